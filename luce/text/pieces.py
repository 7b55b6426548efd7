"""Says what a model's text is cut into: reasoning, text and calls, and the values of calls' parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from luce.text.literals import decoded, from_json

TEXT = frozenset({"string"})
SHOWN = {"properties": "object", "items": "array"}  # A schema with such a key says the type so.
# Types as Python, databases and other schemas name them, in any case.
TYPE_NAMES = {
    "str": "string", "text": "string", "char": "string", "varchar": "string", "enum": "string",
    "int": "integer", "long": "integer", "short": "integer", "bigint": "integer", "uint": "integer",
    "int32": "integer", "int64": "integer", "uint32": "integer", "uint64": "integer",
    "float": "number", "double": "number", "decimal": "number", "num": "number", "numeric": "number",
    "float32": "number", "float64": "number", "bool": "boolean", "list": "array", "arr": "array",
    "tuple": "array", "set": "array", "sequence": "array", "dict": "object", "map": "object",
    "mapping": "object", "struct": "object", "none": "null", "nonetype": "null", "nil": "null",
}  # fmt: skip
WORDS = {"true": True, "false": False, "none": None, "null": None}
JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "array", "object", "null"})


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


def undecided(text: str, marks: Sequence[str]) -> int:
    """Returns the length of the text's end that may be the beginning of a mark."""
    longest = min(max(map(len, marks), default=1) - 1, len(text))
    ends = ((n, text[-n:]) for n in range(longest, 0, -1))
    return next((n for n, end in ends if any(mark.startswith(end) for mark in marks)), 0)


class Parameters:
    """What a tool's schema says of its parameters: their `names`, whether there may be others (`open`), and
    types(name)."""

    def __init__(self, schema: Any):
        self._schema, self._listed = schema, properties(schema)
        self._others = list[Any](_others(schema))
        self._types = dict[str, frozenset[str]]()
        self.names = frozenset(self._listed)
        self.open = not self.names if not self._others else any(each is not False for each in self._others)

    def types(self, name: str) -> frozenset[str]:
        """Returns the JSON types that a parameter may have: "string" where the schema says nothing of it."""
        if name not in self._types:
            given = [self._listed[name]] if name in self._listed else self._others
            self._types[name] = types_of({"anyOf": given} if len(given) > 1 else given[0] if given else {},
                                         self._schema)  # fmt: skip
        return self._types[name]


def properties(schema: Any) -> dict[str, Any]:
    """Returns the schemas of an object's properties by name, wherever the schema has them: at its root, behind
    references, in parts and in alternatives. One that stands at several places may have any of their types."""
    found = dict[str, list[Any]]()
    for part in _parts(schema):
        listed = part.get("properties")
        for name, each in listed.items() if isinstance(listed, Mapping) else ():
            found.setdefault(str(name), []).append(each)
    return {name: each[0] if len(each) == 1 else {"anyOf": each} for name, each in found.items()}


def _others(schema: Any) -> Iterator[Any]:
    """Yields what a schema says of properties that it does not list."""
    for part in _parts(schema):
        if "additionalProperties" in part:
            yield part["additionalProperties"]
        patterns = part.get("patternProperties")
        yield from patterns.values() if isinstance(patterns, Mapping) else ()


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yields a schema and all that it is made of for the same value: what it refers to, its parts and its
    alternatives."""
    left, seen = [schema], set[int]()
    while left:
        each = left.pop()
        if not isinstance(each, Mapping) or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        inner = [part for key in ("allOf", "anyOf", "oneOf") for part in _listed(each.get(key))]
        inner += [each[key] for key in ("if", "then", "else") if key in each]
        if isinstance(ref := each.get("$ref"), str):
            inner.append(_pointed(schema, ref))
        left += reversed(inner)


def value_of(text: str, types: Collection[str] = TEXT) -> Any:
    """Returns a parameter's value. Where a string is one of its types it is the raw text, unless it is null or
    JSON of another of its types. Where none is, it is JSON or a literal as Python writes it, be it in quotes, of
    one of them; else the raw text."""
    raw, word = "string" in types, text.strip().lower()
    try:
        value = WORDS[word] if word in WORDS else (from_json if raw else decoded)(text)
        if isinstance(value, str) and not raw:
            value = decoded(value)
    except ValueError:
        return text
    if isinstance(value, str) or kind_of(value).isdisjoint(types):
        return text
    if isinstance(value, float) and value.is_integer() and "number" not in types:
        return int(value)
    return value


def types_of(schema: Any, root: Any, seen: set[str] | None = None) -> frozenset[str]:
    """Returns the JSON types that a schema names; "string" alone where it names none. `root` is the schema
    that it is a part of, and that its references are of. Those that were `seen` are not followed again."""
    found, seen = set[str](), set() if seen is None else seen
    for each in alternatives(schema, root, seen):
        named = each.get("type")
        for name in [named] if isinstance(named, str) else _texts(named):
            found |= json_types(name)
        for value in choices_of(each) or ():
            found |= kind_of(value)
        found |= {"null"} if found and each.get("nullable") is True else set()
        if "type" not in each:
            found |= {kind for key, kind in SHOWN.items() if key in each}
            parts = _listed(each.get("allOf"))
            found |= {kind for part in parts for kind in types_of(part, root, seen)}
    found = found or set(TEXT)
    if isinstance(schema, Mapping) and schema.get("nullable") is True:
        found.add("null")
    return frozenset(found)


def json_types(name: str) -> set[str]:
    """Returns the JSON types that a type's name stands for: "integer", "INT", "list[str]", "int | None",
    "Optional[int]". One that nobody knows is a string."""
    found = set[str]()
    for each in re.sub(r"\[.*\]|<.*>|\(.*\)", "", name.strip()).lower().split("|"):
        each = each.strip()
        if each in ("optional", "union"):
            inner = name[name.find("[") + 1 : name.rfind("]")]
            found |= {kind for part in inner.split(",") for kind in json_types(part)}
            found |= {"null"} if each == "optional" else set()
        else:
            found.add(each if each in JSON_TYPES else TYPE_NAMES.get(each, "string"))
    return found


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


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
    """Returns what a reference within `root` is to, or None: "#/$defs/Name", or "#", which is all of it."""
    where, *steps = ref.split("/")
    found = root if where == "#" else None
    for step in steps:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(key)] if key.isdecimal() and int(key) < len(found) else None
        else:
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
