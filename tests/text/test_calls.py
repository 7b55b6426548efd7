"""Reads calls of tools with every damage that models are known for, and with marks in their values: as a slow,
plain reference reads them (call_reference.py), however the text is cut into pieces."""

import json
import re

import pytest
from call_reference import Reference, Tool
from depth import examples
from hypothesis import assume, example, given
from hypothesis import strategies as st

from luce.text import calls
from luce.text.parser import Parser
from luce.text.pieces import Call, Text

TOOLS = {
    "put": {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}},
    "run": {"type": "object", "properties": {"cmd": {"type": "string"}, "cwd": {"type": "string"}}},
    "now": {"type": "object", "properties": {}},
}
PLAIN = {
    "put": Tool(frozenset({"path", "n"}), frozenset({"n"})),
    "run": Tool(frozenset({"cmd", "cwd"})),
    "now": Tool(frozenset(), open=True),
}


def read(parts, tools=TOOLS, cut=False, **how):
    """Returns texts and calls, with neighbouring texts as one: a string, or (name, arguments)."""
    parser, found = Parser(tools, **how), []
    for piece in [piece for part in parts for piece in parser.push(part)] + parser.flush(cut):
        if isinstance(piece, Call):
            found.append((piece.name, json.loads(piece.arguments)))
        elif found and isinstance(found[-1], str):
            found[-1] += piece.text
        else:
            found.append(piece.text)
    return found, parser.cut


STRIDE = 37  # A piece of so many letters holds several marks, and ends at any place of one.


def cuts(text):
    """Returns the text whole, by letters, and in pieces of STRIDE, of which one ends at every third place; which
    these are depends on the text's length."""
    begins = range(1 + len(text) % 3, STRIDE + 1, 3)
    pieces = ([text[:at], *(text[i : i + STRIDE] for i in range(at, len(text), STRIDE))] for at in begins)
    return [[text], list(text), *pieces]


def check(text, found, tools=TOOLS):
    for parts in cuts(text):
        assert read(parts, tools)[0] == found, parts


def parameter(key, value):
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def function(name, **values):
    return f"<function={name}>\n{''.join(parameter(*each) for each in values.items())}</function>\n"


def call(name, **values):
    """Spells a call as templates do."""
    return f"<tool_call>\n{function(name, **values)}</tool_call>"


# ---- damage

