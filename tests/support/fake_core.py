"""Stands in for an engine, deterministically: generations and their loop run at full speed, with failures.

It is strict where the core is: it checks its arguments as luce.h says before it does anything, and keeps what
each sequence has `committed`, so that a test sees what a generation left in the caches. What runs generations
over it is here too. Draft sources for it are in fake_sources.py.
"""

from __future__ import annotations

import itertools
from collections import deque

import numpy as np
import tiny  # noqa: F401  puts tools/ on the path

from luce.bench.oracle_tokenizer import MERGES, vocabulary
from luce.decode.events import Failed, Finished, Tokens
from luce.decode.generation import Generation
from luce.decode.loop import MAX_ROWS, Loop
from luce.decode.request import Request
from luce.errors import ArgumentError, Cancelled, ContextFull, NumericError, OutOfMemory, StateError
from luce.files.tokenizer import Tokenizer
from luce.native import CHOSEN, Drafts, Form, Lists, Prompt, Rows, Verified, default
from luce.native import Source as By
from luce.native.structs import DrafterInfo, EngineInfo, SequenceInfo
from luce.speculate.drafting import Drafter, Fixed

N_VOCAB = 384
EOS = N_VOCAB - 1
AHEAD = False  # Engines begin steps ahead where nothing else is said.


def metadata():
    """Returns a file's tokenizer keys: ids 0..255 are bytes, the last three are control tokens."""
    tokens, types = vocabulary(N_VOCAB, "[PAD")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([int(kind) for kind in types], np.int32).data,
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in MERGES],
        "tokenizer.ggml.eos_token_id": EOS,
    }


def tokenizer():
    """Makes the tokenizer of `metadata`; EOS ends a text."""
    return Tokenizer(metadata())


RECENT = deque([((), 7)], 8)  # These are the last histories that were hashed, and their states.


def hashed(history):
    """Returns a byte that depends on every token so far, and never ends the text."""
    history = tuple(history)
    fits = (known for known in reversed(RECENT) if history[: len(known[0])] == known[0])
    known, state = max(fits, key=lambda each: len(each[0]), default=((), 7))
    for token in history[len(known) :]:
        state = (state * 6364136223846793005 + token * 1442695040888963407 + 1) % 2**64
        state ^= state >> 29
    RECENT.append((history, state))
    return state % 256


def scripted(prompt, script):
    """Follows the prompt with `script`, token by token, and then with hashed."""

    def choose(history):
        index = len(history) - len(prompt)
        return script[index] if 0 <= index < len(script) else hashed(history)

    return choose


