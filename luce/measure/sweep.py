"""Measures what a step costs: verify steps by rows and by committed context, and whole rounds by drafts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from luce._native import Drafts, Rows
from luce._native import Sequence as Timeline
from luce.measure.summary import five_digits, quartiles
from luce.plan import Options

WARM_UP = 2
TIMING = (
    "A step: from the call to the choices on the host, nothing committed; a round: draft and verify. "
    "Outside: loading, prefill, warm-up. Medians, quartiles in brackets; row counts take turns."
)


@dataclass(frozen=True)
class Cost:
    """This is one step or round. `ratio` is to one row at the same context. `rows` were verified, and `gamma`
    drafted before, which is 0 in a step without drafts."""

    ctx: int
    rows: int
    gamma: int
    ms: float
    ms_spread: list[float]
    ratio: float

    def as_json(self) -> dict[str, object]:
        figures = {"ms": five_digits(self.ms), "ratio": five_digits(self.ratio)}
        return vars(self) | figures | {"ms_spread": [five_digits(x) for x in self.ms_spread]}


def engine_options(
    contexts: Sequence[int], rows: Sequence[int], gammas: Sequence[int], threads: int | None,
    kv_type: str | None,
) -> Options:  # fmt: skip
    """Returns what costs() needs of an engine."""
    gamma = max(gammas, default=0)
    most = max(*rows, gamma + 1)
    return Options(
        ctx=max(*contexts, 1) + most, kv_type=kv_type, threads=threads, rows=most,
        spec="mtp" if gamma else "off", gamma=gamma or None,
    )  # fmt: skip


def costs(
    sequence: Timeline,
    n_vocab: int,
    contexts: Sequence[int],
    rows: Sequence[int],
    gammas: Sequence[int],
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
    cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[list[Cost]]:
    """Yields for each context, in order, the costs of all row counts and then of all gammas, by steps with
    this sequence alone. A context of 0 is one committed token. It ends early when cancelled."""
    tokens = [int(t) for t in np.random.default_rng(1).integers(0, n_vocab - 16, max(*contexts, 1) + 64)]
    engine, chunk = sequence.engine, sequence.engine.info.n_chunk
    sequence.reset()
    filled = 0
    for ctx in sorted(contexts):
        while filled < max(ctx, 1) and not cancelled():
            end = min(filled + chunk - filled % chunk, max(ctx, 1))
            sequence.prefill(tokens[filled:end], last=False)
            filled = end
        wanted = [(n, 0) for n in dict.fromkeys([1, *rows])] + [(gamma + 1, gamma) for gamma in gammas]
        times: dict[tuple[int, int], list[float]] = {each: [] for each in wanted}
        for turn in range(WARM_UP + steps):
            for n, gamma in wanted:
                if cancelled():
                    return
                start = clock()
                if gamma:
                    engine.draft([Drafts(sequence, tokens[-1], gamma)])
                (found,) = engine.verify([Rows(sequence, None if gamma else tokens[-n:], n=n)])
                if isinstance(found, Exception):
                    raise found
                if turn >= WARM_UP:
                    times[n, gamma].append(1000 * (clock() - start))
        one = statistics.median(times[1, 0])
        yield [
            Cost(ctx, n, gamma, statistics.median(ms), quartiles(ms) or [], statistics.median(ms) / one)
            for (n, gamma), ms in times.items()
            if gamma or n in rows
        ]
