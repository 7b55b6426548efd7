"""Writes a GGUF tensor by tensor, reads it back through the core, and only then gives it its name.

Everything goes to a hidden `.NAME.PID.part` beside the output: whatever stops the program, the output
is either whole and verified or not there.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np

from luce.convert.weight_types import QType
from luce.errors import ArgumentError, Error, FileError, UnsupportedError
from luce.native import File, Library

SLAB = 1 << 24  # So many weights are F32 in memory at once.
F16_MAX = 65504.0


@dataclass(frozen=True)
class Planned:
    """This is a tensor to be written. `shape` is in numpy's order. rows() gives its F32 values as (n,
    shape[-1]) arrays in order. In place of rows, `stored` has the bytes (n_rows, bytes per row) of type
    `stored_type`."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    rows: Callable[[], Iterator[np.ndarray]]
    stored: np.ndarray | None = None
    stored_type: str = ""

    @property
    def count(self) -> int:
        return int(np.prod(self.shape))


def slabs(matrix: np.ndarray, widen: Callable[[np.ndarray], np.ndarray]) -> Iterator[np.ndarray]:
    """Yields widen() of the rows of `matrix` (..., n), some at a time."""
    flat = matrix.reshape(-1, matrix.shape[-1])
    step = max(1, SLAB // flat.shape[1])
    for start in range(0, len(flat), step):
        part = flat[start : start + step]
        yield widen(part)


class Progress:
    """Shows a line on stderr that rewrites itself on a terminal. Elsewhere it is silent."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.last = max(total, 1), 0, 0.0
        self.shown = sys.stderr.isatty()

    def __call__(self, weights: int, name: str) -> None:
        self.done += weights
        if self.shown and (time.monotonic() - self.last > 0.1 or self.done == self.total):
            self.last = time.monotonic()
            print(f"\r{100 * self.done // self.total:3d}%  {name:40.40}", end="", file=sys.stderr, flush=True)

    def finish(self) -> None:
        if self.shown:
            print(f"\r{'':46}\r", end="", file=sys.stderr, flush=True)


class Encoder:
    """Turns F32 rows into the bytes of a type, on all cores: the core's quantiser leaves Python's lock."""

    def __init__(self, library: Library, threads: int):
        self.library = library
        self.threads = threads
        self.pool = ThreadPoolExecutor(threads, "luce-encode")

    def __call__(self, name: str, kind: str, rows: np.ndarray) -> np.ndarray:
        if kind == "F16" and float(np.abs(rows).max(initial=0)) > F16_MAX:
            raise UnsupportedError(f"tensor {name} holds values that F16 cannot", concerns="f16")
        parts = np.array_split(rows, min(self.threads, len(rows)))
        try:
            return np.concatenate(list(self.pool.map(lambda x: self.library.quantize(QType[kind], x), parts)))
        except ArgumentError as error:
            raise FileError(f"tensor {name}: {error}") from error

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class Written:
    """This is what a file holds that was just written and read back."""

    path: Path
    size_bytes: int
    tensors: int
    weights: int
    types: dict[str, int]  # It counts the tensors of each type.

    def __str__(self) -> str:
        mix = ", ".join(f"{n} {kind}" for kind, n in sorted(self.types.items()))
        size = f"{self.size_bytes / 1e6:.1f} MB"
        return f"{self.path}: {size}, {self.weights:,} weights in {self.tensors} tensors ({mix}), verified"


def require_free(path: Path, replace: bool) -> None:
    """Raises FileError where a file is at `path` that is not to be replaced."""
    if path.is_file() and not replace:
        raise FileError(f"{path} is there already", concerns="existing_file")


@contextmanager
def _hidden(path: Path, replace: bool = False) -> Iterator[Path]:
    """Gives a name beside `path` for the unfinished file, which at the end is gone or is `path`. A file that
    is there is not replaced unless that is asked, and what is no file, like a device, never. Errors name
    `path`."""
    require_free(path, replace)
    if path.exists() and not path.is_file():
        raise FileError(f"{path} cannot be written: it is a folder, a device or a pipe")
    if not path.parent.is_dir():
        raise FileError(f"{path} cannot be written: what it should lie in is not a folder")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            yield part
            require_free(path, replace)  # It took a while.
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        if str(error.filename) != str(part):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Error as error:
        if str(part) not in str(error):
            raise
        raise type(error)(str(error).replace(str(part), str(path)), error.concerns) from error


def _bytes_per_row(planned: Planned, kind: str) -> int:
    block, size = gguf.GGML_QUANT_SIZES[QType[kind]]
    return planned.shape[-1] // block * size


def _write_tensor(out: BinaryIO, planned: Planned, kind: str, encode: Encoder) -> str:
    """Writes the data; returns the hash of its bytes."""
    digest = hashlib.blake2b()
    n = 0
    pieces = (
        (encode(planned.name, kind, rows) for rows in planned.rows())
        if planned.stored is None
        else slabs(planned.stored, np.ascontiguousarray)
    )
    for piece in pieces:
        data = piece.tobytes()
        out.write(data)
        digest.update(data)
        n += piece.nbytes
    expected = planned.count // planned.shape[-1] * _bytes_per_row(planned, kind)
    if n != expected:
        raise AssertionError(f"{planned.name}: {n} bytes, {expected} were announced")
    return digest.hexdigest()


def write(
    path: Path,
    writer: gguf.GGUFWriter,
    tensors: Iterable[Planned],
    types: dict[str, str],
    library: Library,
    check: Callable[[File], None] = lambda file: None,
    threads: int = 0,
    replace: bool = False,
) -> Written:
    """Writes the file at `path`: the writer's keys (made without a path) and the tensors, each in memory by
    itself. `types` maps a tensor to its ggml type. `check` makes further demands on the finished file,
    before it gets its name. A file that is there is to `replace`, or a FileError. After Error and OSError
    there is no new file."""
    plan = list(tensors)
    kinds = {t.name: t.stored_type if t.stored is not None else types[t.name] for t in plan}
    for t in plan:
        nbytes = t.count // t.shape[-1] * _bytes_per_row(t, kinds[t.name])
        writer.add_tensor_info(t.name, t.shape, np.dtype(np.float32), nbytes, QType[kinds[t.name]])
    keys = dict(writer.kv_data[0])
    progress = Progress(sum(t.count for t in plan))
    encode = Encoder(library, threads or os.cpu_count() or 1)
    with _hidden(path, replace) as part:
        try:
            writer.write_header_to_file(part)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            assert writer.fout is not None
            (out,) = writer.fout
            writer.write_padding(out, out.tell())
            hashes = {}
            for t in plan:
                hashes[t.name] = _write_tensor(out, t, kinds[t.name], encode)
                writer.write_padding(out, out.tell())
                progress(t.count, t.name)
            out.flush()
            os.fsync(out.fileno())
        finally:
            progress.finish()
            encode.close()
            writer.close()
        with File(part, library) as file:
            _verify(file, plan, kinds, hashes, keys)
            check(file)
            size = file.info.size_bytes
    used = {kind: list(kinds.values()).count(kind) for kind in set(kinds.values())}
    return Written(path, size, len(plan), sum(t.count for t in plan), used)


# ---- reading back


def tensor_bytes(file: File, index: int) -> np.ndarray:
    """Returns uint8 (size_bytes,), a view of tensor `index` in the file's mapping."""
    library = file.library
    info = library.struct("luce_tensor_info")
    library.check(library.lib.luce_file_get_tensor(file.handle, index, info))
    return np.frombuffer(library.ffi.buffer(info.data, info.size_bytes), np.uint8)


def _verify(
    file: File, plan: list[Planned], kinds: dict[str, str], hashes: dict[str, str], keys: dict[str, Any]
) -> None:
    """Compares the file as the core reads it with what was meant."""
    found = [(t.name, t.type_name, t.shape) for t in file.tensors]
    meant = [(t.name, kinds[t.name], tuple(reversed(t.shape))) for t in plan]
    if found != meant:
        pairs = zip(found, meant, strict=False)
        differing = next((pair for pair in pairs if pair[0] != pair[1]), "their number")
        raise FileError(f"the written file reads back with other tensors: {differing}")
    for index, tensor in enumerate(file.tensors):
        if hashlib.blake2b(tensor_bytes(file, index)).hexdigest() != hashes[tensor.name]:  # type: ignore[arg-type]
            raise FileError(f"tensor {tensor.name} reads back with other bytes than were written")
    for key, value in keys.items():
        read: Any = file.kv[key]
        read = read.tolist() if isinstance(read, memoryview) else read
        wanted: Any = value.value
        wanted = list(wanted) if isinstance(wanted, list | tuple) else wanted
        if value.type == gguf.GGUFValueType.FLOAT32:
            wanted = float(np.float32(wanted))
        if read != wanted and not (isinstance(wanted, list) and _same_numbers(read, wanted)):
            raise FileError(f"key {key} reads back as {read!r:.80}, not {wanted!r:.80}")


def _same_numbers(read: Any, wanted: list[Any]) -> bool:
    floats = all(isinstance(value, float) for value in wanted)
    return floats and read == np.array(wanted, np.float32).tolist()
