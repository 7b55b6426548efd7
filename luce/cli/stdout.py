"""Writes to stdout: text as it was decoded, objects as JSON, and one error where it cannot be written."""

from __future__ import annotations

import json
import math
import os
import sys
from contextlib import suppress
from typing import Any

from luce.errors import OutputError, PipeClosed


def prepare() -> None:
    """Makes text UTF-8 in files and pipes. On a terminal of another encoding, characters that it lacks are
    replaced."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding=None if stream.isatty() else "utf-8", errors="replace")


def put(text: str) -> None:
    """Writes `text` as it is, at once. Raises OutputError where it cannot be written."""
    if sys.stdout is None:
        raise OutputError("stdout is closed")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        raise failed(error) from error


# What a terminal would obey rather than show is shown by its picture; a carriage return, half of a line break
# of Windows, is dropped.
_SHOWN: dict[int, str | None] = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"}
_SHOWN |= {0x0D: None, 0x7F: "\u2421"} | dict.fromkeys(range(0x80, 0xA0), "\ufffd")


def put_text(text: str) -> None:
    """Writes a model's text: as it is to a file or a pipe, and to a terminal with no control characters but
    line breaks and tabs, which a text could move the cursor or set the title with."""
    if sys.stdout is not None and sys.stdout.isatty():
        text = text.translate(_SHOWN)
    put(text)


def put_json(value: Any, indent: int | None = None) -> None:
    """Writes one object on a line of its own, in ASCII alone, which every encoding has."""
    put(as_json(value, indent) + "\n")


def as_json(value: Any, indent: int | None = None) -> str:
    """Returns a value that JSON can hold: null stands for a number that is not finite."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def failed(error: Exception) -> OutputError:
    """Returns the error that a failed write to stdout stands for. After it stdout takes everything and keeps
    nothing, since what it still holds back would fail again at the interpreter's end."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    if isinstance(error, BrokenPipeError):
        return PipeClosed("stdout is closed: nobody reads it any more")
    return OutputError(f"stdout cannot be written: {getattr(error, 'strerror', None) or error}")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
