#!/usr/bin/env python3
"""Measures luce beside llama.cpp with several sequences that decode together, on one file, in one run.

Figures are tokens a second of all sequences together. luce's are those of `luce bench batch`: they span from
the first new token of the last sequence to the end of the first, each after a random prompt of
--prompt-tokens. llama-batched-bench generates --n-gen random tokens for each sequence, after as many prompt
tokens; it chooses none. llama-server has as many slots as sequences, which are asked at once: its figure is
their tokens after the first, over the time of the slowest.
Outside the timing windows: loading, opening, warm-ups, prompts, HTTP. Medians over rounds, in which luce
and llama-batched-bench take turns; llama-server is loaded for each configuration afterwards.

    python bench/peer_batch.py oracle-27b-0.8.gguf --bin peer/bin --counts 1,2,4,8,16 --modes plain,mtp:2
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llamacpp
import numpy as np

from luce.bench.batch import Batch
from luce.bench.origin import command_text, origin
from luce.bench.output import as_markdown
from luce.bench.run import PLAIN, WARM_UP_TOKENS, Case, Mode, Settings, parse_modes
from luce.bench.summary import five_digits
from luce.planning.opened import Files

# Speeds are keyed by name and number of sequences, with the tokens a second in all of each round.
Speeds = dict[tuple[str, int], list[float]]
TIMING = " ".join(__doc__.split("\n\n")[1].split())


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def prompts(n_vocab: int, n_tokens: int, count: int) -> list[list[int]]:
    """Makes random prompts, without the last 16 ids, which are control tokens."""
    rng = np.random.default_rng(1)
    return [[int(t) for t in rng.integers(0, n_vocab - 16, n_tokens)] for _ in range(count)]


def take_turns(args: argparse.Namespace, speeds: Speeds) -> tuple[str, int, list[list[int]]]:
    """Runs luce and llama-batched-bench in turn. Returns the device and the threads that the core has, and
    the prompts."""
    device = None if args.device == "auto" else args.device
    with Files(args.model, device=device) as files:
        texts = prompts(len(files.file.kv["tokenizer.ggml.tokens"]), args.prompt_tokens, max(args.counts))
        cases = [Case(f"random {i}", tuple(text)) for i, text in enumerate(texts)]
        settings = Settings(args.n_gen, threads=args.threads)
        batch = Batch(files, args.modes, args.counts, cases, settings)
        with batch.model as model:
            where = model.info.device
            for turn in range(args.rounds):
                for found in batch.run():
                    speeds[f"luce {found.mode}", found.sequences].append(found.tok_per_s)
                peer = llamacpp.llama_batched_bench(
                    args.bin / llamacpp.BATCHED, args.model, args.prompt_tokens, args.n_gen, args.counts,
                    args.threads, where,
                )  # fmt: skip
                for count, speed in peer.items():
                    speeds["llama-batched-bench", count].append(speed)
                figures = [f"{name} x{count} {values[-1]:.0f}" for (name, count), values in speeds.items()]
                say(f"round {turn + 1}: {', '.join(figures)} tok/s")
    return where, batch.threads, texts


def server_speed(server: llamacpp.LlamaServer, texts: Sequence[list[int]], n_gen: int) -> float:
    """Returns tokens/s in all of one request for each text, asked at once."""
    with ThreadPoolExecutor(len(texts)) as pool:
        answers = list(pool.map(lambda text: server.complete(text, n_gen), texts))
    tokens = sum(len(answer["tokens"]) - 1 for answer in answers)
    return tokens / max(answer["timings"]["predicted_ms"] / 1000 for answer in answers)


def ask_servers(args: argparse.Namespace, where: str, texts: Sequence[list[int]], speeds: Speeds) -> None:
    for mode in args.modes:
        name = "llama-server" if mode.name == PLAIN else f"llama-server {mode.name}"
        options = ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(mode.gamma)] if mode.gamma else []
        for count in args.counts:
            with llamacpp.LlamaServer(
                args.bin / "llama-server", args.model, args.threads, where, *options,
                n_ctx=args.prompt_tokens + args.n_gen + 64, slots=count,
            ) as server:  # fmt: skip
                server_speed(server, texts[:count], min(WARM_UP_TOKENS, args.n_gen))
                for _ in range(args.rounds):
                    speeds[name, count].append(server_speed(server, texts[:count], args.n_gen))
            say(f"{name} x{count}: {statistics.median(speeds[name, count]):.0f} tok/s")


def measure(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Returns the device, as the core names it, and the result row."""
    speeds: Speeds = defaultdict(list)
    where, threads, texts = take_turns(args, speeds)
    if not args.no_server:
        ask_servers(args, where, texts, speeds)
    command = ["bench/peer_batch.py", args.model.name, "--device", args.device]
    for name in ("threads", "prompt_tokens", "n_gen", "rounds"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    command += ["--counts", ",".join(map(str, args.counts)), "--modes", ",".join(m.name for m in args.modes)]
    command += ["--no-server"] if args.no_server else []
    head = origin("peer llama.cpp, batch", where, args.model, command_text(command), threads, args.commit)
    rows = [
        {"name": name, "sequences": count, "tok_per_s": five_digits(statistics.median(values)),
         "tok_per_s_rounds": [five_digits(v) for v in values]}
        for (name, count), values in speeds.items()
    ]  # fmt: skip
    return where, head | {"timing": TIMING, "tokens_per_second_in_all": rows}


def markdown(args: argparse.Namespace, result: dict[str, Any]) -> str:
    """Makes a table with a line for each name and a column for each number of sequences."""
    found = {(r["name"], r["sequences"]): r["tok_per_s"] for r in result["tokens_per_second_in_all"]}
    names = list(dict.fromkeys(name for name, _ in found))

    def cell(name: str, count: int) -> str:
        return f"{found[name, count]:,.0f}" if (name, count) in found else ""

    lines = [[name, *(cell(name, count) for count in args.counts)] for name in names]
    return as_markdown((["tok/s in all, by sequences", *map(str, args.counts)], lines))


def checked_modes(text: str) -> list[Mode]:
    modes = parse_modes(text)
    if any(mode.name != PLAIN and mode.gamma is None for mode in modes):
        raise argparse.ArgumentTypeError("--modes takes plain and mtp:N")
    return modes


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    peer = parser.add_mutually_exclusive_group(required=True)
    peer.add_argument("--build", type=Path, metavar="DIR", help="build llama.cpp in this folder")
    peer.add_argument("--bin", type=Path, metavar="DIR", help="folder of llama.cpp's programs")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--counts", default="1,2,4,8,16", type=lambda t: [int(n) for n in t.split(",")])
    parser.add_argument("--modes", default="plain,mtp:2", type=checked_modes, help="plain and mtp:N")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--n-gen", type=int, default=128, help="new tokens of each sequence")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-server", action="store_true", help="leave llama-server out")
    parser.add_argument("--commit", help="of luce, where this is no git checkout")
    parser.add_argument("--save", type=Path, metavar="DIR", help="folder for the result row")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    llamacpp.compare(Path(__file__).stem, "batch", args, measure, lambda row: markdown(args, row), TIMING)


if __name__ == "__main__":
    main()
