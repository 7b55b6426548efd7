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
from typing import NamedTuple

from luce.speculate.candidates import Candidate, Offer, chains, joined, lookups, spread, trees
from luce.speculate.drafting import Drafter
from luce.speculate.estimates import Estimates
from luce.speculate.ledger import BET, HORIZON, PROMISE
from luce.speculate.prices import MAX_ROWS, Costs, Prices

MARGIN = 1 + PROMISE  # A gain below what the promise may cost is not worth a bet.


class Terms(NamedTuple):
    """What candidates of one round have in common. Its steps take `scale` times what the table of costs says
    but no less than `floor`, which is a plain round; `feed` seconds more where it is not plain; and the device
    waits `turns` times for the host, `turn` seconds each. At most `stake` may be lost."""

    scale: float
    floor: float
    turn: float
    turns: int = 0
    feed: float = 0.0
    stake: float = float("inf")

    @property
    def plain(self) -> float:
        return self.floor + self.turns * self.turn


def choose(candidates: Iterable[Candidate], terms: Terms, top: float) -> tuple[Candidate | None, float]:
    """Returns the candidate of the formula whose rate is above `top`, and its rate; None and `top` where there
    is none."""
    scale, floor, turn, turns, feed, stake = terms
    bound, found = floor + stake, None
    for candidate in candidates:
        seconds = scale * (candidate.device + feed)
        seconds = (seconds if seconds > floor else floor) + (turns + candidate.read) * turn
        if candidate.tokens > top * seconds and seconds <= bound:
            top, found = candidate.tokens / seconds, candidate
    return found, top


def chains_of(offers: Sequence[Offer], drafters: Sequence[Drafter], prices: Prices, sequences: int) -> list[list[Candidate]]:
    """Returns by drafter the rounds of chains alone, which need nothing of the round before."""
    found = []
    for by in range(len(drafters)):
        longest = max(len(offer.chains[by]) for offer in offers)
        families = (chains(offers, by, depth) for depth in range(1, longest + 1))
        found.append([each for family in families for each in spread(family, drafters, prices.costs, sequences)])
    return found


def widest(
    offers: Sequence[Offer],
    drafters: Sequence[Drafter],
    prices: Prices,
    sequences: int,
    chained: Sequence[Sequence[Candidate]],
    terms: Terms,
    top: float,
) -> tuple[Candidate | None, float]:
    """Returns the candidate of the formula among all: chains, lookups, both joined, and trees. Trees and joins
    are tried beside the best chain of each drafter alone, since they seldom pay beside another."""
    costs, looked = prices.costs, any(offer.lookup for offer in offers)
    found, top = choose((each for of in chained for each in of), terms, top)
    if looked:
        better, top = choose(spread(lookups(offers), drafters, costs, sequences), terms, top)
        found = better or found
        for by, of in enumerate(chained):
            deepest, _ = choose(of, terms._replace(stake=float("inf")), 0.0)
            if deepest and deepest.family:
                both = spread(joined(offers, by, deepest.family.depth), drafters, costs, sequences)
                better, top = choose(both, terms, top)
                found = better or found
    family = found.family if found else None
    if found and family and family.drafter is not None and drafters[family.drafter].ranks > 1:
        lookup = [choice.lookup for choice in family.choices(found.rows)]
        grown = spread(trees(offers, family.drafter, family.depth, lookup), drafters, costs, sequences)
        better, top = choose(grown, terms, top)
        found = better or found
    return found, top


def chain_can_pay(costs: Costs, drafters: Sequence[Drafter]) -> bool:
    """Says whether some drafts of the model's drafters gain tokens a second if as many are right as may be
    hoped for, and may be tried."""
    hoped, plain = Estimates(), costs.verify(1)
    offer = Offer(MAX_ROWS - 1, (), [hoped.chain(drafter, drafter.most) for drafter in drafters])
    terms = Terms(1.0, plain, 0.0, stake=BET * PROMISE * HORIZON * plain)
    hopeful = (each for of in chains_of([offer], drafters, Prices(costs), 1) for each in of)
    return plain > 0 and choose(hopeful, terms, MARGIN / plain)[0] is not None


def lookup_can_pay(costs: Costs, budget: int) -> bool:
    """Says whether tokens of a lookup gain tokens a second if all of them are right."""
    plain, certain = costs.verify(1), lookups([Offer(budget, [1.0] * budget, ())])
    terms = Terms(1.0, plain, 0.0)
    return plain > 0 and choose(spread(certain, (), costs, 1), terms, MARGIN / plain)[0] is not None