HEAD, PATH, N = "<tool_call>\n<function=put>\n", parameter("path", "a.txt"), parameter("n", "5")
END = "</function>\n</tool_call>"
BOTH = [("put", {"path": "a.txt", "n": 5})]
ONE = [("put", {"path": "a.txt"})]
DAMAGED = {
    "a parameter's closer doubled": (HEAD + PATH + "</parameter>\n" + N + "</parameter>\n" + END, BOTH),
    "three times, on one line": (HEAD + PATH.rstrip() + "</parameter> </parameter>\n" + N + END, BOTH),
    "the last one missing": (HEAD + PATH + "<parameter=n>\n5\n" + END, BOTH),
    "one in the middle missing": (HEAD + "<parameter=path>\na.txt\n" + N + END, BOTH),
    "all of them missing": (HEAD + "<parameter=path>\na.txt\n<parameter=n>\n5\n" + END, BOTH),
    "a function's closer missing": (HEAD + PATH + "</tool_call>", ONE),
    "a call's closer missing at the end": (HEAD + PATH + "</function>", ONE),
    "both missing at the end": (HEAD + PATH, ONE),
    "a parameter's and a function's missing": (HEAD + PATH + "<parameter=n>\n5\n</tool_call>", BOTH),
    "a function's closer doubled": (HEAD + PATH + "</function>\n" + END, ONE),
    "a call's closer doubled": (HEAD + PATH + END + "\n</tool_call>\n", ONE),
    "all of them doubled": (HEAD + PATH + END + "\n</parameter>\n" + END, ONE),
    "another word": (HEAD + PATH + "</function_invocation>\n</tool_call>", ONE),
    "another word behind the right one": (HEAD + PATH + "</function>\n</function_invocation>\n</tool_call>", ONE),
    "another word behind all": (HEAD + PATH + END + "\n</function>\n</function_invocation>\nextra", [*ONE, "extra"]),
    "a word that nobody knows": (HEAD + PATH + "</invoke>\n" + END, ONE),
    "closers in another order": (HEAD + PATH + "</tool_call>\n</function>", ONE),
    "an opening doubled": ("<tool_call>\n" + HEAD + PATH + END, ONE),
    "an opening for the call's closer": (HEAD + PATH + "</function>\n<tool_call>", ONE),
    "an opening at the very end": (HEAD + PATH + END + "\n<tool_call>\n", ONE),
    "closers before the call": ("I put it.\n</tool_call>\n" + HEAD + PATH + END, ["I put it.", *ONE]),
    "no opening": (HEAD.partition("\n")[2] + PATH + END + "\nok", [*ONE, "ok"]),
    "a parameter behind the function": (HEAD + PATH + "</function>\n" + N + END, BOTH),
    "no line breaks": (re.sub(r"\s", "", HEAD + PATH + N + END), BOTH),
    "no line break before closers": (HEAD + PATH.replace("\n</", "</") + N.replace("\n</", "</") + END, BOTH),
    "no line break, no closer": (HEAD + "<parameter=path>a.txt<parameter=n>5</function></tool_call>", BOTH),
    "line ends of Windows": ((HEAD + PATH + N + END).replace("\n", "\r\n"), BOTH),
    "those, and closers missing": ((HEAD + PATH + "<parameter=n>\n5\n" + END).replace("\n", "\r\n"), BOTH),
    "a closer that is not closed": (HEAD + PATH.replace("</parameter>", "</parameter") + N + END, BOTH),
    "a closer named after its parameter": (HEAD + PATH.replace("</parameter>", "</path>") + N + END, BOTH),
    "names in quotes": ((HEAD + PATH + END).replace("=put", '="put"').replace("=path", "='path'"), ONE),
    "a parameter that nobody declared": (HEAD + PATH + parameter("mode", "x") + N + END,
                                         [("put", {"path": "a.txt", "mode": "x", "n": 5})]),
    "a parameter twice": (HEAD + parameter("path", "b") + PATH + END, ONE),
}  # fmt: skip


