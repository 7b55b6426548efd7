"""Makes tiny random Gemma 4 models, in transformers' layout first and then as GGUF.

`weights(config, seed)` is transformers' state dict (numpy, F32). `to_gguf_layout` gives its tensors the names that
published GGUF files have; no number changes. `write` stores it, in any type. Nothing is at its neutral value: norms
and the layers' scales are away from 1, the logits' cap bends the largest logits, and attention is sharp enough to show
a wrong window, scale or angle.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
from tiny import QType, Quantize, TypeOf, Weights, _encode, _Random, drawn_once

from luce.bench.oracle_tokenizer import add_gemma4_tokenizer
from luce.convert.gemma4_layout import CENTROIDS, ORDERING, Config, add_keys, rope_factors, tensor_shapes

CHAT_TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}"
    "{{- message.content + '<turn|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|turn>model\\n' }}{%- endif %}"
)


def _kinds(pattern: str) -> tuple[bool, ...]:
    """Returns Config.sliding of a text with "s" for each sliding layer and "g" for each global one."""
    return tuple(kind == "s" for kind in pattern)


# Each name has a config and a seed. The name says what differs from a dense model whose V is K in global layers.
#
# Seeds are such that a GPU's rounding leaves a golden within the bound of its test: where transformers rounds to F16
# what its products read, no logit moves by more than drive.CUDA_BOUND, and no expert changes places. The golden tool
# refuses others (tools/gemma4_rounding.py). Most random models of these sizes move by up to two times that: their
# logits are three times as large as those of tiny.py's, and all of a stream comes from its blocks.
CASES: dict[str, tuple[Config, int]] = {
    "dense": (Config(v_is_k=True), 211),
    "own-v": (
        Config(sliding=_kinds("ssssg" "sg"), window=16, n_embd=96, n_head=2, n_head_kv_swa=1, n_ff=128, softcap=8.0,
               rope_base=1e5, eps=1e-5), 7),
    "same-heads": (
        Config(sliding=_kinds("sgsg"), window=7, head_dim=64, n_head_kv=2, v_is_k=True, rope_partial=0.5), 39),
    "experts": (
        Config(sliding=_kinds("ssgsg"), window=9, v_is_k=True, n_expert=8, n_expert_used=3, n_ff_expert=48), 910),
    "experts-apart": (
        Config(sliding=_kinds("sg" "sg"), window=20, n_embd=128, head_dim_swa=128, n_head_kv_swa=4, n_head_kv=2,
               v_is_k=True, n_expert=6, n_expert_used=2, n_ff_expert=80, fused_experts=False, softcap=None), 36),
    "per-layer": (
        Config(sliding=_kinds("ssgssgssg"), window=11, n_head_kv_swa=1, n_shared_kv=5, n_ff_shared_kv=192,
               n_embd_per_layer=32), 1254),
    "per-layer-wide": (
        Config(sliding=_kinds("sssgsssg"), window=24, n_embd=128, n_head=4, n_head_kv=2, n_shared_kv=3,
               n_embd_per_layer=64, softcap=12.0), 6),
    "untied": (Config(sliding=_kinds("sssg"), window=5, v_is_k=True, tied=False, softcap=15.0), 4),
    "wide-heads": (  # The sizes that published models have.
        Config(sliding=_kinds("ssg"), window=15, n_embd=128, n_head=2, n_head_kv=1, n_head_kv_swa=1, head_dim=512,
               head_dim_swa=256, v_is_k=True), 1),
}  # fmt: skip

# Of a long prompt many windows have passed, and several pages of 256 positions.
LONG_CASES: dict[str, tuple[Config, int]] = {
    "long": (Config(sliding=_kinds("ssgsg"), window=100, v_is_k=True), 5),
    "long-per-layer": (
        Config(sliding=_kinds("ssgsgsg"), window=256, n_head_kv_swa=1, n_shared_kv=4, n_embd_per_layer=32), 22),
}  # fmt: skip

# What published models are, by their names.
_EVERY_6TH, _EVERY_5TH = (True,) * 5 + (False,), (True,) * 4 + (False,)
_LARGE = Config(head_dim=512, head_dim_swa=256, v_is_k=True, window=1024, n_vocab=262144, n_ctx=262144)
_SMALL = replace(_LARGE, v_is_k=False, window=512, n_ctx=131072, n_head=8, n_embd_per_layer=256)
PUBLISHED = {
    "31B": replace(_LARGE, sliding=_EVERY_6TH * 10, n_embd=5376, n_ff=21504, n_head=32, n_head_kv=4, n_head_kv_swa=16),
    "26B-A4B": replace(_LARGE, sliding=_EVERY_6TH * 5, n_embd=2816, n_ff=2112, n_head=16, n_head_kv=2, n_head_kv_swa=8,
                       n_expert=128, n_expert_used=8, n_ff_expert=704),
    "12B": replace(_LARGE, sliding=_EVERY_6TH * 8, n_embd=3840, n_ff=15360, n_head=16, n_head_kv=1, n_head_kv_swa=8),
    "E4B": replace(_SMALL, sliding=_EVERY_6TH * 7, n_embd=2560, n_ff=10240, n_head_kv=2, n_shared_kv=18),
    "E2B": replace(_SMALL, sliding=_EVERY_5TH * 7, n_embd=1536, n_ff=6144, n_head_kv_swa=1, n_shared_kv=20,
                   n_ff_shared_kv=12288),
    "31B-assistant": replace(_LARGE, sliding=(True, True, True, False), n_embd=1024, n_ff=8192, n_head=32, n_head_kv=4,
                             n_head_kv_swa=16, softcap=None, n_shared_kv=4, n_embd_out=5376),
}  # fmt: skip

# An assistant of CASES["dense"], whose K and V it reads, and its seed: the first for which 17 of the golden's 20 drafts
# are as far ahead as a GPU's rounding asks for, or stand directly behind such ones.
ASSISTANT = Config(sliding=_kinds("sssg"), n_embd=32, n_ff=64, v_is_k=True, softcap=None, n_shared_kv=4, n_embd_out=64)
ASSISTANT_SEED = 35
# As those of E2B and E4B: its vocabulary lies in clusters, and only some of them have logits. CASES["per-layer"] shares
# K and V, as they do. Of the golden's drafts, clusters and tokens are ahead by 0.2 or more, and 13 of 20 are not those
# of the whole vocabulary.
ORDERED = replace(ASSISTANT, window=11, v_is_k=False, n_head_kv_swa=1, n_centroid=24, n_centroid_used=4)
ORDERED_SEED = 300
# Models of CASES, and assistants that llama.cpp drafts with too. (It reuses no layers that share K and V themselves.)
PAIRS = (
    ("dense", ASSISTANT),
    ("experts", replace(ASSISTANT, window=9)),
    ("wide-heads", replace(ASSISTANT, window=15, n_head=2, n_head_kv_swa=1, head_dim=512, head_dim_swa=256,
                           n_embd_out=128)),
)  # fmt: skip

# ---- weights in transformers' layout


def _block(c: Config, rng: _Random, i: int) -> Weights:
    e, d, q, kv, ff = c.n_embd, c.head(i), c.head(i) * c.n_head, c.head(i) * c.head_kv(i), c.ff(i)
    norm = lambda n: rng.uniform(0.4, 1.6, n)  # noqa: E731
    sharp = lambda: norm(d) * np.float32(1.4 * d**-0.25)  # noqa: E731  Scores then have a size of about 2.
    w = {
        "input_layernorm.weight": norm(e),
        "self_attn.q_proj.weight": rng.matrix(q, e),
        "self_attn.q_norm.weight": sharp(),
        "self_attn.o_proj.weight": rng.matrix(e, q),
        "post_attention_layernorm.weight": norm(e),
        "pre_feedforward_layernorm.weight": norm(e),
        "mlp.gate_proj.weight": rng.matrix(ff, e),
        "mlp.up_proj.weight": rng.matrix(ff, e),
        "mlp.down_proj.weight": rng.matrix(e, ff),
        "post_feedforward_layernorm.weight": norm(e),
        "layer_scalar": rng.uniform(0.5, 1.3, 1),
    }
    if i < c.n_layer_kv:
        w |= {"self_attn.k_proj.weight": rng.matrix(kv, e), "self_attn.k_norm.weight": sharp()}
        if c.has_v(i):
            w["self_attn.v_proj.weight"] = rng.matrix(kv, e)
    if c.n_expert:
        n, inner = c.n_expert, c.n_ff_expert
        w |= {
            "router.proj.weight": rng.matrix(n, e, 2.0 * e**0.5),
            "router.scale": norm(e),
            "router.per_expert_scale": norm(n),
            "experts.gate_up_proj": np.stack([rng.matrix(2 * inner, e) for _ in range(n)]),
            "experts.down_proj": np.stack([rng.matrix(e, inner) for _ in range(n)]),
            "pre_feedforward_layernorm_2.weight": norm(e),
            "post_feedforward_layernorm_1.weight": norm(e),
            "post_feedforward_layernorm_2.weight": norm(e),
        }
    if ple := c.n_embd_per_layer:
        w |= {
            "per_layer_input_gate.weight": rng.matrix(ple, e),
            "per_layer_projection.weight": rng.matrix(e, ple),
            "post_per_layer_input_norm.weight": norm(e),
        }
    return w


def weights(c: Config, seed: int) -> Weights:
    """Returns transformers' state dict. The largest logits are about 1.2 times the cap before it bends them; the
    embedding is small beside what the blocks add, so that the output does not just repeat its input."""
    rng = _Random(seed)
    e, ple, half = c.n_embd, c.n_embd_per_layer, 0.8 * c.n_embd**-0.5
    w = {"model.embed_tokens.weight": rng.uniform(-half, half, c.n_vocab, e)}
    if ple:
        wide = (3.0 / ple) ** 0.5
        w |= {
            "model.embed_tokens_per_layer.weight": rng.uniform(-wide, wide, c.n_vocab, ple * c.n_layer),
            "model.per_layer_model_projection.weight": rng.matrix(ple * c.n_layer, e, e**0.5),
            "model.per_layer_projection_norm.weight": rng.uniform(0.4, 1.6, ple),
        }
    for i in range(c.n_layer):
        w |= {f"model.layers.{i}.{name}": value for name, value in _block(c, rng, i).items()}
    size = 0.4 * (c.softcap or 12.0) / (half * (e / 3) ** 0.5)
    w["model.norm.weight"] = rng.uniform(0.4 * size, 1.6 * size, e)
    if not c.tied:
        w["lm_head.weight"] = rng.uniform(-half, half, c.n_vocab, e)
    if c.n_embd_out:
        w["pre_projection.weight"] = rng.matrix(e, 2 * c.n_embd_out)
        w["post_projection.weight"] = rng.matrix(c.n_embd_out, e)
    if c.n_centroid:
        w["masked_embedding.centroids.weight"] = rng.matrix(c.n_centroid, e)
        w["masked_embedding.token_ordering"] = np.argsort(rng.uniform(0, 1, c.n_vocab), kind="stable").astype(np.int64)
    return w


def hf_assistant_config(c: Config) -> dict[str, object]:
    """Returns the arguments of transformers' Gemma4AssistantConfig besides its text_config."""
    keys: dict[str, object] = {"backbone_hidden_size": c.n_embd_out}
    if c.n_centroid:
        keys |= {"use_ordered_embeddings": True, "num_centroids": c.n_centroid,
                 "centroid_intermediate_top_k": c.n_centroid_used}  # fmt: skip
    return keys


