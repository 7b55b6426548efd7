"""Checks grammars of llama.cpp: texts that they take, and what is told of wrong ones."""

from __future__ import annotations

import pytest
from depth import examples
from grammar_walks import accepts, walk
from hypothesis import given
from hypothesis import strategies as st

from luce.errors import ArgumentError
from luce.text.structured import Grammar, grammar_of

ARITHMETIC = r"""
# Lines of assignments, as in llama.cpp's own example.
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""
GRAMMARS = {  # By what they show: a grammar, texts that it takes, and texts that it does not.
    "a literal": ('root ::= "yes"', ["yes"], ["no", "yesyes", ""]),
    "alternatives": ('root ::= ("a" | "b") "c" | ""', ["ac", "bc", ""], ["c", "ab"]),
    "alternatives on lines": ('root ::= "a"\n  | "b" # one more\n  | "c"\n', ["a", "b", "c"], ["ab"]),
    "repetitions": ('root ::= "a"* "b"+ "c"? "d"{2} "e"{1,} "f"{0,2}', ["abcddeff", "bddee"], ["addc", "bddfff"]),
    "characters": (r'root ::= [a-c\]\-] [^a-c\n] "\"\\"', ['ax"\\', '-d"\\'], ['aa"\\', 'x"\\']),
    "numbers of characters": (r'root ::= "\x41\u00e9\U0001F600" [\u4e00-\u9fff]', ["Aé😀字"], ["Aé😀a"]),
    "any character": ("root ::= . .{2}", ["a\né"], ["ab"]),
    "names": ('root ::= a-1 b_2\na-1 ::= "x"\nb_2 ::= [0-9]', ["x1"], ["x"]),
    "names that differ in case alone": ('root ::= ab aB\nab ::= "x"\naB ::= "y"', ["xy"], ["xx"]),
    "a repetition before what it takes too": ('root ::= [a-z]* "abc"', ["abc", "xabcabc"], ["ab", "abcx"]),
    "recursion": ('root ::= x\nx ::= "(" x ")" | [0-9]+', ["7", "((12))"], ["((1)", "()"]),
    "left recursion": ('root ::= root "+" [0-9] | [0-9]', ["1", "1+2+3"], ["1+", "+"]),
    "a rule that is not used": ('root ::= "a"\nx ::= "b"', ["a"], ["b"]),
    "arithmetic": (ARITHMETIC, ["a=1\n", "(x +1)*2 = y\n"], ["a=1", "1++2=3\n"]),
    "JSON": (JSON, ['{"a": [1, -2.5e3, "x\\n"], "b": {}}', "{}"], ["[1]", '{"a"}', '{"a": 01}']),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_grammar_takes_what_it_should(name):
    grammar, good, bad = GRAMMARS[name]
    made = grammar_of(Grammar(grammar))
    assert [text for text in good if not accepts(made, text)] == []
    assert [text for text in bad if accepts(made, text)] == []
    for seed in range(4):
        walk(made, seed, 60)


@pytest.mark.parametrize("thinks", [False, True])
def test_thoughts_come_before_it(thinks):
    made = grammar_of(Grammar('root ::= "a" | "<" root ">"'), thinks)
    assert accepts(made, "hm, <a>?</think>\n\n<a>") == thinks
    assert accepts(made, "<a>") != thinks


# ---- random grammars, against a slow reading of them


def spans(node, text, rules, known):
    """Returns the (begin, end) of the parts of a text that a node takes, where rules take the `known` ones."""
    kind, *more = node
    if kind == "text":
        return {(at, at + len(more[0])) for at in range(len(text) + 1) if text.startswith(more[0], at)}
    if kind == "chars":
        return {(at, at + 1) for at, char in enumerate(text) if char in more[0]}
    if kind == "rule":
        return known[more[0]]
    if kind == "either":
        return set().union(*(spans(each, text, rules, known) for each in more[0]))
    every = {(at, at) for at in range(len(text) + 1)}
    if kind == "sequence":
        for each in more[0]:
            every = joined(every, spans(each, text, rules, known))
        return every
    inner, least, most = more
    step, found, times = spans(inner, text, rules, known), set(), 0
    while times <= (len(text) + least + 1 if most is None else most):
        found |= every if times >= least else set()
        every, times = joined(every, step), times + 1
    return found


def joined(first, second):
    return {(begin, end) for begin, middle in first for start, end in second if start == middle}


def takes(rules, text):
    known, before = {name: set() for name in rules}, None
    while known != before:
        before, known = known, {name: spans(node, text, rules, known) for name, node in rules.items()}
    return (0, len(text)) in known["root"]


def spelled(node):
    kind, *more = node
    if kind == "text":
        return f'"{more[0]}"'
    if kind == "chars":
        return f"[{more[0]}]"
    if kind == "rule":
        return more[0]
    if kind == "either":
        return "(" + " | ".join(map(spelled, more[0])) + ")"
    if kind == "sequence":
        return "(" + " ".join(map(spelled, more[0])) + ")"
    inner, least, most = more
    return f"{spelled(inner)}{{{least},{'' if most is None else most}}}"


LEAVES = (
    st.tuples(st.just("text"), st.sampled_from(["a", "b", "ab", "aa", "c"]))
    | st.tuples(st.just("chars"), st.sampled_from(["ab", "a", "bc"]))
    | st.tuples(st.just("rule"), st.sampled_from(["root", "x", "y"]))
)
NODES = st.recursive(
    LEAVES,
    lambda inner: (
        st.tuples(st.sampled_from(["either", "sequence"]), st.lists(inner, min_size=1, max_size=3))
        | st.tuples(st.just("times"), inner, st.integers(0, 1), st.sampled_from([None, 1, 2]))
    ),
    max_leaves=5,
)


@pytest.mark.long
@examples(200)
@given(
    rules=st.fixed_dictionaries({"root": NODES, "x": NODES, "y": NODES}),
    texts=st.lists(st.text("abc", max_size=6), min_size=6, max_size=12),
)
def test_a_random_grammar_takes_what_a_slow_reading_of_it_takes(rules, texts):
    grammar = "\n".join(f"{name} ::= {spelled(node)}" for name, node in rules.items())
    try:
        made = grammar_of(Grammar(grammar))
    except ArgumentError as error:
        assert "never ends" in str(error)
        return
    for text in texts:
        assert accepts(made, text) == takes(rules, text), (grammar, text)
    walk(made, 1, 30)


WRONG = {
    'x ::= "a"\n)': "line 2: a rule begins with its name and ::=",
    'x ::= "a"': "has no rule root",
    "root ::= x": "rule root names x, which is no rule",
    'root ::= "a" x\nx ::= "b" x': "rule x never ends",
    'root ::= "a"\nx ::= (': "line 2: a ) is missing",
    'root ::= "a" )': "line 1: a rule begins",
    "root ::= 'a'": "line 1: \"'a'\" is not supported",
    'root ::= (=x) "a"': "line 1: '=x) \"a\"' is not supported",
    "root ::= [z-a]": "out of order",
    'root ::= "a"{3,2}': "out of order",
    'root ::= "a"{1234567}': "too many times",
    'root ::= "\\uzzzz"': "is no character",
    'root ::= <think> "a"': "'<think> \"a\"' is not supported",
    "root ::= " + "(" * 99 + '"a"' + ")" * 99: "nested too deep",
}


@pytest.mark.parametrize("grammar", WRONG, ids=lambda grammar: grammar[:20])
def test_what_is_wrong_is_told(grammar):
    with pytest.raises(ArgumentError) as error:
        grammar_of(Grammar(grammar))
    assert "the grammar" in str(error.value) and WRONG[grammar] in str(error.value)
