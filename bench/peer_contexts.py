#!/usr/bin/env python3
"""Measures luce beside llama.cpp behind long prompts, on one file, in one run.

Each side reads a random prompt of every length into an empty context and decodes --n-gen tokens behind it. Prefill
is the prompt to its first token; decoding starts when that is out and ends with the last token, all of a step inside.
luce's modes take turns at each length. Then luce is closed and llama-server is loaded once, for plain decoding. Each
has read a short prompt before. Outside the timing windows: loading, opening, that warm-up, HTTP, checks of tokens.

    python bench/peer_contexts.py oracle-gemma4-31b.gguf --bin peer/bin --lengths 32768,102400
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import llamacpp
from peer_llamacpp import Task, task_of

from luce.bench.origin import command_text, origin
from luce.bench.output import as_markdown
from luce.bench.run import WARM_UP_TOKENS, Bench, Case, Settings, parse_modes
from luce.bench.summary import five_digits
from luce.native import File
from luce.planning.opened import Files

TIMING = " ".join(__doc__.split("\n\n")[1].split())


def row(name: str, task: Task, prefill: float, decode: float, tokens: list[int]) -> dict[str, Any]:
    """Makes the row of one answer from its speeds in tokens/s."""
    return {
        "name": name,
        "context": len(task.short),
        "prefill_tok_per_s": five_digits(prefill),
        "tok_per_s": five_digits(decode),
        "wrong_tokens": task.wrong(tokens) if task.expected else None,
    }


def ours(args: argparse.Namespace, tasks: list[Task]) -> tuple[str, int, list[dict[str, Any]]]:
    """Returns the device, as the core names it, the threads and luce's rows."""
    device = None if args.device == "auto" else args.device
    short = Case("warm-up", tuple(tasks[0].short[-WARM_UP_TOKENS:]))
    cases = [short, *(Case(str(len(task.short)), tuple(task.short)) for task in tasks)]
    with (
        Files(args.model, device=device, drafter=args.draft) as files,
        Bench(files, args.modes, cases, Settings(args.n_gen, threads=args.threads)) as bench,
    ):
        rows = []
        for record in bench.run():
            if record.case is short:
                continue
            task, stats = tasks[cases.index(record.case) - 1], record.stats
            speeds = len(task.short) / stats.prefill_s, stats.tok_per_s or 0.0
            rows.append(row(f"luce {record.mode}", task, *speeds, list(record.tokens)))
            print(rows[-1], file=sys.stderr, flush=True)
        return bench.model.info.device, bench.threads, rows


def measure(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Returns the device, as the core names it, and the result row."""
    with File(args.model) as file:
        tasks = [task_of(file.kv, 1, n, args.n_gen) for n in args.lengths]
    device, threads, rows = ours(args, tasks)
    n_ctx = max(args.lengths) + args.n_gen + 64
    with llamacpp.LlamaServer(args.bin / "llama-server", args.model, threads, device, n_ctx=n_ctx) as server:
        server.complete(tasks[0].short[-WARM_UP_TOKENS:], WARM_UP_TOKENS)
        for task in tasks:
            answer = server.complete(task.short, args.n_gen)
            times = answer["timings"]
            speeds = times["prompt_per_second"], times["predicted_per_second"]
            rows.append(row("llama-server", task, *speeds, answer["tokens"]))
            print(rows[-1], file=sys.stderr, flush=True)
    command = ["bench/peer_contexts.py", args.model.name, "--device", args.device]
    command += ["--threads", str(args.threads), "--n-gen", str(args.n_gen)]
    command += ["--lengths", ",".join(map(str, args.lengths)), "--modes", ",".join(mode.name for mode in args.modes)]
    command += ["--draft", args.draft.name] if args.draft else []
    head = origin("peer llama.cpp, contexts", device, args.model, command_text(command), threads, args.commit)
    return device, head | {"timing": TIMING, "n_gen": args.n_gen, "contexts": rows}


def markdown(result: dict[str, Any]) -> str:
    """Makes a table with a line for each row."""
    lines = []
    for r in result["contexts"]:
        speeds = [f"{r['prefill_tok_per_s']:,.0f}", f"{r['tok_per_s']:.1f}"]
        lines.append([r["name"], f"{r['context']:,}", *speeds, str(r["wrong_tokens"])])
    return as_markdown((["", "context", "prefill tok/s", "tok/s", "wrong tokens"], lines))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    peer = parser.add_mutually_exclusive_group(required=True)
    peer.add_argument("--build", type=Path, metavar="DIR", help="build llama.cpp in this folder")
    peer.add_argument("--bin", type=Path, metavar="DIR", help="folder of llama.cpp's programs")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--lengths", default="32768,102400", type=lambda t: [int(n) for n in t.split(",")])
    parser.add_argument("--modes", default="plain", type=parse_modes, help="of luce: plain, mtp:N, dflash, ..")
    parser.add_argument("--draft", type=Path, help="file of luce's drafter or assistant")
    parser.add_argument("--n-gen", type=int, default=64, help="tokens that are decoded behind each prompt")
    parser.add_argument("--commit", help="of luce, where this is no git checkout")
    parser.add_argument("--save", type=Path, metavar="DIR", help="folder for the result row")
    return parser.parse_args()


def main() -> None:
    llamacpp.compare(Path(__file__).stem, "contexts", arguments(), measure, markdown, TIMING)


if __name__ == "__main__":
    main()
