"""Draft sources: what may follow the anchor. They only propose: no token depends on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Draft:
    """Candidates after an anchor. `tokens` are known to the host, with the parents of [anchor, *tokens]
    (parents[0] = -1; None: a chain). Of `on_device` tokens only the number is known: the NextN head, or with
    `block` the DFlash drafter, makes a chain of them on the device, and the host reads them once they are
    verified."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    on_device: int = 0
    block: bool = False

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
    """One round that is done: how many candidates it had, how many of them were accepted, and the seconds of
    its calls. Sequences that were in one step each count all of its time."""

    drafted: int
    accepted: int
    draft_s: float
    verify_s: float
    commit_s: float


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


class Pace(Protocol):
    """Decides how many tokens a chain drafts."""

    def begin(self, budget: int) -> None:
        """A generation of at most `budget` tokens begins."""

    def gamma(self, limit: int, sequences: int) -> int:
        """Drafts of the next round, 0..limit, in a step with so many sequences."""

    def learn(self, done: Round) -> None:
        """How a round went."""


class NextN:
    """Chains of the model's NextN head, as long as `pace` says."""

    name = "mtp"

    def __init__(self, pace: Pace):
        self._pace = pace

    def begin(self, budget: int) -> None:
        self._pace.begin(budget)

    def draft(self, anchor: int, limits: Limits) -> Draft:
        return Draft(on_device=self._pace.gamma(min(limits.rows, limits.depth), limits.sequences))

    def learn(self, done: Round) -> None:
        self._pace.learn(done)


class Block:
    """A block of the DFlash drafter a round, of which at most `budget` tokens are verified."""

    name = "dflash"

    def __init__(self, budget: int):
        self._budget = budget

    def begin(self, budget: int) -> None:
        pass

    def draft(self, anchor: int, limits: Limits) -> Draft:
        return Draft(on_device=min(self._budget, limits.rows, limits.depth), block=True)

    def learn(self, done: Round) -> None:
        pass


class Text(Protocol):
    """A sequence's committed tokens (_native.Sequence)."""

    def lookup(self, anchor: int, most: int) -> tuple[list[int], int]: ...


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


class FixedGamma:
    """As many drafts as asked, in every round that can still use them."""

    def __init__(self, gamma: int):
        self._gamma = gamma

    def begin(self, budget: int) -> None:
        pass

    def gamma(self, limit: int, sequences: int) -> int:
        return min(self._gamma, limit)

    def learn(self, done: Round) -> None:
        pass
