"""Decides which candidates the next round verifies, where that is left to luce: those that give the most
tokens a second.

There is one formula. Of all that can be drafted, a round takes what maximises

    expected tokens / (seconds of a verify of its rows + seconds of its drafts).

What rounds cost is known once an engine is open (Costs), so only acceptance is learned. That of a lookup is
learned from every token that comes, whether or not it was verified. That of the model's drafters is learned
where they drafted. A text starts from what the engine's earlier texts have shown (Known).

The expected tokens of a round are 1, plus for each depth the chance that some source is right down to it,
plus the chances of the next best candidates beside a chain. No token depends on any of this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import mul

from luce.costs import Costs
from luce.drafting import Draft, Drafter, Limits, Round, Text

# Drafting that fails may cost this part of plain decoding: ALLOWANCE over the first HORIZON tokens, and
# ALLOWANCE_BEYOND after them, since such texts seldom improve. The promise is 3% over 256 tokens. KEPT of it
# covers costs of long contexts, which are not measured.
HORIZON, ALLOWANCE, ALLOWANCE_BEYOND, PROMISE, KEPT = 256, 0.025, 0.01, 0.03, 0.002
BET = 0.5  # One round may lose this part of what may still be lost, so a bad beginning leaves some for later.
MARGIN = 1.03  # Drafting has to promise so much more than plain decoding: below, it is not worth a bet.
MAX_ROWS = 64  # luce.h calls it LUCE_MAX_ROWS.
NEXT_BEST = 8  # So many ranks of a draft's candidates are learned.
# What was learned keeps this weight with each round, and with each text, so that about 33 count.
FORGET = 0.97
KNOWN = 8.0  # At the start of a text, earlier ones are worth at most so many trials (bench/auto_by_costs.py).


# ---- what is learned


class Acceptance:
    """This is what is learned of one drafter. At each depth it is the share of right drafts among those that
    follow right ones, and the share of each next best candidate."""

    HOPE = 0.95  # It is the chance at the first depth before any trial: who does not hope does not try.
    HOPE_WEIGHT = 2.0  # The hope is worth so many trials.
    NEXT_WEIGHT = 4.0  # The share of a depth is worth so many trials at the next one, since they are alike.
    FADE = 0.985  # A trial keeps this weight in a round without drafts, so that a text that changed is tried.

    def __init__(self, depths: int, ranks: int = 1, known: Acceptance | None = None):
        """Starts from what is `known`, which learns along."""
        self.ranks, self._known = ranks, known
        self._weight = 1.0  # One of the trials and hits counts so much, so that all fade at once.
        self._trials = [0.0] * depths
        # Hits are counted by depth and rank; rank 0 is the draft itself.
        self._hits = [[0.0] * ranks for _ in range(depths)]
        if known:
            known.fade(FORGET)
            known._settle()
            parts = [min(1.0, KNOWN / trials) if trials else 0.0 for trials in known._trials]
            self._trials = [part * trials for part, trials in zip(parts, known._trials, strict=True)]
            self._hits = [[part * x for x in hits] for part, hits in zip(parts, known._hits, strict=True)]

    def fade(self, keep: float) -> None:
        """Leaves that part of the weight to all that was learned."""
        self._weight *= keep

    def skip(self) -> None:
        """Learns from a round without drafts, which shows nothing."""
        self._weight *= self.FADE

    def _settle(self) -> None:
        """Counts trials and hits by what they weigh, so that each counts 1 again."""
        weight, self._weight = self._weight, 1.0
        self._trials = [weight * x for x in self._trials]
        self._hits = [[weight * x for x in hits] for hits in self._hits]

    def add(self, drafted: int, right: int, rank: int | None = None) -> None:
        """Learns from a round: each depth up to the first wrong draft is one trial. `rank` is that of the
        target's own token among the candidates there; None means that it is none of them."""
        if not drafted:
            return self.skip()
        self.fade(FORGET)
        self._count(drafted, right, rank)
        if self._known:
            self._known._count(drafted, right, rank)

    def _count(self, drafted: int, right: int, rank: int | None) -> None:
        if self._weight < 1e-3:  # So what is divided by it stays small.
            self._settle()
        one = 1 / self._weight
        for depth in range(min(right + 1, drafted)):
            self._trials[depth] += one
            if depth < right:
                self._hits[depth][0] += one
            elif rank is not None and 0 < rank < len(self._hits[depth]):
                self._hits[depth][rank] += one

    def shares(self, n: int) -> Iterator[float]:
        """Yields the share of right drafts at each depth 1 .. n."""
        share, hope, weight = self.HOPE, self.HOPE_WEIGHT, self._weight
        for depth in range(n):
            share = (self._hits[depth][0] * weight + hope * share) / (self._trials[depth] * weight + hope)
            hope = self.NEXT_WEIGHT
            yield share

    def leaves(self, n: int) -> list[float]:
        """Returns the chances of the next best candidates beside a chain of n drafts, best first. Before any
        trial, each is expected to be right in half of the cases in which those before it are not."""
        found, before, weight, worth = [], 1.0, self._weight, self.HOPE_WEIGHT
        for depth, share in enumerate(self.shares(n)):
            rest, each = 1 - share, before / (self._trials[depth] * weight + worth)
            for hits in self._hits[depth][1:]:
                rest /= 2
                found.append(each * (hits * weight + worth * rest))
            before *= share
        found.sort(reverse=True)
        return found


