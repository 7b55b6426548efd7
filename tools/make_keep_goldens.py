#!/usr/bin/env python3
"""Writes tests/goldens/keep-*.npz: what transformers computes, F32 on the CPU, of prompts from which text was left out,
and what the last rows of such a prompt attend to. Needs torch and transformers: python tools/make_keep_goldens.py

Each file: prompt (300 tokens), gaps (n, 2): so many positions are skipped ahead of this token, logits (3, vocab) of the
prompt's tokens `at`, greedy (12 tokens that follow it) and gap, as make_goldens has them; shares (layers * heads, 300),
the mean over the prompt's last ROWS rows of eager attention's softmax, and `plain`, the same without gaps.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import make_goldens
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
N_PROMPT, N_GREEDY, ROWS = 300, 12, 24
GAPS = ((70, 50), (200, 1), (270, 400))
AT = (69, 150, 299)
CASES = ("base", "grouped-s64-d128", "tied-s16", "wide-s128-d256", "pattern", "experts")


def golden(name: str) -> dict[str, np.ndarray]:
    import torch

    config, seed = make_goldens.CASES[name]
    model, prompt = make_goldens.build(config, seed), make_goldens.random_prompt(config, seed, N_PROMPT)
    positions = np.arange(N_PROMPT)
    for at, n in GAPS:
        positions[at:] += n

    def run(tokens: list[int], at: np.ndarray):  # type: ignore[no-untyped-def]
        with torch.no_grad():
            ids = torch.tensor(tokens)[None]
            # Without a mask transformers takes positions that jump for several packed texts.
            how = {"attention_mask": torch.ones_like(ids), "output_attentions": True, "use_cache": False}
            return model(ids, position_ids=torch.from_numpy(at)[None], **how)

    def shares(out) -> np.ndarray:  # type: ignore[no-untyped-def]
        heads = torch.cat([each[0] for each in out.attentions])  # {layers * heads, rows, keys}
        return heads[:, -ROWS:].mean(1).numpy()

    tokens = prompt.tolist()
    out = run(tokens, positions)
    found = {"prompt": prompt, "gaps": np.array(GAPS), "at": np.array(AT),
             "logits": out.logits[0].numpy()[list(AT)], "shares": shares(out),
             "plain": shares(run(tokens, np.arange(N_PROMPT)))}  # fmt: skip
    rows = [out.logits[0, -1].numpy()]
    while len(rows) < N_GREEDY:
        tokens.append(int(rows[-1].argmax()))
        at = np.concatenate([positions, positions[-1] + 1 + np.arange(len(tokens) - N_PROMPT)])
        rows.append(run(tokens, at).logits[0, -1].numpy())
    return found | make_goldens.choices(np.stack(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "goldens")
    for name in CASES:
        path = parser.parse_args().out / f"keep-{name}.npz"
        np.savez_compressed(path, **golden(name))
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
