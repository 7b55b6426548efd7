"""Tokens and text of one generation, and what ends them."""

from __future__ import annotations

from collections.abc import Sequence

from luce.decode.events import Tokens
from luce.decode.request import Request
from luce.files.tokenizer import Detokenizer, StopStrings, Tokenizer
from luce.native.structs import Logprobs


class Output:
    """What a request has been given so far. `budget` counts the tokens that it can have at most, by what it asked
    for and by a context of `n_ctx` positions. `reason` is "" until it ends, and then what Finished says, as
    `truncated_by` is."""

    def __init__(self, request: Request, tokenizer: Tokenizer, n_ctx: int):
        most = max(n_ctx - len(request.prompt) + 1, 0)  # The last token needs no position.
        self.budget = most if request.max_tokens is None else min(request.max_tokens, most)
        self.tokens: list[int] = []  # The last one is the anchor.
        self.reason, self.logprobs = "", tuple[Logprobs, ...]()  # These are of the tokens that were not said yet.
        self.truncated_by: str | None = None
        self._pieces, self._said = list[str](), (0, 0)  # So many tokens and pieces of text were said.
        self._holds = True  # Text may be held back.
        self._request, self._eos = request, frozenset[int]() if request.ignore_eos else tokenizer.eos_ids
        self._detokenizer, self._stops = Detokenizer(tokenizer), StopStrings(request.stops)

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def room(self) -> int:
        """Returns how many tokens fit behind the one that a round gives at least, which is how deep candidates
        are of use. Below 0 there is no room for a round."""
        return self.budget - len(self.tokens) - 1

    def take(self, tokens: Sequence[int], stopped: bool = False) -> list[int]:
        """Takes the tokens up to the first that ends it, and returns them. `stopped` says that nothing may follow
        the last one. Text is made only where it may hold a stop string."""
        for count, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            if self._request.stops and token not in self._eos and self._push(token):
                self.reason, self._holds = "stop", False
            elif token in self._eos or (stopped and count == len(tokens)):
                self.reason = "stop"
            elif len(self.tokens) == self._request.max_tokens:
                self.reason, self.truncated_by = "length", "max_tokens"
            if self.reason:
                return list(tokens[:count])
        return list(tokens)

    def say(self) -> list[Tokens]:
        """Returns the tokens since the last call with the text that is certain, if there are any."""
        (tokens, pieces), logprobs = self._said, self.logprobs
        ids = tuple(self.tokens[tokens:])
        for token in () if self._request.stops else ids:
            if token not in self._eos:
                self._push(token)
        if self.reason and self._holds:  # That is neither half a character nor a stop string.
            text, met = self._stops.push(self._detokenizer.flush())
            self._pieces.append(text if met else text + self._stops.flush())
        text = "".join(self._pieces[pieces:])
        self._said, self.logprobs = (len(self.tokens), len(self._pieces)), ()
        return [Tokens(ids, text, logprobs)] if ids or text else []

    def _push(self, token: int) -> bool:
        """Makes text of a token. Returns whether a stop string was met."""
        text, met = self._stops.push(self._detokenizer.push(token))
        self._pieces.append(text)
        return met
