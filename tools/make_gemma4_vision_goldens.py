#!/usr/bin/env python3
"""Writes tests/goldens/gemma4-vision-*.npz: what transformers makes of images for Gemma 4. Needs torch, transformers
and Pillow, and for `unified` torchvision; run it after changing these: python tools/make_gemma4_vision_goldens.py

gemma4-vision-pixels.npz: `sizes` (n, 5), a budget of rows, width and height before and after; and for each of PIXELS
the patches of Gemma4ImageProcessorPil with the least budget, as the bytes that they are before they are scaled: every
9th of them (`patches-i`), and the SHA-256 of all (`hash-i`).
gemma4-vision-tower.npz: for each tower of tiny_gemma4_vision and each of GRIDS the rows that the text model gets of
Gemma4VisionModel and its projection (`NAME-i`), F32.
gemma4-vision-unified.npz: the same as `i` of the tower of tiny_gemma4_unified, and of the model "dense" with it what
is below.
gemma4-vision-NAME.npz, of each model of TEXTS: a prompt of text and two images: `prompt` (image tokens in the
places of rows), the `logits` of the rows of text, which are `at`, `greedy` tokens behind it and their `gap`. Of models
whose rows of an image see each other there is also `causal`: logits of the same rows where these do not. Of mixtures
there are, for each layer, `router-margin`: how far the logits of the last expert that is chosen and the first one left
out are apart where they are closest, over all rows of the prompt and of `greedy`, in F32; and `router-moved`: how far a
GPU's rounding moves any such pair. A seed whose logits rounding may move too far, or whose experts it might exchange,
is refused (gemma4_rounding.py).
gemma4-vision-assistant.npz and gemma4-vision-assistant-ordered.npz: of the prompt of "per-layer" the lengths `at` of
beginnings whose last token is one of text behind the first image, and behind each the greedy `drafts` (lengths, 4) of
an assistant and their `logits` (lengths, 4, vocab), as make_gemma4_goldens.py has them of text.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from functools import partial
from pathlib import Path
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))  # Its modules are used below.

import drive
import numpy as np
import tiny_gemma4
import tiny_gemma4_vision as vision
import tiny_vision
from make_goldens import choices

GOLDENS = Path(__file__).resolve().parent.parent / "tests" / "goldens"
BUDGETS = (70, 140, 280, 560, 1120)
PIXELS = [(100, 40), (333, 517), (64, 64), (900, 30), (31, 640), (480, 336)]
GRIDS = [(96, 48), (48, 144), (144, 144)]  # sizes of images: width, height
WORDS = (5, 7, 9)  # tokens
N_GREEDY = 32
# In each layer of a mixture the experts' logits that decide which are chosen are so many times as far apart as rounding
# moves any of them.
ROUTER_MARGIN = 2
BOS, ENDS = 2, (1, 50, 106)


def processor(budget: int = BUDGETS[0]):  # type: ignore[no-untyped-def]
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    return Gemma4ImageProcessorPil(max_soft_tokens=budget)


def pixels() -> dict[str, np.ndarray]:
    from PIL import Image
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    sides = [1, 15, 17, 47, 48, 49, 96, 100, 144, 257, 333, 600, 720, 1080, 1280, 1920, 3840]
    sizes = []
    for budget in BUDGETS:
        for w, h in ((w, h) for w in sides for h in sides):
            try:
                to = get_aspect_ratio_preserving_size(h, w, 16, 9 * budget, 3)
            except ValueError:
                to = (0, 0)
            sizes.append([budget, w, h, to[1], to[0]])
    made: dict[str, np.ndarray] = {"sizes": np.array(sizes, np.int32)}
    for i, size in enumerate(PIXELS):
        out = processor()(Image.fromarray(tiny_vision.image(*size, i)), return_tensors="np")
        n = int(out["num_soft_tokens_per_image"][0]) * 9
        stored = np.rint(np.asarray(out["pixel_values"])[0, :n] * 255).astype(np.uint8)
        made[f"patches-{i}"] = stored[::9]
        made[f"hash-{i}"] = np.frombuffer(hashlib.sha256(stored.tobytes()).digest(), np.uint8)
    return made


def model_of(text, c, seed):  # type: ignore[no-untyped-def]
    """Returns transformers' model of a text model (config, seed), or of a plain one, with the tower of a config."""
    import torch
    import transformers

    (text_config, text_seed), n = text, text[0].n_vocab
    keys = tiny_gemma4.hf_config(text_config)
    bidirectional = None if text_config.n_embd_per_layer else "vision"
    config = transformers.Gemma4Config(
        text_config=keys | {"use_bidirectional_attention": bidirectional}, vision_config=vision.hf_config(c),
        audio_config=None, image_token_id=n - 1, boi_token_id=n - 3, eoi_token_id=n - 2,
        video_token_id=n, audio_token_id=n,
    )  # fmt: skip
    kind = transformers.Gemma4ForConditionalGeneration
    model = kind._from_config(config, attn_implementation="eager").eval().float()
    state = {f"model.{name}": x for name, x in vision.weights(c, seed).items()}
    language = tiny_gemma4.weights(text_config, text_seed)
    state |= {name.replace("model.", "model.language_model.", 1): x for name, x in language.items()}
    state = {name: torch.from_numpy(np.asarray(x)) for name, x in state.items()}
    state.setdefault("lm_head.weight", state["model.language_model.embed_tokens.weight"])
    model.load_state_dict(state, strict=True)
    return model


