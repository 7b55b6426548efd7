"""Reads a call as Gemma 4 writes it, in a text that comes in pieces of any size:

    <|tool_call>call:NAME{path:<|"|>a "b".txt<|"|>,lines:3,list:[true,null],inner:{a:1}}<tool_call|>

What is between <|"|> is a string as it stands. The models also write keys and strings in the quotes of JSON or of
Python, strings without any, `=` for `:`, `(` for `{`, and leave closers out. A quote, of any kind, ends a string only
where what follows it may follow a value: others are of the string, and so are both of a pair of <|"|> of which the
first stands where a value begins, since then the string holds a call. Where no call comes of that, the next <|"|>
ends a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import Any

from luce.files.tokenizer import undecided
from luce.text.dialects import BLANK, GEMMA, MAX_NAME
from luce.text.literals import decoded
from luce.text.parameters import TEXT, WORDS, Parameters, value_of
from luce.text.pieces import Arguments, Call, CallBegin, CallEnd, Piece, as_json

QUOTE = '<|"|>'
OPEN, CLOSE = GEMMA.call
ANSWER = "<|tool_response>"  # A model that has called ends its text with this token.
DEEPEST = 64  # Values are nested at most so deep.
_NAME, _BLANKS = r"""[^\s{}()<>\[\]"'`,=$]""", r"\s{0,64}"  # Without bounds a regex takes hours for many blanks.
_HEAD = re.compile(rf"{_BLANKS}(call{_BLANKS}:{_BLANKS})?({_NAME}{{1,256}}){_BLANKS}")
_HEAD_END = re.compile(r"[{(<]")
_HEAD_BEGUN = re.compile(rf"{_BLANKS}(call{_BLANKS}(:{_BLANKS})?)?{_NAME}{{0,256}}{_BLANKS}")
_BARE_KEY = re.compile(r"""[^\s:=,{}\[\]()<>"'`][^:=,{}\[\]()<>"'`\n]{0,255}""")
# A comma in a string without quotes ends it where such a key follows.
_KEY_AHEAD = re.compile(r"""[^\s:=,{}\[\]()<>"'`][^:=,{}\[\]()<>"'`\n]{0,63}[:=]""")
_BARE_SIGN = re.compile(r"[,{}\[\]()<]")
_OF_MORE = re.compile(r"[\s,<(\[{]")
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_BEFORE_VALUE = frozenset(":=[,({")  # A <|"|> behind one of these opens a string.

Reading = Generator[None, None, Any]  # It waits for more text where it yields.


class NoCall(Exception):
    """What follows the mark of a call is none."""


class CallReader:
    """Takes a text from behind the mark of a call on. `parameters` returns those of a declared tool by its name,
    else None. A call that a grammar forces (`held`) is said while it is written: its strings letter by letter.

    Once it is `done`, `found` says whether it was a call, and `rest` is what follows it, or all of the text where it
    was none: then so many letters were `read_in_vain`. `cut` says that the text ended within a call."""

    def __init__(self, parameters: Callable[[str], Parameters | None], held: bool = False):
        self._parameters, self._held = parameters, held
        self.done, self.cut, self.found, self.rest = False, False, False, ""
        self.read_in_vain = 0
        self._parts = list[str]()  # All of the text.
        self._tail, self._at = "", 0  # The end of it, of which so much was read.
        self._ended, self._was_cut = False, False
        self._care = 0 if held else 2  # 2: marks in strings come in pairs. 1: they may. 0: there are none.
        self._passed = False  # A mark was taken for a part of a string.
        self._stack = list[str]()  # These closers are to come.
        self._tool: Parameters | None = None
        self._said = list[Piece]()
        self._begun = False  # Something of the call was said.
        self._reading = self._read()

    def push(self, text: str) -> list[Piece]:
        """Returns what is certain now."""
        self._parts.append(text)
        self._tail, self._at = self._tail[self._at :] + text, 0
        return self._go_on()

    def flush(self, cut: bool) -> list[Piece]:
        """Returns what is left where the text has ended. It was `cut` where more would have come."""
        self._ended, self._was_cut = True, cut
        return self._go_on()

    def _go_on(self) -> list[Piece]:
        try:
            next(self._reading)
        except StopIteration as end:
            self.done, self.found, self.rest = True, True, self._tail[self._at :]
            self._said += [Arguments("}"), CallEnd()] if self._held else [end.value]
        except NoCall:
            text = "".join(self._parts)
            self.read_in_vain += len(text) - self._left()
            if self._passed:
                return self._again(text)
            self.done = True
            self.cut = self._ended and (self._was_cut or self._begun)
            self.rest = "" if self.cut else text
            self._said += [CallEnd(whole=False)] if self._begun else []
        said, self._said = self._said, []
        return said

    def _again(self, text: str) -> list[Piece]:
        """Reads the text once more, with less care for strings that hold marks."""
        self._care, self._passed, self._stack = self._care - 1, False, []
        self._tail, self._at = text, 0
        self._reading = self._read()
        return self._go_on()

    def _left(self) -> int:
        """Returns how much of the text is there that was not read."""
        return len(self._tail) - self._at

    # ---- letters

    def _letter(self, at: int = 0) -> Reading:
        """Returns the letter that is so far ahead, or "" behind the end of the text."""
        while self._left() <= at and not self._ended:
            yield
        at += self._at
        return self._tail[at : at + 1]

    def _solid(self, at: int = 0) -> Reading:
        """Returns where the next letter is that is no blank."""
        while (yield from self._letter(at)) in (" ", "\t", "\r", "\n"):
            at += 1
        return at

    def _is(self, mark: str, at: int = 0) -> Reading:
        """Returns whether a mark is so far ahead."""
        while self._left() < at + len(mark) and not self._ended and mark.startswith(self._tail[self._at + at :]):
            yield
        return self._tail.startswith(mark, self._at + at)

    def _ends(self, at: int = 0) -> Reading:
        """Returns whether the text of the call has ended there, be it without its closers."""
        if (yield from self._letter(at)) == "":
            return True
        return (yield from self._is(CLOSE, at)) or (yield from self._is(ANSWER, at))

    def _take(self, n: int = 1) -> str:
        taken = self._tail[self._at : self._at + n]
        self._at += n
        return taken

    def _skip_blanks(self) -> Reading:
        self._take((yield from self._solid()))

    def _to(self, sign: re.Pattern[str]) -> tuple[str, str]:
        """Takes the text up to a sign, or as far as there is some. Returns it, and the sign or ""."""
        found = sign.search(self._tail, self._at)
        return self._take((found.start() if found else len(self._tail)) - self._at), found[0] if found else ""

    # ---- a call

    def _read(self) -> Reading:
        while not (head := _HEAD_END.search(self._tail)) and not self._ended:
            if not _HEAD_BEGUN.fullmatch(self._tail):
                raise NoCall
            yield
        end = head.start() if head else len(self._tail)
        said = _HEAD.fullmatch(self._tail, 0, end)
        name, tool = self._named(said[2]) if said else ("", None)
        if said is None or not (said[1] or tool):
            raise NoCall
        self._take(end)
        self._tool = tool
        if self._held:
            self._say(CallBegin(name), Arguments("{"))
        arguments = dict[str, Any]()
        if (sign := (yield from self._letter())) in ("{", "("):
            self._take()
            if sign == "(" and (yield from self._letter((yield from self._solid()))) == "{":
                yield from self._skip_blanks()
                sign = self._take()
            arguments = yield from self._object(_CLOSING[sign], top=True)
        elif not (tool and (yield from self._is(CLOSE))):
            raise NoCall
        yield from self._end()
        return None if self._held else Call(name, as_json(arguments))

    def _named(self, name: str) -> tuple[str, Parameters | None]:
        """Returns a tool's name and its parameters. Some models put namespaces before names."""
        for each in (name, re.split(r"[:.]", name)[-1]):
            if (tool := self._parameters(each)) is not None:
                return each, tool
        return name, None

    def _end(self) -> Reading:
        """Reads what ends a call behind its arguments."""
        while (yield from self._letter(blanks := (yield from self._solid()))) in ("}", ")"):
            self._take(blanks + 1)  # Some models close once too often.
        if (yield from self._is(CLOSE, blanks)):
            self._take(blanks + len(CLOSE))
            return
        for mark in (ANSWER, OPEN, *GEMMA.think):
            if (yield from self._is(mark, blanks)):
                return
        ended = (yield from self._letter(blanks)) == ""
        if self._was_cut if ended else "\n" not in self._tail[self._at : self._at + blanks]:
            raise NoCall

    def _say(self, *pieces: Piece) -> None:
        self._begun = True
        self._said += pieces

    # ---- values

    def _object(self, closer: str, top: bool = False) -> Reading:
        """Returns what follows the opening of an object. That of a call may have either closer."""
        found, closers = dict[str, Any](), ("}", ")") if top else (closer,)
        self._enter(closer)
        while True:
            yield from self._skip_separators()
            if (yield from self._letter()) in closers:
                self._take()
                break
            if (yield from self._ends()):
                self._leave_open(bool(found))
                break
            key = yield from self._key()
            at = yield from self._solid()
            if (yield from self._letter(at)) not in (":", "="):
                raise NoCall
            self._take(at + 1)
            yield from self._skip_blanks()
            if top and self._held:
                self._say(Arguments((", " if found else "") + as_json(key) + ": "))
            found[key] = yield from self._value(self._types(key) if top else None, top and self._held)
            yield from self._behind_value("{")
        self._stack.pop()
        return found

    def _array(self, closer: str) -> Reading:
        found = list[Any]()
        self._enter(closer)
        while True:
            yield from self._skip_separators()
            if (yield from self._letter()) == closer:
                self._take()
                break
            if (yield from self._ends()):
                self._leave_open(True)
                break
            found.append((yield from self._value()))
            yield from self._behind_value("[")
        self._stack.pop()
        return found

    def _enter(self, closer: str) -> None:
        if len(self._stack) >= DEEPEST:
            raise NoCall
        self._stack.append(closer)

    def _leave_open(self, something: bool) -> None:
        """Leaves a value whose closer is missing: where the text ends, there has to be `something` in it."""
        if not self._left() and (self._was_cut or not something):
            raise NoCall

    def _skip_separators(self) -> Reading:
        yield from self._skip_blanks()
        while (yield from self._letter()) == ",":
            self._take()
            yield from self._skip_blanks()

    def _behind_value(self, within: str) -> Reading:
        """Checks that what follows may follow a value."""
        yield from self._skip_blanks()
        if (yield from self._is(QUOTE)) and (yield from self._may_end(len(QUOTE))):
            self._take(len(QUOTE))  # It ends a string that another quote began, or none.
            yield from self._skip_blanks()
        if (yield from self._letter()) in (",", "}", "]", ")") or (yield from self._ends()):
            return
        if not (yield from self._item_follows(0, within)):  # A comma is missing.
            raise NoCall

    def _key(self) -> Reading:
        if (yield from self._is(QUOTE)):
            self._take(len(QUOTE))
            return (yield from self._raw(key=True))
        if (yield from self._letter()) in ('"', "'"):
            return (yield from self._quoted(self._take(), key=True))
        while not self._ended and self._left() <= MAX_NAME and _BARE_KEY.fullmatch(self._tail, self._at):
            yield
        found = _BARE_KEY.match(self._tail, self._at)
        if found is None:
            raise NoCall
        return self._take(len(found[0])).rstrip(BLANK)

    def _types(self, key: str) -> frozenset[str] | None:
        """Returns the types of a parameter, or None where nobody says them, or a grammar holds the value to them."""
        return self._tool.stated(key) or None if self._tool is not None and not self._held else None

    def _value(self, types: frozenset[str] | None = None, said: bool = False) -> Reading:
        """Returns a value, of one of these types where they are known. It is `said` as an argument: where it is a
        string, while it is written."""
        if (yield from self._is(QUOTE)):
            self._take(len(QUOTE))
            text = yield from self._raw(said=said)
            return text if said or types is None or "string" in types else value_of(text, types)
        first = yield from self._letter()
        if first in ('"', "'"):
            text = yield from self._quoted(self._take())
            value = text if types is None or "string" in types else value_of(text, types)
        elif first in _CLOSING and types != TEXT:
            self._take()
            value = yield from (self._object("}") if first == "{" else self._array(_CLOSING[first]))
        else:
            text = yield from self._bare(types)
            value = _literal(text) if types is None or text == "null" else value_of(text, types)
        if said:
            self._say(Arguments(as_json(value)))
        return value

    # ---- strings

    def _raw(self, key: bool = False, said: bool = False) -> Reading:
        """Returns the string that a mark has opened, and says it. Where a grammar holds the call, the next mark
        ends it."""
        parts, inner = list[str](), False
        if said:
            self._say(Arguments('"'))
        while True:
            at = self._tail.find(QUOTE, self._at)
            half = undecided(self._tail[-len(QUOTE) :], [QUOTE])
            if text := self._take((at if at >= 0 else max(len(self._tail) - half, self._at)) - self._at):
                parts.append(text)
                if said:
                    self._say(Arguments(as_json(text)[1:-1]))
            if at < 0:
                if self._ended:
                    raise NoCall
                yield
            elif not self._care or (not inner and (yield from self._may_end(len(QUOTE), key))):
                self._take(len(QUOTE))
                if said:
                    self._say(Arguments('"'))
                return "".join(parts)
            else:
                self._passed, inner = True, not inner and self._care > 1 and _last(parts) in _BEFORE_VALUE
                parts.append(self._take(len(QUOTE)))

    def _quoted(self, quote: str, key: bool = False) -> Reading:
        """Returns the string that a quote has opened as in JSON or in Python."""
        signs, parts = re.compile(rf"\\|{quote}"), list[str]()
        while True:
            text, sign = self._to(signs)
            parts.append(text)
            if not sign:
                if self._ended:
                    raise NoCall
                yield
            elif sign == "\\":
                yield from self._letter(1)
                parts.append(self._take(2))
            elif (yield from self._may_end(1, key)):
                self._take()
                return _unescaped("".join(parts), quote)
            else:
                self._take()
                parts.append(f"\\{quote}")

    def _bare(self, types: frozenset[str] | None) -> Reading:
        """Returns a value that has no quotes. Where the model ends its text, it ends with it."""
        parts, opened = list[str](), list[str]()
        while True:
            text, sign = self._to(_BARE_SIGN)
            parts.append(text)
            if not sign:
                if not self._ended:
                    yield
                    continue
                if self._was_cut or not _is_whole("".join(parts).strip(BLANK), types):
                    raise NoCall
                break
            if sign == "<":
                ends = (yield from self._ends()) or (yield from self._is(QUOTE))
            elif sign == ",":
                sure = self._held or self._stack[-1] == "]"
                ends = not opened and (sure or (yield from self._item_follows(1, "{")))
            elif sign in _CLOSING:
                opened.append(_CLOSING[sign])
                ends = False
            else:
                ends = not opened and (sign in self._stack or (sign == "}" and self._stack == [")"]))
                if opened and sign == opened[-1]:
                    opened.pop()
            if ends:
                break
            parts.append(self._take())
        text = "".join(parts).strip(BLANK)
        if not text:
            raise NoCall
        return text

    # ---- what follows

    def _may_end(self, at: int, key: bool = False) -> Reading:
        """Returns whether a string may end before what is so far ahead."""
        at, closers = (yield from self._solid(at)), list(self._stack)
        if key:
            return (yield from self._letter(at)) in (":", "=")
        while True:
            sign = yield from self._letter(at)
            if sign == "":
                return True
            if sign == ",":
                return bool(closers) and (yield from self._item_follows(at + 1, "[" if closers[-1] == "]" else "{"))
            if sign == "<":
                if (yield from self._ends(at)):
                    return True
                dangling = yield from self._is(QUOTE, at)
                return dangling and self._tail[self._at] in ('"', "'") and (yield from self._may_end(at + len(QUOTE)))
            if sign in ("}", ")") and len(closers) <= 1:
                closers = []
            elif closers and sign == closers[-1]:
                closers.pop()
            else:
                return False
            at = yield from self._solid(at + 1)

    def _item_follows(self, at: int, within: str) -> Reading:
        """Returns whether a value of a list, or a key and its separator, may begin there. Nothing may, too."""
        at = yield from self._solid(at)
        sign = yield from self._letter(at)
        if sign in ("}", "]", ")") or (yield from self._ends(at)):
            return True
        if (yield from self._is(QUOTE, at)) or sign in ('"', "'"):
            return True
        if within == "[":
            return sign in ("{", "[", "(", "-", *"0123456789tfnTFN")
        while True:
            if _KEY_AHEAD.match(self._tail, self._at + at):
                return True
            if self._ended or self._left() - at > MAX_NAME or not _BARE_KEY.fullmatch(self._tail, self._at + at):
                return False
            yield


def _last(parts: list[str]) -> str:
    """Returns the last letter that is no blank."""
    return next((solid[-1] for part in reversed(parts) if (solid := part.rstrip(BLANK))), ":")


def _is_whole(text: str, types: frozenset[str] | None) -> bool:
    """Says whether a text without quotes, with which all ends, is a value rather than prose or a part of one."""
    if types is None or "string" in types:
        return not _OF_MORE.search(text)
    return not isinstance(_literal(text), str)


def _literal(text: str) -> Any:
    """Returns what a text without quotes is: a word of JSON or Python, a number, or itself."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        value = decoded(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float) else text


def _unescaped(text: str, quote: str) -> str:
    """Returns the string that is written so between its quotes."""
    try:
        found = json.loads(f'"{text}"', strict=False) if quote == '"' else decoded(f"'{text}'")
        return found if isinstance(found, str) else text
    except ValueError:
        return text.replace(f"\\{quote}", quote)
