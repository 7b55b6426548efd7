#!/usr/bin/env python3
"""Measures how long `luce generate` takes to start: whole processes, which read the box and write one token.

A process counts from its start to its end, in seconds of the clock and in CPU seconds of its threads. Three
are run in turn. One prints the help, and has then imported what a generation needs. One writes a token. One
writes it without drafts, and times no wide steps as it opens. The least seconds of the clock say what a quiet
machine takes; the CPU seconds say it on a busy one too.

    python bench/start.py --runs 20 --save bench/results
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from luce.bench.origin import origin, write_row
from luce.planning import cpus

BOX = Path(__file__).resolve().parent.parent / "luce/data/box.gguf"
PROMPT = ["generate", "def is_even(n):", "-n", "1", "--quiet"]
COMMANDS = {"help": ["generate", "--help"], "one token": PROMPT, "plain": [*PROMPT, "--spec", "off"]}


def run(words: list[str]) -> tuple[float, float]:
    """Returns the seconds of the clock and the CPU seconds that a process of luce takes."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    # In another folder, since Python would take this clone's luce before the one that is installed.
    command = [sys.executable, "-m", "luce", *words]
    subprocess.run(command, stdout=subprocess.DEVNULL, cwd=BOX.parent, check=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how long luce generate takes to start.")
    parser.add_argument("--runs", type=int, default=20, help="run each command so many times")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write a result row to this folder")
    parser.add_argument("--note", help="say what else ran on the machine")
    args = parser.parse_args()
    load = os.getloadavg()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(args.runs + 1):
        for name, words in COMMANDS.items():
            found[name].append(run(words))
    row = origin("start", "cpu", BOX, "bench/start.py", cpus.usable(), None)
    row |= {"note": args.note, "load_at_start": [round(x, 1) for x in load], "runs": args.runs, "seconds": {}}
    for name, samples in found.items():
        # The first run reads the files into memory, so it does not count.
        walls, used = zip(*samples[1:], strict=True)
        row["seconds"][name] = {
            "least": round(min(walls), 3), "median": round(statistics.median(walls), 3),
            "cpu_least": round(min(used), 3), "cpu_median": round(statistics.median(used), 3),
        }  # fmt: skip
    print(json.dumps(row, indent=1))
    if args.save:
        write_row(args.save, "start-box-cpu", row)


if __name__ == "__main__":
    main()
