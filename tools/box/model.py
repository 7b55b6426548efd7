"""Computes Qwen3.5 in torch: the trunk as transformers' Qwen3_5ForCausalLM names and computes it.

Blocks are plain functions of (x, weights), compiled once for each kind, so that twelve blocks cost two
compilations. `forward` takes whole windows (training, prefill, evaluation), and `step` takes one token for
each of many sequences (generation). Weights stay F32; activations take the model's `dtype`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from box import delta

EPS = 1e-6
TAPS = 4  # The convolution has so many taps.
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Config:
    """These are sizes of the trunk. Rows of every matrix divide by 256, as K-quants want."""

    n_vocab: int = 4096
    n_embd: int = 256
    n_ff: int = 1024
    n_layer: int = 12
    interval: int = 4  # Every fourth block has full attention.
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64  # All of it is rotated.
    n_k_head: int = 4
    n_v_head: int = 8
    state_size: int = 64
    rope_base: float = 1e6
    n_ctx: int = 2048

    def is_full(self, layer: int) -> bool:
        return (layer + 1) % self.interval == 0

    def hf(self, eos_id: int) -> dict[str, object]:
        """Returns config.json of the trunk and its one NextN layer."""
        kinds = ["full_attention" if self.is_full(i) else "linear_attention" for i in range(self.n_layer)]
        half = self.head_dim // 2
        return {
            "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "dtype": "float16",
            "vocab_size": self.n_vocab, "hidden_size": self.n_embd, "intermediate_size": self.n_ff,
            "num_hidden_layers": self.n_layer, "num_attention_heads": self.n_head,
            "num_key_value_heads": self.n_head_kv, "head_dim": self.head_dim, "hidden_act": "silu",
            "rms_norm_eps": EPS, "max_position_embeddings": self.n_ctx, "tie_word_embeddings": True,
            "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True,
            "layer_types": kinds, "full_attention_interval": self.interval,
            "linear_conv_kernel_dim": TAPS, "linear_num_key_heads": self.n_k_head,
            "linear_num_value_heads": self.n_v_head, "linear_key_head_dim": self.state_size,
            "linear_value_head_dim": self.state_size, "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False, "eos_token_id": eos_id,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_base,
                                "partial_rotary_factor": 1.0, "mrope_interleaved": True,
                                "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]},
        }  # fmt: skip


# ---- the arithmetic


def rms(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Computes RMSNorm over the last axis, in F32; `weight` is zero-centred."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
    return (y if weight is None else y * (1.0 + weight)).to(x.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def rope_table(positions: Tensor, dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Returns cos and sin (..., dim) F32 of NEOX RoPE at integer `positions` (...)."""
    inverse = base ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    angle = positions.float().unsqueeze(-1) * inverse
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x (..., T, H, D) by cos, sin (T, D)."""
    y = x.float()
    low, high = y.chunk(2, -1)
    turned = torch.cat([-high, low], -1)
    return (y * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)).to(x.dtype)


def feed_forward(x: Tensor, w: Weights) -> Tensor:
    hidden = F.silu(linear(x, w["mlp.gate_proj.weight"])) * linear(x, w["mlp.up_proj.weight"])
    return linear(hidden, w["mlp.down_proj.weight"])


def attention_inputs(x: Tensor, w: Weights, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Returns q (B, T, H, D) and k, v (B, T, Hkv, D), rotated, and the gate (B, T, H*D)."""
    dim = w["self_attn.q_norm.weight"].shape[0]
    q, gate = linear(x, w["self_attn.q_proj.weight"]).unflatten(-1, (-1, 2 * dim)).chunk(2, -1)
    k = linear(x, w["self_attn.k_proj.weight"]).unflatten(-1, (-1, dim))
    v = linear(x, w["self_attn.v_proj.weight"]).unflatten(-1, (-1, dim))
    q = rotate(rms(q, w["self_attn.q_norm.weight"]), cos, sin)
    k = rotate(rms(k, w["self_attn.k_norm.weight"]), cos, sin)
    return q, k, v, gate.flatten(-2)


