"""What to do, from what the file is and what was asked: a pure function, with a reason for each choice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from luce.errors import ArgumentError, ContextFull, UnsupportedError
from luce.probe import Facts
from luce.structs import Sampling, SessionParams

DEFAULT_CTX = 4096
DEFAULT_CHUNK = 512


@dataclass(frozen=True)
class Request:
    """What was asked. prompt: token ids; max_tokens: at most so many new ones, >= 0; None: not given."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[str, ...] = ()
    device: str | None = None
    ctx: int | None = None
    kv_type: str | None = None
    threads: int | None = None


@dataclass(frozen=True)
class Plan:
    """How a model and its session are opened. ctx in positions, chunk in prefill rows per step,
    threads 0: the core's default. reasons: a line for each of the other fields."""

    device: str
    ctx: int
    kv_type: str
    chunk: int
    threads: int
    mode: str
    reasons: dict[str, str]

    @property
    def session(self) -> SessionParams:
        """Of a session without candidates: one row a step."""
        return SessionParams(
            n_ctx=self.ctx, n_rows=1, n_chunk=self.chunk, n_threads=self.threads, kv_type=self.kv_type
        )

    def as_json(self) -> dict[str, Any]:
        """{field: {"value", "reason"}}."""
        return {
            name: {"value": getattr(self, name), "reason": reason} for name, reason in self.reasons.items()
        }


def plan(facts: Facts, request: Request) -> Plan:
    """The plan of a request. UnsupportedError: luce cannot run the file; ArgumentError: the request
    asks for more than the file has; ContextFull: the prompt alone is longer than the context."""
    require_supported(facts)
    ctx, why_ctx = _context(facts, request)
    if len(request.prompt) > ctx:
        raise ContextFull(f"a prompt of {len(request.prompt)} tokens, a context of {ctx} ({why_ctx})")
    asked = "as asked"
    reasons = {
        "device": asked if request.device else "a CUDA device if there is one, else the CPU",
        "ctx": why_ctx,
        "kv_type": asked if request.kv_type else "the default",
        "chunk": "the default",
        "threads": asked if request.threads else "one per core, at most 16",
        "mode": "there is no draft source",
    }
    return Plan(
        device=request.device or "auto",
        ctx=ctx,
        kv_type=request.kv_type or "f16",
        chunk=DEFAULT_CHUNK,
        threads=request.threads or 0,
        mode="plain",
        reasons=reasons,
    )


def require_supported(facts: Facts) -> None:
    """UnsupportedError with the reasons where luce cannot generate with the file."""
    if not facts.supported:
        raise UnsupportedError("; ".join(facts.reasons))


def _context(facts: Facts, request: Request) -> tuple[int, str]:
    trained = facts.context_length
    if request.ctx is not None:
        if trained is not None and request.ctx > trained:
            raise ArgumentError(f"a context of {request.ctx} was asked, the model was trained for {trained}")
        return request.ctx, "as asked"
    needed = len(request.prompt) + request.max_tokens
    wanted, why = DEFAULT_CTX, f"the default of {DEFAULT_CTX}"
    if needed > wanted:
        wanted, why = needed, f"{len(request.prompt)} prompt tokens and {request.max_tokens} new ones"
    if trained is not None and trained < wanted:
        return trained, f"the model was trained for {trained}"
    return wanted, why
