"""Muon for the matrices of the blocks, Adam for the rest, and the schedule.

Muon (Jordan et al. 2024): momentum, orthogonalised by five Newton-Schulz steps. Matrices of one shape
go through them as one batch, so a step costs a few dozen launches and not a thousand.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

MUON_LR, ADAM_LR = 0.02, 3e-3  # at full rate; Muon's is relative to an orthogonal update
MOMENTUM, BETAS, MUON_DECAY = 0.95, (0.9, 0.95), 0.04
CLIP = 1.0  # of the gradient's global norm
WARMUP_STEPS = 60


def orthogonalise(g: Tensor) -> Tensor:
    """(n, rows, cols), rows >= cols -> about the nearest matrices with orthonormal columns; BF16 on a GPU."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16() if g.is_cuda else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x.mT @ x
        x = a * x + x @ (b * gram + c * (gram @ gram))
    return x


class Optimizer:
    """Steps every parameter of `module`. A matrix whose sides are both at least 64 is Muon's, unless it
    is an embedding; so are none of the norms, convolutions and gates."""

    def __init__(self, module: nn.Module, scale: float = 1.0):
        """scale: of both learning rates."""
        self.scale = scale
        muon: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        self.adam: list[nn.Parameter] = []
        for name, p in module.named_parameters():
            if not p.requires_grad:
                continue
            if p.ndim == 2 and min(p.shape) >= 64 and "embed" not in name:
                muon[max(p.shape), min(p.shape)].append(p)
            else:
                self.adam.append(p)
        self.muon = list(muon.values())
        self.parameters = [p for group in self.muon for p in group] + self.adam
        self.reset()

    def reset(self) -> None:
        """Forgets momenta: after a resume or a restored snapshot; `warmup` then starts again."""
        self.steps = 0
        self.velocity = [[torch.zeros_like(p) for p in group] for group in self.muon]
        self.first = [torch.zeros_like(p) for p in self.adam]
        self.second = [torch.zeros_like(p) for p in self.adam]

    def warmup(self) -> float:
        return min(1.0, (self.steps + 1) / WARMUP_STEPS)

    @torch.no_grad()
    def step(self, rate: float) -> Tensor:
        """One step at `rate` (0..1, before warm-up); returns the gradient's norm and clears it."""
        rate *= self.warmup() * self.scale
        self.steps += 1
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        torch._foreach_mul_(grads, (CLIP / (norm + 1e-6)).clamp(max=1.0))
        done = 0
        for group, velocity in zip(self.muon, self.velocity, strict=True):
            self._muon(group, velocity, grads[done : done + len(group)], rate * MUON_LR)
            done += len(group)
        if self.adam:
            self._adam(grads[done:], rate * ADAM_LR)
        for p in self.parameters:
            p.grad = None
        return norm

    @staticmethod
    def _muon(group: list[nn.Parameter], velocity: list[Tensor], grads: list[Tensor], rate: float) -> None:
        torch._foreach_lerp_(velocity, grads, 1 - MOMENTUM)
        torch._foreach_lerp_(grads, velocity, MOMENTUM)  # Nesterov
        tall = torch.stack([g if g.shape[0] >= g.shape[1] else g.T for g in grads])
        flat = orthogonalise(tall).float()
        params: list[Tensor] = list(group)
        torch._foreach_mul_(params, 1 - MUON_DECAY * rate)
        for p, u in zip(params, flat, strict=True):
            rows, cols = p.shape
            p.add_(u if rows >= cols else u.T, alpha=-rate * max(1.0, rows / cols) ** 0.5)

    def _adam(self, grads: list[Tensor], rate: float) -> None:
        b1, b2 = BETAS
        torch._foreach_lerp_(self.first, grads, 1 - b1)
        torch._foreach_mul_(self.second, b2)
        torch._foreach_addcmul_(self.second, grads, grads, 1 - b2)
        root = torch._foreach_sqrt(torch._foreach_div(self.second, 1 - b2**self.steps))
        torch._foreach_add_(root, 1e-8)
        params: list[Tensor] = list(self.adam)
        torch._foreach_addcdiv_(params, self.first, root, value=-rate / (1 - b1**self.steps))


def decayed(progress: float) -> float:
    """Rate in a final call at `progress` (0..1) through it: linear to zero."""
    return max(0.0, 1.0 - progress)
