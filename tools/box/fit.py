"""Has the training loop, which the trunk and both drafters share; and what the drafters do in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from box.optim import Optimizer, decayed
from box.store import Deadline, compilation, say

CHECK_STEPS = 50  # A drafter makes so many steps between two looks at the loss.


def loop(
    name: str,
    take_step: Callable[[float], Tensor | None],
    check: Callable[[int, float], None],
    check_steps: int,
    deadline: Deadline,
    max_steps: int,
    on_first: Callable[[], None] = lambda: None,
) -> int:
    """Takes steps until the deadline or, where max_steps is not 0, so many. Returns their number.

    take_step is given the share of the time that is over. It returns the step's loss, or None where it made
    no step. check is called every check_steps steps, with their number and the mean loss since its last call;
    it may raise to end the loop. on_first is called after the first step, which compiles."""
    pending: list[Tensor] = []
    steps = 0
    while (progress := deadline.progress()) < 1 and not 0 < max_steps <= steps:
        loss = take_step(progress)
        if loss is None:
            continue
        pending.append(loss.detach())
        steps += 1
        if steps == 1:
            say(f"{name}: first step done, loss {pending[0].item():.3f}; {compilation()}")
            deadline.restart()
            on_first()
        if steps % check_steps == 0:
            mean, pending = float(torch.stack(pending).mean()), []
            check(steps, mean)
    return steps


def fit(
    name: str,
    module: nn.Module,
    next_loss: Callable[[], Tensor],
    deadline: Deadline,
    max_steps: int,
    say_more: Callable[[], str] = lambda: "",
) -> dict[str, Any]:
    """Trains a drafter at a rate that falls to zero. next_loss gives the loss of the next batch, and say_more what
    is printed beside it. Returns the number of steps, and the curve: [step, mean loss since the last point]. Raises
    FloatingPointError where the loss is not finite."""
    optimizer = Optimizer(module)
    curve: list[list[float]] = []
    said = deadline.left()

    def take_step(progress: float) -> Tensor:
        loss = next_loss()
        loss.backward()
        optimizer.step(decayed(progress))
        return loss

    def check(steps: int, mean: float) -> None:
        nonlocal said
        if not math.isfinite(mean):
            raise FloatingPointError(f"{name}: the loss is not finite")
        curve.append([steps, round(mean, 4)])
        if said - deadline.left() > 5:
            said = deadline.left()
            say(f"{name}: step {steps} loss {mean:.4f} {say_more()} {said:.0f}s left")

    return {"steps": loop(name, take_step, check, CHECK_STEPS, deadline, max_steps), "curve": curve}


def add_to(report: dict[str, Any], fitted: dict[str, Any]) -> None:
    """Adds a call's steps behind those of the calls before it."""
    report["curve"] += [[report["steps"] + step, loss] for step, loss in fitted["curve"]]
    report["steps"] += fitted["steps"]
