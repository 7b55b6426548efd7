"""Reads what Gemma 4 writes, cut at every position: the same reasoning, text and calls."""

import json

import pytest
from depth import examples
from hypothesis import given
from hypothesis import strategies as st

from luce.text.gemma import GemmaParser
from luce.text.pieces import Arguments, Call, CallBegin, CallEnd, Reasoning, Text

TOOLS = {
    "put": {"type": "object", "properties": {
        "path": {"type": "string"}, "content": {"type": "string"}, "n": {"type": "integer"},
        "list": {"type": "array"}, "options": {"type": "object"}, "on": {"type": "boolean"},
        "mode": {"type": ["string", "null"]}, "any": {"description": "Whatever."}}},
    "run": {"type": "object", "properties": {"cmd": {"type": "string"}}},
    "now": {"type": "object", "properties": {}},
}  # fmt: skip
Q = '<|"|>'


def spelled(value):
    """Spells a value as the published templates do."""
    if isinstance(value, str):
        return f"{Q}{value}{Q}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{spelled(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(spelled, value)) + "]"
    return json.dumps(value)


def written(body):
    return f"<|tool_call>call:{body}<tool_call|>".replace("~", Q)


def call(name, **arguments):
    return f"<|tool_call>call:{name}{spelled(arguments)}<tool_call|>"


def read(parts, cut=False, tools=TOOLS, **how):
    """Returns the pieces, neighbours of a kind as one, and whether the text was cut within a call."""
    parser, found = GemmaParser(tools, **how), []
    for piece in [piece for part in parts for piece in parser.push(part)] + parser.flush(cut):
        if found and type(found[-1]) is type(piece) and isinstance(piece, Text | Reasoning | Arguments):
            piece = type(piece)(found.pop().text + piece.text)
        found.append(piece)
    return found, parser.cut


def check(text, found, cut=False, was_cut=False, **how):
    """Reads the text whole, by letters, and cut at every third place; which these are depends on its length."""
    for parts in ([text], list(text), *([text[:at], text[at:]] for at in range(1 + len(text) % 3, len(text), 3))):
        assert read(parts, cut, **how) == (found, was_cut), parts


def put(**arguments):
    return Call("put", json.dumps(arguments, ensure_ascii=False))


NOW = Call("now", "{}")

# ---- thoughts, text and calls as they should be

