"""What a place of a JSON schema takes, keyword by keyword: as unions of kinds of values (kinds.py).

A keyword that no grammar can hold a text to leaves a note where it counts, and takes all. `not`, `if` and
`oneOf` are worked out as far as what they deny is the opposite of something that can be enforced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations, product
from typing import Any

from luce.errors import ArgumentError
from luce.text.kinds import (
    ANY,
    Array,
    Boolean,
    Fits,
    Kind,
    Null,
    Number,
    Object,
    SchemaError,
    String,
    Union,
    both,
    either,
    exact,
    is_number,
    joined,
    noted,
    of,
)
from luce.text.pattern import PatternError, languages, matches, other_than, refusal, string_schema
from luce.text.references import References, Resource, step

INTEGER = [Number(integer=True)]
MAX_DENIED = 200  # Strings that a value must not be have at most so many characters.
MAX_DEPTH = 64  # Keywords that hold for the same value are nested at most so deep.
TYPES = {
    "null": "null", "none": "null", "nonetype": "null", "boolean": "boolean", "bool": "boolean",
    "integer": "integer", "int": "integer", "long": "integer", "number": "number", "float": "number",
    "double": "number", "string": "string", "str": "string", "array": "array", "list": "array",
    "tuple": "array", "set": "array", "object": "object", "dict": "object",
}  # fmt: skip
FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}


@dataclass(eq=False, slots=True)  # There is one of each.
class Term:
    """A place of the schema, `at` a JSON pointer, that a value has to fit; or that it must not, where the
    keyword at `denied` says so. `lists` says whether its properties are all that an object has."""

    at: str
    schema: Any
    resource: Resource
    denied: str
    lists: bool


class Places:
    """The places of one schema. `root` is what a value of it has to fit, and `never` what none does."""

    def __init__(self, schema: Any):
        self._references = References(schema)
        resource = self._references.resource(schema, self._references.root)
        self._terms = dict[tuple[str, str, bool], Term]()
        self._unions = dict[Term, Union]()
        self._under_way: list[Term] = []
        self.never: Fits = (self._term("never", False, resource),)
        self.root = self._fits(self._term("", schema, resource))

    def union(self, fits: Fits) -> Union:
        """Returns what fits several places at once."""
        return reduce(both, map(self._union, fits), ANY)

    def _term(self, at: str, schema: Any, resource: Resource, denied: str = "", lists: bool = True) -> Term:
        key = (at, denied, lists)
        if (found := self._terms.get(key)) is None:
            found = self._terms[key] = Term(at, schema, resource, denied, lists)
        return found

    def _fits(self, *terms: Term) -> Fits:
        return tuple(term for term in terms if term.denied or (term.schema is not True and term.schema != {}))

    def _below(self, term: Term, *keys: str | int, denied: str = "", lists: bool | None = None) -> Term:
        """Returns the place below another one."""
        schema = reduce(lambda found, key: found[key], keys, term.schema)
        resource = self._references.resource(schema, term.resource)
        lists = term.lists and not denied if lists is None else lists
        return self._term(step(term.at, *keys), schema, resource, denied, lists)

    def _union(self, term: Term) -> Union:
        """Returns what a place takes."""
        if term not in self._unions:
            if term in self._under_way:
                return noted(ANY, SchemaError("$ref", term.at, "leads back to itself"))
            if len(self._under_way) > MAX_DEPTH:
                raise ArgumentError("the schema is nested too deep")
            self._under_way.append(term)
            self._unions[term] = self._worked_out(term)
            self._under_way.pop()
        return self._unions[term]

    def _worked_out(self, term: Term) -> Union:
        schema = term.schema
        if isinstance(schema, bool):
            return ANY if schema != bool(term.denied) else {}
        if not isinstance(schema, Mapping):
            key = term.at.rpartition("/")[2]
            return noted(ANY, SchemaError(key, term.at, "is no schema"))
        return self._not(term) if term.denied else self._all(term)

    def _all(self, term: Term) -> Union:
        schema, parts = term.schema, list[Union]()
        if "properties" not in schema:
            parts.append(self._kinds(term))
        for key in schema:  # Properties are written in the order in which they come.
            if key == "properties":
                parts.append(self._kinds(term))
            elif (made := _APPLICATORS.get(key)) is not None:
                parts.append(made(self, term, key))
        found = reduce(both, parts, ANY)
        if schema.get("nullable") is True:  # It is OpenAPI's.
            found = either((found, {"null": ANY["null"]}))
        return self._unevaluated(term, found)

    def _unevaluated(self, term: Term, found: Union) -> Union:
        """Applies what holds for the items and properties of which no keyword spoke."""
        for name, key in (("array", "unevaluatedItems"), ("object", "unevaluatedProperties")):
            if name in found and key in term.schema:
                fits = self._fits(self._below(term, key))
                unsure = fits and term.schema.keys() & _SOMETIMES
                notes = [SchemaError(key, step(term.at, key))] if unsure else []
                found = found | {name: [self._rest(kind, fits).noted(notes) for kind in found[name]]}
        return found

    @staticmethod
    def _rest(kind: Kind, fits: Fits) -> Kind:
        if isinstance(kind, Array) and kind.items is None:
            return replace(kind, items=fits)
        if isinstance(kind, Object) and kind.additional is None:
            return replace(kind, additional=fits)
        return kind

    def _kinds(self, term: Term) -> Union:
        """Returns what the keywords that are of one kind of values each take, and `type`."""
        notes = list[SchemaError]()
        kinds = {_KIND_OF[key] for key in term.schema if key in _KIND_OF}
        if not kinds and "type" not in term.schema:
            return ANY
        types = self._types(term, notes)
        integer = "integer" in types and "number" not in types
        types |= {"number"} if integer else set()
        found = {
            name: _BUILDERS[name](self, term) if name in kinds else ANY[name] for name in ANY if name in types
        }
        if integer:
            found["number"] = [replace(found["number"][0], integer=True)] if "number" in kinds else INTEGER
        return noted({name: ways for name, ways in found.items() if ways}, *notes)

    def _types(self, term: Term, notes: list[SchemaError]) -> set[str]:
        if "type" not in term.schema:
            return set(ANY)
        given = term.schema["type"]
        named = given if isinstance(given, list) else [given]
        found = {TYPES.get(each.lower(), "") if isinstance(each, str) else "" for each in named}
        if any(isinstance(each, str) and each.lower() == "any" for each in named):
            return set(ANY)
        if "" in found or not found:
            why = f"is {str(given)[:80]!r}, which is no type"
            notes.append(SchemaError("type", step(term.at, "type"), why))
            return set(ANY)
        return found

    def _read(
        self, term: Term, key: str, notes: list[SchemaError], good: Callable[[Any], bool], what: str
    ) -> Any:
        """Returns a keyword's value; None where it is not given, or where it is not what it has to be."""
        value = term.schema.get(key)
        if value is not None and not good(value):
            notes.append(SchemaError(key, step(term.at, key), f"is {str(value)[:80]!r}, which is no {what}"))
            return None
        return value

    def _count(self, term: Term, key: str, notes: list[SchemaError]) -> int | None:
        value = self._read(term, key, notes, _is_count, "whole number")
        return None if value is None else int(value)

    def _numbers_of(self, term: Term) -> list[Number]:
        notes, schema = list[SchemaError](), term.schema
        low, high = (self._read(term, key, notes, is_number, "number") for key in ("minimum", "maximum"))
        found = Number((), low, high)
        for key, open_ in (("exclusiveMinimum", "above"), ("exclusiveMaximum", "below")):
            if isinstance(schema.get(key), bool):  # Draft 4 has it beside the other one.
                found = replace(found, **{open_: schema[key]})
            elif key in schema and (value := self._read(term, key, notes, is_number, "number")) is not None:
                side = {"low": value, "above": True} if open_ == "above" else {"high": value, "below": True}
                met = found.meet(Number(**side))
                found = met or found
        multiple = self._read(term, "multipleOf", notes, _is_positive, "number above 0")
        if multiple is not None:
            found = replace(found, multiple=exact(multiple))
        return [found.noted(notes)]

    def _strings(self, term: Term) -> list[String]:
        notes = list[SchemaError]()
        least, most = (self._count(term, key, notes) for key in ("minLength", "maxLength"))
        form = term.schema.get("format")
        formats = (form,) if isinstance(form, str) and form in FORMATS else ()
        pattern = self._read(term, "pattern", notes, lambda each: isinstance(each, str), "string")
        ways = [()] if pattern is None else self._regexes(term, "pattern", pattern, notes)
        return [String(tuple(notes), least or 0, most, way, formats) for way in ways]

    def _regexes(
        self, term: Term, key: str, pattern: str, notes: list[SchemaError]
    ) -> Iterable[tuple[str, ...]]:
        """Returns the regexes of a pattern, all of one of which have to match."""
        try:
            ways = languages(pattern)
            said = {way: refusal(string_schema(way)) for way in ways}
        except PatternError as error:
            why = f"cannot be enforced: {error}"
        else:
            if not any(each not in ("", "empty") for each in said.values()):
                return [way for way in ways if not said[way]]
            why = "cannot be enforced: it is too large, or has a property of characters that is not known"
        notes.append(SchemaError(key, step(term.at, key), why))
        return [()]

    def _arrays(self, term: Term) -> list[Array]:
        notes, schema = list[SchemaError](), term.schema
        least, most = (self._count(term, key, notes) for key in ("minItems", "maxItems"))
        first, rest = "prefixItems", "items"
        if isinstance(schema.get("items"), list):  # So it was before 2020-12.
            first, rest = "items", "additionalItems"
        listed = self._read(term, first, notes, lambda each: isinstance(each, list), "list") or ()
        prefix = tuple(self._fits(self._below(term, first, n)) for n in range(len(listed)))
        items = self._fits(self._below(term, rest)) if rest in schema else None
        if "contains" in schema and (schema.get("minContains") != 0 or "maxContains" in schema):
            notes.append(SchemaError("contains", step(term.at, "contains")))
        return [Array(tuple(notes), prefix, items, least or 0, most, schema.get("uniqueItems") is True)]

    def _objects(self, term: Term) -> list[Object]:
        notes, schema = list[SchemaError](), term.schema
        least, most = (self._count(term, key, notes) for key in ("minProperties", "maxProperties"))
        listed = self._read(term, "properties", notes, lambda each: isinstance(each, Mapping), "object")
        properties = {key: self._fits(self._below(term, "properties", key)) for key in listed or ()}
        patterns, whole = self._patterns(term, notes)
        for regex, fits in patterns.items():
            for key in properties:
                if matches((regex,), key):
                    properties[key] = joined(properties[key], fits)
        required = self._read(term, "required", notes, _are_names, "list of strings")
        additional = None
        if not whole:
            additional = ()  # What the other patterns would let in is not to be left out.
        elif "additionalProperties" in schema:
            additional = self._fits(self._below(term, "additionalProperties"))
        names = self._fits(self._below(term, "propertyNames")) if "propertyNames" in schema else ()
        required = tuple(dict.fromkeys(required or ()))
        lists = term.lists and listed is not None
        return [
            Object(tuple(notes), properties, required, patterns, additional, names, least or 0, most, lists)
        ]

    def _patterns(self, term: Term, notes: list[SchemaError]) -> tuple[dict[str, Fits], bool]:
        """Returns what the properties whose names match regexes have to fit, and whether these are all."""
        given = self._read(term, "patternProperties", notes, lambda each: isinstance(each, Mapping), "object")
        found, whole = dict[str, Fits](), True
        for pattern in given or ():
            errors = list[SchemaError]()
            ways = list(self._regexes(term, "patternProperties", pattern, errors))
            if not errors and (len(ways) > 1 or any(len(way) > 1 for way in ways)):
                errors.append(SchemaError("patternProperties", step(term.at, "patternProperties", pattern)))
            notes += errors
            whole = whole and not errors
            fits = self._fits(self._below(term, "patternProperties", pattern))
            for regex in [way[0] for way in ways if not errors]:
                found[regex] = joined(found.get(regex, ()), fits)
        return found, whole

    # ---- keywords that hold for all kinds

    def _reference(self, term: Term, key: str) -> Union:
        given = term.schema[key]
        target = self._references.resolve(given, term.resource) if isinstance(given, str) else None
        if target is None:
            why = f"is to {str(given)[:200]!r}, which the schema does not have"
            return noted(ANY, SchemaError(key, step(term.at, key), why))
        if key != "$ref" and self._references.is_dynamic(target):
            return noted(ANY, SchemaError(key, step(term.at, key)))
        return self._union(self._term(target.at, target.schema, target.resource, "", term.lists))

    def _parts(self, term: Term, key: str, **how: Any) -> list[Term] | None:
        given = term.schema[key]
        if not isinstance(given, list) or not given:
            return None
        return [self._below(term, key, n, **how) for n in range(len(given))]

    def _all_of(self, term: Term, key: str) -> Union:
        parts = self._parts(term, key)
        return self._malformed(term, key) if parts is None else reduce(both, map(self._union, parts), ANY)

    def _any_of(self, term: Term, key: str) -> Union:
        parts = self._parts(term, key)
        if parts is None:
            return self._malformed(term, key)
        unions = list(map(self._union, parts))
        if key == "oneOf" and len(parts) <= 8 and all(_is_plain(part.schema) for part in parts):
            if not all(map(_are_disjoint, combinations(unions, 2))):
                denied = self._parts(term, key, denied=step(term.at, key)) or ()
                others = list(map(self._union, denied))
                rest = [reduce(both, others[:n] + others[n + 1 :], union) for n, union in enumerate(unions)]
                held = not any(kind.notes for union in rest for ways in union.values() for kind in ways)
                unions = rest if held else unions
        return either(unions)

    def _malformed(self, term: Term, key: str) -> Union:
        given = str(term.schema[key])[:80]
        return noted(ANY, SchemaError(key, step(term.at, key), f"is {given!r}, which is no list of schemas"))

    def _none_of(self, term: Term, key: str) -> Union:
        return self._union(self._below(term, key, denied=step(term.at, key)))

    def _if(self, term: Term, key: str) -> Union:
        then, other = (
            self._union(self._below(term, each)) if each in term.schema else ANY for each in ("then", "else")
        )
        if then is other is ANY:
            return ANY
        holds = self._union(self._below(term, "if", lists=False))
        fails = self._union(self._below(term, "if", denied=step(term.at, "if")))
        return either((both(holds, then), both(fails, other)))

    def _listed(self, term: Term, key: str) -> Union:
        """Returns the values of `enum` or `const`."""
        given = term.schema[key]
        if key == "enum" and not isinstance(given, list):
            return noted(ANY, SchemaError(key, step(term.at, key), "is no list"))
        values = [((key, n), value) for n, value in enumerate(given)] if key == "enum" else [((key,), given)]
        texts = tuple(dict.fromkeys(value for _, value in values if isinstance(value, str)))
        numbers = tuple(dict.fromkeys(value for _, value in values if is_number(value)))
        others = [each for each in values if not (isinstance(each[1], str) or is_number(each[1]))]
        found = either({kind.name: [kind]} for kind in (self._literal(term, v, *keys) for keys, v in others))
        found |= {"number": [Number(only=numbers)]} if numbers else {}
        return found | ({"string": [String(only=texts)]} if texts else {})

    def _literal(self, term: Term, value: Any, *keys: str | int) -> Kind:
        def inner(key: str | int, one: Any) -> Fits:
            return (self._term(step(term.at, *keys, key), {"const": one}, term.resource),)

        if isinstance(value, list):
            prefix = tuple(inner(n, each) for n, each in enumerate(value))
            return Array((), prefix, self.never, len(value), len(value))
        if isinstance(value, dict):
            properties = {key: inner(key, each) for key, each in value.items()}
            return Object((), properties, tuple(value), additional=self.never)
        return Null() if value is None else Boolean(values=frozenset((value,)))

    def _dependent(self, term: Term, key: str) -> Union:
        """Returns what the keywords take that hold for objects which have a property."""
        given = term.schema[key]
        if not isinstance(given, Mapping):
            return noted(of(Object()), SchemaError(key, step(term.at, key), "is no object"))
        found = ANY
        for name, needed in given.items():
            without = of(Object(properties={name: self.never}))
            if isinstance(needed, list):
                names = tuple(dict.fromkeys((name, *(each for each in needed if isinstance(each, str)))))
                having = of(Object(required=names))
            else:
                having = both(of(Object(required=(name,))), self._union(self._below(term, key, name)))
            found = both(found, having if name in _names(term.schema) else either((without, having)))
        return found

    # ---- what a place does not take

    def _not(self, term: Term) -> Union:
        schema, found = term.schema, list[Union]()
        for key in schema:
            if key in _NEGATED_PARTS or key in ("$ref", "not"):
                found.append(self._not_applied(term, key))
            elif key in ("enum", "const"):
                found.append(self._not_listed(term, key))
            elif key == "type":
                found.append(self._not_type(term))
            elif key in _KIND_OF and key != "format":
                found.append(self._not_of_kind(term, key, _KIND_OF[key]))
            elif key in _UNDENIABLE:
                found.append(self._undeniable(term, ANY))
        return either(found)

    def _undeniable(self, term: Term, union: Union) -> Union:
        keyword = term.denied.rpartition("/")[2]
        return noted(union, SchemaError(keyword, term.denied))

    def _not_applied(self, term: Term, key: str) -> Union:
        if key == "$ref":
            given = term.schema[key]
            target = self._references.resolve(given, term.resource) if isinstance(given, str) else None
            if target is None:
                return self._undeniable(term, ANY)
            return self._union(self._term(target.at, target.schema, target.resource, term.denied, False))
        if key == "not":
            return self._union(self._below(term, key, lists=False))
        parts = self._parts(term, key, denied=term.denied)
        if parts is None or (key == "oneOf" and len(parts) > 1):
            return self._undeniable(term, ANY)
        unions = list(map(self._union, parts))
        return reduce(both, unions) if key == "anyOf" else either(unions)

    def _not_listed(self, term: Term, key: str) -> Union:
        listed = self._listed(term, key)
        found = {name: ways for name, ways in ANY.items() if name not in listed}
        for name, ways in listed.items():
            if name == "boolean":
                left = ANY[name][0].values.difference(*(way.values for way in ways))
                found |= {name: [Boolean(values=left)]} if left else {}
            elif name == "number":
                found |= _without_numbers(ways[0].only)
            elif name == "string" and max(map(len, ways[0].only)) <= MAX_DENIED:
                found[name] = [String(regexes=(other_than(ways[0].only),))]
            elif name != "null":
                found |= self._undeniable(term, {name: ANY[name]})
        return found

    def _not_type(self, term: Term) -> Union:
        notes: list[Any] = []
        types = self._types(term, notes)
        found = {name: ways for name, ways in ANY.items() if name not in types}
        if notes or ("integer" in types and "number" not in types):
            found = found | self._undeniable(term, {"number": ANY["number"]})
        return found

    def _not_of_kind(self, term: Term, key: str, name: str) -> Union:
        """Returns what one keyword of a kind does not take."""
        value, way = term.schema[key], None
        if key in ("minLength", "minItems", "minProperties") and is_number(value):
            if value <= 0:
                return {}
            way = replace(ANY[name][0], most=int(value) - 1)
        elif key in ("maxLength", "maxItems", "maxProperties") and is_number(value):
            way = replace(ANY[name][0], least=int(value) + 1)
        elif key in _OPPOSITE and is_number(value):
            way = Number(**{_OPPOSITE[key]: value, **_OPEN.get(key, {})})
        elif key == "required" and isinstance(value, list):
            return {name: [Object(properties={each: self.never}) for each in value]} if value else {}
        elif key == "properties" and isinstance(value, Mapping):
            denied = {each: self._below(term, key, each, denied=term.denied) for each in value}
            ways = [Object(properties={each: (one,)}, required=(each,)) for each, one in denied.items()]
            return {name: ways} if ways else {}
        return {name: [way]} if way else self._undeniable(term, {name: ANY[name]})