class FakeEngine:
    """This is an engine whose target is choose(history) and whose head is guess(history). `fail` is {verb:
    (call number from 0, exception)}, and `seconds` is {verb: what a call takes, or a function of its detail}
    for `clock`. Calls of the engine and of its sequences are counted together. on_call(verb) runs within each
    call and does what a signal does."""

    def __init__(self, choose=None, n_ctx=4096, n_rows=64, n_chunk=512, fail=None, guess=None, n_draft=8,
                 n_sequences=1, seconds=None, on_call=lambda verb: None, n_top=0, ahead=None, n_cut=1,
                 whole_images=False):  # fmt: skip
        self.choose, self.guess = choose or hashed, guess or hashed
        self.n_ctx, self.n_rows, self.n_chunk, self.n_draft = n_ctx, n_rows, n_chunk, n_draft
        self.n_sequences, self.on_call, self.n_top, self.n_cut = n_sequences, on_call, n_top, n_cut
        self.whole_images = whole_images
        self.fail, self.seconds, self.now = dict(fail or {}), dict(seconds or {}), 0.0
        self.calls, self.counts = [], {}
        self.open = []  # These sequences are open.
        self.last = None  # This sequence was opened last.
        self.cancels = False
        self.ahead = AHEAD if ahead is None else ahead
        self.begun = []  # Each entry has the sequences and the results of a step that was begun.
        self.following = None  # The next wait() begins a round with so many drafts of each sequence.

    def called(self, verb, detail=None):
        number = self.count(verb)
        self.counts[verb] = number + 1
        self.calls.append((verb, detail))
        self.on_call(verb)
        took = self.seconds.get(verb, 0.0)
        self.now += took(detail) if callable(took) else took
        at, error = self.fail.get(verb, (None, None))
        if at == number:
            raise error

    def count(self, verb):
        return self.counts.get(verb, 0)

    def clock(self):
        return self.now

    @property
    def committed(self):
        """Returns those of the sequence that was opened last."""
        return self.last.committed

    @property
    def info(self):
        return EngineInfo(
            memory_bytes=0, n_ctx=self.n_ctx, n_sequences=self.n_sequences, n_checkpoints=0, n_pages=1,
            n_rows=self.n_rows, n_drafters=1, n_top=self.n_top, n_chunk=self.n_chunk, n_threads=1,
            n_cut=self.n_cut, pages_free=1,
            sequences_free=self.n_sequences - len(self.open), checkpoints_free=0, whole_images=self.whole_images,
            drafters=(DrafterInfo("nextn", 0, self.n_draft, 0, 0, 0, 0, 1),),
        )  # fmt: skip

    def sequence(self):
        if len(self.open) == self.n_sequences:
            raise OutOfMemory("all sequences are open")
        self.last = FakeSequence(self)
        self.open.append(self.last)
        return self.last

    def cancel(self):
        self.cancels = True

    def interruptible(self):
        if self.cancels:
            self.cancels = False
            raise Cancelled("cancelled")

    def prefill(self, items):
        self.called("prefill", [tuple(item.tokens) for item in items])
        self.interruptible()
        if not items or len({id(item.sequence) for item in items}) < len(items):
            raise ArgumentError("items")
        for item in items:
            item.sequence.usable()
            check(item.tokens)
            if not item.tokens or len(item.tokens) > self.n_chunk:
                raise ArgumentError("a chunk")
            if len(item.sequence.committed) + len(item.tokens) > self.n_ctx:
                raise ContextFull("prefill")
        for item in items:
            item.sequence.committed += item.tokens
        return [self.choose(tuple(item.sequence.committed)) if item.last else None for item in items]

    def finish_prompts(self):
        """Takes what a pass over prompts takes behind the call that began it, as on several GPUs."""
        if self.count("finish_prompts") < self.count("prefill"):
            self.called("finish_prompts")

    def draft(self, items):
        self.called("draft", [(item.anchor, item.n) for item in items])
        self.interruptible()
        for item in items:
            item.sequence.usable()
            check([item.anchor])
            if not 1 <= item.n <= self.n_draft:
                raise ArgumentError("n")
            if not item.sequence.committed:
                raise StateError("nothing is committed")
            if len(item.sequence.committed) + item.n > self.n_ctx:
                raise ContextFull("draft")
        for item in items:
            chain = [item.anchor]
            for _ in range(item.n):
                guess = -1 if chain[-1] < 0 else self.guess((*item.sequence.committed, *chain))
                chain.append(-1 if guess is None else guess)  # The head's logits are not finite there.
            item.sequence.chain = chain

    def verify(self, items):
        widths = [item.n if item.tokens is None else len(item.tokens) for item in items]
        self.called("verify", widths)
        self.interruptible()
        if not items or sum(widths) > MAX_ROWS or len({id(item.sequence) for item in items}) < len(items):
            raise ArgumentError("items")
        histories = [item.sequence.histories(item, width) for item, width in zip(items, widths, strict=True)]
        for item, rows in zip(items, histories, strict=True):
            item.sequence.rows = rows
        return [self.choices(item.sequence, rows) for item, rows in zip(items, histories, strict=True)]

    def verified(self, items):
        results = self.verify(items)
        return [self.result(item.sequence, found) for item, found in zip(items, results, strict=True)]

    def result(self, sequence, found):
        if isinstance(found, Exception):
            return found
        return Verified([history[-1] for history in sequence.rows], found)

    def begin(self, items):
        assert self.ahead
        if not all(item.tokens is None and item.anchor == CHOSEN for item in items):
            return self.start(items)
        drafts, sequences = [item.n - 1 for item in items], self.begun[0][0] if self.begun else []
        if any(drafts) or any(len(sequence.rows or ()) > 1 for sequence in sequences):
            return self.ask(drafts)
        return self.follow()

    def start(self, items):
        self.begun = []
        self.begun.append(([item.sequence for item in items], self.verified(items)))

    @property
    def under_way(self):
        return len(self.begun) + bool(self.following)

    def follow(self):
        self.called("verify", [1] * len(self.begun[0][0] if self.begun else ()))
        self.interruptible()
        if len(self.begun) != 1:
            raise StateError("no step, or two")
        sequences, results = self.begun[0]
        if any(sequence not in self.open or len(sequence.rows or ()) != 1 for sequence in sequences):
            raise StateError("closed, or not one row")
        if any(len(sequence.rows[0]) + 1 > self.n_ctx for sequence in sequences):
            raise ContextFull("follow")
        found = []
        for sequence, result in zip(sequences, results, strict=True):
            sequence.committed, failed = list(sequence.rows[0]), isinstance(result, Exception)
            sequence.rows = [(*sequence.committed, 0 if failed else result.choices[0])]
            found.append(result if failed else self.result(sequence, self.choices(sequence, sequence.rows)))
        self.begun.append((sequences, found))

    def ask(self, drafts):
        self.called("ask", list(drafts))
        self.interruptible()
        if len(self.begun) != 1 or self.following:
            raise StateError("no step, or two")
        if len(drafts) != len(self.begun[0][0]) or not all(0 <= n <= self.n_draft for n in drafts):
            raise ArgumentError("drafts")
        self.following = list(drafts)

    def wait(self):
        self.called("wait")
        if not self.begun:
            raise StateError("nothing was begun")
        sequences, results = self.begun.pop(0)
        drafts, self.following = self.following, None
        if drafts:
            self.go_on(sequences, results, drafts)
        return results

    def go_on(self, sequences, results, drafts):
        """Begins the round that follows, through the calls that its caller would make."""
        if self.cancels or any(isinstance(result, Exception) for result in results):
            return
        todo = []
        for sequence, (tokens, choices), n in zip(sequences, results, drafts, strict=True):
            if sequence not in self.open or len(sequence.rows or ()) != len(tokens) or min(tokens) < 0:
                return
            path, anchor = sequence.accept(tokens, sequence.parents, choices)
            if len(sequence.committed) + len(path) + n + 1 > self.n_ctx:
                return
            todo.append((sequence, path, anchor, n))
        for sequence, path, _, _ in todo:
            sequence.commit(path)
        if any(n for *_, n in todo):
            self.draft([Drafts(sequence, anchor, n) for sequence, _, anchor, n in todo if n])
        rows = [Rows(sequence, n=n + 1) if n else Rows(sequence, [anchor]) for sequence, _, anchor, n in todo]
        self.begun.append((sequences, self.verified(rows)))

    def choices(self, sequence, rows):
        found = [self.choose(history) for history in rows]
        if None in found:  # The target's logits are not finite there.
            sequence.failed = 1
            return NumericError("logits are not finite")
        return found


