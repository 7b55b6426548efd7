"""Checks attention over committed positions alone, on --luce-device: by numpy, and by the bits of the attention of a
row whose K and V are the last committed ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from depth import deeper, deeper_but
from op_run import Q8_0, op_run
from step_ctl import PAGE, Seq, chunk_at, step_ctl

from luce.errors import UnsupportedError
from luce.native import Library


class Case(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    window: int
    contexts: tuple[int, ...]  # of sequences that are beside each other
    kind: str = "f32"


CASES = {
    "all": Case(6, 2, 64, 0, (700, 1, 256)),
    "nothing": Case(4, 2, 128, 0, (0, 40)),
    "window": Case(4, 1, 256, 40, (300, 20, 257)),
    "window of one": Case(4, 2, 64, 1, (3, 256)),
    "window of two": Case(2, 2, 512, 2, (1, 513)),
    "as wide as a chunk": Case(4, 4, 128, 128, (128, 129, 4100)),
    # The heads of published assistants.
    "f16": Case(32, 4, 512, 0, (700, 1, 256, 128), "f16"),
    "f16 window": Case(32, 16, 256, 100, (300, 20, 257, 128), "f16"),
    "q8_0": Case(4, 1, 512, 0, (700, 1, 256), "q8_0"),
    "q8_0 window": Case(4, 1, 256, 512, (1500, 511, 512, 513), "q8_0"),
}


def bits(x: float) -> int:
    return int(np.float32(x).view(np.int32))


def random_cells(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns cells and their values, float64 of the shape."""
    if kind == "q8_0":
        cells = np.empty((*shape[:-1], shape[-1] // 32), Q8_0)
        cells["d"] = rng.uniform(0.004, 0.02, cells.shape)
        cells["q"] = rng.integers(-127, 128, (*cells.shape, 32))
        return cells, (cells["d"].astype(np.float64)[..., None] * cells["q"]).reshape(shape)
    cells = rng.standard_normal(shape).astype({"f32": np.float32, "f16": np.float16}[kind])
    return cells, cells.astype(np.float64)


class Pools:
    """Cells of sequences with a page more than they need; all that is not committed is NaN."""

    def __init__(self, native: Library, device: str, case: Case):
        self.native, self.device, self.case = native, device, case
        self.rng = np.random.default_rng(sum(case.contexts))
        self.table, self.bases = list[int](), list[int]()
        counts = [n // PAGE + 2 for n in case.contexts]
        order = [int(page) for page in self.rng.permutation(sum(counts))]
        shape = (sum(counts), case.kv_heads, PAGE, case.dim)
        self.k, self.v = (random_cells(self.rng, case.kind, shape)[0] for _ in range(2))
        for pool in (self.k, self.v):
            pool.view(np.uint8)[...] = 0xFF
        self.of: list[tuple[np.ndarray, np.ndarray]] = []
        for n, count in zip(case.contexts, counts, strict=True):
            self.bases.append(len(self.table))
            self.table += [order.pop() for _ in range(count)]
            at = np.arange(n)
            pages = np.array(self.table)[self.bases[-1] + at // PAGE]
            k, v = (random_cells(self.rng, case.kind, (n, case.kv_heads, case.dim)) for _ in range(2))
            self.k[pages, :, at % PAGE], self.v[pages, :, at % PAGE] = k[0], v[0]
            self.of.append((k[1], v[1]))

    def queries(self, rows: int) -> np.ndarray:
        return self.rng.standard_normal((rows, self.case.heads * self.case.dim)).astype(np.float32)

    def run(self, op: str, q: np.ndarray, window: int, seqs: list[Seq], positions: int = 0) -> np.ndarray:
        """Returns (T, H * D): of the sequences' rows, and of rows of none behind them. A row's own position counts
        `positions` more."""
        ctl, dim = step_ctl(*seqs), self.case.dim
        for row in range(sum(len(seq.parents) for seq in seqs)):
            ctl[4 + 4 * row + 2] += positions
        max_pages = 0 if self.device == "cpu" else len(self.table)
        chunks = chunk_at(max_pages * PAGE - 1) + 1 if max_pages else 0
        scratch = q.size // dim * chunks * (dim + 2)  # It lies behind the rows.
        args = [q, None, self.k, self.v, ctl, np.array(self.table, np.int32)]
        params = (0, window, max_pages, bits(dim**-0.5), bits(0))
        found = op_run(self.native, self.device, op, args, params, shape=(q.size + scratch,))
        return found[: q.size].reshape(q.shape)

    def one_each(self, behind: int = 0) -> list[Seq]:
        """A row of each sequence, `behind` positions before the end of what is committed."""
        pairs = zip(self.case.contexts, self.bases, strict=True)
        return [Seq(n_past=n - behind, parents=[-1], pages=base) for n, base in pairs]


@pytest.mark.parametrize("name", deeper_but(CASES, *(name for name in CASES if name not in ("f16", "f16 window"))))
def test_a_row_sees_what_is_committed(name: str, native: Library, device: str) -> None:
    case = CASES[name]
    heads, kv_heads, dim, window, contexts, kind = case
    pools = Pools(native, device, case)
    q = pools.queries(len(contexts))
    if device != "cpu" and window == 1:
        with pytest.raises(UnsupportedError, match="a window of 1"):
            pools.run("committed_attention", q, window, pools.one_each())
        return
    found = pools.run("committed_attention", q, window, pools.one_each())
    bound = 1e-5 if device == "cpu" or kind == "f32" else 4e-3  # As test_attention.py's, of values as large.
    for row, (k, v) in enumerate(pools.of):
        low = max(0, len(k) - window + 1) if window else 0
        for h in range(heads):
            keys, vals = (x[low:, h * kv_heads // heads] for x in (k, v))
            score = keys @ q[row].reshape(heads, dim)[h] * dim**-0.5
            weight = np.exp(score - score.max()) if len(score) else score
            expected = (weight / weight.sum()) @ vals if len(score) else np.zeros(dim)
            assert np.abs(found[row].reshape(heads, dim)[h] - expected).max() < bound, (row, h)
    later = pools.run("committed_attention", q, window, pools.one_each(), positions=5)
    assert later.tobytes() == found.tobytes(), "a draft's own position says what it chooses, and not what it sees"


@pytest.mark.parametrize(
    "name", [*(name for name in CASES if name not in ("nothing", "window of one", "f16", "f16 window")),
             *deeper("f16", "f16 window")]
)
def test_it_is_attention_of_the_last_committed_row_with_a_window_that_is_smaller_by_one(
    name: str, native: Library, device: str
) -> None:
    pools, window = Pools(native, device, CASES[name]), CASES[name].window
    q = pools.queries(len(CASES[name].contexts))
    found = pools.run("committed_attention", q, window, pools.one_each())
    same = pools.run("attention", q, max(window - 1, 0), pools.one_each(behind=1))
    assert found.tobytes() == same.tobytes()


@pytest.mark.parametrize("name", [*deeper("all", "window", "f16", "f16 window"), "q8_0 window"])
def test_rows_of_a_sequence_have_the_bits_of_each_alone(name: str, native: Library, device: str) -> None:
    pools, window = Pools(native, device, CASES[name]), CASES[name].window
    trees = [[-1, 0, 0, -1], [-1], [-1, 0, 1], [-1, -1]][: len(pools.bases)]
    seqs = pools.one_each()
    for seq, tree in zip(seqs, trees, strict=True):
        seq.parents = tree
    q = pools.queries(sum(map(len, trees)) + 2)
    found, row = pools.run("committed_attention", q, window, seqs), 0
    for alone, tree in zip(pools.one_each(), trees, strict=True):
        for _ in tree:
            single = pools.run("committed_attention", q[row : row + 1], window, [alone])
            assert single.tobytes() == found[row].tobytes()
            row += 1
    assert not found[row:].any()


def test_rows_of_no_sequence_are_zeros(native: Library, device: str) -> None:
    pools = Pools(native, device, Case(1, 1, 64, 0, (30,)))
    found = pools.run("committed_attention", pools.queries(3), 0, pools.one_each())
    assert found[0].any() and not found[1:].any()
