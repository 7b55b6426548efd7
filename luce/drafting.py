"""Draft sources: what may follow the anchor. They only propose: no token depends on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from luce._native import Lists, Source
from luce.costs import Costs


@dataclass(frozen=True)
class Draft:
    """Candidates after an anchor. `tokens` are known to the host, with the parents of [anchor, *tokens]
    (parents[0] = -1; None: a chain). Of `on_device` tokens only the number is known: `by` drafts them on the
    device, and the host reads them once they are verified. grow: makes of them, once they are drafted, the
    draft that is verified in their stead. sources: who proposed each candidate, names joined with "+"; none:
    the draft's one source."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    on_device: int = 0
    by: Source = Source.NEXTN
    grow: Callable[[], Draft] | None = field(default=None, compare=False)
    sources: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The number of candidates."""
        return self.on_device or len(self.tokens)

    @property
    def depths(self) -> list[int]:
        """The depth of each candidate: 1 for a child of the anchor, 2 for a child of that one."""
        if self.parents is None:
            return list(range(1, self.size + 1))
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths[1:]


@dataclass(frozen=True)
class Round:
    """One round that is done: how many candidates it had, how many of them were accepted, the seconds of its
    calls, and the tokens that it gave, the new anchor among them. Sequences that were in one step each count
    all of its time."""

    drafted: int
    accepted: int
    draft_s: float
    verify_s: float
    commit_s: float
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Limits:
    """What the candidates of a round are bound to. rows: their number, and depth: how deep they may go, both
    at least 1; sequences: how many share the step, this one counted."""

    rows: int
    depth: int
    sequences: int = 1


class DraftSource(Protocol):
    """Proposes what may follow the anchor of one sequence. One that raises is dropped, and the generation
    goes on plain."""

    name: str

    def begin(self, budget: int) -> None:
        """A generation of at most `budget` tokens begins."""

    def draft(self, anchor: int, limits: Limits) -> Draft:
        """Candidates for the next round, or none."""

    def learn(self, done: Round) -> None:
        """How a round went, also one without candidates."""


class Text(Protocol):
    """A sequence, as draft sources see it (_native.Sequence)."""

    def lookup(self, anchor: int, most: int) -> tuple[list[int], int]: ...
    def lists(self, depth: int, k: int, comb: bool = True) -> Lists: ...
    def tree(
        self, anchor: int, lists: Lists, budget: int, chain: Sequence[int] = ()
    ) -> tuple[list[int], list[int], list[int]]: ...


class TextLookup:
    """What followed earlier in the text, as many tokens as asked, in every round that finds such a place."""

    name = "lookup"

    def __init__(self, text: Text, budget: int):
        self._text, self._budget = text, budget

    def begin(self, budget: int) -> None:
        pass

    def draft(self, anchor: int, limits: Limits) -> Draft:
        tokens, _ = self._text.lookup(anchor, min(self._budget, limits.rows, limits.depth))
        return Draft(tuple(tokens))

    def learn(self, done: Round) -> None:
        pass


class Drafter:
    """A drafter of the model: its NextN head, which chains at most `most` drafts, or a DFlash drafter, whose
    block has as many. ranks: candidates that the engine keeps of each draft; with more than one, trees can be
    made of them."""

    def __init__(self, text: Text, by: Source, most: int, ranks: int = 1):
        self.name = "mtp" if by is Source.NEXTN else "dflash"
        self.most, self.ranks = most, ranks
        self._text, self._by = text, by
        self._lists: Lists | None = None  # of the last draft, where the host has seen it

    def seconds(self, costs: Costs, n: int, sequences: int) -> float:
        """What n >= 1 drafts cost for each of so many sequences: a chain costs by its length, a block does
        not."""
        return n * costs.draft(sequences) if self._by is Source.NEXTN else costs.block(sequences)

    def draft(self, anchor: int, n: int, budget: int | None = None, chain: Sequence[int] = ()) -> Draft:
        """n drafts, one after the other, or where there is a budget the tree of so many candidates to that
        depth; joined with a chain that the host knows."""
        self._lists = None
        drafted = Draft(on_device=n, by=self._by, sources=(self.name,) * n)
        if budget is None and not chain:
            return drafted
        return replace(drafted, grow=lambda: self._grow(anchor, n, budget, chain))

    def _grow(self, anchor: int, n: int, budget: int | None, chain: Sequence[int]) -> Draft:
        k, size = (1, n) if budget is None else (min(self.ranks, budget), budget)
        self._lists = self._text.lists(n, k, self._by is Source.NEXTN)
        tokens, parents, bits = self._text.tree(anchor, self._lists, size, chain)
        names = ("", self.name, "lookup", f"{self.name}+lookup")
        return Draft(tuple(tokens[1:]), tuple(parents), sources=tuple(names[bit] for bit in bits[1:]))

    def right(self, done: Round, n: int) -> tuple[int, int | None]:
        """Of the last n drafts, verified in a round, how many were right before the first wrong one, and the
        rank of the target's own token there (None: it is not known, or not a candidate)."""
        if self._lists is None:
            return min(done.accepted, n), None
        for depth, token in enumerate(done.tokens[:n]):
            candidates = self._lists.at(depth)
            if token != candidates[0]:
                return depth, candidates.index(token) if token in candidates else None
        return min(len(done.tokens), n), None


class Fixed:
    """As many drafts of one drafter as asked, in every round that can still use them; with a budget, a tree
    of so many candidates."""

    def __init__(self, drafter: Drafter, drafts: int, budget: int | None = None):
        self.name = drafter.name
        self._drafter, self._drafts, self._budget = drafter, drafts, budget

    def begin(self, budget: int) -> None:
        pass

    def draft(self, anchor: int, limits: Limits) -> Draft:
        if self._budget is None:
            return self._drafter.draft(anchor, min(self._drafts, limits.rows, limits.depth))
        return self._drafter.draft(anchor, min(self._drafts, limits.depth), min(self._budget, limits.rows))

    def learn(self, done: Round) -> None:
        pass
