"""What a model runs with where nobody asked for anything: its own sampling, a context that fits, short chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from luce import native as _native
from luce.errors import FileError, OutOfMemory
from luce.files.probe import fact
from luce.native.structs import PAGE
from luce.planning.memory import total
from luce.planning.opened import Files
from luce.planning.plan import Options

MAX_DEFAULT_CTX = 32768
GPU_CHUNK, CPU_CHUNK = 1024, 256  # A step has so many prompt tokens.
# The same where luce.h chooses: as many as are read fastest, of several GPUs one after the other.
CORE_GPU_CHUNK, CORE_GPUS_CHUNK, CORE_CPU_CHUNK = 2048, 1024, 512
# One GPU has chunks as luce.h chooses them here too, where all that an engine needs leaves it this part of its free
# memory: a 27b reads a tenth faster in them than in half as long ones, which take half as much memory.
SPARE = 1 / 4
# Qwen recommends these for precise tasks.
RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0}
# These keys give these options, of which each has at most so much.
KEYS = {name: f"general.sampling.{name}" for name in RECOMMENDED} | {"temperature": "general.sampling.temp"}
REPEAT = "general.sampling.penalty_repeat"
MOST = {"temperature": 1e6, "top_p": 1.0, "top_k": 2**31 - 1, "min_p": 1.0}


def with_defaults(files: Files, options: Options, shrink: bool, image: int = 0) -> Options:
    """Fills in what nobody asked for: as long a context as was trained and fits, within reason, and chunks
    that are short where memory is, but have room for an image of so many tokens. Raises
    OutOfMemory where the context would have to shrink and may not."""
    ctx = options.ctx or min(files.facts.context_length or MAX_DEFAULT_CTX, MAX_DEFAULT_CTX)
    if options.chunk is None:
        chunk = _gpu_chunk(files, replace(options, ctx=ctx)) if _on_gpu(options) else CPU_CHUNK
        options = replace(options, chunk=max(chunk, _pages(image)))
    if options.ctx is not None:
        return options
    while ctx > 4096:
        needed = files.memory(files.plan(replace(options, ctx=ctx)))
        if needed.has_room:
            break
        if not shrink:
            said = f"{total(needed)} bytes are needed for a context of {ctx}, {needed.device_free} are free"
            raise OutOfMemory(said)
        ctx //= 2
    return replace(options, ctx=ctx)


def with_room(options: Options, image: int) -> Options:
    """Makes chunks longer that the core would choose, where they have no room for an image of so many tokens."""
    on_gpu = CORE_GPUS_CHUNK if _one_after_the_other(options) else CORE_GPU_CHUNK
    if options.chunk is not None or image <= (on_gpu if _on_gpu(options) else CORE_CPU_CHUNK):
        return options
    return replace(options, chunk=_pages(image))


def _gpu_chunk(files: Files, options: Options) -> int:
    if _one_after_the_other(options):
        return GPU_CHUNK
    needed = files.memory(files.plan(replace(options, chunk=CORE_GPU_CHUNK, copies=False)))
    spare = all(each.total <= (1 - SPARE) * each.free for each in needed.devices)
    return CORE_GPU_CHUNK if spare else GPU_CHUNK


def _one_after_the_other(options: Options) -> bool:
    """Says whether several devices have layers each, so that chunks follow each other through them."""
    return options.split not in (None, "tensor") or "," in (options.device or "")


def _on_gpu(options: Options) -> bool:
    if options.device is None:
        return bool(_native.default().devices()[0].is_gpu)
    return not options.device.startswith("cpu")


def _pages(tokens: int) -> int:
    """Returns the tokens of so many whole pages as `tokens` fit into."""
    return -(-tokens // PAGE) * PAGE


def sampling_of(kv: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the file's own sampling, else what Qwen recommends. FileError names a key with which no token
    can be sampled."""
    found: dict[str, Any] = {}
    for name, key in KEYS.items():
        value, most = fact(kv, key, float, float(RECOMMENDED[name])), MOST[name]
        if not 0 <= value <= most:
            raise FileError(f"key {key}: {value:g} is not within 0 and {most:g}")
        found[name] = type(RECOMMENDED[name])(value)
    return found


def penalties_of(kv: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the file's own repetition penalty, if it has one. FileError names one that is no penalty."""
    value = fact(kv, REPEAT, float, 1.0)
    if not 0.01 <= value <= 100:
        raise FileError(f"key {REPEAT}: {value:g} is not within 0.01 and 100")
    return {"repetition": value} if value != 1 else {}
