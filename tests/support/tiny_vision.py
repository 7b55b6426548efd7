"""Makes tiny random vision towers, in transformers' layout first and then as the GGUF that luce.convert lays out, and
images that need no file."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import tiny

from luce.convert.qwen35_tower import Config, add_keys, hf_name, shapes, type_of

__all__ = ["Config", "hf_config", "image", "weights", "write", "write_both"]

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")  # The last ids before the three of every tiny model.
# A model that takes images: M-RoPE of 16 pairs, in SECTIONS.
TEXT = tiny.Config(n_layer=4, n_vocab=400, head_dim=64, rope_dim=32, n_head=2, n_head_kv=1, n_nextn=1)
NAME = "tiny"
SECTIONS = (6, 5, 5)
TEXT_SEED = 32
# Q of a drafter is so much larger than else: its scores then show where keys stand, and drafts what they are.
SHARP = np.float32(3)
VISION_START, VISION_END, IMAGE_PAD = (TEXT.n_vocab - 6 + i for i in range(3))
PICTURES = [(100, 40), (50, 110)]  # Sizes of two images in a golden's prompt, with text before, between and behind.
TINY = Config(n_layer=3, n_embd=72, n_ff=100, n_head=2, n_out=64, table_side=6)  # heads of 36


def weights(c: Config, seed: int) -> dict[str, np.ndarray]:
    """Returns transformers' state dict of the tower, F32."""
    rng = tiny._Random(seed)
    made: dict[str, np.ndarray] = {}
    for name, shape in shapes(c).items():
        called = hf_name(name)
        if called == "patch_embed.proj.weight":
            shape = (*shape[:2], 2, *shape[2:])
        inner = int(np.prod(shape[1:]))
        if len(shape) > 1:
            value = rng.uniform(-1, 1, *shape) if called == "pos_embed.weight" else rng.matrix(shape[0], inner, 1.5)
        elif "norm" in called and called.endswith("weight"):
            value = rng.uniform(0.5, 1.5, *shape)
        else:
            value = rng.uniform(-0.3, 0.3, *shape)
        made.setdefault(called, value.reshape(shape))
    return made


def hf_config(c: Config) -> dict[str, object]:
    """Returns the arguments of transformers' Qwen3_5VisionConfig."""
    return {
        "depth": c.n_layer, "hidden_size": c.n_embd, "intermediate_size": c.n_ff, "num_heads": c.n_head,
        "out_hidden_size": c.n_out, "patch_size": c.patch, "spatial_merge_size": c.merge,
        "temporal_patch_size": 2, "in_channels": 3, "num_position_embeddings": c.table_side**2,
        "hidden_act": "gelu_pytorch_tanh",
    }  # fmt: skip


def hf_text_config() -> dict[str, object]:
    """Returns the arguments of transformers' Qwen3_5TextConfig of the model that takes images."""
    keys = tiny.hf_config(TEXT)
    keys["rope_parameters"] |= {"mrope_section": list(SECTIONS), "mrope_interleaved": True}  # type: ignore[operator]
    return keys


def layout(c: Config, hf: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors that the GGUF stores."""
    made = {}
    for name in shapes(c):
        x = hf[hf_name(name)]
        made[name] = x[:, :, 1 if name.endswith(".1") else 0] if name.startswith("v.patch_embd.weight") else x
    return made


def write(path: Path, c: Config, tensors: dict[str, np.ndarray], kind: str = "F32", **keys: object) -> Path:
    """Writes the tower. `keys` replace keys of clip.vision by name, or leave them out where they are None."""
    w = gguf.GGUFWriter(path, "clip")
    add_keys(w, c, NAME, 0)
    replace_keys(w, keys)
    for called, x in tensors.items():
        stored = type_of(called, x.shape, kind)
        w.add_tensor(called, tiny._encode(np.ascontiguousarray(x), stored, None), raw_dtype=tiny.QType[stored])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def replace_keys(w: gguf.GGUFWriter, keys: dict[str, object]) -> None:
    """Replaces a writer's keys by their last names, or takes those out that are None."""
    for key, value in keys.items():
        (name,) = (name for name in w.kv_data[0] if name.endswith(f".{key}"))
        old = w.kv_data[0].pop(name)
        if value is not None:
            w.kv_data[0][name] = gguf.GGUFValue(value, old.type, old.sub_type)


def write_text(path: Path, **options: object) -> Path:
    """Writes the model that takes images."""
    return tiny.write(path, TEXT, tiny.layout(TEXT, TEXT_SEED), marks=MARKS, **options)


def head_weights() -> tiny.Weights:
    """Returns the weights of the model's NextN head with a sharp attention, by their names behind `mtp.`."""
    hf = tiny.weights(TEXT, TEXT_SEED)
    made = {name.removeprefix("mtp."): x for name, x in hf.items() if name.startswith("mtp.")}
    made["layers.0.self_attn.q_norm.weight"] = SHARP * (1 + made["layers.0.self_attn.q_norm.weight"]) - 1
    return made


def write_sharp(path: Path) -> Path:
    """Writes the model that takes images, whose NextN head has the weights of head_weights()."""
    hf = tiny.weights(TEXT, TEXT_SEED) | {f"mtp.{name}": x for name, x in head_weights().items()}
    return tiny.write(path, TEXT, tiny.to_gguf_layout(TEXT, hf), marks=MARKS)


def image(width: int, height: int, seed: int = 0) -> np.ndarray:
    """Returns RGB uint8 (height, width, 3): waves, edges and some noise, of integers alone."""
    y, x = np.mgrid[0:height, 0:width].astype(np.int64)
    noise = (np.random.PCG64(seed).random_raw(height * width) & np.uint64(15)).astype(np.int64).reshape(height, width)
    red = (x * 7 + y * (3 + seed)) % 256
    green = np.where((x // 9 + y // 5) % 2, 230, 20) + noise
    blue = (x * x // 11 + y * y // (7 + seed)) % 200 + noise
    return np.stack([red, green, blue], -1).clip(0, 255).astype(np.uint8)


def pictures() -> list[np.ndarray]:
    """Returns those of PICTURES."""
    return [image(*size, 20 + i) for i, size in enumerate(PICTURES)]


def write_both(folder: Path) -> None:
    """Writes a model as model.gguf, and a tower that fits it as mmproj.gguf."""
    write_text(folder / "model.gguf")
    write(folder / "mmproj.gguf", TINY, layout(TINY, weights(TINY, 5)))
