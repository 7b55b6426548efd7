"""Makes tiny random Qwen3.5 models, in transformers' layout first and then as GGUF.

`weights(config, seed)` is transformers' state dict (numpy, F32). `to_gguf_layout` applies the conversion that
published GGUF files have had. `write` stores it, whole or in parts, in any type.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, wraps
from pathlib import Path
from typing import ParamSpec

import gguf
import numpy as np

from luce.bench.oracle_tokenizer import add_tokenizer
from luce.convert.qwen35_layout import ARCH, Config, add_keys, tensor_shapes

Weights = dict[str, np.ndarray]
TypeOf = Callable[[str], str]
Drawn = ParamSpec("Drawn")
QType = gguf.GGMLQuantizationType
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# It takes a ggml type id and F32 rows, and gives uint8 rows: the core's Library.quantize.
Quantize = Callable[[int, np.ndarray], np.ndarray]

__all__ = ["ARCH", "CHAT_TEMPLATE", "Config", "Weights", "copy", "drawn_once", "head_only", "hf_config", "layout",
           "quantizable", "to_gguf_layout", "weights", "with_experts", "with_own_output", "write",
           "write_v2"]  # fmt: skip


# ---- weights in transformers' layout


class _Random:
    """Draws uniform numbers straight from PCG64's output: the same bits on every numpy and machine."""

    def __init__(self, seed: int) -> None:
        self.bits = np.random.PCG64(seed)

    def uniform(self, low: float, high: float, *shape: int) -> np.ndarray:
        raw = self.bits.random_raw(int(np.prod(shape))) >> np.uint64(11)
        return (low + (high - low) * (raw * 2.0**-53)).astype(np.float32).reshape(shape)

    def matrix(self, out: int, inner: int, gain: float = 1.0) -> np.ndarray:
        """Draws a matrix of standard deviation gain / sqrt(inner): inputs of size 1 give outputs of size
        `gain`."""
        half = gain * (3.0 / inner) ** 0.5
        return self.uniform(-half, half, out, inner)


def _block(c: Config, rng: _Random, recurrent: bool) -> Weights:
    e, d = c.n_embd, c.head_dim
    norm = lambda n: rng.uniform(-0.5, 0.5, n)  # noqa: E731  zero-centred: 1 is added in the model
    w = {"input_layernorm.weight": norm(e), "post_attention_layernorm.weight": norm(e)}
    if recurrent:
        w |= {
            "linear_attn.in_proj_qkv.weight": rng.matrix(c.conv_dim, e),
            "linear_attn.in_proj_z.weight": rng.matrix(c.value_dim, e),
            "linear_attn.in_proj_b.weight": rng.matrix(c.n_v_head, e),
            "linear_attn.in_proj_a.weight": rng.matrix(c.n_v_head, e),
            "linear_attn.conv1d.weight": rng.uniform(-0.8, 0.8, c.conv_dim, 1, c.conv_kernel),
            "linear_attn.A_log": rng.uniform(-3.0, 2.0, c.n_v_head),
            "linear_attn.dt_bias": rng.uniform(-4.0, 1.0, c.n_v_head),
            "linear_attn.norm.weight": rng.uniform(0.5, 1.5, c.state_size),
            "linear_attn.out_proj.weight": rng.matrix(e, c.value_dim),
        }
    else:
        w |= {
            "self_attn.q_proj.weight": rng.matrix(2 * d * c.n_head, e),
            "self_attn.k_proj.weight": rng.matrix(d * c.n_head_kv, e),
            "self_attn.v_proj.weight": rng.matrix(d * c.n_head_kv, e),
            "self_attn.o_proj.weight": rng.matrix(e, d * c.n_head, 2.0),
            "self_attn.q_norm.weight": norm(d),
            "self_attn.k_norm.weight": norm(d),
        }
    if c.n_expert:
        return w | _experts(c, rng)
    return w | {
        "mlp.gate_proj.weight": rng.matrix(c.n_ff, e),
        "mlp.up_proj.weight": rng.matrix(c.n_ff, e),
        "mlp.down_proj.weight": rng.matrix(e, c.n_ff, 2.0),
    }


def _experts(c: Config, rng: _Random) -> Weights:
    e, n, ff, shared = c.n_embd, c.n_expert, c.n_ff_expert, c.n_ff_shared
    w = {
        "mlp.gate.weight": rng.matrix(n, e, 2.0),
        "mlp.experts.gate_up_proj": np.stack([rng.matrix(2 * ff, e) for _ in range(n)]),
        "mlp.experts.down_proj": np.stack([rng.matrix(e, ff, 2.0) for _ in range(n)]),
    }
    if not shared:
        return w
    return w | {
        "mlp.shared_expert.gate_proj.weight": rng.matrix(shared, e),
        "mlp.shared_expert.up_proj.weight": rng.matrix(shared, e),
        "mlp.shared_expert.down_proj.weight": rng.matrix(e, shared, 2.0),
        "mlp.shared_expert_gate.weight": rng.matrix(1, e),
    }


