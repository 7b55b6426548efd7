"""Ends thoughts that have had their number of tokens: as a grammar, which lets all follow until then.

What it forces depends on the tokens before alone, so the tokens are the same with drafts and without.
"""

from __future__ import annotations

import codecs
import re

from luce.files.tokenizer import Tokenizer
from luce.text.dialects import QWEN, Dialect
from luce.text.grammar import Matcher

END = QWEN.thought[1]  # What Qwen's templates write behind thoughts.


class Budget:
    """This is a Matcher, over `inner` where the text is held to a grammar too. Thoughts have at most `most`
    tokens, then what ends them in templates follows. They are what the prompt has `begun`, or what the text begins
    with. With `calls` a call within them ends them, and it is not cut. Nor is a character."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        most: int,
        begun: bool,
        calls: bool,
        inner: Matcher | None = None,
        dialect: Dialect = QWEN,
    ):
        self._tokenizer, self._left, self._inner = tokenizer, most, inner
        self._dialect = dialect
        marks = [dialect.think[1]]
        if calls:
            marks += [dialect.within_call[0], *dialect.within_call[1]]
        self._marks = re.compile("|".join(map(re.escape, marks)))
        self._longest = max(map(len, marks))
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""  # It is the last of the text, in which a mark may be.
        self._begun, self._over, self._in_call = begun, False, False
        self._forced: list[int] = []  # These tokens have to follow.
        self._force()

    def mask(self) -> bytes | None:
        if not self._forced:
            return self._inner.mask() if self._inner else None
        token = self._forced[0]
        return bytes(token // 8) + bytes([1 << token % 8])

    def consume(self, token: int) -> None:
        if self._inner:
            self._inner.consume(token)
        if self._forced:
            self._forced.pop(0)
        elif not self._over:
            self._text += self._utf8.decode(self._tokenizer.bytes_of(token, special=True))
            if self._begun:
                self._left -= 1
                self._look()
            else:
                self._begin()
            self._force()

    @property
    def is_stopped(self) -> bool:
        return self._inner is not None and self._inner.is_stopped

    def _begin(self) -> None:
        """Looks whether the text begins with thoughts."""
        text, think = self._text.lstrip(), self._dialect.think[0]
        self._begun = text.startswith(think)
        self._over = not self._begun and not think.startswith(text)

    def _look(self) -> None:
        """Looks for marks in the text."""
        for mark in self._marks.findall(self._text):
            self._in_call = mark == self._dialect.within_call[0]
            self._over = self._over or not self._in_call
        self._text = self._text[1 - self._longest :]

    def _force(self) -> None:
        """Ends the thoughts where they have had their tokens."""
        half = self._utf8.getstate()[0]
        if self._begun and self._left <= 0 and not (self._over or self._in_call or half):
            self._forced, self._over = self._tokenizer.encode(self._dialect.thought[1], special=False), True
