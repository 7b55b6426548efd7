"""Has texts that decode together draft in the same rounds, as deep as that pays for all of them.

A step waits for the drafts of each of its texts, and verifies what all have drafted. So who drafts alone has
all others wait, and one more that drafts costs little. What a round costs is counted as if all did the same
(Prices), which is true only if they do. So each text says in every round what it would draft. By what all
said in the last one, drafts go as deep as gives the most tokens a second of all. Who drafts pays for who
waits, and what may be lost is lost together: what one loses beyond what it may, the others pay at once, of
what they have gained. If it stayed with the one, it would hold up all who come once those others have ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple


class Wish(NamedTuple):
    """This is what a text would draft in a round: a chain whose first 1, 2 .. drafts are all right with these
    `chances`, and so many candidates `beside` it, which promise `gain` tokens. 0, 1 .. drafts take `drafting`
    plain rounds. `by` is the index of what drafts."""

    chances: Sequence[float]
    beside: int
    gain: float
    drafting: Sequence[float]
    by: int = 0


class Company:
    """This is the round that the texts of one engine have together, with what they said in it and in the last
    one. It knows no text by itself, so it keeps nothing of one that ends, but for a loss that is unpaid.
    `spare` is what each may lose, in plain rounds: the mean of what they told since the last round. None
    means that none did. `steps` are the prices of verifies by the rows of all texts, in plain rounds."""

    def __init__(self) -> None:
        self._number, self._sequences = 0, 1
        self._debt = 0.0  # So much was lost beyond what may be, in plain rounds, and nobody has paid it yet.
        self.disband()

    def disband(self) -> None:
        """Says that no texts decode together now, so that nothing is known of those who will."""
        self.spare: float | None = None
        self._depth: int | None = None  # Drafts go so deep, and as deep as each likes at first.
        self._begin()

    def _begin(self) -> None:
        self._over = False  # One of its texts has ended it.
        self._texts, self._wishes, self._spares = 0, list[Wish](), list[float]()
        self._drafted, self._candidates = 0, 0  # Those who drafted have these.
        self._drafting = dict[int | None, float]()  # It is by what drafts.
        self._owed: float | None = None  # It is counted once a round.

    def begin(self, sequences: int, steps: Sequence[float]) -> int:
        """Says that one text of so many begins a round, and returns its number. It is the next one where this
        one is over, or has as many texts already: they may have ended before it was."""
        if self._over or self._texts >= sequences:
            self._number += 1
            self._depth = best_depth(self._wishes, sequences, steps)
            self.spare = (sum(self._spares) - self._debt) / len(self._spares) if self._spares else None
            self._begin()
        self._texts, self._sequences = self._texts + 1, sequences
        return self._number

    def wishes(self, wish: Wish) -> int:
        """Takes what a text would draft in this round, and returns how many of the drafts pay for all."""
        self._wishes.append(wish)
        return len(wish.chances) if self._depth is None else min(len(wish.chances), self._depth)

    def drafts(self, candidates: int, drafting: float, by: int | None = 0) -> None:
        """Says that a text has so many candidates in this round, and what its drafts take. None drafts for it
        where they are a lookup's."""
        self._drafted, self._candidates = self._drafted + 1, self._candidates + candidates
        self._drafting[by] = max(self._drafting.get(by, 0.0), drafting)

    def owes(self, plain: float, steps: Sequence[float], saved: float = 0.0) -> float:
        """Returns how much longer than a `plain` one this round took, for all texts together and for each one
        of those that drafted; 0 where none did. It `saved` so much by being begun ahead."""
        if self._owed is None:
            took = _step(steps, self._sequences + self._candidates) + sum(self._drafting.values()) - saved
            self._owed = self._sequences * (took - plain) / self._drafted if self._drafted else 0.0
        return self._owed

    def end(self, number: int, spare: float) -> float:
        """Says that the round of a number is over, and what one of its texts may still lose, which is below 0
        where it has lost more. Returns what it may lose then: less by what it pays for others, or 0 where the
        others pay for it. Where rounds are begun ahead, the next one may have begun for other texts."""
        self._over = self._over or number == self._number
        left = spare - self._debt
        self._debt = max(-left, 0.0)
        self._spares.append(max(left, 0.0))
        return self._spares[-1]


def best_depth(wishes: Sequence[Wish], sequences: int, steps: Sequence[float]) -> int:
    """Returns how deep the drafts go of so many sequences, some of which have wishes, where that gives the
    most tokens a second; 0 where no drafts do."""
    if not wishes:
        return 0
    rows = sequences + sum(wish.beside for wish in wishes)
    tokens = sequences + sum(wish.gain for wish in wishes)
    lengths = sorted(len(wish.chances) for wish in wishes)
    # All wait for who drafts most with each drafter, and these draft one after the other.
    most = {wish.by: wish for wish in sorted(wishes, key=lambda wish: len(wish.chances))}.values()
    top, found = float(sequences), 0
    for n, chances in enumerate(zip_longest(*(wish.chances for wish in wishes), fillvalue=0.0), start=1):
        rows, tokens = rows + len(lengths) - bisect_left(lengths, n), tokens + sum(chances)
        price = _step(steps, rows) + sum(wish.drafting[min(n, len(wish.chances))] for wish in most)
        if tokens > top * price:
            top, found = tokens / price, n
    return found


def _step(steps: Sequence[float], rows: int) -> float:
    """Returns the price of a verify. There are too many rows for one where a text has ended meanwhile."""
    return steps[min(rows, len(steps) - 1)]
