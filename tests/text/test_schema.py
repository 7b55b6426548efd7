"""Checks the translation of JSON schemas: what a text held to one may be, by the specification and jsonschema.

Objects that list properties are closed unless a test says otherwise."""

from __future__ import annotations

import json

import jsonschema
import pytest
from checkout import GOLDENS
from depth import deeper_but, examples
from grammar_walks import accepts, walk
from hypothesis import given
from hypothesis import strategies as st
from random_schemas import KEY, SCHEMAS, VALUES, ordered

from luce.errors import ArgumentError
from luce.text.call_grammar import call_grammar
from luce.text.schema import SchemaError, translated
from luce.text.structured import JsonSchema, grammar_of
from luce.text.tool import Tool

CLIENTS = json.loads((GOLDENS / "client_schemas.json").read_text())
OBJECT = {"type": "object"}
INTEGER = {"type": "integer"}
TREE = {"type": "object", "properties": {"v": INTEGER, "kids": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["v"]}  # fmt: skip


def of(*properties, **more):
    """Returns the schema of an object with these properties, all of them required."""
    return {"type": "object", "properties": {name: {} for name in properties}, "required": [*properties], **more}


def grammar(schema, **how):
    return grammar_of(JsonSchema(schema, **how))


def call(**values):
    told = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=f>\n{told}</function>\n</tool_call>"


def calls(parameters, strict=False, closed=True):
    """Returns the grammar of one call of a tool, which is forced."""
    tool = Tool("f", parameters, strict=strict)
    return call_grammar([tool], thinks=False, required=True, many=False, closed=closed)


# ---- what is taken and what is not


TAKEN = {  # By what they show: a schema, texts that fit it, and texts that do not.
    "a reference to the root": (TREE, ['{"v":1,"kids":[{"v":2,"kids":[]}]}'], ['{"v":1,"kids":[[]]}']),
    "a reference to definitions": ({"$ref": "#/$defs/a", "$defs": {"a": INTEGER}}, ["5"], ['"5"']),
    "a reference to draft 7's definitions": (
        {"$ref": "#/definitions/a", "definitions": {"a": INTEGER}}, ["5"], ["{}"]),
    "a reference to any place": (
        {"type": "array", "prefixItems": [INTEGER, {"$ref": "#/prefixItems/0"}], "items": False},
        ["[1,2]"], ['[1,"a"]']),
    "a pointer with escapes": (
        {"$ref": "#/$defs/a~1b~0c%25", "$defs": {"a/b~c%": {"const": 1}}}, ["1"], ["2"]),
    "an anchor": ({"$ref": "#it", "$defs": {"x": {"$anchor": "it", "const": 1}}}, ["1"], ["2"]),
    "an id": (
        {"$id": "https://x.example/root.json", "$ref": "item.json#/$defs/n",
         "$defs": {"x": {"$id": "item.json", "$defs": {"n": {"$ref": "#/$defs/m"}, "m": {"const": 1}}}}}, ["1"], ["2"]),
    "an id as a URN": ({"$id": "urn:x", "$ref": "#/$defs/a", "$defs": {"a": {"const": 1}}}, ["1"], ["2"]),
    "siblings of a reference": (
        {"$ref": "#/$defs/a", "maximum": 3, "$defs": {"a": {"type": "integer", "minimum": 1}}}, ["1", "3"], ["0", "4"]),
    "recursion with siblings": (
        {"$ref": "#/$defs/n", "required": ["next"], "$defs": {"n": {
            "type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}}, ['{"next":{}}'], ["{}"]),
    "mutual recursion": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/b"}},
                                        "b": {"type": "object", "additionalProperties": {"$ref": "#/$defs/a"}}}},
        ['[{"x":[]},{}]'], ["[[]]"]),
    "allOf of a recursive one with another": (
        {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {
            "a": {"type": "object", "properties": {"c": {"$ref": "#/$defs/a"}}},
            "b": {"type": "object", "properties": {"c": {"$ref": "#/$defs/b"}, "n": INTEGER}}}},
        ['{"c":{"c":{}}}', '{"c":{"n":1}}'], ['{"c":{"n":"x"}}', '{"c":1}']),
    "anyOf under a type": (
        {"type": "string", "anyOf": [{"maxLength": 1}, {"pattern": "^a+$"}]}, ['"b"', '"aaa"'], ['"bb"', "1"]),
    "oneOf of types that overlap": ({"oneOf": [INTEGER, {"type": "number"}]}, ["1.5", "1"], ['"1"']),
    "oneOf that requires one of two": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a":1}', '{"b":1}'], ["{}", '{"a":1,"b":1}']),
    "anyOf that requires one of two": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a":1}', '{"b":1}', '{"a":1,"b":1}'], ["{}"]),
    "oneOf of ranges": ({"type": "string", "oneOf": [{"minLength": 2}, {"maxLength": 3}]}, ['"a"', '"aaaa"'], ['"aa"']),
    "enum beside a type": ({"type": "string", "enum": ["a", 1, None]}, ['"a"'], ["1", "null"]),
    "enum beside a pattern": ({"enum": ["ab", "b"], "pattern": "^a"}, ['"ab"'], ['"b"']),
    "const of an object": ({"const": {"a": [1, {"b": None}]}}, ['{"a":[1,{"b":null}]}'], ['{"a":[1]}', "{}"]),
    "true and 1 are different": ({"enum": [1, False]}, ["1", "false"], ["true", "0"]),
    "nullable": ({"type": "string", "nullable": True, "enum": ["a"]}, ['"a"', "null"], ['"b"']),
    "nullable beside a reference": (
        {"nullable": True, "allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": INTEGER}}, ["1", "null"], ['"a"']),
    "types in capitals": ({"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}, ['{"a":"x"}'], ["1", '{"a":1}']),
    "types as Python has them": ({"type": ["int", "None"]}, ["1", "null"], ['"a"', "1.5"]),
    "draft 4's exclusive bounds": (
        {"type": "integer", "minimum": 1, "exclusiveMinimum": True, "maximum": 3}, ["2", "3"], ["1", "4"]),
    "older tuples": (
        {"type": "array", "items": [INTEGER, {"type": "string"}], "additionalItems": False},
        ['[1,"a"]', "[]"], ['[1,"a",2]']),
    "types that tell apart what keywords say": (
        {"minimum": 3, "minLength": 2}, ["3", '"ab"', "true", "{}"], ["2", '"a"']),
    "a multiple": ({"type": "integer", "multipleOf": 5}, ["0", "-15"], ["7"]),
    "bounds beyond what is counted": (
        {"type": "number", "maximum": 3.4e38, "minimum": -3.4e38}, ["1.5", "-7"], ['"a"']),
    "bounds of 64 bits": (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**64}, ["0", "-12345678901234"], ["1.5"]),
    "not a type": ({"not": {"type": ["string", "null"]}}, ["1", "[]"], ['"a"', "null"]),
    "not these values": ({"type": "string", "not": {"enum": ["a", "ab"]}}, ['"b"', '"abc"', '""'], ['"a"', '"ab"']),
    "not this number": ({"type": "integer", "not": {"const": 3}}, ["2", "4", "33"], ["3"]),
    "not required": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "not": {"required": ["a"]}},
        ["{}", '{"b":1}'], ['{"a":1}']),
    "never": ({"type": "object", "properties": {"a": {}, "b": {"not": {}}}}, ["{}", '{"a":1}'], ['{"b":1}']),
    "if, then and else": (
        {"type": "object", "properties": {"k": {"enum": ["a", "b"]}, "n": {}}, "required": ["k"],
         "if": {"properties": {"k": {"const": "a"}}}, "then": {"required": ["n"]},
         "else": {"properties": {"n": {"type": "null"}}}},
        ['{"k":"a","n":1}', '{"k":"b"}', '{"k":"b","n":null}'], ['{"k":"a"}', '{"k":"b","n":1}']),
    "if that says nothing": (
        {"type": "object", "properties": {"a": {}}, "if": {"required": ["a"]}, "then": {}}, ["{}"], ["1"]),
    "dependentRequired": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        ["{}", '{"b":1}', '{"a":1,"b":1}'], ['{"a":1}']),
    "draft 7's dependencies": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependencies": {"a": {"required": ["b"]}}},
        ['{"b":1}', '{"a":1,"b":1}'], ['{"a":1}']),
    "at least two properties": (
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2},
        ['{"a":1,"b":1}', '{"b":1,"c":1}', '{"a":1,"b":1,"c":1}'], ["{}", '{"b":1}']),
    "at most one property": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}, ["{}", '{"b":1}'], ['{"a":1,"b":1}']),
    "a map of at least one": (
        {"type": "object", "additionalProperties": INTEGER, "minProperties": 1}, ['{"a":1}'], ["{}", '{"a":"x"}']),
    "names that are listed": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER},
        ["{}", '{"a":1,"b":2}'], ['{"c":1}', '{"a":"x"}']),
    "names of a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^x_"}, "additionalProperties": INTEGER},
        ['{"x_a":1}'], ['{"a":1}']),
    "names of any string": ({"type": "object", "propertyNames": {"type": "string"}}, ['{"a":1}'], ["[]"]),
    "patterns of names": (
        {"type": "object", "patternProperties": {"^x": INTEGER, "^y": {"type": "null"}}, "additionalProperties": False},
        ['{"x1":1,"y":null}'], ['{"x1":null}', '{"a":1}']),
    "unevaluatedProperties": (
        {"allOf": [of("a")], "properties": {"b": {}}, "unevaluatedProperties": False},
        ['{"a":1}', '{"a":1,"b":2}'], ['{"a":1,"c":2}']),
    "a sequence with look-ahead": ({"type": "string", "pattern": "^(?!-).+$"}, ['"a-"'], ['"-a"', '""']),
    "several patterns": (
        {"type": "string", "allOf": [{"pattern": "a"}, {"pattern": "b$"}]}, ['"ab"', '"xab"'], ['"b"', '"ba"']),
    "few different items": (
        {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}, ['["a","b"]', "[]"], ['["a","b","a"]']),
    "a key that is spelled otherwise": (
        {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": {"type": "string"}},
        ['{"a":1,"b":"x"}'], ['{"\\u0061":"x"}', '{"a":"x"}']),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_a_text_is_one_that_fits(name):
    schema, good, bad = TAKEN[name]
    made = grammar(schema)
    assert [text for text in good if not accepts(made, text)] == []
    assert [text for text in bad if accepts(made, text)] == []


ANNOTATIONS = [
    {"title": "t", "description": "d", "default": 1, "examples": [1], "$comment": "c", "deprecated": True},
    {"readOnly": True, "writeOnly": False, "x-order": 1, "discriminator": {"propertyName": "a"}},
    {"contentEncoding": "base64", "contentMediaType": "application/json", "contentSchema": {"not": {}}},
    *({"format": name} for name in ("path", "password", "binary", "regex", "uri-reference", "int32", "color")),
    {"uniqueItems": True},
    {"minContains": 2, "maxContains": 1},
    {"$schema": "https://json-schema.org/draft/2019-09/schema", "$vocabulary": {}},
]


@pytest.mark.parametrize("annotation", ANNOTATIONS, ids=str)
def test_an_annotation_holds_nothing(annotation):
    made = grammar({"type": ["array", "string", "integer"]} | annotation)
    assert all(accepts(made, text) for text in ("5", '"not a path"', "[1,1]"))


# ---- closed objects


PAIR = {"a": INTEGER}
CLOSED = {  # By what they show: a schema, an object that fits it where objects are closed, and one that does not.
    "properties": ({"properties": PAIR}, '{"a":1}', '{"a":1,"b":2}'),
    "nested": ({"type": "array", "items": {"properties": PAIR}}, '[{"a":1}]', '[{"b":1}]'),
    "a reference": ({"$ref": "#/$defs/a", "$defs": {"a": {"properties": PAIR}}}, '{"a":1}', '{"b":1}'),
    "beside patterns": ({"properties": PAIR, "patternProperties": {"^x": {}}}, '{"a":1,"x":1}', '{"a":1,"y":1}'),
    "parts of allOf": (
        {"allOf": [of("a"), of("b")], "properties": {"c": {}}}, '{"a":1,"b":1,"c":1}', '{"a":1,"b":1,"d":1}'),
    "parts of anyOf": ({"anyOf": [of("a"), of("b")]}, '{"b":1}', '{"a":1,"b":1}'),
    "properties and a base": (
        {"allOf": [{"$ref": "#/$defs/b"}], "properties": PAIR, "$defs": {"b": of("b")}}, '{"b":1}', '{"b":1,"c":1}'),
    "required but not listed": ({"properties": PAIR, "required": ["b"]}, '{"a":1,"b":[]}', '{"b":1,"c":1}'),
    "only required": ({"anyOf": [{"required": ["a"]}], "properties": PAIR}, '{"a":1}', '{"a":1,"b":1}'),
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSED)
def test_an_object_that_lists_properties_is_closed_unless_the_request_opens_it(name):
    schema, good, open_ = CLOSED[name]
    schema = OBJECT | schema if "array" not in str(schema.get("type")) else schema
    assert accepts(grammar(schema), good) and not accepts(grammar(schema), open_)
    opened = grammar(schema, closed=False)
    assert accepts(opened, good)
    assert accepts(opened, open_) == jsonschema.Draft202012Validator(schema).is_valid(json.loads(open_))


OPEN = [
    (OBJECT, '{"b":1}'),
    ({"type": "object", "additionalProperties": True, "properties": PAIR}, '{"b":1}'),
    ({"type": "object", "additionalProperties": {}, "properties": PAIR}, '{"a":1,"b":[]}'),
    ({"allOf": [{"properties": PAIR}, {"additionalProperties": {}}], "type": "object"}, '{"a":1,"b":1}'),
    ({"type": "object", "if": {"properties": {"a": {"const": 1}}}, "then": {}}, '{"b":1}'),
    ({}, '{"b":1}'),
]


@pytest.mark.parametrize(("schema", "text"), OPEN, ids=str)
def test_an_object_that_says_so_or_lists_nothing_stays_open(schema, text):
    assert accepts(grammar(schema), text)


# ---- what is refused


REFUSED = {  # By keyword and place: a schema of which no text can be held to that.
    ("contains", "/contains"): {"type": "array", "contains": {"const": 1}},
    ("not", "/properties/x/not"): of("x", properties={"x": {"type": "string", "not": {"pattern": "^a"}}}),
    ("not", "/not"): {"type": "number", "not": {"type": "integer"}},
    ("if", "/items/if"): {
        "type": "array",
        "items": {"type": "string", "if": {"pattern": "a"}, "then": {"minLength": 3}},
    },
    ("pattern", "/$defs/p/pattern"): {"$ref": "#/$defs/p", "$defs": {"p": {"type": "string", "pattern": r"\bx\b"}}},
    ("pattern", "/pattern"): {"type": "string", "pattern": r"^(a+)\1$"},
    ("pattern", "/anyOf/1/pattern"): {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "("}]},
    ("multipleOf", "/multipleOf"): {"type": "integer", "multipleOf": 123456789},
    ("enum", "/enum"): {"enum": [2**60 + 1]},
    ("$ref", "/properties/a~1b/$ref"): {"type": "object", "properties": {"a/b": {"$ref": "other.json#/x"}}},
    ("$ref", "/$ref"): {"$ref": "#/nothing"},
    ("patternProperties", "/patternProperties"): {"patternProperties": {"a": INTEGER, "b": {"type": "null"}}},
    ("minProperties", "/minProperties"): {
        "type": "object", "properties": {str(n): {} for n in range(20)}, "minProperties": 9},
    ("unevaluatedProperties", "/unevaluatedProperties"): {
        "properties": {"a": {}}, "if": {"required": ["a"]}, "then": {"properties": {"b": {}}},
        "unevaluatedProperties": False},
    ("type", "/items/type"): {"type": "array", "items": {"type": "frog"}},
    ("properties", "/properties"): {"type": "object", "properties": [1]},
    ("required", "/required"): {"type": "object", "required": True},
    ("minLength", "/minLength"): {"type": "string", "minLength": "3"},
    ("items", "/items"): {"type": "array", "items": 5},
    ("anyOf", "/anyOf"): {"anyOf": {}},
}  # fmt: skip


