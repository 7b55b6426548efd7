"""Candidates of a round: what each of its texts could verify, and how many tokens that is expected to give.

A text offers nodes: tokens of its lookup, drafts of a chain, and next best candidates beside a chain (leaves). Where a
drafter's lists are conditional, what follows a next best candidate is as good as what follows the best, and a tree has
the best nodes of all paths.
The chance that all of a node's path is right is what it adds to the round's tokens, so a round of nodes is
expected to give one token a text and the sum of their chances. Where a lookup and a chain share a depth, either
may be right: what comes second adds its chance times that of the other being wrong.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf
from operator import add, itemgetter
from typing import Any, NamedTuple

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
DRAFTS = (("drafts", MAX_ROWS),)  # The kinds of a chain's nodes (Family).


class Offer(NamedTuple):
    """What one text could verify: at most so many candidates. `lookup` and `chains` (by drafter) have the
    chances that their first 1, 2 .. tokens are all right. `leaves` gives those beside a chain of a drafter, and
    `grown` the (chance, depth) of a tree's nodes where its lists are conditional."""

    most: int
    lookup: Sequence[float]
    chains: Sequence[Sequence[float]]
    leaves: Callable[[int, Sequence[float]], Sequence[float]] = lambda drafter, chances: ()
    grown: Callable[[int], Sequence[tuple[float, int]]] = lambda drafter: ()


class Steps:
    """Seconds of the steps of rounds that so many sequences share, by the table of costs. Lists are by the rows
    of all candidates: 1, 2 .. as many as fit."""

    def __init__(self, costs: Costs, drafters: Sequence[Drafter], sequences: int):
        self.sequences, self.drafters, self.plain = sequences, drafters, costs.verify(sequences)
        self.verify = [costs.verify(rows) for rows in range(sequences + 1, MAX_ROWS + 1)]
        self.drafts = [[each.seconds(costs, n, sequences) for n in range(1, each.most + 1)] for each in drafters]
        # A single text's chain is as deep as it has rows.
        self.chains = [list(map(add, self.verify, drafts)) for drafts in self.drafts]
        self._least = min((self.verify[0] + drafts[0] for drafts in self.drafts if drafts), default=inf)
        self._deep = dict[tuple[int, int], list[float]]()
        # Those whose next best candidates are known, by their index.
        self.listed = [(by, each) for by, each in enumerate(drafters) if each.ranks > 1]

    def least(self, lookup: bool) -> float:
        """Returns the seconds of the cheapest candidate: of a `lookup`, or of a drafter."""
        return self.verify[0] if lookup else self._least

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
    """Rounds that differ in their rows. `gains` are those of all texts' nodes, best first, none before those
    that it needs, and `seconds` those of the steps by rows, of which there are at least `least`. Texts draft at
    most `depth` with one drafter; 0 is as many as there are rows. `nodes` has the gains by text, in the order
    in which they are taken, and `kinds` how many of them are at most lookup tokens, drafts and leaves, one kind
    after the other. `read` says that the host reads the drafts before they are verified, to grow what joins
    them."""

    gains: Sequence[float]
    seconds: Sequence[float]
    nodes: Sequence[Sequence[float]]
    kinds: Sequence[Sequence[tuple[str, int]]]
    drafter: int | None = None
    depth: int = 0
    least: int = 1
    read: bool = False


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
        """Returns what each text verifies."""
        family, counts = self.family, [self.rows]
        if len(family.nodes) == 1 and family.kinds[0] is DRAFTS:
            return [Choice(0, family.drafter, self.rows, 0)]
        if len(family.nodes) > 1:
            counts = [0] * len(family.nodes)
            for _, text in _best_first(family.nodes)[: self.rows]:
                counts[text] += 1
        found = []
        for left, kinds in zip(counts, family.kinds, strict=True):
            sizes = {"lookup": 0, "drafts": 0, "leaves": 0}
            for kind, size in kinds:
                taken = min(left, size)
                sizes[kind] += taken
                left -= taken
            found.append(Choice(drafter=family.drafter if sizes["drafts"] else None, **sizes))
        return found


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
    """Returns the rounds of lookups alone."""
    nodes = [offer.lookup for offer in offers]
    return Family(_gains(nodes), steps.verify, nodes, [(("lookup", len(gains)),) for gains in nodes])


