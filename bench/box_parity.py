#!/usr/bin/env python3
"""Compares the model in the box with others that compute it: transformers' F32 logits, llama.cpp's greedy
tokens.

Logits: max abs error of the core over every position of tests/goldens/box.npz, f32 KV, by verify steps of 1,
7 and all rows; for the shipped file, for the same weights in F32, and with --f32 for an F32 conversion
of the training checkpoint. Tokens: the prompts of tests/support/box_model.py, until llama-server ends a text, of the
shipped file with f16 KV and of the F32 conversion with f32 KV; where the two programs part, `gap` is the
distance of luce's two largest logits there. llama-server also drafts with both of the box's drafters.

    python bench/box_parity.py --f32 .box/export/box-f32.gguf --llama-server PATH
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))  # Its modules are used below.

import box_model
import drive
import llamacpp
import numpy as np

from luce.bench.origin import origin, write_row
from luce.files.tokenizer import Tokenizer
from luce.native import File, Model

ROOT = Path(__file__).resolve().parent.parent


def logit_error(path: Path, device: str, golden: dict[str, np.ndarray], name: str) -> dict[str, Any]:
    """Compares one file with the golden's set `name`, and counts how many of its greedy tokens come out."""
    prompt, greedy = golden["prompt"].tolist(), golden[f"{name}greedy"].tolist()
    with File(path) as file, Model(file, device) as model:
        sequence = drive.open_sequence(model, n_ctx=256, n_threads=2)
        worst = 0.0
        for width in (1, 7, len(prompt)):
            sequence.reset()
            rows = drive.chain_logits(sequence, prompt, width)
            worst = max(worst, float(np.abs(rows - golden[f"{name}logits"]).max()))
        sequence.reset()
        mine = drive.greedy(sequence, prompt, len(greedy))
    same = next((i for i, (a, b) in enumerate(zip(mine, greedy, strict=True)) if a != b), len(greedy))
    return {"max_abs_error": float(f"{worst:.2e}"), "greedy_tokens_equal": f"{same} of {len(greedy)}"}


def logits(args: argparse.Namespace) -> dict[str, Any]:
    golden = dict(np.load(ROOT / "tests" / "goldens" / "box.npz"))
    with tempfile.TemporaryDirectory() as folder:
        same = box_model.write_f32(Path(folder) / "box-f32.gguf")
        found = {"the file's weights in F32, against transformers with these weights":
                 logit_error(same, args.device, golden, "stored_")}  # fmt: skip
    found["the file, against transformers with its weights"] = logit_error(
        box_model.GGUF, args.device, golden, "stored_"
    )
    found["the file, against transformers with the checkpoint"] = logit_error(
        box_model.GGUF, args.device, golden, ""
    )
    if args.f32:
        found["F32 conversion of the checkpoint, against transformers with the checkpoint"] = logit_error(
            args.f32, args.device, golden, ""
        )
    std = round(float(golden["logits"].std()), 2)
    return {"positions": len(golden["prompt"]), "logits_std": std, "rows": found}


def tokens(args: argparse.Namespace, path: Path, kv_type: str) -> list[dict[str, Any]]:
    """Compares the greedy tokens of both programs on one file, prompt by prompt."""
    rows = []
    kv = ("-ctk", kv_type, "-ctv", kv_type)
    with (
        File(path) as file,
        Model(file, args.device) as model,
        drive.open_sequence(
            model, n_ctx=1024, n_rows=1, n_threads=args.threads, kv_type=kv_type
        ) as sequence,
        llamacpp.LlamaServer(args.llama_server, path, args.threads, args.device, *kv) as server,
    ):
        tokenizer = Tokenizer(file.kv)
        for text in box_model.PROMPTS:
            prompt = tokenizer.encode(text)
            theirs = server.complete(prompt, args.n_gen)["tokens"]
            sequence.reset()
            mine = drive.greedy(sequence, prompt, args.n_gen)
            same = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
            row: dict[str, Any] = {"prompt": text, "tokens": len(theirs), "equal": same is None}
            if same is not None:
                sequence.reset()
                drive.prefill(sequence, [*prompt, *mine[:same]])
                second, first = np.sort(sequence.logits(0))[-2:]
                row |= {"first_difference": same, "gap": round(float(first - second), 4)}
            rows.append(row)
    return rows


def drafts(args: argparse.Namespace) -> dict[str, float]:
    """Counts the tokens a round that llama.cpp gets from the box's drafters, over all prompts."""
    with File(box_model.GGUF) as file:
        tokenizer = Tokenizer(file.kv)
    drafter = str(box_model.DRAFTER)
    kinds = {
        "NextN head, 2 drafts": ("draft-mtp", "--spec-draft-n-max", "2"),
        "DFlash drafter, 15 drafts": ("draft-dflash", "-md", drafter, "--spec-draft-n-max", "15"),
    }
    found = {}
    for name, options in kinds.items():
        made = rounds = 0
        spec = ("--spec-type", *options)
        with llamacpp.LlamaServer(
            args.llama_server, box_model.GGUF, args.threads, args.device, *spec
        ) as server:
            for text in box_model.PROMPTS:
                answer = server.complete(tokenizer.encode(text), args.n_gen)
                made += len(answer["tokens"])
                rounds += len(answer["tokens"]) - answer["timings"]["draft_n_accepted"]
        found[name] = round(made / rounds, 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--n-gen", type=int, default=128)
    parser.add_argument("--f32", type=Path, help="an F32 conversion of the training checkpoint")
    parser.add_argument("--llama-server", type=Path, help="also compare tokens with this llama-server")
    parser.add_argument("--commit", help="of luce, where this is no git checkout")
    parser.add_argument("--save", type=Path, help="folder for the result row")
    args = parser.parse_args()
    command = f"bench/box_parity.py --device {args.device} --threads {args.threads} --n-gen {args.n_gen}"
    command += f" --f32 {args.f32.name}" if args.f32 else ""
    result = origin("box parity", args.device, box_model.GGUF, command, args.threads, args.commit)
    result["transformers"] = logits(args)
    if args.llama_server:
        result["llamacpp"] = {"the file": tokens(args, box_model.GGUF, "f16")}
        if args.f32:
            result["llamacpp"]["F32 conversion of the checkpoint"] = tokens(args, args.f32, "f32")
        result["llamacpp"]["tokens a round"] = drafts(args)
    print(json.dumps(result, indent=1))
    if args.save is not None:
        write_row(args.save, f"box-parity-{'cpu' if args.device == 'cpu' else 'gpu'}", result)


if __name__ == "__main__":
    main()