def finish_block(x: Tensor, mixed: Tensor, w: Weights) -> Tensor:
    x = x + mixed
    return x + feed_forward(rms(x, w["post_attention_layernorm.weight"]), w)


def full_block(x: Tensor, w: Weights, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Puts x (B, T, E) through a full-attention block. Returns also its k and v (B, Hkv, T, D)."""
    q, k, v, gate = attention_inputs(rms(x, w["input_layernorm.weight"]), w, cos, sin)
    repeat = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    wide_k, wide_v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    o = F.scaled_dot_product_attention(q, wide_k, wide_v, is_causal=True)
    o = o.transpose(1, 2).flatten(-2) * torch.sigmoid(gate)
    return finish_block(x, linear(o, w["self_attn.o_proj.weight"]), w), k.detach(), v.detach()


def full_step(
    x: Tensor, w: Weights, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, position: int
) -> Tensor:
    """Puts x (N, 1, E) at `position` through a full-attention block, and writes its k and v into the caches
    (N, Hkv, capacity, D)."""
    q, k, v, gate = attention_inputs(rms(x, w["input_layernorm.weight"]), w, cos, sin)
    keys[:, :, position] = k[:, 0]
    values[:, :, position] = v[:, 0]
    seen = slice(0, position + 1)
    # The heads that share one k become its queries: (N, Hkv, H / Hkv, D).
    q = q[:, 0].unflatten(1, (keys.shape[1], -1))
    o = F.scaled_dot_product_attention(q, keys[:, :, seen], values[:, :, seen])
    o = o.flatten(1).unsqueeze(1) * torch.sigmoid(gate)
    return finish_block(x, linear(o, w["self_attn.o_proj.weight"]), w)


def _delta_heads(conv: Tensor, x: Tensor, w: Weights) -> tuple[Tensor, ...]:
    """Returns q, k, v by head after the convolution, and g and beta (..., Hv) F32."""
    hv, dim = w["linear_attn.A_log"].shape[0], w["linear_attn.norm.weight"].shape[0]
    n_k = (conv.shape[-1] - hv * dim) // 2
    q, k, v = (t.unflatten(-1, (-1, dim)) for t in conv.split([n_k, n_k, hv * dim], -1))
    beta = linear(x, w["linear_attn.in_proj_b.weight"]).float().sigmoid()
    rate = F.softplus(linear(x, w["linear_attn.in_proj_a.weight"]).float() + w["linear_attn.dt_bias"])
    return q, k, v, -w["linear_attn.A_log"].exp() * rate, beta


def _delta_out(o: Tensor, x: Tensor, w: Weights) -> Tensor:
    gate = F.silu(linear(x, w["linear_attn.in_proj_z.weight"]).float())
    normed = rms(o).float() * w["linear_attn.norm.weight"]
    return linear((normed.flatten(-2) * gate).to(x.dtype), w["linear_attn.out_proj.weight"])


def delta_block(x: Tensor, w: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """Puts x (B, T, E), with T a multiple of 64, through a DeltaNet block from zero state. Returns also the
    last three rows before the convolution (B, 3, C) and the last state (B, Hv, K, V)."""
    y = rms(x, w["input_layernorm.weight"])
    rows = linear(y, w["linear_attn.in_proj_qkv.weight"])  # (B, T, C)
    padded = F.pad(rows, (0, 0, TAPS - 1, 0)).float()
    taps = w["linear_attn.conv1d.weight"][:, 0]  # They are (C, 4), and tap 0 is the oldest.
    conv = padded[:, : x.shape[1]] * taps[:, 0]
    for i in range(1, TAPS):
        conv = conv + padded[:, i : i + x.shape[1]] * taps[:, i]
    o, state = delta.chunked(*_delta_heads(F.silu(conv).to(x.dtype), y, w))
    tail = rows[:, 1 - TAPS :].detach()
    return finish_block(x, _delta_out(o, y, w), w), tail, state.detach()


def delta_step(x: Tensor, w: Weights, tail: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Puts x (N, E), one row later, through a DeltaNet block. Returns its output and the new tail and state.
    """
    y = rms(x, w["input_layernorm.weight"])
    rows = torch.cat([tail, linear(y, w["linear_attn.in_proj_qkv.weight"]).unsqueeze(1)], 1)  # (N, 4, C)
    conv = F.silu((rows.float() * w["linear_attn.conv1d.weight"][:, 0].T).sum(1)).to(x.dtype)
    o, state = delta.step(*_delta_heads(conv, y, w), state)
    return finish_block(x, _delta_out(o, y, w), w), rows[:, 1:], state


# ---- modules that hold the weights under transformers' names


def matrix(out: int, inner: int, gain: float = 1.0) -> nn.Linear:
    layer = nn.Linear(inner, out, bias=False)
    nn.init.normal_(layer.weight, std=0.5 * gain * inner**-0.5)
    return layer


class Norm(nn.Module):
    """This is a norm's weight; zeros for the zero-centred ones."""

    def __init__(self, n: int, value: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((n,), value))


class DeltaWeights(nn.Module):
    def __init__(self, c: Config, gain: float):
        super().__init__()
        value_dim = c.n_v_head * c.state_size
        conv_dim = 2 * c.n_k_head * c.state_size + value_dim
        self.in_proj_qkv = matrix(conv_dim, c.n_embd)
        self.in_proj_z = matrix(value_dim, c.n_embd)
        self.in_proj_b = matrix(c.n_v_head, c.n_embd)
        self.in_proj_a = matrix(c.n_v_head, c.n_embd)
        self.conv1d = nn.Conv1d(conv_dim, conv_dim, TAPS, groups=conv_dim, bias=False)
        dt = torch.empty(c.n_v_head).uniform_(-6.9, -2.3).exp()  # It is log-uniform in 0.001 .. 0.1.
        self.dt_bias = nn.Parameter(dt + (-torch.expm1(-dt)).log())  # Then softplus gives dt.
        self.A_log = nn.Parameter(torch.empty(c.n_v_head).uniform_(1, 16).log())
        self.norm = Norm(c.state_size, 1.0)
        self.out_proj = matrix(c.n_embd, value_dim, gain)


class AttentionWeights(nn.Module):
    def __init__(self, c: Config, gain: float, gated: bool = True):
        super().__init__()
        heads, heads_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        self.q_proj = matrix(2 * heads if gated else heads, c.n_embd)
        self.k_proj = matrix(heads_kv, c.n_embd)
        self.v_proj = matrix(heads_kv, c.n_embd)
        self.o_proj = matrix(c.n_embd, heads, gain)
        self.q_norm = Norm(c.head_dim)
        self.k_norm = Norm(c.head_dim)


class FeedForwardWeights(nn.Module):
    def __init__(self, n_embd: int, n_ff: int, gain: float):
        super().__init__()
        self.gate_proj = matrix(n_ff, n_embd)
        self.up_proj = matrix(n_ff, n_embd)
        self.down_proj = matrix(n_embd, n_ff, gain)


class Block(nn.Module):
    """These are one block's weights; `weights()` hands them to the functions above by their local names."""

    def __init__(self, c: Config, full: bool):
        super().__init__()
        gain = (2 * c.n_layer) ** -0.5
        self.full = full
        self.input_layernorm = Norm(c.n_embd)
        if full:
            self.self_attn = AttentionWeights(c, gain)
        else:
            self.linear_attn = DeltaWeights(c, gain)
        self.post_attention_layernorm = Norm(c.n_embd)
        self.mlp = FeedForwardWeights(c.n_embd, c.n_ff, gain)

    def weights(self) -> Weights:
        return dict(self.named_parameters())


class Inner(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.n_vocab, c.n_embd)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(Block(c, c.is_full(i)) for i in range(c.n_layer))
        self.norm = Norm(c.n_embd)


class Cache:
    """This is what generation remembers of N sequences: for a DeltaNet block the tail (N, 3, C) and the state
    (N, Hv, K, V), for a full one keys and values (N, Hkv, capacity, D)."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0
        self.layers: list[tuple[Tensor, Tensor]] = []


class Trunk(nn.Module):
    """state_dict() is transformers' (tied: there is no lm_head)."""

    def __init__(self, c: Config, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = c
        self.dtype = dtype
        self.model = Inner(c)
        self._delta_block: Callable[..., tuple[Tensor, Tensor, Tensor]] = delta_block
        self._full_block: Callable[..., tuple[Tensor, Tensor, Tensor]] = full_block
        self._delta_step: Callable[..., tuple[Tensor, Tensor, Tensor]] = delta_step

    def compile_blocks(self) -> None:
        self._delta_block = torch.compile(delta_block, dynamic=False)
        self._full_block = torch.compile(full_block, dynamic=False)
        self._delta_step = torch.compile(delta_step, dynamic=False)

    @property
    def embedding(self) -> Tensor:
        """Returns the token embeddings (V, E), which are the output matrix too."""
        return self.model.embed_tokens.weight

    def rope(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(first, first + count, device=self.embedding.device)
        return rope_table(positions, self.config.head_dim, self.config.rope_base)

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding).to(self.dtype)

    def forward(
        self, tokens: Tensor, taps: Sequence[int] = (), cache: Cache | None = None, eager: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs tokens (B, T) from position 0. Returns the hidden states after the output norm (B, T, E), and
        the residual stream after each tapped block. T is padded to a multiple of 64 inside; a cache needs
        one. `eager` says that it is not compiled, for shapes that are rare; nor is a prefill into a cache."""
        length = tokens.shape[1]
        pad = -length % delta.CHUNK
        if pad and cache is not None:
            raise ValueError(f"a prefill of {length} tokens is not a multiple of {delta.CHUNK}")
        x = self.embed(F.pad(tokens, (0, pad)))
        cos, sin = self.rope(0, length + pad)
        eager = eager or cache is not None
        run_full = full_block if eager else self._full_block
        run_delta = delta_block if eager else self._delta_block
        tapped = {}
        for i, block in enumerate(self.model.layers):
            if block.full:
                x, *kept = run_full(x, block.weights(), cos, sin)
            else:
                x, *kept = run_delta(x, block.weights())
            if i in taps:
                tapped[i] = x[:, :length]
            if cache is not None:
                cache.layers.append(self._keep(block.full, kept, cache.capacity))
        if cache is not None:
            cache.length = length
        return rms(x[:, :length], self.model.norm.weight), [tapped[i] for i in taps]

    @staticmethod
    def _keep(full: bool, kept: list[Tensor], capacity: int) -> tuple[Tensor, Tensor]:
        if not full:
            return kept[0].clone(), kept[1].clone()  # Views would keep all rows and all states.
        room = [t.new_empty(*t.shape[:2], capacity, t.shape[3]) for t in kept]
        for t, source in zip(room, kept, strict=True):
            t[:, :, : source.shape[2]] = source
        return room[0], room[1]

    def step(self, tokens: Tensor, cache: Cache, eager: bool = False) -> Tensor:
        """Takes one token (N,) for each sequence -> hidden after the output norm (N, E)."""
        run_delta = delta_step if eager else self._delta_step
        x = self.embed(tokens)
        cos, sin = self.rope(cache.length, 1)
        for i, block in enumerate(self.model.layers):
            one, two = cache.layers[i]
            if block.full:
                x = full_step(x[:, None], block.weights(), cos, sin, one, two, cache.length)[:, 0]
            else:
                x, one, two = run_delta(x, block.weights(), one, two)
                cache.layers[i] = one, two
        cache.length += 1
        return rms(x, self.model.norm.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embedding.to(hidden.dtype))


def token_loss(hidden: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """Computes the mean cross-entropy of hidden (..., E) against targets (...)."""
    logits = F.linear(hidden, embedding.to(hidden.dtype)).float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def count_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
