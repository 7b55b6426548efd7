"""Checks the inputs of the CPU's matmuls, which one op makes: each kind against numpy, as values and as
packed blocks, and a row's bits beside any other rows."""

from __future__ import annotations

import numpy as np
import pytest
import ref
from op_run import op_run

from luce.native import Library

EPS = 1e-5
FORMS = ("rms", "residual", "swiglu", "geglu", "heads")
SILU, GELU = 0, 1  # native/kernels/common/activation.h
# The values of a row and of a head. Rows of 37 are not packed, and those of 1056 are of several units.
SHAPES = {"one head": (64, 16), "ragged": (37, 37), "many heads": (1056, 32), "a row": (1056, 1056)}


def random(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def normed(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    heads = x.astype(np.float64).reshape(len(x), -1, len(w))
    return (heads / np.sqrt((heads**2).mean(-1, keepdims=True) + EPS) * w).reshape(x.shape)


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


Args = dict[str, np.ndarray]


def make(native: Library, args: Args, form: str = "rms") -> tuple[np.ndarray, np.ndarray, bytes]:
    """Returns x + residual, or nothing; the values; and the packed blocks as (K / 32, T) rows of bytes."""
    t, k = args["x"].shape
    sums, activation = form == "residual", GELU if form == "geglu" else SILU
    n_packed = k // 2 * t if k % 32 == 0 else 0
    eps = int(np.float32(EPS).view(np.int32))
    arrays = [args.get(name) for name in ("x", "w", "z", "up", "residual")]
    out = op_run(native, "cpu", "rows_input", arrays, [eps, activation], shape=((1 + sums) * k * t + n_packed,))
    summed, values, packed = np.split(out, np.cumsum([sums * k * t, k * t]))
    return summed.reshape(-1, k), values.reshape(t, k), packed.tobytes()


def cases(k: int, s: int, t: int) -> dict[str, tuple[Args, np.ndarray]]:
    """Returns the arguments and the expected values of each form."""
    x, y, w, head = (random(*shape, seed=i) for i, shape in enumerate([(t, k), (t, k), (k,), (s,)]))
    return {
        "rms": ({"x": x, "w": w}, normed(x, w)),
        "residual": ({"x": x, "w": w, "residual": y}, normed(x + y, w)),
        "swiglu": ({"x": x, "up": y}, ref.silu(x.astype(np.float64)) * y),
        "geglu": ({"x": x, "up": y}, gelu(x.astype(np.float64)) * y),
        "heads": ({"x": x, "w": head, "z": y}, normed(x, head) * ref.silu(y.astype(np.float64))),
    }


@pytest.mark.parametrize("t", [1, 5])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_values_and_blocks(form: str, shape: str, t: int, native: Library) -> None:
    args, expected = cases(*SHAPES[shape], t)[form]
    sums, values, packed = make(native, args, form)
    assert np.abs(values - expected).max() < 1e-5 * max(1, np.abs(expected).max())
    assert form != "residual" or (sums == args["x"] + args["residual"]).all()
    if SHAPES[shape][0] % 32 == 0:
        shape_of_blocks = (t, 2 * values.shape[1])
        blocks = op_run(native, "cpu", "pack_rows", [values], shape=shape_of_blocks, dtype=np.int8)
        assert packed == blocks.tobytes()


@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_depend_on_others(form: str, native: Library) -> None:
    args, _ = cases(1056, 32, 7)[form]
    _, together, _ = make(native, args, form)
    for t in range(7):
        alone = {name: a if a.ndim == 1 else a[t : t + 1] for name, a in args.items()}
        assert make(native, alone, form)[1].tobytes() == together[t].tobytes()


def test_what_is_not_finite_stays_so(native: Library) -> None:
    x = random(3, 64, seed=1)
    x[0, 5], x[1, 7] = np.nan, np.inf
    w = random(64, seed=2)
    _, values, _ = make(native, {"x": x, "w": w})
    assert np.isnan(values[0]).all() and not np.isfinite(values[1]).all() and np.isfinite(values[2]).all()
    gate = np.array([[np.nan, -1e30, 1e30, -200, 200, 0, -np.inf, 88.8]], np.float32)
    gate = np.tile(gate, (1, 4))
    _, out, _ = make(native, {"x": gate, "up": np.ones_like(gate)})
    assert np.isnan(out[0, 0]) and (out[0, [1, 3, 5]] == 0).all()
    assert out[0, [2, 4]].tolist() == [np.float32(1e30), 200] and abs(out[0, 7] - 88.8) < 1e-4
    _, out, _ = make(native, {"x": gate, "up": np.ones_like(gate)}, "geglu")
    assert np.isnan(out[0, 0]) and (out[0, [1, 3, 5]] == 0).all() and out[0, [2, 4]].tolist() == [np.float32(1e30), 200]


def test_gelu_is_exact_but_for_rounding(native: Library) -> None:
    """Nothing is looked up in F16, which has one part in 2000."""
    gate = np.linspace(-12, 12, 24 * 1056, dtype=np.float32).reshape(24, 1056)
    _, values, _ = make(native, {"x": gate, "up": np.ones_like(gate)}, "geglu")
    expected = gelu(gate.astype(np.float64))
    assert np.abs(values - expected).max() < 2e-6 and (np.abs(values - expected) < 1e-6 * np.abs(gate)).all()
