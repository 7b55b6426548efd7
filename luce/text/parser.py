"""Says what Qwen's models write, as reasoning, text and calls of tools: a state machine over pieces of any
size.

<think>\\nREASONING\\n</think>\\n\\nTEXT\\n\\n<tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n
</function>\\n</tool_call>

Values are raw text where the tool's schema takes a string, else JSON. The format cannot escape its own marks:
a value ends at the `</parameter>` that another parameter or the end of the function follows, a call where its
last parameter, its function and itself end one after the other. The older form, a JSON object with "name" and
"arguments", is read too. What does not parse is text. What is said does not depend on how the text is cut
into pieces.

A call that turns out to be none is text. So a call is returned once it has ended: before, it may still be cut
off, and what was said of it could not be taken back. Only where a grammar holds the text to well-formed calls
(forced.py), they are returned while they are written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from luce.text.forced import CALL, END_CALL, END_FUNCTION, FUNCTION, ForcedCall
from luce.text.pieces import TEXT, Call, Piece, Reasoning, Text, parameter_types, undecided, value_of

THINK, END_THINK = "<think>", "</think>"
_BLANK = " \t\r\n"

_HEAD = re.compile(r"<function=([^<>\n]{1,256})>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>")
_END_PARAMETER = re.compile(r"</parameter>(?=\s*(?:<parameter=[^<>\n]+>|\Z))")


class Parser:
    """Takes text and returns pieces. `tools` has the JSON schemas of the declared functions' parameters by
    name; without any, calls are text. `reasoning` says whether the prompt ends within `<think>`. `held` says
    that a grammar holds the text to well-formed calls: "strict" wherever one begins, "required" where there
    has to be one, which is after all thoughts, "instead" where one comes there or other text without any."""

    def __init__(self, tools: Mapping[str, Any] | None = None, reasoning: bool = False, held: str = ""):
        self._tools = dict(tools or {})
        self._types = dict[str, dict[str, frozenset[str]]]()  # Calls of these tools were read.
        self._reasoning = reasoning
        self._may_think = not reasoning  # Then what begins with <think> is reasoning.
        self._trim = reasoning  # Then blanks before the first text of this kind are dropped.
        self._said = False  # Some text of this kind was said.
        self._called = False  # A call came before it.
        self._blank = ""  # These blanks are said only if text of the same kind follows.
        self._text = ""  # It is not decided yet.
        self._searched = 0  # So much of it was searched for the end of a call.
        self._held = held
        self._writing: ForcedCall | None = None  # This call is written now.

    @property
    def reasoning(self) -> bool:
        """Says whether what comes next is reasoning, as far as is known."""
        return self._reasoning

    def push(self, text: str) -> list[Piece]:
        """Returns the pieces that are now certain."""
        self._text += text
        return list(self._drain(final=False))

    def flush(self) -> list[Piece]:
        """Returns what is left once the text has ended."""
        pieces = list(self._drain(final=True))
        if self._blank and not self._reasoning and (self._said or not self._trim):
            pieces.append(Text(self._blank))
        self._blank = ""
        return pieces

    def _drain(self, final: bool) -> Iterator[Piece]:
        while self._text or (final and self._writing):
            if self._writing:
                yield from self._go_on(self._writing, final)
                continue
            mark, at = self._next_mark()
            if mark is None:
                at = len(self._text) - (0 if final else undecided(self._text, self._marks()))
                yield from self._say(self._take(at))
                return
            yield from self._say(self._take(at))
            if mark == CALL and self._held:
                self._writing = ForcedCall(self._tools)
            elif mark in (CALL, FUNCTION):
                found = self._call(mark, final)
                if found is None:
                    return
                self._searched = 0
                yield from self._say(found) if isinstance(found, str) else self._called_now(found)
            else:
                self._take(len(mark))
                if mark != END_CALL:
                    self._begin(reasoning=mark == THINK)

    def _take(self, n: int) -> str:
        taken, self._text = self._text[:n], self._text[n:]
        return taken

    def _begin(self, reasoning: bool, called: bool = False) -> None:
        """Begins a text of another kind, or behind a call."""
        self._reasoning, self._called, self._said, self._blank = reasoning, called, False, ""
        self._trim, self._may_think = True, False

    def _called_now(self, call: Call) -> Iterator[Piece]:
        self._begin(reasoning=False, called=True)
        yield call

    def _go_on(self, call: ForcedCall, final: bool) -> Iterator[Piece]:
        """Reads on in a call that is written."""
        yield from call.push(self._take(len(self._text)))
        if call.rest is None and not final:
            return
        self._writing = None
        if call.rest is not None:
            self._text = call.rest
            self._begin(reasoning=False, called=True)
        else:
            yield from call.cut()
            yield from self._say(call.read)

    # ---- text and marks

    def _say(self, text: str) -> Iterator[Piece]:
        text, self._blank = self._blank + text, ""
        if not self._said and self._trim:
            text = text.lstrip(_BLANK if self._reasoning else "\r\n")
        solid = text.rstrip(_BLANK)
        if self._reasoning or self._tools or not (solid or self._said):
            text, self._blank = solid, text[len(solid) :]  # A mark may follow, before which they are nothing.
        if text:
            self._said = True
            yield Reasoning(text) if self._reasoning else Text(text)

    def _marks(self) -> list[str]:
        """Returns what means something here."""
        if self._reasoning:
            calls = self._tools and self._held in ("", "strict")
            return [END_THINK, CALL] if calls else [END_THINK]
        leading = self._leading_marks()
        return [CALL, FUNCTION, *leading] if self._tools and self._held != "instead" else leading

    def _leading_marks(self) -> list[str]:
        """Returns the marks that count before all other text alone. A second end of the same thing is one too
        many."""
        if self._reasoning or self._said:
            return []
        marks = [END_THINK, END_CALL] if self._called else [END_THINK]
        marks += [CALL] if self._held == "instead" else []
        return [*marks, THINK] if self._may_think else marks

    def _next_mark(self) -> tuple[str | None, int]:
        """Returns the first mark in the text, and where it is."""
        first: str | None = None
        where, leading = len(self._text), self._leading_marks()
        start = where - len(self._text.lstrip(_BLANK))
        for mark in self._marks():
            at = self._text.find(mark, 0, where + len(mark))
            if 0 <= at < where and (mark not in leading or at == start):
                first, where = mark, at
        return first, where

    # ---- calls

    def _call(self, mark: str, final: bool) -> Call | str | None:
        """Returns the call that the text begins with, which is taken off; or its mark, if it is none; or None
        where that is not certain yet."""
        begin = len(mark) if mark == CALL else 0
        inner = self._text[begin:]
        body = inner.lstrip(_BLANK)
        begin += len(inner) - len(body)
        found: Call | str | None = ""
        if mark == FUNCTION and self._said and "\n" not in self._blank:
            pass  # In the middle of a line it is only spoken of.
        elif not body or FUNCTION.startswith(body):
            found = None
        elif mark == CALL and body.startswith("{"):
            found = self._ended(begin, END_CALL, _json_call)
        elif body.startswith(FUNCTION):
            head = _HEAD.match(body)
            if head is None:
                found = "" if re.search(r"[<>\n]", body[len(FUNCTION) :]) or len(body) > 300 else None
            elif mark == CALL or head[1] in self._tools:
                found = self._ended(begin, END_CALL if mark == CALL else END_FUNCTION, self._function_call)
        if found == "" or (found is None and final):
            return self._take(len(mark))
        return found

    def _ended(self, begin: int, end: str, parse: Callable[[str], Call | None]) -> Call | str | None:
        """Returns the call from `begin` up to the first `end` with which it parses."""
        think = self._text.find(END_THINK) if self._reasoning else -1
        at = self._text.find(end, max(begin, self._searched))
        while at >= 0 and not 0 <= think < at:
            inner = self._text[begin : at if end == END_CALL else at + len(end)]
            if call := parse(inner):
                self._take(at + len(end))
                return call
            at = self._text.find(end, at + 1)
        self._searched = max(len(self._text) - len(end) + 1, 0)
        return "" if think >= 0 else None  # Where reasoning goes on, the call was only spoken of.

    def _function_call(self, text: str) -> Call | None:
        """Reads <function=NAME> ... </function>."""
        text = text.rstrip()
        head = _HEAD.match(text)
        if head is None or not text.endswith(END_FUNCTION):
            return None
        body = text[head.end() : -len(END_FUNCTION)]
        name = head[1].strip()
        types = self._types[name] = self._types.get(name) or parameter_types(self._tools.get(name))
        arguments, at = dict[str, Any](), 0
        while body[at:].strip():
            key = _PARAMETER.match(body, at)
            end = _END_PARAMETER.search(body, key.end()) if key else None
            if key is None or end is None:
                return None
            value = body[key.end() : end.start()].removeprefix("\n").removesuffix("\n")
            arguments[key[1].strip()] = value_of(value, types.get(key[1].strip(), TEXT))
            at = end.end()
        return Call(name, json.dumps(arguments, ensure_ascii=False))


def _json_call(text: str) -> Call | None:
    """Reads {"name": ..., "arguments": {...}}."""
    try:
        found = msgspec.json.decode(text)  # It refuses NaN, numbers beyond F64 and half a surrogate pair.
    except (ValueError, RecursionError):
        return None
    name, arguments = found.get("name"), found.get("arguments", found.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return Call(name, json.dumps(arguments, ensure_ascii=False))
