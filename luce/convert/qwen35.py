"""Converts a Qwen3.5/3.6 checkpoint (safetensors; dense or MoE) to GGUF."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf

from luce import native as _native
from luce.convert import hf_qwen35
from luce.convert.gguf_output import Planned, Written, require_free, write
from luce.convert.gguf_tokenizer import add_hf_tokenizer, check_tokenizer
from luce.convert.hf_config import read_config
from luce.convert.hf_sampling import add_sampling
from luce.convert.qwen35_layout import Config, add_keys
from luce.convert.safetensors_reader import Checkpoint
from luce.convert.weight_types import DEFAULT, MIXES, choose
from luce.errors import FileError, UnsupportedError

Say = Callable[[str], None]  # It tells the user.


def convert(
    folder: Path,
    out: Path,
    kind: str = DEFAULT,
    part: str = "all",
    tokenizer: Path | None = None,
    name: str | None = None,
    threads: int = 0,
    say: Say = lambda text: None,
    replace: bool = False,
) -> Written:
    """Writes the checkpoint in `folder` as `out`. `kind` is a key of MIXES. `part` is "all" (the trunk, and
    the NextN head where there is one), "trunk" or "mtp". A file that is there is to `replace`, or an error.
    Error names the key or tensor at fault."""
    require_free(out, replace)
    checkpoint = Checkpoint(folder)
    names = hf_qwen35.plain_names(checkpoint, part)
    c = hf_qwen35.read_hparams(read_config(folder), names)
    if part == "mtp" and not c.n_nextn:
        raise FileError(f"{folder} has no mtp.* tensors: there is no NextN head to write")
    if part == "all" and not c.n_nextn:
        say("no mtp.* tensors: the file will have no NextN head")
    if c.tied and "lm_head.weight" in names:
        say(f"{names['lm_head.weight']} is left out: config.json ties it to the embedding")
    plan = hf_qwen35.plan(c, part, checkpoint, names)
    mix = MIXES[kind]
    types, fallbacks = choose(mix, ((t.name, t.shape) for t in plan), c.tied)
    for fallback in fallbacks:
        say(str(fallback))
    writer = gguf.GGUFWriter(None, c.arch)
    add_keys(writer, c, name or folder.resolve().name, mix.file_type)
    writer.add_type("model")
    own = folder.parent if folder.is_file() else folder
    add_sampling(writer, own)
    source = tokenizer or own
    add_hf_tokenizer(writer, source, c.n_vocab, say)

    def check(file: _native.File) -> None:
        check_tokenizer(file, source)
        say(_can_run(file, c, plan))

    return write(out, writer, plan, types, _native.default(), check, threads, replace)


def _can_run(file: _native.File, c: Config, plan: list[Planned]) -> str:
    """Returns a line about what luce does with the file. Raises FileError where the core finds fault with it.
    """
    if not any(t.name.startswith("blk.0.") for t in plan):
        return "a NextN head alone: it drafts for the trunk that it was made with"
    try:
        file.plan_memory("cpu")
    except UnsupportedError as error:
        return "luce does not run this file yet: " + str(error).removeprefix(f"{file.path}: ")
    return f"luce runs this file: {c.n_layer} blocks" + (", NextN head" if c.n_nextn else "")
