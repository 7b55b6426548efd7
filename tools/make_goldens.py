#!/usr/bin/env python3
"""Writes tests/goldens/*.npz: what transformers' Qwen3_5ForCausalLM and Qwen3_5MoeForCausalLM compute, F32
on the CPU, for the tiny random models of CASES and LONG_CASES. Needs torch and transformers; run it after
changing these: python tools/make_goldens.py

Each file: prompt (40 tokens, or 400 of LONG_CASES), logits (rows, vocab) teacher-forced, greedy (64 tokens
that follow the prompt, or 24) and gap, the distance between the two largest logits where each of them was
chosen. A long case keeps the logits of the prompt's positions `at` alone; the others keep them all.
Tokens go in one by one, so transformers uses its recurrent rule; the chunked one has to agree.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))  # Its modules are used below.

import numpy as np
import tiny
from tiny import Config

ROOT = Path(__file__).resolve().parent.parent

N_PROMPT = 40
N_GREEDY = 64
MIN_GAP = 5e-3  # A seed whose greedy choice is closer than this is a bad golden.

# Each name has a config and a seed. The name says what differs: DeltaNet heads, S, head sizes, tied...
CASES: dict[str, tuple[Config, int]] = {
    "base": (Config(), 11),
    "grouped-s64-d128": (
        Config(n_embd=128, n_ff=192, n_head=4, n_head_kv=2, head_dim=128, rope_dim=32,
               n_k_head=2, n_v_head=6, state_size=64, rope_base=1e6), 11),
    "tied-s16": (
        Config(n_layer=6, interval=3, n_ff=160, n_head=4, n_head_kv=4, head_dim=64, rope_dim=64,
               n_k_head=4, n_v_head=8, state_size=16, rope_base=1e4, tied=True), 3),
    "wide-s128-d256": (
        Config(n_embd=256, n_ff=256, n_head=3, n_head_kv=1, head_dim=256, rope_dim=64,
               n_k_head=1, n_v_head=3, state_size=128, n_vocab=512), 4),
    "deep": (
        Config(n_layer=12, n_embd=96, n_ff=128, n_head=6, n_head_kv=2, head_dim=64, rope_dim=16,
               n_k_head=4, n_v_head=4, state_size=32, rope_base=5e5, eps=1e-5), 5),
    "tied-grouped": (
        Config(n_layer=4, n_embd=128, n_ff=256, n_head=2, n_head_kv=2, head_dim=128, rope_dim=64,
               n_k_head=2, n_v_head=4, state_size=128, rope_base=1e7, tied=True), 6),
    "pattern": (
        Config(n_layer=5, recurrent=(False, True, True, False, True), n_embd=64, n_ff=96, n_head=4,
               n_head_kv=1, head_dim=64, rope_dim=32, n_k_head=1, n_v_head=4, state_size=64), 7),
    "experts": (Config(n_expert=4, n_expert_used=2, n_ff_expert=48, n_ff_shared=80), 11),
    "experts-one-used": (
        Config(n_layer=5, interval=2, n_embd=96, n_expert=6, n_expert_used=1, n_ff_expert=64, n_ff_shared=32,
               n_head=4, n_head_kv=2, rope_dim=32, n_k_head=2, n_v_head=4), 11),
    "experts-16-tied": (
        Config(n_embd=128, n_expert=16, n_expert_used=4, n_ff_expert=32, n_ff_shared=128, head_dim=128,
               n_k_head=1, n_v_head=3, state_size=64, tied=True, fused_experts=True), 12),
    "experts-all": (
        Config(n_layer=3, interval=3, n_expert=4, n_expert_used=4, n_ff_expert=96, n_ff_shared=64,
               rope_base=1e5, eps=1e-5, fused_experts=True), 17),
    "experts-none-shared": (
        Config(n_layer=3, interval=3, n_embd=128, n_expert=8, n_expert_used=3, n_ff_expert=80, n_head=2,
               n_head_kv=1, head_dim=128, n_k_head=2, n_v_head=4, tied=True), 16),
}  # fmt: skip

# A long prompt on a GPU writes its weights out for cuBLAS (graph/lower_gpu.cpp) and does DeltaNet by chunks;
# 400 tokens are long enough for both even after a first call of 256. The cases differ in which way they take:
# chunks have an S of 64 or 128, and cuBLAS takes input widths that are multiples of 8; 100 and 180 are none.
N_LONG = 400
N_LONG_GREEDY = 24
# These are indices of the prompt's tokens.
LONG_AT = (63, 126, 127, 128, 190, 255, 256, 319, 382, 383, 384, 399)
LONG_CASES: dict[str, tuple[Config, int]] = {
    "long-s128": (
        Config(n_layer=3, interval=3, n_embd=160, n_ff=224, n_head=3, n_head_kv=1, head_dim=128, rope_dim=64,
               n_k_head=1, n_v_head=2, state_size=128), 21),
    "long-s64-uneven": (
        Config(n_layer=3, interval=2, n_embd=100, n_ff=180, n_head=4, n_head_kv=2, n_k_head=2, n_v_head=4,
               state_size=64, rope_base=1e5), 22),
    "long-s32-tied": (
        Config(n_layer=3, interval=3, n_embd=128, n_ff=96, n_head=2, n_head_kv=2, head_dim=256, rope_dim=32,
               n_k_head=4, n_v_head=4, tied=True), 23),
}  # fmt: skip


def build(c: Config, seed: int):  # type: ignore[no-untyped-def]
    """Returns transformers' model with the weights of tiny.weights(c, seed)."""
    import torch
    import transformers

    kind = "Qwen3_5Moe" if c.n_expert else "Qwen3_5"
    keys = tiny.hf_config(c) | ({"experts_implementation": "eager"} if c.n_expert else {})
    config = getattr(transformers, f"{kind}TextConfig")(**keys, attn_implementation="eager")
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
    state = {k: torch.from_numpy(v) for k, v in tiny.weights(c, seed).items() if not k.startswith("mtp.")}
    if c.n_expert and not c.n_ff_shared:
        state |= _empty_shared_experts(c)
    if c.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model


