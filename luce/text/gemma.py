"""Cuts what Gemma 4 says into reasoning, text and calls of tools, in pieces of any size: what comes of them does not
depend on how the text was cut.

Thoughts stand in blocks, which may be empty or come again, and are closed once more than they were opened. Calls are
read by gemma_calls.py. As in Qwen's dialects (parser.py), one that turns out to be none is text, and one is returned
once it is certain, or while it is written where a grammar holds the text to calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from luce.files.tokenizer import undecided
from luce.text.dialects import BLANK, GEMMA
from luce.text.gemma_calls import ANSWER, CallReader
from luce.text.parameters import Parameters
from luce.text.pieces import Piece, Reasoning
from luce.text.speech import Speech

(_CHANNEL, END_THINK), (CALL, END_CALL) = GEMMA.think, GEMMA.call
# A channel has a name, which ends its line.
_BEGIN = rf"(?P<begin>{re.escape(_CHANNEL)}[a-z]{{0,32}}[ \t]{{0,8}}(?:\r?\n|(?={re.escape(END_THINK)})))"
_END = f"(?P<end>{re.escape(END_THINK)})"
_CALL = f"(?P<call>{re.escape(CALL)})"
_BEHIND = f"(?P<behind>{re.escape(END_CALL)}|{re.escape(ANSWER)})"
_HALF_BEGIN = re.compile(rf"{re.escape(_CHANNEL)}[a-z]{{0,32}}[ \t]{{0,8}}\r?\Z")
MOST_IN_VAIN = 1 << 20  # Once so many letters were read that are of no call, calls are text.
_MARKS = [_CHANNEL, END_THINK, CALL, END_CALL, ANSWER]


class GemmaParser(Speech):
    """Takes text and returns pieces. `tools`, `reasoning` and `held` are as in Parser."""

    def __init__(self, tools: Mapping[str, Any] | None = None, reasoning: bool = False, held: str = ""):
        super().__init__(reasoning, bool(tools))
        self._tools, self._held = dict(tools or {}), held
        self._parameters = cache(self._parameters_of)
        self._thought = False  # Some reasoning was said.
        self._behind = False  # Only blanks and closers came since a call.
        self._reader: CallReader | None = None  # It reads a call now.
        self._in_vain = 0

    @property
    def reasoning(self) -> bool:
        return self._reasoning

    def _parameters_of(self, name: str) -> Parameters | None:
        return Parameters(self._tools[name]) if name in self._tools else None

    def _drain(self, final: bool = False, cut: bool = False) -> Iterator[Piece]:
        while self._text or (final and self._reader):
            if self._reader is not None:
                yield from self._read_call(self._reader, final, cut)
                if self._reader is not None:
                    return
                continue
            found = re.search("|".join(self._marks()), self._text)
            if found is None:
                half = len(self._text) if final else len(self._text) - self._undecided()
                if cut and self._is_half_call():
                    half, self.cut = len(self._text) - undecided(self._text, [CALL]), True
                elif final and (begun := _HALF_BEGIN.search(self._text)):
                    half = begun.start()
                yield from self._say(self._text[:half])
                self._text = "" if final else self._text[half:]
                return
            yield from self._say(self._text[: found.start()])
            self._text = self._text[found.end() :]
            if self._counts(mark := str(found.lastgroup)):
                self._meet(mark)
            else:
                yield from self._say(found[0])

    def _marks(self) -> list[str]:
        """Returns the patterns of what means something here."""
        within = self._held in ("", "strict") or not self._reasoning
        calls = self._tools and within and self._in_vain < MOST_IN_VAIN
        return [_BEGIN, _END, *([_CALL] if calls else []), *([_BEHIND] if self._behind else [])]

    def _counts(self, mark: str) -> bool:
        """Says whether a mark means something behind what was said: closers right behind a call alone, and a call that
        comes instead of text before any."""
        if mark == "behind":
            return self._behind
        return not (mark == "call" and self._held == "instead" and self._said)

    def _undecided(self) -> int:
        """Returns the length of the text's end that may become a mark."""
        n = undecided(self._text, _MARKS)
        begun = _HALF_BEGIN.search(self._text, 0, len(self._text) - n)
        begun = begun or _HALF_BEGIN.search(self._text)
        return len(self._text) - begun.start() if begun else n

    def _is_half_call(self) -> bool:
        """Says whether the text ends with at least half of a call's mark, where one may be."""
        return _CALL in self._marks() and self._counts("call") and undecided(self._text, [CALL]) > len(CALL) // 2

    def _meet(self, mark: str) -> None:
        if mark == "call":
            self._reader = CallReader(self._parameters, bool(self._held))
        elif mark == "begin" and not self._reasoning:
            self._begin(reasoning=True)
        elif mark == "end" and (self._reasoning or not self._said):
            self._begin(reasoning=False)  # Else it closes nothing.

    def _begin(self, reasoning: bool) -> None:
        super()._begin(reasoning)
        self._behind = False

    def _read_call(self, reader: CallReader, final: bool, cut: bool) -> Iterator[Piece]:
        text, self._text = self._text, ""
        yield from reader.push(text)
        if final and not reader.done:
            yield from reader.flush(cut)
        if not reader.done:
            return
        self._reader, self.cut = None, self.cut or reader.cut
        if reader.found:
            self._begin(reasoning=False)
            self._behind = True
        elif not reader.cut:
            yield from self._say(CALL)
            self._in_vain += reader.read_in_vain
        self._text = reader.rest

    def _say(self, text: str) -> Iterator[Piece]:
        begins = not self._said
        self._behind = self._behind and not text.strip(BLANK)
        for piece in super()._say(text):
            if isinstance(piece, Reasoning):
                # Blocks of thoughts are paragraphs.
                piece = Reasoning("\n\n" + piece.text) if begins and self._thought else piece
                self._thought, begins = True, False
            yield piece
