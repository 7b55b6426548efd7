#!/usr/bin/env python3
"""Measures luce's prefill beside llama.cpp's, by length of the prompt, on one file, in one run.

Random tokens are read into an empty context: in luce to the choice of the next token, in llama-bench to the
logits of the last chunk. Loading, opening and one warm-up of each length are outside the timing windows.
Figures are medians over rounds, in which luce and llama-bench take turns.

    python bench/peer_prefill.py oracle-27b-0.8.gguf --bin peer/bin --lengths 512,2048,8192
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import llamacpp
import numpy as np
from peer_llamacpp import prefill_speed

from luce.bench.origin import command_text, origin, print_row
from luce.bench.output import as_markdown
from luce.bench.summary import five_digits
from luce.decode.engine import Engine
from luce.errors import Error
from luce.planning.opened import Files
from luce.planning.plan import Options

Speeds = dict[int, list[float]]  # Speeds are keyed by length, with the tokens a second of each round.
TIMING = " ".join(__doc__.split("\n\n")[1].split())


def measure(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Returns the device, as the core names it, and the result row."""
    device = None if args.device == "auto" else args.device
    ours: Speeds = defaultdict(list)
    peers: Speeds = defaultdict(list)
    longest = max(args.lengths)
    asked = Options(ctx=longest + 1, chunk=args.chunk, threads=args.threads, spec="off")
    with Files(args.model, device=device) as files:
        n_ids = len(files.file.kv["tokenizer.ggml.tokens"]) - 16  # The last ids are control tokens.
        tokens = [int(t) for t in np.random.default_rng(2).integers(0, n_ids, longest)]
        with Engine.open(files, asked) as engine, engine.native.sequence() as sequence:
            where = engine.model.info.device
            chunk, threads = engine.info.n_chunk, engine.info.n_threads
            for n in args.lengths:
                prefill_speed(sequence, tokens[:n])  # This warms up.
            for _ in range(args.rounds):
                for n in args.lengths:
                    ours[n].append(prefill_speed(sequence, tokens[:n]))
                found, _ = llamacpp.llama_bench(
                    args.bin / "llama-bench", args.model, args.lengths, 0, args.threads, where
                )
                for n, speed in found.items():
                    peers[n].append(speed)
    command = ["bench/peer_prefill.py", args.model.name, "--device", args.device]
    for name in ("threads", "rounds", "chunk"):
        command += [f"--{name}", str(getattr(args, name))]
    command += ["--lengths", ",".join(map(str, args.lengths))]
    head = origin("peer llama.cpp, prefill", where, args.model, command_text(command), threads, args.commit)
    rows = [
        {"name": name, "tokens": n, "tok_per_s": five_digits(statistics.median(speeds[n])),
         "tok_per_s_rounds": [five_digits(v) for v in speeds[n]]}
        for name, speeds in (("luce", ours), ("llama-bench", peers)) for n in args.lengths
    ]  # fmt: skip
    return where, head | {"timing": TIMING, "n_chunk": chunk, "prefill": rows}


def markdown(args: argparse.Namespace, result: dict[str, Any]) -> str:
    """Makes a table with a line for each side and a column for each length."""
    found = {(r["name"], r["tokens"]): r["tok_per_s"] for r in result["prefill"]}
    lines = [[name, *(f"{found[name, n]:,.0f}" for n in args.lengths)] for name in ("luce", "llama-bench")]
    return as_markdown((["prefill in tok/s, by tokens", *map(str, args.lengths)], lines))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    peer = parser.add_mutually_exclusive_group(required=True)
    peer.add_argument("--build", type=Path, metavar="DIR", help="build llama.cpp in this folder")
    peer.add_argument("--bin", type=Path, metavar="DIR", help="folder of llama.cpp's programs")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--lengths", default="512,2048,8192", type=lambda t: [int(n) for n in t.split(",")])
    parser.add_argument("--chunk", type=int, default=0, help="luce's n_chunk; 0: its own choice")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commit", help="of luce, where this is no git checkout")
    parser.add_argument("--save", type=Path, metavar="DIR", help="folder for the result row")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    try:
        if args.build:
            args.bin = llamacpp.build(args.build, args.device != "cpu")
        where, result = measure(args)
        text = f"{args.model.name} on {result['device']}. {TIMING}\n\n{markdown(args, result)}"
        print(text, file=sys.stderr, flush=True)
        print_row(result, args.save, f"prefill-{args.model.stem}-{'cpu' if where == 'cpu' else 'gpu'}")
    except (Error, llamacpp.PeerError, OSError) as error:
        raise SystemExit(f"peer_prefill: error: {error}") from None


if __name__ == "__main__":
    main()
