"""Checks what fields of requests, of several servers, hold an answer to."""

from __future__ import annotations

import json

import pytest
from grammar_walks import accepts, walk

from luce.errors import ArgumentError
from luce.text.call_grammar import call_grammar
from luce.text.structured import (
    ANY_OBJECT,
    Choice,
    FieldError,
    Grammar,
    JsonSchema,
    Regex,
    Tags,
    constraint_of,
    grammar_of,
    opens_objects,
)
from luce.text.tool import Tool

SCHEMA = {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"]}
HELD = JsonSchema(SCHEMA)
GBNF = 'root ::= "a" | "b"'
LARK = 'start: "a" | "b"'
STRUCTURES = [
    {"begin": "<f>", "schema": SCHEMA, "end": "</f>"},
    {"begin": "<g>", "schema": {"const": 2}, "end": "</g>"},
]
TAG = {"type": "structural_tag", "structures": STRUCTURES, "triggers": ["<"]}
TAGS = Tags((("<f>", SCHEMA, "</f>"), ("<g>", {"const": 2}, "</g>")), ("<",))


def form(kind, **more):
    return {"response_format": {"type": kind, **more}}


GIVEN = [  # Fields, and what they mean.
    ({}, None),
    ({"response_format": None, "grammar": "", "structured_outputs": {}, "guided_json": None}, None),
    (form("text"), None),
    (form("json_object"), ANY_OBJECT),
    (form("json_object", schema=SCHEMA), HELD),
    (form("json_schema", json_schema={"name": "x", "schema": SCHEMA, "strict": True}), HELD),
    (form("json_schema", json_schema={"name": "x", "schema": SCHEMA}), HELD),
    (form("json_schema", json_schema={"schema": SCHEMA, "strict": False}), JsonSchema(SCHEMA, exact=False)),
    (form("json_schema", schema=SCHEMA), HELD),
    (form("regex", pattern="a+"), Regex("a+")),
    (form("grammar", grammar=GBNF), Grammar(GBNF)),
    (form("json", value=SCHEMA), HELD),
    (form("structural_tag", structures=STRUCTURES, triggers=["<"]), TAGS),
    ({"text.format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}, HELD),
    ({"output_config.format": {"type": "json_schema", "schema": SCHEMA}}, HELD),
    ({"output_format": {"type": "json_schema", "schema": SCHEMA}}, HELD),
    ({"structured_outputs": {"json": SCHEMA}}, HELD),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, HELD),
    ({"structured_outputs": {"regex": "a+", "json": None, "json_object": False}}, Regex("a+")),
    ({"structured_outputs": {"choice": ["a", "b", "a"]}}, Choice(("a", "b"))),
    ({"structured_outputs": {"grammar": GBNF}}, Grammar(GBNF)),
    ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, TAGS),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, JsonSchema(SCHEMA, whitespace=None)),
    ({"structured_outputs": {"json": SCHEMA, "disable_additional_properties": False}},
     JsonSchema(SCHEMA, closed=False)),
    (form("json_object", schema=SCHEMA) | {"structured_outputs": {"disable_additional_properties": False}},
     JsonSchema(SCHEMA, closed=False)),
    ({"guided_json": SCHEMA}, HELD),
    ({"guided_regex": "a+"}, Regex("a+")),
    ({"guided_choice": ["a"]}, Choice(("a",))),
    ({"guided_grammar": LARK}, Grammar(LARK)),
    ({"json_schema": SCHEMA}, HELD),
    ({"json_schema": json.dumps(SCHEMA)}, HELD),
    ({"json_schema": {}}, JsonSchema({})),
    ({"grammar": GBNF}, Grammar(GBNF)),
    ({"grammar": {"type": "json", "value": SCHEMA}}, HELD),
    ({"grammar": {"type": "regex", "value": "a+"}}, Regex("a+")),
    ({"regex": "a+"}, Regex("a+")),
    ({"ebnf": GBNF}, Grammar(GBNF)),
    ({"structural_tag": TAG}, TAGS),
    ({"format": "json"}, ANY_OBJECT),
    ({"format": SCHEMA}, HELD),
    ({"format": json.dumps(SCHEMA)}, HELD),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "constraint"), GIVEN, ids=str)
def test_fields_mean_one_thing(fields, constraint):
    assert constraint_of(fields) == constraint


