"""Drafts with all sources that an engine has, as they pay: the formula of choose.py, applied to the texts that
decode together now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from luce.speculate.candidates import PLAIN, Candidate, Choice, Family, Offer, Steps
from luce.speculate.choose import MARGIN, Search, Terms, chains_of
from luce.speculate.drafting import NOTHING, Draft, Drafter, Limits, Round, Text
from luce.speculate.estimates import Estimates
from luce.speculate.ledger import BET, HORIZON, Ledger
from luce.speculate.prices import Costs, Prices, Work

# A lookup that is found a round late loses half of a plain round, as half of such rounds have drafts that are
# as good.
LATE = 0.5


@dataclass(slots=True)
class Priced:
    """A round of several texts: the work that it was chosen by. `beside_drafts` says that the round before or
    after it has drafts: a wait begins one of the two then, later than plain rounds begin. Its price is learned
    once."""

    work: Work
    read: bool
    beside_drafts: bool
    learned: bool = False

    @property
    def observed(self) -> bool:
        """Says whether it is booked as it was observed. A plain round is no draft's fault, however long it is."""
        return self.work.drafted or self.beside_drafts


class Auto:
    """Chooses for the texts of one engine, which decode together. It keeps what earlier texts have shown, what
    rounds cost, and a debt: what texts have lost beyond what they may, which the others pay of what they may
    still lose."""

    def __init__(self, costs: Costs, budget: int, hidden: bool = False):
        """Drafts at most `budget` candidates a round for each text. `hidden` says that the engine can begin
        rounds before the one before has ended."""
        self.prices, self.budget, self.known = Prices(costs, paced=not hidden), budget, Estimates()
        self._steps = dict[int, Steps]()
        self.debt = 0.0  # Plain rounds.
        self.hidden = hidden  # The last round was begun before the one before it had ended, or could have been.
        self.drafted = False  # The last round had candidates.
        self.offered: list[Source] = []  # These have offered what they could verify in the next round.

    def source(self, text: Text, drafters: Sequence[Drafter]) -> Source:
        """Returns what drafts for one text. All texts of an engine have the same drafters."""
        return Source(self, text, drafters)

    def steps(self, drafters: Sequence[Drafter], sequences: int) -> Steps:
        """Returns what steps cost that so many sequences share."""
        found = self._steps.get(sequences)
        if found is None:
            found = self._steps[sequences] = Steps(self.prices.costs, drafters, sequences)
        return found

    def decide(self) -> None:
        """Decides the round of all that have offered. Where rounds are begun before the one before has ended, it
        decides too what the next one is begun with: a chain of each text, unless more is expected of waiting for
        what this one gives."""
        texts, self.offered = self.offered, []
        prices, hidden, limits = self.prices, self.hidden, texts[0].limits
        n = limits.sequences
        steps = self._steps.get(n) or self.steps(texts[0].drafters, n)
        scale, floor, turn = prices.terms(n, hidden)
        stake = self._stake(texts, n) * floor if floor else 0.0
        scales = prices.scales(hidden, len(steps.drafters))
        terms = Terms(scale, floor, turn, int(hidden), self._feed(texts, n), stake, scales)
        chained: list[list[Family]] = []
        best, rate = None, 0.0
        # Where not even the cheapest drafts may be lost, nothing need be known of any: the host's time counts too.
        cheapest = min([scale, *scales]) * steps.least(any([text.found[0] for text in texts]))
        if stake > 0 and cheapest <= floor + stake:
            offers = [text.offer() for text in texts]
            chained = chains_of(offers, steps)
            search = Search(steps, terms, MARGIN * n / terms.plain)
            best, rate = search.tries_all(offers, chained), search.top
        plain = [PLAIN] * len(texts)
        now, read, device, drafted = plain, False, steps.plain, False
        wanted = best.choices if best else plain
        if limits.begun is not None:
            now = [text.of_begun() for text in texts]
            device, drafted = steps.of(now), any([choice.drafts for choice in now])
        elif best:
            now, read, device, drafted = wanted, best.family.read, best.device, True
        if drafted:
            device += terms.feed
        by = next((choice.drafter for choice in now if choice.drafter is not None), None) if scales else None
        work = Work(device, n, drafted, int(read), hidden, by)
        first, waits = None, not hidden
        if hidden and floor:
            first, waits = self._next(texts, terms, chained, rate if best else 0.0, work)
        priced = Priced(work, read, self.drafted or (first is not None and not waits))
        self.drafted = drafted
        for text, choice, want in zip(texts, now, wanted, strict=True):
            text.decided(choice, want, priced)
            text.next = None if waits else NOTHING
        if first and not waits:
            for text, choice in zip(texts, first.choices, strict=True):
                text.next = text.chain_of(choice)

    def _next(
        self,
        texts: list[Source],
        terms: Terms,
        chained: list[list[Family]],
        rate: float,
        work: Work,
    ) -> tuple[Candidate | None, bool]:
        """Returns the best of the chains with which the next round may be begun, and whether more is expected of
        waiting. `work` is that of this round, and `rate` that of the best drafts for it, which may not be those
        that it was begun with; 0 where none pays."""
        n, floor, steps = work.sequences, terms.floor, self._steps[work.sequences]
        # The next one is begun before this one is booked, which may lose all that it has more than a plain one.
        stake = terms.stake
        if work.drafted or work.turns:
            stake -= BET * max(self.prices.seconds(work) - floor, 0.0)
        first, gain = None, n / floor
        if chained and stake > 0:
            feed = self._feed(texts, n, work.drafted)
            following = Terms(terms.scale, floor, terms.turn, 0, feed, stake, terms.scales)
            search = Search(steps, following, MARGIN * n / floor)
            for of in chained:
                first = search.tries_each(of)
            gain = search.top if first else gain
        # To wait in vain is a loss too, and so is the wait of a text's last round.
        waits = 2 * terms.turn <= stake
        if waits and rate <= gain:
            missed = sum([text.missed() for text in texts]) / len(texts)
            waits = terms.turn <= missed * LATE * floor
        # What a plain round takes is seen where one follows another at once.
        return first, waits and bool(first or rate or self.prices.seen(n, work.hidden))

    def _feed(self, texts: list[Source], sequences: int, drafted: bool | None = None) -> float:
        """Returns the seconds of feeding the head what plain rounds have left, after a round that drafted or not
        where that is given."""
        if sequences > 1:
            return 0.0
        left = texts[0].unfed if drafted is None else 0 if drafted else texts[0].unfed + 1
        return self.prices.costs.feed(left)

    def _stake(self, texts: list[Source], sequences: int) -> float:
        """Returns how many plain rounds one round may lose: those who may lose more pay the debt of others first."""
        rests = [max(text.rest(sequences), 0.0) for text in texts]
        if not self.debt:
            return BET * sum(rests) / len(texts)
        part = min(1.0, self.debt / sum(rests)) if sum(rests) else 0.0
        if part:
            for text, rest in zip(texts, rests, strict=True):
                text.ledger.paid += part * rest
            self.debt = max(self.debt - sum(rests), 0.0)
        return BET * (1 - part) * sum(rests) / len(texts)