class Lookups:
    """This is what is learned of lookups: the share whose first token is right, and the share of right tokens
    after right ones. Both are kept by the length of the match: 4 to 7 tokens, 8 to 15, and so on. A proposal
    is followed until it is wrong, whether or not it was verified."""

    HOPE = 0.8  # It is the chance before any trial, and it is worth two of them.
    LENGTHS = 5  # There are so many classes of matched lengths.

    def __init__(self, known: Lookups | None = None) -> None:
        """Starts from what is `known`, which learns along."""
        # These are (hits, trials) of first tokens, and of later ones.
        self._counts = [[[0.0, 0.0], [0.0, 0.0]] for _ in range(self.LENGTHS)]
        self._known = known
        if known:
            for own, shown in zip(self._counts, known._counts, strict=True):
                for kind, (hits, trials) in enumerate(shown):
                    shown[kind] = [FORGET * hits, FORGET * trials]
                    part = min(1.0, KNOWN / trials) if trials else 0.0
                    own[kind] = [part * hits, part * trials]
        self._followed: Sequence[int] = ()
        self._at, self._class = 0, 0

    def _class_of(self, matched: int) -> int:
        return min(max(matched.bit_length() - 3, 0), self.LENGTHS - 1)

    def chances(self, n: int, matched: int) -> list[float]:
        """Returns the chances that the first 1, 2 .. n tokens are all right. A length of match without
        trials starts from what all lengths show together."""
        if not n:
            return []
        first, later = self._shares(self._class_of(matched))
        return list(accumulate(repeat(later, n - 1), mul, initial=first))

    def _shares(self, of: int) -> tuple[float, float]:
        """Returns the shares of right tokens of a class: of first ones, and of later ones."""
        shares = []
        for kind in (0, 1):
            all_hits = all_trials = 0.0
            for counts in self._counts:
                all_hits += counts[kind][0]
                all_trials += counts[kind][1]
            hope = (all_hits + 2 * self.HOPE) / (all_trials + 2)
            hits, trials = self._counts[of][kind]
            shares.append((hits + 2 * hope) / (trials + 2))
        return shares[0], shares[1]

    def follow(self, tokens: Sequence[int], matched: int) -> None:
        """Begins to follow a proposal, unless one is still followed."""
        if not self._followed and tokens:
            self._followed, self._at, self._class = tokens, 0, self._class_of(matched)

    def came(self, tokens: Iterable[int]) -> None:
        """Learns from the tokens that the target has chosen since."""
        for token in tokens:
            if not self._followed:
                return
            right, kind = self._followed[self._at] == token, min(self._at, 1)
            hits, trials = self._counts[self._class][kind]
            self._counts[self._class][kind] = [FORGET * hits + right, FORGET * trials + 1]
            if self._known:
                hits, trials = self._known._counts[self._class][kind]
                self._known._counts[self._class][kind] = [hits + right, trials + 1]
            self._at += 1
            if not right or self._at == len(self._followed):
                self._followed = ()

    def reset(self) -> None:
        """Forgets the proposal that is followed, since another text begins."""
        self._followed = ()