@pytest.mark.parametrize(("keyword", "place"), REFUSED)
def test_what_cannot_be_enforced_is_refused_by_its_keyword_and_place(keyword, place):
    schema = REFUSED[keyword, place]
    with pytest.raises(SchemaError) as error:
        translated(schema)
    assert (error.value.keyword, error.value.place) == (keyword, place)
    assert f"`{keyword}` at {place} " in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("place", REFUSED)
def test_in_a_tool_that_is_not_strict_it_costs_nothing(place):
    """The call is held to the rest."""
    schema = REFUSED[place]
    parameters = of(properties={"n": INTEGER, "x": schema}, required=["n", "x"])
    parameters |= {"$defs": schema.get("$defs", {})}
    made = calls(parameters)
    walk(made, 1, 60)  # It never stands still.
    assert not accepts(made, call(n="many", x="1"))
    with pytest.raises(ArgumentError, match="the tool f: the schema's `"):
        calls(parameters, strict=True)


EMPTY = {  # By keyword and place: a schema that no finite value fits.
    ("minItems", "/minItems"): {"type": "array", "minItems": 3, "maxItems": 2},
    ("minLength", "/properties/a/minLength"): of(
        "a", properties={"a": {"type": "string", "minLength": 3, "maxLength": 2}}),
    ("minimum", "/minimum"): {"type": "integer", "minimum": 3, "maximum": 2},
    ("exclusiveMinimum", "/exclusiveMinimum"): {"type": "number", "exclusiveMinimum": 2, "maximum": 2},
    ("multipleOf", "/multipleOf"): {"type": "integer", "minimum": 1, "maximum": 4, "multipleOf": 5},
    ("enum", "/enum"): {"enum": []},
    ("pattern", "/pattern"): {"type": "string", "pattern": "^a{3}$", "maxLength": 2},
    ("additionalProperties", "/additionalProperties"): {
        "type": "object", "properties": {"a": {}}, "required": ["b"], "additionalProperties": False},
    ("maxProperties", "/maxProperties"): {"type": "object", "required": ["a", "b"], "maxProperties": 1},
    ("$ref", "/properties/next/$ref"): {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
    ("allOf", "/allOf"): {"allOf": [{"type": "string"}, INTEGER]},
    ("not", "/not"): {"not": {}},
}  # fmt: skip


@pytest.mark.parametrize(("keyword", "place"), EMPTY)
def test_a_schema_that_no_value_fits_is_refused(keyword, place):
    schema = EMPTY[keyword, place]
    with pytest.raises(SchemaError) as error:
        grammar(schema)
    assert (error.value.keyword, error.value.place) == (keyword, place)


@pytest.mark.parametrize("place", EMPTY)
def test_what_no_value_fits_is_left_out_where_it_may_be(place):
    """A property that is not required is never begun, and a list of it stays empty."""
    schema = EMPTY[place]
    if place[0] == "$ref":
        endless = of("next", properties={"next": {"$ref": "#/$defs/e"}})
        schema = {"$ref": "#/$defs/e", "$defs": {"e": endless}}
    outer = {"type": "object", "properties": {"n": INTEGER, "e": schema, "l": {"type": "array", "items": schema}}}
    outer["$defs"] = schema.get("$defs", {})
    made = grammar(outer)
    assert accepts(made, '{"n":1,"l":[]}') and not accepts(made, '{"l":[1]}')
    for seed in range(3):
        assert "e" not in json.loads(walk(made, seed) or "{}")


def test_alternatives_that_multiply_are_bounded():
    """All of nine lists of nine, any of each, would be as many as nine to the ninth."""
    lists = [{"anyOf": [of(f"{n}", f"{m}") for m in range(9)]} for n in range(9)]
    with pytest.raises(ArgumentError, match="the schema has more than 256 alternatives in one place"):
        translated({"allOf": lists})


def test_keywords_that_are_nested_without_end_are_bounded():
    deep = {"const": 1}
    for _ in range(200):
        deep = {"allOf": [deep]}
    with pytest.raises(ArgumentError, match="the schema is nested too deep"):
        translated(deep)


# ---- calls


ROOTS = {  # Where the properties are, and a call that fits.
    "$ref": {"$defs": {"N": of("x", properties={"x": INTEGER})}, "$ref": "#/$defs/N"},
    "allOf": {"allOf": [of("x", properties={"x": INTEGER})]},
    "anyOf": {"anyOf": [of("x", properties={"x": INTEGER}), of("x", properties={"x": INTEGER})]},
    "oneOf": {"type": "object", "oneOf": [of("x", properties={"x": INTEGER})]},
    "additionalProperties": {"type": "object", "additionalProperties": INTEGER, "minProperties": 1},
    "patternProperties": {"type": "object", "patternProperties": {"^x$": INTEGER}, "additionalProperties": False,
                          "minProperties": 1},
    "names": {"type": "object", "propertyNames": {"enum": ["x"]}, "additionalProperties": INTEGER, "required": ["x"]},
    "then": {"type": "object", "if": {}, "then": of("x", properties={"x": INTEGER})},
}  # fmt: skip


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ROOTS)
def test_parameters_that_are_not_at_the_root(name, strict):
    made = calls(ROOTS[name], strict)
    assert accepts(made, call(x="5")) and not accepts(made, call(x="five")) and not accepts(made, call())


