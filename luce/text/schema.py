"""JSON Schema, translated for llguidance: one translation for tools' parameters and for response formats.

llguidance makes grammars of a part of JSON Schema. Here any schema becomes one of that part which takes the
same values:

1. A value has to fit several places of the schema at once: those of `allOf`, `$ref`, `properties` and
   `patternProperties` alike. Such a set of places is a tuple of Terms.
2. For each set is worked out what it takes, by kinds of values (kinds.py): for each kind some alternatives,
   whose items and properties have to fit sets again. Sets are known by their members, so this ends, and
   recursive schemas work.
3. Sets that no finite value fits are found. They are left out where they may be, so that a grammar never has
   a dead end; where the whole schema is such a one, it is refused.
4. What is left is written as `$defs` of plain objects, arrays and alternatives.

What no grammar can hold a text to is a note of the alternative that it belongs to. An exact translation
raises the first note as SchemaError. Another one leaves the keyword out: it takes more values, never fewer.

Annotations hold nothing: `title`, `default`, `contentEncoding`, unknown `format`s, and `uniqueItems`, which
other servers ignore too. `oneOf` is as `anyOf`, unless its alternatives only require properties.

An object that lists `properties` and says nothing of others is closed, as with other local servers: a weak
model would add properties without end. `additionalProperties: true` opens one object; a request opens all
of them by vLLM's `structured_outputs: {"disable_additional_properties": false}`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from luce.errors import ArgumentError
from luce.text.kinds import ANY, Array, Boolean, Fits, Kind, Number, Object, SchemaError, String, Union
from luce.text.pattern import literal, matches, refusal
from luce.text.places import Places
from luce.text.references import step
from luce.text.scalars import MAX_WHOLE, scalar

# Such whitespace stands between parts of JSON. It is bounded, so that no text is blank forever.
WHITESPACE = r"( |\n[ \t]{0,40})?"
MAX_SETS = 20_000  # A schema has at most so many sets of places,
MAX_COUNTED = 64  # and so many alternatives that count the properties of an object.
_BLAMED = ("enum", "const", "not", "allOf", "anyOf", "oneOf", "$ref", "type")


@dataclass(frozen=True)
class Value:
    """What a call's parameter takes: any `text`, or the `texts` that are listed or that match all of one of
    `regexes`, and values that are no strings: those of the schema `json`, if there is one."""

    text: bool
    texts: tuple[str, ...] = ()
    regexes: tuple[tuple[str, ...], ...] = ()
    json: dict[str, Any] | None = None


@dataclass(frozen=True)
class Parameter:
    name: str
    required: bool
    value: Value


@dataclass(frozen=True)
class Signature:
    """Parameters of a call, in their order, and behind them `least` to `most` others, each with a name that
    matches one of the regexes. There are others where the schema says which; a tool that lists no parameters
    has none."""

    parameters: tuple[Parameter, ...]
    others: tuple[tuple[str, Value], ...] = ()
    least: int = 0
    most: int | None = None


def translated(
    schema: Any, exact: bool = True, closed: bool = True, whitespace: str | None = WHITESPACE
) -> dict[str, Any]:
    """Returns llguidance's form of a schema. `whitespace` is the regex of what may stand between parts of
    JSON; None lets nothing stand there. Raises SchemaError where no text can be held to the schema."""
    return _deep(lambda: _Translation(schema, exact, closed).json(whitespace))


def arguments(schema: Any, exact: bool = True, closed: bool = True) -> dict[str, Any]:
    """Returns translated()'s form of the objects that a schema takes, without whitespace: the arguments of calls of a
    tool whose parameters have this schema. Raises SchemaError."""
    return _deep(lambda: _Translation(schema, exact, closed).arguments())


def signatures(schema: Any, exact: bool = True, closed: bool = True) -> list[Signature]:
    """Returns the forms of calls of a tool whose parameters have this schema. Raises SchemaError."""
    return _deep(lambda: _Translation(schema, exact, closed).signatures())


def _deep(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except RecursionError as error:
        raise ArgumentError("the schema is nested too deep") from error


@dataclass
class _Set:
    """What a set of places takes: `union` as it was worked out, `ways` as they are written, and whether some
    finite value is among them. `why` is the reason where an alternative turned out to be empty."""

    fits: Fits
    union: Union
    ways: list[tuple[Kind, Any]] = field(default_factory=list)  # Scalars have their JSON schema beside them.
    good: bool = False
    why: SchemaError | None = None

    @property
    def at(self) -> str:
        return self.fits[0].at if self.fits else ""


def _children(kind: Kind) -> Iterator[Fits]:
    """Yields the sets that a value's items and properties have to fit."""
    if isinstance(kind, Array):
        yield from kind.prefix
        yield kind.items or ()
    elif isinstance(kind, Object):
        yield from kind.properties.values()
        yield from kind.patterns.values()
        yield kind.additional or ()


