"""Measures what a step costs: verify steps by rows and by committed context, and whole rounds by drafts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from luce.bench.summary import five_digits, quartiles
from luce.native import Checkpoint, Drafts, Rows
from luce.native import Sequence as Timeline
from luce.native.structs import PAGE
from luce.planning.plan import Options

WARM_UP = 2
TIMING = (
    "A step: from the call to the choices on the host; a round: draft and verify. Of each the first row is "
    "committed, and the next one pays for that, as in decoding. Outside: loading, prefill, warm-up. Medians, "
    "quartiles in brackets. Each kind of step, from few rows to many, takes turns with one row at the same "
    "context and with one at context 0: `x one row` and `over` compare steps of the same turn."
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


def room(rows: Sequence[int], gammas: Sequence[int], steps: int) -> int:
    """Returns the positions that costs() needs beyond a context: the rows of its widest step, and one for
    each step that it commits a row of. Beside each step there is one of a single row."""
    return max(*rows, max(gammas, default=0) + 1) + 2 * (WARM_UP + steps)


def engine_options(
    contexts: Sequence[int], rows: Sequence[int], gammas: Sequence[int], steps: int, threads: int | None,
    kv_type: str | None,
) -> Options:  # fmt: skip
    """Returns what costs() needs of an engine: one sequence, as luce generate has, and where it goes beyond
    context 0, another that stays there."""
    gamma, beside, more = max(gammas, default=0), int(any(contexts)), room(rows, gammas, steps)
    most = max(*rows, gamma + 1)
    ctx = max(*contexts, 1) + more
    return Options(
        ctx=ctx, kv_type=kv_type, threads=threads, rows=most, sequences=1 + beside, checkpoints=beside,
        pages=-(-(ctx + most) // PAGE) + beside * -(-(1 + more) // PAGE),
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

    Of each step the first row is committed, which is the least that a round of decoding leaves. The step
    behind it brings the recurrent states up to that row: on an H200 a step of one row of the 27b took 4.96 ms
    then, and 4.74 with nothing to bring (bench/results/2026-11-23-commits-h200.txt). Each kind of step begins
    at the context anew.

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
        ms = 1000 * (clock() - start)
        line.commit([0])
        return ms

    def return_to(line: Timeline, kept: Checkpoint | None) -> None:
        line.resume(kept) if kept else line.reset()

    def fill(line: Timeline, past: int, ctx: int) -> None:
        while past < ctx and not cancelled():
            end = min(past + chunk - past % chunk, ctx)
            line.prefill(tokens[past:end], last=False)
            past = end

    sequence.reset()
    short, whole = sequence, 0  # `sequence` has so many whole pages of tokens.
    with ExitStack() as opened:
        if any(contexts):
            short = opened.enter_context(engine.sequence())
        for ctx in sorted(contexts):
            line, begin = (sequence, ctx - ctx % PAGE) if ctx else (short, 0)
            fill(line, whole, begin)
            kept = opened.enter_context(line.checkpoint()) if begin and not cancelled() else None
            wanted = [(n, 0) for n in dict.fromkeys([1, *rows])] + [(gamma + 1, gamma) for gamma in gammas]
            took_by = dict[tuple[int, int], list[list[float]]]()
            for kind in sorted(wanted):
                compared = [(short, 1, 0), (line, 1, 0), (line, *kind)]
                runs, turns = list(dict.fromkeys(compared)), []
                return_to(line, kept)
                fill(line, begin, ctx)
                return_to(short, None)
                fill(short, 0, 1)
                for turn in range(WARM_UP + steps):
                    if cancelled():
                        return
                    first = turn % len(runs)
                    times = {run: took(*run) for run in runs[first:] + runs[:first]}
                    turns.append([times[run] for run in compared])
                took_by[kind] = turns[WARM_UP:]
            return_to(line, kept)
            whole = begin
            if kept:
                kept.close()
            yield [cost_of(ctx, *kind, took_by[kind]) for kind in wanted if kind[1] or kind[0] in rows]
