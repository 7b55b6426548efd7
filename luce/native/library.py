"""Has a loaded libluce."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from luce.errors import BY_CODE, ArgumentError, Error, InternalError, StateError
from luce.native.declare import declared
from luce.native.structs import Device, Form, GpuInfo, Penalties, Sampling, TypeInfo

if TYPE_CHECKING:
    import numpy as np

R = TypeVar("R", bound=Any)
IntArray = Sequence[int]


class Library:
    """This is a loaded libluce. `ffi` and `lib` are cffi's; the methods are the functions without a
    handle."""

    def __init__(self, path: Path, header: Path):
        self.path = path
        self._points_to: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.ffi = declared(header)
        self._unset = self.ffi.new_allocator(should_clear_after_alloc=False)
        try:
            self.lib: Any = self.ffi.dlopen(str(path))
            found = self.lib.luce_abi_version()
        except (OSError, AttributeError) as error:
            raise Error(f"cannot load {path}: {error}; reinstall luce") from error
        if found != self.lib.LUCE_ABI_VERSION:
            raise Error(
                f"{path} has ABI version {found}, its header says {self.lib.LUCE_ABI_VERSION}: "
                "they come from different builds; reinstall luce"
            )

    def check(self, status: int) -> None:
        """Raises the exception of a luce_status that is not LUCE_OK."""
        if status != 0:
            message = self.ffi.string(self.lib.luce_last_error()).decode("utf-8", "replace")
            raise BY_CODE.get(status, InternalError)(message or f"status {status}")

    def struct(self, name: str, **fields: Any) -> Any:
        """Returns a zeroed struct `name` with its struct_size and `fields` set."""
        made = self.ffi.new(f"{name} *")
        made.struct_size = self.ffi.sizeof(made[0])
        for field, value in fields.items():
            setattr(made, field, value)
        return made

    def read(self, kind: type[R], function: Callable[..., int], *args: Any, **more: Any) -> R:
        """Returns `kind`, filled from the struct kind.STRUCT that function(*args, struct) writes, and from `more`."""
        struct = self.struct(kind.STRUCT)
        self.check(function(*args, struct))
        return self.filled(kind, struct, **more)

    def filled(self, kind: type[R], struct: Any, **more: Any) -> R:
        """Returns `kind`, filled from a struct's fields of the same names, and from `more`."""
        values = {name: getattr(struct, name) for name in kind.__match_args__}
        texts = {
            name: self.text(value) for name, value in values.items() if isinstance(value, self.ffi.CData)
        }
        made: R = kind(**values | texts, **more)
        return made

    def text(self, pointer: Any) -> str:
        """Returns a NUL-terminated string of the core as str."""
        return str(self.ffi.string(pointer).decode("utf-8", "replace"))

    def ints(self, values: IntArray) -> Any:
        """Returns token ids, row indices or parents as int32_t[]. What does not fit raises ArgumentError."""
        listed = values if isinstance(values, list | tuple) else list(values)
        try:
            return self.ffi.new("int32_t[]", listed)
        except OverflowError:
            raise ArgumentError(f"{max(listed, key=abs)} does not fit into 32 bits") from None

    @property
    def version(self) -> str:
        """Returns the version for people: "0.1.0 (ggml 0.25.3, cuda)"."""
        return self.text(self.lib.luce_version())

    def devices(self) -> list[Device]:
        """Returns all devices; the first is what "auto" takes."""
        count = self.ffi.new("int32_t *")
        self.check(self.lib.luce_device_count(count))
        return [self.read(Device, self.lib.luce_device_get, index) for index in range(count[0])]

    def device(self, name: str | None) -> Device:
        """Returns the device of a name: None (auto), "cpu", "cuda" or "cuda:N". Raises ArgumentError where there is
        none."""
        listed = self.devices()
        for device in listed:
            if name in (None, device.name) or (name == "cuda" and device.is_gpu):
                return device
        have = ", ".join(device.name for device in listed)
        why = f"; {self.missing_gpu}" if self.missing_gpu else ""
        raise ArgumentError(f"no device '{name}': this machine has {have}{why}")

    def gpu_info(self, index: int) -> GpuInfo:
        """Returns what the driver says of a GPU, by its index in devices(). Raises ArgumentError for a CPU."""
        return self.read(GpuInfo, self.lib.luce_device_gpu, index)

    def bandwidth(self, index: int, threads: int) -> int:
        """Measures the bytes a second that the memory of a device gives: so many threads of a CPU read it, a GPU
        copies it. Raises OutOfMemory where too little is free."""
        out = self.ffi.new("uint64_t *")
        self.check(self.lib.luce_device_bandwidth(index, threads, out))
        return int(out[0])

    @property
    def missing_gpu(self) -> str:
        """Returns why GPUs of this machine may be missing among the devices, in a line; "" where none is."""
        return self.text(self.lib.luce_device_missing())

    def set_log(self, log: Callable[[int, str], None] | None) -> None:
        """Sets who gets the core's messages: `log` gets (level 0 debug .. 3 error, text) from any thread;
        None discards them."""
        if log is None:
            callback = self.ffi.NULL
        else:
            callback = self.ffi.callback("luce_log_fn", lambda level, text, _: log(level, self.text(text)))
        self.check(self.lib.luce_set_log(callback, self.ffi.NULL))
        self._log = callback  # The core calls it until the next set_log.

    def sampling(self, sampling: Sampling) -> Any:
        """Returns `sampling` as luce_sampling."""
        return self.struct("luce_sampling", **vars(sampling))

    def penalties(self, penalties: Penalties, n_prompt: int) -> Any:
        """Returns `penalties` as luce_penalties, after a prompt of n_prompt tokens. Its bias list lives as
        long."""
        bias = self.ffi.new("luce_logit_bias[]", max(len(penalties.bias), 1))
        for entry, (token, value) in zip(bias, penalties.bias, strict=False):
            (entry.token,) = self.ints([token])
            entry.bias = value
        made = self.struct(
            "luce_penalties",
            bias=bias,
            n_bias=len(penalties.bias),
            n_prompt=n_prompt,
            repetition=penalties.repetition,
            presence=penalties.presence,
            frequency=penalties.frequency,
        )
        self._points_to[made] = bias
        return made

    def bytes_of(self, function: Callable[..., int], handle: Any) -> memoryview:
        """Returns what function(handle, data, size) writes. The function gives its size where data is NULL.
        """
        size = self.ffi.new("uint64_t *")
        self.check(function(handle, self.ffi.NULL, size))
        data = self._unset("char[]", size[0])
        self.check(function(handle, data, size))
        return memoryview(self.ffi.buffer(data))  # A copy would keep all threads of Python waiting.

    def sample(self, logits: np.ndarray, sampling: Sampling, position: int) -> int:
        """Applies the sampling rule to F32 logits (n_vocab,) for the token at `position`."""
        import numpy as np

        row = np.ascontiguousarray(logits, dtype=np.float32)
        token = self.ffi.new("int32_t *")
        data = self.ffi.from_buffer("float[]", row)
        self.check(self.lib.luce_sample(data, row.size, self.sampling(sampling), position, token))
        return int(token[0])

    def accept(self, tokens: IntArray, parents: IntArray | None, choices: IntArray) -> tuple[list[int], int]:
        """Applies the accept rule. Returns the accepted rows from row 0 on, and the choice after the last of
        them, which is the next anchor. parents None is a chain."""
        n = len(tokens)
        if len(choices) != n or (parents is not None and len(parents) != n):
            raise ArgumentError("tokens, parents and choices differ in length")
        if parents is None and n:  # Of a chain the rule is short, and rounds of small models are too.
            right = 1
            while right < n and tokens[right] == choices[right - 1]:
                right += 1
            return list(range(right)), int(choices[right - 1])
        parents = () if parents is None else parents
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

    def tree(self, anchor: int, lists: Lists, budget: int) -> tuple[list[int], list[int]]:
        """Makes the draft tree: `budget` nodes of the lists, best first. Returns the tokens and parents of its rows,
        depth first; row 0 is the anchor."""
        tokens, parents = self.ffi.new("int32_t[]", 1 + budget), self.ffi.new("int32_t[]", 1 + budget)
        n = self.ffi.new("uint32_t *")
        self.check(self.lib.luce_tree(anchor, lists.struct, budget, tokens, parents, n))
        return list(tokens[0 : n[0]]), list(parents[0 : n[0]])

    def op_run(
        self, device: str, op: str, arrays: Sequence[OpArray | None], params: IntArray, out: OpArray
    ) -> None:
        """Runs one of the core's ops alone. It writes to `out`, and to those of `arrays` that the op is documented to
        write to; None stands for one that is left out."""
        made, result = self.ffi.new("luce_array[]", max(len(arrays), 1)), self.ffi.new("luce_array *")
        for struct, array in zip([*made[0 : len(arrays)], result], [*arrays, out], strict=True):
            if array is not None:
                struct.data = self.ffi.cast("void *", array.data.ctypes.data)
                struct.ne = [*array.shape, *[1] * (4 - len(array.shape))]
                struct.type = array.type
        numbers = self.ints(params)
        status = self.lib.luce_op_run(device.encode(), op.encode(), made, len(arrays), numbers, len(numbers), result)
        self.check(status)

    def type_info(self, type_id: int) -> TypeInfo:
        """Returns the name and block layout of a ggml type id. Raises ArgumentError for an id that ggml
        lacks."""
        return self.read(TypeInfo, self.lib.luce_type_get, type_id)

    def quantize(self, type_id: int, rows: np.ndarray) -> np.ndarray:
        """Quantises F32 (n_rows, n_per_row) to uint8 (n_rows, bytes per row) of a ggml type id."""
        import numpy as np

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


