"""The devices of models that tests cut into stages or ranks: a CPU several times, or GPUs of --luce-device."""

from __future__ import annotations

import re
from itertools import cycle, islice

import pytest


def stages(device: str, n: int) -> str | None:
    """Returns n devices for n stages, of those that are tested, or None where there are too few GPUs."""
    given = re.split("[,+]", device)
    if not device.startswith("cpu") and len(given) < n:
        return None
    return ",".join(islice(cycle(given), n))


def ranks(device: str, n: int) -> str | None:
    """Returns n devices that have a part of each matrix, likewise; of one its name."""
    given = re.split("[,+]", device)
    if not device.startswith("cpu") and len(given) < n:
        return None
    return "+".join(islice(cycle(given), n))


def two_ranks(device: str) -> str:
    if (found := ranks(device, 2)) is None:
        pytest.skip("one GPU is tested, and a rank needs one of its own")
    return found


def two_stages(device: str) -> str:
    if (found := stages(device, 2)) is None:
        pytest.skip("one GPU is tested, and a stage needs one of its own")
    return found


def drafts_apart(device: str, n: int = 1) -> tuple[str, str]:
    """Returns n devices for layers, and one more for what drafts."""
    if (found := stages(device, n + 1)) is None:
        pytest.skip("there are too few GPUs")
    layers, _, drafts = found.rpartition(",")
    return layers, drafts


def held(device: str, found: list[bytes]) -> list[bytes]:
    """Returns what one device and several have in common. On GPUs a NextN head's inputs are packed by another op where
    the embeddings come from another device: what it drafts and its KV may have other bits, and no token does."""
    return found if device.startswith("cpu") else [part for part in found if not part.startswith((b"LUCEDUMP", b"["))]
