"""Stage nextn trains the NextN (multi-token prediction) head, which reads the frozen trunk's hidden states.

x = fc [RMS(embed(token)) * e ; RMS(h) * n], one full-attention block with its own KV, then `norm`, then
the trunk's output matrix. Row r takes the token at r and the hidden state of r - 1, and predicts the
token at r + 1; there is no row 0. In a chain the hidden state is the head's own, after `norm`.
A chained row sees true rows up to its chain's start and the chain's rows before it: training reproduces
that for every start at once, with a mask over the keys of all passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from box import generate, tokens
from box.fit import add_to, fit
from box.model import (
    Block,
    Config,
    Norm,
    Trunk,
    Weights,
    attention_inputs,
    count_parameters,
    finish_block,
    linear,
    matrix,
    rms,
    rope_table,
)
from box.store import Deadline, Store, prepare_torch, say
from box.trunk import load_trunk

STEP_WEIGHTS = (1.0, 0.8, 0.6)  # The losses of a chain's steps weigh so much.
HARD = 0.5  # This share of the loss is on the trunk's own choice; the rest is on its whole distribution.


@dataclass(frozen=True)
class Settings:
    batch: int = 64
    max_steps: int = 0
    reserve: float = 15.0
    compile: bool = True
    eval_rows: int = 64


class NextN(nn.Module):
    """state_dict() has the names under `mtp.` in published checkpoints."""

    def __init__(self, c: Config):
        super().__init__()
        self.config = c
        self.fc = matrix(c.n_embd, 2 * c.n_embd)
        with torch.no_grad():  # It begins as the mean of both inputs.
            eye = torch.eye(c.n_embd)
            self.fc.weight.mul_(0.1).add_(torch.cat([eye, eye], 1) * 0.5)
        self.pre_fc_norm_embedding = Norm(c.n_embd)
        self.pre_fc_norm_hidden = Norm(c.n_embd)
        self.norm = Norm(c.n_embd)
        self.layers = nn.ModuleList([Block(c, full=True)])

    def start_from(self, trunk: Trunk) -> None:
        """Begins with the trunk's last full-attention block as the block, and its output norm as the norm."""
        last = [block for block in trunk.model.layers if block.full][-1]
        self.layers[0].load_state_dict(last.state_dict())
        self.norm.load_state_dict(trunk.model.norm.state_dict())

    def weights(self) -> Weights:
        return {name.removeprefix("layers.0."): p for name, p in self.named_parameters()}


def chain_mask(length: int, step: int, device: Any) -> Tensor:
    """Returns (T, step * T) bool: what row r of pass `step` (1, 2 ...) sees of the keys of passes 1 .. step.
    Of pass 1 it sees the rows 1 .. r - step + 1, of each later pass j the row r - step + j. Row 0 sees
    itself."""
    r = torch.arange(length, device=device)[:, None]
    c = torch.arange(length, device=device)[None]
    parts = [(c >= 1) & (c <= r - step + 1)]
    parts += [c == r - step + j for j in range(2, step + 1)]
    mask = torch.cat(parts, 1)
    # Rows without a chain see something too, so that no NaN arises.
    mask[:, -length:] |= (r == c) & (r < step)
    return mask


def chain(
    hidden: Tensor, embedded: Tensor, w: Weights, masks: list[Tensor], cos: Tensor, sin: Tensor
) -> list[Tensor]:
    """Returns the head's hidden states (B, T, E) of each pass, from hidden, embedded (B, T, E) of the trunk.
    """
    prefix = rms(embedded, w["pre_fc_norm_embedding.weight"])
    keys: list[Tensor] = []
    values: list[Tensor] = []
    outputs = []
    for mask in masks:
        before = F.pad(hidden, (0, 0, 1, 0))[:, :-1]
        x = linear(torch.cat([prefix, rms(before, w["pre_fc_norm_hidden.weight"])], -1), w["fc.weight"])
        q, k, v, gate = attention_inputs(rms(x, w["input_layernorm.weight"]), w, cos, sin)
        repeat = q.shape[2] // k.shape[2]
        keys.append(k.repeat_interleave(repeat, 2).transpose(1, 2))
        values.append(v.repeat_interleave(repeat, 2).transpose(1, 2))
        o = F.scaled_dot_product_attention(q.transpose(1, 2), torch.cat(keys, 2), torch.cat(values, 2), mask)
        o = o.transpose(1, 2).flatten(-2) * torch.sigmoid(gate)
        x = finish_block(x, linear(o, w["self_attn.o_proj.weight"]), w)
        hidden = rms(x, w["norm.weight"])
        outputs.append(hidden)
    return outputs


def distillation_loss(student: Tensor, teacher: Tensor, hard: float = HARD) -> Tensor:
    """Computes for each row the cross-entropy of student logits (..., V) against the teacher's distribution
    and choice."""
    logq = student.float().log_softmax(-1)
    soft = -(teacher.float().softmax(-1) * logq).sum(-1)
    choice = teacher.argmax(-1, keepdim=True)
    return (1 - hard) * soft - hard * logq.gather(-1, choice).squeeze(-1)