PLAIN = {
    "text alone": ("  Hello\n world \n", [Text("  Hello\n world \n")]),
    "thoughts": ("<|channel>thought\nI see.\n<channel|>Yes.", [Reasoning("I see."), Text("Yes.")]),
    "an empty block": ("<|channel>thought\n<channel|>Yes.", [Text("Yes.")]),
    "an empty block and a full one": ("<|channel>thought\n<channel|><|channel>thought\nI see.\n<channel|>\nYes.",
                                      [Reasoning("I see."), Text("Yes.")]),
    "two full ones": ("<|channel>thought\na<channel|>\n<|channel>thought\nb<channel|>c",
                      [Reasoning("a\n\nb"), Text("c")]),
    "empty blocks behind each other": ("<|channel>thought\n<channel|>" * 3 + "a", [Text("a")]),
    "an end that closes nothing": ("<channel|>Yes.", [Text("Yes.")]),
    "ends within the text": ("Yes<channel|>, no<channel|>.", [Text("Yes, no.")]),
    "two ends": ("<|channel>thought\na\n<channel|><channel|>\nb", [Reasoning("a"), Text("b")]),
    "two beginnings": ("<|channel>thought\n<|channel>thought\na\n<channel|>b", [Reasoning("a"), Text("b")]),
    "no line break behind the name": ("<|channel>thought<channel|>a", [Text("a")]),
    "a channel without a name": ("<|channel>\na<channel|>b", [Reasoning("a"), Text("b")]),
    "line ends of Windows": ("<|channel>thought\r\na\r\n<channel|>b", [Reasoning("a"), Text("b")]),
    "thoughts that do not end": ("<|channel>thought\nI was just about", [Reasoning("I was just about")]),
    "nothing but a beginning": ("<|channel>thought", []),
    "thoughts behind text": ("a\n<|channel>thought\nb<channel|>c", [Text("a"), Reasoning("b"), Text("c")]),
    "a call": (call("put", path="a.txt", n=5), [put(path="a.txt", n=5)]),
    "text and a call": (f"I look.\n\n{call('now')}\n", [Text("I look."), NOW]),
    "thoughts and a call": (f"<|channel>thought\nhm\n<channel|>{call('now')}", [Reasoning("hm"), NOW]),
    "a call within thoughts": (f"<|channel>thought\nhm\n{call('now')}Done.", [Reasoning("hm"), NOW, Text("Done.")]),
    "several calls": (f"{call('now')}{call('put', n=1)}\n{call('now')}", [NOW, put(n=1), NOW]),
    "text between calls": (f"{call('now')}\nThen\n{call('now')}", [NOW, Text("Then"), NOW]),
    "thoughts between calls": (f"{call('now')}<|channel>thought\nhm<channel|>{call('now')}",
                               [NOW, Reasoning("hm"), NOW]),
    "the token that ends a call's text": (f"{call('now')}<|tool_response>", [NOW]),
    "every kind of value": (
        call("put", path="a", n=-3, list=[1, True, None, "x", [], {}], options={"a": {"b": [1.5, "c"]}}, on=False),
        [put(path="a", n=-3, list=[1, True, None, "x", [], {}], options={"a": {"b": [1.5, "c"]}}, on=False)]),
    "null": (call("put", mode=None, path=None), [put(mode=None, path=None)]),
    "an empty text": (call("put", path=""), [put(path="")]),
    "an undeclared tool": (call("fly", to="home", n=3), [Call("fly", '{"to": "home", "n": 3}')]),
    "an undeclared parameter": (call("put", other=5, path="a"), [put(other=5, path="a")]),
    "a parameter of any type": (call("put", any=5), [put(any=5)]),
}  # fmt: skip


@pytest.mark.parametrize(("text", "found"), PLAIN.values(), ids=PLAIN)
def test_what_is_written_as_it_should_be(text, found):
    check(text, found)


def test_without_tools_calls_are_text():
    check(f"a{call('now')}b", [Text(f"a{call('now')}b")], tools=None)
    check("<|channel>thought\na<channel|>b", [Reasoning("a"), Text("b")], tools=None)


def test_a_prompt_may_end_within_thoughts():
    check("I see.\n<channel|>Yes.", [Reasoning("I see."), Text("Yes.")], reasoning=True)
    check("<channel|>Yes.", [Text("Yes.")], reasoning=True)
    check(f"I see.{call('now')}", [Reasoning("I see."), NOW], reasoning=True)


VALUES = ['"', "'it's'", '{"a": [1]}', "}", "]}", "}<tool_call|>", "<tool_call|>", "<|tool_call>call:now{}<tool_call|>",
          "a, n:5", "<channel|>", "<|channel>thought\nx", "\\n\\", "\n a\r\n", "  ", "日本 ü", "<|", '<|"', '"|>', "~",
          "<div>\n</div>", "null", "5", "<|tool_response>"]  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
def test_a_string_is_what_stands_between_its_marks(value):
    check(call("put", path=value, n=1), [put(path=value, n=1)])
    check(call("put", list=[value, {"a": value}]), [put(list=[value, {"a": value}])])


# A string that holds the marks of strings can only be told by what stands around these.
MARKED = ["~", "use ~ here", "`~`", "'~'", "~a~ b", "a ~b~ c", "x:~y~ z", "call:put{path:~a~}<tool_call|>",
          "<|tool_call>call:put{path:~a~,n:3}<tool_call|>", "[~a~,~b~]", 'Q = "~"\nR = "~"', "~ ~ ~", "Q:~ alone"]


@pytest.mark.parametrize("value", [each.replace("~", Q) for each in MARKED])
def test_a_string_may_hold_marks_of_strings(value):
    check(call("put", content=value, n=1) + call("now"), [put(content=value, n=1), NOW])


