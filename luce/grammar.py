"""Grammars that a text is held to: what may come next after each token."""

from __future__ import annotations

from typing import Protocol


class Matcher(Protocol):
    """Where one text is in its grammar. The first call of mask() is for its first token."""

    def mask(self) -> bytes:
        """The tokens that may come next: token i where bit i % 8 of byte i // 8 is set."""

    def consume(self, token: int) -> None:
        """`token`, which the mask allowed, was chosen."""

    @property
    def is_stopped(self) -> bool:
        """Whether the text is complete and nothing may follow it."""