def rows() -> dict[str, np.ndarray]:
    import torch
    from transformers.models.gemma4.image_processing_pil_gemma4 import convert_image_to_patches

    made = {}
    for name, (c, seed) in vision.TOWERS.items():
        model = model_of(tiny_gemma4.CASES["dense"], c, seed)
        for i, (width, height) in enumerate(GRIDS):
            image = tiny_vision.image(width, height, i).transpose(2, 0, 1).astype(np.float32) / np.float32(255)
            patches = torch.from_numpy(convert_image_to_patches(image, c.patch))[None]
            x, y = np.meshgrid(np.arange(width // c.patch), np.arange(height // c.patch), indexing="xy")
            places = torch.from_numpy(np.stack([x, y], -1).reshape(1, -1, 2))
            with torch.no_grad():
                (out,) = model.model.get_image_features(patches, places, return_dict=True).pooler_output
            made[f"{name}-{i}"] = out.numpy()
    return made


def unified() -> dict[str, np.ndarray]:
    import tiny_gemma4_unified as tiny_unified
    import torch
    import transformers
    from transformers.models.gemma4_unified import modeling_gemma4_unified
    from transformers.models.gemma4_unified.image_processing_gemma4_unified import (
        convert_image_to_patches,
        pad_along_first_dim,
        patches_merge,
    )

    torch.set_num_threads(1)
    (text_config, text_seed), n = vision.TEXTS["dense"][0], vision.VOCABULARY_SIZE
    config = transformers.Gemma4UnifiedConfig(
        text_config=tiny_gemma4.hf_config(text_config) | {"use_bidirectional_attention": "vision"},
        vision_config=tiny_unified.hf_config(), audio_config=None, image_token_id=n - 1, boi_token_id=n - 3,
        eoi_token_id=n - 2, video_token_id=n, audio_token_id=n,
    )  # fmt: skip
    kind = transformers.Gemma4UnifiedForConditionalGeneration
    model = kind._from_config(config, attn_implementation="eager").eval().float()
    # As transformers renames what checkpoints have.
    state = {
        f"model.{name}".replace("vision_embedder.", "embed_vision.").replace(
            "embed_vision.embedding_projection", "embed_vision.multimodal_embedder.embedding_projection"): x
        for name, x in tiny_unified.weights().items()
    }  # fmt: skip
    language = tiny_gemma4.weights(text_config, text_seed)
    state |= {name.replace("model.", "model.language_model.", 1): x for name, x in language.items()}
    state = {name: torch.from_numpy(np.asarray(x)) for name, x in state.items()}
    state.setdefault("lm_head.weight", state["model.language_model.embed_tokens.weight"])
    model.load_state_dict(state, strict=True)

    def patches_of(pixels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Of pixels uint8 (height, width, 3): merged patches, and where they stand."""
        image = torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32) / np.float32(255))
        side = tiny_unified.CONFIG.patch
        patches, (_, height, width) = convert_image_to_patches(image, side), image.shape
        x, y = np.meshgrid(np.arange(width // side), np.arange(height // side), indexing="xy")
        places = torch.from_numpy(np.stack([x, y], -1).reshape(1, -1, 2))
        return patches_merge(patches[None], places, len(patches) // tiny_unified.CONFIG.merge**2)

    made: dict[str, np.ndarray] = {}
    for i, (width, height) in enumerate(GRIDS):
        with torch.no_grad():
            out = model.model.embed_vision(*patches_of(tiny_vision.image(width, height, i)), return_dict=True)
        made[str(i)] = out.pooler_output[0].numpy()
    # Stretched by Pillow, as luce does: transformers has no processor by Pillow for these.
    most, prompt, pixels, places = BUDGETS[0], [BOS], [], []
    words = iter(int(i) for i in np.random.PCG64(77).random_raw(sum(WORDS)) % np.uint64(26))
    prompt += [vision.LETTERS[next(words)] for _ in range(WORDS[0])]
    for i, picture in enumerate(tiny_vision.pictures()):
        (patches,), (at,) = patches_of(stretched(picture))
        rows = len(patches)
        for found, padded in zip((pixels, places), pad_along_first_dim(patches, at, most), strict=True):
            found.append(padded[None])
        prompt += [n - 3, *[n - 1] * rows, n - 2, *(vision.LETTERS[next(words)] for _ in range(WORDS[i + 1]))]
    ids = torch.tensor([prompt])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.cat(pixels),
             "image_position_ids": torch.cat(places), "mm_token_type_ids": (ids == n - 1).int()}  # fmt: skip
    # Of the two masks that transformers 5.17 has for this model, that of Gemma4Model: create_masks_for_generate has it
    # too, and vLLM has it for the 12B (its pull request 47217). The model's forward still has Gemma 3's, in all layers.
    def masks(block_sequence_ids, **of):  # type: ignore[no-untyped-def]
        return modeling_gemma4_unified.create_masks_for_vision_model(block_sequence_ids=block_sequence_ids, **of)

    with mock.patch.object(modeling_gemma4_unified, "create_masks_for_generate", masks):
        return made | answered(model, given, sees_ahead=True)


def stretched(picture: np.ndarray) -> np.ndarray:
    """Returns an image, stretched for the least budget: uint8 (height, width, 3)."""
    from PIL import Image
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    height, width = get_aspect_ratio_preserving_size(*picture.shape[:2], 16, 9 * BUDGETS[0], 3)
    return np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC))


def text(name: str) -> dict[str, np.ndarray]:
    import torch

    torch.set_num_threads(1)
    model, given = prompted(name)
    return answered(model, given, sees_ahead=not vision.TEXTS[name][0][0].n_embd_per_layer)


def answered(model, given, sees_ahead: bool) -> dict[str, np.ndarray]:  # type: ignore[no-untyped-def]
    """Returns what is kept of a model's answer to a prompt with images, whose rows may see each other."""
    import gemma4_rounding
    import torch

    prompt, is_image = given["input_ids"][0].numpy(), given["mm_token_type_ids"][0].numpy()
    with torch.no_grad():
        logits = model(**given).logits[0].numpy()
        out = model.generate(**given, max_new_tokens=N_GREEDY, do_sample=False, eos_token_id=None, pad_token_id=0,
                             return_dict_in_generate=True, output_logits=True)  # fmt: skip
    rows = torch.cat(out.logits).numpy()
    assert np.abs(rows[0] - logits[-1]).max() < 1e-3, np.abs(rows[0] - logits[-1]).max()
    at = np.flatnonzero(is_image == 0)
    for kind in gemma4_rounding.PRODUCTS:
        with torch.no_grad(), gemma4_rounding.rounded(kind):
            moved = np.abs(model(**given).logits[0].numpy() - logits)[at].max()
        print(f"rounding moves logits by {moved:.3f} in {kind}", end="; ")
        if moved > drive.CUDA_BOUND:
            raise RuntimeError("that is more than a GPU's logits may be off by: take another seed")
    unwanted = {int(prompt[is_image == 1][0]), *ENDS} & set(rows.argmax(-1).tolist())
    if unwanted:  # transformers takes an image's token for a pad, and luce's command line ends at the others.
        raise RuntimeError(f"tokens {unwanted} are greedy ones: take another seed")
    made = {"prompt": prompt.astype(np.int32), "at": at, "logits": logits[at], **choices(rows)}
    if model.config.text_config.enable_moe_block:
        made |= routing(model, given, made["greedy"])
    if sees_ahead:
        given = {name: x for name, x in given.items() if name != "mm_token_type_ids"}  # Nothing says what is an image.
        with torch.no_grad():
            made["causal"] = model(**given).logits[0].numpy()[at]
    return made


def routing(model, given, greedy: np.ndarray) -> dict[str, np.ndarray]:  # type: ignore[no-untyped-def]
    """Returns `router-margin` and `router-moved` of all rows of a prompt and the greedy tokens behind it. An expert
    that a GPU's rounding might exchange for another is an error."""
    import gemma4_rounding
    import torch

    behind = torch.from_numpy(greedy[:-1]).long()[None]
    given = given | {"input_ids": torch.cat([given["input_ids"], behind], 1)}
    for name, value in (("attention_mask", 1), ("mm_token_type_ids", 0)):
        given[name] = torch.cat([given[name], torch.full_like(behind, value)], 1)
    margin, moved = gemma4_rounding.margins(model, given)
    print(f"experts are {np.round(margin, 4)} apart, and rounding moves them by {np.round(moved, 4)}", end="; ")
    if (margin < ROUTER_MARGIN * moved).any():
        raise RuntimeError(f"that is less than {ROUTER_MARGIN} times as much: take another seed")
    return {"router-margin": margin, "router-moved": moved}


def prompted(name: str):  # type: ignore[no-untyped-def]
    """Returns a model of TEXTS and the arguments of its forward for a prompt with two images."""
    import torch
    from PIL import Image

    case, (c, seed) = vision.TEXTS[name]
    model, n = model_of(case, c, seed), case[0].n_vocab
    images = [Image.fromarray(image) for image in tiny_vision.pictures()]
    seen = processor()(images, return_tensors="pt")
    chosen = np.random.PCG64(77).random_raw(sum(WORDS)) % np.uint64(26)
    words = iter([vision.LETTERS[int(i)] for i in chosen])
    prompt = [BOS, *(next(words) for _ in range(WORDS[0]))]
    for rows, follow in zip(seen["num_soft_tokens_per_image"], WORDS[1:], strict=True):
        prompt += [n - 3, *[n - 1] * int(rows), n - 2, *(next(words) for _ in range(follow))]
    ids = torch.tensor([prompt])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": seen["pixel_values"],
             "image_position_ids": seen["image_position_ids"], "mm_token_type_ids": (ids == n - 1).int()}  # fmt: skip
    return model, given


def assisted(name: str) -> dict[str, np.ndarray]:
    import make_gemma4_goldens as of_text
    import torch

    torch.set_num_threads(1)
    model, given = prompted("per-layer")
    assistant, ids = of_text.build_assistant(*vision.ASSISTANTS[name]), given["input_ids"]
    prompt = ids[0].numpy()
    rows = np.flatnonzero(prompt == vision.VOCABULARY_SIZE - 1)
    between = int(rows[np.flatnonzero(np.diff(rows) > 1)[0]])  # the last row of the first image
    at = [between + 2, between + 4, between + 9, int(rows[-1]) + 2, int(rows[-1]) + 6, len(prompt)]
    made = []
    with torch.no_grad(), of_text.margins_between_clusters(assistant) as margins:
        for n in at:
            cut = {key: given[key][:, : n - 1] for key in ("input_ids", "attention_mask", "mm_token_type_ids")}
            images = 1 if n < rows[-1] else 2
            cut |= {key: given[key][:images] for key in ("pixel_values", "image_position_ids")}
            out = model.model(**cut, use_cache=False, return_shared_kv_states=True)
            embed = model.get_input_embeddings()
            made.append(of_text.drafted(assistant, out, embed, ids[:, n - 1 : n], n - 1))
    return {"at": np.array(at)} | of_text.chosen(made, margins)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="of pixels, tower, unified, models of TEXTS and assistants; none: all")
    only = parser.parse_args().only
    makers = {"pixels": pixels, "tower": rows, "unified": unified}
    makers |= {name: partial(text, name) for name in vision.TEXTS}
    makers |= {name: partial(assisted, name) for name in vision.ASSISTANTS}
    for name, make in makers.items():
        if not only or name in only:
            path = GOLDENS / f"gemma4-vision-{name}.npz"
            np.savez_compressed(path, **make())
            print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