def _empty_shared_experts(c: Config):  # type: ignore[no-untyped-def]
    """Returns shared experts of width 0, which add nothing: transformers' block always has one."""
    import torch

    e = c.n_embd
    shapes = {"shared_expert.gate_proj": (0, e), "shared_expert.up_proj": (0, e),
              "shared_expert.down_proj": (e, 0), "shared_expert_gate": (1, e)}  # fmt: skip
    return {
        f"model.layers.{i}.mlp.{name}.weight": torch.ones(shape)
        for i in range(c.n_layer)
        for name, shape in shapes.items()
    }


def golden(c: Config, seed: int) -> dict[str, np.ndarray]:
    return run(build(c, seed), random_prompt(c, seed, N_PROMPT))


def long_golden(c: Config, seed: int) -> dict[str, np.ndarray]:
    """Runs the prompt in one call, by transformers' chunked rule; main() compares its recurrent one."""
    import torch

    model, prompt = build(c, seed), random_prompt(c, seed, N_LONG)
    with torch.no_grad():
        out = model(torch.from_numpy(prompt).long()[None], use_cache=True)
        rows = [out.logits[0, -1].numpy()]
        while len(rows) < N_LONG_GREEDY:
            token = torch.tensor([[int(rows[-1].argmax())]])
            step = model(token, past_key_values=out.past_key_values, use_cache=True)
            rows.append(step.logits[0, -1].numpy())
    return {"prompt": prompt, "at": np.array(LONG_AT), "logits": out.logits[0].numpy()[list(LONG_AT)],
            **choices(np.stack(rows))}  # fmt: skip


def choices(rows: np.ndarray, min_gap: float = MIN_GAP) -> dict[str, np.ndarray]:
    """Returns greedy and gap of logits (tokens, V). A choice closer than min_gap is an error."""
    top = np.sort(rows, -1)
    gap = top[:, -1] - top[:, -2]
    if gap.min() < min_gap:
        raise RuntimeError(f"a greedy choice is decided by {gap.min()}: take another seed or prompt")
    return {"greedy": rows.argmax(-1).astype(np.int32), "gap": gap}


def random_prompt(c: Config, seed: int, n: int) -> np.ndarray:
    raw = np.random.PCG64(1000 + seed).random_raw(n)
    return (raw % np.uint64(c.n_vocab)).astype(np.int32)


def run(  # type: ignore[no-untyped-def]
    model, prompt: np.ndarray, min_gap: float = MIN_GAP, n_greedy: int = N_GREEDY
) -> dict[str, np.ndarray]:
    """Returns prompt, logits, greedy and gap of a transformers model. A choice closer than min_gap is an
    error."""
    import torch

    n_prompt = len(prompt)
    with torch.no_grad():
        chunked = model(torch.from_numpy(prompt).long()[None]).logits[0].numpy()
        cache = None
        logits: list[np.ndarray] = []
        greedy: list[int] = []
        for i in range(n_prompt + n_greedy - 1):
            token = int(prompt[i]) if i < n_prompt else greedy[-1]
            out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits[0, -1].numpy())
            if i >= n_prompt - 1:
                greedy.append(int(logits[-1].argmax()))
    rows = np.stack(logits)
    if np.abs(rows[:n_prompt] - chunked).max() > 1e-4:
        worst = np.abs(rows[:n_prompt] - chunked).max()
        raise RuntimeError(f"transformers' recurrent and chunked rules disagree by {worst}")
    return {"prompt": prompt, "logits": rows[:n_prompt], **choices(rows[n_prompt - 1 :], min_gap)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "goldens")
    parser.add_argument("names", nargs="*", help="of the cases to write; all where none are given")
    args = parser.parse_args()
    out = args.out
    for name, (config, seed) in (CASES | LONG_CASES).items():
        if args.names and name not in args.names:
            continue
        made = (golden if name in CASES else long_golden)(config, seed)
        if name in LONG_CASES:
            one_by_one = run(build(config, seed), made["prompt"], n_greedy=N_LONG_GREEDY)
            worst = np.abs(one_by_one["logits"][list(LONG_AT)] - made["logits"]).max()
            if worst > 1e-4 or one_by_one["greedy"].tolist() != made["greedy"].tolist():
                raise RuntimeError(f"{name}: the recurrent rule gives other tokens, or logits {worst} off")
        np.savez_compressed(out / f"{name}.npz", **made)
        size = (out / f"{name}.npz").stat().st_size
        different = len(set(made["greedy"].tolist()))
        print(f"{name}: {size} bytes, smallest gap {made['gap'].min():.4f}, {different} different tokens")


if __name__ == "__main__":
    main()
