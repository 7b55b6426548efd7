"""Checks paged KV and attention, each op alone on --luce-device, against numpy; and the bits that steps rely
on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import drive
import numpy as np
import pytest
from depth import examples
from hypothesis import given
from hypothesis import strategies as st
from op_run import Q4_0, Q8_0, op_run
from step_ctl import MAX_ROWS, PAGE, Seq, chunk_at, step_ctl

from luce.errors import ArgumentError
from luce.native import Library

TYPES = {"f32": np.dtype("f4"), "f16": np.dtype("f2"), "q8_0": Q8_0, "q4_0": Q4_0}
seeds = st.integers(0, 2**32 - 1)
few = examples(8)


def random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def bits(x: float) -> int:
    return int(np.float32(x).view(np.int32))


def quantize(x: np.ndarray, kind: str) -> np.ndarray:
    """Returns x as a cell holds it, rounded as ggml's reference quantiser rounds."""
    if kind in ("f32", "f16"):
        return x.astype(TYPES[kind])
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // 32, 32)
    out = np.zeros(blocks.shape[:-1], TYPES[kind])
    if kind == "q8_0":
        d = np.abs(blocks).max(-1) / np.float32(127)
    else:
        most = np.abs(blocks).argmax(-1)[..., None]
        d = np.take_along_axis(blocks, most, -1)[..., 0] / np.float32(-8)
    inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)[..., None]
    scaled = blocks * inverse
    out["d"] = d.astype(np.float16)
    if kind == "q8_0":
        out["q"] = np.where(scaled < 0, -np.floor(0.5 - scaled), np.floor(scaled + 0.5)).astype(np.int8)
    else:
        q = np.minimum(15, np.trunc(scaled + np.float32(8.5))).astype(np.uint8)
        out["q"] = q[..., :16] | q[..., 16:] << 4
    return out


def values(cells: np.ndarray) -> np.ndarray:
    """Returns what cells hold, as float64."""
    if cells.dtype == Q8_0:
        x = cells["q"] * cells["d"].astype(np.float64)[..., None]
    elif cells.dtype == Q4_0:
        q = np.concatenate([cells["q"] & 15, cells["q"] >> 4], -1).astype(np.float64) - 8
        x = q * cells["d"].astype(np.float64)[..., None]
    else:
        return cells.astype(np.float64)
    return x.reshape(*cells.shape[:-1], cells.shape[-1] * 32)


@dataclass(frozen=True)
class Shape:
    h: int
    hkv: int
    d: int
    kind: str = "f16"
    first: int = 0
    window: int = 0
    softcap: float = 0.0
    gated: bool = True
    sinks: bool = False


SHAPES = [
    Shape(2, 1, 64, "f32"),
    Shape(6, 1, 256),
    Shape(8, 2, 128, "q8_0"),
    Shape(4, 4, 64, "q4_0", gated=False),
    Shape(6, 2, 128, "f16", first=1),
    Shape(4, 2, 64, "f16", window=100, gated=False),
    Shape(4, 1, 128, "f32", softcap=5.0, window=300, first=1),
    Shape(24, 1, 128, "f16"),  # A KV head has more heads than a CUDA unit takes.
    Shape(34, 2, 64, "f32", window=150),
    Shape(48, 1, 64, "q8_0", gated=False),
    Shape(6, 2, 64, "f32", window=150, gated=False, sinks=True),
    Shape(4, 1, 128, "q8_0", first=1, softcap=5.0, sinks=True),
]
shapes = pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda s: f"{s.h}-{s.hkv}-{s.d}-{s.kind}{'-sinks' * s.sinks}"
)


@dataclass
class Rows:
    """These are inputs of some rows."""

    q: np.ndarray  # (T, H * D)
    gate: np.ndarray  # (T, 2 * D * H)
    k: np.ndarray  # (T, Hkv * D)
    v: np.ndarray  # (T, Hkv * D)

    def take(self, rows: Sequence[int]) -> Rows:
        index = list(rows)
        return Rows(self.q[index], self.gate[index], self.k[index], self.v[index])


def random_rows(rng: np.random.Generator, s: Shape, n: int) -> Rows:
    wide, narrow = s.h * s.d, s.hkv * s.d
    return Rows(*(random(rng, n, width) for width in (wide, 2 * wide, narrow, narrow)))


@dataclass
class Context:
    """This is one timeline: its pages, and the K and V that it has committed."""

    pages: list[int]
    k: np.ndarray  # (n_past, Hkv * D)
    v: np.ndarray
    pending: list[int] = field(default_factory=list)


