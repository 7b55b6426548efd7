"""Says what a GGUF says: facts of the file, no decisions (those are plan.py's)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from luce.errors import ArgumentError, FileError, UnsupportedError
from luce.files.gemma4 import BUDGETS, MERGE, PROJECTOR, UNIFIED
from luce.native import File
from luce.native import Tower as OpenTower
from luce.native.files import is_assistant
from luce.native.structs import EngineParams, Memory, Tensor

T = TypeVar("T")
_MISSING: Any = object()

# This is llama.cpp's llama_ftype, which quantisers write to general.file_type.
_FILE_TYPES = {
    **dict(enumerate(("F32", "F16", "Q4_0", "Q4_1"))),
    **dict(enumerate(("Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L"), start=7)),
    **dict(enumerate(("Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K"), start=14)),
    **dict(enumerate(("IQ2_XXS", "IQ2_XS", "Q2_K_S", "IQ3_XS", "IQ3_XXS", "IQ1_S"), start=19)),
    **dict(enumerate(("IQ4_NL", "IQ3_S", "IQ3_M", "IQ2_S", "IQ2_M", "IQ4_XS", "IQ1_M"), start=25)),
    32: "BF16",
    **dict(enumerate(("TQ1_0", "TQ2_0", "MXFP4_MOE", "NVFP4", "Q1_0", "Q2_0"), start=36)),
}
_BLOCK = re.compile(r"blk\.(\d{1,9})\.(nextn\.|attn_norm\.weight$)?")
_MARKOV = ("markov_w1.weight", "dflash.dspark.markov.w1", "dflash.dspark.markov.w1.weight")  # Older files' are last.
_KV = re.compile(r"blk\.\d{1,9}\.attn_(?:k|v|k_norm)\.weight")
_BESIDE = ("clip", "eagle", "eagle3")  # Projectors and heads of other kinds go with a model.
# Names of the centroids of an assistant's clusters, and how many of these a draft looks at where the file does not say
# it: as the core has them.
CENTROIDS = ("masked_embd_centroids.weight", "mtp.centroids.weight", "masked_embedding.centroids.weight")
CLUSTERS_USED = 32
_BY_ROW = ("IQ1_", "IQ2_", "IQ3_", "NVFP4")  # On a GPU luce has no matmul of its own for these.
# In place of these a GPU has a type that holds the same values, in so many bits a weight.
_RECODED = {"MXFP4": "Q5_0, of 5.5 bits", "TQ1_0": "Q4_0, of 4.5 bits", "TQ2_0": "Q4_0, of 4.5 bits"}


@dataclass(frozen=True)
class Quantization:
    """Says how many tensors have one weight type, and their bytes."""

    tensors: int
    bytes: int


@dataclass(frozen=True)
class DFlash:
    """These are a drafter's settings as its file gives them; None where it does not. `target_layers` are the
    layers whose outputs are tapped, counted from 1. `causal` holds for all layers, `causal_pattern` for each.

    `target_architecture` (which older files' own architecture begins with), `target_embedding`, `target_vocabulary` and
    `target_blocks` (the fewest) say which models it drafts for.
    `kv_bytes_per_position` is that of its context, in F16.

    `kind` is "DFlash", "DFlash2" (with convolutions and a selector) or "DSpark" (with a Markov head), and `drafts`
    counts the tokens of a block that are drafts. Those of a block's rows are all where the anchor's row drafts too
    (`sample_from_anchor`): a Markov head's file that does not say so means that.
    `draft_vocabulary` counts the tokens that it drafts among.
    """

    block_size: int | None
    target_layers: list[int] | None
    mask_token_id: int | None
    sliding_window: int | None
    sliding_window_pattern: list[bool] | None
    causal: bool | None
    causal_pattern: list[bool] | None
    final_logit_softcapping: float | None
    embedding_scale: float | None
    target_architecture: str | None
    target_embedding: int | None
    target_vocabulary: int | None
    target_blocks: int | None
    kv_bytes_per_position: int | None
    kind: str
    drafts: int | None
    sample_from_anchor: bool
    conv_kernel_size: int | None
    conv_group_size: int | None
    selector_rank: int | None
    selector_top_k: int | None
    markov_rank: int | None
    confidence_head: bool
    attention_sinks: bool
    draft_vocabulary: int | None
    own_embedding: bool
    own_output: bool
    logit_scale: float | None

    @property
    def what(self) -> str:
        """What the drafter is, in a line: its kind, its parts, and how many tokens it drafts."""
        parts = []
        if self.conv_kernel_size:
            groups = f" in groups of {self.conv_group_size}" if self.conv_group_size else ""
            parts.append(f"convolutions of {self.conv_kernel_size} taps{groups}")
        if self.selector_rank:
            over = f" over the top {self.selector_top_k}" if self.selector_top_k else ""
            parts.append(f"a selector of rank {self.selector_rank}{over}")
        if self.markov_rank:
            parts.append(f"a Markov head of rank {self.markov_rank}")
        if self.confidence_head:
            parts.append("a confidence head")
        if self.attention_sinks:
            parts.append("attention sinks")
        *first, last = parts or [""]
        having = f" with {', '.join(first)}{' and ' if first else ''}{last}" if last else ""
        known = self.drafts is not None
        rows = f", {self.drafts} drafts of a block of {self.block_size}" if known else ", of a block of unknown size"
        reduced = f", among {self.draft_vocabulary:,} tokens" if self.draft_vocabulary else ""
        return f"{self.kind}{having}{rows}{reduced}"

    @property
    def fits(self) -> str:
        """Which models it drafts for, in a line."""
        said = [
            f"{label} {value:,}"
            for label, value in (("embedding", self.target_embedding), ("vocabulary", self.target_vocabulary))
            if value is not None
        ]
        if self.target_blocks is not None:
            said.append(f"{self.target_blocks:,} blocks or more")
        of = f"{self.target_architecture} models" if self.target_architecture else "models"
        return f"{of} with {', '.join(said)}" if said else "unknown: the file does not say"


@dataclass(frozen=True)
class Layers:
    """The kinds of layers of a model in which some have a window, as its file gives them; None where it does not. They
    are sliding ones, whose rows see a window of positions, or global ones; `_swa` marks sizes of the sliding ones.

    `values_are_keys` says that global layers have no V. The last `shared_kv_layers` read K and V of a layer before
    them. `kv_bytes_per_position` and `kv_bytes_per_position_swa` are the F16 K and V of all layers of a kind that have
    them. An assistant drafts for models of width `target_embedding`; where its vocabulary is ordered in `clusters`, a
    draft is one of the tokens of `clusters_used` of them.
    """

    global_layers: int | None
    sliding_layers: int | None
    sliding_window: int | None
    key_length: int | None
    key_length_swa: int | None
    head_count_kv: int | None
    head_count_kv_swa: int | None
    values_are_keys: bool
    shared_kv_layers: int
    per_layer_embedding: int
    final_logit_softcapping: float | None
    kv_bytes_per_position: int | None
    kv_bytes_per_position_swa: int | None
    target_embedding: int | None
    clusters: int | None
    clusters_used: int | None

    @property
    def what(self) -> str:
        """What its layers are, in a line."""
        if self.global_layers is None:
            return "unknown: the file does not say which of them slide"
        parts = [
            f"{self.global_layers} global of {self.head_count_kv} KV heads of {self.key_length}",
            f"{self.sliding_layers} sliding of {self.head_count_kv_swa} of {self.key_length_swa}"
            f" with a window of {self.sliding_window}",
        ]
        if self.values_are_keys:
            parts.append("V is K in the global ones")
        if self.shared_kv_layers:
            parts.append(f"the last {self.shared_kv_layers} read others' K and V")
        if self.per_layer_embedding:
            parts.append(f"each with an embedding of {self.per_layer_embedding}")
        if self.clusters:
            parts.append(f"drafts of {self.clusters_used} of {self.clusters} clusters of the vocabulary")
        return ", ".join(parts)


@dataclass(frozen=True)
class Tower:
    """A vision tower's settings as its file gives them; None where it does not. Its rows have the width of the models
    that it fits, `projection_dim`. Images take `min_rows` to `max_rows` rows each. `runs` says whether luce runs it."""

    projector_type: str | None
    block_count: int | None
    embedding_length: int | None
    head_count: int | None
    patch_size: int | None
    spatial_merge_size: int | None
    projection_dim: int | None
    min_rows: int | None
    max_rows: int | None
    runs: bool

    @property
    def what(self) -> str:
        """What the tower is, in a line."""
        rows = "unknown rows" if self.min_rows is None else f"{self.min_rows} to {self.max_rows} rows"
        return f"{self.projector_type}, {self.block_count} blocks of width {self.embedding_length}, {rows} an image"


@dataclass(frozen=True)
class Facts:
    """This is what one GGUF holds. Sizes and memory are in bytes; a value is None where the file does not
    give it.

    `kind` is "model" (a trunk), "head" (NextN blocks without their trunk), "drafter", "assistant" (which drafts
    with its target's K and V), "tower" (which sees images for a model) or "other". `supported` says that luce can
    generate with it as a model; else `reasons` says why not. `notes` say what else there is to know of running it, and
    `warnings` are those of them that whoever runs it should be told.

    `block_count` and `nextn_predict_layers` are those of the tensors, where the keys do not fit them.

    `experts` is how many each mixture has, `experts_used` how many of them a token goes through.
    `active_parameters` and `bytes_per_token` are the weights that a plain step of one token reads: of the
    trunk, with the experts that are used, and one row of an embedding that is not the output matrix too.
    """

    kind: str
    architecture: str
    name: str | None
    file_type: str | None
    size_bytes: int
    parameters: int
    block_count: int | None
    nextn_predict_layers: int
    embedding_length: int | None
    context_length: int | None
    vocab_size: int | None
    experts: int | None
    experts_used: int | None
    active_parameters: int | None
    bytes_per_token: int | None
    quantization: dict[str, Quantization]
    tokenizer: str | None
    chat_template: bool
    supported: bool
    reasons: list[str]
    notes: list[str]
    context: int | None
    memory: Memory | None
    dflash: DFlash | None
    layers: Layers | None
    tower: Tower | None
    warnings: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Returns the object that `luce probe-gguf --json` prints. Warnings are among its notes."""
        return {name: value for name, value in asdict(self).items() if name != "warnings"}


def fact(kv: Mapping[str, Any], key: str, kind: type[T], default: Any = _MISSING) -> T:
    """Returns kv[key], which has to be of `kind` (an int passes for a float). FileError names the key, what
    was expected and what was found. It is also raised where the key is missing and there is no default."""
    if key not in kv:
        if default is _MISSING:
            raise FileError(f"key {key} is missing")
        return default  # type: ignore[no-any-return]
    value = kv[key]
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise FileError(f"key {key}: expected {_named(kind)}, found {_named(type(value))}")
    if isinstance(value, float) and not math.isfinite(value):
        raise FileError(f"key {key}: expected a finite number, found {value}")
    return value


def whole_numbers(kv: Mapping[str, Any], key: str, default: Any = _MISSING) -> Any:
    """Returns an array of numbers as a list; they have to be integers or booleans. Raises FileError as
    fact() does."""
    values = fact(kv, key, memoryview, default)
    if values is default:
        return default
    if values.format in "fd":
        raise FileError(f"key {key}: expected an array of whole numbers, found one of floating-point numbers")
    return values.tolist()


def _named(kind: type) -> str:
    if kind is memoryview:
        return "an array of numbers"
    return "an array of strings" if kind is list else f"a value of type {kind.__name__}"


def probe(file: File, ctx: int | None = None, device: str = "auto") -> Facts:
    """Returns the facts of `file`. Its memory is that of an engine with one sequence of `ctx` positions
    (with None as many as generate would take). Raises FileError where a key has the wrong type, and
    ArgumentError where the model was trained for fewer positions."""
    kv, tensors = file.kv, file.tensors
    architecture = fact(kv, "general.architecture", str)
    blocks = _blocks(kv, architecture, tensors)
    kind = _kind(kv, architecture, tensors, blocks)
    context_length = _number(kv, f"{architecture}.context_length")
    if ctx is not None and context_length is not None and ctx > context_length:
        raise ArgumentError(f"a context of {ctx} was asked, the model was trained for {context_length}")
    context = ctx or (None if context_length is None else min(context_length, 4096))
    memory, reasons = None, _reasons_of_kind(kind, kv, architecture)
    tower = _tower(file, reasons) if kind == "tower" else None
    active, read = _of_a_token(kv, architecture, tensors, blocks) if kind == "model" else (None, None)
    warnings = blocks.lacking if kind == "model" else []
    if kind == "model":
        try:
            memory = file.plan_memory(device, EngineParams(n_ctx=context or 0))
        except (UnsupportedError, FileError) as error:
            reasons.append(str(error))
    return Facts(
        kind=kind,
        architecture=architecture,
        name=fact(kv, "general.name", str, None),
        file_type=_file_type(kv, tensors),
        size_bytes=file.info.size_bytes,
        parameters=sum(_elements(tensor) for tensor in tensors),
        block_count=blocks.count,
        nextn_predict_layers=blocks.nextn,
        embedding_length=_number(kv, f"{architecture}.embedding_length"),
        context_length=context_length,
        vocab_size=_vocab_size(kv, architecture, tensors),
        experts=_number(kv, f"{architecture}.expert_count"),
        experts_used=_number(kv, f"{architecture}.expert_used_count"),
        active_parameters=active,
        bytes_per_token=read,
        quantization=_quantization(tensors),
        tokenizer=_tokenizer(kv),
        chat_template="tokenizer.chat_template" in kv,
        supported=not reasons,
        reasons=reasons,
        notes=[*warnings, *blocks.unsaid, *_notes(tensors)] if kind not in ("other", "tower") else [],
        context=context,
        memory=memory,
        dflash=_dflash(kv, architecture, tensors) if kind == "drafter" else None,
        layers=_layers(kv, architecture, tensors) if kind in ("model", "assistant") else None,
        tower=tower,
        warnings=warnings,
    )


def what_it_holds(file: File) -> str | None:
    """Says what a file has in place of a model; None means that it is one, of whatever architecture. Raises
    FileError as probe() does."""
    architecture = fact(file.kv, "general.architecture", str)
    kind = _kind(file.kv, architecture, file.tensors, _blocks(file.kv, architecture, file.tensors))
    held = fact(file.kv, "general.type", str, "model")
    return {
        "model": None,
        "head": "a NextN head",
        "drafter": "a DFlash drafter",
        "assistant": "a Gemma 4 assistant",
        "tower": "a vision tower",
        "other": f"data of type {held if held != 'model' else architecture}",
    }[kind]


def _number(kv: Mapping[str, Any], key: str) -> int | None:
    """Returns what the key counts. Raises FileError as fact() does."""
    count = fact(kv, key, int, None)
    if count is not None and count < 0:
        raise FileError(f"key {key}: expected a number of at least 0, found {count}")
    return count


def is_drafter(architecture: str) -> bool:
    """Says whether general.architecture is that of a DFlash drafter. Older files have `dflash-draft`, which
    the target's architecture and a dash may precede."""
    return architecture in ("dflash", "dflash-draft") or architecture.endswith("-dflash-draft")


@dataclass(frozen=True)
class _Blocks:
    """These are a file's blocks, and how many of them are NextN heads. `lacking` tells of heads that its keys
    promise and that are not there, and `unsaid` of one that they do not mention."""

    count: int | None
    nextn: int
    lacking: list[str] = field(default_factory=list)
    unsaid: list[str] = field(default_factory=list)


def _blocks(kv: Mapping[str, Any], architecture: str, tensors: list[Tensor]) -> _Blocks:
    """Counts the blocks as the core does: tensors decide whether the last ones are heads (nextn.*), the
    trunk's, or not there. Converters copy the keys from a configuration, though a checkpoint has no head."""
    key = f"{architecture}.nextn_predict_layers"
    count, promised = _number(kv, f"{architecture}.block_count"), _number(kv, key) or 0
    present, heads, whole = set[int](), set[int](), set[int]()
    for tensor in tensors:
        if match := _BLOCK.match(tensor.name):
            block = int(match[1])
            present.add(block)
            if match[2]:
                (heads if match[2] == "nextn." else whole).add(block)
    if count is None or promised >= count:
        return _Blocks(count, promised)
    expected = range(count - promised, count)
    absent = [block for block in expected if block not in present]
    lacking = [block for block in expected if block not in heads and (block in absent or block in whole)]
    heads |= {block for block in expected if block in present and block not in whole}
    said = []
    if lacking:
        named = " and ".join(f"blk.{block}" for block in lacking)
        they = "is" if len(lacking) == 1 else "are"
        how = "not in the file" if lacking == absent else "no head: without nextn.*"
        why = f"{key} is {promised}, and {named} {they} {how}"
        said.append(f"the file lacks the NextN head that it promises, and runs without: {why}")
    if not heads:
        return _Blocks(count - len(absent), 0, said)
    first = min(heads)
    unsaid = [f"blk.{first} is taken for a NextN head, as its tensors are, though {key} is 0 or missing"]
    return _Blocks(first + len(heads), len(heads), said, [] if promised else unsaid)


def _kind(kv: Mapping[str, Any], architecture: str, tensors: list[Tensor], blocks: _Blocks) -> str:
    if is_drafter(architecture):
        return "drafter"
    if is_assistant(architecture):
        return "assistant"
    if architecture == "clip" and tensors and fact(kv, "clip.has_vision_encoder", bool, False):
        return "tower"
    if not tensors or architecture in _BESIDE or fact(kv, "general.type", str, "model") != "model":
        return "other"
    trunk = any(tensor.name.startswith("blk.0.") for tensor in tensors)
    heads = blocks.nextn > 0 or blocks.lacking
    return "head" if heads and not trunk else "model"


def _reasons_of_kind(kind: str, kv: Mapping[str, Any], architecture: str) -> list[str]:
    width = _target_width(kv, architecture)
    fitting = "a Gemma 4 model" if width is None else f"a Gemma 4 model of width {width}"
    return {
        "assistant": [f"an assistant: it drafts for {fitting}, it does not generate alone"],
        "head": ["head only: NextN blocks without their trunk; it drafts beside a model that is one"],
        "drafter": [f"a {architecture} drafter: it drafts for a target model, it does not generate alone"],
        "tower": ["a vision tower: it sees images for a model, it does not generate alone"],
        "other": ["the file holds no model"],
    }.get(kind, [])


def _target_width(kv: Mapping[str, Any], architecture: str) -> int | None:
    """Returns the width of the models that an assistant drafts for. Forks of llama.cpp have a key of their own."""
    width = _number(kv, f"{architecture}.embedding_length_out")
    return _number(kv, f"{architecture}.n_embd_backbone") if width is None else width


def _clusters(kv: Mapping[str, Any], architecture: str, tensors: list[Tensor]) -> int | None:
    """Counts the centroids of an assistant's ordered vocabulary, which the core reads by these names."""
    if not is_assistant(architecture) or not fact(kv, f"{architecture}.use_ordered_embeddings", bool, True):
        return None
    return next((tensor.shape[-1] for tensor in tensors if tensor.name in CENTROIDS), None)


def _tower(file: File, reasons: list[str]) -> Tower:
    """Returns what the file says of its tower, and adds to the reasons why luce does not run it."""
    kv, runs = file.kv, True
    try:
        with OpenTower(file):
            pass
    except (UnsupportedError, FileError) as error:
        reasons.append(str(error).removeprefix(f"{file.path}: "))
        runs = False

    def number(key: str) -> int | None:
        return _number(kv, f"clip.vision.{key}")

    # Files with parts that hear as well say it of each part.
    projector = fact(kv, "clip.vision.projector_type", str, None) or fact(kv, "clip.projector_type", str, None)
    patch, merge = number("patch_size"), number("spatial_merge_size")
    pixels = (patch * merge) ** 2 if patch and merge else None
    least = most = None  # transformers' limits, which files do not have
    if projector in (PROJECTOR, UNIFIED):
        merge = number("projector.scale_factor") or MERGE
        least, most = (BUDGETS[0], BUDGETS[-1]) if runs else (None, None)
    elif runs and pixels:
        least, most = 65536 // pixels, 16777216 // pixels
    return Tower(
        projector_type=projector,
        block_count=number("block_count"),
        embedding_length=number("embedding_length"),
        head_count=number("attention.head_count"),
        patch_size=patch,
        spatial_merge_size=merge,
        projection_dim=number("projection_dim"),
        min_rows=least,
        max_rows=most,
        runs=runs,
    )


def _notes(tensors: list[Tensor]) -> list[str]:
    """Says what is otherwise on a GPU: which types it holds as others, and which matrices are multiplied a
    row at a time. Of an embedding that is not the output matrix too only rows are looked up there, and
    experts of these types are refused."""
    notes = [
        f"a GPU holds {kind} as {other} a weight: with the same values, in more memory"
        for kind, other in _RECODED.items()
        if any(tensor.type_name == kind for tensor in tensors)
    ]
    has_output = any(tensor.name == "output.weight" for tensor in tensors)
    by_row = [
        tensor
        for tensor in tensors
        if tensor.type_name.startswith(_BY_ROW)
        and not (has_output and tensor.name == "token_embd.weight")
        and "exps." not in tensor.name
        and "shexp." not in tensor.name
    ]
    if not by_row:
        return notes
    share = sum(tensor.size_bytes for tensor in by_row) / sum(tensor.size_bytes for tensor in tensors)
    types = " and ".join(_quantization(by_row))
    return [
        *notes,
        f"on a GPU, ggml multiplies the {types} matrices ({share:.0%} of the bytes) a row at a time: that is "
        "exact, but each drafted token reads them again, so drafts gain little",
    ]


def _file_type(kv: Mapping[str, Any], tensors: list[Tensor]) -> str | None:
    """Returns general.file_type by name, else the type that holds most bytes."""
    named = _FILE_TYPES.get(_number(kv, "general.file_type") or 0)
    if "general.file_type" in kv and named:
        return named
    by_type = _quantization(tensors)
    return max(by_type, key=lambda name: by_type[name].bytes, default=None)


def _quantization(tensors: list[Tensor]) -> dict[str, Quantization]:
    """Returns the share of each type by its name, most bytes first."""
    count = Counter(tensor.type_name for tensor in tensors)
    size: Counter[str] = Counter()
    for tensor in tensors:
        size[tensor.type_name] += tensor.size_bytes
    return {name: Quantization(count[name], total) for name, total in size.most_common()}


def _elements(tensor: Tensor) -> int:
    return math.prod(tensor.shape)


def _of_a_token(
    kv: Mapping[str, Any], architecture: str, tensors: list[Tensor], blocks: _Blocks
) -> tuple[int, int]:
    """Returns the weights that a plain step of one token reads, and their bytes."""
    experts = _number(kv, f"{architecture}.expert_count") or 1
    used = _number(kv, f"{architecture}.expert_used_count") or experts
    trunk = (blocks.count or 0) - blocks.nextn
    has_output = any(tensor.name == "output.weight" for tensor in tensors)
    looked_up = ("per_layer_token_embd.weight", *(("token_embd.weight",) if has_output else ()))
    shared = _number(kv, f"{architecture}.attention.shared_kv_layers") or 0
    elements = size = 0
    for tensor in tensors:
        block = _BLOCK.match(tensor.name)
        if block and int(block[1]) >= trunk > 0:
            continue
        part, whole = 1, 1
        if "_exps." in tensor.name:
            part, whole = used, experts
        elif tensor.name in looked_up and len(tensor.shape) > 1:
            whole = tensor.shape[1]
        elif block and int(block[1]) >= trunk - shared and _KV.fullmatch(tensor.name):
            continue  # It is there, and no layer reads it.
        elements += _elements(tensor) * part // whole
        size += tensor.size_bytes * part // whole
    return elements, size


def _vocab_size(kv: Mapping[str, Any], architecture: str, tensors: list[Tensor]) -> int | None:
    """Returns the rows of token_embd {E, V}, else what the key says, else the number of the tokenizer's
    tokens."""
    for tensor in tensors:
        if tensor.name == "token_embd.weight" and len(tensor.shape) > 1:
            return tensor.shape[1]
    size = _number(kv, f"{architecture}.vocab_size")
    if size is None and "tokenizer.ggml.tokens" in kv:
        size = len(fact(kv, "tokenizer.ggml.tokens", list))
    return size


def _tokenizer(kv: Mapping[str, Any]) -> str | None:
    """Returns the model and the pre-tokenizer: "gpt2/llama-bpe"."""
    parts = [fact(kv, f"tokenizer.ggml.{key}", str, None) for key in ("model", "pre")]
    return "/".join(part for part in parts if part) or None


def _dflash(kv: Mapping[str, Any], architecture: str, tensors: list[Tensor]) -> DFlash:
    """Returns the drafter's settings. Older architectures put `dflash.` between the architecture's prefix
    and the key, and count the layers whose outputs are tapped from 0."""

    def key(name: str) -> str:
        prefixes = (architecture, f"{architecture}.dflash", "dflash")
        return f"{next((p for p in prefixes if f'{p}.{name}' in kv), architecture)}.{name}"

    def setting(name: str, kind: type[T]) -> T | None:
        return fact(kv, key(name), kind, None)

    def pattern(name: str) -> list[bool] | None:
        values = whole_numbers(kv, key(name), None)
        return None if values is None else [bool(layer) for layer in values]

    taps = whole_numbers(kv, key("target_layers"), None)
    if taps is None and (older := whole_numbers(kv, key("target_layer_ids"), None)) is not None:
        taps = [layer + 1 for layer in older]
    older = architecture.endswith("-dflash-draft")
    shape = ("block_count", "attention.head_count_kv", "attention.key_length")
    sizes = [setting(name, int) for name in shape]
    mask = _number(kv, "tokenizer.ggml.mask_token_id")
    held = {tensor.name: tensor.shape for tensor in tensors}
    head = next((held[name] for name in _MARKOV if name in held), None)
    block, markov = _number(kv, key("block_size")), head[0] if head else _number(kv, key("markov_rank")) or None
    conv, group, rank, best = (
        _number(kv, key(name)) or None
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    )
    from_anchor = fact(kv, key("sample_from_anchor"), bool, markov is not None)
    return DFlash(
        kind="DSpark" if markov else "DFlash2" if conv or rank else "DFlash",
        drafts=None if block is None else block - (not from_anchor),
        sample_from_anchor=from_anchor,
        conv_kernel_size=conv,
        conv_group_size=group,
        selector_rank=rank,
        selector_top_k=best,
        markov_rank=markov,
        confidence_head="conf_proj.weight" in held,
        attention_sinks=any(name.endswith("attn_sinks.weight") for name in held),
        draft_vocabulary=held["d2t"][0] if held.get("d2t") else None,
        own_embedding="token_embd.weight" in held,
        own_output="output.weight" in held,
        logit_scale=setting("logit_scale", float),
        block_size=block,
        target_layers=taps,
        mask_token_id=setting("mask_token_id", int) if mask is None else mask,
        sliding_window=setting("attention.sliding_window", int),
        sliding_window_pattern=pattern("attention.sliding_window_pattern"),
        causal=setting("attention.causal", bool),
        causal_pattern=pattern("attention.causal_pattern"),
        final_logit_softcapping=setting("final_logit_softcapping", float),
        embedding_scale=setting("embedding_scale", float),
        target_architecture=architecture.removesuffix("-dflash-draft") if older else None,
        target_embedding=setting("embedding_length", int),
        target_vocabulary=_vocab_size(kv, architecture, tensors),
        target_blocks=max(taps) if taps else None,
        kv_bytes_per_position=None if None in sizes else 2 * 2 * math.prod(size or 0 for size in sizes),
    )


def _layers(kv: Mapping[str, Any], architecture: str, tensors: list[Tensor]) -> Layers | None:
    """Returns the kinds of layers where some have a window. What differs between layers is an array of its key."""
    if f"{architecture}.attention.sliding_window" not in kv:
        return None

    def number(name: str) -> int | None:
        return _number(kv, f"{architecture}.{name}")

    pattern = f"{architecture}.attention.sliding_window_pattern"  # Of other models it may be a number.
    given = isinstance(kv.get(pattern), memoryview)
    kinds = [bool(layer) for layer in whole_numbers(kv, pattern)] if given else None
    heads = _of_layers(kv, f"{architecture}.attention.head_count_kv", kinds)
    sizes = {True: number("attention.key_length_swa"), False: number("attention.key_length")}
    shared, names = number("attention.shared_kv_layers") or 0, {tensor.name for tensor in tensors}
    own = [] if kinds is None else kinds[: max(len(kinds) - shared, 0)]
    of_kind = {kind: None if kinds is None else own.count(kind) for kind in (True, False)}
    each = {kind: (of_kind[kind], heads[kind], sizes[kind]) for kind in (True, False)}
    stored = {kind: None if None in parts else 2 * 2 * math.prod(p or 0 for p in parts) for kind, parts in each.items()}
    clusters = _clusters(kv, architecture, tensors)
    return Layers(
        global_layers=None if kinds is None else kinds.count(False),
        sliding_layers=None if kinds is None else kinds.count(True),
        sliding_window=number("attention.sliding_window"),
        key_length=sizes[False],
        key_length_swa=sizes[True],
        head_count_kv=heads[False],
        head_count_kv_swa=heads[True],
        values_are_keys=any(
            not kind and f"blk.{i}.attn_k.weight" in names and f"blk.{i}.attn_v.weight" not in names
            for i, kind in enumerate(own)
        ),
        shared_kv_layers=shared,
        per_layer_embedding=number("embedding_length_per_layer_input") or 0,
        final_logit_softcapping=fact(kv, f"{architecture}.final_logit_softcapping", float, None),
        kv_bytes_per_position=stored[False],
        kv_bytes_per_position_swa=stored[True],
        target_embedding=_target_width(kv, architecture),
        clusters=clusters,
        clusters_used=clusters and min(number("centroid_top_k") or CLUSTERS_USED, clusters),
    )


def _of_layers(kv: Mapping[str, Any], key: str, sliding: list[bool] | None) -> dict[bool, int | None]:
    """Returns a number of sliding layers (True) and of global ones: of a key that has one for all, or one for each."""
    if not isinstance(kv.get(key), memoryview):
        return dict.fromkeys((True, False), _number(kv, key))
    values: list[int] = whole_numbers(kv, key)
    kinds = sliding or []
    return {kind: next((n for n, k in zip(values, kinds, strict=False) if k == kind), None) for kind in (True, False)}
