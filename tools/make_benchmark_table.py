#!/usr/bin/env python3
"""Writes the table of docs/benchmarks.md, and of README, from recorded rows (bench/results).

    python tools/make_benchmark_table.py
"""

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "README.md")
BEGIN, END = "<!-- made by tools/make_benchmark_table.py -->\n", "<!-- end of what is made -->\n"
MODES = ("plain", "mtp:1", "mtp:2", "mtp:3", "auto")
# What is said of a row, the row, and what is synthetic about its figures.
SYNTHETIC = "synthetic weights, 0.8 of the drafts right"
MIXED = "synthetic weights, drafts right as reported of a mixture of texts; auto with a DFlash2 drafter"
ASSISTED = "synthetic weights, 0.8 of an assistant's drafts right; a prompt of 2,048"
PEERS = (
    ("27B, Q4_K, one H200, a mixture", "2026-11-29-peer-dflash2-oracle-27b-mixed-h200.json", MIXED),
    ("27B, Q4_K, one H200", "2026-11-24-peer-oracle-27b-h200.json", SYNTHETIC),
    ("35B-A3B, Q4_K, one H200", "2026-11-24-peer-oracle-35b-a3b-h200.json", SYNTHETIC),
    ("Gemma 4 31B, Q4_K, one H200", "2026-11-30-peer-assistant-oracle-gemma4-31b-h200.json", ASSISTED),
)
BOX = ("the small model, Q8_0, 2 CPU cores", "2026-11-22-prompts-box-cpu-3.json", "real weights and prompts")


def read(name: str) -> dict[str, Any]:
    row: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return row


def number(value: float | None) -> str:
    """Returns a rate with four digits, or nothing."""
    return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def line(title: str, rates: dict[str, float], prefill: float | None, what: str, row: str) -> str:
    cells = [number(rates.get(mode)) for mode in MODES]
    return f"| {title} | {' | '.join(cells)} | {number(prefill)} | {what} | {row} |"


def table() -> str:
    """Returns the lines of the table: decoded tokens a second, and those of a prompt of 512 in an empty context,
    where nothing else is said."""
    lines = ["| | plain | 1 draft | 2 drafts | 3 drafts | auto | prefill | what is synthetic | row |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---|---|")
    for title, name, what in PEERS:
        row, at = read(name), name.removesuffix(".json")
        ours = {each["mode"]: each["tok_per_s"] for each in row["luce"]}
        theirs = {
            each["name"].removeprefix("llama-server").strip() or "plain": each["tok_per_s"]
            for each in row["llamacpp"]
            if each["name"].startswith("llama-server")
        }
        (prefill,) = (e["prefill_tok_per_s"] for e in row["llamacpp"] if e["name"] == "llama-bench")
        lines.append(line(f"{title}: luce", ours, row["luce_prefill"]["prefill_tok_per_s"], what, f"`{at}`"))
        lines.append(line("llama.cpp, same file, same run", theirs, prefill, "the same", "the same"))
    title, name, what = BOX
    modes = {each["mode"]: each for each in read(name)["modes"]}
    rates = {mode: each["tok_per_s"] for mode, each in modes.items()}
    prefill = modes["plain"]["prefill_tok_per_s"]
    lines.append(line(f"{title}: luce", rates, prefill, what, f"`{name.removesuffix('.json')}`"))
    return "\n".join(lines) + "\n"


def made(page: str) -> str:
    """Returns a page with the table as it is made now."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{table()}\n{END}{after}"


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for path in PAGES:
        path.write_text(made(path.read_text(encoding="utf-8")), encoding="utf-8")
