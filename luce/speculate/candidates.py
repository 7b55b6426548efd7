"""Candidates of a round: what each of its texts could verify, and how many tokens that is expected to give.

A text offers nodes: tokens of its lookup, drafts of a chain, and next best candidates beside a chain (leaves).
The chance that all of a node's path is right is what it adds to the round's tokens, so a round of nodes is
expected to give one token a text and the sum of their chances. Where a lookup and a chain share a depth, either
may be right: what comes second adds its chance times that of the other being wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from operator import itemgetter
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
    chances that their first 1, 2 .. tokens are all right. `leaves` gives those beside a chain of a drafter."""

    most: int
    lookup: Sequence[float]
    chains: Sequence[Sequence[float]]
    leaves: Callable[[int, Sequence[float]], Sequence[float]] = lambda drafter, chances: ()


@dataclass(frozen=True)
class Family:
    """Rounds that cost the same but for their rows: each text drafts at most `depth` with one drafter. `nodes`
    has the gains of each text's nodes in the order in which they are taken, and `kinds` how many of them are
    lookup tokens, drafts and leaves, one kind after the other. `read` says that the host reads the drafts
    before they are verified, to grow what joins them."""

    drafter: int | None
    depth: int
    nodes: Sequence[Sequence[float]]
    kinds: Sequence[tuple[tuple[str, int], ...]]
    read: bool = False

    def taken(self) -> list[tuple[float, int]]:
        """Returns (gain, text) of all nodes, best first, none before those that it needs."""
        keyed = list[tuple[float, float, int]]()
        for text, gains in enumerate(self.nodes):
            least = inf
            for gain in gains:
                least = min(least, gain)
                keyed.append((-least, gain, text))
        keyed.sort(key=itemgetter(0))
        return [(gain, text) for _, gain, text in keyed]

    def choices(self, rows: int) -> list[Choice]:
        """Returns what each text verifies where the round has so many nodes of all."""
        counts = [rows]
        if len(self.nodes) > 1:
            counts = [0] * len(self.nodes)
            for _, text in self.taken()[:rows]:
                counts[text] += 1
        found = []
        for left, kinds in zip(counts, self.kinds, strict=True):
            sizes = {"lookup": 0, "drafts": 0, "leaves": 0}
            for kind, size in kinds:
                sizes[kind] = min(left, size)
                left -= sizes[kind]
            found.append(Choice(drafter=self.drafter if sizes["drafts"] else None, **sizes))
        return found


class Candidate(NamedTuple):
    """A round that could be: it is expected to give so many tokens, and its steps take `device` seconds by the
    table of costs. It takes so many rows of nodes of its family; None is the plain round."""

    tokens: float
    device: float
    rows: int = 0
    family: Family | None = None

    @property
    def read(self) -> bool:
        return self.family is not None and self.family.read


def spread(family: Family, drafters: Sequence[Drafter], costs: Costs, sequences: int) -> list[Candidate]:
    """Returns the rounds of a family by their rows, of texts that share a step of so many sequences."""
    drafting = drafters[family.drafter].seconds(costs, family.depth, sequences) if family.drafter is not None else 0.0
    tokens, found, least = float(sequences), list[Candidate](), family.depth
    gains = family.nodes[0] if len(family.nodes) == 1 else [gain for gain, _ in family.taken()]
    # Fewer rows than the drafts are deep are better had with fewer drafts.
    for rows, gain in enumerate(gains[: MAX_ROWS - sequences], start=1):
        tokens += gain
        if rows >= least:
            found.append(Candidate(tokens, costs.verify(sequences + rows) + drafting, rows, family))
    return found


def lookups(offers: Sequence[Offer]) -> Family:
    """Returns the rounds of lookups alone."""
    nodes = [offer.lookup[: offer.most] for offer in offers]
    return Family(None, 0, nodes, [(("lookup", len(gains)),) for gains in nodes])


def chains(offers: Sequence[Offer], drafter: int, depth: int) -> Family:
    """Returns the rounds of chains alone, of at most so many drafts each."""
    nodes = [offer.chains[drafter][: min(depth, offer.most)] for offer in offers]
    return Family(drafter, depth, nodes, [(("drafts", len(gains)),) for gains in nodes])


def joined(offers: Sequence[Offer], drafter: int, depth: int) -> Family:
    """Returns the rounds of chains joined with lookups, those first of which more is expected."""
    nodes, kinds = list[Sequence[float]](), list[tuple[tuple[str, int], ...]]()
    for offer in offers:
        chain, looked = offer.chains[drafter][:depth], offer.lookup
        if sum(looked[:depth]) > sum(chain):
            order, first, second = ("lookup", "drafts"), looked, chain
        else:
            order, first, second = ("drafts", "lookup"), chain, looked
        both = min(len(first), len(second))
        more = [second[at] * (1 - first[at]) for at in range(both)]
        gains = [*first, *more, *second[both:]]
        nodes.append(gains[: offer.most])
        kinds.append(tuple(zip(order, (len(first), len(second)), strict=True)))
    return Family(drafter, depth, nodes, kinds, read=True)


def trees(offers: Sequence[Offer], drafter: int, depth: int, looked: Sequence[int]) -> Family:
    """Returns the rounds of trees: chains, so many tokens of each text's lookup, and leaves beside the chains."""
    nodes, kinds = list[Sequence[float]](), list[tuple[tuple[str, int], ...]]()
    for offer, taken in zip(offers, looked, strict=True):
        chain = offer.chains[drafter][:depth]
        more = [
            chance * (1 - chain[at]) if at < len(chain) else chance
            for at, chance in enumerate(offer.lookup[:taken])
        ]
        leaves = offer.leaves(drafter, chain)
        nodes.append([*chain, *more, *leaves][: offer.most])
        kinds.append((("drafts", len(chain)), ("lookup", len(more)), ("leaves", len(leaves))))
    return Family(drafter, depth, nodes, kinds, read=True)
