"""Cuts what a model says into reasoning, text and calls of tools, in pieces of any size: what comes of them does
not depend on how the text was cut.

Calls are read by calls.py, from the first mark on that may be of one. A call that turns out to be none is text,
whole and unchanged. So a call is returned once it is certain: before, it may still be cut off, and what was said
of it could not be taken back. Only where a grammar holds the text to calls, they are returned while they are
written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from luce.files.tokenizer import undecided
from luce.text.calls import CallReader
from luce.text.dialects import BLANK, QWEN, SIGN, Tagged
from luce.text.parameters import Parameters
from luce.text.pieces import Call, CallEnd, Piece
from luce.text.speech import Speech


class Parser(Speech):
    """Takes text and returns pieces. `tools` has the JSON schemas of the declared functions' parameters by
    name; without any, calls are text. `reasoning` says whether the prompt ends within thoughts. `held` says
    that a grammar holds the text to well-formed calls: "strict" wherever one begins, "required" where there
    has to be one, which is after all thoughts, "instead" where one comes there or other text without any.

    `cut` says, once the text has ended, that it ended within a call."""

    def __init__(
        self,
        tools: Mapping[str, Any] | None = None,
        reasoning: bool = False,
        held: str = "",
        dialect: Tagged = QWEN,
    ):
        super().__init__(reasoning, bool(tools))
        self._tools, self._dialect, self._held = dict(tools or {}), dialect, held
        self._parameters = cache(self._parameters_of)
        self._may_think = not reasoning  # Then what begins with <think> is reasoning.
        self._line = True  # Only blanks are before it in its line.
        self._objects = True  # Calls may be JSON objects.
        self._spoken = False  # The text speaks of calls.
        self._reader: CallReader | None = None  # It reads calls now.

    @property
    def reasoning(self) -> bool:
        """Says whether what comes next is reasoning, as far as is known."""
        return self._reasoning and not (self._reader is not None and self._reader.called)

    def _parameters_of(self, name: str) -> Parameters | None:
        return Parameters(self._tools[name]) if name in self._tools else None

    def _drain(self, final: bool = False, cut: bool = False) -> Iterator[Piece]:
        while self._text or (final and self._reader):
            if self._reader is not None:
                yield from self._read_calls(self._reader, final, cut)
                if self._reader is not None:
                    return
                continue
            if SIGN not in self._text:
                yield from self._say(self._take(len(self._text)))
                return
            mark, at = self._next_mark()
            if mark is None:
                half = self._half() if cut else 0
                self.cut = self.cut or half > 0
                at = len(self._text) - (half if final else undecided(self._text, self._marks()))
                yield from self._say(self._take(at))
                self._text = "" if final else self._text
                return
            yield from self._say(self._take(at))
            if mark in self._dialect.think:
                self._take(len(mark))
                self._begin(reasoning=mark == self._dialect.think[0])
            else:
                held = bool(self._held) and mark == self._dialect.call[0]
                self._reader = CallReader(
                    self._dialect, self._parameters, thinking=self._reasoning, line=self._line,
                    objects=self._objects, spoken=self._spoken, held=held)  # fmt: skip

    def _take(self, n: int) -> str:
        taken, self._text = self._text[:n], self._text[n:]
        if self._line or "\n" in taken:
            self._line = not taken.rpartition("\n")[2].strip(BLANK)
        return taken

    def _begin(self, reasoning: bool) -> None:
        """Begins a text of another kind, or behind a call."""
        super()._begin(reasoning)
        self._may_think = False

    def _read_calls(self, reader: CallReader, final: bool, cut: bool) -> Iterator[Piece]:
        """Yields what is certain of a text that may be calls."""
        text = self._take(len(self._text))
        for piece in reader.push(text):
            yield from self._call_or_text(piece)
        if final and not reader.done:
            for piece in reader.flush(cut):
                yield from self._call_or_text(piece)
        if reader.done:
            self._reader, self._text, self._line = None, reader.rest, reader.line
            self._objects, self._spoken, self.cut = reader.objects, reader.spoken, self.cut or reader.cut

    def _call_or_text(self, piece: Piece | str) -> Iterator[Piece]:
        if isinstance(piece, str):
            yield from self._say(piece)
        else:
            if isinstance(piece, (Call, CallEnd)):
                self._begin(reasoning=False)
            yield piece

    # ---- text and marks

    def _marks(self) -> list[str]:
        """Returns what means something here."""
        calls = [self._dialect.call[0]] if self._tools and self._held != "instead" else []
        if self._reasoning:
            return [self._dialect.think[1], *(calls if self._held in ("", "strict") else [])]
        return [*calls, *(self._line_marks() if calls else []), *self._leading_marks()]

    def _line_marks(self) -> list[str]:
        """Returns the marks that count at the beginning of a line alone: a function without its call's mark, and
        closers, which may be debris before a call."""
        return [] if self._held == "required" else [self._dialect.function[0], *self._dialect.closers.values()]

    def _leading_marks(self) -> list[str]:
        """Returns the marks that count before all other text alone. A second end of the same thing is one too
        many."""
        if self._reasoning or self._said:
            return []
        think, end_think = self._dialect.think
        marks = [end_think, self._dialect.call[0]] if self._held == "instead" else [end_think]
        return [*marks, think] if self._may_think else marks

    def _next_mark(self) -> tuple[str | None, int]:
        """Returns the first mark in the text, and where it is."""
        first: str | None = None
        where, leading, lines = len(self._text), self._leading_marks(), self._line_marks()
        start = where - len(self._text.lstrip(BLANK))
        for mark in self._marks():
            at = self._text.find(mark, 0, where + len(mark))
            while at >= 0 and mark in lines and not self._begins_line(at):
                at = self._text.find(mark, at + 1, where + len(mark))
            if 0 <= at < where and (mark not in leading or at == start):
                first, where = mark, at
        return first, where

    def _begins_line(self, at: int) -> bool:
        begin = self._text.rfind("\n", 0, at) + 1
        return not self._text[begin:at].strip(BLANK) and (begin > 0 or self._line)

    def _half(self) -> int:
        """Returns the length of the text's end that is the beginning of a call, as far as it goes."""
        if not self._tools or (self._reasoning and self._held not in ("", "strict")):
            return 0
        n = undecided(self._text, self._marks())
        at = len(self._text) - n
        return n if n and self._dialect.opens(self._text[at:], self._begins_line(at)) else 0
