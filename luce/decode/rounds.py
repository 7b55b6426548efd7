"""Measures what rounds take beside their steps, when an engine is opened: the host's part of them, and how
much of it is saved where a round is begun before the one before it has ended.

It decodes a short text plain in both ways, with all that a round of auto does on the host. So it counts what
rounds of this model take on this machine as it is now: on a host that others use too, the same rounds were
seen to take four times as long between two steps (bench/results/2026-11-23-rounds-h200.txt).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

from luce.decode.generation import Generation
from luce.decode.loop import Loop
from luce.decode.request import Request
from luce.files.tokenizer import Tokenizer
from luce.native import Engine, Sequence
from luce.speculate.costs import NO_TIME, Costs, Host, Hosts
from luce.speculate.drafting import NOTHING, Draft, DraftSource, Limits, Round

ROUNDS = 4  # It takes the median of so many rounds of each way.
COMPANY = 4  # Where sequences decode together, so many are timed: more would take longer to begin.


class Plain:
    """Drafts nothing, and does on the host what `source` does. Its first rounds are begun one after the
    other, and the later ones ahead."""

    name = "plain"

    def __init__(self, source: DraftSource):
        self._source, self._rounds = source, 0

    def begin(self, budget: int) -> None:
        self._source.begin(budget)

    def draft(self, anchor: int, limits: Limits) -> Draft:
        self._source.draft(anchor, limits)
        self._rounds += 1
        return NOTHING

    def follows(self) -> Draft | None:
        self._source.follows()
        return NOTHING if self._rounds > ROUNDS else None

    def learn(self, done: Round) -> None:
        self._source.learn(done)

    def prepare(self) -> None:
        self._source.prepare()


def timed(
    engine: Engine,
    tokenizer: Tokenizer,
    source: Callable[[Sequence], DraftSource],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Costs, Hosts]:
    """Returns what steps of an engine cost, and what rounds take beside them: of one sequence, and of several
    where it has several. `source` makes what drafts for a sequence. Where no round is begun ahead, or too
    few could be decoded (a model's first token may give what is not finite), nothing is known of what
    rounds take; where that is so of several sequences alone (they may have too few pages), what one takes
    counts. A step takes no longer than a round, so one that was disturbed when it was timed alone costs as
    much as that."""
    costs, hosts = Costs(engine.costs()), dict[int, Host]()
    if not engine.ahead or not costs.verify(1):
        return costs, NO_TIME
    for n in sorted({1, min(COMPANY, engine.info.n_sequences)}):
        took = _took(engine, tokenizer, source, clock, n)
        if not all(took.values()):
            break
        apart, ahead = median(took[False]), median(took[True])
        costs = costs.at_most(n, apart)
        hosts[n] = Host(apart - costs.verify(n), min(ahead, apart) - costs.verify(n))
    return costs, Hosts(hosts)


def _took(
    engine: Engine,
    tokenizer: Tokenizer,
    source: Callable[[Sequence], DraftSource],
    clock: Callable[[], float],
    n: int,
) -> dict[bool, list[float]]:
    """Returns the seconds of plain rounds of n sequences, by whether they were begun ahead."""
    loop, ends = Loop(engine), list[tuple[bool, float]]()
    # The prompt and the text's end give one token each. One text after the other begins.
    request = Request((0,), 2 * ROUNDS + 3 + n, ignore_eos=True)
    for _ in range(n):
        sequence = engine.sequence()
        loop.add(Generation(sequence, engine.info, tokenizer, request, Plain(source(sequence))))
    while loop.running:
        rounds = [event for _, event in loop.step() if isinstance(event, Round)]
        if len(rounds) == n:
            ends.append((rounds[0].ahead, clock()))
    took: dict[bool, list[float]] = {False: [], True: []}
    for (before, since), (kind, end) in pairwise(ends):
        if before is kind:
            took[kind].append(end - since)
    return took