def weights(c: Config, seed: int) -> Weights:
    """Returns transformers' state dict (and `mtp.*`, which it ignores). The embedding is small beside what
    the blocks add, so that with tied weights the output does not just repeat its input."""
    rng = _Random(seed)
    w = {"model.embed_tokens.weight": rng.uniform(-0.5, 0.5, c.n_vocab, c.n_embd)}
    for i in range(c.n_layer):
        for name, value in _block(c, rng, c.is_recurrent(i)).items():
            w[f"model.layers.{i}.{name}"] = value
    w["model.norm.weight"] = rng.uniform(-0.5, 0.5, c.n_embd)
    if not c.tied:
        w["lm_head.weight"] = rng.matrix(c.n_vocab, c.n_embd, 2.0)
    for i in range(c.n_nextn):
        for name, value in _block(c, rng, False).items():
            w[f"mtp.layers.{i}.{name}"] = value
    if c.n_nextn:
        w["mtp.fc.weight"] = rng.matrix(c.n_embd, 2 * c.n_embd)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            w[f"mtp.{name}.weight"] = rng.uniform(-0.5, 0.5, c.n_embd)
    return w


def hf_config(c: Config) -> dict[str, object]:
    """Returns the arguments of transformers' Qwen3_5TextConfig, or Qwen3_5MoeTextConfig."""
    kinds = ["linear_attention" if c.is_recurrent(i) else "full_attention" for i in range(c.n_layer)]
    experts = {
        "num_experts": c.n_expert, "num_experts_per_tok": c.n_expert_used,
        "moe_intermediate_size": c.n_ff_expert, "shared_expert_intermediate_size": c.n_ff_shared,
    }  # fmt: skip
    return (experts if c.n_expert else {"intermediate_size": c.n_ff}) | {
        "vocab_size": c.n_vocab, "hidden_size": c.n_embd,
        "num_hidden_layers": c.n_layer, "num_attention_heads": c.n_head,
        "num_key_value_heads": c.n_head_kv, "head_dim": c.head_dim, "rms_norm_eps": c.eps,
        "max_position_embeddings": c.n_ctx, "tie_word_embeddings": c.tied, "layer_types": kinds,
        "linear_conv_kernel_dim": c.conv_kernel, "linear_num_key_heads": c.n_k_head,
        "linear_num_value_heads": c.n_v_head, "linear_key_head_dim": c.state_size,
        "linear_value_head_dim": c.state_size,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_base,
                            "partial_rotary_factor": c.rope_dim / c.head_dim},
    }  # fmt: skip


# ---- transformers' layout to GGUF's

NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "fc.weight": "nextn.eh_proj.weight",
    "pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "norm.weight": "nextn.shared_head_norm.weight",
}
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def _gguf_name(c: Config, name: str) -> str:
    if name in TOP:
        return TOP[name]
    parts = name.split(".")
    if parts[1] == "layers":  # Names are model.layers.i.* or mtp.layers.i.*.
        block = int(parts[2]) + (c.n_layer if parts[0] == "mtp" else 0)
        return f"blk.{block}.{NAMES['.'.join(parts[3:])]}"
    return f"blk.{c.n_layer}.{NAMES['.'.join(parts[1:])]}"


