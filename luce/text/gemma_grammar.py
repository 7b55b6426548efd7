"""Makes the grammars of calls of tools in Gemma 4's dialect (gemma_calls.py), in llguidance's Lark.

A tool's schema is translated as for JSON (schema.py), and what comes of it is spelled in the dialect: properties in
the schema's order, with bare names where these have no signs of the dialect, and strings between marks, which hold
none. No blanks stand between the parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from luce.errors import ArgumentError
from luce.text.dialects import Opening
from luce.text.gemma_calls import CLOSE, OPEN, QUOTE
from luce.text.kinds import SchemaError
from luce.text.schema import arguments
from luce.text.structured import (
    Constraint,
    answer_rules,
    json_rule,
    regex_rule,
    text_rule,
    thought_rules,
    with_grammars,
)
from luce.text.tool import Tool

_MARK = re.escape(QUOTE)
_SOLID = r"""[^\s\x00-\x20\x7f-\x9f:=,{}\[\]()<>"'`]"""
_BARE = f"{_SOLID}( ?{_SOLID}){{0,31}}|{_SOLID}{{1,64}}"  # A name of a property that needs no marks.
_OTHER = f"{_SOLID}{{1,64}}"  # One that is not listed.
_ANY = rf"""
rest[suffix={text_rule(QUOTE)}]: /(?s:.*)/
string: {text_rule(QUOTE)} rest
NAME: /[A-Za-z_][A-Za-z0-9_.-]{{0,63}}/
any: "null" | "true" | "false" | {json_rule({"type": "number"})} | string | any_array | any_object
any_array: "[" (any ("," any)*)? "]"
any_object: "{{" (any_pair ("," any_pair)*)? "}}"
any_pair: NAME ":" any
"""


def gemma_call_grammar(
    tools: Sequence[Tool],
    opening: Opening,
    required: bool,
    many: bool,
    constraint: Constraint | None = None,
    closed: bool = True,
) -> str:
    """Returns the grammar of text with calls of tools, as call_grammar does for Qwen's dialect. Raises ArgumentError,
    which names the tool, where a call cannot be held to a tool's schema."""
    rules = [_function(f"f{at}", tool.name, json.dumps(tool.parameters), tool.strict, closed)
             for at, tool in enumerate(tools)]  # fmt: skip
    rules.append(f"call: ({' | '.join(f'f{at}' for at in range(len(tools)))}) {text_rule(CLOSE)}\n")
    named: dict[str, str] = {}
    if required:
        before, thoughts = thought_rules(opening.within, opening.dialect, opening.may_think)
        calls = f"{text_rule(f'{OPEN}call:')} call"
        calls += f" ({calls})*" if many else ""
        start = f"start: {before}{calls if constraint is None else f'({calls} | answer)'}\n{thoughts}"
        if constraint is not None:
            answer, named = answer_rules(constraint)
            start += answer
    else:
        mark = re.escape(OPEN)
        start = f"""lead[suffix={text_rule(OPEN)}]: /(?s:.*)/
TAIL: /(?s:.*)/ & ~/(?s:.*{mark}.*)/
begun: lead "call:" call
start: {"begun* TAIL" if many else "TAIL | begun"}
"""
    return with_grammars(start + _ANY + "".join(rules), named)


@lru_cache(1024)
def _function(rule: str, name: str, schema: str, strict: bool, closed: bool) -> str:
    """Returns the rules of one tool, whose parameters have a schema, as JSON. Agents send the same tools again and
    again."""
    try:
        found = arguments(json.loads(schema), exact=strict, closed=closed)
        spelling = _Spelling(rule, found.get("$defs", {}))
        return spelling.rules(f"{text_rule(name)} {spelling.value(found)}")
    except SchemaError as error:
        raise ArgumentError(f"the tool {name}: {error}") from error
    except _Unspelled as error:
        raise ArgumentError(f"the tool {name}: {error} cannot be enforced: it has the model's {QUOTE}") from error


class _Unspelled(Exception):
    """A text that has to come has a mark of the dialect."""


class _Spelling:
    """Spells translated schemas as parts of rules. The rules that they name are lines of Lark, whose names begin
    with `prefix`."""

    def __init__(self, prefix: str, definitions: Mapping[str, Any]):
        self._prefix, self._definitions = prefix, definitions
        self._lines = list[str]()

    def rules(self, start: str) -> str:
        """Returns all rules, of which the prefix is `start`."""
        for name, schema in self._definitions.items():
            self._lines.append(f"{self._prefix}_d{name}: {self.value(schema)}")
        return "\n".join([f"{self._prefix}: {start}", *self._lines]) + "\n"

    def _rule(self, text: str, terminal: bool = False, how: str = "") -> str:
        name = f"{self._prefix}_{len(self._lines)}"
        name = name.upper() if terminal else name
        self._lines.append(f"{name}{how}: {text}")
        return name

    def value(self, schema: Any) -> str:
        """Returns the values of a schema."""
        if "$ref" in schema:
            return f"{self._prefix}_d{schema['$ref'].rpartition('/')[2]}"
        if "anyOf" in schema:
            return f"({' | '.join(map(self.value, schema['anyOf']))})"
        if "const" in schema:
            return json.dumps(json.dumps(schema["const"]))
        if "enum" in schema:
            return self._listed(schema["enum"])
        kind = schema.get("type")
        if kind in ("integer", "number"):
            return json_rule(schema)
        spelled = {"string": self._string, "array": self._array, "object": self._object}
        if kind in spelled:
            return spelled[kind](schema)
        return {"null": '"null"', "boolean": '("true" | "false")'}.get(kind, "any")

    def _listed(self, values: Sequence[Any]) -> str:
        texts = [text_rule(f"{QUOTE}{each}{QUOTE}") for each in values if isinstance(each, str) and QUOTE not in each]
        others = [each for each in values if not isinstance(each, str)]
        ways = texts + ([json_rule({"enum": others})] if others else [])
        if not ways:
            raise _Unspelled(values[0])
        return f"({' | '.join(ways)})"

    def _string(self, schema: Mapping[str, Any]) -> str:
        """Returns strings. What a format asks for is an annotation here."""
        parts = [schema, *schema.get("allOf", ())]
        regexes = [part["pattern"].removeprefix("^(?:").removesuffix(")$") for part in parts if "pattern" in part]
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if least or most is not None:
            regexes.append(f"[\\x{{0}}-\\x{{10ffff}}]{_often(least, most)}")
        if not regexes:
            return "string"
        text = self._rule(f"{regex_rule([tuple(regexes)])} & ~/(?s:.*){_MARK}(?s:.*)/", terminal=True)
        rest = self._rule(f"{text} {text_rule(QUOTE)}", how="[lazy]")
        return f"{text_rule(QUOTE)} {rest}"

    def _array(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        first, items = schema.get("prefixItems", []), schema.get("items", {})
        rest = None if items is False or (most is not None and most <= len(first)) else self._named(items)
        left = None if most is None else most - len(first)
        # From the end on: what follows so many items.
        after = _again(rest, max(least - len(first), 0), left) if rest else ""
        for at in reversed(range(1, len(first))):
            item = f'"," {self._named(first[at])} {after}'
            after = self._rule(item if at < least else f"({item})?")
        if first:
            inner = f"{self._named(first[0])} {after}"
        elif rest and left != 0:
            inner = f"{rest} {_again(rest, max(least - 1, 0), None if left is None else left - 1)}"
        else:
            return '"[]"'
        return f'"[" {inner if least else f"({inner})?"} "]"'

    def _named(self, schema: Any) -> str:
        """Returns the values of a schema by a name."""
        found = self.value(schema)
        return found if re.fullmatch(r"[a-z0-9_]+", found) else self._rule(found)

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Returns objects. From the last property on, there are rules for what may follow: where a property came
        before, and where none did."""
        required = schema.get("required", ())
        first, later = self._others(schema)
        for name, each in reversed(schema.get("properties", {}).items()):
            if each is False or (name not in required and QUOTE in name):
                continue
            pair = self._rule(f"{_key(name)} {self.value(each)}")
            ways = [f"{pair} {later}"], [f'"," {pair} {later}']
            if name not in required:
                ways[0].append(first)
                ways[1].append(later)
            first, later = (self._rule(" | ".join(way or '""' for way in each_way)) for each_way in ways)
        return f'"{{" {first} "}}"'

    def _others(self, schema: Mapping[str, Any]) -> tuple[str, str]:
        """Returns properties that are not listed, where none came before, and behind others."""
        listed = [name for name in schema.get("properties", {}) if re.fullmatch(_BARE, name)]
        taken = f" & ~({' | '.join(map(text_rule, listed))})" if listed else ""
        ways = list[str]()
        for regex, each in self._patterns(schema):
            if each is not False:
                key = self._rule(f"{regex}{taken}", terminal=True)
                ways.append(f'{key} ":" {self._named(each)}')
        known = len(schema.get("required", ()))
        least = max(schema.get("minProperties", 0) - known, 0)
        most = schema["maxProperties"] - known if "maxProperties" in schema else None
        if not ways or most == 0:
            return '""', '""'
        other = self._rule(" | ".join(ways))
        first = f"{other} {_again(other, max(least - 1, 0), None if most is None else most - 1)}"
        later = self._rule(_again(other, least, most))
        return self._rule(first if least else f"({first})?"), later

    def _patterns(self, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yields what names of properties that are not listed may be, and what these hold."""
        patterns = {f"/{key[1:-1]}/": each for key, each in schema.get("patternProperties", {}).items()}
        for regex, each in patterns.items():
            yield f"{regex} & /{_OTHER}/", each
        others = schema.get("additionalProperties", {})
        if others is not False:
            taken = f" & ~({' | '.join(patterns)})" if patterns else ""
            yield f"/{_OTHER}/{taken}", others


def _key(name: str) -> str:
    """Returns a property's name and what separates it from its value: two lexemes, for of one with both the lexer,
    which takes the longest, would leave nothing to an alternative where the name is not listed."""
    if QUOTE in name:
        raise _Unspelled(name)
    return f"{text_rule(name if re.fullmatch(_BARE, name) else f'{QUOTE}{name}{QUOTE}')} \":\""


def _again(item: str, least: int, most: int | None) -> str:
    """Returns items behind another one."""
    return "" if most == 0 else f'("," {item}){_often(least, most)}'


def _often(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}" if least or most is not None else "*"