def hf_config(c: Config) -> dict[str, object]:
    """Returns the arguments of transformers' Gemma4TextConfig, with the keys that checkpoints were published with."""
    keys: dict[str, object] = {
        "vocab_size": c.n_vocab, "hidden_size": c.n_embd, "intermediate_size": c.n_ff,
        "num_hidden_layers": c.n_layer, "num_attention_heads": c.n_head, "num_key_value_heads": c.n_head_kv_swa,
        "num_global_key_value_heads": c.n_head_kv if c.v_is_k else None, "head_dim": c.head_dim_swa,
        "global_head_dim": c.head_dim, "attention_k_eq_v": c.v_is_k, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": c.n_ctx, "rms_norm_eps": c.eps, "tie_word_embeddings": c.tied,
        "sliding_window": c.window, "final_logit_softcapping": c.softcap, "num_kv_shared_layers": c.n_shared_kv,
        "use_double_wide_mlp": c.n_ff_shared_kv > 0, "hidden_size_per_layer_input": c.n_embd_per_layer,
        "vocab_size_per_layer_input": 0 if c.n_embd_out else c.n_vocab, "enable_moe_block": c.n_expert > 0,
        "layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in c.sliding],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": c.rope_base_swa},
            "full_attention": {"rope_type": "proportional", "rope_theta": c.rope_base,
                               "partial_rotary_factor": c.rope_partial},
        },
    }  # fmt: skip
    if c.n_expert:
        keys |= {"num_experts": c.n_expert, "top_k_experts": c.n_expert_used, "moe_intermediate_size": c.n_ff_expert}
    if c.n_ff_shared_kv not in (0, 2 * c.n_ff) or (not c.v_is_k and c.n_head_kv != c.n_head_kv_swa):
        raise ValueError("transformers has no such model")
    return keys