class Known:
    """This is what the texts of one engine have shown. With each text that begins, the earlier ones count
    less."""

    def __init__(self) -> None:
        self._drafters: dict[str, Acceptance] = {}
        self._lookups = Lookups()

    def acceptance(self, drafter: Drafter) -> Acceptance:
        """Returns what a text that begins expects of a drafter."""
        ranks = min(drafter.ranks, NEXT_BEST)
        known = self._drafters.setdefault(drafter.name, Acceptance(drafter.most, ranks))
        return Acceptance(drafter.most, ranks, known)

    def lookups(self) -> Lookups:
        """Returns what a text that begins expects of lookups."""
        return Lookups(self._lookups)


# ---- what is chosen


@dataclass(frozen=True)
class Choice:
    """This is what a round verifies: `lookup` tokens of the lookup, the first `drafts` of a drafter (its
    index; None for no drafter), and `leaves` of that drafter's next best candidates. `tokens` is how many the
    round is expected to give. `price` is what it costs, in plain rounds."""

    lookup: int = 0
    drafter: int | None = None
    drafts: int = 0
    leaves: int = 0
    tokens: float = 1.0
    price: float = 1.0


PLAIN, NOTHING = Choice(), Draft()
Fields = tuple[int, int | None, int, int, float, float]  # These are the fields of a Choice.


class Prices:
    """This is what rounds of so many sequences cost, where each does the same; the unit is a plain round of
    them. `verify` has a step's price by the rows of each sequence, and `drafts` that of 0, 1 .. drafts of
    each drafter. `slopes` has by drafts what each further one adds at least. `with_lookup` and `with_drafts`
    are the prices of the cheapest rounds that verify a lookup, and drafts of a drafter."""

    def __init__(self, costs: Costs, drafters: Sequence[Drafter], sequences: int, handed: float = 0.0):
        """Counts `handed` seconds for each sequence where a drafter drafts."""
        plain, most = costs.verify(sequences), MAX_ROWS // max(sequences, 1)
        self.known = plain > 0
        self.verify = [
            costs.verify(max(rows, 1) * sequences) / plain if plain else 1.0 for rows in range(most + 1)
        ]
        self.drafts = [
            [0.0, *((d.seconds(costs, n, sequences) + handed * sequences) / plain if plain else 0.0
                    for n in range(1, d.most + 1))]
            for d in drafters
        ]  # fmt: skip
        verify = self.verify
        chains = [[of[n] + verify[1 + n] for n in range(min(len(of), most))] for of in self.drafts]
        self.slopes = [_slopes(chain) for chain in chains]
        self.with_lookup = verify[2] if most > 1 else math.inf
        self.with_drafts = min((chain[1] for chain in chains if len(chain) > 1), default=math.inf)


def _slopes(prices: Sequence[float]) -> list[float]:
    """Returns for each price what the least slope is from it to a later one."""
    found, after = [], list[float]()
    for price in reversed(prices):
        slopes = ((later - price) / more for more, later in enumerate(reversed(after), start=1))
        found.append(min(slopes, default=math.inf))
        after.append(price)
    return found[::-1]


