"""Has a model that is ready to run: files, weights, engine, tokenizer and the plan they were opened by."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from luce import native as _native
from luce.decode.events import Event, Failed, State
from luce.decode.experts import Experts
from luce.decode.generation import Generation, Prefixes
from luce.decode.loop import Loop
from luce.decode.reading import Reading
from luce.decode.request import Request
from luce.errors import Error
from luce.files.tokenizer import Tokenizer
from luce.native import Form, Model, Progress, Source
from luce.native.structs import EngineInfo, first
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

    def __init__(self, native: _native.Engine, model: Model, tokenizer: Tokenizer, plan: Plan):
        self.native, self.model, self.tokenizer, self.plan = native, model, tokenizer, plan
        self.info, self.costs = native.info, Costs(native.costs())
        self.experts = Experts.of(native)
        self._loops: list[Loop] = []
        self._auto: Choosing | None = None
        if isinstance(plan.draft, Auto):
            self._auto = Choosing(self.costs, plan.draft.budget, native.ahead)
        self._opened = ExitStack()

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

        Where auto is to draft, what steps cost here is measured before the last plan, which leaves out the
        sources that cannot pay. `keep_drafters` has it measure nothing, so that checkpoints hold the same
        whatever was measured. Raises what planning, loading and the core raise."""
        with ExitStack() as opened:
            asked = asked or Options()
            if not isinstance(files, Files):
                files = opened.enter_context(Files(files, device=asked.device))
            plan = asked if isinstance(asked, Plan) else files.plan(asked, prompt, new)
            model = model or opened.enter_context(files.load([plan], progress))
            native = _open(model, plan)
            if isinstance(plan.draft, Auto) and not keep_drafters:
                with ExitStack() as measured:
                    measured.enter_context(native)
                    before, plan = plan, _paying(plan, plan.draft, native)
                    if (before.drafts, before.blocks) == (plan.drafts, plan.blocks):
                        measured.pop_all()
                    else:  # Without a drafter, steps need not keep its caches up to date.
                        measured.close()
                        native = _open(model, plan)
            opened.enter_context(native)
            engine = cls(native, model, files.tokenizer, plan)
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
        loop, waiting = Loop(self.native, experts=self.experts), deque(range(len(requests)))
        index = dict[Generation, int]()
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
                loop.keep()
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
    made = []
    for by, most in sizes.items():
        if most:
            drafter = info.drafters[first(info.drafters, by) or 0]
            ranks = max((info.n_top and drafter.n_list) or info.n_top, 1)
            made.append(Drafter(sequence, by, most, ranks, info.n_part, Form(drafter.form)))
    return made


def _open(model: Model, plan: Plan) -> _native.Engine:
    return _native.Engine(model, params_of(plan, model.info.device, model.info.n_vocab))


def _paying(plan: Plan, draft: Auto, measured: _native.Engine) -> Plan:
    """Returns the plan without the sources of `draft` that cannot pay by what the steps of an engine cost that
    was opened by it."""
    costs = Costs(measured.costs())
    with measured.sequence() as sequence:
        paying = {d.name for d in _drafters(draft, sequence, measured.info) if chain_can_pay(costs, [d])}
    paying = {"mtp" if name == "mtp-part" else name for name in paying}
    kept = replace(
        draft, gamma=draft.gamma if "mtp" in paying else 0, block=draft.block if "dflash" in paying else 0
    )
    pays = bool(paying) or lookup_can_pay(costs, draft.budget)
    if kept == draft and pays:
        return plan
    ratio = costs.verify(2) / costs.verify(1) if costs.verify(1) else 1.0
    why = f"a step of two rows costs {ratio:.2f} of one row, measured at the start"
    if not pays:
        return plan.because("draft", f"no draft can pay here: {why}", draft=Plain())
    lost = " and ".join(name for name, size in (("mtp", draft.gamma), ("dflash", draft.block))
                        if size and name not in paying)  # fmt: skip
    reason = f"{plan.reasons['draft']}; but no draft of {lost} can pay here: {why}"
    return plan.because("draft", reason, draft=kept)
