"""Reads what Qwen's models write, cut at every position: the same reasoning, text and calls."""

import json

import pytest
from depth import deeper, examples
from hypothesis import given
from hypothesis import strategies as st

from luce.text.parser import Parser
from luce.text.pieces import Arguments, Call, CallBegin, CallEnd, Reasoning, Text

TOOLS = {
    "read": {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}},
    "write": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "content": {"type": "string"},
            "mode": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "options": {"type": "object"},
            "append": {"type": "boolean"},
        },
    },
    "now": {"type": "object", "properties": {}},
}


def written(name, **values):
    """Spells a call as the template does."""
    parts = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"


def call(name, **arguments):
    return Call(name, json.dumps(arguments, ensure_ascii=False))


READ = written("read", path="a.py", lines=3)
# Each has the name, the text, whether the prompt ends within <think>, and the pieces.
GOLDEN = [
    ("text alone", "  Hello\n world \n", False, [Text("  Hello\n world \n")]),
    ("thinking 3.5", "I see.\n</think>\n\nYes.", True, [Reasoning("I see."), Text("Yes.")]),
    ("thinking it began itself", "<think>\nI see.\n</think>\n\nYes.", False,
     [Reasoning("I see."), Text("Yes.")]),
    ("no thought", "\n</think>\n\nYes.", True, [Text("Yes.")]),
    ("two ends of thinking", "a\n</think>\n\n</think>\n\nYes", True, [Reasoning("a"), Text("Yes")]),
    ("thinking cut", "I was just about", True, [Reasoning("I was just about")]),
    ("a call", READ, False, [call("read", path="a.py", lines=3)]),
    ("text and a call", f"I look.\n\n{READ}\n", False, [Text("I look."), call("read", path="a.py", lines=3)]),
    ("a call in thinking", f"Let me look.\n{READ}", True,
     [Reasoning("Let me look."), call("read", path="a.py", lines=3)]),
    ("thinking, then a call", f"hm\n</think>\n\n{READ}", True,
     [Reasoning("hm"), call("read", path="a.py", lines=3)]),
    ("several calls", f"{READ}\n{written('now')}\n{READ}", False,
     [call("read", path="a.py", lines=3), call("now"), call("read", path="a.py", lines=3)]),
    ("text behind a call", f"{READ}\nDone.", False, [call("read", path="a.py", lines=3), Text("Done.")]),
    ("a bare function", "<function=read>\n<parameter=path>\nx\n</parameter>\n</function>", False,
     [call("read", path="x")]),
    ("a bare function with half its frame",
     "Now:\n<function=read>\n<parameter=path>\nx\n</parameter>\n</function>\n</tool_call>\nok", False,
     [Text("Now:"), call("read", path="x"), Text("ok")]),
    ("a bare function that is not declared", "<function=other>\n</function>", False,
     [Text("<function=other>\n</function>")]),
    ("spoken of within a line", "Write <function=now> and </function>.", False,
     [Text("Write <function=now> and </function>.")]),
    ("an undeclared tool", written("fly", to="home", n=3), False, [call("fly", to="home", n="3")]),
    ("values with marks",
     written("write", path="a", content="x </parameter> y </tool_call>\n</function> z"), False,
     [call("write", path="a", content="x </parameter> y </tool_call>\n</function> z")]),
    ("lines, umlauts and quotes", written("write", path="ä", content='\n "日本"\n\n\té\\n'), False,
     [call("write", path="ä", content='\n "日本"\n\n\té\\n')]),
    ("types", written("write", mode="null", options='{"a": [1, 2.5]}', append="True", path="12"), False,
     [call("write", mode=None, options={"a": [1, 2.5]}, append=True, path="12")]),
    ("a value that is none of its type", written("read", lines="many"), False, [call("read", lines="many")]),
    ("an empty value", written("write", content=""), False, [call("write", content="")]),
    ("JSON", '<tool_call>\n{"name": "read", "arguments": {"path": "</tool_call>"}}\n</tool_call>', False,
     [call("read", path="</tool_call>")]),
    ("cut by the token limit", "<tool_call>\n<function=read>\n<parameter=path>\na.p", False,
     [Text("<tool_call>\n<function=read>\n<parameter=path>\na.p")]),
    ("cut within its name", "Go: <tool_call>\n<func", False, [Text("Go: <tool_call>\n<func")]),
    ("not a call", "a <tool_call> is a mark\n", False, [Text("a <tool_call> is a mark\n")]),
    ("a parameter without its end",
     f"<tool_call>\n<function=read>\n<parameter=path>\nx\n</function>\n</tool_call>\nHm. {'x' * 20}", False,
     [call("read", path="x"), Text(f"Hm. {'x' * 20}")]),
    ("a call that thinking speaks of",
     f"I could say <tool_call>\n<function=now>\n so.\n</think>\n\n{READ}", True,
     [Reasoning("I could say <tool_call>\n<function=now>\n so."), call("read", path="a.py", lines=3)]),
    ("nothing", "", False, []),
    ("blanks", "\n \n", False, [Text("\n \n")]),
]  # fmt: skip


