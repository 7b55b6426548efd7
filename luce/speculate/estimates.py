"""Estimates of what may be accepted: decayed counts of how often each kind of guess was right.

Every estimate is a Count. Its share starts from a prior, which is worth a few trials, and forgets slowly, so
that a text that changes is followed. A text's counts start from what earlier texts of the engine have shown.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate, repeat
from operator import mul

from luce.speculate.drafting import Drafter

FADE = 0.975  # A trial keeps this weight with each round, so that about 1 / (1 - FADE) = 40 rounds count.
# Before any trial a guess is taken to be right so often: who does not hope does not try. Being worth two
# trials, two misses in a row halve it.
HOPE, HOPE_WEIGHT = 0.95, 2.0
# What is alike is worth so many trials: the depth above, and earlier texts. It is the value whose worst class
# is best where each class of recorded texts is held out in turn (bench/auto_by_costs.py --alike).
ALIKE = 8.0
RANK_HOPE = 0.4  # Where better candidates are wrong, the next one is right so often before any trial.
RANKS = 8  # Of a draft's candidates so many are counted; later ones are hardly ever right.
LENGTHS = 5  # Classes of matched lengths: 4 to 7 tokens, 8 to 15, and so on.


class Count:
    """Decayed hits among decayed trials. It starts from `known`, which learns along and is worth ALIKE trials
    at most."""

    __slots__ = ("faded", "hits", "known", "trials")

    def __init__(self, known: Count | None = None):
        self.hits = self.trials = 0.0
        self.faded = 0  # It has forgotten so many rounds.
        self.known = known
        if known and known.trials:
            part = min(1.0, ALIKE / known.trials)
            self.hits, self.trials = part * known.hits, part * known.trials

    def fade(self, kept: float = FADE) -> None:
        self.hits *= kept
        self.trials *= kept

    def add(self, hit: float) -> None:
        self.hits += hit
        self.trials += 1
        if self.known:
            self.known.hits += hit
            self.known.trials += 1

    def share(self, prior: float, worth: float) -> float:
        """Returns the share of hits where `prior` is worth so many trials."""
        return (self.hits + worth * prior) / (self.trials + worth)


class Estimates(dict[Hashable, Count]):
    """Counts of one text by what they count, or those of an engine, which are `known` to its texts. A count
    begins when it is asked for."""

    def __init__(self, known: Estimates | None = None):
        super().__init__()
        self._known, self._rounds = known, 0
        self._followed: Sequence[int] = ()  # The lookup's tokens that are compared with what comes.
        self._at, self._class = 0, 0
        for count in known.values() if known else ():
            count.fade()

    def __missing__(self, key: Hashable) -> Count:
        made = self[key] = Count(None if self._known is None else self._known[key])
        return made

    # ---- drafters

    def chain(self, drafter: Drafter, n: int) -> list[float]:
        """Returns the chances that the first 1, 2 .. n drafts are all right. Drafts among a part of the
        vocabulary are right where the head is and the token is of the part."""
        covered = self._covered(drafter)
        share, worth, chance, chances = HOPE, HOPE_WEIGHT, 1.0, list[float]()
        for depth in range(n):
            share, worth = self._of_head(drafter.head, depth).share(share, worth), ALIKE
            chance *= covered * share
            chances.append(chance)
        return chances

    def leaves(self, drafter: Drafter, chances: Sequence[float]) -> list[float]:
        """Returns the chances of the next best candidates beside a chain with these chances, best first: it is
        wrong there for the first time, and the candidate of that rank is right. Ranks count together for all
        depths, which are alike."""
        rest, ranks = 1.0, list[float]()
        for rank in range(1, min(drafter.ranks, RANKS)):
            ranks.append(self._of_head(drafter.head, "rank", rank).share(rest * RANK_HOPE, 1.0))
            rest *= 1 - RANK_HOPE
        covered = self._covered(drafter)
        wrong = [above * covered - chance for above, chance in zip((1.0, *chances), chances, strict=False)]
        return sorted((miss * right for miss in wrong for right in ranks), reverse=True)

    def _covered(self, drafter: Drafter) -> float:
        return self["part", drafter.part].share(HOPE, HOPE_WEIGHT) if drafter.part else 1.0

    def drafted(self, drafter: Drafter, trials: int, right: int, rank: int | None) -> None:
        """Learns from a round: each depth up to the first wrong draft is one trial. `rank` is that of the
        target's own token among the candidates there, and None where they were not read."""
        for depth in range(min(right + 1, trials)):
            self._of_head(drafter.head, depth).add(depth < right)
        if rank is not None:
            for at in range(1, min(drafter.ranks, RANKS)):
                self._of_head(drafter.head, "rank", at).add(at == rank)

    def fade(self) -> None:
        """Forgets a round's worth of what is known of drafters, whether or not they drafted in it: a text that
        may have changed is tried again. A count does so once it is asked for."""
        self._rounds += 1

    def _of_head(self, *key: Hashable) -> Count:
        count, rounds = self[key], self._rounds
        if count.faded < rounds:
            count.fade(FADE ** (rounds - count.faded))
            count.faded = rounds
        return count

    # ---- lookups

    def lookup(self, n: int, matched: int) -> list[float]:
        """Returns the chances that the first 1, 2 .. n tokens are all right. A length of match starts from
        what all lengths show together."""
        if not n:
            return []
        of, shares = _class_of(matched), list[float]()
        for kind in ("first", "later"):
            counts = [self["lookup", kind, each] for each in range(LENGTHS)]
            hits, trials = sum(count.hits for count in counts), sum(count.trials for count in counts)
            prior = (hits + HOPE_WEIGHT * HOPE) / (trials + HOPE_WEIGHT)
            shares.append(counts[of].share(prior, HOPE_WEIGHT))
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
            self["part", part].fade()
            for token in tokens:
                self["part", part].add(token < part)
        for token in tokens:
            if not self._followed:
                return
            right = self._followed[self._at] == token
            count = self["lookup", "later" if self._at else "first", self._class]
            count.fade()
            count.add(right)
            self._at += 1
            if not right or self._at == len(self._followed):
                self._followed = ()


def _class_of(matched: int) -> int:
    return min(max(matched.bit_length() - 3, 0), LENGTHS - 1)
