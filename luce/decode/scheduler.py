"""The engine's thread: requests come in from any thread, and their events go out as they happen.

It runs a Loop: each turn is a pass over prompts, or one round of all that decode. A request waits until a
sequence is free and the pages of its longest possible text are there. So a request that runs never lacks a
page.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from luce.decode.engine import Engine
from luce.decode.events import Event, Failed, Finished, Prefilled, State
from luce.decode.generation import Generation, Prefixes
from luce.decode.loop import Loop
from luce.decode.request import Request
from luce.errors import Busy, Cancelled, DeviceError, Error, InternalError, OutOfMemory
from luce.native.structs import PAGE
from luce.speculate.prices import MAX_ROWS

if TYPE_CHECKING:
    import numpy as np

RETRY_S = 0.01  # What failed is followed by such a pause.


class Cache(Prefixes, Protocol):
    """Beginnings of prompts that are kept between requests; all calls are the engine's thread's."""

    @property
    def pending(self) -> bool:
        """Says whether there is something for work() to do."""

    def fetch(self, prompt: np.ndarray, wait: bool) -> bool:
        """Gets ready what the prompt will be resumed from. Returns False as long as that goes on, unless it
        is to `wait` for it."""

    def free_pages(self, n: int) -> None:
        """Makes n pages free, as far as kept beginnings hold them."""

    def free_place(self) -> None:
        """Makes a place free for the next beginning, behind the first token of a prompt."""

    def free_ahead(self, n: int) -> None:
        """Makes n pages free for the next prompt, behind an answer, where nobody misses them soon."""

    def work(self) -> None:
        """Does a little of what can wait, between two turns."""


@dataclass(eq=False)
class Job:
    """A request, and where its events go. `put` is called with what happened in a turn, the last time
    with its Finished or Failed. `cancelled` says that nobody wants it any more; any thread may set it."""

    request: Request
    put: Callable[[list[Event]], None]
    cancelled: bool = False

    def is_cancelled(self) -> bool:
        return self.cancelled


Happened = dict[Job, list[Event]]


def put_all(happened: Happened) -> None:
    """Gives each job what happened to it."""
    for job, events in happened.items():
        job.put(events)


def _defect(error: Exception) -> Error:
    if isinstance(error, MemoryError):
        return OutOfMemory("out of memory")
    return InternalError(f"{type(error).__name__}: {error}")


class Scheduler:
    """One engine and its thread. `max_waiting` bounds the requests that wait for a sequence; None bounds
    nothing. `owner` is what errors call the one that runs it. `prefill_share` is the Loop's. `hand_over` gets
    what happened in a turn and calls put_all with it, in any thread: once for all jobs, since it costs the
    engine's thread about as much for one as for many. Where a device fails, `lost` gets the jobs that wait, in the
    engine's thread, and has to have others run them; without it they are tried here."""

    def __init__(
        self,
        engine: Engine,
        cache: Cache | None = None,
        max_waiting: int | None = 64,
        prefill_share: float = 0.75,
        hand_over: Callable[[Happened], None] = put_all,
        owner: str = "the server",
        lost: Callable[[list[Job]], None] | None = None,
    ):
        self._engine, self._cache, self._max_waiting = engine, cache, max_waiting
        self._share, self._hand_over, self._owner = prefill_share, hand_over, owner
        self._lost = lost
        self._loop = Loop(engine.native, prefill_share=prefill_share, experts=engine.experts)
        self._jobs = dict[Generation, Job]()
        self._waiting = deque[Job]()
        self._admitting: Job | None = None  # It has left the queue and has no generation yet.
        self._changed = threading.Condition()
        self._stopping = False
        self.pages_free = engine.info.n_pages  # This many pages were free after the last turn.
        self._seconds = deque[float](maxlen=32)  # Each entry says how long one of the last jobs took.
        self._thread = threading.Thread(target=self._run, name="luce-engine", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Returns the number of requests that have a sequence."""
        return len(self._jobs)

    @property
    def waiting(self) -> int:
        """Returns the number of requests that wait for one."""
        return len(self._waiting)

    @property
    def is_here(self) -> bool:
        """Says whether the caller runs in the engine's thread, which cannot wait for its own end."""
        return threading.current_thread() is self._thread

    @property
    def idle(self) -> bool:
        """Says whether no request waits or runs. Any thread may ask: a job is in the next of these before it
        leaves the one before, and they are looked at in the order in which it passes through them."""
        return not self._waiting and self._admitting is None and not self._jobs

    def submit(self, job: Job, admitted: bool = False) -> None:
        """Runs a job as soon as there is room. Raises Busy where as many wait as may, unless it is of a
        request that was `admitted` before."""
        with self._changed:
            free = self._engine.info.n_sequences - len(self._jobs)
            full = self._max_waiting is not None and len(self._waiting) >= self._max_waiting + free
            if full and not admitted:
                raise Busy(f"{self._owner} is busy", retry_after=self._retry_after())
            if self._stopping:
                raise Busy(f"{self._owner} is busy", retry_after=5)
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Ends a job within a turn; one that waits ends at once."""
        job.cancelled = True
        self._turn_away(job, Cancelled("cancelled"))

    def _turn_away(self, job: Job, error: Error) -> None:
        """Ends a job if it waits."""
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
                self._hand_over({job: [Failed(error, State.IDLE)]})

    def interrupt(self) -> None:
        """Ends all jobs that run, after the engine's present step at most. A signal handler may call it."""
        self._loop.cancel()

    def stop(self) -> None:
        """Ends all jobs soon, and takes no more. A signal handler may call it, so it takes no lock."""
        self._stopping = True
        self._loop.cancel()

    def close(self) -> None:
        """Ends all jobs and the thread. The engine stays the caller's to close."""
        self.stop()
        with self._changed:
            self._changed.notify()
        self._thread.join()

    def _retry_after(self) -> int:
        mean = sum(self._seconds) / len(self._seconds) if self._seconds else 1.0
        return min(max(math.ceil(mean), 1), 60)

    # ---- in the thread

    def _run(self) -> None:
        ending: Error | None = None
        while ending or not self._stopping:
            try:
                if ending:
                    self._end_all(ending)
                ending = None
                if self._wait():
                    self._turn()
            except Exception as error:  # It is a defect: those that ran end with it, and the others go on.
                ending = _defect(error)
                time.sleep(RETRY_S)  # Memory may lack even to end them.
        self._end_all(Cancelled(f"{self._owner} is shutting down"))

    def _wait(self) -> bool:
        """Waits until there is something to do. Returns False where the thread is to stop."""
        with self._changed:
            while not self._stopping and not self._jobs and not self._waiting:
                self._changed.wait(0.05 if self._cache and self._cache.pending else None)
                if self._cache and self._cache.pending:
                    break
            return not self._stopping

    def _turn(self) -> None:
        self._admit()
        if self._jobs:
            self._step()
        if self._cache:
            self._cache.work()

    def _step(self) -> None:
        if self._cache and (soon := self._pages_soon()):
            self._cache.free_pages(soon)
        happened, over = Happened(), dict[Generation, Job]()
        events = self._loop.step()
        for generation, event in events:
            happened.setdefault(self._jobs[generation], []).append(event)
            if isinstance(event, (Finished, Failed)):
                over[generation] = self._jobs.pop(generation)
            if isinstance(event, Finished):
                self._seconds.append(event.stats.prefill_s + event.stats.decode_s)
        try:
            self._hand_over(happened)
        except Exception:
            self._jobs |= over  # They end with the others.
            raise
        self._loop.keep()
        self.pages_free = self._engine.native.info.pages_free  # It waits for a round of those that have ended.
        if self._cache and any(isinstance(each, Prefilled) and each.done == each.total for _, each in events):
            self._cache.free_place()
        if self._cache and over:
            self._cache.free_ahead(min(self._two_turns(1), self._engine.info.n_pages // 8))
        if self._lost and any(isinstance(each, Failed) and isinstance(each.error, DeviceError) for _, each in events):
            with self._changed:
                waiting = list(self._waiting)
                self._waiting.clear()
            self._lost(waiting)

    def _admit(self) -> None:
        with self._changed:
            gone = [job for job in self._waiting if job.cancelled]  # Nobody reads them any more.
        for job in gone:
            self._turn_away(job, Cancelled("cancelled"))
        while len(self._jobs) < self._engine.info.n_sequences:
            with self._changed:
                if not self._waiting or (self._jobs and not self._has_room(self._waiting[0])):
                    return
                job = self._waiting[0]
            try:
                cache = None if job.request.reads else self._cache  # Else no kept beginning is of use.
                if cache and not cache.fetch(job.request.key, wait=not self._jobs):
                    return
            except Exception as error:
                self._turn_away(job, _defect(error))
                continue
            with self._changed:
                if not self._waiting or self._waiting[0] is not job:  # The job was cancelled meanwhile.
                    continue
                self._admitting = self._waiting.popleft()
            try:
                generation = self._engine.generation(job.request, job.is_cancelled, self._cache)
            except Exception as error:
                failure = error if isinstance(error, Error) else _defect(error)
                self._hand_over({job: [Failed(failure, State.IDLE)]})
                self._admitting = None
                continue
            self._jobs[generation] = job
            self._admitting = None
            self._loop.add(generation)

    def _has_room(self, job: Job) -> bool:
        jobs = [*self._jobs.values(), job]
        return sum(self._pages(each.request) for each in jobs) <= self._engine.info.n_pages

    def _pages(self, request: Request) -> int:
        """Returns the pages of the longest text that may come of it, and of rows that are verified beyond
        it."""
        n_ctx, prompt = self._engine.info.n_ctx, len(request.prompt)
        most = n_ctx if request.max_tokens is None else min(prompt + request.max_tokens + MAX_ROWS, n_ctx)
        return math.ceil(most / PAGE)

    def _pages_soon(self) -> int:
        """Returns the most pages that this turn and the next one take: copies that leave take a while."""
        two_turns = self._two_turns(len(self._jobs))
        if self._engine.native.info.pages_free >= two_turns:
            return 0
        running = ((each, job) for each, job in self._jobs.items() if not each.over)
        lacking = (self._pages(job.request) - each.sequence.info.n_pages for each, job in running)
        return min(two_turns, sum(lacking))

    def _two_turns(self, jobs: int) -> int:
        # Each chunk of a pass begins within a page, and a checkpoint at its end has one of its own.
        return 2 * (math.ceil(self._engine.info.n_chunk / PAGE) + 2 * jobs)

    def _end_all(self, error: Error) -> None:
        """Ends what runs, and what waits too where the thread is to stop. Where it fails it may be called
        again: nobody is forgotten before he was told."""
        self._loop.close()
        self._loop = Loop(self._engine.native, prefill_share=self._share, experts=self._engine.experts)
        with self._changed:
            jobs = [*self._jobs.values(), *(self._waiting if self._stopping else ())]
            if self._admitting:
                jobs.append(self._admitting)
            self._hand_over({job: [Failed(error, State.IDLE)] for job in jobs})
            self._jobs, self._admitting = {}, None
            if self._stopping:
                self._waiting.clear()
