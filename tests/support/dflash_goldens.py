"""What comparisons of DFlash drafters with their goldens share."""

from __future__ import annotations

import numpy as np

from luce.convert.hf_dflash import DFlash
from luce.native import Sequence as Timeline


def context_of(sequence: Timeline, c: DFlash, n: int) -> np.ndarray:
    """Returns (layers, 2, n, Hkv, D) F32 of a dump, whose last part it is. The n positions are of one page, which is
    dumped head by head."""
    size = c.n_layer * 2 * n * c.n_head_kv * c.head_dim
    heads = np.frombuffer(sequence.dump()[-4 * size :], np.float32)
    return heads.reshape(c.n_layer, 2, c.n_head_kv, n, c.head_dim).swapaxes(2, 3)


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max())


def full(c: DFlash, logits: np.ndarray, d2t: np.ndarray | None) -> np.ndarray:
    """Spreads logits over the target's vocabulary; what a reduced one lacks is as the core has it."""
    if d2t is None:
        return logits
    out = np.full((len(logits), c.n_vocab), -1e30, np.float32)
    out[:, d2t] = logits
    return out