class OpArray(NamedTuple):
    """An array of Library.op_run: contiguous `data`, its shape, fastest first, and its ggml type."""

    data: np.ndarray
    shape: Sequence[int]
    type: int


class Lists:
    """A drafter's candidates at each depth (luce.h: luce_lists). Ids are int32[depth * k] and their scores
    float[depth * k], or of conditional lists float[depth * k * k], both C arrays."""

    def __init__(self, library: Library, depth: int, k: int, form: Form):
        self.depth, self.k, self.form = depth, k, form
        self.ids = library.ffi.new("int32_t[]", max(depth * k, 1))
        self.scores = library.ffi.new("float[]", max(depth * k * (k if form is Form.CONDITIONAL else 1), 1))
        self.struct = library.struct(
            "luce_lists", ids=self.ids, scores=self.scores, depth=depth, k=k, form=int(form)
        )

    def at(self, depth: int) -> list[int]:
        """Returns the ids at a depth, counted from 0, best first. Of conditional lists it is the one behind the best
        candidate of each depth above, without those that cannot be chosen."""
        ids = list(self.ids[depth * self.k : (depth + 1) * self.k])
        if self.form is not Form.CONDITIONAL:
            return ids
        above = 0
        for each in range(depth + 1):
            order = self._behind(each, above)
            above = order[0] if order else 0
        return [ids[candidate] for candidate in order]

    def _behind(self, depth: int, above: int) -> list[int]:
        """Returns the candidates of a depth behind one of the depth above, best first."""
        first = (depth * self.k + above) * self.k
        scores = self.scores[first : first + self.k]
        there = [candidate for candidate in range(self.k) if scores[candidate] > -math.inf]
        return sorted(there, key=lambda candidate: (-scores[candidate], self.ids[depth * self.k + candidate]))