def test_a_call_of_one_of_several_forms():
    first = of("a", "k", properties={"a": INTEGER, "k": {"const": "a"}})
    second = of("b", "k", properties={"b": {"type": "boolean"}, "k": {"const": "b"}})
    parameters = {"type": "object", "oneOf": [first, second]}
    strict = calls(parameters, strict=True)
    assert accepts(strict, call(a="1", k="a")) and accepts(strict, call(b="true", k="b"))
    assert not accepts(strict, call(a="1", k="b")) and not accepts(strict, call(a="1", b="true", k="b"))
    wider = calls(parameters)
    assert accepts(wider, call(a="1", k="a")) and accepts(wider, call(b="true", k="b"))
    assert not accepts(wider, call(a="x", k="a")) and not accepts(wider, call(a="1"))


def test_a_reference_to_the_root_from_a_parameter():
    parameters = {
        "type": "object",
        "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["kids"],
    }
    made = calls(parameters)
    assert accepts(made, call(kids='[{"kids": []}]')) and not accepts(made, call(kids="[[]]"))


STRINGS = {  # By schema of a parameter: values that a call may have, and ones that it may not.
    "any": ({"type": "string"}, ["", "5", "a\nb", "{", "<b>"], []),
    "listed": ({"enum": ["a", 1, None]}, ["a", "1", "null"], ["b", '"a"', "2"]),
    "constant": ({"const": "a b"}, ["a b"], ["a"]),
    "a pattern": ({"type": "string", "pattern": "^[a-z]+$"}, ["abc"], ["ABC", "", "1"]),
    "a length": ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "a\nb"], ["a", "abcd"]),
    "a pattern or null": ({"type": ["string", "null"], "pattern": "^[0-9]{2}$"}, ["12", "null"], ["1", "nul"]),
    "not this one": ({"type": "string", "not": {"const": "a"}}, ["b", "aa"], ["a"]),
    "a format": ({"type": "string", "format": "date"}, ["2026-01-01", "today"], []),
    "text or a list": ({"anyOf": [{"type": "string"}, {"type": "array"}]}, ["x", "[1]", "[1"], []),
    "a number": ({"type": "number"}, ["1.5", "-3e7"], ["x", "1,5"]),
    "an object": ({"type": "object", "properties": {"a": INTEGER}}, ["{}", '{"a": 1}'], ['{"b": 1}', "{"]),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", STRINGS)
