"""Which candidates the next round verifies, where that is left to luce: those that give the most tokens a
second.

There is one formula. Of all that can be drafted, a round takes what maximises

    expected tokens / (seconds of a verify of its rows + seconds of its drafts).

What rounds cost is known once an engine is open (Costs), so only acceptance is learned: of a lookup from
every token that comes, whether it was verified or not, of the model's drafters where they drafted. The tokens
that are expected of several sources at once are 1 + the sum over depths of the chance that any of them is
right so far, and the chances of the next best candidates beside a chain. No token depends on any of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from luce.costs import Costs
from luce.drafting import Draft, Drafter, Limits, Round, Text

# What drafting that fails may cost, in parts of plain decoding. 3% over 256 tokens is the promise; the rest
# of it is for what the costs of short contexts do not say. After them little: such texts stay hopeless.
HORIZON, ALLOWANCE, ALLOWANCE_BEYOND = 256, 0.025, 0.01
MARGIN = 1.03  # drafting has to promise so much more than plain decoding: below, it is not worth a bet
MAX_ROWS = 64  # LUCE_MAX_ROWS
NEXT_BEST = 8  # ranks of a draft's candidates that are learned


# ---- what is learned


class Acceptance:
    """Of a drafter: the share of right drafts at each depth, of those that follow right ones, and of its next
    best candidates there."""

    HOPE = 0.95  # at the first depth before any trial: who does not hope does not try
    HOPE_WEIGHT = 2.0  # trials that it is worth
    NEXT_WEIGHT = 4.0  # trials that the share of a depth is worth at the next one: they are alike
    FORGET = 0.97  # weight that a trial keeps in a round with drafts: about 33 of them count
    FADE = 0.985  # and in a round without, so that a text that has changed is tried again

    def __init__(self, depths: int, ranks: int = 1):
        self._trials = [0.0] * depths
        self._hits = [[0.0] * ranks for _ in range(depths)]  # by depth and rank; rank 0: the draft itself

    def add(self, drafted: int, right: int, rank: int | None = None) -> None:
        """A round: one trial at each depth up to the first wrong draft. rank: of the target's own token among
        the candidates there, None: it is none of them."""
        keep = self.FORGET if drafted else self.FADE
        self._trials = [keep * x for x in self._trials]
        self._hits = [[keep * x for x in hits] for hits in self._hits]
        for depth in range(min(right + 1, drafted)):
            self._trials[depth] += 1
            if depth < right:
                self._hits[depth][0] += 1
            elif rank is not None and 0 < rank < len(self._hits[depth]):
                self._hits[depth][rank] += 1

    def shares(self, n: int) -> list[float]:
        """Of the drafts at depths 1 .. n."""
        share, weight, found = self.HOPE, self.HOPE_WEIGHT, []
        for hits, trials in zip(self._hits[:n], self._trials, strict=False):
            share, weight = (hits[0] + weight * share) / (trials + weight), self.NEXT_WEIGHT
            found.append(share)
        return found

    def chances(self, n: int) -> list[float]:
        """That the first 1, 2 .. n drafts are all right."""
        return list(accumulate(self.shares(n), mul))

    def leaves(self, n: int) -> list[float]:
        """The chances of the next best candidates beside a chain of n drafts, best first. Each is hoped to be
        right in half of the cases in which those before it are not."""
        found, before = [], 1.0
        for depth, share in enumerate(self.shares(n)):
            rest = 1 - share
            for hits in self._hits[depth][1:]:
                rest /= 2
                found.append(
                    before * (hits + self.HOPE_WEIGHT * rest) / (self._trials[depth] + self.HOPE_WEIGHT)
                )
            before *= share
        return sorted(found, reverse=True)


class Lookups:
    """Of lookups: the share of those whose first token is right, and of right tokens after right ones, by the
    length of the match: 4 to 7 tokens, 8 to 15, and so on. What was proposed is followed until it is wrong,
    whether it was verified or not."""

    LENGTHS = 5  # classes
    FORGET = 0.97

    def __init__(self) -> None:
        # (hits, trials) of first tokens, and of later ones
        self._counts = [[[0.0, 0.0], [0.0, 0.0]] for _ in range(self.LENGTHS)]
        self._followed: Sequence[int] = ()
        self._at, self._class = 0, 0

    def _class_of(self, matched: int) -> int:
        return min(max(matched.bit_length() - 3, 0), self.LENGTHS - 1)

    def chances(self, n: int, matched: int) -> list[float]:
        """That the first 1, 2 .. n tokens are all right, before any trial one half each (rule of succession);
        a length of match starts from what all lengths show."""
        pooled = [[sum(counts[i][j] for counts in self._counts) for j in (0, 1)] for i in (0, 1)]
        own, shares = self._counts[self._class_of(matched)], []
        for (hits, trials), (all_hits, all_trials) in zip(own, pooled, strict=True):
            hope = (all_hits + 1) / (all_trials + 2)
            shares.append((hits + 2 * hope) / (trials + 2))
        first, later = shares
        return [first * later**depth for depth in range(n)]

    def follow(self, tokens: Sequence[int], matched: int) -> None:
        """A proposal; one that is still followed is followed on."""
        if not self._followed and tokens:
            self._followed, self._at, self._class = tokens, 0, self._class_of(matched)

    def came(self, tokens: Iterable[int]) -> None:
        """What the target chose since."""
        for token in tokens:
            if not self._followed:
                return
            right, kind = self._followed[self._at] == token, min(self._at, 1)
            counts = self._counts[self._class][kind]
            counts[:] = [self.FORGET * counts[0] + right, self.FORGET * counts[1] + 1]
            self._at += 1
            if not right or self._at == len(self._followed):
                self._followed = ()

    def reset(self) -> None:
        """Another text begins."""
        self._followed = ()


# ---- what is chosen


@dataclass(frozen=True)
class Choice:
    """Of a round: `lookup` tokens of the lookup's, the first `drafts` of a drafter (an index, None: none),
    and `leaves` of its next best candidates. tokens: expected; price: in plain rounds."""

    lookup: int = 0
    drafter: int | None = None
    drafts: int = 0
    leaves: int = 0
    tokens: float = 1.0
    price: float = 1.0

    @property
    def rate(self) -> float:
        """Tokens a plain round's time."""
        return self.tokens / self.price