class Handle:
    """This is a core object. `handle` is its C pointer. It is closed on exit, by close() or when it is
    collected."""

    def __init__(self, library: Library, pointer: Any, close: Callable[[Any], int]):
        self.library = library
        self._pointer = pointer
        self._close = weakref.finalize(self, close, pointer)

    @property
    def handle(self) -> Any:
        if not self._close.alive:
            raise StateError(f"the {type(self).__name__.lower()} is closed")
        return self._pointer

    @property
    def is_open(self) -> bool:
        return self._close.alive

    def close(self) -> None:
        """Frees the object; a second call does nothing."""
        self._close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


CPU_INFO = Path("/proc/cpuinfo")
_OTHER_NAMES = {"lzcnt": "abm", "bmi": "bmi1"}  # /proc/cpuinfo names these otherwise than the compiler does.

_ALWAYS_NEEDED = ("avx2", "fma", "f16c")  # A build with LUCE_NATIVE=OFF needs them too.


def _require_cpu(features: Path) -> None:
    """Raises Error where this CPU lacks what the library was built for: loading it would end in SIGILL.
    """
    try:
        needed = features.read_text(encoding="utf-8").split()
        info = CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:  # This is an older build or no Linux, so there is nothing to compare.
        return
    flags = next((line for line in info.splitlines() if line.startswith("flags")), "").partition(":")[2]
    found = set(flags.replace("_", "").split())
    lacking = [name for name in needed if not {name, _OTHER_NAMES.get(name, name)} & found] if found else []
    if any(name in _ALWAYS_NEEDED for name in lacking):
        raise Error(f"luce needs a CPU with AVX2, FMA and F16C: this one lacks {', '.join(lacking)}")
    if lacking:
        raise Error(
            f"this luce was built for another CPU: this one lacks {', '.join(lacking)}; build it on this "
            "machine, or for all CPUs with -C cmake.define.LUCE_NATIVE=OFF"
        )


def load(lib_dir: Path, header: Path | None = None) -> Library:
    """Loads the library in lib_dir (libluce.so or .dylib). Its header is luce/include/luce.h beside lib/
    unless given. Raises Error, which names the remedy, where one is missing or is for another CPU."""
    header = header or lib_dir.parent / "include" / "luce.h"
    for name in ("libluce.so", "libluce.dylib"):
        path = lib_dir / name
        if path.exists() and header.exists():
            _require_cpu(lib_dir / "cpu-features.txt")
            return Library(path, header)
    raise Error(
        f"no libluce and luce.h for {lib_dir}: run `pip install .`, and python outside of the source tree"
    )


_chosen: Library | None = None


def default() -> Library:
    """Returns the library that use() named, else the installed package's. It is loaded once."""
    global _chosen
    if _chosen is None:
        package = Path(__file__).resolve().parent.parent
        require_built(package)
        _chosen = load(package / "lib")
    return _chosen


def require_built(package: Path) -> None:
    """Raises Error where the package is a source tree whose native/include/luce.h has changed since it was built."""
    built, source = package / "include" / "luce.h", package.parent / "native" / "include" / "luce.h"
    if built.exists() and source.exists() and built.read_bytes() != source.read_bytes():
        raise Error(f"{package / 'lib'} was built before {source} changed: run `pip install -e .` in {package.parent}")


def use(library: Library) -> None:
    """Sets what default() returns: a build that is not the installed one."""
    global _chosen
    _chosen = library
