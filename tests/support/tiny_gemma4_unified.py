"""Makes a tiny random vision tower of Gemma 4's 12B, in transformers' layout first and then as the GGUF that
luce.convert lays out. It fits the models of tiny_gemma4_vision that have no per-layer embeddings."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import tiny
import tiny_vision

from luce.convert.gemma4_unified_tower import Config, add_keys, hf_name, laid_out, shapes
from luce.convert.qwen35_tower import type_of

CONFIG, SEED = Config(n_embd=64, n_out=64, table_side=30), 15


def weights(c: Config = CONFIG, seed: int = SEED) -> dict[str, np.ndarray]:
    """Returns the state dict of a checkpoint's tower and its projection, F32, by names behind `model.`."""
    rng = tiny._Random(seed)
    made: dict[str, np.ndarray] = {}
    for name, shape in shapes(c).items():
        if name == "v.position_embd.weight":
            value = rng.uniform(-1, 1, c.table_side, 2, c.n_embd)
        elif len(shape) > 1:
            value = rng.matrix(shape[0], shape[1], 1.5)
        elif name.endswith("bias"):
            value = rng.uniform(-0.5, 0.5, *shape)
        else:
            value = rng.uniform(0.5, 1.5, *shape)
        made[hf_name(name)] = np.asarray(value, np.float32)
    return made


def hf_config(c: Config = CONFIG) -> dict[str, object]:
    """Returns the arguments of transformers' Gemma4UnifiedVisionConfig."""
    return {
        "patch_size": c.patch, "pooling_kernel_size": c.merge, "mm_embed_dim": c.n_embd,
        "mm_posemb_size": c.table_side, "rms_norm_eps": c.eps, "output_proj_dims": c.n_embd,
    }  # fmt: skip


def write(path: Path, kind: str = "F32", c: Config = CONFIG, **keys: object) -> Path:
    """Writes the tower. `keys` replace keys of clip.vision by name, or leave them out where they are None."""
    w, hf = gguf.GGUFWriter(path, "clip"), weights(c)
    add_keys(w, c, tiny_vision.NAME, 0)
    tiny_vision.replace_keys(w, keys)
    for name, shape in shapes(c).items():
        stored = type_of(name, shape, kind)
        w.add_tensor(name, tiny._encode(laid_out(name, shape, hf[hf_name(name)]), stored, None),
                     raw_dtype=tiny.QType[stored])  # fmt: skip
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path
