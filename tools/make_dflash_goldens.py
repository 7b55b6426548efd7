#!/usr/bin/env python3
"""Writes tests/goldens/dflash-*.npz: what a DFlash drafter computes by the arithmetic of its published
PyTorch code, F32 on the CPU, for the random drafters of tests/support/tiny_dflash.py and for that in the box. Needs
torch and transformers; run it after changing CASES or GEMMA4: python tools/make_dflash_goldens.py

DFlashDraftModel below has the published model's names and order of operations over transformers' Qwen3 parts
(z-lab/dflash, dflash/model.py). The residual streams are those of transformers' Qwen3_5ForCausalLM or
Gemma4ForCausalLM, of the box those of tests/support/ref.py, which is checked against it. Beside Gemma 4, embeddings are
what the target's own module gives, which scales them, or scaled as it does, and logits are capped as the target caps
its own.

Each file: prompt (T,), anchor; positions `at`, where k and v (layers, len(at), Hkv, D) of the context are
kept; logits (rows, V or the drafter's own vocabulary) of the block's rows `rows`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests" / "support"))  # Its modules are used below.


def arguments() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "goldens")
    return parser.parse_args()


if __name__ == "__main__":
    arguments()  # --help needs no torch.

# ruff: noqa: E402
import box_model
import numpy as np
import ref
import tiny_dflash
import torch
from make_gemma4_goldens import build as build_gemma4
from make_goldens import build
from tiny_dflash import CASES, GEMMA4, Case
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Config,
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    repeat_kv,
    rotate_half,
)

from luce.convert import hf_dflash
from luce.convert.gemma4_layout import Config as Gemma4
from luce.convert.hf_dflash import DFlash

N_PROMPT = 40
Rope = tuple[Tensor, Tensor]


def config_of(c: DFlash) -> Qwen3Config:
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": c.rope_base}
    if c.yarn is not None:
        given = {
            "attention_factor": c.yarn.attention_factor,
            "beta_fast": c.yarn.beta_fast,
            "beta_slow": c.yarn.beta_slow,
        }
        rope |= {"rope_type": "yarn", "factor": c.yarn.factor}
        rope |= {"original_max_position_embeddings": c.yarn.n_ctx_original}
        rope |= {name: value for name, value in given.items() if value is not None}
    return Qwen3Config(
        vocab_size=c.n_vocab, hidden_size=c.n_embd, intermediate_size=c.n_ff, num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head, num_key_value_heads=c.n_head_kv, head_dim=c.head_dim,
        rms_norm_eps=c.eps, max_position_embeddings=c.n_ctx, rope_parameters=rope,
    )  # fmt: skip


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotates x (heads, rows, D)."""
    cos, sin = rope
    return x * cos + rotate_half(x) * sin


class Attention(nn.Module):
    def __init__(self, c: DFlash, config: Qwen3Config):
        super().__init__()
        self.q_proj = nn.Linear(c.n_embd, c.n_head * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.n_embd, c.n_head_kv * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.n_embd, c.n_head_kv * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.n_head * c.head_dim, c.n_embd, bias=False)
        self.q_norm = Qwen3RMSNorm(c.head_dim, eps=c.eps)
        self.k_norm = Qwen3RMSNorm(c.head_dim, eps=c.eps)
        self.dim, self.groups = c.head_dim, c.n_head // c.n_head_kv

    def keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Returns keys and values, (Hkv, rows, D) each, of context features or of a block's rows."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.dim))).transpose(0, 1)
        return rotate(k, rope), self.v_proj(x).unflatten(-1, (-1, self.dim)).transpose(0, 1)

    def forward(self, x: Tensor, context: tuple[Tensor, Tensor], rope: Rope, mask: Tensor) -> Tensor:
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.dim))).transpose(0, 1), rope)
        own = self.keys_values(x, rope)
        k, v = (
            repeat_kv(torch.cat([before, new], 1)[None], self.groups)[0]
            for before, new in zip(context, own, strict=True)
        )
        scores = q @ k.transpose(1, 2) * self.dim**-0.5 + mask
        o = torch.softmax(scores, -1, dtype=torch.float32) @ v
        return self.o_proj(o.transpose(0, 1).flatten(1))


