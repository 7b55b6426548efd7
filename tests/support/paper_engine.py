"""Is an engine that counts pages, sequences and checkpoints as the core does and computes nothing: a server's
scheduler and cache run over it, with prompts of any length.

A page is taken where a sequence first writes it, and shared by who starts from it; one that has begun only is
copied. What leaves for host memory frees what it alone holds. A checkpoint needs a slot on the device, and its pages
there.
"""

from __future__ import annotations

from types import SimpleNamespace

from luce.decode.generation import Generation
from luce.errors import OutOfMemory
from luce.native import Verified
from luce.native.structs import PAGE

SIZE = 64  # A checkpoint in host memory has so many bytes for each of its tokens.


class PaperEngine:
    """Stands in for decode.engine.Engine, and for its native one. `n_pages` None is the core's default."""

    def __init__(self, tokenizer, n_ctx, n_sequences, n_checkpoints, n_chunk, n_pages=None, n_cut=64):
        self.tokenizer, self.native, self.ahead, self.experts = tokenizer, self, False, None
        full = n_ctx // PAGE
        self.sizes = {"n_ctx": n_ctx, "n_sequences": n_sequences, "n_checkpoints": n_checkpoints, "n_rows": 8,
                      "n_chunk": n_chunk, "n_cut": n_cut, "whole_images": False,
                      "n_pages": n_pages or full * (n_sequences + 1)}  # fmt: skip
        self.lines = []  # All of these hold pages.

    @property
    def info(self):
        lines = list(self.lines)  # The cache closes some in a thread of its own.
        taken = len(set().union(*(line.pages for line in lines)))
        return SimpleNamespace(**self.sizes, pages_free=self.sizes["n_pages"] - taken)

    def generation(self, request, cancelled, prefixes):
        sequences = sum(not line.is_checkpoint for line in self.lines)
        if sequences == self.info.n_sequences:
            raise OutOfMemory("all sequences are open")
        line = PaperLine(self)
        return Generation(line, self.info, self.tokenizer, request, None, cancelled, prefixes=prefixes)

    def cancel(self):
        pass

    def prefill(self, items):
        return [item.sequence.prefill(item.tokens, item.last) for item in items]

    def finish_prompts(self):
        pass

    def verified(self, items):
        for item in items:  # The core has a position's page before it verifies there.
            item.sequence.take(len(item.tokens))
        return [Verified(item.tokens, [33] * len(item.tokens)) for item in items]

    def take(self, n):
        if n > self.info.pages_free:
            raise OutOfMemory("pages")
        return [object() for _ in range(n)]

    def take_slot(self):
        if sum(line.is_checkpoint and line.on_device for line in self.lines) == self.info.n_checkpoints:
            raise OutOfMemory("checkpoints")


class PaperLine:
    """Is a sequence, or a checkpoint of it."""

    def __init__(self, engine, of=None):
        self.engine, self.is_checkpoint, self.is_open, self.on_device = engine, of is not None, True, True
        self.pages, self.n_past = (list(of.pages), of.n_past) if of else ([], 0)
        engine.lines.append(self)

    @property
    def info(self):
        size = SIZE * self.n_past
        return SimpleNamespace(n_past=self.n_past, n_pages=len(self.pages), size_bytes=size, failed=0)

    def close(self):
        self.engine.lines.remove(self)
        self.is_open, self.pages = False, []

    def reset(self):
        self.pages, self.n_past = [], 0

    def set_sampling(self, sampling):
        pass

    def resume(self, checkpoint):
        shared = checkpoint.pages[: checkpoint.n_past // PAGE] if checkpoint.on_device else []
        own = self.engine.take(-(-checkpoint.n_past // PAGE) - len(shared))
        self.pages, self.n_past = shared + own, checkpoint.n_past

    def prefill(self, tokens, last=True):
        """A part of a prompt, which the core takes up to n_chunk, and which begins where it may be cut."""
        assert len(tokens) <= self.engine.info.n_chunk and self.n_past % min(self.engine.info.n_cut, PAGE) == 0
        self.add(len(tokens))
        return 33 if last else None

    def add(self, n):
        self.take(n)
        self.n_past += n

    def take(self, n):
        assert self.n_past + n <= self.engine.info.n_ctx
        self.pages += self.engine.take(max(-(-(self.n_past + n) // PAGE) - len(self.pages), 0))

    def checkpoint(self):
        assert self.n_past % min(self.engine.info.n_cut, PAGE) == 0
        self.engine.take_slot()
        part = self.engine.take(1 if self.n_past % PAGE else 0)
        made = PaperLine(self.engine, self)
        made.pages[self.n_past // PAGE :] = part
        return made

    def to_host(self):
        self.on_device, self.pages = False, []

    def to_device(self):
        self.engine.take_slot()
        self.pages, self.on_device = self.engine.take(-(-self.n_past // PAGE)), True

    # ---- rounds, each of one row whose choice is always the same

    def accept(self, rows, parents, choices):
        return [0], choices[0]

    def commit(self, path):
        self.add(len(path))
