"""Estimates of what may be accepted: decayed counts of how often each kind of guess was right.

Every estimate is one of Counts. Its share starts from a prior, which is worth a few trials, and forgets slowly, so
that a text that changes is followed. A text's counts start from what earlier texts of the engine have shown.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import accumulate, repeat
from operator import mul

from luce.planning.plan import AUTO_BUDGET
from luce.speculate.drafting import Drafter
from luce.speculate.prices import WINDOW

# A trial keeps this weight with each round, so that about 1 / (1 - FADE) = 40 rounds count. Over the recorded texts by
# counted costs, where the host takes 0.03 of a step, the worst class has 0.95 of the best fixed way; with 20 or 100
# rounds 0.86.
FADE = 0.975
# Before any trial a guess is taken to be right so often: who does not hope does not try. Being worth two
# trials, two misses in a row halve it. With three the worst class has 0.66, with one a CPU's texts lose 5%.
HOPE, HOPE_WEIGHT = 0.95, 2.0
# What is alike is worth as many trials as it takes of rounds to change what is believed of them, which is half of the
# window: the depth above, earlier texts, and other drafters of the same text. Over the recorded texts 8 and 16 gain the
# most, and the worst class has 0.99 with 8 and 0.96 with 16 of what it has with 1 (bench/auto_by_costs.py --alike).
ALIKE = (WINDOW + 1) / 2
# Classes of matched lengths: 4 to 7 tokens, 8 to 15, 16 to 31, and what is longer than any draft.
LENGTHS = AUTO_BUDGET.bit_length() - 1


class Counts:
    """Decayed hits among decayed trials, at each of `n` places: depths, ranks, or lengths. They start from `known`,
    which learns along and is worth ALIKE trials at most."""

    __slots__ = ("faded", "hits", "known", "trials")

    def __init__(self, n: int, rounds: int = 0, known: Counts | None = None):
        self.hits, self.trials, self.known = [0.0] * n, [0.0] * n, known
        self.faded = rounds  # They have forgotten what there was to forget until this round.
        if known:
            parts = [min(1.0, ALIKE / trials) if trials else 0.0 for trials in known.trials]
            self.hits = list(map(mul, parts, known.hits))
            self.trials = list(map(mul, parts, known.trials))

    def fade(self, rounds: int) -> None:
        """Forgets what there is to forget until so many rounds."""
        kept = FADE ** (rounds - self.faded)
        self.faded = rounds
        self.hits = [kept * hits for hits in self.hits]
        self.trials = [kept * trials for trials in self.trials]

    def add(self, at: int, hits: float, trials: int = 1) -> None:
        """Adds trials at a place."""
        for counts in (self, self.known) if self.known else (self,):
            counts.hits[at] += hits
            counts.trials[at] += trials

    def add_run(self, right: int, trials: int) -> None:
        """Adds trials at the first places, one each: so many are hits, and the first miss is the last trial."""
        for at in range(min(right + 1, trials)):
            self.add(at, at < right)

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
        if known:
            known.fade()

    def of(self, what: Hashable, n: int = 1) -> Counts:
        """Returns the counts of something, at n places. They begin when they are asked for, and forget with each
        round, whether or not it was tried: a text that may have changed is tried again."""
        found = self._counts.get(what)
        if found is None:
            found = self._counts[what] = Counts(n, self._rounds, self._known.of(what, n) if self._known else None)
        elif found.faded < self._rounds:
            found.fade(self._rounds)
        return found

    # ---- drafters

    def chain(self, drafter: Drafter, n: int, others: Iterable[Drafter] = ()) -> list[float]:
        """Returns the chances that the first 1, 2 .. n drafts are all right. Drafts among a part of the
        vocabulary are right where the head is and the token is of the part. As long as the drafter has few trials,
        those of `others` stand for its own where the head differs: what one foresees the others mostly foresee too."""
        counts, covered = self.of(drafter.head, drafter.most), self._covered(drafter)
        share, worth, alike, chance = HOPE, HOPE_WEIGHT, ALIKE, 1.0
        missing = alike - counts.trials[0]
        for other in others if missing > 0 else ():
            if other.head != drafter.head and (first := self.of(other.head, other.most)).trials[0]:
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

    def tree(self, drafter: Drafter, chances: Sequence[float], most: int) -> list[tuple[float, int]]:
        """Returns (chance, depth) of the nodes of a tree of at most so many, in the order in which it is grown: best
        first, a node before what follows it and before the next rank beside it. `chances` are the first choices'.
        Ranks count together for all depths, which are alike. Behind any right candidate of conditional lists the next
        list is as good: that is what they are conditional for. Of other lists only first choices go on."""
        ranks, covered = self._ranks(drafter), self._covered(drafter)
        shares: list[list[float]] = []
        above = 1.0
        for chance in chances:
            first = chance / above if above else 0.0
            shares.append([first, *((covered - first) * rank for rank in ranks)])
            above = chance
        found: list[tuple[float, int]] = []
        left = [(-shares[0][0], 0, 0, 1.0)] if shares else []  # Minus the chance, depth, rank, the parent's chance.
        while left and len(found) < most:
            minus, depth, rank, parent = heappop(left)
            found.append((-minus, depth + 1))
            if rank + 1 < len(shares[depth]):
                heappush(left, (-parent * shares[depth][rank + 1], depth, rank + 1, parent))
            if depth + 1 < len(shares) and (drafter.conditional or not rank):
                heappush(left, (minus * shares[depth + 1][0], depth + 1, 0, -minus))
        return found

    def _ranks(self, drafter: Drafter) -> list[float]:
        """Returns how often the second, third .. candidate is right where the first is wrong. Before any trial each is
        taken to be right as often as not where the better ones are wrong, which one trial outvotes."""
        counts = self.of((drafter.head, "rank"), drafter.ranks)
        return [counts.share(rank, 0.5**rank, 0.5) for rank in range(1, drafter.ranks)]

    def worth(self, drafter: Drafter) -> float:
        """Returns what part of what was expected of trees they gave, at most all of it. A drafter grows them by
        probabilities of its own, which may not be the chances that its candidates have."""
        return min(self.of((drafter.head, "tree")).share(0, 1.0, WINDOW), 1.0)

    def grew(self, drafter: Drafter, right: int, nodes: Sequence[tuple[float, int]]) -> None:
        """Learns from a tree of these nodes, of which so many were right."""
        self.of((drafter.head, "tree")).add(0, right / sum([chance for chance, _ in nodes]))

    def _covered(self, drafter: Drafter) -> float:
        return self.of(("part", drafter.part)).share(0, HOPE, HOPE_WEIGHT) if drafter.part else 1.0

    def drafted(self, drafter: Drafter, trials: int, right: int, rank: int | None) -> None:
        """Learns from a round: each depth up to the first wrong draft is one trial. `rank` is that of the
        target's own token among the candidates there, and None where they were not read."""
        self.of(drafter.head, drafter.most).add_run(right, trials)
        if rank is not None:
            counts = self.of((drafter.head, "rank"), drafter.ranks)
            for at in range(1, drafter.ranks):
                counts.add(at, at == rank)

    def fade(self) -> None:
        """Says that a round is over."""
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
            self.of(("part", part)).add(0, sum(token < part for token in tokens), len(tokens))
        followed = self._followed
        for token in tokens if followed else ():
            right = followed[self._at] == token
            self.of("later" if self._at else "first", LENGTHS).add(self._class, right)
            self._at += 1
            if not right or self._at == len(followed):
                self._followed = ()
                return


def _class_of(matched: int) -> int:
    return min(max(matched.bit_length() - 3, 0), LENGTHS - 1)
