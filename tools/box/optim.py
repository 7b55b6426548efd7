"""Trains with torch.optim's Muon for the matrices of the blocks and its Adam for the rest, with the schedule.

Muon (Jordan et al. 2024) is momentum that five Newton-Schulz steps make orthogonal.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MUON_LR, ADAM_LR = 0.02, 3e-3  # Both are at full rate. Muon's is relative to an orthogonal update.
MOMENTUM, BETAS, MUON_DECAY = 0.95, (0.9, 0.95), 0.04
CLIP = 1.0  # The gradient's global norm is at most this.
WARMUP_STEPS = 60
TABLES = ("embed", "codebook", "markov_w")  # Matrices with these in their names have a row for each token.


class Optimizer:
    """Steps every parameter of `module`. A matrix whose sides are both at least 64 is Muon's, unless it has a row for
    each token (TABLES); so are none of the norms, convolutions and gates."""

    def __init__(self, module: nn.Module):
        self.muon: list[nn.Parameter] = []
        self.adam: list[nn.Parameter] = []
        for name, p in module.named_parameters():
            if p.requires_grad:
                matrix = p.ndim == 2 and min(p.shape) >= 64 and not any(t in name for t in TABLES)
                (self.muon if matrix else self.adam).append(p)
        self.reset()

    def reset(self) -> None:
        """Forgets momenta: after a resume or a restored snapshot; `warmup` then starts again."""
        self.steps = 0
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = []
        if self.muon:
            muon = torch.optim.Muon(self.muon, MUON_LR, MUON_DECAY, MOMENTUM)
            self.optimizers.append((muon, MUON_LR))
        if self.adam:
            adam = torch.optim.AdamW(self.adam, ADAM_LR, BETAS, weight_decay=0.0, foreach=True)
            self.optimizers.append((adam, ADAM_LR))

    def warmup(self) -> float:
        return min(1.0, (self.steps + 1) / WARMUP_STEPS)

    def step(self, rate: float) -> Tensor:
        """Takes one step at `rate` (0..1, before warm-up). Returns the gradient's norm and clears it."""
        rate *= self.warmup()
        self.steps += 1
        norm = nn.utils.clip_grad_norm_([*self.muon, *self.adam], CLIP)
        for optimizer, full in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * full
            optimizer.step()
            optimizer.zero_grad()
        return norm


def decayed(progress: float) -> float:
    """Returns the rate in a final call at `progress` (0..1) through it: it is linear to zero."""
    return max(0.0, 1.0 - progress)
