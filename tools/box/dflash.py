"""Stage dflash trains the block-diffusion drafter, which reads the trunk's features.

One forward drafts a block: rows are the anchor and 15 masks, each layer's keys are the features of the
committed positions before the anchor and the block's own rows (no mask inside the block). Row i predicts the
token at its own position. Names and layout are those of z-lab's published drafters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from box.store import Deadline, Store, prepare_torch, say
from box.trunk import load_trunk

BLOCK = 16
Table = tuple[Tensor, Tensor]  # It holds cos and sin by position.
POSITION_DECAY = 4.0  # Row i weighs exp(-(i - 1) / POSITION_DECAY).


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


def plain_rms(x: Tensor, weight: Tensor) -> Tensor:
    return (rms(x.float()) * weight).to(x.dtype)


def features(tapped: Sequence[Tensor], w: Weights) -> Tensor:
    """Makes context features (B, T, E) of the residual streams (B, T, E) of the tapped layers."""
    return plain_rms(linear(torch.cat(list(tapped), -1), w["fc.weight"]), w["hidden_norm.weight"])


def draft_hidden(
    context: Tensor, x: Tensor, w: Weights, n_layer: int, mask: Tensor, table: Table, rows: Tensor
) -> Tensor:
    """Returns the normed hidden states (B, R, E) of x (B, R, E), the embedded rows at positions `rows` (R,).
    `context` (B, T, E) has the features at positions 0 .. T-1, `mask` is (R, T + R), and `table` holds cos
    and sin by position."""
    cos, sin = table
    t = context.shape[1]
    for i in range(n_layer):
        p = f"layers.{i}."
        a = p + "self_attn."
        dim = w[a + "q_norm.weight"].shape[0]
        y = plain_rms(x, w[p + "input_layernorm.weight"])
        both = torch.cat([context, y], 1)  # (B, T + R, E)
        q = plain_rms(linear(y, w[a + "q_proj.weight"]).unflatten(-1, (-1, dim)), w[a + "q_norm.weight"])
        k = plain_rms(linear(both, w[a + "k_proj.weight"]).unflatten(-1, (-1, dim)), w[a + "k_norm.weight"])
        v = linear(both, w[a + "v_proj.weight"]).unflatten(-1, (-1, dim))
        q = rotate(q, cos[rows], sin[rows])
        k = rotate(k, torch.cat([cos[:t], cos[rows]]), torch.cat([sin[:t], sin[rows]]))
        repeat = q.shape[2] // k.shape[2]
        k, v = (s.repeat_interleave(repeat, 2).transpose(1, 2) for s in (k, v))
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask).transpose(1, 2).flatten(-2)
        x = x + linear(o, w[a + "o_proj.weight"])
        local = {name.removeprefix(p): value for name, value in w.items() if name.startswith(p)}
        x = x + feed_forward(plain_rms(x, w[p + "post_attention_layernorm.weight"]), local)
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


def block_loss(
    tapped: list[Tensor], hidden: Tensor, x: Tensor, embedding: Tensor, w: Weights, n_layer: int,
    mask: Tensor, table: Table, rows: Tensor, targets: Tensor
) -> Tensor:  # fmt: skip
    """Computes the loss of blocks. `tapped` and `hidden` (B, T, E) are the trunk's, x, rows and mask are
    draft_hidden's, and targets (B, R) are the tokens at `rows`. The first row of each block is the anchor,
    which drafts nothing."""
    mine = draft_hidden(features(tapped, w), x, w, n_layer, mask, table, rows)
    drafts = mine.unflatten(1, (-1, BLOCK))[:, :, 1:]  # (B, A, 15, E)
    seen = hidden[:, rows - 1].unflatten(1, (-1, BLOCK))[:, :, 1:]  # The trunk predicts from these.
    wanted = targets.unflatten(1, (-1, BLOCK))[:, :, 1:]
    output = embedding.to(hidden.dtype)
    student = F.linear(drafts, output)
    soft = distillation_loss(student, F.linear(seen, output), hard=0.0)
    hard = F.cross_entropy(student.float().flatten(0, 2), wanted.flatten(), reduction="none").view_as(soft)
    weight = torch.exp(-torch.arange(BLOCK - 1, device=x.device) / POSITION_DECAY)
    return ((0.5 * soft + 0.5 * hard) * (weight / weight.sum())).sum(-1).mean()


# ---- evaluation


@torch.no_grad()
def evaluate(trunk: Trunk, drafter: Drafter, sets: list[tuple[Tensor, int]], rows: int) -> dict[str, object]:
    """Measures greedy acceptance of whole blocks against the trunk's greedy continuation."""
    rounds: list[int] = []
    hits_at, tries_at = np.zeros(BLOCK - 1), np.zeros(BLOCK - 1)
    w = drafter.weights()
    for whole, prompt in sets:
        length = whole.shape[1]
        positions = torch.arange(length, device=whole.device)
        table = rope_table(positions, drafter.config.head_dim, drafter.config.rope_base)
        for batch in whole.split(rows):
            _, tapped = trunk(batch, drafter.taps, eager=True)
            context = features(tapped, w)
            truth = batch.cpu().numpy()
            hits = np.zeros((len(batch), length - BLOCK + 1, BLOCK - 1), bool)
            for anchors in torch.arange(prompt, length - BLOCK + 1, device=whole.device).split(32):
                at = block_rows(anchors)
                x = trunk.embed(block_tokens(batch, anchors))
                mine = draft_hidden(
                    context, x, w, drafter.sizes.n_layer, block_mask(anchors, length), table, at
                )
                drafts = trunk.logits(mine).argmax(-1).unflatten(1, (-1, BLOCK))[:, :, 1:].cpu().numpy()
                wanted = truth[:, at.cpu().numpy()].reshape(len(batch), -1, BLOCK)[:, :, 1:]
                hits[:, anchors.cpu().numpy()] = drafts == wanted
            for lead, stop in zip(leading(hits), stops(truth, prompt), strict=True):
                rounds += walk(lead[:stop], prompt)
                for j in range(BLOCK - 1):
                    tries_at[j] += (lead[prompt:stop] >= j).sum()
                    hits_at[j] += (lead[prompt:stop] > j).sum()
    return {
        "acceptance_by_position": rates(hits_at, tries_at),
        "mean_accepted_length": round(float(np.mean(rounds)), 4),
        "rounds": len(rounds),
    }