class FakeSequence:
    """This is one timeline of a FakeEngine."""

    def __init__(self, engine):
        self.engine = engine
        self.committed, self.failed = [], 0
        self.rows = None  # These are the histories of the last verify.
        self.chain = None  # This is the last draft: [anchor, *drafts].

    def usable(self):
        if self.failed or self not in self.engine.open:
            raise StateError("failed or closed")

    @property
    def info(self):
        self.engine.called("info")
        return SequenceInfo(len(self.committed), len(self.rows or ()), 1, self.failed)

    def close(self):
        if self in self.engine.open:
            self.engine.open.remove(self)

    def reset(self):
        self.engine.called("reset")
        self.committed, self.rows, self.chain, self.failed = [], None, None, 0

    def set_sampling(self, sampling):
        self.engine.called("set_sampling", sampling)

    def prefill(self, tokens, last=True):
        return self.engine.prefill([Prompt(self, tokens, last)])[0]

    def drafted(self, n):
        self.engine.called("drafted", n)
        if self.chain is None or n != len(self.chain) - 1:
            raise ArgumentError("n")
        if -1 in self.chain:
            raise NumericError("the logits of a draft are not finite")
        return self.chain[1:]

    def lookup(self, anchor, most):
        """Finds the newest place where the last four tokens stood before; the core takes the longest match."""
        self.engine.called("lookup", most)
        text = [*self.committed, anchor]
        for end in range(len(text) - 1, 3, -1):
            if text[end - 4 : end] == text[-4:]:
                for at in range(end, end + most):
                    text.append(text[at])
                return text[len(text) - most :] if most else [], 4
        return [], 0

    def lists(self, depth, k, form=Form.CHAIN):
        """Returns the chain's tokens and, as next best ones, those that follow them by number."""
        self.engine.called("lists", (depth, k))
        made = Lists(default(), depth, k, form)
        drafted = self.chain[1 : depth + 1]
        made.ids[0 : depth * k] = [(token + rank) % 256 for token in drafted for rank in range(k)]
        made.scores[0 : depth * k] = [-0.5 * rank for _ in range(depth) for rank in range(k)]
        return made

    def tree(self, anchor, lists, budget):
        return default().tree(anchor, lists, budget)

    def histories(self, item, n):
        """Returns what each row of a verify follows, itself included."""
        self.usable()
        tokens, parents = item.tokens, item.parents
        if tokens is None:
            if self.chain is None or n > len(self.chain):
                raise StateError("no draft")
            tokens, parents = self.chain[:n], None
        else:
            check(tokens)
        parents = [row - 1 for row in range(n)] if parents is None else list(parents)
        if not 1 <= n <= self.engine.n_rows or len(parents) != n or parents[0] != -1:
            raise ArgumentError("rows")
        histories, self.parents = [], parents
        for row, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if row and not 0 <= parent < row:
                raise ArgumentError("parents")
            above = histories[parent] if row else tuple(self.committed)
            histories.append((*above, token))
        if max(map(len, histories)) > self.engine.n_ctx:
            raise ContextFull("verify")
        return histories

    def accept(self, tokens, parents, choices):
        self.engine.called("accept")
        parents = [row - 1 for row in range(len(tokens))] if parents is None else list(parents)
        path = [0]
        while True:
            children = [row for row in range(1, len(tokens)) if parents[row] == path[-1]]
            right = [row for row in children if tokens[row] == choices[path[-1]]]
            if not right:
                return path, choices[path[-1]]
            path.append(right[0])

    def commit(self, path):
        self.engine.called("commit", tuple(path))
        if self.rows is None:
            raise StateError("commit before verify")
        for row, length in zip(path, range(1, len(path) + 1), strict=True):
            if len(self.rows[row]) != len(self.committed) + length:
                raise ArgumentError("path")
        self.committed, self.rows, self.chain = list(self.rows[path[-1]]), None, None


