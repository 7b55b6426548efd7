"""Log on stderr: a line for each request, refused ones too, and what the core, libraries and the server
report.

A line is `name=value` words, or with "json" one object of the same names. Nothing that users say or models
answer is in it: of an error that nobody expected, its kind and place are told, not its text.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import sys
import time
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timezone
from types import TracebackType
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LEVELS = ("debug", "info", "warning", "error")  # The core has them by these numbers.
MAX_PATH = 200  # A line has at most so many letters of a path.
CLOSED = "luce.closed"  # Who ends a connection before its answer says under this key of the scope why.
_SANE = re.compile(rb"[A-Za-z0-9._:-]{1,128}")  # Clients' own ids are taken if they look so.
_SUMS = ("prompt", "cached", "again", "generated")  # Of several answers to one request these are added,
_IMAGES = ("images", "encoded")  # and these where there are some.


@dataclass
class Record:
    """One request, as its line tells of it. `status` is 0 before the answer begins; `error` is why the
    request was refused or broken off. `details` are what its answers add."""

    method: str
    path: str
    id: str = ""
    client: str = ""
    status: int = 0
    error: str = ""
    began: float = field(default_factory=time.perf_counter)
    details: dict[str, Any] = field(default_factory=dict)

    def add(self, details: dict[str, Any]) -> None:
        """Adds what an answer tells of itself; with several answers, their tokens are summed."""
        names = (*_SUMS, *(name for name in _IMAGES if name in details))
        sums = {name: self.details.get(name, 0) + (details.get(name) or 0) for name in names}
        self.details = {**details, **self.details, **sums}

    def as_json(self) -> dict[str, Any]:
        """Returns the names and values of the line, in its order."""
        head = {"method": self.method, "path": self.path[:MAX_PATH], "status": self.status, "id": self.id,
                "client": self.client or None, "error": self.error or None}  # fmt: skip
        return head | {"seconds": time.perf_counter() - self.began} | self.details


_record: ContextVar[Record | None] = ContextVar("luce_record", default=None)


def noted() -> Record | None:
    """Returns the record of the request that is being answered here, where there is one."""
    return _record.get()


class Log:
    """Writes lines to stderr: `form` is "text" or "json", or "" for errors alone."""

    def __init__(self, form: str = "text"):
        self.form = form

    def request(self, record: Record) -> None:
        """Writes the line of a request that is over."""
        if self.form:
            self._write(record.as_json())

    def message(self, level: int, text: str) -> None:
        """Writes what is reported beside requests, by its level in LEVELS. Any thread may call it."""
        if level >= (1 if self.form else 3):
            self._write({"level": LEVELS[min(level, 3)], "message": " ".join(text.split())})

    def defect(self, error: BaseException) -> None:
        """Writes the kind and the place of an error that nobody expected."""
        request = noted()
        of = f" in request {request.id}" if request else ""
        self.message(3, f"{type(error).__name__}{of} at {_places(error.__traceback__)}")

    def _write(self, fields: dict[str, Any]) -> None:
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        known = {name: round(value, 4) if isinstance(value, float) else value
                 for name, value in {"time": now, **fields}.items() if value is not None}  # fmt: skip
        if self.form == "json":
            line = json.dumps(known)
        else:
            line = " ".join(f"{name}={json.dumps(value)}" for name, value in known.items())
        with suppress(OSError, ValueError):  # Nobody may read it any more: the server goes on.
            print(line, file=sys.stderr, flush=True)


def _places(trace: TracebackType | None) -> str:
    """Returns where an error was raised, the innermost place first: "engine.py:12 in step < ..."."""
    places = []
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append(f"{'/'.join(code.co_filename.split('/')[-2:])}:{trace.tb_lineno} in {code.co_name}")
        trace = trace.tb_next
    return " < ".join(reversed(places[-8:])) or "an unknown place"


class FromPython(logging.Handler):
    """Takes the warnings and errors of Python's loggers (uvicorn, asyncio, libraries) into the log."""

    def __init__(self, log: Log):
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self._log.defect(record.exc_info[1])
        else:
            level = 3 if record.levelno >= logging.ERROR else 2
            self._log.message(level, f"{record.name}: {record.getMessage()}")


class Logged:
    """Gives each request an id and writes its line when it is over.

    The id goes into the headers x-request-id and request-id (Anthropic's clients read the second). A client's
    own x-request-id is kept if it is short and plain. Status 499 is a client that went away before its answer
    was whole, also where the answer had begun with 200.
    """

    def __init__(self, app: ASGIApp, log: Log):
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        id = given if _SANE.fullmatch(given) else secrets.token_hex(12).encode()
        client = scope.get("client")
        record = Record(scope["method"], scope["path"], id.decode(), client[0] if client else "")
        whole = gone = False

        async def sending(message: Message) -> None:
            nonlocal whole
            if message["type"] == "http.response.start":
                record.status = record.status if gone else message["status"]
                own = [(b"x-request-id", id), (b"request-id", id)]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            elif not message.get("more_body"):
                whole = True
            await send(message)

        async def receiving() -> Message:
            nonlocal gone
            message = await receive()
            if message["type"] == "http.disconnect" and not whole:
                gone = True
                record.status, record.error = scope.get(CLOSED, (499, "gone"))
            return message

        token = _record.set(record)
        try:
            await self._app(scope, receiving, sending)
        except asyncio.CancelledError:  # The server has ended, and waited long enough for it.
            record.status = record.status or 503
            raise
        finally:
            record.status = record.status or 500
            _record.reset(token)
            self._log.request(record)
