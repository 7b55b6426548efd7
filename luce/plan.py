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
MAX_TOP = 63  # LUCE_MAX_TOP: candidates that are kept of a draft; samples come of all of them
AUTO_BUDGET = 31  # candidates of a round, at most, where luce chooses
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
    block: ClassVar[int] = 0
    candidates: ClassVar[int] = 0
    ranks: ClassVar[int] = 0


@dataclass(frozen=True)
class Mtp:
    """The NextN head of the model's file (embedded) or of another (separate) drafts `gamma` >= 1 tokens. With
    a budget, a tree of so many candidates is made of them and of the next best ones."""

    mode: ClassVar[str] = "mtp"
    block: ClassVar[int] = 0
    gamma: int
    head: Where
    budget: int | None = None

    @property
    def chain(self) -> int:
        return self.gamma

    @property
    def candidates(self) -> int:
        return self.budget or self.gamma

    @property
    def ranks(self) -> int:
        return MAX_TOP if self.budget else 0


@dataclass(frozen=True)
class Auto:
    """All that is loaded drafts as it pays: the NextN head at most `gamma` tokens (0: there is none), the
    DFlash drafter of the file `path` blocks of `block` (0: there is none), a lookup, and all together at most
    `budget` >= 1 candidates."""

    mode: ClassVar[str] = "auto"
    gamma: int
    head: Where | None
    budget: int
    path: str | None = None
    block: int = 0

    @property
    def chain(self) -> int:
        return self.gamma

    @property
    def candidates(self) -> int:
        return self.budget

    @property
    def ranks(self) -> int:
        return MAX_TOP if self.block else 0


@dataclass(frozen=True)
class Lookup:
    """What followed earlier in the text is drafted, at most `budget` >= 1 tokens of it."""

    mode: ClassVar[str] = "lookup"
    chain: ClassVar[int] = 0
    block: ClassVar[int] = 0
    ranks: ClassVar[int] = 0
    budget: int

    @property
    def candidates(self) -> int:
        return self.budget


@dataclass(frozen=True)
class Dflash:
    """The DFlash drafter of the file `path` drafts a block of `block` >= 1 tokens a round. With a budget, a
    tree of so many candidates is made of its lists."""

    mode: ClassVar[str] = "dflash"
    chain: ClassVar[int] = 0
    path: str
    block: int
    budget: int | None

    @property
    def candidates(self) -> int:
        return self.budget or self.block

    @property
    def ranks(self) -> int:
        return MAX_TOP if self.budget else 0


# Of each, chain: drafts of the NextN head a round; block: those of a DFlash drafter; candidates: of all
# sources, at most; ranks: candidates that are kept of each draft, 0 where the draft alone is.
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
        return self.draft.block > 0

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
            n_top=self.draft.ranks,
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
    if spec == "lookup":
        budget = options.budget or DEFAULT_BUDGET
        length = "as asked" if options.budget else f"by default {budget} a round"
        return Lookup(budget), f"what followed earlier in the text, {length}"
    if head is not None and not _has_head(head):
        raise UnsupportedError(f"the head's file holds no NextN head: {_missing(head)}")
    where: Where | None = "separate" if head is not None else "embedded" if _has_head(facts) else None
    if spec == "mtp":
        if asked == 0 and (where is not None or options.spec is None):
            return Plain(), "no drafts, as asked"
        if where is None:
            raise UnsupportedError(f"no NextN head to draft with: {_missing(facts)}", concerns="nextn_head")
        length = "as asked" if asked else f"by default {DEFAULT_GAMMA} a round"
        return Mtp(asked or DEFAULT_GAMMA, where, options.budget), f"{_OF_FILE[where]}, {length}"
    return _auto(options, where if asked != 0 else None, drafter)


_OF_FILE = {"embedded": "the head in the model's file", "separate": "the head of its own file"}


def _auto(options: Options, where: Where | None, drafter: tuple[str, Facts] | None) -> tuple[Auto, str]:
    """Sequences that draft together share the rows of a step."""
    share = (MAX_BUDGET + 1) // max(options.sequences, 1) - 1
    gamma = 0 if where is None else options.gamma or MAX_GAMMA
    path, block = (None, 0) if drafter is None else (drafter[0], _block_of(drafter))
    budget = options.budget or max(min(AUTO_BUDGET, share), gamma, block, 1)
    gamma = min(gamma, budget)
    who = "as asked" if options.spec else "the default"
    sources = ["what followed earlier in the text"]
    if where is not None:
        sources.append(f"at most {gamma} by {_OF_FILE[where]}")
    if path is not None:
        sources.append(f"blocks of {block} by the DFlash drafter that was given")
    why = f"{who}: as many drafts as pay, at most {budget} candidates a round: {', '.join(sources)}"
    return Auto(gamma, where, budget, path, block), why


def _dflash(options: Options, drafter: tuple[str, Facts] | None) -> tuple[Drafting, str]:
    if drafter is None:
        raise UnsupportedError("there is no DFlash drafter to draft with", concerns="drafter")
    block = _block_of(drafter)
    length = f"a tree of {options.budget}, as asked" if options.budget else f"all {block} drafts of its block"
    return Dflash(drafter[0], block, options.budget), f"the DFlash drafter that was given, {length}"


def _block_of(drafter: tuple[str, Facts]) -> int:
    """Drafts of a block."""
    path, facts = drafter
    if facts.dflash is None:
        raise UnsupportedError(f"{path} is no DFlash drafter: its architecture is {facts.architecture}")
    if facts.dflash.block_size is None:
        raise FileError(f"{path}: the drafter's block_size is missing")
    return facts.dflash.block_size - 1


def _has_head(facts: Facts) -> bool:
    return facts.kind in ("model", "head") and facts.nextn_predict_layers > 0


def _missing(facts: Facts) -> str:
    """Why there is no head in a file."""
    if facts.kind not in ("model", "head"):
        return "; ".join(facts.reasons)
    return f"{facts.architecture}.nextn_predict_layers is 0 or missing"


def smaller(chosen: Plan, memory: Memory) -> Plan | None:
    """Where the choice to draft was auto's and `memory` for it is not there, the plan to try in its stead:
    without the NextN head, and then plain; else None."""
    if not isinstance(chosen.draft, Auto) or memory.total <= memory.device_free:
        return None
    with_drafters = chosen.draft.gamma > 0 or chosen.draft.block > 0
    what = "with the model's drafters" if with_drafters else "to verify lookups"
    why = f"{what} {memory.total:,} bytes would be needed, {memory.device_free:,} are free"
    draft = Auto(0, None, chosen.draft.budget) if with_drafters else Plain()
    return replace(chosen, draft=draft, reasons=chosen.reasons | {"draft": why})


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
