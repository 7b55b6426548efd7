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

from luce.bench import oracle_gemma4, oracle_model
from luce.bench.oracle_tokenizer import add_gemma4_tokenizer, add_tokenizer
from luce.convert import gemma4_layout, qwen35_layout
from luce.convert.weight_types import MIXES, choose
from luce.planning.memory import total
from luce.planning.opened import Files
from luce.planning.plan import AUTO_BUDGET, MAX_GAMMA, Options

PAGE = Path(__file__).resolve().parent.parent / "docs" / "quickstart.md"
BEGIN, END = "<!-- made by tools/make_fit_table.py -->\n", "<!-- end of what is made -->\n"
QWEN = {"Qwen3.5 9B": "9b", "Qwen3.6, 3.8 27B": "27b", "Qwen3.6 35B-A3B": "35b-a3b"}
GEMMA = {"Gemma 4 26B-A4B": "gemma4-26b-a4b", "Gemma 4 31B": "gemma4-31b"}
TYPES = ("Q4_K_M", "Q6_K", "Q8_0")
MEMORY_GB = (8, 12, 16, 24, 32, 48, 80)
CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072, 262144)
KEPT = 1 << 30  # The driver, the display and others have so much of the device.


def write(path: Path, shape: str, mix: str) -> Path:
    """Writes a file without weights of a shape in a mix of types, of Gemma 4 with one matrix for embeddings and
    output, as the published ones have it."""
    is_gemma = shape in oracle_gemma4.SHAPES
    layout, add_words = (gemma4_layout, add_gemma4_tokenizer) if is_gemma else (qwen35_layout, add_tokenizer)
    config = replace(oracle_gemma4.SHAPES[shape], tied=True) if is_gemma else oracle_model.SHAPES[shape]
    shapes = layout.tensor_shapes(config)
    types, _ = choose(MIXES[mix], shapes.items(), config.tied)
    w = gguf.GGUFWriter(path, config.arch)
    layout.add_keys(w, config, path.stem, MIXES[mix].file_type)
    add_words(w, config.n_vocab)
    write_without_weights(w, shapes, types.__getitem__)
    return path


def needed(path: Path, has_head: bool) -> dict[int, int]:
    """Returns the bytes that a run takes in all, by context: with drafts of the NextN head where the file has one, else
    with lookups."""
    drafting = {"spec": "mtp", "gamma": MAX_GAMMA} if has_head else {"spec": "lookup"}
    options = Options(ctx=CONTEXTS[0], budget=AUTO_BUDGET, **drafting)
    with Files(path, device="cpu") as files:
        return {n: total(files.memory(files.plan(replace(options, ctx=n)), n)) for n in CONTEXTS}


def row(name: str, size: int, by_context: dict[int, int]) -> str:
    cells = []
    for memory in MEMORY_GB:
        fitting = [n for n, taken in by_context.items() if taken + KEPT <= memory * 10**9]
        cells.append(f"{max(fitting) >> 10}K" if fitting else "-")
    return f"| {name} | {size / 1e9:.1f} GB | {' | '.join(cells)} |"


def table(types: tuple[str, ...] = TYPES) -> str:
    """Returns the lines of the table, with a row for each of the types."""
    lines = [f"| model, type | file | {' | '.join(f'{n} GB' for n in MEMORY_GB)} |"]
    lines.append(f"|---|---:|{'---:|' * len(MEMORY_GB)}")
    with tempfile.TemporaryDirectory() as folder:
        for model, shape in {**QWEN, **GEMMA}.items():
            for mix in types:
                path = write(Path(folder) / f"{shape}-{mix}.gguf", shape, mix)
                lines.append(row(f"{model}, {mix}", path.stat().st_size, needed(path, model in QWEN)))
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
