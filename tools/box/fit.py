"""The training loop of both drafters: steps at a rate that falls to zero until the time is over."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from box.optim import Optimizer, decayed
from box.store import Deadline, compilation, say

CHECK_STEPS = 50  # between two points of the curve


def fit(
    name: str, module: nn.Module, next_loss: Callable[[], Tensor], deadline: Deadline, max_steps: int
) -> dict[str, Any]:
    """Trains `module` until the deadline or, where max_steps is not 0, for so many steps. next_loss: the loss
    of the next batch. Returns the number of steps, and the curve: [step, mean loss since the last point].
    Raises FloatingPointError where the loss is not finite."""
    optimizer = Optimizer(module)
    curve: list[list[float]] = []
    pending: list[Tensor] = []
    steps, said = 0, deadline.left()
    while (progress := deadline.progress()) < 1 and not 0 < max_steps <= steps:
        loss = next_loss()
        loss.backward()
        optimizer.step(decayed(progress))
        pending.append(loss.detach())
        steps += 1
        if steps == 1:
            say(f"{name}: first step done, loss {pending[0].item():.3f}; {compilation()}")
            deadline.restart()
        if steps % CHECK_STEPS:
            continue
        mean, pending = float(torch.stack(pending).mean()), []
        if not math.isfinite(mean):
            raise FloatingPointError(f"{name}: the loss is not finite")
        curve.append([steps, round(mean, 4)])
        if said - deadline.left() > 5:
            said = deadline.left()
            say(f"{name}: step {steps} loss {mean:.4f} {said:.0f}s left")
    return {"steps": steps, "curve": curve}


def add_to(report: dict[str, Any], fitted: dict[str, Any]) -> None:
    """A call's steps behind those of the calls before it."""
    report["curve"] += [[report["steps"] + step, loss] for step, loss in fitted["curve"]]
    report["steps"] += fitted["steps"]