@pytest.mark.parametrize(("text", "found"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_call_is_read_whole(text, found):
    check(text, found)


SPELLED = {
    "</parameter>": ["</paramter>", "</parameters>", "</parmaeter>", "</Parameter>", "</param>", "<parameter>",
                     "</ parameter>", "</parameter >", "</parameter/>", "<\\parameter>", "</parameter1>",
                     "</parameter_x>", "</parameter=path>", "</parameter>>"],
    "</function>": ["</functon>", "</functions>", "</funciton>", "<function>", "</func>", "</FUNCTION>",
                    "</function_call>", "</function>>", "</function"],
    "</tool_call>": ["</tool_cal>", "</tool_calls>", "</tool-call>", "</toolcall>", "</tool>", "</tool_call>>",
                     "</tool_use>"],
}  # fmt: skip
MISSPELT = [(right, wrong) for right, wrongs in SPELLED.items() for wrong in wrongs]


@pytest.mark.parametrize(("right", "wrong"), MISSPELT, ids=[wrong for _, wrong in MISSPELT])
def test_a_closer_may_be_misspelt(right, wrong):
    check((HEAD + PATH + N + END).replace(right, wrong), BOTH)
    text = f"<tool_call>\n{function('run', cmd='ls').replace(right, wrong)}{right if 'tool' in right else ''}"
    check(f"{text}\n{call('now')}", [("run", {"cmd": "ls"}), ("now", {})])


# ---- several calls

LS, PWD = ("run", {"cmd": "ls"}), ("run", {"cmd": "pwd"})
SEVERAL = {
    "whole ones": (f"{call('run', cmd='ls')}\n{call('run', cmd='pwd')}", [LS, PWD]),
    "with text between": (f"{call('run', cmd='ls')}\nThen:\n\n{call('run', cmd='pwd')}", [LS, "Then:", PWD]),
    "two in one wrapper": (
        f"<tool_call>\n{function('run', cmd='ls')}{function('run', cmd='pwd')}</tool_call>",
        [LS, PWD],
    ),
    "three in one wrapper": (f"<tool_call>\n{function('run', cmd='ls') * 3}</tool_call>", [LS] * 3),
    "the first one's wrapper open": (f"<tool_call>\n{function('run', cmd='ls')}{call('run', cmd='pwd')}", [LS, PWD]),
    "its function open, too": (f"<tool_call>\n{function('run', cmd='ls').replace('</function>', '')}"
                               f"{call('run', cmd='pwd')}", [LS, PWD]),
    "its value open, too": (f"<tool_call>\n<function=run>\n<parameter=cmd>\nls\n{call('run', cmd='pwd')}", [LS, PWD]),
    "a function open in one wrapper": (f"<tool_call>\n{function('run', cmd='ls').replace('</function>', '')}"
                                       f"{function('run', cmd='pwd')}</tool_call>", [LS, PWD]),
    "bare functions": (f"{function('run', cmd='ls')}{function('run', cmd='pwd')}", [LS, PWD]),
    "none that is declared": (f"{call('run', cmd='ls')}\n{call('fly', to='home')}", [LS, ("fly", {"to": "home"})]),
    "closers doubled between": (f"{call('run', cmd='ls')}\n</function>\n{call('run', cmd='pwd')}", [LS, PWD]),
    "on one line": (re.sub(r"\s", "", call("run", cmd="ls") * 2), [LS, LS]),
}  # fmt: skip


@pytest.mark.parametrize(("text", "found"), SEVERAL.values(), ids=SEVERAL)
def test_several_calls_never_become_one(text, found):
    check(text, found)
    check(text.replace("\n", "\r\n"), found)


# ---- values that hold marks

FILE = {"put": {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}}}
WHOLE = f'doc = """\n{call("put", path="a/b.txt", content="hello")}\n"""'
MARKED = {
    "a whole call": WHOLE,
    "nothing but a whole call": call("put", path="a", content="b"),
    "a call of a tool that nobody declared": f'x = """\n{call("foo", bar="baz")}\n"""',
    "two calls": f"{WHOLE}\nand\n{WHOLE}",
    "a call in a call": f'x = """\n{call("put", path="a", content=WHOLE)}\n"""',
    "a JSON call": '<tool_call>\n{"name": "put", "arguments": {}}\n</tool_call>',
    "a parameter by a name that is declared": '"""\n<parameter=path>\nliteral\n</parameter>\n"""',
    "a parameter by another name": 'T = """\n</parameter>\n<parameter=new>\n#!\n</parameter>\n"""',
    "two of them": '"""\n</parameter>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"""',
    "marks in code": (
        '[\n    "<tool_call>\\n",\n    "<parameter=query>\\n",\n    "\\n'
        '</parameter>\\n",\n    "</function>\\n",\n]'
    ),
    "marks in a sentence": "see <tool_call> and </parameter> in the docs",
    "an opening that nothing closes": "use <parameter=NAME> to open a parameter",
    "a declared one within a sentence": "use `<parameter=path>` for a path",
    "an opening on its own line": "it begins with\n<tool_call>",
    "the end of a call": "it ends with\n</parameter>\n</function>\n</tool_call>\nand nothing else",
    "closers within lines": "x </parameter> y </tool_call>\n</function> z",
    "a misspelt closer before the right one": "<config>\n  <p>1</p>\n</parameters>",
    "an element by the parameter's name": "<content>\n1\n</content>",
    "HTML": "<div>\n  <p>a < b</p>\n</div>\n<function>\n<call>",
    "a call without its closers": "<tool_call>\n<function=NAME>\nand so on",
    "fences": "```xml\n<tool_call>\n```\n",
    "thoughts": "<think>\nhm\n</think>\n",
    "line ends of its own": "a\r\nb\r\n",
    "blank lines": "\n\n a\n\n",
    "nothing": "",
}  # fmt: skip


@pytest.mark.parametrize("value", MARKED.values(), ids=MARKED)
def test_a_value_may_hold_marks(value):
    first = call("put", path="f.py", content=value)
    check(first, [("put", {"path": "f.py", "content": value})], FILE)
    check(call("put", content=value, path="f.py"), [("put", {"content": value, "path": "f.py"})], FILE)
    both = [("put", {"path": "f.py", "content": value}), ("put", {"path": "x", "content": "y"})]
    check(f"{first}\n{call('put', path='x', content='y')}", both, FILE)


def test_a_value_keeps_its_line_ends_where_marks_have_those_of_windows():
    text = call("put", path="a.md", content="see <tool_call> and </parameter> in the docs").replace("\n", "\r\n")
    found = [("put", {"path": "a.md", "content": "see <tool_call> and </parameter> in the docs"})]
    check(text.replace("docs\r\n</", "docs</"), found, FILE)
    check(text.replace("in the", "in\r\nthe\n"), [("put", {"path": "a.md", "content": "see <tool_call> and "
                                                           "</parameter> in\r\nthe\n docs"})], FILE)  # fmt: skip


def test_the_last_end_that_leaves_a_well_formed_rest_ends_a_call():
    end = "\n</parameter>\n</function>\n</tool_call>"
    check(f"{call('run', cmd='a')}\nNo more.{end}", [("run", {"cmd": f"a{end}\nNo more."})])
    note = "Note: a call ends with </tool_call>, and </parameter> is before it."
    check(f"{call('run', cmd='a')}\n{note}", [("run", {"cmd": "a"}), note])
    check(f"{call('put', n=5)}\nNo more.{end}", [("put", {"n": 5}), f"No more.{end}"])  # That is no integer.


# ---- the older form

J = '{"name": "put", "arguments": {"path": "a.txt", "n": 5}}'
OBJECTS = {
    "as it should be": (f"ok\n<tool_call>\n{J}\n</tool_call>", ["ok", *BOTH]),
    "without its closer": (f"<tool_call>\n{J}", BOTH),
    "closers doubled": (f"<tool_call>{J}</tool_call>\n</tool_call>", BOTH),
    "another closer": (f"<tool_call>\n{J}\n</function>\n</tool_call>", BOTH),
    "an opening for the closer": (f"<tool_call>\n{J}\n<tool_call>", BOTH),
    "two in one wrapper": (f"<tool_call>\n{J}\n{J}\n</tool_call>", BOTH * 2),
    "the first one's closer missing": (f"<tool_call>\n{J}\n<tool_call>\n{J}\n</tool_call>", BOTH * 2),
    "a bracket too many": (f"<tool_call>\n{J}}}\n</tool_call>", BOTH),
    "a bracket missing": (f"<tool_call>\n{J[:-1]}\n</tool_call>", BOTH),
    "both missing at the end": (f"<tool_call>\n{J[:-2]}", BOTH),
    "line ends of Windows": (f"<tool_call>\r\n{J}\r\n</tool_call>\r\n", BOTH),
    "marks in strings": (f"<tool_call>\n{J.replace('a.txt', '</tool_call>{<function=put>')}\n</tool_call>",
                         [("put", {"path": "</tool_call>{<function=put>", "n": 5})]),
    "line breaks in strings": ("<tool_call>\n" + J.replace("a.txt", "a\nb") + "\n</tool_call>",
                               [("put", {"path": "a\nb", "n": 5})]),
    "arguments in a string": (
        '<tool_call>\n{"name": "put", "arguments": "{\\"n\\": 5}"}\n</tool_call>',
        [("put", {"n": 5})],
    ),
    "arguments by another name": (
        '<tool_call>\n{"name": "put", "parameters": {"n": 5}}\n</tool_call>',
        [("put", {"n": 5})],
    ),
    "no arguments": ('<tool_call>\n{"name": "now"}\n</tool_call>', [("now", {})]),
    "as Python has it": ("<tool_call>\n{'name': 'put', 'arguments': {'path': \"it's\", 'n': None}}\n</tool_call>",
                         [("put", {"path": "it's", "n": None})]),
    "a number in a string": (f"<tool_call>\n{J.replace('5', chr(34) + '5' + chr(34))}\n</tool_call>", BOTH),
}  # fmt: skip


@pytest.mark.parametrize(("text", "found"), OBJECTS.values(), ids=OBJECTS)
def test_an_object_is_a_call(text, found):
    check(text, found)


# ---- what is no call

UNREAD = {
    "a mark in a sentence": "a <tool_call> is a mark\n",
    "an undeclared function without its call": "<function=other>\n</function>",
    "a function within a line": "Write <function=now> and </function>.",
    "a template": (
        "<tool_call>\n<function={{ tc.name }}>\n<parameter={{ k }}>\n{{ v }}\n"
        "</parameter>\n</function>\n</tool_call>"
    ),
    "text for a function": "<tool_call>example</tool_call>",
    "no name": "<tool_call>\n<function=>\n</function>\n</tool_call>",
    "a function's mark that is not closed": (
        "<tool_call>\n<function=put\n<parameter=path>a</parameter>\n"
        "</function>\n</tool_call>"
    ),
    "text in a function": f"{HEAD}{PATH}and\n{N}{END}",
    "a value that does not end": HEAD + "<parameter=path>\na.tx",
    "a function and nothing else": HEAD,
    "another object": '<tool_call>\n{"x": 1}\n</tool_call>',
    "half an object": '<tool_call>\n{"name": "put", "argum',
    "a list": "<tool_call>\n[1, 2]\n</tool_call>",
    "attributes": (
        '<tool_call>\n<function name="put">\n<parameter name="path">\nx\n'
        '</parameter>\n</function>\n</tool_call>'
    ),
    "closers alone": "so\n</parameter>\n</function>\n</tool_call>\nthere",
    "blanks": " \n\n",
}  # fmt: skip


@pytest.mark.parametrize("text", UNREAD.values(), ids=UNREAD)
def test_what_cannot_be_read_is_text_whole_and_unchanged(text):
    check(text, [text])
    check(f"x\n\n{text}", [f"x\n\n{text}"])


def test_a_call_follows_what_cannot_be_read():
    example = "I'll show: <tool_call>example</tool_call>. Now real:"
    check(f"{example}\n{call('run', cmd='ls')}", [example, LS])
    check(f"{UNREAD['a template']}\n\n{call('run', cmd='ls')}", [UNREAD["a template"], LS])
    check(f"{call('run', cmd='ls')}\n{HEAD}and", [LS, f"{HEAD}and"])


# ---- a text that was cut


WHOLE_TEXTS = [
    *((text, TOOLS) for table in (DAMAGED, SEVERAL, OBJECTS) for text, _ in table.values()),
    *((text, TOOLS) for text in UNREAD.values()),
    *((f"{call('put', path='f.py', content=value)}\n{call('put', path='x')}", FILE) for value in MARKED.values()),
]


@pytest.mark.long  # It reads 5,000 texts.
@pytest.mark.parametrize("number", range(len(WHOLE_TEXTS)))
def test_no_cut_in_two_changes_what_is_read(number):
    """Texts of one kind differ in a few letters: each is cut at every third place, at others than the next one."""
    text, tools = WHOLE_TEXTS[number]
    whole = read([text], tools)
    for at in range(1 + number % 3, len(text), 3):
        assert read([text[:at], text[at:]], tools) == whole, at


@pytest.mark.parametrize(
    "at", range(len("ok\n\n") + len(call("run", cmd="ls")), len("ok\n\n") + 2 * len(call("run", cmd="ls")))
)
def test_a_call_that_was_cut_is_neither_call_nor_text(at):
    text = f"ok\n\n{call('run', cmd='ls')}\n{call('run', cmd='pwd')}"[:at]
    for parts in ([text], list(text)):
        assert read(parts, cut=True) == (["ok", LS], at > len(f"ok\n\n{call('run', cmd='ls')}\n"))


def test_text_behind_a_call_is_text_where_it_was_cut():
    text = f"{call('run', cmd='ls')}\nThen a < b and"
    assert read([text], cut=True) == ([LS, "Then a < b and"], False)
    assert read(["if a <"], cut=True) == (["if a <"], False)
    assert read(["I see. <tool_"], cut=True) == (["I see."], True)
    assert read(["I see.\n<function=ru"], cut=True) == (["I see."], True)


# ---- all of it, against the reference

WORDS = [
    "<tool_call>", "</tool_call>", "<function=put>", "<function=run>", "<function=now>", "<function=foo>",
    "</function>",
    "<parameter=path>", "<parameter=n>", "<parameter=cmd>", "<parameter=bogus>", "</parameter>", "</parameters>",
    "</function_invocation>", "</div>", "</path>", "\n", "\n", "\n", " ", "a", "5", "x y", "\r\n", "<", "</", "> ", "`",
    '{"name": "now", "arguments": {"a": "1"}}', '{"n', "</parameter>\n</function>\n</tool_call>", PATH, N,
    "<tool_call>\n<function=run>\n<parameter=cmd>\n", "</parameter>\n<parameter=", call("run", cmd="ls"),
]  # fmt: skip


BLANK = " \t\r\n"


def reference(text, cut=False):
    """Returns what read() does, as the reference reads it."""
    found, begun, was_cut = [], None, False
    for what, *where in Reference(text, PLAIN, cut=cut).read():
        if what == "said":
            said = text[slice(*where)]
            found[-1:] = [found[-1] + said] if found and isinstance(found[-1], str) else [*found[-1:], said]
        elif what == "begin":
            begun = (where[0], {})
        elif what == "json":
            begun[1].update(where[0])
        elif what == "value":
            begun[1][where[0]] = plain_value(begun[0], where[0], text[where[1] : where[2]])
        elif what == "end":
            found.append(begun)
        was_cut = was_cut or what == "cut"
    shown = []
    for at, one in enumerate(found):  # Blanks around calls are of nothing.
        if isinstance(one, str):
            one = one.lstrip("\r\n") if at else one
            last = at + 1 == len(found) and not was_cut
            one = one.rstrip(BLANK) if not last or (at and not one.strip(BLANK)) else one
        shown += [one] if one else []
    return shown, was_cut


def plain_value(name, key, text):
    windows = not text.startswith("\n")
    text = text.removeprefix("\r\n") if windows else text[1:]
    text = text[:-2] if windows and text.endswith("\r\n") else text.removesuffix("\n")
    whole = name in PLAIN and key in PLAIN[name].integers and re.fullmatch(r"\s*-?[0-9]+\s*", text)
    return int(text) if whole else text


@examples(300)
@given(st.lists(st.sampled_from(WORDS), max_size=16), st.sampled_from(["", HEAD, "<tool_call>\n<function=run>\n"]),
       st.booleans(), st.data())  # fmt: skip
@example([PATH, END, "\n", "</function>", HEAD, PATH], "", False, None)
@example(["<parameter=cmd>", "a", "\n", call("run", cmd="ls"), END], "<tool_call>\n<function=run>\n", False, None)
def test_any_text_is_read_as_the_reference_reads_it_however_it_is_cut(words, begin, cut, data):
    text = begin + "".join(words)
    cut = cut and not re.search(r"<[^>\n]*$", text)  # Else half a mark ends it.
    expected = reference(text, cut)
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6))) if data else []
    parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    for each in ([text], list(text), parts):
        assert read(each, cut=cut) == expected, each


