#!/usr/bin/env python3
"""Reckons what cards that nobody here has should give: the tables of docs/gpus.md, which nobody has measured.

    python3 bench/reckon.py             print the tables
    python3 bench/reckon.py --write     write them into docs/gpus.md

A step takes the longest of three times, and what its launches cost:

    bytes      that it reads and writes / (0.9 * bandwidth of the data sheet)
    products   8 rows of 16 outputs and 16 values are one mma.sync, which a multiprocessor of a GeForce takes 8 clocks
               for: 256 products in F16 with F32 sums a clock, half of what it does with F16 sums
    issue      256 weights cost a warp 26 instructions with up to 16 rows and 30 with up to 32, of which a
               multiprocessor issues 4 a clock. They are counted in the loops over weights as CUDA 13.0 assembles them
               for 8.6: the median of 14 loops, which types of weights have of their own, of 17 to 34

Launches cost 1.0 ms a step where one begins beside another (9.0 and above), as recorded on an H200, and twice that
elsewhere, which is assumed. Clocks are the boost clocks of data sheets; cards, multiprocessors and bandwidth are those
of tests/cuda/cards.h.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/gpus.md"
SHARE = 0.9  # of the bandwidth of the data sheet, as an H200 reaches it
OVERLAPPED, ONE_BY_ONE = 1.0, 2.0  # ms that a step's launches cost
HMMA_CLOCKS = 8
INSTRUCTIONS = {1: 26, 2: 26, 4: 30}  # of a warp for 256 weights, by the tiles of 8 rows
SCHEDULERS = 4
CLOCK_MHZ = {  # boost
    "RTX 3060 12 GB": 1777,
    "RTX 3090": 1695,
    "RTX 4070": 2475,
    "RTX 4090": 2520,
    "RTX 5060 Ti 16 GB": 2572,
    "RTX 5090": 2407,
}
ROWS = (8, 16, 32)


@dataclass(frozen=True)
class Card:
    """What a card is sold as."""

    name: str
    capability: int
    multiprocessors: int
    memory: int
    bandwidth: int


@dataclass(frozen=True)
class Model:
    """Bytes of a step of one row, GB; weights that it multiplies, billions; GB of a draft; GB that must fit a card."""

    name: str
    gb: float
    weights: float
    draft_gb: float
    file_gb: float


# Of a step: the bytes of the files' matrices, and DeltaNet's state, read and written. Of a draft of the 27B: what a
# round of 3 on an H200 takes beyond a step of 4 rows (2026-11-30-oracle-27b-one-h200 and
# 2026-11-24-sweep-oracle-27b-h200-13).
DENSE = Model("27B, Q4_K", 16.2, 26.9, 1.5, 18.5)
MODELS = (DENSE, Model("9B, Q8_0", 8.56, 8.1, 0, 9.5), Model("35B-A3B, Q4_K", 2.1, 3.0, 0, 22.3))
TOKENS_OF_3_DRAFTS = 2.83  # a round, where a draft is right with 0.8
H200 = {"27B, Q4_K": "209.5", "9B, Q8_0": "343.9", "35B-A3B, Q4_K": "682.6"}
H200_RATIOS = {8: "1.09", 16: "1.24", 32: "1.62"}


def cards() -> dict[str, Card]:
    """Reads tests/cuda/cards.h."""
    row = re.compile(r'\{"([^"]+)", (\d+), \d+, \d+, (?:small_card\((\d+)|(\w+))[^}]*?, (\d+), (\d+)\}')
    limits = {"A100_LIMITS": 108, "HOPPER_LIMITS": 132}
    return {
        name: Card(name, int(capability), int(small or limits[large]), int(memory), int(bandwidth))
        for name, capability, small, large, memory, bandwidth in row.findall((ROOT / "tests/cuda/cards.h").read_text())
    }


def fits(card: Card, model: Model) -> bool:
    """Says whether a card has room for a file, with 2 GB beside it."""
    return model.file_gb + 2 < card.memory * 1.074  # sold as GiB


def launches(card: Card) -> float:
    """Milliseconds that a step's launches cost."""
    return OVERLAPPED if card.capability >= 90 else ONE_BY_ONE


def parts(card: Card, model: Model, rows: int) -> dict[str, float]:
    """Milliseconds of a step of up to 32 rows by what bounds it."""
    tiles = 1 if rows <= 8 else 2 if rows <= 16 else 4
    clocks = card.multiprocessors * CLOCK_MHZ[card.name] * 1e3  # a millisecond, of all multiprocessors
    groups = model.weights * 1e9 / 256
    return {
        "bytes": model.gb / (SHARE * card.bandwidth) * 1e3,
        "products": groups * HMMA_CLOCKS * tiles / clocks,
        "issue": groups * INSTRUCTIONS[tiles] / SCHEDULERS / clocks,
    }


def step(card: Card, model: Model, rows: int) -> float:
    """Milliseconds of a step."""
    return max(parts(card, model, rows).values()) + launches(card)


def tables() -> str:
    """Both tables, as Markdown."""
    known = cards()
    shown = [known[name] for name in CLOCK_MHZ]
    h200 = known["H200"]
    names = " | ".join(c.name for c in shown)
    lines = [f"| reckoned: plain, tokens a second | bytes a token | {names} | H200: reckoned, recorded |"]
    lines.append("|---" * (len(shown) + 3) + "|")
    for model in MODELS:
        plain = [f"{1e3 / step(c, model, 1):.0f}" if fits(c, model) else "does not fit" for c in shown]
        own = 1e3 / (model.gb / (SHARE * h200.bandwidth) * 1e3 + OVERLAPPED)
        lines.append(f"| {model.name} | {model.gb:.1f} GB | {' | '.join(plain)} | {own:.0f}, {H200[model.name]} |")
    lines += ["", f"| reckoned: {DENSE.name} | step of one row, ms: bytes, products, issue, launches | "]
    lines[-1] += " | ".join(f"{rows} rows, in steps" for rows in ROWS) + " | 3 drafts, 0.8 of them right |"
    lines.append("|---" * (len(ROWS) + 3) + "|")
    for card in shown:
        if not fits(card, DENSE):
            continue
        one = step(card, DENSE, 1)
        of = ", ".join(f"{ms:.1f}" for ms in (*parts(card, DENSE, 1).values(), launches(card)))
        ratios = " | ".join(f"{step(card, DENSE, rows) / one:.2f}" for rows in ROWS)
        drafts = 3 * DENSE.draft_gb / (SHARE * card.bandwidth) * 1e3
        drafted = TOKENS_OF_3_DRAFTS * 1e3 / (step(card, DENSE, 4) + drafts)
        lines.append(f"| {card.name} | {of} | {ratios} | {drafted:.0f} |")
    lines.append(f"| H200, recorded | | {' | '.join(H200_RATIOS[rows] for rows in ROWS)} | 465 |")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page with its tables as they are reckoned now."""
    start, end = "<!-- bench/reckon.py -->\n", "<!-- end of bench/reckon.py -->\n"
    before, rest = page.split(start)
    return before + start + tables() + end + rest.split(end)[1]


def main() -> None:
    """Prints or writes the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write them into docs/gpus.md")
    if parser.parse_args().write:
        PAGE.write_text(written(PAGE.read_text()))
    else:
        print(tables(), end="")


if __name__ == "__main__":
    main()