def merged(pieces):
    out = []
    for piece in pieces:
        if out and type(out[-1]) is type(piece) and not isinstance(piece, Call):
            out[-1] = type(piece)(out[-1].text + piece.text)
        else:
            out.append(piece)
    return out


def parsed(parts, reasoning=False, tools=TOOLS):
    parser = Parser(tools, reasoning)
    pieces = [piece for part in parts for piece in parser.push(part)]
    return merged(pieces + parser.flush())


@pytest.mark.parametrize(("text", "reasoning", "pieces"), [g[1:] for g in GOLDEN], ids=[g[0] for g in GOLDEN])
def test_transcripts_cut_anywhere(text, reasoning, pieces):
    assert parsed([text], reasoning) == pieces
    assert parsed(list(text), reasoning) == pieces
    for at in range(1, len(text)):
        assert parsed([text[:at], text[at:]], reasoning) == pieces, at


MARKS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=read>", "</function>",
    "<parameter=path>", "</parameter>", "\n", " ", "a", "<", "<function=", '{"name": "now"}', "é", READ,
]  # fmt: skip


@examples(150)
@given(st.lists(st.sampled_from(MARKS), max_size=14), st.booleans(), st.booleans(), st.data())
def test_no_grouping_changes_what_is_said(words, reasoning, with_tools, data):
    text, tools = "".join(words), TOOLS if with_tools else {}
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(parts, reasoning, tools) == parsed([text], reasoning, tools)


@given(st.dictionaries(st.sampled_from(["path", "content"]), st.text(max_size=40)))
def test_arguments_come_back_as_they_were_written(arguments):
    """They are any text but what the format itself cannot say: a parameter's end before another one's
    beginning."""
    values = {key: value for key, value in arguments.items() if "</parameter>" not in value}
    values = {key: value for key, value in values.items() if "</tool_call>" not in value}
    (found,) = parsed([written("write", **values)])
    assert found.name == "write" and json.loads(found.arguments) == values


def test_without_tools_calls_are_text():
    assert parsed([f"x\n\n{READ}\n"], tools={}) == [Text(f"x\n\n{READ}\n")]


# ---- calls that a grammar forces, while they are written


def streamed(parts, held="strict", reasoning=False):
    """Returns the pieces of forced calls: adjacent ones merged, each whole call as one."""
    parser = Parser(TOOLS, reasoning, held)
    pieces = [piece for part in parts for piece in parser.push(part)] + parser.flush()
    found, name, arguments = [], "", ""
    for piece in pieces:
        match piece:
            case CallBegin(name):
                arguments = ""
            case Arguments(text):
                arguments += text
            case CallEnd(True):
                found.append(Call(name, arguments))
            case CallEnd(False):
                found.append((name, arguments))
            case _:
                found.append(piece)
    return merged(found)


def forced(name, **values):
    """Spells a call as the grammar lets it be written: JSON where the schema takes no text."""
    return written(name, **{key: v if isinstance(v, str) else json.dumps(v) for key, v in values.items()})


WRITE = {"path": "ä </parameter> b", "content": '\n "日本"\n\té\\n</tool_call>', "mode": "fast",
         "options": {"a": [1, 2.5]}, "append": True}  # fmt: skip


@pytest.mark.parametrize("held", ["strict", *deeper("required")])
def test_forced_calls_cut_anywhere(held):
    text = f"I see.\n</think>\n\n{forced('write', **WRITE)}\n{forced('now')}\n{READ}"
    pieces = [Reasoning("I see."), call("write", **WRITE), call("now"), call("read", path="a.py", lines=3)]
    assert streamed([text], held, reasoning=True) == pieces
    assert streamed(list(text), held, reasoning=True) == pieces
    for at in range(1, len(text)):
        assert streamed([text[:at], text[at:]], held, reasoning=True) == pieces, at


@pytest.mark.parametrize("begin", ["", "I see <tool_call>.\n</think>\n\n"])
def test_calls_or_other_text_cut_anywhere(begin):
    """Only what the text begins with is a call: JSON may speak of one."""
    json_text = '{"a": "<tool_call>\\n", "b": "</think><tool_call>\\n<function=now>"}'
    before = [Reasoning("I see <tool_call>.")] if begin else []
    for text, pieces in (
        (json_text, [Text(json_text)]),
        (f"{forced('now')}\n{READ}", [call("now"), call("read", path="a.py", lines=3)]),
    ):
        text = begin + text
        for parts in ([text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))):
            assert streamed(parts, "instead", reasoning=bool(begin)) == [*before, *pieces]


def test_forced_calls_say_what_is_certain_at_once():
    """Text values come letter by letter, others once they have ended."""
    parser, said = Parser(TOOLS, held="required"), []
    for letter in forced("write", path="a.py", options={"a": 1}):
        said += [piece.text if isinstance(piece, Arguments) else piece for piece in parser.push(letter)]
    assert said[:-1] == [CallBegin("write"), "{", '"path": "', *"a.py", '"', ', "options": ', '{"a": 1}', "}"]
    assert said[-1] == CallEnd()


