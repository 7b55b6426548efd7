#!/usr/bin/env python3
"""Measures one model on one GPU, then shared out among several, beside llama.cpp on the same GPUs, in one run.

The first of --devices is measured by itself, and then all of them together, by each --split: with layers each (auto),
and with a part of each matrix (tensor). Prompts by length, from an empty context to the choice of the next token;
decoding in each mode of --modes after a random prompt of 32 tokens; and sequences that decode together, with the
mode's drafts. llama.cpp's programs run on the first device, and on all of them with `-sm layer` and `-sm tensor`:
llama-bench for prompts and one sequence, llama-batched-bench for several. Where a file knows its answers, `wrong`
counts tokens that are not those. Outside the timing windows: loading, opening, warm-ups. Medians over rounds.

    python bench/peer_gpus.py oracle-27b-0.8.gguf --bin peer/bin --devices cuda:0,cuda:1 --modes plain,mtp:3
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import llamacpp
import numpy as np
from peer_llamacpp import oracle_rule, prefill_speed

from luce.bench.batch import Batch
from luce.bench.oracle_model import wrong_tokens
from luce.bench.origin import command_text, origin, print_row
from luce.bench.run import Bench, Case, Mode, Settings, parse_modes
from luce.bench.summary import five_digits
from luce.decode.engine import Engine
from luce.errors import Error
from luce.planning.opened import Files
from luce.planning.plan import Options

TIMING = " ".join(__doc__.split("\n\n")[1].split())
PROMPT_TOKENS = 32
JOINED = {"auto": ",", "tensor": "+"}
Figures = dict[str, Any]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def cases(files: Files, count: int) -> list[Case]:
    """Makes random prompts of ids that an oracle file has answers to."""
    rule = oracle_rule(files.file.kv)
    n_ids = rule.n_cycle if rule else len(files.file.kv["tokenizer.ggml.tokens"]) - 16
    rng = np.random.default_rng(1)
    return [Case(f"random {i}", tuple(int(t) for t in rng.integers(0, n_ids, PROMPT_TOKENS))) for i in range(count)]


def prompts_of(files: Files, args: argparse.Namespace) -> Iterator[Figures]:
    """Reads prompts of each length, with the chunk that the plan has and with each of --chunks."""
    longest = max(args.lengths)
    for chunk in args.chunks:
        asked = Options(ctx=longest + 1, chunk=chunk or None, threads=args.threads, spec="off")
        with Engine.open(files, asked) as engine, engine.native.sequence() as sequence:
            tokens = [int(t) for t in np.random.default_rng(2).integers(0, 1000, longest)]
            for n in args.lengths:
                prefill_speed(sequence, tokens[:n])  # This warms up.
                speeds = [prefill_speed(sequence, tokens[:n]) for _ in range(args.rounds)]
                yield {"tokens": n, "chunk": engine.info.n_chunk, "prefill_tok_per_s": middle(speeds)}


def decoded_by(files: Files, args: argparse.Namespace) -> Iterator[Figures]:
    """Decodes one prompt in each mode."""
    rule, case = oracle_rule(files.file.kv), cases(files, 1)
    settings = Settings(args.n_gen, args.rounds, threads=args.threads)
    modes = [mode for mode in args.modes if mode.spec != "dflash" or files.drafter is not None]
    with Bench(files, modes, case, settings) as bench:
        records = list(bench.run())
    for mode in modes:
        own = [record for record in records if record.mode == mode.name]
        expected = rule.continuation(case[0].prompt[-1], args.n_gen) if rule else None
        yield {
            "mode": mode.name,
            "tok_per_s": middle([record.stats.tok_per_s or 0.0 for record in own]),
            "wrong": sum(wrong_tokens(record.tokens, expected) for record in own) if expected else None,
        }


def together_on(files: Files, args: argparse.Namespace) -> Iterator[Figures]:
    """Decodes several sequences in each mode that chains have."""
    modes = [mode for mode in args.modes if mode.spec != "dflash"]
    batch = Batch(files, modes, args.counts, cases(files, max(args.counts)), Settings(args.n_gen, threads=args.threads))
    with batch.model:
        for found in batch.run():
            yield {"mode": found.mode, "sequences": found.sequences, "tok_per_s": five_digits(found.tok_per_s)}


def ours(args: argparse.Namespace, device: str) -> Figures:
    """Returns what luce does on a device, or on several: "a,b" have layers each, "a+b" parts of matrices. Where it
    refuses the model there, its error is the row's end."""
    parts: list[tuple[str, Callable[[Files, argparse.Namespace], Iterator[Figures]]]] = [
        ("prompts", prompts_of), ("decoding", decoded_by), ("together", together_on)]  # fmt: skip
    found: Figures = {"name": "luce", "device": device}
    try:
        with Files(args.model, device=device, drafter=args.draft) as files:
            for name, measured in parts:
                began, found[name] = time.perf_counter(), []
                for row in measured(files, args):
                    found[name].append(row)
                    say(f"luce on {device}: {row}")
                say(f"({time.perf_counter() - began:.0f} s)")
    except Error as error:
        found["error"] = str(error)
        say(f"luce on {device}: {error}")
    return found


