"""GBNF, the grammars of llama.cpp, as rules of llguidance's Lark; SGLang's and xgrammar's EBNF is the same.

    root ::= "yes" | "no" ws        literals, alternatives, other rules
    ws   ::= [ \\t\\n]* .{2,3}        characters, any character, repetitions

llguidance cuts a text into terminals, each as long as possible. So what is regular is made one terminal, as
large as it can be, and only what leads back to itself is made of rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from luce.errors import ArgumentError
from luce.text.pattern import Alt, AnyCase, Chars, Node, PatternError, Repeat, Seq, characters, literal_node

MAX_DEPTH = 60  # Groups are nested at most so deep,
MAX_RULES = 1000  # and a grammar has at most so many rules.
_TOKEN = re.compile(
    r"(?P<blank>(?:\s|\#[^\n]*)+)"
    r"|(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*)"
    r"|(?P<is>::=)"
    r'|(?P<text>"(?:\\.|[^"\\])*")'
    r"|(?P<chars>\[(?:\\.|[^\]\\])*\])"
    r"|(?P<times>[*+?]|\{\s*\d*\s*(?:,\s*\d*\s*)?\})"
    r"|(?P<mark>[().|])",
    re.S,
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_NUMBERS = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True)
class Ref:
    """Another rule."""

    name: str


Part = Node | Ref  # Nodes hold references too.


def is_gbnf(grammar: str) -> bool:
    """Says whether a grammar is written so, and not in Lark, which has no ::= outside of its strings."""
    return re.search(r"^\s*[\w.-]+\s*::=", grammar, re.M) is not None


def lark_rules(grammar: str, start: str) -> str:
    """Returns Lark's rules of a grammar, of which `start` is for its root. Raises ArgumentError where it is
    wrong, or has a rule that no finite text fits."""
    rules = _Reader(grammar).rules()
    _require_rules(rules)
    return "".join(_Writer(rules, start).lines())


class _Reader:
    def __init__(self, grammar: str):
        self._tokens = [each for each in _tokens(grammar) if each[0] != "blank"]
        self._at, self._depth = 0, 0

    def rules(self) -> dict[str, Part]:
        found = dict[str, Part]()
        while self._at < len(self._tokens):
            kind, name, line = self._tokens[self._at]
            if kind != "name" or self._kind(1) != "is":
                raise ArgumentError(f"the grammar's line {line}: a rule begins with its name and ::=")
            self._at += 2
            found[name] = self._alternatives()
        return found

    def _kind(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self._tokens[at][0] if at < len(self._tokens) else ""

    def _skip(self, mark: str) -> bool:
        found = self._at < len(self._tokens) and self._tokens[self._at][1] == mark and self._kind() == "mark"
        self._at += found
        return found

    def _alternatives(self) -> Part:
        ways = [self._sequence()]
        while self._skip("|"):
            ways.append(self._sequence())
        return ways[0] if len(ways) == 1 else Alt(tuple(ways))  # type: ignore[arg-type]

    def _sequence(self) -> Part:
        parts: list[Part] = []
        while (part := self._part()) is not None:
            while self._kind() == "times":
                part = Repeat(part, *self._times())  # type: ignore[arg-type]
            parts.append(part)
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))  # type: ignore[arg-type]

    def _part(self) -> Part | None:
        """Returns what comes next of a sequence, if it goes on."""
        kind = self._kind()
        if kind == "name" and self._kind(1) != "is":
            self._at += 1
            return Ref(self._tokens[self._at - 1][1])
        if kind == "text":
            self._at += 1
            return literal_node("".join(_characters(self._tokens[self._at - 1][1][1:-1])))
        if kind == "chars":
            return self._chars()
        if self._skip("."):
            return Chars(r"\x{0}-\x{10ffff}")
        if not self._skip("("):
            return None
        line = self._tokens[self._at - 1][2]
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ArgumentError("the grammar's groups are nested too deep")
        part = self._alternatives()
        if not self._skip(")"):
            raise ArgumentError(f"the grammar's line {line}: a ) is missing")
        self._depth -= 1
        return part

    def _chars(self) -> Part:
        _, text, line = self._tokens[self._at]
        self._at += 1
        try:
            return Chars(characters(text[1:-1]))
        except PatternError as error:
            raise ArgumentError(f"the grammar's line {line}: {text[:80]}: {error}") from error

    def _times(self) -> tuple[int, int | None]:
        _, text, line = self._tokens[self._at]
        self._at += 1
        if text in "*+?":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[text]
        least, comma, most = (each.strip() for each in text[1:-1].partition(","))
        if max(len(least), len(most)) > 6:
            raise ArgumentError(f"the grammar's line {line}: {text[:80]} is too many times")
        low = int(least or 0)
        high = low if not comma else int(most) if most else None
        if high is not None and high < low:
            raise ArgumentError(f"the grammar's line {line}: {text} is out of order")
        return low, high


def _tokens(grammar: str) -> Iterator[tuple[str, str, int]]:
    """Yields the kind of each token, its text, and its line."""
    at, line = 0, 1
    while at < len(grammar):
        found = _TOKEN.match(grammar, at)
        if found is None:
            rest = grammar[at : at + 20].split("\n")[0]
            raise ArgumentError(f"the grammar's line {line}: {rest!r} is not supported")
        yield str(found.lastgroup), found[0], line
        at, line = found.end(), line + found[0].count("\n")


def _characters(text: str) -> Iterator[str]:
    """Yields the characters that the inner part of a literal stands for."""
    at = 0
    while at < len(text):
        char, at = text[at], at + 1
        if char == "\\":
            char, at = text[at], at + 1
            if char in _NUMBERS:
                digits, at = text[at : at + _NUMBERS[char]], at + _NUMBERS[char]
                if not re.fullmatch("[0-9A-Fa-f]+", digits) or int(digits, 16) > 0x10FFFF:
                    raise ArgumentError(f"the grammar's \\{char}{digits} is no character")
                char = chr(int(digits, 16))
            else:
                char = _ESCAPES.get(char, char)
        yield char


# ---- checks


def _refs(part: Part) -> Iterator[str]:
    match part:
        case Ref(name):
            yield name
        case Seq(parts) | Alt(parts):
            for each in parts:
                yield from _refs(each)
        case Repeat(inner) | AnyCase(inner):
            yield from _refs(inner)


def _require_rules(rules: dict[str, Part]) -> None:
    for name, part in rules.items():
        for ref in _refs(part):
            if ref not in rules:
                raise ArgumentError(f"the grammar's rule {name} names {ref}, which is no rule")
    if len(rules) > MAX_RULES:
        raise ArgumentError(f"the grammar has more than {MAX_RULES} rules")
    if "root" not in rules:
        raise ArgumentError("the grammar has no rule root")
    finite, changed = set[str](), True
    while changed:
        found = {name for name, part in rules.items() if _is_finite(part, finite)}
        finite, changed = found, found != finite
    if endless := [name for name in rules if name not in finite]:
        raise ArgumentError(f"the grammar's rule {endless[-1]} never ends")


def _is_finite(part: Part, finite: set[str]) -> bool:
    """Says whether some finite text fits, where one fits each of these rules."""
    match part:
        case Ref(name):
            return name in finite
        case Seq(parts):
            return all(_is_finite(each, finite) for each in parts)
        case Alt(ways):
            return any(_is_finite(each, finite) for each in ways)
        case Repeat(inner, least):
            return least == 0 or _is_finite(inner, finite)
    return True


# ---- writing


class _Writer:
    def __init__(self, rules: dict[str, Part], start: str):
        self._rules, self._start = rules, start
        self._terminals: list[str] = []
        below = {name: set(_refs(part)) for name, part in rules.items()}
        changed = True
        while changed:  # Each rule gets the rules below those below it.
            grown = {name: set().union(refs, *(below[ref] for ref in refs)) for name, refs in below.items()}
            below, changed = grown, grown != below
        endless = {name for name, refs in below.items() if name in refs}
        self._regular = {name: name not in endless and not refs & endless for name, refs in below.items()}
        self._needed = [name for name in rules if name == "root" or name in below["root"]]
        self._number = {name: n for n, name in enumerate(rules)}

    def lines(self) -> Iterator[str]:
        yield f"{self._start}: {self._named('root')}\n"
        for name in self._needed:
            if self._regular[name]:
                yield f"{self._named(name)}: {self._terminal(self._rules[name])}\n"
            else:
                yield f"{self._named(name)}: {self._rule(self._rules[name])}\n"
        yield from self._terminals

    def _named(self, name: str) -> str:
        prefix = self._start.upper() if self._regular[name] else self._start.lower()
        return f"{prefix}_{self._number[name]}"

    def _is_regular(self, part: Part) -> bool:
        return all(self._regular[ref] for ref in _refs(part))

    def _terminal(self, part: Part) -> str:
        """Returns a regular part as what stands in a terminal."""
        if next(_refs(part), None) is None:
            return f"/{part}/" if str(part) else '""'
        match part:
            case Ref(name):
                return self._named(name)
            case Seq(parts):
                return "(" + " ".join(map(self._terminal, parts)) + ")"
            case Alt(ways):
                return "(" + " | ".join(map(self._terminal, ways)) + ")"
            case Repeat(inner, least, most):
                return f"({self._terminal(inner)}){_often(least, most)}"
        raise AssertionError(part)

    def _rule(self, part: Part) -> str:
        """Returns a part as what stands in a rule."""
        if self._is_regular(part):
            name = f"{self._start.upper()}_T{len(self._terminals)}"
            self._terminals.append(f"{name}: {self._terminal(part)}\n")
            return name
        match part:
            case Ref(name):
                return self._named(name)
            case Seq(parts):
                return "(" + " ".join(map(self._rule, self._runs(parts))) + ")"
            case Alt(ways):
                return "(" + " | ".join(map(self._rule, ways)) + ")"
            case Repeat(inner, least, most):
                return f"({self._rule(inner)}){_often(least, most)}"
        raise AssertionError(part)

    def _runs(self, parts: tuple[Part, ...]) -> Iterator[Part]:
        """Yields parts, with neighbours that are regular as one."""
        run: list[Part] = []
        for part in parts:
            if self._is_regular(part):
                run.append(part)
                continue
            if run:
                yield Seq(tuple(run))  # type: ignore[arg-type]
            run = []
            yield part
        if run:
            yield Seq(tuple(run))  # type: ignore[arg-type]


def _often(least: int, most: int | None) -> str:
    return {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most)) or (
        f"{{{least},{'' if most is None else most}}}"
    )