@examples(150)
@given(st.lists(st.sampled_from([*WORDS, "<think>", "</think>"]), max_size=16), st.booleans(), st.booleans(), st.data())
def test_thoughts_do_not_depend_on_cuts_either(words, reasoning, cut, data):
    text = "".join(words)
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    whole = [_with_kinds(each, reasoning, cut) for each in ([text], list(text), parts)]
    assert whole[0] == whole[1] == whole[2]


def _with_kinds(parts, reasoning, cut):
    parser, found = Parser(TOOLS, reasoning), []
    for piece in [piece for part in parts for piece in parser.push(part)] + parser.flush(cut):
        if found and type(found[-1]) is type(piece) and not isinstance(piece, Call):
            found[-1] = type(piece)(found[-1].text + piece.text)
        else:
            found.append(piece)
    return found, parser.cut


# Values with marks that are balanced, or within lines.
INNER = st.recursive(
    st.text(alphabet='ab <\n\r\t>`"é', max_size=8),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        inner.map(lambda value: f'x = """\n{call("put", path="a", content=value)}\n"""'),
        inner.map(lambda value: f"`<parameter=path>` {value} `</parameter>`."),
        inner.map(lambda value: f"say <tool_call> {value}."),
    ),
    max_leaves=5,
)


@examples(200)
@given(st.lists(st.tuples(INNER, INNER), min_size=1, max_size=3))
def test_what_was_written_comes_back(values):
    found = [("put", {"path": path, "content": content}) for path, content in values]
    text = "\n".join(call(name, **arguments) for name, arguments in found)
    assert read([text], FILE)[0] == read(list(text), FILE)[0] == found