class Layer(nn.Module):
    def __init__(self, c: DFlash, config: Qwen3Config):
        super().__init__()
        self.self_attn = Attention(c, config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(c.n_embd, eps=c.eps)
        self.post_attention_layernorm = Qwen3RMSNorm(c.n_embd, eps=c.eps)

    def forward(self, x: Tensor, context: tuple[Tensor, Tensor], rope: Rope, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, rope, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashDraftModel(nn.Module):
    def __init__(self, c: DFlash):
        super().__init__()
        config = config_of(c)
        self.c = c
        self.layers = nn.ModuleList(Layer(c, config) for _ in range(c.n_layer))
        self.norm = Qwen3RMSNorm(c.n_embd, eps=c.eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.fc = nn.Linear(len(c.target_layer_ids) * c.n_embd, c.n_embd, bias=False)
        self.hidden_norm = Qwen3RMSNorm(c.n_embd, eps=c.eps)

    def rope(self, first: int, n: int) -> Rope:
        cos, sin = self.rotary_emb(torch.zeros(1), torch.arange(first, first + n)[None])
        return cos[0], sin[0]

    def context(self, streams: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Returns K and V of each layer for the positions of the target's streams (T, E), those of its
        blocks."""
        features = self.hidden_norm(self.fc(torch.cat([streams[i] for i in self.c.target_layer_ids], -1)))
        rope = self.rope(0, len(features))
        return [layer.self_attn.keys_values(features, rope) for layer in self.layers]

    def block(self, x: Tensor, context: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Returns the normed hidden states (B, E) of x (B, E), the rows' embeddings, after the context's
        positions."""
        n, rows = context[0][0].shape[1], len(x)
        rope, c = self.rope(n, rows), self.c
        query, key = n + torch.arange(rows)[:, None], torch.arange(n + rows)[None]
        for i, layer in enumerate(self.layers):
            hidden = (key > query) & torch.tensor(c.causal[i])
            if c.sliding[i]:
                hidden = hidden | (query - key >= c.window)
            x = layer(x, context[i], rope, torch.where(hidden, -torch.inf, 0.0))
        return self.norm(x)


def published(tensors: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Returns the tensors of a GGUF by the published model's names, but those of both ends."""
    names = dict(hf_dflash.TOP)
    for i in range(sum(name.endswith("attn_q.weight") for name in tensors)):
        names |= {f"blk.{i}.{a}": f"layers.{i}.{b}" for a, b in hf_dflash.BLOCK.items()}
    return {names[k]: torch.from_numpy(np.array(x)) for k, x in tensors.items() if k in names}


def golden(
    c: DFlash,
    tensors: Mapping[str, np.ndarray],
    prompt: np.ndarray,
    anchor: int,
    streams: list[Tensor],
    ends: tuple[np.ndarray, np.ndarray],
    keep: tuple[list[int], list[int]],
) -> dict[str, np.ndarray]:
    """Makes a golden. `streams` are those of the target's blocks over the prompt, and `ends` what the target embeds a
    token as (V, E), and its head."""
    model = DFlashDraftModel(c).eval().float()
    model.load_state_dict(published(tensors), strict=True)
    embedding = torch.from_numpy(tensors.get("token_embd.weight", ends[0]))
    head = torch.from_numpy(tensors.get("output.weight", ends[1]))
    at, rows = keep
    with torch.no_grad():
        context = model.context(streams)
        x = embedding[torch.tensor([anchor] + [c.mask_token_id] * (c.block_size - 1))]
        logits = model.block(x * (c.embedding_scale or 1.0), context) @ head.T
        if c.softcap is not None:
            logits = c.softcap * torch.tanh(logits / c.softcap)
        k, v = (torch.stack([pair[i] for pair in context]).transpose(1, 2)[:, at] for i in (0, 1))
    made = {"k": k.numpy(), "v": v.numpy(), "logits": logits[rows].numpy(), "prompt": prompt}
    return made | {"anchor": np.array(anchor, np.int32), "at": np.array(at), "rows": np.array(rows)}


def of_case(case: Case) -> dict[str, np.ndarray]:
    gemma4 = isinstance(case.target, Gemma4)
    target = build_gemma4(case.target, case.seed) if gemma4 else build(case.target, case.seed)
    raw = np.random.PCG64(2000 + case.seed).random_raw(N_PROMPT + 1)
    tokens = (raw % np.uint64(256)).astype(np.int32)
    streams: list[Tensor] = []
    for layer in target.model.layers:
        layer.register_forward_hook(lambda module, args, out: streams.append(out[0]))
    with torch.no_grad():
        target(torch.from_numpy(tokens[:-1]).long()[None])
        embedded = target.model.embed_tokens(torch.arange(case.target.n_vocab))
    ends = embedded.detach().numpy(), target.lm_head.weight.detach().numpy()
    keep = [0, 1, N_PROMPT - 2, N_PROMPT - 1], list(range(case.drafter.block_size))
    flat = [stream.reshape(N_PROMPT, -1) for stream in streams]
    tensors, drafter = tiny_dflash.weights(case), case.drafter
    has_embedding = "token_embd.weight" in case.own
    if has_embedding:  # Without a head of its own it is its head too.
        tensors.setdefault("output.weight", tensors["token_embd.weight"])
    if gemma4:
        scale = case.target.n_embd**0.5 if has_embedding else None
        drafter = replace(drafter, softcap=case.target.softcap, embedding_scale=scale)
    return golden(drafter, tensors, tokens[:-1], int(tokens[-1]), flat, ends, keep)


def of_box() -> dict[str, np.ndarray]:
    """Returns the first choice after the box's golden prompt, and its block; all weights are as they are
    stored."""
    text = dict(np.load(ROOT / "tests" / "goldens" / "box.npz"))
    weights = ref.read_gguf(str(box_model.GGUF))
    step = ref.Reference(box_model.CONFIG, weights).step(text["prompt"])
    streams = [torch.from_numpy(x.astype(np.float32)) for x in step.outputs]
    ends = (weights["token_embd.weight"],) * 2
    n = len(text["prompt"])
    keep = [0, n // 2, n - 1], [1, 8, 15]
    tensors = ref.read_gguf(str(box_model.DRAFTER))
    anchor = int(text["stored_greedy"][0])
    return golden(tiny_dflash.BOX, tensors, text["prompt"], anchor, streams, ends, keep)


def main() -> None:
    out = arguments().out
    torch.set_num_threads(1)
    for name, case in CASES.items():
        save(out / f"dflash-{name}.npz", of_case(case))
    for name, case in GEMMA4.items():
        save(out / f"dflash-gemma4-{name}.npz", of_case(case))
    save(out / "dflash-box.npz", of_box())


def save(path: Path, made: dict[str, np.ndarray]) -> None:
    np.savez_compressed(path, **made)
    print(f"{path.name}: {path.stat().st_size} bytes, logits' standard deviation {made['logits'].std():.2f}")


if __name__ == "__main__":
    main()
