"""Checks attention over committed positions alone, on --luce-device: by numpy, and by the bits of the attention of a
row whose K and V are the last committed ones."""

from __future__ import annotations

import numpy as np
import pytest
from op_run import op_run
from step_ctl import PAGE, Seq, chunk_at, step_ctl

from luce.errors import UnsupportedError
from luce.native import Library

# Each has H, Hkv, D, the window and the contexts of sequences that are beside each other.
CASES = {
    "all": (6, 2, 64, 0, (700, 1, 256)),
    "nothing": (4, 2, 128, 0, (0, 40)),
    "window": (4, 1, 256, 40, (300, 20, 257)),
    "window of one": (4, 2, 64, 1, (3, 256)),
    "window of two": (2, 2, 512, 2, (1, 513)),
    "as wide as a chunk": (4, 4, 128, 128, (128, 129, 4100)),
}


def bits(x: float) -> int:
    return int(np.float32(x).view(np.int32))


class Pools:
    """Cells of sequences with a page more than they need; all that is not committed is NaN."""

    def __init__(self, heads: int, dim: int, contexts: tuple[int, ...]):
        self.rng = np.random.default_rng(sum(contexts))
        self.contexts, self.table, self.bases = contexts, list[int](), list[int]()
        counts = [n // PAGE + 2 for n in contexts]
        order = [int(page) for page in self.rng.permutation(sum(counts))]
        self.k, self.v = (np.full((sum(counts), heads, PAGE, dim), np.nan, np.float32) for _ in range(2))
        self.of: list[tuple[np.ndarray, np.ndarray]] = []
        for n, count in zip(contexts, counts, strict=True):
            self.bases.append(len(self.table))
            self.table += [order.pop() for _ in range(count)]
            k, v = (self.rng.standard_normal((n, heads, dim)).astype(np.float32) for _ in range(2))
            at = np.arange(n)
            pages = np.array(self.table)[self.bases[-1] + at // PAGE]
            self.k[pages, :, at % PAGE], self.v[pages, :, at % PAGE] = k, v
            self.of.append((k, v))

    def run(
        self, native: Library, device: str, op: str, q: np.ndarray, window: int, behind: int = 0, positions: int = 0
    ) -> np.ndarray:
        """Returns (T, H * D): of a row of each sequence, `behind` positions before the end of what is committed, and of
        rows of none behind them. A row's own position counts `positions` more."""
        seqs = [
            Seq(n_past=n - behind, parents=[-1], pages=base)
            for n, base in zip(self.contexts, self.bases, strict=True)
        ]
        ctl = step_ctl(*seqs)
        for row in range(len(seqs)):
            ctl[4 + 4 * row + 2] += positions
        dim = self.k.shape[-1]
        max_pages = 0 if device == "cpu" else len(self.table)
        chunks = chunk_at(max_pages * PAGE - 1) + 1 if max_pages else 0
        scratch = q.size // dim * chunks * (dim + 2)  # It lies behind the rows.
        args = [q, None, self.k, self.v, ctl, np.array(self.table, np.int32)]
        params = (0, window, max_pages, bits(dim**-0.5), bits(0))
        return op_run(native, device, op, args, params, shape=(q.size + scratch,))[: q.size].reshape(q.shape)


@pytest.mark.parametrize("name", CASES)
def test_a_row_sees_what_is_committed(name: str, native: Library, device: str) -> None:
    heads, kv_heads, dim, window, contexts = CASES[name]
    pools = Pools(kv_heads, dim, contexts)
    q = pools.rng.standard_normal((len(contexts), heads * dim)).astype(np.float32)
    if device != "cpu" and window == 1:
        with pytest.raises(UnsupportedError, match="a window of 1"):
            pools.run(native, device, "committed_attention", q, window)
        return
    found = pools.run(native, device, "committed_attention", q, window)
    for row, (k, v) in enumerate(pools.of):
        low = max(0, len(k) - window + 1) if window else 0
        for h in range(heads):
            keys, vals = (x[low:, h * kv_heads // heads].astype(np.float64) for x in (k, v))
            score = keys @ q[row].reshape(heads, dim)[h] * dim**-0.5
            weight = np.exp(score - score.max()) if len(score) else score
            expected = (weight / weight.sum()) @ vals if len(score) else np.zeros(dim)
            assert np.abs(found[row].reshape(heads, dim)[h] - expected).max() < 1e-5, (row, h)
    later = pools.run(native, device, "committed_attention", q, window, positions=5)
    assert later.tobytes() == found.tobytes(), "a draft's own position says what it chooses, and not what it sees"


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("nothing", "window of one")])
def test_it_is_attention_of_the_last_committed_row_with_a_window_that_is_smaller_by_one(
    name: str, native: Library, device: str
) -> None:
    heads, kv_heads, dim, window, contexts = CASES[name]
    pools = Pools(kv_heads, dim, contexts)
    q = pools.rng.standard_normal((len(contexts), heads * dim)).astype(np.float32)
    found = pools.run(native, device, "committed_attention", q, window)
    same = pools.run(native, device, "attention", q, max(window - 1, 0), behind=1)
    assert found.tobytes() == same.tobytes()


def test_rows_of_no_sequence_are_zeros(native: Library, device: str) -> None:
    pools = Pools(1, 64, (30,))
    q = pools.rng.standard_normal((3, 64)).astype(np.float32)
    found = pools.run(native, device, "committed_attention", q, 0)
    assert found[0].any() and not found[1:].any()
