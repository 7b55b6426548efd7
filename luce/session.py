"""A model opened as a plan says: requests in, events out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

from luce._native import File, Model, Progress, Session
from luce.orchestrator import Event, Orchestrator
from luce.plan import Plan, Request
from luce.tokenizer import Tokenizer


class TextSession:
    """One model, one timeline, one tokenizer; a context manager. Opening raises what the core does:
    OutOfMemory, Cancelled (from `progress`), DeviceError, ... and leaves nothing open."""

    def __init__(self, file: File, tokenizer: Tokenizer, plan: Plan, progress: Progress | None = None):
        self._tokenizer = tokenizer
        with ExitStack() as opened:
            self.model = opened.enter_context(Model(file, plan.device, progress))
            self.session = opened.enter_context(Session(self.model, plan.session))
            self._opened = opened.pop_all()

    def generate(self, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """The events of one generation, from an empty timeline. It may be called again after any end."""
        return Orchestrator(self.session, self._tokenizer, request, cancelled=cancelled).run()

    def close(self) -> None:
        """Frees the session and the model; a second call does nothing."""
        self._opened.close()

    def __enter__(self) -> TextSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
