"""A small model that says how important each position of a long prompt is to what follows it.

It reads the whole prompt, and a few tokens that it would answer itself. What the last rows of the prompt and those
tokens attend to, in the layers that see all positions, is what an answer is likely to need. "Speculative Prefill"
(Liu, Chen, Zhang; 2025) does so, and takes the largest share that any layer and head gives a position. That a draft
of the answer tells more than the prompt's end alone is what "SpecKV" (Galim and others; 2025) and "Lookahead Q-Cache"
(Wang and others; 2025) found of caches that drop entries. luce takes the mean of the HEADS largest shares (luce.h:
luce_sequence_get_scores), since the largest alone is often of one head that looks for something else.

The scorer has an engine of its own, so the model that answers needs to know nothing of it but the positions that it
leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from luce.decode.engine import Engine
from luce.decode.request import Compressed
from luce.errors import ArgumentError, Cancelled, ContextFull, UnsupportedError, about
from luce.files.tokenizer import Tokenizer, difference
from luce.native import Rows
from luce.planning.opened import Files
from luce.planning.plan import DEFAULT_CTX, Options, require_supported
from luce.prompts.spans import Marks, Span, budget_of, chosen, lines_of, marked, pooled
from luce.text.dialects import dialect_of_turns

if TYPE_CHECKING:
    import numpy as np

ROWS = 16  # So many last tokens of the prompt are asked what they attend to,
AHEAD = 8  # and so many that follow it.
COUNTED = 4  # Prompts are counted, and a part of them is read, up to so many contexts.
HEADS = 8  # A position is as important as the mean of so many heads says that find it most so.


class _Breaks:
    """The tokens whose text has a line break."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def __contains__(self, token: object) -> bool:
        return isinstance(token, int) and b"\n" in self._tokenizer.bytes_of(token)


def longest_of(trained: int | None, n_ctx: int) -> int:
    """Returns how long prompts may be of which a part is read, beside a model with such a context."""
    return min(trained or COUNTED * n_ctx, COUNTED * n_ctx)


class Scorer:
    """The scorer of the file at `path`, for prompts of `ctx` tokens, or of as many as it was trained for where those
    are fewer (None: of as many as it was trained for), whose tokens are those of `tokenizer`, which `metadata`
    describes. It is a context manager, and any thread may use it, one at a time. Raises what opening the file raises,
    UnsupportedError where its tokenizer is another, and with `whole` ContextFull where it was trained for fewer."""

    def __init__(
        self,
        path: str | Path,
        tokenizer: Tokenizer,
        metadata: Mapping[str, Any],
        ctx: int | None = None,
        device: str | None = None,
        threads: int | None = None,
        *,
        whole: bool = False,
    ):
        with ExitStack() as opened:
            files = opened.enter_context(Files(path, device=device))
            with about(files.file.path):
                if found := difference(metadata, files.file.kv):
                    raise UnsupportedError(f"it cannot score prompts of this model: {found}")
                require_supported(files.facts)
            files.tokenizer = tokenizer  # It is the same.
            trained = files.facts.context_length or ctx or DEFAULT_CTX
            if whole and ctx is not None and ctx > trained:
                said = f"{path} was trained for {trained} tokens, and the prompt has {ctx}"
                raise ContextFull(f"{said}: a scorer has to read all of it")
            longest = min((ctx or trained) + AHEAD, trained)
            asked = Options(device, ctx=longest, threads=threads, rows=ROWS + AHEAD, spec="off", scores=True)
            self._engine = opened.enter_context(Engine.open(files, asked)).native
            self._sequence = opened.enter_context(self._engine.sequence())
            self._opened = opened.pop_all()
        self.name, self.n_ctx = Path(path).name, self._engine.info.n_ctx
        self._tokenizer, self._lock = tokenizer, Lock()
        self._last: tuple[tuple[int, ...], np.ndarray] | None = None  # Several answers to one prompt need them once.
        dialect = dialect_of_turns(tokenizer.control)
        self._marks = Marks(
            frozenset(tokenizer.added_ids),
            tokenizer.control.get(dialect.turn[0], -1),
            _Breaks(tokenizer),
        )

    def compressed(
        self, tokens: Sequence[int], keep: float, cancelled: Callable[[], bool] = lambda: False
    ) -> Compressed:
        """Returns what of a prompt is read where that is to be the share `keep` of it, above 0 and at most 1.
        `cancelled` is asked between steps. Raises ContextFull where it is too long for the scorer, Cancelled, and what
        a step raises."""
        if not 0 < keep <= 1:
            raise ArgumentError(f"the share of a prompt that is kept is {keep:g}: it is above 0 and at most 1")
        budget = budget_of(len(tokens), keep)
        lines = marked(tokens, self._marks, self._messages(tokens), budget)
        spans = [(0, len(tokens))]
        if budget < len(tokens) and not all(line.stays for line in lines):
            spans = chosen(lines, pooled(self.scores(tokens, cancelled).tolist()), budget)
        return Compressed(self.name, keep, len(tokens), tuple(spans))

    def lines(self, tokens: Sequence[int]) -> list[Span]:
        """Returns a prompt's lines."""
        return lines_of(tokens, self._marks)

    def scores(self, tokens: Sequence[int], cancelled: Callable[[], bool] = lambda: False) -> np.ndarray:
        """Returns how important each token of a prompt is: F32 (n,)."""
        if len(tokens) > self.n_ctx:
            raise ContextFull(f"a prompt of {len(tokens)} tokens, and a scorer with a context of {self.n_ctx}")
        if min(tokens) < 0:
            raise UnsupportedError("a prompt with images cannot be compressed: the scorer sees none")
        with self._lock:
            asked = tuple(tokens)
            if self._last and self._last[0] == asked:
                return self._last[1]
            sequence, chunk = self._sequence, self._engine.info.n_chunk
            sequence.reset()
            first = max(len(tokens) - ROWS, 0)
            for at in range(0, first, chunk):
                if cancelled():
                    raise Cancelled("cancelled")
                sequence.prefill(tokens[at : min(at + chunk, first)], last=False)
            rows = list(tokens[first:])
            most = min(AHEAD, self.n_ctx - len(tokens))
            for _ in range(most + 1):  # Nothing is committed: each step has all rows again.
                (choices,) = self._engine.verify([Rows(sequence, rows)])
                if isinstance(choices, Exception):
                    raise choices
                if choices[-1] in self._tokenizer.eos_ids or len(rows) == ROWS + most:
                    break
                rows.append(choices[-1])
            self._last = asked, sequence.scores(len(tokens), HEADS)
            return self._last[1]

    def _messages(self, tokens: Sequence[int]) -> list[int]:
        """Returns where messages of users begin, and of tools."""
        begins = (at for at, token in enumerate(tokens) if token == self._marks.turn)
        return [at for at in begins if self._names_user(tokens[at + 1 : at + 5])]

    def _names_user(self, tokens: Sequence[int]) -> bool:
        said = self._tokenizer.decode(tokens)
        return said.startswith(("user", "tool"))

    def close(self) -> None:
        """Frees all of it; a second call does nothing."""
        self._opened.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
