"""What one generation is asked: its prompt, its bounds, and how its tokens are chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

from luce.images.sight import Shown
from luce.native.structs import Penalties, Sampling
from luce.text.grammar import Matcher

if TYPE_CHECKING:
    import numpy as np


class _Names:
    """Gives each (token, positions left out ahead of it) a name below those of images' rows (images/sight.py), of this
    process alone. Those that were given long ago are forgotten, and never given again."""

    FIRST, MOST, AT_ONCE = -(1 << 30), 1 << 29, 1 << 16

    def __init__(self) -> None:
        self._given, self._n, self._lock = dict[tuple[int, int], int](), 0, Lock()

    def of(self, token: int, left_out: int) -> int:
        with self._lock:
            if len(self._given) >= self.AT_ONCE:
                self._given.clear()
            name = self._given.get((token, left_out))
            if name is None:
                name = self._given[token, left_out] = self.FIRST - self._n % self.MOST
                self._n += 1
            return name


_NAMES = _Names()


@dataclass(frozen=True)
class Compressed:
    """What of a prompt is read, in its own tokens: `spans` [first, end), in order and apart, of `total` tokens, which
    `model` chose, a file's name, to be the share `keep` of them."""

    model: str
    keep: float
    total: int
    spans: tuple[tuple[int, int], ...]

    @property
    def read(self) -> int:
        """Returns how many tokens are read."""
        return sum(end - first for first, end in self.spans)

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Returns (at, n) for each place where n tokens are left out ahead of token `at` of those that are read."""
        found, at, last = list[tuple[int, int]](), 0, 0
        for first, end in self.spans:
            if first > last:
                found.append((at, first - last))
            at, last = at + end - first, end
        return tuple(found)

    def of(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Returns those of a whole prompt's tokens that are read."""
        return tuple(token for first, end in self.spans for token in tokens[first:end])

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "keep": self.keep,
            "read": self.read,
            "left_out": self.total - self.read,
            "spans": [list(span) for span in self.spans],
        }


@dataclass(frozen=True)
class Request:
    """This is one generation. `prompt` holds token ids, and names below -1 of rows of its `images`. At most
    `max_tokens` >= 0 new ones follow; None means until the context is full. The text ends before any of `stops`.
    With `ignore_eos` an end-of-text token is a token like any other. `grammar` makes the matcher that the text is
    held to. `logprobs` is how many of the most probable tokens are listed beside each token; None lists nothing.

    `reads` asks for the prompt alone, and no token follows: "scores" are the logprobs of its own tokens,
    "vector" is the mean of its hidden states.

    `compressed` says that the prompt is what is read of a longer one: each token keeps the position that it had
    there."""

    prompt: tuple[int, ...]
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    penalties: Penalties = field(default_factory=Penalties)
    grammar: Callable[[], Matcher] | None = None
    logprobs: int | None = None
    reads: Literal["", "scores", "vector"] = ""
    images: tuple[Shown, ...] = ()
    compressed: Compressed | None = None

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Returns (at, n) for each place where n tokens were left out ahead of token `at` of the prompt."""
        return self.compressed.gaps if self.compressed else ()

    @cached_property
    def key(self) -> np.ndarray:
        """Returns what the prompt is kept by, int32 (n,): its tokens, but that the first one behind a gap has a name,
        so that no beginning with a gap is met by a prompt without one. Ahead of the first gap all bits are a whole
        prompt's."""
        import numpy as np  # Who generates text alone does without.

        found = np.fromiter(self.prompt, np.int32, len(self.prompt))
        for at, n in self.gaps:
            found[at] = _NAMES.of(int(found[at]), n)
        found.setflags(write=False)  # Who keeps beginnings of it keeps parts of this very array.
        return found