# ---- what models write beside that

LENIENT = {
    "an equals sign": ("put{path=~a~,n=5}", put(path="a", n=5)),
    "round brackets": ("put(path=~a~,n=5)", put(path="a", n=5)),
    "both kinds of brackets": ("put({path:~a~,n:5})", put(path="a", n=5)),
    "a bracket of each kind": ("put(path:~a~,n:5}", put(path="a", n=5)),
    "a smile": ("put{path:hello :)}", put(path="hello :)")),
    "blanks": (" put { path : ~a~ , n : 5 } ", put(path="a", n=5)),
    "line breaks": ("put{\n  path: ~a~,\n  n: 5,\n}\n", put(path="a", n=5)),
    "JSON": ('put{"path": "a \\"b\\"\\n", "n": 5}', put(path='a "b"\n', n=5)),
    "JSON in containers": ('put{list:["a, b",{"c":"}"}],n:5}', put(list=["a, b", {"c": "}"}], n=5)),
    "names between marks": ("put{~path~:~a~,options:{~b c~:1}}", put(path="a", options={"b c": 1})),
    "quotes that are not escaped": ('put{path:"say "hi" there",n:5}', put(path='say "hi" there', n=5)),
    "single quotes": ("put(path='it's a, b', n=5)", put(path="it's a, b", n=5)),
    "Python's words": ("put(list=[True, None], on=False)", put(list=[True, None], on=False)),
    "a tuple": ("put(list=(1, 'a'))", put(list=[1, "a"])),
    "no quotes": ("put{path:notes/a b.txt,n:5}", put(path="notes/a b.txt", n=5)),
    "no quotes, and commas": ("put{path:Hello, world (1, 2),n:5}", put(path="Hello, world (1, 2)", n=5)),
    "no quotes at the end": ("put{n:5,path:f(x) {y}}", put(n=5, path="f(x) {y}")),
    "no quotes in a list": ("put{list:[a,b c]}", put(list=["a", "b c"])),
    "the first mark missing": ("put{path:a.txt~,n:5}", put(path="a.txt", n=5)),
    "a mark too many": ("put{path:'a'~,n:5}", put(path="a", n=5)),
    "a date without quotes": ("put{path:2026-01-31}", put(path="2026-01-31")),
    "a number for a text": ("put{path:12,content:true}", put(path="12", content="true")),
    "an object for a text": ('put{content:{"a": [1, 2]},n:1}', put(content='{"a": [1, 2]}', n=1)),
    "a text for a number": ("put{n:~12~,on:~true~,list:~[1]~}", put(n=12, on=True, list=[1])),
    "a text that is no number": ("put{n:~many~}", put(n="many")),
    "a whole number with a point": ("put{n:5.0}", put(n=5)),
    "a comma missing": ("put{path:~a~ n:5}", put(path="a", n=5)),
    "a comma too many": ("put{,path:~a~,,n:5,}", put(path="a", n=5)),
    "a bracket too many": ("put{path:~a~}}", put(path="a")),
    "a bracket missing": ("put{options:{a:1},n:5", put(options={"a": 1}, n=5)),
    "all brackets missing": ("put{n:5,list:[1,{a:~b~", put(n=5, list=[1, {"a": "b"}])),
    "a name twice": ("put{n:1,n:2}", put(n=2)),
    "no brackets": ("now", NOW),
    "a namespace": ("default_api:put{n:5}", put(n=5)),
    "a namespace with a point": ("functions.put{n:5}", put(n=5)),
}  # fmt: skip


@pytest.mark.parametrize(("body", "found"), LENIENT.values(), ids=LENIENT)
def test_what_models_write_beside_that(body, found):
    check(written(body), [found])
    check(f"<|channel>thought\nx<channel|>{written(body)}\n{written(body)}", [Reasoning("x"), found, found])


