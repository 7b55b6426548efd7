"""Says whether two runs print the same tokens, and counts what was compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Same = Callable[[Sequence[int], Sequence[int], int], None]  # Identity.compare, as the fixture `same` gives it


@dataclass
class Identity:
    """Identity counts over all pairs of runs of a test; a failed comparison is counted too."""

    runs_compared: int = 0
    runs_that_differ: int = 0
    tokens_compared: int = 0  # Each run counts up to its first difference, and with it.

    def compare(self, found: Sequence[int], plain: Sequence[int], n: int) -> None:
        """Compares the first n tokens."""
        pairs = zip(found[:n], plain[:n], strict=True)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        self.runs_compared += 1
        self.runs_that_differ += at is not None
        self.tokens_compared += n if at is None else at + 1
        assert at is None, f"token {at}: {found[at]}, not {plain[at]}"
