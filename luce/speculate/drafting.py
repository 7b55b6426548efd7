"""Draft sources propose what may follow the anchor. They only propose: no token depends on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from luce.native import Form, Lists, Source
from luce.speculate.prices import Costs


@dataclass(frozen=True)
class Draft:
    """These are the candidates after an anchor. Either the host knows them as `tokens`, or `by` drafts
    `on_device` many on the device, and the host reads them once they are verified.

    `parents` are those of [anchor, *tokens]: parents[0] is -1, and None means a chain. `grow`, where it is
    set, is called once the drafts are there and returns the draft that is verified in their stead. `source`
    names who proposed them; where it is empty, that is the one draft source.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    on_device: int = 0
    by: Source = Source.NEXTN
    grow: Callable[[], Draft] | None = field(default=None, compare=False)
    source: str = ""

    @property
    def size(self) -> int:
        """Returns the number of candidates."""
        return self.on_device or len(self.tokens)

    @property
    def depth(self) -> int:
        """Returns the depth of the deepest candidate, and 0 without candidates."""
        return self.size if self.parents is None else max(self.depths, default=0)

    @property
    def depths(self) -> list[int]:
        """Returns the depth of each candidate: 1 for a child of the anchor, 2 for a child of that one."""
        if self.parents is None:
            return list(range(1, self.size + 1))
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths[1:]


NOTHING = Draft()


class Round(NamedTuple):
    """This is one round that is done: how many candidates it had, how many of them were accepted, how many
    seconds each of its calls took, and which tokens it gave. The new anchor is the last of these tokens.
    Sequences that share a step each count all of its time. `ahead` says that it was begun before its anchor
    was told, and `behind` that it was not, and would have been if none that decode had drafts.
    `seconds` count from the end of the round before it; None where something else came between them."""

    drafted: int
    accepted: int
    draft_s: float
    verify_s: float
    commit_s: float
    tokens: tuple[int, ...] = ()
    ahead: bool = False
    behind: bool = False
    seconds: float | None = None


class Limits(NamedTuple):
    """This is what bounds a round of one sequence: how many `candidates` it may have, each of which is a row
    of the step beside the anchor's, and what `depth` they may go to, both at least 1. `sequences` is how many
    share the step, this one counted. `begun` is what the round was begun with, and None where it was not yet.
    """

    candidates: int
    depth: int
    sequences: int = 1
    begun: Draft | None = None


class DraftSource(Protocol):
    """Proposes what may follow the anchor of one sequence. A source that raises is dropped, and the
    generation goes on without drafts."""

    name: str

    def begin(self, budget: int) -> None:
        """Says that a generation of at most `budget` tokens begins."""

    def propose(self, anchor: int, limits: Limits) -> None:
        """Says that a round comes. All texts that share it are told so before one of them drafts."""

    def draft(self, anchor: int, limits: Limits) -> Draft:
        """Returns candidates for the next round, or none. A round that has begun leaves them out."""

    def follows(self) -> Draft | None:
        """Returns what the round after this one may be begun with before its anchor is known: NOTHING, or a
        chain that is drafted on the device. None means that the tokens of this one decide it. It comes after
        draft()."""

    def learn(self, done: Round) -> None:
        """Tells how a round went, also one that had no candidates."""


class Text(Protocol):
    """This is a sequence, as draft sources see it (luce.native.Sequence)."""

    def lookup(self, anchor: int, most: int) -> tuple[list[int], int]: ...
    def lists(self, depth: int, k: int, form: Form = Form.CHAIN) -> Lists: ...
    def tree(self, anchor: int, lists: Lists, budget: int) -> tuple[list[int], list[int]]: ...


class TextLookup:
    """Drafts what followed the same tokens earlier in the text. It drafts as many tokens as asked, in every
    round that finds such a place."""

    name = "lookup"

    def __init__(self, text: Text, budget: int):
        self._text, self._budget = text, budget

    def begin(self, budget: int) -> None:
        pass

    def propose(self, anchor: int, limits: Limits) -> None:
        pass

    def draft(self, anchor: int, limits: Limits) -> Draft:
        tokens, _ = self._text.lookup(anchor, min(self._budget, limits.candidates, limits.depth))
        return Draft(tuple(tokens))

    def follows(self) -> Draft | None:
        return None

    def learn(self, done: Round) -> None:
        pass