class Source:
    """Drafts for one text as Auto decides."""

    name = "auto"

    def __init__(self, auto: Auto, text: Text, drafters: Sequence[Drafter]):
        self.auto, self.drafters, self._text = auto, drafters, text
        self.estimates = Estimates(auto.known)
        # Those whose trials say something of each other.
        self.others = drafters if len({drafter.head for drafter in drafters}) > 1 else ()
        self.parts = sorted({drafter.part for drafter in drafters if drafter.part})
        self._chains, self._most = list[list[float]](), 0  # What the last offer had.
        # Plain steps of one sequence leave many rows to one feed, and those of several feed the head each.
        self.most_unfed = auto.budget + 1
        self.fed = auto.prices.costs.feed(self.most_unfed) / self.most_unfed
        self.begin(HORIZON)

    def begin(self, budget: int) -> None:
        """Begins a text of at most `budget` tokens."""
        self.ledger = Ledger(budget)
        self.unfed = 0  # The head has not read the rows of so many plain rounds.
        self.limits = Limits(budget, budget)
        self.next: Draft | None = NOTHING
        self.choice = PLAIN
        self.found: tuple[list[int], int] = [], 0  # Of the last lookup: tokens, and how many matched.
        self._priced: Priced | None = None
        self._proposed = False
        # These count rounds, those with a lookup that was worth it, and the last ones that had none.
        self._rounds = self._looked = self._unlooked = 0

    def propose(self, anchor: int, limits: Limits) -> None:
        """Offers what the text could verify in the round that comes."""
        self.limits = limits
        self.found = self._text.lookup(anchor, min(limits.candidates, limits.depth, self.auto.budget))
        if self.found[0]:
            self.estimates.follow(*self.found)
        self.auto.offered.append(self)
        self._proposed = True

    def offer(self) -> Offer:
        (tokens, matched), estimates, limits = self.found, self.estimates, self.limits
        self._most = most = min(limits.candidates, self.auto.budget)
        depth = min(most, limits.depth)
        self._chains = chains = [estimates.chain(each, min(each.most, depth), self.others) for each in self.drafters]
        looked = estimates.lookup(len(tokens), matched) if tokens else ()
        return Offer(most, looked, chains, self._leaves, self._grown)

    def _leaves(self, by: int, chances: Sequence[float]) -> Sequence[float]:
        return self.estimates.leaves(self.drafters[by], chances)

    def _grown(self, by: int) -> Sequence[tuple[float, int]]:
        return self.estimates.grown(self.drafters[by], self._chains[by], self._most)

    def of_begun(self) -> Choice:
        """Returns the choice by which the round was begun."""
        begun = self.limits.begun
        if begun is None or not begun.size:
            return PLAIN
        for index, drafter in enumerate(self.drafters):
            if begun in drafter.chains:
                return Choice(0, index, begun.size, 0)
        raise ValueError("a round was begun with drafts that no drafter has")

    def chain_of(self, choice: Choice) -> Draft:
        """Returns the chain of a choice, with which a round may be begun."""
        return NOTHING if choice.drafter is None else self.drafters[choice.drafter].chains[choice.drafts]

    def decided(self, choice: Choice, wanted: Choice, priced: Priced) -> None:
        self.choice, self._priced = choice, priced
        self._rounds, self._unlooked = self._rounds + 1, self._unlooked + 1
        if wanted.lookup:
            self._looked, self._unlooked = self._looked + 1, 0

    def rest(self, sequences: int) -> float:
        """Returns how many plain rounds the text may still lose."""
        prices = self.auto.prices
        fed = prices.costs.feed(1) if sequences > 1 else self.fed
        return self.ledger.rest(prices, sequences, self.auto.hidden, fed)

    def missed(self) -> float:
        """Returns the chance that a lookup is worth it in the next round: as often as so far, which starts from a
        tenth that is worth two rounds, and the less the longer none was."""
        return min(1 / (self._unlooked + 2), (self._looked + 0.2) / (self._rounds + 2))

    def draft(self, anchor: int, limits: Limits) -> Draft:
        if not self._proposed:
            self.propose(anchor, limits)
        if self in self.auto.offered:
            self.auto.decide()
        self._proposed = False
        return self._made(anchor)

    def _made(self, anchor: int) -> Draft:
        choice = self.choice
        if not choice.candidates:
            return NOTHING
        chain = self.found[0][: choice.lookup]
        if choice.drafter is None:
            return Draft(tuple(chain), sources=("lookup",) * len(chain))
        budget = choice.drafts + choice.leaves if choice.leaves else None
        return self.drafters[choice.drafter].draft(anchor, choice.drafts, budget, chain)

    def follows(self) -> Draft | None:
        return self.next

    def learn(self, done: Round) -> None:
        auto, priced, choice, came = self.auto, self._priced, self.choice, len(done.tokens)
        self.choice, self._priced = PLAIN, None
        if not priced:  # The last round of a text has no use for drafts, so none was decided.
            self.ledger.tokens += came
            self.estimates.came(done.tokens, self.parts)
            return
        if self.ledger.tokens:  # The first round of a text follows its prompt, whatever the others do.
            auto.hidden = done.ahead or done.behind
        device, sequences, drafted, turned, was_hidden, by = work = priced.work
        hidden, prices, ledger, seconds = auto.hidden, auto.prices, self.ledger, done.seconds
        turns = (hidden and not done.ahead) + priced.read
        if turns != turned or hidden is not was_hidden:
            work = Work(device, sequences, drafted, turns, hidden, by)
        observed, plain = priced.observed, not drafted and not turns
        booked = seconds is not None and observed and not prices.paced and not plain
        price = prices.seconds(work) if booked else 0.0  # Before it learns of this round.
        if seconds is not None and not priced.learned and observed is drafted:
            prices.learn(work, seconds)
            priced.learned = True
        ledger.tokens += came
        if plain:
            pass  # It is a round of plain decoding: that it varies is no loss of drafts.
        elif seconds is not None and booked:
            # What is beyond twice the price is a machine that stood still, and no draft's fault.
            ledger.book(sequences, hidden, min(seconds, 2 * price), 0, came)
        elif drafted:
            ledger.book(sequences, hidden, prices.steps(device, sequences, hidden, by), turns, came)
        else:
            ledger.book(sequences, hidden, 0.0, turns, 0)
        if sequences > 1 and (over := -self.rest(sequences)) > 0:
            ledger.paid -= over
            auto.debt += over
        self.unfed = 0 if drafted or sequences > 1 else min(self.unfed + 1, self.most_unfed)
        self.estimates.came(done.tokens, self.parts)
        self.estimates.fade()
        if choice.drafter is not None and done.drafted:
            drafter = self.drafters[choice.drafter]
            self.estimates.drafted(drafter, *drafter.shown(done, choice.drafts))
