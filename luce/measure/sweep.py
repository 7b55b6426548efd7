"""Measures what a step costs: verify steps by rows and by committed context, and whole rounds by drafts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from luce._native import Drafts, Rows
from luce._native import Sequence as Timeline
from luce.measure.summary import five_digits, quartiles
from luce.plan import Options
from luce.structs import PAGE

WARM_UP = 2
TIMING = (
    "A step: from the call to the choices on the host, nothing committed; a round: draft and verify. "
    "Outside: loading, prefill, warm-up. Medians, quartiles in brackets. Each kind of step, from few rows to "
    "many, takes turns with one row at the same context and with one at context 0: `x one row` and `over` "
    "compare steps of the same turn."
)


@dataclass(frozen=True)
class Cost:
    """This is one step or round. `ratio` is to one row at the same context, and `over` is in milliseconds
    beyond one row at context 0, both by turns. `rows` were verified, and `gamma` drafted before, which is
    0 in a step without drafts."""

    ctx: int
    rows: int
    gamma: int
    ms: float
    ms_spread: list[float]
    ratio: float
    over: float

    def as_json(self) -> dict[str, object]:
        figures = {"ms": five_digits(self.ms), "ratio": five_digits(self.ratio)}
        figures["over"] = round(self.over, 4)
        return vars(self) | figures | {"ms_spread": [five_digits(x) for x in self.ms_spread]}


def engine_options(
    contexts: Sequence[int], rows: Sequence[int], gammas: Sequence[int], threads: int | None,
    kv_type: str | None,
) -> Options:  # fmt: skip
    """Returns what costs() needs of an engine: one sequence, as luce generate has, and where it goes beyond
    context 0, another that stays there."""
    gamma, beside = max(gammas, default=0), int(any(contexts))
    most = max(*rows, gamma + 1)
    ctx = max(*contexts, 1) + most
    return Options(
        ctx=ctx, kv_type=kv_type, threads=threads, rows=most, sequences=1 + beside,
        pages=-(-(ctx + most) // PAGE) + beside * -(-(1 + most) // PAGE),
        spec="mtp" if gamma else "off", gamma=gamma or None,
    )  # fmt: skip


def cost_of(ctx: int, rows: int, gamma: int, turns: Sequence[Sequence[float]]) -> Cost:
    """Returns the cost by turns, of which each has the milliseconds of one row at context 0, of one row at
    `ctx`, and of the step or round."""
    ms = [own for _, _, own in turns]
    ratio = statistics.median(own / one for _, one, own in turns)
    over = statistics.median(own - at_0 for at_0, _, own in turns)
    return Cost(ctx, rows, gamma, statistics.median(ms), quartiles(ms) or [], ratio, over)


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
    one sequence alone. A context of 0 is one committed token. It ends early when cancelled.

    A GPU near its limit of power lowers its clock, and a long prefill or a wide step leaves it hot. So a step
    is compared with steps of one row as the device is then, and wide steps come last."""
    tokens = [int(t) for t in np.random.default_rng(1).integers(0, n_vocab - 16, max(*contexts, 1) + 64)]
    engine, chunk = sequence.engine, sequence.engine.info.n_chunk

    def took(line: Timeline, n: int, gamma: int) -> float:
        start = clock()
        if gamma:
            engine.draft([Drafts(line, tokens[-1], gamma)])
        (found,) = engine.verify([Rows(line, None if gamma else tokens[-n:], n=n)])
        if isinstance(found, Exception):
            raise found
        return 1000 * (clock() - start)

    sequence.reset()
    filled, short = 0, sequence
    with ExitStack() as opened:
        if any(contexts):
            short = opened.enter_context(engine.sequence())
            short.prefill(tokens[:1], last=False)
        for ctx in sorted(contexts):
            while filled < max(ctx, 1) and not cancelled():
                end = min(filled + chunk - filled % chunk, max(ctx, 1))
                sequence.prefill(tokens[filled:end], last=False)
                filled = end
            wanted = [(n, 0) for n in dict.fromkeys([1, *rows])] + [(gamma + 1, gamma) for gamma in gammas]
            took_by = dict[tuple[int, int], list[list[float]]]()
            for kind in sorted(wanted):
                compared = [(short, 1, 0), (sequence, 1, 0), (sequence, *kind)]
                runs, turns = list(dict.fromkeys(compared)), []
                for turn in range(WARM_UP + steps):
                    if cancelled():
                        return
                    first = turn % len(runs)
                    times = {run: took(*run) for run in runs[first:] + runs[:first]}
                    turns.append([times[run] for run in compared])
                took_by[kind] = turns[WARM_UP:]
            yield [cost_of(ctx, *kind, took_by[kind]) for kind in wanted if kind[1] or kind[0] in rows]