# ---- keywords

_OF_KIND = {  # These keywords are of one kind of values each.
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {
        "items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains",
        "unevaluatedItems",
    },
    "object": {
        "properties", "patternProperties", "additionalProperties", "required", "minProperties",
        "maxProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies",
        "unevaluatedProperties",
    },
}  # fmt: skip
_KIND_OF = {key: name for name, keys in _OF_KIND.items() for key in keys}
_BUILDERS: dict[str, Callable[[Places, Term], list[Any]]] = {
    "number": Places._numbers_of, "string": Places._strings, "array": Places._arrays,
    "object": Places._objects,
}  # fmt: skip
_APPLICATORS: dict[str, Callable[[Places, Term, str], Union]] = {
    "$ref": Places._reference, "$dynamicRef": Places._reference,
    "$recursiveRef": Places._reference, "allOf": Places._all_of, "anyOf": Places._any_of,
    "oneOf": Places._any_of, "not": Places._none_of, "if": Places._if,
    "enum": Places._listed, "const": Places._listed,
    "dependentRequired": Places._dependent, "dependentSchemas": Places._dependent,
    "dependencies": Places._dependent,
}  # fmt: skip
_NEGATED_PARTS = {"allOf", "anyOf", "oneOf"}
_OPPOSITE = {"minimum": "high", "exclusiveMinimum": "high", "maximum": "low", "exclusiveMaximum": "low"}
_OPEN = {"minimum": {"below": True}, "maximum": {"above": True}}
_UNDENIABLE = {"if", "$dynamicRef", "$recursiveRef"}
_SOMETIMES = {"if", "not", "contains", "dependentSchemas"}  # What they speak of depends on the value.
_PLAIN = {
    "type", "required", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "minLength", "maxLength", "title", "description",
}  # fmt: skip


def _is_count(value: Any) -> bool:
    return is_number(value) and value >= 0 and value == int(value)


def _is_positive(value: Any) -> bool:
    return is_number(value) and value > 0


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_plain(schema: Any) -> bool:
    """Says whether a schema is one of scalars, or only says which properties are required."""
    return isinstance(schema, Mapping) and schema.keys() <= _PLAIN


def _are_disjoint(pair: tuple[Union, Union]) -> bool:
    """Says whether it is plain that no value is of both."""
    ways = [pair_of for name in pair[0] for pair_of in product(pair[0][name], pair[1].get(name, ()))]
    return all(
        isinstance(one, (String, Number)) and None not in (one.only, other.only) and one.meet(other) is None
        for one, other in ways
    )


def _names(schema: Mapping[str, Any]) -> tuple[Any, ...]:
    required = schema.get("required")
    return tuple(required) if isinstance(required, list) else ()


def _without_numbers(listed: Iterable[Any]) -> Union:
    """Returns the numbers between those that are listed."""
    ends = [None, *sorted(listed), None]
    return {
        "number": [
            Number(low=low, above=low is not None, high=high, below=high is not None)
            for low, high in zip(ends, ends[1:], strict=False)
        ]
    }
