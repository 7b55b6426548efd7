"""Makes a DFlash drafter for an oracle model: what it costs is real, and every draft is known.

A block's row i has to name the i-th token after the anchor, from the anchor alone. The drafter's own
embedding of a token holds, side by side, codes of the tokens that are to be drafted after it, one slice of
head_dim values for each depth. One KV head of the first layers is there for each depth: its value is that
depth's slice, its key is the same for every anchor and zero for all else, and its query, the same for every
mask, is turned so that RoPE makes the score high exactly at that distance: score(i) = sum of a_d cos(theta_d
(i - depth)), with the amplitudes a_d that tell whole numbers from 0 to 15 apart best. So row i gets the
anchor's slice i, and the drafter's own head, whose rows are the tokens' codes, names the token. Everything
else is at noise level or zero, and costs what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import gguf
import numpy as np

from luce import native as _native
from luce.bench.oracle_blocks import QType, noise_blocks, random_words
from luce.bench.oracle_model import FILE_TYPE, NOISE, Rule
from luce.bench.oracle_tokenizer import add_tokenizer
from luce.convert import hf_dflash
from luce.convert.gguf_output import Planned, write
from luce.convert.hf_dflash import DFlash
from luce.convert.qwen35_layout import Config

ACCEPT = 0.9033  # With it, a round of a block of 16 gives 8.31 tokens, the new anchor among them.
FLAGS = 32  # So many values of slice 0 say that a row is an anchor, and as many after them that it is a mask.
MARGIN = 24.0  # By so much a matching depth's score is above 0, and the scores of other depths are below.
ASIDE = -2  # No query uses this frequency. The keys of masks lie there, so that they are not noise alone.
ROWS = 4096  # So many rows of a table are made at once.


def drafter_of(c: Config) -> DFlash:
    """Returns the drafter's shape for a target. That for the 27b has 5 layers, 32/8 heads of 128, and blocks
    of 16. Its FFN is as wide as the target's, and three times the embedding where that has experts."""
    dim = 128 if c.n_embd >= 2048 else 64
    heads = min(32, c.n_embd // dim)
    kv_heads, n_layer = min(8, heads // 2), 5
    block = min(16, c.n_embd // dim, kv_heads * n_layer + 1)
    n_ff = 3 * c.n_embd if c.n_expert else c.n_ff
    taps = tuple(sorted({round(1 + i * (c.n_layer - 4) / 4) for i in range(5)}))
    return DFlash(
        n_layer=n_layer, n_embd=c.n_embd, n_ff=n_ff, n_head=heads, n_head_kv=kv_heads, head_dim=dim,
        rope_dim=dim, n_ctx=c.n_ctx, n_vocab=c.n_vocab, n_vocab_draft=c.n_vocab, rope_base=1e7, eps=1e-6,
        block_size=block, target_layer_ids=taps, mask_token_id=c.n_vocab - 2, sliding=(False,) * n_layer,
        window=None, causal=(False,) * n_layer, softcap=None, embedding_scale=None, yarn=None,
    )  # fmt: skip


@dataclass(frozen=True)
class BlockRule:
    """Knows what the drafter drafts. At each depth it is the right token for a share `accept` of the
    anchors, which the rule's seed chooses. For the other anchors it is the token after the right one."""

    rule: Rule
    block_size: int
    accept: float = ACCEPT

    @cached_property
    def drafts(self) -> np.ndarray:
        """Returns the draft of each depth from 1 on after each token, as (block_size, n_vocab). Row 0 is not
        used."""
        n, after = self.rule.n_cycle, np.arange(self.rule.n_vocab)
        made = np.zeros((self.block_size, self.rule.n_vocab), np.int64)
        for depth in range(1, self.block_size):
            after = self.rule.perm[after]
            order = np.argsort(random_words(n, self.rule.seed, 5, depth), kind="stable")
            wrong = order[: round((1 - self.accept) * n)]
            made[depth] = after
            made[depth, wrong] = self.rule.perm[after[wrong]]
        return made

    def accepted(self, anchor: int, most: int) -> int:
        """Returns how many of the first `most` drafts after an anchor are right, up to the first wrong one.
        """
        token = anchor
        for depth in range(1, most + 1):
            token = int(self.rule.perm[token])
            if self.drafts[depth, anchor] != token:
                return depth - 1
        return most


def amplitudes(c: DFlash) -> tuple[np.ndarray, float]:
    """Returns an amplitude a of each RoPE frequency (D/2,), such that the sum of a cos(theta m) is +1 or more
    at m = 0 and -1 or less at the other distances of a block. Returns the worst of both beside it."""
    theta = c.rope_base ** (-np.arange(c.head_dim // 2) / (c.head_dim // 2))
    cosines = np.cos(np.outer(np.arange(c.block_size), theta))  # (distances, D/2)
    cosines[:, ASIDE] = 0
    wanted = np.where(np.arange(c.block_size) == 0, 1.0, -1.0)
    gram = cosines @ cosines.T + 0.01 * np.eye(c.block_size)
    a = cosines.T @ np.linalg.solve(gram, wanted)
    scores = cosines @ a
    a[-1] -= (scores[0] + scores[1:].max()) / 2  # The slowest one hardly turns, so it shifts all scores.
    gap = (scores[0] - scores[1:].max()) / 2
    return a / gap, float(gap)


@dataclass
class OracleDrafter:
    """These are the tensors, planned for gguf_output.write."""

    c: DFlash
    blocks: BlockRule

    @cached_property
    def codes(self) -> np.ndarray:
        """Returns (n_vocab, D) F32 of 16 levels and standard deviation 1."""
        n = self.c.n_vocab * self.c.head_dim
        nibbles = random_words(-(-n // 16), self.blocks.rule.seed, 6).view(np.uint8)
        levels = np.stack([nibbles & 15, nibbles >> 4], -1).reshape(-1)[:n].astype(np.float32)
        return ((levels - 7.5) / np.sqrt(255 / 12)).reshape(self.c.n_vocab, -1)

    def embedding(self) -> Iterator[np.ndarray]:
        c, dim = self.c, self.c.head_dim
        for first in range(0, c.n_vocab, ROWS):
            tokens = np.arange(first, min(first + ROWS, c.n_vocab))
            rows = np.zeros((len(tokens), c.n_embd), np.float32)
            rows[:, :FLAGS] = 1
            for depth in range(1, c.block_size):
                rows[:, depth * dim : (depth + 1) * dim] = self.codes[self.blocks.drafts[depth, tokens]]
            rows[tokens == c.mask_token_id] = 0
            rows[tokens == c.mask_token_id, FLAGS : 2 * FLAGS] = 1
            yield rows

    def head(self) -> Iterator[np.ndarray]:
        """Yields the rows of the head: a row is the token's code, in slice 1. Tokens after the cycle are
        never drafted."""
        c, dim = self.c, self.c.head_dim
        for first in range(0, c.n_vocab, ROWS):
            tokens = np.arange(first, min(first + ROWS, c.n_vocab))
            rows = np.zeros((len(tokens), c.n_embd), np.float32)
            rows[:, dim : 2 * dim] = np.where(
                tokens[:, None] < self.blocks.rule.n_cycle, self.codes[tokens], 0
            )
            yield rows

    def depth_of(self, layer: int, kv_head: int) -> int:
        """Returns the depth that a KV head is there for; 0 is none."""
        depth = layer * self.c.n_head_kv + kv_head + 1
        return depth if depth < self.c.block_size else 0

    def attention(self, layer: int, local: str) -> np.ndarray:
        """Returns attn_q, attn_k, attn_v or attn_output of a layer that has depths to copy."""
        c, dim, group = self.c, self.c.head_dim, self.c.n_head // self.c.n_head_kv
        theta = c.rope_base ** (-np.arange(dim // 2) / (dim // 2))
        a, _ = amplitudes(c)
        out = np.zeros(self.shapes[f"blk.{layer}.{local}.weight"], np.float32)
        for kv_head in range(c.n_head_kv):
            depth, kv, head = self.depth_of(layer, kv_head), kv_head * dim, kv_head * group * dim
            if not depth:
                continue
            if local == "attn_q":
                turned = np.concatenate([a * np.cos(theta * depth), -a * np.sin(theta * depth)])
                out[head : head + dim, FLAGS : 2 * FLAGS] = turned[:, None]
            elif local == "attn_k":
                out[kv : kv + dim // 2, :FLAGS] = 1
                out[kv + dim // 2 + ASIDE] = 0
                out[kv + dim // 2 + ASIDE, FLAGS : 2 * FLAGS] = 1
            elif local == "attn_v":
                out[kv + np.arange(dim), depth * dim + np.arange(dim)] = 1
            else:
                out[dim + np.arange(dim), head + np.arange(dim)] = 1
        return out

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return hf_dflash.tensor_shapes(self.c, {"token_embd.weight", "output.weight"})

    def norm(self, name: str) -> np.ndarray:
        c = self.c
        values = np.ones(self.shapes[name], np.float32)
        if name == "enc.output_norm.weight":
            values[:] = 0  # Keys of the context score 0, and its values are nothing.
        elif name == "output_norm.weight":
            values[:] = 0
            values[c.head_dim : 2 * c.head_dim] = 0.2
        elif name.endswith("attn_q_norm.weight"):
            a, _ = amplitudes(c)
            # An anchor's key has D/2 - 1 ones. q and k are divided by their RMS, and scores by sqrt(D).
            q, k = np.sum(a**2) / c.head_dim, (c.head_dim // 2 - 1) / c.head_dim
            values[:] = MARGIN * np.sqrt(q * k * c.head_dim)
        return values

    def planned(self) -> Iterator[tuple[Planned, str]]:
        """Returns each tensor and its type."""
        for index, (name, shape) in enumerate(self.shapes.items()):
            local = name.split(".", 2)[-1].removesuffix(".weight")
            layer = int(name.split(".")[1]) if name.startswith("blk.") else self.c.n_layer
            if "norm" in name:
                yield _rows(name, shape, partial(_once, self.norm(name)[None])), "F32"
            elif name == "token_embd.weight":
                yield _rows(name, shape, self.embedding), "Q4_K"
            elif name == "output.weight":
                yield _rows(name, shape, self.head), "Q6_K"
            elif local.startswith("attn") and layer < self.c.n_layer and self.depth_of(layer, 0):
                yield _rows(name, shape, partial(_once, self.attention(layer, local))), "Q4_K"
            else:
                std = NOISE if local in ("attn_output", "ffn_down") else shape[1] ** -0.5
                n_blocks = shape[0] * shape[1] // 256
                blocks = noise_blocks(QType.Q4_K, n_blocks, std, self.blocks.rule.seed, 7, index)
                yield Planned(name, shape, (), lambda: iter(()), blocks.reshape(shape[0], -1), "Q4_K"), "Q4_K"


def _once(matrix: np.ndarray) -> Iterator[np.ndarray]:
    yield matrix


def _rows(name: str, shape: tuple[int, ...], rows: Callable[[], Iterator[np.ndarray]]) -> Planned:
    return Planned(name, shape, (), rows)


def make_drafter(
    path: Path, config: Config, rule: Rule, accept: float = ACCEPT, threads: int = 0
) -> BlockRule:
    """Writes the drafter of an oracle model's file, and returns what it drafts. `accept` is that of each
    depth."""
    c = drafter_of(config)
    drafter = OracleDrafter(c, BlockRule(rule, c.block_size, accept))
    writer = gguf.GGUFWriter(None, hf_dflash.ARCH)
    hf_dflash.add_keys(writer, c, f"luce oracle drafter {path.stem}", FILE_TYPE, m_rope=True)
    writer.add_float64("oracle.accept", accept)
    add_tokenizer(writer, c.n_vocab, filler="Ġw")
    writer.add_mask_token_id(c.mask_token_id or 0)
    plan = list(drafter.planned())
    types = {planned.name: kind for planned, kind in plan}
    write(path, writer, [planned for planned, _ in plan], types, _native.default(), threads=threads)
    return drafter.blocks
