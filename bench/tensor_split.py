#!/usr/bin/env python3
"""Says what splitting each matrix between two GPUs could bring, from measured parts.

A model is made whose layers have half of the heads, of the feed-forward's width and of the vocabulary, and the same
stream: what each of two GPUs would compute. Its plain step, and the whole model's, are as an engine times them when it
opens. What two GPUs exchange, twice a layer, is what bench/exchange.cu measures; its figure is given. The sum is the
least that a step takes: exchanges begin when the slower one has ended, and norms would be computed by both.

    python bench/tensor_split.py oracle-27b-0.8.gguf --exchange-us 8 --folder /somewhere
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from luce.bench.oracle_model import SHAPES, Oracle, Rule, write_oracle
from luce.decode.engine import Engine
from luce.planning.opened import Files
from luce.planning.plan import Options

ROWS = (1, 4, 8, 16)


def steps(path: Path, device: str) -> dict[int, float]:
    """Returns the seconds of a verifying step by its rows."""
    with Files(path, device=device) as files, Engine.open(files, Options(ctx=1024, rows=16, spec="off")) as engine:
        found = {cost.rows: cost.seconds for cost in engine.native.costs() if cost.drafts == 0}
    return {rows: found[rows] for rows in ROWS if rows in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="an oracle of the 27b's shape")
    parser.add_argument("--exchange-us", type=float, required=True, help="microseconds of one exchange")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--folder", type=Path, default=Path("."), help="where the half model is written")
    args = parser.parse_args()
    whole = SHAPES["27b"]
    half = replace(
        whole, n_head=whole.n_head // 2, n_head_kv=whole.n_head_kv // 2, n_v_head=whole.n_v_head // 2,
        n_k_head=whole.n_k_head // 2, n_ff=whole.n_ff // 2, n_vocab=whole.n_vocab // 2,
    )  # fmt: skip
    path = args.folder / "half-27b.gguf"
    write_oracle(Oracle(half, Rule(half.n_vocab), "mixed"), path, "27b", lambda done, total: None)
    exchanges = 2 * whole.n_layer * args.exchange_us * 1e-6
    all_of_it, a_half = steps(args.model, args.device), steps(path, args.device)
    for rows, seconds in all_of_it.items():
        split = a_half[rows] + exchanges
        print(f"{rows} rows: {1e3 * seconds:.3f} ms on one GPU; half of it {1e3 * a_half[rows]:.3f} ms and "
              f"{2 * whole.n_layer} exchanges {1e3 * exchanges:.3f} ms: {seconds / split:.2f} times")  # fmt: skip


if __name__ == "__main__":
    main()
