"""Plans DFlash drafters (z-lab's DFlashDraftModel) as the tensors and keys of a GGUF of architecture dflash.

The sources are z-lab/dflash (dflash/model.py) and llama.cpp's dflash (its names and keys). Everything comes
from config.json, where `dflash_config` overrides the top level. What luce does not implement is refused by
name: a key or tensor that is silently dropped shows as low acceptance and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

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
# These keys of dflash_config are read here; any other one is a feature that luce lacks.
_KNOWN = {"target_layer_ids", "mask_token_id", "block_size", "use_swa", "swa_window_size", "causal",
          "final_logit_softcapping", "input_embedding_scale", "num_target_layers"}  # fmt: skip
_REFUSED = ("attention_value_scale", "output_multiplier", "markov_rank", "markov_head_type", "selector_rank",
            "selector_top_k", "conv_kernel_size", "conv_group_size", "sample_from_anchor")  # fmt: skip


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


# ---- config.json


def read_hparams(config: Section) -> DFlash:
    """Hyperparameters from config.json; an error names a key that is missing or not implemented."""
    own = config.section("dflash_config")
    _refuse(config, own)
    both = Section({**config.values, **{k: v for k, v in own.values.items() if v is not None}}, config.where)
    n_layer, n_head = config.size("num_hidden_layers"), config.size("num_attention_heads")
    n_embd, n_vocab = config.size("hidden_size"), config.size("vocab_size")
    head_dim = config.size("head_dim", n_embd // n_head)
    rope = rope_parameters(config)
    partial = (rope if "partial_rotary_factor" in rope else config).get("partial_rotary_factor", float, 1.0)
    kinds = _layer_kinds(config, n_layer)
    sliding, window = _window(config, own, kinds)
    return DFlash(
        n_layer=n_layer,
        n_embd=n_embd,
        n_ff=config.size("intermediate_size"),
        n_head=n_head,
        n_head_kv=config.size("num_key_value_heads"),
        head_dim=head_dim,
        rope_dim=int(head_dim * partial),
        n_ctx=config.size("max_position_embeddings"),
        n_vocab=n_vocab,
        n_vocab_draft=config.size("draft_vocab_size", n_vocab),
        rope_base=rope_theta(config),
        eps=config.get("rms_norm_eps", float),
        block_size=both.size("block_size"),
        target_layer_ids=_target_layers(both),
        mask_token_id=both.get("mask_token_id", int, None),
        sliding=sliding,
        window=window,
        causal=_causal(config, own, kinds),
        softcap=both.get("final_logit_softcapping", float, None) or None,
        embedding_scale=both.get("input_embedding_scale", float, None),
        yarn=_yarn(config, rope),
    )


def _refuse(config: Section, own: Section) -> None:
    for name in config.get("architectures", list, []):
        if name != "DFlashDraftModel":
            raise UnsupportedError(f"{config.where}: key architectures: {name} is not DFlashDraftModel")
    config.only("hidden_act", "silu")
    config.only("attention_bias", False)
    config.only("rope_is_neox_style", True)
    for key, value in own.values.items():
        if key not in _KNOWN and value not in (None, False):
            raise UnsupportedError(f"{own.where}: key {key} is {value!r}: luce does not implement it")
    for key in _REFUSED:
        if key in config:
            raise UnsupportedError(f"{config.where}: key {key}: luce does not implement it")


def _target_layers(both: Section) -> tuple[int, ...]:
    ids = both.get("target_layer_ids", list)
    end = both.get("num_target_layers", int, 1 << 16)
    if not ids or any(type(i) is not int or not 0 <= i < end for i in ids) or sorted(set(ids)) != ids:
        raise FileError(f"{both.where}: key target_layer_ids is {ids}, expected rising ids below {end}")
    return tuple(ids)


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
    """Returns the tensors in file order, with numpy's shapes. `own` says which of OPTIONAL the checkpoint
    has."""
    e, q, kv = c.n_embd, c.n_head * c.head_dim, c.n_head_kv * c.head_dim
    block = {
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
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (c.n_vocab, e),
        "fc.weight": (e, len(c.target_layer_ids) * e),
        "enc.output_norm.weight": (e,),
    }
    for i in range(c.n_layer):
        shapes |= {f"blk.{i}.{local}": shape for local, shape in block.items()}
    shapes |= {"output_norm.weight": (e,), "output.weight": (c.n_vocab_draft, e), "d2t": (c.n_vocab_draft,)}
    return {name: shape for name, shape in shapes.items() if name not in OPTIONAL or name in own}


def plain_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Maps names without `model.` to the checkpoint's own; t2d and RoPE's constants follow from the rest."""
    names: dict[str, str] = {}
    for name in checkpoint.names:
        plain = name.removeprefix("model.")
        if plain in names:
            raise FileError(f"tensors {names[plain]} and {name} are the same tensor of the drafter")
        if plain != "t2d" and not plain.endswith("rotary_emb.inv_freq"):
            names[plain] = name
    return names


def source_name(name: str) -> str:
    """Turns GGUF's name into z-lab's."""
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    return f"layers.{match[1]}.{BLOCK[match[2]]}" if match else (TOP | OPTIONAL)[name]


def plan(c: DFlash, checkpoint: Checkpoint) -> list[Planned]:
    """Returns every tensor of the file. FileError names one that is missing or has another shape, and
    UnsupportedError one of the checkpoint that luce does not implement."""
    names = plain_names(checkpoint)
    shapes = tensor_shapes(c, {name for name, plain in OPTIONAL.items() if plain in names})
    left = set(names) - {source_name(name) for name in shapes}
    if left:
        more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
        raise UnsupportedError(f"tensor {names[min(left)]}{more}: luce does not implement drafters with it")
    if c.n_vocab_draft != c.n_vocab and "d2t" not in shapes:
        raise FileError(f"tensor d2t is missing: draft_vocab_size is {c.n_vocab_draft} of {c.n_vocab}")
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
        ids = target_ids(source.read(), c.n_vocab)
        return Planned(name, shape, (own,), lambda: iter(()), ids.view(np.uint8).reshape(1, -1), "I64")

    def rows() -> Iterator[np.ndarray]:
        return slabs(source.read().reshape(shape), as_f32)

    return Planned(name, shape, (own,), rows)


def target_ids(d2t: np.ndarray, n_vocab: int) -> np.ndarray:
    """Returns int64 (n,): the target's id of each row of a reduced vocabulary. Checkpoints hold either that
    or, more often, its distance from the row's index; distances repeat, ids do not."""
    if d2t.dtype.kind not in "iu":
        raise UnsupportedError(f"tensor d2t holds {d2t.dtype}, expected integers")
    ids = d2t.astype(np.int64)
    if len(np.unique(ids)) != len(ids):
        ids = ids + np.arange(len(ids))
    if len(np.unique(ids)) != len(ids) or ids.min() < 0 or ids.max() >= n_vocab:
        raise FileError(f"tensor d2t does not name {len(ids)} different tokens of {n_vocab}")
    return ids
