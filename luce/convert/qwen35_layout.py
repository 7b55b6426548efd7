"""Lays out a qwen35 GGUF: keys, tensor names and shapes.

The converter, the oracle (luce/bench/oracle_model.py) and what writes test models (tests/support/tiny.py) share it.
Shapes are numpy's, slowest first, so a matrix is (out, in) and GGUF stores its dimensions reversed.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf

from luce.convert.attention_keys import add_attention_keys

ARCH = "qwen35"
ARCH_MOE = "qwen35moe"
PRE_TOKENIZER = "qwen35"  # It is the value of tokenizer.ggml.pre.


@dataclass(frozen=True)
class Config:
    """Hyperparameters of a Qwen3.5 model, dense unless it has experts. Names follow GGUF's keys."""

    n_layer: int = 4  # It counts the trunk's blocks.
    n_embd: int = 64
    n_ff: int = 128
    n_head: int = 2
    n_head_kv: int = 1
    head_dim: int = 64
    rope_dim: int = 16
    n_k_head: int = 2  # DeltaNet has so many key heads (Hk).
    n_v_head: int = 2  # DeltaNet has so many value heads (Hv), a multiple of Hk.
    state_size: int = 32  # DeltaNet's heads have this size (S).
    conv_kernel: int = 4
    n_vocab: int = 384
    rope_base: float = 1e7
    eps: float = 1e-6
    tied: bool = False
    interval: int = 4  # Block i has full attention where (i + 1) % interval == 0 (full_attention_interval).
    # It replaces `interval`: True marks a DeltaNet block of the trunk.
    recurrent: tuple[bool, ...] | None = None
    n_ctx: int = 2048
    n_nextn: int = 0
    # M-RoPE has 4 sections. Text needs none: None splits in thirds.
    rope_sections: tuple[int, ...] | None = None
    n_expert: int = 0  # With 0 the model is dense and n_ff is the FFN's width; else n_ff is not used.
    n_expert_used: int = 0
    n_ff_expert: int = 0
    n_ff_shared: int = 0  # It is the shared expert's width, 0 where there is none.
    fused_experts: bool = False  # Then one tensor, ffn_gate_up_exps, holds gate over up.

    @property
    def arch(self) -> str:
        return ARCH_MOE if self.n_expert else ARCH

    def is_recurrent(self, i: int) -> bool:
        if i >= self.n_layer:
            return False
        return self.recurrent[i] if self.recurrent is not None else (i + 1) % self.interval != 0

    @property
    def key_dim(self) -> int:
        return self.n_k_head * self.state_size

    @property
    def value_dim(self) -> int:
        return self.n_v_head * self.state_size

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_dim + self.value_dim


Shapes = dict[str, tuple[int, ...]]


def _ffn_shapes(c: Config) -> Shapes:
    e, ff = c.n_embd, c.n_ff
    if not c.n_expert:
        return {"ffn_gate.weight": (ff, e), "ffn_up.weight": (ff, e), "ffn_down.weight": (e, ff)}
    n, ff, shared = c.n_expert, c.n_ff_expert, c.n_ff_shared
    shapes: Shapes = {"ffn_gate_inp.weight": (n, e)}
    if c.fused_experts:
        shapes["ffn_gate_up_exps.weight"] = (n, 2 * ff, e)
    else:
        shapes |= {"ffn_gate_exps.weight": (n, ff, e), "ffn_up_exps.weight": (n, ff, e)}
    shapes["ffn_down_exps.weight"] = (n, e, ff)
    if not shared:
        return shapes
    return shapes | {
        "ffn_gate_inp_shexp.weight": (e,),
        "ffn_gate_shexp.weight": (shared, e),
        "ffn_up_shexp.weight": (shared, e),
        "ffn_down_shexp.weight": (e, shared),
    }


def block_shapes(c: Config, i: int) -> Shapes:
    """Returns the tensors of block i, without the `blk.i.` prefix."""
    e, d = c.n_embd, c.head_dim
    shapes: Shapes = {"attn_norm.weight": (e,)}
    if c.is_recurrent(i):
        shapes |= {
            "attn_qkv.weight": (c.conv_dim, e),
            "attn_gate.weight": (c.value_dim, e),
            "ssm_conv1d.weight": (c.conv_dim, c.conv_kernel),
            "ssm_dt.bias": (c.n_v_head,),
            "ssm_a": (c.n_v_head,),
            "ssm_beta.weight": (c.n_v_head, e),
            "ssm_alpha.weight": (c.n_v_head, e),
            "ssm_norm.weight": (c.state_size,),
            "ssm_out.weight": (e, c.value_dim),
        }
    else:
        shapes |= {
            "attn_q.weight": (2 * d * c.n_head, e),
            "attn_k.weight": (d * c.n_head_kv, e),
            "attn_v.weight": (d * c.n_head_kv, e),
            "attn_q_norm.weight": (d,),
            "attn_k_norm.weight": (d,),
            "attn_output.weight": (e, d * c.n_head),
        }
    shapes |= {"post_attention_norm.weight": (e,)} | _ffn_shapes(c)
    if i >= c.n_layer:
        shapes |= {
            "nextn.eh_proj.weight": (e, 2 * e),
            "nextn.enorm.weight": (e,),
            "nextn.hnorm.weight": (e,),
            "nextn.shared_head_norm.weight": (e,),
        }
    return shapes


def tensor_shapes(c: Config) -> Shapes:
    """Returns every tensor of the file, in file order. `nextn.embed_tokens` is optional and left out."""
    shapes: Shapes = {"token_embd.weight": (c.n_vocab, c.n_embd)}
    for i in range(c.n_layer + c.n_nextn):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block_shapes(c, i).items()}
    shapes["output_norm.weight"] = (c.n_embd,)
    if not c.tied:
        shapes["output.weight"] = (c.n_vocab, c.n_embd)
    return shapes


def add_keys(w: gguf.GGUFWriter, c: Config, name: str, file_type: int) -> None:
    """Adds every key that a qwen35 file needs, but the tokenizer's."""
    w.add_name(name)
    w.add_file_type(file_type)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    w.add_block_count(c.n_layer + c.n_nextn)
    w.add_context_length(c.n_ctx)
    w.add_embedding_length(c.n_embd)
    if c.n_expert:
        w.add_expert_count(c.n_expert)
        w.add_expert_used_count(c.n_expert_used)
        w.add_expert_feed_forward_length(c.n_ff_expert)
        w.add_expert_shared_feed_forward_length(c.n_ff_shared)
    else:
        w.add_feed_forward_length(c.n_ff)
    add_attention_keys(w, c)
    third = c.rope_dim // 2 // 3
    w.add_rope_dimension_sections(c.rope_sections or [c.rope_dim // 2 - 2 * third, third, third, 0])
    w.add_ssm_conv_kernel(c.conv_kernel)
    w.add_ssm_inner_size(c.value_dim)
    w.add_ssm_state_size(c.state_size)
    w.add_ssm_time_step_rank(c.n_v_head)
    w.add_ssm_group_count(c.n_k_head)
    if c.recurrent is None:
        w.add_full_attention_interval(c.interval)
    else:
        flags = [c.is_recurrent(i) for i in range(c.n_layer + c.n_nextn)]
        w.add_array(f"{c.arch}.attention.recurrent_layers", flags)
    if c.n_nextn:
        w.add_nextn_predict_layers(c.n_nextn)
