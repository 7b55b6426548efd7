"""Plans Gemma 4 checkpoints (dense, mixture, with per-layer embeddings; and assistants) as the tensors of a GGUF.

The sources are transformers' Gemma4ForCausalLM and Gemma4AssistantForCausalLM, and llama.cpp's gemma4 and
gemma4-assistant. Published checkpoints are `Gemma4ForConditionalGeneration`: the language model is under
`model.language_model.`, and the towers for images and sounds, which are dropped, beside it. No number changes: norms
are stored as they are used, and what RoPE leaves standing is said by a tensor of factors, which is made here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from luce.convert.gemma4_layout import CENTROIDS, ORDERING, Config, rope_factors, tensor_shapes
from luce.convert.gguf_output import Planned, slabs
from luce.convert.hf_config import Section, text_config
from luce.convert.safetensors_reader import Checkpoint, as_f32
from luce.errors import FileError, UnsupportedError

FACTORS = "rope_freqs.weight"
TOP = {
    "token_embd.weight": "embed_tokens.weight",
    "per_layer_token_embd.weight": "embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "per_layer_projection_norm.weight",
    "nextn.pre_projection.weight": "pre_projection.weight",
    "nextn.post_projection.weight": "post_projection.weight",
    CENTROIDS: "masked_embedding.centroids.weight",
    ORDERING: "masked_embedding.token_ordering",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
    "inp_gate.weight": "per_layer_input_gate.weight",
    "proj.weight": "per_layer_projection.weight",
    "post_norm.weight": "post_per_layer_input_norm.weight",
    "layer_output_scale.weight": "layer_scalar",
}
_TOWERS = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder.")
_OVERRIDES = {"head_dim", "num_key_value_heads"}  # Of a layer's keys, these may differ from the model's.
# What transformers' Gemma4TextConfig takes where the config has none.
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_GLOBAL_HEAD_DIM = 512
_N_CENTROID, _N_CENTROID_USED = 2048, 32  # Gemma4AssistantConfig's.


# ---- names and hyperparameters


def is_gemma(config: Section) -> bool:
    """Says whether config.json is that of a Gemma 4 model or assistant."""
    kinds = [config.get("model_type", str, ""), *config.get("architectures", list, [])]
    return any(str(kind).lower().replace("_", "").startswith("gemma4") for kind in kinds)


def plain_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Maps `layers.0...`, `embed_tokens...`, `lm_head...` to the checkpoint's own name, without the towers."""
    names: dict[str, str] = {}
    for name in checkpoint.names:
        plain = re.sub(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?", "", name)
        if plain.startswith(_TOWERS):
            continue
        if re.search(r"\.experts\.(?:gate_up|down)_proj\.weight$", plain):
            plain = plain.removesuffix(".weight")
        if plain in names:
            raise FileError(f"tensors {names[plain]} and {name} are the same tensor of the model")
        names[plain] = name
    return names


def read_hparams(config: Section) -> Config:
    """Reads the GGUF's hyperparameters from config.json. A missing key is an error that names it."""
    text = text_config(config)
    assistant = "backbone_hidden_size" in config
    for key, value in (("hidden_activation", "gelu_pytorch_tanh"), ("attention_bias", False)):
        text.only(key, value)
    if text.values.get("use_bidirectional_attention") not in (None, "vision"):  # Text is causal beside images.
        text.only("use_bidirectional_attention", None)
    sliding = _sliding(text)
    heads = _heads(text, sliding)
    rope = text.section("rope_parameters") if "rope_parameters" in text else Section(_ROPE, text.where)
    mixture = text.get("enable_moe_block", bool, False)
    ff, shared = text.size("intermediate_size"), text.get("num_kv_shared_layers", int, 0)
    if not 0 <= shared <= len(sliding):
        raise FileError(f"{text.where}: key num_kv_shared_layers is {shared}, of {len(sliding)} layers")
    if shared and not assistant and {*sliding} - {*sliding[: len(sliding) - shared]}:
        raise FileError(f"{text.where}: key num_kv_shared_layers is {shared}: no layer of their kind has K and V")
    ordered = assistant and config.get("use_ordered_embeddings", bool, False)
    wide = shared > 0 and text.get("use_double_wide_mlp", bool, False)
    return Config(
        sliding=sliding,
        window=text.size("sliding_window"),
        n_embd=text.size("hidden_size"),
        n_ff=ff,
        n_head=text.size("num_attention_heads"),
        n_head_kv=heads[False][1],
        n_head_kv_swa=heads[True][1],
        head_dim=heads[False][0],
        head_dim_swa=heads[True][0],
        v_is_k=text.get("attention_k_eq_v", bool, False),
        rope_base=_theta(rope, "full_attention"),
        rope_base_swa=_theta(rope, "sliding_attention"),
        rope_partial=_partial(rope),
        softcap=None if assistant else text.get("final_logit_softcapping", float, None),
        tied=_is_tied(config, text),
        n_vocab=text.size("vocab_size"),
        n_ctx=text.size("max_position_embeddings"),
        eps=text.get("rms_norm_eps", float),
        n_shared_kv=len(sliding) if assistant else shared,
        n_ff_shared_kv=2 * ff if wide else 0,
        n_embd_per_layer=text.get("hidden_size_per_layer_input", int, 0),
        n_expert=text.size("num_experts") if mixture else 0,
        n_expert_used=text.size("top_k_experts") if mixture else 0,
        n_ff_expert=text.size("moe_intermediate_size") if mixture else 0,
        n_embd_out=config.size("backbone_hidden_size") if assistant else 0,
        n_centroid=config.size("num_centroids", _N_CENTROID) if ordered else 0,
        n_centroid_used=config.size("centroid_intermediate_top_k", _N_CENTROID_USED) if ordered else 0,
    )


def _sliding(text: Section) -> tuple[bool, ...]:
    """Says of each layer whether its attention has a window. The last one never has."""
    n_layer = text.size("num_hidden_layers")
    default = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(n_layer)]
    kinds = text.strings("layer_types", n_layer) if "layer_types" in text else [*default[:-1], "full_attention"]
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        raise UnsupportedError(f"{text.where}: key layer_types has {sorted(unknown)}")
    if kinds[-1] != "full_attention":
        raise UnsupportedError(f"{text.where}: key layer_types: the last layer is {kinds[-1]}: it has to be global")
    return tuple(kind == "sliding_attention" for kind in kinds)