def best(
    prices: Prices,
    rows: int,
    depth: int,
    lookup: Sequence[float],
    learned: Sequence[Acceptance],
    most_lost: float,
    owed: float = 0.0,
) -> Choice:
    """Returns the choice that the formula gives. `lookup` has the chances of the lookup's tokens, and
    `learned` what is known of each drafter. A round that could lose more than `most_lost` plain rounds, were
    nothing accepted, is not considered. A round that is not plain costs `owed` plain rounds more than its
    drafts and its verify.

    It runs in every round, beside steps of less than a millisecond on small models, so it is plain
    arithmetic.
    """
    verify, bound = prices.verify, 1 + most_lost
    rows = min(rows, len(verify) - 2)
    top = MARGIN  # It counts tokens in the time of a plain round.
    found: Fields = (0, None, 0, 0, 1.0, 1.0)
    if not prices.known:  # Nothing was measured, so nothing is known to pay.
        return PLAIN
    lookup = lookup[: min(rows, depth)]
    if 1 + sum(lookup) <= top:  # No round is cheaper than a plain one.
        lookup = ()
    tokens = 1.0
    for n, chance in enumerate(lookup, start=1):
        tokens += chance
        price = verify[1 + n] + owed
        if tokens > top * price and price <= bound:
            top, found = tokens / price, (n, None, 0, 0, tokens, price)
    for index, acceptance in enumerate(learned):
        drafting, slopes = prices.drafts[index], prices.slopes[index]
        # The best chain without a lookup has this rate, n drafts, and `alone` tokens.
        rate, n, alone, tokens = 1.0, 0, 1.0, 1.0
        chance, chances = 1.0, list[float]()  # This is the chance that all drafts up to there are right.
        for size, share in enumerate(acceptance.shares(min(len(drafting) - 1, rows, depth)), start=1):
            chance *= share
            tokens += chance
            chances.append(chance)
            price = verify[1 + size] + drafting[size] + owed
            if tokens > rate * price:
                rate, n, alone = tokens / price, size, tokens
            if tokens > top * price and price <= bound:
                top, found = tokens / price, (0, index, size, 0, tokens, price)
            if chance <= rate * slopes[size] or (price > bound and not lookup):
                break  # No longer chain is better.
        tokens = alone
        for taken, chance in enumerate(lookup[: rows - n] if n else (), start=1):
            tokens += chance * (1 - chances[taken - 1]) if taken <= n else chance
            price = verify[1 + n + taken] + drafting[n] + owed
            if tokens > top * price and price <= bound:
                top, found = tokens / price, (taken, index, n, 0, tokens, price)
        if found[1] == index and acceptance.ranks > 1:
            top, found = _with_leaves(top, found, acceptance, verify, rows, bound)
    return Choice(*found) if top > MARGIN else PLAIN


def _with_leaves(
    top: float, found: Fields, acceptance: Acceptance, verify: Sequence[float], rows: int, bound: float
) -> tuple[float, Fields]:
    """Returns the best choice with more and more of the drafter's next best candidates."""
    looked, index, n, _, tokens, price = found
    used = n + looked
    drafting = price - verify[1 + used]
    for more, gain in enumerate(acceptance.leaves(n)[: rows - used], start=1):
        tokens += gain
        price = verify[1 + used + more] + drafting
        if tokens > top * price and price <= bound:
            top, found = tokens / price, (looked, index, n, more, tokens, price)
    return top, found


def chain_can_pay(costs: Costs, drafters: Sequence[Drafter]) -> bool:
    """Says whether some drafts of the model's drafters gain tokens a second if as many are right as may be
    hoped for."""
    learned = [Acceptance(drafter.most) for drafter in drafters]
    rows, most_lost = MAX_ROWS - 1, BET * HORIZON * ALLOWANCE
    return best(Prices(costs, drafters, 1), rows, rows, (), learned, most_lost).drafter is not None


def lookup_can_pay(costs: Costs, budget: int) -> bool:
    """Says whether tokens of a lookup gain tokens a second if all of them are right."""
    return best(Prices(costs, (), 1), budget, budget, [1.0] * budget, (), MAX_ROWS).lookup > 0


def allowances(costs: Costs, budget: int, beside: float) -> tuple[float, float]:
    """Returns what may be lost a token by drafting that fails, within HORIZON tokens and beyond, as parts of
    plain decoding. A round that does not draft takes `beside` seconds more than plain decoding, and the
    promise covers these too. But half of the allowances is left, and two rounds of `budget` candidates may
    always fail, as nothing would be found out with less."""
    plain = costs.verify(1)
    if not plain:
        return ALLOWANCE, ALLOWANCE_BEYOND
    taken, wide = beside / plain, costs.verify(1 + budget) / plain - 1
    within = max(PROMISE - KEPT - taken, ALLOWANCE / 2, 2 * wide / HORIZON)
    return min(ALLOWANCE, within), max(ALLOWANCE_BEYOND - taken, ALLOWANCE_BEYOND / 2)


