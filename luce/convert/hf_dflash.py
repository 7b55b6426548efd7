"""Plans block drafters (DFlash, DFlash2, DSpark) as the tensors and keys of a GGUF of architecture dflash.

A drafter is published in one of two layouts. In that of its authors (z-lab, RadixArk, deepseek-ai) config.json is the
drafter's own, and `dflash_config` overrides its top level. In that of speculators the layers are described under
`transformer_layer_config`, and taps are counted from 1 (`aux_hidden_state_layer_ids`). Names and keys of the GGUF are
llama.cpp's. DFlash2 has convolutions around attention and MLP, and a selector; DSpark has a Markov head and may have
a confidence head. What luce does not implement is refused by name: a key or tensor that is silently dropped shows as
low acceptance and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import gguf
import numpy as np

from luce.convert.attention_keys import add_attention_keys
from luce.convert.gguf_output import Planned, slabs
from luce.convert.hf_config import Section, rope_parameters, rope_theta
from luce.convert.safetensors_reader import Checkpoint, as_f32
from luce.errors import FileError, UnsupportedError

ARCH = "dflash"

TOP = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
}
OPTIONAL = {"token_embd.weight": "embed_tokens.weight", "output.weight": "lm_head.weight", "d2t": "d2t"}
SELECTOR = {
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
}
MARKOV = {
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
}
CONFIDENCE = {"conf_proj.weight": "confidence_head.proj.weight", "conf_proj.bias": "confidence_head.proj.bias"}
# Some checkpoints have these names in place of those above.
ALIASES = {
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "confidence_proj.weight": "confidence_head.proj.weight",
    "confidence_proj.bias": "confidence_head.proj.bias",
    "candidate_selector.predecessor_codebook.weight": "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook.weight": "candidate_selector.successor_codebook",
}
BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
CONVOLUTIONS = {
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj.weight": "attention_conv.kernel_projection.weight",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj.weight": "mlp_conv.kernel_projection.weight",
}
SINKS = "attn_sinks.weight", "self_attn.sinks"
# These keys of dflash_config are read here; any other one is a feature that luce lacks.
_KNOWN = {"target_layer_ids", "mask_token_id", "block_size", "use_swa", "swa_window_size", "causal",
          "final_logit_softcapping", "input_embedding_scale", "output_multiplier", "num_target_layers",
          "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "projector_type", "markov_rank",
          "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor",
          "attention_mode"}  # fmt: skip
# These say how a drafter was trained, and nothing of what it computes.
_TRAINING = {"num_anchors", "confidence_head_alpha", "loss_decay_gamma", "ce_loss_alpha", "l1_loss_alpha"}
_REFUSED = ("attention_value_scale",)
# Architectures, and what their drafters are.
_DRAFTERS = {
    "DFlashDraftModel": "DFlash", "DFlashSpeculator": "DFlash", "DFlash2DraftModel": "DFlash2",
    "DFlash2Speculator": "DFlash2", "DSparkDraftModel": "DSpark", "DSparkSpeculator": "DSpark",
    "Qwen3DSparkModel": "DSpark",
}  # fmt: skip
_FEATURES = {
    "DFlash2": ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    "DSpark": ("markov_rank",),
}
# What projector_type and speculators_model_type say.
_KINDS = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}
_HEADS = {
    "gated": "a gated Markov head, whose bias a gate of the hidden row weighs",
    "rnn": "a recurrent Markov head, whose bias depends on all drafts before",
}
_DOMINO = "a Domino drafter, whose GRU over a block's drafts corrects their logits"
# What architectures are that have these in their names.
_NAMED = {"domino": _DOMINO, "gemma4dspark": "a DSpark drafter with layers like Gemma 4's own"}
# Tensors by which drafters are told that no key names.
_TELLING = {
    "markov_head.gate_proj": _HEADS["gated"],
    "markov_head.joint_proj": _HEADS["rnn"],
    "prefix_gru": _DOMINO,
    "embed_proj": _DOMINO,
}


@dataclass(frozen=True)
class Yarn:
    """This is RoPE scaling by YaRN. None means the reader's default."""

    factor: float
    n_ctx_original: int
    attention_factor: float | None
    beta_fast: float | None
    beta_slow: float | None


