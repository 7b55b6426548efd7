"""What to do, from what the files are and what was asked: a pure function, with a reason for each choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal

from luce.errors import ArgumentError, ContextFull, FileError, UnsupportedError
from luce.grammar import Matcher
from luce.probe import Facts
from luce.structs import EngineParams, Memory, Penalties, Sampling

DEFAULT_CTX = 4096
DEFAULT_GAMMA = 2  # where a chain is asked for without a length
MAX_GAMMA = 8  # LUCE_MAX_DRAFT
MAX_THREADS = 16  # that are taken without being asked for: more seldom help
DEFAULT_BUDGET = 15  # candidates of a round, where a lookup is asked for without a number
MAX_BUDGET = 63  # LUCE_MAX_ROWS less the anchor's
SPECS = ("auto", "off", "mtp", "dflash", "lookup")

Where = Literal["embedded", "separate"]


@dataclass(frozen=True)
class Request:
    """One generation. prompt: token ids; max_tokens: at most so many new ones, >= 0, None: until the context
    is full; stops: texts to end before; ignore_eos: an end of text is a token like any other. grammar: makes
    the matcher that the text is held to; logprobs: of each token, with so many of the most probable ones,
    None: no."""

    prompt: tuple[int, ...]
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    penalties: Penalties = field(default_factory=Penalties)
    grammar: Callable[[], Matcher] | None = None
    logprobs: int | None = None


@dataclass(frozen=True)
class Options:
    """How an engine is asked for; None: not said. ctx: positions of a sequence; sequences: that run at once;
    checkpoints: on the device at once; pages: of KV, for all of these; chunk: prefill rows of a step.
    spec: who decides what is drafted, one of SPECS; gamma: drafts of the NextN head a round,
    0..MAX_GAMMA; budget: candidates a round of a lookup or a tree, 1..MAX_BUDGET."""

    device: str | None = None
    ctx: int | None = None
    kv_type: str | None = None
    threads: int | None = None
    sequences: int = 1
    checkpoints: int = 0
    pages: int | None = None
    chunk: int | None = None
    spec: str | None = None
    gamma: int | None = None
    budget: int | None = None

    @property
    def resolved_spec(self) -> str:
        """A length alone asks for a chain of it, nothing at all for what pays."""
        return self.spec or ("auto" if self.gamma is None else "mtp")


@dataclass(frozen=True)
class Plain:
    """Nothing is drafted."""

    mode: ClassVar[str] = "plain"
    chain: ClassVar[int] = 0
    candidates: ClassVar[int] = 0


@dataclass(frozen=True)
class Mtp:
    """The NextN head of the model's file (embedded) or of another (separate) drafts `gamma` >= 1 tokens."""

    mode: ClassVar[str] = "mtp"
    gamma: int
    head: Where

    @property
    def chain(self) -> int:
        return self.gamma

    candidates = chain


@dataclass(frozen=True)
class Auto:
    """The NextN head drafts as many tokens as pay, at most `gamma` >= 1."""

    mode: ClassVar[str] = "auto"
    gamma: int
    head: Where

    @property
    def chain(self) -> int:
        return self.gamma

    candidates = chain


@dataclass(frozen=True)
class Lookup:
    """What followed earlier in the text is drafted, at most `budget` >= 1 tokens of it."""

    mode: ClassVar[str] = "lookup"
    chain: ClassVar[int] = 0
    budget: int

    @property
    def candidates(self) -> int:
        return self.budget


@dataclass(frozen=True)
class Dflash:
    """The DFlash drafter of the file `path` drafts a block a round, of which `budget` >= 1 tokens are
    verified."""

    mode: ClassVar[str] = "dflash"
    chain: ClassVar[int] = 0
    path: str
    budget: int

    @property
    def candidates(self) -> int:
        return self.budget


# Of each, chain: drafts of the NextN head a round, and candidates: of all sources, at most.
Drafting = Plain | Mtp | Auto | Lookup | Dflash


