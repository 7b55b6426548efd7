"""Converts a Qwen3.5/3.6/3.8 checkpoint (safetensors; dense or MoE) to GGUF."""

from __future__ import annotations

from pathlib import Path

import gguf

from luce.convert import hf_qwen35
from luce.convert.gguf_output import Written, require_free
from luce.convert.hf_config import read_config
from luce.convert.model_file import NewModel, Say, write_model
from luce.convert.qwen35_layout import add_keys
from luce.convert.safetensors_reader import Checkpoint
from luce.convert.weight_types import DEFAULT
from luce.errors import FileError


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

    def keys(w: gguf.GGUFWriter, called: str, file_type: int) -> None:
        add_keys(w, c, called, file_type)

    alone = any(t.name.startswith("blk.0.") for t in plan)
    parts = f"{c.n_layer} blocks" + (", NextN head" if c.n_nextn else "")
    beside = None if alone else "a NextN head alone: it drafts for the trunk that it was made with"
    model = NewModel(c.arch, plan, keys, c.tied, c.n_vocab, parts, beside)
    return write_model(model, folder, out, kind, tokenizer, name, threads, say, replace)
