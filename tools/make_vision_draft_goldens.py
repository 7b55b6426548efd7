#!/usr/bin/env python3
"""Writes tests/goldens/vision-nextn.npz and vision-dflash.npz: what drafters keep of a prompt with images, and what
they draft behind these, F32 on the CPU. Needs torch, transformers and Pillow; run it after make_vision_goldens.py, or
after changing tiny_vision or tiny_dflash.VISION: python tools/make_vision_draft_goldens.py

The text is the prompt of vision-text.npz and the greedy tokens behind it; embeddings with rows of images, their three
axes of positions, outputs of blocks and hidden rows are those of transformers' Qwen3_5ForConditionalGeneration.

  NextN   MultiTokenPredictor has the names and order of operations of vLLM's qwen3_5_mtp.py, with transformers' norms,
          decoder layer, M-RoPE and cache: transformers itself drops the head. Row p has the embedding of p (the image's
          row, where p is one), the hidden row of p - 1, and stands at the axes of p.
  DFlash  The drafter of make_dflash_goldens.py. All rows have features, those of images too, and stand at their index,
          since published drafters have no M-RoPE (sgl-project/SpecForge, pull request 730).

Each file: `tokens` (T,), with image_pad in the places of rows; K and V of the positions `rows`, `k` and `v` (layers,
len(rows), Hkv, D); `at`: a draft behind token at - 1, which is the anchor, after all before; `logits` of these drafts
(len(at), drafts, V), and of NextN the tokens `drafts`, each of which the next one stands behind. `wrong-NAME`
(len(at),): by how much logits differ at most if a drafter makes the mistake NAME (see MISTAKES and _mistaken).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests" / "support"))  # Its modules are used below.
GOLDENS = ROOT / "tests" / "goldens"


def arguments() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=__doc__, formatter_class=raw).parse_args()


if __name__ == "__main__":
    arguments()  # --help needs no torch.

# ruff: noqa: E402
import drive
import gemma4_rounding
import make_vision_goldens
import numpy as np
import tiny_dflash
import tiny_vision
import torch
import transformers
from make_dflash_goldens import DFlashDraftModel, published
from make_goldens import choices
from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

N_DRAFTS = 4
EVERY = 7  # Of rows within images, one of so many is kept.


@dataclass(frozen=True)
class Text:
    """What the target makes of a text of T tokens."""

    tokens: np.ndarray  # (T,)
    inputs: Tensor  # (T, E): embeddings, and rows of images
    positions: Tensor  # (3, T): time, height, width
    streams: list[Tensor]  # (T, E) of each block
    hidden: Tensor  # (T, E), after the output norm

    @property
    def is_image(self) -> np.ndarray:
        return self.tokens == tiny_vision.IMAGE_PAD


def read_text():  # type: ignore[no-untyped-def]
    """Returns transformers' model, and what it makes of the text."""
    model, given = make_vision_goldens.asked()
    with np.load(GOLDENS / "vision-text.npz") as held:
        assert held["prompt"].tolist() == given["input_ids"][0].tolist()
        greedy = torch.from_numpy(held["greedy"]).long()[None]
    ids = torch.cat([given["input_ids"], greedy], 1)
    is_image = (ids == tiny_vision.IMAGE_PAD).int()
    given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": is_image}
    assert is_image[:, -greedy.shape[1] :].sum() == 0
    language, inputs, streams = model.model.language_model, [], []

    def keep_inputs(module, args, kwargs) -> None:  # type: ignore[no-untyped-def]
        inputs.append(kwargs["inputs_embeds"][0])

    hooks = [language.register_forward_pre_hook(keep_inputs, with_kwargs=True)]
    for layer in language.layers:
        hooks.append(layer.register_forward_hook(lambda module, args, out: streams.append(out[0])))
    with torch.no_grad():
        positions, _ = model.model.get_rope_index(ids, is_image, given["image_grid_thw"])
        hidden = model.model(**given).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    return model, Text(ids[0].numpy(), inputs[0], positions[:, 0], streams, hidden)


def cuts(text: Text) -> list[int]:
    """Ahead of the images; behind each one directly, and further on; and in the text behind the prompt."""
    rows = np.flatnonzero(text.is_image)
    first = int(rows[np.flatnonzero(np.diff(rows) > 1)[0]])  # the last row of the first image
    last, end = int(rows[-1]), len(text.tokens)
    return [4, first + 2, first + 3, first + 8, last + 2, last + 6, end - 20, end]


