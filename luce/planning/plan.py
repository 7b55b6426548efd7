"""Decides how a model runs, from what the files hold and what was asked. It is a pure function that gives a
reason for each choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from luce.errors import ArgumentError, ContextFull, FileError, UnsupportedError
from luce.files.probe import Facts
from luce.native.structs import EngineParams, Memory
from luce.planning.split import Split, are_ranks, layers_of

DEFAULT_CTX = 4096
DEFAULT_GAMMA = 2  # A chain has so many where it is asked for without a length.
MAX_GAMMA = 8  # luce.h calls it LUCE_MAX_DRAFT.
MAX_THREADS = 16  # No more are taken without being asked for, since more seldom help.
MAX_TOP = 63  # So many candidates of a draft are kept, LUCE_MAX_TOP. Samples come of all of them.
# The part of a large vocabulary that the head drafts among has so many tokens. A BPE's first tokens are its
# most frequent: of Qwen's first 151,643 these are 96 to 98% of the tokens of English and code, 30% of
# Chinese.
PART = 65536
AUTO_BUDGET = 31  # A round has at most so many candidates where luce chooses.
DEFAULT_BUDGET = 15  # A round has so many candidates where a lookup is asked for without a number.
MAX_BUDGET = 63  # These are LUCE_MAX_ROWS less the anchor's row.
SPECS = ("auto", "off", "mtp", "dflash", "lookup")

Where = Literal["embedded", "separate", "assistant"]


def part_of(n_vocab: int) -> int:
    """Returns how many first tokens a head drafts among where it drafts among a part: PART of a large
    vocabulary, and a quarter of a small one in a measurement."""
    return PART if n_vocab >= 2 * PART else n_vocab // 4 // 128 * 128


@dataclass(frozen=True)
class Options:
    """This is what was asked of an engine; None where nothing was said. `ctx` counts the positions of a
    sequence, `sequences` those that run at once, `checkpoints` those that are on the device at once, `pages`
    the KV pages of all of these, and `chunk` the rows of a prefill step. `rows` counts the rows that a verify
    can have of a sequence, where more are wanted than drafts need.

    `device` names one device, or several, of which each has consecutive layers. With a `split` a model lies on all GPUs
    where none is named by its number; it has each device's share of the layers, or is empty, and then they are shared
    out by what is free. With "tensor" each device has an equal part of every matrix. The drafters lie on a
    `draft_device`, which has no layers, and the output with them; with None they are where the last layers are.

    `cpu_experts` counts the layers, from the first, whose experts stay in host memory, where the CPU
    multiplies them; with "auto" it is as few as leave room on the device. With `expert_slots` the experts of
    all layers have their home in host memory, and so many of each layer a slot on the device; with "auto" it is as
    many as there is room for.

    `spec` says who decides what is drafted and is one of SPECS. `gamma` counts the drafts of the NextN head
    or assistant in a round, 0..MAX_GAMMA. `budget` counts the candidates of a round of a lookup or a tree,
    1..MAX_BUDGET. With `part` chains of "mtp" are drafted among so many first tokens of the vocabulary alone.
    With `gaps` prompts may leave text out, and with `scores` verifies say what their rows give each position.
    With `copies` False a GPU keeps no F16 copies of matrices for prompts.
    """

    device: str | None = None
    draft_device: str | None = None
    split: Split | None = None
    ctx: int | None = None
    kv_type: str | None = None
    threads: int | None = None
    sequences: int = 1
    checkpoints: int = 0
    pages: int | None = None
    chunk: int | None = None
    rows: int | None = None
    cpu_experts: int | Literal["auto"] | None = None
    expert_slots: int | Literal["auto"] | None = None
    spec: str | None = None
    gamma: int | None = None
    budget: int | None = None
    part: int = 0
    gaps: bool = False
    scores: bool = False
    copies: bool = True

    @property
    def resolved_spec(self) -> str:
        """Returns the draft mode. Where only a length is given it is "mtp", and where nothing is given it is
        "auto"."""
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
    """The NextN head drafts `gamma` >= 1 tokens a round. It is in the model's own file (embedded) or in
    another one (separate), or an assistant chains in its place. With a budget, its drafts and their next best
    candidates become a tree of so many candidates. With a part, it drafts among so many first tokens of the
    vocabulary."""

    mode: ClassVar[str] = "mtp"
    block: ClassVar[int] = 0
    gamma: int
    head: Where
    budget: int | None = None
    part: int = 0

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
    """Every loaded draft source drafts as it pays. The NextN head drafts at most `gamma` tokens (0 where
    there is none), the DFlash drafter of the file `path` a block of `block` (0 where there is none), and a
    lookup what it finds. All together have at most `budget` >= 1 candidates in a round."""

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
    """A lookup drafts at most `budget` >= 1 tokens a round: those that followed the same tokens earlier in
    the text."""

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
    """The DFlash drafter of the file `path` drafts a block of `block` >= 1 tokens a round. With a budget,
    its lists of candidates become a tree of so many."""

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


# Each says what a round drafts at most. `chain` counts the drafts of the NextN head, `block` those of
# a DFlash drafter, and `candidates` those of all sources. `ranks` counts the candidates that are kept of each
# draft; 0 means that the draft alone is kept.
Drafting = Plain | Mtp | Auto | Lookup | Dflash


@dataclass(frozen=True)
class Plan:
    """Says how a model and its engine are opened. `layers` counts those of each device, where there are several; a
    `draft_device` has none, and the output and the drafters. `ctx` is in positions and `chunk` in rows of a prefill
    step. A `chunk`, `pages` or `threads` of 0 means the core's default. A verify can have `rows` rows of a
    sequence, or more where its drafts need them. Where `expert_slots` is not None all experts have their home in host
    memory, and so many of each layer a slot on the device. Each GPU keeps up to `copy_bytes` of F16 copies of matrices
    for prompts. `reasons` has a line for each of the other fields.

    Nothing changes a plan. Where something has to be measured first, that lies between two plans."""

    device: str
    layers: tuple[int, ...]
    ctx: int
    kv_type: str
    chunk: int
    rows: int
    threads: int
    sequences: int
    checkpoints: int
    pages: int
    cpu_experts: int
    draft: Drafting
    reasons: Mapping[str, str]
    gaps: bool = False
    scores: bool = False
    copy_bytes: int = 0
    draft_device: str | None = None
    expert_slots: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "reasons", MappingProxyType(dict(self.reasons)))

    def because(self, field: str, reason: str, **values: Any) -> Plan:
        """Returns another plan with these values and the reason of one of its fields."""
        return replace(self, reasons={**self.reasons, field: reason}, **values)

    @property
    def drafts(self) -> int:
        """Returns the most drafts of the NextN head in a round."""
        return self.draft.chain

    @property
    def blocks(self) -> bool:
        """Says whether a DFlash drafter drafts."""
        return self.draft.block > 0

    @property
    def params(self) -> EngineParams:
        """Says how the core opens the engine: drafts need a row for the anchor and one for each candidate."""
        return EngineParams(
            n_ctx=self.ctx,
            n_sequences=self.sequences,
            n_checkpoints=self.checkpoints,
            n_pages=self.pages,
            n_rows=max(self.rows, self.draft.candidates + 1),
            n_draft=self.drafts,
            blocks=int(self.blocks),
            n_top=self.draft.ranks,
            n_part=self.draft.part if isinstance(self.draft, Mtp) else 0,
            n_chunk=self.chunk,
            n_threads=self.threads,
            kv_type=self.kv_type,
            gaps=int(self.gaps),
            scores=int(self.scores),
            n_expert_slots=self.expert_slots or 0,
        )

    def as_json(self) -> dict[str, Any]:
        """Returns {field: {"value", "reason"}}. The value of `draft` is {"mode", ...}."""
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
    """Returns the plan of an engine for the model of `facts`. `head` has the facts of the file that the
    NextN head is taken from or that is an assistant, and `drafter` the path and facts of a DFlash drafter's
    file. `prompt` and `new` count the tokens of the longest request that is known already, and those that it may
    add. `cpus` counts the CPUs that this process may use; 0 means that it is not known.

    Raises UnsupportedError where luce cannot run these files as asked, ArgumentError where the options
    contradict each other or ask for more than the model has, and ContextFull where the prompt alone is
    longer than the context.
    """
    require_supported(facts)
    ctx, why_ctx = _context(facts, options, prompt, new or 0)
    if prompt > ctx:
        raise ContextFull(f"a prompt of {prompt} tokens, a context of {ctx} ({why_ctx})")
    drafting, why_draft = _drafting(facts, options, head, drafter)
    _require_drafter(drafting, options.draft_device)
    cpu_experts, why_experts = _cpu_experts(facts, options)
    expert_slots, why_slots = _expert_slots(facts, options)
    asked, default = "as asked", "the default"
    return Plan(
        device=options.device or "auto",
        layers=_layers(facts, options),
        ctx=ctx,
        kv_type=options.kv_type or "f16",
        chunk=options.chunk or 0,
        rows=options.rows or 0,
        threads=options.threads or min(cpus, MAX_THREADS),
        sequences=options.sequences,
        checkpoints=options.checkpoints,
        pages=options.pages or 0,
        cpu_experts=cpu_experts,
        draft=drafting,
        gaps=options.gaps,
        scores=options.scores,
        draft_device=options.draft_device,
        expert_slots=expert_slots,
        reasons={
            "device": asked if options.device else "a CUDA device if there is one, else the CPU",
            "layers": _why_layers(options),
            "ctx": why_ctx,
            "kv_type": asked if options.kv_type else default,
            "rows": asked if options.rows else "as many as drafts need",
            "chunk": asked if options.chunk else "as many as the device prefills fastest",
            "threads": asked if options.threads else f"one for each usable CPU, at most {MAX_THREADS}",
            "sequences": default if options.sequences == 1 else asked,
            "checkpoints": asked if options.checkpoints else default,
            "pages": asked if options.pages else "enough for every sequence's whole context",
            "cpu_experts": why_experts,
            "expert_slots": why_slots,
            "copy_bytes": "none, before memory is counted" if options.copies else "none, as asked",
            "draft": why_draft,
            "gaps": "prompts of which parts are read" if options.gaps else "prompts are read whole",
            "scores": "it scores prompts for another model" if options.scores else "it scores no prompts",
            "draft_device": "as asked, with the output" if options.draft_device else "drafters are with the layers",
        },
    )


def _layers(facts: Facts, options: Options) -> tuple[int, ...]:
    shares = options.split
    return layers_of(shares, trunk_layers(facts)) if shares and shares != "tensor" else ()


def _why_layers(options: Options) -> str:
    if are_ranks(options.device):
        return "each device has an equal part of every layer, as asked"
    return "as asked" if options.split else "all on one device"


def _require_drafter(drafting: Drafting, device: str | None) -> None:
    """Raises what is wrong with a device for drafters: that there is none, or an assistant, which reads the cells of
    the model's layers."""
    if device is None:
        return
    if drafting.chain == 0 and drafting.block == 0:
        raise ArgumentError(f"{device} was to have the drafters, and there is none", concerns="draft_device")
    if getattr(drafting, "head", None) == "assistant":
        why = "it reads the cells of the model's layers, so that it lies where these do"
        raise UnsupportedError(f"an assistant was to draft on {device}: {why}", concerns="draft_device")