CLOSER = re.compile(r"</(?:parameter|function|tool_call)>\n?")
DAMAGE = st.sampled_from([
    lambda closer: "", lambda closer: closer * 2, lambda closer: closer.rstrip(),
    lambda closer: closer.replace("e", "", 1),
    lambda closer: closer.replace("r", "x", 1), lambda closer: closer.replace("\n", "\r\n"),
])  # fmt: skip


@examples(300)
@given(st.lists(st.sampled_from(["ls", "a b", "x\ny", "<b>1</b>", "5"]), min_size=1, max_size=4), DAMAGE, st.data())
def test_a_damaged_text_is_read_as_it_was_meant_or_is_text(values, damage, data):
    """One closer is damaged. Never is a mark within a value, or debris in the text, and never do calls join."""
    found = [("run", {"cmd": value}) for value in values]
    text = "\n".join(call(name, **arguments) for name, arguments in found)
    closers = list(CLOSER.finditer(text))
    hurt = data.draw(st.sampled_from(closers))
    text = text[: hurt.start()] + damage(hurt[0]) + text[hurt.end() :]
    said, _ = read([text], TOOLS)
    assert said == found


@given(st.text(alphabet="ab <>/=\n", max_size=40), st.sampled_from(list(DAMAGED.values())))
def test_text_before_a_call_stays(before, damaged):
    text, found = damaged
    assume(not re.search(r"</|<t|<f", before) and isinstance(found[0], tuple))
    before = before.rstrip(BLANK)
    said, _ = read([f"{before}\n\n{text}"], TOOLS)
    assert said == ([before] if before else []) + found


