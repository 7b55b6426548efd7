"""Finds a JSON object in a text that comes in pieces, and reads the call of a tool that it is."""

from __future__ import annotations

import re
from typing import Any

from luce.text.literals import decoded

_CLOSING = {"{": "}", "[": "]"}
_OUTSIDE = re.compile(r"[{}\[\]<\"']")  # What counts outside of strings. Python's may have single quotes.
_IN_STRING = {'"': re.compile(r'[\\"]'), "'": re.compile(r"[\\']")}


class Scan:
    """Takes a text that begins with an object's bracket, up to the object's end. Marks within its strings mean
    nothing. Where another mark, or the end of the text, comes before all brackets are closed, the missing ones
    are added; and what is closed once more right behind the object belongs to it."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0
        self._open: list[str] = []  # These brackets are to come.
        self._closed = 0  # The object has ended after so many letters.
        self._quote, self._escaped = "", False  # A string that begins so is open, and its next letter is escaped.

    @property
    def text(self) -> str:
        """Returns all that was taken."""
        return "".join(self._parts)

    @property
    def object(self) -> str:
        """Returns the object alone, whole."""
        return self.text[: self._closed] if self._closed else self.text.rstrip() + "".join(self._open[::-1])

    def push(self, text: str, final: bool) -> int | None:
        """Returns how much of the text is of the object, once that has ended."""
        at, end = 0, None
        while at < len(text) and end is None:
            if self._closed and text[at] not in "}]":
                end = at
            elif self._closed:
                at += 1
            elif self._quote:
                at = self._string(text, at)
            else:
                at, end = self._outside(text, at)
        self._parts.append(text[: len(text) if end is None else end])
        self._length += len(self._parts[-1])
        return len(text) if end is None and final else end

    def _string(self, text: str, at: int) -> int:
        """Returns where to go on from `at` in a string."""
        if self._escaped:
            self._escaped = False
            return at + 1
        found = _IN_STRING[self._quote].search(text, at)
        if found is None:
            return len(text)
        if found[0] == "\\":
            self._escaped = True
        else:
            self._quote = ""
        return found.end()

    def _outside(self, text: str, at: int) -> tuple[int, int | None]:
        """Returns where to go on from `at` outside of strings, and where the object has been cut off."""
        found = _OUTSIDE.search(text, at)
        if found is None:
            return len(text), None
        sign, after = found[0], found.end()
        if sign in "\"'":
            self._quote = sign
        elif sign in _CLOSING:
            self._open.append(_CLOSING[sign])
        elif self._open and sign == self._open[-1]:
            self._open.pop()
            self._closed = 0 if self._open else self._length + after
        else:
            return after, found.start()
        return after, None


def call_of(text: str) -> tuple[str, dict[str, Any]] | None:
    """Returns the name and the arguments of a call that is written as {"name": ..., "arguments": {...}}, or None
    where it is none. The arguments may be JSON in a string."""
    try:
        found = decoded(text)
        if not isinstance(found, dict):
            return None
        name, arguments = found.get("name"), found.get("arguments", found.get("parameters"))
        if isinstance(arguments, str) and arguments.strip():
            arguments = decoded(arguments)
    except ValueError:
        return None
    if not isinstance(name, str) or not name or not isinstance(arguments or {}, dict):
        return None
    return name, arguments or {}
