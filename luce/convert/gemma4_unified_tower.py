"""Lays out the vision tower of Gemma 4's 12B (gemma4uv) as llama.cpp's mmproj: keys, names and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np

from luce.convert.gemma4_tower import IMAGE_SIZE, PREFIXES
from luce.convert.gguf_output import Planned, slabs
from luce.convert.hf_config import Section
from luce.convert.safetensors_reader import Checkpoint, as_f32
from luce.convert.tower_file import add_tower_keys, found_in
from luce.files.gemma4 import UNIFIED

_NAMES = {
    "v.patch_norm.1": "vision_embedder.patch_ln1", "v.patch_embd": "vision_embedder.patch_dense",
    "v.patch_norm.2": "vision_embedder.patch_ln2", "v.patch_norm.3": "vision_embedder.pos_norm",
    "mm.input_projection": "embed_vision.embedding_projection",
}  # fmt: skip
_POSITIONS = "v.position_embd.weight"


@dataclass(frozen=True)
class Config:
    """Hyperparameters of a tower. `n_embd` is its own width, and `n_out` that of the model that it serves. A row has
    `merge` x `merge` patches of `patch` x `patch` pixels."""

    n_embd: int = 3840
    n_out: int = 3840
    patch: int = 16
    merge: int = 3
    table_side: int = 1120  # Positions of each axis.
    eps: float = 1e-6
    n_layer: int = 0

    @property
    def values(self) -> int:
        return 3 * (self.patch * self.merge) ** 2


def is_unified(config: Section) -> bool:
    """Says whether config.json's tower is of this kind."""
    vision = config.section("vision_config") if "vision_config" in config else None
    return vision is not None and vision.get("model_type", str, "") == "gemma4_unified_vision"


def read_hparams(config: Section) -> Config:
    """Reads config.json's `vision_config`; pixels are as the published processor has them, of 0 to 1."""
    vision = config.section("vision_config")
    c = Config(
        n_embd=vision.size("mm_embed_dim"),
        n_out=config.section("text_config").size("hidden_size"),
        patch=vision.size("patch_size"),
        merge=vision.size("pooling_kernel_size"),
        table_side=vision.size("mm_posemb_size"),
        eps=float(vision.get("rms_norm_eps", float, 1e-6)),
    )
    vision.only("output_proj_dims", c.n_embd)
    return c


def shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Returns every tensor of the file with its shape in numpy's order."""
    d = c.n_embd
    norms = {f"v.patch_norm.{i}.{end}": (n,) for i, n in ((1, c.values), (2, d), (3, d)) for end in ("weight", "bias")}
    return norms | {
        "v.patch_embd.weight": (d, c.values), "v.patch_embd.bias": (d,), _POSITIONS: (2, c.table_side, d),
        "mm.input_projection.weight": (c.n_out, d),
    }  # fmt: skip


def hf_name(name: str) -> str:
    """Returns what the checkpoint calls a tensor of the file, behind `model.`."""
    if name == _POSITIONS:
        return "vision_embedder.pos_embedding"
    part, _, end = name.rpartition(".")
    return f"{_NAMES[part]}.{end}"


def add_keys(w: gguf.GGUFWriter, c: Config, name: str, file_type: int) -> None:
    """Writes the keys, as llama.cpp's converter does."""
    sizes = {
        "projection_dim": c.n_out, "image_size": IMAGE_SIZE, "patch_size": c.patch, "embedding_length": c.n_embd,
        "feed_forward_length": 0, "block_count": 0, "attention.head_count": 0,
    }  # fmt: skip
    add_tower_keys(w, name, file_type, sizes, c.eps, [0.0] * 3, [1.0] * 3)
    w.add_string("clip.vision.projector_type", UNIFIED)
    if c.merge != Config.merge:
        w.add_uint32("clip.vision.projector.scale_factor", c.merge)


def laid_out(name: str, shape: tuple[int, ...], x: Any) -> np.ndarray:
    """Returns a tensor of the checkpoint as the file has it: pixels by channel first, and positions by axis first."""
    if name == _POSITIONS:
        x = x.transpose(1, 0, 2)
    elif name in ("v.patch_embd.weight", "v.patch_norm.1.weight", "v.patch_norm.1.bias"):
        side = int((shape[-1] // 3) ** 0.5)
        x = np.moveaxis(x.reshape(*shape[:-1], side * side, 3), -1, -2)
    return np.ascontiguousarray(x).reshape(shape)


def planned(c: Config, name: str, shape: tuple[int, ...], checkpoint: Checkpoint) -> Planned:
    """Returns a tensor of the file, to be read from the checkpoint. Raises FileError where it is not there, or has
    another shape."""
    wanted = (c.table_side, 2, c.n_embd) if name == _POSITIONS else shape
    source = found_in(checkpoint, PREFIXES, hf_name(name), wanted)

    def rows() -> Iterator[np.ndarray]:
        return slabs(laid_out(name, shape, source.read()), as_f32)

    return Planned(name, shape, (source.name,), rows)
