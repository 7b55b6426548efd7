"""Reads the bodies of requests, bounded and typed, and makes those of answers."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from luce.errors import OutOfMemory
from luce.server.ask import Refused
from luce.threads import BESIDE

MAX_BODY = 16 << 20  # A body has at most so many bytes.
LONG = 1 << 20  # A body of more bytes is read in a thread.
MAX_DEPTH = 128  # A body's objects and lists are nested at most so deep.

B = TypeVar("B", bound=msgspec.Struct)


async def read(request: Request, kind: type[B]) -> B:
    """Returns the body as its type. Raises Refused where it is too large, too deep, no JSON, or of another
    form, where memory lacks, and where it has one of the fields that the type's REFUSED names: an answer
    without what it asks for would be another one."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_BODY:
            raise Refused(413, f"the body is of more than {MAX_BODY >> 20} MiB", "too_large")
    if len(raw) > LONG:  # Streams go on while it is read.
        try:
            return await asyncio.get_running_loop().run_in_executor(BESIDE, _typed, raw, kind)
        except (OutOfMemory, MemoryError) as error:
            raise Refused(503, str(error) or "out of memory", "busy", retry_after=5) from error
    return _typed(raw, kind)


def _typed(raw: bytes | bytearray, kind: type[B]) -> B:
    try:
        found = msgspec.json.decode(raw)
        _require_shallow(found)
        for name in getattr(kind, "REFUSED", ()) if isinstance(found, dict) else ():
            if found.get(name):
                raise Refused(400, f"{name} is not supported", param=name)
        return msgspec.convert(found, kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(400, f"the body: {error}") from error
    except RecursionError as error:
        raise Refused(400, "the body is nested too deeply") from error


def _require_shallow(value: Any) -> None:
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise Refused(400, "the body is nested too deeply")
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.values()
            elif isinstance(each, list):
                inner += each
        level, depth = inner, depth + 1


def reply(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")