def _cpu_experts(facts: Facts, options: Options) -> tuple[int, str]:
    """Decides how many layers have their experts in host memory: with "auto" none, before memory is counted.
    """
    asked = options.cpu_experts
    if asked is None:
        return 0, "experts are where the model is, the default"
    if facts.experts is None:
        raise ArgumentError("experts were asked to stay in host memory, and the model has none")
    if asked == "auto":
        return 0, "all experts have room on the device"
    layers = trunk_layers(facts)
    if asked > layers:
        what = f"experts of {asked} layers were asked to stay in host memory"
        raise ArgumentError(f"{what}, the model has {layers}")
    return asked, "as asked"


def _expert_slots(facts: Facts, options: Options) -> tuple[int | None, str]:
    """Decides how many of a layer's experts have slots on the device, or None where none has its home in host memory:
    so with "auto", before memory is counted."""
    asked = options.expert_slots
    if asked is None:
        return None, "experts have no home in host memory, the default"
    if facts.experts is None:
        raise ArgumentError("slots were asked for experts, and the model has none")
    if options.cpu_experts is not None:
        raise ArgumentError("experts were to be multiplied by the CPU, and to have slots on the device: leave one out")
    if asked == "auto":
        return None, "all experts have room on the device"
    if asked > facts.experts:
        raise ArgumentError(f"slots were asked for {asked} experts of each layer, the model has {facts.experts}")
    return asked, "as asked"


