"""Has what auto learns of texts: how many drafts of a head are right, how many tokens of a lookup, and how
much of a text is of a part of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, repeat
from operator import mul

from luce.speculate.company import Company
from luce.speculate.drafting import Drafter

NEXT_BEST = 8  # So many ranks of a draft's candidates are learned.
FORGET = 0.97  # What was learned of lookups keeps this weight with each trial, and with each text.
KNOWN = 8.0  # At the start of a text, earlier ones are worth at most so many trials (bench/auto_by_costs.py).


class Acceptance:
    """This is what is learned of one drafter. At each depth it is the share of right drafts among those that
    follow right ones. Of wrong drafts it is how often each next best candidate is right instead, which is
    much the same at all depths (it is so of the model in the box), so that all of them count together."""

    HOPE = 0.95  # It is the chance at the first depth before any trial: who does not hope does not try.
    HOPE_WEIGHT = 2.0  # The hope is worth so many trials.
    NEXT_WEIGHT = 8.0  # The share of a depth is worth so many trials at the next one, since they are alike.
    # A next best candidate is taken to be right so often where those before it are not, before any trial, and
    # that is worth so many trials.
    BEST_HOPE, BEST_WEIGHT = 0.4, 1.0
    FORGET = 0.975  # A trial keeps this weight with each round, and with each text, so that about 40 count.
    FADE = 0.985  # A trial keeps this weight in a round that has none, so that a text that changed is tried.

    def __init__(self, depths: int, ranks: int = 1, known: Acceptance | None = None):
        """Starts from what is `known`, which learns along."""
        self.ranks, self._known = ranks, known
        # One of the trials and hits counts so much, so that all fade at once; one of the wrong drafts too.
        self._weight = self._wrong_weight = 1.0
        self._trials, self._hits = [0.0] * depths, [0.0] * depths
        # The first one counts the wrong drafts whose candidates were seen, and the others those of which the
        # candidate of that rank was right.
        self._wrong = [0.0] * ranks
        if known:
            known._weight *= self.FORGET
            known._wrong_weight *= self.FORGET
            known._settle()
            parts = [min(1.0, KNOWN / trials) if trials else 0.0 for trials in known._trials]
            self._trials = [part * trials for part, trials in zip(parts, known._trials, strict=True)]
            self._hits = [part * hits for part, hits in zip(parts, known._hits, strict=True)]
            seen = known._wrong[0]
            self._wrong = [min(1.0, KNOWN / seen) * x for x in known._wrong] if seen else self._wrong

    def skip(self) -> None:
        """Learns from a round without drafts, which shows nothing."""
        self._weight *= self.FADE
        self._wrong_weight *= self.FADE

    def _settle(self) -> None:
        """Counts all by what it weighs, so that each trial counts 1 again."""
        weight, wrong, self._weight, self._wrong_weight = self._weight, self._wrong_weight, 1.0, 1.0
        self._trials = [weight * x for x in self._trials]
        self._hits = [weight * x for x in self._hits]
        self._wrong = [wrong * x for x in self._wrong]

    def add(self, drafted: int, right: int, rank: int | None = None) -> None:
        """Learns from a round: each depth up to the first wrong draft is one trial. `rank` is that of the
        target's own token among the candidates there, or `ranks` where it is none of them. None means that
        this is not known."""
        if not drafted:
            return self.skip()
        self._weight *= self.FORGET
        self._wrong_weight *= self.FADE if rank is None else self.FORGET
        self._count(drafted, right, rank)
        if self._known:
            self._known._count(drafted, right, rank)

    def _count(self, drafted: int, right: int, rank: int | None) -> None:
        if min(self._weight, self._wrong_weight) < 1e-3:  # So what is divided by it stays small.
            self._settle()
        one = 1 / self._weight
        for depth in range(min(right + 1, drafted)):
            self._trials[depth] += one
        for depth in range(min(right, drafted)):
            self._hits[depth] += one
        if rank is not None:
            one = 1 / self._wrong_weight
            self._wrong[0] += one
            if 0 < rank < len(self._wrong):
                self._wrong[rank] += one

    def shares(self, n: int) -> Iterator[float]:
        """Yields the share of right drafts at each depth 1 .. n."""
        weight, share, hope = self._weight, self.HOPE, self.HOPE_WEIGHT
        for hits, trials in zip(self._hits[:n], self._trials, strict=False):
            share = (hits * weight + hope * share) / (trials * weight + hope)
            hope = self.NEXT_WEIGHT
            yield share

    def leaves(self, n: int, covered: float = 1.0) -> list[float]:
        """Returns the chances of the next best candidates beside a chain of n drafts, best first, where the
        share `covered` of the tokens can be drafted."""
        weight, worth, rest = self._wrong_weight, self.BEST_WEIGHT, 1.0
        all_wrong, chances = self._wrong[0] * weight + worth, list[float]()
        for right in self._wrong[1:]:
            chances.append((right * weight + worth * rest * self.BEST_HOPE) / all_wrong)
            rest *= 1 - self.BEST_HOPE
        found, before = list[float](), covered
        for share in self.shares(n):
            found += [before * (1 - share) * chance for chance in chances]
            before *= covered * share
        found.sort(reverse=True)
        return found


class Coverage:
    """This is what is learned of a part of the vocabulary: the share of a text's tokens that are of it."""

    HOPE, HOPE_WEIGHT = 0.95, 4.0  # It is the share before any token, and worth so many of them.
    KEEP = 0.995  # A token keeps this weight with each that comes after it, so that about 200 count.

    def __init__(self, part: int, known: Coverage | None = None):
        """Starts from what is `known`, which learns along."""
        self._part, self._known = part, known
        self._hits = self._trials = 0.0
        if known and known._trials:
            self._trials = min(known._trials, KNOWN)
            self._hits = known._hits * self._trials / known._trials

    def came(self, tokens: Sequence[int]) -> None:
        """Learns from the tokens that the target has chosen since."""
        for token in tokens:
            self._hits = self.KEEP * self._hits + (token < self._part)
            self._trials = self.KEEP * self._trials + 1
        if self._known:
            self._known.came(tokens)

    @property
    def share(self) -> float:
        hope = self.HOPE_WEIGHT
        return (self._hits + hope * self.HOPE) / (self._trials + hope)


