"""Drafts with all sources that an engine has, as they pay: the formula of choose.py, applied to the texts that
decode together now."""

from __future__ import annotations

from collections.abc import Sequence

from luce.speculate.candidates import PLAIN, Candidate, Choice, Family, Offer, Steps
from luce.speculate.choose import MARGIN, Search, Terms, chains_of
from luce.speculate.drafting import NOTHING, Draft, Drafter, Limits, Round, Text
from luce.speculate.estimates import Estimates
from luce.speculate.ledger import BET, HORIZON, Ledger
from luce.speculate.prices import Costs, Prices, Work


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
        self.unseen: Work | None = None  # What the last round took was not learned yet.
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
        prices, hidden, limits, drafters = self.prices, self.hidden, texts[0].limits, texts[0].drafters
        n = limits.sequences
        steps, (scale, floor, turn) = self.steps(drafters, n), prices.terms(n, hidden)
        scales = prices.scales(hidden, len(drafters))
        stake, feed = self._stake(texts, n) * floor, self._feed(texts, 0)
        terms = Terms(scale, floor, turn, int(hidden), feed, stake, scales)
        chained, best, rate = list[Family](), None, 0.0
        if stake > 0:
            offers = [text.offer() for text in texts]
            chained = chains_of(offers, steps)
            search = Search(steps, terms, MARGIN * n / terms.plain)
            if best := search.tries_all(offers, chained):
                rate = search.top
        wanted = best.choices if best else [PLAIN] * len(texts)
        now = wanted if limits.begun is None else [text.of_begun() for text in texts]
        device = steps.of(now)  # A tree of few rows may be less deep than its family.
        drafted, grown = any([choice.candidates for choice in now]), any([choice.leaves for choice in now])
        by = next((choice.drafter for choice in now if choice.drafter is not None), None) if scales else None
        work = Work(device + feed if drafted else device, n, drafted, int(grown), hidden, by)
        first, waits = self._next(texts, terms, chained, rate, work) if hidden and floor else (None, not hidden)
        # A plain round beside one that drafts is later than others: a wait begins one of the two.
        clear = drafted or not (self.drafted or (first and not waits))
        self.unseen, self.drafted = work if clear else None, drafted
        nexts = first.choices if first else [PLAIN] * len(texts)
        for text, choice, want, following in zip(texts, now, wanted, nexts, strict=True):
            text.choice, text.work = choice, work
            text.unlooked = 0 if want.lookup else text.unlooked + 1
            text.following, text.waits = following, waits

    def _next(
        self, texts: list[Source], terms: Terms, chained: list[Family], rate: float, work: Work
    ) -> tuple[Candidate | None, bool]:
        """Returns the best of the chains with which the next round may be begun, and whether more is expected of
        waiting. `work` is that of this round, and `rate` that of the best drafts for it, which may not be those
        that it was begun with; 0 where none pays."""
        n, floor = work.sequences, terms.floor
        # The next one is begun before this one is booked, which may lose all that it has more than a plain one.
        stake = terms.stake - BET * max(self.prices.seconds(work) - floor, 0.0)
        first, gain = None, n / floor
        if chained and stake > 0:
            feed = 0.0 if work.drafted else self._feed(texts, 1)
            following = terms._replace(turns=0, feed=feed, stake=stake)
            search = Search(self._steps[n], following, MARGIN * n / floor)
            if first := search.tries_each(chained):
                gain = search.top
        # To wait in vain is a loss too, and so is the wait of a text's last round.
        waits = 2 * terms.turn <= stake
        if waits and rate <= gain:
            missed = sum([text.missed() for text in texts]) / len(texts)
            waits = terms.turn <= missed * floor
        # What a plain round takes is seen where one follows another at once.
        return first, waits and bool(first or rate or self.prices.seen(n, work.hidden))

    def _feed(self, texts: list[Source], more: int) -> float:
        """Returns the seconds that the head is fed in a round that drafts and would not be in a plain one, after so
        many `more` plain rounds. Those that texts share feed it all in either."""
        return self.prices.costs.feed(texts[0].unfed + more) if len(texts) == 1 else 0.0

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
        self.parts = sorted({drafter.part for drafter in drafters if drafter.part})
        self._trees = dict[int, list[tuple[float, int]]]()  # By drafter, of the last offer.
        # Plain steps of one sequence leave many rows to one feed, and those of several feed the head each.
        self.most_unfed = auto.budget + 1
        self.fed = auto.prices.costs.feed(self.most_unfed) / self.most_unfed
        self.begin(HORIZON)

    def begin(self, budget: int) -> None:
        """Begins a text of at most `budget` tokens."""
        self.ledger = Ledger(budget)
        self.unfed = 0  # The head has not read the rows of so many plain rounds.
        self.limits = Limits(budget, budget)
        self.choice = self.following = PLAIN  # Of this round, and of what the next one may be begun with,
        self.waits = False  # unless the tokens of this one decide it.
        self.found: tuple[list[int], int] = [], 0  # Of the last lookup: tokens, and how many matched.
        self.work: Work | None = None
        self.unlooked = 0  # So many rounds had no lookup that was worth it.

    def propose(self, anchor: int, limits: Limits) -> None:
        """Offers what the text could verify in the round that comes."""
        self.limits = limits
        self.found = self._text.lookup(anchor, min(limits.candidates, limits.depth, self.auto.budget))
        if self.found[0]:
            self.estimates.follow(*self.found)
        self.auto.offered.append(self)

    def offer(self) -> Offer:
        (tokens, matched), estimates, limits = self.found, self.estimates, self.limits
        most = min(limits.candidates, self.auto.budget)
        depth = min(most, limits.depth)
        chains = [estimates.chain(each, min(each.most, depth), self.drafters) for each in self.drafters]

        def tree(by: int, depth: int) -> Sequence[tuple[float, int]]:
            nodes = self._trees[by] = estimates.tree(self.drafters[by], chains[by][:depth], most)
            worth = estimates.worth(self.drafters[by])
            return [(worth * chance, at) for chance, at in nodes]

        return Offer(most, estimates.lookup(len(tokens), matched), chains, tree)

    def of_begun(self) -> Choice:
        """Returns the choice by which the round was begun."""
        return self.following if self.limits.begun and self.limits.begun.size else PLAIN

    def rest(self, sequences: int) -> float:
        """Returns how many plain rounds the text may still lose."""
        prices, hidden = self.auto.prices, self.auto.hidden
        plain, fed = prices.plain(sequences, hidden), prices.costs.feed(1) if sequences > 1 else self.fed
        rest = self.ledger.rest(fed / plain if plain else 0.0)
        if not prices.seen(sequences, hidden):
            rest -= BET * self.ledger.allowed(0.0)
        return rest

    def missed(self) -> float:
        """Returns how many plain rounds the next one loses on average if it is begun before its lookup is known. After
        n rounds without one that was worth it, the next has one with 1 / (n + 2), by the rule of succession. Found a
        round late it loses half a plain round, and nothing where drafts are as good, which is half of the cases."""
        return 0.25 / (self.unlooked + 2)

    def draft(self, anchor: int, limits: Limits) -> Draft:
        if self in self.auto.offered:
            self.auto.decide()
        choice = self.choice
        if not choice.candidates:
            return NOTHING
        if choice.drafter is None:
            return Draft(tuple(self.found[0][: choice.lookup]), source="lookup")
        return self.drafters[choice.drafter].draft(anchor, choice.drafts, choice.leaves and choice.candidates)

    def follows(self) -> Draft | None:
        if self.waits:
            return None
        by = self.following.drafter
        return NOTHING if by is None else self.drafters[by].chains[self.following.drafts]

    def learn(self, done: Round) -> None:
        auto, work, choice, came = self.auto, self.work, self.choice, len(done.tokens)
        self.choice, self.work = PLAIN, None
        self.estimates.came(done.tokens, self.parts)
        if work:  # The last round of a text has no use for drafts, so none was decided.
            self.estimates.fade()
            if self.ledger.tokens:  # The first round of a text follows its prompt, whatever the others do.
                auto.hidden = done.ahead or done.behind
            n, waited = work.sequences, auto.hidden and not done.ahead
            took = work._replace(turns=work.turns + waited, hidden=auto.hidden)
            if done.seconds is not None and auto.unseen is work:
                auto.prices.learn(took, done.seconds)
                auto.unseen = None
            self.ledger.book(took, came, auto.prices)
            if n > 1 and (over := -self.rest(n)) > 0:
                self.ledger.paid -= over
                auto.debt += over
            self.unfed = 0 if work.drafted or n > 1 else min(self.unfed + 1, self.most_unfed)
            if choice.drafter is not None and done.drafted:
                drafter = self.drafters[choice.drafter]
                self.estimates.drafted(drafter, *drafter.shown(done, choice.drafts))
                if choice.leaves:
                    self.estimates.grew(drafter, done.accepted, self._trees[choice.drafter][: choice.candidates])
        self.ledger.tokens += came
