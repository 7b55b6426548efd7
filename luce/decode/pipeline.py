"""Rounds that are in flight: the one place from which the core drafts and verifies.

At most two are. The first one is on the device, or runs when it is waited for where the device is the host. The
second one was begun before the first one has landed, so that the device need not wait for the host:

  plain  device  V1 |V2 |V3         host  land 1, enqueue 3, emit 1, land 2, ..
  chain  device  D V1 |D V2         host  next(2), ..., land 1, emit 1, choose, next(3), ..
  tree   device  D |....|V |....    host  draft, lists, grow, enqueue, land, emit

Without candidates the second round is on the device at once. A chain of the model's own drafter is begun by the
wait for the first round, as soon as that has ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from luce import native as _native
from luce.errors import ArgumentError, Cancelled, ContextFull, OutOfMemory, StateError
from luce.native import CHOSEN, Drafts, Engine, Prompt, Rows, Verified
from luce.speculate.drafting import NOTHING, Draft
from luce.speculate.prices import MAX_ROWS

# A call that did nothing raises one of these. Without the drafts that it was asked for, it may be asked
# again.
NOTHING_DONE = (ArgumentError, ContextFull, StateError, OutOfMemory)

T = TypeVar("T", Drafts, Rows)
Outcomes = dict[_native.Sequence, "Landed | Read | Exception"]


class Decision(NamedTuple):
    """What is decided about a round and the one after it: the candidates of this one, and what the next one is
    begun with before the tokens of this one are known: NOTHING, or a chain that is drafted on the device. None
    means that the tokens decide it. Where not `ahead`, no next round may be begun, whatever is drafted."""

    now: Draft = NOTHING
    next: Draft | None = NOTHING
    ahead: bool = True


class Landed(NamedTuple):
    """What a round gave one sequence: the `tokens` of its rows (n,), of which -1 is a draft whose logits were not
    finite, and the target's `choices` after each of them (n,).

    The next round has `begun` with a draft, and has committed the accepted rows of this one. Where that is None
    it has not, and it is `behind` where it would have if none that decode had drafts. `seconds` were spent in this
    round's calls, and `period` counts from the landing of the round before it; None where something else came
    between them."""

    tokens: Sequence[int] = ()
    choices: Sequence[int] = ()
    begun: Draft | None = None
    behind: bool = False
    seconds: float = 0.0
    period: float | None = None


class Read(NamedTuple):
    """What reading a chunk of a prompt gave: the choice after the prompt's last token, or None where more follows."""

    choice: int | None = None


@dataclass
class _Round:
    """A round in flight. `live` are those of its sequences that were not dropped. `drafts` are what it was begun
    with, before the round ahead of it landed."""

    rows: list[Rows]
    live: set[_native.Sequence]
    drafts: list[Draft] | None = None
    is_begun: bool = False
    seconds: float = 0.0
    error: Exception | None = None  # It could not be begun.
    next_waits: bool = False  # The next one is behind: what it drafts is not known yet.


