"""The core through its flat C ABI (native/include/luce.h); the only importer of cffi.

Each handle is a context manager; closing twice is harmless, a closed handle raises StateError.
Every failed call raises the LuceError subclass of its luce_status with the core's one-line message.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import cffi  # type: ignore[import-untyped]
import numpy as np

from luce.errors import BY_CODE, ArgumentError, InternalError, LuceError, StateError
from luce.metadata import Metadata
from luce.structs import (
    Device,
    FileInfo,
    Memory,
    ModelInfo,
    Sampling,
    SessionInfo,
    SessionParams,
    Tensor,
    TypeInfo,
)

Progress = Callable[[float], object]  # part done in 0..1; a true result cancels
R = TypeVar("R", bound=Any)
IntArray = Sequence[int] | np.ndarray


def c_declarations(header: str) -> str:
    """luce.h as cffi parses it: no comments, no C++ guards, no directives but integer constants."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    text = re.sub(r"^#ifdef __cplusplus$.*?^#endif$", "", text, flags=re.S | re.M)
    text = re.sub(r"^#(?!define[ \t]+\w+[ \t]+\d+[ \t]*$).*$", "", text, flags=re.M)
    return text.replace("LUCE_API", "")


class Library:
    """A loaded libluce. `ffi` and `lib` are cffi's; the methods are the functions without a handle."""

    def __init__(self, path: Path, header: Path):
        self.path = path
        self.ffi = cffi.FFI()
        self.ffi.cdef(c_declarations(header.read_text(encoding="utf-8")))
        try:
            self.lib: Any = self.ffi.dlopen(str(path))
            found = self.lib.luce_abi_version()
        except (OSError, AttributeError) as error:
            raise LuceError(f"cannot load {path}: {error}; reinstall luce") from error
        if found != self.lib.LUCE_ABI_VERSION:
            raise LuceError(
                f"{path} has ABI version {found}, its header says {self.lib.LUCE_ABI_VERSION}: "
                "they come from different builds; reinstall luce"
            )

    def check(self, status: int) -> None:
        """Raises the exception of a luce_status that is not LUCE_OK."""
        if status != 0:
            message = self.ffi.string(self.lib.luce_last_error()).decode("utf-8", "replace")
            raise BY_CODE.get(status, InternalError)(message or f"status {status}")

    def struct(self, name: str, **fields: Any) -> Any:
        """A zeroed `name` with its struct_size set, and `fields`."""
        made = self.ffi.new(f"{name} *")
        made.struct_size = self.ffi.sizeof(name)
        for field, value in fields.items():
            setattr(made, field, value)
        return made

    def read(self, kind: type[R], function: Callable[..., int], *args: Any) -> R:
        """`kind` filled from the struct kind.STRUCT that function(*args, struct) writes."""
        struct = self.struct(kind.STRUCT)
        self.check(function(*args, struct))
        values = {field.name: getattr(struct, field.name) for field in fields(kind)}
        texts = {
            name: self.text(value) for name, value in values.items() if isinstance(value, self.ffi.CData)
        }
        made: R = kind(**values | texts)
        return made

    def text(self, pointer: Any) -> str:
        """A NUL-terminated string of the core, str."""
        return str(self.ffi.string(pointer).decode("utf-8", "replace"))

    def ints(self, values: IntArray) -> Any:
        """int32_t[] from token ids, row indices or parents; what does not fit raises ArgumentError."""
        array = np.ascontiguousarray(values, dtype=np.int64)
        if array.size and np.abs(array).max() >= 2**31:
            raise ArgumentError(f"{array[np.abs(array).argmax()]} does not fit into 32 bits")
        return self.ffi.from_buffer("int32_t[]", array.astype(np.int32))

    @property
    def version(self) -> str:
        """For people: "0.1.0 (ggml 0.25.3, cuda)"."""
        return self.text(self.lib.luce_version())

    def devices(self) -> list[Device]:
        """All devices; the first is what "auto" takes."""
        count = self.ffi.new("int32_t *")
        self.check(self.lib.luce_device_count(count))
        return [self.read(Device, self.lib.luce_device_get, index) for index in range(count[0])]

    def set_log(self, log: Callable[[int, str], None] | None) -> None:
        """`log` gets (level 0 debug .. 3 error, text) from any thread; None discards."""
        if log is None:
            callback = self.ffi.NULL
        else:
            callback = self.ffi.callback("luce_log_fn", lambda level, text, _: log(level, self.text(text)))
        self.check(self.lib.luce_set_log(callback, self.ffi.NULL))
        self._log = callback  # the core calls it until the next set_log

    def sampling(self, sampling: Sampling) -> Any:
        """luce_sampling of `sampling`."""
        return self.struct("luce_sampling", **vars(sampling))

    def sample(self, logits: np.ndarray, sampling: Sampling, position: int) -> int:
        """The sampling rule on F32 logits (n_vocab,) for the token at `position`."""
        row = np.ascontiguousarray(logits, dtype=np.float32)
        token = self.ffi.new("int32_t *")
        data = self.ffi.from_buffer("float[]", row)
        self.check(self.lib.luce_sample(data, row.size, self.sampling(sampling), position, token))
        return int(token[0])

    def accept(self, tokens: IntArray, parents: IntArray | None, choices: IntArray) -> tuple[list[int], int]:
        """The accept rule: (accepted rows from row 0 on, the choice after the last: the new anchor).
        parents None: a chain."""
        n = len(tokens)
        parents = range(-1, n - 1) if parents is None else parents
        if len(choices) != n or len(parents) != n:
            raise ArgumentError("tokens, parents and choices differ in length")
        path, n_path = self.ffi.new("int32_t[]", n), self.ffi.new("uint32_t *")
        anchor = self.ffi.new("int32_t *")
        self.check(
            self.lib.luce_accept(
                self.ints(tokens),
                self.ints(parents),
                self.ints(choices),
                n,
                path,
                n_path,
                anchor,
            )
        )
        return list(path[0 : n_path[0]]), int(anchor[0])

    def type_info(self, type_id: int) -> TypeInfo:
        """Name and block layout of a ggml type id; ArgumentError for an id that ggml lacks."""
        return self.read(TypeInfo, self.lib.luce_type_get, type_id)

    def quantize(self, type_id: int, rows: np.ndarray) -> np.ndarray:
        """F32 (n_rows, n_per_row) to uint8 (n_rows, bytes per row) of a ggml type id."""
        info = self.type_info(type_id)
        source = np.ascontiguousarray(rows, dtype=np.float32)
        if source.ndim != 2 or source.shape[1] % max(info.block_size, 1):
            raise ArgumentError(f"{source.shape} is not rows of {info.name} blocks of {info.block_size}")
        made = np.empty((source.shape[0], source.shape[1] // info.block_size * info.type_size), np.uint8)
        self.check(
            self.lib.luce_quantize(
                type_id,
                self.ffi.from_buffer("float[]", source),
                *source.shape,
                self.ffi.from_buffer("char[]", made),
                made.nbytes,
            )
        )
        return made

    def op_run(
        self,
        device: str,
        op: str,
        arrays: Sequence[np.ndarray],
        params: IntArray = (),
        *,
        shape: Sequence[int],
        dtype: Any = np.float32,
    ) -> np.ndarray:
        """Runs one of luce's ops alone. Shapes are numpy's (slowest first), types F32, F16, I32.
        The op may write to the arrays it is documented to write to: they are changed in place."""
        result = np.full(shape, np.nan if np.dtype(dtype).kind == "f" else -1, dtype)  # poison
        args = self.ffi.new("luce_array[]", len(arrays))
        for arg, array in zip(args, arrays, strict=True):
            self._fill_array(arg, array)
        out = self.ffi.new("luce_array *")
        self._fill_array(out, result)
        numbers = self.ints(params)
        self.check(
            self.lib.luce_op_run(device.encode(), op.encode(), args, len(arrays), numbers, len(numbers), out)
        )
        return result

    def _fill_array(self, out: Any, array: np.ndarray) -> None:
        types = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(np.int32): 26}
        if array.dtype not in types or not array.flags.c_contiguous or array.ndim > 4:
            raise ArgumentError(
                f"{array.dtype} {array.shape}: not contiguous F32, F16 or I32 of 4 dimensions"
            )
        out.data = self.ffi.cast("void *", array.ctypes.data)
        out.ne = list(array.shape[::-1]) + [1] * (4 - array.ndim)
        out.type = types[array.dtype]

    def plan_memory(self, file: File, device: str, params: SessionParams, head: File | None = None) -> Memory:
        """What a model and one session of it need, in bytes. Raises what opening the model would:
        UnsupportedError or FileError where luce cannot run the files."""
        model, session = _model_params(self, device, head), _session_params(self, params)
        return self.read(Memory, self.lib.luce_plan_memory, file.handle, model.struct, session.struct)


class Handle:
    """A core object. `handle` is its C pointer; closed on exit, close() or collection."""

    def __init__(self, library: Library, pointer: Any, close: Callable[[Any], int]):
        self.library = library
        self._pointer = pointer
        self._close = weakref.finalize(self, close, pointer)

    @property
    def handle(self) -> Any:
        if not self._close.alive:
            raise StateError(f"the {type(self).__name__.lower()} is closed")
        return self._pointer

    def close(self) -> None:
        """Frees the object; a second call does nothing."""
        self._close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class File(Handle):
    """A GGUF, all parts of a split one, memory-mapped: facts, no weights loaded."""

    def __init__(self, path: str | Path, library: Library | None = None):
        library = library or default()
        out = library.ffi.new("luce_file **")
        library.check(library.lib.luce_file_open(out, str(path).encode("utf-8", "surrogateescape")))
        super().__init__(library, out[0], library.lib.luce_file_close)
        self.path = Path(path)

    @cached_property
    def info(self) -> FileInfo:
        return self.library.read(FileInfo, self.library.lib.luce_file_get_info, self.handle)

    @cached_property
    def kv(self) -> Metadata:
        return Metadata(self)

    @cached_property
    def tensors(self) -> list[Tensor]:
        return [self._tensor(index) for index in range(self.info.n_tensors)]

    def _tensor(self, index: int) -> Tensor:
        tensor = self.library.struct("luce_tensor_info")
        self.library.check(self.library.lib.luce_file_get_tensor(self.handle, index, tensor))
        shape = tuple(tensor.ne[0 : tensor.n_dims])
        name, type_name = self.library.text(tensor.name), self.library.text(tensor.type_name)
        return Tensor(name, type_name, tensor.type, shape, tensor.size_bytes)

    def plan_memory(
        self, device: str = "auto", params: SessionParams | None = None, head: File | None = None
    ) -> Memory:
        """Library.plan_memory of this file."""
        return self.library.plan_memory(self, device, params or SessionParams(), head)


@dataclass
class _Params:
    """A C struct and what it points to, which has to live as long."""

    struct: Any
    kept: tuple[Any, ...]


def _model_params(library: Library, device: str, head: File | None = None, progress: Any = None) -> _Params:
    name = library.ffi.new("char[]", device.encode())
    struct = library.struct("luce_model_params", device=name)
    if head is not None:
        struct.head = head.handle
    if progress is not None:
        struct.progress = progress
    return _Params(struct, (name, head, progress))


def _session_params(library: Library, params: SessionParams) -> _Params:
    fields: dict[str, Any] = dict(vars(params))
    kv_type = fields.pop("kv_type")
    name = library.ffi.NULL if kv_type is None else library.ffi.new("char[]", kv_type.encode())
    return _Params(library.struct("luce_session_params", kv_type=name, **fields), (name,))


class Model(Handle):
    """Weights on a device, and the NextN head that `head` holds (the model's own file or another).
    `progress` may cancel (Cancelled); what it raises is raised here."""

    def __init__(
        self,
        file: File,
        device: str = "auto",
        progress: Progress | None = None,
        head: File | None = None,
    ):
        library = file.library
        raised: list[BaseException] = []
        callback = None
        if progress is not None:
            callback = library.ffi.callback(
                "luce_progress_fn",
                lambda fraction, _: 1 if progress(fraction) else 0,
                error=1,
                onerror=lambda kind, error, trace: raised.append(error),
            )
        params = _model_params(library, device, head, callback)
        out = library.ffi.new("luce_model **")
        status = library.lib.luce_model_open(out, file.handle, params.struct)
        if status == 0:
            super().__init__(library, out[0], library.lib.luce_model_close)
        if raised:
            self.close() if status == 0 else None
            raise raised[0]
        library.check(status)

    @cached_property
    def info(self) -> ModelInfo:
        return self.library.read(ModelInfo, self.library.lib.luce_model_get_info, self.handle)


class Session(Handle):
    """One timeline of a model: committed tokens in the caches. One call at a time."""

    def __init__(self, model: Model, params: SessionParams | None = None):
        library = model.library
        made = _session_params(library, params or SessionParams())
        out = library.ffi.new("luce_session **")
        library.check(library.lib.luce_session_open(out, model.handle, made.struct))
        super().__init__(library, out[0], library.lib.luce_session_close)
        self._n_vocab = model.info.n_vocab

    @property
    def info(self) -> SessionInfo:
        return self.library.read(SessionInfo, self.library.lib.luce_session_get_info, self.handle)

    def reset(self) -> None:
        """Back to an empty timeline; also heals a failed session."""
        self.library.check(self.library.lib.luce_session_reset(self.handle))

    def set_sampling(self, sampling: Sampling) -> None:
        """How choices are made from now on."""
        struct = self.library.sampling(sampling)
        self.library.check(self.library.lib.luce_session_set_sampling(self.handle, struct))

    def prefill(self, tokens: IntArray) -> int:
        """Commits tokens (n,), n >= 1, and returns the choice after the last of them."""
        choice = self.library.ffi.new("int32_t *")
        rows = self.library.ints(tokens)
        self.library.check(self.library.lib.luce_session_prefill(self.handle, rows, len(rows), choice))
        return int(choice[0])

    def draft(self, anchor: int, n: int) -> None:
        """Chains n tokens (1..n_draft) after `anchor` with the NextN head. They stay on the device: verify
        them with verify_draft, read them with drafted. What is committed does not change."""
        (token,) = self.library.ints([anchor])
        self.library.check(self.library.lib.luce_session_draft(self.handle, token, n))

    def drafted(self, n: int) -> list[int]:
        """The n tokens of the last draft. NumericError where the head's logits were not finite; the
        session goes on."""
        tokens = self.library.ffi.new("int32_t[]", max(n, 1))
        self.library.check(self.library.lib.luce_session_get_draft(self.handle, tokens, n))
        return list(tokens[0:n])

    def verify(self, tokens: IntArray, parents: IntArray | None = None) -> list[int]:
        """One forward over tokens (n,); parents (n,) with parents[0] = -1, None for a chain.
        Returns the target's choice after each row (n,)."""
        rows = self.library.ints(tokens)
        if parents is not None and len(parents) != len(rows):
            raise ArgumentError(f"{len(rows)} tokens, but {len(parents)} parents")
        return self._verify(rows, None if parents is None else self.library.ints(parents), len(rows))

    def verify_draft(self, n: int) -> list[int]:
        """verify of the last draft's anchor and its first n tokens, which never left the device: the
        target's choice after each of the n + 1 rows."""
        return self._verify(None, None, n + 1)

    def _verify(self, rows: Any, parents: Any, n: int) -> list[int]:
        null = self.library.ffi.NULL
        choices = self.library.ffi.new("int32_t[]", max(n, 1))
        self.library.check(
            self.library.lib.luce_session_verify(
                self.handle, null if rows is None else rows, null if parents is None else parents, n, choices
            )
        )
        return list(choices[0:n])

    def accept(self, tokens: IntArray, parents: IntArray | None, choices: IntArray) -> tuple[list[int], int]:
        """Library.accept."""
        return self.library.accept(tokens, parents, choices)

    def commit(self, path: IntArray) -> None:
        """Appends rows path (n,) of the last verify: path[0] = 0, each the child of the one before."""
        rows = self.library.ints(path)
        self.library.check(self.library.lib.luce_session_commit(self.handle, rows, len(rows)))

    def save(self) -> bytes:
        """The committed state as bytes: equal for sessions with the same committed tokens, however their
        rounds went. Verified rows that are not committed are dropped."""
        size = self.library.ffi.new("uint64_t *")
        save, handle = self.library.lib.luce_session_save, self.handle
        self.library.check(save(handle, self.library.ffi.NULL, size))
        data = np.empty(size[0], np.uint8)
        self.library.check(save(handle, self.library.ffi.from_buffer("char[]", data), size))
        return data[: size[0]].tobytes()

    def restore(self, data: bytes) -> None:
        """Back to what `save` returned, of this or another session of the same model, kv_type and kind of
        head, whose context is large enough; ArgumentError names what does not fit and changes nothing."""
        buffer = self.library.ffi.from_buffer("char[]", data)
        self.library.check(self.library.lib.luce_session_restore(self.handle, buffer, len(data)))

    def logits(self, row: int = 0) -> np.ndarray:
        """F32 (n_vocab,) of a row of the last verify; row 0 after a prefill: its last token."""
        out = np.empty(self._n_vocab, np.float32)
        data = self.library.ffi.from_buffer("float[]", out)
        self.library.check(self.library.lib.luce_session_get_logits(self.handle, row, data, self._n_vocab))
        return out


def load(lib_dir: Path, header: Path | None = None) -> Library:
    """The library in lib_dir (libluce.so or .dylib). Its header is luce/include/luce.h beside lib/
    unless given. LuceError names the remedy where one is missing."""
    header = header or lib_dir.parent / "include" / "luce.h"
    for name in ("libluce.so", "libluce.dylib"):
        path = lib_dir / name
        if path.exists() and header.exists():
            return Library(path, header)
    raise LuceError(
        f"no libluce and luce.h for {lib_dir}: run `pip install .`, and python outside of the source tree"
    )


@lru_cache(maxsize=1)
def default() -> Library:
    """The installed package's library, loaded once."""
    return load(Path(__file__).resolve().parent / "lib")