class Among:
    """This is what is learned of a head that drafts among a part of the vocabulary: a draft is right where
    the head is right and the token is of the part."""

    def __init__(self, head: Acceptance, coverage: Coverage):
        self.ranks, self._head, self._coverage = head.ranks, head, coverage

    def shares(self, n: int) -> Iterator[float]:
        """Yields the share of right drafts at each depth 1 .. n."""
        covered = self._coverage.share
        return (covered * share for share in self._head.shares(n))

    def leaves(self, n: int) -> list[float]:
        """Returns the chances of the next best candidates beside a chain of n drafts, best first."""
        return self._head.leaves(n, self._coverage.share)


Learned = Acceptance | Among


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
    less. `company` are those that decode together now."""

    def __init__(self) -> None:
        self._heads: dict[str, Acceptance] = {}
        self._parts: dict[int, Coverage] = {}
        self._lookups = Lookups()
        self.company = Company()

    def head(self, drafter: Drafter) -> Acceptance:
        """Returns what a text that begins expects of what drafts."""
        ranks = min(drafter.ranks, NEXT_BEST)
        known = self._heads.setdefault(drafter.head, Acceptance(drafter.most, ranks))
        return Acceptance(drafter.most, ranks, known)

    def coverage(self, part: int) -> Coverage:
        """Returns what share of a text that begins is expected to be of a part of the vocabulary."""
        return Coverage(part, self._parts.setdefault(part, Coverage(part)))

    def lookups(self) -> Lookups:
        """Returns what a text that begins expects of lookups."""
        return Lookups(self._lookups)
