#!/usr/bin/env python3
"""Says how much sooner the first token comes where a small model chooses what is read of a long prompt.

A prompt is so many tokens of Python files of this machine, others each time, since nothing of an earlier prompt
shall be there already; nothing is kept for later prompts either. Its first token is asked for twice in turn: with
all of the prompt read, and with the share that the scorer chooses. The time is from the call to the answer of one
token: to score the prompt, to read it and to choose. Outside: loading and opening both models, and one
short prompt of each way. What the models say is not looked at, so an oracle with made weights serves as well as a
real model.

    python bench/keep_speed.py oracle-27b.gguf oracle-0.8b.gguf --lengths 32000,100000 --save bench/results
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import luce
from luce.bench.origin import command_text, origin, print_row
from luce.bench.summary import five_digits

METHOD = " ".join(__doc__.split("\n\n")[1].split())


def texts(seed: int) -> Iterator[str]:
    """Yields Python files of this machine in an order of the seed."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(seed).shuffle(files)
    for file in files:
        yield file.read_text(errors="replace")


def prompt_of(model: luce.Model, length: int, seed: int) -> list[int]:
    """Returns `length` tokens of files, which begin otherwise for each seed."""
    tokens = list[int]()
    for text in texts(seed):
        tokens += model.encode(text)
        if len(tokens) >= length:
            return tokens[:length]
    raise SystemExit(f"this machine's Python has no {length} tokens: ask for fewer with --lengths")


def timed(model: luce.Model, prompt: list[int], keep: float | None) -> tuple[float, luce.Answer]:
    began = time.perf_counter()
    answer = model.generate(prompt, max_tokens=1, temperature=0, prefill_keep=keep)
    return time.perf_counter() - began, answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("scorer", type=Path)
    parser.add_argument("--device", default="cuda", help="cuda (default), cpu or cuda:N")
    parser.add_argument("--lengths", default="32000,100000", help="of prompts, in tokens (default: %(default)s)")
    parser.add_argument("--keep", type=float, default=0.1, help="this share is read (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="prompts of each length (default: %(default)s)")
    parser.add_argument("--commit", help="of luce, where this is no git checkout")
    parser.add_argument("--save", type=Path, metavar="DIR", help="folder for the result row")
    args = parser.parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]
    found = list[dict[str, Any]]()
    with luce.load(
        args.model, device=args.device, ctx=max(lengths) + 8, draft="off", checkpoints=0, prefill_model=args.scorer
    ) as model:
        device = model.info.device
        for keep in (None, args.keep):
            timed(model, prompt_of(model, min(*lengths, 2000), -1), keep)
        for length in lengths:
            seconds: dict[str, list[float]] = {"whole": [], "kept": []}
            read = list[int]()
            for seed in range(args.runs):
                prompt = prompt_of(model, length, length + seed)
                seconds["whole"].append(timed(model, prompt, None)[0])
                took, answer = timed(model, prompt, args.keep)
                seconds["kept"].append(took)
                assert answer.prefill is not None
                read.append(answer.prefill.read)
            whole, kept = (statistics.median(seconds[way]) for way in ("whole", "kept"))
            found.append({
                "prompt_tokens": length, "read": read, "whole_s": five_digits(whole), "kept_s": five_digits(kept),
                "times_sooner": five_digits(whole / kept),
                "all_s": {way: [five_digits(one) for one in each] for way, each in seconds.items()},
            })  # fmt: skip
            print(f"{length} tokens: {whole:.3f} s whole, {kept:.3f} s kept", file=sys.stderr, flush=True)
    row = origin("keep speed", device, args.model, command_text(sys.argv), 0, args.commit)
    row |= {"method": METHOD, "scorer": args.scorer.name, "keep": args.keep, "prompts": found}
    print_row(row, args.save, f"keep-speed-{args.model.stem}")


if __name__ == "__main__":
    main()
