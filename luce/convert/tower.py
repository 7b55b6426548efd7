"""Converts the vision tower of a checkpoint (safetensors) to the GGUF that llama.cpp calls mmproj."""

from __future__ import annotations

from pathlib import Path

import gguf

from luce import native as _native
from luce.convert import gemma4_tower, gemma4_unified_tower, qwen35_tower
from luce.convert.gguf_output import Written, require_free, write
from luce.convert.hf_config import read_config
from luce.convert.hf_gemma4 import is_gemma
from luce.convert.model_file import Say
from luce.convert.safetensors_reader import Checkpoint
from luce.convert.weight_types import MIXES
from luce.errors import UnsupportedError

TYPES = ("F32", "F16", "BF16", "Q8_0")  # Towers come in these, and lose much by fewer bits.


def convert(
    folder: Path, out: Path, kind: str, name: str | None = None, threads: int = 0,
    say: Say = lambda text: None, replace: bool = False,
) -> Written:  # fmt: skip
    """Writes the tower of the checkpoint in `folder` as `out`; `kind` is one of TYPES. A file that is there is to
    `replace`, or an error. Error names the key or tensor at fault."""
    if kind not in TYPES:
        raise UnsupportedError(f"a tower is written as {', '.join(TYPES)}: not as {kind}", concerns="tower_type")
    require_free(out, replace)
    own = folder.parent if folder.is_file() else folder
    config = read_config(folder)
    checkpoint, writer = Checkpoint(folder), gguf.GGUFWriter(None, "clip")
    called, file_type = name or folder.resolve().name, MIXES[kind].file_type
    if is_gemma(config) and gemma4_unified_tower.is_unified(config):
        unified = gemma4_unified_tower.read_hparams(config)
        n_layer, of_all = unified.n_layer, gemma4_unified_tower.shapes(unified)
        plan = [gemma4_unified_tower.planned(unified, each, shape, checkpoint) for each, shape in of_all.items()]
        gemma4_unified_tower.add_keys(writer, unified, called, file_type)
    elif is_gemma(config):
        gemma = gemma4_tower.read_hparams(config, own)
        n_layer, of_all = gemma.n_layer, gemma4_tower.shapes(gemma)
        plan = [gemma4_tower.planned(gemma, each, shape, checkpoint) for each, shape in of_all.items()]
        gemma4_tower.add_keys(writer, gemma, called, file_type)
    else:
        qwen = qwen35_tower.read_hparams(config, own)
        n_layer, of_all = qwen.n_layer, qwen35_tower.shapes(qwen)
        plan = [qwen35_tower.planned(qwen, each, shape, checkpoint) for each, shape in of_all.items()]
        qwen35_tower.add_keys(writer, qwen, called, file_type)
    types = {t.name: qwen35_tower.type_of(t.name, t.shape, kind) for t in plan}

    def check(file: _native.File) -> None:
        with _native.Tower(file) as tower:
            say(f"luce runs this tower: {n_layer} blocks, for models of width {tower.info.n_out}")

    return write(out, writer, plan, types, _native.default(), check, threads, replace)
