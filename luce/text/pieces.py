"""Says what a model's text is cut into: reasoning, text and calls, and the values of calls' parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

TEXT = frozenset({"string"})
SHOWN = {"properties": "object", "items": "array"}  # A schema with such a key says the type so.


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


def parameter_types(schema: Any) -> dict[str, frozenset[str]]:
    """Returns the JSON types that a tool's schema lets each of its parameters have."""
    return {str(key): types_of(each, schema) for key, each in properties(schema).items()}


def properties(schema: Any) -> Mapping[str, Any]:
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def value_of(text: str, types: Collection[str] = TEXT) -> Any:
    """Returns a parameter's value. It is raw text where a string is one of its types, unless it is null or
    JSON of another of its types."""
    try:
        value = msgspec.json.decode(text)  # It refuses NaN, numbers beyond F64 and half a surrogate pair.
    except (ValueError, RecursionError):
        value = {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)
    if isinstance(value, str):  # Quoted JSON, where only a string will do, is what was meant as it is.
        return text
    return value if not kind_of(value).isdisjoint(types) else text


def types_of(schema: Any, root: Any, seen: set[str] | None = None) -> frozenset[str]:
    """Returns the JSON types that a schema names; "string" alone where it names none. `root` is the schema
    that it is a part of, and that its references are of. Those that were `seen` are not followed again."""
    found, seen = set[str](), set() if seen is None else seen
    for each in alternatives(schema, root, seen):
        named = each.get("type")
        found |= {named} if isinstance(named, str) else set(_texts(named))
        for value in choices_of(each) or ():
            found |= kind_of(value)
        if "type" not in each:
            found |= {kind for key, kind in SHOWN.items() if key in each}
            parts = _listed(each.get("allOf"))
            found |= {kind for part in parts for kind in types_of(part, root, seen)}
    return frozenset(found) or TEXT


def choices_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """Returns the values that a schema lists, or None where it lists none."""
    listed = schema.get("enum")
    if isinstance(listed, list) and listed:
        return listed
    return [schema["const"]] if "const" in schema else None


def alternatives(schema: Any, root: Any, seen: set[str] | None = None) -> list[Mapping[str, Any]]:
    """Returns the schemas of which a value has to fit one. None of them is a reference, or leaves it to
    others which type it is of."""
    found, left, seen = list[Mapping[str, Any]](), [schema], set() if seen is None else seen
    while left:
        each = left.pop()
        if not isinstance(each, Mapping):
            continue
        inner: list[Any] = []
        if not ("type" in each or choices_of(each) or SHOWN.keys() & each.keys()):
            inner = _listed(each.get("anyOf")) + _listed(each.get("oneOf"))
            if len(parts := _listed(each.get("allOf"))) == 1:  # Several hold together.
                inner += parts
            if isinstance(ref := each.get("$ref"), str):
                inner += [] if ref in seen else [_pointed(root, ref)]
                seen.add(ref)
        left += reversed(inner)
        found += [] if inner else [each]
    return found


def _texts(value: Any) -> list[str]:
    return [each for each in _listed(value) if isinstance(each, str)]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _pointed(root: Any, ref: str) -> Any:
    """Returns what a reference within `root` is to, or None: "#/$defs/Name"."""
    where, *steps = ref.split("/")
    found = root if where == "#" else None
    for step in steps:
        key = step.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def kind_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    kinds = {str: "string", list: "array", dict: "object", type(None): "null"}
    return {kinds[type(value)]}