def check(tokens):
    if not all(0 <= token < N_VOCAB for token in tokens):
        raise ArgumentError("token")


TOKENIZER = tokenizer()
PROMPT = tuple(b"a prompt")


class Text:
    """This is the sequence that was opened last, as draft sources see it."""

    def __init__(self, core):
        self.core = core

    def __getattr__(self, name):
        return getattr(self.core.last, name)


def nextn(core, gamma, budget=None):
    """Makes a source of the fake head's chains, or of trees of them."""
    return Fixed(Drafter(Text(core), By.NEXTN, 8, max(core.n_top, 1)), gamma, budget)


def generation(core, request, source=None, cancelled=lambda: False):
    """Makes a generation of a request on a new sequence of the fake engine."""
    return Generation(core.sequence(), core.info, TOKENIZER, request, source, cancelled, core.clock)


def drive(core, generations):
    """Returns the events of each generation, driven together."""
    loop, events = Loop(core, core.clock), {one: [] for one in generations}
    for one in generations:
        loop.add(one)
    for turn in itertools.count():
        assert turn < 100_000, "it does not end"
        for one, event in loop.step():
            events[one].append(event)
        if not loop.running:
            break
    for one in generations:
        well_formed(events[one])
        assert one.sequence not in core.open
    return list(events.values())


def well_formed(events):
    """Checks that one terminal event is the last, and that the text and tokens of a Finished are those that
    were emitted."""
    terminal = [event for event in events if isinstance(event, Finished | Failed)]
    assert terminal == events[-1:], "exactly one terminal event, and it is the last"
    if isinstance(events[-1], Finished):
        emitted = [event for event in events if isinstance(event, Tokens)]
        assert events[-1].text == "".join(event.text for event in emitted)
        assert events[-1].tokens == tuple(token for event in emitted for token in event.ids)


def run(core, source=None, cancelled=lambda: False, prompt=PROMPT, max_tokens=20, **asked):
    """Returns the events of a generation; `asked` is more of a Request."""
    one = generation(core, Request(prompt, max_tokens, **asked), source, cancelled)
    return drive(core, [one])[0]


def finish(core, **asked):
    """Returns the Finished of a generation."""
    last = run(core, **asked)[-1]
    assert isinstance(last, Finished), last
    return last


def expected(choose, count, prompt=PROMPT):
    """Returns what plain decoding emits."""
    history = tuple(prompt)
    for _ in range(count):
        history = (*history, choose(history))
    return history[len(prompt) :]
