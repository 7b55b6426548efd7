"""Reads the bodies of requests, bounded and typed. What is large is read beside the event loop (lanes.py)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import msgspec
from starlette.requests import Request

from luce.server.api.fields import checked
from luce.server.ask import Ask, Refused
from luce.server.lanes import beside

MAX_BODY = 16 << 20  # A body has at most so many bytes,
MAX_HELD = 1 << 30  # and all that are being read together.
MAX_DEPTH = 128  # A body's objects and lists are nested at most so deep.

M = TypeVar("M")


class Held:
    """The bytes of all bodies that are being read."""

    total = 0


class Body(msgspec.Struct, kw_only=True):
    """The body of a request. `API` is the route whose rows of fields.TABLE it is checked by."""

    API: ClassVar[str]


B = TypeVar("B", bound=Body)

# The body that this task read has such fields, which its route does not know.
ignored: ContextVar[Sequence[str]] = ContextVar("ignored", default=())


async def read(request: Request, kind: type[B], api: str = "") -> B:
    """Returns the body as its type, of the route `api`, which is the type's own unless said otherwise.
    `ignored` then has the names of fields that the route does not know. Raises Refused where the body is too
    large, too deep, no JSON, or of another form, where memory lacks, and for fields that the table refuses:
    an answer without what they ask for would be another one."""
    body, _, _ = await _read(request, kind, lambda body: None, api)
    return body


async def asked(
    request: Request, kind: type[B], make: Callable[[B], Ask], api: str = ""
) -> tuple[B, Ask]:
    """Returns the body and the request that it makes of it, which may take as long as to read it. Raises as
    read() does, and what `make` raises."""
    body, ask, size = await _read(request, kind, make, api)
    return body, replace(ask, size=size)


async def _read(
    request: Request, kind: type[B], make: Callable[[B], M], api: str
) -> tuple[B, M, int]:
    raw = bytearray()
    try:
        async for chunk in request.stream():
            raw += chunk
            Held.total += len(chunk)
            if len(raw) > MAX_BODY:
                raise Refused(413, f"the body is of more than {MAX_BODY >> 20} MiB", "too_large")
            if Held.total > MAX_HELD:
                raise Refused(503, "the server is busy with large requests", "busy", retry_after=5)

        unknown: list[str] = []

        def made() -> tuple[B, M, int]:
            body = _typed(raw, kind, api or kind.API, unknown)
            return body, make(body), len(raw)

        try:
            return await beside(len(raw), made)
        finally:
            ignored.set(unknown)  # Also where the request is refused for something else.
    finally:
        Held.total -= len(raw)


def _typed(raw: bytes | bytearray, kind: type[B], api: str, unknown: list[str]) -> B:
    """Returns a body as its type, and adds the names of its fields that are unknown."""
    try:
        found = msgspec.json.decode(raw)
        if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:  # Else it has not so many levels.
            _require_shallow(found)
        if isinstance(found, dict):
            unknown += checked(api, found)
        return msgspec.convert(found, kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(400, f"the body: {error}", param=_blamed(str(error))) from error
    except RecursionError as error:
        raise Refused(400, "the body is nested too deeply") from error


def _blamed(said: str) -> str | None:
    """Returns the field of a body that msgspec's error is about: "temperature", "options.seed"."""
    found = re.search(r"at `\$\.([\w.]+)", said) or re.search(r"required field `(\w+)`$", said)
    return found[1] if found else None


def _require_shallow(value: Any) -> None:
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise Refused(400, "the body is nested too deeply")
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.values()
            elif isinstance(each, list):  # Of tens of thousands of numbers one says how deep they are.
                inner += each if {dict, list} & set(map(type, each)) else each[:1]
        level, depth = inner, depth + 1