@dataclass(frozen=True)
class Plan:
    """How a model and its engine are opened. ctx in positions, chunk in prefill rows a step; chunk,
    pages and threads 0: the core's default. reasons: a line for each of the other fields."""

    device: str
    ctx: int
    kv_type: str
    chunk: int
    threads: int
    sequences: int
    checkpoints: int
    pages: int
    draft: Drafting
    reasons: dict[str, str]

    @property
    def drafts(self) -> int:
        """Drafts of the NextN head a round, at most."""
        return self.draft.chain

    @property
    def blocks(self) -> bool:
        """Whether a DFlash drafter drafts."""
        return isinstance(self.draft, Dflash)

    @property
    def params(self) -> EngineParams:
        """The engine's: a sequence has a row for its anchor and one for each candidate."""
        return EngineParams(
            n_ctx=self.ctx,
            n_sequences=self.sequences,
            n_checkpoints=self.checkpoints,
            n_pages=self.pages,
            n_rows=self.draft.candidates + 1,
            n_draft=self.drafts,
            blocks=int(self.blocks),
            n_chunk=self.chunk,
            n_threads=self.threads,
            kv_type=self.kv_type,
        )

    def as_json(self) -> dict[str, Any]:
        """{field: {"value", "reason"}}; of draft the value is {"mode", ...}."""
        values = {name: getattr(self, name) for name in self.reasons}
        values["draft"] = {"mode": self.draft.mode, **asdict(self.draft)}
        return {name: {"value": values[name], "reason": reason} for name, reason in self.reasons.items()}


def plan(
    facts: Facts,
    options: Options,
    head: Facts | None = None,
    prompt: int = 0,
    new: int | None = None,
    cpus: int = 0,
    drafter: tuple[str, Facts] | None = None,
) -> Plan:
    """The plan of an engine for the model of `facts`. head: facts of the file to take the NextN head from;
    prompt, new: tokens of the longest request that is known already, and how many it may add; cpus: that this
    process may use, 0: not known; drafter: path and facts of a DFlash drafter's file.
    UnsupportedError: luce cannot do it with these files; ArgumentError: the options contradict each other,
    or ask for more than the model has; ContextFull: the prompt alone is longer than the context."""
    require_supported(facts)
    ctx, why_ctx = _context(facts, options, prompt, new or 0)
    if prompt > ctx:
        raise ContextFull(f"a prompt of {prompt} tokens, a context of {ctx} ({why_ctx})")
    drafting, why_draft = _drafting(facts, options, head, drafter)
    asked, default = "as asked", "the default"
    return Plan(
        device=options.device or "auto",
        ctx=ctx,
        kv_type=options.kv_type or "f16",
        chunk=options.chunk or 0,
        threads=options.threads or min(cpus, MAX_THREADS),
        sequences=options.sequences,
        checkpoints=options.checkpoints,
        pages=options.pages or 0,
        draft=drafting,
        reasons={
            "device": asked if options.device else "a CUDA device if there is one, else the CPU",
            "ctx": why_ctx,
            "kv_type": asked if options.kv_type else default,
            "chunk": asked if options.chunk else "as many as the device prefills fastest",
            "threads": asked if options.threads else f"one for each usable CPU, at most {MAX_THREADS}",
            "sequences": default if options.sequences == 1 else asked,
            "checkpoints": asked if options.checkpoints else default,
            "pages": asked if options.pages else "enough for every sequence's whole context",
            "draft": why_draft,
        },
    )