def test_values_of_parameters_are_raw_text_or_json(name, strict):
    schema, good, bad = STRINGS[name]
    made = calls(of("x", properties={"x": schema}), strict)
    assert [value for value in good if not accepts(made, call(x=value))] == []
    assert [value for value in bad if accepts(made, call(x=value))] == []


def test_a_tool_that_lists_no_parameters_has_none():
    for parameters in ({}, OBJECT, {"type": "object", "properties": {}}, {"type": "object", "required": []}):
        made = calls(parameters)
        assert accepts(made, call()) and not accepts(made, call(x="1"))


def test_parameters_beyond_the_listed_ones():
    open_ = of("a", additionalProperties={"type": "boolean"})
    made = calls(open_, strict=True)
    assert accepts(made, call(a="1")) and accepts(made, call(a="1", b="true", c="false"))
    assert not accepts(made, call(a="1", b="1")) and not accepts(made, call(b="true"))
    listed = of("a")
    assert not accepts(calls(listed), call(a="1", b="x"))
    assert accepts(calls(listed, closed=False), call(a="1", b="x"))


# ---- schemas that libraries make


@pytest.mark.parametrize("name", deeper_but(CLIENTS, *list(CLIENTS)[::5]))
def test_schemas_of_pydantic_and_zod(name):
    schema = CLIENTS[name]
    made, draft = grammar(schema), jsonschema.Draft4Validator if "openapi" in name else jsonschema.Draft202012Validator
    known = "nullable" not in str(schema) and r"\p{" not in str(schema)  # jsonschema knows neither.
    validator = jsonschema.validators.validator_for(schema, draft)(schema if known else {})
    for seed in range(2):
        text = walk(made, seed, 150)
        assert text is None or list(validator.iter_errors(json.loads(text))) == []


