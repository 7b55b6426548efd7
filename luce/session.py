"""A model opened as a plan says: requests in, events out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

from luce._native import File, Model, Progress, Session
from luce.drafting import FixedGamma, NextN
from luce.gamma import AutoGamma
from luce.orchestrator import Event, Orchestrator
from luce.plan import Plan, Request
from luce.tokenizer import Tokenizer


class TextSession:
    """One model, one timeline, one tokenizer; a context manager. `head`: the file of a NextN head that is
    not in the model's own. Opening raises what the core does: FileError where a head does not fit,
    OutOfMemory, Cancelled (from `progress`), DeviceError, ... and leaves nothing open."""

    def __init__(
        self,
        file: File,
        tokenizer: Tokenizer,
        plan: Plan,
        progress: Progress | None = None,
        head: File | None = None,
    ):
        self._tokenizer = tokenizer
        with ExitStack() as opened:
            drafts_with = (head or file) if plan.head else None
            self.model = opened.enter_context(Model(file, plan.device, progress, drafts_with))
            self.session = opened.enter_context(Session(self.model, plan.session))
            self._opened = opened.pop_all()
        self._source = None
        if plan.gamma:  # it stays, for what auto has learned of costs holds for later generations too
            pace = AutoGamma(plan.gamma) if plan.spec == "auto" else FixedGamma(plan.gamma)
            self._source = NextN(self.session, pace)

    def generate(self, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """The events of one generation, from an empty timeline. It may be called again after any end."""
        return Orchestrator(self.session, self._tokenizer, request, self._source, cancelled).run()

    def close(self) -> None:
        """Frees the session and the model; a second call does nothing."""
        self._opened.close()

    def __enter__(self) -> TextSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