def kept_rows(text: Text) -> np.ndarray:
    """Positions whose K and V are kept: all of text but the first, both edges of images and some within."""
    is_image = text.is_image
    edges = is_image & ~(np.roll(is_image, 1) & np.roll(is_image, -1))
    every = np.arange(len(is_image)) % EVERY == 0
    return np.flatnonzero(~is_image | edges | every)[1:]


# Mistakes of positions and rows, of which each is seen in what is drafted behind an image.
def _mistaken(text: Text) -> dict[str, Text]:
    index = torch.arange(len(text.tokens)).expand(3, -1)
    inputs = torch.where(torch.from_numpy(text.is_image)[:, None], text.inputs.roll(1, 0), text.inputs)
    behind = torch.from_numpy(~text.is_image)
    return {
        "index": replace(text, positions=index),  # All rows stand at their index.
        "index-behind": replace(text, positions=torch.where(behind, index, text.positions)),
        "time-alone": replace(text, positions=text.positions[:1].expand(3, -1)),
        "row-before": replace(text, inputs=inputs),  # Rows of images are those of the row before.
    }


# ---- NextN


class MultiTokenPredictor(nn.Module):
    def __init__(self, config: transformers.Qwen3_5TextConfig):
        super().__init__()
        e, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * e, e, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, 0)])
        self.norm = Qwen3_5RMSNorm(e, eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(e, eps)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(e, eps)
        self.rotary_emb = Qwen3_5TextRotaryEmbedding(config)

    def forward(self, inputs: Tensor, hidden: Tensor, positions: Tensor, cache: transformers.DynamicCache) -> Tensor:
        """Appends rows (T, E) at positions (3, T) to what the cache has. Returns the head's hidden rows (T, E)."""
        x = torch.cat([self.pre_fc_norm_embedding(inputs), self.pre_fc_norm_hidden(hidden)], -1)
        x, n_past = self.fc(x)[None], cache.get_seq_length()
        rope = self.rotary_emb(x, positions[:, None])
        sees = torch.arange(n_past + len(inputs))[None] <= n_past + torch.arange(len(inputs))[:, None]
        mask = torch.where(sees, 0.0, -torch.inf)[None, None]
        x = self.layers[0](x, position_embeddings=rope, attention_mask=mask, past_key_values=cache)
        return self.norm(x)[0]


def nextn_head() -> MultiTokenPredictor:
    keys = tiny_vision.hf_text_config() | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    config = transformers.Qwen3_5TextConfig(**keys, attn_implementation="eager")
    head = MultiTokenPredictor(config).eval().float()
    state = {name: torch.from_numpy(x) for name, x in tiny_vision.head_weights().items()}
    head.load_state_dict(state, strict=True)
    return head


def chain(model, head: MultiTokenPredictor, text: Text, n: int, drafts: np.ndarray | None = None) -> np.ndarray:  # type: ignore[no-untyped-def]
    """Returns the logits (N_DRAFTS, V) of drafts behind token n - 1: behind `drafts`, or behind the best ones."""
    cache, rows = transformers.DynamicCache(config=head.layers[0].self_attn.config), []
    head(text.inputs[1 : n - 1], text.hidden[: n - 2], text.positions[:, 1 : n - 1], cache)
    token, hidden, place = int(text.tokens[n - 1]), text.hidden[n - 2], text.positions[:, n - 1 : n]
    for i in range(N_DRAFTS):
        embedded = model.get_input_embeddings()(torch.tensor([token]))
        hidden = head(embedded, hidden[None], place + i, cache)[0]
        rows.append(model.lm_head(hidden))
        token = int(rows[-1].argmax() if drafts is None else drafts[i])
    return torch.stack(rows).numpy()


def nextn(model, text: Text) -> dict[str, np.ndarray]:  # type: ignore[no-untyped-def]
    head, at, rows = nextn_head(), cuts(text), kept_rows(text)
    cache = transformers.DynamicCache(config=head.layers[0].self_attn.config)
    head(text.inputs[1:], text.hidden[:-1], text.positions[:, 1:], cache)
    (layer,) = cache.layers
    k, v = (x[0].transpose(0, 1)[rows - 1][None].numpy() for x in (layer.keys, layer.values))  # Row 0 is of token 1.
    logits = np.stack([chain(model, head, text, n) for n in at])  # (at, N_DRAFTS, V)
    drafts = choices(logits.reshape(-1, logits.shape[-1]))["greedy"].reshape(logits.shape[:2])

    def other(text: Text) -> np.ndarray:
        made = [chain(model, head, text, n, of) for n, of in zip(at, drafts, strict=True)]
        return np.abs(np.stack(made) - logits).max((1, 2))

    made = {"tokens": text.tokens, "rows": rows, "k": k, "v": v, "at": np.array(at), "drafts": drafts, "logits": logits}
    say_rounding("nextn", other)
    return made | {f"wrong-{name}": other(wrong) for name, wrong in _mistaken(text).items()}


# ---- DFlash


def dflash(model, text: Text) -> dict[str, np.ndarray]:  # type: ignore[no-untyped-def]
    case = tiny_dflash.VISION
    c, at, rows = case.drafter, cuts(text), kept_rows(text)
    drafter = DFlashDraftModel(c).eval().float()
    drafter.load_state_dict(published(tiny_dflash.sharp(tiny_dflash.weights(case))), strict=True)
    embed = model.get_input_embeddings()

    def blocks(streams: list[Tensor]) -> np.ndarray:
        made = []
        for n in at:
            context = drafter.context([x[: n - 1] for x in streams])
            tokens = torch.tensor([int(text.tokens[n - 1]), *[c.mask_token_id] * (c.block_size - 1)])
            made.append(model.lm_head(drafter.block(embed(tokens), context)).numpy())
        return np.stack(made)

    context = drafter.context(text.streams)
    k, v = (torch.stack([pair[i] for pair in context]).transpose(1, 2)[:, rows].numpy() for i in (0, 1))
    logits = blocks(text.streams)
    made = {"tokens": text.tokens, "rows": rows, "k": k, "v": v, "at": np.array(at), "logits": logits}
    say_rounding("dflash", lambda rounded: np.abs(blocks(rounded.streams) - logits))
    # Features of images' rows are those of the row before, or there are none; all rows stand at the target's times.
    is_image = torch.from_numpy(text.is_image)[:, None]
    before = [torch.where(is_image, x.roll(1, 0), x) for x in text.streams]
    none = [torch.where(is_image, 0.0, x) for x in text.streams]
    made |= {f"wrong-{name}": np.abs(blocks(other) - logits).max((1, 2))
             for name, other in (("row-before", before), ("no-features", none))}  # fmt: skip

    def at_times(first: int, n: int) -> tuple[Tensor, Tensor]:
        times = text.positions[0, :n] if first == 0 else text.positions[0, first - 1] + 1 + torch.arange(n)
        cos, sin = drafter.rotary_emb(torch.zeros(1), times[None])
        return cos[0], sin[0]

    drafter.rope = at_times  # type: ignore[method-assign]
    return made | {"wrong-time": np.abs(blocks(text.streams) - logits).max((1, 2))}


def say_rounding(name: str, moved: Callable[[Text], np.ndarray]) -> None:
    """Says how far a GPU's rounding moves drafts, in the target and in the drafter. Further than their test's bound is
    an error."""
    for kind in gemma4_rounding.PRODUCTS:
        with gemma4_rounding.rounded(kind):
            most = float(moved(read_text()[1]).max())
        print(f"{name}: rounding moves logits by {most:.3f} in {kind}", end="; ")
        if most > drive.CUDA_BOUND:
            raise RuntimeError("that is more than a GPU's logits may be off by: take another seed")


def goldens() -> dict[str, dict[str, np.ndarray]]:
    torch.set_num_threads(1)
    with torch.no_grad():
        model, text = read_text()
        return {"nextn": nextn(model, text), "dflash": dflash(model, text)}


def main() -> None:
    for name, made in goldens().items():
        path = GOLDENS / f"vision-{name}.npz"
        np.savez_compressed(path, **made)
        print(f"{path.name}: {path.stat().st_size} bytes, logits' standard deviation {made['logits'].std():.2f}")
        for key in made:
            if key.startswith("wrong"):
                print(f"  {key}: {np.round(made[key], 2).tolist()}")


if __name__ == "__main__":
    main()
