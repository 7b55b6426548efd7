#!/usr/bin/env python3
"""Writes the table of docs/quickstart.md that says which file fits which memory, by the arithmetic of
`luce probe-gguf`.

    python tools/make_fit_table.py

The files have the shapes of the published models and the types that `luce convert` gives them, and no weights.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # luce, where it is not installed.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))  # Its modules are used below.

import gguf
from hollow import write_without_weights

from luce.bench.oracle_model import SHAPES
from luce.bench.oracle_tokenizer import add_tokenizer
from luce.convert.qwen35_layout import Config, add_keys, tensor_shapes
from luce.convert.weight_types import MIXES, choose
from luce.planning.memory import total
from luce.planning.opened import Files
from luce.planning.plan import AUTO_BUDGET, MAX_GAMMA, Options

PAGE = Path(__file__).resolve().parent.parent / "docs" / "quickstart.md"
BEGIN, END = "<!-- made by tools/make_fit_table.py -->\n", "<!-- end of what is made -->\n"
MODELS = {"9B": "9b", "27B": "27b", "35B-A3B": "35b-a3b"}
TYPES = ("Q4_K_M", "Q6_K", "Q8_0")
MEMORY_GB = (8, 12, 16, 24, 32, 48, 80)
CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072, 262144)
KEPT = 1 << 30  # The driver, the display and others have so much of the device.


def write(path: Path, config: Config, mix: str) -> Path:
    """Writes a file without weights of a shape in a mix of types."""
    shapes = tensor_shapes(config)
    types, _ = choose(MIXES[mix], shapes.items(), config.tied)
    w = gguf.GGUFWriter(path, config.arch)
    add_keys(w, config, path.stem, MIXES[mix].file_type)
    add_tokenizer(w, config.n_vocab)
    write_without_weights(w, shapes, types.__getitem__)
    return path


def needed(path: Path) -> dict[int, int]:
    """Returns the bytes that a run with drafts of the NextN head takes in all, by context."""
    options = Options(ctx=CONTEXTS[0], spec="mtp", gamma=MAX_GAMMA, budget=AUTO_BUDGET)
    with Files(path, device="cpu") as files:
        return {n: total(files.memory(files.plan(replace(options, ctx=n)), n)) for n in CONTEXTS}


def row(name: str, size: int, by_context: dict[int, int]) -> str:
    cells = []
    for memory in MEMORY_GB:
        fitting = [n for n, taken in by_context.items() if taken + KEPT <= memory * 10**9]
        cells.append(f"{max(fitting) >> 10}K" if fitting else "-")
    return f"| {name} | {size / 1e9:.1f} GB | {' | '.join(cells)} |"


def table() -> str:
    """Returns the lines of the table."""
    lines = [f"| model, type | file | {' | '.join(f'{n} GB' for n in MEMORY_GB)} |"]
    lines.append(f"|---|---:|{'---:|' * len(MEMORY_GB)}")
    with tempfile.TemporaryDirectory() as folder:
        for model, shape in MODELS.items():
            for mix in TYPES:
                path = write(Path(folder) / f"{shape}-{mix}.gguf", SHAPES[shape], mix)
                lines.append(row(f"{model}, {mix}", path.stat().st_size, needed(path)))
                path.unlink()
    return "\n".join(lines) + "\n"


def made(page: str) -> str:
    """Returns the page with the table as it is made now."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    PAGE.write_text(made(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