@pytest.mark.parametrize("end", ["", "<tool_call|><tool_call|>", "<|tool_response>", "<tool_call|>\n<|tool_response>"])
def test_a_calls_closer_may_be_missing_or_doubled_at_the_end(end):
    check(f"<|tool_call>call:put{{path:{Q}a{Q}}}{end}", [put(path="a")])


@pytest.mark.parametrize("closed", ["", "<tool_call|>", "<|tool_response>"])
@pytest.mark.parametrize(("body", "found"), [
    ("put{n:5", put(n=5)), ("put{n:5 ", put(n=5)), ("put{n:5,", put(n=5)), ("put(n=5", put(n=5)),
    ("put{on:true", put(on=True)), ("put{n:5,path:a.txt", put(n=5, path="a.txt")), ("put{list:[1,2", put(list=[1, 2])),
    ("put{options:{a:1", put(options={"a": 1})), ("put{options:{a:[~b~", put(options={"a": ["b"]})),
    ("put{path:~a~", put(path="a")), ("put{path:~a~}", put(path="a")),
])  # fmt: skip
def test_closers_of_arguments_may_be_missing_where_the_model_ends_its_text(body, found, closed):
    """The token with which it ends is not in the text. Where the text was cut, more would have come."""
    text = f"<|tool_call>call:{body}{closed}".replace("~", Q)
    check(text, [found])
    if not closed:
        check(text, [], cut=True, was_cut=True)


def test_a_calls_closer_may_be_missing_elsewhere():
    check(f"<|tool_call>call:put{{n:5}}{call('now')}", [put(n=5), NOW])
    check(f"<|tool_call>call:put{{path:{Q}a{Q}}}{call('now')}", [put(path="a"), NOW])
    check("<|tool_call>call:put{n:5}\nDone.", [put(n=5), Text("Done.")])
    check("<|channel>thought\n<|tool_call>call:put{n:5}<channel|>Done.", [put(n=5), Text("Done.")])


def test_no_word_call():
    check("<|tool_call>put{n:5}<tool_call|>", [put(n=5)])
    check("<|tool_call>other{n:5}<tool_call|>", [Text("<|tool_call>other{n:5}<tool_call|>")])


# ---- what is no call, and no mark

UNREAD = [
    "a <|tool_call> is a mark", "<|tool_call>", "<|tool_call>example<tool_call|>", "<|tool_call>call:put",
    "<|tool_call>call:put{", "<|tool_call>call:put{path", "<|tool_call>call:put{path:",
    f"<|tool_call>call:put{{path:{Q}a",
    "<|tool_call>call:put{n:}<tool_call|>", "<|tool_call>call:put{:5}<tool_call|>", "<|tool_call>call:put{n:5} or so",
    "<|tool_call>call:put{n 5}<tool_call|>", "<|tool_call>call:put[1]<tool_call|>", "<|tool_call>call:{{ name }}",
    "<|tool_call>call:put{list:[1}<tool_call|>", "<|tool_call>call:put{path: is how", "<tool_call|>",
    "<|tool_call>call:put{n:is", "<|tool_call>call:put{n:5,path", "<|tool_call>call:put{n:-",
    "<|tool_call>call:put{n:5<", "so <tool_call|> there",
    "<|tool_calls> and <|tool_call >", "<tool_call>call:now{}</tool_call>", "<|channel> is a mark",
    "<|channel>Thought\nx",
    "<|channel>thought is", "<think>a</think>", "<|channe", "<|tool_", "call:now{}", "<|turn>", Q, "<channel|", "<|\"|",
]  # fmt: skip


@pytest.mark.parametrize("text", UNREAD)
def test_what_cannot_be_read_is_text_whole_and_unchanged(text):
    check(text, [Text(text)])
    check(f"x\n\n{text}", [Text(f"x\n\n{text}")])


def test_a_call_follows_what_cannot_be_read():
    check(f"See <|tool_call>example<tool_call|>. Now:\n{call('now')}",
          [Text("See <|tool_call>example<tool_call|>. Now:"), NOW])  # fmt: skip


