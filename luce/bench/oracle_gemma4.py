"""Writes a Gemma 4 GGUF of a real shape whose greedy continuation is known, as oracle_model does of Qwen3.5.

What a layer adds to the stream is normed, so that it is the norms behind attention and FFN that are at noise level.
The output matrix is a tensor of its own, whose row perm[t] is the embedding's row t: published models have one matrix
for both, of which a step reads as much. The last norm's weights let the right token's logit be twice the cap before it
bends it; those of others have a standard deviation of a seventieth of that in the 31B. The tokenizer is byte-level, as
of other oracles: its words mean nothing.

An assistant (MTP, a file of its own) is silent in the same way. It lets the first values of the newest token's
embedding pass, and its head has those values of the target's embedding as rows: of the right next token, but for a
share of 1 - accept of all tokens, whose rows are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import gguf
import numpy as np

from luce.bench.oracle_blocks import QType, pass_through_blocks
from luce.bench.oracle_model import NOISE, TYPES, Oracle, Rule, Tensor, is_head, write_oracle
from luce.convert.gemma4_layout import Config, add_keys, rope_factors, tensor_shapes
from luce.convert.weight_types import fitting, is_matrix

_EVERY_6TH = (True,) * 5 + (False,)
_LARGE = Config(head_dim=512, head_dim_swa=256, v_is_k=True, window=1024, n_vocab=262144, n_ctx=262144, tied=False)
_MINI = Config(
    sliding=(True, True, False) * 2, window=64, n_embd=512, n_ff=512, n_vocab=2048, n_ctx=8192, v_is_k=True, tied=False
)
SHAPES = {
    "gemma4-31b": replace(_LARGE, sliding=_EVERY_6TH * 10, n_embd=5376, n_ff=21504, n_head=32, n_head_kv=4,
                          n_head_kv_swa=16),
    "gemma4-26b-a4b": replace(_LARGE, sliding=_EVERY_6TH * 5, n_embd=2816, n_ff=2112, n_head=16, n_head_kv=2,
                              n_head_kv_swa=8, n_expert=128, n_expert_used=8, n_ff_expert=704),
    "gemma4-mini": _MINI,
    "gemma4-mini-moe": replace(_MINI, n_ff=352, n_expert=16, n_expert_used=4, n_ff_expert=96),
}  # fmt: skip


def assistant_of(shape: str) -> Config:
    """Returns the hyperparameters of a shape's assistant."""
    c = SHAPES[shape]
    width, ff = (1024, 8192) if c.n_embd > 1024 else (256, 512)
    kinds = (True, True, True, False)
    return replace(
        c, sliding=kinds, tied=True, softcap=None, n_shared_kv=len(kinds), n_expert=0, n_expert_used=0, n_ff_expert=0,
        n_embd=width, n_ff=ff, n_embd_out=c.n_embd,
    )  # fmt: skip


@dataclass
class Gemma4Oracle(Oracle):
    """One file being written."""

    config: Config  # type: ignore[assignment]

    def layout(self) -> list[Tensor]:
        shapes = tensor_shapes(self.config).items()
        return [Tensor(name, i, shape, self.type_of(name, shape)) for i, (name, shape) in enumerate(shapes)]

    def type_of(self, name: str, shape: tuple[int, ...]) -> QType:
        if not is_matrix(name, shape):
            return QType.F32
        better = is_head(name) or (".ffn_down" in name and int(name.split(".")[1]) % 2 == 1)
        kind = ("Q6_K" if better else "Q4_K") if self.kind == "mixed" else self.kind
        return gguf.GGMLQuantizationType[fitting(kind, shape[-1])]

    def begin(self, path: Path, name: str) -> gguf.GGUFWriter:
        w = gguf.GGUFWriter(path, self.config.arch)
        add_keys(w, self.config, f"luce oracle {name}", TYPES[self.kind])
        return w

    def f32(self, t: Tensor) -> np.ndarray:
        """Returns a small tensor. A router's logits have a standard deviation of 1."""
        c = self.config
        if t.name == "rope_freqs.weight":
            return rope_factors(c)
        if t.name.endswith("ffn_gate_inp.weight"):
            return super().f32(t)
        value = 1.0
        if t.name == "output_norm.weight":
            value = 2 * (c.softcap or 30.0) / c.n_embd
        elif t.name.endswith((".post_attention_norm.weight", ".post_ffw_norm.weight", ".post_norm.weight")):
            value = NOISE
        elif t.name.endswith("ffn_gate_inp.scale"):
            value = c.n_embd**0.5
        elif t.name.endswith(("attn_q_norm.weight", "attn_k_norm.weight")):
            value = t.shape[0] ** -0.25  # Scores then have a standard deviation of 1.
        return np.full(t.n_blocks, value, "<f4")


@dataclass
class AssistantOracle(Gemma4Oracle):
    """An assistant's file being written. `embedding` is the target's, (V, bytes of a row) as its type stores them."""

    embedding: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.uint8))
    stored: str = "Q4_K"  # It is the embedding's type, and the head's.

    def type_of(self, name: str, shape: tuple[int, ...]) -> QType:
        if name == "token_embd.weight":
            return gguf.GGMLQuantizationType[self.stored]
        return super().type_of(name, shape)

    @cached_property
    def sources(self) -> np.ndarray:
        """Returns (V,) the token whose embedding a row of the head is: it drafts that row's token after that one."""
        tokens, sources = np.arange(self.rule.n_cycle), np.zeros(self.rule.n_vocab, np.int64)
        sources[self.rule.draft(tokens)] = tokens
        return sources

    def make(self, t: Tensor, first: int, n: int) -> np.ndarray:
        if t.name == "nextn.pre_projection.weight":
            return pass_through_blocks(t.kind, first, n, self.config.n_embd_out)
        if t.name != "token_embd.weight":
            return super().make(t, first, n)
        per_row = t.shape[-1] // gguf.GGML_QUANT_SIZES[t.kind][0]
        rows = self.sources[first // per_row : (first + n) // per_row]
        return self.embedding[rows, : per_row * t.block_bytes].reshape(n, t.block_bytes)

    def copies(self, t: Tensor) -> bool:
        return False


def make_assistant(
    path: Path,
    target: Path,
    shape: str,
    seed: int = 0,
    accept: float = 0.8,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Rule:
    """Writes the assistant of an oracle that make_oracle wrote with the same seed, and returns its rule, which says
    what it drafts."""
    embedding = gguf.GGUFReader(target).tensors[0]
    config, rule = assistant_of(shape), Rule(SHAPES[shape].n_vocab, seed, accept)
    kind = embedding.tensor_type.name
    of_all = "mixed" if kind == "Q4_K" else kind
    oracle = AssistantOracle(config, rule, of_all, embedding=embedding.data, stored=kind)
    return write_oracle(oracle, path, shape, progress)


def make_oracle(
    path: Path,
    shape: str,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    kind: str = "mixed",
) -> Rule:
    """Writes the file and returns its rule, as oracle_model.make_oracle does; nothing drafts in it."""
    config = SHAPES[shape]
    return write_oracle(Gemma4Oracle(config, Rule(config.n_vocab, seed), kind), path, shape, progress)