class Runner:
    """Drafts with all sources that an engine has, as they pay. It keeps a ledger of what was lost against
    plain decoding of the same tokens. A round that could take the loss past the allowance is made smaller,
    or plain."""

    name = "auto"

    def __init__(
        self,
        text: Text,
        costs: Costs,
        drafters: Sequence[Drafter],
        budget: int,
        known: Known | None = None,
        beside: float = 0.0,
        handed: float = 0.0,
    ):
        """Drafts at most `budget` candidates a round. Beside what it feeds the head, a round that does not
        draft takes `beside` seconds more than plain decoding. One in which a drafter drafts takes `handed`
        seconds more than that and its steps."""
        self._text, self._costs, self._drafters, self._budget = text, costs, drafters, budget
        known = known or Known()
        self._learned, self._lookups = [known.acceptance(d) for d in drafters], known.lookups()
        self._prices: dict[int, Prices] = {}  # They are by the number of sequences.
        # Plain steps of several sequences feed the head each, and those of one leave many rows to one feed.
        self._most_owed = budget + 1
        fed = costs.feed(1), costs.feed(self._most_owed) / self._most_owed
        self._allowed = [allowances(costs, budget, beside + each) for each in fed]  # by whether it is alone
        self._handed = handed
        self.begin(HORIZON)

    def begin(self, budget: int) -> None:
        """Begins a text of at most `budget` tokens."""
        self._tokens, self._tokens_most = 0, budget
        self._lost = 0.0  # It counts plain rounds.
        self._owed = 0  # The head is owed so many rows of plain rounds.
        self._alone = True  # The last round's step had no other sequence.
        self._choice = PLAIN
        self._lookups.reset()

    def draft(self, anchor: int, limits: Limits) -> Draft:
        rows, depth = min(limits.rows, self._budget), limits.depth
        tokens, matched = self._text.lookup(anchor, min(rows, depth))
        self._lookups.follow(tokens, matched)
        prices = self._prices.get(limits.sequences)
        if prices is None:
            prices = Prices(self._costs, self._drafters, limits.sequences, self._handed)
            self._prices[limits.sequences] = prices
        self._alone = limits.sequences == 1
        most_lost, choice = BET * (self._allowance() - self._lost), PLAIN
        owed = self._costs.feed(self._owed) / self._costs.verify(1) if prices.known and self._alone else 0.0
        if (prices.with_lookup if tokens else prices.with_drafts) + owed <= 1 + most_lost:
            chances = self._lookups.chances(len(tokens), matched)
            choice = best(prices, rows, depth, chances, self._learned, most_lost, owed)
        if choice is PLAIN:
            self._choice = PLAIN
            return NOTHING
        self._choice, chain = choice, tokens[: choice.lookup]
        if choice.drafter is None:
            return Draft(tuple(chain), sources=("lookup",) * len(chain))
        drafter = self._drafters[choice.drafter]
        budget = choice.drafts + choice.leaves if choice.leaves else None
        return drafter.draft(anchor, choice.drafts, budget, chain)

    def learn(self, done: Round) -> None:
        """Learns from a round that is over."""
        choice = self._choice
        self._tokens += len(done.tokens)
        if done.drafted:
            self._lost += choice.price - len(done.tokens)
        self._lookups.came(done.tokens)
        # The core feeds the head at once where a step has more rows than one.
        self._owed = min(self._owed + 1, self._most_owed) if self._alone and not done.drafted else 0
        if choice.drafter is None or not done.drafted:
            for learned in self._learned:
                learned.skip()
            return
        for index, (drafter, learned) in enumerate(zip(self._drafters, self._learned, strict=True)):
            if index == choice.drafter:
                learned.add(choice.drafts, *drafter.right(done, choice.drafts))
            else:
                learned.add(*drafter.shown_by(self._drafters[choice.drafter], done, choice.drafts))

    def _allowance(self) -> float:
        """Returns what may be lost up to now, in plain rounds."""
        within, beyond = self._allowed[self._alone]
        return within * min(HORIZON, self._tokens_most) + beyond * max(self._tokens - HORIZON, 0)
