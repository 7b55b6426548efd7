#!/usr/bin/env python3
"""Writes luce/doctor/answers.npz, what `luce doctor` holds the kernels to: a part of tests/goldens/box.npz, which
transformers' Qwen3_5ForCausalLM and nextn.py's head computed (tools/box/make_golden.py), for the weights that
luce/data/box.gguf stores.

`prompt` (T,) and `greedy` (N,) are tokens; `ids` (K,) are the ids of which `logits` (T, K) are kept; `drafts` (A, 3)
are the head's after the anchors greedy[0], greedy[1] .. `gap` (N,) and `draft_gap` (A, 3) are the distances of the two
largest logits there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
N_IDS, N_ANCHORS = 128, 16


def answers() -> dict[str, np.ndarray]:
    """Returns what the file holds."""
    golden = dict(np.load(ROOT / "tests" / "goldens" / "box.npz"))
    logits = golden["stored_logits"]
    # Each position's most probable ids, and others that lie over the whole vocabulary.
    best = np.unique(logits.argmax(-1))
    spread = np.linspace(0, logits.shape[1] - 1, N_IDS - len(best)).astype(np.int64)
    ids = np.unique(np.concatenate([best, spread]))
    return {
        "prompt": golden["prompt"], "greedy": golden["stored_greedy"], "ids": ids.astype(np.int32),
        "logits": logits[:, ids], "gap": golden["stored_gap"], "drafts": golden["stored_drafts"][:N_ANCHORS],
        "draft_gap": golden["stored_draft_gap"][:N_ANCHORS],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "luce" / "doctor" / "answers.npz")
    args = parser.parse_args()
    made = answers()
    np.savez_compressed(args.out, **made)
    print(f"{args.out.name}: {args.out.stat().st_size} bytes, {len(made['ids'])} logits of each position")


if __name__ == "__main__":
    main()