class Pool:
    """This is the KV of one layer, driven through op_run. What no sequence has written is NaN."""

    def __init__(self, native: Library, device: str, s: Shape, n_pages: int, seed: int):
        self.native, self.device, self.s = native, device, s
        # From far below scores to far above.
        self.sinks = np.linspace(-6, 8, s.h).astype(np.float32) if s.sinks else None
        self.rng = np.random.default_rng(seed)
        self.free = list(self.rng.permutation(n_pages))
        blocks = s.d // (1 if s.kind in ("f32", "f16") else 32)
        self.k, self.v = (np.zeros((n_pages, s.hkv, PAGE, blocks), TYPES[s.kind]) for _ in range(2))
        for cells in (self.k, self.v):
            cells.view(np.uint8)[:] = 0xFF

    def cells(self, rows: np.ndarray, seq: Context, n: int) -> np.ndarray:
        """Returns the first n cells of a sequence, (n, Hkv, blocks), of the pool's k or v."""
        positions = np.arange(n)
        return rows[np.array(seq.pages)[positions // PAGE], :, positions % PAGE]

    def sequence(self, k: np.ndarray, v: np.ndarray, room: int = MAX_ROWS) -> Context:
        """Returns a sequence that has committed k and v, written as a prefill writes them."""
        seq = Context([self.free.pop() for _ in range(-(-(len(k) + room) // PAGE))], k[:0], v[:0])
        if len(k) > 0:
            self.append(seq, k, v)
        return seq

    def append(self, seq: Context, k: np.ndarray, v: np.ndarray) -> None:
        ctl = step_ctl(Seq(n_past=len(seq.k), n_rows=len(k)))
        self.store(k, v, ctl, np.array(seq.pages, np.int32), append=1)
        seq.k, seq.v = np.concatenate([seq.k, k]), np.concatenate([seq.v, v])

    def control(self, seqs: Sequence[Context], trees: Sequence[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Pays the sequences' moves. Returns the control block of a step and its page table."""
        parts, pages = [], []
        for seq, parents in zip(seqs, trees, strict=True):
            parts.append(
                Seq(parents=parents, n_past=len(seq.k), pending=seq.pending, move=True, pages=len(pages))
            )
            pages += seq.pages
            seq.pending = []
        ctl, table = step_ctl(*parts), np.array(pages or [0], np.int32)
        op_run(self.native, self.device, "kv_move", [self.k, self.v, ctl, table], shape=(1,), dtype=np.int32)
        return ctl, table

    def store(
        self, k: np.ndarray, v: np.ndarray, ctl: np.ndarray, pages: np.ndarray, append: int = 0
    ) -> None:
        args = [k, v, self.k, self.v, ctl, pages]
        op_run(self.native, self.device, "kv_store", args, (append,), shape=(1,), dtype=np.int32)

    def attend(self, rows: Rows, ctl: np.ndarray, pages: np.ndarray) -> np.ndarray:
        """Returns (T, H, D)."""
        s, t = self.s, len(rows.q)
        max_pages = max(1, len(pages))
        params = (s.first, s.window, max_pages, bits(s.d**-0.5), bits(s.softcap))
        n = t * s.h * s.d
        chunks = chunk_at(max_pages * PAGE - 1) + 1
        args = [rows.q, rows.gate if s.gated else None, self.k, self.v, ctl, pages, self.sinks]
        size = n + t * s.h * chunks * (s.d + 2)  # The rows come first, then scratch.
        out = op_run(self.native, self.device, "attention", args, params, shape=(size,))
        return out[:n].reshape(t, s.h, s.d)

    def step(
        self, seqs: Sequence[Context], trees: Sequence[list[int]], rows: Rows, junk: int = 0
    ) -> np.ndarray:
        """Runs one step of all sequences, with `junk` rows behind them that belong to none."""
        ctl, pages = self.control(seqs, trees)
        rows = Rows(*(np.pad(x, ((0, junk), (0, 0)), constant_values=np.nan) for x in vars(rows).values()))
        self.store(rows.k, rows.v, ctl, pages)
        return self.attend(rows, ctl, pages)

    def expected(self, seq: Context, parents: list[int], rows: Rows) -> np.ndarray:
        """Returns float64 (T, H, D) of one sequence's rows."""
        s = self.s
        out = np.zeros((len(parents), s.h, s.d))
        k, v = (values(quantize(np.concatenate(x), s.kind)) for x in ((seq.k, rows.k), (seq.v, rows.v)))
        k, v = (x.reshape(len(x), s.hkv, s.d) for x in (k, v))
        n_past = len(seq.k)
        for t in range(len(parents)):
            path = drive.root_path(parents, t)
            position = n_past + len(path) - 1
            low = max(s.first, position - s.window + 1 if s.window else 0)
            seen = [*range(n_past), *(n_past + row for row in path)][low:]
            if not seen:
                continue
            q = rows.q[t].astype(np.float64).reshape(s.hkv, s.h // s.hkv, s.d)
            score = np.einsum("hgd,nhd->hgn", q, k[seen]) / np.sqrt(s.d)
            if s.softcap:
                score = s.softcap * np.tanh(score / s.softcap)
            most = score.max(-1, keepdims=True)
            weight = np.exp(score - most)
            total = weight.sum(-1, keepdims=True)
            if self.sinks is not None:
                total += np.exp(self.sinks.reshape(s.hkv, -1, 1).astype(np.float64) - most)
            weight /= total
            out[t] = np.einsum("hgn,nhd->hgd", weight, v[seen]).reshape(s.h, s.d)
            if s.gated:
                gate = rows.gate[t].astype(np.float64).reshape(s.h, 2, s.d)[:, 1]
                out[t] /= 1 + np.exp(-gate)
        return out


def close(found: np.ndarray, expected: np.ndarray, kind: str, device: str) -> None:
    """Compares results. The CPU sums in float32. CUDA's tensor cores take q and weights as F16 (11 bits)
    unless KV is F32."""
    bound = 1e-5 if device.startswith("cpu") or kind == "f32" else 4e-3
    assert np.linalg.norm(found - expected) <= bound * max(np.linalg.norm(expected), 1e-3)


def random_company(rng: np.random.Generator, pool: Pool, most: int) -> tuple[list[Context], list[list[int]]]:
    s, left = pool.s, MAX_ROWS
    seqs, trees = [], []
    for _ in range(int(rng.integers(1, 6))):
        n = int(rng.choice([0, 1, 127, 128, 129, 255, 256, 257, int(rng.integers(most))]))
        seqs.append(pool.sequence(random(rng, n, s.hkv * s.d), random(rng, n, s.hkv * s.d)))
        rows = min(left, int(rng.choice([0, 1, 2, int(rng.integers(1, 33))])))
        left -= rows
        trees.append(drive.random_tree(rng, rows) if rows else [])
    if left == MAX_ROWS:
        trees[0] = [-1]
    return seqs, trees


@shapes
@given(seed=seeds)
@few
def test_rows_of_a_step_match_the_reference(native, device, shape, seed):
    rng = np.random.default_rng(seed)
    pool = Pool(native, device, shape, 32, seed)
    seqs, trees = random_company(rng, pool, 700)
    rows = random_rows(rng, shape, sum(map(len, trees)))
    junk = int(rng.integers(0, MAX_ROWS - len(rows.q) + 1))
    found = pool.step(seqs, trees, rows, junk)
    at = 0
    for seq, parents in zip(seqs, trees, strict=True):
        mine = range(at, at + len(parents))
        close(found[mine], pool.expected(seq, parents, rows.take(mine)), shape.kind, device)
        at += len(parents)
    assert not found[at:].any()  # Rows of no sequence are zeros.


@shapes
@given(seed=seeds)
@few
def test_a_row_has_the_bits_of_plain_decoding(native, device, shape, seed):
    rng = np.random.default_rng(seed)
    pool = Pool(native, device, shape, 32, seed)
    seqs, trees = random_company(rng, pool, 700)
    rows = random_rows(rng, shape, sum(map(len, trees)))
    found = pool.step(seqs, trees, rows)
    at = 0
    for seq, parents in zip(seqs, trees, strict=True):
        for r in rng.permutation(len(parents))[:3]:
            path = [at + row for row in drive.root_path(parents, int(r))]
            plain = Pool(native, device, shape, 8, seed + 1)  # It is alone, and has other pages.
            alone = plain.sequence(seq.k, seq.v)
            for row in path:
                one = rows.take([row])
                out = plain.step([alone], [[-1]], one)
                alone.k, alone.v = np.concatenate([alone.k, one.k]), np.concatenate([alone.v, one.v])
            assert out[0].tobytes() == found[path[-1]].tobytes()
        at += len(parents)


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("n", [4095, 4096, 4097])
def test_long_contexts_match_the_reference_in_plain_bits(native, device, kind, n):
    shape = Shape(6, 1, 128, kind)
    rng = np.random.default_rng(n)
    pool = Pool(native, device, shape, 40, n)
    seq = pool.sequence(random(rng, n, 128), random(rng, n, 128))
    rows, parents = random_rows(rng, shape, 3), [-1, 0, 0]
    found = pool.step([seq], [parents], rows)
    close(found, pool.expected(seq, parents, rows), kind, device)
    alone = pool.sequence(np.concatenate([seq.k, rows.k[:1]]), np.concatenate([seq.v, rows.v[:1]]))
    assert pool.step([alone], [[-1]], rows.take([2]))[0].tobytes() == found[2].tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kind", ["f16", "f32"])
def test_what_a_row_does_not_see_cannot_reach_it(native, device, kind, bad):
    """Committed values at the window's edge, which only the first rows see, and a sibling's own value are
    NaN."""
    shape, rng, n = Shape(6, 1, 128, kind, window=100), np.random.default_rng(3), 200
    pool = Pool(native, device, shape, 8, 3)
    k, v = random(rng, n, 128), random(rng, n, 128)
    v[[100, 102], [5, 77]] = bad  # They are below every window, and positions 200 and 201 see them.
    rows, parents = random_rows(rng, shape, 8), [-1, 0, 1, 2, 3, 2, 5, 6]
    rows.v[4, 9] = bad  # It is row 4's own, and rows 5 to 7 are beside it.
    seq = pool.sequence(k, v)
    found, expected = pool.step([seq], [parents], rows), pool.expected(seq, parents, rows)
    clean, sees = [2, 3, 5, 6, 7], [0, 1, 4]
    close(found[clean], expected[clean], kind, device)
    assert not np.isfinite(found[sees]).all(axis=(1, 2)).any()


@shapes
@given(seed=seeds)
@few
def test_accepted_rows_move_down_before_new_ones_are_written(native, device, shape, seed):
    rng = np.random.default_rng(seed)
    pool = Pool(native, device, shape, 8, seed)
    n = int(rng.integers(0, 300))
    width = shape.hkv * shape.d
    seqs = [pool.sequence(random(rng, m, width), random(rng, m, width)) for m in (n, n + 5)]
    for _ in range(4):
        trees = [drive.random_tree(rng, int(rng.integers(1, 33))) for _ in seqs]
        rows = random_rows(rng, shape, sum(map(len, trees)))
        pool.step(seqs, trees, rows)
        at = 0
        for seq, parents in zip(seqs, trees, strict=True):
            seq.pending = drive.root_path(parents, int(rng.integers(len(parents))))
            path = [at + row for row in seq.pending]
            seq.k, seq.v = np.concatenate([seq.k, rows.k[path]]), np.concatenate([seq.v, rows.v[path]])
            at += len(parents)
    pool.control(seqs, [[], []])
    for seq in seqs:
        for side, x in ((pool.k, seq.k), (pool.v, seq.v)):
            found = pool.cells(side, seq, len(x))
            assert found.tobytes() == quantize(x, shape.kind).tobytes()


@shapes
def test_gather_brings_cells_in_order(native, device, shape):
    check_gather(native, device, shape, np.float16)


@shapes
def test_gather_brings_cells_in_order_as_f32(native, shape):
    """A CPU's prompts attend over F32, and a GPU's over F16 alone."""
    check_gather(native, "cpu", shape, np.float32)


def check_gather(native, device, shape, dtype):
    rng = np.random.default_rng(7)
    pool = Pool(native, device, shape, 8, 7)
    seq = pool.sequence(random(rng, 300, shape.hkv * shape.d), random(rng, 300, shape.hkv * shape.d))
    ctl, pages = step_ctl(Seq(n_past=200, n_rows=100)), np.array(seq.pages, np.int32)
    for side, x in ((pool.k, seq.k), (pool.v, seq.v)):
        out = op_run(
            native,
            device,
            "kv_gather",
            [side, ctl, pages],
            (512, 0 if dtype == np.float32 else 1, 0),
            shape=(512, shape.hkv * shape.d),
            dtype=dtype,
        )
        expected = values(quantize(x, shape.kind)).astype(np.float32).astype(dtype)
        assert out[:300].tobytes() == expected.tobytes()
        assert not out[300:].any()


def test_gather_has_zeros_for_a_page_that_is_gone(native):
    """A mask hides its positions, and hidden NaN would show. GPUs run no such layers yet."""
    k = random(np.random.default_rng(1), 4, PAGE * 2 * 64).reshape(4, 2, PAGE, 64)
    ctl, pages = step_ctl(Seq(n_past=2 * PAGE, n_rows=9)), np.array([-1, 3, 0], np.int32)
    out = op_run(native, "cpu", "kv_gather", [k, ctl, pages], (3 * PAGE, 0, 0), shape=(3 * PAGE, 128), dtype=np.float32)
    heads = out.reshape(3, PAGE, 2, 64).swapaxes(1, 2)
    assert not out[:PAGE].any() and (heads[1] == k[3]).all() and (heads[2, :, :9] == k[0, :, :9]).all()


@shapes
def test_gather_and_store_take_several_prompts(native, device, shape):
    """Their rows and cells lie side by side, the cells with room between."""
    rng = np.random.default_rng(8)
    pool, width = Pool(native, device, shape, 8, 7), shape.hkv * shape.d
    lengths, rooms = ((0, 3), (250, 20), (40, 1)), (0, 64, 512)  # Positions before, and rows; where cells begin.
    contexts = [pool.sequence(random(rng, n + 300, width), random(rng, n + 300, width)) for n, _ in lengths]
    seqs, table = [], list[int]()
    for (n_past, n_rows), cells, seq in zip(lengths, rooms, contexts, strict=True):
        seqs.append(Seq(n_past=n_past, n_rows=n_rows, pages=len(table), cells=cells))
        table += seq.pages
    ctl, pages = step_ctl(*seqs), np.array(table, np.int32)
    rows = random(rng, 24, width)
    pool.store(rows, -rows, ctl, pages, append=1)
    at = 0
    for (n_past, n_rows), seq in zip(lengths, contexts, strict=True):
        seq.k[n_past : n_past + n_rows] = rows[at : at + n_rows]
        at += n_rows
    for seq in contexts:
        assert pool.cells(pool.k, seq, len(seq.k)).tobytes() == quantize(seq.k, shape.kind).tobytes()
    out = op_run(native, device, "kv_gather", [pool.k, ctl, pages], (768, 1, 0), shape=(768, width), dtype=np.float16)
    expected = np.zeros((768, width), np.float16)
    for (n_past, n_rows), cells, seq in zip(lengths, rooms, contexts, strict=True):
        expected[cells : cells + n_past + n_rows] = values(quantize(seq.k, shape.kind))[: n_past + n_rows]
    assert out.tobytes() == expected.tobytes()


def test_a_mask_of_several_prompts_is_of_each_ones_own_cells(native):
    ctl = step_ctl(Seq(n_past=30, n_rows=5), Seq(n_past=0, n_rows=1), Seq(n_past=7, n_rows=11))
    mask = op_run(native, "cpu", "prefill_mask", [ctl], (17, 64, 1, 0), shape=(17, 64), dtype=np.float16)
    p, c = np.array([*range(30, 35), 0, *range(7, 18)])[:, None], np.arange(64)[None]
    assert np.array_equal(mask, np.where((c >= 1) & (c <= p), 0, -np.inf))


@pytest.mark.parametrize(("first", "window"), [(0, 0), (1, 0), (0, 7), (1, 40)])
def test_prefill_mask_shows_what_a_row_sees(native, first, window):
    ctl = step_ctl(Seq(n_past=30, n_rows=17))
    mask = op_run(native, "cpu", "prefill_mask", [ctl], (17, 256, first, window), shape=(17, 256), dtype=np.float16)
    p, c = 30 + np.arange(17)[:, None], np.arange(256)[None]
    seen = (c >= first) & (c <= p) & ((c > p - window) if window else True)
    assert np.array_equal(mask, np.where(seen, 0, -np.inf))


def test_choices_become_tokens(native, device):
    drafts = np.random.default_rng(1).integers(0, 1000, (8, 2)).astype(np.int32)
    drafts[7, 0] = 2000  # It is beyond the vocabulary.
    tokens = np.array([5, -1, -4, -8, 0], np.int32)
    found = op_run(native, device, "row_tokens", [tokens, drafts], (1000,), shape=(5,), dtype=np.int32)
    assert found.tolist() == [5, drafts[0, 0], drafts[3, 0], 0, 0]


def test_rows_that_are_not_all_heads_of_a_pool_are_refused(native):
    """An extent may be a product: a row of k or v has D values for each of Hkv heads."""
    ctl, pages = step_ctl(Seq(parents=[-1])), np.zeros(1, np.int32)
    pools = [np.zeros((1, 2, PAGE, 32), np.float32) for _ in range(2)]
    for width in (32, 63, 65, 128):
        rows = [np.zeros((1, width), np.float32) for _ in range(2)]
        named = rf"kv_store: dimension 0 of k is {width}, expected 64 \(D\*Hkv\)"
        with pytest.raises(ArgumentError, match=named):
            op_run(native, "cpu", "kv_store", [*rows, *pools, ctl, pages], (0,), shape=(1,), dtype=np.int32)
