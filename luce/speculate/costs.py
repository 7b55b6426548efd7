"""Says what steps cost, from what an engine measured when it was opened."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from copy import copy
from itertools import pairwise
from typing import NamedTuple

from luce.native.structs import Cost


class Host(NamedTuple):
    """This is what rounds take in seconds beside their steps, by what those cost: `between` where a round is
    begun after the one before it, and `ahead` where it is begun before that has ended. A step that follows
    another one at once takes less than one that is timed alone, so `ahead` may be below 0."""

    between: float = 0.0
    ahead: float = 0.0


NO_WORK = Host()  # It stands for a host that takes no time.


class Costs:
    """This is what steps cost in seconds: a verify by its rows, one more draft or a block by the sequences
    that share the step, and a feed by its rows. A width that was not measured lies on the line between its
    neighbours. A wider one lies on the line of the last two.

    A machine that was disturbed makes what it measures dearer, never cheaper. So a step costs no more than
    several narrower ones for its rows, and no more than a wider one."""

    def __init__(self, measured: Iterable[Cost]):
        self._lines: tuple[dict[int, float], ...] = ({}, {}, {}, {}, {})
        for cost in measured:
            self._lines[cost.drafts][cost.rows] = max(cost.seconds, 0.0)
        self._lines = tuple(map(_undisturbed, self._lines))

    def verify(self, rows: int) -> float:
        """Returns the seconds of a verify with so many rows in all."""
        return _on_line(self._lines[0], rows)

    def at_most(self, rows: int, seconds: float) -> Costs:
        """Returns the same costs, but of a verify with so many rows that takes so many seconds at most."""
        capped = copy(self)
        line = self._lines[0] | {rows: min(self.verify(rows), seconds)}
        capped._lines = (_undisturbed(line), *self._lines[1:])
        return capped

    def draft(self, sequences: int = 1, part: bool = False) -> float:
        """Returns the seconds of one more draft of the NextN head for each of so many sequences; 0 in an
        engine whose head does not draft. `part` means among a part of the vocabulary."""
        return _on_line(self._lines[3 if part else 1], sequences)

    def block(self, sequences: int = 1) -> float:
        """Returns the seconds of a DFlash block for each of so many sequences; 0 in an engine that drafts
        none."""
        return _on_line(self._lines[2], sequences)

    def feed(self, rows: int) -> float:
        """Returns the seconds of feeding the NextN head so many rows that were verified in steps of one row
        each, which leave that to the next step of another kind; 0 in an engine whose head does not draft."""
        return _on_line(self._lines[4], rows) if rows else 0.0


def _undisturbed(line: Mapping[int, float]) -> dict[int, float]:
    """Returns a line on which no step costs more than several narrower ones, or than a wider one."""
    found: dict[int, float] = {}
    for rows, seconds in sorted(line.items()):
        found[rows] = min([seconds, *(-(-rows // n) * each for n, each in found.items())])
    for narrower, wider in reversed(list(pairwise(found))):
        found[narrower] = min(found[narrower], found[wider])
    return found


def _on_line(line: dict[int, float], width: int) -> float:
    widths = list(line)
    if not widths:
        return 0.0
    if width in line:
        return line[width]
    if width < widths[0] or len(widths) == 1:
        return line[widths[0]]
    right = min(bisect_left(widths, width), len(widths) - 1)
    below, above = widths[right - 1], widths[right]
    slope = (line[above] - line[below]) / (above - below)
    if width > above:  # A cost that falls falls by noise, so it is taken as level.
        return line[above] + max(slope, 0.0) * (width - above)
    return line[below] + slope * (width - below)


class Hosts(NamedTuple):
    """This is what rounds take beside their steps by how many sequences decode together: the host works for
    each of them, and a step of several takes longer than one of as many rows of one sequence, since each has
    a state of its own. It was `timed` for some numbers, and the others lie on the line of these."""

    timed: Mapping[int, Host]

    def of(self, sequences: int) -> Host:
        """Returns what rounds of so many sequences take."""
        between = _on_line({n: each.between for n, each in self.timed.items()}, sequences)
        ahead = _on_line({n: each.ahead for n, each in self.timed.items()}, sequences)
        return Host(between, min(ahead, between))


NO_TIME = Hosts({})  # Nothing is known, so it counts as none.
