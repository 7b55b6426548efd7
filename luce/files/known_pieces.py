"""Remembers the ids of pieces of text. The next prompt of a conversation has all that the last one had, and only what
is new in it is tokenized."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from threading import Lock

LEAST = 64  # Shorter pieces are tokenized about as fast as they are found.
MOST = 8 << 20  # All pieces together have at most so many letters.


class KnownPieces:
    """The ids of pieces, by their text, of which those are forgotten that were asked for longest ago. Any thread may
    ask. `most` bounds the letters of all."""

    def __init__(self, most: int = MOST):
        self._most, self._letters, self._lock = most, 0, Lock()
        # Lists of Python's numbers would take nine times as much.
        self._ids: OrderedDict[str, array[int]] = OrderedDict()

    def get(self, text: str) -> list[int] | None:
        """Returns the ids of a piece, or None where they are not known."""
        if len(text) < LEAST:
            return None
        with self._lock:
            if (ids := self._ids.get(text)) is None:
                return None
            self._ids.move_to_end(text)
        return ids.tolist()

    def put(self, text: str, ids: list[int]) -> None:
        if not LEAST <= len(text) <= self._most:
            return
        kept = array("i", ids)
        with self._lock:
            if text not in self._ids:
                self._letters += len(text)
            self._ids[text] = kept
            while self._letters > self._most:
                oldest, _ = self._ids.popitem(last=False)
                self._letters -= len(oldest)
