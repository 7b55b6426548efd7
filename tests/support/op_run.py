"""Calls what libluce exports for tests alone and luce.h does not name, and runs one of luce's ops alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import cffi
import numpy as np

from luce.errors import ArgumentError
from luce.native import Engine, IntArray, Library
from luce.native.structs import Penalties

DECLARATION = """
typedef int luce_status;
typedef struct luce_penalties luce_penalties;
typedef struct luce_engine luce_engine;
typedef struct luce_array { void *data; uint64_t ne[4]; int32_t type; } luce_array;
luce_status luce_op_run(const char *device, const char *op, luce_array *args, uint32_t n_args,
                        const int32_t *params, uint32_t n_params, luce_array *out);
luce_status luce_sampling_run(const uint32_t *words, const float *z, uint64_t n, float *minus_log,
                              float *gumbel, float *bound, uint64_t *mass);
luce_status luce_penalise(float *logits, uint32_t n, const luce_penalties *penalties, const int32_t *tokens,
                          uint32_t n_tokens);
luce_status luce_engine_counts(luce_engine *engine, uint64_t *steps, uint64_t *synchronisations);
luce_status luce_engine_poison(luce_engine *engine);
luce_status luce_engine_poison_experts(luce_engine *engine, uint32_t layer);
luce_status luce_fault(int32_t fault, uint64_t after);
luce_status luce_leave_device(int32_t index);
luce_status luce_recode(int32_t from, const uint8_t *src, uint64_t n, int32_t table, int32_t *to,
                        uint8_t *dst, uint64_t dst_size);
luce_status luce_lookup(const int32_t *tokens, uint32_t n_tokens, int32_t *draft, uint32_t *n,
                        uint32_t *matched);
luce_status luce_rule(uint32_t index, const char **name, int32_t *same, uint64_t *uses);
luce_status luce_switch_rule(uint32_t index, int32_t on);
luce_status luce_part_devices(int on);
luce_status luce_thread_stages(int on, unsigned slow);
luce_status luce_pretend_device(const char *name, uint64_t memory);
luce_status luce_hold_copies(int32_t at);
luce_status luce_time_steps(int on);
luce_status luce_block_towers(uint64_t bytes);
"""
# These are ggml's blocks of 32 values. The innermost dimension of an array counts blocks.
Q4_0 = np.dtype([("d", "<f2"), ("q", "u1", 16)])  # Values i and i + 16 are the halves of byte i.
Q8_0 = np.dtype([("d", "<f2"), ("q", "i1", 32)])
# These are ggml's types of numpy's: F32, F16, Q4_0, Q8_0, I32, and I8, which also stands for raw bytes.
TYPES = {
    np.dtype("f4"): 0,
    np.dtype("f2"): 1,
    Q4_0: 2,
    Q8_0: 8,
    np.dtype("i4"): 26,
    np.dtype("i1"): 24,
    np.dtype("u1"): 24,
}


@dataclass
class Weights:
    """This is a matrix as a file holds it: rows of k values of a ggml type, whose blocks are `rows` (N,
    bytes)."""

    rows: np.ndarray
    type_id: int
    k: int


@cache
def core(path: Path) -> tuple[Any, Any]:
    """Returns an FFI with these functions, and the library. luce's own FFI has those of luce.h alone."""
    ffi = cffi.FFI()
    ffi.cdef(DECLARATION)
    return ffi, ffi.dlopen(str(path))


def address(native: Library, pointer: Any) -> int:
    """Returns where a struct of luce's own FFI is, which another FFI takes for one of another type."""
    return int(native.ffi.cast("uintptr_t", pointer))