def _tile(c: Config, x: np.ndarray, axis: int, per_head: int) -> np.ndarray:
    """Reorders v heads from grouped (Hk, r) to tiled (r, Hk) along `axis`."""
    x = np.moveaxis(x, axis, 0)
    grouped = x.reshape(c.n_k_head, c.n_v_head // c.n_k_head, per_head, *x.shape[1:])
    return np.moveaxis(grouped.swapaxes(0, 1).reshape(x.shape), 0, axis)


def _transform(c: Config, name: str, x: np.ndarray) -> np.ndarray:
    s = c.state_size
    if name.endswith("norm.weight") or "pre_fc_norm" in name:
        return x if name.endswith("linear_attn.norm.weight") else x + np.float32(1)
    if name.endswith("A_log"):
        return _tile(c, -np.exp(x), 0, 1)
    if name.endswith("dt_bias"):
        return _tile(c, x, 0, 1)
    if name.endswith("conv1d.weight"):
        x = x[:, 0, :]
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        qk = 2 * c.key_dim
        return np.concatenate([x[:qk], _tile(c, x[qk:], 0, s)])
    if name.endswith("in_proj_z.weight"):
        return _tile(c, x, 0, s)
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight")):
        return _tile(c, x, 0, 1)
    if name.endswith("out_proj.weight"):
        return _tile(c, x, 1, s)
    return x[0] if name.endswith("shared_expert_gate.weight") else x


def to_gguf_layout(c: Config, hf: Weights) -> Weights:
    """Returns the dict that GGUF stores, F32, in file order. Shapes are checked against the layout."""
    out = {_gguf_name(c, k): np.ascontiguousarray(_transform(c, k, v), np.float32) for k, v in hf.items()}
    if not c.fused_experts:
        out = _apart(c, out)
    shapes = tensor_shapes(c)
    if {k: v.shape for k, v in out.items()} != shapes:
        raise ValueError("weights do not match the layout")
    return {name: out[name] for name in shapes}


def _apart(c: Config, tensors: Weights) -> Weights:
    """Returns the weights with the experts' gate and up matrices as tensors of their own."""
    out: Weights = {}
    for name, x in tensors.items():
        if "ffn_gate_up_exps" in name:
            out[name.replace("gate_up", "gate")] = np.ascontiguousarray(x[:, : c.n_ff_expert])
            out[name.replace("gate_up", "up")] = np.ascontiguousarray(x[:, c.n_ff_expert :])
        else:
            out[name] = x
    return out


def with_experts(c: Config) -> Config:
    """Returns the model with eight experts, of which three are used, and a shared one, each as wide as its
    FFN."""
    return replace(c, n_expert=8, n_expert_used=3, n_ff_expert=c.n_ff, n_ff_shared=c.n_ff)


def drawn_once(make: Callable[Drawn, Weights]) -> Callable[Drawn, Weights]:
    """Has the weights of a config and a seed drawn once for all who ask. They are the caller's own."""
    kept = lru_cache(maxsize=16)(make)

    @wraps(make)
    def copied(*args: Drawn.args, **kwargs: Drawn.kwargs) -> Weights:
        return {name: x.copy() for name, x in kept(*args, **kwargs).items()}

    return copied


@drawn_once
def layout(c: Config, seed: int) -> Weights:
    """Returns the weights in GGUF's layout."""
    return to_gguf_layout(c, weights(c, seed))


def head_only(c: Config, tensors: Weights, *top: str) -> Weights:
    """Returns what a file of its NextN head holds: the block after the trunk, and tensors of the top that it
    may repeat, like token_embd.weight."""
    return {name: x for name, x in tensors.items() if name in top or name.startswith(f"blk.{c.n_layer}.")}


def with_own_output(c: Config, tensors: Weights, seed: int) -> Weights:
    """Returns the weights with an embedding and an output of the NextN head's own."""
    rng = _Random(seed)
    return tensors | {
        f"blk.{c.n_layer}.nextn.embed_tokens.weight": rng.uniform(-0.5, 0.5, c.n_vocab, c.n_embd),
        f"blk.{c.n_layer}.nextn.shared_head_head.weight": rng.matrix(c.n_vocab, c.n_embd, 2.0),
    }


# ---- GGUF files


def quantizable(name: str) -> bool:
    """Names the matrices that published files quantise; the rest (norms, conv, gates' biases, routers) stays
    F32."""
    return name.endswith(".weight") and not any(part in name for part in ("norm", "conv1d", "ffn_gate_inp"))


def _encode(x: np.ndarray, type_name: str, quantize: Quantize | None) -> np.ndarray:
    """Returns rows of x as `type_name`: F32, F16, or the stored bytes."""
    kind = QType[type_name]
    if type_name in ("F32", "F16", "BF16"):
        return gguf.quants.quantize(x, kind)
    if quantize is None:
        from luce import native as _native

        quantize = _native.default().quantize
    rows = quantize(int(kind), x.reshape(-1, x.shape[-1]))
    return rows.reshape(*x.shape[:-1], -1)


def write(
    path: Path,
    c: Config,
    tensors: Weights,
    type_of: TypeOf | str = "F32",
    *,
    quantize: Quantize | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    tensors_per_part: int = 0,
    tokenizer: bool = True,
    marks: tuple[str, ...] = (),
) -> Path:
    """Writes GGUF v3. type_of: one type for every quantizable tensor, or a function of the name.
    With tensors_per_part, `x.gguf` becomes x-00001-of-0000N.gguf ...; returns the first part."""
    w = gguf.GGUFWriter(path, c.arch, split_max_tensors=tensors_per_part)
    add_keys(w, c, f"tiny-{path.stem}", file_type=0)
    if tokenizer:
        add_tokenizer(w, c.n_vocab, marks=marks)
        if chat_template:
            w.add_chat_template(chat_template)
    for name, x in tensors.items():
        if callable(type_of):
            kind = type_of(name)
        else:
            kind = type_of if quantizable(name) else "F32"
        w.add_tensor(name, _encode(x, kind, quantize), raw_dtype=QType[kind])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    n_parts = len(w.tensors)
    w.close()
    return path.with_name(f"{path.stem}-00001-of-{n_parts:05d}.gguf") if n_parts > 1 else path


def copy(source: Path, path: Path, c: Config, keep: Callable[[str], bool]) -> Path:
    """Writes the tensors of `source` that `keep` names, as they are, in a file with the keys of `c`."""
    w = gguf.GGUFWriter(path, c.arch)
    add_keys(w, c, f"tiny-{path.stem}", file_type=0)
    add_tokenizer(w, c.n_vocab)
    for tensor in gguf.GGUFReader(source).tensors:
        if keep(tensor.name):
            w.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def write_v2(source: Path, path: Path) -> Path:
    """Writes version 2, which differs from little-endian version 3 in the version number alone."""
    data = bytearray(source.read_bytes())
    data[4:8] = struct.pack("<I", 2)
    path.write_bytes(data)
    return path


def rewritten(path, **keys):
    """Writes the tiny model with other keys in its metadata."""
    config = Config()
    return write(path, config, layout(config, 1), **keys)
