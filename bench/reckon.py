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

A chunk of a prompt takes the sum of three:

    products   at a share of what the tensor cores do at most: a multiprocessor does 256 products a clock with sums in
               F32, 512 with sums in F16, 1,024 of int8 (NVIDIA's white papers)
    weights    that are read and written out as F16, at 0.9 of the bandwidth
    rest       attention, DeltaNet, norms: what an H200 took, by its bandwidth

Launches cost 1.0 ms a step where one begins beside another (9.0 and above), as recorded on an H200, and twice that
elsewhere, which is assumed. Clocks are the boost clocks of data sheets; cards, multiprocessors and bandwidth are those
of tests/cuda/cards.h.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/gpus.md"
FITS = ROOT / "docs/quickstart.md"
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

# Prompts of the 27B. The weights of its layers' matrices, {weights of one, how many}: FFNs, DeltaNet, attention.
FFN, DELTANET, ATTENTION = 3 * 5120 * 17408, 5120 * (10240 + 2 * 6144 + 96), 5120 * (12288 + 2 * 1024 + 6144)
LAYERS = 64 * FFN + 48 * DELTANET + 16 * ATTENTION
BYTES_OF_WEIGHT = 0.6  # Q4_K_M, about
CHUNKS = (1024, 2048)
PRODUCTS = {"F32": 256, "F16": 512, "int8": 1024}  # of a multiprocessor, a clock, by the sums
# cuBLAS is taken to reach so much with sums in F32. With sums in F16 it is what luce's kernel reached on an H200 whose
# tensor cores were made half as fast beside all else, as they are on these cards (each mma.sync issued twice). With
# int8 it is what ggml's MMQ reached: 9,266 tokens a second of an 8B in Q4_K_S on an RTX 4090, with all else
# that a prompt takes (llama.cpp's pull request 7860).
REACHED = {"F32": 0.95, "F16": 0.52, "int8": 2 * 7.5e9 * 9266 / (2 * 1024 * 128 * 2520e6)}
REST_OF_H200 = {1024: 22.5, 2048: 47.5}  # ms
PREFILL_RECORD = "2026-11-30-prompts-f16-sums-h200.txt"


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
    """GB that a step of one row moves, weights that it multiplies (billions), its file in docs/quickstart.md's table,
    tok/s of an H200."""

    name: str
    gb: float
    weights: float
    file: str
    recorded: float


# The rows of bench/results of which models and what an H200 does are read.
PLAIN = {
    # the weights that a step multiplies, billions; layers with DeltaNet, and their value heads; the published file
    "27B, Q4_K": ("2026-11-24-peer-oracle-27b-h200", 26.9, 48, 48, "Qwen3.6, 3.8 27B, Q4_K_M"),
    "9B, Q8_0": ("2026-11-22-peer-oracle-9b-q8_0-h200", 8.1, 24, 32, "Qwen3.5 9B, Q8_0"),
    "9B, Q6_K": ("2026-11-22-peer-oracle-9b-q6_k-h200", 8.1, 24, 32, "Qwen3.5 9B, Q6_K"),
    "35B-A3B, Q4_K": ("2026-11-24-peer-oracle-35b-a3b-h200", 3.0, 30, 32, "Qwen3.6 35B-A3B, Q4_K_M"),
}
STEPS = ("2026-11-24-sweep-oracle-27b-h200", "2026-11-24-sweep-oracle-27b-h200-13")  # the later says what both have
DRAFTED = "2026-11-30-oracle-27b-one-h200"
DRAFT_GB = 1.5  # a round of 3 drafts takes so much beyond a step of 4 rows there


def recorded(row: str) -> dict[str, Any]:
    """Reads a row of bench/results."""
    found: dict[str, Any] = json.loads((ROOT / f"bench/results/{row}.json").read_text())
    return found


def models() -> list[Model]:
    """Reads the models' rows."""
    found = []
    for name, (row, weights, layers, heads, file) in PLAIN.items():
        r = recorded(row)
        plain = next(mode["tok_per_s"] for mode in r["luce"] if mode["mode"] == "plain")
        state = layers * heads * 128 * 128 * 4 * 2  # F32, read and written
        found.append(Model(name, (r["bytes_per_token"] + state) / 1e9, weights, file, plain))
    return found


def steps_of_h200() -> dict[int, float]:
    """Ratio of a step of so many rows to one of one row, as recorded."""
    costs = [cost for row in STEPS for cost in recorded(row)["costs"]]
    return {cost["rows"]: cost["ratio"] for cost in costs if cost["ctx"] == 0 and cost["gamma"] == 0}


def cards() -> dict[str, Card]:
    """Reads tests/cuda/cards.h."""
    row = re.compile(r'\{"([^"]+)", (\d+), \d+, \d+, (?:small_card\((\d+)|(\w+))[^}]*?, (\d+), (\d+)\}')
    limits = {"A100_LIMITS": 108, "HOPPER_LIMITS": 132}
    return {
        name: Card(name, int(capability), int(small or limits[large]), int(memory), int(bandwidth))
        for name, capability, small, large, memory, bandwidth in row.findall((ROOT / "tests/cuda/cards.h").read_text())
    }


def fits(card: Card, model: Model) -> bool:
    """Says whether a card has room for a file, by docs/quickstart.md's table of what fits."""
    lines = FITS.read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("|")]
    header, row = (next(r for r in rows if r[1] == first) for first in ("model, type", model.file))
    return row[header.index(f"{card.memory} GB")] != "-"


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