def trunk_layers(facts: Facts) -> int:
    """Returns the layers of the model without those of its NextN heads."""
    return (facts.block_count or 0) - facts.nextn_predict_layers


def with_room(chosen: Plan, layers: int, memory: Callable[[Plan], Memory]) -> Plan:
    """Returns the plan with as few of `layers` layers' experts in host memory as leave room on the device for
    the others, or those of all layers where nothing does. `memory` counts what a plan needs; more layers in
    host memory need less of the device."""
    needed = memory(chosen)
    if needed.fits:
        return chosen

    at = partial(_lacking, chosen, needed, "cpu_experts")
    low, high = 0, layers  # With `low` layers it does not fit.
    while high - low > 1:
        middle = (low + high) // 2
        found = memory(at(middle))
        low, high = (low, middle) if found.fits else (middle, high)
    return at(high)


def _lacking(chosen: Plan, needed: Memory, name: str, n: int) -> Plan:
    """Returns the plan with `name` n, and the reason: all experts on the device would have needed so much."""
    why = f"with all experts on the device {needed.total:,} bytes would be needed"
    return chosen.because(name, f"{why}, {needed.device_free:,} are free", **{name: n})


def with_slots(chosen: Plan, experts: int, memory: Callable[[Plan], Memory]) -> Plan:
    """Returns the plan as it is where all experts have room on the device; else with as many slots for each layer's
    `experts` as leave room, or none where nothing does. `memory` counts what a plan needs; slots need more of it."""
    needed = memory(chosen)
    if needed.fits:
        return chosen

    at = partial(_lacking, chosen, needed, "expert_slots")
    low, high = 0, experts  # With `high` slots it does not fit.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if memory(at(middle)).fits else (low, middle)
    return at(low)


