"""Converts a block drafter (DFlash, DFlash2 or DSpark, as safetensors) to GGUF."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import gguf

from luce import native as _native
from luce.convert import gemma4_layout, hf_dflash
from luce.convert.gguf_output import Written, require_free, write
from luce.convert.gguf_tokenizer import add_hf_tokenizer, check_tokenizer, copy_keys
from luce.convert.hf_config import read_config, rope_parameters, text_config
from luce.convert.hf_gemma4 import is_gemma
from luce.convert.safetensors_reader import Checkpoint
from luce.convert.weight_types import DEFAULT, MIXES, choose
from luce.errors import FileError, UnsupportedError, about
from luce.files.probe import fact


@dataclass(frozen=True)
class Target:
    """This is the model that is drafted for, as far as the drafter's file depends on it."""

    path: Path
    n_embd: int
    n_layer: int
    n_vocab: int
    m_rope: bool
    gemma4: bool  # It scales embeddings by the root of their width, and so does its drafter.
    softcap: float | None  # It caps its logits, and so does a drafter that uses its output matrix.
    add_tokenizer: Callable[[gguf.GGUFWriter], None]
    check: Callable[[_native.File], None]


def gguf_target(path: Path) -> Target:
    """Returns a target from its GGUF; the tokenizer's keys are copied."""
    with _native.File(path) as file, about(path):
        arch = fact(file.kv, "general.architecture", str)
        n_nextn = fact(file.kv, f"{arch}.nextn_predict_layers", int, 0)
        found = (fact(file.kv, f"{arch}.embedding_length", int), fact(file.kv, f"{arch}.block_count", int))
        m_rope = f"{arch}.rope.dimension_sections" in file.kv
        softcap = fact(file.kv, f"{arch}.final_logit_softcapping", float, None)
        n_vocab = len(fact(file.kv, "tokenizer.ggml.tokens", list))

    def add(w: gguf.GGUFWriter) -> None:
        with _native.File(path) as file:
            copy_keys(w, file, lambda key: key.startswith("tokenizer."))

    scaled = arch == gemma4_layout.ARCH
    return Target(path, found[0], found[1] - n_nextn, n_vocab, m_rope, scaled, softcap, add, lambda file: None)


def folder_target(path: Path, say: Callable[[str], None]) -> Target:
    """Returns a target, or the drafter itself, from a Hugging Face folder."""
    if not (path / "tokenizer.json").exists():
        raise FileError(f"{path} has no tokenizer.json: copy it beside config.json")
    config = read_config(path)
    text, scaled = text_config(config), is_gemma(config)
    sizes = (text.size("hidden_size"), text.size("num_hidden_layers"), text.size("vocab_size"))

    def add(w: gguf.GGUFWriter) -> None:
        add_hf_tokenizer(w, path, sizes[2], say)

    m_rope = not scaled and "mrope_section" in rope_parameters(text)
    softcap = text.get("final_logit_softcapping", float, None) if scaled else None
    return Target(path, *sizes, m_rope, scaled, softcap, add, lambda file: check_tokenizer(file, path))


def find_target(drafter: Path, given: Path | None, say: Callable[[str], None]) -> tuple[Target, bool]:
    """Returns the target, and whether it is the drafter's own folder. It is the one that was given, else that
    folder if it has a tokenizer."""
    own = drafter.parent if drafter.is_file() else drafter
    if given is not None:
        return (folder_target(given, say) if given.is_dir() else gguf_target(given)), False
    if (own / "tokenizer.json").exists():
        return folder_target(own, say), True
    raise FileError(f"{own} has no tokenizer.json", concerns="target")


def convert(
    drafter: Path,
    out: Path,
    kind: str = DEFAULT,
    target: Path | None = None,
    name: str | None = None,
    threads: int = 0,
    say: Callable[[str], None] = lambda text: None,
    replace: bool = False,
) -> Written:
    """Writes the drafter in folder `drafter` to `out`. `kind` is a key of MIXES, and `target` a GGUF or a
    folder. A file that is there is to `replace`, or an error. Error names the key or tensor at fault."""
    require_free(out, replace)
    checkpoint = Checkpoint(drafter)
    c = hf_dflash.read_hparams(read_config(drafter))
    c = hf_dflash.with_confidence(c, checkpoint)
    _refuse_mask_embedding(drafter, c)
    plan = hf_dflash.plan(c, checkpoint)
    source, is_own = find_target(drafter, target, say)
    if not is_own:
        _check_target(c, source)
    c = _of_gemma4(c, source) if source.gemma4 else c
    mix = MIXES[kind]
    types, fallbacks = choose(mix, ((t.name, t.shape) for t in plan), tied=False)
    for fallback in fallbacks:
        say(str(fallback))
    writer = gguf.GGUFWriter(None, hf_dflash.ARCH)
    hf_dflash.add_keys(writer, c, name or drafter.resolve().name, mix.file_type, source.m_rope)
    source.add_tokenizer(writer)
    _add_mask_token(writer, c, source)
    return write(out, writer, plan, types, _native.default(), source.check, threads, replace)


def _refuse_mask_embedding(drafter: Path, c: hf_dflash.DFlash) -> None:
    """Raises UnsupportedError where the mask's embedding is in a pickle beside the checkpoint: opening one may run
    any code."""
    pickled = (drafter.parent if drafter.is_file() else drafter) / "mask_embedding.pt"
    if pickled.exists():
        raise UnsupportedError(
            f"{pickled}: the mask's embedding is in a pickle, which luce does not open; save the target's "
            f"embed_tokens.weight, with that embedding as its row {c.mask_token_id}, and its lm_head.weight in "
            "the checkpoint, and move this file away"
        )


def _of_gemma4(c: hf_dflash.DFlash, target: Target) -> hf_dflash.DFlash:
    """Returns the hyperparameters with what a Gemma 4 target does to embeddings and logits, where the drafter's config
    does not say it: z-lab's do not."""
    scale = math.sqrt(c.n_embd) if c.embedding_scale is None else c.embedding_scale
    return replace(c, embedding_scale=scale, softcap=target.softcap if c.softcap is None else c.softcap)


def _check_target(c: hf_dflash.DFlash, target: Target) -> None:
    sizes = {"hidden_size": (c.n_embd, target.n_embd), "vocab_size": (c.n_vocab, target.n_vocab)}
    for key, (own, other) in sizes.items():
        if own != other:
            raise FileError(f"key {key} is {own}, but {other} in {target.path}: not the drafter's target")
    if c.target_layer_ids[-1] >= target.n_layer:
        raise FileError(
            f"key target_layer_ids taps layer {c.target_layer_ids[-1]}, {target.path} has {target.n_layer}"
        )


def _add_mask_token(w: gguf.GGUFWriter, c: hf_dflash.DFlash, target: Target) -> None:
    """Adds the mask token's id, the config's or else the tokenizer's."""
    key = gguf.Keys.Tokenizer.MASK_ID
    given = w.kv_data[0].pop(key, None)  # The tokenizer's keys may have it.
    mask = c.mask_token_id if c.mask_token_id is not None else given.value if given else None
    if mask is None:
        raise FileError(
            "key mask_token_id is missing in config.json (dflash_config or top level), and "
            f"the tokenizer of {target.path} has no mask token"
        )
    if not 0 <= mask < c.n_vocab:
        raise FileError(f"key mask_token_id is {mask}, the vocabulary has {c.n_vocab} tokens")
    w.add_mask_token_id(mask)
