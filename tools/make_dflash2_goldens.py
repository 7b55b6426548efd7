#!/usr/bin/env python3
"""Writes tests/goldens/dflash2*.npz and dspark*.npz: what DFlash2 and DSpark drafters compute, F32 on the CPU, for the
random drafters of tests/support/tiny_dflash2.py. Needs torch and transformers; run it after changing them:
python tools/make_dflash2_goldens.py

The equations are those of z-lab's dflash 0.1.0 (DFlash2DraftModel) and of DeepSpec (Qwen3DSparkModel), which agree with
them to 2e-5; attention sinks are as in transformers' GptOss. The target's residual streams are those of transformers'
Qwen3_5ForCausalLM.

Each file: prompt (T,), anchor; positions `at`, where k and v (layers, len(at), Hkv, D) of the context are kept; logits
(rows, V or the drafter's own vocabulary) of the block, before what a draft adds to those of the next; path (n,), the
greedy drafts; candidates (n, K), tokens by their logits; scores (n, K, K), behind each candidate of the depth above the
log-softmax over those of the depth. Where there is a confidence head, confidence (n, K), what it says behind each: how
likely a draft of the depth is right.
"""

from __future__ import annotations

import argparse
import sys
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
import numpy as np
import tiny_dflash2
import torch
import torch.nn.functional as F
from make_goldens import build
from tiny_dflash2 import CASES, More
from torch import Tensor

N_PROMPT = 40