class Pipeline:
    """The rounds of one engine. `clock` gives seconds."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter):
        self._engine, self._clock = engine, clock
        self._rounds = deque[_Round]()
        self._last: tuple[float, list[_native.Sequence]] = 0.0, []  # When the last round landed, and whose it was.
        self.read_since = 0.0  # The last pass over prompts began then.

    @property
    def pending(self) -> bool:
        """Says whether a round is in flight."""
        return bool(self._rounds)

    def read(self, items: Sequence[Prompt], wait: bool = True) -> Outcomes:
        """Reads chunks of several prompts in one pass. Without `wait` it may still be under way on a GPU, and
        the next one follows it closely. Where one of them alone is to blame for an error, the others are
        read one after the other; those that a cancel then keeps from being read are not in what it returns. Raises
        Cancelled where nothing was done."""
        self._last = 0.0, []  # It comes between two rounds.
        try:
            if wait:  # Else it is not known what this pass takes.
                self._engine.finish_prompts()
            self.read_since = self._clock()
            found: Sequence[int | None | Exception] = self._engine.prefill(items)
            if wait:
                self._engine.finish_prompts()
        except Cancelled:
            raise
        except Exception as error:
            if isinstance(error, NOTHING_DONE) and len(items) > 1:
                return self._read_apart(items)
            found = [error] * len(items)
        return {
            item.sequence: choice if isinstance(choice, Exception) else Read(choice)
            for item, choice in zip(items, found, strict=True)
        }

    def draft(self, items: Sequence[Drafts]) -> Outcomes:
        """Drafts on the device for the round that is enqueued next. Returns the seconds or the error of each
        sequence. Raises Cancelled where nothing was done."""
        began = self._clock()
        results, done = self._together(items, self._drafted), Landed(seconds=self._clock() - began)
        return {item.sequence: result or done for item, result in zip(items, results, strict=True)}

    def enqueue(self, rows: Sequence[Rows]) -> None:
        """Begins a round of these rows, where none is in flight. What it raises, land() tells. Raises Cancelled
        where nothing was done."""
        assert not self._rounds
        if not rows:
            return
        began, new = self._clock(), _Round(list(rows), {item.sequence for item in rows})
        if self._engine.ahead:
            try:
                self._engine.begin(new.rows)
                new.is_begun = True
            except Cancelled:
                raise
            except Exception as error:
                if not isinstance(error, NOTHING_DONE) or len(rows) == 1:  # Else one of them may be to blame.
                    new.error = error
        new.seconds = self._clock() - began
        self._rounds.append(new)

    def next(self, decisions: Mapping[_native.Sequence, Decision]) -> None:
        """Begins the round after the one that is in flight, if all who decide take part in that one, and know
        beforehand what they draft. The round in flight commits what it accepts then."""
        if len(self._rounds) != 1 or not self._rounds[0].is_begun:
            return
        ahead = self._rounds[0]
        all_decide = list(decisions) == [row.sequence for row in ahead.rows]
        if not all_decide or not all(each.ahead for each in decisions.values()):
            return
        drafts = [each.next for each in decisions.values() if each.next is not None]
        sources = {draft.by for draft in drafts if draft.size}
        if len(drafts) < len(decisions) or len(sources) > 1 or sum(draft.size + 1 for draft in drafts) > MAX_ROWS:
            ahead.next_waits = True
            return
        began = self._clock()
        pairs = zip(decisions, drafts, strict=True)
        rows = [Rows(one, n=draft.size + 1, anchor=CHOSEN, source=draft.by) for one, draft in pairs]
        new = _Round(rows, set(decisions), drafts, is_begun=True)
        try:
            self._engine.begin(rows)
        except (Cancelled, *NOTHING_DONE):
            return  # It is begun once this one has landed.
        except Exception as error:  # What it committed before it failed is booked.
            new.error, new.drafts = error, [NOTHING] * len(drafts)
        new.seconds = self._clock() - began
        self._rounds.append(new)

    def land(self) -> Outcomes:
        """Waits for the first round in flight, and returns what it gave each sequence that was not dropped.
        Raises Cancelled where nothing was done, and the round is no more."""
        if not self._rounds:
            return {}
        landing, began = self._rounds.popleft(), self._clock()
        results, now = self._results(landing), self._clock()
        begun: Sequence[Draft | None] = [None] * len(results)
        if self._rounds and (self._rounds[0].error or self._engine.under_way):
            begun = self._rounds[0].drafts or begun
        elif self._rounds:  # The wait has not begun it.
            self._rounds.clear()
            landing.next_waits = True
        theirs = [row.sequence for row in landing.rows]
        (since, before), self._last = self._last, (now, theirs)
        more = landing.next_waits, landing.seconds + now - began, now - since if before == theirs else None
        return {
            sequence: result if isinstance(result, Exception) else Landed(result.tokens, result.choices, draft, *more)
            for sequence, result, draft in zip(theirs, results, begun, strict=True)
            if sequence in landing.live
        }

    def drop(self, sequence: _native.Sequence) -> None:
        """Forgets a sequence. Its rounds land for the others."""
        for each in self._rounds:
            each.live.discard(sequence)
        self._rounds = deque(each for each in self._rounds if each.live)

    def _read_apart(self, items: Sequence[Prompt]) -> Outcomes:
        read = Outcomes()
        for item in items:
            try:
                read |= self.read([item])
            except Cancelled:
                if not read:
                    raise
                break
        return read

    def _results(self, landing: _Round) -> Sequence[Verified | Exception]:
        if landing.error:
            return [landing.error] * len(landing.rows)
        if not landing.is_begun:
            return self._together(landing.rows, self._engine.verified)
        try:
            return self._engine.wait()
        except Exception as error:
            return [error] * len(landing.rows)

    def _drafted(self, items: Sequence[Drafts]) -> list[None]:
        for source in sorted({item.source for item in items}):
            self._engine.draft([item for item in items if item.source == source])
        return [None] * len(items)

    def _together(self, items: Sequence[T], call: Callable[[Sequence[T]], Iterable[Any]]) -> list[Any]:
        """Makes one call for several items. An error that one of them alone is to blame for is that one's alone.
        """
        try:
            return list(call(items))
        except Cancelled:
            raise
        except Exception as error:
            if isinstance(error, NOTHING_DONE) and len(items) > 1:
                return [found for item in items for found in self._together([item], call)]
            return [error] * len(items)
