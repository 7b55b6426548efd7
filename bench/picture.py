#!/usr/bin/env python3
"""Draws README's picture, tokens a second by drafts a round, from a row that bench/peer_llamacpp.py recorded.

    python bench/picture.py bench/results/2026-11-24-peer-oracle-27b-h200.json bench/tokens-by-drafts.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402

Points = list[tuple[int, float]]  # Each has the drafts of a round and the tokens a second.


def drafts(mode: str) -> int | None:
    """Reads "plain" and "mtp:N" as numbers; auto is None."""
    kind, _, number = mode.partition(":")
    return {"plain": 0, "mtp": int(number or 0)}.get(kind)


def points(row: dict[str, Any]) -> tuple[Points, Points]:
    """Returns the points of luce, and of llama-server."""
    luce = [(drafts(mode["mode"]), mode["tok_per_s"]) for mode in row["luce"]]
    servers = [one for one in row["llamacpp"] if one["name"].startswith("llama-server")]
    server = [(drafts(one["compared_with"].removeprefix("luce ")), one["tok_per_s"]) for one in servers]
    luce_, server_ = ([(n, rate) for n, rate in of if n is not None] for of in (luce, server))
    return luce_, server_


def draw(row: dict[str, Any], path: Path) -> None:
    luce, server = points(row)
    auto = next((mode["tok_per_s"] for mode in row["luce"] if mode["mode"] == "auto"), None)
    pyplot.rcParams["svg.hashsalt"] = "luce"  # With it, the same row always gives the same bytes.
    figure, axes = pyplot.subplots(figsize=(6.4, 3.2), layout="constrained")
    for name, found, colour in (("luce", luce, "tab:blue"), ("llama-server", server, "tab:gray")):
        axes.plot(*zip(*found, strict=True), marker="o", label=name, color=colour)
    if auto is not None:
        axes.axhline(auto, linestyle="--", color="tab:blue", label="luce, as many as pay (auto)")
    axes.set(xlabel="drafts a round (0: plain)", ylabel="tokens a second", ylim=(0, None))
    axes.set_xticks([n for n, _ in luce])
    axes.set_title(f"{row['model']['file'].removesuffix('.gguf')} on one {row['device']}", fontsize=10)
    axes.legend(frameon=False)
    figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw tokens a second by drafts a round.")
    parser.add_argument("row", type=Path)
    parser.add_argument("svg", type=Path)
    args = parser.parse_args()
    draw(json.loads(args.row.read_text(encoding="utf-8")), args.svg)


if __name__ == "__main__":
    main()