def sampling_run(native: Library, words: np.ndarray, z: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns, of random words (n,) and z (n,), -log(u), noise and its bound in F32, and masses as u64, each
    (n,)."""
    (ffi, lib), n = core(native.path), len(words)
    floats = [np.empty(n, np.float32) for _ in range(3)]
    mass = np.empty(n, np.uint64)
    native.check(
        lib.luce_sampling_run(
            ffi.from_buffer("uint32_t[]", words),
            ffi.from_buffer("float[]", z),
            n,
            *(ffi.from_buffer("float[]", array) for array in floats),
            ffi.from_buffer("uint64_t[]", mass),
        )
    )
    return (*floats, mass)


def penalise(
    native: Library, logits: np.ndarray, penalties: Penalties, tokens: IntArray, n_prompt: int = 0
) -> np.ndarray:
    """Returns F32 logits (n_vocab,) as the penalties make them after `tokens`, of which the first n_prompt
    were not generated."""
    ffi, lib = core(native.path)
    row, made = np.array(logits, dtype=np.float32), native.penalties(penalties, n_prompt)
    struct = ffi.cast("luce_penalties *", address(native, made))
    data, ids = ffi.from_buffer("float[]", row), native.ints(tokens)
    native.check(lib.luce_penalise(data, row.size, struct, ids, len(tokens)))
    return row


def lookup(native: Library, tokens: IntArray, most: int) -> tuple[list[int], int]:
    """Returns what followed the longest match of the end of tokens (n,), none or `most` tokens, and how long
    that match is."""
    ffi, lib = core(native.path)
    draft, n, matched = ffi.new("int32_t[]", max(most, 1)), ffi.new("uint32_t *", most), ffi.new("uint32_t *")
    native.check(lib.luce_lookup(native.ints(tokens), len(tokens), draft, n, matched))
    return list(draft[0 : n[0]]), int(matched[0])


def counts(engine: Engine) -> tuple[int, int]:
    """Returns how many steps an engine has run, and how often it has waited for its device."""
    ffi, lib = core(engine.library.path)
    handle = ffi.cast("luce_engine *", address(engine.library, engine.handle))
    steps, waits = ffi.new("uint64_t *"), ffi.new("uint64_t *")
    engine.library.check(lib.luce_engine_counts(handle, steps, waits))
    return int(steps[0]), int(waits[0])


def poison(engine: Engine) -> None:
    """Makes NaN of an engine's scratch, and of pages and slots that nobody holds."""
    ffi, lib = core(engine.library.path)
    handle = ffi.cast("luce_engine *", address(engine.library, engine.handle))
    engine.library.check(lib.luce_engine_poison(handle))


def poison_experts(engine: Engine, layer: int) -> None:
    """Makes NaN of the slots of experts of a layer, whoever has them."""
    ffi, lib = core(engine.library.path)
    handle = ffi.cast("luce_engine *", address(engine.library, engine.handle))
    engine.library.check(lib.luce_engine_poison_experts(handle, layer))


class Fault(IntEnum):
    """Says what luce_fault makes fail: a graph that is being built, one that is too large, an op of
    a step, the launch of a captured step, a wait for the device, the copy of an expert to a slot, that of
    a checkpoint to the host."""

    GRAPH = 1
    SIZE = 2
    OP = 3
    LAUNCH = 4
    WAIT = 5
    MOVE = 6
    LEAVE = 7


def round_fault(device: str) -> Fault:
    """Returns what can fail in the middle of a round. On a GPU rounds were captured, and run no op of
    their own."""
    return Fault.OP if device.startswith("cpu") else Fault.LAUNCH


@contextmanager
def fault(native: Library, kind: Fault, after: int = 0) -> Iterator[None]:
    """Lets the core fail once, after so many points of that kind, or not at all where it comes to fewer."""
    _, lib = core(native.path)
    native.check(lib.luce_fault(kind, after))
    try:
        yield
    finally:
        native.check(lib.luce_fault(0, 0))


@dataclass(frozen=True)
class Rule:
    """This is a rule by which fused ops take the place of patterns in a plain graph (graph/rules.cpp). `same`: a
    row has the same bits without it. `uses` counts how often it has fused one in this process."""

    index: int
    name: str
    same: bool
    uses: int


def rules(native: Library) -> list[Rule]:
    ffi, lib = core(native.path)
    name, same, uses = ffi.new("const char **"), ffi.new("int32_t *"), ffi.new("uint64_t *")
    found: list[Rule] = []
    while lib.luce_rule(len(found), name, same, uses) == 0:
        found.append(Rule(len(found), ffi.string(name[0]).decode(), bool(same[0]), int(uses[0])))
    return found


@contextmanager
def without(native: Library, *off: Rule) -> Iterator[None]:
    """Switches rules off, for graphs that are built meanwhile."""
    _, lib = core(native.path)
    for rule in off:
        native.check(lib.luce_switch_rule(rule.index, 0))
    try:
        yield
    finally:
        for rule in off:
            native.check(lib.luce_switch_rule(rule.index, 1))


@contextmanager
def held_copies(native: Library, at: int) -> Iterator[None]:
    """Holds checkpoints that leave their device ahead of a portion of their copies: 0 is the state, others pages."""
    _, lib = core(native.path)
    native.check(lib.luce_hold_copies(at))
    try:
        yield
    finally:
        native.check(lib.luce_hold_copies(-1))


def time_steps(native: Library, on: bool) -> None:
    """Lets engines that are opened on a CPU from now on time their steps, or take made-up costs."""
    _, lib = core(native.path)
    native.check(lib.luce_time_steps(on))


@contextmanager
def blocked_towers(native: Library, n_bytes: int) -> Iterator[None]:
    """Opens towers on a CPU with the graph of a GPU, whose blocks of queries take so many bytes of scores."""
    _, lib = core(native.path)
    native.check(lib.luce_block_towers(n_bytes))
    try:
        yield
    finally:
        native.check(lib.luce_block_towers(0))


def leave_device(native: Library, index: int = -1) -> None:
    """Makes GPU `index` this thread's current device, where there is one, and none that luce knows of."""
    _, lib = core(native.path)
    native.check(lib.luce_leave_device(index))


def op_run(
    native: Library,
    device: str,
    op: str,
    arrays: Sequence[np.ndarray | Weights | None],
    params: IntArray = (),
    *,
    shape: Sequence[int],
    dtype: Any = np.float32,
) -> np.ndarray:
    """Returns what the op makes of `arrays`, of this shape and type. Shapes are numpy's (slowest first). The
    op may write to the arrays that it is documented to write to: they are changed in place. None stands for an
    array that is left out."""
    ffi, lib = core(native.path)
    result = np.empty(shape, dtype)
    result.view(np.uint8)[...] = 0xFF  # This poisons it with NaN, or -1.
    args, out = ffi.new("luce_array[]", max(len(arrays), 1)), ffi.new("luce_array *")
    for arg, array in zip(args, arrays, strict=False):
        if array is not None:
            _fill(ffi, arg, array)
    _fill(ffi, out, result)
    numbers = native.ints(params)
    native.check(lib.luce_op_run(device.encode(), op.encode(), args, len(arrays), numbers, len(numbers), out))
    return result


def _fill(ffi: Any, out: Any, array: np.ndarray | Weights) -> None:
    if isinstance(array, Weights):
        out.data = ffi.cast("void *", array.rows.ctypes.data)
        out.ne, out.type = [array.k, len(array.rows), 1, 1], array.type_id
        return
    if array.dtype not in TYPES or not array.flags.c_contiguous or array.ndim > 4:
        kinds = "contiguous F32, F16, Q4_0, Q8_0, I32 or bytes of at most 4 dimensions"
        raise ArgumentError(f"{array.dtype} {array.shape}: not {kinds}")
    out.data = ffi.cast("void *", array.ctypes.data)
    out.ne = list(array.shape[::-1]) + [1] * (4 - array.ndim)
    if array.dtype in (Q4_0, Q8_0):
        out.ne[0] *= 32
    out.type = TYPES[array.dtype]


@contextmanager
def parted_devices(native: Library) -> Iterator[None]:
    """Engines that are opened meanwhile take their GPUs for such as do not reach each other's memory."""
    _, lib = core(native.path)
    native.check(lib.luce_part_devices(1))
    try:
        yield
    finally:
        native.check(lib.luce_part_devices(0))


@contextmanager
def threads_of_stages(native: Library, slow: int) -> Iterator[None]:
    """A CPU's stages of engines that are opened meanwhile read prompts beside each other, each on a thread; that of one
    stage is slow."""
    _, lib = core(native.path)
    native.check(lib.luce_thread_stages(1, slow))
    try:
        yield
    finally:
        native.check(lib.luce_thread_stages(0, 0))


@contextmanager
def pretended_devices(native: Library, free: Mapping[str, int]) -> Iterator[None]:
    """Gives devices of these names, for which the CPU stands in, that seem to have so many bytes."""
    _, lib = core(native.path)
    for name, memory in free.items():
        native.check(lib.luce_pretend_device(name.encode(), memory))
    try:
        yield
    finally:
        native.check(lib.luce_pretend_device(b"", 0))
