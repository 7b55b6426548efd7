#!/usr/bin/env python3
"""Compares a GGUF with the safetensors checkpoint that it was made from, tensor by tensor.

The relative error is ||gguf - hf|| / ||hf|| (Frobenius), of the dequantised weights and after the
transforms that a conversion has. A bad conversion looks like low acceptance, not like an error: here
a wrong order of heads shows as an error of about 1.4, a norm without its +1 as one near 1.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import gguf
import numpy as np

from luce.convert import hf_dflash, hf_qwen35
from luce.convert.gguf_output import Planned, tensor_bytes
from luce.convert.hf_config import read_config
from luce.convert.safetensors_reader import Checkpoint
from luce.errors import Error, UnsupportedError
from luce.files.probe import fact
from luce.native import File

EXAMPLES = """
examples:
  compare_weights.py Qwen3.5-9B qwen3.5-9b-q4_k_m.gguf
  compare_weights.py Qwen3.6-27B-DFlash drafter.gguf --max 0.01 --json

Typical errors: F32 0, BF16 of a BF16 checkpoint 0, F16 0.0002, Q8_0 0.005, Q6_K 0.018, Q5_K 0.036,
Q4_K 0.072.
Exit 1 where a tensor is missing on either side, has another shape, or is above --max.
"""
DEFAULT_MAX = 0.1
INTEGERS = {"I32": np.int32, "I64": np.int64}
SHARED = ("token_embd.weight", "output_norm.weight", "output.weight")  # A head alone may lack them.


@dataclass(frozen=True)
class Row:
    """This is one tensor. `status` is ok, above, missing (in the GGUF), extra (only there) or shape."""

    name: str
    type: str
    shape: tuple[int, ...]  # It is in ggml's order, the fastest first.
    error: float | None
    status: str


class Weights:
    """This is the GGUF's side: types, shapes and dequantised rows by name."""

    def __init__(self, file: File):
        self.file = file
        self.index = {tensor.name: i for i, tensor in enumerate(file.tensors)}

    def __contains__(self, name: str) -> bool:
        return name in self.index

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns numpy's order of a shape."""
        return tuple(reversed(self.file.tensors[self.index[name]].shape))

    def type_name(self, name: str) -> str:
        return self.file.tensors[self.index[name]].type_name

    def rows(self, name: str, start: int, count: int) -> np.ndarray:
        """Returns F32 or, for integers, int64 rows [start, start + count) of the tensor as a matrix."""
        kind = gguf.GGMLQuantizationType(self.file.tensors[self.index[name]].type)
        data = tensor_bytes(self.file, self.index[name])
        rows = data.reshape(math.prod(self.shape(name)[:-1]), -1)[start : start + count].copy()
        if kind.name in INTEGERS:
            return rows.view(INTEGERS[kind.name]).astype(np.int64)
        return gguf.quants.dequantize(rows, kind)


def planned(folder: Path, weights: Weights) -> list[Planned]:
    """Returns what the checkpoint says that the GGUF should hold."""
    kv = weights.file.kv
    arch = fact(kv, "general.architecture", str)
    checkpoint, config = Checkpoint(folder), read_config(folder)
    if arch == hf_dflash.ARCH:
        return hf_dflash.plan(hf_dflash.read_hparams(config), checkpoint)
    if arch not in ("qwen35", "qwen35moe"):
        raise UnsupportedError(f"architecture {arch}: luce compares qwen35, qwen35moe and dflash")
    part = "all" if fact(kv, f"{arch}.nextn_predict_layers", int, 0) else "trunk"
    if part == "all" and "blk.0.attn_norm.weight" not in weights:
        part = "mtp"
    names = hf_qwen35.plain_names(checkpoint, part)
    c = hf_qwen35.read_hparams(config, names)
    if c.arch != arch:
        raise UnsupportedError(f"the GGUF is {arch}, the checkpoint {c.arch}")
    tensors = hf_qwen35.plan(c, part, checkpoint, names)
    if part == "mtp":
        tensors = [t for t in tensors if t.name not in SHARED or t.name in weights]
    if c.tied and "output.weight" in weights:  # It is a copy of the embedding.
        (embedding,) = (t for t in tensors if t.name == "token_embd.weight")
        tensors.append(replace(embedding, name="output.weight"))
    return tensors


