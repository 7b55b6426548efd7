"""Chooses how many tokens of prompts are read in one pass between two rounds of those that decode.

A short chunk holds them up least, and a long one reads most tokens a second where a step has to read all weights
whatever it computes. So chunks are as short as rounds need for their share of the time, unless such short ones are
slow. What sizes take is learnt as they come; a size that was not tried is taken to be as fast as the next longer one.
"""

from __future__ import annotations

SLOW = 1.5  # A token may take so many times what it takes at the fastest size.
NEW = 0.5  # The newest chunk of a size counts so much, since contexts and batches change.
FORGOTTEN = 64  # A size that was passed by for so many chunks is tried again.


class ChunkSizes:
    """The sizes that chunks may have: n_cut, at multiples of which a prompt may be cut, twice as many, and so on, and
    n_chunk."""

    def __init__(self, n_cut: int, n_chunk: int):
        self._sizes, size = list[int](), n_cut
        while size < n_chunk:
            self._sizes.append(size)
            size *= 2
        self._sizes.append(n_chunk)
        self._chunks = 0
        self._took = dict[int, tuple[float, int]]()  # One of these sizes takes so long, and which chunk was the last.

    def knows(self, n: int) -> bool:
        """Says whether a chunk of n tokens was timed, or would not be kept in mind."""
        return n in self._took or n not in self._sizes

    def took(self, n: int, seconds: float) -> None:
        """Notes that a chunk of n tokens took so long."""
        self._chunks += 1
        if n in self._sizes:
            before, _ = self._took.get(n, (seconds, 0))
            self._took[n] = before + NEW * (seconds - before), self._chunks

    def within(self, seconds: float) -> int:
        """Returns the largest size that takes at most so long, of those that are not slow, or the smallest of these."""
        each, longer = dict[int, float](), 0.0  # Seconds of a token; the longest size is tried before all others.
        for size in reversed(self._sizes):
            took, last = self._took.get(size, (0.0, 0))
            known = last and (size == self._sizes[-1] or self._chunks - last < FORGOTTEN)
            longer = each[size] = took / size if known else longer
        fast = [size for size in self._sizes if each[size] <= SLOW * min(each.values())]
        return max((size for size in fast if size * each[size] <= seconds), default=fast[0])
