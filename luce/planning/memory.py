"""Finds out whether a model fits into the device's memory, and with which context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from luce.errors import Error
from luce.native.structs import Memory
from luce.planning.opened import Files
from luce.planning.plan import AUTO_BUDGET, MAX_GAMMA, Options


@dataclass(frozen=True)
class Fit:
    """This is what it takes to run a model at `context` positions, in bytes. `mode` is "plain", "drafts"
    (with the NextN head, and the longest chains and widest steps that auto takes) or "dflash" (with the
    drafter and its whole blocks).

    `total` is the sum of the parts; on a CPU the weights among them are only mapped. `largest` is the
    longest context that fits, or 0 where none does. Where `expert_slots` is not None, so many of each layer's
    experts have a slot on the device, and all are at home in host memory.
    """

    mode: str
    context: int
    memory: Memory
    total: int
    fits: bool
    largest: int
    expert_slots: int | None = None


def fits(files: Files, options: Options) -> list[Fit]:
    """Returns a Fit for each way in which `luce generate` may open the files: plain, with drafts where there
    is a NextN head, and with blocks where there is a DFlash drafter. Raises what plan() refuses."""
    found = [_fit(files, "plain", replace(options, spec="off"))]
    if files.head is not None or files.facts.nextn_predict_layers > 0:
        found.append(_fit(files, "drafts", replace(options, spec="mtp", gamma=MAX_GAMMA, budget=AUTO_BUDGET)))
    if files.drafter is not None:
        found.append(_fit(files, "dflash", replace(options, spec="dflash")))
    return found


def _fit(files: Files, mode: str, options: Options) -> Fit:
    chosen = files.plan(replace(options, copies=False))  # Copies are made in what is left.

    def holds(context: int) -> bool:
        try:
            needed = files.memory(chosen, context)
        except Error:  # There would be more pages than there can be.
            return False
        return needed.has_room

    at = files.memory(chosen)
    largest = _largest(holds, files.facts.context_length or chosen.ctx)
    return Fit(mode, chosen.ctx, at, total(at), at.has_room, largest, chosen.expert_slots)


def total(memory: Memory) -> int:
    """Adds up all parts, also where the weights are only mapped."""
    return memory.parts


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """Returns the greatest context that holds, found by halving to within a part in 256, or 0 if none does.
    """
    if holds(most):
        return most
    low, high = 0, most
    while high - low > max(1, high >> 8):
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
