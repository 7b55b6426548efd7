"""A deterministic stand-in for a session: the orchestrator's state machine at full speed, with failures.

It is strict where the core is: it checks its arguments as luce.h says, and keeps `committed`, so that a
test sees what a generation left in the caches. With draft sources, and what runs a generation over it.
"""

from __future__ import annotations

import itertools

import numpy as np
import tiny  # noqa: F401  puts tools/ on the path

from luce.drafting import Draft
from luce.errors import ArgumentError, ContextFull, StateError
from luce.orchestrator import Failed, Finished, Orchestrator, Tokens
from luce.plan import Request
from luce.qwen35_gguf import MERGES, vocabulary
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
    """choose(history) is the target, guess(history) the head. fail: {verb: (call number from 0, exception)}.
    seconds: {verb: what a call takes, or a function of its arguments} for `clock`."""

    def __init__(
        self,
        choose=hashed,
        n_ctx=4096,
        n_rows=64,
        n_chunk=512,
        fail=None,
        guess=hashed,
        n_draft=8,
        seconds=None,
    ):
        self.choose, self.n_ctx, self.n_rows, self.n_chunk = choose, n_ctx, n_rows, n_chunk
        self.guess, self.n_draft = guess, n_draft
        self.fail, self.seconds, self.now = dict(fail or {}), dict(seconds or {}), 0.0
        self.committed = []
        self.calls = []
        self.failed = 0
        self.rows = None  # histories of the last verify
        self.chain = None  # the last draft: [anchor, *drafts]

    def _called(self, verb, detail=None):
        number = sum(1 for name, _ in self.calls if name == verb)
        self.calls.append((verb, detail))
        took = self.seconds.get(verb, 0.0)
        self.now += took(detail) if callable(took) else took
        at, error = self.fail.get(verb, (None, None))
        if at == number:
            raise error

    def count(self, verb):
        return sum(1 for name, _ in self.calls if name == verb)

    def clock(self):
        return self.now

    @property
    def info(self):
        self._called("info")
        return SessionInfo(
            memory_bytes=0,
            n_ctx=self.n_ctx,
            n_rows=self.n_rows,
            n_chunk=self.n_chunk,
            n_threads=1,
            n_draft=self.n_draft,
            n_past=len(self.committed),
            n_verified=len(self.rows or ()),
            failed=self.failed,
        )

    def reset(self):
        self._called("reset")
        self.committed, self.rows, self.chain, self.failed = [], None, None, 0

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

    def draft(self, anchor, n):
        self._called("draft", (anchor, n))
        self._check([anchor])
        if not 1 <= n <= self.n_draft:
            raise ArgumentError("n")
        if not self.committed:
            raise StateError("nothing is committed")
        if len(self.committed) + n >= self.n_ctx:  # the last one's row would have no position
            raise ContextFull("draft")
        chain = [anchor]
        for _ in range(n):
            chain.append(self.guess((*self.committed, *chain)))
        self.chain = chain

    def drafted(self, n):
        self._called("drafted", n)
        if self.chain is None or n != len(self.chain) - 1:
            raise ArgumentError("n")
        return self.chain[1:]

    def verify_draft(self, n):
        self._called("verify_draft", n)
        if self.chain is None or n >= len(self.chain):
            raise StateError("no draft")
        return self._verify(self.chain[: n + 1], None)

    def verify(self, tokens, parents=None):
        self._called("verify", (tuple(tokens), parents))
        return self._verify(tokens, parents)

    def _verify(self, tokens, parents):
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
        self.committed, self.rows, self.chain = list(self.rows[path[-1]]), None, None

    def _check(self, tokens):
        if not all(0 <= token < N_VOCAB for token in tokens):
            raise ArgumentError("token")


TOKENIZER = tokenizer()
PROMPT = tuple(b"a prompt")


class Source:
    """A draft source that keeps what it was told."""

    def __init__(self, core=None):
        self.core = core
        self.budgets, self.rounds = [], []

    def begin(self, budget):
        self.budgets.append(budget)

    def learn(self, done):
        self.rounds.append(done)


class Chain(Source):
    """Drafts chains: `guess(history)` for each next token. Keeps what it was asked."""

    name = "chain"

    def __init__(self, core, guess, length=8):
        super().__init__(core)
        self.guess, self.length = guess, length
        self.asked = []

    def draft(self, anchor, rows, depth):
        self.asked.append((anchor, rows, depth))
        history, tokens = (*self.core.committed, anchor), []
        for _ in range(min(self.length, rows, depth)):
            tokens.append(self.guess(history))
            history = (*history, tokens[-1])
        return Draft(tuple(tokens))


class OnDevice(Source):
    """Leaves chains of the fake core's head on the device."""

    name = "on device"

    def __init__(self, core, length=8):
        super().__init__(core)
        self.length = length

    def draft(self, anchor, rows, depth):
        n = min(self.length, rows, depth)
        self.core.draft(anchor, n)
        return Draft(on_device=n)

    def drafted(self, n):
        return self.core.drafted(n)


class Trees(Source):
    """Drafts trees of given shapes whose nodes follow the target where the given flags say so."""

    name = "trees"

    def __init__(self, core, shapes):
        super().__init__(core)
        self.shapes = itertools.cycle(shapes)

    def draft(self, anchor, rows, depth):
        histories, tokens, parents = [(*self.core.committed, anchor)], [], [-1]
        for above, right in next(self.shapes)[:rows]:
            parent = above % len(histories)
            if len(histories[parent]) - len(histories[0]) < depth:
                choice = self.core.choose(histories[parent])
                tokens.append(choice if right else (choice + 1) % 256)
                histories.append((*histories[parent], tokens[-1]))
                parents.append(parent)
        return Draft(tuple(tokens), tuple(parents))


class Faulty(Source):
    name = "faulty"

    def __init__(self, draft):
        super().__init__()
        self._draft = draft
        self.calls = 0

    def draft(self, anchor, rows, depth):
        self.calls += 1
        if isinstance(self._draft, Exception):
            raise self._draft
        return self._draft


def run(core, source=None, cancelled=lambda: False, prompt=PROMPT, max_tokens=20, **asked):
    """The events of a generation; **asked: more of a Request."""
    request = Request(prompt, max_tokens, **asked)
    events = list(Orchestrator(core, TOKENIZER, request, source, cancelled, core.clock).run())
    terminal = [event for event in events if isinstance(event, Finished | Failed)]
    assert terminal == events[-1:], "exactly one terminal event, and it is the last"
    if isinstance(events[-1], Finished):
        emitted = [event for event in events if isinstance(event, Tokens)]
        assert events[-1].text == "".join(event.text for event in emitted)
        assert events[-1].tokens == tuple(token for event in emitted for token in event.ids)
    return events


def finish(core, **asked):
    """The Finished of a generation."""
    last = run(core, **asked)[-1]
    assert isinstance(last, Finished), last
    return last


def expected(choose, count, prompt=PROMPT):
    """What plain decoding emits."""
    history = tuple(prompt)
    for _ in range(count):
        history = (*history, choose(history))
    return history[len(prompt) :]
