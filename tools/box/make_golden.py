#!/usr/bin/env python3
"""Writes tests/goldens/box.npz: what transformers' Qwen3_5ForCausalLM, and nextn.py's head, compute with the
box's weights, F32 on the CPU. Needs torch and transformers, and .box/export/box beside the committed
luce/data/box.gguf.

Twice, for two sets of weights: the checkpoint's own (`logits`, `greedy`, `gap` as in the other goldens), and
the same as box.gguf stores them, every matrix through Q8_0 (`stored_logits`, `stored_greedy`,
`stored_gap`), which is checked to be the file's content bit by bit. `prompt` is PROMPT's tokens.

transformers ignores the NextN head: that is nextn.py's, on the trunk of model.py, which is checked against
transformers. With each of the N = 64 greedy tokens as the anchor: `drafts` (N, 3), each the head's choice
after the ones before it, and `draft_gap` (N, 3), the distance of its two largest logits there;
`stored_drafts` and `stored_draft_gap`; and for the anchors greedy[draft_anchors] `stored_draft_logits`
(2, 3, V).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.extend([str(ROOT / "tests" / "support"), str(ROOT / "tools")])  # Their modules are used below.


def arguments() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--checkpoint", type=Path, default=ROOT / ".box" / "export" / "box")
    parser.add_argument("--gguf", type=Path, default=ROOT / "luce" / "data" / "box.gguf")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "goldens" / "box.npz")
    return parser.parse_args()


if __name__ == "__main__":
    arguments()  # --help needs no torch.

# ruff: noqa: E402
import box_model
import gguf
import numpy as np
import ref
import tiny
import torch
from make_goldens import run
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from box import nextn
from box.model import Config, Trunk

PROMPT = "import unittest\n\n\nclass TestQueue(unittest.TestCase):\n    def setUp(self):\n"
MIN_GAP = 0.2  # The two largest logits are so far apart at least: Q8_0 moves each of them by up to 0.1.
N_DRAFT = 3
ANCHORS = (0, 40)  # The head's logits are kept at these greedy tokens.


def stored(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the state with every matrix put through Q8_0."""
    q8 = gguf.GGMLQuantizationType.Q8_0
    through = lambda x: gguf.quants.dequantize(gguf.quants.quantize(x, q8), q8).reshape(x.shape)  # noqa: E731
    return {name: through(x) if x.ndim == 2 else x for name, x in state.items()}


def check_same(config: tiny.Config, state: dict[str, np.ndarray], file: Path) -> None:
    """Checks that the state is what the GGUF holds."""
    mine, theirs = tiny.to_gguf_layout(config, state), ref.read_gguf(str(file))
    if mine.keys() != theirs.keys():
        raise RuntimeError(f"{file.name} holds other tensors: {sorted(mine.keys() ^ theirs.keys())}")
    for name, x in mine.items():
        exact = not name.endswith("ssm_a")  # That one is computed, by exp.
        if not np.array_equal(x, theirs[name]) and (exact or not np.allclose(x, theirs[name], rtol=1e-6)):
            raise RuntimeError(f"{file.name}: {name} differs by {np.abs(x - theirs[name]).max()}")


def model(folder: Path, state: dict[str, np.ndarray]) -> Qwen3_5ForCausalLM:
    text = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    made = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**text, attn_implementation="eager")).eval().float()
    trunk = {name: torch.from_numpy(x) for name, x in state.items() if not name.startswith("mtp.")}
    made.load_state_dict(trunk | {"lm_head.weight": trunk["model.embed_tokens.weight"]}, strict=True)
    return made


def head_logits(config: Config, state: dict[str, np.ndarray], golden: dict[str, np.ndarray]) -> np.ndarray:
    """Returns (N, N_DRAFT, V): the head's logits for each draft after the anchors greedy[0], greedy[1] ...,
    where the chain goes on with its own choices."""
    trunk, head = Trunk(config), nextn.NextN(config)
    tensors = {name: torch.from_numpy(x) for name, x in state.items()}
    trunk.load_state_dict({k: x for k, x in tensors.items() if not k.startswith("mtp.")})
    head.load_state_dict({k.removeprefix("mtp."): x for k, x in tensors.items() if k.startswith("mtp.")})
    n_prompt, n = len(golden["prompt"]), len(golden["greedy"])
    true = torch.from_numpy(np.concatenate([golden["prompt"], golden["greedy"]])).long()
    length = len(true) + N_DRAFT - 1
    rows = torch.zeros(n, length, dtype=torch.long)  # Row i is the text over which anchor i's drafts go.
    rows[:, : len(true)] = true
    each, anchors = torch.arange(n), n_prompt + torch.arange(n)
    masks = [nextn.chain_mask(length, step, "cpu") for step in range(1, N_DRAFT + 1)]
    cos, sin = nextn.head_rope(config, length, "cpu")
    logits = []
    with torch.no_grad():
        hidden, _ = trunk(true[None])
        if (trunk.logits(hidden[0, :n_prompt]) - torch.from_numpy(golden["logits"])).abs().max() > 1e-4:
            raise RuntimeError("model.py and transformers disagree")
        hidden = torch.nn.functional.pad(hidden, (0, 0, 0, N_DRAFT - 1)).expand(n, -1, -1)  # (N, T, E)
        for step in range(1, N_DRAFT + 1):
            passes = nextn.chain(hidden, trunk.embed(rows), head.weights(), masks[:step], cos, sin)
            logits.append(trunk.logits(passes[-1][each, anchors + step - 1]))  # (N, V)
            if step < N_DRAFT:
                rows[each, anchors + step] = logits[-1].argmax(-1)
    return torch.stack(logits, 1).numpy()


def drafts_of(logits: np.ndarray) -> dict[str, np.ndarray]:
    top = np.sort(logits, -1)
    return {"drafts": logits.argmax(-1).astype(np.int32), "draft_gap": top[..., -1] - top[..., -2]}


def main() -> None:
    args = arguments()
    torch.set_num_threads(2)
    state = {k: v.float().numpy() for k, v in load_file(args.checkpoint / "model.safetensors").items()}
    check_same(box_model.CONFIG, stored(state), args.gguf)
    tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    prompt = np.array(tokenizer.encode(PROMPT).ids, np.int32)
    own = run(model(args.checkpoint, state), prompt, MIN_GAP)
    other = run(model(args.checkpoint, stored(state)), prompt, MIN_GAP)
    own |= drafts_of(head_logits(Config(), state, own))
    drafted = head_logits(Config(), stored(state), other)
    other |= drafts_of(drafted) | {"draft_logits": drafted[list(ANCHORS)]}
    made = own | {f"stored_{name}": x for name, x in other.items() if name != "prompt"}
    made["draft_anchors"] = np.array(ANCHORS, np.int32)
    np.savez_compressed(args.out, **made)
    for name in ("", "stored_"):
        gap, greedy = made[f"{name}gap"].min(), made[f"{name}greedy"]
        first = made[f"{name}drafts"][:-1, 0] == greedy[1:]
        print(f"{name or 'checkpoint'}: smallest gap {gap:.4f}, first drafts right {first.mean():.2f}")
        print(tokenizer.decode(greedy.tolist()))
    moved = np.abs(own["logits"] - other["logits"]).max()
    print(f"{len(prompt)} prompt tokens, std {own['logits'].std():.2f}, Q8_0 moves logits by {moved:.4f}")
    print(f"{args.out.name}: {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
