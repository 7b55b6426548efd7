#!/usr/bin/env python3
"""Writes tests/goldens/llamacpp.json: the greedy tokens of llama.cpp, of the archive that luce's ggml is of,
for the files of make_goldens.py (F32, dense and with experts) and their prompts. Run it after that, with a
llama-server that bench/peer_llamacpp.py has built:

    python tools/make_llamacpp_goldens.py --llama-server PATH

A text has as many tokens as the golden, or ends with a token that ends a text. KV is F32, as the golden's.
Quantised files are not compared: the two programs round activations in blocks of their own, and in random
weights that is enough for another expert, and then for other tokens. llama.cpp refuses experts without a
shared one, so there it has one of zeros.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[1] / name) for name in ("tests/support", "bench"))

import llamacpp
import numpy as np
import tiny
from make_goldens import CASES, LONG_CASES, ROOT

from luce.convert.qwen35_layout import tensor_shapes

GOLDENS = ROOT / "tests" / "goldens"
OUT = GOLDENS / "llamacpp.json"
OPTIONS = ("-ctk", "f32", "-ctv", "f32")


def with_shared_expert(c: tiny.Config, tensors: tiny.Weights) -> tuple[tiny.Config, tiny.Weights]:
    """Returns the model with a shared expert of zeros where it has experts and none of these."""
    if c.n_expert and not c.n_ff_shared:
        c = replace(c, n_ff_shared=32)
    shapes = tensor_shapes(c)
    return c, {n: tensors[n] if n in tensors else np.zeros(shape, np.float32) for n, shape in shapes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    made = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (config, seed) in (CASES | LONG_CASES).items():
            model = with_shared_expert(config, tiny.layout(config, seed))
            path = tiny.write(Path(folder) / "model.gguf", *model)
            golden = np.load(GOLDENS / f"{name}.npz")
            with llamacpp.LlamaServer(args.llama_server, path, 1, "cpu", *OPTIONS) as server:
                made[name] = server.complete(golden["prompt"].tolist(), len(golden["greedy"]))["tokens"]
            print(f"{name}: {len(made[name])} tokens, {len(set(made[name]))} different ones")
    text = ",\n".join(f" {json.dumps(name)}: {tokens}" for name, tokens in made.items())
    args.out.write_text(f"{{\n{text}\n}}\n")


if __name__ == "__main__":
    main()
