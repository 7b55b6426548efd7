"""A prompt that is read for itself: for the log-probabilities of its own tokens, or for a vector.

A prefill has the logits of its last row alone. So the prompt goes through verify steps, as a chain of rows
that are all known: they are committed as they are, and what the model made of each is there until the next
step. It takes its turns with generations, in the same steps, which change none of their tokens.
"""

from __future__ import annotations

from luce.decode.events import Embedded, Prefilled, Scored
from luce.decode.generation import Generation, Verb
from luce.decode.wants import Share, Turn
from luce.native import Rows

MAX_READ = 16  # A step has at most so many rows of it: others wait for them.


class Reading(Generation):
    """A generation of no token, whose request `reads`. Scored tells of each row's log-probabilities; Embedded
    of the mean of all hidden states, after the output norm and scaled to the Euclidean norm 1."""

    def _prefill(self) -> Verb:
        import numpy as np  # Who generates text alone does without.

        prompt, at, top = self._request.prompt, 0, self._request.logprobs or 0
        total = np.zeros(1)
        while at < len(prompt):
            share: Share = yield Turn()
            n = min(share.rows, self._sizes.n_rows, MAX_READ, len(prompt) - at)
            yield Rows(self.sequence, prompt[at : at + n])
            if self._request.reads == "scores":
                following = enumerate(prompt[at + 1 : at + 1 + n])
                yield Scored(tuple(self.sequence.logprobs(row, token, top) for row, token in following))
            else:
                total = total + sum(self.sequence.hidden(row).astype(np.float64) for row in range(n))
            self.sequence.commit(range(n))
            at += n
            yield Prefilled(at, len(prompt))
        if self._request.reads == "vector":
            yield Embedded(tuple(map(float, total / max(float(np.linalg.norm(total)), 1e-30))))
        self._first_token = self._clock()
        return (yield from self._end("length", "max_tokens"))
