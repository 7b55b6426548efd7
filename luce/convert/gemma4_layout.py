"""Lays out a gemma4 GGUF, and that of a gemma4-assistant: keys, tensor names and shapes.

The converter, the oracle and what writes test models (tests/support/tiny_gemma4.py) share it. Shapes are numpy's,
slowest first, so a matrix is (out, in) and GGUF stores its dimensions reversed.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np

ARCH = "gemma4"
ARCH_ASSISTANT = "gemma4-assistant"
# llama.cpp's names: the centroids of an ordered vocabulary's clusters, and its tokens, cluster by cluster, I32.
CENTROIDS, ORDERING = "masked_embd_centroids.weight", "masked_embd_ordering"
STANDING = 1e30  # RoPE's angles are divided by a pair's factor, so that a pair with this one stands.


@dataclass(frozen=True)
class Config:
    """Hyperparameters of a Gemma 4 model, or of an assistant where `n_embd_out` is set. Names follow GGUF's keys;
    `_swa` marks what sliding layers have of their own."""

    sliding: tuple[bool, ...] = (True, True, False, True, True, False)  # One for each layer; others are global.
    window: int = 12  # A sliding layer's row sees so many positions, with its own.
    n_embd: int = 64
    n_ff: int = 96
    n_head: int = 4
    n_head_kv: int = 1
    n_head_kv_swa: int = 2
    head_dim: int = 128
    head_dim_swa: int = 64
    v_is_k: bool = False  # Global layers have no V: it is what their K is made of.
    rope_base: float = 1e6
    rope_base_swa: float = 1e4
    rope_partial: float = 0.25  # So much of a global layer's head turns.
    softcap: float | None = 30.0
    tied: bool = True
    n_vocab: int = 384
    n_ctx: int = 2048
    eps: float = 1e-6
    n_shared_kv: int = 0  # So many layers, the last, read K and V of the last one before them of their kind.
    n_ff_shared_kv: int = 0  # Their FFN has this width; 0: it is n_ff.
    n_embd_per_layer: int = 0  # Each layer adds an embedding of this width (PLE); 0: there is none.
    n_expert: int = 0  # With experts a layer has a mixture beside its dense FFN.
    n_expert_used: int = 0
    n_ff_expert: int = 0
    fused_experts: bool = True  # One tensor, ffn_gate_up_exps, holds gate over up.
    n_embd_out: int = 0  # An assistant's target has this width.
    n_centroid: int = 0  # An assistant's vocabulary is ordered in so many clusters; 0: it is not.
    n_centroid_used: int = 0  # A draft is one of the tokens of so many of them.

    @property
    def arch(self) -> str:
        return ARCH_ASSISTANT if self.n_embd_out else ARCH

    @property
    def n_layer(self) -> int:
        return len(self.sliding)

    @property
    def n_layer_kv(self) -> int:
        """Counts the layers that have K and V of their own: the first ones."""
        return self.n_layer - self.n_shared_kv

    def head(self, i: int) -> int:
        return self.head_dim_swa if self.sliding[i] else self.head_dim

    def head_kv(self, i: int) -> int:
        return self.n_head_kv_swa if self.sliding[i] else self.n_head_kv

    def ff(self, i: int) -> int:
        return self.n_ff_shared_kv or self.n_ff if i >= self.n_layer_kv else self.n_ff

    def has_v(self, i: int) -> bool:
        return self.sliding[i] or not self.v_is_k


Shapes = dict[str, tuple[int, ...]]


def rope_factors(c: Config) -> np.ndarray:
    """Returns rope_freqs.weight (head_dim / 2): the first pairs of a global layer's head turn, the others stand."""
    turning = int(c.head_dim * c.rope_partial / 2)
    return np.array([1.0] * turning + [STANDING] * (c.head_dim // 2 - turning), np.float32)


def block_shapes(c: Config, i: int) -> Shapes:
    """Returns the tensors of block i, without the `blk.i.` prefix."""
    e, d, ff, ple = c.n_embd, c.head(i), c.ff(i), c.n_embd_per_layer
    shapes: Shapes = {
        "attn_norm.weight": (e,),
        "attn_q.weight": (d * c.n_head, e),
        "attn_q_norm.weight": (d,),
    }
    if i < c.n_layer_kv:
        shapes["attn_k.weight"] = (d * c.head_kv(i), e)
        if c.has_v(i):
            shapes["attn_v.weight"] = (d * c.head_kv(i), e)
        shapes["attn_k_norm.weight"] = (d,)
    shapes |= {
        "attn_output.weight": (e, d * c.n_head),
        "post_attention_norm.weight": (e,),
        "ffn_norm.weight": (e,),
        "ffn_gate.weight": (ff, e),
        "ffn_up.weight": (ff, e),
        "ffn_down.weight": (e, ff),
        "post_ffw_norm.weight": (e,),
    }
    if c.n_expert:
        shapes |= _mixture_shapes(c)
    if ple:
        shapes |= {"inp_gate.weight": (ple, e), "proj.weight": (e, ple), "post_norm.weight": (e,)}
    return shapes | {"layer_output_scale.weight": (1,)}


def _mixture_shapes(c: Config) -> Shapes:
    e, n, ff = c.n_embd, c.n_expert, c.n_ff_expert
    shapes: Shapes = {
        "ffn_gate_inp.weight": (n, e),
        "ffn_gate_inp.scale": (e,),
        "pre_ffw_norm_2.weight": (e,),
        "post_ffw_norm_1.weight": (e,),
        "post_ffw_norm_2.weight": (e,),
    }
    if c.fused_experts:
        shapes["ffn_gate_up_exps.weight"] = (n, 2 * ff, e)
    else:
        shapes |= {"ffn_gate_exps.weight": (n, ff, e), "ffn_up_exps.weight": (n, ff, e)}
    return shapes | {"ffn_down_exps.weight": (n, e, ff), "ffn_down_exps.scale": (n,)}


def tensor_shapes(c: Config) -> Shapes:
    """Returns every tensor of the file, in file order."""
    e, layers = c.n_embd, c.n_layer
    shapes: Shapes = {"token_embd.weight": (c.n_vocab, e)}
    if c.n_embd_per_layer:
        shapes |= {
            "per_layer_token_embd.weight": (c.n_vocab, c.n_embd_per_layer * layers),
            "per_layer_model_proj.weight": (c.n_embd_per_layer * layers, e),
            "per_layer_proj_norm.weight": (c.n_embd_per_layer,),
        }
    if c.n_embd_out:
        shapes |= {
            "nextn.pre_projection.weight": (e, 2 * c.n_embd_out),
            "nextn.post_projection.weight": (c.n_embd_out, e),
        }
    if c.n_centroid:
        shapes |= {CENTROIDS: (c.n_centroid, e), ORDERING: (c.n_vocab,)}
    shapes["rope_freqs.weight"] = (c.head_dim // 2,)
    for i in range(layers):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block_shapes(c, i).items()}
    shapes["output_norm.weight"] = (e,)
    if not c.tied:
        shapes["output.weight"] = (c.n_vocab, e)
    return shapes


def add_keys(w: gguf.GGUFWriter, c: Config, name: str, file_type: int) -> None:
    """Adds every key that the file needs, but the tokenizer's."""
    w.add_name(name)
    w.add_file_type(file_type)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    w.add_block_count(c.n_layer)
    w.add_context_length(c.n_ctx)
    w.add_embedding_length(c.n_embd)
    widths = [c.ff(i) for i in range(c.n_layer)]
    w.add_feed_forward_length(widths if len(set(widths)) > 1 else widths[0])
    w.add_head_count(c.n_head)
    heads = [c.head_kv(i) for i in range(c.n_layer)]
    w.add_head_count_kv(heads if len(set(heads)) > 1 else heads[0])
    w.add_key_length(c.head_dim)
    w.add_value_length(c.head_dim)
    w.add_key_length_swa(c.head_dim_swa)
    w.add_value_length_swa(c.head_dim_swa)
    w.add_layer_norm_rms_eps(c.eps)
    w.add_sliding_window(c.window)
    w.add_sliding_window_pattern(list(c.sliding))
    w.add_shared_kv_layers(c.n_shared_kv)
    w.add_rope_freq_base(c.rope_base)
    w.add_rope_freq_base_swa(c.rope_base_swa)
    w.add_rope_dimension_count(c.head_dim)  # rope_freqs says which of them stand.
    w.add_rope_dimension_count_swa(c.head_dim_swa)
    if c.softcap is not None:
        w.add_final_logit_softcapping(c.softcap)
    w.add_embedding_length_per_layer_input(c.n_embd_per_layer)
    if c.n_expert:
        w.add_expert_count(c.n_expert)
        w.add_expert_used_count(c.n_expert_used)
        w.add_expert_feed_forward_length(c.n_ff_expert)
    if c.n_embd_out:
        w.add_embedding_length_out(c.n_embd_out)
        w.add_nextn_predict_layers(c.n_layer)
    if c.n_centroid:
        w.add_uint32(f"{c.arch}.centroid_top_k", c.n_centroid_used)  # As forks of llama.cpp call it.
