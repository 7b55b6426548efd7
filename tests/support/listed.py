"""Replays texts whose drafter has lists of candidates, by counted costs: of a block drafter it is known at what rank
the right token is at each depth.

A text's true token at position i is i. Behind right tokens a depth's list has the right one first with
`chances[depth]`, else second, third .. in `ranks` of the cases; which it is, is drawn once for each anchor. Behind
wrong tokens all is wrong. The drafter's own probabilities, by which a tree is grown, are these chances, but for its
first choices, whose are `own` times that. Sampling leaves `kept` candidates of a list.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from luce.native import Form, Source
from luce.native.structs import Cost
from luce.planning.plan import AUTO_BUDGET
from luce.speculate.auto import Auto
from luce.speculate.drafting import Draft, Drafter, Limits, Round
from luce.speculate.prices import Costs

K = 16  # A list has so many candidates.


class Machine(NamedTuple):
    """Costs of steps in plain ones, and what the device waits where the host has to see tokens first."""

    costs: Costs
    turn: float


def machine(verify: str, block: float, turn: float, draft: float = 0.0) -> Machine:
    """Returns a machine by what a verify costs by its rows, "1:1 8:1.2", a block, a turn, and a NextN head's draft."""
    widths = {int(rows): float(cost) for rows, cost in (entry.split(":") for entry in verify.split())}
    drafts = [Cost(1, 1, draft)] if draft else []
    return Machine(Costs([*(Cost(rows, 0, cost) for rows, cost in widths.items()), Cost(1, 2, block), *drafts]), turn)


# The first is of oracle-27b-dflash2-*-h200 of 2026-11-29 and replay's table of that GPU. The second has cheaper rows.
MACHINES = {
    "27b on an H200": machine("1:1 2:1.03 4:1.05 8:1.07 9:1.25 13:1.29 16:1.32 20:1.46 24:1.49 32:1.58", 0.25, 0.04),
    "cheap rows": machine("1:1 2:1.02 8:1.06 16:1.12 32:1.3", 0.2, 0.03),
}


@dataclass
class Listed:
    """A text that is replayed, at the position of its anchor; draft sources take it for one."""

    chances: Sequence[float]
    ranks: Sequence[float]
    seed: int
    kept: int = K
    at: int = 0
    _drawn: dict[tuple[int, int], int] = field(default_factory=dict)
    own: float = 1.0

    def shares(self, depth: int, own: float = 1.0) -> list[float]:
        """Returns the chance of each rank of a depth, or the drafter's own probability."""
        first = own * self.chances[depth]
        return [first, *((1 - first) * share for share in self.ranks)]

    def rank(self, depth: int) -> int:
        """Returns the rank of the right token of a depth behind right ones; K is none."""
        if (self.at, depth) not in self._drawn:
            draw, found = random.Random(f"{self.seed} {self.at} {depth}").random(), K
            for rank, share in enumerate(self.shares(depth)):
                if draw < share:
                    found = rank
                    break
                draw -= share
            self._drawn[self.at, depth] = found
        return self._drawn[self.at, depth]

    def token(self, path: Sequence[int]) -> int:
        """Returns the token at the end of a path of ranks: wrong ones are below 0."""
        right = all(rank == self.rank(depth) for depth, rank in enumerate(path))
        return self.at + len(path) if right else -1 - sum(rank * K**depth for depth, rank in enumerate(path))

    def drafters(self) -> list[Drafter]:
        return [Drafter(self, Source.DFLASH, len(self.chances), K, form=Form.CONDITIONAL)]

    def right(self, draft: Draft) -> int:
        """Counts the right ones of a chain's drafts up to the first wrong one."""
        return next((depth for depth in range(draft.size) if self.rank(depth)), draft.size)

    def lookup(self, anchor: int, most: int) -> tuple[list[int], int]:
        return [], 0

    def lists(self, depth: int, k: int, form: Form = Form.CHAIN) -> Lists:
        return Lists(self, depth, k)

    def tree(self, anchor: int, lists: Lists, budget: int) -> tuple[list[int], list[int]]:
        """Grows a tree of so many candidates, best first, a node before the next rank beside it."""
        tokens, parents = [anchor], [-1]
        left: list[tuple[float, tuple[int, ...], int]] = [(-self.shares(0, self.own)[0], (0,), 0)]
        while left and len(tokens) <= budget:
            minus, path, parent = heappop(left)
            row, last, of = len(tokens), path[-1], self.shares(len(path) - 1, self.own)
            tokens.append(self.token(path))
            parents.append(parent)
            if last + 1 < min(len(of), lists.k, self.kept) and of[last]:
                heappush(left, (minus / of[last] * of[last + 1], (*path[:-1], last + 1), parent))
            if len(path) < lists.depth:
                heappush(left, (minus * self.shares(len(path), self.own)[0], (*path, 0), row))
        return tokens, parents


