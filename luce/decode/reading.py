"""A prompt that is read for itself: for the log-probabilities of its own tokens, or for a vector.

A prefill has the logits of its last row alone. So the prompt goes through verify steps, as a chain of rows
that are all known: they are committed as they are, and what the model made of each is there until the next
step. It takes its turns with generations, in the same steps, which change none of their tokens.
"""

from __future__ import annotations

from typing import Any

from luce.decode.events import Embedded, Event, Prefilled, Scored, State
from luce.decode.generation import Generation
from luce.decode.pipeline import Decision, Landed
from luce.native import Rows
from luce.speculate.drafting import Limits

MAX_READ = 16  # A step has at most so many rows of it: others wait for them.


class Reading(Generation):
    """A generation of no token, whose request `reads`. Scored tells of each row's log-probabilities; Embedded
    of the mean of all hidden states, after the output norm and scaled to the Euclidean norm 1. It goes from IDLE to
    DRAFT, and from round to round."""

    _total: Any = 0.0  # Sum of the hidden states up to `_read`: (n_embd,) float64.
    _n = 0  # The next round reads so many tokens.

    @property
    def rows(self) -> Rows:
        return Rows(self.sequence, self._request.prompt[self._read : self._read + self._n])

    @property
    def decision(self) -> Decision:
        return Decision(ahead=False)

    def propose(self, rows: int, sequences: int) -> list[Event]:
        self._n = min(rows, self._sizes.n_rows, MAX_READ, self.unread)
        return []

    def _begin(self) -> State:
        super()._begin()
        return State.DRAFT

    def _offer(self, limits: Limits) -> State:
        return State.VERIFY

    def _commit(self, landed: Landed) -> State:
        import numpy as np  # Who generates text alone does without.

        self.state = State.COMMIT
        prompt, begin, end = self._request.prompt, self._read, self._read + self._n
        if self._request.reads == "scores":
            following, top = enumerate(prompt[begin + 1 : end + 1]), self._request.logprobs or 0
            self._events.append(Scored(tuple(self.sequence.logprobs(row, token, top) for row, token in following)))
        else:
            self._total += sum(self.sequence.hidden(row).astype(np.float64) for row in range(self._n))
        self.sequence.commit(range(self._n))
        self._read = end
        self._events.append(Prefilled(end, len(prompt)))
        if self.unread:
            return State.DRAFT
        if self._request.reads == "vector":
            mean = self._total / max(float(np.linalg.norm(self._total)), 1e-30)
            self._events.append(Embedded(tuple(map(float, mean))))
        self._tally.first = self._clock()
        return self._end("length", "max_tokens")
