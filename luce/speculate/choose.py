"""Chooses what rounds verify, where that is left to luce: of all candidates, those that give the most tokens a
second.

There is one formula. Of all that can be drafted, a round takes the candidate c of

    argmax tokens(c) / seconds(c), subject to seconds(c) - plain <= stake,

where plain is what a round without candidates takes. What tokens are expected is estimated (estimates.py), what
a round takes is priced (prices.py), what it may lose is in the ledgers of its texts (ledger.py), and what could
be verified is listed (candidates.py). Texts that decode together share a round, so tokens and losses are sums
over them, and one text is a batch of one. No token depends on any of this.

A row is one token that a step computes. In a round each sequence has a row for its anchor and one for each
candidate: n candidates make n + 1 rows, and a plain round has one. The NextN head is fed what was verified, by
row too: at once in a step of several rows. A step of a single row leaves that to the next one that is not plain,
whose round owes the feed of all rows that were left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from luce.speculate.candidates import Candidate, Family, Offer, Steps, chains, lookups, trees
from luce.speculate.drafting import Drafter
from luce.speculate.estimates import Estimates
from luce.speculate.ledger import BET, HORIZON, PROMISE
from luce.speculate.prices import MAX_ROWS, Costs

MARGIN = 1 + PROMISE  # A gain below what the promise may cost is not worth a bet.


class Terms(NamedTuple):
    """What candidates of one round have in common. Its steps take `scale` times what the table of costs says
    but no less than `floor`, which is a plain round; `feed` seconds more where it is not plain; and the device
    waits `turns` times for the host, `turn` seconds each. At most `stake` may be lost. Where there are several
    drafters, `scales` has a scale for the steps of each."""

    scale: float
    floor: float
    turn: float
    turns: int = 0
    feed: float = 0.0
    stake: float = inf
    scales: Sequence[float] = ()

    @property
    def plain(self) -> float:
        return self.floor + self.turns * self.turn


class Search:
    """The formula, over rounds whose steps are `steps`. `found` is the best of those that were tried, and `top`
    its rate, or what it has to exceed where it is None."""

    __slots__ = ("found", "steps", "terms", "top")

    def __init__(self, steps: Steps, terms: Terms, top: float):
        self.steps, self.terms, self.top = steps, terms, top
        self.found: Candidate | None = None

    def tries(self, family: Family) -> None:
        """Compares the rounds of a family. More rows never cost less, so it ends where those that are left take
        too long to pay, whatever they gain, or would lose more than they may."""
        scale, floor, turn, turns, feed, stake, scales = self.terms
        gains, device, _, by, _, depths = family
        if scales and by is not None:
            scale = scales[by]
        top, rows, best = self.top, 0, 0
        tokens: float = self.steps.sequences
        hoped, waits, bound = tokens + sum(gains), (turns + bool(depths)) * turn, floor + stake
        for gain, step in zip(gains, device):  # noqa: B905 (there may be more of either)
            rows += 1
            tokens += gain
            seconds = scale * (step + feed)
            if seconds < floor:
                seconds = floor
            seconds += waits
            needed = top * seconds
            if seconds > bound or hoped <= needed:
                break
            if tokens > needed:
                top, best, given, took = tokens / seconds, rows, tokens, step
        if best:
            self.top, self.found = top, Candidate(given, took, best, family)

    def tries_each(self, families: Iterable[Family]) -> Candidate | None:
        """Compares the rounds of several families, and returns the best so far."""
        for family in families:
            self.tries(family)
        return self.found

    def tries_all(self, offers: Sequence[Offer], chained: Iterable[Family]) -> Candidate | None:
        """Compares chains, lookups and trees, and returns the best. Trees are tried beside the best chain, since they
        seldom pay beside another; those of conditional lists may pay where no chain does."""
        self.tries_each(chained)
        if any([offer.lookup for offer in offers]):
            self.tries(lookups(offers, self.steps))
        best = self.found
        for by, drafter in self.steps.listed:
            if (best.family.drafter == by) if best else drafter.conditional:
                depth = best.depth if best and not drafter.conditional else drafter.most
                self.tries(trees(offers, by, depth, self.steps))
        return self.found


def chains_of(offers: Sequence[Offer], steps: Steps) -> list[Family]:
    """Returns the rounds of chains alone, of each drafter."""
    return [family for by in range(len(steps.drafters)) for family in chains(offers, by, steps)]


def chain_can_pay(costs: Costs, drafters: Sequence[Drafter]) -> bool:
    """Says whether some drafts of the model's drafters gain tokens a second if as many are right as may be
    hoped for, and may be tried."""
    hoped, search = Estimates(), _search(costs, drafters, BET * PROMISE * HORIZON)
    offer = Offer(MAX_ROWS - 1, (), [hoped.chain(drafter, drafter.most) for drafter in drafters])
    return search is not None and search.tries_each(chains_of([offer], search.steps)) is not None


def lookup_can_pay(costs: Costs, budget: int) -> bool:
    """Says whether tokens of a lookup gain tokens a second if all of them are right."""
    search, certain = _search(costs, (), inf), Offer(budget, [1.0] * budget, ())
    return search is not None and search.tries_all([certain], ()) is not None


def _search(costs: Costs, drafters: Sequence[Drafter], stake: float) -> Search | None:
    """Returns a search for what may pay for one text, where so many plain rounds may be lost; None where no
    costs were measured."""
    plain = costs.verify(1)
    terms = Terms(1.0, plain, 0.0, stake=stake * plain)
    return Search(Steps(costs, drafters, 1), terms, MARGIN / plain) if plain > 0 else None
