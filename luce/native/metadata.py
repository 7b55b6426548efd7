"""Has the keys of a GGUF as Python values."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from struct import calcsize
from typing import Any

from luce.errors import FileError
from luce.native.library import Handle

Scalar = int | float | bool | str
Value = Scalar | list[str] | memoryview

# These are memoryview's formats of GGUF's types.
_FORMATS: dict[int, Any] = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class Metadata(Mapping[str, Value]):
    """These are a file's keys, decoded on demand. Scalars are int, float, bool or str; arrays of numbers are
    memoryviews of a copy, and arrays of strings are list[str]. Strings that are not UTF-8 raise FileError."""

    def __init__(self, file: Handle, n_kv: int):
        self._file = file
        library = file.library
        self._index: dict[str, int] = {}
        for index in range(n_kv):
            kv = self._entry(index)
            self._index.setdefault(library.text(kv.name), index)

    def _entry(self, index: int) -> Any:
        library = self._file.library
        kv = library.struct("luce_kv")
        library.check(library.lib.luce_file_get_kv(self._file.handle, index, kv))
        return kv

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, key: str) -> Value:
        kv = self._entry(self._index[key])
        ffi = self._file.library.ffi
        if kv.type == _STRING:
            return _decode(key, bytes(ffi.buffer(kv.data, kv.count)) if kv.count else b"")
        if kv.type == _ARRAY and kv.elem_type == _STRING:
            return self._strings(key, kv.count)
        form = _FORMATS[kv.elem_type]
        raw = bytes(ffi.buffer(kv.data, kv.count * calcsize(form))) if kv.count else b""
        values = memoryview(raw).cast(form)
        return values if kv.type == _ARRAY else values[0]

    def _strings(self, key: str, count: int) -> list[str]:
        if not count:
            return []
        library, ffi = self._file.library, self._file.library.ffi
        starts, lengths = array("Q", bytes(8 * count)), array("Q", bytes(8 * count))
        library.check(
            library.lib.luce_file_get_strings(
                self._file.handle,
                self._index[key],
                ffi.from_buffer("char *[]", starts),
                ffi.from_buffer("uint64_t[]", lengths),
            )
        )
        # An array's strings lie one after the other in the mapping, so they are copied once and then sliced.
        first = starts[0]
        raw = bytes(ffi.buffer(ffi.cast("char *", first), starts[-1] + lengths[-1] - first))
        try:
            return [raw[at - first : at - first + n].decode() for at, n in zip(starts, lengths, strict=True)]
        except UnicodeDecodeError as error:
            raise FileError(f"key {key} holds a string that is not UTF-8") from error


def _decode(key: str, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise FileError(f"key {key} is not UTF-8") from error
