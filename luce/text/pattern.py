"""Regular expressions of JSON Schema (ECMA-262), rewritten as ones that a grammar can hold a text to.

A grammar's regexes are those of formal languages: a match is of the whole text, and there are no anchors, no
look-around and no back-references. So a pattern is parsed, its anchors are turned into what may stand before
and behind, and its look-around into further regexes that the text has to match as well:

    ^(?=.*[0-9])(?!-)[a-z0-9-]{8}$   is   [a-z0-9-]{8}   and   .*[0-9].*   and   "" or [^-].*

What is written is Rust's syntax, with each character but letters and digits by its number, so that it can
stand in JSON and between slashes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from luce.errors import UnsupportedError

MAX_PATTERN = 20_000  # A pattern has at most so many characters,
MAX_DEPTH = 60  # groups nested at most so deep,
MAX_WAYS = 64  # and at most so many alternatives where anchors or look-around tell them apart.

# Characters of classes that ECMA-262 and other dialects agree on.
_BLANK = r"\x{09}-\x{0d}\x{20}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_MAYBE_BLANK = _BLANK + r"\x{1c}-\x{1f}\x{85}\x{feff}"
_LINE_END = r"\x{0a}\x{0d}\x{2028}\x{2029}"
_CLASSES = {"d": "0-9", "D": "[^0-9]", "w": "A-Za-z0-9_", "W": "[^A-Za-z0-9_]",
            "s": _BLANK, "S": f"[^{_MAYBE_BLANK}]"}  # fmt: skip
_CONTROLS = {"t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r"}
_REPEATS = re.compile(r"\{(\d*)(,?)(\d*)\}")
_GROUP_NAME = re.compile(r"P?<[A-Za-z_$][\w$]*>")


class PatternError(ValueError):
    """A pattern that no grammar can hold a text to; str() is the reason."""


@dataclass(frozen=True)
class Chars:
    """One character, of those that `inner` lists as Rust does between brackets."""

    inner: str

    def __str__(self) -> str:
        return f"[{self.inner}]"


@dataclass(frozen=True)
class Seq:
    parts: tuple[Node, ...]

    def __str__(self) -> str:
        return "".join(f"(?:{part})" if isinstance(part, Alt) else str(part) for part in self.parts)


@dataclass(frozen=True)
class Alt:
    ways: tuple[Node, ...]

    def __str__(self) -> str:
        return "|".join(map(str, self.ways))


@dataclass(frozen=True)
class Repeat:
    node: Node
    least: int
    most: int | None

    def __str__(self) -> str:
        often = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((self.least, self.most))
        often = often or f"{{{self.least},{'' if self.most is None else self.most}}}"
        return (str(self.node) if isinstance(self.node, Chars) else f"(?:{self.node})") + often


@dataclass(frozen=True)
class AnyCase:
    """A part whose letters match in upper and in lower case."""

    node: Node

    def __str__(self) -> str:
        return f"(?i:{self.node})"


@dataclass(frozen=True)
class Edge:
    """The begin of the text, or its end."""

    begin: bool


@dataclass(frozen=True)
class Look:
    """What has to follow here (`ahead`) or stand before, or must not (`negated`)."""

    node: Node
    ahead: bool
    negated: bool


Node = Chars | Seq | Alt | Repeat | AnyCase | Edge | Look
ANY = Chars(r"\x{0}-\x{10ffff}")
NONE = Chars(f"[^{ANY.inner}]")
ANYTHING = Repeat(ANY, 0, None)
NOTHING = Seq(())
_BEGIN, _END = Edge(begin=True), Edge(begin=False)


@lru_cache(4096)
def languages(pattern: str) -> tuple[tuple[str, ...], ...]:
    """Returns regexes of whole texts for a pattern that may match anywhere in a text: the text has to match
    all regexes of one of the tuples. Raises PatternError where there are none."""
    if len(pattern) > MAX_PATTERN:
        raise PatternError(f"it has more than {MAX_PATTERN} characters")
    ways = [tuple(map(str, _search(way))) for way in _ways(_Reader(pattern).read())]
    single = [way[0] for way in ways if len(way) == 1]
    several = [way for way in ways if len(way) > 1]
    return (*(((str("|".join(single)),),) if single else ()), *several)


@lru_cache(4096)
def whole(pattern: str) -> tuple[tuple[str, ...], ...]:
    """Returns the same of a pattern that has to match the whole text."""
    return languages(f"^(?:{pattern})$")


@lru_cache(4096)
def refusal(schema: str) -> str:
    """Returns why no grammar can be made of a schema of strings or numbers, in llguidance's words; "" where
    one can, "empty" where no value fits it."""
    try:
        from llguidance import LLMatcher
    except ModuleNotFoundError as error:
        raise UnsupportedError("grammars need the package llguidance", concerns="grammar") from error
    said: str = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
    return "empty" if said.startswith("Unsatisfiable") else said


def matches(regexes: tuple[str, ...], text: str) -> bool:
    """Says whether a text matches all these regexes."""
    return not refusal(string_schema(regexes, text))


def string_schema(regexes: tuple[str, ...], text: str | None = None) -> str:
    """Returns the JSON schema of strings that match all these regexes, or of the one `text` if it does."""
    parts = [{"type": "string", "pattern": f"^(?:{regex})$"} for regex in regexes]
    return json.dumps({"type": "string", "allOf": parts} if text is None else {"const": text, "allOf": parts})


def literal(text: str) -> str:
    """Returns the regex of one text."""
    return "".join(_char(char) for char in text)


def literal_node(text: str) -> Node:
    return Seq(tuple(Chars(_char(char)) for char in text))


def characters(inner: str) -> str:
    """Returns what stands between brackets, as Rust has it there. Raises PatternError."""
    reader = _Reader(f"{inner}]")
    found = reader.characters()
    if not reader.at_end:
        raise PatternError("a ] is not escaped")
    return found


def other_than(texts: Sequence[str]) -> str:
    """Returns the regex of all texts but these."""

    def rest(texts: set[str]) -> str:
        """Returns the regex of what may follow where these must not."""
        firsts: dict[str, set[str]] = {}
        for text in texts - {""}:
            firsts.setdefault(text[0], set()).add(text[1:])
        if not firsts:
            return f"{ANY}+"
        ways = [f"[^{''.join(map(_char, sorted(firsts)))}]{ANYTHING}"]
        ways += [f"{_char(char)}{rest(ends)}" for char, ends in sorted(firsts.items())]
        return f"(?:{'|'.join(ways)}){'' if '' in texts else '?'}"

    return rest(set(texts))


def _char(char: str) -> str:
    """Returns a character as it can stand between brackets and outside of them."""
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"


# ---- reading


class _Reader:
    """A parser of ECMA-262's syntax, and of the few forms that Python and Rust add."""

    def __init__(self, pattern: str):
        self._text, self._at, self._depth, self._dot = pattern, 0, 0, f"[^{_LINE_END}]"

    def read(self) -> Node:
        node = self._alternatives()
        if self._at < len(self._text):
            raise PatternError(f"it has a ) too many, at {self._at}")
        return node

    @property
    def at_end(self) -> bool:
        return self._at == len(self._text)

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, n: int = 1) -> str:
        taken = self._text[self._at : self._at + n]
        if len(taken) < n:
            raise PatternError("it ends too early")
        self._at += n
        return taken

    def _skip(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _alternatives(self) -> Node:
        ways = [self._sequence()]
        while self._skip("|"):
            ways.append(self._sequence())
        return ways[0] if len(ways) == 1 else Alt(tuple(ways))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._next() not in ("", "|", ")"):
            if (node := self._quantified()) is not None:
                parts += node.parts if isinstance(node, Seq) else (node,)
        return Seq(tuple(parts))

    def _quantified(self) -> Node | None:
        node = self._atom()
        while node is not None and (often := self._quantifier()):
            if isinstance(node, (Edge, Look)):
                raise PatternError("an anchor or a look-around is repeated")
            node = Repeat(node, *often)
            if not self._skip("?") and self._next() == "+":  # What is lazy matches the same texts.
                raise PatternError("possessive quantifiers are not supported")
        return node

    def _quantifier(self) -> tuple[int, int | None] | None:
        for mark, often in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._skip(mark):
                return often
        found = _REPEATS.match(self._text, self._at)
        if found is None or not (found[1] or found[3]):
            return None
        if max(len(found[1]), len(found[3])) > 6:
            raise PatternError(f"it repeats too often: {found[0][:40]}")
        self._at = found.end()
        least = int(found[1] or 0)
        most = least if not found[2] else int(found[3]) if found[3] else None
        if most is not None and most < least:
            raise PatternError(f"the numbers of {found[0]} are out of order")
        return least, most

    def _atom(self) -> Node | None:
        char = self._take()
        if char == "(":
            return self._group()
        if char == "[":
            return Chars(self.characters())
        if char == "\\":
            return self._escape()
        if char == "^":
            return _BEGIN
        if char == "$":
            return _END
        if char == ".":
            return Chars(self._dot)
        if char in "*+?":
            raise PatternError(f"there is nothing to repeat, at {self._at - 1}")
        return Chars(_char(char))

    def _group(self) -> Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise PatternError("its groups are nested too deep")
        look, any_case, dot = None, False, self._dot
        if self._skip("?"):
            kinds = {"=": (True, False), "!": (True, True), "<=": (False, False), "<!": (False, True)}
            look = next((kind for mark, kind in kinds.items() if self._skip(mark)), None)
            if look is None and (name := _GROUP_NAME.match(self._text, self._at)):
                self._at = name.end()
            elif look is None and not self._skip(":"):
                any_case = self._flags()
                if self._skip(")"):  # The flags hold for the rest.
                    self._depth -= 1
                    return AnyCase(self._alternatives()) if any_case else None
                self._take()
        node = self._alternatives()
        if not self._skip(")"):
            raise PatternError("a ) is missing")
        self._depth, self._dot = self._depth - 1, dot
        if look is not None:
            return Look(node, *look)
        return AnyCase(node) if any_case else node

    def _flags(self) -> bool:
        """Takes the letters of flags, up to a : or ), and returns whether case is ignored."""
        flags = re.compile(r"[a-z]+(?=[:)])").match(self._text, self._at)
        if flags is None or not set(flags[0]) <= set("isu"):
            raise PatternError(f"the group (?{self._text[self._at : self._at + 5]} is not supported")
        self._at = flags.end()
        if "s" in flags[0]:
            self._dot = ANY.inner
        return "i" in flags[0]

    def _escape(self) -> Node:
        char = self._take()
        if char in "bB":
            raise PatternError("word boundaries (\\b) are not supported")
        if char in "123456789k":
            raise PatternError("back-references are not supported")
        if char == "A":
            return _BEGIN
        if char in "Zz":
            return _END
        return Chars(self._escaped(char))

    def _escaped(self, char: str) -> str:
        """Returns what an escape means, as it can stand between brackets."""
        if char in _CLASSES:
            return _CLASSES[char]
        if char in "pP":
            found = re.compile(r"\{\^?\w+(?:=\w+)?\}|[A-Z]").match(self._text, self._at)
            if found is None:
                raise PatternError(f"\\{char} names no property")
            self._at = found.end()
            return f"\\{char}{found[0]}"
        if char in _CONTROLS:
            return _char(_CONTROLS[char])
        if char == "c" and re.match("[A-Za-z]", self._next()):
            return _char(chr(ord(self._take()) % 32))
        if char in "xuU":
            return self._numbered(char)
        if char == "0" and not self._next().isdigit():
            return _char("\0")
        if char.isascii() and char.isalnum():
            raise PatternError(f"\\{char} is no escape")
        return _char(char)

    def _numbered(self, char: str) -> str:
        found = re.compile(r"\{([0-9A-Fa-f]{1,6})\}").match(self._text, self._at)
        if found:
            self._at, number = found.end(), int(found[1], 16)
        else:
            number = self._hex({"x": 2, "u": 4, "U": 8}[char])
            if 0xD800 <= number < 0xDC00 and self._skip("\\u"):
                number = 0x10000 + (number - 0xD800 << 10) + (self._hex(4) - 0xDC00)
        if number > 0x10FFFF or 0xD800 <= number < 0xE000:
            raise PatternError(f"there is no character {number:#x}")
        return _char(chr(number))

    def _hex(self, n: int) -> int:
        digits = self._take(n)
        if not re.fullmatch("[0-9A-Fa-f]+", digits):
            raise PatternError(f"{digits!r} is no hexadecimal number")
        return int(digits, 16)

    def characters(self) -> str:
        """Returns what is between the brackets, the first of which was taken."""
        negated, inner, first = self._skip("^"), "", True
        while not self._skip("]"):
            low = self._member()
            if self._next() == "-" and self._text[self._at + 1 : self._at + 2] not in ("", "]"):
                self._take()
                high = self._member()
                if _number(low) is None or _number(high) is None:
                    inner += low + _char("-") + high
                elif _number(low) > _number(high):  # type: ignore[operator]
                    raise PatternError("the ends of a range are out of order")
                else:
                    inner += f"{low}-{high}"
            else:
                inner += low
            first = False
        if first:
            return ANY.inner if negated else NONE.inner
        return f"[^{inner}]" if negated else inner

    def _member(self) -> str:
        char = self._take()
        if char == "\\":
            char = self._take()
            return _char("\b") if char == "b" else self._escaped(char)
        return _char(char)


def _number(member: str) -> int | None:
    """Returns the number of a single character, as _char spells it."""
    if len(member) == 1:
        return ord(member)
    found = re.fullmatch(r"\\x\{([0-9a-f]+)\}", member)
    return int(found[1], 16) if found else None


# ---- anchors and look-around


def _has_edges(node: Node) -> bool:
    match node:
        case Edge() | Look():
            return True
        case Seq(parts):
            return any(map(_has_edges, parts))
        case Alt(ways):
            return any(map(_has_edges, ways))
        case Repeat(inner) | AnyCase(inner):
            return _has_edges(inner)
    return False


def _ways(node: Node) -> list[tuple[Node, ...]]:
    """Returns the alternatives of a node: sequences with anchors and look-around at their top alone."""
    if isinstance(node, Edge | Look) or not _has_edges(node):
        return [node.parts if isinstance(node, Seq) else (node,)]
    found: list[tuple[Node, ...]] = []
    match node:
        case Alt(ways):
            found = [way for each in ways for way in _ways(each)]
        case Seq(parts):
            found = [()]
            for part in parts:
                found = [(*before, *after) for before, after in product(found, _ways(part))]
                _require_few(found)
        case Repeat(inner, 0, 1):
            found = [(), *_ways(inner)]
        case Repeat(inner, 1, 1):
            found = _ways(inner)
        case AnyCase(inner):
            found = [tuple(map(_any_case, way)) for way in _ways(inner)]
        case _:
            raise PatternError("an anchor or a look-around is repeated")
    _require_few(found)
    return found


def _require_few(ways: Sequence[object]) -> None:
    if len(ways) > MAX_WAYS:
        raise PatternError(f"its anchors and look-around tell more than {MAX_WAYS} alternatives apart")


def _any_case(node: Node) -> Node:
    if isinstance(node, Edge):
        return node
    return Look(AnyCase(node.node), node.ahead, node.negated) if isinstance(node, Look) else AnyCase(node)


def _search(way: Sequence[Node]) -> Iterator[Node]:
    """Yields the regexes that a whole text has to match all, where this sequence is to match within it."""
    parts = _anchored(way)
    if parts is None:
        yield NONE
        return
    yield _plain(parts)
    for at, look in enumerate(parts):
        if not isinstance(look, Look):
            continue
        before = tuple(part for part in parts[:at] if not isinstance(part, Look))
        after = tuple(part for part in parts[at + 1 :] if not isinstance(part, Look))
        here = before if look.ahead else after
        if _width(Seq(here)) is None and not _is_marked(here if look.ahead else _reversed(here)):
            raise PatternError("a look-around may look from several places")
        for inner in _looked(look):
            yield Seq((*before, inner) if look.ahead else (inner, *after))


def _plain(parts: Sequence[Node]) -> Seq:
    return Seq(tuple(part for part in parts if not isinstance(part, Look)))


def _anchored(way: Sequence[Node]) -> tuple[Node, ...] | None:
    """Returns a sequence without anchors that matches whole texts; None where it matches none."""
    begins = [at for at, part in enumerate(way) if part == _BEGIN]
    ends = [at for at, part in enumerate(way) if part == _END]
    first, last = max(begins, default=-1), min(ends, default=len(way))
    before = [part for part in way[: max(first, 0)] if not isinstance(part, Edge)]
    after = [part for part in way[last + 1 :] if not isinstance(part, Edge)]
    if first > last or not all(map(_may_be_empty, before + after)):
        return None  # Something stands before the begin or behind the end.
    if any(isinstance(part, Look) for part in before + after):
        raise PatternError("a look-around looks out of the text")
    inner = way[first + 1 : last]
    return (*(() if begins else (ANYTHING,)), *inner, *(() if ends else (ANYTHING,)))


def _may_be_empty(node: Node) -> bool:
    match node:
        case Seq(parts):
            return all(map(_may_be_empty, parts))
        case Alt(ways):
            return any(map(_may_be_empty, ways))
        case Repeat(inner, least, _):
            return least == 0 or _may_be_empty(inner)
        case AnyCase(inner):
            return _may_be_empty(inner)
    return not isinstance(node, Chars)


def _width(node: Node) -> int | None:
    """Returns how many characters all texts of a node have; None where they have different numbers."""
    match node:
        case Chars():
            return 1
        case Seq(parts):
            widths = [_width(part) for part in parts]
            return None if None in widths else sum(filter(None, widths))
        case Alt(ways):
            found = {_width(way) for way in ways}
            return found.pop() if len(found) == 1 else None
        case Repeat(inner, least, most):
            width = _width(inner)
            return None if width is None or least != most else width * least
        case AnyCase(inner):
            return _width(inner)
    return 0


def _is_marked(parts: Sequence[Node]) -> bool:
    """Says whether parts end with a character that none of them has elsewhere: its place is certain, then."""
    if not parts or not isinstance(mark := parts[-1], Chars) or _number(mark.inner) is None:
        return False
    return not any(
        matches((str(each),), chr(_number(mark.inner) or 0)) for each in _characters(Seq(tuple(parts[:-1])))
    )


def _characters(node: Node) -> Iterator[Chars | AnyCase]:
    match node:
        case Seq(parts) | Alt(parts):
            for part in parts:
                yield from _characters(part)
        case Repeat(inner):
            yield from _characters(inner)
        case Chars() | AnyCase():
            yield node


def _looked(look: Look) -> Iterator[Node]:
    """Yields what all have to match from where is looked to the text's end (or from its begin to there)."""
    ways = []
    for way in _ways(look.node):
        parts = _anchored((_BEGIN, *way) if look.ahead else (*way, _END))
        if any(isinstance(part, Look) for part in parts or ()):
            raise PatternError("look-around within look-around is not supported")
        ways += [] if parts is None else [parts]
    if not look.negated:
        yield Alt(tuple(map(Seq, ways)))
        return
    for parts in ways:
        for each in _spelled(parts if look.ahead else _reversed(parts)):
            found = _without(each)
            yield found if look.ahead else _reversed((found,))[0]


def _reversed(parts: Sequence[Node]) -> tuple[Node, ...]:
    def turned(node: Node) -> Node:
        match node:
            case Seq(parts):
                return Seq(_reversed(parts))
            case Alt(ways):
                return Alt(tuple(map(turned, ways)))
            case Repeat(inner, least, most):
                return Repeat(turned(inner), least, most)
            case AnyCase(inner):
                return AnyCase(turned(inner))
        return node

    return tuple(turned(part) for part in reversed(parts))


def _spelled(parts: Sequence[Node]) -> list[tuple[Node, ...]]:
    """Returns a sequence as alternatives in which small repetitions and groups are spelled out."""
    found: list[tuple[Node, ...]] = [()]
    for part in parts:
        ways: list[tuple[Node, ...]] = [(part,)]
        match part:
            case Alt(alternatives):
                ways = [way for each in alternatives for way in _spelled((each,))]
            case Seq(inner):
                ways = _spelled(inner)
            case Repeat(node, least, most) if most is not None and most <= 8:
                ways = [way for n in range(least, most + 1) for way in _spelled((node,) * n)]
        found = [(*before, *after) for before, after in product(found, ways)]
        _require_few(found)
    return found


def _without(parts: Sequence[Node]) -> Node:
    """Returns all texts that a sequence, at the begin of a text, does not match. It knows a few forms."""
    head = list(parts)
    if open_end := parts[-1:] == (ANYTHING,):
        head.pop()
        while head and isinstance(last := head[-1], Repeat) and last.most is None:
            head[-1:] = [last.node] * last.least  # More of it may follow anyhow.
    singles = [part for part in head if isinstance(part, Chars)]
    if len(singles) == len(head):
        found: Node = NONE if open_end else Repeat(ANY, 1, None)
        for one in reversed(singles):
            found = Repeat(Alt((Seq((_not(one), ANYTHING)), Seq((one, found)))), 0, 1)
        return found
    match head:
        case [Repeat(Chars() as one, least, None)] if not open_end and least <= 1:  # Not of these alone.
            other = Seq((Repeat(one, 0, None), _not(one), ANYTHING))
            return Alt((NOTHING, other)) if least else other
        case [Repeat(Chars() as dot, 0, None), Chars() as one] if open_end:  # Not one of these.
            return _lines(dot, Repeat(_not(one, dot), 0, None), _not(one))
        case [Repeat(Chars() as dot, 0, None), Chars() as one, Chars() as two] if open_end:  # Not these two.
            first = Seq((one, Repeat(Chars(f"[{one.inner}]&&[^{two.inner}]"), 0, None)))
            free = Alt((_not(one, dot), Seq((first, _not(one, dot, two)))))
            return _lines(dot, Seq((Repeat(free, 0, None), Repeat(first, 0, 1))), ANY)
    raise PatternError("this negative look-around is not supported")


def _not(one: Chars, dot: Chars = ANY, two: Chars | None = None) -> Chars:
    """Returns a character of `dot` that is neither `one` nor `two`."""
    out = f"[^{one.inner}{two.inner if two else ''}]"
    return Chars(out if dot == ANY else f"[{dot.inner}]&&{out}")


def _lines(dot: Chars, free: Node, end: Chars) -> Node:
    """Returns `free`, which is of the first line, where `dot` is no line's end, and what may follow it."""
    if dot == ANY:
        return free
    return Seq((free, Repeat(Seq((Chars(f"[^{dot.inner}]&&[{end.inner}]"), ANYTHING)), 0, 1)))
