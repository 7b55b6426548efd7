"""Keeps checkpoints as files: they outlive the process, and a bound keeps them small.

A file is written under another name and then renamed, so that a process that is killed leaves a whole file
or none. Its tokens come first, since a search for a beginning reads them alone. The rest is the core's, with
a checksum that the core verifies.
"""

from __future__ import annotations

import hashlib
import os
import queue
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import numpy as np

from luce.errors import Error, FileError

MAGIC = b"LUCEPFX1"
# These are the magic and the number of tokens. The tokens follow as int32, then the checkpoint.
_HEAD = struct.Struct("<8sQ")
SUFFIX = ".prefix"
FOLDER_MODE, FILE_MODE = 0o700, 0o600
CLOSE_S = 10.0  # A server that ends goes on writing for so many seconds.


Save = Callable[[], bytes | memoryview]  # This is Checkpoint.save.


class DiskCache:
    """A folder of one model's checkpoints, with at most `max_bytes` in all, private to its owner. One thread saves
    and writes them, beside the engine's. `key` says what the checkpoints depend on beside their tokens. `done`
    counts what was handed to the thread and is over, written or not."""

    def __init__(self, folder: Path, key: str, max_bytes: int):
        self._folder = folder / hashlib.sha256(key.encode()).hexdigest()[:16]
        self._max_bytes = max_bytes
        try:
            _private(folder, self._folder)
            for left in self._folder.glob("*.part"):
                left.unlink()
        except OSError as error:
            raise FileError(f"{self._folder}: {error.strerror}") from error
        self.done = 0
        self._work: queue.Queue[tuple[Path, np.ndarray, Save] | None] = queue.Queue(maxsize=1)
        self._ended = False
        self._written = dict[Path, bool]()  # The thread was handed these; each says whether it is there.
        self._thread = Thread(target=self._write_all, name="luce-cache", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Says whether the thread has still to begin with what it was given last."""
        return self._work.full()

    def found(self) -> Iterator[tuple[np.ndarray, Path, int]]:
        """Yields the tokens, path and bytes of each file. Other files in the folder are passed by."""
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            with suppress(OSError, FileError, ValueError), path.open("rb") as file:
                tokens = _read_tokens(file.read(_HEAD.size), file.read)
                if path.name == _name(tokens):
                    yield tokens, path, path.stat().st_size

    def write(self, tokens: np.ndarray, save: Save) -> Path:
        """Returns the path that the file will have. What `save` returns in the thread is written later, or
        nothing is, where it raises Error or the disk is full."""
        path = self._folder / _name(tokens)
        self._written[path] = True
        self._work.put((path, tokens, save))
        return path

    def read(self, path: Path, tokens: np.ndarray) -> bytes:
        """Returns the checkpoint of a file. Raises FileError where it is not there, or not of these
        tokens."""
        try:
            with path.open("rb") as file:
                found = _read_tokens(file.read(_HEAD.size), file.read)
                if not np.array_equal(found, tokens):
                    raise FileError(f"{path}: other tokens")
                data = file.read()
            os.utime(path)
        except OSError as error:
            raise FileError(f"{path}: {error.strerror}") from error
        return data

    def has(self, path: Path) -> bool:
        """Says whether the file is there, or will be."""
        return path.exists() or self._written.get(path, False)

    def remove(self, path: Path) -> None:
        with suppress(OSError):
            path.unlink()

    def close(self, last: Iterable[tuple[np.ndarray, Save]] = (), seconds: float = CLOSE_S) -> None:
        """Ends once everything that it was given is written, and then `last`, or after so many seconds. What
        is only half written then is no file."""
        end = time.monotonic() + seconds
        given = [(self._folder / _name(tokens), tokens, save) for tokens, save in last]
        with suppress(queue.Full):
            for item in (*given, None):
                self._work.put(item, timeout=max(end - time.monotonic(), 0))
        self._thread.join(max(end - time.monotonic(), 0))
        self._ended = True

    def _write_all(self) -> None:
        while not self._ended and (item := self._work.get()) is not None:
            path, tokens, save = item
            with suppress(Error, OSError, MemoryError):
                self._write(path, tokens, save())
                self._bound(path)
            self._written[path] = False
            self.done += 1

    def _write(self, path: Path, tokens: np.ndarray, data: bytes | memoryview) -> None:
        part = path.with_suffix(".part")
        try:
            with open(part, "wb", opener=_open_private) as file:
                file.write(_HEAD.pack(MAGIC, len(tokens)))
                file.write(tokens.astype("<i4").tobytes())
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except OSError:
            self.remove(part)
            raise

    def _bound(self, newest: Path) -> None:
        """Evicts the files that were used longest ago, until the rest is within the bound."""
        files = []
        for path in self._folder.glob(f"*{SUFFIX}"):
            with suppress(OSError):
                stat = path.stat()
                files.append((path == newest, stat.st_mtime_ns, stat.st_size, path))
        total = sum(size for _, _, size, _ in files)
        for _, _, size, path in sorted(files):
            if total <= self._max_bytes:
                break
            self.remove(path)
            total -= size


def _private(given: Path, folder: Path) -> None:
    """Makes a folder that its owner alone may enter, since its files hold what was said. Files of before are
    made private too. Raises OSError where it is somebody else's."""
    given.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
    folder.chmod(FOLDER_MODE)
    for path in folder.glob(f"*{SUFFIX}"):
        path.chmod(FILE_MODE)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, FILE_MODE)


def _name(tokens: np.ndarray) -> str:
    return hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest()[:32] + SUFFIX


def _read_tokens(head: bytes, read: object) -> np.ndarray:
    magic, n = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", 0)
    if magic != MAGIC or n > 1 << 24:
        raise FileError("no checkpoint of a prompt")
    raw = read(4 * n)  # type: ignore[operator]
    if len(raw) != 4 * n:
        raise FileError("the file is cut off")
    return np.frombuffer(raw, "<i4").astype(np.int32)
