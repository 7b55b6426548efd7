"""Writes a model that was planned from a checkpoint: types, keys, sampling and tokenizer; and says if luce runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf

from luce import native as _native
from luce.convert.gguf_output import Planned, Written, write
from luce.convert.gguf_tokenizer import add_hf_tokenizer, check_tokenizer
from luce.convert.hf_sampling import add_sampling
from luce.convert.weight_types import MIXES, choose
from luce.errors import UnsupportedError

Say = Callable[[str], None]  # It tells the user.


@dataclass(frozen=True)
class NewModel:
    """What a checkpoint becomes. `add_keys` takes the writer, a name and the file's type; `tied` says that the
    embedding is the output matrix too. `parts` names what the file has, in a line; a file that does not run alone says
    `beside` what it does."""

    arch: str
    plan: list[Planned]
    add_keys: Callable[[gguf.GGUFWriter, str, int], None]
    tied: bool
    n_vocab: int
    parts: str
    beside: str | None = None


def write_model(
    model: NewModel,
    folder: Path,
    out: Path,
    kind: str,
    tokenizer: Path | None,
    name: str | None,
    threads: int,
    say: Say,
    replace: bool,
) -> Written:
    """Writes the model of the checkpoint in `folder` to `out`; `kind` is a key of MIXES. The tokenizer is that of
    `tokenizer`, else of the checkpoint."""
    mix = MIXES[kind]
    types, fallbacks = choose(mix, ((t.name, t.shape) for t in model.plan), model.tied)
    for fallback in fallbacks:
        say(str(fallback))
    writer = gguf.GGUFWriter(None, model.arch)
    model.add_keys(writer, name or folder.resolve().name, mix.file_type)
    writer.add_type("model")
    own = folder.parent if folder.is_file() else folder
    add_sampling(writer, own)
    source = tokenizer or own
    add_hf_tokenizer(writer, source, model.n_vocab, say)

    def check(file: _native.File) -> None:
        check_tokenizer(file, source)
        say(model.beside or _can_run(file, model.parts))

    return write(out, writer, model.plan, types, _native.default(), check, threads, replace)


def _can_run(file: _native.File, parts: str) -> str:
    """Returns a line about what luce does with the file. Raises FileError where the core finds fault with it."""
    try:
        file.plan_memory("cpu")
    except UnsupportedError as error:
        return "luce does not run this file yet: " + str(error).removeprefix(f"{file.path}: ")
    return f"luce runs this file: {parts}"
