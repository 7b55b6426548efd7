"""Computes the sampling rule of luce.h in numpy and double precision, written from its words alone."""

from __future__ import annotations

import numpy as np

from luce.native.structs import Sampling

M32 = (1 << 32) - 1


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """Computes Philox4x32-10 as Random123's paper gives it: 32-bit words go in, 32-bit words come out."""
    c, k = list(counter), list(key)
    for _ in range(10):
        low, high = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [high >> 32 ^ c[1] ^ k[0], high & M32, low >> 32 ^ c[3] ^ k[1], low & M32]
        k = [(k[0] + 0x9E3779B9) & M32, (k[1] + 0xBB67AE85) & M32]
    return tuple(c)


def words(seed: int, position: int, n: int) -> np.ndarray:
    """Returns the random words (n,) of ids 0 .. n - 1 at a position."""
    halves = (position & M32, position >> 32)
    blocks = [philox((*halves, group, 0), (seed & M32, seed >> 32)) for group in range((n + 3) // 4)]
    return np.array(blocks, np.uint64).ravel()[:n]


def minus_log_uniform(word: np.ndarray) -> np.ndarray:
    """Computes -log((word + 1/2) / 2^32), exact to double's last bits at both ends."""
    word = word.astype(np.float64)
    near_one = (2.0**32 - 1 - word + 0.5) / 2.0**32
    return np.where(word < 2**31, -np.log((word + 0.5) / 2.0**32), -np.log1p(-near_one))


def scores(logits: np.ndarray, sampling: Sampling, position: int) -> np.ndarray:
    """Returns z + G of every id (n,), which is -inf where the rule does not keep it."""
    x = logits.astype(np.float64)
    with np.errstate(over="ignore"):
        z = (x - x.max()) / np.float64(np.float32(sampling.temperature))
    n = len(x)
    order = np.lexsort((np.arange(n), -x))
    kept = order[: sampling.top_k] if sampling.top_k else order
    mass = np.floor(np.exp(z) * 2.0**40)
    if 0 < sampling.top_p < 1:
        before = np.cumsum(mass[kept]) - mass[kept]
        kept = kept[before < np.float64(np.float32(sampling.top_p)) * mass[kept].sum()]
    kept = kept[mass[kept] >= np.float64(np.float32(sampling.min_p)) * 2.0**40]
    out = np.full(n, -np.inf)
    out[kept] = z[kept] - np.log(minus_log_uniform(words(sampling.seed, position, n)[kept]))
    return out


def kept_probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Returns the renormalised softmax (n,) of what is kept."""
    x = logits.astype(np.float64)
    p = np.exp((x - x.max()) / sampling.temperature) * np.isfinite(scores(logits, sampling, 0))
    return p / p.sum()
