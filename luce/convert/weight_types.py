"""Chooses the ggml type of each tensor of a converted file: llama.cpp's mixes, with two exceptions.

Q4_K_M and Q5_K_M (llama-quant.cpp) take Q4_K or Q5_K. They take Q6_K for the output matrix (and the embedding
where it serves as one), and, in the first and last eighth of the blocks and every third between, for attn_v,
attn_qkv and ffn_down. The exceptions: ssm_alpha and ssm_beta, which decide what the state forgets and are a
thousandth of the weights, and per_layer_model_proj, which llama.cpp leaves as it is, stay at Q8_0; and a row that does
not fit into blocks of 256 falls back to Q8_0, not to a legacy 4 or 5 bit type. Whatever the type, everything with one
dimension, norms, conv1d, the experts' router, an assistant's centroids and a drafter's confidence head are F32.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import gguf

QType: type[gguf.GGMLQuantizationType] = gguf.GGMLQuantizationType


@dataclass(frozen=True)
class Mix:
    """A mix has `base` for every matrix, and `better`, where there is one, for those that deserve more bits.
    """

    file_type: int  # It is general.file_type, by llama.cpp's llama_ftype.
    base: str
    better: str | None = None


MIXES = {
    "F32": Mix(0, "F32"),
    "F16": Mix(1, "F16"),
    "BF16": Mix(32, "BF16"),
    "Q8_0": Mix(7, "Q8_0"),
    "Q4_K_M": Mix(15, "Q4_K", "Q6_K"),
    "Q5_K_M": Mix(17, "Q5_K", "Q6_K"),
    "Q6_K": Mix(18, "Q6_K"),
}
DEFAULT = "Q8_0"

_MORE_BITS = re.compile(r"blk\.(\d+)\.(?:attn_v|attn_qkv|ffn_down|ffn_down_exps|ffn_down_shexp)\.weight")
_EXACT = re.compile(r"blk\.\d+\.ssm_(?:alpha|beta)\.weight|per_layer_model_proj\.weight")


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Says whether the tensor takes the file's type; the rest is F32."""
    small = any(part in name for part in ("norm", "conv1d", "ffn_gate_inp", "conf_proj", "attn_sinks", "centroids"))
    return name.endswith(".weight") and len(shape) > 1 and not small


def fitting(kind: str, row: int) -> str:
    """Returns the type itself, or where its blocks do not divide the row Q8_0, else F16."""
    for choice in (kind, "Q8_0", "F16"):
        if row % gguf.GGML_QUANT_SIZES[QType[choice]][0] == 0:
            return choice
    raise AssertionError("every row fits F16")


@dataclass(frozen=True)
class Fallback:
    """Tensors whose rows do not fit the type that they should have had."""

    row: int
    wanted: str
    got: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        shown = ", ".join(self.names[:3]) + (f" and {len(self.names) - 3} more" if self.names[3:] else "")
        block = gguf.GGML_QUANT_SIZES[QType[self.wanted]][0]
        return f"rows of {self.row} are no multiple of {block}: {self.got} instead of {self.wanted}: {shown}"


def choose(
    mix: Mix, tensors: Iterable[tuple[str, tuple[int, ...]]], tied: bool
) -> tuple[dict[str, str], list[Fallback]]:
    """Returns the type of each (name, shape), with shapes slowest first, and what fell back. `tied` says that
    the embedding is the output matrix too."""
    shapes = dict(tensors)
    blocks = sorted({int(name.split(".")[1]) for name in shapes if name.startswith("blk.")})
    rank = {block: i for i, block in enumerate(blocks)}
    types: dict[str, str] = {}
    fallbacks: dict[tuple[int, str, str], list[str]] = {}
    for name, shape in shapes.items():
        if not is_matrix(name, shape):
            types[name] = "F32"
            continue
        wanted = mix.base if mix.better is None else _mixed(mix, mix.better, name, rank, tied)
        types[name] = fitting(wanted, shape[-1])
        if types[name] != wanted:
            fallbacks.setdefault((shape[-1], wanted, types[name]), []).append(name)
    return types, [Fallback(*key, tuple(names)) for key, names in fallbacks.items()]


def _mixed(mix: Mix, better: str, name: str, rank: dict[int, int], tied: bool) -> str:
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        return better
    if _EXACT.fullmatch(name):
        return "Q8_0"
    match = _MORE_BITS.fullmatch(name)
    if match is None:
        return mix.base
    i, n = rank[int(match.group(1))], len(rank)
    return better if i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2 else mix.base