# ---- transformers' layout to GGUF's

NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
}
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "pre_projection.weight": "nextn.pre_projection.weight",
    "post_projection.weight": "nextn.post_projection.weight",
    "masked_embedding.centroids.weight": CENTROIDS,
    "masked_embedding.token_ordering": ORDERING,
}


def _gguf_name(name: str) -> str:
    if name in TOP:
        return TOP[name]
    _, _, block, local = name.split(".", 3)
    return f"blk.{block}.{NAMES[local]}"


def to_gguf_layout(c: Config, hf: Weights) -> Weights:
    """Returns the dict that GGUF stores, F32, in file order; ids are I32. Shapes are checked against the layout."""
    kinds = {"i": np.int32, "f": np.float32}
    out = {_gguf_name(name): np.ascontiguousarray(x, kinds[x.dtype.kind]) for name, x in hf.items()}
    out["rope_freqs.weight"] = rope_factors(c)
    for name in [name for name in out if name.endswith("ffn_gate_up_exps.weight") and not c.fused_experts]:
        gate_up = out.pop(name)
        out[name.replace("gate_up", "gate")] = np.ascontiguousarray(gate_up[:, : c.n_ff_expert])
        out[name.replace("gate_up", "up")] = np.ascontiguousarray(gate_up[:, c.n_ff_expert :])
    shapes = tensor_shapes(c)
    if {name: x.shape for name, x in out.items()} != shapes:
        raise ValueError("weights do not match the layout")
    return {name: out[name] for name in shapes}