WRONG = [  # Fields, the one that is named, and what is said of it.
    (form("xml"), "response_format", "'xml' is none of text, json_object, json_schema"),
    (form("json_schema"), "response_format", "json_schema has no schema"),
    (form("json_schema", json_schema={"schema": []}), "response_format", "has no schema"),
    (form("json_object", schema="x"), "response_format", "has no schema"),
    ({"response_format": "json"}, "response_format", "is no object"),
    ({"output_format": {"type": "json_object"}}, "output_format", "is no json_schema with a schema"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs", "json and regex exclude each other"),
    ({"structured_outputs": {"jsn": SCHEMA}}, "structured_outputs", "'jsn' is not supported"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "is no JSON"),
    ({"structured_outputs": [1]}, "structured_outputs", "is no object"),
    ({"guided_json": "[1]"}, "guided_json", "is no JSON schema, which is an object"),
    ({"guided_choice": "a"}, "guided_choice", "is no list of strings"),
    ({"guided_choice": []}, "guided_choice", "has 0 strings"),
    ({"guided_regex": "("}, "guided_regex", "cannot be enforced: a ) is missing"),
    ({"guided_regex": 5}, "guided_regex", "is no string"),
    ({"regex": r"(a)\1"}, "regex", "cannot be enforced: back-references are not supported"),
    ({"grammar": 5}, "grammar", "is no string"),
    ({"grammar": {"type": "xml"}}, "grammar", "is neither a string nor of type json or regex"),
    ({"structural_tag": {"format": {}}}, "structural_tag", "is supported in the form"),
    ({"structural_tag": TAG | {"triggers": ["x"]}}, "structural_tag", "has no trigger for '<f>'"),
    ({"structural_tag": TAG | {"structures": []}}, "structural_tag", "has no structures"),
    ({"format": "xml"}, "format", "'xml' is neither json nor a schema"),
    (form("json_object") | {"regex": "a"}, "response_format and regex", "both say what the answer has to be"),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": "("}, "guided_whitespace_pattern", "cannot be enforced"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "name", "said"), WRONG, ids=str)
def test_a_field_that_cannot_be_obeyed_is_named(fields, name, said):
    with pytest.raises(FieldError) as error:
        constraint_of(fields)
    assert error.value.field == name and str(error.value).startswith(f"{name} ") and said in str(error.value)


def test_a_request_that_opens_objects():
    assert opens_objects({"structured_outputs": {"disable_additional_properties": False}})
    assert not opens_objects({"structured_outputs": {"disable_additional_properties": True}})
    assert not opens_objects({"structured_outputs": None}) and not opens_objects({})


TEXTS = {  # By what they show: a constraint, texts that it takes, and texts that it does not.
    "a schema": (HELD, ['{"n":1}', '{ "n": 1 }', '{\n  "n": 1\n}'], ['{"n":2}', "{}", '{"n":1} ', ' {"n":1}']),
    "without blanks": (JsonSchema(SCHEMA, whitespace=None), ['{"n":1}'], ['{"n": 1}']),
    "other blanks": (JsonSchema(SCHEMA, whitespace="[ ]{2}"), ['{"n":1}', '{"n":  1}'], ['{"n": 1}', '{\n"n":1}']),
    "any object": (ANY_OBJECT, ["{}", '{"a": [1]}'], ["[]", "1"]),
    "any JSON": (JsonSchema({}), ["{}", "[1]", '"a"', "null"], ["a", ""]),
    "a regex": (Regex(r"(?!0)\d{1,3}|x/y"), ["7", "120", "x/y"], ["012", "1234", "", "x"]),
    "a regex with look-ahead": (Regex(r"(?=.*a)(?=.*b)[a-c]{2,3}"), ["ab", "cba"], ["aa", "a", "abca"]),
    "an empty one": (Regex("a?"), ["", "a"], ["aa"]),
    "a choice": (Choice(("yes", "yes sir", 'no "no"\n')), ["yes", "yes sir", 'no "no"\n'], ["no", "yes "]),
    "a Lark grammar": (Grammar('start: "a" x\nx: /[0-9]+/'), ["a1"], ["a", "1"]),
    "GBNF": (Grammar(GBNF), ["a", "b"], ["ab"]),
    "tags": (
        TAGS,
        ["", "free { text", 'so <f>{"n":1}</f>, <g>2</g>.', "<g>2</g>"],
        ["<", "<h>", "a <f>{}</f>", "<g>2"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_texts_that_a_constraint_takes(name):
    constraint, good, bad = TEXTS[name]
    made = grammar_of(constraint)
    assert [text for text in good if not accepts(made, text)] == []
    assert [text for text in bad if accepts(made, text)] == []
    for seed in range(3):
        walk(made, seed, 50)


@pytest.mark.parametrize("name", TEXTS)
def test_thoughts_come_before(name):
    constraint, good, bad = TEXTS[name]
    after = grammar_of(constraint, thinks=True)
    assert all(accepts(after, f"hm\n</think>\n\n{text}") for text in good)
    assert not any(accepts(after, f"hm\n</think>\n\n{text}") for text in bad)


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "tags"])
def test_calls_come_instead(name):
    constraint, good, bad = TEXTS[name]
    tools = [Tool("f", {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})]
    either = call_grammar(tools, thinks=False, required=True, many=False, constraint=constraint)
    assert accepts(either, "<tool_call>\n<function=f>\n<parameter=x>\n5\n</parameter>\n</function>\n</tool_call>")
    assert all(accepts(either, text) for text in good)
    assert not any(accepts(either, text) for text in bad)


def test_a_lark_grammar_that_is_wrong_is_told_in_llguidances_words():
    with pytest.raises(ArgumentError, match=r"the grammar cannot be used: .*1\(\d+\)"):
        accepts(grammar_of(Grammar("start: foo bar(")), "a")