class Block:
    """The forward of a drafter over its context and a block, by GGUF's tensors."""

    def __init__(self, case: More):
        self.case, self.c = case, case.base.drafter
        self.w = {name: torch.from_numpy(x) for name, x in tiny_dflash2.weights(case).items()}

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.c.eps) * self.w[name]

    def heads(self, x: Tensor, name: str, n: int) -> Tensor:
        """Returns x (T, E) times a matrix, as heads (n, T, D)."""
        return (x @ self.w[name].T).view(len(x), n, self.c.head_dim).transpose(0, 1)

    def rotated(self, x: Tensor, first: int) -> Tensor:
        """Rotates x (heads, T, D), whose rows are at positions from `first` on."""
        d = self.c.head_dim
        rates = self.c.rope_base ** (-torch.arange(0, d, 2).float() / d)
        angles = torch.arange(first, first + x.shape[1]).float()[:, None] * rates
        cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
        return x * cos + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1) * sin

    def keys_values(self, x: Tensor, layer: int, first: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values (Hkv, T, D) of context features or of a block's rows."""
        p, n = f"blk.{layer}.attn_", self.c.n_head_kv
        k = self.rotated(self.norm(self.heads(x, f"{p}k.weight", n), f"{p}k_norm.weight"), first)
        return k, self.heads(x, f"{p}v.weight", n)

    def context(self, streams: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        taps = torch.cat([streams[i] for i in self.c.target_layer_ids], -1)
        features = self.norm(taps @ self.w["fc.weight"].T, "enc.output_norm.weight")
        return [self.keys_values(features, layer, 0) for layer in range(self.c.n_layer)]

    def conv(self, x: Tensor, part: str, side: int, added: Tensor) -> Tensor:
        """Convolves x (T, E) by a kernel to which each row adds (T, 2, taps, E / G)."""
        base, out = self.w[f"{part}_conv_base"][side], torch.zeros_like(x)
        for tap in range(self.case.taps):
            earlier = F.pad(x, (0, 0, tap, 0))[: len(x)]
            out = out + (base[tap] + added[:, side, tap].repeat_interleave(self.case.group, -1)) * earlier
        return out

    def convolved(self, x: Tensor, part: str, sublayer):  # type: ignore[no-untyped-def]
        """Runs a sublayer between the convolutions of its input and of what it gives."""
        if not self.case.taps:
            return sublayer(x)
        added = (x @ self.w[f"{part}_conv_proj.weight"].T).view(len(x), 2, self.case.taps, -1)
        return self.conv(sublayer(self.conv(x, part, 0, added)), part, 1, added)

    def attention(self, x: Tensor, layer: int, context: tuple[Tensor, Tensor]) -> Tensor:
        c, p, n = self.c, f"blk.{layer}.attn_", context[0].shape[1]
        q = self.rotated(self.norm(self.heads(x, f"{p}q.weight", c.n_head), f"{p}q_norm.weight"), n)
        own = self.keys_values(x, layer, n)
        k, v = (
            torch.cat([before, new], 1).repeat_interleave(c.n_head // c.n_head_kv, 0)
            for before, new in zip(context, own, strict=True)
        )
        query, key = n + torch.arange(len(x))[:, None], torch.arange(n + len(x))[None]
        hidden = (key > query) & torch.tensor(c.causal[layer])
        if c.sliding[layer]:
            hidden = hidden | ((query - key).abs() >= c.window)
        scores = (q @ k.transpose(1, 2) / c.head_dim**0.5).masked_fill(hidden, -torch.inf)
        if self.case.sinks:  # A score more of each head, whose share of the softmax has no value.
            sinks = self.w[f"{p}sinks.weight"].view(-1, 1, 1).expand(-1, len(x), 1)
            scores, v = torch.cat([scores, sinks], -1), torch.cat([v, torch.zeros_like(v[:, :1])], 1)
        return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ self.w[f"{p}output.weight"].T

    def ffn(self, x: Tensor, layer: int) -> Tensor:
        gate, up, down = (self.w[f"blk.{layer}.ffn_{name}.weight"] for name in ("gate", "up", "down"))
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def hidden(self, x: Tensor, context: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Returns the normed states (B, E) of x (B, E), the rows' embeddings, after the context's positions."""
        for i, kv in enumerate(context):
            y = self.norm(x, f"blk.{i}.attn_norm.weight")
            x = x + self.convolved(y, f"blk.{i}.attn", lambda y, i=i, kv=kv: self.attention(y, i, kv))
            y = self.norm(x, f"blk.{i}.ffn_norm.weight")
            x = x + self.convolved(y, f"blk.{i}.ffn", lambda y, i=i: self.ffn(y, i))
        return self.norm(x, "output_norm.weight")

    def after(self, token: int, h: Tensor) -> Tensor:
        """Returns what a token adds to the logits (V or the own vocabulary) of the row behind it, whose state is h."""
        if self.case.markov:
            return self.w["markov_w2.weight"] @ self.w["markov_w1.weight"][token]
        gates = self.w["selector_hidden.weight"] @ h
        return self.w["selector_successor.weight"] @ (self.w["selector_predecessor.weight"][token] * gates)


def drafts(block: Block, h: Tensor, logits: Tensor, anchor: int) -> dict[str, np.ndarray]:
    """Makes lists and the greedy path of the rows that draft: h (n, E), logits (n, V or the own vocabulary)."""
    case, tokens = block.case, block.w.get("d2t", torch.arange(logits.shape[1]))
    best = torch.from_numpy(tiny_dflash2.candidates_of(logits.numpy(), case.candidates).copy())
    n, k = best.shape
    scores, path, prior, above = torch.full((n, k, k), -torch.inf), [], anchor, [anchor]
    confidence = torch.zeros(n, k)
    for i in range(n):
        for j, token in enumerate(above):
            if case.confidence:
                read = torch.cat([h[i], block.w["markov_w1.weight"][token]])
                confidence[i, j] = (block.w["conf_proj.weight"] @ read + block.w["conf_proj.bias"]).sigmoid()
            scores[i, j] = (logits[i] + block.after(token, h[i]))[best[i]].log_softmax(-1)
        summed = logits[i] + block.after(prior, h[i])
        chosen = summed.argmax() if case.markov else best[i][summed[best[i]].argmax()]
        prior, above = int(tokens[chosen]), tokens[best[i]].tolist()
        path.append(prior)
    made = {"path": np.array(path, np.int32), "candidates": tokens[best].numpy(), "scores": scores.numpy()}
    return made | ({"confidence": confidence.numpy()} if case.confidence else {})


def seen(case: More, block: Block) -> tuple[np.ndarray, list[Tensor], Tensor, Tensor]:
    """Returns a prompt with its anchor, the prompt's residual streams, and the drafter's embedding and head."""
    target = build(case.base.target, case.base.seed)
    raw = np.random.PCG64(2000 + case.base.seed).random_raw(N_PROMPT + 1)
    tokens = (raw % np.uint64(256)).astype(np.int32)
    streams: list[Tensor] = []
    for layer in target.model.layers:
        layer.register_forward_hook(lambda module, args, out: streams.append(out[0].reshape(N_PROMPT, -1)))
    with torch.no_grad():
        target(torch.from_numpy(tokens[:-1]).long()[None])
    embedding = block.w.get("token_embd.weight", target.model.embed_tokens.weight.detach())
    return tokens, streams, embedding, block.w.get("output.weight", target.lm_head.weight.detach())


def of_case(case: More) -> dict[str, np.ndarray]:
    c, block = case.base.drafter, Block(case)
    tokens, streams, embedding, head = seen(case, block)
    with torch.no_grad():
        anchor, at = int(tokens[-1]), [0, 1, N_PROMPT - 2, N_PROMPT - 1]
        context = block.context(streams)
        x = embedding[torch.tensor([anchor] + [c.mask_token_id] * (c.block_size - 1))]
        h = block.hidden(x * (c.embedding_scale or 1.0), context)
        logits = h @ head.T * case.logit_scale
        if c.softcap is not None:
            logits = c.softcap * torch.tanh(logits / c.softcap)
        k, v = (torch.stack([pair[i] for pair in context]).transpose(1, 2)[:, at] for i in (0, 1))
        first = c.block_size - case.n_draft
        made = drafts(block, h[first:], logits[first:], anchor)
    made |= {"k": k.numpy(), "v": v.numpy(), "logits": logits.numpy(), "prompt": tokens[:-1], "at": np.array(at)}
    return made | {"anchor": np.array(anchor, np.int32)}


def main() -> None:
    out = arguments().out
    torch.set_num_threads(1)
    for name, case in CASES.items():
        made, path = of_case(case), out / f"{name}.npz"
        np.savez_compressed(path, **made)
        unlike = made["path"] != made["candidates"][:, 0]
        print(f"{path.name}: {path.stat().st_size} bytes, logits' standard deviation {made['logits'].std():.2f}, "
              f"{unlike.sum()} of {len(unlike)} drafts are not a row's best")  # fmt: skip


if __name__ == "__main__":
    main()
