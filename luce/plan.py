"""What to do, from what the file is and what was asked: a pure function, with a reason for each choice."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from luce.errors import ArgumentError, ContextFull, UnsupportedError
from luce.probe import Facts
from luce.structs import Memory, Sampling, SessionParams

DEFAULT_CTX = 4096
DEFAULT_CHUNK = 512
DEFAULT_GAMMA = 2  # where a chain is asked for without a length
MAX_GAMMA = 8  # LUCE_MAX_DRAFT
SPECS = ("auto", "off", "mtp")


@dataclass(frozen=True)
class Request:
    """What was asked. prompt: token ids; max_tokens: at most so many new ones, >= 0; None: not given.
    spec: one of SPECS; mtp_gamma: 0..MAX_GAMMA."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[str, ...] = ()
    device: str | None = None
    ctx: int | None = None
    kv_type: str | None = None
    threads: int | None = None
    spec: str | None = None
    mtp_gamma: int | None = None


@dataclass(frozen=True)
class Plan:
    """How a model and its session are opened. ctx in positions, chunk in prefill rows per step,
    threads 0: the core's default. mode: "plain", or the draft source "mtp"; spec: who decides how much is
    drafted, "auto", "off" or "mtp"; gamma: drafts a round, at most where spec is auto; head: where the
    NextN head is, "embedded" in the model's file, "separate" in another, or None: not loaded.
    reasons: a line for each of the other fields."""

    device: str
    ctx: int
    kv_type: str
    chunk: int
    threads: int
    mode: str
    spec: str
    gamma: int
    head: str | None
    reasons: dict[str, str]

    @property
    def session(self) -> SessionParams:
        """A row for the anchor and one for each draft."""
        return SessionParams(
            n_ctx=self.ctx,
            n_rows=self.gamma + 1,
            n_chunk=self.chunk,
            n_draft=self.gamma,
            n_threads=self.threads,
            kv_type=self.kv_type,
        )

    def as_json(self) -> dict[str, Any]:
        """{field: {"value", "reason"}}."""
        return {
            name: {"value": getattr(self, name), "reason": reason} for name, reason in self.reasons.items()
        }


def plan(facts: Facts, request: Request, head: Facts | None = None) -> Plan:
    """The plan of a request for the model of `facts`; head: facts of the file that it is to draft with.
    UnsupportedError: luce cannot do it with these files; ArgumentError: the request contradicts itself, or
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
    }
    drafting, why = _drafting(facts, request, head)
    return Plan(
        device=request.device or "auto",
        ctx=ctx,
        kv_type=request.kv_type or "f16",
        chunk=DEFAULT_CHUNK,
        threads=request.threads or 0,
        **drafting,
        reasons=reasons | why,
    )


def contradiction(spec: str | None, mtp_gamma: int | None, mtp_gguf: bool) -> str | None:
    """What is wrong with flags of speculation that exclude each other."""
    if spec == "off" and mtp_gamma is not None:
        return "--mtp-gamma drafts with the NextN head, --spec off drafts nothing: give one of them"
    if spec == "off" and mtp_gguf:
        return "--mtp-gguf names a NextN head to draft with, --spec off drafts nothing: give one of them"
    return None


def _drafting(facts: Facts, request: Request, head: Facts | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Plan.mode, spec, gamma and head, and their reasons."""
    if problem := contradiction(request.spec, request.mtp_gamma, head is not None):
        raise ArgumentError(problem)
    if head is not None and not _has_head(head):
        raise UnsupportedError(f"the file of --mtp-gguf holds no NextN head: {_missing(head)}")
    spec, asked = request.spec, request.mtp_gamma
    why_spec = "as asked" if spec else "the default"
    if spec is None:
        spec, why_spec = ("auto", why_spec) if asked is None else ("mtp", "--mtp-gamma was given")
    where = "separate" if head is not None else "embedded" if _has_head(facts) else None
    if where is None and spec == "mtp" and not (asked == 0 and request.spec is None):
        raise UnsupportedError(f"no NextN head to draft with: {_missing(facts)}; give --mtp-gguf PATH")
    gamma, why = _gamma(spec, asked, where)
    why_head = {"separate": "of --mtp-gguf", "embedded": "in the model's file", None: "there is none"}[where]
    chosen = {
        "mode": "mtp" if gamma else "plain",
        "spec": spec,
        "gamma": gamma,
        "head": where if gamma else None,
    }
    reasons = {
        "mode": "there is a NextN head" if gamma else why,
        "spec": why_spec,
        "gamma": why,
        "head": why_head if gamma or where is None else "it would not be used",
    }
    return chosen, reasons


def _gamma(spec: str, asked: int | None, where: str | None) -> tuple[int, str]:
    """Drafts a round and the reason."""
    if spec == "off":
        return 0, "--spec off"
    if where is None:
        return 0, "there is no NextN head"
    if asked is not None:
        return asked, "as asked" if spec == "mtp" else "at most, as asked: what pays is measured"
    if spec == "mtp":
        return DEFAULT_GAMMA, "the default of a chain"
    return MAX_GAMMA, "at most: what pays is measured"


def _has_head(facts: Facts) -> bool:
    return facts.kind in ("model", "head") and facts.nextn_predict_layers > 0


def _missing(facts: Facts) -> str:
    """Why there is no head in a file."""
    if facts.kind not in ("model", "head"):
        return "; ".join(facts.reasons)
    return f"{facts.architecture}.nextn_predict_layers is 0 or missing"


def fitted(chosen: Plan, memory: Memory) -> Plan:
    """`chosen`, plain where the choice to draft was auto's and `memory` for it is not there."""
    if chosen.spec != "auto" or chosen.head is None or memory.total <= memory.device_free:
        return chosen
    why = f"with the NextN head {memory.total:,} bytes would be needed, {memory.device_free:,} are free"
    reasons = chosen.reasons | dict.fromkeys(("mode", "gamma", "head"), why)
    return replace(chosen, mode="plain", gamma=0, head=None, reasons=reasons)


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
