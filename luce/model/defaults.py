"""What a model runs with where nobody asked for anything: its own sampling, a context that fits, short chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from luce import native as _native
from luce.errors import FileError, OutOfMemory
from luce.files.probe import fact
from luce.planning.memory import total
from luce.planning.opened import Files
from luce.planning.plan import Options

MAX_DEFAULT_CTX = 32768
GPU_CHUNK, CPU_CHUNK = 1024, 256  # A step has so many prompt tokens.
# Qwen recommends these for precise tasks.
RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0}
# These keys give these options, of which each has at most so much.
KEYS = {name: f"general.sampling.{name}" for name in RECOMMENDED} | {"temperature": "general.sampling.temp"}
REPEAT = "general.sampling.penalty_repeat"
MOST = {"temperature": 1e6, "top_p": 1.0, "top_k": 2**31 - 1, "min_p": 1.0}


def with_defaults(files: Files, options: Options, shrink: bool) -> Options:
    """Fills in what nobody asked for: as long a context as was trained and fits, within reason, and chunks
    that are short enough for others to go on between them. Raises OutOfMemory where the context would have
    to shrink and may not."""
    if options.chunk is None:
        gpu = _native.default().devices()[0].is_gpu if options.device is None else not options.device.startswith("cpu")
        options = replace(options, chunk=GPU_CHUNK if gpu else CPU_CHUNK)
    if options.ctx is not None:
        return options
    ctx = min(files.facts.context_length or MAX_DEFAULT_CTX, MAX_DEFAULT_CTX)
    while ctx > 4096:
        needed = files.memory(files.plan(replace(options, ctx=ctx)))
        if needed.has_room:
            break
        if not shrink:
            said = f"{total(needed)} bytes are needed for a context of {ctx}, {needed.device_free} are free"
            raise OutOfMemory(said)
        ctx //= 2
    return replace(options, ctx=ctx)


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
