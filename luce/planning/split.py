"""Says on which devices the layers of a model lie, and how many on each, or that each has a part of all of them.

Devices of a model are named in one string: "cuda:0,cuda:1" have layers each, "cuda:0+cuda:1" a part of each matrix.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from luce.errors import ArgumentError
from luce.native.structs import Device, DeviceMemory, Memory

Split = tuple[int, ...] | Literal["tensor"]


def names_of(device: str | None) -> list[str]:
    """Returns the names of a model's devices."""
    return re.split("[,+]", device) if device else []


def are_ranks(device: str | None) -> bool:
    """Says whether each of a model's devices has a part of each matrix."""
    return "+" in (device or "")


def devices_of(
    device: str | None, split: Split | None, known: Sequence[Device], draft_device: str | None = None
) -> str | None:
    """Returns the names of a model's devices: what was named, or where a split was asked for of a GPU that was not
    named by its number, all GPUs that there are but for one that drafts. With "tensor" they are joined by "+". Raises
    ArgumentError where there is nothing to split."""
    if split is None:
        return device
    if device in (None, "cuda"):
        device = ",".join(each.name for each in known if each.is_gpu and each.name != draft_device)
    names = names_of(device)
    if len(names) < 2:
        found = f"there is one: {names[0]}" if names else "there is no GPU"
        raise ArgumentError(f"a model was to be split over several devices, and {found}")
    if split == "tensor":
        return "+".join(names)
    if split and len(split) != len(names):
        raise ArgumentError(f"a split of {len(split)} parts was asked for over {len(names)} devices: {device}")
    return device


def layers_of(shares: tuple[int, ...], n_layers: int) -> tuple[int, ...]:
    """Returns how many layers each device has, by its share; shares that add up to n_layers are the layers themselves.
    Each has one at least. Raises ArgumentError where there are fewer layers than devices."""
    if n_layers < len(shares):
        raise ArgumentError(f"{len(shares)} devices were asked for, and the model has {n_layers} layers")
    total = sum(shares)
    layers = [max(1, n_layers * share // total) for share in shares]
    while sum(layers) != n_layers:  # What was rounded goes to whom it lacks most, or comes from who has too much.
        more = 1 if sum(layers) < n_layers else -1
        wanted = [n_layers * share / total - own for share, own in zip(shares, layers, strict=True)]
        free = [i for i, own in enumerate(layers) if own + more > 0]
        layers[max(free, key=lambda i: more * wanted[i])] += more
    return tuple(layers)


def lacking(memory: Memory) -> str:
    """Names the devices that lack memory, and how much; "" where none of several does."""
    return "; ".join(
        f"{each.name} lacks {each.total - each.free:,} bytes: {_of(memory, each)} need {each.total:,}, "
        f"{each.free:,} are free"
        for each in memory.devices
        if each.total > each.free
    )


def _of(memory: Memory, device: DeviceMemory) -> str:
    layers = memory.layers_of(device)
    if device.n_layers == 0:
        return layers.replace(" and", ",") + " and what goes with them"
    return f"{'its ' if layers[0].isdigit() else ''}{layers} and what goes with them"
