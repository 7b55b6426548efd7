"""Checks the CPU's matmul of steps: each weight type against numpy, and a row's bits beside any other
rows."""

from __future__ import annotations

from pathlib import Path

import drive
import numpy as np
import pytest
import tiny
from depth import deeper
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from op_run import Weights, op_run

from luce.native import Library

FLOATS = ("F32", "F16", "BF16")
SMALL_BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4")
BIG_BLOCKS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "NVFP4", "TQ1_0", "TQ2_0")
KINDS = FLOATS + SMALL_BLOCKS + BIG_BLOCKS
PACKED = np.dtype(
    [("q", "i1", 32), ("d", "<f4"), ("minus", "<i4", 3), ("minus_real", "<f4", 3), ("unused", "<i4")]
)
DEEP = {"F32": 37, "F16": 70, "BF16": 33} | dict.fromkeys(SMALL_BLOCKS, 96) | dict.fromkeys(BIG_BLOCKS, 768)


def random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def weights_of(native: Library, kind: str, k: int, n: int, seed: int = 0) -> tuple[Weights, np.ndarray]:
    """Returns a random matrix, and the (n, k) values that its blocks stand for."""
    values = random(np.random.default_rng(seed), n, k) + np.float32(0.2)
    type_id = GGMLQuantizationType[kind]
    rows = native.quantize(int(type_id), values)
    return Weights(rows, int(type_id), k), dequantize(rows, type_id).reshape(n, k).astype(np.float64)


def pack(native: Library, x: np.ndarray) -> np.ndarray:
    t, k = x.shape
    return op_run(native, "cpu", "pack_rows", [x], shape=(t, 2 * k), dtype=np.int8)


def multiply(native: Library, matrices: list[Weights], x: np.ndarray) -> list[np.ndarray]:
    """Returns (T, N) of each matrix."""
    floats = matrices[0].type_id in [int(GGMLQuantizationType[kind]) for kind in FLOATS]
    rows, t = x if floats else pack(native, x), len(x)
    sizes = [t * len(each.rows) for each in matrices]
    out = op_run(native, "cpu", "rows_matmul", [rows, *matrices], shape=(sum(sizes),))
    return [part.reshape(t, -1) for part in np.split(out, np.cumsum(sizes)[:-1])]


def check(native: Library, kind: str, k: int, n: int, t: int) -> None:
    weights, w = weights_of(native, kind, k, n)
    x = random(np.random.default_rng(1), t, k)
    taken = x.astype(np.float64)
    if kind not in FLOATS:
        blocks = pack(native, x).reshape(-1).view(PACKED).reshape(k // 32, t).T
        taken = (blocks["q"] * blocks["d"][..., None].astype(np.float64)).reshape(t, k)
        half_step = np.abs(x.reshape(t, -1, 32)).max(-1) / 254
        assert (np.abs(taken - x).reshape(t, -1, 32).max(-1) <= half_step * 1.0001).all()
    compare(native, weights, w, x, taken)


def compare(native: Library, weights: Weights, w: np.ndarray, x: np.ndarray, taken: np.ndarray) -> None:
    (found,) = multiply(native, [weights], x)
    # Sums of F32 products are compared relative to what the terms would give without their signs.
    assert (np.abs(found - taken @ w.T) <= 2e-6 * (np.abs(taken) @ np.abs(w).T)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("t", [*deeper(1, 3, 8), 11])
def test_product_is_that_of_what_the_blocks_say(native, kind, t):
    for n in (1, 3, 17, 48):
        check(native, kind, DEEP[kind], n, t)
    check(native, kind, 256, 1000, t)
    check(native, kind, 4096, 17, t)
    if kind not in BIG_BLOCKS:
        check(native, kind, 32, 17, t)


@pytest.mark.parametrize("kind, scales", [("MXFP4", range(220)), ("NVFP4", range(128))])
def test_each_scale_of_four_bit_floats_counts(native, kind, scales):
    """A weight row has one scale throughout, from the subnormal ones on."""
    type_id = GGMLQuantizationType[kind]
    k, size, at = (32, 17, 1) if kind == "MXFP4" else (64, 36, 4)
    blocks = np.random.default_rng(5).integers(0, 256, (len(scales), 1, size), np.uint8)
    blocks[:, :, :at] = np.array(scales, np.uint8)[:, None, None]
    rows = blocks.reshape(len(scales), -1)
    w = dequantize(rows, type_id).reshape(len(scales), k).astype(np.float64)
    x = np.full((3, k), 127, np.float32)  # It is exact as 8 bits.
    compare(native, Weights(rows, int(type_id), k), w, x, x.astype(np.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_same_bits_at_any_width_and_place(native, kind):
    weights, _ = weights_of(native, kind, DEEP[kind], 19)
    rng = np.random.default_rng(2)
    x = random(rng, 64, DEEP[kind])
    alone = np.concatenate([multiply(native, [weights], row[None])[0] for row in x])
    for width in range(1, 65):
        rows = rng.permutation(64)[:width]
        (found,) = multiply(native, [weights], x[rows])
        assert found.tobytes() == alone[rows].tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, 3e38])
def test_bad_rows_show_and_leave_others_alone(native, kind, junk):
    weights, _ = weights_of(native, kind, DEEP[kind], 19)
    x = random(np.random.default_rng(3), 13, DEEP[kind])
    (clean,) = multiply(native, [weights], x)
    bad = [0, 5, 12]
    x[bad, 7] = junk
    (found,) = multiply(native, [weights], x)
    good = [row for row in range(13) if row not in bad]
    assert found[good].tobytes() == clean[good].tobytes()
    if not abs(junk) < np.inf:
        assert not np.isfinite(found[bad]).any()


def test_tiny_and_zero_rows_give_small_numbers(native):
    weights, _ = weights_of(native, "Q8_0", 64, 5)
    for size in (0.0, 1e-45, 1e-38, 1e-36):
        (found,) = multiply(native, [weights], np.full((2, 64), size, np.float32))
        assert (np.abs(found) <= 500 * size).all()


@pytest.mark.parametrize(
    "kinds", [("Q4_K", "Q6_K", "Q8_0", "Q5_K"), ("F16", "F32"), ("Q4_0", "Q4_1", "IQ4_NL")]
)
def test_matrices_of_one_op_do_not_meet(native, kinds):
    x = random(np.random.default_rng(4), 6, 256)
    matrices = [weights_of(native, kind, 256, n)[0] for kind, n in zip(kinds, (33, 1, 16, 7), strict=False)]
    together = multiply(native, matrices, x)
    for matrix, found in zip(matrices, together, strict=True):
        assert found.tobytes() == multiply(native, [matrix], x)[0].tobytes()


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_threads_change_no_bit(native, tmp_path: Path, kind):
    config = tiny.Config()
    layout, kinds = tiny.layout(config, 5), drive.type_of(kind)
    path = tiny.write(tmp_path / "model.gguf", config, layout, kinds, quantize=native.quantize)
    model, found = drive.open_model(native, path), set()
    for threads in (1, 2, 3, 4):
        sequence = drive.open_sequence(model, n_ctx=64, n_threads=threads)
        drive.prefill(sequence, [1, 2, 3])
        drive.verify(sequence, range(5, 10))
        found.add(b"".join(sequence.logits(row).tobytes() for row in range(5)))
    assert len(found) == 1
