"""Holds the structs of luce.h as Python values. STRUCT is the C name of one that the core fills."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar

PAGE = 256  # A KV page has so many positions, as LUCE_PAGE says.
MAX_U32 = 2**32 - 1  # A count of luce.h holds no more.


@dataclass(frozen=True)
class Device:
    """This is a place where models run. `name` is what Model takes. Memory is in bytes; the free part is as
    of now."""

    STRUCT: ClassVar[str] = "luce_device_info"

    name: str
    description: str
    memory_free: int
    memory_total: int
    is_gpu: int


@dataclass(frozen=True)
class GpuInfo:
    """What the driver says of a GPU: its place on the bus, by which nvidia-smi knows it, the bytes a second of its
    memory by clock and width (0 where the driver does not say), its compute capability (90 is 9.0), and the CUDA
    that the driver runs and that the core was built with (13000 is 13.0)."""

    STRUCT: ClassVar[str] = "luce_gpu_info"

    pci: str
    bandwidth: int
    capability: int
    multiprocessors: int
    driver_cuda: int
    built_cuda: int


@dataclass(frozen=True)
class TypeInfo:
    """This is a ggml type, with the weights and the bytes of a block. `is_weight` says that luce multiplies
    with it."""

    STRUCT: ClassVar[str] = "luce_type_info"

    name: str
    block_size: int
    type_size: int
    is_weight: int


@dataclass(frozen=True)
class DeviceMemory:
    """What one of a model's devices has: `n_layers` layers from `first` on, and bytes as in Memory, of `free` ones."""

    name: str
    first: int
    n_layers: int
    weights: int
    kv: int
    state: int
    compute: int
    other: int
    total: int
    free: int
    experts: int = 0

    @property
    def parts(self) -> int:
        """Adds up all parts, also where the weights are only mapped."""
        return self.weights + self.kv + self.state + self.experts + self.compute + self.other


@dataclass(frozen=True)
class Memory:
    """These are bytes on the device, or on all `devices` of a model. `total` is what a new model and its engine
    together allocate. `kv` is that of pages, `state` that of sequences and checkpoints, and `compute` that of
    activations, inputs and outputs. `other` is an upper bound of captured graphs, or of all graphs on a CPU, and
    ggml's work buffers. `experts` is that of slots of experts whose home is in host memory."""

    STRUCT: ClassVar[str] = "luce_memory"

    weights: int
    kv: int
    state: int
    compute: int
    other: int
    total: int
    device_free: int
    experts: int = 0
    devices: tuple[DeviceMemory, ...] = field(default=(), kw_only=True)

    @property
    def parts(self) -> int:
        """Adds up all parts, also where the weights are only mapped."""
        return self.weights + self.kv + self.state + self.experts + self.compute + self.other

    def layers_of(self, device: DeviceMemory) -> str:
        """Says what one of several devices has of the layers: some, or a part of all; of one without any it says so."""
        if device.n_layers == 0:
            return "the output and the drafters"
        if sum(each.n_layers > 0 and each.first == 0 for each in self.devices) > 1:
            return f"a part of each of {device.n_layers} layers"
        return f"{device.n_layers} layers from {device.first} on"

    @property
    def fits(self) -> bool:
        """Says whether each device has room for what is allocated there."""
        return all(each.total <= each.free for each in self.devices) if self.devices else self.total <= self.device_free

    @property
    def has_room(self) -> bool:
        """Says the same of all parts, also of weights that are only mapped."""
        if self.devices:
            return all(each.parts <= each.free for each in self.devices)
        return self.parts <= self.device_free


@dataclass(frozen=True)
class Sampling:
    """Says how a token is chosen (luce.h: luce_sample). A temperature of 0 is greedy, and 0 turns a filter
    off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    min_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Penalties:
    """This is what changes logits before a choice (luce.h: luce_penalties). Each (token, bias) of `bias` is
    added. The logit of a token that occurred is divided by `repetition` where it is positive, else multiplied
    by it. From that of a generated token count * frequency + presence is subtracted."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()

    @property
    def any(self) -> bool:
        """Says whether a logit can change."""
        return self != Penalties()