@pytest.mark.parametrize("head", ["", "call", "call:", "call:put", "put", "call "])
@pytest.mark.parametrize("blank", [" ", "\n", "\t ", "\u3000"])
def test_blanks_around_a_name_are_of_a_call_up_to_a_bound(head, blank):
    """A regex that tried every way of parting so many blanks would never end."""
    for behind in ("", "{n:5}<tool_call|>", "[", "$", ":", "put{n:5}"):
        text = f"<|tool_call>{head}{blank * 3000}{behind}"
        assert read([text])[0] == read([text[:70], text[70:]])[0] == [Text(text)]
    few = blank[0] * 40
    check(f"<|tool_call>{few}call{few}:{few}put{few}{{n:5}}<tool_call|>", [put(n=5)])


def test_values_are_nested_so_deep_at_most():
    deep = written(f"put{{list:{'[' * 60}{']' * 60}}}")
    assert [type(piece) for piece in read([deep])[0]] == [Call]
    far = written(f"put{{list:{'[' * 100_000}{']' * 100_000}}}")
    assert read([far])[0] == [Text(far)]


# ---- a text that was cut


@pytest.mark.parametrize("one", [call("put", path="a b", n=5), written('put{"path":"a","list":[1,{b:2}]}')])
def test_a_call_that_was_cut_is_neither_call_nor_text(one):
    begin = len("<|tool_call>") // 2 + 1
    for at in range(begin, len(one)):
        check(f"ok\n\n{call('now')}{one[:at]}", [Text("ok"), NOW], cut=True, was_cut=True)


def test_text_is_text_where_it_was_cut():
    check("if a <", [Text("if a <")], cut=True)
    check(f"{call('now')}\nThen a < b and", [NOW, Text("Then a < b and")], cut=True)
    check("<|channel>thought\nI was", [Reasoning("I was")], cut=True)
    check(call("now"), [NOW], cut=True)


# ---- calls that a grammar forces


def test_a_forced_call_is_said_while_it_is_written():
    said = {"path": 'ä "b"\n\t', "n": 12, "list": [1, {"a": "x"}], "content": "<tool_call|>"}
    parser = GemmaParser(TOOLS, held="required")
    parts = [piece for letter in call("put", **said) for piece in parser.push(letter)]
    assert parts[0] == CallBegin("put") and parts[-1] == CallEnd() and not parser.flush()
    assert "".join(part.text for part in parts[1:-1]) == json.dumps(said, ensure_ascii=False)
    assert sum(len(part.text) == 1 for part in parts[1:-1]) > 15
    check(call("put", **said), [CallBegin("put"), Arguments(json.dumps(said, ensure_ascii=False)), CallEnd()],
          held="required")  # fmt: skip


def test_a_forced_call_that_was_cut_has_an_end():
    one = call("put", path="abc", n=5)
    for at in range(len("<|tool_call>call:put{"), len(one)):
        found, was_cut = read([one[:at]], cut=True, held="strict")
        assert was_cut and found[0] == CallBegin("put") and found[-1] == CallEnd(whole=False)
        assert '{"path": "abc", "n": 5}'.startswith("".join(piece.text for piece in found[1:-1]))


def test_thoughts_before_a_forced_call_hold_what_they_want():
    text = f"<|tool_call>call:now{{}}<tool_call|>\n<channel|>{call('put', n=1)}"
    found = [Reasoning("<|tool_call>call:now{}<tool_call|>"), CallBegin("put"), Arguments('{"n": 1}'), CallEnd()]
    check(text, found, reasoning=True, held="required")
    check(f"<|channel>thought\n{text}", found, held="instead")
    check(f"Hi {call('now')}", [Text(f"Hi {call('now')}")], held="instead")


# ---- any text

WORDS = [
    "<|channel>thought\n", "<|channel>", "thought", "<channel|>", "<|tool_call>", "<tool_call|>", "call:put{",
    "call:now{", "path:", "n:", "list:[", Q, Q, Q, "a", "5", ",", "}", "]", '"', "'", "=", "(", ")", "{", ":", "\n",
    " ", "<", "<|", "<|tool_response>", "\\", "null", call("now"), call("put", path="x", n=1), "options:{a:1}",
    "call:", "put",
]  # fmt: skip


