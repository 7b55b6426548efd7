"""Writes a Qwen3.5 GGUF of any real shape whose greedy continuation is known.

The blocks are random quantised weights, so a step costs what the real model's costs, but their
output projections are at noise level: the residual stream keeps the embedding of the newest token.
Head row perm[t] equals embedding row t, so the token after t is perm[t], by a margin of tens of
standard deviations. perm is one cycle over all tokens but the three control tokens at the end of
the vocabulary, which nothing predicts and which are followed by what follows token 0.
The NextN head passes the newest token's `nextn.embed_tokens` row on: a copy of the embedding, with a
share of 1 - accept of its rows exchanged; drafts after those tokens are wrong, all others right. It
has a head of its own, a copy of the target's, of the same type or as Q4_K: the values are the same.

Where acceptance differs by depth, the head has to know the depth of a draft. The first 64 values of a row are
8 slots for it. In the target's embedding slot 0 is set, so the target's hidden rows begin the count, and the
head's input turns the slots of the hidden row by one place: at depth i slot i (modulo 8) is set. A row of the
head's own output has large weights in the slots of those depths at which its token is easy. Of all tokens only
the easy ones can be drafted, so a draft at a depth is right if the right token is easy there, which is so of
a share of all tokens that is the depth's acceptance. No row is exchanged then.

In a model with a coverage, texts stay in a cycle of their own: of the first tokens of the vocabulary, which
the head may draft among, and of so many more that the first ones are that share of it.

A mixture's router is random, and tells rows of different tokens apart: its experts are chosen evenly, and
a step of several rows reads more of them than one of trained experts, which neighbours share.

Types: Q4_K, but Q5_K for DeltaNet's attn_qkv, Q6_K for the head and every second block's ffn_down ("mixed");
or Q6_K or Q8_0 for all of these. Norms, conv, gate biases and routers are F32. The same seed gives the same
bytes, whatever the number of threads.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import gguf
import numpy as np

from luce.bench.acceptance import Acceptance, acceptance
from luce.bench.oracle_blocks import (
    QType,
    noise_blocks,
    pass_through_blocks,
    q4_to_q6,
    random_words,
    set_first,
    silent,
)
from luce.bench.oracle_tokenizer import CONTROL, add_tokenizer
from luce.convert.qwen35_layout import Config, add_keys, tensor_shapes
from luce.planning.plan import part_of

CHUNK = 8 << 20  # So many bytes of a tensor are made at once. A seed's weights depend on it.
NOISE = 1e-4  # The output projections have this standard deviation.
SLOTS, SLOT = 8, 8  # So many slots say how deep a draft is, each of so many values.
FILE_TYPE = 15  # llama.cpp calls it "mostly Q4_K, medium".
# The matrices of a file are of one of these; the number is general.file_type.
TYPES = {"mixed": FILE_TYPE, "Q6_K": 18, "Q8_0": 7}

_LARGE = Config(
    n_head=16, n_head_kv=4, head_dim=256, rope_dim=64, n_k_head=16, n_v_head=32, state_size=128,
    n_vocab=248320, n_ctx=262144, n_nextn=1,
)  # fmt: skip
_MINI = Config(
    n_layer=4, n_embd=256, n_ff=512, n_head=4, n_head_kv=2, n_v_head=4, state_size=64, n_vocab=2048,
    n_ctx=8192, n_nextn=1,
)  # fmt: skip
SHAPES = {
    "27b": replace(_LARGE, n_layer=64, n_embd=5120, n_ff=17408, n_head=24, n_v_head=48),
    "9b": replace(_LARGE, n_layer=32, n_embd=4096, n_ff=12288),
    "0.8b": replace(_LARGE, n_layer=24, n_embd=1024, n_ff=3584, n_head=8, n_head_kv=2, n_v_head=16),
    "35b-a3b": replace(_LARGE, n_layer=40, n_embd=2048, n_head_kv=2, n_expert=256, n_expert_used=8,
                       n_ff_expert=512, n_ff_shared=512),
    "3b-a0.6b": replace(_LARGE, n_layer=24, n_embd=1024, n_head=8, n_head_kv=2, n_v_head=16, n_vocab=65536,
                        # This shape takes 2 GB, so a CPU can run it.
                        n_expert=64, n_expert_used=8, n_ff_expert=512, n_ff_shared=512),
    "mini": _MINI,
    "mini-moe": replace(_MINI, n_expert=16, n_expert_used=4, n_ff_expert=256, n_ff_shared=256),
}  # fmt: skip


# ---- what the model says


@dataclass(frozen=True)
class Rule:
    """These are the known answers of an oracle file: its metadata keys are oracle.seed, oracle.accept, an array
    where it is by depth, and oracle.coverage, which is 0 where tokens of the part and others are mixed evenly."""

    n_vocab: int
    seed: int = 0
    accept: float | Acceptance = 0.8
    coverage: float = 0.0

    @property
    def n_cycle(self) -> int:
        return self.n_vocab - len(CONTROL)

    @property
    def n_begin(self) -> int:
        """Returns how many first tokens a prompt may end with."""
        return part_of(self.n_vocab) if self.coverage else self.n_cycle

    @cached_property
    def perm(self) -> np.ndarray:
        """Returns (n_vocab,) the token that follows each; the first n_cycle entries are one cycle, with a
        coverage two."""
        order = np.argsort(random_words(self.n_cycle, self.seed, 1), kind="stable")
        perm = np.empty(self.n_vocab, np.int64)
        rest = order >= (round(self.n_begin / self.coverage) if self.coverage else self.n_cycle)
        for cycle in (order[~rest], order[rest]):
            perm[cycle] = np.roll(cycle, -1)
        perm[self.n_cycle :] = perm[0]
        return perm

    @cached_property
    def swap(self) -> np.ndarray:
        """Returns (n_vocab,) the embedding row that `nextn.embed_tokens` holds for each token."""
        constant = acceptance(self.accept).constant
        n = 0 if constant is None else round((1 - constant) * self.n_cycle)
        chosen = np.argsort(random_words(self.n_cycle, self.seed, 2), kind="stable")[:n]
        swap = np.arange(self.n_vocab)
        swap[chosen] = np.roll(chosen, 1)
        return swap

    def successor(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the target's greedy choice after each token, whatever came before it."""
        return self.perm[tokens]

    @property
    def by_depth(self) -> bool:
        """Says whether acceptance differs by depth, so that the head has slots."""
        return acceptance(self.accept).constant is None

    @cached_property
    def _order(self) -> np.ndarray:
        """Returns (n_cycle,) each token's place in an order in which the first ones are the easy ones."""
        place = np.empty(self.n_cycle, np.int64)
        place[np.argsort(random_words(self.n_cycle, self.seed, 2), kind="stable")] = np.arange(self.n_cycle)
        return place

    def easy(self, depth: int) -> np.ndarray:
        """Returns bool (n_cycle,): whether each token is drafted at a depth, from 1 on, where it is right."""
        return self._order < round(acceptance(self.accept).at(depth) * self.n_cycle)

    def right(self, depth: int) -> np.ndarray:
        """Returns bool (n_vocab,): whether the draft at a depth is right after each token, where all drafts
        before it were."""
        return self.easy(depth)[self.perm] if self.by_depth else self.perm[self.swap] == self.perm

    def draft(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the NextN head's choice after each token, at any depth. By depth wrong ones are not known."""
        if self.by_depth:
            raise ValueError("the acceptance is by depth: right() says where drafts are right")
        return self.perm[self.swap[tokens]]

    def continuation(self, last: int, n: int) -> list[int]:
        """Returns the n tokens after `last`."""
        out = [last]
        while len(out) <= n:
            out.append(int(self.perm[out[-1]]))
        return out[1:]


def wrong_tokens(found: Sequence[int], expected: Sequence[int]) -> int:
    """Counts tokens that are not the expected ones, missing or too many."""
    differ = sum(a != b for a, b in zip(found, expected, strict=False))
    return differ + abs(len(expected) - len(found))


# ---- the file


@dataclass
class Tensor:
    name: str
    index: int
    shape: tuple[int, ...]  # It is in numpy's order.
    kind: QType
    offset: int = 0  # It counts the bytes before the tensor in the file.

    @property
    def n_blocks(self) -> int:
        """Counts the blocks of its type, which may be single numbers."""
        return int(np.prod(self.shape)) // gguf.GGML_QUANT_SIZES[self.kind][0]

    @property
    def block_bytes(self) -> int:
        return gguf.GGML_QUANT_SIZES[self.kind][1]

    @property
    def n_bytes(self) -> int:
        return self.n_blocks * self.block_bytes


def add_acceptance(w: gguf.GGUFWriter, accept: Acceptance) -> None:
    """Adds oracle.accept, a number or an array by depth, and oracle.class where it has one."""
    if accept.constant is not None:
        w.add_float64("oracle.accept", accept.constant)
    else:
        kinds = gguf.GGUFValueType
        w.add_key_value("oracle.accept", list(accept.depths), kinds.ARRAY, kinds.FLOAT64)
    if accept.name:
        w.add_string("oracle.class", accept.name)


def type_of(c: Config, name: str, kind: str = "mixed", draft_head: str | None = None) -> QType:
    if not name.endswith(".weight") or any(part in name for part in ("norm", "conv1d", "ffn_gate_inp")):
        return QType.F32
    if draft_head and name.endswith(DRAFT_HEAD):
        return gguf.GGMLQuantizationType[draft_head]
    if kind != "mixed":
        return gguf.GGMLQuantizationType[kind]
    if is_head(name):
        return QType.Q6_K
    if name.endswith("attn_qkv.weight"):
        return QType.Q5_K
    if ".ffn_down" in name and int(name.split(".")[1]) % 2 == 1:
        return QType.Q6_K
    return QType.Q4_K


DRAFT_HEAD = "nextn.shared_head_head.weight"


def is_head(name: str) -> bool:
    return name == "output.weight" or name.endswith(DRAFT_HEAD)


def tensors_of(c: Config, kind: str = "mixed", draft_head: str | None = None) -> list[Tensor]:
    shapes = tensor_shapes(c)
    for name in ("embed_tokens", "shared_head_head"):
        shapes[f"blk.{c.n_layer}.nextn.{name}.weight"] = (c.n_vocab, c.n_embd)
    return [
        Tensor(name, i, shape, type_of(c, name, kind, draft_head))
        for i, (name, shape) in enumerate(shapes.items())
    ]


@dataclass
class Oracle:
    """This is one file being written. Every method that makes bytes depends on the seed alone."""

    config: Config
    rule: Rule
    kind: str = "mixed"  # It is one of TYPES.
    draft_head: str | None = None  # The NextN head's own output has this type, or None the target's.
    marks: tuple[str, ...] = ()  # Its vocabulary has these control tokens besides.
    template: str = ""  # of chats
    fd: int = -1
    tensors: list[Tensor] = field(default_factory=list)

    def layout(self) -> list[Tensor]:
        """Returns the file's tensors, of which the first is the embedding."""
        return tensors_of(self.config, self.kind, self.draft_head)

    def begin(self, path: Path, name: str) -> gguf.GGUFWriter:
        """Returns a writer that has the keys of the architecture."""
        w = gguf.GGUFWriter(path, self.config.arch)
        add_keys(w, self.config, f"luce oracle {name}", TYPES[self.kind])
        return w

    def f32(self, t: Tensor) -> np.ndarray:
        """Returns a small tensor: norms are 1, and conv taps, decays and biases lie in the range of trained
        models. A router gives logits of standard deviation 1."""
        low, high = 1.0, 1.0
        if t.name.endswith("ssm_a"):
            low, high = -1.0, -0.05
        elif t.name.endswith("ssm_dt.bias"):
            low, high = -4.0, 1.0
        elif t.name.endswith("conv1d.weight"):
            low, high = -0.8, 0.8
        elif "ffn_gate_inp" in t.name:
            high = (3 / t.shape[-1]) ** 0.5
            low = -high
        unit = random_words(t.n_blocks, self.rule.seed, 3, t.index) * 2.0**-64
        return (low + (high - low) * unit).astype("<f4")

    def make(self, t: Tensor, first: int, n: int) -> np.ndarray:
        """Blocks first .. first + n of t, but of those that copy the embedding."""
        if t.kind == QType.F32:
            return self.f32(t)[first : first + n]
        if t.name.endswith("eh_proj.weight"):
            carried = SLOTS * SLOT if self.rule.by_depth else 0
            return pass_through_blocks(t.kind, first, n, self.config.n_embd, carried, SLOT)
        std = t.shape[-1] ** -0.5
        if t.name == "token_embd.weight":
            std = 1.0
        elif t.name.endswith(("attn_output.weight", "ssm_out.weight")) or ".ffn_down" in t.name:
            std = NOISE
        made = noise_blocks(t.kind, n, std, self.rule.seed, 4, t.index, first)
        if self.rule.by_depth and t.name == "token_embd.weight":
            rows = self.by_row(t, made)
            begins = np.zeros((len(rows), SLOTS), bool)
            begins[:, 0] = True
            # A twentieth of a hidden row's squares lies in the slot that is set.
            set_first(rows, t.kind, begins.repeat(SLOT, 1), (0.05 * self.config.n_embd / SLOT) ** 0.5)
        return made

    def by_row(self, t: Tensor, blocks: np.ndarray) -> np.ndarray:
        """Returns a view (rows, blocks of a row, bytes)."""
        return blocks.reshape(-1, t.shape[-1] // gguf.GGML_QUANT_SIZES[t.kind][0], t.block_bytes)

    def copy(self, t: Tensor, first: int, n: int) -> np.ndarray:
        """Blocks of a head or of nextn.embed_tokens: rows of the embedding, already in the file."""
        embedding = self.tensors[0]
        per_row = t.shape[-1] // gguf.GGML_QUANT_SIZES[t.kind][0]
        rows = np.arange(first // per_row, (first + n) // per_row)
        source = self.rule.swap
        if is_head(t.name):
            source = np.empty(t.shape[0], np.int64)
            source[self.rule.perm[: self.rule.n_cycle]] = np.arange(self.rule.n_cycle)
            source[self.rule.n_cycle :] = 0
        made = self.embedding_rows(source[rows]).reshape(n, embedding.block_bytes)
        # The head predicts so many of these rows; the others are the last ones, of control tokens.
        others = max(0, self.rule.n_cycle - int(rows[0])) * per_row
        counts = self.rule.by_depth and t.name.endswith(DRAFT_HEAD)
        if counts and others < n:  # They are what is drafted at a depth where no token is easy.
            made[others:] = noise_blocks(embedding.kind, n - others, 1.0, self.rule.seed, 8)
        if t.kind != embedding.kind:
            made = q4_to_q6(made)
        if is_head(t.name) and not counts:
            silent(made[others:], t.kind)
        if self.rule.by_depth:
            drafted = np.zeros((len(rows), SLOTS), bool)
            for depth in range(1, SLOTS + 1) if counts else ():
                drafted[:, depth % SLOTS] = np.append(self.rule.easy(depth), [True] * len(CONTROL))[rows]
            # A right token's score is about E. A set slot adds more to an easy one's, at the eighth draft too.
            set_first(self.by_row(t, made), t.kind, drafted.repeat(SLOT, 1), 2.7 * self.config.n_embd**0.5)
        return made

    def embedding_rows(self, rows: np.ndarray) -> np.ndarray:
        embedding = self.tensors[0]
        size = embedding.n_bytes // embedding.shape[0]
        return np.stack([
            np.frombuffer(os.pread(self.fd, size, embedding.offset + int(r) * size), np.uint8) for r in rows
        ])  # fmt: skip

    def copies(self, t: Tensor) -> bool:
        return is_head(t.name) or t.name.endswith("nextn.embed_tokens.weight")

    def chunks(self, t: Tensor) -> Iterator[tuple[Tensor, int, int]]:
        """Yields (tensor, first block, blocks), each of whole rows and about CHUNK bytes."""
        per_row = t.shape[-1] // gguf.GGML_QUANT_SIZES[t.kind][0]
        step = max(1, CHUNK // (per_row * t.block_bytes)) * per_row
        for first in range(0, t.n_blocks, step):
            yield t, first, min(step, t.n_blocks - first)

    def write_header(self, path: Path, name: str) -> None:
        w = self.begin(path, name)
        w.add_uint64("oracle.seed", self.rule.seed)
        add_acceptance(w, acceptance(self.rule.accept))
        if self.rule.coverage:
            w.add_float64("oracle.coverage", self.rule.coverage)
        add_tokenizer(w, self.rule.n_vocab, filler="Ġw", marks=self.marks)
        if self.template:
            w.add_chat_template(self.template)
        for t in self.tensors:
            w.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.n_bytes, raw_dtype=t.kind)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_ti_data_to_file()
        w.close()
        end = path.stat().st_size
        for t in self.tensors:
            t.offset = -(-end // 32) * 32
            end = t.offset + t.n_bytes
        os.truncate(path, -(-end // 32) * 32)

    def write(self, path: Path, name: str, progress: Callable[[int], None]) -> None:
        """Writes everything random first, then what copies the embedding, and then renames the file into
        place. `progress` gets the bytes that are written."""
        done = 0
        self.tensors = self.layout()
        partial = path.with_name(path.name + ".partial")
        try:
            self.write_header(partial, name)
            self.fd = os.open(partial, os.O_RDWR)
            embedding = self.tensors[0]
            with ThreadPoolExecutor(os.cpu_count() or 1, "luce-oracle") as pool:
                work = [job for t in self.tensors if not self.copies(t) for job in self.chunks(t)]
                for n in pool.map(lambda job: self._store(job, self.make), work):
                    done += n
                    progress(done)
                for control in range(self.rule.n_cycle, self.rule.n_vocab):
                    row = self.embedding_rows(np.array([0]))
                    os.pwrite(self.fd, row.tobytes(), embedding.offset + control * row.size)
                work = [job for t in self.tensors if self.copies(t) for job in self.chunks(t)]
                for n in pool.map(lambda job: self._store(job, self.copy), work):
                    done += n
                    progress(done)
            os.replace(partial, path)
        finally:
            if self.fd >= 0:
                os.close(self.fd)
            partial.unlink(missing_ok=True)

    def _store(self, job: tuple[Tensor, int, int], make: Callable[[Tensor, int, int], np.ndarray]) -> int:
        t, first, n = job
        data = np.ascontiguousarray(make(t, first, n)).data.cast("B")
        at = t.offset + first * t.block_bytes
        done = 0
        while done < len(data):
            done += os.pwrite(self.fd, data[done:], at + done)
        return len(data)


def make_oracle(
    path: Path,
    shape: str,
    seed: int = 0,
    accept: float | Acceptance = 0.8,
    progress: Callable[[int, int], None] = lambda done, total: None,
    kind: str = "mixed",
    coverage: float = 0.0,
    draft_head: str | None = None,
    marks: tuple[str, ...] = (),
    template: str = "",
) -> Rule:
    """Writes the file and returns its rule. progress: bytes that are written, of how many. kind: of TYPES.
    marks: control tokens besides."""
    config = SHAPES[shape]
    oracle = Oracle(config, Rule(config.n_vocab, seed, accept, coverage), kind, draft_head, marks, template)
    return write_oracle(oracle, path, shape, progress)


def write_oracle(oracle: Oracle, path: Path, shape: str, progress: Callable[[int, int], None]) -> Rule:
    """Writes the file and returns its rule. Raises OSError where the disk lacks room."""
    total = sum(t.n_bytes for t in oracle.layout())
    free = shutil.disk_usage(path.parent).free
    if total > free:
        raise OSError(f"{path}: needs {total / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
    oracle.write(path, shape, lambda done: progress(done, total))
    return oracle.rule