# ---- random schemas


DATES = jsonschema.FormatChecker(["date"])
DAYS = ["2026-01-31", "1999-12-01"]


def bounds(schema):
    """Yields the schemas within a schema that bound what a text is, but for names of properties."""
    if isinstance(schema, list):
        for each in schema:
            yield from bounds(each)
    elif isinstance(schema, dict):
        if found := {key: schema[key] for key in ("pattern", "minLength", "maxLength") if key in schema}:
            yield found
        for key, each in schema.items():
            yield from bounds(each) if key != "propertyNames" else ()


def fits(schema, value):
    """Says whether a value fits a schema; None where jsonschema finds no end, and where its formats decide while no
    day fits all bounds of texts: a format that no text of the bounds has is an annotation."""
    try:
        dated = jsonschema.Draft202012Validator(schema, format_checker=DATES).is_valid(value)
        undated = jsonschema.Draft202012Validator(schema).is_valid(value)
    except RecursionError:
        return None
    bounded = jsonschema.Draft202012Validator({"allOf": [{}, *bounds(schema)]})
    return dated if dated == undated or any(map(bounded.is_valid, DAYS)) else None


def test_a_format_that_no_text_of_a_pattern_has_is_an_annotation():
    clash, agree = ({"type": "string", "pattern": pattern, "format": "date"} for pattern in ("^a+$", "^2"))
    assert accepts(grammar(clash, closed=False), '"a"')
    made = grammar(agree, closed=False)
    assert accepts(made, '"2026-01-31"') and not accepts(made, '"2026"') and not accepts(made, '"1999-01-31"')