class _Translation:
    def __init__(self, schema: Any, exact: bool, closed: bool):
        self._exact, self._closed = exact, closed
        self._places = Places(schema)
        self._root, self._never = self._places.root, self._places.never
        self._sets = dict[Fits, _Set]()
        self._numbers = dict[Fits, int]()  # These sets are written as $defs of the document under way.
        self._open_keys = False  # It has an object with other properties than the listed ones.
        self._explore()

    # ---- what is asked for

    def json(self, whitespace: str | None) -> dict[str, Any]:
        root = self._sets[self._root]
        if not root.good:
            raise self._empty(self._root)
        self._require_held()
        return self._document(self._written(root), whitespace)

    def signatures(self) -> list[Signature]:
        objects = self._objects()
        if self._exact:
            objects = [each for found in objects for each in self._counted(found, self._root)]
        found = list[Signature]()
        for form in (self._signature(each, [each] if self._exact else objects) for each in objects):
            found += [form] if form not in found else []
        return found or [Signature(())]

    def arguments(self) -> dict[str, Any]:
        objects = [
            replace(each, additional=self._never)
            if self._closed and each.additional is None and each.least <= len(each.properties)
            else each
            for each in self._objects() or [Object(most=0)]
        ]
        return self._document(self._alternatives([(each, None) for each in objects], self._root), None)

    def _objects(self) -> list[Object]:
        """Returns the objects that are among the schema's values."""
        root = self._sets[self._root]
        objects = [kind for kind, _ in root.ways if isinstance(kind, Object) and self._is_good(kind)]
        objects = [Object()] if root.union is ANY else objects
        if self._exact and not objects:
            raise SchemaError("type", "/type", "takes no object") if root.good else self._empty(self._root)
        self._require_held()
        return objects

    def _signature(self, kind: Object, kinds: Sequence[Object]) -> Signature:
        """Returns the form of calls with one object's parameters. Their values are those of all `kinds`: a
        grammar cannot tell text and JSON apart before what follows them."""
        parameters, others = list[Parameter](), list[tuple[str, Value]]()
        for key in kind.properties:
            fits = [each for each in dict.fromkeys(one.at(key) for one in kinds) if self._sets[each].good]
            if key in kind.required or self._sets[kind.properties[key]].good:
                parameters.append(Parameter(key, key in kind.required, self._value(fits)))
        patterns = list(kind.patterns.items())
        if kind.additional is not None or not self._closed or kind.least > len(kind.properties):
            patterns.append((r"[^<>\n]+", kind.additional or ()))
        for regex, those in patterns if kind.most is None or kind.most > len(kind.required) else ():
            if self._sets[those].good:
                others.append((regex, self._value([those if len(kinds) == 1 else ()])))
        least = max(kind.least - (len(kind.required) if self._exact else len(parameters)), 0)
        most = None if kind.most is None else max(kind.most - len(kind.required), 0)
        return Signature(tuple(parameters), tuple(others), least, most)

    def _value(self, every: Iterable[Fits]) -> Value:
        """Returns the values that fit one of some sets."""
        strings, others = list[String](), list[tuple[Kind, Any]]()
        for found in map(self._sets.__getitem__, every):
            if found.union is ANY:
                return Value(text=True)
            for way in found.ways:
                if isinstance(way[0], String):
                    strings.append(way[0])
                elif self._is_good(way[0]) and way not in others:
                    others.append(way)
        texts: list[str] = []
        regexes: list[tuple[str, ...]] = []
        for each in strings:
            length = () if not each.least and each.most is None else (_length(each.least, each.most),)
            if each.only is not None:
                texts += [text for text in each.only if text not in texts]
            elif not (length or each.regexes):
                return Value(text=True)
            else:
                regexes.append(each.regexes + length)
        nested = any(isinstance(kind, (Array, Object)) for kind, _ in others)
        if not (strings or others) or (regexes and nested and not self._exact):
            return Value(text=True)  # Terminals are as long as can be: text would hide JSON that is allowed.
        json = self._document(self._alternatives(others), WHITESPACE) if others else None
        return Value(False, tuple(texts), tuple(dict.fromkeys(regexes)), json)

    # ---- sets of places

    def _explore(self) -> None:
        """Works out all sets that the root leads to, and which of them some finite value fits."""
        left, order = [self._root, self._never, ()], list[_Set]()
        while left:
            fits = left.pop()
            if fits in self._sets:
                continue
            union = self._places.union(fits)
            found = self._sets[fits] = _Set(fits, union, good=union is ANY)
            if union is not ANY:
                self._shape(found)
            if len(self._sets) > MAX_SETS:
                raise ArgumentError(f"the schema has more than {MAX_SETS} places and combinations of them")
            order.append(found)
            left += [each for kind, _ in found.ways for each in _children(kind)]
        changed = True
        while changed:
            changed = False
            for each in reversed(order):
                if not each.good and any(self._is_good(kind) for kind, _ in each.ways):
                    each.good = changed = True

    def _shape(self, found: _Set) -> None:
        """Makes of what a set takes what can be written."""
        for kind in (kind for ways in found.union.values() for kind in ways):
            if isinstance(kind, Array):
                found.ways.append((kind, None))
            elif isinstance(kind, Object):
                found.ways.append((self._described(kind, found), None))
            else:
                try:
                    found.ways.append(scalar(kind, found.at, self._exact))
                except SchemaError as error:
                    found.why = error

    def _described(self, kind: Object, found: _Set) -> Object:
        """Returns an object whose properties, patterns and others say all that it takes."""
        if missing := [key for key in kind.required if key not in kind.properties]:
            kind = replace(kind, properties={**kind.properties, **{key: kind.at(key) for key in missing}})
        if self._closed and kind.listed and kind.additional is None:
            kind = replace(kind, additional=self._never)
        return self._apart(self._named(kind, found) if kind.names else kind, found)

    def _named(self, kind: Object, found: _Set) -> Object:
        """Returns an object without `names`: its properties are those whose names fit them."""
        union = self._places.union(kind.names)
        ways: list[String] = union.get("string", [])
        notes = [note for way in ways for note in way.notes]
        kind = replace(kind, names=()).noted(notes)
        if any(way == String(way.notes, formats=way.formats) for way in ways):
            return kind
        properties = {
            key: fits if any(map(_takes(key), ways)) else self._never for key, fits in kind.properties.items()
        }
        others = kind.additional != self._never or kind.patterns
        if all(way.only is not None for way in ways):
            for key in (key for way in ways for key in way.only or () if _takes(key)(way)):
                properties.setdefault(key, kind.at(key))
            return replace(kind, properties=properties, patterns={}, additional=self._never)
        kind = replace(kind, properties=properties)
        regexes = [regex for way in ways for regex in _name_regexes(way)]
        if not others:
            return kind
        clear = not kind.patterns and not any(
            matches((regex,), key) for regex in regexes for key in properties
        )
        if not clear or any(len(list(_name_regexes(way))) != 1 for way in ways):
            return kind.noted([SchemaError("propertyNames", step(found.at, "propertyNames"))])
        return replace(kind, patterns={"|".join(regexes): kind.additional or ()}, additional=self._never)

    def _apart(self, kind: Object, found: _Set) -> Object:
        """Returns an object of whose patterns no two match the same name, and none a listed one, but for
        scalars: llguidance would meet what both say once more, and cannot where that is recursive."""
        for regex, fits in kind.patterns.items():
            union = self._places.union(fits)
            nested = union is not ANY and not union.keys().isdisjoint(("array", "object"))
            if nested and any(matches((regex,), key) for key in kind.properties):
                note = SchemaError("patternProperties", step(found.at, "patternProperties"),
                                   "cannot be enforced: a pattern matches a name that is listed")  # fmt: skip
                kind = replace(kind, patterns={**kind.patterns, regex: ()}).noted([note])
        patterns = {"type": "object", "patternProperties": {f"^(?:{each})$": True for each in kind.patterns}}
        if len(kind.patterns) < 2 or not refusal(json.dumps(patterns)):
            return kind
        meant: set[tuple[Any, ...]] = set(kind.patterns.values())
        one = "|".join(kind.patterns)
        if len(meant) == 1:
            return replace(kind, patterns={one: meant.pop()})
        note = SchemaError("patternProperties", step(found.at, "patternProperties"),
                           "cannot be enforced: two patterns match the same name")  # fmt: skip
        return replace(kind, patterns={one: ()}).noted([note])

    def _is_good(self, kind: Kind) -> bool:
        """Says whether some finite value is of a kind, as far as is known."""
        if isinstance(kind, Array):
            return kind.least <= self._longest(kind)
        if isinstance(kind, Object):
            possible = sum(self._sets[fits].good for fits in kind.properties.values())
            possible = possible if not self._has_others(kind) else MAX_WHOLE
            return (
                all(self._sets[kind.properties[key]].good for key in kind.required)
                and kind.least <= possible
                and (kind.most is None or max(len(kind.required), kind.least) <= kind.most)
            )
        return True

    def _has_others(self, kind: Object) -> bool:
        return any(self._sets[fits].good for fits in (*kind.patterns.values(), kind.additional or ()))

    def _longest(self, kind: Array) -> float:
        """Returns how many items an array may have."""
        most: float = math.inf if kind.most is None else kind.most
        for n, fits in enumerate(kind.prefix):
            if not self._sets[fits].good:
                return min(most, n)
        rest = self._sets[kind.items or ()]
        if not rest.good:
            return min(most, len(kind.prefix))
        if kind.unique and (count := self._different(rest)) is not None and not kind.prefix:
            return min(most, count)
        return most

    def _different(self, found: _Set) -> int | None:
        """Returns how many values a set has, if these are plainly few."""
        total = 0
        for kind, written in found.ways:
            if written is None:
                return None
            if isinstance(kind, Boolean):
                total += len(kind.values)
            elif isinstance(kind, (Number, String)):
                if kind.only is None:
                    return None
                total += len(kind.only)
            else:
                total += 1
        return total if found.ways else None

    def _require_held(self) -> None:
        """Raises the first note of what a value of the root may have, if all has to be held."""
        seen, left = {self._root}, [self._root] if self._exact else []
        for fits in left:
            for kind, _ in self._sets[fits].ways:
                if not self._is_good(kind):
                    continue
                for note in kind.notes:
                    raise note
                for each in _children(kind):
                    if each not in seen and self._sets[each].good:
                        seen.add(each)
                        left.append(each)

    def _empty(self, fits: Fits) -> SchemaError:
        """Returns why no value fits a set."""
        seen = set[Fits]()
        while fits not in seen:
            seen.add(fits)
            found = self._sets[fits]
            if found.why is not None:
                return found.why
            below = None
            for kind, _ in found.ways:
                if isinstance(kind, Object):
                    bad = [key for key in kind.required if not self._sets[kind.properties[key]].good]
                    below = below or (kind.properties[bad[0]] if bad else None)
                    if not bad:
                        key = "minProperties" if kind.least else "maxProperties"
                        return SchemaError(key, step(found.at, key), "cannot be fulfilled")
                elif isinstance(kind, Array):
                    fitting = int(self._longest(kind))
                    if kind.most is not None and kind.least > kind.most:
                        return SchemaError("minItems", step(found.at, "minItems"), "is more than `maxItems`")
                    below = below or kind.at(fitting)
            if below is None or below == self._never:
                schema = fits[0].schema if fits else {}
                named = [key for key in _BLAMED if isinstance(schema, dict) and key in schema]
                key = named[0] if named else found.at.rpartition("/")[2]
                return SchemaError(key, step(found.at, key) if named else found.at, "takes no value")
            fits = below
        why = "takes no finite value: each would have another one in it"
        return SchemaError("$ref", step(self._sets[fits].at, "$ref"), why)

    # ---- writing

    def _document(self, schema: dict[str, Any], whitespace: str | None) -> dict[str, Any]:
        """Returns a schema with the $defs that it and they refer to."""
        definitions = dict[str, Any]()
        while len(definitions) < len(self._numbers):
            fits = list(self._numbers)[len(definitions)]
            definitions[str(len(definitions))] = self._written(self._sets[fits])
        options: dict[str, Any] = {"whitespace_flexible": False}
        options = options if whitespace is None else {"whitespace_pattern": whitespace}
        if self._open_keys:  # Else a listed name could be spelled with \u as another one.
            options["json_allowed_escapes"] = 'nrbtf\\"'
        self._numbers, self._open_keys = {}, False
        return schema | ({"$defs": definitions} if definitions else {}) | {"x-guidance": options}

    def _part(self, fits: Fits) -> Any:
        """Returns a set as a part of another one's schema."""
        found = self._sets[fits]
        if not found.good:
            return False
        if all(written is not None for _, written in found.ways):
            return self._written(found)
        return {"$ref": f"#/$defs/{self._numbers.setdefault(fits, len(self._numbers))}"}

    def _written(self, found: _Set) -> dict[str, Any]:
        if found.union is ANY:
            return {}
        return self._alternatives([each for each in found.ways if self._is_good(each[0])], found.fits)

    def _alternatives(self, ways: list[tuple[Kind, Any]], fits: Fits = ()) -> dict[str, Any]:
        parts = list[dict[str, Any]]()
        for kind, written in ways:
            if isinstance(kind, Array):
                parts.append(self._array(kind))
            elif isinstance(kind, Object):
                parts += map(self._object, self._counted(kind, fits))
            else:
                parts.append(written)
        return parts[0] if len(parts) == 1 else {"anyOf": parts}

    def _array(self, kind: Array) -> dict[str, Any]:
        longest = self._longest(kind)
        prefix = [self._part(each) for each in kind.prefix[: None if longest == math.inf else int(longest)]]
        found: dict[str, Any] = {"type": "array"} | ({"prefixItems": prefix} if prefix else {})
        if longest > len(prefix):
            found["items"] = self._part(kind.items or ())
        elif longest == len(prefix):
            found["items"] = False
        found |= {"minItems": kind.least} if kind.least else {}
        return found | ({} if longest == math.inf else {"maxItems": int(longest)})

    def _object(self, kind: Object) -> dict[str, Any]:
        patterns = {f"^(?:{each})$": self._part(fits) for each, fits in kind.patterns.items()}
        found = {
            "type": "object",
            "properties": {key: self._part(fits) for key, fits in kind.properties.items()},
            "required": list(kind.required),
            "additionalProperties": self._part(kind.additional or ()),
        } | ({"patternProperties": patterns} if patterns else {})
        self._open_keys = self._open_keys or bool(kind.properties and self._has_others(kind))
        found |= {"minProperties": kind.least} if kind.least else {}
        return found | ({} if kind.most is None else {"maxProperties": kind.most})

    def _counted(self, kind: Object, fits: Fits) -> list[Object]:
        """Returns objects that together take what one does, in which at most others than the listed
        properties are counted."""
        open_, required = self._has_others(kind), len(kind.required)
        optional = [
            key for key, each in kind.properties.items() if key not in kind.required and self._sets[each].good
        ]
        needed = max(kind.least - required, 0)
        room = None if kind.most is None else kind.most - required
        if room is not None and not open_ and room >= len(optional):
            room = None
        if not optional or (needed == 0 and room is None):
            if kind.least == 0 and kind.most is None:
                return [kind]
            least = required + needed if needed and open_ else 0
            return [replace(kind, least=least, most=kind.most if room is not None and open_ else None)]
        found: list[Object] = []
        left: list[tuple[int, int, int | None, dict[str, bool]]] = [(0, needed, room, {})]
        while left:
            n, needed, room, chosen = left.pop()
            rest = optional[n:]
            if room is not None and not open_ and room >= len(rest):
                room = None
            if needed > len(rest) and not open_:
                continue
            if not rest or (needed == 0 and room is None) or room == 0:
                free = open_ and room != 0
                found.append(self._chosen(kind, chosen | {key: False for key in rest if room == 0}, free))
                names = len(found[-1].required)
                least = names + needed if needed and free else 0
                most = names + room if free and room is not None else None
                found[-1] = replace(found[-1], least=least, most=most)
            else:
                less = None if room is None else room - 1
                left.append((n + 1, needed, room, chosen | {rest[0]: False}))
                left.append((n + 1, max(needed - 1, 0), less, chosen | {rest[0]: True}))
            if len(found) + len(left) > MAX_COUNTED:
                if self._exact:
                    key = "minProperties" if kind.least else "maxProperties"
                    raise SchemaError(key, step(self._sets[fits].at, key))
                return [replace(kind, least=0, most=None)]
        return found

    def _chosen(self, kind: Object, chosen: Mapping[str, bool], free: bool) -> Object:
        """Returns an object that has some of its optional properties and has not others. `free` leaves what
        is not listed."""
        kept = tuple(key for key, kept in chosen.items() if kept)
        properties = {
            key: fits if chosen.get(key, True) else self._never for key, fits in kind.properties.items()
        }
        kind = replace(kind, properties=properties, required=(*kind.required, *kept))
        return kind if free else replace(kind, patterns={}, additional=self._never)


def _length(least: int, most: int | None) -> str:
    return f"[\\x{{0}}-\\x{{10ffff}}]{{{least},{'' if most is None else most}}}"


def _takes(text: str) -> Callable[[String], bool]:
    def takes(kind: String) -> bool:
        length = kind.least <= len(text) and (kind.most is None or len(text) <= kind.most)
        return length and (kind.only is None or text in kind.only) and matches(kind.regexes, text)

    return takes


def _name_regexes(kind: String) -> Iterator[str]:
    """Yields what a name has to match all."""
    yield from kind.regexes
    if kind.only is not None:
        yield "|".join(map(literal, kind.only))
    elif kind.least or kind.most is not None:
        yield _length(kind.least, kind.most)
