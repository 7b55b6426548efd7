"""Values of one kind that a schema takes: null, boolean, number, string, array, object; and unions of them.

A kind is a set of constraints that hold together. meet() gives the values that two of them take both, or
None where it is plain that there are none. `notes` are of keywords that a value has to fit too and that no
grammar can hold it to. A union has some alternatives for each name of a kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import reduce
from itertools import product
from typing import Any, ClassVar, TypeVar

from luce.errors import ArgumentError
from luce.text.pattern import matches

MAX_WAYS = 256  # A union has at most so many alternatives of a kind.

K = TypeVar("K", bound="Kind")
Fits = tuple[Any, ...]  # Places of a schema (places.py) that a value has to fit all; () takes any value.


class SchemaError(ArgumentError):
    """A schema that no text can be held to: `keyword` is what of it is to blame ("" where no single one is), and
    `place` where that is, as a JSON pointer ("" is the schema itself)."""

    def __init__(self, keyword: str, place: str, why: str = "cannot be enforced"):
        self.keyword, self.place, self.why = keyword, place, why
        what = f"the schema's `{keyword}`" if keyword else "the schema"
        super().__init__(f"{what} at {place or '#'} {why}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SchemaError) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


def joined(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the members of both, each once."""
    return tuple(dict.fromkeys(first + second)) if first and second else first or second