def _heads(text: Section, sliding: tuple[bool, ...]) -> dict[bool, tuple[int, int]]:
    """Returns (head size, KV heads) of sliding layers (True) and of global ones. The top level has those of sliding
    layers; configs say otherwise by layer (per_layer_config, as transformers saves since 5.17), or by
    global_head_dim and num_global_key_value_heads."""
    own = text.size("head_dim"), text.size("num_key_value_heads")
    if "per_layer_config" not in text:
        of_global = text.size("num_global_key_value_heads", None) if text.get("attention_k_eq_v", bool, False) else None
        return {True: own, False: (text.size("global_head_dim", _GLOBAL_HEAD_DIM), of_global or own[1])}
    layers = text.section("per_layer_config")
    found: dict[bool, set[tuple[int, int]]] = {True: set(), False: {own} if all(sliding) else set()}
    strangers = [key for key in layers.values if not key.isdigit() or int(key) >= len(sliding)]
    if strangers:
        raise FileError(f"{layers.where}: key {strangers[0]!r} is not one of {len(sliding)} layers")
    for i, is_sliding in enumerate(sliding):
        layer = layers.section(str(i))
        unknown = {key for key in layer.values if layer.values[key] != text.values.get(key)} - _OVERRIDES
        if unknown:
            raise UnsupportedError(f"{layer.where}: key {min(unknown)} differs from the model's")
        size = layer.size("head_dim", own[0]), layer.size("num_key_value_heads", own[1])
        found[is_sliding].add(size)
    for is_sliding, sizes in found.items():
        if len(sizes) > 1:
            kind = "sliding" if is_sliding else "global"
            raise UnsupportedError(f"{layers.where}: {kind} layers differ in heads: luce implements one size for all")
    return {kind: next(iter(sizes), own) for kind, sizes in found.items()}


def _theta(rope: Section, kind: str) -> float:
    section = rope.section(kind)
    theta = section.get("rope_theta", float)
    if not theta > 0:
        raise FileError(f"{section.where}: key rope_theta is {theta}, expected a positive number")
    return theta


def _partial(rope: Section) -> float:
    """Returns how much of a global layer's head turns. Sliding layers turn whole."""
    sliding, of_global = rope.section("sliding_attention"), rope.section("full_attention")
    sliding.only("rope_type", "default")
    for section in (sliding, of_global):
        section.only("factor", 1.0)
    sliding.only("partial_rotary_factor", 1.0)
    if of_global.get("rope_type", str) == "default":
        return 1.0
    of_global.only("rope_type", "proportional")
    partial = of_global.get("partial_rotary_factor", float, 1.0)
    if not 0 < partial <= 1:
        raise FileError(f"{of_global.where}: key partial_rotary_factor is {partial}, expected a part of 1")
    return partial