def with_copies(chosen: Plan, memory: Callable[[Plan], Memory]) -> Plan:
    """Returns the plan with F16 copies of layers' matrices, of which GPUs spare prompts the writing in each of their
    steps. They take half of what the fullest GPU has left at most, so that others find memory too. `memory`
    counts what a plan needs, with what the copies really take among the weights."""
    devices = memory(chosen).devices
    left = min(each.free - each.total for each in devices)
    most = memory(replace(chosen, copy_bytes=max(left // 2, 0))).devices
    taken = max(having.weights - without.weights for having, without in zip(most, devices, strict=True))
    if taken == 0:
        return chosen.because("copy_bytes", f"none: no matrix has room in half of the {max(left, 0):,} bytes left")
    why = f"{left:,} bytes are left without, and prompts are read faster with F16 copies of matrices"
    return chosen.because("copy_bytes", why, copy_bytes=taken)


def _drafting(
    facts: Facts, options: Options, head: Facts | None, drafter: tuple[str, Facts] | None
) -> tuple[Drafting, str]:
    spec, asked = options.resolved_spec, options.gamma
    if options.part and spec != "mtp":
        raise ArgumentError(f"drafts among {options.part} tokens were asked for, which mtp makes, and {spec} was too")
    if spec == "off":
        if asked is not None:
            raise ArgumentError(f"chains of {asked} drafts were asked for (gamma), and none at all: leave one out")
        return Plain(), "drafting is off, as asked"
    if asked is not None and spec in ("dflash", "lookup"):
        chains = f"chains of {asked} drafts were asked for (gamma), which the NextN head makes"
        raise ArgumentError(f"{chains}, and drafts of {spec}: leave one out")
    if spec == "dflash":
        if drafter is None and head is not None and head.kind == "assistant":
            given = "what was given is an assistant, which drafts with mtp or auto"
            raise UnsupportedError(f"drafts of a DFlash drafter were asked for, and {given}")
        return _dflash(facts, options, drafter)
    if spec == "lookup":
        budget = options.budget or DEFAULT_BUDGET
        length = "as asked" if options.budget else f"by default {budget} a round"
        return Lookup(budget), f"what followed earlier in the text, {length}"
    where = _where(facts, head)
    if spec == "mtp":
        return _mtp(facts, options, where)
    return _auto(facts, options, where if asked != 0 else None, drafter)


def _where(facts: Facts, head: Facts | None) -> Where | None:
    """Says where what chains is: in the model's file, in a head's, or an assistant; None where there is none."""
    if head is None:
        return "embedded" if _has_head(facts) else None
    if head.kind == "assistant":
        return "assistant"
    if head.kind == "drafter":
        raise UnsupportedError("the head's file is a DFlash drafter and holds no NextN head", concerns="not_a_head")
    if not _has_head(head):
        raise UnsupportedError(f"the head's file holds no NextN head: {_missing(head)}")
    return "separate"


def _mtp(facts: Facts, options: Options, where: Where | None) -> tuple[Drafting, str]:
    asked = options.gamma
    if asked == 0 and (where is not None or options.spec is None):
        return Plain(), "no drafts, as asked"
    if where is None and facts.layers is not None:  # Some have a window, as in no other model that luce runs.
        raise UnsupportedError("no assistant to draft with: Gemma 4's are files of their own", concerns="assistant")
    if where is None:
        raise UnsupportedError(f"no NextN head to draft with: {_missing(facts)}", concerns="nextn_head")
    length = "as asked" if asked else f"by default {DEFAULT_GAMMA} a round"
    chosen = Mtp(asked or DEFAULT_GAMMA, where, options.budget, options.part)
    return chosen, f"{_OF_FILE[where]}, {length}"


_OF_FILE = {
    "embedded": "the head in the model's file",
    "separate": "the head of its own file",
    "assistant": "the assistant that was given",
}


def _auto(
    facts: Facts, options: Options, where: Where | None, drafter: tuple[str, Facts] | None
) -> tuple[Auto, str]:
    """Decides what auto may draft. Sequences that draft together share the rows of a step."""
    share = (MAX_BUDGET + 1) // max(options.sequences, 1) - 1
    gamma = 0 if where is None else options.gamma or MAX_GAMMA
    path, block = (None, 0) if drafter is None else (drafter[0], _block_of(facts, drafter))
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


def _dflash(facts: Facts, options: Options, drafter: tuple[str, Facts] | None) -> tuple[Drafting, str]:
    if drafter is None:
        raise UnsupportedError("there is no DFlash drafter to draft with", concerns="drafter")
    block = _block_of(facts, drafter)
    length = f"a tree of {options.budget}, as asked" if options.budget else f"all {block} drafts of its block"
    return Dflash(drafter[0], block, options.budget), f"the DFlash drafter that was given, {length}"


def _block_of(model: Facts, drafter: tuple[str, Facts]) -> int:
    """Returns the number of drafts in a block of a drafter, which has to fit the model."""
    path, facts = drafter
    dflash = facts.dflash
    if dflash is None:
        what = "is neither a DFlash drafter nor an assistant"
        raise UnsupportedError(f"{path} {what}: its architecture is {facts.architecture}")
    if dflash.drafts is None:
        raise FileError(f"{path}: the drafter's block_size is missing")
    blocks = None if model.block_count is None else model.block_count - model.nextn_predict_layers
    own, other = (dflash.target_embedding, dflash.target_vocabulary), (model.embedding_length, model.vocab_size)
    unlike = any(None not in pair and pair[0] != pair[1] for pair in zip(own, other, strict=True))
    if unlike or (dflash.target_blocks is not None and blocks is not None and blocks < dflash.target_blocks):
        parts = zip(("embedding", "vocabulary"), other, strict=True)
        found = ", ".join(f"{label} {value:,}" for label, value in parts if value is not None)
        raise FileError(f"{path} drafts for {dflash.fits}, and this model has {found}, {blocks} blocks")
    return dflash.drafts


def _has_head(facts: Facts) -> bool:
    return facts.kind in ("model", "head") and facts.nextn_predict_layers > 0


def _missing(facts: Facts) -> str:
    """Says why a file has no head."""
    if facts.kind not in ("model", "head"):
        return "; ".join(facts.reasons)
    return "; ".join(facts.warnings) or f"{facts.architecture}.nextn_predict_layers is 0 or missing"


def smaller(chosen: Plan, memory: Memory) -> Plan | None:
    """Returns the plan to try next where auto chose to draft and `memory` for it is not there: first without
    the NextN head, then without any drafts. Returns None where there is no smaller plan."""
    if not isinstance(chosen.draft, Auto) or memory.fits:
        return None
    with_drafters = chosen.draft.gamma > 0 or chosen.draft.block > 0
    what = "with the model's drafters" if with_drafters else "to verify lookups"
    why = f"{what} {memory.total:,} bytes would be needed, {memory.device_free:,} are free"
    draft = Auto(0, None, chosen.draft.budget) if with_drafters else Plain()
    return chosen.because("draft", why, draft=draft)


def require_supported(facts: Facts) -> None:
    """Raises UnsupportedError, with the reasons, where luce cannot generate with the file."""
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