# ---- training


def train(store: Store, config: Config, sizes: Sizes, s: Settings, until: float, seed: int) -> None:
    device = prepare_torch(seed)
    deadline = Deadline(until, s.reserve)
    trunk = load_trunk(store, config, device, s.compile).requires_grad_(False)
    drafter = Drafter(config, sizes).to(device)
    saved = store.weights("dflash")
    if saved is not None:
        drafter.load_state_dict(saved)
    pool = generate.PoolBatches(store, s.batch, seed, device)
    loss_of = torch.compile(block_loss, dynamic=False) if s.compile else block_loss
    length = pool.groups[0][0].shape[1]
    table = rope_table(torch.arange(length, device=device), config.head_dim, config.rope_base)
    generator = torch.Generator().manual_seed(seed)
    embedding = trunk.embedding.detach()

    def next_loss() -> Tensor:
        batch, prompt = pool.next()
        spots = torch.randperm(length - BLOCK + 1 - prompt, generator=generator)[: s.anchors] + prompt
        anchors = spots.sort().values.to(device)
        rows = block_rows(anchors)
        with torch.no_grad():
            hidden, tapped = trunk(batch, drafter.taps)
            x = trunk.embed(block_tokens(batch, anchors))
        mask = block_mask(anchors, length)
        w, wanted = drafter.weights(), batch[:, rows]
        return loss_of(tapped, hidden, x, embedding, w, sizes.n_layer, mask, table, rows, wanted)

    report = store.report("dflash") or {"curve": [], "steps": 0}
    fitted = fit("dflash", drafter, next_loss, deadline, s.max_steps)
    add_to(report, fitted)
    report["parameters"] = count_parameters(drafter)
    report["taps"] = drafter.taps
    store.write_weights("dflash", drafter.state_dict())
    report["evaluation"] = evaluate(trunk, drafter, generate.held_out(store, device), s.eval_rows)
    say(f"dflash: {fitted['steps']} steps, {report['evaluation']}")
    store.write_report("dflash", report)
    store.publish()
