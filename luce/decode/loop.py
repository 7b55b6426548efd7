"""The loop drives any number of generations in turn, with one step of the engine for all of them.

Its turns alternate. In one turn those that have not read their whole prompts read chunks of them in one pass, which
has as many tokens as the rounds of the others leave time for (chunks.py). In the next turn all the others have a
round: the steps that draft, where there are any, and then one step that verifies the rows of all of them. A single
generation needs no other code.

Where the device works while the host does something else, a turn ends with the begin of the next round, and
text is made of the last one's tokens after that; a prompt's first token, which somebody waits for, is told before.
Rounds follow each other even closer where it is known beforehand what the next one drafts (pipeline.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate

from luce import native as _native
from luce.decode.chunks import ChunkSizes
from luce.decode.events import Event, State, Warned
from luce.decode.experts import Experts
from luce.decode.generation import Generation
from luce.decode.pipeline import Outcomes, Pipeline, Read
from luce.errors import Cancelled
from luce.native import Engine, Prompt
from luce.native.structs import PAGE
from luce.speculate.prices import MAX_ROWS

Happened = list[tuple[Generation, Event]]


class Loop:
    """Runs generations on sequences of one engine. `clock` gives seconds. `prefill_share`, above 0 and at
    most 1, is the part of the time that passes over prompts may take while other generations decode: they are as
    long as that is between two rounds, and where such short ones would be slow there are more rounds between two.
    `experts` move as a generation is added."""

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float] = time.perf_counter,
        prefill_share: float = 1.0,
        experts: Experts | None = None,
    ):
        self._engine, self._clock, self._pipeline = engine, clock, Pipeline(engine, clock)
        self._experts = experts
        # A second of prompts is followed by so many of rounds.
        self._rounds_for = (1 - prefill_share) / prefill_share
        info = engine.info
        self._n_chunk, self._sizes = info.n_chunk, ChunkSizes(info.n_cut, info.n_chunk)
        self._shares = info.n_cut < PAGE  # Else bits depend on the batch: prompts are read one by one.
        self._round = 0.0  # The last round took so many seconds.
        self._due = 0.0  # So many seconds of rounds are due before the next pass over prompts.
        self._prompts_next = self._oldest_next = True
        self._running = dict[_native.Sequence, Generation]()
        self._cancelled = False
        self._happened = Happened()

    @property
    def running(self) -> int:
        """Returns the number of generations that have not ended."""
        return len(self._running)

    def add(self, generation: Generation) -> None:
        """Runs a generation that was not started yet beside the others, and closes its sequence at its end."""
        self._cancelled = self._cancelled and bool(self._running)
        lost = self._experts.settle() if self._experts else ""
        self._running[generation.sequence] = generation
        self._note(generation, [Warned(lost)] if lost else [])
        self._note(generation, generation.begin())

    def cancel(self) -> None:
        """Ends all generations that run, after the engine's present step at most. It may be called from any
        thread and from a signal handler."""
        self._cancelled = True
        self._engine.cancel()

    def step(self) -> Happened:
        """Takes one turn. Returns what happened in it and since the turn before."""
        self._end_cancelled()
        reading, began, first = self._in(State.PREFILL), self._clock(), False
        try:
            if reading and not self._pipeline.pending and (self._prompts_next or len(reading) == self.running):
                self._prompts_next = False
                alone = len(reading) == self.running
                chunks = self._chunks(reading, self._longest(alone))
                size = sum(len(chunk.tokens) for chunk in chunks)
                timed = not alone or not self._sizes.knows(size)
                read = self._pipeline.read(chunks, wait=timed)
                self._tell(read)
                first = any(isinstance(each, Read) and each.choice is not None for each in read.values())
                took = self._clock() - self._pipeline.read_since
                if timed:
                    self._sizes.took(size, took)
                self._due = self._rounds_for * took
            else:
                if not self._pipeline.pending:
                    self._enqueue()
                self._land()
                self._round = self._clock() - began
                self._due -= self._round
                self._prompts_next = self._due <= 0
            # A first token is waited for: it does not wait for drafts behind it.
            if self._engine.ahead and not self._pipeline.pending and not self._in(State.PREFILL) and not first:
                self._enqueue()
        except Cancelled:
            pass  # Nothing was done: the next turn ends those who asked, and asks again for the others.
        for one in self._running.values():
            self._happened += [(one, event) for event in one.emit()]
        happened, self._happened = self._happened, []
        return happened

    def keep(self) -> None:
        """Has beginnings kept, once what step() returned was told: who waits for a first token waits for no checkpoint.
        It comes ahead of the next turn."""
        for one in self._running.values():
            one.keep()

    def close(self) -> None:
        """Ends what still runs, without another event."""
        for sequence in self._running:
            self._pipeline.drop(sequence)
            sequence.close()
        self._running.clear()

    def _end_cancelled(self) -> None:
        everything = self._cancelled
        if everything:  # It is reset here alone, since a signal may come in between.
            self._cancelled = False
        for generation in list(self._running.values()):
            if everything or generation.cancelled():
                self._note(generation, generation.cancel())

    def _longest(self, alone: bool) -> int:
        """Returns how many tokens the next pass may have. It has all that a step may have where nothing decodes."""
        if alone or not self._rounds_for or not self._round:
            return self._n_chunk
        return self._sizes.within(self._round / self._rounds_for)

    def _chunks(self, reading: Sequence[Generation], most: int) -> list[Prompt]:
        """Returns the chunks of the next pass, of so many tokens at most. Those who came first are asked first, and in
        the next turn those with the least left to read. So a short prompt does not wait for long ones, and a long one
        is read all the same."""
        self._oldest_next = not self._oldest_next
        order = sorted(reading, key=lambda each: each.unread) if self._oldest_next else reading
        chunks = list[Prompt]()
        for one in order if self._shares else order[:1]:
            if chunk := one.chunk(most):
                chunks.append(chunk)
                most -= len(chunk.tokens)
        return chunks

    def _enqueue(self) -> None:
        """Enqueues a round of all that have read their prompts. Some have their rows already: who drafts nothing,
        or was in a round that was cancelled. The others share the rows that are free. They wait where drafts of such
        a round are still to be made, which may grow into more rows. Who came last waits too, where the rows are too
        many for one step."""
        waiting, ready = self._in(State.DRAFT), self._in(State.VERIFY)
        if waiting and not any(one.drafts for one in waiting):
            share = (MAX_ROWS - sum(one.rows.width for one in ready)) // len(waiting)
            if share > 0:
                self._offer(waiting, share, len(waiting) + len(ready))
        if items := [drafts for one in self._in(State.DRAFT) if (drafts := one.drafts)]:
            self._tell(self._pipeline.draft(items))
        rows = [one.rows for one in self._in(State.VERIFY)]
        if len(rows) > 1:
            totals = accumulate(each.width for each in rows)
            rows = [each for each, total in zip(rows, totals, strict=True) if total <= MAX_ROWS]
        self._pipeline.enqueue(rows)

    def _land(self) -> None:
        """Ends the round that was enqueued. Where all take part and go on, the next one is begun before, or with
        it, and is only told to the draft sources."""
        if self._engine.ahead:
            self._pipeline.next({sequence: one.decision for sequence, one in self._running.items()})
        landed = self._pipeline.land()
        self._tell(landed)
        if self._pipeline.pending:
            self._offer(self._in(State.DRAFT), MAX_ROWS // len(landed), len(landed))

    def _tell(self, outcomes: Outcomes) -> None:
        for sequence, landed in outcomes.items():
            one = self._running[sequence]
            self._note(one, one.fail(landed) if isinstance(landed, Exception) else one.landed(landed))

    def _offer(self, waiting: Sequence[Generation], rows: int, sequences: int) -> None:
        for one in waiting:
            self._note(one, one.propose(rows, sequences))
        for one in waiting:
            if one.state is State.DRAFT:
                self._note(one, one.offer())

    def _in(self, state: State) -> list[Generation]:
        return [one for one in self._running.values() if one.state is state]

    def _note(self, generation: Generation, events: list[Event]) -> None:
        self._happened += [(generation, event) for event in events]
        if generation.over:
            generation.keep()
            del self._running[generation.sequence]
            self._pipeline.drop(generation.sequence)
            generation.sequence.close()
