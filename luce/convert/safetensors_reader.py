"""Reads safetensors checkpoints, of one file or several, by the safetensors package: names, shapes and numbers.

A tensor's numbers are read when they are asked for, so a checkpoint takes no more memory than one tensor. numpy has
no BF16; ml_dtypes gives it one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 (safetensors takes numpy's BF16 from it)
import numpy as np
from safetensors import SafetensorError, safe_open

from luce.convert.hf_config import read_json
from luce.errors import FileError, UnsupportedError

INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
_STORED = (*_FLOATS, "I64", "I32", "I16", "I8", "U8", "BOOL")


@dataclass(frozen=True)
class Source:
    """This is one tensor. `read` reads its numbers, of `shape` and of the type that the file calls `dtype`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def as_f32(stored: np.ndarray) -> np.ndarray:
    """Returns stored numbers in F32. That is exact for BF16, F16 and F32."""
    return np.ascontiguousarray(stored, np.float32)


class Checkpoint:
    """These are the tensors of a checkpoint by name. `folder` may also be the path of a single .safetensors
    file."""

    def __init__(self, folder: Path):
        self.path = folder
        self._tensors: dict[str, tuple[Path, Source]] = {}
        for path, wanted in _shards(folder):
            found = _read_header(path)
            for name, source in found.items():
                if name in self._tensors:
                    raise FileError(f"tensor {name} is in {self._tensors[name][0].name} and in {path.name}")
                self._tensors[name] = (path, source)
            for name in wanted:
                if name not in found:
                    raise FileError(f"tensor {name} is not in {path}, where {INDEX} says it is")

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> Source:
        """Returns the tensor, which has to hold floating-point numbers."""
        source = self.any_type(name)
        if source.dtype not in _FLOATS:
            raise UnsupportedError(f"tensor {name} is {source.dtype}, expected one of {', '.join(_FLOATS)}")
        return source

    def any_type(self, name: str) -> Source:
        if name not in self._tensors:
            raise FileError(f"tensor {name} is missing in {self.path}")
        return self._tensors[name][1]


def _shards(folder: Path) -> list[tuple[Path, list[str]]]:
    """Returns the files, each with the names that the index puts there."""
    if folder.is_file():
        return [(folder, [])]
    if not folder.is_dir():
        raise FileError(f"{folder} is not a folder with config.json and *.safetensors")
    index = folder / INDEX
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        single = folder / "model.safetensors"
        if single in files or len(files) == 1:
            return [(single if single in files else files[0], [])]
        what = f"{len(files)} .safetensors files, but no {INDEX}" if files else "no .safetensors file"
        raise FileError(f"{folder} has {what}")
    values = read_json(index)
    try:
        weight_map = values["weight_map"]
        by_file: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            by_file.setdefault(str(file), []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"{index} holds no weight_map of tensor to file: {error!r}") from error
    for file in by_file:
        if Path(file).name != file:
            raise FileError(f"{index}: {file!r} is not the name of a file beside it")
    return [(folder / file, names) for file, names in sorted(by_file.items())]


def _read_header(path: Path) -> dict[str, Source]:
    """Returns every tensor of one file. Raises FileError where the file is none or is damaged."""
    if path.exists() and not path.is_file():
        raise FileError(f"{path}: it is a folder, a device or a pipe")
    try:
        if path.stat().st_size == 0:
            raise FileError(f"{path}: the file is empty")
        file: Any = safe_open(path, "numpy")
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise FileError(f"{path}: {error}") from error
    return {name: _source(path, file, name) for name in file.offset_keys()}


def _source(path: Path, file: Any, name: str) -> Source:
    entry = file.get_slice(name)
    dtype = entry.get_dtype()
    if dtype not in _STORED:
        raise UnsupportedError(
            f"{path}: tensor {name} is {dtype}: luce converts {', '.join(_STORED)}; take the unquantised checkpoint"
        )
    return Source(name, dtype, tuple(entry.get_shape()), lambda: file.get_tensor(name))