class Prices:
    """Of the rounds of so many sequences that each do the same, in plain rounds of them."""

    def __init__(self, costs: Costs, sequences: int):
        plain = costs.verify(sequences)
        self.known = plain > 0
        most = MAX_ROWS // max(sequences, 1)
        self.verify = [1.0] * (most + 1)
        if self.known:
            self.verify = [costs.verify(max(rows, 1) * sequences) / plain for rows in range(most + 1)]
        self._costs, self._sequences, self._plain = costs, sequences, plain

    def drafts(self, drafter: Drafter, n: int) -> float:
        """Of n drafts of a drafter."""
        return drafter.seconds(self._costs, n, self._sequences) / self._plain if n and self.known else 0.0


def best(
    prices: Prices,
    limits: Limits,
    lookup: Sequence[float],
    drafters: Sequence[Drafter],
    learned: Sequence[Acceptance],
    most_lost: float,
) -> Choice:
    """The formula. lookup: chances of the lookup's tokens; learned: of each drafter. A round that could lose
    more than most_lost plain rounds, with nothing accepted, is not considered."""
    chosen = Choice()
    rows = min(limits.rows, len(prices.verify) - 2)

    def consider(choice: Choice) -> None:
        nonlocal chosen
        if choice.rate > chosen.rate and choice.price - 1 <= most_lost:
            chosen = choice

    if not prices.known:  # nothing was measured: nothing is known to pay
        return chosen
    lookup = lookup[: min(rows, limits.depth)]
    for n, expected in enumerate(accumulate(lookup), start=1):
        consider(Choice(n, tokens=1 + expected, price=prices.verify[1 + n]))
    for index, drafter in enumerate(drafters):
        n_max = min(drafter.most, rows, limits.depth)
        chances = learned[index].chances(n_max)
        alone = Choice()
        for n, expected in enumerate(accumulate(chances), start=1):
            price = prices.verify[1 + n] + prices.drafts(drafter, n)
            choice = Choice(0, index, n, tokens=1 + expected, price=price)
            alone = choice if choice.rate > alone.rate else alone
            consider(choice)
        if not alone.drafts:
            continue
        n, price = alone.drafts, prices.drafts(drafter, alone.drafts)
        beside = [chance * (1 - (chances[d] if d < n else 0.0)) for d, chance in enumerate(lookup)]
        for taken, gain in enumerate(accumulate(beside[: rows - n]), start=1):
            consider(Choice(taken, index, n, 0, alone.tokens + gain, prices.verify[1 + n + taken] + price))
        if chosen.drafter == index and drafter.ranks > 1:
            base = chosen
            room = rows - base.drafts - base.lookup
            leaves = learned[index].leaves(base.drafts)[:room]
            for more, gain in enumerate(accumulate(leaves), start=1):
                price = prices.verify[1 + base.drafts + base.lookup + more]
                price += prices.drafts(drafter, base.drafts)
                consider(Choice(base.lookup, index, base.drafts, more, base.tokens + gain, price))
    return chosen if chosen.rate > MARGIN else Choice()


