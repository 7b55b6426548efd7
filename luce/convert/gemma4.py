"""Converts a Gemma 4 checkpoint (safetensors; dense, mixture, with per-layer embeddings, or an assistant) to GGUF."""

from __future__ import annotations

from pathlib import Path

import gguf

from luce.convert import hf_gemma4
from luce.convert.gemma4_layout import add_keys
from luce.convert.gguf_output import Written, require_free
from luce.convert.hf_config import read_config
from luce.convert.model_file import NewModel, Say, write_model
from luce.convert.safetensors_reader import Checkpoint
from luce.convert.weight_types import DEFAULT


def convert(
    folder: Path,
    out: Path,
    kind: str = DEFAULT,
    tokenizer: Path | None = None,
    name: str | None = None,
    threads: int = 0,
    say: Say = lambda text: None,
    replace: bool = False,
) -> Written:
    """Writes the checkpoint in `folder` as `out`. `kind` is a key of MIXES. A file that is there is to `replace`, or an
    error. Error names the key or tensor at fault."""
    require_free(out, replace)
    checkpoint = Checkpoint(folder)
    c = hf_gemma4.read_hparams(read_config(folder))
    plan = hf_gemma4.plan(c, checkpoint, hf_gemma4.plain_names(checkpoint))
    for note in plan.notes:
        say(note)

    def keys(w: gguf.GGUFWriter, called: str, file_type: int) -> None:
        add_keys(w, c, called, file_type)

    beside = f"an assistant: it drafts for a Gemma 4 model of width {c.n_embd_out}" if c.n_embd_out else None
    model = NewModel(c.arch, plan.tensors, keys, c.tied, c.n_vocab, f"{c.n_layer} blocks", beside)
    return write_model(model, folder, out, kind, tokenizer, name, threads, say, replace)