def chunk_parts(card: Card, rows: int, sums: str) -> dict[str, float]:
    """Milliseconds of a chunk of a prompt of the 27B, by what takes them."""
    clocks = card.multiprocessors * CLOCK_MHZ[card.name] * 1e3  # a millisecond, of all multiprocessors
    written = BYTES_OF_WEIGHT + 2 if sums != "int8" else 0  # ggml's kernel reads the weights as they are
    return {
        "products": LAYERS * rows / (PRODUCTS[sums] * clocks * REACHED[sums]),
        "weights": LAYERS * written / (SHARE * card.bandwidth * 1e6),
        "rest": REST_OF_H200[rows] * cards()["H200"].bandwidth / card.bandwidth,
    }


def chunk(card: Card, rows: int, sums: str) -> float:
    """Milliseconds of a chunk of a prompt."""
    return sum(chunk_parts(card, rows, sums).values())


def prompts_table() -> list[str]:
    """Lines of the table of prompts."""
    lines = [
        "| reckoned: a chunk of a prompt, 27B, Q4_K | products with sums in F32, in F16, ms | weights as F16, ms "
        "| rest, ms | tokens a second: F32, F16 | gain | int8 as ggml's |",
        "|---" * 7 + "|",
    ]
    dense = models()[0]
    for card in (c for c in cards().values() if c.name in CLOCK_MHZ and fits(c, dense)):
        for rows in CHUNKS:
            f32, f16 = chunk_parts(card, rows, "F32"), chunk_parts(card, rows, "F16")
            speeds = {sums: rows / chunk(card, rows, sums) * 1e3 for sums in PRODUCTS}
            lines.append(
                f"| {card.name}, {rows:,} rows | {f32['products']:.0f}, {f16['products']:.0f} | {f16['weights']:.0f} "
                f"| {f16['rest']:.0f} | {speeds['F32']:.0f}, {speeds['F16']:.0f} | {speeds['F16'] / speeds['F32']:.2f} "
                f"| {speeds['int8']:.0f} |"
            )
    return lines


def tables() -> str:
    """All tables, as Markdown."""
    known = cards()
    shown = [known[name] for name in CLOCK_MHZ]
    h200 = known["H200"]
    names = " | ".join(c.name for c in shown)
    lines = [f"| reckoned: plain, tokens a second | bytes a token | {names} | H200: reckoned, recorded |"]
    lines.append("|---" * (len(shown) + 3) + "|")
    for model in models():
        plain = [f"{1e3 / step(c, model, 1):.0f}" if fits(c, model) else "does not fit" for c in shown]
        own = 1e3 / (model.gb / (SHARE * h200.bandwidth) * 1e3 + OVERLAPPED)
        lines.append(f"| {model.name} | {model.gb:.1f} GB | {' | '.join(plain)} | {own:.0f}, {model.recorded:.1f} |")
    dense = models()[0]
    lines += ["", f"| reckoned: {dense.name} | step of one row, ms: bytes, products, issue, launches | "]
    lines[-1] += " | ".join(f"{rows} rows, in steps" for rows in ROWS) + " | 3 drafts, 0.8 of them right |"
    lines.append("|---" * (len(ROWS) + 3) + "|")
    mode = next(mode for mode in recorded(DRAFTED)["modes"] if mode["mode"] == "mtp:3")
    for card in (card for card in shown if fits(card, dense)):
        of = ", ".join(f"{ms:.1f}" for ms in (*parts(card, dense, 1).values(), launches(card)))
        ratios = " | ".join(f"{step(card, dense, rows) / step(card, dense, 1):.2f}" for rows in ROWS)
        drafts = 3 * DRAFT_GB / (SHARE * card.bandwidth) * 1e3
        drafted = mode["mean_accepted_length"] * 1e3 / (step(card, dense, 4) + drafts)
        lines.append(f"| {card.name} | {of} | {ratios} | {drafted:.0f} |")
    own_steps = " | ".join(f"{steps_of_h200()[rows]:.2f}" for rows in ROWS)
    lines.append(f"| H200, recorded | | {own_steps} | {mode['tok_per_s']:.0f} |")
    return "\n".join([*lines, "", *prompts_table()]) + "\n"


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