@dataclass(frozen=True)
class DFlash:
    """Hyperparameters of a drafter. Per-layer lists have n_layer entries."""

    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    rope_dim: int
    n_ctx: int
    n_vocab: int
    n_vocab_draft: int  # The drafter's own head has so many rows: n_vocab, unless it is reduced (d2t).
    rope_base: float
    eps: float
    block_size: int
    target_layer_ids: tuple[int, ...]  # The outputs of these layers are tapped, counted from 0.
    mask_token_id: int | None  # It is None where the config has none.
    sliding: tuple[bool, ...]
    window: int | None
    causal: tuple[bool, ...]  # It says of each layer whether rows of a block see only earlier ones.
    softcap: float | None
    embedding_scale: float | None
    yarn: Yarn | None
    logit_scale: float | None = None
    kind: str = "DFlash"  # Or DFlash2 or DSpark.
    from_anchor: bool = False  # The anchor's row drafts too: row j predicts position p + j + 1, not p + j.
    conv_kernel: int = 0  # A convolution has so many taps, and so many values share what a row adds to them.
    conv_group: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    markov_rank: int = 0
    # The confidence head reads the Markov embedding beside the hidden row. None: that the file has no such head, or
    # that its config leaves both to the tensors.
    confidence: bool | None = None
    confidence_reads_markov: bool | None = None
    tied: bool = False  # The embedding serves as the head.
    offsets: bool = False  # d2t is known to hold distances.


# ---- config.json


