"""Decides which candidates the next round verifies, where that is left to luce: those that give the most
tokens a second.

There is one formula. Of all that can be drafted, a round takes what maximises

    expected tokens / (seconds of a verify of its rows + seconds of its drafts).

What rounds cost is known once an engine is open (Costs), so only acceptance is learned. That of a lookup is
learned from every token that comes, whether or not it was verified. That of the model's drafters is learned
where they drafted. The NextN head is one drafter, also where it drafts among a part of the vocabulary: how
much of a text is of the part is learned from every token that comes too. A text starts from what the engine's
earlier texts have shown (Known).

The expected tokens of a round are 1, plus for each depth the chance that some source is right down to it,
plus the chances of the next best candidates beside a chain. Texts that decode together draft no deeper than
pays for all of them (Company). No token depends on any of this.

A row is one token that a step computes. In a round each sequence has a row for its anchor and one for each
candidate: n candidates make n + 1 rows, and a plain round has one. A step has the rows of all sequences that
decode together. What a round may have is counted in candidates here, and what a step costs is asked by rows.
The NextN head is fed what was verified, by row too: at once in a step of several rows. A step of a single row
leaves that to the next one that is not plain, whose round owes the feed of all rows that were left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from luce.speculate.acceptance import Acceptance, Among, Known, Learned
from luce.speculate.company import Wish
from luce.speculate.costs import NO_TIME, NO_WORK, Costs, Host, Hosts
from luce.speculate.drafting import NOTHING, Draft, Drafter, Limits, Round, Text

# A text of HORIZON tokens takes at most PROMISE more than plain decoding. What drafting that fails loses is
# counted by what rounds cost here, and may be up to COUNTED times that: on an H200 it was 1.08 times at most
# (bench/results/2026-11-23-rounds-h200.txt), and hosts may be disturbed after they were timed. Beyond those
# tokens it may cost ALLOWANCE_BEYOND, since such texts seldom improve.
HORIZON, PROMISE, COUNTED, ALLOWANCE_BEYOND = 256, 0.03, 1.25, 0.01
ALLOWANCE = PROMISE / COUNTED
BET = 0.5  # One round may lose this part of what may still be lost, so a bad beginning leaves some for later.
MARGIN = 1.03  # Drafting has to promise so much more than plain decoding: below, it is not worth a bet.
MAX_ROWS = 64  # luce.h calls it LUCE_MAX_ROWS.


class Choice(NamedTuple):
    """This is what a round verifies: `lookup` tokens of the lookup, the first `drafts` of a drafter (its
    index; None for no drafter), and `leaves` of that drafter's next best candidates. `tokens` is how many the
    round is expected to give. `price` is what it costs, in plain rounds."""

    lookup: int = 0
    drafter: int | None = None
    drafts: int = 0
    leaves: int = 0
    tokens: float = 1.0
    price: float = 1.0

    @property
    def candidates(self) -> int:
        """Returns how many candidates the round verifies."""
        return self.lookup + self.drafts + self.leaves


PLAIN = Choice()


class Ready(NamedTuple):
    """This is a choice that was made before its round, for a text without a lookup there: what bounds that
    round, and the price of feeding the head. `wish` is what a text in company says by it."""

    choice: Choice
    limits: Limits
    owed: float
    wish: Wish | None = None

    def holds(self, limits: Limits, owed: float, most_lost: float) -> bool:
        """Says whether the round is as expected, and may lose what the choice could."""
        known = self.limits
        same = (limits.candidates, limits.sequences) == (known.candidates, known.sequences)
        same = same and (limits.begun is None) is (known.begun is None)
        fits = self.choice.drafts <= limits.depth <= known.depth
        return same and fits and owed == self.owed and self.choice.price <= 1 + most_lost


# What a round gave, and what it showed of a head: its name, and what Acceptance.add takes.
Shown = tuple[tuple[int, ...], tuple[str, tuple[int, int, int | None]] | None]
Fields = tuple[int, int | None, int, int, float, float]  # These are the fields of a Choice.


def plain_round(costs: Costs, host: Host, sequences: int = 1) -> float:
    """Returns the seconds of a round of plain decoding, for each of so many sequences; 0 where nothing was
    measured."""
    step = costs.verify(sequences)
    return max(step + host.ahead, 0.0) if step else 0.0


class Prices:
    """This is what rounds of so many sequences cost, where each does the same; the unit is a plain round of
    them, as plain decoding has it: begun ahead. `steps[n]` is the price of a round that is begun after the
    last one, whose step has n rows of all sequences together. `verify[n]` is that of one in which each
    sequence has n rows: its anchor's and those of n - 1 candidates. `drafts` has what 0, 1 .. drafts of each
    drafter add. `slopes` has by drafts what each further one adds at least. `again` is what a round takes
    more whose drafts the host has to see before it verifies: a tree, or drafts beside a lookup. `with_lookup`
    and `with_drafts` are the prices of the cheapest rounds that verify a lookup, and drafts of a drafter."""

    def __init__(self, costs: Costs, drafters: Sequence[Drafter], sequences: int, host: Host = NO_WORK):
        plain, most = plain_round(costs, host, sequences), MAX_ROWS // max(sequences, 1)
        self.known = plain > 0
        self.again = host.between / plain if plain else 0.0
        self.steps = [
            (costs.verify(max(rows, 1)) + host.between) / plain if plain else 1.0
            for rows in range(MAX_ROWS + 1)
        ]
        self.verify = [self.steps[max(rows, 1) * sequences] for rows in range(most + 1)]
        self.drafts = [
            [0.0, *(d.seconds(costs, n, sequences) / plain if plain else 0.0 for n in range(1, d.most + 1))]
            for d in drafters
        ]
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
    candidates: int,
    depth: int,
    lookup: Sequence[float],
    learned: Sequence[Learned],
    most_lost: float,
    owed: float = 0.0,
    saved: float = 0.0,
) -> Choice:
    """Returns the choice that the formula gives, of so many `candidates` at most that go down to `depth`.
    `lookup` has the chances of the lookup's tokens, and `learned` what is known of each drafter. A round that
    could lose more than `most_lost` plain rounds, were nothing accepted, is not considered. A round that is
    not plain costs `owed` plain rounds more than its drafts and its verify, and one of a chain alone `saved`
    less.

    It runs in every round, beside steps of less than a millisecond on small models, so it is plain
    arithmetic.
    """
    verify, bound = prices.verify, 1 + most_lost
    candidates = min(candidates, len(verify) - 2)  # The anchor has a row too, and verify[0] has none.
    top = MARGIN  # It counts tokens in the time of a plain round.
    found: Fields = (0, None, 0, 0, 1.0, 1.0)
    if not prices.known:  # Nothing was measured, so nothing is known to pay.
        return PLAIN
    lookup = lookup[: min(candidates, depth)]
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
        for size, share in enumerate(acceptance.shares(min(len(drafting) - 1, candidates, depth)), start=1):
            chance *= share
            tokens += chance
            chances.append(chance)
            price = verify[1 + size] + drafting[size] + owed - saved
            if tokens > rate * price:
                rate, n, alone = tokens / price, size, tokens
            if tokens > top * price and price <= bound:
                top, found = tokens / price, (0, index, size, 0, tokens, price)
            if chance <= rate * slopes[size] or (price > bound and not lookup):
                break  # No longer chain is better.
        tokens = alone
        for taken, chance in enumerate(lookup[: candidates - n] if n else (), start=1):
            tokens += chance * (1 - chances[taken - 1]) if taken <= n else chance
            price = verify[1 + n + taken] + drafting[n] + owed + prices.again
            if tokens > top * price and price <= bound:
                top, found = tokens / price, (taken, index, n, 0, tokens, price)
        if found[1] == index and acceptance.ranks > 1:
            again = 0.0 if found[0] else prices.again + saved
            top, found = _with_leaves(top, found, acceptance, verify, candidates, bound, again)
    return Choice(*found) if top > MARGIN else PLAIN


def _with_leaves(
    top: float,
    found: Fields,
    acceptance: Learned,
    verify: Sequence[float],
    candidates: int,
    bound: float,
    again: float,
) -> tuple[float, Fields]:
    """Returns the best choice with more and more of the drafter's next best candidates, which cost `again`
    beside their rows."""
    looked, index, n, _, tokens, price = found
    used = n + looked
    drafting = price - verify[1 + used]
    for more, gain in enumerate(acceptance.leaves(n)[: candidates - used], start=1):
        tokens += gain
        price = verify[1 + used + more] + drafting + again
        if tokens > top * price and price <= bound:
            top, found = tokens / price, (looked, index, n, more, tokens, price)
    return top, found


def chain_can_pay(costs: Costs, drafters: Sequence[Drafter]) -> bool:
    """Says whether some drafts of the model's drafters gain tokens a second if as many are right as may be
    hoped for."""
    learned = [Acceptance(drafter.most) for drafter in drafters]
    most, most_lost = MAX_ROWS - 1, BET * HORIZON * ALLOWANCE
    return best(Prices(costs, drafters, 1), most, most, (), learned, most_lost).drafter is not None


def lookup_can_pay(costs: Costs, budget: int) -> bool:
    """Says whether tokens of a lookup gain tokens a second if all of them are right."""
    return best(Prices(costs, (), 1), budget, budget, [1.0] * budget, (), MAX_ROWS).lookup > 0


def allowances(costs: Costs, host: Host, budget: int, fed: float) -> tuple[float, float]:
    """Returns what may be lost a token by drafting that fails, within HORIZON tokens and beyond, as parts of
    plain decoding. A plain round owes the head `fed` seconds, and these count as lost. But as nothing would
    be found out without trials, two rounds of `budget` candidates may fail within HORIZON tokens, and two of
    one candidate in as many beyond."""
    plain = plain_round(costs, host)
    if not plain:
        return ALLOWANCE, ALLOWANCE_BEYOND
    taken = fed / plain
    wide, narrow = ((costs.verify(1 + more) + host.between) / plain - 1 for more in (budget, 1))
    within = max(ALLOWANCE - taken, 2 * wide / HORIZON)
    beyond = max(ALLOWANCE_BEYOND - taken, 2 * narrow / HORIZON)
    return min(ALLOWANCE, within), min(ALLOWANCE_BEYOND, beyond)


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
        hosts: Hosts = NO_TIME,
    ):
        """Drafts at most `budget` candidates a round."""
        self._text, self._costs, self._drafters, self._budget = text, costs, drafters, budget
        self._hosts, host = hosts, hosts.of(1)
        known = known or Known()
        self._company = known.company
        self._lookups = known.lookups()
        self._heads: dict[str, Acceptance] = {}
        for drafter in drafters:
            self._heads.setdefault(drafter.head, known.head(drafter))
        self._coverages = {d.part: known.coverage(d.part) for d in drafters if d.part}
        self._learned: list[Learned] = [
            Among(self._heads[d.head], self._coverages[d.part]) if d.part else self._heads[d.head]
            for d in drafters
        ]
        self._prices: dict[int, Prices] = {}  # They are by the number of sequences.
        # Plain steps of several sequences feed the head each, and those of one leave many rows to one feed.
        self._most_unfed = budget + 1
        fed = costs.feed(1), costs.feed(self._most_unfed) / self._most_unfed
        self._allowed = [allowances(costs, host, budget, each) for each in fed]  # by whether it is alone
        # They are the prices of feeding the head so many rows, where one sequence decodes alone.
        plain = plain_round(costs, host)
        self._feeds = [costs.feed(n) / plain if plain else 0.0 for n in range(self._most_unfed + 1)]
        self.begin(HORIZON)

    def begin(self, budget: int) -> None:
        """Begins a text of at most `budget` tokens."""
        self._tokens, self._tokens_most = 0, budget
        self._lost = 0.0  # It counts plain rounds.
        self._unfed = 0  # The head has not read the rows of so many plain rounds.
        self._alone = True  # The last round's step had no other sequence.
        self._round = 0  # Its last round in company had this number.
        self._apart = 0.0  # A plain round takes so much more, in plain rounds, where it is not begun ahead.
        # The last round has `_choice`. It would have had `_wanted` if it had not been begun before.
        self._choice = self._wanted = PLAIN
        self._unlearned = list[Shown]()  # What is known of the heads lacks these rounds.
        self._ready: Ready | None = None  # It was chosen ahead of the next draft.
        self._asked = Limits(budget, budget)  # The last draft had these.
        self._waiting = False  # Nothing was learned of the last draft yet.
        # These count rounds, those with a lookup that was worth it, and the last ones that had none.
        self._rounds = self._looked = self._unlooked = 0
        self._lookups.reset()

    def draft(self, anchor: int, limits: Limits) -> Draft:
        most, depth = min(limits.candidates, self._budget), limits.depth
        tokens, matched = self._text.lookup(anchor, min(most, depth))
        self._lookups.follow(tokens, matched)
        alone, self._alone = self._alone, limits.sequences == 1
        prices = self._prices_of(limits.sequences)
        self._apart = prices.verify[1] - 1
        if not self._alone:
            self._round = self._company.begin(limits.sequences, prices.steps)
        elif not alone:  # All others have ended.
            self._company.disband()
        most_lost = self._most_lost()
        owed = self._feeds[self._unfed] if self._alone else 0.0
        ready, choice, wish, chances = self._ready, PLAIN, None, list[float]()
        if ready and not tokens and ready.holds(limits, owed, most_lost):
            choice, wish = ready.choice, ready.wish
        elif (prices.with_lookup if tokens else prices.with_drafts) + owed <= 1 + most_lost:
            self._settle()
            chances = self._lookups.chances(len(tokens), matched)
            saved = self._saved(prices, limits)
            choice = best(prices, most, depth, chances, self._learned, most_lost, owed, saved)
            wish = None if self._alone else self._wish(choice, prices)
        if wish:
            deep = self._company.wishes(wish)
            if not deep:  # Where no drafts pay for all, a lookup still may.
                choice = best(prices, most, depth, chances, (), most_lost)
            elif deep < choice.drafts:
                choice = choice._replace(drafts=deep)
        self._ready, self._asked, self._waiting = None, limits, True
        self._rounds, self._unlooked = self._rounds + 1, self._unlooked + 1
        if choice.lookup:
            self._looked, self._unlooked = self._looked + 1, 0
        self._wanted = choice
        last, self._choice = self._choice, choice
        if limits.begun is not None:
            self._choice = self._of_begun(limits.begun, last, prices, owed)
        return self._made(anchor, tokens, prices)

    def _made(self, anchor: int, tokens: list[int], prices: Prices) -> Draft:
        """Returns the draft of this round's choice, and says in company what it takes. `tokens` are the
        lookup's."""
        choice = self._choice
        if not choice.candidates:
            return NOTHING
        if not self._alone:
            drafting = 0.0 if choice.drafter is None else prices.drafts[choice.drafter][choice.drafts]
            self._company.drafts(choice.candidates, drafting, choice.drafter)
        chain = tokens[: choice.lookup]
        if choice.drafter is None:
            return Draft(tuple(chain), sources=("lookup",) * len(chain))
        drafter = self._drafters[choice.drafter]
        budget = choice.drafts + choice.leaves if choice.leaves else None
        return drafter.draft(anchor, choice.drafts, budget, chain)

    def follows(self) -> Draft | None:
        """Says what the next round is begun with, which saves what is between rounds. What a drafter is worth
        changes little from round to round, so the next choice is taken to be this one."""
        wanted, prices = self._wanted, self._prices_of(self._asked.sequences)
        if wanted.lookup or wanted.leaves:
            return None
        if wanted.drafter is None:
            return NOTHING if self._apart > self._missed() else None
        most_lost = self._most_lost() - BET * max(self._choice.price - 1, 0.0)  # This one may lose that.
        fits = prices.again > self._missed() and wanted.price <= 1 + most_lost
        return self._drafters[wanted.drafter].chains[wanted.drafts] if fits else None

    def _missed(self) -> float:
        """Returns what a round that is begun ahead loses on average, in plain rounds. If a lookup is worth it
        then, it comes a round later, which loses some half of a plain round. The chance of that is taken from
        the last rounds that had none, and from all rounds. Few rounds without one make it small."""
        return min(1 / (self._unlooked + 2), (self._looked + 0.2) / (self._rounds + 2)) / 2

    def _saved(self, prices: Prices, limits: Limits) -> float:
        """Returns what a chain saves by being begun ahead, as the round of these limits was; 0 where it is
        not."""
        return prices.again if limits.begun is not None and prices.again > self._missed() else 0.0

    def _of_begun(self, begun: Draft, last: Choice, prices: Prices, owed: float) -> Choice:
        """Returns the choice by which a round was begun. The wait for the `last` one has begun it where
        either has drafts. So the host's part is saved, and not what it takes to begin a step."""
        if not begun.size:
            return Choice(price=1 + self._apart - prices.again) if last.candidates else PLAIN
        index = next(i for i, drafter in enumerate(self._drafters) if begun in drafter.chains)
        price = prices.drafts[index][begun.size] + prices.verify[1 + begun.size] + owed - prices.again
        return Choice(drafter=index, drafts=begun.size, price=price)

    def learn(self, done: Round) -> None:
        """Learns from a round that is over: what it lost and what came at once, and what the heads are worth
        when there is time, since the next round waits for this."""
        choice, self._waiting = self._choice, False
        self._tokens += len(done.tokens)
        apart = 1 + self._apart
        plain = 1.0 if done.ahead or done.behind else apart  # Plain decoding takes that for each token.
        took = choice.price if done.drafted or done.ahead else apart
        if not self._alone:  # Who drafted pays for all who waited.
            prices = self._prices_of(self._asked.sequences)
            owed = self._company.owes(plain, prices.steps, prices.again if done.ahead else 0.0)
            took = plain + owed if done.drafted else plain if owed else took
        self._lost += took - plain * len(done.tokens)
        if not self._alone:
            allowance = self._allowance()
            self._lost = allowance - self._company.end(self._round, allowance - self._lost)
        self._lookups.came(done.tokens)
        # The core feeds the head at once where a step has more rows than one.
        self._unfed = min(self._unfed + 1, self._most_unfed) if self._alone and not done.drafted else 0
        shown = None
        if choice.drafter is not None and done.drafted:
            drafter = self._drafters[choice.drafter]
            shown = drafter.head, drafter.shown(done, choice.drafts)
        self._unlearned.append((done.tokens, shown))

    def prepare(self) -> None:
        """Chooses what the next draft will be where the text has no lookup then. If the next round has begun,
        that is the one after it, which is taken to lose all that it may."""
        self._settle()
        limits, alone, most_lost = self._asked, self._alone, self._most_lost()
        unfed = self._unfed
        if self._waiting:
            most_lost -= BET * max(self._choice.price - 1, 0.0)
            unfed = 0 if self._choice.candidates else min(unfed + 1, self._most_unfed)
        owed, prices, choice = self._feeds[unfed] if alone else 0.0, self._prices_of(limits.sequences), PLAIN
        if prices.with_drafts + owed <= 1 + most_lost:
            most = min(limits.candidates, self._budget)
            saved = self._saved(prices, limits)
            choice = best(prices, most, limits.depth, (), self._learned, most_lost, owed, saved)
        self._ready = Ready(choice, limits, owed, None if alone else self._wish(choice, prices))

    def _settle(self) -> None:
        """Has the heads learn from the rounds that they have not learned from yet."""
        for tokens, by in self._unlearned:
            for coverage in self._coverages.values():
                coverage.came(tokens)
            for name, head in self._heads.items():
                if by and name == by[0]:
                    head.add(*by[1])
                else:
                    head.skip()
        self._unlearned.clear()

    def _wish(self, choice: Choice, prices: Prices) -> Wish | None:
        """Returns what a text in company says by a choice: nothing by one without drafts of a drafter."""
        if choice.drafter is None:
            return None
        chances = list(accumulate(self._learned[choice.drafter].shares(choice.drafts), mul))
        beside = choice.lookup + choice.leaves
        gain = choice.tokens - 1 - sum(chances) if beside else 0.0
        return Wish(chances, beside, gain, prices.drafts[choice.drafter], choice.drafter)

    def _prices_of(self, sequences: int) -> Prices:
        prices = self._prices.get(sequences)
        if prices is None:
            prices = Prices(self._costs, self._drafters, sequences, self._hosts.of(sequences))
            self._prices[sequences] = prices
        return prices

    def _most_lost(self) -> float:
        """Returns what the next round may lose, in plain rounds."""
        spare = None if self._alone else self._company.spare
        return BET * (self._allowance() - self._lost if spare is None else spare)

    def _allowance(self) -> float:
        """Returns what may be lost up to now, in plain rounds."""
        within, beyond = self._allowed[self._alone]
        return within * min(HORIZON, self._tokens_most) + beyond * max(self._tokens - HORIZON, 0)
