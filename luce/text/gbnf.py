"""GBNF, the grammars of llama.cpp, as rules of llguidance's Lark; SGLang's and xgrammar's EBNF is the same.

    root ::= "yes" | "no" ws        literals, alternatives, other rules
    ws   ::= [ \\t\\n]* .{2,3}        characters, any character, repetitions

llguidance cuts a text into terminals, each as long as possible, which GBNF knows nothing of. So what is
regular is one terminal, as large as it can be, and only what leads back to itself is made of rules. Where a
terminal could take characters of what follows it, it is cut into smaller ones, down to single characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import permutations
from operator import or_
from typing import Any

from luce.errors import ArgumentError
from luce.text.pattern import MAX_DEPTH, Alt, AnyCase, Chars, PatternError, Repeat, Seq, characters, literal_node

MAX_RULES = 1000  # A grammar has at most so many rules,
MAX_PAIRS = 100_000  # and so many pairs of terminals that stand in the same place.
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
_MEMBER = re.compile(r"\[\^?(?:\\x\{[0-9a-f]+\}|[^\]\\])*\]|\\x\{[0-9a-f]+\}|.", re.S)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_NUMBERS = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True)
class Ref:
    """Another rule."""

    name: str


Part = Any  # A node of pattern.py, of which parts are Refs and Terminals too.


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
        return ways[0] if len(ways) == 1 else Alt(tuple(ways))

    def _sequence(self) -> Part:
        parts: list[Part] = []
        while (part := self._part()) is not None:
            while self._kind() == "times":
                part = Repeat(part, *self._times())
            parts.append(part)
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))

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


# ---- sets of characters, as the bits of a number

ALL = (1 << 0x110000) - 1


@lru_cache(4096)
def _bits(inner: str) -> int:
    """Returns the characters that stand between brackets, as characters() writes them."""
    found, at, negated = 0, 0, inner.startswith("^")
    spelled = _MEMBER.findall(inner, 1 if negated else 0)
    while at < len(spelled):
        one, at = spelled[at], at + 1
        if one.startswith("["):
            found |= _bits(one[1:-1])
            continue
        low = high = _code(one)
        if spelled[at : at + 1] == ["-"]:
            high, at = _code(spelled[at + 1]), at + 2
        found |= ((1 << (high - low + 1)) - 1) << low
    return ALL & ~found if negated else found


def _code(member: str) -> int:
    return int(member[3:-1], 16) if member.startswith("\\") else ord(member)


@dataclass(frozen=True)
class _Shape:
    """What is known of a part's texts: the characters that they begin with, those that they have behind the
    first, those that make another text of one that has ended, and whether one of them is empty."""

    first: int = 0
    inner: int = 0
    more: int = 0
    empty: bool = False

    @property
    def all(self) -> int:
        return self.first | self.inner

    def then(self, other: _Shape) -> _Shape:
        more = other.more | (other.first | self.more if other.empty else 0)
        if self.more & other.first:  # A text can be cut into the two in several ways.
            more |= self.all | other.all
        first = self.first | (other.first if self.empty else 0)
        inner = self.inner | other.inner | (other.first if self.all else 0)
        return _Shape(first, inner, more, self.empty and other.empty)

    def or_(self, other: _Shape) -> _Shape:
        more = self.more | other.more | (other.first if self.empty else 0) | (self.first if other.empty else 0)
        if self.first & other.first:  # One may begin with the other.
            more |= self.inner | other.inner
        return _Shape(self.first | other.first, self.inner | other.inner, more, self.empty or other.empty)

    def times(self, least: int, most: int | None) -> _Shape:
        if most == 0:
            return _Shape(empty=True)
        again = most is None or most > 1
        more = self.more | (self.first if most != least else 0)
        if again and (self.empty or self.more & self.first):
            more |= self.all
        inner = self.inner | (self.first if again else 0)
        return _Shape(self.first, inner, more, self.empty or least == 0)


# ---- writing


_Firsts = dict[str, tuple[frozenset[Part], bool]]


@dataclass(frozen=True)
class Terminal:
    """A regular part that is one terminal."""

    part: Part


class _Writer:
    def __init__(self, rules: dict[str, Part], start: str):
        self._given, self._start = rules, start
        self._terminals = dict[Part, str]()
        below = {name: set(_refs(part)) for name, part in rules.items()}
        changed = True
        while changed:  # Each rule gets the rules below those below it.
            grown = {name: set().union(refs, *(below[ref] for ref in refs)) for name, refs in below.items()}
            below, changed = grown, grown != below
        endless = {name for name, refs in below.items() if name in refs}
        self._regular = {name: name not in endless and not refs & endless for name, refs in below.items()}
        needed = [name for name in rules if name == "root" or name in below["root"]]
        self._number = {name: n for n, name in enumerate(needed)}
        # A rule that leads back to itself, or to such a one, is a rule here too; what is regular is terminals.
        self._rules = {name: self._cut(rules[name]) for name in needed if not self._regular[name] or name == "root"}
        self._shapes = dict[Part, _Shape]()
        while loose := self._loose():
            self._rules = {name: self._without(part, loose) for name, part in self._rules.items()}

    def lines(self) -> Iterator[str]:
        written = {name: self._rule(part) for name, part in self._rules.items()}
        yield f"{self._start}: {self._named('root')}\n"
        for name, text in written.items():
            yield f"{self._named(name)}: {text}\n"
        for part, name in self._terminals.items():
            yield f"{name}: {self._terminal(part)}\n"
        for name in self._number:
            if self._regular[name]:
                yield f"{self._start.upper()}_{self._number[name]}: {self._terminal(self._given[name])}\n"

    def _named(self, name: str) -> str:
        return f"{self._start}_{self._number[name]}"

    def _cut(self, part: Part) -> Part:
        """Returns a part with all that is regular in it as terminals, which are as large as can be."""
        if all(self._regular[ref] for ref in _refs(part)):
            return Terminal(part)
        match part:
            case Seq(parts):
                found: list[Part] = []
                for each in map(self._cut, parts):
                    if found and isinstance(each, Terminal) and isinstance(found[-1], Terminal):
                        found[-1] = Terminal(Seq((found[-1].part, each.part)))
                    else:
                        found.append(each)
                return Seq(tuple(found))
            case Alt(ways):
                return Alt(tuple(map(self._cut, ways)))
            case Repeat(inner, least, most):
                return Repeat(self._cut(inner), least, most)
        return part

    # ---- terminals end where they should

    def _loose(self) -> set[Part]:
        """Returns terminals that would take characters which are of what follows them, or of what follows
        another terminal in their place: llguidance never takes less of a text than it can."""
        followers, starts = self._followers()
        bits = {part: reduce(or_, (self._shape(each).first for each in after), 0) for part, after in followers.items()}
        loose = {part for part in followers if self._shape(part).more & bits[part] and not isinstance(part, Chars)}
        if sum(len(each) ** 2 for each in followers.values()) > MAX_PAIRS:
            raise ArgumentError("the grammar is too large")
        for together in (starts, *followers.values()):
            for part, longer in permutations(together, 2):
                shape, other = self._shape(part), self._shape(longer)
                if other.first & shape.first and other.inner & bits[part]:
                    loose.add(longer)
        return loose

    def _shape(self, part: Part) -> _Shape:
        """Returns the shape of what is regular."""
        if part not in self._shapes:
            match part:
                case Chars(inner):
                    found = _Shape(first=_bits(inner))
                case Seq(parts):
                    found = reduce(_Shape.then, map(self._shape, parts), _Shape(empty=True))
                case Alt(ways):
                    found = reduce(_Shape.or_, map(self._shape, ways))
                case Repeat(inner, least, most):
                    found = self._shape(inner).times(least, most)
                case Ref(name):
                    found = self._shape(self._given[name])
                case _:
                    raise AssertionError(part)
            self._shapes[part] = found
        return self._shapes[part]

    def _followers(self) -> tuple[dict[Part, set[Part]], set[Part]]:
        """Returns the terminals that may follow each one, and those that may be first of all."""
        firsts: _Firsts = {name: (frozenset(), False) for name in self._rules}
        changed = True
        while changed:
            grown = {name: self._first(part, firsts) for name, part in self._rules.items()}
            firsts, changed = grown, grown != firsts
        ends = {name: set[Part]() for name in self._rules}
        found, size = dict[Part, set[Part]](), -1
        while size != (size := sum(map(len, (*ends.values(), *found.values())))):
            for name, part in self._rules.items():
                self._follow(part, frozenset(ends[name]), firsts, ends, found)
        return found, set(firsts["root"][0])

    def _first(self, part: Part, firsts: _Firsts) -> tuple[frozenset[Part], bool]:
        """Returns the terminals that texts of a part begin with, and whether one of them may be empty."""
        match part:
            case Terminal(inner):
                return frozenset((inner,)), self._shape(inner).empty
            case Ref(name):
                return firsts[name]
            case Seq(parts):
                found = frozenset[Part]()
                for each in parts:
                    first, empty = self._first(each, firsts)
                    found |= first
                    if not empty:
                        return found, False
                return found, True
            case Alt(ways):
                every = [self._first(each, firsts) for each in ways]
                return frozenset().union(*(first for first, _ in every)), any(empty for _, empty in every)
            case Repeat(inner, least):
                first, empty = self._first(inner, firsts)
                return first, empty or least == 0
        raise AssertionError(part)

    def _follow(
        self,
        part: Part,
        after: frozenset[Part],
        firsts: _Firsts,
        ends: dict[str, set[Part]],
        found: dict[Part, set[Part]],
    ) -> None:
        """Notes what may follow the rules and the terminals of a part that `after` may follow."""
        match part:
            case Terminal(inner):
                found.setdefault(inner, set()).update(after)
            case Ref(name):
                ends[name] |= after
            case Seq(parts):
                for each in reversed(parts):
                    self._follow(each, after, firsts, ends, found)
                    first, empty = self._first(each, firsts)
                    after = first | (after if empty else frozenset())
            case Alt(ways):
                for each in ways:
                    self._follow(each, after, firsts, ends, found)
            case Repeat(inner, _, most):
                again = self._first(inner, firsts)[0] if most is None or most > 1 else frozenset()
                self._follow(inner, after | again, firsts, ends, found)

    def _without(self, part: Part, loose: set[Part]) -> Part:
        """Returns a part with its loose terminals cut into smaller ones."""
        match part:
            case Terminal(inner):
                return self._smaller(inner) if inner in loose else part
            case Seq(parts):
                return Seq(tuple(self._without(each, loose) for each in parts))
            case Alt(ways):
                return Alt(tuple(self._without(each, loose) for each in ways))
            case Repeat(inner, least, most):
                return Repeat(self._without(inner, loose), least, most)
        return part

    def _smaller(self, part: Part) -> Part:
        terminal: Callable[[Part], Part] = Terminal
        match part:
            case Seq(parts):
                return Seq(tuple(map(terminal, parts)))
            case Alt(ways):
                return Alt(tuple(map(terminal, ways)))
            case Repeat(inner, least, most):
                return Repeat(terminal(inner), least, most)
            case Ref(name):
                return self._smaller(self._given[name])
        return Terminal(part)

    # ---- Lark

    def _terminal(self, part: Part) -> str:
        """Returns a regular part as what stands in a terminal."""
        if next(_refs(part), None) is None:
            return f"/{part}/" if str(part) else '""'
        match part:
            case Ref(name):
                return f"{self._start.upper()}_{self._number[name]}"
            case Seq(parts):
                return "(" + " ".join(map(self._terminal, parts)) + ")"
            case Alt(ways):
                return "(" + " | ".join(map(self._terminal, ways)) + ")"
            case Repeat(inner, least, most):
                return f"({self._terminal(inner)}){_often(least, most)}"
        raise AssertionError(part)

    def _rule(self, part: Part) -> str:
        """Returns a part as what stands in a rule."""
        match part:
            case Terminal(inner):
                name = f"{self._start.upper()}_T{len(self._terminals)}"
                return self._terminals.setdefault(inner, name)
            case Ref(name):
                return self._named(name)
            case Seq(parts):
                return "(" + " ".join(map(self._rule, parts)) + ")" if parts else '""'
            case Alt(ways):
                return "(" + " | ".join(map(self._rule, ways)) + ")"
            case Repeat(inner, least, most):
                return f"({self._rule(inner)}){_often(least, most)}"
        raise AssertionError(part)


def _often(least: int, most: int | None) -> str:
    return {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most)) or (
        f"{{{least},{'' if most is None else most}}}"
    )