# ---- what it costs


def steps(monkeypatch, text):
    """Returns how often a reading was taken a step further, letter by letter."""
    counted = [0]
    inner = calls.go_on

    def counting(rules, readings, event):
        counted[0] += len(readings)
        return inner(rules, readings, event)

    with monkeypatch.context() as patched:
        patched.setattr(calls, "go_on", counting)
        read([text[at : at + 7] for at in range(0, len(text), 7)], FILE)
    return counted[0]


@pytest.mark.parametrize("unit", [
    "x < y and <b>1</b>\n", f"{WHOLE}\n", "</parameter>\n</function>\n</tool_call>\nx\n", "<parameter=x> <tool_call>\n",
    "see\n<tool_call>\n<function=foo>\n<parameter=path>\n", "</parameters>\n</functions>\n",
], ids=range(6))  # fmt: skip
def test_the_work_grows_as_the_text_does(monkeypatch, unit):
    short, long = (steps(monkeypatch, call("put", path="a", content=unit * n)) for n in (100, 400))
    assert long <= 4.5 * short


def test_text_is_said_as_soon_as_it_can_be_no_call():
    parser = Parser(TOOLS)
    said = [
        "".join(piece.text for piece in parser.push(word))
        for word in ("I ", "<b> ", "a <tool_", "call> ", "is a", " mark")
    ]
    assert said == ["I", " <b>", " a", "", " <tool_call> is a", " mark"]
    assert parser.push(f"\n{call('put', n=5)}") == [Call("put", '{"n": 5}')]  # An integer has no more to it.
    assert parser.push("\nDone") == [Text("Done")]