@drawn_once
def layout(c: Config, seed: int) -> Weights:
    """Returns the weights in GGUF's layout."""
    return to_gguf_layout(c, weights(c, seed))


# ---- GGUF files


def quantizable(name: str) -> bool:
    """Names the matrices that published files quantise; norms, scales, factors and the router stay F32."""
    small = any(part in name for part in ("norm", "ffn_gate_inp", "scale", "rope_freqs", "centroids"))
    return name.endswith(".weight") and not small


def write(
    path: Path,
    c: Config,
    tensors: Weights,
    type_of: TypeOf | str = "F32",
    *,
    quantize: Quantize | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    tokenizer: bool = True,
    last: tuple[str, ...] = (),
) -> Path:
    """Writes GGUF v3. type_of: one type for every quantizable tensor, or a function of the name. last: the last
    control tokens."""
    w = gguf.GGUFWriter(path, c.arch)
    add_keys(w, c, f"tiny-{path.stem}", file_type=0)
    if tokenizer:
        add_gemma4_tokenizer(w, c.n_vocab, last)
        if chat_template:
            w.add_chat_template(chat_template)
    for name, x in tensors.items():
        if x.dtype == np.int32:
            w.add_tensor(name, x)
            continue
        if callable(type_of):
            kind = type_of(name)
        else:
            kind = type_of if quantizable(name) else "F32"
        w.add_tensor(name, _encode(x, kind, quantize), raw_dtype=QType[kind])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path
