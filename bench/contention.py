#!/usr/bin/env python3
"""Says how decoding fares beside busy neighbours: builds of luce in turn, under each condition, many times.

Each build, a source tree with its libraries installed, writes text with the model in the box, plain and on
as many threads as it is told, in a process that stays. A condition is a number of endless loops beside it, at
the same priority or with luce at `nice -n 19`. A sample is a short run of one build; builds take turns within
a round, so that other load hits all alike. It is recorded how many tokens a second there were, and what part
of the machine's CPUs the process had meanwhile.

    python bench/contention.py before=OTHER now=. --rounds 5 --save bench/results
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from luce.bench.origin import origin, write_row
from luce.decode.engine import Engine
from luce.decode.events import Tokens
from luce.decode.request import Request
from luce.planning import cpus
from luce.planning.plan import Options

ROOT = Path(__file__).resolve().parent.parent
BOX = ROOT / "luce/data/box.gguf"
# Each has so many busy loops, at this nice level.
CONDITIONS = {"idle": (0, 0), "1 loop": (1, 0), "2 loops": (2, 0), "nice 19, 2 loops": (2, 19)}
TOKENS = 16  # A text gets so many tokens.


def _is_over(end: float) -> bool:
    return time.perf_counter() > end


def serve(threads: int) -> None:
    """Writes, for each line on stdin, a number of seconds, what that long gave as JSON: tokens, seconds and
    CPU seconds."""
    with Engine.open(BOX, Options(spec="off", threads=threads, ctx=512)) as engine:
        request = Request(tuple(engine.tokenizer.encode("def fibonacci(n):\n")), TOKENS, ignore_eos=True)
        print("ready", flush=True)
        for line in sys.stdin:
            tokens, began, cpu = 0, time.perf_counter(), time.process_time()
            end = began + float(line)
            over = partial(_is_over, end)
            while not over():
                for event in engine.generate(request, over):
                    tokens += len(event.ids) if isinstance(event, Tokens) else 0
            said = (tokens, time.perf_counter() - began, time.process_time() - cpu)
            print(json.dumps(said), flush=True)


@contextmanager
def loops(count: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


class Build:
    """This is a process of one build at one priority."""

    def __init__(self, folder: str, threads: int, nice: int):
        own = {"PYTHONPATH": str(Path(folder).resolve())} if folder else {}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", "--threads", str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.nice(nice),
            env=os.environ | own,
        )  # fmt: skip
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"

    def sample(self, seconds: float) -> tuple[float, float]:
        """Returns tokens a second, and the part of all CPUs that the process had."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        tokens, wall, cpu = json.loads(self.process.stdout.readline())
        return tokens / wall, cpu / wall / cpus.usable()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(builds: dict[str, str], args: argparse.Namespace) -> dict[str, dict[str, object]]:
    samples: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with ExitStack() as opened:
        running: dict[tuple[str, int], Build] = {}
        for nice in sorted({CONDITIONS[condition][1] for condition in args.conditions}):
            for name, folder in builds.items():
                running[name, nice] = Build(folder, args.threads, nice)
                opened.callback(running[name, nice].close)
        for turn in range(args.rounds):
            for condition in args.conditions:
                count, nice = CONDITIONS[condition]
                names = list(builds)[turn % len(builds) :] + list(builds)[: turn % len(builds)]
                with loops(count):
                    for name in names:
                        found = running[name, nice].sample(args.seconds)
                        samples.setdefault((condition, name), []).append(found)
                        print(f"{condition}, {name}: {found[0]:.0f} tok/s", file=sys.stderr)
    result: dict[str, dict[str, object]] = {}
    for (condition, name), found_all in samples.items():
        rates, shares = zip(*found_all, strict=True)
        result.setdefault(condition, {})[name] = {
            "tok_per_s": round(statistics.median(rates), 1), "least": round(min(rates), 1),
            "most": round(max(rates), 1), "share_of_cpus": round(statistics.median(shares), 2),
        }  # fmt: skip
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure decoding beside busy neighbours.")
    parser.add_argument("builds", nargs="*", metavar="NAME=DIR",
                        help="a build's source tree; default: what is installed")  # fmt: skip
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a sample")
    parser.add_argument("--save", type=Path, metavar="DIR")
    parser.add_argument("--note", help="what else ran on the machine")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.threads)
        return
    load = os.getloadavg()
    builds = dict(one.split("=", 1) for one in args.builds) or {"installed": ""}
    row = origin("contention", "cpu", BOX, "bench/contention.py", args.threads, None)
    row |= {
        "note": args.note, "load_at_start": [round(x, 1) for x in load], "rounds": args.rounds,
        "seconds": args.seconds, "conditions": measure(builds, args),
    }  # fmt: skip
    print(json.dumps(row, indent=1))
    if args.save:
        write_row(args.save, "contention-box-cpu", row)


if __name__ == "__main__":
    main()