def chains(offers: Sequence[Offer], by: int, steps: Steps) -> list[Family]:
    """Returns the rounds of chains of a drafter alone: by how deep the deepest is where there are several texts,
    of which the others wait for it."""
    whole, kinds = [offer.chains[by] for offer in offers], [DRAFTS] * len(offers)
    if len(whole) == 1:
        return [Family(whole[0], steps.chains[by], whole, kinds, by)]
    found, taken = list[Family](), list[float]()  # What the drafts lose, the best first.
    for depth in range(1, max(map(len, whole)) + 1):
        deepest = [-chain[depth - 1] for chain in whole if len(chain) >= depth]
        least = bisect_left(taken, min(deepest)) + 1  # Fewer rows are had with fewer drafts.
        for loss in deepest:
            insort(taken, loss)
        gains, nodes = [-loss for loss in taken], [chain[:depth] for chain in whole]
        found.append(Family(gains, steps.deep(by, depth), nodes, kinds, by, depth, least))
    return found


def joined(offers: Sequence[Offer], by: int, depth: int, steps: Steps) -> Family:
    """Returns the rounds of chains joined with lookups, those first of which more is expected."""
    nodes: list[Sequence[float]] = []
    kinds: list[Sequence[tuple[str, int]]] = []
    for offer in offers:
        chain, looked = offer.chains[by][:depth], offer.lookup
        if sum(looked[:depth]) > sum(chain):
            order, first, second = ("lookup", "drafts"), looked, chain
        else:
            order, first, second = ("drafts", "lookup"), chain, looked
        nodes.append([*first, *_beside(second, first)][: offer.most])
        kinds.append(tuple(zip(order, (len(first), len(second)), strict=True)))
    return _read(nodes, kinds, by, depth, steps)


def trees(offers: Sequence[Offer], by: int, depth: int, looked: Sequence[int], steps: Steps) -> Family:
    """Returns the rounds of trees: chains, so many tokens of each text's lookup, and leaves beside the chains."""
    nodes: list[Sequence[float]] = []
    kinds: list[Sequence[tuple[str, int]]] = []
    for offer, taken in zip(offers, looked, strict=True):
        chain = offer.chains[by][:depth]
        more, leaves = _beside(offer.lookup[:taken], chain), offer.leaves(by, chain)
        nodes.append([*chain, *more, *leaves][: offer.most])
        kinds.append((("drafts", len(chain)), ("lookup", len(more)), ("leaves", len(leaves))))
    return _read(nodes, kinds, by, depth, steps)


def grown(offers: Sequence[Offer], by: int, looked: Sequence[int], steps: Steps) -> Family:
    """Returns the rounds of trees of conditional lists beside so many tokens of each text's lookup. A tree's nodes are
    taken best first, and are as many drafts as it is deep; the others are leaves."""
    nodes: list[Sequence[float]] = []
    kinds: list[Sequence[tuple[str, int]]] = []
    deepest = 0
    for offer, taken in zip(offers, looked, strict=True):
        beside, tree, depth = _beside(offer.lookup[:taken], offer.chains[by]), offer.grown(by), 0
        own = [("lookup", len(beside))]
        for _, at in tree:
            own.append(("drafts" if at > depth else "leaves", 1))
            depth = max(depth, at)
        nodes.append([*beside, *(chance for chance, _ in tree)][: offer.most])
        kinds.append(own)
        deepest = max(deepest, depth)
    return _read(nodes, kinds, by, deepest, steps)._replace(least=1)


def _read(nodes: Any, kinds: Any, by: int, depth: int, steps: Steps) -> Family:
    """Returns a family of drafts that the host reads. Fewer rows than they are deep are had with fewer drafts."""
    return Family(_gains(nodes), steps.deep(by, depth), nodes, kinds, by, depth, depth, read=True)


def _beside(second: Sequence[float], first: Sequence[float]) -> list[float]:
    """Returns what a chain of nodes adds to another one: where both have a node, the other's is wrong too."""
    both = min(len(first), len(second))
    return [*(of * (1 - other) for of, other in zip(second[:both], first, strict=False)), *second[both:]]
