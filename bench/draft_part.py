#!/usr/bin/env python3
"""Decides whether the NextN head should draft among a part of the vocabulary on a device: what a draft costs
among all tokens and among the first ones, as the engine measures it when it opens, and what that gives.

`gain` is tokens a second of chains among the part by those of chains among all tokens, each of the best
length, where a draft is right with a share. Among the part it is right with share * coverage. The coverage is
the part of a text's tokens that are among the first ones: of code and prose, by Qwen's vocabulary, the first
64k have 0.97 to 0.98. `luce bench oracle --coverage 0.975 --modes plain,mtp:3,mtp-part:3:64k` decodes so.

    python bench/draft_part.py oracle-27b-0.8.gguf --device cuda --save bench/results
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from luce.bench.origin import command_text, origin, print_row
from luce.bench.summary import five_digits
from luce.decode.engine import Engine
from luce.planning.opened import Files
from luce.planning.plan import MAX_GAMMA, PART, Options, part_of
from luce.speculate.prices import Costs


def best_rate(costs: Costs, share: float, part: bool) -> tuple[float, int]:
    """Returns the most tokens a second that chains give, and the length of these."""
    return max(
        (sum(share**i for i in range(n + 1)) / (costs.verify(n + 1) + n * costs.draft(1, part)), n)
        for n in range(1, MAX_GAMMA + 1)
    )


def gains(costs: Costs, coverages: tuple[float, ...] = (0.95, 0.975, 0.98)) -> list[dict[str, Any]]:
    """Compares both ways to draft, by the share of right drafts and the coverage of the part."""
    found = []
    for share in (0.6, 0.7, 0.8, 0.9):
        every, drafts = best_rate(costs, share, part=False)
        for coverage in coverages:
            among, part_drafts = best_rate(costs, share * coverage, part=True)
            found.append({
                "share": share, "coverage": coverage, "drafts": drafts, "drafts_among_part": part_drafts,
                "gain": five_digits(among / every),
            })  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--part", type=int, help=f"tokens of it; default {PART}, or a quarter")
    parser.add_argument("--commit", help="of luce, where this is no git checkout")
    parser.add_argument("--save", type=Path, metavar="DIR", help="folder for the result row")
    args = parser.parse_args()
    device = None if args.device == "auto" else args.device
    with Files(args.model, device=device) as files:
        n_vocab = len(files.file.kv["tokenizer.ggml.tokens"])
        part = args.part or part_of(n_vocab)
        options = Options(
            device, ctx=2048, threads=args.threads, spec="mtp", gamma=MAX_GAMMA, part=part
        )
        with Engine.open(files, options) as engine:
            costs, kind, threads = engine.costs, engine.model.info.device, engine.info.n_threads
    row = origin("draft part", kind, args.model, command_text(sys.argv), threads, args.commit)
    row["part"] = part
    row["ms"] = {
        "draft": five_digits(1000 * costs.draft(1)),
        "draft_among_part": five_digits(1000 * costs.draft(1, part=True)),
        **{f"verify_{n}": five_digits(1000 * costs.verify(n)) for n in (1, 2, 4, 8)},
    }
    row["gains"] = gains(costs)
    print_row(row, args.save, f"draft-part-{args.model.stem}-{'cpu' if kind == 'cpu' else 'gpu'}")


if __name__ == "__main__":
    main()
