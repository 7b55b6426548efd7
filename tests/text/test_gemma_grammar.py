"""Checks grammars of calls in Gemma 4's dialect: what one forces is read back as arguments that fit the schema."""

import json

import jsonschema
import pytest
from checkout import GOLDENS
from depth import deeper_but, examples
from grammar_walks import accepts, walk
from hypothesis import example, given
from hypothesis import strategies as st
from random_schemas import PARTS, SCHEMAS, VALUES, ordered

from luce.errors import ArgumentError
from luce.text.dialects import GEMMA, Opening
from luce.text.gemma import GemmaParser
from luce.text.gemma_grammar import gemma_call_grammar
from luce.text.held import Held
from luce.text.pieces import Arguments, Call, Whole
from luce.text.structured import Choice, JsonSchema
from luce.text.tool import Tool

CLIENTS = json.loads((GOLDENS / "client_schemas.json").read_text())
OBJECT = {"type": "object"}
QUOTE = '<|"|>'
ANSWER = Opening(GEMMA)


def spelled(value):
    """Spells a value as the published templates do, with keys as they come."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{spelled(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(spelled, value)) + "]"
    return json.dumps(value)


def call(name="f", **arguments):
    return f"<|tool_call>call:{name}{spelled(arguments)}<tool_call|>"


def calls(parameters, strict=False, closed=True, opening=ANSWER, **how):
    """Returns the grammar of one call of a tool, which is forced."""
    how = {"required": True, "many": False} | how
    return gemma_call_grammar([Tool("f", parameters, strict=strict)], opening, closed=closed, **how)


def of(*required, **properties):
    return {"type": "object", "properties": properties, "required": [*required]}


def read(text, schema, held="required", step=None):
    """Returns what the parser makes of a text: whole, or in pieces of so many letters."""
    parser, whole = GemmaParser({"f": schema}, held=held), Whole()
    parts = [text[at : at + step] for at in range(0, len(text), step)] if step else [text]
    for piece in [piece for part in parts for piece in parser.push(part)] + parser.flush():
        whole.add(piece)
    assert not parser.cut
    return whole


# ---- what is taken and what is not

TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
VALUES_OF = {  # A schema, values that fit it, and values that do not.
    "text": (TEXT, ["", 'a "b" \\n\n{}[]', "<tool_call|>", "<|tool_call>call:f{}"], [1, None, ["a"]]),
    "an integer": (WHOLE, [0, -7, 123456], [1.5, "1", True]),
    "bounds": (WHOLE | {"minimum": 3, "maximum": 12}, [3, 12], [2, 13]),
    "a number": ({"type": "number"}, [0, -1.5, 2e10], ["1", None]),
    "a boolean": ({"type": "boolean"}, [True, False], [0, "true"]),
    "null": ({"type": "null"}, [None], [False, ""]),
    "a type or another": ({"type": ["string", "null"]}, ["null", None], [1]),
    "an enum": ({"enum": ["a b", 3, None, True]}, ["a b", 3, None, True], ["a", 4, False, "3"]),
    "a constant": ({"const": "x"}, ["x"], ["y"]),
    "a pattern": (TEXT | {"pattern": "^[ab]+$"}, ["a", "abba"], ["", "c", "ab c"]),
    "a length": (TEXT | {"minLength": 2, "maxLength": 3}, ["éé", "abc"], ["a", "abcd"]),
    "a list": ({"type": "array", "items": WHOLE}, [[], [1], [1, 2, 3]], [["a"], 1, {}]),
    "a list of texts": ({"type": "array", "items": TEXT, "minItems": 1, "maxItems": 2},
                        [["a"], ["a", ","]], [[], ["a", "b", "c"], [1]]),
    "a tuple": ({"type": "array", "prefixItems": [WHOLE, TEXT], "items": False}, [[], [1], [1, "a"]],
                [["a"], [1, "a", 2]]),
    "a tuple that goes on": ({"type": "array", "prefixItems": [WHOLE], "items": TEXT, "minItems": 2},
                             [[1, "a"], [1, "a", "b"]], [[1], [1, 2]]),
    "an object": (of("a", a=WHOLE, b=TEXT), [{"a": 1}, {"a": 1, "b": "x"}], [{}, {"b": "x"}, {"b": "x", "a": 1}]),
    "all of it optional": (of(a=WHOLE, b=WHOLE, c=WHOLE), [{}, {"a": 1}, {"c": 1}, {"a": 1, "c": 2}, {"b": 1}],
                           [{"d": 1}, {"b": 1, "a": 1}]),
    "other properties": (of("a", a=WHOLE) | {"additionalProperties": {"type": "boolean"}},
                         [{"a": 1}, {"a": 1, "x": True, "y": False}], [{"x": True}, {"a": 1, "x": 1}]),
    "names by a pattern": ({"type": "object", "patternProperties": {"^x": WHOLE}, "additionalProperties": False},
                           [{}, {"x": 1, "x2": 2}], [{"y": 1}, {"x": "a"}]),
    "some properties": ({"type": "object", "additionalProperties": WHOLE, "minProperties": 1, "maxProperties": 2},
                        [{"a": 1}, {"a": 1, "b": 2}], [{}, {"a": 1, "b": 2, "c": 3}]),
    "a tree": ({"$ref": "#/$defs/tree", "$defs": {"tree": of("v", v=WHOLE, kids={
        "type": "array", "items": {"$ref": "#/$defs/tree"}})}},
        [{"v": 1}, {"v": 1, "kids": [{"v": 2, "kids": []}]}], [{"v": 1, "kids": [1]}]),
    "anything": ({}, ["a", 1, None, [1, "a", {"b": []}], {"a": {"b": "c"}}], []),
    "one of": ({"anyOf": [TEXT, of("a", a=WHOLE)]}, ["x", {"a": 1}], [1, {}]),
}  # fmt: skip


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("schema", "good", "bad"), VALUES_OF.values(), ids=VALUES_OF)
def test_what_a_parameter_takes(schema, good, bad, strict):
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    made = calls(of("x", x=schema) | definitions, strict)
    assert [value for value in good if not accepts(made, call(x=value))] == []
    assert [value for value in bad if accepts(made, call(x=value))] == []


@pytest.mark.parametrize("value", ["<|\"|>", "a <|\"|> b"])
def test_no_text_holds_the_mark_that_ends_it(value):
    for schema in (TEXT, TEXT | {"minLength": 1}, {}):
        assert not accepts(calls(of("x", x=schema)), call(x=value))
    with pytest.raises(ArgumentError, match="the tool f: .* cannot be enforced: it has the model's"):
        calls(of("x", x={"enum": [value]}))
    made = calls(of("x", x={"enum": [value, "b"]}))
    assert accepts(made, call(x="b")) and not accepts(made, call(x=value))


def test_parameters_come_in_the_schemas_order_and_only_once():
    made = calls(of("b", "a", b=WHOLE, a=WHOLE, c=WHOLE))
    assert accepts(made, call(b=1, a=2)) and accepts(made, call(b=1, a=2, c=3))
    for wrong in (call(a=2, b=1), call(b=1), call(), call(b=1, a=2, c=3, d=4), call(b=1, a=2).replace(":", ": ")):
        assert not accepts(made, wrong)
    assert not accepts(made, call(b=1, a=2).replace("a:", "b:"))


@pytest.mark.parametrize("name", ["a b", "é", "x-y.z", "$ref", "a/b", "@id"])
def test_names_are_bare(name):
    made = calls(of(name, **{name: WHOLE}))
    assert accepts(made, call(**{name: 1})) and read(call(**{name: 1}), OBJECT).calls == [Call("f", f'{{"{name}": 1}}')]


@pytest.mark.parametrize("name", ["a:b", "a=b", "", " a", "{}", "it's", "a,b", "[0]"])
def test_names_with_signs_of_the_dialect_stand_between_marks(name):
    made, text = calls(of(name, **{name: WHOLE})), f"<|tool_call>call:f{{{QUOTE}{name}{QUOTE}:1}}<tool_call|>"
    assert accepts(made, text) and not accepts(made, call(**{name: 1}))
    assert json.loads(read(text, OBJECT).calls[0].arguments) == {name: 1}


def test_a_tool_that_lists_no_parameters_has_none():
    for parameters in ({}, OBJECT, of(), {"type": "object", "required": []}):
        made = calls(parameters)
        assert accepts(made, call()) and not accepts(made, call(x=1))
    assert accepts(calls(of("a", a={}), closed=False), call(a=1, b="x"))
    assert not accepts(calls(of("a", a={})), call(a=1, b="x"))


def test_a_reference_to_the_root():
    kids = {"type": "array", "items": {"$ref": "#"}}
    made = calls(of("v", v=WHOLE, kids=kids), strict=True)
    assert accepts(made, call(v=1, kids=[{"v": 2, "kids": []}])) and not accepts(made, call(v=1, kids=[[]]))


def test_a_schema_that_takes_no_object_is_refused_where_it_is_strict():
    with pytest.raises(ArgumentError, match="the tool f"):
        calls({"type": "string"}, strict=True)
    assert accepts(calls({"type": "string"}), call())


# ---- what stands around calls


def test_calls_are_forced_or_held_to_where_they_begin():
    tools = [Tool("f", of("n", n=WHOLE)), Tool("g", {})]
    one, two = call(n=1), call("g")
    many, single = (gemma_call_grammar(tools, ANSWER, required=True, many=many) for many in (True, False))
    assert accepts(many, one) and accepts(many, one + two + one) and not accepts(many, f"Hi{one}")
    assert accepts(single, two) and not accepts(single, two + two) and not accepts(many, "Hi")
    free, once = (gemma_call_grammar(tools, ANSWER, required=False, many=many) for many in (True, False))
    for text in ("", "Hi <|tool_", f"I look.{one}", one, f"<|channel>thought\nhm<channel|>{one}"):
        assert accepts(free, text) and accepts(once, text), text
    assert accepts(free, f"a{one}b{two}c") and not accepts(once, f"a{one}b{two}")
    assert not accepts(free, call(n="x")) and not accepts(free, "a<|tool_call>b") and not accepts(free, call("h"))


def test_thoughts_come_first_where_the_prompt_lets_them():
    thought, one = "<|channel>thought\nhm <|tool_call>\n<channel|>", call()
    assert not accepts(calls({}), thought + one)
    may = calls({}, opening=Opening(GEMMA, may_think=True))
    assert accepts(may, one) and accepts(may, thought + one) and not accepts(may, thought)
    within = calls({}, opening=Opening(GEMMA, within=True))
    assert accepts(within, f"hm\n<channel|>{one}") and not accepts(within, one)


OPENINGS = [ANSWER, Opening(GEMMA, within=True), Opening(GEMMA, may_think=True)]


@pytest.mark.parametrize("opening", OPENINGS, ids=range(3))
def test_a_constraint_comes_behind_thoughts_or_instead_of_calls(opening):
    before = {"within": "hm\n<channel|>", "may_think": "<|channel>thought\nhm\n<channel|>"}
    thought = next((text for name, text in before.items() if getattr(opening, name)), "")
    held = Held(constraint=Choice(("yes", "no"))).lark(opening)
    assert accepts(held, f"{thought}yes") and not accepts(held, f"{thought}maybe")
    either = Held([Tool("f", of("n", n=WHOLE))], constraint=JsonSchema({"type": "array"})).lark(opening)
    assert accepts(either, f"{thought}[1]") and accepts(either, thought + call(n=1))
    assert not accepts(either, f"{thought}Hi")


# ---- what is forced is read back


def test_a_forced_call_comes_while_it_is_written():
    schema = of("path", "n", path=TEXT, n=WHOLE)
    parser = GemmaParser({"f": schema}, held="required")
    said = [parser.push(letter) for letter in call(path='ä "b"\nc', n=12)]
    parts = [piece for pieces in said for piece in pieces if isinstance(piece, Arguments)]
    assert json.loads("".join(part.text for part in parts)) == {"path": 'ä "b"\nc', "n": 12}
    assert len(parts) > 8 and said[-1] and not parser.flush()


def fits(schema, value):
    """Says whether a value fits a schema, whose formats are annotations; None where jsonschema finds no end."""
    try:
        return jsonschema.Draft202012Validator(schema).is_valid(value)
    except RecursionError:
        return None


def check(schema, seed, strict, closed):
    try:
        made = calls(schema, strict, closed)
    except ArgumentError:
        assert strict, schema
        return
    text = walk(made, seed, 120)
    if text is None:
        return
    found = read(text, schema)
    ((name, arguments),) = ((each.name, json.loads(each.arguments)) for each in found.calls)
    assert (name, found.text, found.reasoning) == ("f", "", "")
    assert not strict or fits(schema, arguments) is not False, (schema, text)
    for step in (1, 3):
        assert read(text, schema, step=step) == found
    whole = read(text, {}, held="")  # Types of a schema would make texts of what is written for them.
    assert [json.loads(each.arguments) for each in whole.calls] == [arguments], text
    return text


@pytest.mark.parametrize("name", deeper_but(CLIENTS, *list(CLIENTS)[::5]))
def test_schemas_of_pydantic_and_zod(name):
    known = "nullable" not in str(CLIENTS[name]) and r"\p{" not in str(CLIENTS[name]) and "openapi" not in name
    for seed in range(2):
        check(CLIENTS[name], seed, strict=known, closed=True)


# Tools whose parameters have all to be given: a walk comes through all kinds of values.
FULL = st.builds(
    lambda root, parts: {**root, "type": "object", "properties": parts, "required": [*parts]},
    st.builds(lambda schema: {"$defs": schema["$defs"]}, SCHEMAS),
    st.dictionaries(st.sampled_from("abcde"), PARTS.filter(lambda part: part is not False), min_size=2, max_size=4),
)


@examples(60)
@given(schema=SCHEMAS | FULL, seed=st.integers(0, 9), strict=st.booleans(), closed=st.booleans())
def test_what_the_grammar_of_a_random_schema_forces_is_read_back_and_fits(schema, seed, strict, closed):
    check(schema | OBJECT, seed, strict, closed)


@examples(60)
@given(schema=SCHEMAS, value=st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3))
@example({"type": "object", "additionalProperties": {}}, {"a": []})
@example({"anyOf": [{}, {"const": {"b": None}}]}, {"b": ""})  # Only the second lists b.
def test_a_tool_that_is_not_strict_takes_all_that_fits(schema, value):
    made = calls(schema | OBJECT, closed=False)
    if fits(schema | OBJECT, value):
        assert any(accepts(made, call(**json.loads(text))) for text in ordered(value)), (schema, value)
