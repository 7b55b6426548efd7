"""One answer under way, read as it comes by the thread that asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Protocol

from luce.decode.events import Event
from luce.decode.scheduler import Job
from luce.model.answer import Answer, Piece, Reader
from luce.model.loaded import Loaded
from luce.model.prompting import Asked


class Model(Protocol):
    """What an answer has to know of the model that is asked."""

    @property
    def loaded(self) -> Loaded: ...
    def submit(self, job: Job, admitted: bool) -> None: ...


class Pending:
    """An answer that is generated for whoever holds this: once nobody does, it is cancelled. `put` gets what
    happened, in the thread of the scheduler's `hand_over`."""

    def __init__(self, model: Model, asked: Asked, put: Callable[[list[Event]], None]):
        self._model = model  # It is not freed as long as somebody reads.
        self._reader = Reader(model.loaded.tokenizer, asked.request, asked.parser)
        self._pieces = deque[Piece]()
        self._job = Job(asked.request, put)

    def start(self, admitted: bool = False) -> None:
        """Hands the request to the engine. Raises Busy and StateError as Model's methods do."""
        self._model.submit(self._job, admitted)

    def cancel(self) -> None:
        """Ends the answer, after the engine's present step at most: what came up to then is the answer, whose
        reason is "cancelled". Any thread may call it; where the answer has ended, it does nothing."""
        if not self._reader.ended:
            self._reader.left = True
            self._model.loaded.scheduler.cancel(self._job)

    def _take(self, events: list[Event]) -> None:
        self._pieces += self._reader.read(events)

    def _ended(self) -> bool:
        """Says whether all pieces were taken. Raises what ended the answer where it failed."""
        if self._pieces or not self._reader.ended:
            return False
        if self._reader.error is not None:
            raise self._reader.error
        return True

    def __del__(self) -> None:
        if hasattr(self, "_job"):  # No lock is taken: Python may call this anywhere.
            self._job.cancelled = True


class Stream(Pending, Iterator[Piece]):
    """Yields the pieces of an answer as they come; `answer` is the whole. One thread reads it, and any may
    cancel it; a stream that nobody holds any more is cancelled. It is a context manager, which cancels it at
    its end. Raises what ends the answer where it fails: DeviceError, NumericError, and Cancelled where the model
    was closed."""

    def __init__(self, model: Model, asked: Asked):
        self._events = SimpleQueue[list[Event]]()
        super().__init__(model, asked, self._events.put)

    def __next__(self) -> Piece:
        while not self._pieces:
            if self._ended():
                raise StopIteration
            self._take(self._events.get())
        return self._pieces.popleft()

    @property
    def answer(self) -> Answer:
        """Returns the whole answer, for whose end it waits. Pieces that nobody took are dropped."""
        for _ in self:
            pass
        assert self._reader.answer is not None
        return self._reader.answer

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