@pytest.mark.parametrize("at", range(len("Now:\n\n"), len(f"Now:\n\n{READ}")))
def test_a_forced_call_that_is_cut_is_no_text(at):
    """What began of it stays begun, and is no whole call. Less than half of its mark may be anything else."""
    text, half = f"Now:\n\n{READ}"[:at], len("Now:\n\n<tool_")
    parser, found = Parser(TOOLS, held="strict"), []
    for letter in text:
        found += parser.push(letter)
    found += parser.flush(cut=True)
    said = "".join(piece.text for piece in found if isinstance(piece, Text))
    assert said.rstrip() == ("Now:" if at >= half else text.rstrip())
    arguments = "".join(piece.text for piece in found if isinstance(piece, Arguments))
    assert json.dumps({"path": "a.py", "lines": 3}).startswith(arguments)
    begun = any(isinstance(piece, CallBegin) for piece in found)
    assert begun == ("=read>" in text) and [CallEnd(whole=False)] * begun == [
        piece for piece in found if isinstance(piece, CallEnd)
    ]


def test_thoughts_may_speak_of_calls_where_one_is_required():
    text = f"I could say <tool_call>\n<function=now>\n so.\n</think>\n\n{READ}"
    pieces = [Reasoning("I could say <tool_call>\n<function=now>\n so."), call("read", path="a.py", lines=3)]
    assert streamed(list(text), "required", reasoning=True) == pieces


@pytest.mark.parametrize("odd", ["NaN", "-Infinity", "1e999", r'"\ud800"', "[" * 5000])
def test_a_call_has_no_value_that_json_lacks(odd):
    """Such a call of the older dialect is text, and such a parameter of the newer one is text."""
    older = '<tool_call>{"name": "write", "arguments": {"options": ' + odd + "}}</tool_call>"
    assert {type(piece) for piece in parsed([older])} == {Text}
    (found,) = parsed([written("write", options=odd)])
    assert found == call("write", options=odd)


# Pydantic writes nested models, enums and optional fields so.
PARTS = {"type": "object", "properties": {
    "place": {"$ref": "#/$defs/Place"}, "colour": {"$ref": "#/$defs/Colour", "default": "red"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "near": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
    "both": {"allOf": [{"$ref": "#/$defs/Place"}, {"required": ["x"]}]},
    "one": {"allOf": [{"$ref": "#/$defs/n"}]}, "all": {"items": {"$ref": "#/$defs/Place"}},
    "size": {"enum": ["s", 1]},
    "endless": {"$ref": "#/$defs/endless"}, "lost": {"$ref": "#/$defs/lost"}},
    "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "integer"}}}, "n": {"const": 3},
              "Colour": {"type": "string", "enum": ["red", "7"]},
              "endless": {"anyOf": [{"$ref": "#/$defs/endless"},
                                    {"allOf": [{"$ref": "#/$defs/endless"}] * 2}]}}}  # fmt: skip
SPELLED = {"place": '{"x": 1}', "colour": "7", "note": '"a" and b', "near": '{"x": 2}', "both": '{"x": 3}',
           "one": "3", "all": '[{"x": 4}]', "size": "1", "endless": "{}", "lost": "{}"}  # fmt: skip
MEANT = {"place": {"x": 1}, "colour": "7", "note": '"a" and b', "near": {"x": 2}, "both": {"x": 3}, "one": 3,
         "all": [{"x": 4}], "size": 1, "endless": "{}", "lost": "{}"}  # fmt: skip


@pytest.mark.parametrize("held", ["", "strict"])
def test_types_that_a_schema_names_elsewhere(held):
    parser = Parser({"put": PARTS}, held=held)
    said = parser.push(written("put", **SPELLED)) + parser.flush()
    arguments = "".join(piece.text if held else piece.arguments for piece in said
                        if isinstance(piece, (Arguments, Call)))  # fmt: skip
    assert json.loads(arguments) == MEANT
    (nothing,) = Parser({"put": PARTS}).push(written("put", note="null", near="null"))
    assert nothing == call("put", note=None, near=None)


@examples(100)
@given(
    st.lists(st.tuples(st.sampled_from(["path", "content"]), st.text(max_size=30)), max_size=2,
             unique_by=lambda each: each[0]),
    st.data(),
)  # fmt: skip
def test_no_grouping_changes_a_forced_call(values, data):
    """Its arguments come back as they were written: any text but a line `</parameter>`."""
    values = {key: value for key, value in values if "\n</parameter>\n" not in f"\n{value}\n"}
    text = f"x{forced('write', **values)}y"
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    before, found, after = streamed(parts)
    assert (before, after) == (Text("x"), Text("y"))
    assert found == call("write", **values) and json.loads(found.arguments) == values
