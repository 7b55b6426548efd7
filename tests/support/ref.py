"""Computes the whole model in numpy, readably: it is what every kernel and graph of the core has to compute.

Weights are the dict of a GGUF file, with matrices (out, in). A step takes rows with a parent each: a row
starts from its parent's recurrent state and conv window, and attends to the committed tokens, its ancestors
and itself. It changes nothing committed and returns the log from which `commit` replays the accepted rows. A
dtype of float64 is for the truth, float32 shows what rounding does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import gguf
import numpy as np
from tiny import Config, Weights

L2_EPS = 1e-6  # It is for q and k in DeltaNet: a constant of the model, not its RMS epsilon.


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(x, 0)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + x.dtype.type(eps)) * weight


def l2_norm(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.sum(x * x, -1, keepdims=True) + x.dtype.type(L2_EPS))


def rope(x: np.ndarray, positions: np.ndarray, n_rot: int, base: float) -> np.ndarray:
    """Rotates x (rows, heads, D) as NEOX does: dimension i turns with i + n_rot/2, and dimensions from n_rot
    on stay."""
    half = n_rot // 2
    angle = positions[:, None] * float(base) ** (-np.arange(half) / half)  # (rows, half)
    cos, sin = (f(angle)[:, None, :].astype(x.dtype) for f in (np.cos, np.sin))
    a, b, rest = x[..., :half], x[..., half:n_rot], x[..., n_rot:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def delta_step(
    s: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, decay: np.ndarray, beta: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Runs one row of the recurrence over s (Hv, S_k, S_v); q, k, v (Hv, S); decay, beta (Hv,). Returns the
    new state, delta (Hv, S_v), and o (Hv, S_v) before its norm."""
    d = decay[:, None, None] * s
    delta = beta[:, None] * (v - np.einsum("hkv,hk->hv", d, k))
    s = delta_update(s, k, delta, decay)
    o = np.einsum("hkv,hk->hv", s, q) / np.sqrt(s.dtype.type(s.shape[1]))
    return s, delta, o


def delta_update(s: np.ndarray, k: np.ndarray, delta: np.ndarray, decay: np.ndarray) -> np.ndarray:
    """Does what commit replays from the log."""
    return decay[:, None, None] * s + k[:, :, None] * delta[:, None, :]


@dataclass
class Log:
    """A log is what a step records for each row of a DeltaNet layer."""

    k: np.ndarray  # It is (rows, Hk, S), l2-normalised.
    delta: np.ndarray  # (rows, Hv, S)
    decay: np.ndarray  # It is exp(g), (rows, Hv).
    qkv: np.ndarray  # It is attn_qkv x before the conv, (rows, conv_dim).


@dataclass
class Step:
    """A step has rows that are computed and not committed."""

    logits: np.ndarray  # (rows, V)
    hidden: np.ndarray  # It is (rows, E), after output_norm.
    parents: list[int]
    # Each is the residual stream after a block, (rows, E).
    outputs: list[np.ndarray] = field(default_factory=list)
    logs: dict[int, Log] = field(default_factory=dict)
    kv: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # Each is (rows, Hkv, D).


