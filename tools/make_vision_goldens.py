#!/usr/bin/env python3
"""Writes tests/goldens/vision-*.npz: what transformers makes of images. Needs torch, transformers and Pillow; run it
after changing these: python tools/make_vision_goldens.py

vision-pixels.npz: `sizes` (n, 4), width and height before and after smart_resize with the limits of the published
models; and for each of PIXELS the patches of Qwen2VLImageProcessorPil, as the bytes that they are before they are
normalised (`patches-i`: without the second frame) and the normalised values of the first patch (`first-i`).
vision-tower.npz: for each of GRIDS the rows of Qwen3_5VisionModel (`rows-i`), F32, with the weights of tiny_vision.
vision-text.npz: a prompt of text and two images, for tiny_vision's model and tower: `prompt` (image_pad in the places
of rows), its `positions` (3, n), the `logits` of the rows of text, which are `at`, `greedy` tokens behind it and their
`gap`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))  # Its modules are used below.

import numpy as np
import tiny
import tiny_vision
from make_goldens import choices

GOLDENS = Path(__file__).resolve().parent.parent / "tests" / "goldens"
PUBLISHED = {"shortest_edge": 65536, "longest_edge": 16777216}
LIMITS = {"shortest_edge": 4096, "longest_edge": 9216}  # so small that files are
# Sizes before: enlarged, shrunk, as they are, rounded to even at a half (80 = 2.5 * 32), thin ones.
PIXELS = [(64, 64), (33, 47), (300, 200), (80, 80), (112, 48), (10, 90), (150, 31), (97, 101), (64, 96), (5, 5),
          (1000, 20), (77, 130)]  # fmt: skip
GRIDS = [(64, 64), (96, 64), (32, 288)]  # sizes of images: width, height
SEED = 5
TEXTS = (5, 7, 9)  # tokens
N_GREEDY = 32


def processor(limits: dict[str, int] = LIMITS):  # type: ignore[no-untyped-def]
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    half = [0.5, 0.5, 0.5]
    return Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, image_mean=half, image_std=half, size=limits)


def pixels() -> dict[str, np.ndarray]:
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    made: dict[str, np.ndarray] = {}
    sides = [1, 15, 16, 17, 31, 48, 80, 100, 112, 144, 200, 240, 256, 257, 333, 600, 720, 1080, 1280, 1920, 3840, 6000]
    sizes = [(w, h) for w in sides for h in sides if max(w, h) / min(w, h) <= 200]
    after = [smart_resize(h, w, factor=32, min_pixels=65536, max_pixels=16777216)[::-1] for w, h in sizes]
    made["sizes"] = np.array([[*size, *to] for size, to in zip(sizes, after, strict=True)], np.int32)
    for i, (width, height) in enumerate(PIXELS):
        image = Image.fromarray(tiny_vision.image(width, height, i))
        values = np.asarray(processor()(image, return_tensors="np")["pixel_values"])
        frames = values.reshape(-1, 3, 2, 256)
        assert (frames[:, :, 0] == frames[:, :, 1]).all()
        stored = np.rint((frames[:, :, 0] * 0.5 + 0.5) * 255)
        made[f"patches-{i}"] = stored.astype(np.uint8).reshape(-1, 768)
        made[f"first-{i}"] = frames[0, :, 0].reshape(768).astype(np.float32)
    return made


def tower():  # type: ignore[no-untyped-def]
    """Returns transformers' tower with the weights of tiny_vision."""
    import torch
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

    c = tiny_vision.TINY
    config = Qwen3_5VisionConfig(**tiny_vision.hf_config(c), attn_implementation="eager")
    model = Qwen3_5VisionModel(config).eval().float()
    model.load_state_dict({k: torch.from_numpy(v) for k, v in tiny_vision.weights(c, SEED).items()}, strict=True)
    return model


def rows() -> dict[str, np.ndarray]:
    import torch
    from PIL import Image

    made = {}
    for i, (width, height) in enumerate(GRIDS):
        out = processor()(Image.fromarray(tiny_vision.image(width, height, i)), return_tensors="pt")
        with torch.no_grad():
            made[f"rows-{i}"] = tower()(out["pixel_values"], out["image_grid_thw"]).pooler_output.numpy()
    return made


def asked():  # type: ignore[no-untyped-def]
    """Returns transformers' model with its tower, and the arguments of its forward for a prompt with two images."""
    import torch
    import transformers
    from PIL import Image

    c, tower_config = tiny_vision.TEXT, tiny_vision.hf_config(tiny_vision.TINY)
    config = transformers.Qwen3_5Config(
        text_config=tiny_vision.hf_text_config(), vision_config=tower_config, image_token_id=tiny_vision.IMAGE_PAD,
        vision_start_token_id=tiny_vision.VISION_START, vision_end_token_id=tiny_vision.VISION_END,
    )  # fmt: skip
    kind = transformers.Qwen3_5ForConditionalGeneration
    model = kind._from_config(config, attn_implementation="eager").eval().float()
    language = tiny.weights(c, tiny_vision.TEXT_SEED)
    state = {f"model.visual.{k}": v for k, v in tiny_vision.weights(tiny_vision.TINY, SEED).items()}
    state |= {k.replace("model.", "model.language_model.", 1): v for k, v in language.items() if "mtp." not in k}
    model.load_state_dict({k: torch.from_numpy(v) for k, v in state.items()}, strict=True)
    images = [Image.fromarray(image) for image in tiny_vision.pictures()]
    seen = processor(PUBLISHED)(images, return_tensors="pt")
    words = iter((np.random.PCG64(77).random_raw(sum(TEXTS)) % np.uint64(26) + np.uint64(65)).tolist())  # A to Z
    prompt = [next(words) for _ in range(TEXTS[0])]
    for grid, n in zip(seen["image_grid_thw"].tolist(), TEXTS[1:], strict=True):
        rows = [tiny_vision.IMAGE_PAD] * (grid[1] * grid[2] // 4)
        prompt += [tiny_vision.VISION_START, *rows, tiny_vision.VISION_END, *(next(words) for _ in range(n))]
    ids = torch.tensor([prompt])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **seen,
             "mm_token_type_ids": (ids == tiny_vision.IMAGE_PAD).int()}  # fmt: skip
    return model, given


def text() -> dict[str, np.ndarray]:
    import torch

    model, given = asked()
    ids, prompt = given["input_ids"], given["input_ids"][0].tolist()
    with torch.no_grad():
        positions, _ = model.model.get_rope_index(ids, given["mm_token_type_ids"], given["image_grid_thw"])
        logits = model(**given).logits[0].numpy()
        out = model.generate(**given, max_new_tokens=N_GREEDY, do_sample=False, eos_token_id=None, pad_token_id=0,
                             return_dict_in_generate=True, output_logits=True)  # fmt: skip
    rows = torch.cat(out.logits).numpy()
    assert np.abs(rows[0] - logits[-1]).max() < 1e-4
    at = np.flatnonzero(np.array(prompt) != tiny_vision.IMAGE_PAD)
    return {"prompt": np.array(prompt, np.int32), "positions": positions[:, 0].numpy().astype(np.int32),
            "at": at, "logits": logits[at], **choices(rows)}  # fmt: skip


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, make in (("pixels", pixels), ("tower", rows), ("text", text)):
        path = GOLDENS / f"vision-{name}.npz"
        np.savez_compressed(path, **make())
        print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
