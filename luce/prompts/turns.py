"""Decides where a prompt is cut into chunks, and at which of their ends its beginning is kept.

Chunks end at multiples of n_chunk. A conversation's next prompt goes on where a turn of it ended. So a chunk
is cut there too, at the beginning of the page, where else more than a twentieth of the prompt would be read
again.

Where a prompt is cut decides the last bits of what follows. So whether it is cut at a page depends only on
the tokens up to the end of that page. Prompts that begin alike are then cut alike. Each may be resumed at its
own cuts, from any prompt's checkpoint of the same tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from luce.files.tokenizer import Tokenizer
from luce.native.structs import PAGE

EVERY = 4096  # So many tokens are between the beginnings of a long prompt that are kept.
LOST = 20  # At most one token in so many is read again.
RULE = f"chunks are cut at pages of {PAGE} for turns, where 1 in {LOST} is lost"  # Files differ by this rule.


class Turns:
    """Finds, in a prompt's tokens, where messages begin."""

    def __init__(self, tokenizer: Tokenizer, n_chunk: int):
        self._tokenizer, self._n_chunk = tokenizer, n_chunk
        self._mark = tokenizer.control.get("<|im_start|>", -1)  # No token has the id -1.

    def cut(self, prompt: Sequence[int]) -> tuple[list[int], frozenset[int]]:
        """Returns the ends of all whole chunks of a prompt, ascending, and those of them where it is worth
        keeping: before the first message of a user, after the last one that is no tool's answer (templates
        write thoughts after it, and drop older ones), at the end of the prompt, and every EVERY tokens."""
        begins = np.flatnonzero(np.asarray(prompt, np.int32) == self._mark).tolist()
        users = [at for at in (self._named(prompt, begin, "user") for begin in begins) if at]
        answers = [at for at in (self._named(prompt, begin, "assistant") for begin in begins) if at]
        ends = self._ends({*answers, *users[:1]}, len(prompt))
        asked = [at for at in users if not self._is_tool(prompt, at)]
        last = [at for at in answers if asked and at > asked[-1]]
        met = {len(prompt), *range(EVERY, len(prompt), EVERY), *asked[:1], *last[:1]}
        found = (bisect_right(ends, at) for at in met)
        return ends, frozenset(ends[n - 1] for n in found if n)

    def _ends(self, turns: set[int], n: int) -> list[int]:
        """Returns where chunks of a prompt of n tokens end; `turns` are the places where turns end."""
        pages, ends, last = {at - at % PAGE for at in turns}, list[int](), 0
        for page in range(PAGE, n + 1, PAGE):
            if page % self._n_chunk == 0 or (page in pages and page - last + PAGE > last // LOST):
                ends.append(page)
                last = page
        return ends

    def _named(self, prompt: Sequence[int], begin: int, role: str) -> int | None:
        """Returns the place of the token that completes the name of a message's role, if it has that role."""
        for at in range(begin + 1, min(begin + 1 + len(role), len(prompt))):
            text = self._tokenizer.decode(prompt[begin + 1 : at + 1])
            if text.startswith(role):
                return at
            if not role.startswith(text):
                return None
        return None

    def _is_tool(self, prompt: Sequence[int], at: int) -> bool:
        return "<tool_response>" in self._tokenizer.decode(prompt[at : at + 8])
