"""Checks attention of a block, whose rows all see each other, alone on --luce-device against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from op_run import Q4_0, Q8_0, op_run
from step_ctl import PAGE, Seq, step_ctl

from luce.native import Library

B = 16
# Each has the type of the cells, H, Hkv, D, the window, the softcap and the contexts.
CASES = {
    "27b": (np.dtype("f2"), 32, 8, 128, 0, 0.0, (700, 0)),
    "box": (Q8_0, 4, 2, 64, 0, 0.0, (3, 256, 255)),
    "window": (np.dtype("f4"), 6, 2, 256, 40, 0.0, (300, 20)),
    "narrow window": (Q4_0, 2, 2, 64, 9, 5.0, (300, 1)),
    "sinks": (np.dtype("f4"), 6, 2, 64, 40, 0.0, (300, 20)),
    "sinks of 27b": (np.dtype("f2"), 32, 8, 128, 0, 0.0, (700, 0)),
}


def values(cells: np.ndarray) -> np.ndarray:
    """Returns what cells (.., blocks) hold, as float64 (.., values)."""
    if cells.dtype not in (Q8_0, Q4_0):
        return cells.astype(np.float64)
    q = cells["q"] if cells.dtype == Q8_0 else np.concatenate([cells["q"] & 15, cells["q"] >> 4], -1)
    x = (q.astype(np.float64) - (8 if cells.dtype == Q4_0 else 0)) * cells["d"].astype(np.float64)[..., None]
    return x.reshape(*cells.shape[:-1], -1)


def random_pool(rng: np.random.Generator, kind: np.dtype, *shape: int) -> np.ndarray:
    """Returns a pool of this shape, whose last dimension is a head's."""
    if kind not in (Q8_0, Q4_0):
        return rng.standard_normal(shape).astype(kind)
    cells = np.zeros((*shape[:-1], shape[-1] // 32), kind)
    cells["d"] = rng.uniform(0.005, 0.02, cells.shape) * (8 if kind == Q4_0 else 1)
    cells["q"] = rng.integers(-128 if kind == Q8_0 else 0, 128 if kind == Q8_0 else 256, cells["q"].shape)
    return cells


@pytest.mark.parametrize("name", CASES)
def test_a_blocks_rows_see_the_context_and_all_of_the_block(name: str, native: Library, device: str) -> None:
    kind, heads, kv_heads, dim, window, softcap, contexts = CASES[name]
    with_sinks = name.startswith("sinks")
    sinks = np.linspace(-6, 8, heads).astype(np.float32)
    rng = np.random.default_rng(7)
    n_pages = sum((n + B) // PAGE + 1 for n in contexts) + 2
    k, v = (random_pool(rng, kind, n_pages, kv_heads, PAGE, dim) for _ in range(2))
    order, table, seqs = [int(page) for page in rng.permutation(n_pages)], [], []
    for n_past in contexts:
        seqs.append(Seq(n_past=n_past, parents=range(-1, B - 1), pages=len(table)))
        table += [order.pop() for _ in range((n_past + B) // PAGE + 1)]
    cells_used = np.zeros((n_pages, PAGE), bool)
    where = []  # Each sequence has the pages of its positions, and the places in them.
    for seq in seqs:
        positions = np.arange(seq.n_past + B)
        where.append((np.array(table)[seq.pages + positions // PAGE], positions % PAGE))
        cells_used[where[-1]] = True
    for pool in (k, v):  # NaN stands where nobody may look.
        pool.view(np.uint8).reshape(n_pages, kv_heads, PAGE, -1).swapaxes(1, 2)[~cells_used] = 0xFF
    rows = B * len(contexts)
    q = rng.standard_normal((rows, heads * dim)).astype(np.float32)
    real = [int(np.float32(x).view(np.int32)) for x in (dim**-0.5, softcap)]
    params = [0, window, max((n + B) // PAGE + 1 for n in contexts), *real, B]
    scratch = rows * heads * 32 * (dim + 2)  # It is the core's block_attention_scratch.
    arrays = [q, None, k, v, step_ctl(*seqs), np.array(table, np.int32), sinks if with_sinks else None]
    found = op_run(native, device, "block_attention", arrays, params, shape=(1, rows * heads * dim + scratch))
    again = op_run(native, device, "block_attention", arrays, params, shape=(1, rows * heads * dim + scratch))
    out = found[0, : rows * heads * dim].reshape(rows, heads, dim)
    assert np.array_equal(out, again[0, : out.size].reshape(out.shape))
    for s, (seq, (pages, at)) in enumerate(zip(seqs, where, strict=True)):
        keys, vals = (values(pool[pages, :, at]) for pool in (k, v))
        for r in range(B):
            low = max(0, seq.n_past + r - window + 1) if window else 0
            for h in range(heads):
                one = q[s * B + r].reshape(heads, dim)[h].astype(np.float64)
                score = keys[low:, h * kv_heads // heads] @ one * dim**-0.5
                score = softcap * np.tanh(score / softcap) if softcap else score
                p = np.exp(score - score.max())
                total = p.sum() + (np.exp(sinks[h] - score.max()) if with_sinks else 0)
                expected = (p / total) @ vals[low:, h * kv_heads // heads]
                error = np.linalg.norm(out[s * B + r, h] - expected) / np.linalg.norm(expected)
                assert error < 1e-5, (s, r, h)
