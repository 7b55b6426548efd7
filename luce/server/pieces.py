"""Says what a model's text is cut into: reasoning, text and calls, and the values of calls' parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec


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


def undecided(text: str, marks: Sequence[str]) -> int:
    """Returns the length of the text's end that may be the beginning of a mark."""
    longest = min(max(map(len, marks), default=1) - 1, len(text))
    ends = ((n, text[-n:]) for n in range(longest, 0, -1))
    return next((n for n, end in ends if any(mark.startswith(end) for mark in marks)), 0)


def properties(schema: Any) -> Mapping[str, Any]:
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def value_of(text: str, schema: Any) -> Any:
    """Returns a parameter's value. It is raw text where a string is one of its types, unless it is null or
    JSON of another of its types, and where the schema says no type."""
    types = types_of(schema)
    try:
        value = msgspec.json.decode(text)  # It refuses NaN, numbers beyond F64 and half a surrogate pair.
    except (ValueError, RecursionError):
        value = {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)
    if isinstance(value, str):  # Quoted JSON, where only a string will do, is what was meant as it is.
        return text
    return value if kind_of(value) & types else text


def types_of(schema: Any) -> set[str]:
    """Returns the JSON types that a schema names; "string" alone where it names none."""
    if not isinstance(schema, Mapping):
        return {"string"}
    found = set[str]()
    named = schema.get("type")
    found |= {named} if isinstance(named, str) else set(named) if isinstance(named, list) else set()
    for key in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(key) or ():
            found |= types_of(each)
    for value in [*(schema.get("enum") or ()), *([schema["const"]] if "const" in schema else ())]:
        found |= kind_of(value)
    return found or ({"object"} if "properties" in schema else {"string"})


def kind_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    kinds = {str: "string", list: "array", dict: "object", type(None): "null"}
    return {kinds[type(value)]}
