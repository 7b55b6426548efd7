#!/usr/bin/env python3
"""Prices auto and fixed ways to draft on the texts of the 27b oracle, beside its NextN head and a DFlash2, by counts.

What an oracle's texts are and which drafts are right in them is known without running it (luce/bench/oracle_model.py).
So rounds are replayed as an engine on a GPU has them, begun ahead where they may be: `luce bench oracle` on an H200 had
the same number of rounds of each drafter. Each engine begins with neither drafter known, and has a warm-up of 32 tokens
and six texts of 192. `ratio` is what the best fixed way takes by what auto takes, over all engines.

    python bench/auto_on_oracle.py --engines 24
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))  # Its modules are used below.

import numpy as np
from listed import Fixed, K, Machine, Spent, Twice, chain, spend

from luce.bench.acceptance import CLASSES, NAMES, RANKS, parse
from luce.bench.oracle_drafter import BlockRule
from luce.bench.oracle_model import SHAPES, Rule
from luce.cli.stdout import as_json
from luce.native import Source
from luce.native.structs import Cost
from luce.planning.plan import AUTO_BUDGET, MAX_BUDGET, MAX_GAMMA
from luce.speculate.auto import Auto
from luce.speculate.drafting import Draft
from luce.speculate.prices import Costs

# ms of a 27b on an H200 by rows (2026-11-30-dflash2-block-h200.txt), of a draft, of feeds, and of a wait for the host.
VERIFY = {1: 4.868, 2: 5.036, 3: 5.107, 4: 5.135, 5: 5.209, 6: 5.236, 7: 5.25, 8: 5.372, 9: 5.778, 12: 5.891,
          16: 6.105, 23: 7.524, 32: 7.816}  # fmt: skip
DRAFT, FEEDS, TURN = 0.361, {1: 0.036, 32: 0.048}, 0.7
TEXTS, TOKENS, WARM_UP, BLOCK_ROWS, HEAD_DRAFTS = 6, 192, 32, 8, 8


@cache
def rules(cls: str) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Returns what follows each token, at which rank the drafter has it by depth, and where the head is right."""
    rule = Rule(SHAPES["27b"].n_vocab, accept=parse(cls, "mtp", MAX_GAMMA))
    block = BlockRule(rule, BLOCK_ROWS, parse(f"dflash2:{cls}", "dflash", MAX_BUDGET))
    return rule.perm, block.rank, [rule.right(depth) for depth in range(1, HEAD_DRAFTS + 1)]


@dataclass
class Text(Twice):
    """The oracle's text after a prompt that ends with the token `last`."""

    cls: str = "code"
    last: int = 0
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        follows = rules(self.cls)[0]
        self.tokens = [int(follows[self.last])]
        for _ in range(TOKENS + BLOCK_ROWS + HEAD_DRAFTS):
            self.tokens.append(int(follows[self.tokens[-1]]))

    def rank(self, depth: int) -> int:
        rank = int(rules(self.cls)[1][depth + 1, self.tokens[self.at]])
        return K if rank < 0 else rank

    def right(self, draft: Draft) -> int:
        if draft.by is not Source.NEXTN:
            return super().right(draft)
        right = rules(self.cls)[2]
        return next((d for d in range(draft.size) if not right[d][self.tokens[self.at + d]]), draft.size)


def fixed_head(n: int) -> Fixed:
    return lambda drafter, anchor, depth: Draft(on_device=min(n, depth), by=Source.NEXTN)


def price(cls: str, engines: int, block: float) -> dict[str, float]:
    verify = [Cost(rows, 0, ms) for rows, ms in VERIFY.items()]
    feeds = [Cost(rows, 4, ms) for rows, ms in FEEDS.items()]
    on = Machine(Costs([*verify, Cost(1, 1, DRAFT), Cost(1, 2, block), *feeds]), TURN)
    ways = {"dflash": chain(7), "mtp:3": fixed_head(3), "mtp:6": fixed_head(6)}
    found, fixed = Spent(), {name: Spent() for name in ways}
    random = np.random.default_rng(77)

    def text(last: int) -> Text:
        return Text(CLASSES["dflash2"][cls], RANKS, 0, chain=(0.0,) * HEAD_DRAFTS, cls=cls, last=last)

    for _ in range(engines):
        lasts = [int(last) for last in random.integers(0, Rule(SHAPES["27b"].n_vocab).n_begin, TEXTS)]
        auto = Auto(on.costs, AUTO_BUDGET, hidden=True)
        spend(text(lasts[0]), WARM_UP, on, auto, Spent())
        for last in lasts:
            spend(text(last), TOKENS - 1, on, auto, found)
            for name, way in ways.items():
                spend(text(last), TOKENS - 1, on, way, fixed[name])
    rates = {name: 1000 * out.rate for name, out in [("auto", found), *fixed.items()]}
    ratio = found.rate / max(out.rate for out in fixed.values())
    return {"ratio": round(ratio, 4)} | {f"{name} tok/s": round(rate, 1) for name, rate in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--engines", type=int, default=8, help="so many, each with six texts")
    parser.add_argument("--block", type=float, default=0.83, help="ms of a block of the drafter")
    args = parser.parse_args()
    print(as_json({cls: price(cls, args.engines, args.block) for cls in NAMES}, indent=1))


if __name__ == "__main__":
    main()
