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
        self.c, self.first = c, 0
        self.w = {name: x.astype(np.float64) if x.dtype.kind == "f" else x for name, x in weights.items()}

    def logits(self, tokens: Array) -> Array:
        """Returns the logits (T, V) of each position."""
        return self.capped(self.states(tokens)[0] @ self.head().T)

    def states(self, tokens: Array) -> tuple[Array, dict[int, tuple[Array, Array]]]:
        """Returns the normed states (T, E) of each position, and keys and values of the layers that have them."""
        x = self.embedded(tokens)
        per_layer = self.per_layer(tokens, x)
        kv: dict[int, tuple[Array, Array]] = {}
        for i in range(self.c.n_layer):
            x = self.block(i, x, None if per_layer is None else per_layer[:, i], kv)
        return self.norm(x, "output_norm.weight"), kv

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
        scores = np.where(self.visible(i, n), self.scores(i, q, k), -np.inf)  # (H, T, T)
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
        """Turns x (heads, T, D), whose rows are at the positions from `first` on, in pairs (j, j + D / 2)."""
        half = self.c.head(i) // 2
        angle = (self.first + np.arange(x.shape[1]))[:, None] * self.rates(i)  # (T, D / 2)
        cos, sin, a, b = np.cos(angle), np.sin(angle), x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def rates(self, i: int) -> Array:
        """Returns the angles (D / 2) by which a position turns each pair."""
        half = self.c.head(i) // 2
        exponents = -np.arange(half) / half
        if self.c.sliding[i]:
            return self.c.rope_base_swa**exponents
        return self.c.rope_base**exponents / self.w["rope_freqs.weight"]

    def scores(self, i: int, q: Array, k: Array) -> Array:
        return q @ k.swapaxes(1, 2)

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


class AssistantReference(Reference):
    """Drafts of an assistant (MTP) behind a text, from what its target made of the text but its last token. B is the
    target's width."""

    def __init__(self, c: Config, weights: Weights, target: Reference):
        super().__init__(c, weights)
        self.target = target

    def drafts(self, tokens: Array, n: int) -> tuple[list[int], Array]:
        """Returns n greedy drafts that follow the text, and their logits (n, V). Every draft has the position of the
        text's last token, and sees the target's keys before it; none has keys of its own."""
        states, kv = self.target.states(tokens[:-1])
        self.first, token, state = len(tokens) - 1, int(tokens[-1]), self.first_state(states[-1])
        found, logits = [], []
        for _ in range(n):
            x = self.projected(token, state)[None]
            for i in range(self.c.n_layer):
                x = self.block(i, x, None, {i: self.seen(i, kv)})
            normed = self.norm(x[0], "output_norm.weight")
            logits.append(self.scored(normed))
            token, state = int(logits[-1].argmax()), self.passed_on(x[0], normed)
            found.append(token)
        return found, np.stack(logits)

    def first_state(self, normed: Array) -> Array:
        """Returns the state (B) for the first draft, from what the target's head has read."""
        return normed

    def scored(self, normed: Array) -> Array:
        """Returns the logits (V) of a normed state (E). Where the vocabulary is ordered, tokens of clusters that are
        not among the best have one less than the smallest logit of the others."""
        logits = self.capped(self.head() @ normed)
        if not self.c.n_centroid:
            return logits
        seen = self.clusters()[self.best_clusters(normed)].ravel()
        masked = np.full_like(logits, logits[seen].min() - 1)
        masked[seen] = logits[seen]
        return masked

    def clusters(self) -> Array:
        """Returns the tokens (clusters, tokens of each) of the ordered vocabulary."""
        return self.w["masked_embd_ordering"].reshape(self.c.n_centroid, -1)

    def best_clusters(self, normed: Array) -> Array:
        return np.argsort(-(self.w["masked_embd_centroids.weight"] @ normed))[: self.c.n_centroid_used]

    def passed_on(self, x: Array, normed: Array) -> Array:
        """Returns the state (B) for the next draft, from the last layer's output (E) and what the head reads of it."""
        return self.w["nextn.post_projection.weight"] @ normed

    def projected(self, token: int, state: Array) -> Array:
        """Returns the input (E) of the first layer, from a token and a state (B): the target's embedding goes first."""
        return self.w["nextn.pre_projection.weight"] @ np.concatenate([self.target.embedded(np.array(token)), state])

    def seen(self, i: int, kv: dict[int, tuple[Array, Array]]) -> tuple[Array, Array]:
        """Returns the keys and values that layer i sees: of the target's last layer of its kind that has some."""
        k, v = kv[max(j for j in kv if self.target.c.sliding[j] == self.c.sliding[i])]
        first = max(0, self.first - self.c.window + 1) if self.c.sliding[i] else 0
        return k[:, first:], v[:, first:]

    def kv_layer(self, i: int) -> int:
        return i

    def visible(self, i: int, n: int) -> Array:
        return np.ones((n, 1), bool)
