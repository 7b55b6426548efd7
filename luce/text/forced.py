"""Reads a call that a grammar forces (grammar.py) while it is written.

The grammar leaves no choice but a well-formed call of a declared tool, in which a value ends at the first
line `</parameter>`. So what is read is certain at once, unless the text ends within the call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from luce.text.pieces import (
    TEXT,
    Arguments,
    CallBegin,
    CallEnd,
    Piece,
    parameter_types,
    undecided,
    value_of,
)

CALL, END_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
HEAD = f"{CALL}\n{FUNCTION}"
PARAMETER, END_VALUE = "<parameter=", "\n</parameter>\n"
END = f"{END_FUNCTION}\n{END_CALL}"


class ForcedCall:
    """Takes the text from the call's mark on. `read` is what it was given so far, and `rest` what follows the
    call once it has ended. `tools` is as in dialect.Parser."""

    def __init__(self, tools: Mapping[str, Any]):
        self._tools = tools
        self._types: Mapping[str, frozenset[str]] = {}
        self.rest: str | None = None
        self.read = ""  # It is all that was read of the call.
        self._text = ""  # It is not decided yet.
        self._begun = False  # The name was read.
        self._key: str | None = None  # The value that is read now has this key.
        self._streams = False  # The value is text whatever it says.
        self._n = 0  # It counts parameters.

    def push(self, text: str) -> Iterator[Piece]:
        """Yields what is certain now."""
        self.read += text
        self._text += text
        while self.rest is None:
            step = self._head if not self._begun else self._parameter if self._key is None else self._value
            before = len(self._text)
            yield from step()
            if len(self._text) == before:
                return

    def cut(self) -> Iterator[Piece]:
        """Yields the end of a call that the text ended within. What was `read` of it is text."""
        if self._begun:
            yield CallEnd(whole=False)

    def _line(self, begin: str, end: str) -> str | None:
        """Takes `begin`, a name and `end`, if they are all there."""
        at = self._text.find(end, len(begin))
        if at < 0:
            return None
        name, self._text = self._text[len(begin) : at], self._text[at + len(end) :]
        return name

    def _head(self) -> Iterator[Piece]:
        if (name := self._line(HEAD, ">\n")) is not None:
            self._begun, self._types = True, parameter_types(self._tools.get(name))
            yield CallBegin(name)
            yield Arguments("{")

    def _parameter(self) -> Iterator[Piece]:
        if self._text.startswith(END):
            self.rest, self._text = self._text[len(END) :], ""
            yield Arguments("}")
            yield CallEnd()
        elif self._text.startswith(PARAMETER) and (key := self._line(PARAMETER, ">\n")) is not None:
            self._key, self._streams = key, self._types.get(key, TEXT) == TEXT
            yield Arguments(f"{', ' if self._n else ''}{_json(key)}: " + ('"' if self._streams else ""))
            self._n += 1

    def _value(self) -> Iterator[Piece]:
        at = self._text.find(END_VALUE)
        ended = at >= 0
        at = at if ended else len(self._text) - undecided(self._text, [END_VALUE])
        if not ended and not self._streams:
            return
        value, self._text = self._text[:at], self._text[at + (len(END_VALUE) if ended else 0) :]
        types = self._types.get(self._key or "", TEXT)
        said = _json(value)[1:-1] if self._streams else _json(value_of(value, types))
        said += '"' if self._streams and ended else ""
        if said:
            yield Arguments(said)
        if ended:
            self._key = None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
