"""A small mixture of experts, whose matrices any weight type can have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import drive
import numpy as np
import tiny
from tiny import Config

from luce.native import Library

CONFIG = Config(n_layer=2, interval=2, n_embd=256, n_head=4, n_head_kv=2, n_k_head=2, n_v_head=4,
                state_size=64, n_expert=8, n_expert_used=3, n_ff_expert=256, n_ff_shared=256,
                n_nextn=1)  # fmt: skip
FUSED = Config(**{**CONFIG.__dict__, "fused_experts": True, "n_ff_shared": 0})

# Models of the tests of experts in host memory, by their matrices' type; of all others it is SMALL.
CASES = {"F32": CONFIG, "Q4_K": CONFIG, "Q6_K": FUSED}
SMALL = replace(CONFIG, n_layer=1, n_expert=2, n_expert_used=1, n_ff_shared=0, n_nextn=0)


def written(native: Library, folder: Path) -> Callable[[str], Path]:
    """Returns what gives the file of a case, which is written once."""

    def make(kind: str) -> Path:
        path, c = folder / f"{kind}.gguf", CASES.get(kind, SMALL)
        if not path.exists():
            tiny.write(path, c, tiny.layout(c, seed=5), drive.type_of(kind), quantize=native.quantize)
        return path

    return make


def tokens_of(seed: int, n: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, CONFIG.n_vocab, n)]