def chain_loss(
    hidden: Tensor, embedded: Tensor, output: Tensor, w: Weights, masks: list[Tensor],
    cos: Tensor, sin: Tensor
) -> Tensor:  # fmt: skip
    """Compares the chain's passes with the trunk's own predictions; output (V, E) is the output matrix."""
    output = output.to(hidden.dtype)
    teacher = F.linear(hidden, output)
    total = hidden.new_zeros((), dtype=torch.float32)
    weights = STEP_WEIGHTS[: len(masks)]
    for step, mine in enumerate(chain(hidden, embedded, w, masks, cos, sin), 1):
        student = F.linear(mine[:, step:], output)  # The rows before have no whole chain.
        total = total + weights[step - 1] * distillation_loss(student, teacher[:, step:]).mean()
    return total / sum(weights)


def inputs(trunk: Trunk, batch: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return trunk(batch)[0], trunk.embed(batch)


def head_rope(c: Config, length: int, device: Any) -> tuple[Tensor, Tensor]:
    return rope_table(torch.arange(length, device=device), c.head_dim, c.rope_base)


# ---- evaluation


def walk(accepted: np.ndarray, first: int) -> list[int]:
    """Returns the tokens that each round emits (accepted drafts + 1) from anchor `first` on; accepted (T,) is
    given for each anchor."""
    rounds, at = [], first
    while at < len(accepted):
        rounds.append(int(accepted[at]) + 1)
        at += rounds[-1]
    return rounds


def stops(truth: np.ndarray, prompt: int) -> list[int]:
    """Returns for each row of tokens (n, T) where its text ends: at the first <|endoftext|> after the prompt,
    or at T."""
    ended = truth[:, prompt:] == tokens.special_id(tokens.END)
    return [prompt + int(row.argmax()) if row.any() else truth.shape[1] for row in ended]


def leading(hits: np.ndarray) -> np.ndarray:
    """Counts how many of hits (..., n) bool lead without a miss."""
    return np.cumprod(hits, -1).sum(-1)


def rates(hits: np.ndarray, tries: np.ndarray) -> list[float]:
    return [round(float(h / max(t, 1)), 4) for h, t in zip(hits, tries, strict=True)]


@torch.no_grad()
def evaluate(trunk: Trunk, head: NextN, sets: list[tuple[Tensor, int]], rows: int) -> dict[str, object]:
    """Measures greedy acceptance against the trunk's own greedy continuation, as rounds of gamma 1, 2 and 3.
    """
    steps = len(STEP_WEIGHTS)
    device = trunk.embedding.device
    rounds: dict[int, list[int]] = {gamma: [] for gamma in range(1, steps + 1)}
    hits_at, tries_at = np.zeros(steps), np.zeros(steps)
    for whole, prompt in sets:
        length = whole.shape[1]
        masks = [chain_mask(length, j, device) for j in range(1, steps + 1)]
        for batch in whole.split(rows):
            hidden, _ = trunk(batch, eager=True)
            cos, sin = head_rope(head.config, length, device)
            passes = chain(hidden, trunk.embed(batch), head.weights(), masks, cos, sin)
            drafts = torch.stack([trunk.logits(p).argmax(-1) for p in passes]).cpu().numpy()  # (S, B, T)
            truth = batch.cpu().numpy()
            for b, stop in enumerate(stops(truth, prompt)):
                # For the anchor p, row p + j - 1 of pass j drafts the token at p + j.
                last = max(min(stop, length - steps), prompt)
                hits = np.zeros((last, steps), bool)
                for p in range(prompt, last):
                    hits[p] = [drafts[j - 1, b, p + j - 1] == truth[b, p + j] for j in range(1, steps + 1)]
                for j in range(steps):
                    reached = hits[prompt:, :j].all(-1)
                    tries_at[j] += reached.sum()
                    hits_at[j] += (reached & hits[prompt:, j]).sum()
                for gamma in rounds:
                    rounds[gamma] += walk(leading(hits[:, :gamma]), prompt)
    return {
        "acceptance_by_position": rates(hits_at, tries_at),
        "mean_accepted_length": {str(g): round(float(np.mean(r)), 4) for g, r in rounds.items()},
        "rounds_at_gamma_2": len(rounds[2]),
    }


# ---- training


def train(store: Store, config: Config, s: Settings, until: float, seed: int) -> None:
    device = prepare_torch(seed)
    deadline = Deadline(until, s.reserve)
    trunk = load_trunk(store, config, device, s.compile).requires_grad_(False)
    head = NextN(config).to(device)
    head.start_from(trunk)
    saved = store.weights("nextn")
    if saved is not None:
        head.load_state_dict(saved)
    pool = generate.PoolBatches(store, s.batch, seed, device)
    loss_of = torch.compile(chain_loss, dynamic=False) if s.compile else chain_loss
    length = pool.groups[0][0].shape[1]
    masks = [chain_mask(length, j, device) for j in range(1, len(STEP_WEIGHTS) + 1)]
    cos, sin = head_rope(config, length, device)
    embedding = trunk.embedding.detach()

    def next_loss() -> Tensor:
        batch, _ = pool.next()
        hidden, embedded = inputs(trunk, batch)
        return loss_of(hidden, embedded, embedding, head.weights(), masks, cos, sin)

    report = store.report("nextn") or {"curve": [], "steps": 0}
    fitted = fit("nextn", head, next_loss, deadline, s.max_steps)
    add_to(report, fitted)
    report["parameters"] = count_parameters(head)
    store.write_weights("nextn", head.state_dict())
    report["evaluation"] = evaluate(trunk, head, generate.held_out(store, device), s.eval_rows)
    say(f"nextn: {fitted['steps']} steps, {report['evaluation']}")
    store.write_report("nextn", report)
    store.publish()
