"""The loop drives any number of generations in turn, with one step of the engine for all of them.

Its turns alternate. In one turn a generation that has not read its whole prompt reads a chunk of it. In the
next turn all the others have a round: the steps that draft, where there are any, and then one step that verifies
the rows of all of them. A single generation needs no other code.

Where the device works while the host does something else, a turn ends with the begin of the next round, and
text is made of the last one's tokens after that. Rounds follow each other even closer where it is known
beforehand what the next one drafts. Without candidates it is begun before the last one's tokens are known to
the host. A chain of the model's own drafter is begun by the wait for the last round, as soon as that has
ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from luce.decode.events import Event, Item
from luce.decode.generation import NOTHING_DONE, Generation
from luce.decode.wants import Chunk, Proposed, Share, Turn
from luce.errors import Cancelled
from luce.native import CHOSEN, Drafts, Engine, Rows, Verified
from luce.speculate.drafting import NOTHING, Draft

MAX_ROWS = 64  # A step has at most so many rows (LUCE_MAX_ROWS).

Happened = list[tuple[Generation, Event]]
W = TypeVar("W", Chunk, Turn, Proposed, Drafts, Rows)


class Loop:
    """Runs generations on sequences of one engine. `clock` gives seconds. `prefill_share`, above 0 and at
    most 1, is the part of the time that chunks of prompts may take while other generations decode. There is
    always a round between two chunks."""

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float] = time.perf_counter,
        prefill_share: float = 1.0,
    ):
        self._engine, self._clock = engine, clock
        # A second of chunks is followed by so many of rounds.
        self._rounds_for = (1 - prefill_share) / prefill_share
        self._owed = 0.0  # So many seconds of rounds are due before the next chunk.
        self._oldest_next = True
        self._running: list[Generation] = []
        self._cancelled = False
        self._chunk_next = True
        self._happened: list[tuple[Generation, Item]] = []
        self._last: tuple[float, list[Generation]] = 0.0, []  # When the last round ended, and whose it was.
        # The round that was begun, and the seconds that its begin took. A generation of it may have ended since.
        self._begun: tuple[list[tuple[Generation, Rows]], float] | None = None

    @property
    def running(self) -> int:
        """Returns the number of generations that have not ended."""
        return len(self._running)

    def add(self, generation: Generation) -> None:
        """Runs a generation that was not started yet beside the others, and closes its sequence at its end."""
        self._cancelled = self._cancelled and bool(self._running)
        self._running.append(generation)
        self._note(generation, generation.start())

    def cancel(self) -> None:
        """Ends all generations that run, after the engine's present step at most. It may be called from any
        thread and from a signal handler."""
        self._cancelled = True
        self._engine.cancel()

    def step(self) -> Happened:
        """Takes one turn. Returns what happened in it and since the turn before."""
        self._end_cancelled()
        reading, began = self._wanting(Chunk), self._clock()
        try:
            if not self._begun and reading and (self._chunk_next or len(reading) == len(self._running)):
                self._chunk_next, self._last = False, (0.0, [])
                self._step([self._next_to_read(reading)], self._prefill)
                self._owed = self._rounds_for * (self._clock() - began)
            else:
                if not self._begun:
                    self._begin_round()
                if self._begun:
                    self._end_round(*self._begun)
                self._owed -= self._clock() - began
                self._chunk_next = self._owed <= 0
            if self._engine.ahead and not self._begun and not self._wanting(Chunk):
                self._begin_round()
        except Cancelled:
            pass  # Nothing was done: the next turn ends those who asked, and asks again for the others.
        happened, self._happened = self._happened, []
        return [(of, event) for of, item in happened for event in (item() if callable(item) else (item,))]

    def close(self) -> None:
        """Ends what still runs, without another event."""
        for generation in self._running:
            generation.sequence.close()
        self._running, self._begun = [], None

    def _end_cancelled(self) -> None:
        everything = self._cancelled
        if everything:  # It is reset here alone, since a signal may come in between.
            self._cancelled = False
        for generation in list(self._running):
            if everything or generation.cancelled():
                self._note(generation, generation.cancel())
        if self._begun and all(generation.want is None for generation, _ in self._begun[0]):
            self._begun = None

    def _next_to_read(self, reading: Sequence[tuple[Generation, Chunk]]) -> tuple[Generation, Chunk]:
        """Picks in turn the oldest generation and the one with the least left to read. So a short prompt
        does not wait for long ones, and a long one is read all the same."""
        self._oldest_next = not self._oldest_next
        if not self._oldest_next:
            return reading[0]
        return min(reading, key=lambda each: len(each[1].tokens) + each[1].left)

    def _prefill(self, of: Sequence[tuple[Generation, Chunk]]) -> list[int | None]:
        return [one.sequence.prefill(chunk.tokens, chunk.last) for one, chunk in of]

    def _begin_round(self) -> None:
        """Begins a round of all that have read their prompts, or runs it where the device is the host. Some have
        their rows already: who drafts nothing, or was in a round that was cancelled. The others share the rows that
        are free. They wait where drafts of such a round are still to be made, which may grow into more rows. Who came
        last waits too, where the rows are too many for one step."""
        turns = self._wanting(Turn)
        if turns and not self._wanting(Drafts):
            rows = self._wanting(Rows)
            share = (MAX_ROWS - sum(want.width for _, want in rows)) // len(turns)
            for generation, _ in turns if share > 0 else ():
                self._note(generation, generation.tell(Share(share, len(turns) + len(rows))))
            self._proposed()
        if drafts := self._wanting(Drafts):
            self._step(drafts, self._draft)
        fitting = self._wanting(Rows)
        if len(fitting) > 1:
            totals = accumulate(want.width for _, want in fitting)
            fitting = [one for one, total in zip(fitting, totals, strict=True) if total <= MAX_ROWS]
        if self._engine.ahead and fitting:
            self._begin(fitting)
        else:
            self._step(fitting, self._verify)

    def _begin(self, of: list[tuple[Generation, Rows]]) -> None:
        began = self._clock()
        try:
            self._engine.begin([rows for _, rows in of])
        except Cancelled:
            raise
        except Exception as error:
            if isinstance(error, NOTHING_DONE) and len(of) > 1:  # One of them alone may be to blame.
                self._step(of, self._verify)
            else:
                self._tell(of, [error] * len(of), self._clock() - began)
        else:
            self._begun = of, self._clock() - began

    def _end_round(self, of: list[tuple[Generation, Rows]], seconds: float) -> None:
        """Ends the round that was begun. Where all take part and go on, the next one is begun before, or with
        it."""
        began = self._clock()
        following, failure = self._begin_next(of)
        results, waited = list[Any](), self._clock()
        try:
            results += self._engine.wait()
        except Exception as error:
            results += [error] * len(of)
        self._begun = None
        self._landed(of)
        if following and self._engine.under_way:
            rows = [(one, Rows(one.sequence, n=draft.size + 1)) for one, draft in following]
            self._begun = rows, waited - began
        for one, draft in following:
            one.begun(draft) if self._begun else one.behind()
        self._tell(of, results, seconds + self._clock() - waited)
        if failure:
            self._tell(of, [failure] * len(of), 0.0)
        for generation, _ in self._begun[0] if self._begun else ():
            if isinstance(generation.want, Turn):  # Its round has begun, and is only told to its source.
                self._note(generation, generation.tell(Share(MAX_ROWS // len(of), len(of))))
        self._proposed()

    def _proposed(self) -> None:
        """Has those draft whose sources know of the round, as all of them do now."""
        for generation, _ in self._wanting(Proposed):
            self._note(generation, generation.tell(None))

    def _landed(self, of: Sequence[tuple[Generation, Rows]]) -> None:
        """Says how long a round took that ended now, if the one before it was of the same generations and
        nothing else came between them."""
        now, theirs = self._clock(), [generation for generation, _ in of]
        since, before = self._last
        for generation in theirs:
            generation.landed(now - since if before == theirs else None)
        self._last = now, theirs

    def _begin_next(self, of: list[tuple[Generation, Rows]]) -> tuple[list[tuple[Generation, Draft]], Exception | None]:
        """Begins the next round of those whose round is under way, if all take part and know what they draft in
        it. Returns their drafts, or none, and the error of a step that failed."""
        theirs = [generation for generation, _ in of]
        if theirs != self._running or not all(one.could_go_on() for one in theirs):
            return [], None
        drafts = [(one, draft) for one in theirs if (draft := one.next_draft()) is not None]
        sources = {draft.by for _, draft in drafts if draft.size}
        rows = sum(draft.size + 1 for _, draft in drafts)
        if len(drafts) < len(theirs) or len(sources) > 1 or rows > MAX_ROWS:
            for one in theirs:
                one.behind()
            return [], None
        try:
            self._engine.begin(
                [Rows(one.sequence, n=draft.size + 1, anchor=CHOSEN, source=draft.by) for one, draft in drafts]
            )
        except (Cancelled, *NOTHING_DONE):
            return [], None  # It is begun once this one has ended.
        except Exception as error:
            for one in theirs:  # What it committed before it failed is booked.
                one.begun(NOTHING)
            return [], error
        return drafts, None

    def _verify(self, of: Sequence[tuple[Generation, Rows]]) -> Sequence[Verified | Exception]:
        results = self._engine.verified([rows for _, rows in of])
        self._landed(of)
        return results

    def _draft(self, of: Sequence[tuple[Generation, Drafts]]) -> list[None]:
        for source in sorted({drafts.source for _, drafts in of}):
            self._engine.draft([drafts for _, drafts in of if drafts.source == source])
        return [None] * len(of)

    def _wanting(self, kind: type[W]) -> list[tuple[Generation, W]]:
        return [(one, one.want) for one in self._running if isinstance(one.want, kind)]

    def _step(
        self,
        of: Sequence[tuple[Generation, W]],
        call: Callable[[Sequence[tuple[Generation, W]]], Sequence[Any]],
    ) -> None:
        """Makes one call for what several generations want. An error that one of them alone is to blame for
        ends that one alone."""
        if not of:
            return
        began = self._clock()
        try:
            results = call(of)
        except Cancelled:
            raise
        except Exception as error:
            if isinstance(error, NOTHING_DONE) and len(of) > 1:
                for one in of:
                    self._step([one], call)
                return
            results = [error] * len(of)
        self._tell(of, results, self._clock() - began)

    def _tell(self, of: Sequence[tuple[Generation, W]], results: Sequence[Any], seconds: float) -> None:
        """Tells generations their results. One that was cancelled meanwhile has ended."""
        for (generation, _), result in zip(of, results, strict=True):
            if generation.want is not None:
                failed = isinstance(result, Exception)
                events = generation.fail(result) if failed else generation.tell(result, seconds)
                self._note(generation, events)

    def _note(self, generation: Generation, events: list[Item]) -> None:
        self._happened += [(generation, event) for event in events]
        if generation.want is None:
            self._running.remove(generation)
            generation.sequence.close()
