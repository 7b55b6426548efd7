#!/usr/bin/env python3
"""Measures how long an engine of a loaded model takes to open: to count and take its memory, and to run,
capture and time the graph of every width and draft that its steps will have.

The vocabulary is read and the weights are loaded once, each timed by itself: a prompt's tokens are counted
before its engine is planned. Each way to open is tried in turn, and the first time of each counts too: a
process opens one engine, and what the driver loads at its first kernel is part of that.

    python bench/opening.py oracle-27b-0.8.gguf --device cuda --save bench/results
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

from luce.bench.origin import command_text, origin, print_row
from luce.bench.summary import five_digits
from luce.decode.engine import Engine
from luce.planning.opened import Files
from luce.planning.plan import Options

WAYS = {"auto": Options(), "plain": Options(spec="off"), "auto, 16 sequences": Options(sequences=16)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda", help="cuda (default), cpu or cuda:N")
    parser.add_argument("--runs", type=int, default=5, help="open each way so many times")
    parser.add_argument("--commit", help="of luce, where this is no git checkout")
    parser.add_argument("--save", type=Path, metavar="DIR", help="folder for the result row")
    args = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    with Files(args.model, device=args.device) as files:
        plans = {name: files.plan(options) for name, options in WAYS.items()}
        began = time.perf_counter()
        n_vocab = files.tokenizer.n_vocab
        read = time.perf_counter() - began
        began = time.perf_counter()
        with files.load(plans.values()) as model:
            loaded = time.perf_counter() - began
            for _ in range(args.runs):
                for name, chosen in plans.items():
                    began = time.perf_counter()
                    with Engine.open(files, chosen, keep_drafters=True, model=model) as engine:
                        found[name].append(time.perf_counter() - began)
                        kind, threads = engine.model.info.device, engine.info.n_threads
    row = origin("opening", kind, args.model, command_text(sys.argv), threads, args.commit)
    row |= {"vocabulary": n_vocab, "vocabulary_s": five_digits(read), "load_s": five_digits(loaded)}
    row |= {"runs": args.runs, "seconds": {}}
    for name, seconds in found.items():
        row["seconds"][name] = {
            "first": five_digits(seconds[0]), "median": five_digits(statistics.median(seconds)),
            "most": five_digits(max(seconds)),
        }  # fmt: skip
    print_row(row, args.save, f"opening-{args.model.stem}-{'cpu' if kind == 'cpu' else 'gpu'}")


if __name__ == "__main__":
    main()
