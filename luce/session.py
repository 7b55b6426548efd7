"""A model opened as a plan says: requests in, events out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from luce._native import File, Model, Progress, Session
from luce.drafting import FixedGamma, NextN
from luce.gamma import AutoGamma
from luce.orchestrator import Event, Orchestrator
from luce.plan import Plan, Request
from luce.tokenizer import Tokenizer


def open_model(file: File, plan: Plan, progress: Progress | None = None, head: File | None = None) -> Model:
    """The weights on the plan's device, with the NextN head where it drafts: that of `head`, or the file's
    own. Raises what the core does: FileError where a head does not fit, OutOfMemory, Cancelled (from
    `progress`), DeviceError, ... and leaves nothing open."""
    return Model(file, plan.device, progress, (head or file) if plan.head else None)


class TextSession:
    """One timeline of a model with its tokenizer and draft source; a context manager. The model must have
    been opened with the head that the plan names. Raises what the core does (OutOfMemory, ...)."""

    def __init__(self, model: Model, tokenizer: Tokenizer, plan: Plan):
        self._tokenizer, self.model = tokenizer, model
        self.session = Session(model, plan.session)
        self._source = None
        if plan.gamma:  # it stays, for what auto has learned of costs holds for later generations too
            pace = AutoGamma(plan.gamma) if plan.spec == "auto" else FixedGamma(plan.gamma)
            self._source = NextN(self.session, pace)

    def generate(self, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """The events of one generation, from an empty timeline. It may be called again after any end."""
        return Orchestrator(self.session, self._tokenizer, request, self._source, cancelled).run()

    def close(self) -> None:
        """Frees the session; a second call does nothing."""
        self.session.close()

    def __enter__(self) -> TextSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