@dataclass(frozen=True)
class Logprobs:
    """These are natural logarithms of a token's probability, and of the most probable (token, ...) at its
    place, best first. The probabilities are the model's softmax as it is, without temperature, penalties or a
    grammar."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Form(IntEnum):
    """What the candidates of a draft are (luce.h: luce_form): a chain, each from those before it; a list for each
    depth, whatever was chosen above; or for each depth a list behind each candidate of the depth above."""

    CHAIN = 0
    INDEPENDENT = 1
    CONDITIONAL = 2


@dataclass(frozen=True)
class DrafterParams:
    """How an engine drafts with the model's drafter of this index: at most `n_draft` tokens a round, which 0
    leaves to the drafter, among the first `n_part` tokens of the vocabulary, or with 0 among all."""

    drafter: int = 0
    n_draft: int = 0
    n_part: int = 0


@dataclass(frozen=True)
class DrafterInfo:
    """A drafter of a model's or an engine's list (luce.h: luce_drafter_info). `kind` is "nextn", "assistant" or
    "dflash", `form` a Form, and `n_block` counts the rows of the step that drafts all at once; 0 means that a step
    drafts one token. Conditional lists have `n_list` candidates of each depth."""

    STRUCT: ClassVar[str] = "luce_drafter_info"

    kind: str
    form: int
    n_draft: int
    n_block: int
    n_list: int
    n_part: int
    drafter: int
    has_kv: int


CHAINS = ("nextn", "assistant")  # These kinds of drafters chain: a head drafts of one of them.


class Source(IntEnum):
    """A drafter by what it is, and not by its place in an engine's list: a head (a NextN head, or an assistant), a
    DFlash drafter, or a head that drafts among the first tokens of the vocabulary alone, which costs less."""

    NEXTN = 0
    DFLASH = 1
    PART = 2

    @staticmethod
    def of(drafter: DrafterInfo) -> Source | None:
        """Returns what an entry of a list is; None where Python has no word for it."""
        if drafter.kind in CHAINS:
            return Source.PART if drafter.n_part else Source.NEXTN
        return Source.DFLASH if drafter.kind == "dflash" else None


def first(drafters: tuple[DrafterInfo, ...], source: Source) -> int | None:
    """Returns the index of the first drafter of a list that is a `source`, or None."""
    return next((index for index, each in enumerate(drafters) if Source.of(each) is source), None)


@dataclass(frozen=True)
class EngineParams:
    """Says how an engine is opened. 0 and None mean the core's default, which luce.h gives for each field
    (luce_engine_params).

    `n_ctx` counts the positions of a sequence, `n_pages` KV pages, `n_rows` the most rows of a sequence in a
    step, `n_top` the candidates that are kept of each draft, and `n_chunk` the rows of a prefill step.
    `drafters` is the engine's list of drafters. Before these, the list has what three fields ask for: the model's
    first head, where `n_draft` counts its most drafts of a round, with `n_part` once more, among so many
    first tokens, and where `blocks` is 1 its first DFlash drafter. With `gaps` 1 prompts may leave text out, and with
    `scores` 1 verifies say what their rows give each position (Sequence.scores). Where experts are at home in host
    memory, `n_expert_slots` of each layer have a slot on the device.
    """

    n_ctx: int = 0
    n_sequences: int = 0
    n_checkpoints: int = 0
    n_pages: int = 0
    n_rows: int = 0
    n_draft: int = 0
    blocks: int = 0
    n_top: int = 0
    n_part: int = 0
    n_chunk: int = 0
    n_threads: int = 0
    kv_type: str | None = None
    drafters: tuple[DrafterParams, ...] = ()
    gaps: int = 0
    scores: int = 0
    n_expert_slots: int = 0


@dataclass(frozen=True)
class FileInfo:
    """These are facts of the container, with sizes in bytes over all parts."""

    STRUCT: ClassVar[str] = "luce_file_info"

    size_bytes: int
    n_kv: int
    n_tensors: int
    version: int
    n_parts: int


@dataclass(frozen=True)
class Tensor:
    """This is one tensor, whose `shape` is in ggml order, fastest first."""

    name: str
    type_name: str
    type: int
    shape: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True)
class ModelInfo:
    """This is an opened model, whose `device` is as resolved. `n_nextn` counts the NextN blocks in its file,
    and `n_drafters` the `drafters` that are loaded."""

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
    n_drafters: int
    drafters: tuple[DrafterInfo, ...] = field(default=(), kw_only=True)

    @property
    def has_head(self) -> bool:
        """Says whether a NextN head or an assistant is loaded."""
        return first(self.drafters, Source.NEXTN) is not None


@dataclass(frozen=True)
class TowerInfo:
    """An opened vision tower: rows have width `n_out`, and it is `n_embd` wide itself. A patch has `patch` pixels a
    side, and a row `merge` patches. `identity` tells towers apart that make other rows. An image has at most `max_rows`
    rows, which take `scratch_bytes` of memory; a GPU holds them."""

    STRUCT: ClassVar[str] = "luce_tower_info"

    weight_bytes: int
    identity: int
    scratch_bytes: int
    max_rows: int
    n_out: int
    n_embd: int
    n_layer: int
    patch: int
    merge: int


@dataclass(frozen=True)
class EngineInfo:
    """This is an opened engine: its sizes as resolved, what is free now, its bytes on the device, and its list of
    drafters. A prompt may be cut at multiples of `n_cut` tokens without a bit changing. With `whole_images` rows of an
    image see each other: a prompt is not cut within them, and may be cut ahead of and behind them. In `n_expert_layers`
    layers, `n_expert_slots` of `n_experts` have a slot on the device, and the others are read in host memory."""

    STRUCT: ClassVar[str] = "luce_engine_info"

    memory_bytes: int
    n_ctx: int
    n_sequences: int
    n_checkpoints: int
    n_pages: int
    n_rows: int
    n_drafters: int
    n_top: int
    n_chunk: int
    n_threads: int
    n_cut: int
    pages_free: int
    sequences_free: int
    checkpoints_free: int
    whole_images: bool
    n_expert_layers: int = 0
    n_experts: int = 0
    n_expert_slots: int = 0
    drafters: tuple[DrafterInfo, ...] = field(default=(), kw_only=True)

    @property
    def n_draft(self) -> int:
        """Returns the most drafts of a head in a round, 0 without one."""
        at = first(self.drafters, Source.NEXTN)
        return 0 if at is None else self.drafters[at].n_draft

    @property
    def n_part(self) -> int:
        """Returns how many tokens Source.PART drafts among, 0 without it."""
        at = first(self.drafters, Source.PART)
        return 0 if at is None else self.drafters[at].n_part

    @property
    def n_block(self) -> int:
        """Returns the rows of a DFlash block, 0 without a drafter."""
        at = first(self.drafters, Source.DFLASH)
        return 0 if at is None else self.drafters[at].n_block


@dataclass(frozen=True)
class SequenceInfo:
    """This is a sequence with n_past committed tokens and n_verified rows that are not committed yet. It
    holds n_pages KV pages, alone or shared. Where it is `failed`, only reset, resume and close work."""

    STRUCT: ClassVar[str] = "luce_sequence_info"

    n_past: int
    n_verified: int
    n_pages: int
    failed: int


@dataclass(frozen=True)
class CheckpointInfo:
    """This is a checkpoint of n_past committed tokens. `size_bytes` is the size of what its save()
    returns."""

    STRUCT: ClassVar[str] = "luce_checkpoint_info"

    size_bytes: int
    n_past: int
    on_device: int


@dataclass(frozen=True)
class Cost:
    """This is what a step took when the engine was opened. With drafts 0 it is a verify of `rows` rows, with
    1 one more draft of the head for each of `rows` sequences, with 2 a DFlash block for each of them,
    with 3 one more draft of the head among a part of the vocabulary for each of them, and with 4 what the
    head is fed of `rows` rows that were verified in steps of one row each."""

    rows: int
    drafts: int
    seconds: float