@pytest.mark.long
@examples(150)
@given(schema=SCHEMAS, seed=st.integers(0, 9), closed=st.booleans())
def test_random_walks_never_stand_still_and_end_in_what_fits(schema, seed, closed):
    try:
        made = grammar(schema, closed=closed)
    except SchemaError as error:
        assert error.keyword or error.why.startswith("takes no"), schema
        return
    twice = list[bool]()  # No grammar keeps a free name from coming twice, and a parser then has one property less.

    def made_of(pairs):
        twice.append(len(dict(pairs)) < len(pairs))
        return dict(pairs)

    if text := walk(made, seed, 120):
        value = json.loads(text, object_pairs_hook=made_of)
        assert any(twice) or fits(schema, value) is not False, (schema, text)


@pytest.mark.long
@examples(150)
@given(schema=SCHEMAS, values=st.lists(VALUES, min_size=5, max_size=8))
def test_a_grammar_takes_what_fits_and_nothing_else(schema, values):
    try:
        made = grammar(schema, closed=False)
    except SchemaError as error:
        if "takes no" in error.why:
            assert not any(fits(schema, value) for value in values), (schema, error)
        return
    for value in values:
        if (good := fits(schema, value)) is not None:
            assert any(accepts(made, text) for text in ordered(value)) == good, (schema, value)


@pytest.mark.long
@examples(60)
@given(schema=SCHEMAS, value=st.dictionaries(KEY, VALUES, max_size=3), seed=st.integers(0, 9))
def test_a_tool_that_is_not_strict_is_never_refused_and_takes_all_that_fits(schema, value, seed):
    made = calls(schema | OBJECT, closed=False)
    walk(made, seed, 60)
    if not fits(schema | OBJECT, value):
        return
    spelled = {key: [each] if isinstance(each, str) else [*ordered(each)] for key, each in value.items()}

    def spellings(keys, chosen):
        if not keys:
            yield call(**chosen)
        for key in keys:
            for text in spelled[key]:
                yield from spellings([other for other in keys if other != key], chosen | {key: text})

    assert any(accepts(made, text) for text in spellings(list(value), {})), (schema, value)
