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

from luce._native import Engine, Sequence
from luce.costs import NO_TIME, Costs, Host
from luce.drafting import NOTHING, Draft, DraftSource, Limits, Round
from luce.generation import Generation
from luce.loop import Loop
from luce.plan import Request
from luce.tokenizer import Tokenizer

ROUNDS = 4  # It takes the median of so many rounds of each way.


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

    def stays_plain(self) -> bool:
        self._source.stays_plain()
        return self._rounds > ROUNDS

    def learn(self, done: Round) -> None:
        self._source.learn(done)


def timed(
    engine: Engine,
    tokenizer: Tokenizer,
    source: Callable[[Sequence], DraftSource],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Costs, Host]:
    """Returns what steps of an engine cost, and what rounds take beside them. `source` makes what drafts for
    a sequence. Where no round is begun ahead, or too few could be decoded (a model's first token may give
    what is not finite), nothing is known of what rounds take. A step takes no longer than a round, so one
    that was disturbed when it was timed alone costs as much as that."""
    costs = engine.costs()
    if not engine.ahead or not costs.verify(1):
        return costs, NO_TIME
    sequence, loop, ends = engine.sequence(), Loop(engine), list[tuple[bool, float]]()
    request = Request((0,), 2 * ROUNDS + 4, ignore_eos=True)  # The prompt and the text's end give one each.
    loop.add(Generation(sequence, engine.info, tokenizer, request, Plain(source(sequence))))
    while loop.running:
        ends += [(event.ahead, clock()) for _, event in loop.step() if isinstance(event, Round)]
    took: dict[bool, list[float]] = {False: [], True: []}
    for (before, since), (kind, end) in pairwise(ends):
        if before is kind:
            took[kind].append(end - since)
    if not all(took.values()):
        return costs, NO_TIME
    apart, ahead = median(took[False]), median(took[True])
    costs = costs.at_most(1, apart)
    return costs, Host(apart - costs.verify(1), min(ahead, apart) - costs.verify(1))
