#!/usr/bin/env python3
"""Plain decoding and prefill of one model, luce beside llama.cpp, in turn, in one run.

Outside the timing windows: loading, session opening, one warm-up of each side. Inside: for prefill, the
prompt's chunks to the choice of the next token; for decoding, `--n-gen` rounds of one row, each ending
when the host has the token. llama-bench times the same: `-p` tokens, then `-n` tokens, from an empty
context. Rounds alternate between the two, so that drift hits both alike; the table shows medians.

The peer is llama-bench of the llama.cpp in the same source archive as luce's ggml; `--build DIR` builds it
there (its weight repacking off, GGML_NATIVE on), `--llama-bench PATH` takes one that is built.

    python bench/beside_llamacpp.py model.gguf --device cpu --threads 2 --build /somewhere/peer
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from luce._native import File, Model, Session, SessionParams

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))
sys.path.append(str(Path(__file__).resolve().parent))

import peer_llamacpp  # noqa: E402
from make_oracle import Rule  # noqa: E402
from record import origin, save  # noqa: E402


def luce_round(session: Session, prompt: list[int], n_gen: int) -> tuple[float, list[int], float]:
    """(prefill tokens/s, generated ids, decoded tokens/s): decoding starts from a prompt of one token."""
    session.reset()
    start = time.perf_counter()
    session.prefill(prompt)
    prefill = len(prompt) / (time.perf_counter() - start)
    session.reset()
    tokens = [session.prefill(prompt[-1:])]
    start = time.perf_counter()
    for _ in range(n_gen):
        tokens += session.verify(tokens[-1:])
        session.commit([0])
    return prefill, tokens, n_gen / (time.perf_counter() - start)


def oracle_rule(file: File) -> Rule | None:
    """The known answers of an oracle model; None for other models."""
    if "oracle.seed" not in file.kv:
        return None
    return Rule(len(file.kv["tokenizer.ggml.tokens"]), file.kv["oracle.seed"], file.kv["oracle.accept"])


def wrong_tokens(rule: Rule, tokens: list[int]) -> int:
    """How many generated ids differ from what the oracle must say after the first one."""
    expected = rule.continuation(tokens[0], len(tokens) - 1)
    return sum(a != b for a, b in zip(tokens[1:], expected, strict=True))


def measure(args: argparse.Namespace, binary: Path) -> dict[str, Any]:
    rng = np.random.Generator(np.random.PCG64(1))
    start = time.perf_counter()
    with File(args.model) as file, Model(file, args.device) as model:
        load_s = time.perf_counter() - start
        device = model.info.device
        rule = oracle_rule(file)
        prompt = [int(t) for t in rng.integers(0, model.info.n_vocab - 16, args.n_prompt)]
        params = SessionParams(n_ctx=max(args.n_prompt, args.n_gen + 1) + 64, n_threads=args.threads)
        rows, wrong = [], 0
        with Session(model, params) as session:
            luce_round(session, prompt, 8)  # warm-up
            for i in range(args.rounds):
                ours = luce_round(session, prompt, args.n_gen)
                peer = peer_llamacpp.llama_bench(
                    binary, args.model, args.n_prompt, args.n_gen, args.threads, device != "cpu"
                )
                wrong += wrong_tokens(rule, ours[1]) if rule else 0
                rows.append((ours[2], peer[1], ours[0], peer[0]))
                decode, prefill = f"{ours[2]:.2f} / {peer[1]:.2f}", f"{ours[0]:.0f} / {peer[0]:.0f}"
                print(f"round {i + 1}: decode {decode}, prefill {prefill}", file=sys.stderr, flush=True)
    names = ("luce_decode", "llamacpp_decode", "luce_prefill", "llamacpp_prefill")
    columns = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    medians = {name: statistics.median(column) for name, column in columns.items()}
    command = (
        f"bench/beside_llamacpp.py {args.model.name} --device {args.device} --threads {args.threads} "
        f"--n-prompt {args.n_prompt} --n-gen {args.n_gen} --rounds {args.rounds}"
    )
    return origin("plain beside llama.cpp", device, args.model, command, args.threads, args.commit) | {
        "wrong_tokens": wrong if rule else None,
        "load_s": round(load_s, 3),
        "tok_per_s": {k: round(v, 2) for k, v in medians.items()},
        "spread": {k: [round(min(v), 2), round(max(v), 2)] for k, v in columns.items()},
        "decode_ratio": round(medians["luce_decode"] / medians["llamacpp_decode"], 4),
        "prefill_ratio": round(medians["luce_prefill"] / medians["llamacpp_prefill"], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--n-prompt", type=int, default=512)
    parser.add_argument("--n-gen", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama-bench", type=Path)
    parser.add_argument("--build", type=Path, help="build llama-bench in this folder")
    parser.add_argument("--commit", help="of luce, where this is no git checkout")
    parser.add_argument("--save", type=Path, help="folder for the result row")
    args = parser.parse_args()
    if (args.llama_bench is None) == (args.build is None):
        parser.error("give --llama-bench PATH or --build DIR")
    binary = args.llama_bench or peer_llamacpp.build(args.build, args.device != "cpu", "llama-bench")
    result = measure(args, binary)
    save(args.save, f"plain-{args.model.stem}-{'cpu' if args.device == 'cpu' else 'gpu'}", result)


if __name__ == "__main__":
    main()
