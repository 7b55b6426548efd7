"""Writes the events of one generation to stdout and to the display."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from luce.cli import stdout
from luce.cli.command import Interrupted
from luce.cli.terminal import Display
from luce.decode.engine import Engine
from luce.decode.events import Event, Failed, Finished, Prefilled, Started, Tokens, Warned
from luce.planning.plan import Options


class Writer:
    """Writes in one of three forms. "text" streams. "json" is one object at the end. "jsonl" is an object
    for each event: started, tokens ..., warning, and at the end failed or finished, which is json's object.
    `has_grammar` says that the text is held to one, which it may be too short for."""

    def __init__(
        self, display: Display, engine: Engine, options: Options, form: str, has_grammar: bool = False
    ):
        self._display, self._engine, self._options, self._form = display, engine, options, form
        self._has_grammar = has_grammar
        self._line_open = False
        self._last: Event | None = None

    def on(self, event: Event) -> None:
        self._last = event
        if isinstance(event, Started):
            self._display.spin(f"reading the prompt: {event.prompt_tokens} tokens")
            self._line("started", prompt_tokens=event.prompt_tokens)
        elif isinstance(event, Prefilled):
            self._display.prefill(event.done, event.total)
        elif isinstance(event, Warned):
            self._display.warn(event.message)
            self._line("warning", message=event.message)
        elif isinstance(event, Tokens):
            self._line("tokens", tokens=list(event.ids), text=event.text)
            if event.text and self._form == "text":
                self._display.clear()
                stdout.put_text(event.text)
                self._line_open = not event.text.endswith("\n")

    def end(self, interrupted: bool) -> None:
        """Writes what follows the terminal event: the last newline or the object, and the summary. It ends
        with the exit code. `interrupted` says that Ctrl-C was pressed, be it in the last step. A file or a
        pipe gets no newline, which would not be of the text."""
        self._display.clear()
        if self._line_open and sys.stdout.isatty():
            stdout.put("\n")
        if isinstance(self._last, Failed):
            self._line("failed", message=str(self._last.error))
            raise self._last.error
        if not isinstance(self._last, Finished):
            raise AssertionError(f"the generation ended with {self._last}")
        found = _as_json(self._last, self._engine, self._options)
        self._line("finished", **found)
        if self._form == "json":
            stdout.put_json(found)
        if self._last.truncated_by == "context":
            n_ctx = self._engine.info.n_ctx
            self._display.warn(f"the text ends because the context of {n_ctx} tokens (--ctx) is full")
        elif self._has_grammar and self._last.truncated_by == "max_tokens":
            n = len(self._last.tokens)
            self._display.warn(f"the text ends after {n} tokens (-n), where its grammar would go on")
        self._display.summary(self._last)
        if interrupted or self._last.reason == "cancelled":
            raise Interrupted()

    def _line(self, event: str, **values: Any) -> None:
        if self._form == "jsonl":
            self._display.clear()
            stdout.put_json({"event": event} | values)


def _as_json(result: Finished, engine: Engine, options: Options) -> Mapping[str, Any]:
    stats = asdict(result.stats) | {
        "spec": options.resolved_spec,
        "device": engine.model.info.device,
        "threads": engine.info.n_threads,
        "plan": engine.plan.as_json(),
    }
    return {
        "text": result.text,
        "tokens": list(result.tokens),
        "prompt_tokens": result.prompt_tokens,
        "finish_reason": result.reason,
        "truncated_by": result.truncated_by,
        "stats": stats,
    } | ({"prefill": result.compressed.as_json()} if result.compressed else {})