def pieces_of(text, data):
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@examples(200)
@given(st.lists(st.sampled_from(WORDS), max_size=24),
       st.sampled_from(["", "<|tool_call>call:put{", f"<|tool_call>call:put{{path:{Q}"]), st.booleans(),
       st.booleans(), st.data())  # fmt: skip
def test_no_cutting_changes_what_any_text_is(words, begin, reasoning, cut, data):
    text = begin + "".join(words)
    whole = read([text], cut, reasoning=reasoning)
    assert read(list(text), cut, reasoning=reasoning) == whole
    assert read(pieces_of(text, data), cut, reasoning=reasoning) == whole
    for piece in whole[0]:
        assert not isinstance(piece, Call) or isinstance(json.loads(piece.arguments), dict)
        assert not isinstance(piece, Text) or "<channel|>" not in piece.text


NAMES = st.from_regex(r"[a-z_][a-z0-9_.-]{0,8}", fullmatch=True)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20).filter(lambda text: Q not in text) | st.sampled_from(VALUES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@examples(150)
@given(st.lists(st.dictionaries(NAMES, ANY, max_size=3), min_size=1, max_size=3), st.sampled_from(["", "strict"]),
       st.data())  # fmt: skip
def test_what_was_written_comes_back(several, held, data):
    text = "Hi " + "".join(call("open", **{key: each[key] for key in each}) for each in several)
    whole = read([text], held=held, tools={"open": {"type": "object"}})
    assert read(pieces_of(text, data), held=held, tools={"open": {"type": "object"}}) == whole
    told = [json.loads(piece.text if held else piece.arguments) for piece in whole[0]
            if isinstance(piece, Arguments if held else Call)]  # fmt: skip
    assert told == several and whole[0][0] == Text("Hi")


@examples(100)
@given(st.lists(st.sampled_from(["a", "x y", "<b>", f"see {Q} here", "`", "\n"]), min_size=1, max_size=4),
       st.integers(2, 3))  # fmt: skip
def test_several_calls_never_become_one(words, several):
    value = "".join(words)
    text = call("run", cmd=value) * several
    assert read([text])[0] == read(list(text))[0] == [Call("run", json.dumps({"cmd": value}))] * several


# ---- what it costs


UNITS = ["a b, c:d\n", f"x {Q} y", f"a:{Q}b{Q},", "<tool_call|>", "<|tool_call>", '"', "}", "],"]


@pytest.mark.parametrize("unit", UNITS)
def test_the_work_grows_as_the_text_does(unit):
    """Counted are the letters that are looked at behind what is read."""
    counted = []
    for n in (200, 800):
        parser, looked = GemmaParser(TOOLS), 0
        text = call("put", content=unit * n + "!", n=1)
        for at in range(0, len(text), 7):
            parser.push(text[at : at + 7])
            looked += len(parser._reader._tail) - parser._reader._at if parser._reader else 0
        counted.append(looked)
    assert counted[1] <= 4.5 * counted[0] + 1000


def test_a_model_that_only_begins_calls_is_not_read_for_ever():
    """Each beginning is within the string of the one before, which does not end."""
    text = f"<|tool_call>call:put{{content:{Q}a" * 20_000
    assert read([text]) == ([Text(text)], False)


def test_text_is_said_as_soon_as_it_can_be_no_call():
    parser = GemmaParser(TOOLS)
    said = ["".join(piece.text for piece in parser.push(word))
            for word in ("I ", "<b> ", "a <|tool_", "call> ", "is a", " mark")]  # fmt: skip
    assert said == ["I", " <b>", " a", "", " <|tool_call> is a", " mark"]
    assert parser.push(f"\n{call('put', n=5)}") == [put(n=5)]
    assert parser.push("\nDone") == [Text("Done")]
