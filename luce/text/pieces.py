"""Has what a model's text is cut into: reasoning, text and calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Call:
    """This is a whole call of a tool. `arguments` is a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class CallBegin:
    """This is a call of a tool whose arguments come in pieces of their JSON, up to a CallEnd."""

    name: str


@dataclass(frozen=True)
class Arguments:
    text: str


@dataclass(frozen=True)
class CallEnd:
    """This is the end of a call. `whole` is False where the text ended within it: its text, from the mark on,
    follows as Text."""

    whole: bool = True


Piece = Reasoning | Text | Call | CallBegin | Arguments | CallEnd


@dataclass
class Whole:
    """All pieces of an answer together."""

    reasoning: str = ""
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    _name: str = ""  # The call that is open has it.
    _arguments: str = ""

    def add(self, piece: Piece) -> None:
        match piece:
            case Reasoning(text):
                self.reasoning += text
            case Text(text):
                self.text += text
            case CallBegin(name):
                self._name, self._arguments = name, ""
            case Arguments(text):
                self._arguments += text
            case Call():
                self.calls.append(piece)
            case CallEnd(whole):
                self.calls += [Call(self._name, self._arguments)] if whole else []


def in_parts(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yields the pieces with each whole call as its begin, arguments and end."""
    for piece in pieces:
        if isinstance(piece, Call):
            yield from (CallBegin(piece.name), Arguments(piece.arguments), CallEnd())
        else:
            yield piece


def joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yields the pieces with neighbours of text, or of reasoning, as one. There are some where events came
    faster than they were read."""
    last: Reasoning | Text | None = None
    for piece in pieces:
        if last is not None and isinstance(piece, type(last)):
            last = type(last)(last.text + piece.text)
            continue
        if last is not None:
            yield last
        last = piece if isinstance(piece, (Reasoning, Text)) else None
        if last is None:
            yield piece
    if last is not None:
        yield last


class Shown:
    """Puts thoughts where a request wants them: "apart", as they come; "within" the text, between the marks
    that templates write; or "left out"."""

    def __init__(self, thoughts: str = "apart"):
        self._thoughts, self._open = thoughts, False

    def pieces(self, pieces: Iterable[Piece]) -> list[Piece]:
        if self._thoughts == "apart":
            return list(pieces)
        if self._thoughts == "left out":
            return [piece for piece in pieces if not isinstance(piece, Reasoning)]
        shown: list[Piece] = []
        for piece in pieces:
            thinks = isinstance(piece, Reasoning)
            if thinks != self._open:
                shown.append(Text("<think>\n" if thinks else "\n</think>\n\n"))
                self._open = thinks
            shown.append(Text(piece.text) if isinstance(piece, Reasoning) else piece)
        return shown


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
