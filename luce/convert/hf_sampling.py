"""Reads how a checkpoint wants to be sampled, from generation_config.json beside its config.json."""

from __future__ import annotations

from pathlib import Path

import gguf

from luce.convert.hf_config import Section, read_json
from luce.errors import FileError

# By the key of general.sampling, as llama.cpp's converter names them: the configuration's keys, of which the
# first that is there counts, with the least and most that a server takes.
_REALS: dict[str, tuple[tuple[str, ...], float, float]] = {
    "temp": (("temperature",), 0.0, 1e6),
    "top_p": (("top_p",), 0.0, 1.0),
    "min_p": (("min_p",), 0.0, 1.0),
    "penalty_repeat": (("penalty_repeat", "repetition_penalty"), 0.01, 100.0),
}


def add_sampling(w: gguf.GGUFWriter, folder: Path) -> None:
    """Adds the sampling that generation_config.json gives; without that file it adds nothing. FileError names
    a value that no token can be sampled with."""
    path = folder / "generation_config.json"
    if not path.exists():
        return
    config = Section(read_json(path), str(path))
    for name, (keys, least, most) in _REALS.items():
        key = next((key for key in keys if key in config), None)
        if key is None:
            continue
        value = config.get(key, float)
        if not least <= value <= most:
            raise FileError(f"{path}: key {key} is {value:g}, expected {least:g} to {most:g}")
        w.add_float32(f"general.sampling.{name}", value)
    if "top_k" in config:
        w.add_int32("general.sampling.top_k", max(config.get("top_k", int), 0))  # None of them all is 0 too.
