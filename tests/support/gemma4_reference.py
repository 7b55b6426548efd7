"""Computes a Gemma 4 model in numpy, readably: it is what the core's graph and kernels have to compute.

Weights are the dict of a GGUF file, with matrices (out, in); a text is run as a whole, without a cache. The methods are
the steps of the forward, so that a test can put a mistake in place of one.
"""

from __future__ import annotations

import numpy as np
from tiny import Weights

from luce.convert.gemma4_layout import Config

Array = np.ndarray


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Reference:
    """The forward of a model over a text. T counts its tokens, E is n_embd, D a layer's head size, P the width of a
    per-layer embedding."""

    act = staticmethod(gelu)

    def __init__(self, c: Config, weights: Weights):
        self.c = c
        self.w = {name: x.astype(np.float64) for name, x in weights.items()}

    def logits(self, tokens: Array) -> Array:
        """Returns the logits (T, V) of each position."""
        x = self.embedded(tokens)
        per_layer = self.per_layer(tokens, x)
        kv: dict[int, tuple[Array, Array]] = {}
        for i in range(self.c.n_layer):
            x = self.block(i, x, None if per_layer is None else per_layer[:, i], kv)
        return self.capped(self.norm(x, "output_norm.weight") @ self.head().T)

    def embedded(self, tokens: Array) -> Array:
        return self.w["token_embd.weight"][tokens] * self.c.n_embd**0.5  # (T, E)

    def head(self) -> Array:
        return self.w["token_embd.weight" if self.c.tied else "output.weight"]

    def capped(self, z: Array) -> Array:
        return z if self.c.softcap is None else self.c.softcap * np.tanh(z / self.c.softcap)

    def norm(self, x: Array, name: str | None = None) -> Array:
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c.eps)
        return y if name is None else y * self.w[name]

    def block(self, i: int, x: Array, per_layer: Array | None, kv: dict[int, tuple[Array, Array]]) -> Array:
        p = f"blk.{i}."
        attended = self.attention(i, self.norm(x, p + "attn_norm.weight"), kv)
        a = x + self.norm(attended, p + "post_attention_norm.weight")
        y = a + self.norm(self.ffn(i, a), p + "post_ffw_norm.weight")
        if per_layer is not None:
            gated = self.act(y @ self.w[p + "inp_gate.weight"].T) * per_layer  # (T, P)
            y = y + self.norm(gated @ self.w[p + "proj.weight"].T, p + "post_norm.weight")
        return y * self.scale_of(i)

    def scale_of(self, i: int) -> Array:
        return self.w[f"blk.{i}.layer_output_scale.weight"]

    # ---- attention

    def attention(self, i: int, x: Array, kv: dict[int, tuple[Array, Array]]) -> Array:
        c, p, n = self.c, f"blk.{i}.attn_", len(x)
        q = self.rotated(i, self.norm(self.heads(i, x @ self.w[p + "q.weight"].T), p + "q_norm.weight"))
        if i < c.n_layer_kv:
            kv[i] = self.keys_values(i, x)
        k, v = (np.repeat(part, c.n_head // c.head_kv(i), axis=0) for part in kv[self.kv_layer(i)])
        scores = np.where(self.visible(i, n), q @ k.swapaxes(1, 2) * self.score_scale(i), -np.inf)  # (H, T, T)
        return (softmax(scores) @ v).swapaxes(0, 1).reshape(n, -1) @ self.w[p + "output.weight"].T

    def heads(self, i: int, x: Array) -> Array:
        """Returns x (T, heads * D) as (heads, T, D)."""
        return x.reshape(len(x), -1, self.c.head(i)).swapaxes(0, 1)

    def keys_values(self, i: int, x: Array) -> tuple[Array, Array]:
        p = f"blk.{i}.attn_"
        raw = self.heads(i, x @ self.w[p + "k.weight"].T)
        v = self.heads(i, x @ self.w[p + "v.weight"].T) if self.c.has_v(i) else raw
        return self.rotated(i, self.norm(raw, p + "k_norm.weight")), self.norm(v)

    def kv_layer(self, i: int) -> int:
        """Returns the layer whose keys and values layer i reads: its own, or the last before the shared ones."""
        own = [j for j in range(self.c.n_layer_kv) if self.c.sliding[j] == self.c.sliding[i]]
        return i if i < self.c.n_layer_kv else own[-1]

    def rotated(self, i: int, x: Array) -> Array:
        """Turns x (heads, T, D), whose rows are at the positions from 0 on, in pairs (j, j + D / 2)."""
        half = self.c.head(i) // 2
        angle = np.arange(x.shape[1])[:, None] * self.rates(i)  # (T, D / 2)
        cos, sin, a, b = np.cos(angle), np.sin(angle), x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def rates(self, i: int) -> Array:
        """Returns the angles (D / 2) by which a position turns each pair."""
        half = self.c.head(i) // 2
        exponents = -np.arange(half) / half
        if self.c.sliding[i]:
            return self.c.rope_base_swa**exponents
        return self.c.rope_base**exponents / self.w["rope_freqs.weight"]

    def score_scale(self, i: int) -> float:
        return 1.0

    def visible(self, i: int, n: int) -> Array:
        """Says which keys (columns) each row sees."""
        back = np.arange(n)[:, None] - np.arange(n)
        return (back >= 0) & (back < self.c.window) if self.c.sliding[i] else back >= 0

    # ---- FFN

    def ffn(self, i: int, a: Array) -> Array:
        p = f"blk.{i}."
        x = self.norm(a, p + "ffn_norm.weight")
        gate, up, down = (self.w[f"{p}ffn_{part}.weight"] for part in ("gate", "up", "down"))
        dense = (self.act(x @ gate.T) * (x @ up.T)) @ down.T
        if not self.c.n_expert:
            return dense
        mixed = self.mixture(i, self.norm(a, p + "pre_ffw_norm_2.weight"), self.routed(i, a))
        return self.norm(dense, p + "post_ffw_norm_1.weight") + self.norm(mixed, p + "post_ffw_norm_2.weight")

    def routed(self, i: int, a: Array) -> Array:
        """Returns the weights (T, experts) of a row's experts, 0 of those that it does not use."""
        p = f"blk.{i}.ffn_"
        x = self.norm(a) * self.w[p + "gate_inp.scale"] / self.c.n_embd**0.5
        chances = softmax(x @ self.w[p + "gate_inp.weight"].T)
        least = np.sort(chances, -1)[:, -self.c.n_expert_used, None]
        return self.scaled(i, np.where(chances >= least, chances, 0))

    def scaled(self, i: int, chosen: Array) -> Array:
        return chosen / chosen.sum(-1, keepdims=True) * self.w[f"blk.{i}.ffn_down_exps.scale"]

    def mixture(self, i: int, x: Array, shares: Array) -> Array:
        p = f"blk.{i}.ffn_"
        if self.c.fused_experts:
            gate, up = np.split(self.w[p + "gate_up_exps.weight"], 2, axis=1)
        else:
            gate, up = self.w[p + "gate_exps.weight"], self.w[p + "up_exps.weight"]
        inner = self.act(np.einsum("te,nfe->ntf", x, gate)) * np.einsum("te,nfe->ntf", x, up)
        return np.einsum("ntf,nef,tn->te", inner, self.w[p + "down_exps.weight"], shares)

    # ---- per-layer embeddings

    def per_layer(self, tokens: Array, x: Array) -> Array | None:
        """Returns what each layer's gate is multiplied by, (T, layers, P)."""
        c = self.c
        if not c.n_embd_per_layer:
            return None
        shape = (len(tokens), c.n_layer, c.n_embd_per_layer)
        projected = (x @ self.w["per_layer_model_proj.weight"].T / c.n_embd**0.5).reshape(shape)
        own = self.w["per_layer_token_embd.weight"][tokens].reshape(shape) * c.n_embd_per_layer**0.5
        return (self.norm(projected, "per_layer_proj_norm.weight") + own) / 2**0.5