def _is_tied(config: Section, text: Section) -> bool:
    for section in (config, text):
        if "tie_word_embeddings" in section:
            return section.get("tie_word_embeddings", bool)
    return True  # As transformers has it.


# ---- the plan


@dataclass(frozen=True)
class Plan:
    """The tensors of a file, and what is said of those that are left out."""

    tensors: list[Planned]
    notes: list[str]


def plan(c: Config, checkpoint: Checkpoint, names: dict[str, str]) -> Plan:
    """Returns every tensor of the file with where it comes from. FileError names one that is missing or has another
    shape, and UnsupportedError one of the checkpoint that has no place in the file."""
    tensors = [_tensor(c, checkpoint, names, name, shape) for name, shape in tensor_shapes(c).items()]
    used = {source for tensor in tensors for source in tensor.sources}
    left, notes = [plain for plain, own in names.items() if own not in used], []
    for why, out in _left_out(c).items():
        found = [plain for plain in left if out.fullmatch(plain)]
        if found and why:
            more = f" and {len(found) - 1} more" if found[1:] else ""
            notes.append(f"{names[found[0]]}{more}: left out, {why}")
        left = [plain for plain in left if plain not in found]
    if left:
        more = f" (and {len(left) - 1} more)" if left[1:] else ""
        raise UnsupportedError(f"tensor {names[left[0]]}{more} is not part of the {c.arch} that luce knows")
    return Plan(tensors, notes)


def _left_out(c: Config) -> dict[str, re.Pattern[str]]:
    """Returns what a checkpoint has that is rightly not in the file, by what is said of it."""
    shared = "|".join(str(i) for i in range(c.n_layer_kv, c.n_layer)) or "(?!)"
    out = {
        "": re.compile(r".*(?:rotary_emb\..*inv_freq|embed_scale)"),
        "since these layers read another layer's K and V": re.compile(
            rf"layers\.(?:{shared})\.self_attn\.(?:k_proj|v_proj|k_norm|v_norm)\.weight"
        ),
    }
    if c.tied:
        out["since config.json ties it to the embedding"] = re.compile(r"lm_head\.weight")
    if not c.n_centroid:
        out["since use_ordered_embeddings of config.json is not true"] = re.compile(r"masked_embedding\..*")
    return out


def _tensor(c: Config, checkpoint: Checkpoint, names: dict[str, str], name: str, shape: tuple[int, ...]) -> Planned:
    if name == FACTORS:
        return Planned(name, shape, (), lambda: iter([rope_factors(c)[None]]))
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    plain = f"layers.{match[1]}.{BLOCK[match[2]]}" if match else TOP[name]
    if plain not in names:
        raise FileError(f"tensor {plain} is missing in {checkpoint.path}: {name} is made from it")
    if name == ORDERING:
        return _ordering(c, checkpoint, names[plain])
    source = checkpoint[names[plain]]
    scalar = shape == (1,) and source.shape == ()
    if source.shape != shape and not scalar:
        raise FileError(f"tensor {source.name}: expected shape {shape} ({name}), found {source.shape}")

    def rows() -> Iterator[np.ndarray]:
        stored: Any = source.read()
        return slabs(stored.reshape(shape), as_f32)

    return Planned(name, shape, (source.name,), rows)


def _ordering(c: Config, checkpoint: Checkpoint, own: str) -> Planned:
    """Returns the order of a vocabulary, as it is stored: each token once, in clusters of one size."""
    source = checkpoint.any_type(own)
    if source.shape != (c.n_vocab,):
        raise FileError(f"tensor {own}: expected shape {(c.n_vocab,)} ({ORDERING}), found {source.shape}")
    ids = source.read()
    if ids.dtype.kind not in "iu" or not np.array_equal(np.sort(ids), np.arange(c.n_vocab)):
        raise FileError(f"tensor {own} is no order of {c.n_vocab} tokens: each has to be there once")
    if c.n_vocab % c.n_centroid:
        raise FileError(f"tensor {own}: {c.n_vocab} tokens do not go into {c.n_centroid} clusters of one size")
    stored = ids.astype("<i4").view(np.uint8).reshape(1, -1)
    return Planned(ORDERING, source.shape, (own,), lambda: iter(()), stored, "I32")
