"""Estimates of what may be accepted: decayed counts of how often each kind of guess was right.

Every estimate is one of Counts. Its share starts from a prior, which is worth a few trials, and forgets slowly, so
that a text that changes is followed. A text's counts start from what earlier texts of the engine have shown.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import accumulate, repeat
from operator import mul

from luce.speculate.drafting import Drafter

FADE = 0.975  # A trial keeps this weight with each round, so that about 1 / (1 - FADE) = 40 rounds count.
# Before any trial a guess is taken to be right so often: who does not hope does not try. Being worth two
# trials, two misses in a row halve it.
HOPE, HOPE_WEIGHT = 0.95, 2.0
# What is alike is worth so many trials: the depth above, earlier texts, and other drafters of the same text. It is
# the value whose worst class is best where each class of recorded texts is held out in turn (bench/auto_by_costs.py
# --alike).
ALIKE = 8.0
RANK_HOPE = 0.4  # Where better candidates are wrong, the next one is right so often before any trial.
RANKS = 8  # Of a draft's candidates so many are counted; later ones are hardly ever right.
LENGTHS = 5  # Classes of matched lengths: 4 to 7 tokens, 8 to 15, and so on.


class Counts:
    """Decayed hits among decayed trials, at each of `n` places: depths, ranks, or lengths. They start from `known`,
    which learns along and is worth ALIKE trials at most."""

    __slots__ = ("faded", "hits", "known", "trials")

    def __init__(self, n: int, known: Counts | None = None):
        self.hits, self.trials, self.known = [0.0] * n, [0.0] * n, known
        self.faded = 0  # They have forgotten so many rounds.
        if known:
            parts = [min(1.0, ALIKE / trials) if trials else 0.0 for trials in known.trials]
            self.hits = list(map(mul, parts, known.hits))
            self.trials = list(map(mul, parts, known.trials))

    def fade(self, rounds: int = 1) -> None:
        """Forgets so many rounds' worth."""
        kept = FADE**rounds
        self.hits = [kept * hits for hits in self.hits]
        self.trials = [kept * trials for trials in self.trials]

    def add(self, at: int, hit: float, kept: float = 1.0) -> None:
        """Adds a trial at a place, of whose earlier ones this part is kept."""
        self.hits[at] = kept * self.hits[at] + hit
        self.trials[at] = kept * self.trials[at] + 1
        if known := self.known:
            known.hits[at] += hit
            known.trials[at] += 1

    def add_run(self, right: int, trials: int) -> None:
        """Adds trials at the first places, one each: so many are hits, and the first miss is the last trial."""
        for counts in (self, self.known) if self.known else (self,):
            hits, tried = counts.hits, counts.trials
            for at in range(min(right, trials)):
                hits[at] += 1
                tried[at] += 1
            if right < trials:
                tried[right] += 1

    def share(self, at: int, prior: float, worth: float) -> float:
        """Returns the share of hits at a place, where `prior` is worth so many trials."""
        return (self.hits[at] + worth * prior) / (self.trials[at] + worth)


