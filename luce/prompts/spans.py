"""Chooses which spans of a long prompt are read, by how important each of its positions is: a pure function.

Lines are kept or left out as a whole, since half a statement or half a row of a table misleads more than none. What the
rest of a prompt hangs on is always kept: its beginning, all that stands before the first message of a user (system text
and tools), the heads and ends of messages, every control token, and the last message. Where the last message itself is
what is long, as a file with a question behind it, its last lines stay.

Importance is averaged over neighbours first, as in "Speculative Prefill" (Liu, Chen, Zhang; 2025), which averages over
13 positions and then keeps chunks of 32 whatever these cut. luce keeps lines instead of chunks.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import accumulate

POOL = 13  # A position's importance is the mean of so many around it.
FIRST = 32  # Lines of so many first tokens stay.
# Of a last message that is too long to stay whole, lines of so many last tokens stay, at most and at least, and between
# these a quarter of what may be read: the rest is for what they point to.
LAST, LEAST = 128, 16
LONGEST = 128  # A longer line is cut into pieces of so many tokens: minified text has no others.

Span = tuple[int, int]  # first, and end behind the last


@dataclass(frozen=True)
class Line:
    """Tokens first .. end - 1 of a prompt, which are kept or left out together. Those that `stay` are kept."""

    first: int
    end: int
    stays: bool = False

    def __len__(self) -> int:
        return self.end - self.first


@dataclass(frozen=True)
class Marks:
    """What tells a prompt's parts: `control` tokens, the one that opens a `turn` (-1: there is none), and tokens whose
    text has a line break (`breaks`)."""

    control: Container[int]
    turn: int
    breaks: Container[int]


def lines_of(tokens: Sequence[int], marks: Marks) -> list[Span]:
    """Returns a prompt's lines, in order and without holes. A line ends with a token that breaks it, ahead of a control
    token, and behind one, but for the head of a message: that is the token which opens it and the name of its role."""
    ends = [0]
    for at, token in enumerate(tokens):
        control = token in marks.control
        if control and at > ends[-1]:
            ends.append(at)
        if token in marks.breaks or (control and token != marks.turn) or at + 1 - ends[-1] == LONGEST:
            ends.append(at + 1)
    if ends[-1] < len(tokens):
        ends.append(len(tokens))
    return list(zip(ends[:-1], ends[1:], strict=True))


def marked(tokens: Sequence[int], marks: Marks, users: Sequence[int], budget: int) -> list[Line]:
    """Returns a prompt's lines, of which those stay that are kept whatever they are worth. `users` are the places
    where messages of users begin, and of tools, which templates write like theirs. The last message stays whole where
    it takes half of the budget at most."""
    spans, n = lines_of(tokens, marks), len(tokens)
    first = users[0] if users else 0
    last = users[-1] if users else 0
    if n - last > budget // 2:
        last = max(n - min(max(budget // 4, LEAST), LAST), last)
    found = list[Line]()
    for begin, end in spans:
        mark = tokens[begin]
        # Behind a control token a line break alone belongs to it.
        tail = begin > 0 and tokens[begin - 1] in marks.control and end - begin == 1
        held = mark in marks.control or mark == marks.turn or (tail and tokens[begin] in marks.breaks)
        found.append(Line(begin, end, held or begin < max(first, FIRST) or end > last))
    return found


def pooled(scores: Sequence[float], n: int = POOL) -> list[float]:
    """Returns the mean of each score and those around it, n in all, or fewer at the ends."""
    sums, half = [0.0, *accumulate(map(float, scores))], n // 2
    around = ((max(at - half, 0), min(at + half + 1, len(scores))) for at in range(len(scores)))
    return [(sums[end] - sums[begin]) / (end - begin) for begin, end in around]


def chosen(lines: Sequence[Line], scores: Sequence[float], budget: int) -> list[Span]:
    """Returns the spans of a prompt that are read: the lines that stay, and of the others the best by their mean score,
    those of earlier ones among equals, as long as all together have at most `budget` tokens. One that has no room is
    passed by for smaller ones."""
    mean = {line: sum(scores[line.first : line.end]) / len(line) for line in lines if not line.stays}
    kept = {line for line in lines if line.stays}
    room = budget - sum(map(len, kept))
    for line in sorted(mean, key=lambda line: (-mean[line], line.first)):
        if len(line) <= room:
            kept.add(line)
            room -= len(line)
    return joined(sorted((line.first, line.end) for line in kept))


def joined(spans: Sequence[Span]) -> list[Span]:
    """Returns spans in order, of which those are one that lie side by side."""
    found = list[Span]()
    for first, end in spans:
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], end)
        else:
            found.append((first, end))
    return found


def budget_of(n: int, keep: float) -> int:
    """Returns how many tokens of n may be read where the share `keep` is, above 0 and at most 1."""
    return math.ceil(n * keep)
