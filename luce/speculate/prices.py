"""Prices of rounds in seconds: the steps that an engine measured when it was opened, and what the rounds
themselves show of the host's work and of the machine's pace."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple

from luce.native.structs import Cost

# The median of so many rounds is believed: up to seven that were disturbed change it by nothing, and a machine
# that got slower is known within eight.
WINDOW = 15
# The table of costs counts as so many rounds, so that the first one that drafts, if it was disturbed, does not keep
# others from being tried: with 1, recorded texts on a busy CPU have 1.41 of plain by counted costs, not 1.76; with 2,
# HumanEval's have 1.14, not 1.26.
TABLE = 3
MAX_ROWS = 64  # luce.h calls it LUCE_MAX_ROWS.


class Costs:
    """Seconds of steps: a verify by its rows, one more draft or a block by the sequences
    that share the step, and a feed by its rows. A width that was not measured lies on the line between its
    neighbours. A wider one lies on the line of the last two.

    A machine that was disturbed makes what it measures dearer, never cheaper. So a step costs no more than
    several narrower ones for its rows, and no more than a wider one."""

    def __init__(self, measured: Iterable[Cost]):
        lines: tuple[dict[int, float], ...] = ({}, {}, {}, {}, {})
        for cost in measured:
            lines[cost.drafts][cost.rows] = max(cost.seconds, 0.0)
        self._lines = [_undisturbed(line) for line in lines]
        self._tables = [[_on_line(line, max(width, 1)) for width in range(MAX_ROWS + 1)] for line in self._lines]

    def _at(self, kind: int, width: int) -> float:
        return self._tables[kind][width] if width <= MAX_ROWS else _on_line(self._lines[kind], width)

    def verify(self, rows: int) -> float:
        """Returns the seconds of a verify with so many rows in all."""
        return self._at(0, rows)

    def draft(self, sequences: int = 1, part: bool = False) -> float:
        """Returns the seconds of one more draft of the NextN head for each of so many sequences; 0 in an
        engine whose head does not draft. `part` means among a part of the vocabulary."""
        return self._at(3 if part else 1, sequences)

    def block(self, sequences: int = 1) -> float:
        """Returns the seconds of a DFlash block for each of so many sequences; 0 in an engine that drafts
        none."""
        return self._at(2, sequences)

    def feed(self, rows: int) -> float:
        """Returns the seconds of feeding the NextN head so many rows that were verified in steps of one row
        each, which leave that to the next step of another kind; 0 in an engine whose head does not draft."""
        return self._at(4, rows) if rows else 0.0


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


class Work(NamedTuple):
    """What a round is priced by. `device` counts the seconds of its steps by the table of costs, `drafted` says
    whether it has candidates, and `sequences` share it. `hidden` says that rounds are begun before the one
    before has ended, as far as nothing keeps this one from it: `turns` counts the times that the device waits
    for the host. `by` is the number of what drafted, where there are several drafters."""

    device: float
    sequences: int = 1
    drafted: bool = False
    turns: int = 0
    hidden: bool = True
    by: int | None = None


class Median:
    """The median of the last WINDOW values; None before the first."""

    __slots__ = ("_last", "value")

    def __init__(self, *values: float) -> None:
        self._last = deque(values, maxlen=WINDOW)
        self.value: float | None = values[0] if values else None

    @property
    def least(self) -> float | None:
        """Returns the least of the last values, which is hardly ever above what most are; None before WINDOW is half
        full."""
        return min(self._last) if 2 * len(self._last) > WINDOW else None

    def add(self, value: float) -> None:
        self._last.append(value)
        self.value = sorted(self._last)[len(self._last) // 2]


class Prices:
    """Seconds of rounds:

        max(scale * device, floor) + turns * turn

    `scale` is how much longer steps take than when they were measured alone: contexts are longer, clocks lower,
    and a step that follows another at once is begun meanwhile. `floor` is what a plain round takes: the host's
    work for its sequences is hidden behind the steps, unless these are shorter. Then a drafted round takes what such
    rounds took, since the host has more to begin in it. `turn` is what the device waits where the host has to see
    tokens first. All are medians of what rounds took, by the number of sequences, and where rounds cannot be hidden,
    theirs. Several drafters have a scale each, for what the table says of one may be wrong beside what it says of
    another: a machine that was disturbed while one was measured made that one dearer.

    A host that computes the steps itself hides nothing behind them (`paced`). Then plain and drafted rounds have one
    pace, since other programs take its cores for a while from both: `floor` is that pace times a plain step. How much
    longer drafted rounds take than the table says is the median of what neighbours show, of which one is plain."""

    def __init__(self, costs: Costs, paced: bool = False):
        self.costs, self.paced, self._observes = costs, paced, False
        self._pace, self._beside = Median(*[1.0] * TABLE), Median(*[1.0] * TABLE)
        self._before: tuple[bool, float] | None = None
        # Those of what drafted, and under None that of all rounds together.
        self._scale = defaultdict[tuple[bool, int | None], Median](lambda: Median(*[1.0] * TABLE))
        self._floor = defaultdict[tuple[int, bool], Median](Median)
        self._turn = defaultdict[tuple[int, bool], Median](Median)
        self._hosted = dict[tuple[int, bool], Median]()
        self._terms = dict[tuple[int, bool], tuple[float, float, float]]()  # They hold until something is learned.

    def terms(self, sequences: int, hidden: bool) -> tuple[float, float, float]:
        """Returns (scale, floor, turn) of rounds of so many sequences."""
        found = self._terms.get(key := (sequences, hidden))
        if found is None:
            if self.paced:
                pace, beside = self._pace.value or 1.0, self._beside.value or 1.0
                scale, floor = pace * beside, pace * self.costs.verify(sequences)
            else:
                scale, seen = self._scale[hidden, None].value or 1.0, self._floor[key].value
                floor = scale * self.costs.verify(sequences) if seen is None else seen
            found = self._terms[key] = scale, floor, max(self._turn[key].value or 0.0, 0.0)
        return found

    def plain(self, sequences: int, hidden: bool = True) -> float:
        """Returns the seconds of a plain round; 0 where nothing was measured."""
        return self.terms(sequences, hidden)[1]

    def seen(self, sequences: int, hidden: bool = True) -> bool:
        """Says whether a plain round was observed, or nothing is."""
        return self.paced or not self._observes or self._floor[sequences, hidden].value is not None

    def settled(self, sequences: int, hidden: bool = True) -> bool:
        """Says whether enough plain rounds were observed to book drafts for good, or nothing is."""
        return self.paced or not self._observes or self._floor[sequences, hidden].least is not None

    def _steps(self, of: Work) -> float:
        """Returns what its steps are expected to take."""
        own = None if of.by is None or self.paced else self._scale[of.hidden, of.by].value
        return (own or self.terms(of.sequences, of.hidden)[0]) * of.device

    def seconds(self, of: Work) -> float:
        """Returns what a round is expected to take."""
        _, floor, turn = self.terms(of.sequences, of.hidden)
        if of.drafted:
            hosted = self._hosted.get((of.sequences, of.hidden))
            floor = max(self._steps(of), floor, (hosted and hosted.value) or 0.0)
        return floor + of.turns * turn

    def lost(self, of: Work, rounds: int, tokens: int) -> float:
        """Returns how many plain rounds so many rounds took beyond those that their tokens take. Rounds of which few
        were seen may seem shorter beside others than they are, so one that drafts is as long as the table says at
        least, and waits for the host beside that. Where the host takes longer than a plain step, both kinds wait for
        it: the shortest of the last plain rounds is what it takes at most, since a disturbed round is longer."""
        scale, plain, turn = self.terms(of.sequences, of.hidden)
        if not plain:
            return 0.0
        host = 0.0 if self.paced else (self._floor[of.sequences, of.hidden].least or 0.0) / max(scale, 1.0)
        alone = max(self.costs.verify(of.sequences), host)
        least = of.device / alone + of.turns * turn / plain if of.drafted and alone else 0.0
        return rounds * max(self.seconds(of) / plain, least) - tokens

    def scales(self, hidden: bool, drafters: int) -> list[float]:
        """Returns the scale of each drafter, where there are several."""
        if drafters < 2 or self.paced:
            return []
        return [self._scale[hidden, by].value or 1.0 for by in range(drafters)]

    def learn(self, of: Work, seconds: float) -> None:
        """Learns from what a round took, from the end of the one before it."""
        key, self._observes = (of.sequences, of.hidden), True
        scale, floor, _ = self.terms(*key)
        steps, known = self._steps(of), self.seconds(of._replace(turns=0)) if of.turns else 0.0
        self._terms.clear()
        if of.turns and of.by is not None and max(floor, seconds) < steps:
            # The round waited for the host, and took less than its steps alone should: the table has these dearer.
            self._scale[of.hidden, of.by].add(seconds / of.device)
        elif of.turns:
            self._turn[key].add((seconds - known) / of.turns)
        elif self.paced and of.device:
            pace, before = seconds / of.device, self._before
            self._before = of.drafted, pace
            if before and before[0] != of.drafted:
                self._beside.add(pace / before[1] if of.drafted else before[1] / pace)
            self._pace.add(pace / (self._beside.value or 1.0) if of.drafted else pace)
        elif not of.drafted:
            self._floor[key].add(seconds)
        elif of.device and scale * of.device > floor:
            for by in {None, of.by}:
                self._scale[of.hidden, by].add(seconds / of.device)
        else:
            self._hosted.setdefault(key, Median(*[floor] * TABLE)).add(seconds)
