"""Decides at which places of a prompt its beginning is kept, and where its chunks end.

It is kept at the last multiple of n_cut ahead of where a turn ends, since a conversation's next prompt goes on there,
of the prompt's end, and of every EVERY tokens that are read. A chunk ends there, and the others are as long as who
reads them wants, since where a prompt is cut changes no bit. A prompt goes on from any beginning of it that is kept, of
whatever prompt that was. Where rows of an image see each other, none of these places is within an image: it is one
ahead of that.

Where the core says that cuts do change bits (n_cut is more than a page), what follows has the bits of a cold prompt
only if that was cut at the same places, so a prompt's own tokens alone say where. Chunks end at multiples of n_chunk,
and at pages where turns end if else more than a twentieth of the prompt would be read again. Whether it is cut at a
page depends on the tokens up to the end of that page, so prompts that begin alike are cut alike; each goes on from its
own cuts alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from luce.files.tokenizer import Tokenizer
from luce.native.structs import PAGE
from luce.text.dialects import dialect_of_turns

EVERY = 4096  # So many tokens are between the beginnings of a long prompt that are kept, and less than twice as many.
LOST = 20  # At most one token in so many is read again where cuts change bits.
RULE = f"chunks are cut at pages of {PAGE} for turns, where 1 in {LOST} is lost"


def cuts_are_free(n_cut: int) -> bool:
    """Says whether a prompt may be cut within a page, or at any, without a bit changing; `n_cut` is EngineInfo's."""
    return PAGE % n_cut == 0


def rule(n_cut: int) -> str:
    """Returns what checkpoints depend on besides tokens and n_cut: where a prompt was cut, if that changes bits."""
    return "" if cuts_are_free(n_cut) else RULE


class Turns:
    """Finds, in a prompt's tokens, where messages begin. It is `free` to cut prompts where no cut changes a bit."""

    def __init__(self, tokenizer: Tokenizer, n_chunk: int, n_cut: int, whole_images: bool = False):
        self._whole = whole_images
        self._tokenizer, self._n_chunk, self._n_cut, self.free = tokenizer, n_chunk, n_cut, cuts_are_free(n_cut)
        self._dialect = dialect_of_turns(tokenizer.control)
        self._mark = tokenizer.control.get(self._dialect.turn[0], -1)  # No token has the id -1.

    def cut(self, tokens: Sequence[int] | np.ndarray, begun: int = 0) -> tuple[list[int], frozenset[int]]:
        """Returns where chunks of a prompt have to end, ascending, and those of these places where it is worth keeping:
        before the first message of a user, after the last one that is no tool's answer (templates write thoughts
        after it, and drop older ones), at the end of the prompt, and every EVERY tokens. Where it goes on behind its
        first `begun` tokens, the next of these is as far behind them, if that changes no bit."""
        prompt = np.asarray(tokens, np.int32)  # This costs nothing where it is one.
        begins = np.flatnonzero(prompt == self._mark).tolist()
        users = [at for at in (self._named(prompt, begin, "user") for begin in begins) if at]
        answers = [at for at in (self._named(prompt, begin, self._dialect.assistant) for begin in begins) if at]
        asked = [at for at in users if not self._is_tool(prompt, at)]
        last = [at for at in answers if asked and at > asked[-1]]
        first = EVERY + -(-begun // EVERY) * EVERY if self.free else EVERY
        met = {len(prompt), *range(first, len(prompt), EVERY), *asked[:1], *last[:1]}
        if self.free:
            kept = {self._outside(prompt, at - at % self._n_cut, self._n_cut) for at in met} - {0}
            return sorted(kept), frozenset(kept)
        ends = self._ends({*answers, *users[:1]}, len(prompt))
        ends = [end for end in ends if self._outside(prompt, end, PAGE) == end]
        found = (bisect_right(ends, at) for at in met)
        return ends, frozenset(ends[n - 1] for n in found if n)

    def goes_on(self, at: int, ends: Sequence[int]) -> bool:
        """Says whether a prompt whose chunks end at `ends` may go on from its first `at` tokens, to which another
        prompt was read and kept."""
        return self.free or at in ends

    def _outside(self, prompt: np.ndarray, at: int, step: int) -> int:
        """Returns `at`, or where that is within an image that is read whole, a place ahead of it, by whole steps. Rows
        of an image have names that follow each other downwards."""
        while self._whole and 0 < at < len(prompt) and prompt[at] < -1 and prompt[at] == prompt[at - 1] - 1:
            at -= step
        return at

    def _ends(self, turns: set[int], n: int) -> list[int]:
        """Returns where chunks of a prompt of n tokens end; `turns` are the places where turns end."""
        pages, ends, last = {at - at % PAGE for at in turns}, list[int](), 0
        for page in range(PAGE, n + 1, PAGE):
            if page % self._n_chunk == 0 or (page in pages and page - last + PAGE > last // LOST):
                ends.append(page)
                last = page
        return ends

    def _named(self, prompt: np.ndarray, begin: int, role: str) -> int | None:
        """Returns the place of the token that completes the name of a message's role, if it has that role."""
        for at in range(begin + 1, min(begin + 1 + len(role), len(prompt))):
            text = self._text(prompt[begin + 1 : at + 1])
            if text.startswith(role):
                return at
            if not role.startswith(text):
                return None
        return None

    def _is_tool(self, prompt: np.ndarray, at: int) -> bool:
        return "<tool_response>" in self._text(prompt[at : at + 8])

    def _text(self, tokens: np.ndarray) -> str:
        # The others are rows of images.
        return self._tokenizer.decode(token for token in tokens.tolist() if token >= 0)
