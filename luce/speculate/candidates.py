"""Candidates of a round: what each of its texts could verify, and how many tokens that is expected to give.

A text offers nodes: tokens of its lookup, drafts of a chain, or a chain with next best candidates beside it (leaves).
Where a drafter's lists are conditional, what follows a next best candidate is as good as what follows the best, and a
tree has the best nodes of all paths. The chance that all of a node's path is right is what it adds to the round's
tokens, so a round of nodes is expected to give one token a text and the sum of their chances. A lookup and drafts are
not verified in one round: over the recorded traces that would bring 0.05%.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import add, itemgetter
from typing import NamedTuple

from luce.speculate.drafting import Drafter
from luce.speculate.prices import MAX_ROWS, Costs


class Choice(NamedTuple):
    """What a text verifies in a round: `lookup` tokens of its lookup, the first `drafts` of a drafter (its
    index; None for no drafter), and `leaves` of that drafter's next best candidates."""

    lookup: int = 0
    drafter: int | None = None
    drafts: int = 0
    leaves: int = 0

    @property
    def candidates(self) -> int:
        """Returns how many candidates the round verifies."""
        return self.lookup + self.drafts + self.leaves


PLAIN = Choice()


class Offer(NamedTuple):
    """What one text could verify: at most so many candidates. `lookup` and `chains` (by drafter) have the
    chances that their first 1, 2 .. tokens are all right. `tree` gives the (chance, depth) of the nodes of a tree of a
    drafter that is at most so deep."""

    most: int
    lookup: Sequence[float]
    chains: Sequence[Sequence[float]]
    tree: Callable[[int, int], Sequence[tuple[float, int]]] = lambda drafter, depth: ()


class Steps:
    """Seconds of the steps of rounds that so many sequences share, by the table of costs. Lists are by the rows
    of all candidates: 1, 2 .. as many as fit."""

    def __init__(self, costs: Costs, drafters: Sequence[Drafter], sequences: int):
        self.sequences, self.drafters, self.plain = sequences, drafters, costs.verify(sequences)
        self.verify = [costs.verify(rows) for rows in range(sequences + 1, MAX_ROWS + 1)]
        self.drafts = [[each.seconds(costs, n, sequences) for n in range(1, each.most + 1)] for each in drafters]
        # A single text's chain is as deep as it has rows.
        self.chains = [list(map(add, self.verify, drafts)) for drafts in self.drafts]
        self._deep = dict[tuple[int, int], list[float]]()
        # Those whose next best candidates are known, by their index.
        self.listed = [(by, each) for by, each in enumerate(drafters) if each.ranks > 1]

    def deep(self, drafter: int, depth: int) -> list[float]:
        """Returns the seconds where the deepest text has so many drafts."""
        found = self._deep.get((drafter, depth))
        if found is None:
            drafting = self.drafts[drafter][depth - 1]
            found = self._deep[drafter, depth] = [seconds + drafting for seconds in self.verify]
        return found

    def of(self, choices: Sequence[Choice]) -> float:
        """Returns the seconds of what texts verify: those that draft with one drafter draft together."""
        rows = 0
        deepest: dict[int, int] = {}
        for choice in choices:
            rows += choice.candidates
            if choice.drafter is not None:
                deepest[choice.drafter] = max(deepest.get(choice.drafter, 0), choice.drafts)
        drafting = sum(self.drafts[by][depth - 1] for by, depth in deepest.items())
        return (self.verify[rows - 1] if rows else self.plain) + drafting


class Family(NamedTuple):
    """Rounds that differ in their rows. `gains` are those of all texts' nodes, best first, none before those that it
    needs, and `seconds` those of the steps by rows. Texts draft at most `depth` with one drafter; 0 is as many as there
    are rows. `nodes` has the gains by text, in the order in which they are taken, and `depths` those of trees' nodes,
    which the host grows before they are verified."""

    gains: Sequence[float]
    seconds: Sequence[float]
    nodes: Sequence[Sequence[float]]
    drafter: int | None = None
    depth: int = 0
    depths: Sequence[Sequence[int]] = ()


class Candidate(NamedTuple):
    """A round that could be: it is expected to give so many tokens, and its steps take `device` seconds by the
    table of costs. It takes so many rows of nodes of its family."""

    tokens: float
    device: float
    rows: int
    family: Family

    @property
    def depth(self) -> int:
        """Returns how many drafts a text has at most."""
        return self.family.depth or self.rows

    @property
    def choices(self) -> list[Choice]:
        """Returns what each text verifies. A tree's nodes are as many drafts as it is deep; the others are leaves."""
        _, _, nodes, by, _, depths = self.family
        counts = [self.rows] if len(nodes) == 1 else [0] * len(nodes)
        for _, text in _best_first(nodes)[: self.rows] if len(nodes) > 1 else ():
            counts[text] += 1
        if by is None:
            return [Choice(n) for n in counts]
        deep = [max(of[:n], default=0) for n, of in zip(counts, depths, strict=True)] if depths else counts
        return [Choice(0, by if n else None, depth, n - depth) for n, depth in zip(counts, deep, strict=True)]


def _best_first(nodes: Sequence[Sequence[float]]) -> list[tuple[float, int]]:
    """Returns (gain, text) of all nodes, best first. A node that gains more than one which it needs counts as
    that one, so that it follows it."""
    keyed = [
        (-least, gain, text)
        for text, gains in enumerate(nodes)
        for least, gain in zip(accumulate(gains, min), gains, strict=True)
    ]
    keyed.sort(key=itemgetter(0))
    return [(gain, text) for _, gain, text in keyed]


def _gains(nodes: Sequence[Sequence[float]]) -> Sequence[float]:
    return nodes[0] if len(nodes) == 1 else [gain for gain, _ in _best_first(nodes)]


def lookups(offers: Sequence[Offer], steps: Steps) -> Family:
    """Returns the rounds of lookups."""
    nodes = [offer.lookup for offer in offers]
    return Family(_gains(nodes), steps.verify, nodes)


def chains(offers: Sequence[Offer], by: int, steps: Steps) -> list[Family]:
    """Returns the rounds of chains of a drafter: by how deep the deepest is where there are several texts, of
    which the others wait for it."""
    whole = [offer.chains[by] for offer in offers]
    if len(whole) == 1:
        return [Family(whole[0], steps.chains[by], whole, by)]
    found = list[Family]()
    for depth in range(1, max(map(len, whole)) + 1):
        nodes = [chain[:depth] for chain in whole]
        gains = sorted([gain for chain in nodes for gain in chain], reverse=True)
        found.append(Family(gains, steps.deep(by, depth), nodes, by, depth))
    return found


def trees(offers: Sequence[Offer], by: int, depth: int, steps: Steps) -> Family:
    """Returns the rounds of trees of a drafter that are at most so deep."""
    grown = [offer.tree(by, depth) for offer in offers]
    nodes = [[chance for chance, _ in tree] for tree in grown]
    depths = [[at for _, at in tree] for tree in grown]
    deepest = max(max(of, default=1) for of in depths)
    return Family(_gains(nodes), steps.deep(by, deepest), nodes, by, deepest, depths)
