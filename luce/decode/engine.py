"""Has a model that is ready to run: files, weights, engine, tokenizer and the plan they were opened by."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from luce import native as _native
from luce.decode.events import Event, Failed, State
from luce.decode.generation import Generation, Prefixes
from luce.decode.loop import Loop
from luce.decode.reading import Reading
from luce.decode.request import Request
from luce.errors import Error
from luce.files.tokenizer import Tokenizer
from luce.native import Model, Progress, Source
from luce.native.structs import EngineInfo
from luce.planning.opened import Files, params_of
from luce.planning.plan import (
    Auto,
    Dflash,
    Drafting,
    Lookup,
    Mtp,
    Options,
    Plain,
    Plan,
)
from luce.speculate.auto import Auto as Choosing
from luce.speculate.choose import chain_can_pay, lookup_can_pay
from luce.speculate.drafting import Drafter, DraftSource, Fixed, TextLookup
from luce.speculate.prices import Costs


class Engine:
    """This is the engine of a loaded model. Engine.open() opens it. Requests go in and events come out. It is
    a context manager. `plan` is the one that it was opened by."""

    def __init__(self, model: Model, tokenizer: Tokenizer, chosen: Plan, keep_drafters: bool):
        self.model, self.tokenizer = model, tokenizer
        self._loops: list[Loop] = []
        native = _native.Engine(model, params_of(chosen, model.info.device, model.info.n_vocab))
        if isinstance(chosen.draft, Auto) and not keep_drafters:
            paying = _paying(chosen, native)
            if (paying.drafts, paying.blocks) != (chosen.drafts, chosen.blocks):
                native.close()  # Without a drafter, steps need not keep its caches up to date.
                native = _native.Engine(model, params_of(paying, model.info.device, model.info.n_vocab))
            chosen = paying
        self.plan, self.native = chosen, native
        self.info, self.costs = native.info, Costs(native.costs())
        self._auto: Choosing | None = None
        if isinstance(chosen.draft, Auto):
            self._auto = Choosing(self.costs, chosen.draft.budget, native.ahead)
        with ExitStack() as opened:
            opened.enter_context(native)
            self._opened = opened.pop_all()

    @classmethod
    def open(
        cls,
        files: Files | str | Path,
        asked: Options | Plan | None = None,
        progress: Progress | None = None,
        prompt: int = 0,
        new: int | None = None,
        keep_drafters: bool = False,
        model: Model | None = None,
    ) -> Engine:
        """Plans, loads and opens. `prompt` and `new` are what is known of the longest request (see plan).
        What is given open stays the caller's to close: files, and a `model`, which `files` loaded for this
        plan among others. What is opened here is freed with the engine.

        Where auto is to draft and no draft can pay by what steps cost here, the engine's plan drafts nothing;
        `keep_drafters` leaves it as it is, so that checkpoints hold the same whatever was measured. Raises
        what planning, loading and the core raise."""
        with ExitStack() as opened:
            asked = asked or Options()
            if not isinstance(files, Files):
                files = opened.enter_context(Files(files, device=asked.device))
            chosen = asked if isinstance(asked, Plan) else files.plan(asked, prompt, new)
            model = model or opened.enter_context(files.load([chosen], progress))
            engine = cls(model, files.tokenizer, chosen, keep_drafters)
            opened.push(engine._opened.pop_all())
            engine._opened = opened.pop_all()
        return engine

    def generation(
        self,
        request: Request,
        cancelled: Callable[[], bool] = lambda: False,
        prefixes: Prefixes | None = None,
    ) -> Generation:
        """Returns a generation on a sequence of its own, for a Loop. Raises OutOfMemory where all sequences
        are taken. `prefixes` says where it may start, and keeps the beginnings of prompts."""
        sequence = self.native.sequence()
        try:
            if request.reads:
                return Reading(sequence, self.info, self.tokenizer, request, cancelled=cancelled)
            source = self._source(sequence)
            return Generation(
                sequence, self.info, self.tokenizer, request, source, cancelled, prefixes=prefixes
            )
        except BaseException:
            sequence.close()
            raise

    def _source(self, sequence: _native.Sequence) -> DraftSource | None:
        match self.plan.draft:
            case Plain():
                return None
            case Lookup(budget=budget):
                return TextLookup(sequence, budget)
            case Auto() as draft:
                assert self._auto
                return self._auto.source(sequence, _drafters(draft, sequence, self.info))
            case Mtp(budget=budget) | Dflash(budget=budget) as draft:
                drafter = _drafters(draft, sequence, self.info)[-1]
                return Fixed(drafter, drafter.most, budget)

    def generate(
        self,
        request: Request,
        cancelled: Callable[[], bool] = lambda: False,
        prefixes: Prefixes | None = None,
    ) -> Iterator[Event]:
        """Yields the events of one generation, up to exactly one Finished or Failed. `cancelled` is asked
        between steps. `prefixes` is as in generation()."""
        with closing(self.run([request], cancelled, prefixes)) as running:
            for _, event in running:
                yield event

    def run(
        self,
        requests: Sequence[Request],
        cancelled: Callable[[], bool] = lambda: False,
        prefixes: Prefixes | None = None,
    ) -> Generator[tuple[int, Event], None, None]:
        """Yields the events of several generations, each as (index of the request, event). As many run at
        once as the engine has sequences."""
        loop, index, waiting = Loop(self.native), dict[Generation, int](), deque(range(len(requests)))
        self._loops.append(loop)
        try:
            while waiting or loop.running:
                while waiting and loop.running < self.info.n_sequences:
                    at = waiting.popleft()
                    try:
                        generation = self.generation(requests[at], cancelled, prefixes)
                    except Error as error:
                        yield at, Failed(error, State.IDLE)
                    else:
                        index[generation] = at
                        loop.add(generation)
                for generation, event in loop.step():
                    yield index[generation], event
        finally:
            self._loops.remove(loop)
            loop.close()

    def cancel(self) -> None:
        """Ends all generations that run, after the engine's present step at most. It may be called from any
        thread and from a signal handler."""
        for loop in self._loops:
            loop.cancel()

    def close(self) -> None:
        """Frees all that the engine opened; a second call does nothing."""
        self._opened.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _drafters(draft: Drafting, sequence: _native.Sequence, info: EngineInfo) -> list[Drafter]:
    """Returns the model's drafters that a plan names."""
    part = draft.chain if info.n_part else 0
    sizes = {Source.NEXTN: draft.chain, Source.PART: part, Source.DFLASH: draft.block}
    ranks = max(info.n_top, 1)
    return [Drafter(sequence, by, most, ranks, info.n_part) for by, most in sizes.items() if most]