def attention(
    c: Config,
    w: Weights,
    x: np.ndarray,
    positions: np.ndarray,
    past: tuple[np.ndarray, np.ndarray],
    parents: Sequence[int],
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Mixes normed rows x (rows, E) as a full-attention block does. Returns its output, and its K and V
    (rows, Hkv, D). `past` holds K and V (n, Hkv, D) that every row sees."""
    n = len(x)
    q, gate = np.split((x @ w["attn_q.weight"].T).reshape(n, -1, 2 * c.head_dim), 2, -1)
    k = (x @ w["attn_k.weight"].T).reshape(n, -1, c.head_dim)
    v = (x @ w["attn_v.weight"].T).reshape(n, -1, c.head_dim)
    q = rope(rms_norm(q, w["attn_q_norm.weight"], c.eps), positions, c.rope_dim, c.rope_base)
    k = rope(rms_norm(k, w["attn_k_norm.weight"], c.eps), positions, c.rope_dim, c.rope_base)
    o = np.empty_like(q)
    for r in range(n):
        rows = _path(parents, r)
        keys, values = (
            np.repeat(np.concatenate([before, new[rows]]), q.shape[1] // k.shape[1], axis=1)
            for before, new in zip(past, (k, v), strict=True)
        )  # (keys, H, D)
        score = np.einsum("hd,khd->hk", q[r], keys) / np.sqrt(x.dtype.type(c.head_dim))
        p = np.exp(score - score.max(-1, keepdims=True))
        o[r] = np.einsum("hk,khd->hd", p / p.sum(-1, keepdims=True), values)
    return (o * sigmoid(gate)).reshape(n, -1) @ w["attn_output.weight"].T, (k, v)


def router_gap(w: Weights, c: Config, x: np.ndarray) -> float:
    """Returns how far the least chosen expert's logit is from the next one's, in the row where they are
    closest. Arithmetic that rounds by more may choose the other, whose output is another."""
    if c.n_expert_used == c.n_expert:
        return math.inf
    # They are (rows, experts), the largest first.
    logits = -np.sort(-(x @ w["ffn_gate_inp.weight"].T), axis=1)
    return float((logits[:, c.n_expert_used - 1] - logits[:, c.n_expert_used]).min())


def moe(w: Weights, c: Config, x: np.ndarray) -> np.ndarray:
    logits = x @ w["ffn_gate_inp.weight"].T  # (rows, experts)
    if c.fused_experts:
        gate, up = np.split(w["ffn_gate_up_exps.weight"], 2, axis=1)
    else:
        gate, up = w["ffn_gate_exps.weight"], w["ffn_up_exps.weight"]
    out = np.zeros_like(x)
    for t, row in enumerate(x):
        # Of equal ones the lowest id comes first.
        chosen = np.argsort(-logits[t], kind="stable")[: c.n_expert_used]
        share = np.exp(logits[t, chosen] - logits[t, chosen].max())
        for e, weight in zip(chosen, share / share.sum(), strict=True):
            h = silu(gate[e] @ row) * (up[e] @ row)
            out[t] += weight * (w["ffn_down_exps.weight"][e] @ h)
    if not c.n_ff_shared:
        return out
    names = ("gate", "up", "down")
    shared = {f"ffn_{name}.weight": w[f"ffn_{name}_shexp.weight"] for name in names}
    return out + sigmoid(x @ w["ffn_gate_inp_shexp.weight"])[:, None] * ffn(shared, x)


def ffn(w: Weights, x: np.ndarray) -> np.ndarray:
    h = silu(x @ w["ffn_gate.weight"].T) * (x @ w["ffn_up.weight"].T)  # (rows, FF)
    return h @ w["ffn_down.weight"].T


def block_weights(weights: Weights, i: int) -> Weights:
    prefix = f"blk.{i}."
    return {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}


def tree_positions(parents: Sequence[int]) -> list[int]:
    """Returns the depth of each row below row 0."""
    depth: list[int] = []
    for p in parents:
        depth.append(depth[p] + 1 if p >= 0 else 0)
    return depth


class Reference:
    """This is one timeline of one model."""

    def __init__(self, c: Config, weights: Weights, dtype: type = np.float64) -> None:
        self.c = c
        self.dtype = dtype
        self.w = {name: x.astype(dtype) for name, x in weights.items()}
        self.n_past = 0
        blocks = range(c.n_layer)
        full = [i for i in blocks if not c.is_recurrent(i)]
        linear = [i for i in blocks if c.is_recurrent(i)]
        n_kv = {i: len(weights[f"blk.{i}.attn_k.weight"]) // c.head_dim for i in full}
        self.kv = {i: (np.zeros((0, n_kv[i], c.head_dim), dtype),) * 2 for i in full}  # (n_past, Hkv, D)
        self.state = {i: np.zeros((c.n_v_head, c.state_size, c.state_size), dtype) for i in linear}
        # The oldest row comes first.
        self.conv = {i: np.zeros((c.conv_kernel - 1, c.conv_dim), dtype) for i in linear}
        self.router_gap = math.inf  # It is the least gap of all rows so far.

    def step(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> Step:
        """Runs one forward over rows, where parents[0] = -1 and parents[i] < i; None is a chain."""
        c = self.c
        up = list(parents) if parents is not None else list(range(-1, len(tokens) - 1))
        positions = self.n_past + np.array(tree_positions(up))
        out = Step(np.empty(0), np.empty(0), up)
        x = self.w["token_embd.weight"][np.asarray(tokens)]  # (rows, E)
        for i in range(c.n_layer):
            w = block_weights(self.w, i)
            h = rms_norm(x, w["attn_norm.weight"], c.eps)
            if c.is_recurrent(i):
                x = x + self._delta_net(i, w, h, out)
            else:
                h, out.kv[i] = attention(c, w, h, positions, self.kv[i], up)
                x = x + h
            h = rms_norm(x, w["post_attention_norm.weight"], c.eps)
            if c.n_expert:
                self.router_gap = min(self.router_gap, router_gap(w, c, h))
            x = x + (moe(w, c, h) if c.n_expert else ffn(w, h))
            out.outputs.append(x)
        out.hidden = rms_norm(x, self.w["output_norm.weight"], c.eps)
        head = self.w["token_embd.weight" if c.tied else "output.weight"]
        out.logits = out.hidden @ head.T
        return out

    def _delta_net(self, i: int, w: Weights, x: np.ndarray, out: Step) -> np.ndarray:
        c, n = self.c, len(x)
        qkv = x @ w["attn_qkv.weight"].T  # (rows, conv_dim)
        z = (x @ w["attn_gate.weight"].T).reshape(n, c.n_v_head, -1)
        beta = sigmoid(x @ w["ssm_beta.weight"].T)  # (rows, Hv)
        decay = np.exp(w["ssm_a"] * softplus(x @ w["ssm_alpha.weight"].T + w["ssm_dt.bias"]))
        log = Log(np.empty((n, c.n_k_head, c.state_size), x.dtype), np.empty_like(z), decay, qkv)
        windows, states = [], []  # Both hold an entry for each row: its children go on from there.
        o = np.empty_like(z)
        for r, p in enumerate(out.parents):
            window = np.vstack([windows[p] if p >= 0 else self.conv[i], qkv[r]])  # (conv, conv_dim)
            mixed = silu(np.sum(window * w["ssm_conv1d.weight"].T, 0))
            q, k, v = np.split(mixed, [c.key_dim, 2 * c.key_dim])
            q, k = (l2_norm(y.reshape(c.n_k_head, -1)) for y in (q, k))
            tiled = np.arange(c.n_v_head) % c.n_k_head
            s, log.delta[r], o[r] = delta_step(
                states[p] if p >= 0 else self.state[i],
                q[tiled], k[tiled], v.reshape(c.n_v_head, -1), decay[r], beta[r],
            )  # fmt: skip
            log.k[r] = k
            windows.append(window[1:])
            states.append(s)
        out.logs[i] = log
        o = rms_norm(o, w["ssm_norm.weight"], c.eps) * silu(z)
        return o.reshape(n, -1) @ w["ssm_out.weight"].T

    def commit(self, step: Step, path: Sequence[int]) -> None:
        """Appends rows path[0] = 0, ... each the child of the one before, by replaying the log."""
        rows = list(path)
        for i, (k, v) in step.kv.items():
            self.kv[i] = (np.concatenate([self.kv[i][0], k[rows]]), np.concatenate([self.kv[i][1], v[rows]]))
        tiled = np.arange(self.c.n_v_head) % self.c.n_k_head
        for i, log in step.logs.items():
            for r in rows:
                self.state[i] = delta_update(self.state[i], log.k[r][tiled], log.delta[r], log.decay[r])
                self.conv[i] = np.vstack([self.conv[i][1:], log.qkv[r]])
        self.n_past += len(rows)

    def feed(self, tokens: Sequence[int]) -> np.ndarray:
        """Commits a chain, and returns logits (rows, V)."""
        step = self.step(tokens)
        self.commit(step, range(len(tokens)))
        return step.logits

    def greedy(self, prompt: Sequence[int], n: int) -> list[int]:
        out = [int(self.feed(prompt)[-1].argmax())]
        while len(out) < n:
            out.append(int(self.feed(out[-1:])[-1].argmax()))
        return out


class NextN:
    """This is the NextN head beside a trunk's timeline. Its KV row of position p comes from the trunk's
    hidden state at p - 1 and token p; there is no row 0. `c` is the head's own configuration, `weights` its
    file's with, where it lacks them, the trunk's embedding, output norm and output."""

    def __init__(self, c: Config, weights: Weights, dtype: type = np.float64) -> None:
        self.c = c
        self.w = {name: x.astype(dtype) for name, x in block_weights(weights, c.n_layer).items()}
        output = weights.get("output.weight", weights["token_embd.weight"])
        defaults = {"embed_tokens": "token_embd.weight", "shared_head_norm": "output_norm.weight"}
        for name, other in defaults.items():
            self.w.setdefault(f"nextn.{name}.weight", weights[other].astype(dtype))
        self.w.setdefault("nextn.shared_head_head.weight", output.astype(dtype))
        self.kv = (np.zeros((0, c.n_head_kv, c.head_dim), dtype),) * 2  # They are of positions from 1 on.
        self.router_gap = math.inf  # It is as in Reference.

    def _rows(
        self, tokens: Sequence[int], hidden: np.ndarray, kv: tuple[np.ndarray, np.ndarray]
    ) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """Runs rows (token p, hidden of p - 1 (E,)) after those of kv. Returns the head's hidden states
        (rows, E) after its norm, and kv with them."""
        c, w = self.c, self.w
        e = rms_norm(w["nextn.embed_tokens.weight"][np.asarray(tokens)], w["nextn.enorm.weight"], c.eps)
        h = rms_norm(hidden, w["nextn.hnorm.weight"], c.eps)
        x = np.concatenate([e, h], -1) @ w["nextn.eh_proj.weight"].T  # (rows, E)
        positions = len(kv[0]) + 1 + np.arange(len(tokens))
        parents = range(-1, len(tokens) - 1)
        mixed, new = attention(c, w, rms_norm(x, w["attn_norm.weight"], c.eps), positions, kv, parents)
        x = x + mixed
        h = rms_norm(x, w["post_attention_norm.weight"], c.eps)
        if c.n_expert:
            self.router_gap = min(self.router_gap, router_gap(w, c, h))
        x = x + (moe(w, c, h) if c.n_expert else ffn(w, h))
        kv = (np.concatenate([kv[0], new[0]]), np.concatenate([kv[1], new[1]]))
        return rms_norm(x, w["nextn.shared_head_norm.weight"], c.eps), kv

    def follow(self, tokens: Sequence[int], hidden: np.ndarray) -> None:
        """Appends the rows of committed tokens p, with the trunk's hidden states (rows, E) of p - 1."""
        if len(tokens):
            _, self.kv = self._rows(tokens, hidden, self.kv)

    def draft(self, chain: Sequence[int], hidden: np.ndarray) -> np.ndarray:
        """Returns logits (rows, V) after each token of a chain that begins with the anchor; hidden (E,): the
        trunk's at the last committed token. A chained row takes the head's own hidden state."""
        kv, logits = self.kv, []
        for token in chain:
            out, kv = self._rows([token], hidden[None], kv)
            hidden = out[0]
            logits.append(hidden @ self.w["nextn.shared_head_head.weight"].T)
        return np.stack(logits)


def _path(parents: Sequence[int], row: int) -> list[int]:
    """Returns the rows from row 0 down to `row`."""
    rows = [row]
    while parents[rows[-1]] >= 0:
        rows.append(parents[rows[-1]])
    return rows[::-1]


def read_gguf(path: str) -> Weights:
    """Returns all tensors of a file, dequantised to F32: what the core's arithmetic should amount to."""
    dequantize = gguf.quants.dequantize
    return {
        t.name: dequantize(t.data, t.tensor_type).reshape(t.shape[::-1].tolist())
        for t in gguf.GGUFReader(path).tensors
    }
