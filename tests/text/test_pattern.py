"""Checks regular expressions of JSON Schema against Python's re, which searches as they do."""

from __future__ import annotations

import re

import pytest
from depth import examples
from hypothesis import given
from hypothesis import strategies as st

from luce.text.pattern import PatternError, languages, matches, other_than, whole


def found(pattern, text):
    """Says whether the regexes of a pattern say that it matches within a text."""
    return any(matches(way, text) for way in languages(pattern))


# By pattern: texts that it matches, and texts that it does not. They are ECMA-262's, and not all of them Python's.
PATTERNS = {
    "a": (["a", "xax"], ["", "b"]),
    "^a|b$": (["ax", "xb"], ["xa", "bx"]),
    "(^|,)x($|,)": (["x", ",x", "a,x,b"], ["ax", "xb"]),
    "^(?:a|b)??c$": (["c", "ac"], ["abc"]),
    "^$|^ab$": (["", "ab"], ["a"]),
    "^a{2}b{1,}c{,2}$": (["aab", "aabbcc"], ["ab", "aabccc"]),
    "^[^\\]a-]+$": (["b"], ["]", "a", "-"]),
    "^[\\]a\\-z.]+$": (["]-z.a"], ["b"]),
    "^[]$": ([], ["", "a"]),
    "^[^]$": (["a", "\n"], ["", "ab"]),
    "^.$": (["a", "é"], ["\n", "\u2028"]),
    "^\\d\\w\\s$": (["1_ ", "0a\t"], ["٣a ", "1é "]),
    "^\\D\\W\\S$": (["a-b"], ["1-b", "aab", "a- "]),
    "^\\x41\\u0042\\u{43}\\cJ\\t\\/\\-$": (["ABC\n\t/-"], ["ABC"]),
    "^\\ud83d\\ude00$": (["😀"], ["a"]),
    "^\\p{Lu}\\P{L}$": (["Ä1"], ["ä1", "ÄA"]),
    "^(?<year>\\d{2})(?P<month>\\d)$": (["123"], ["12"]),
    "(?i)^ab$": (["AB", "aB"], ["abc"]),
    "^(?i:a)b$": (["Ab"], ["aB"]),
    "^(?s:.)$": (["\n"], [""]),
    "\\Aab\\Z": (["ab"], ["xab", "abx"]),
    "a{": (["a{"], ["a"]),
    "^(?=.*[A-Z])(?=.*\\d)[A-Za-z\\d]{3,}$": (["A1a", "1bC"], ["a1a", "AAA", "A1"]),
    "^(?!-)[a-z-]{1,4}(?<!-)$": (["a-b"], ["-ab", "ab-", "abcde"]),
    "^(?!\\s*$).+": ([" a"], ["  ", ""]),
    "^(?!\\.)(?!.*\\.\\.)[a.]+$": (["a.a."], [".a", "a..a"]),
    "^(?!https?:)": (["ftp:", "", "httpx:"], ["http:", "https:x"]),
    "^(?!ab|ba)[abc]*$": (["", "ac", "a"], ["ab", "bac"]),
    "^(?!a$)": (["", "ab"], ["a"]),
    "^(?!.*b)a": (["ac", "a\nb"], ["ab", "ba"]),
    "^(?=.{1,3}$)a*$": (["a", "aaa"], ["", "aaaa"]),
    "(?<!b)$": (["", "a"], ["ab"]),
    "(?<=a)$": (["ba"], ["ab"]),
    "^x*T(?=\\d)[\\da]*$": (["xT1a"], ["xTa", "T"]),
    "^a(?!b)": (["a", "ac"], ["ab"]),
    "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$": (["+1.5", "0"], ["+", ".", ""]),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_what_it_should(pattern):
    good, bad = PATTERNS[pattern]
    assert [text for text in good if not found(pattern, text)] == []
    assert [text for text in bad if found(pattern, text)] == []


REFUSED = {
    "(": "a ) is missing", "a)": "a ) too many", "[a": "it ends too early", "*a": "nothing to repeat",
    "\\ba\\b": "word boundaries", "(a)\\1": "back-references", "\\k<n>": "back-references", "a++": "possessive",
    "(?>a)": "not supported", "(?#x)": "not supported", "a{3,2}": "out of order", "[z-a]": "out of order",
    "\\p": "names no property", "\\y": "is no escape", "\\u12": "ends too early", "\\xzz": "hexadecimal",
    "^(?:^a)+$": "is repeated", "a(?=b)*": "is repeated", "a.*(?=b.*c)": "from several places",
    "^(?!(ab)+c)": "negative look-around is not supported", "^(?=a(?=b))": "within look-around",
    "(" * 100 + ")" * 100: "nested too deep", "a" * 30_000: "more than 20000 characters", "a{1234567}": "too often",
    "|".join("^a$" for _ in range(99)): "more than 64 alternatives",
}  # fmt: skip


@pytest.mark.parametrize("pattern", REFUSED, ids=lambda pattern: pattern[:20])
def test_what_no_grammar_can_hold_to_is_told(pattern):
    with pytest.raises(PatternError, match=re.escape(REFUSED[pattern])):
        languages(pattern)


ATOMS = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", "\\d", "-", "(?:ab|-)", "[a-]"])
PARTS = st.builds(str.__add__, ATOMS, st.sampled_from(["", "", "*", "+", "?", "{2}", "{0,2}"]))
SEQUENCES = st.lists(PARTS, max_size=3).map("".join)
LOOKS = st.sampled_from(
    ["", "", "(?!-)", "(?!ab)", "(?=.*b)", "(?!.*--)", "(?!a*$)", "(?=.{2}$)", "(?!.*a)", "(?=a|-b)"]
)
BEHIND = st.sampled_from(["", "", "(?<!-)", "(?<=a)", "(?<!ab)"])


def way(begin, look, inner, behind, end):
    return f"{begin}{look if begin else ''}{inner}{behind if end else ''}{end}"


EDGES = [st.sampled_from([mark, mark, ""]) for mark in "^$"]
WAYS = st.builds(way, EDGES[0], LOOKS, SEQUENCES, BEHIND, EDGES[1])


@examples(150)
@given(
    st.lists(WAYS, min_size=1, max_size=2).map("|".join),
    st.lists(st.text("ab-1\n", max_size=5), min_size=3, max_size=3),
)
def test_random_patterns_match_as_pythons_do(pattern, texts):
    try:
        languages(pattern)
    except PatternError as error:
        assert "look-around" in str(error), pattern
        return
    same = re.compile(pattern.replace("$", r"\Z"))  # Python's $ is also before a last line's end.
    for text in texts:
        assert found(pattern, text) == (same.search(text) is not None), (pattern, text)


@examples(50)
@given(st.lists(st.text("ab", max_size=4), min_size=1, max_size=4), st.text("abc", max_size=5))
def test_texts_other_than_some(texts, text):
    assert matches((other_than(texts),), text) == (text not in texts)


def test_a_whole_match():
    assert any(matches(way, "ab") for way in whole("a|ab"))
    assert not any(matches(way, "abc") for way in whole("a|ab"))