def _paying(chosen: Plan, native: _native.Engine) -> Plan:
    """Returns `chosen` without the draft sources that cannot pay by what steps cost."""
    assert isinstance(chosen.draft, Auto)
    costs, draft = Costs(native.costs()), chosen.draft
    with native.sequence() as sequence:
        paying = {d.name for d in _drafters(draft, sequence, native.info) if chain_can_pay(costs, [d])}
    paying = {"mtp" if name == "mtp-part" else name for name in paying}
    kept = replace(
        draft, gamma=draft.gamma if "mtp" in paying else 0, block=draft.block if "dflash" in paying else 0
    )
    if kept == draft and (paying or lookup_can_pay(costs, draft.budget)):
        return chosen
    ratio = costs.verify(2) / costs.verify(1) if costs.verify(1) else 1.0
    why = f"a step of two rows costs {ratio:.2f} of one row, measured at the start"
    if paying or lookup_can_pay(costs, draft.budget):
        lost = " and ".join(name for name, size in (("mtp", draft.gamma), ("dflash", draft.block))
                            if size and name not in paying)  # fmt: skip
        reason = f"{chosen.reasons['draft']}; but no draft of {lost} can pay here: {why}"
        return replace(chosen, draft=kept, reasons=chosen.reasons | {"draft": reason})
    reasons = chosen.reasons | {"draft": f"no draft can pay here: {why}"}
    return replace(chosen, draft=Plain(), reasons=reasons)
