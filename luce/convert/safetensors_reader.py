"""Reads safetensors checkpoints, of one file or several, memory-mapped: names, shapes and the stored numbers.

The format (huggingface/safetensors, README "Format") is a u64 little-endian header length, a JSON header
{name: {dtype, shape, data_offsets}} and the data; offsets count from the data's start. numpy has no BF16, so
a tensor's numbers are handed out as stored (BF16 as uint16), and `as_f32` widens them.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from luce.convert.hf_config import parse_json, read_json
from luce.errors import FileError, UnsupportedError

INDEX = "model.safetensors.index.json"
MAX_HEADER = 100 << 20  # The reference reader takes no header of more bytes.
MAX_DIMS = 8

_STORED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4",
           "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "?"}  # fmt: skip
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Source:
    """This is one tensor: `stored` has its shape and holds its numbers as the file does."""

    name: str
    dtype: str
    stored: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape


def as_f32(stored: np.ndarray, dtype: str) -> np.ndarray:
    """Returns numbers that are stored as a type in F32. That is exact for BF16, F16 and F32."""
    if dtype == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
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


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} appears twice")
    return dict(pairs)


def _read_header(path: Path) -> dict[str, Source]:
    """Returns every tensor of one file as a view of its mapping. All bounds are checked."""
    if path.exists() and not path.is_file():
        raise FileError(f"{path}: it is a folder, a device or a pipe")
    try:
        data = np.memmap(path, np.uint8, "r")
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:  # numpy refuses to map nothing.
        raise FileError(f"{path}: the file is empty") from error
    if data.size < 8:
        raise FileError(f"{path}: truncated: {data.size} bytes")
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    if length > min(MAX_HEADER, data.size - 8):
        raise FileError(f"{path}: the header claims {length} bytes, the file has {data.size}")
    header = parse_json(data[8 : 8 + length].tobytes(), f"{path}: the header", _unique)
    header.pop("__metadata__", None)
    body = data[8 + length :]
    spans = sorted((*_span(path, name, entry, body.size), name) for name, entry in header.items())
    for (_, end, name), (begin, _, after) in zip(spans, spans[1:], strict=False):
        if begin < end:
            raise FileError(f"{path}: tensors {name} and {after} overlap")
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype = entry["dtype"]
        stored = np.frombuffer(body[begin:end], _STORED[dtype]).reshape(entry["shape"])
        tensors[name] = Source(name, dtype, stored)
    return tensors


def _is_extent(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _span(path: Path, name: str, entry: object, size: int) -> tuple[int, int]:
    """Returns the data_offsets of one entry, checked."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise FileError(f"{path}: tensor {name} lacks dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _STORED:
        raise UnsupportedError(
            f"{path}: tensor {name} is {dtype}: luce converts {', '.join(_STORED)}; "
            "take the unquantised checkpoint"
        )
    for values in (shape, offsets):
        if not isinstance(values, list) or not all(_is_extent(value) for value in values):
            raise FileError(f"{path}: tensor {name}: {values!r} is not a list of sizes")
    if len(shape) > MAX_DIMS:
        raise FileError(f"{path}: tensor {name} has {len(shape)} dimensions, at most {MAX_DIMS} are read")
    needed = math.prod(shape) * np.dtype(_STORED[dtype]).itemsize
    if len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1] <= size:
        raise FileError(f"{path}: tensor {name}: offsets {offsets} do not lie in {size} bytes: truncated?")
    if offsets[1] - offsets[0] != needed:
        raise FileError(f"{path}: tensor {name}: {dtype} {shape} takes {needed} bytes, not {offsets}")
    return offsets[0], offsets[1]
