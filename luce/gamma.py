"""How many tokens to draft: the gamma that gives the most tokens a second.

What rounds cost is known once an engine is open (Costs), so only acceptance is learned. No token depends on
it: every gamma gives the same ones.
"""

from __future__ import annotations

from luce.costs import Costs
from luce.drafting import Round

# What drafting that fails may cost, in parts of plain decoding. 3% over 256 tokens is the promise; the rest
# of it is for what the costs of short contexts do not say. After them little: such texts stay hopeless.
HORIZON, ALLOWANCE, ALLOWANCE_BEYOND = 256, 0.025, 0.01
MARGIN = 1.03  # drafting has to promise so much more than plain decoding: below, it is not worth a bet


class Acceptance:
    """Share of accepted drafts at each position, of those that follow accepted ones."""

    HOPE = 0.95  # at the first position before any trial: who does not hope does not try
    HOPE_WEIGHT = 2.0  # trials that it is worth
    NEXT_WEIGHT = 4.0  # trials that the share of a position is worth at the next one: they are alike
    FORGET = 0.97  # weight that a trial keeps in a round with drafts: about 33 of them count
    FADE = 0.985  # and in a round without, so that a text that has changed is tried again

    def __init__(self, positions: int):
        self._hits, self._trials = [0.0] * positions, [0.0] * positions

    def add(self, drafted: int, accepted: int) -> None:
        """A round: one trial at each position up to the first rejected one."""
        keep = self.FORGET if drafted else self.FADE
        self._hits, self._trials = [keep * x for x in self._hits], [keep * x for x in self._trials]
        for position in range(min(accepted + 1, drafted)):
            self._trials[position] += 1
            self._hits[position] += position < accepted

    def tokens(self, gamma: int) -> list[float]:
        """Expected of a round with 0, 1 .. gamma drafts: 1 + a1 + a1*a2 + ..."""
        share, weight, chance, expected = self.HOPE, self.HOPE_WEIGHT, 1.0, [1.0]
        for hits, trials in zip(self._hits[:gamma], self._trials, strict=False):
            share, weight = (hits + weight * share) / (trials + weight), self.NEXT_WEIGHT
            chance *= share
            expected.append(expected[-1] + chance)
        return expected


def can_pay(costs: Costs, gamma_max: int) -> bool:
    """Whether some number of drafts gains tokens a second if as many are accepted as may be hoped for."""
    return bool(AutoGamma(gamma_max, costs).gamma(gamma_max))


class AutoGamma:
    """The gamma from 0 to gamma_max that gives the most tokens a second, by what its rounds cost and by the
    acceptance that is hoped for until it is seen. Hope fades in where nothing was drafted for a while, so
    that drafting is tried again. A ledger of what was lost against plain decoding of the same tokens bounds
    all that: a draft that could take it past the allowance is made shorter, or not at all."""

    def __init__(self, gamma_max: int, costs: Costs):
        self._max, self._costs = gamma_max, costs
        self._acceptance = Acceptance(gamma_max)
        self.begin(HORIZON)

    def begin(self, budget: int) -> None:
        """A text of at most `budget` tokens."""
        self._budget, self._tokens = budget, 0
        self._lost = 0.0  # in plain rounds
        self._price = [1.0]  # of a round of the present step, by its drafts, in plain rounds

    def gamma(self, limit: int, sequences: int = 1) -> int:
        """For the next round, in which at most `limit` drafts are of use; all sequences of its step are taken
        to draft as many."""
        self._price = self._prices(min(limit, self._max), sequences)
        tokens = self._acceptance.tokens(len(self._price) - 1)
        rates = [n / price for n, price in zip(tokens, self._price, strict=True)]
        best = max(range(len(rates)), key=rates.__getitem__)
        while best and self._lost + self._price[best] - 1 > self._allowance():
            best -= 1
        return best if rates[best] > MARGIN else 0

    def _allowance(self) -> float:
        """What may be lost up to now, in plain rounds."""
        return ALLOWANCE * min(HORIZON, self._budget) + ALLOWANCE_BEYOND * max(self._tokens - HORIZON, 0)

    def learn(self, done: Round) -> None:
        """A round that is over."""
        self._tokens += done.accepted + 1
        if done.drafted:
            self._lost += self._price[done.drafted] - (done.accepted + 1)
        self._acceptance.add(done.drafted, done.accepted)

    def _prices(self, gamma: int, sequences: int) -> list[float]:
        plain = self._costs.verify(sequences)
        if not plain:  # nothing was measured: nothing is known to pay
            return [1.0]
        draft = self._costs.draft(sequences)
        return [(self._costs.verify((g + 1) * sequences) + g * draft) / plain for g in range(gamma + 1)]