def theirs(args: argparse.Namespace, device: str, split: str | None) -> Figures:
    """Returns what llama.cpp does there. Where it fails, its error is the row."""
    options = ["-sm", split] if split else []
    found: Figures = {"name": "llama.cpp", "device": device, "split": split}
    try:
        speeds, plain = llamacpp.llama_bench(
            args.bin / "llama-bench", args.model, args.lengths, args.n_gen, args.threads, device, *options
        )
        found["prompts"] = [{"tokens": n, "prefill_tok_per_s": five_digits(v)} for n, v in speeds.items()]
        found["decoding"] = [{"mode": "plain", "tok_per_s": five_digits(plain)}]
        batched = llamacpp.llama_batched_bench(
            args.bin / llamacpp.BATCHED, args.model, PROMPT_TOKENS, args.n_gen, args.counts, args.threads, device,
            *options,
        )  # fmt: skip
        found["together"] = [
            {"mode": "plain", "sequences": n, "tok_per_s": five_digits(v)} for n, v in batched.items()
        ]
    except llamacpp.PeerError as error:
        found["error"] = str(error)[-300:]
    say(f"llama.cpp on {device} {split or ''}: { {k: v for k, v in found.items() if k not in ('name', 'device')} }")
    return found


def middle(values: list[float]) -> float:
    return five_digits(statistics.median(values))


def measure(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Returns all devices, as the core names them, and the result row."""
    one, several = args.devices[0], ",".join(args.devices)
    parts = [partial(ours, args, one)]
    parts += [partial(ours, args, several.replace(",", JOINED[split])) for split in args.split]
    parts += [partial(theirs, args, *on) for on in ((several, "layer"), (several, "tensor"), (one, None))]
    rows = []
    try:
        for part in parts:
            rows.append(part())
    except KeyboardInterrupt:
        say("interrupted: the row has the parts that had ended by then")
    command = ["bench/peer_gpus.py", args.model.name, "--devices", several, "--split", ",".join(args.split)]
    for name in ("threads", "n_gen", "rounds"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    for name in ("lengths", "chunks", "counts"):
        command += [f"--{name}", ",".join(map(str, getattr(args, name)))]
    command += ["--modes", ",".join(mode.name for mode in args.modes)]
    command += ["--draft", args.draft.name] if args.draft else []
    head = origin("peer llama.cpp, several GPUs", several, args.model, command_text(command), args.threads, args.commit)
    return several, head | {"timing": TIMING, "rows": rows}


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def splits(text: str) -> list[str]:
    if unknown := set(found := text.split(",")) - set(JOINED):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected {' or '.join(JOINED)}")
    return found


def modes(text: str) -> list[Mode]:
    return parse_modes(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--bin", type=Path, metavar="DIR", required=True, help="folder of llama.cpp's programs")
    parser.add_argument("--devices", default="cuda:0,cuda:1", type=lambda text: text.split(","))
    parser.add_argument("--split", default="auto,tensor", type=splits, help="ways of sharing the model out")
    parser.add_argument("--draft", type=Path, help="a DFlash drafter's file, for modes of dflash")
    parser.add_argument("--modes", default="plain,mtp:3", type=modes)
    parser.add_argument("--lengths", default="2048,8192", type=numbers)
    parser.add_argument("--chunks", default="0", type=numbers, help="n_chunk; 0: luce's own choice")
    parser.add_argument("--counts", default="1,4,16", type=numbers, help="sequences that decode together")
    parser.add_argument("--n-gen", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--commit", help="of luce, where this is no git checkout")
    parser.add_argument("--save", type=Path, metavar="DIR", help="folder for the result row")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    try:
        _, row = measure(args)
        print_row(row, args.save, f"gpus-{args.model.stem}-gpu")
    except (Error, llamacpp.PeerError, OSError) as error:
        raise SystemExit(f"peer_gpus: error: {error}") from None


if __name__ == "__main__":
    main()
