"""Says what a tool's schema has to say of its parameters' types, and reads the values that models write for them.

A schema is read as widely as it can be, since a value that was written is there: what no grammar could hold it to
(schema.py) may still say its type.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from luce.text.literals import decoded, from_json
from luce.text.places import TYPES
from luce.text.references import References

TEXT = frozenset({"string"})
WORDS = {"true": True, "false": False, "none": None, "null": None}
SHOWN = {"properties": "object", "items": "array"}  # A schema with such a key says the type so.
# Types as databases and other languages name them.
TYPE_NAMES = TYPES | {
    "text": "string", "char": "string", "varchar": "string", "enum": "string", "short": "integer",
    "bigint": "integer", "uint": "integer", "int32": "integer", "int64": "integer", "uint32": "integer",
    "uint64": "integer", "decimal": "number", "num": "number", "numeric": "number", "float32": "number",
    "float64": "number", "arr": "array", "sequence": "array", "map": "object", "mapping": "object",
    "struct": "object", "nil": "null",
}  # fmt: skip
DEEPEST = 64  # Schemas are followed so deep for a type.
_GENERIC = re.compile(r"\[.*\]|<.*>|\(.*\)")  # What a type's name has behind it.


class Parameters:
    """What a tool's schema says of its parameters: their `names`, wherever the schema has them, at its root, behind
    references, in parts and in alternatives; whether there may be others (`open`); types(name) and stated(name)."""

    def __init__(self, schema: Any):
        self._schema = schema
        self._references: References | None = None
        self._types = dict[str, frozenset[str]]()
        self._listed, self._others = dict[str, list[Any]](), list[Any]()
        for part in self._parts():
            listed, patterns = part.get("properties"), part.get("patternProperties")
            for name, each in listed.items() if isinstance(listed, Mapping) else ():
                self._listed.setdefault(str(name), []).append(each)
            self._others += [part["additionalProperties"]] if "additionalProperties" in part else []
            self._others += patterns.values() if isinstance(patterns, Mapping) else []
        self.names = frozenset(self._listed)
        self.open = any(each is not False for each in self._others) or not (self.names or self._others)

    def types(self, name: str) -> frozenset[str]:
        """Returns the JSON types that a parameter may have: "string" where the schema says nothing of it."""
        return self.stated(name) or TEXT

    def stated(self, name: str) -> frozenset[str]:
        """Returns the JSON types that the schema lets a parameter have: none where it says nothing of them."""
        if name not in self._types:
            given = [self._types_of(each, ()) for each in self._listed.get(name, self._others)]
            self._types[name] = frozenset[str]().union(*(each for each in given if each))
        return self._types[name]

    def _parts(self) -> Iterator[Mapping[str, Any]]:
        """Yields the schema, and all that it is made of for the same value."""
        left, seen = [self._schema], set[int]()
        while left:
            each = left.pop()
            if isinstance(each, Mapping) and id(each) not in seen:
                seen.add(id(each))
                yield each
                inner = [part for key in ("allOf", "anyOf", "oneOf") for part in _listed(each.get(key))]
                inner += [each[key] for key in ("if", "then", "else") if key in each]
                left += reversed([*inner, *self._referred(each)])

    def _referred(self, schema: Mapping[str, Any]) -> list[Any]:
        """Returns what a schema refers to."""
        names = [schema[key] for key in ("$ref", "$dynamicRef") if isinstance(schema.get(key), str)]
        if names and self._references is None:
            self._references = References(self._schema)
        found = [self._references.resolve(name, self._references.root) for name in names if self._references]
        return [target.schema for target in found if target]

    def _types_of(self, schema: Any, above: tuple[int, ...]) -> frozenset[str] | None:
        """Returns the types that a schema lets a value have, or None where it says nothing of them. It is not
        followed within itself."""
        if not isinstance(schema, Mapping) or id(schema) in above or len(above) > DEEPEST:
            return None
        above = (*above, id(schema))
        found = _own_types(schema)
        for each in [*_listed(schema.get("allOf")), *self._referred(schema)]:
            found = _both(found, self._types_of(each, above))
        for key in ("anyOf", "oneOf"):
            given = [self._types_of(each, above) for each in _listed(schema.get(key))]
            if given and all(each is not None for each in given):
                found = _both(found, frozenset[str]().union(*(each or () for each in given)))
        if schema.get("nullable") is True:  # It is OpenAPI's.
            found = (found or TEXT) | {"null"}
        return found


def _own_types(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """Returns the types that a schema itself names or shows."""
    named, listed = schema.get("type"), _listed(schema.get("enum"))
    listed = listed or ([schema["const"]] if "const" in schema else [])
    names = [each for each in (_listed(named) or [named]) if isinstance(each, str)]
    if names:
        return frozenset[str]().union(*map(json_types, names))
    if listed:
        return frozenset[str]().union(*map(kind_of, listed))
    return frozenset(kind for key, kind in SHOWN.items() if key in schema) or None


def _both(one: frozenset[str] | None, other: frozenset[str] | None) -> frozenset[str] | None:
    return one if other is None else other if one is None else (one & other) or one


def json_types(name: str) -> frozenset[str]:
    """Returns the JSON types that a type's name stands for: "integer", "INT", "list[str]", "int | None",
    "Optional[int]". One that nobody knows is a string."""
    found = set[str]()
    for each in map(str.strip, _GENERIC.sub("", name).lower().split("|")):
        if each in ("optional", "union"):
            inner = name[name.find("[") + 1 : name.rfind("]")].split(",")
            found |= frozenset[str]().union(*map(json_types, inner))
            found |= {"null"} if each == "optional" else set()
        else:
            found.add(TYPE_NAMES.get(each, "string"))
    return frozenset(found | {"integer"} if "number" in found else found)


def kind_of(value: Any) -> frozenset[str]:
    """Returns the JSON types of a value."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, (int, float)):
        return frozenset({"number", "integer"} if value == int(value) else {"number"})
    kinds = {str: "string", list: "array", dict: "object", type(None): "null"}
    return frozenset({kinds[type(value)]})


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def value_of(text: str, types: Collection[str] = TEXT) -> Any:
    """Returns a parameter's value. Where a string is one of its types it is the raw text, unless it is null or
    JSON of another of its types. Where none is, it is JSON or a literal as Python writes it, be it in quotes, of
    one of them; else the raw text."""
    raw, word = "string" in types, text.strip().lower()
    try:
        value: Any = WORDS[word] if word in WORDS else (from_json if raw else decoded)(text)
        if isinstance(value, str) and not raw:
            value = decoded(value)
    except ValueError:
        return text
    if isinstance(value, str) or kind_of(value).isdisjoint(types):
        return text
    whole = isinstance(value, float) and value.is_integer() and "number" not in types
    return int(value) if whole else value


def trimmed(text: str) -> str:
    """Returns a value without the line breaks of its marks: one behind the opening, and one before the closer, as
    the opening's line ends. Its own line ends stay."""
    return without_break(*behind_opening(text))


def behind_opening(text: str) -> tuple[str, bool]:
    """Returns the text behind an opening's line break, and whether lines end as those of Windows."""
    if text.startswith("\n"):
        return text[1:], False
    return text.removeprefix("\r\n"), True


def without_break(text: str, windows: bool) -> str:
    if windows and text.endswith("\r\n"):
        return text[:-2]
    return text.removesuffix("\n")