class Drafter:
    """Drafts with a part of the model that runs on the device: its NextN head, which chains at most `most`
    drafts, or a DFlash drafter, whose block has as many. `ranks` is how many candidates the engine keeps of
    each draft. Trees need more than one. `form` says what these are, `part` how many tokens Source.PART drafts
    among. `head` names what drafts: the NextN head is one, whatever it drafts among."""

    def __init__(
        self, text: Text, by: Source, most: int, ranks: int = 1, part: int = 0, form: Form = Form.CHAIN
    ):
        self.name = {Source.NEXTN: "mtp", Source.PART: "mtp-part", Source.DFLASH: "dflash"}[by]
        self.head = "mtp" if by is Source.PART else self.name
        self.most, self.ranks, self.part = most, ranks, part if by is Source.PART else 0
        self._text, self._by, self._form = text, by, form
        self._lists: Lists | None = None  # These are of the last draft, where the host has seen it.
        # These are by the number of drafts, and none is made twice.
        self.chains = [Draft(on_device=n, by=by, source=self.name) for n in range(most + 1)]

    @property
    def conditional(self) -> bool:
        """Says whether each candidate has a list of its own behind it."""
        return self._form is Form.CONDITIONAL and self.ranks > 1

    def seconds(self, costs: Costs, n: int, sequences: int) -> float:
        """Returns the seconds of n >= 1 drafts for each of so many sequences. A chain costs by its length; a
        block always costs the same."""
        if self._by is Source.DFLASH:
            return costs.block(sequences)
        return n * costs.draft(sequences, self._by is Source.PART)

    def draft(self, anchor: int, n: int, budget: int | None = None) -> Draft:
        """Returns n drafts, one after the other. With a budget it returns a tree of so many candidates, at
        most n deep."""
        self._lists = None
        return replace(self.chains[n], grow=lambda: self._grow(anchor, n, budget)) if budget else self.chains[n]

    def _grow(self, anchor: int, n: int, budget: int) -> Draft:
        self._lists = self._text.lists(n, self.ranks, self._form)
        tokens, parents = self._text.tree(anchor, self._lists, budget)
        return Draft(tuple(tokens[1:]), tuple(parents), source=self.name)

    def shown(self, done: Round, n: int) -> tuple[int, int, int | None]:
        """Returns how many of the last n drafts show what the head is worth, how many of these were right
        before the first wrong one, and at which rank of the candidates the target's own token stood there:
        `ranks` where it is none of them. The rank is None where the host has not read them.

        The head chooses the same among all tokens and among a part of them as long as its choice is of the
        part. So a draft among the part is as good as one among all, but for a token that is not of the part:
        there it was wrong whatever the head is worth, and shows nothing."""
        right, rank = self._right(done, n)
        if self.part and right < min(n, len(done.tokens)) and done.tokens[right] >= self.part:
            return right, right, None
        return n, right, rank

    def _right(self, done: Round, n: int) -> tuple[int, int | None]:
        if self._lists is None:
            return min(done.accepted, n), None
        for depth, token in enumerate(done.tokens[:n]):
            candidates = self._lists.at(depth)
            if not candidates or token != candidates[0]:
                # Where sampling leaves fewer candidates, the target's own is none of them either.
                return depth, candidates.index(token) if token in candidates else self.ranks
        return min(len(done.tokens), n), None


class Fixed:
    """Drafts as many tokens with one drafter as asked, in every round that can still use them. With a budget
    it drafts a tree of so many candidates."""

    def __init__(self, drafter: Drafter, drafts: int, budget: int | None = None):
        self.name = drafter.name
        self._drafter, self._drafts, self._budget = drafter, drafts, budget
        self._most = drafts  # The last round could have so many.

    def begin(self, budget: int) -> None:
        pass

    def propose(self, anchor: int, limits: Limits) -> None:
        pass

    def draft(self, anchor: int, limits: Limits) -> Draft:
        most, drafts = limits.candidates, min(self._drafts, limits.depth)
        self._most = min(most, self._drafts)
        if self._budget is None:
            return self._drafter.draft(anchor, min(drafts, most))
        return self._drafter.draft(anchor, drafts, min(self._budget, most))

    def follows(self) -> Draft | None:
        return self._drafter.chains[self._most] if self._budget is None else None

    def learn(self, done: Round) -> None:
        pass