def _drafting(
    facts: Facts, options: Options, head: Facts | None, drafter: tuple[str, Facts] | None
) -> tuple[Drafting, str]:
    spec, asked = options.resolved_spec, options.gamma
    if spec == "off":
        if asked is not None:
            raise ArgumentError(f"chains of {asked} drafts were asked for, and that nothing is drafted")
        return Plain(), "drafting is off, as asked"
    if asked is not None and spec in ("dflash", "lookup"):
        raise ArgumentError(f"chains of {asked} drafts were asked for, and that {spec} drafts")
    if spec == "dflash":
        return _dflash(options, drafter)
    if drafter is not None and spec == "auto":
        raise UnsupportedError("auto does not weigh a DFlash drafter yet, and one was given")
    if spec == "lookup":
        budget = options.budget or DEFAULT_BUDGET
        length = "as asked" if options.budget else f"by default {budget} a round"
        return Lookup(budget), f"what followed earlier in the text, {length}"
    if head is not None and not _has_head(head):
        raise UnsupportedError(f"the head's file holds no NextN head: {_missing(head)}")
    where: Where | None = "separate" if head is not None else "embedded" if _has_head(facts) else None
    if where is None and spec == "mtp" and not (asked == 0 and options.spec is None):
        raise UnsupportedError(f"no NextN head to draft with: {_missing(facts)}", concerns="nextn_head")
    if asked == 0:
        return Plain(), "no drafts, as asked"
    if where is None:
        return Plain(), "there is no NextN head"
    of_file = "the head in the model's file" if where == "embedded" else "the head of its own file"
    if spec == "mtp":
        length = "as asked" if asked else f"by default {DEFAULT_GAMMA} a round"
        return Mtp(asked or DEFAULT_GAMMA, where), f"{of_file}, {length}"
    most = "at most as many as asked" if asked else f"at most {MAX_GAMMA}"
    who = "as asked" if options.spec else "the default"
    return Auto(asked or MAX_GAMMA, where), f"{who}: as many drafts as pay, {most}, by {of_file}"


def _dflash(options: Options, drafter: tuple[str, Facts] | None) -> tuple[Drafting, str]:
    if drafter is None:
        raise UnsupportedError("there is no DFlash drafter to draft with", concerns="drafter")
    path, facts = drafter
    if facts.dflash is None:
        raise UnsupportedError(f"{path} is no DFlash drafter: its architecture is {facts.architecture}")
    if facts.dflash.block_size is None:
        raise FileError(f"{path}: the drafter's block_size is missing")
    most = facts.dflash.block_size - 1
    if options.budget is not None and options.budget > most:
        raise ArgumentError(f"{options.budget} candidates were asked for, the drafter's blocks have {most}")
    length = "as asked" if options.budget else "all of its block"
    return Dflash(path, options.budget or most), f"the DFlash drafter that was given, {length}"


def _has_head(facts: Facts) -> bool:
    return facts.kind in ("model", "head") and facts.nextn_predict_layers > 0


def _missing(facts: Facts) -> str:
    """Why there is no head in a file."""
    if facts.kind not in ("model", "head"):
        return "; ".join(facts.reasons)
    return f"{facts.architecture}.nextn_predict_layers is 0 or missing"


def fitted(chosen: Plan, memory: Memory) -> Plan:
    """`chosen`, plain where the choice to draft was auto's and `memory` for it is not there."""
    if not isinstance(chosen.draft, Auto) or memory.total <= memory.device_free:
        return chosen
    why = f"with the NextN head {memory.total:,} bytes would be needed, {memory.device_free:,} are free"
    return replace(chosen, draft=Plain(), reasons=chosen.reasons | {"draft": why})


def require_supported(facts: Facts) -> None:
    """UnsupportedError with the reasons where luce cannot generate with the file."""
    if not facts.supported:
        raise UnsupportedError("; ".join(facts.reasons), concerns="trunk" if facts.kind == "head" else None)


def _context(facts: Facts, options: Options, prompt: int, new: int) -> tuple[int, str]:
    trained = facts.context_length
    if options.ctx is not None:
        if trained is not None and options.ctx > trained:
            raise ArgumentError(f"a context of {options.ctx} was asked, the model was trained for {trained}")
        return options.ctx, "as asked"
    wanted, why = DEFAULT_CTX, f"the default of {DEFAULT_CTX}"
    if prompt + new > wanted:
        wanted, why = prompt + new, f"{prompt} prompt tokens and {new} new ones"
    if trained is not None and trained < wanted:
        return trained, f"the model was trained for {trained}"
    return wanted, why