@dataclass
class Twice(Listed):
    """The same with a NextN head beside it, whose drafts are right by `chain`."""

    chain: Sequence[float] = ()

    def drafters(self) -> list[Drafter]:
        return [Drafter(self, Source.NEXTN, len(self.chain)), *super().drafters()]

    def right(self, draft: Draft) -> int:
        if draft.by is not Source.NEXTN:
            return super().right(draft)
        drawn = (random.Random(f"{self.seed} {self.at + depth} head {depth}").random() for depth in range(draft.size))
        return next((depth for depth, draw in enumerate(drawn) if draw >= self.chain[depth]), draft.size)


@dataclass
class Lists:
    """The lists of the last draft."""

    text: Listed
    depth: int
    k: int

    def at(self, depth: int) -> list[int]:
        """Returns the list behind the first choices."""
        return [self.text.token([*[0] * depth, rank]) for rank in range(min(self.k, self.text.kept))]


def accepted(draft: Draft, at: int) -> int:
    """Counts the right tokens of a grown draft behind the anchor at this position, which are on one path."""
    found, row, parents = 0, 0, draft.parents or range(-1, len(draft.tokens))
    for child, (parent, token) in enumerate(zip(parents[1:], draft.tokens, strict=True), start=1):
        if parent == row and token == at + found + 1:
            found, row = found + 1, child
    return found


@dataclass
class Spent:
    """What texts took: rounds, those of them that were trees, and seconds, for so many tokens."""

    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    trees: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


# It takes a drafter, an anchor and how many tokens are left.
Fixed = Callable[[Drafter, int, int], Draft]


def chain(n: int) -> Fixed:
    return lambda drafter, anchor, depth: drafter.draft(anchor, min(n, depth))


def tree(budget: int) -> Fixed:
    return lambda drafter, anchor, depth: drafter.draft(anchor, min(drafter.most, depth), budget)


def spend(text: Listed, n: int, on: Machine, way: Fixed | Auto, out: Spent) -> Spent:
    """Adds what n tokens of a text take, by a fixed way or by auto. A round whose lists are read waits a turn, and so
    does one that was not begun before the one ahead had ended, as fixed chains are."""
    drafters = text.drafters()
    source, begun = way.source(text, drafters) if isinstance(way, Auto) else None, None
    if source is not None:
        source.begin(n + 1)
    while text.at < n:
        depth, ahead = n - text.at, begun is not None
        if source is not None:
            source.propose(text.at, limits := Limits(AUTO_BUDGET, depth, begun=begun))
            draft = source.draft(text.at, limits)
            draft = draft if begun is None else begun
        else:
            draft = way(drafters[-1], text.at, depth)  # type: ignore[operator]
            ahead = draft.grow is None
        took = 0.0 if ahead else on.turn
        if draft.grow is not None:
            draft, took, out.trees = draft.grow(), took + on.turn, out.trees + 1
            right = accepted(draft, text.at)
        else:
            right = text.right(draft)
        took += on.costs.verify(1 + draft.size)
        if draft.size and draft.by is Source.NEXTN and draft.on_device:
            took += draft.size * on.costs.draft()
        elif draft.size:
            took += on.costs.block()
        came = tuple(range(text.at + 1, text.at + 2 + right))
        if source is not None:
            follows = source.follows()
            begun = follows if follows is not None and follows.size <= depth - draft.size - 2 else None
            source.learn(Round(draft.size, right, 0.0, 0.0, 0.0, came, ahead, not ahead, took))
        out.tokens, out.seconds, out.rounds = out.tokens + len(came), out.seconds + took, out.rounds + 1
        text.at += len(came)
    return out
