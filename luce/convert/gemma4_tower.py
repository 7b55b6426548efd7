"""Lays out the vision tower of a Gemma 4 checkpoint (gemma4v) as llama.cpp's mmproj: keys, names and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from luce.convert.gguf_output import Planned, slabs
from luce.convert.hf_config import Section
from luce.convert.safetensors_reader import Checkpoint, as_f32
from luce.convert.tower_file import add_tower_keys, found_in
from luce.errors import FileError

PREFIXES = ("model.", "")
IMAGE_SIZE = 224  # llama.cpp's converter writes it; nothing reads it.
BOUNDS = ("input_min", "input_max", "output_min", "output_max")

_LINEAR = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_NORM = {
    "ln1": "input_layernorm", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "attn_post_norm": "post_attention_layernorm", "ln2": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}  # fmt: skip
_TOP = {
    "v.patch_embd.weight": "vision_tower.patch_embedder.input_proj.weight",
    "v.position_embd.weight": "vision_tower.patch_embedder.position_embedding_table",
    "v.std_bias": "vision_tower.std_bias",
    "v.std_scale": "vision_tower.std_scale",
    "mm.input_projection.weight": "embed_vision.embedding_projection.weight",
}


@dataclass(frozen=True)
class Config:
    """Hyperparameters of a tower. `n_embd` is its own width, and `n_out` that of the model that it serves."""

    n_layer: int = 27
    n_embd: int = 1152
    n_ff: int = 4304
    n_head: int = 16
    n_out: int = 5376
    patch: int = 16
    merge: int = 3
    table_side: int = 10240  # Positions of each axis.
    standardized: bool = True  # Rows are shifted and scaled ahead of the projection.
    clamped: bool = False  # Products clamp what they read and make.
    eps: float = 1e-6
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)


def read_hparams(config: Section, folder: Path) -> Config:
    """Reads config.json's `vision_config`; pixels are as the published processors have them, whose mean is 0."""
    if "vision_config" not in config:
        raise FileError(f"{config.where}: key vision_config is missing: the checkpoint has no vision tower")
    vision = config.section("vision_config")
    vision.only("model_type", "gemma4_vision")
    vision.only("hidden_activation", "gelu_pytorch_tanh")
    c = Config(
        n_layer=vision.size("num_hidden_layers"),
        n_embd=vision.size("hidden_size"),
        n_ff=vision.size("intermediate_size"),
        n_head=vision.size("num_attention_heads"),
        n_out=config.section("text_config").size("hidden_size"),
        patch=vision.size("patch_size"),
        merge=vision.size("pooling_kernel_size"),
        table_side=vision.size("position_embedding_size"),
        standardized=vision.get("standardize", bool, False),
        clamped=vision.get("use_clipped_linears", bool, False),
        eps=float(vision.get("rms_norm_eps", float, 1e-6)),
    )
    vision.only("head_dim", c.n_embd // c.n_head)
    vision.only("num_key_value_heads", c.n_head)
    rope = vision.section("rope_parameters") if vision.get("rope_parameters", dict, {}) else None
    if rope is not None:
        rope.only("rope_theta", 100.0)
    return c


def shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Returns every tensor of the file with its shape in numpy's order."""
    d, ff = c.n_embd, c.n_ff
    linear = {"attn_q": (d, d), "attn_k": (d, d), "attn_v": (d, d), "attn_out": (d, d),
              "ffn_gate": (ff, d), "ffn_up": (ff, d), "ffn_down": (d, ff)}  # fmt: skip
    found: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (d, 3, c.patch, c.patch),
        "v.position_embd.weight": (2, c.table_side, d),
    }
    for i in range(c.n_layer):
        p = f"v.blk.{i}"
        for name in _NORM:
            found[f"{p}.{name}.weight"] = (d // c.n_head if name.endswith(("q_norm", "k_norm")) else d,)
        for name, shape in linear.items():
            found[f"{p}.{name}.weight"] = shape
            if c.clamped:
                found |= {f"{p}.{name}.{bound}": (1,) for bound in BOUNDS}
    if c.standardized:
        found |= {"v.std_bias": (d,), "v.std_scale": (d,)}
    return found | {"mm.input_projection.weight": (c.n_out, d)}


def hf_name(name: str) -> str:
    """Returns what the checkpoint calls a tensor of the file, behind `model.`."""
    if name in _TOP:
        return _TOP[name]
    _, _, block, part, end = name.split(".")
    called = f"vision_tower.encoder.layers.{block}."
    if part in _NORM:
        return f"{called}{_NORM[part]}.weight"
    return f"{called}{_LINEAR[part]}.{'linear.weight' if end == 'weight' else end}"


def add_keys(w: gguf.GGUFWriter, c: Config, name: str, file_type: int) -> None:
    """Writes the keys, as llama.cpp's converter does."""
    sizes = {
        "projection_dim": c.n_out, "image_size": IMAGE_SIZE, "patch_size": c.patch, "embedding_length": c.n_embd,
        "feed_forward_length": c.n_ff, "block_count": c.n_layer, "attention.head_count": c.n_head,
    }  # fmt: skip
    add_tower_keys(w, name, file_type, sizes, c.eps, c.mean, c.std)
    w.add_string("clip.vision.projector_type", "gemma4v")
    if c.merge != Config.merge:
        w.add_uint32("clip.vision.projector.scale_factor", c.merge)


def laid_out(name: str, shape: tuple[int, ...], x: Any) -> np.ndarray:
    """Returns a tensor of the checkpoint as the file has it: patches by channel first, and bounds of one number."""
    if name == "v.patch_embd.weight":
        d, channels, patch, _ = shape
        x = x.reshape(d, patch, patch, channels).transpose(0, 3, 1, 2)
    return np.ascontiguousarray(x).reshape(shape)


def planned(c: Config, name: str, shape: tuple[int, ...], checkpoint: Checkpoint) -> Planned:
    """Returns a tensor of the file, to be read from the checkpoint. Raises FileError where it is not there, or has
    another shape."""
    wanted = (shape[0], 3 * c.patch**2) if name == "v.patch_embd.weight" else shape
    scalar = [()] if wanted == (1,) else []
    source = found_in(checkpoint, PREFIXES, hf_name(name), wanted, *scalar)

    def rows() -> Iterator[np.ndarray]:
        return slabs(laid_out(name, shape, source.read()), as_f32)

    return Planned(name, shape, (source.name,), rows)
