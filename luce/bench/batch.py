"""Measures sequences that decode together: what they give in all, and what each of them gets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from luce.bench.run import WARM_UP_TOKENS, Case, Mode, Settings, mode_plan
from luce.bench.summary import five_digits
from luce.decode.engine import Engine
from luce.decode.events import Event, Failed, Tokens
from luce.decode.loop import Loop
from luce.decode.request import Request
from luce.errors import ArgumentError
from luce.planning.opened import Files
from luce.speculate.drafting import Round

TIMING = (
    "From the first new token of the last sequence to the end of the first: all of the rounds that all "
    "sequences share. Outside: loading, opening, warm-up, prompts. Ends of text count as tokens."
)


@dataclass(frozen=True)
class Together:
    """These are so many sequences in one mode. `tok_per_s` is that of all of them, `tok_per_s_each` that of
    one on average. `step_ms` is the mean time of a round, and `tokens_per_round` is that of one sequence.
    `speedup` divides tok_per_s by that of the first count of sequences in the same mode. `acceptance` is None
    where nothing was drafted."""

    mode: str
    sequences: int
    tok_per_s: float
    tok_per_s_each: float
    step_ms: float
    tokens_per_round: float
    acceptance: float | None
    rounds: int
    tokens: int
    speedup: float = 1.0

    def as_json(self) -> dict[str, object]:
        """Returns all fields, with figures of five digits."""
        return {k: five_digits(v) if isinstance(v, float) else v for k, v in vars(self).items()}


@dataclass
class _Window:
    """This is what happened in the steps that are measured."""

    steps: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0

    def add(self, events: Sequence[Event]) -> None:
        self.steps += 1
        for event in events:
            if isinstance(event, Round):
                self.rounds += 1
                self.drafted += event.drafted
                self.accepted += event.accepted
            elif isinstance(event, Tokens):
                self.tokens += len(event.ids)


def together(
    engine: Engine,
    mode: str,
    requests: Sequence[Request],
    clock: Callable[[], float] = time.perf_counter,
    cancelled: Callable[[], bool] = lambda: False,
) -> Together | None:
    """Runs all requests at once until the first of them ends. Returns None where it was cancelled."""
    loop, window = Loop(engine.native, experts=engine.experts), _Window()
    generations = [engine.generation(request, cancelled) for request in requests]
    reading, began, ended = set(generations), 0.0, 0.0  # A step that reads ends where the window may begin.
    try:
        for generation in generations:
            loop.add(generation)
        while loop.running == len(requests):
            measured = not reading
            happened = loop.step()
            ended = clock()
            began = began if measured else ended
            for generation, event in happened:
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Tokens):
                    reading.discard(generation)
            if measured:
                window.add([event for _, event in happened])
    finally:
        loop.close()
    if cancelled():
        return None
    if not window.tokens:
        n = requests[0].max_tokens
        raise ArgumentError(f"{len(requests)} sequences of {n} new tokens never decode together: ask for more")
    rate = window.tokens / (ended - began)
    return Together(
        mode=mode,
        sequences=len(requests),
        tok_per_s=rate,
        tok_per_s_each=rate / len(requests),
        step_ms=1000 * (ended - began) / window.steps,
        tokens_per_round=window.tokens / window.rounds,
        acceptance=window.accepted / window.drafted if window.drafted else None,
        rounds=window.rounds,
        tokens=window.tokens,
    )


class Batch:
    """Runs all modes, one after the other, each for all counts of sequences."""

    def __init__(
        self,
        files: Files,
        modes: Sequence[Mode],
        counts: Sequence[int],
        cases: Sequence[Case],
        settings: Settings,
        progress: Callable[[float], bool | None] | None = None,
    ):
        self._plans = {m.name: mode_plan(files, m, cases, settings, max(counts)) for m in modes}
        self._files, self._counts, self._cases, self._settings = files, counts, cases, settings
        self.model = files.load(self._plans.values(), progress)
        self.threads = 0  # The engines have so many, which is known once one is open.

    def run(self, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Together]:
        """Yields the figures of each mode and count. It ends early when cancelled."""
        most = max(self._counts)
        cases = [self._cases[at % len(self._cases)] for at in range(most)]
        requests = [
            Request(c.prompt, self._settings.max_tokens, self._settings.sampling, ignore_eos=True)
            for c in cases
        ]
        for mode, chosen in self._plans.items():
            with Engine.open(self._files, chosen, model=self.model) as engine:
                self.threads, first = engine.info.n_threads, None
                for _ in engine.generate(replace(requests[0], max_tokens=WARM_UP_TOKENS), cancelled):
                    pass
                for count in self._counts:
                    found = together(engine, mode, requests[:count], cancelled=cancelled)
                    if found is None:
                        return
                    first = first or found.tok_per_s
                    yield replace(found, speedup=found.tok_per_s / first)

    @property
    def total(self) -> int:
        """Returns the number of figures of a whole run."""
        return len(self._plans) * len(self._counts)

    def close(self) -> None:
        """Frees the weights; a second call does nothing."""
        self.model.close()

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
