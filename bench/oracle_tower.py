"""Writes a random vision tower of real size, in F16, for an oracle model, whose tokens it does not change: these follow
the newest token of text alone. An oracle that sees images has the marks of them and a chat template."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np

from luce.convert.qwen35_tower import Config, add_keys, shapes, type_of
from luce.convert.weight_types import MIXES

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# By the published configs: width, blocks, heads and FF of the tower.
LARGE = Config()
SMALL = Config(n_layer=12, n_embd=768, n_ff=3072, n_head=12)
MINI = Config(n_layer=2, n_embd=64, n_ff=128, n_head=2, table_side=8)


def tower_of(n_embd: int) -> Config:
    """Returns the shape of the tower that models of such a width have."""
    base = LARGE if n_embd >= 2048 else SMALL if n_embd >= 1024 else MINI
    return Config(base.n_layer, base.n_embd, base.n_ff, base.n_head, n_embd, table_side=base.table_side)


def make_tower(path: Path, n_embd: int, name: str, seed: int = 0) -> Config:
    """Writes the tower of the model of a name, whose rows have a width of n_embd, and returns its shape. Matrices keep
    the size of what they multiply, and norms are 1."""
    c = tower_of(n_embd)
    w = gguf.GGUFWriter(path, "clip")
    add_keys(w, c, name, MIXES["F16"].file_type)

    def made(job: tuple[int, tuple[str, tuple[int, ...]]]) -> np.ndarray:
        index, (name, shape) = job
        stored = np.float16 if type_of(name, shape, "F16") == "F16" else np.float32
        if len(shape) == 1:
            norm = name.endswith("weight")
            return np.full(shape, 1.0 if norm else 0.0, stored)
        rng = np.random.Generator(np.random.PCG64([seed, index]))
        scale = np.float32(np.prod(shape[1:]) ** -0.5)
        return (rng.standard_normal(shape, np.float32) * scale).astype(stored)

    with ThreadPoolExecutor() as pool:
        all_shapes = shapes(c)
        for name, values in zip(all_shapes, pool.map(made, enumerate(all_shapes.items())), strict=True):
            w.add_tensor(name, values)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return c