class Estimates:
    """Counts of one text by what they count, or those of an engine, which are `known` to its texts."""

    def __init__(self, known: Estimates | None = None):
        self._known, self._rounds = known, 0
        self._counts = dict[Hashable, Counts]()
        self._followed: Sequence[int] = ()  # The lookup's tokens that are compared with what comes.
        self._at, self._class = 0, 0
        for counts in known._counts.values() if known else ():
            counts.fade()

    def of(self, what: Hashable, n: int = 1) -> Counts:
        """Returns the counts of something, at n places. They begin when they are asked for."""
        found = self._counts.get(what)
        if found is None:
            known = None if self._known is None else self._known.of(what, n)
            found = self._counts[what] = Counts(n, known)
        return found

    def _by_round(self, what: Hashable, n: int) -> Counts:
        """Returns counts of a drafter, which forget with each round, whether or not it drafted."""
        found = self._counts.get(what) or self.of(what, n)
        if found.faded < self._rounds:
            found.fade(self._rounds - found.faded)
            found.faded = self._rounds
        return found

    # ---- drafters

    def chain(self, drafter: Drafter, n: int, others: Iterable[Drafter] = ()) -> list[float]:
        """Returns the chances that the first 1, 2 .. n drafts are all right. Drafts among a part of the
        vocabulary are right where the head is and the token is of the part. As long as the drafter has few trials,
        those of `others` stand for its own: a text that one foresees the others mostly foresee too."""
        counts, covered = self._by_round(drafter.head, drafter.most), self._covered(drafter)
        share, worth, alike, chance = HOPE, HOPE_WEIGHT, ALIKE, 1.0
        missing = alike - counts.trials[0]
        for other in others if missing > 0 else ():
            if other.head != drafter.head and (first := self._by_round(other.head, other.most)).trials[0]:
                part = min(1.0, missing / first.trials[0])
                more = part * first.trials[0]
                share = (part * first.hits[0] + worth * share) / (more + worth)
                worth, missing = worth + more, missing - more
        chances: list[float] = []
        for hits, trials in zip(counts.hits[:n], counts.trials):  # noqa: B905 (strict costs as much as a place does)
            share = (hits + worth * share) / (trials + worth)
            worth = alike
            chance *= covered * share
            chances.append(chance)
        return chances

    def leaves(self, drafter: Drafter, chances: Sequence[float]) -> list[float]:
        """Returns the chances of the next best candidates beside a chain with these chances, best first: it is
        wrong there for the first time, and the candidate of that rank is right. Ranks count together for all
        depths, which are alike."""
        ranks, covered = self._ranks(drafter), self._covered(drafter)
        wrong = [above * covered - chance for above, chance in zip((1.0, *chances), chances, strict=False)]
        return sorted((miss * right for miss in wrong for right in ranks), reverse=True)

    def grown(self, drafter: Drafter, chances: Sequence[float], most: int) -> list[tuple[float, int]]:
        """Returns (chance, depth) of the nodes of a tree of at most so many, in the order in which it is grown from
        lists that are conditional on the candidate above: best first, a node before what follows it and before the next
        rank beside it. `chances` are the first choices'. Behind any right candidate the next list is as good: that is
        what lists are conditional for."""
        ranks = self._ranks(drafter)
        shares: list[list[float]] = []
        above = 1.0
        for chance in chances:
            first = chance / above if above else 0.0
            shares.append([first, *((1 - first) * rank for rank in ranks)])
            above = chance
        found: list[tuple[float, int]] = []
        left = [(-shares[0][0], 0, 0, 1.0)] if shares else []  # Minus the chance, depth, rank, the parent's chance.
        while left and len(found) < most:
            minus, depth, rank, parent = heappop(left)
            found.append((-minus, depth + 1))
            if rank + 1 < len(shares[depth]):
                heappush(left, (-parent * shares[depth][rank + 1], depth, rank + 1, parent))
            if depth + 1 < len(shares):
                heappush(left, (minus * shares[depth + 1][0], depth + 1, 0, -minus))
        return found

    def _ranks(self, drafter: Drafter) -> list[float]:
        """Returns how often the second, third .. candidate is right where the better ones are wrong."""
        counts = self._by_round((drafter.head, "rank"), RANKS)
        rest = 1.0
        ranks: list[float] = []
        for rank in range(1, min(drafter.ranks, RANKS)):
            ranks.append(counts.share(rank, rest * RANK_HOPE, 1.0))
            rest *= 1 - RANK_HOPE
        return ranks

    def _covered(self, drafter: Drafter) -> float:
        return self.of(("part", drafter.part)).share(0, HOPE, HOPE_WEIGHT) if drafter.part else 1.0

    def drafted(self, drafter: Drafter, trials: int, right: int, rank: int | None) -> None:
        """Learns from a round: each depth up to the first wrong draft is one trial. `rank` is that of the
        target's own token among the candidates there, and None where they were not read."""
        self._by_round(drafter.head, drafter.most).add_run(right, trials)
        if rank is not None:
            counts = self._by_round((drafter.head, "rank"), RANKS)
            for at in range(1, min(drafter.ranks, RANKS)):
                counts.add(at, at == rank)

    def fade(self) -> None:
        """Forgets a round's worth of what is known of drafters: a text that may have changed is tried again."""
        self._rounds += 1

    # ---- lookups

    def lookup(self, n: int, matched: int) -> list[float]:
        """Returns the chances that the first 1, 2 .. n tokens are all right. A length of match starts from
        what all lengths show together."""
        if not n:
            return []
        shares: list[float] = []
        for kind in ("first", "later"):
            counts = self.of(kind, LENGTHS)
            prior = (sum(counts.hits) + HOPE_WEIGHT * HOPE) / (sum(counts.trials) + HOPE_WEIGHT)
            shares.append(counts.share(_class_of(matched), prior, HOPE_WEIGHT))
        return list(accumulate(repeat(shares[1], n - 1), mul, initial=shares[0]))

    def follow(self, tokens: Sequence[int], matched: int) -> None:
        """Begins to compare a lookup with what comes, whether or not it is verified, unless another one is
        still right."""
        if not self._followed and tokens:
            self._followed, self._at, self._class = tokens, 0, _class_of(matched)

    def came(self, tokens: Sequence[int], parts: Iterable[int] = ()) -> None:
        """Learns from the tokens that the target has chosen since. `parts` of the vocabulary are drafted
        among."""
        for part in parts:
            counts = self.of(("part", part))
            counts.fade()
            for token in tokens:
                counts.add(0, token < part)
        followed = self._followed
        for token in tokens if followed else ():
            right = followed[self._at] == token
            self.of("later" if self._at else "first", LENGTHS).add(self._class, right, FADE)
            self._at += 1
            if not right or self._at == len(followed):
                self._followed = ()
                return


def _class_of(matched: int) -> int:
    return min(max(matched.bit_length() - 3, 0), LENGTHS - 1)
