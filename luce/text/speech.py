"""Text and thoughts of an answer, as its parser says them: without the blanks around marks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from luce.text.dialects import BLANK
from luce.text.pieces import Piece, Reasoning, Text


class Speech(ABC):
    """The part that parsers of all dialects share: they take text and return pieces. `reasoning` says whether the
    prompt ends within thoughts, and `called` that calls may come in the text.

    `cut` says, once the text has ended, that it ended within a call."""

    def __init__(self, reasoning: bool, called: bool):
        self._reasoning, self._called = reasoning, called
        self._trim = reasoning  # Then blanks before the first text of this kind are dropped.
        self._said = False  # Some text of this kind was said.
        self._blank = ""  # These blanks are said only if text of the same kind follows.
        self._text = ""  # It is not decided yet.
        self.cut = False

    @property
    @abstractmethod
    def reasoning(self) -> bool:
        """Says whether what comes next is reasoning, as far as is known."""

    @abstractmethod
    def _drain(self, final: bool = False, cut: bool = False) -> Iterator[Piece]:
        """Yields what is certain of the text that is not decided yet: all of it once it has ended."""

    def push(self, text: str) -> list[Piece]:
        """Returns the pieces that are now certain."""
        self._text += text
        return list(self._drain())

    def flush(self, cut: bool = False) -> list[Piece]:
        """Returns what is left once the text has ended. It was `cut` where the model would have gone on: then a
        call that it ended within is no text, and only the end of what was said of it is returned, if any was."""
        pieces = list(self._drain(final=True, cut=cut))
        if self._blank and not (self._reasoning or self.cut) and (self._said or not self._trim):
            pieces.append(Text(self._blank))
        self._blank = ""
        return pieces

    def _begin(self, reasoning: bool) -> None:
        """Begins a text of another kind, or behind a call."""
        self._reasoning, self._said, self._blank = reasoning, False, ""
        self._trim = True

    def _say(self, text: str) -> Iterator[Piece]:
        if self._blank and not text.strip(BLANK):
            self._blank += text  # Looking at all of many blanks each time would take ever longer.
            return
        text, self._blank = self._blank + text, ""
        if not self._said and self._trim:
            text = text.lstrip(BLANK if self._reasoning else "\r\n")
        solid = text.rstrip(BLANK)
        if self._reasoning or self._called or not (solid or self._said):
            text, self._blank = solid, text[len(solid) :]  # A mark may follow, before which they are nothing.
        if text:
            self._said = True
            yield Reasoning(text) if self._reasoning else Text(text)