def relative_error(tensor: Planned, weights: Weights) -> float:
    """Computes ||gguf - hf|| / ||hf|| in F64 sums, where 0 / 0 is 0."""
    name, offset, per_expert = tensor.name, 0, 0
    if name not in weights:  # One tensor {E, 2 FF, n_expert} has gate over up.
        per_expert = tensor.shape[1]
        offset = 0 if "gate_exps" in name else per_expert
        name = _fused(name)
    difference = reference = 0.0
    row = 0
    for mine in _pieces(tensor, per_expert):
        start = row if not per_expert else row // per_expert * 2 * per_expert + row % per_expert + offset
        other = weights.rows(name, start, len(mine)).astype(np.float64)
        difference += float(np.square(other - mine).sum())
        reference += float(np.square(mine, dtype=np.float64).sum())
        row += len(mine)
    if difference == 0:
        return 0.0
    return math.sqrt(difference / reference) if reference else math.inf


def _pieces(tensor: Planned, limit: int) -> Iterator[np.ndarray]:
    """Yields the checkpoint's rows; where limit > 0, in pieces that do not cross a multiple of it."""
    if tensor.stored is not None:
        yield tensor.stored.view(INTEGERS[tensor.stored_type]).astype(np.int64)
        return
    row = 0
    for part in tensor.rows():
        while len(part):
            n = min(len(part), limit - row % limit) if limit else len(part)
            yield part[:n]
            part, row = part[n:], row + n


def _fused(name: str) -> str:
    return name.replace("ffn_gate_exps", "ffn_gate_up_exps").replace("ffn_up_exps", "ffn_gate_up_exps")


def compare(folder: Path, path: Path, limit: float = DEFAULT_MAX) -> list[Row]:
    """Yields a row for each tensor of either side, in file order."""
    rows = []
    with File(path) as file:
        weights = Weights(file)
        tensors = planned(folder, weights)
        seen = set()
        for tensor in tensors:
            name, shape = tensor.name, tensor.shape
            if name not in weights and _fused(name) in weights:
                name, shape = _fused(name), (shape[0], 2 * shape[1], shape[2])
            seen.add(name)
            wanted = tuple(reversed(tensor.shape))
            if name not in weights:
                rows.append(Row(tensor.name, "-", wanted, None, "missing"))
            elif weights.shape(name) != shape:
                found = tuple(reversed(weights.shape(name)))
                rows.append(Row(tensor.name, weights.type_name(name), found, None, "shape"))
            else:
                error = relative_error(tensor, weights)
                status = "ok" if error <= limit else "above"
                rows.append(Row(tensor.name, weights.type_name(name), wanted, error, status))
        for name in weights.index:
            if name not in seen:
                shape = tuple(reversed(weights.shape(name)))
                rows.append(Row(name, weights.type_name(name), shape, None, "extra"))
    return rows


def table(rows: list[Row]) -> Iterator[str]:
    width = max(len(row.name) for row in rows)
    yield f"{'tensor':{width}}  {'type':6}  {'shape':24}  {'rel. error':>10}"
    for row in rows:
        error = "" if row.error is None else f"{row.error:.3g}"
        status = "" if row.status == "ok" else f"  {row.status}"
        yield f"{row.name:{width}}  {row.type:6}  {'x'.join(map(str, row.shape)):24}  {error:>10}{status}"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("checkpoint", type=Path, help="folder with config.json and *.safetensors")
    made.add_argument("gguf", type=Path, help="the file made from it")
    limit = "largest error allowed (default: %(default)s)"
    made.add_argument("--max", type=float, default=DEFAULT_MAX, metavar="ERROR", help=limit)
    made.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return made


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        rows = compare(args.checkpoint, args.gguf, args.max)
    except (Error, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    bad = [row for row in rows if row.status != "ok"]
    worst = max((row for row in rows if row.error is not None), key=lambda row: row.error or 0, default=None)
    if args.json:
        listed = [asdict(row) for row in rows]
        print(json.dumps({"ok": not bad, "max": args.max, "worst": worst and worst.name, "tensors": listed}))
    else:
        print(*table(rows), sep="\n")
        if worst is not None:
            print(f"{len(rows)} tensors, worst {worst.name} at {worst.error:.3g}, {len(bad)} not ok")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
