"""Stage dflash trains the block-diffusion drafter, which reads the trunk's features; conditional.py has those whose
drafts depend on the draft before.

One forward drafts a block: rows are the anchor and 15 masks, each layer's keys are the features of the
committed positions before the anchor and the block's own rows (no mask inside the block). Row i predicts the
token at its own position. Names and layout are those of z-lab's published drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from box import generate, tokens
from box.fit import add_to, fit
from box.model import (
    EPS,
    AttentionWeights,
    Config,
    FeedForwardWeights,
    Norm,
    Trunk,
    Weights,
    count_parameters,
    feed_forward,
    linear,
    matrix,
    rms,
    rope_table,
    rotate,
)
from box.nextn import distillation_loss, leading, rates, stops, walk
from box.store import Deadline, Store, say
from box.trunk import load_trunk

BLOCK = 16
Table = tuple[Tensor, Tensor]  # It holds cos and sin by position.


@dataclass(frozen=True)
class Settings:
    batch: int = 64
    anchors: int = 32  # A step has so many, the same for the whole batch.
    max_steps: int = 0
    reserve: float = 20.0
    compile: bool = True
    eval_rows: int = 16


@dataclass(frozen=True)
class Sizes:
    n_layer: int = 4
    n_ff: int = 768


def target_layers(n: int, n_layer: int) -> list[int]:
    """Returns the trunk's layers whose outputs a drafter of n layers taps, evenly from the second on."""
    return [round(1 + i * (n_layer - 4) / (n - 1)) for i in range(n)] if n > 1 else [n_layer // 2]


class Layer(nn.Module):
    def __init__(self, c: Config, sizes: Sizes):
        super().__init__()
        gain = (2 * sizes.n_layer) ** -0.5
        self.input_layernorm = Norm(c.n_embd, 1.0)
        self.self_attn = AttentionWeights(c, gain, gated=False)
        for norm in (self.self_attn.q_norm, self.self_attn.k_norm):
            nn.init.ones_(norm.weight)
        self.post_attention_layernorm = Norm(c.n_embd, 1.0)
        self.mlp = FeedForwardWeights(c.n_embd, sizes.n_ff, gain)


class Drafter(nn.Module):
    """state_dict() has z-lab's names; embedding and output matrix are the target's."""

    kind = "dflash"  # Its checkpoint and report are named so.
    first = 1  # Rows draft from this one on: row i predicts the token at its own position, or, with 0, one further.
    decay = 4.0  # The loss of the i-th draft weighs exp(-i / decay).

    def __init__(self, c: Config, sizes: Sizes):
        super().__init__()
        self.config, self.sizes = c, sizes
        self.taps = target_layers(sizes.n_layer, c.n_layer)
        self.fc = matrix(c.n_embd, len(self.taps) * c.n_embd)
        self.hidden_norm = Norm(c.n_embd, 1.0)
        self.layers = nn.ModuleList(Layer(c, sizes) for _ in range(sizes.n_layer))
        self.norm = Norm(c.n_embd, 1.0)

    def weights(self) -> Weights:
        return dict(self.named_parameters())

    def hf(self) -> dict[str, object]:
        c = self.config
        return {
            "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dtype": "float16",
            "vocab_size": c.n_vocab, "hidden_size": c.n_embd, "intermediate_size": self.sizes.n_ff,
            "num_hidden_layers": self.sizes.n_layer, "num_attention_heads": c.n_head,
            "num_key_value_heads": c.n_head_kv, "head_dim": c.head_dim, "hidden_act": "silu",
            "rms_norm_eps": EPS, "max_position_embeddings": c.n_ctx, "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_base},
            "layer_types": ["full_attention"] * self.sizes.n_layer, "num_target_layers": c.n_layer,
            "tie_word_embeddings": False, "block_size": BLOCK,
            "dflash_config": {"mask_token_id": tokens.special_id(tokens.MASK), "causal": False,
                              "target_layer_ids": self.taps},
        }  # fmt: skip

    def drafts(self, logits: Tensor, mine: Tensor, anchors: Tensor) -> Tensor:
        """Returns the greedy drafts (..., n) of rows with logits (..., n, V) and states (..., n, E), behind the
        anchors' tokens (...)."""
        return logits.argmax(-1)


def plain_rms(x: Tensor, weight: Tensor) -> Tensor:
    return (rms(x.float()) * weight).to(x.dtype)


def features(tapped: Sequence[Tensor], w: Weights) -> Tensor:
    """Makes context features (B, T, E) of the residual streams (B, T, E) of the tapped layers."""
    return plain_rms(linear(torch.cat(list(tapped), -1), w["fc.weight"]), w["hidden_norm.weight"])


def convolve(x: Tensor, base: Tensor, added: Tensor) -> Tensor:
    """Convolves the rows x (B, A * BLOCK, E) of each block, zero before its first, by a kernel: base (T, E), and
    what each row adds to it for groups of values, (B, A * BLOCK, T, E / G)."""
    blocks, out = x.unflatten(1, (-1, BLOCK)), torch.zeros_like(x)
    for tap in range(base.shape[0]):
        earlier = F.pad(blocks, (0, 0, tap, 0))[:, :, :BLOCK].flatten(1, 2)
        out = out + (base[tap] + added[:, :, tap].repeat_interleave(x.shape[-1] // added.shape[-1], -1)) * earlier
    return out


def convolved(y: Tensor, w: Weights, name: str, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    """Runs a sublayer on y (B, R, E), between the convolutions of what goes in and of what comes out where the
    drafter has them (DFlash2); the kernels of both come from y."""
    if f"{name}.base_kernel" not in w:
        return sublayer(y)
    base = w[f"{name}.base_kernel"].to(y.dtype)  # (2, T, E)
    added = linear(y, w[f"{name}.kernel_projection.weight"]).unflatten(-1, (2, base.shape[1], -1))
    return convolve(sublayer(convolve(y, base[0], added[:, :, 0])), base[1], added[:, :, 1])


def attend(y: Tensor, context: Tensor, w: Weights, mask: Tensor, table: Table, rows: Tensor) -> Tensor:
    """Returns the attention (B, R, E) of a layer's weights `w`; the rest is draft_hidden's."""
    cos, sin = table
    t, dim = context.shape[1], w["self_attn.q_norm.weight"].shape[0]
    heads = lambda x, name: linear(x, w[f"self_attn.{name}_proj.weight"]).unflatten(-1, (-1, dim))  # noqa: E731
    both = torch.cat([context, y], 1)  # (B, T + R, E)
    q = plain_rms(heads(y, "q"), w["self_attn.q_norm.weight"])
    k, v = plain_rms(heads(both, "k"), w["self_attn.k_norm.weight"]), heads(both, "v")
    q = rotate(q, cos[rows], sin[rows])
    k = rotate(k, torch.cat([cos[:t], cos[rows]]), torch.cat([sin[:t], sin[rows]]))
    repeat = q.shape[2] // k.shape[2]
    k, v = (s.repeat_interleave(repeat, 2).transpose(1, 2) for s in (k, v))
    o = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask).transpose(1, 2).flatten(-2)
    return linear(o, w["self_attn.o_proj.weight"])


def draft_hidden(
    context: Tensor, x: Tensor, w: Weights, n_layer: int, mask: Tensor, table: Table, rows: Tensor
) -> Tensor:
    """Returns the normed hidden states (B, R, E) of x (B, R, E), the embedded rows at positions `rows` (R,).
    `context` (B, T, E) has the features at positions 0 .. T-1, `mask` is (R, T + R), and `table` holds cos
    and sin by position."""
    for i in range(n_layer):
        p = f"layers.{i}."
        local = {name.removeprefix(p): value for name, value in w.items() if name.startswith(p)}
        attention = lambda y, local=local: attend(y, context, local, mask, table, rows)  # noqa: E731
        mlp = lambda y, local=local: feed_forward(y, local)  # noqa: E731
        x = x + convolved(plain_rms(x, local["input_layernorm.weight"]), local, "attention_conv", attention)
        x = x + convolved(plain_rms(x, local["post_attention_layernorm.weight"]), local, "mlp_conv", mlp)
    return plain_rms(x, w["norm.weight"])


def block_rows(anchors: Tensor) -> Tensor:
    """Returns the positions of all rows (A * BLOCK,) of blocks at anchors (A,)."""
    return (anchors[:, None] + torch.arange(BLOCK, device=anchors.device)).flatten()


def block_mask(anchors: Tensor, length: int) -> Tensor:
    """Returns (A * BLOCK, length + A * BLOCK) bool: a row sees the context before its anchor, and its own
    block."""
    owner = torch.arange(len(anchors), device=anchors.device).repeat_interleave(BLOCK)
    before = torch.arange(length, device=anchors.device)[None] < anchors[owner][:, None]
    return torch.cat([before, owner[:, None] == owner[None]], 1)


def block_tokens(batch: Tensor, anchors: Tensor) -> Tensor:
    """Returns (B, A * BLOCK): each anchor's token and its masks."""
    rows = torch.full((len(batch), len(anchors), BLOCK), tokens.special_id(tokens.MASK), device=batch.device)
    rows[:, :, 0] = batch[:, anchors]
    return rows.flatten(1)


@dataclass(frozen=True)
class Blocks:
    """These are blocks to learn from. `tapped` and `hidden` (B, T, E) are the trunk's, whose tokens are batch (B, T),
    and embedding (V, E) is its output matrix; x, mask, table and rows are draft_hidden's. Drafts are of the rows from
    `first` on."""

    tapped: Sequence[Tensor]
    hidden: Tensor
    batch: Tensor
    embedding: Tensor
    x: Tensor
    mask: Tensor
    table: Table
    rows: Tensor
    first: int
    decay: float

    def drafting(self, of_rows: Tensor) -> Tensor:
        """Returns (B, A, n, ...): what belongs to the rows (B, A * BLOCK, ...) that draft."""
        return of_rows.unflatten(1, (-1, BLOCK))[:, :, self.first :]

    def at(self, of_tokens: Tensor, ahead: int = 0) -> Tensor:
        """Returns (B, A, n, ...): what belongs to (B, T, ...) `ahead` of the token before each draft."""
        return self.drafting(of_tokens[:, self.rows - self.first + ahead])

    def states(self, w: Weights, n_layer: int) -> tuple[Tensor, Tensor]:
        """Returns the drafting rows' states (B, A, n, E), and the trunk's logits (B, A, n, V) in their places."""
        mine = draft_hidden(features(self.tapped, w), self.x, w, n_layer, self.mask, self.table, self.rows)
        teacher = F.linear(self.at(self.hidden), self.embedding.to(self.hidden.dtype))
        return self.drafting(mine), teacher

    def loss(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Returns the loss of logits (B, A, n, V): half on the trunk's distribution, half on the text's tokens."""
        soft = distillation_loss(student, teacher, hard=0.0)
        wanted = self.at(self.batch, 1)
        hard = F.cross_entropy(student.float().flatten(0, 2), wanted.flatten(), reduction="none").view_as(soft)
        weight = torch.exp(-torch.arange(student.shape[2], device=student.device) / self.decay)
        return ((0.5 * soft + 0.5 * hard) * (weight / weight.sum())).sum(-1).mean()


def round_length(hits: Tensor) -> Tensor:
    """Returns the mean number of tokens of a round, of hits (..., n) bool."""
    return 1 + hits.float().cumprod(-1).sum(-1).mean()


def block_loss(blocks: Blocks, w: Weights, n_layer: int) -> tuple[Tensor, Tensor]:
    """Returns the loss, and the tokens of a greedy round where the text is the trunk's own choice."""
    mine, teacher = blocks.states(w, n_layer)
    student = F.linear(mine, blocks.embedding.to(mine.dtype))
    return blocks.loss(student, teacher), round_length(student.argmax(-1) == teacher.argmax(-1))


# ---- evaluation


@torch.no_grad()
def evaluate(trunk: Trunk, drafter: Drafter, sets: list[tuple[Tensor, int]], rows: int) -> dict[str, object]:
    """Measures greedy acceptance of whole blocks against the trunk's greedy continuation."""
    rounds: list[int] = []
    first, n = drafter.first, BLOCK - drafter.first
    hits_at, tries_at = np.zeros(n), np.zeros(n)
    w = drafter.weights()
    for whole, prompt in sets:
        length = whole.shape[1]
        positions = torch.arange(length, device=whole.device)
        table = rope_table(positions, drafter.config.head_dim, drafter.config.rope_base)
        for batch in whole.split(rows):
            _, tapped = trunk(batch, drafter.taps, eager=True)
            context = features(tapped, w)
            truth = batch.cpu().numpy()
            stop_at = length - BLOCK + first  # The last block's drafts are of the last tokens.
            hits = np.zeros((len(batch), stop_at, n), bool)
            for anchors in torch.arange(prompt, stop_at, device=whole.device).split(32):
                at = block_rows(anchors)
                x = trunk.embed(block_tokens(batch, anchors))
                mine = draft_hidden(
                    context, x, w, drafter.sizes.n_layer, block_mask(anchors, length), table, at
                ).unflatten(1, (-1, BLOCK))[:, :, first:]  # fmt: skip
                drafts = drafter.drafts(trunk.logits(mine), mine, batch[:, anchors]).cpu().numpy()
                wanted = truth[:, (at - first + 1).cpu().numpy()].reshape(len(batch), -1, BLOCK)[:, :, first:]
                hits[:, anchors.cpu().numpy()] = drafts == wanted
            for lead, stop in zip(leading(hits), stops(truth, prompt), strict=True):
                rounds += walk(lead[:stop], prompt)
                for j in range(n):
                    tries_at[j] += (lead[prompt:stop] >= j).sum()
                    hits_at[j] += (lead[prompt:stop] > j).sum()
    return {
        "acceptance_by_position": rates(hits_at, tries_at),
        "mean_accepted_length": round(float(np.mean(rounds)), 4),
        "rounds": len(rounds),
    }


# ---- training


LossOf = Callable[[Blocks, Weights, int], tuple[Tensor, Tensor]]


def train(
    store: Store, drafter: Drafter, loss_of: LossOf, s: Settings, until: float, seed: int, device: Any
) -> None:
    """Trains a drafter from its checkpoint on, and without one from that of the plain DFlash, as far as it has the
    same tensors."""
    deadline = Deadline(until, s.reserve)
    config, kind, n_layer = drafter.config, drafter.kind, drafter.sizes.n_layer
    trunk = load_trunk(store, config, device, s.compile).requires_grad_(False)
    begin(store, drafter.to(device))
    pool = generate.PoolBatches(store, s.batch, seed, device)
    run = torch.compile(loss_of, dynamic=False) if s.compile else loss_of
    length = pool.groups[0][0].shape[1]
    table = rope_table(torch.arange(length, device=device), config.head_dim, config.rope_base)
    generator = torch.Generator().manual_seed(seed)
    embedding = trunk.embedding.detach()
    told: list[Tensor] = []

    def next_loss() -> Tensor:
        batch, prompt = pool.next()
        most = length - BLOCK + drafter.first - prompt
        anchors = (torch.randperm(most, generator=generator)[: s.anchors] + prompt).sort().values.to(device)
        rows = block_rows(anchors)
        with torch.no_grad():
            hidden, tapped = trunk(batch, drafter.taps)
            x = trunk.embed(block_tokens(batch, anchors))
        mask = block_mask(anchors, length)
        blocks = Blocks(tapped, hidden, batch, embedding, x, mask, table, rows, drafter.first, drafter.decay)
        loss, accepted = run(blocks, drafter.weights(), n_layer)
        told.append(accepted.detach())
        return loss

    def say_more() -> str:
        mean = float(torch.stack(told).mean())
        told.clear()
        return f"{mean:.3f} tokens a round"

    report = store.report(kind) or {"curve": [], "steps": 0}
    fitted = fit(kind, drafter, next_loss, deadline, s.max_steps, say_more)
    add_to(report, fitted)
    report["parameters"] = count_parameters(drafter)
    report["taps"] = drafter.taps
    store.write_weights(kind, drafter.state_dict())
    report["evaluation"] = evaluate(trunk, drafter, generate.held_out(store, device), s.eval_rows)
    say(f"{kind}: {fitted['steps']} steps, {report['evaluation']}")
    store.write_report(kind, report)
    store.publish()


def begin(store: Store, drafter: Drafter) -> None:
    """Loads the drafter's checkpoint, else what the plain DFlash's has, else nothing."""
    saved = store.weights(drafter.kind)
    if saved is not None:
        drafter.load_state_dict(saved)
    elif (plain := store.weights(Drafter.kind)) is not None:
        _, unexpected = drafter.load_state_dict(plain, strict=False)
        if unexpected:
            raise ValueError(f"{drafter.kind}: the DFlash drafter has other tensors: {unexpected}")
        say(f"{drafter.kind}: begins as the DFlash drafter")