def smaller(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else min(a, b)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Kind:
    name: ClassVar[str]
    notes: tuple[SchemaError, ...] = ()

    def noted(self: K, notes: Iterable[SchemaError]) -> K:
        notes = tuple(notes)
        return replace(self, notes=joined(self.notes, notes)) if notes else self


@dataclass(frozen=True)
class Null(Kind):
    name: ClassVar[str] = "null"

    def meet(self, other: Null) -> Null:
        return self.noted(other.notes)


@dataclass(frozen=True)
class Boolean(Kind):
    name: ClassVar[str] = "boolean"
    values: frozenset[bool] = frozenset((False, True))

    def meet(self, other: Boolean) -> Boolean | None:
        values = self.values & other.values
        return Boolean(joined(self.notes, other.notes), values) if values else None


@dataclass(frozen=True)
class Number(Kind):
    """Numbers from `low` to `high`, which are not among them where `above` and `below` say so; `only` are
    the ones that are listed."""

    name: ClassVar[str] = "number"
    low: float | None = None
    high: float | None = None
    above: bool = False
    below: bool = False
    integer: bool = False
    multiple: Fraction | None = None
    only: tuple[float, ...] | None = None

    def meet(self, other: Number) -> Number | None:
        low, above = max(_limit(self.low, self.above), _limit(other.low, other.above))
        high, below = max(_limit(self.high, self.below, -1), _limit(other.high, other.below, -1))
        only = both_listed(self.only, other.only)
        found = Number(
            joined(self.notes, other.notes),
            None if low == -math.inf else low,
            None if high == -math.inf else -high,
            above,
            below,
            self.integer or other.integer,
            _common_multiple(self.multiple, other.multiple),
            only,
        )
        found = replace(found, only=tuple(filter(found.takes, only))) if only is not None else found
        return None if found.only == () else found

    def takes(self, value: float) -> bool:
        """Says whether a value is among the numbers, `only` aside."""
        low = self.low is None or (value > self.low if self.above else value >= self.low)
        high = self.high is None or (value < self.high if self.below else value <= self.high)
        whole = not self.integer or value == int(value)
        return low and high and whole and (
            self.multiple is None or (exact(value) / self.multiple).denominator == 1
        )  # fmt: skip


def _limit(value: float | None, open_: bool, sign: int = 1) -> tuple[float, bool]:
    return (-math.inf if value is None else sign * value, open_)


def exact(value: float) -> Fraction:
    """Returns a number of JSON as it is written."""
    return Fraction(repr(value))


def _common_multiple(a: Fraction | None, b: Fraction | None) -> Fraction | None:
    if a is None or b is None:
        return a or b
    numerator = math.lcm(a.numerator * b.denominator, b.numerator * a.denominator)
    return Fraction(numerator, a.denominator * b.denominator)


def both_listed(a: tuple[Any, ...] | None, b: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """Returns the values of both lists; None lists none and takes any."""
    if a is None or b is None:
        return b if a is None else a
    kept = set(b)
    return tuple(value for value in a if value in kept)


@dataclass(frozen=True)
class String(Kind):
    """Strings of `least` to `most` characters that match all `regexes` (pattern.py) and, where a grammar
    knows them, `formats`; `only` are the ones that are listed."""

    name: ClassVar[str] = "string"
    least: int = 0
    most: int | None = None
    regexes: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None

    def meet(self, other: String) -> String | None:
        least, most = max(self.least, other.least), smaller(self.most, other.most)
        only = both_listed(self.only, other.only)
        if only is not None:
            only = tuple(each for each in only if least <= len(each) and (most is None or len(each) <= most))
        if only == ():
            return None
        regexes, formats = joined(self.regexes, other.regexes), joined(self.formats, other.formats)
        return String(joined(self.notes, other.notes), least, most, regexes, formats, only)


@dataclass(frozen=True)
class Array(Kind):
    """Arrays of `least` to `most` items, the first of which fit `prefix`, and the others `items`; None says
    nothing of these."""

    name: ClassVar[str] = "array"
    prefix: tuple[Fits, ...] = ()
    items: Fits | None = None
    least: int = 0
    most: int | None = None
    unique: bool = False

    def meet(self, other: Array) -> Array:
        longest = max(len(self.prefix), len(other.prefix))
        prefix = tuple(joined(self.at(n), other.at(n)) for n in range(longest))
        items = None if self.items is other.items is None else joined(self.items or (), other.items or ())
        least, most = max(self.least, other.least), smaller(self.most, other.most)
        return Array(joined(self.notes, other.notes), prefix, items, least, most, self.unique or other.unique)

    def at(self, n: int) -> Fits:
        return self.prefix[n] if n < len(self.prefix) else self.items or ()


@dataclass(frozen=True)
class Object(Kind):
    """Objects of `least` to `most` properties, whose names fit `names`. Those that neither `properties` nor
    `patterns` (regexes of names) describe fit `additional`; None says nothing of them: where properties are
    `listed`, a grammar may leave others out."""

    name: ClassVar[str] = "object"
    properties: Mapping[str, Fits] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    patterns: Mapping[str, Fits] = field(default_factory=dict)
    additional: Fits | None = None
    names: Fits = ()
    least: int = 0
    most: int | None = None
    listed: bool = False

    def meet(self, other: Object) -> Object:
        keys = dict.fromkeys((*self.properties, *other.properties))
        additional = None
        if self.additional is not None or other.additional is not None:
            additional = joined(self.additional or (), other.additional or ())
        patterns = dict.fromkeys((*self.patterns, *other.patterns))
        return Object(
            joined(self.notes, other.notes),
            {key: joined(self.at(key), other.at(key)) for key in keys},
            joined(self.required, other.required),
            {each: joined(self._of_pattern(each), other._of_pattern(each)) for each in patterns},
            additional,
            joined(self.names, other.names),
            max(self.least, other.least),
            smaller(self.most, other.most),
            self.listed or other.listed,
        )

    def at(self, key: str) -> Fits:
        """Returns what a property has to fit."""
        if key in self.properties:
            return self.properties[key]
        found = [fits for regex, fits in self.patterns.items() if matches((regex,), key)]
        return reduce(joined, found) if found else self.additional or ()

    def _of_pattern(self, regex: str) -> Fits:
        return self.patterns[regex] if regex in self.patterns else self.additional or ()


# ---- unions

Union = dict[str, list[Any]]
ANY: Union = {kind.name: [kind] for kind in (Null(), Boolean(), Number(), String(), Array(), Object())}


def both(first: Union, second: Union) -> Union:
    """Returns the values that both take."""
    if first is ANY or second is ANY:
        return second if first is ANY else first
    found: Union = {}
    for name in first:
        ways: list[Kind] = []
        for one, other in product(first[name], second.get(name, ())):
            met = one if other is ANY[name][0] else other if one is ANY[name][0] else one.meet(other)
            if met is not None and met not in ways:
                ways.append(met)
            if len(ways) > MAX_WAYS:
                raise ArgumentError(f"the schema has more than {MAX_WAYS} alternatives in one place")
        if ways:
            found[name] = ways
    return found


def either(unions: Iterable[Union]) -> Union:
    """Returns the values that one of them takes at least."""
    found: Union = {}
    for union in unions:
        if union is ANY:
            return ANY
        for name, ways in union.items():
            kept = found.setdefault(name, [])
            kept += [way for way in ways if way not in kept]
    return found


def of(*kinds: Kind) -> Union:
    """Returns what is of these kinds, or of a kind that is none of them."""
    named = {kind.name for kind in kinds}
    return {name: ways for name, ways in ANY.items() if name not in named} | {
        name: [kind for kind in kinds if kind.name == name] for name in named
    }


def noted(union: Union, *notes: SchemaError) -> Union:
    return {name: [kind.noted(notes) for kind in ways] for name, ways in union.items()} if notes else union