def chain_can_pay(costs: Costs, drafters: Sequence[Drafter]) -> bool:
    """Whether some drafts of the model's drafters gain tokens a second if as many are right as may be hoped
    for."""
    learned = [Acceptance(drafter.most) for drafter in drafters]
    limits = Limits(MAX_ROWS - 1, MAX_ROWS - 1)
    return best(Prices(costs, 1), limits, (), drafters, learned, HORIZON * ALLOWANCE).drafter is not None


def lookup_can_pay(costs: Costs, budget: int) -> bool:
    """Whether tokens of a lookup gain tokens a second if all are right."""
    return best(Prices(costs, 1), Limits(budget, budget), [1.0] * budget, (), (), float(MAX_ROWS)).lookup > 0


class Runner:
    """All sources that an engine has, as they pay. A ledger of what was lost against plain decoding of the
    same tokens bounds what may be tried: a round that could take it past the allowance is made smaller, or
    plain."""

    name = "auto"

    def __init__(self, text: Text, costs: Costs, drafters: Sequence[Drafter], budget: int):
        self._text, self._costs, self._drafters, self._budget = text, costs, drafters, budget
        self._learned = [Acceptance(d.most, min(d.ranks, NEXT_BEST)) for d in drafters]
        self._lookups = Lookups()
        self._prices: dict[int, Prices] = {}  # by sequences
        self.begin(HORIZON)

    def begin(self, budget: int) -> None:
        """A text of at most `budget` tokens."""
        self._tokens, self._tokens_most = 0, budget
        self._lost = 0.0  # in plain rounds
        self._choice = Choice()
        self._lookups.reset()

    def draft(self, anchor: int, limits: Limits) -> Draft:
        limits = Limits(min(limits.rows, self._budget), limits.depth, limits.sequences)
        tokens, matched = self._text.lookup(anchor, min(limits.rows, limits.depth))
        self._lookups.follow(tokens, matched)
        prices = self._prices.get(limits.sequences)
        if prices is None:
            prices = self._prices[limits.sequences] = Prices(self._costs, limits.sequences)
        chances = self._lookups.chances(len(tokens), matched)
        most_lost = self._allowance() - self._lost
        choice = best(prices, limits, chances, self._drafters, self._learned, most_lost)
        self._choice, chain = choice, tokens[: choice.lookup]
        if choice.drafter is None:
            return Draft(tuple(chain), sources=("lookup",) * len(chain))
        drafter = self._drafters[choice.drafter]
        budget = choice.drafts + choice.leaves if choice.leaves else None
        return drafter.draft(anchor, choice.drafts, budget, chain)

    def learn(self, done: Round) -> None:
        """A round that is over."""
        choice = self._choice
        self._tokens += len(done.tokens)
        if done.drafted:
            self._lost += choice.price - len(done.tokens)
        self._lookups.came(done.tokens)
        for index, (drafter, learned) in enumerate(zip(self._drafters, self._learned, strict=True)):
            if index == choice.drafter and done.drafted:
                right, rank = drafter.right(done, choice.drafts)
                learned.add(choice.drafts, right, rank)
            else:
                learned.add(0, 0)

    def _allowance(self) -> float:
        """What may be lost up to now, in plain rounds."""
        within = ALLOWANCE * min(HORIZON, self._tokens_most)
        return within + ALLOWANCE_BEYOND * max(self._tokens - HORIZON, 0)
