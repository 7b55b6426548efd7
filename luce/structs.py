"""The structs of luce.h as Python values. STRUCT: the C name of one that the core fills."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Device:
    """`name` is what Model takes; memory in bytes, free as of now."""

    STRUCT: ClassVar[str] = "luce_device_info"

    name: str
    description: str
    memory_free: int
    memory_total: int
    is_gpu: int


@dataclass(frozen=True)
class TypeInfo:
    """A ggml type: weights and bytes per block; is_weight: luce multiplies with it."""

    STRUCT: ClassVar[str] = "luce_type_info"

    name: str
    block_size: int
    type_size: int
    is_weight: int


@dataclass(frozen=True)
class Memory:
    """Bytes on the device; `total` is what model and session together allocate."""

    STRUCT: ClassVar[str] = "luce_memory"

    weights: int
    kv: int
    state: int
    compute: int
    total: int
    device_free: int


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen (luce.h: luce_sample). temperature 0 is greedy; 0 turns a filter off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    min_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class SessionParams:
    """0 and None mean the core's default: ctx min(trained, 4096), 1 row, chunk 512, no drafts, threads up
    to 16. n_draft > 0 needs a model with a head, and n_rows > n_draft."""

    n_ctx: int = 0
    n_rows: int = 0
    n_chunk: int = 0
    n_draft: int = 0
    n_threads: int = 0
    kv_type: str | None = None


@dataclass(frozen=True)
class FileInfo:
    """Facts of the container; sizes in bytes over all parts."""

    STRUCT: ClassVar[str] = "luce_file_info"

    size_bytes: int
    n_kv: int
    n_tensors: int
    version: int
    n_parts: int


@dataclass(frozen=True)
class Tensor:
    """One tensor; `shape` in ggml order, fastest first."""

    name: str
    type_name: str
    type: int
    shape: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True)
class ModelInfo:
    """An opened model; `device` as resolved. n_nextn: NextN blocks in its file; has_head: one is loaded."""

    STRUCT: ClassVar[str] = "luce_model_info"

    architecture: str
    device: str
    n_params: int
    weight_bytes: int
    n_vocab: int
    n_embd: int
    n_layer: int
    n_nextn: int
    n_ctx_train: int
    has_head: int


@dataclass(frozen=True)
class SessionInfo:
    """An opened session; sizes as resolved, memory in bytes on the device."""

    STRUCT: ClassVar[str] = "luce_session_info"

    memory_bytes: int
    n_ctx: int
    n_rows: int
    n_chunk: int
    n_threads: int
    n_draft: int
    n_past: int
    n_verified: int
    failed: int
