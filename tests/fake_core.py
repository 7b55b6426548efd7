"""A deterministic stand-in for a session: the orchestrator's state machine at full speed, with failures.

It is strict where the core is: it checks its arguments as luce.h says, and keeps `committed`, so that a
test sees what a generation left in the caches.
"""

from __future__ import annotations

import numpy as np
import tiny  # noqa: F401  puts tools/ on the path
from qwen35_gguf import MERGES, vocabulary

from luce.errors import ArgumentError, ContextFull, StateError
from luce.structs import SessionInfo
from luce.tokenizer import Tokenizer

N_VOCAB = 384
EOS = N_VOCAB - 1


def metadata():
    """A file's tokenizer keys: ids 0..255 are bytes, the last three are control tokens."""
    tokens, types = vocabulary(N_VOCAB, "[PAD")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([int(kind) for kind in types], np.int32),
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in MERGES],
        "tokenizer.ggml.eos_token_id": EOS,
    }


def tokenizer():
    """Of `metadata`; EOS ends a text."""
    return Tokenizer(metadata())


def hashed(history):
    """A byte that depends on every token so far, and never ends the text."""
    state = 7
    for token in history:
        state = (state * 6364136223846793005 + token * 1442695040888963407 + 1) % 2**64
        state ^= state >> 29
    return state % 256


def scripted(prompt, script):
    """What follows the prompt is `script`, token by token, and then hashed."""

    def choose(history):
        index = len(history) - len(prompt)
        return script[index] if 0 <= index < len(script) else hashed(history)

    return choose


class FakeCore:
    """choose(history) is the target. fail: {verb: (call number from 0, exception)}."""

    def __init__(self, choose=hashed, n_ctx=4096, n_rows=64, n_chunk=512, fail=None):
        self.choose, self.n_ctx, self.n_rows, self.n_chunk = choose, n_ctx, n_rows, n_chunk
        self.fail = dict(fail or {})
        self.committed = []
        self.calls = []
        self.rows = None  # histories of the last verify

    def _called(self, verb, detail=None):
        number = sum(1 for name, _ in self.calls if name == verb)
        self.calls.append((verb, detail))
        at, error = self.fail.get(verb, (None, None))
        if at == number:
            raise error

    def count(self, verb):
        return sum(1 for name, _ in self.calls if name == verb)

    @property
    def info(self):
        self._called("info")
        return SessionInfo(0, self.n_ctx, self.n_rows, self.n_chunk, 1, len(self.committed), 0, 0)

    def reset(self):
        self._called("reset")
        self.committed, self.rows = [], None

    def set_sampling(self, sampling):
        self._called("set_sampling", sampling)

    def prefill(self, tokens):
        self._called("prefill", tuple(tokens))
        if not tokens:
            raise ArgumentError("no tokens")
        if len(self.committed) + len(tokens) > self.n_ctx:
            raise ContextFull("prefill")
        self._check(tokens)
        self.committed += tokens
        return self.choose(tuple(self.committed))

    def verify(self, tokens, parents=None):
        self._called("verify", (tuple(tokens), parents))
        parents = [row - 1 for row in range(len(tokens))] if parents is None else list(parents)
        if not 1 <= len(tokens) <= self.n_rows or len(parents) != len(tokens) or parents[0] != -1:
            raise ArgumentError("rows")
        self._check(tokens)
        histories = []
        for row, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if row and not 0 <= parent < row:
                raise ArgumentError("parents")
            above = histories[parent] if row else tuple(self.committed)
            histories.append((*above, token))
        if max(map(len, histories)) > self.n_ctx:
            raise ContextFull("verify")
        self.rows = histories
        return [self.choose(history) for history in histories]

    def accept(self, tokens, parents, choices):
        self._called("accept")
        parents = [row - 1 for row in range(len(tokens))] if parents is None else list(parents)
        path = [0]
        while True:
            children = [row for row in range(1, len(tokens)) if parents[row] == path[-1]]
            right = [row for row in children if tokens[row] == choices[path[-1]]]
            if not right:
                return path, choices[path[-1]]
            path.append(right[0])

    def commit(self, path):
        self._called("commit", tuple(path))
        if self.rows is None:
            raise StateError("commit before verify")
        for row, length in zip(path, range(1, len(path) + 1), strict=True):
            if len(self.rows[row]) != len(self.committed) + length:
                raise ArgumentError("path")
        self.committed, self.rows = list(self.rows[path[-1]]), None

    def _check(self, tokens):
        if not all(0 <= token < N_VOCAB for token in tokens):
            raise ArgumentError("token")
