"""Makes tiny random vision towers of Gemma 4, in transformers' layout first and then as the GGUF that luce.convert lays
out, and the model that takes their images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import tiny
import tiny_gemma4
import tiny_vision

from luce.bench.oracle_tokenizer import gemma4_vocabulary
from luce.convert.gemma4_tower import BOUNDS, Config, add_keys, hf_name, laid_out, shapes
from luce.convert.qwen35_tower import type_of

# As the large models have it, and as the small ones. Heads are of 36 and 32.
LARGE = Config(n_layer=3, n_embd=72, n_ff=100, n_head=2, n_out=64, table_side=80)
SMALL = Config(n_layer=2, n_embd=64, n_ff=96, n_head=2, n_out=64, table_side=80, standardized=False, clamped=True)
TOWERS = {"large": (LARGE, 5), "small": (SMALL, 6)}
# Models that take images, by name, each a text model with its seed and a tower with its own. With per-layer embeddings
# rows of images see what is before them; without, sliding layers see all of an image. Seeds are such that a GPU's
# rounding leaves the golden within the bound of its test (tools/gemma4_rounding.py), and no row of the mixture is so
# near to other experts that it might choose them: of 182 rows in three layers, half of four experts each, one seed of a
# hundred is so. With more layers or experts none of 700 was.
TEXTS = {
    "per-layer": ((tiny_gemma4.CASES["per-layer"][0], 17), TOWERS["small"]),
    "dense": (tiny_gemma4.CASES["dense"], TOWERS["large"]),
    "experts": ((replace(tiny_gemma4.CASES["experts"][0], sliding=tiny_gemma4._kinds("ssg"), n_expert=4,
                         n_expert_used=2), 204), TOWERS["large"]),
}
# Assistants of the model "per-layer", each with its seed.
ASSISTANTS = {
    "assistant": (replace(tiny_gemma4.ASSISTANT, v_is_k=False, n_head_kv_swa=1, window=11), tiny_gemma4.ASSISTANT_SEED),
    "assistant-ordered": (tiny_gemma4.ORDERED, 37),
}
VOCABULARY_SIZE = tiny_gemma4.Config.n_vocab
VOCABULARY = gemma4_vocabulary(VOCABULARY_SIZE)[0]
LETTERS = [VOCABULARY.index(letter) for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"]  # Tokens of texts.
MARKS = ("<|image>", "<image|>", "<|image|>")  # The last ids of a model that takes images.


def weights(c: Config, seed: int) -> dict[str, np.ndarray]:
    """Returns transformers' state dict of Gemma4Model's tower and its projection, F32. Bounds clamp some values."""
    rng = tiny._Random(seed)
    made: dict[str, np.ndarray] = {}
    for name, shape in shapes(c).items():
        called = hf_name(name)
        if name.endswith(BOUNDS):
            value = np.array(rng.uniform(1.0, 2.0, 1)[0] * (-1 if name.endswith("min") else 1), np.float32)
        elif name == "v.patch_embd.weight":
            value = rng.matrix(shape[0], int(np.prod(shape[1:])), 1.5)
        elif name == "v.position_embd.weight":
            value = rng.uniform(-1, 1, *shape)
        elif len(shape) > 1:
            value = rng.matrix(shape[0], shape[1], 1.5)
        elif name == "v.std_bias":
            value = rng.uniform(-0.5, 0.5, *shape)
        elif "q_norm" in name or "k_norm" in name:
            value = rng.uniform(0.4, 1.6, *shape) * np.float32(1.4 * shape[0] ** -0.25)
        else:
            value = rng.uniform(0.5, 1.5, *shape)
        made[called] = np.asarray(value, np.float32)
    return made


def hf_config(c: Config) -> dict[str, object]:
    """Returns the arguments of transformers' Gemma4VisionConfig."""
    return {
        "num_hidden_layers": c.n_layer, "hidden_size": c.n_embd, "intermediate_size": c.n_ff,
        "num_attention_heads": c.n_head, "num_key_value_heads": c.n_head, "head_dim": c.n_embd // c.n_head,
        "patch_size": c.patch, "pooling_kernel_size": c.merge, "position_embedding_size": c.table_side,
        "use_clipped_linears": c.clamped, "standardize": c.standardized, "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": c.eps,
    }  # fmt: skip


def layout(c: Config, hf: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors that the GGUF stores."""
    return {name: laid_out(name, shape, hf[hf_name(name)]) for name, shape in shapes(c).items()}


def write(path: Path, c: Config, tensors: dict[str, np.ndarray], kind: str = "F32", **keys: object) -> Path:
    """Writes the tower. `keys` replace keys of clip.vision by name, or leave them out where they are None."""
    w = gguf.GGUFWriter(path, "clip")
    add_keys(w, c, tiny_vision.NAME, 0)
    tiny_vision.replace_keys(w, keys)
    for called, x in tensors.items():
        stored = type_of(called, x.shape, kind)
        w.add_tensor(called, tiny._encode(np.ascontiguousarray(x), stored, None), raw_dtype=tiny.QType[stored])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def write_text(path: Path, name: str, **options: object) -> Path:
    """Writes a model of TEXTS."""
    (config, seed), _ = TEXTS[name]
    return tiny_gemma4.write(path, config, tiny_gemma4.layout(config, seed), last=MARKS, **options)


def write_both(folder: Path, name: str = "per-layer") -> None:
    """Writes a model as model.gguf, and a tower that fits it as mmproj.gguf."""
    _, (c, seed) = TEXTS[name]
    write_text(folder / "model.gguf", name)
    write(folder / "mmproj.gguf", c, layout(c, weights(c, seed)))


def write_assistant(path: Path, name: str = "assistant") -> Path:
    """Writes one of ASSISTANTS."""
    c, seed = ASSISTANTS[name]
    return tiny_gemma4.write(path, c, tiny_gemma4.layout(c, seed))


def write_assistant_of(path: Path, name: str) -> Path:
    """Writes an assistant of a model of TEXTS."""
    text = TEXTS[name][0][0]
    c = replace(tiny_gemma4.ASSISTANT, n_head_kv_swa=text.n_head_kv_swa, window=text.window)
    return tiny_gemma4.write(path, c, tiny_gemma4.layout(c, tiny_gemma4.ASSISTANT_SEED))
