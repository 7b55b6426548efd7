"""Lays out the vision tower of a Qwen3.5/3.6/3.8 checkpoint as llama.cpp's mmproj: keys, names and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from luce.convert.gguf_output import Planned, slabs
from luce.convert.hf_config import Section, read_json
from luce.convert.safetensors_reader import Checkpoint, as_f32
from luce.convert.tower_file import add_tower_keys, found_in
from luce.errors import FileError, UnsupportedError

PREFIXES = ("model.visual.", "visual.")
FRAMES = 2  # A patch has so many; those of an image are the same.

_BLOCK = {
    "ln1": "norm1", "attn_qkv": "attn.qkv", "attn_out": "attn.proj",
    "ln2": "norm2", "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2",
}  # fmt: skip
_MERGER = {"v.post_ln": "merger.norm", "mm.0": "merger.linear_fc1", "mm.2": "merger.linear_fc2"}


@dataclass(frozen=True)
class Config:
    """Hyperparameters of a tower. `n_embd` is its own width, and `n_out` that of the model that it serves."""

    n_layer: int = 27
    n_embd: int = 1152
    n_ff: int = 4304
    n_head: int = 16
    n_out: int = 5120
    patch: int = 16
    merge: int = 2
    table_side: int = 48  # The table of positions is square.
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    eps: float = 1e-6


def read_hparams(config: Section, folder: Path) -> Config:
    """Reads config.json's `vision_config`, and what preprocessor_config.json says of pixels."""
    if "vision_config" not in config:
        raise FileError(f"{config.where}: key vision_config is missing: the checkpoint has no vision tower")
    vision = config.section("vision_config")
    vision.only("hidden_act", "gelu_pytorch_tanh")
    vision.only("temporal_patch_size", FRAMES)
    vision.only("in_channels", 3)
    if vision.get("deepstack_visual_indexes", list, []):
        raise UnsupportedError(f"{vision.where}: key deepstack_visual_indexes is not empty: luce has no deepstack")
    n_positions = vision.size("num_position_embeddings")
    side = round(n_positions**0.5)
    if side * side != n_positions:
        raise FileError(f"{vision.where}: key num_position_embeddings is {n_positions}, expected a square")
    path = folder / "preprocessor_config.json"
    pixels = Section(read_json(path) if path.exists() else {}, str(path))
    mean, std = (tuple(map(float, pixels.get(key, list, [0.5] * 3))) for key in ("image_mean", "image_std"))
    return Config(
        n_layer=vision.size("depth"),
        n_embd=vision.size("hidden_size"),
        n_ff=vision.size("intermediate_size"),
        n_head=vision.size("num_heads"),
        n_out=vision.size("out_hidden_size"),
        patch=vision.size("patch_size"),
        merge=vision.size("spatial_merge_size"),
        table_side=side,
        mean=mean,
        std=std,
    )


def shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Returns every tensor of the file with its shape in numpy's order."""
    d, ff, merged = c.n_embd, c.n_ff, c.n_embd * c.merge**2
    patch = (d, 3, c.patch, c.patch)
    found: dict[str, tuple[int, ...]] = {"v.patch_embd.weight": patch, "v.patch_embd.weight.1": patch}
    found |= {"v.patch_embd.bias": (d,), "v.position_embd.weight": (c.table_side**2, d)}
    of_block = {
        "ln1": (d,), "attn_qkv": (3 * d, d), "attn_out": (d, d),
        "ln2": (d,), "ffn_up": (ff, d), "ffn_down": (d, ff),
    }  # fmt: skip
    linear = {f"v.blk.{i}.{name}": shape for i in range(c.n_layer) for name, shape in of_block.items()}
    linear |= {"v.post_ln": (d,), "mm.0": (merged, merged), "mm.2": (c.n_out, merged)}
    for name, shape in linear.items():
        found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return found


def hf_name(name: str) -> str:
    """Returns what the checkpoint calls a tensor of the file, behind `model.visual.`."""
    if name.startswith("v.patch_embd."):
        return f"patch_embed.proj.{name.removesuffix('.1').rpartition('.')[2]}"
    if name == "v.position_embd.weight":
        return "pos_embed.weight"
    stem, _, end = name.rpartition(".")
    if stem in _MERGER:
        return f"{_MERGER[stem]}.{end}"
    _, _, block, part = stem.split(".")
    return f"blocks.{block}.{_BLOCK[part]}.{end}"


def add_keys(w: gguf.GGUFWriter, c: Config, name: str, file_type: int) -> None:
    """Writes the keys, as llama.cpp's converter does."""
    sizes = {
        "projection_dim": c.n_out, "image_size": c.patch * c.table_side, "patch_size": c.patch,
        "embedding_length": c.n_embd, "feed_forward_length": c.n_ff, "block_count": c.n_layer,
        "attention.head_count": c.n_head, "spatial_merge_size": c.merge,
    }  # fmt: skip
    add_tower_keys(w, name, file_type, sizes, c.eps, c.mean, c.std)
    w.add_string("clip.projector_type", "qwen3vl_merger")
    w.add_bool("clip.use_gelu", True)
    w.add_array("clip.vision.is_deepstack_layers", [False] * c.n_layer)


def type_of(name: str, shape: tuple[int, ...], kind: str) -> str:
    """Returns the type that a tensor has in a file of type `kind`, as in llama.cpp's files: vectors and positions F32,
    patches F16 in F16 files and else F32, and rows that do not fit into blocks F16."""
    if len(shape) < 2 or name == "v.position_embd.weight":
        return "F32"
    if len(shape) > 2:
        return "F16" if kind == "F16" else "F32"
    return "F16" if kind == "Q8_0" and shape[-1] % 32 else kind


def planned(c: Config, name: str, shape: tuple[int, ...], checkpoint: Checkpoint) -> Planned:
    """Returns a tensor of the file, to be read from the checkpoint. Raises FileError where it is not there, or has
    another shape."""
    frames = name.startswith("v.patch_embd.weight")
    source = found_in(checkpoint, PREFIXES, hf_name(name), (*shape[:2], FRAMES, *shape[2:]) if frames else shape)

    def rows(frame: int | None) -> Iterator[np.ndarray]:
        stored: Any = source.read()
        return slabs(stored if frame is None else np.ascontiguousarray(stored[:, :, frame]), as_f32)

    return Planned(name, shape, (source.name,), partial(rows, (1 if name.endswith(".1") else 0) if frames else None))
