"""Draft sources: what may follow the anchor. They only propose: no token depends on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Draft:
    """Candidates after an anchor: `tokens`, with the parents of [anchor, *tokens] (parents[0] = -1; None:
    a chain), or a chain of `on_device` tokens that the host reads once they are verified."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    on_device: int = 0

    @property
    def size(self) -> int:
        """Candidates."""
        return self.on_device or len(self.tokens)

    @property
    def depths(self) -> list[int]:
        """Of each candidate, 1 for a child of the anchor."""
        if self.parents is None:
            return list(range(1, self.size + 1))
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths[1:]


@dataclass(frozen=True)
class Round:
    """One round that is done: candidates, how many of them were accepted, and the seconds of its calls."""

    drafted: int
    accepted: int
    draft_s: float
    verify_s: float
    commit_s: float

    @property
    def seconds(self) -> float:
        return self.draft_s + self.verify_s + self.commit_s


class DraftSource(Protocol):
    """Proposes what may follow the anchor. One that raises is dropped, and the generation goes on plain."""

    name: str

    def begin(self, budget: int) -> None:
        """A generation of at most `budget` tokens begins."""

    def draft(self, anchor: int, rows: int, depth: int) -> Draft:
        """At most `rows` candidates, none deeper than `depth`; both are at least 1."""

    def drafted(self, n: int) -> list[int]:
        """The n tokens of the last draft, which was left on the device and is verified now."""

    def learn(self, done: Round) -> None:
        """How a round went, also one without candidates."""


class Drafter(Protocol):
    """What a NextN chain needs of a session (_native.Session)."""

    def draft(self, anchor: int, n: int) -> None: ...
    def drafted(self, n: int) -> list[int]: ...


class Pace(Protocol):
    """Decides how many tokens to draft. gamma(limit): 0..limit for the next round."""

    def begin(self, budget: int) -> None: ...
    def gamma(self, limit: int) -> int: ...
    def learn(self, done: Round) -> None: ...


class NextN:
    """Chains of the model's NextN head, as long as `pace` says."""

    name = "mtp"

    def __init__(self, core: Drafter, pace: Pace):
        self._core, self._pace = core, pace

    def begin(self, budget: int) -> None:
        self._pace.begin(budget)

    def draft(self, anchor: int, rows: int, depth: int) -> Draft:
        n = self._pace.gamma(min(rows, depth))
        if n:
            self._core.draft(anchor, n)
        return Draft(on_device=n)

    def drafted(self, n: int) -> list[int]:
        return self._core.drafted(n)

    def learn(self, done: Round) -> None:
        self._pace.learn(done)


class FixedGamma:
    """As many drafts as asked, in every round that can still use them."""

    def __init__(self, gamma: int):
        self._gamma = gamma

    def begin(self, budget: int) -> None:
        pass

    def gamma(self, limit: int) -> int:
        return min(self._gamma, limit)

    def learn(self, done: Round) -> None:
        pass
