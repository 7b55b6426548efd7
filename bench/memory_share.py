#!/usr/bin/env python3
"""Says how much of the memory's speed plain decoding reaches, of rows that bench/peer_llamacpp.py has
recorded.

A plain step reads the weights of the trunk once; caches and activations are not counted. Its share is those
bytes times tokens a second, over what a kernel that only reads reaches on the same device
(bench/read_speed.cu); beside it stands the share of what the memory's clock and width give. llama.cpp's is
that of llama-bench.

    python bench/memory_share.py 2026-11-21-peer-oracle-9b-q8_0-0.8-gpu.json --read-speed read-speed.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from luce.bench.origin import write_row
from luce.bench.output import as_markdown
from luce.bench.summary import five_digits

METHOD = " ".join(__doc__.split("\n\n")[1].split())


def shares(row: dict[str, Any], speed: dict[str, float]) -> dict[str, Any]:
    """Returns a file's figures. `row` is of bench/peer_llamacpp.py, `speed` of bench/read_speed.cu."""
    per_token = row["bytes_per_token"]

    def share(tok_per_s: float) -> dict[str, float]:
        read = tok_per_s * per_token
        return {
            "tok_per_s": tok_per_s,
            "bytes_per_s": five_digits(read),
            "share_of_read_speed": five_digits(read / speed["read_bytes_per_s"]),
            "share_of_nominal": five_digits(read / speed["nominal_bytes_per_s"]),
        }

    ours = next(mode for mode in row["luce"] if mode["mode"] == "plain")
    theirs = next(peer for peer in row["llamacpp"] if peer["name"] == "llama-bench")
    return {"model": row["model"], "bytes_per_token": per_token,
            "luce": share(ours["tok_per_s"]), "llama.cpp": share(theirs["tok_per_s"])}  # fmt: skip


def measure(rows: list[dict[str, Any]], speed: dict[str, float]) -> dict[str, Any]:
    """Returns the result row. ValueError: the rows are not of one device and commit."""
    heads = [{key: row[key] for key in ("version", "commit", "device", "driver")} for row in rows]
    if any(head != heads[0] for head in heads):
        raise ValueError("the rows are of several devices, drivers or commits")
    head = {"bench": "memory share", "date": max(row["date"] for row in rows), **heads[0]}
    head["command"] = [row["command"] for row in rows]
    return head | {"method": METHOD, "memory": speed, "files": [shares(row, speed) for row in rows]}


def markdown(result: dict[str, Any]) -> str:
    """Makes a table with two lines for each file."""
    lines = []
    for file in result["files"]:
        for name in ("luce", "llama.cpp"):
            f, read = file[name], file["bytes_per_token"] / 1e9
            lines.append([file["model"]["file"], name, f"{f['tok_per_s']:.1f}", f"{read:.2f}",
                          f"{f['bytes_per_s'] / 1e12:.3f}", f"{f['share_of_read_speed']:.1%}",
                          f"{f['share_of_nominal']:.1%}"])  # fmt: skip
    speed = result["memory"]["read_bytes_per_s"] / 1e12, result["memory"]["nominal_bytes_per_s"] / 1e12
    title = [
        "file",
        "by",
        "tok/s",
        "GB a token",
        "TB/s",
        f"of {speed[0]:.2f} read",
        f"of {speed[1]:.2f} nominal",
    ]
    return as_markdown((title, lines))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, nargs="+", metavar="ROW.json")
    parser.add_argument(
        "--read-speed", type=Path, required=True, metavar="JSON", help="what read_speed printed"
    )
    parser.add_argument("--save", type=Path, metavar="DIR", help="folder for the result row")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    try:
        result = measure(
            [json.loads(path.read_text()) for path in args.rows], json.loads(args.read_speed.read_text())
        )
        print(f"on {result['device']}. {METHOD}\n\n{markdown(result)}", file=sys.stderr, flush=True)
        print(json.dumps(result, indent=1))
        if args.save is not None:
            print(f"wrote {write_row(args.save, 'memory-share', result)}", file=sys.stderr)
    except (OSError, ValueError, KeyError, StopIteration) as error:
        raise SystemExit(f"memory_share: error: {error!r}") from None


if __name__ == "__main__":
    main()