def read_hparams(config: Section) -> DFlash:
    """Hyperparameters from config.json; an error names a key that is missing or not implemented."""
    speculators = "transformer_layer_config" in config
    own = config.section("dflash_config")
    both = Section({**config.values, **{k: v for k, v in own.values.items() if v is not None}}, config.where)
    kind = _kind(config, both)
    model = config.section("transformer_layer_config") if speculators else config
    _refuse(config, model, own)
    n_layer, n_head = model.size("num_hidden_layers"), model.size("num_attention_heads")
    n_embd, n_vocab = model.size("hidden_size"), model.size("vocab_size")
    head_dim = model.size("head_dim", n_embd // n_head)
    rope = rope_parameters(model)
    partial = (rope if "partial_rotary_factor" in rope else model).get("partial_rotary_factor", float, 1.0)
    kinds = _layer_kinds(model, n_layer)
    sliding, window = _speculators_window(model, kinds) if speculators else _window(model, own, kinds)
    width = config.size("target_hidden_size", n_embd)
    if width != n_embd:
        raise UnsupportedError(
            f"{config.where}: key target_hidden_size is {width}, hidden_size {n_embd}: luce implements drafters as "
            "wide as their target"
        )
    convolves, markov = kind == "DFlash2", kind == "DSpark"
    if convolves and both.size("draft_vocab_size", n_vocab) != n_vocab:
        raise UnsupportedError(
            f"{config.where}: key draft_vocab_size is {both.size('draft_vocab_size')} of {n_vocab}: luce implements "
            "a selector over all of the vocabulary"
        )
    return DFlash(
        n_layer=n_layer,
        n_embd=n_embd,
        n_ff=model.size("intermediate_size"),
        n_head=n_head,
        n_head_kv=model.size("num_key_value_heads"),
        head_dim=head_dim,
        rope_dim=int(head_dim * partial),
        n_ctx=model.size("max_position_embeddings"),
        n_vocab=n_vocab,
        n_vocab_draft=both.size("draft_vocab_size", n_vocab),
        rope_base=rope_theta(model),
        eps=model.get("rms_norm_eps", float),
        block_size=both.size("block_size"),
        target_layer_ids=_target_layers(both, markov),
        mask_token_id=both.get("mask_token_id", int, None),
        sliding=sliding,
        window=window,
        causal=_speculators_causal(config, kind, kinds) if speculators else _causal(config, own, kinds),
        softcap=both.get("final_logit_softcapping", float, None) or None,
        embedding_scale=both.get("input_embedding_scale", float, None),
        yarn=_yarn(model, rope),
        logit_scale=both.get("output_multiplier", float, None),
        kind=kind,
        # Where the key is missing, authors' DSpark drafters draft with the anchor's row, and all others do not.
        from_anchor=both.get("sample_from_anchor", bool, markov and not speculators),
        conv_kernel=both.size("conv_kernel_size") if convolves else 0,
        conv_group=_conv_group(both, n_embd) if convolves else 0,
        selector_rank=both.size("selector_rank") if convolves else 0,
        selector_top_k=both.size("selector_top_k") if convolves else 0,
        markov_rank=both.size("markov_rank") if markov else 0,
        confidence=both.get("enable_confidence_head", bool, None) if markov else None,
        confidence_reads_markov=both.get("confidence_head_with_markov", bool, None) if markov else None,
        tied=config.get("tie_word_embeddings", bool, model.get("tie_word_embeddings", bool, False)),
        offsets=speculators or markov,
    )


def _kind(config: Section, both: Section) -> str:
    """Returns what the drafter is: DFlash, DFlash2 or DSpark. Raises UnsupportedError for others, by name."""
    kind = _named_kind(config, both)
    head = both.get("markov_head_type", str, "vanilla")
    if head in _HEADS:
        raise _refused(config, f"key markov_head_type is {head!r}: {_HEADS[head]}")
    both.only("markov_head_type", "vanilla")
    if kind == "DSpark":  # DeepSeek-V4's drafters have this architecture's name too, and other layers.
        layers = config.section("transformer_layer_config") if "transformer_layer_config" in config else config
        layers.only("model_type", "qwen3")
    for of, keys in _FEATURES.items():
        for key in keys:
            if kind != of and both.values.get(key):
                raise UnsupportedError(f"{config.where}: key {key} is of {of} drafters, and this is a {kind} drafter")
    return kind


def _named_kind(config: Section, both: Section) -> str:
    """Returns the kind by architecture, projector_type or speculators_model_type."""
    projector = both.get("projector_type", str, "dflash")
    if projector not in _KINDS:
        is_domino = f": {_DOMINO}" if projector == "domino" else ""
        raise _refused(config, f"key projector_type is {projector!r}{is_domino}")
    named = config.get("architectures", list, [])
    for name in named:
        if name not in _DRAFTERS:
            what = next((f", {what}," for word, what in _NAMED.items() if word in str(name).lower()), "")
            raise UnsupportedError(
                f"{config.where}: key architectures: {name}{what} is not DFlashDraftModel, DFlash2DraftModel, "
                "DSparkDraftModel or Qwen3DSparkModel"
            )
    found = {_DRAFTERS[name] for name in named}
    if (said := config.get("speculators_model_type", str, None)) is not None:
        if said not in _KINDS:
            raise _refused(config, f"key speculators_model_type is {said!r}")
        found = {_KINDS[said]}
    if projector != "dflash":
        found = {_KINDS[projector]}
    if not found:  # Older configs name no architecture.
        found = {"DSpark" if "markov_rank" in both else "DFlash2" if "selector_rank" in both else "DFlash"}
    if len(found) > 1:
        raise FileError(f"{config.where}: key architectures is {named}: these are drafters of several kinds")
    return found.pop()


def _refused(config: Section, what: str) -> UnsupportedError:
    return UnsupportedError(f"{config.where}: {what}: luce does not implement it")


def _conv_group(both: Section, n_embd: int) -> int:
    group = both.size("conv_group_size")
    if n_embd % group:
        raise FileError(f"{both.where}: key conv_group_size is {group}, which does not divide hidden_size, {n_embd}")
    return group


def _refuse(config: Section, model: Section, own: Section) -> None:
    for section in (config, model):
        section.only("hidden_act", "silu")
        section.only("attention_bias", False)
        section.only("rope_is_neox_style", True)
    config.only("shift_label", False)
    config.only("draft_ffn_type", "dense")
    own.only("attention_mode", "gqa")
    for key, value in own.values.items():
        if key not in _KNOWN | _TRAINING and value not in (None, False):
            raise UnsupportedError(f"{own.where}: key {key} is {value!r}: luce does not implement it")
    for key in _REFUSED:
        if key in config:
            raise UnsupportedError(f"{config.where}: key {key}: luce does not implement it")


def _target_layers(both: Section, embeddings: bool) -> tuple[int, ...]:
    """Returns the layers whose outputs are tapped, counted from 0. Some tap the `embeddings` too, which are -1.
    speculators counts layers from 1, and the embeddings are 0."""
    key, of_first = "target_layer_ids", 0
    if "aux_hidden_state_layer_ids" in both:
        key, of_first = "aux_hidden_state_layer_ids", 1
    ids = both.get(key, list)
    low, end = of_first - embeddings, both.get("num_target_layers", int, 1 << 16) + of_first
    if not ids or any(type(i) is not int or not low <= i < end for i in ids) or sorted(set(ids)) != ids:
        raise FileError(f"{both.where}: key {key} is {ids}, expected rising ids from {low} and below {end}")
    return tuple(i - of_first for i in ids)


def _layer_kinds(config: Section, n_layer: int) -> list[str]:
    """Returns layer_types; without them, what transformers' Qwen3Config makes of max_window_layers."""
    if "layer_types" in config:
        kinds = config.strings("layer_types", n_layer)
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown:
            raise UnsupportedError(f"{config.where}: key layer_types has {sorted(unknown)}")
        return kinds
    first = n_layer
    if config.get("use_sliding_window", bool, False):
        first = config.get("max_window_layers", int)
    return ["sliding_attention" if i >= first else "full_attention" for i in range(n_layer)]


def _window(config: Section, own: Section, kinds: list[str]) -> tuple[tuple[bool, ...], int | None]:
    """Returns which layers have a window, and its size. dflash_config.use_swa means all of them or none. Else
    they are those of layer_types, where use_sliding_window is true, as in transformers' Qwen3Config."""
    sliding = tuple(kind == "sliding_attention" for kind in kinds)
    if "use_swa" in own:
        sliding = (own.get("use_swa", bool),) * len(kinds)
    elif any(sliding) and "sliding_window" in config and not config.get("use_sliding_window", bool):
        sliding = (False,) * len(kinds)
    if not any(sliding):
        return sliding, None
    section, key = (own, "swa_window_size") if "swa_window_size" in own else (config, "sliding_window")
    return sliding, section.size(key)


def _speculators_window(model: Section, kinds: list[str]) -> tuple[tuple[bool, ...], int | None]:
    """Returns which layers have a window, and its size. In speculators layer_types alone says which."""
    sliding = tuple(kind == "sliding_attention" for kind in kinds)
    return sliding, model.size("sliding_window") if any(sliding) else None


def _speculators_causal(config: Section, kind: str, kinds: list[str]) -> tuple[bool, ...]:
    """Returns which layers are causal: those with a window, unless sliding_window_non_causal says otherwise, which
    is so of DFlash2 where it is missing."""
    both_ways = config.get("sliding_window_non_causal", bool, kind == "DFlash2")
    return tuple(each == "sliding_attention" and not both_ways for each in kinds)


def _causal(config: Section, own: Section, kinds: list[str]) -> tuple[bool, ...]:
    """Returns for each layer is_causal, else dflash_config.causal, else whether its attention slides."""
    for section, key in ((config, "is_causal"), (own, "causal")):
        if key in section:
            return (section.get(key, bool),) * len(kinds)
    return tuple(kind == "sliding_attention" for kind in kinds)


def _yarn(config: Section, rope: Section) -> Yarn | None:
    """Reads RoPE scaling from rope_parameters, or from rope_scaling as older configs have it."""
    scaling = rope if "rope_type" in rope or "type" in rope else config.section("rope_scaling")
    kind = scaling.get("rope_type", str, None) or scaling.get("type", str, "default")
    if kind == "default":
        return None
    if kind != "yarn":
        raise UnsupportedError(f"{scaling.where}: rope_type {kind!r}: luce implements default and yarn")
    for key in ("mscale", "mscale_all_dim", "extrapolation_factor"):
        if key in scaling:
            raise UnsupportedError(f"{scaling.where}: key {key}: luce does not implement it")
    scaling.only("truncate", True)
    return Yarn(
        scaling.get("factor", float),
        scaling.size("original_max_position_embeddings"),
        *(scaling.get(key, float, None) for key in ("attention_factor", "beta_fast", "beta_slow")),
    )


# ---- keys


def add_keys(w: gguf.GGUFWriter, c: DFlash, name: str, file_type: int, m_rope: bool) -> None:
    """Adds every key but the tokenizer's and the mask token's. `m_rope` says that the target has M-RoPE. The
    drafter then has the degenerate sections {rope_dim/2, 0, 0, 0} that llama.cpp looks for.

    dflash.attention.causal is one bool. Where layers differ it is left out (llama.cpp: non-causal everywhere)
    and dflash.attention.causal_pattern holds a bool for each layer.
    """
    w.add_type("model")
    w.add_name(name)
    w.add_file_type(file_type)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    w.add_block_count(c.n_layer)
    w.add_context_length(c.n_ctx)
    w.add_embedding_length(c.n_embd)
    w.add_feed_forward_length(c.n_ff)
    add_attention_keys(w, c)
    w.add_vocab_size(c.n_vocab)
    w.add_uint32(f"{ARCH}.block_size", c.block_size)
    w.add_array(f"{ARCH}.target_layers", [i + 1 for i in c.target_layer_ids])
    if m_rope:
        w.add_rope_dimension_sections([c.rope_dim // 2, 0, 0, 0])
    if c.window is not None:
        w.add_sliding_window(c.window)
        w.add_sliding_window_pattern(list(c.sliding))
    if len(set(c.causal)) == 1:
        w.add_causal_attention(c.causal[0])
    else:
        w.add_array(f"{ARCH}.attention.causal_pattern", list(c.causal))
    if c.softcap is not None:
        w.add_final_logit_softcapping(c.softcap)
    if c.embedding_scale is not None:
        w.add_embedding_scale(c.embedding_scale)
    if c.logit_scale is not None:
        w.add_logit_scale(c.logit_scale)
    if c.kind == "DFlash2":
        for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            w.add_uint32(f"{ARCH}.{key}", getattr(c, key.removesuffix("_size")))
    # Readers differ in what they take where it is missing.
    if c.kind != "DFlash" or c.from_anchor:
        w.add_bool(f"{ARCH}.sample_from_anchor", c.from_anchor)
    if c.kind == "DSpark":
        w.add_bool(f"{ARCH}.has_confidence_head", bool(c.confidence))
    if c.yarn is not None:
        _add_yarn(w, c.yarn)


def _add_yarn(w: gguf.GGUFWriter, yarn: Yarn) -> None:
    w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    w.add_rope_scaling_factor(yarn.factor)
    w.add_rope_scaling_orig_ctx_len(yarn.n_ctx_original)
    if yarn.attention_factor is not None:
        w.add_rope_scaling_yarn_attn_factor(yarn.attention_factor)
    if yarn.beta_fast is not None:
        w.add_rope_scaling_yarn_beta_fast(yarn.beta_fast)
    if yarn.beta_slow is not None:
        w.add_rope_scaling_yarn_beta_slow(yarn.beta_slow)


# ---- tensors


def tensor_shapes(c: DFlash, own: set[str]) -> dict[str, tuple[int, ...]]:
    """Returns the tensors in file order, with numpy's shapes. `own` says which of those that a drafter may leave out
    the checkpoint has, by GGUF's names."""
    e, q, kv = c.n_embd, c.n_head * c.head_dim, c.n_head_kv * c.head_dim
    block: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (e,),
        "attn_q.weight": (q, e),
        "attn_k.weight": (kv, e),
        "attn_v.weight": (kv, e),
        "attn_output.weight": (e, q),
        "attn_q_norm.weight": (c.head_dim,),
        "attn_k_norm.weight": (c.head_dim,),
        "ffn_norm.weight": (e,),
        "ffn_gate.weight": (c.n_ff, e),
        "ffn_up.weight": (c.n_ff, e),
        "ffn_down.weight": (e, c.n_ff),
    }
    if c.conv_kernel:
        for part in ("attn", "ffn"):  # A kernel of what goes into it, and one of what comes out.
            block[f"{part}_conv_base"] = (2, c.conv_kernel, e)
            block[f"{part}_conv_proj.weight"] = (2 * c.conv_kernel * (e // c.conv_group), e)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (c.n_vocab, e),
        "fc.weight": (e, len(c.target_layer_ids) * e),
        "enc.output_norm.weight": (e,),
    }
    for i in range(c.n_layer):
        shapes |= {f"blk.{i}.{local}": shape for local, shape in block.items()}
        if f"blk.{i}.{SINKS[0]}" in own:
            shapes[f"blk.{i}.{SINKS[0]}"] = (c.n_head,)
    shapes |= {"output_norm.weight": (e,), "output.weight": (c.n_vocab_draft, e), "d2t": (c.n_vocab_draft,)}
    shapes = {name: shape for name, shape in shapes.items() if name not in OPTIONAL or name in own}
    if c.selector_rank:
        shapes["selector_predecessor.weight"] = (c.n_vocab, c.selector_rank)
        shapes["selector_successor.weight"] = (c.n_vocab, c.selector_rank)
        shapes["selector_hidden.weight"] = (c.selector_rank, e)
    if c.markov_rank:
        shapes["markov_w1.weight"] = (c.n_vocab, c.markov_rank)
        shapes["markov_w2.weight"] = (c.n_vocab_draft, c.markov_rank)
    if c.confidence:
        shapes["conf_proj.weight"] = (1, e + c.markov_rank * (c.confidence_reads_markov is not False))
        shapes |= {name: (1,) for name in ("conf_proj.bias",) if name in own}
    return shapes


def plain_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Maps z-lab's names, without `model.`, to the checkpoint's own. t2d and RoPE's constants follow from the rest,
    and what speculators keeps of the target served training."""
    names: dict[str, str] = {}
    for name in checkpoint.names:
        plain = name.removeprefix("model.")
        plain = ALIASES.get(plain, plain)
        if plain in names:
            raise FileError(f"tensors {names[plain]} and {name} are the same tensor of the drafter")
        if not plain.startswith(("t2d", "verifier_")) and not plain.endswith("rotary_emb.inv_freq"):
            names[plain] = name
    return names


def source_name(name: str) -> str:
    """Turns GGUF's name into z-lab's."""
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if match:
        return f"layers.{match[1]}.{(BLOCK | CONVOLUTIONS | dict([SINKS]))[match[2]]}"
    return (TOP | OPTIONAL | SELECTOR | MARKOV | CONFIDENCE)[name]


def with_confidence(c: DFlash, checkpoint: Checkpoint) -> DFlash:
    """Returns the hyperparameters with what the tensors say of a confidence head where the config says nothing."""
    names = plain_names(checkpoint)
    proj = names.get(CONFIDENCE["conf_proj.weight"])
    if c.kind != "DSpark" or proj is None:
        return c
    if c.confidence is False:
        raise FileError(f"key enable_confidence_head is false, but there is the tensor {proj}")
    reads = c.confidence_reads_markov
    if reads is None:
        reads = checkpoint[proj].shape[-1] != c.n_embd
    return replace(c, confidence=True, confidence_reads_markov=reads)


def plan(c: DFlash, checkpoint: Checkpoint) -> list[Planned]:
    """Returns every tensor of the file. FileError names one that is missing or has another shape, and
    UnsupportedError one of the checkpoint that luce does not implement."""
    names = plain_names(checkpoint)
    may = [*OPTIONAL]
    if c.kind == "DSpark":
        may += ["conf_proj.bias", *(f"blk.{i}.{SINKS[0]}" for i in range(c.n_layer))]
    shapes = tensor_shapes(c, {name for name in may if source_name(name) in names})
    left = set(names) - {source_name(name) for name in shapes}
    for name in sorted(left):
        for begin, what in _TELLING.items():
            if name.startswith(begin):
                raise UnsupportedError(f"tensor {names[name]}: it is of {what}: luce does not implement it")
    if left:
        more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
        raise UnsupportedError(f"tensor {names[min(left)]}{more}: luce does not implement drafters with it")
    if c.n_vocab_draft != c.n_vocab:
        for name in ("d2t", "output.weight"):
            if name not in shapes:
                said = f"draft_vocab_size is {c.n_vocab_draft} of {c.n_vocab}"
                raise FileError(f"tensor {OPTIONAL[name]} is missing: {said}")
    if "token_embd.weight" in shapes and "output.weight" not in shapes and not c.tied:
        raise UnsupportedError(
            f"tensor {names['embed_tokens.weight']} is there without lm_head.weight, and tie_word_embeddings is not "
            "true: GGUF has no drafter with an embedding of its own and the target's head: add the target's "
            "lm_head.weight to the checkpoint"
        )
    return [_tensor(c, checkpoint, names, name, shape) for name, shape in shapes.items()]


def _tensor(
    c: DFlash, checkpoint: Checkpoint, names: dict[str, str], name: str, shape: tuple[int, ...]
) -> Planned:
    plain = source_name(name)
    if plain not in names:
        raise FileError(f"tensor {plain} is missing in {checkpoint.path}: {name} is made from it")
    own = names[plain]
    source = checkpoint.any_type(own) if name == "d2t" else checkpoint[own]
    if source.shape != shape:
        raise FileError(f"tensor {own}: expected shape {shape} ({name}), found {source.shape}")
    if name == "d2t":
        ids = target_ids(source.read(), c.n_vocab, _drafted(checkpoint, c.n_vocab), c.offsets)
        return Planned(name, shape, (own,), lambda: iter(()), ids.view(np.uint8).reshape(1, -1), "I64")

    def rows() -> Iterator[np.ndarray]:
        return slabs(source.read().reshape(shape), as_f32)

    return Planned(name, shape, (own,), rows)


def _drafted(checkpoint: Checkpoint, n_vocab: int) -> np.ndarray | None:
    """Returns the ids that t2d marks, rising, where the checkpoint has it."""
    name = next((name for name in ("t2d", "model.t2d") if name in checkpoint), None)
    if name is None or checkpoint.any_type(name).shape != (n_vocab,):
        return None
    return np.flatnonzero(checkpoint.any_type(name).read())


def target_ids(
    d2t: np.ndarray, n_vocab: int, drafted: np.ndarray | None = None, offsets: bool = False
) -> np.ndarray:
    """Returns int64 (n,): the target's id of each row of a reduced vocabulary. Checkpoints hold its distance from
    the row's index, which is known where `offsets` says so, or the id itself. The ids that are `drafted` tell which;
    else distances repeat mostly, and ids do not."""
    if d2t.dtype.kind not in "iu":
        raise UnsupportedError(f"tensor d2t holds {d2t.dtype}, expected integers")
    ids = d2t.astype(np.int64)
    moved = ids + np.arange(len(ids))
    told = [drafted is not None and np.array_equal(np.sort(each), drafted) for each in (ids, moved)]
    if told[0] != told[1]:
        ids = ids if told[0] else moved
    elif offsets or len(np.unique(ids)) != len(ids):
        ids = moved
    if len(np.unique(ids)) != len(ids) or ids.min() < 0 or ids.max() >= n_vocab:
        raise FileError(f"tensor d2t does not name {len(ids)} different tokens of {n_vocab}")
    return ids
