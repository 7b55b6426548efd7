"""Says what a request asks of its choices beyond sampling: penalties, a logit bias, a grammar,
log-probabilities.

They depend on the tokens before a choice, so they act after the verify, along the path that is accepted: rows
that are not accepted need no mask, and drafts pay as ever. The tokens are those of plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from luce.decode.request import Request
from luce.native import IntArray, Sequence
from luce.native.structs import Logprobs
from luce.text.grammar import Matcher


class Chooser:
    """Makes the choices of one request on its sequence, after steps of the engine that it had rows in."""

    def __init__(self, sequence: Sequence, request: Request):
        self._sequence, self._request = sequence, request
        self._matcher: Matcher | None = request.grammar() if request.grammar else None
        # With one of these, the step's choices are not the last word.
        self._own = request.penalties.any or self._matcher is not None

    @property
    def by_step(self) -> bool:
        """Says whether its choices are those of the steps and nothing else is asked of them, so that a round can
        begin before the host knows its token."""
        return not self._own and self._request.logprobs is None

    @property
    def stopped(self) -> bool:
        """Says whether the grammar lets nothing follow the last choice."""
        return self._matcher is not None and self._matcher.is_stopped

    def begin(self) -> None:
        """Prepares the sequence before the prompt is read."""
        self._sequence.set_sampling(self._request.sampling)
        if self._own:
            self._sequence.set_penalties(self._request.penalties, len(self._request.prompt))

    def first(self, choice: int) -> int:
        """Returns the token after the prompt; `choice` is the step's own."""
        return self._choose(0, choice) if self._own else choice

    def accept(self, rows: IntArray, parents: IntArray | None, choices: IntArray) -> tuple[list[int], int]:
        """Applies the accept rule with the request's own choices. Returns the accepted rows from row 0 on,
        and the choice after the last of them. `choices` are the step's own."""
        if not self._own:
            return self._sequence.accept(rows, parents, choices)
        parents = range(-1, len(rows) - 1) if parents is None else parents
        path = [0]
        while True:
            token = self._choose(path[-1], choices[path[-1]])
            below = (row for row in range(1, len(rows)) if parents[row] == path[-1] and rows[row] == token)
            row = next(below, None)
            if row is None or self.stopped:
                return path, token
            path.append(row)

    def logprobs(self, path: Items[int], tokens: Items[int]) -> tuple[Logprobs, ...]:
        """Returns the log-probabilities of the tokens chosen after the rows of `path`, before they are
        committed. It returns none where they were not asked for."""
        top = self._request.logprobs
        if top is None:
            return ()
        return tuple(
            self._sequence.logprobs(row, token, top) for row, token in zip(path, tokens, strict=False)
        )

    def _choose(self, row: int, choice: int) -> int:
        """Returns the choice after a row, for which the step's own is `choice`."""
        mask = self._matcher.mask() if self._matcher else None
        if mask is None and not self._request.penalties.any:
            token = choice
        else:
            token = self._sequence.choose(row, mask)
        if self._matcher:
            self._matcher.consume(token)
        return token
