#!/usr/bin/env python3
"""Writes an oracle model, whose greedy continuation is known (luce/bench/oracle_model.py).

    python tools/make_oracle.py --shape 0.8b oracle-0.8b.gguf
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))  # oracle_tower.py

from oracle_tower import MARKS, TEMPLATE, make_tower

from luce.bench.acceptance import parse
from luce.bench.oracle_drafter import ACCEPT, make_drafter
from luce.bench.oracle_model import SHAPES, TYPES, Rule, make_oracle
from luce.planning.plan import MAX_BUDGET, MAX_GAMMA


def show_progress(done: int, total: int) -> None:
    """Shows one line on stderr, where that is a terminal."""
    if sys.stderr.isatty():
        print(f"\r{done / total:6.1%} ", end="", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a model with a known greedy continuation.")
    parser.add_argument("out", type=Path, nargs="?", help="GGUF to write; none: write nothing")
    parser.add_argument("--shape", choices=SHAPES, default="mini")
    parser.add_argument("--type", choices=TYPES, default="mixed", help="of the matrices")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--accept", default="0.8", help="share of right drafts, or shares by depth (default 0.8)")
    parser.add_argument("--drafter", type=Path, help="GGUF to write with a DFlash drafter of the model")
    parser.add_argument("--draft-accept", help="share of its right drafts, or shares by depth and rank")
    parser.add_argument("--tower", type=Path, help="GGUF to write with a random vision tower of the model")
    parser.add_argument("--tokens", type=int, metavar="N", help="print the N ids that follow --after")
    parser.add_argument("--after", type=int, default=0, help="last token of the prompt")
    args = parser.parse_args()
    if args.draft_accept is not None and not args.drafter:
        parser.error("--draft-accept is of --drafter")
    try:
        accept = parse(args.accept, "mtp", MAX_GAMMA)
        drafts = None if args.draft_accept is None else parse(args.draft_accept, "dflash", MAX_BUDGET)
    except ValueError as error:
        parser.error(str(error))
    start = time.monotonic()
    if args.out is not None:
        marks, template = (MARKS, TEMPLATE) if args.tower else ((), "")
        make_oracle(
            args.out, args.shape, args.seed, accept, show_progress, args.type, marks=marks, template=template
        )
        size = args.out.stat().st_size
        print(f"{args.out}: {size / 2**30:.2f} GiB in {time.monotonic() - start:.1f} s", file=sys.stderr)
    if args.tower is not None:
        make_tower(args.tower, SHAPES[args.shape].n_embd, f"luce oracle {args.shape}", args.seed)
    if args.drafter is not None:
        rule = Rule(SHAPES[args.shape].n_vocab, args.seed)
        make_drafter(args.drafter, SHAPES[args.shape], rule, ACCEPT if drafts is None else drafts)
    if args.tokens is not None:
        rule = Rule(SHAPES[args.shape].n_vocab, args.seed, accept)
        print(*rule.continuation(args.after, args.tokens))


if __name__ == "__main__":
    main()
