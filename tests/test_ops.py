"""luce's own ops, each alone on --luce-device, against numpy; and the bits that rounds rely on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import drive
import numpy as np
import pytest
import ref

from luce._native import Library

MAX_ROWS = 64
VERIFY, APPEND, FLUSH = 0, 1, 2  # DeltaMode in kernels.h
SHAPES = [(1, 1, 16), (2, 4, 32), (2, 2, 64), (3, 6, 64), (4, 4, 128), (2, 6, 128)]  # Hk, Hv, S


def random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@dataclass
class Rows:
    """Inputs of some rows of one DeltaNet layer."""

    x: np.ndarray  # (T, C)
    alpha: np.ndarray  # (T, Hv)
    beta: np.ndarray  # (T, Hv)

    def take(self, rows: Sequence[int]) -> Rows:
        index = list(rows)
        return Rows(self.x[index], self.alpha[index], self.beta[index])


class Layer:
    """One DeltaNet layer's weights, state and log, driven through op_run."""

    def __init__(self, native: Library, device: str, hk: int, hv: int, s: int, n_log: int, seed: int):
        self.native, self.device, self.hk, self.hv, self.s, self.n_log = native, device, hk, hv, s, n_log
        self.rng = np.random.default_rng(seed)
        self.c = (2 * hk + hv) * s
        self.w = random(self.rng, self.c, 4)
        self.dt, self.a = random(self.rng, hv), -np.exp(random(self.rng, hv))
        self.window = random(self.rng, 3, self.c)
        self.state = random(self.rng, hv, s, s)
        self.log = np.full(n_log * (self.c + hv * s) + 2 * n_log * (hk * s + hv), np.nan, np.float32)
        self.bank = 0
        self.pending: list[int] = []

    def rows(self, n: int) -> Rows:
        return Rows(*(random(self.rng, n, width) for width in (self.c, self.hv, self.hv)))

    def copy(self) -> Layer:
        other = object.__new__(Layer)
        other.__dict__ = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in self.__dict__.items()}
        return other

    def run(self, rows: Rows, mode: int, parents: Sequence[int] = ()) -> np.ndarray:
        """(T, Hv, S): what leaves the recurrence."""
        t = len(rows.x)
        ctl = np.zeros(2 + 2 * MAX_ROWS, np.int32)
        ctl[:2] = self.bank, len(self.pending)
        ctl[2 : 2 + len(self.pending)] = self.pending
        ctl[2 + MAX_ROWS : 2 + MAX_ROWS + len(parents)] = parents
        params = (self.n_log, self.hk, self.hv, self.s, mode)
        run = self.native.op_run
        args = [rows.x, self.w, self.window, self.log, ctl]
        conv = run(self.device, "deltanet_conv", args, params, shape=(t, self.c))
        args = [conv, rows.alpha, rows.beta, self.dt, self.a, self.state, self.log, ctl]
        out = run(self.device, "deltanet", args, params, shape=(t, self.hv * self.s))
        self.pending = []
        if mode == VERIFY:
            self.bank ^= 1
        return out.reshape(t, self.hv, self.s)

    def verify(self, rows: Rows, parents: Sequence[int]) -> np.ndarray:
        return self.run(rows, VERIFY, parents)

    def append(self, rows: Rows) -> np.ndarray:
        return self.run(rows, APPEND)

    def commit(self, path: Sequence[int]) -> None:
        """Accepts rows of the last verify and replays them at once."""
        self.pending = list(path)
        self.run(self.rows(1), FLUSH)

    def reference(self, rows: Rows, parents: Sequence[int]) -> tuple[np.ndarray, list[np.ndarray]]:
        """float64: (T, Hv, S) outputs, and the state after each row."""
        states: list[np.ndarray] = []
        out = []
        for t, parent in enumerate(parents):
            chain = [t]
            while len(chain) < 4 and parents[chain[-1]] >= 0:
                chain.append(parents[chain[-1]])
            taps = np.concatenate([self.window, rows.x[chain[::-1]]])[-4:].astype(np.float64)
            y = ref.silu(np.einsum("tc,ct->c", taps, self.w.astype(np.float64)))
            q, k, v = np.split(y.reshape(-1, self.s), [self.hk, 2 * self.hk])
            of_head = np.arange(self.hv) % self.hk
            q, k = ref.l2_norm(q)[of_head], ref.l2_norm(k)[of_head]
            decay = np.exp(self.a * ref.softplus(rows.alpha[t].astype(np.float64) + self.dt))
            before = states[parent] if parent >= 0 else self.state.astype(np.float64)
            state, _, o = ref.delta_step(before, q, k, v, decay, ref.sigmoid(rows.beta[t].astype(np.float64)))
            states.append(state)
            out.append(o)
        return np.stack(out), states


def chain(n: int) -> list[int]:
    return list(range(-1, n - 1))


def close(found: np.ndarray, expected: np.ndarray) -> None:
    """float32 sums of up to 64 dependent updates against float64: relative to the largest value."""
    assert np.abs(found - expected).max() <= 2e-5 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [1, 7, 64])
def test_verified_tree_rows_match_the_reference_and_leave_the_state_alone(native, device, shape, n):
    layer = Layer(native, device, *shape, n_log=n, seed=n)
    rows, parents = layer.rows(n), drive.random_tree(layer.rng, n)
    state, window = layer.state.copy(), layer.window.copy()
    expected, states = layer.reference(rows, parents)
    close(layer.verify(rows, parents), expected)
    assert layer.state.tobytes() == state.tobytes() and layer.window.tobytes() == window.tobytes()
    path = drive.root_path(parents, n - 1)
    layer.commit(path)
    close(layer.state, states[path[-1]])
    assert layer.window.tobytes() == np.concatenate([window, rows.x[path]])[-3:].tobytes()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [1, 2, 5, 64, 200])
def test_appended_rows_match_the_reference(native, device, shape, n):
    layer = Layer(native, device, *shape, n_log=1, seed=n)
    rows, window = layer.rows(n), layer.window.copy()
    expected, states = layer.reference(rows, chain(n))
    close(layer.append(rows), expected)
    close(layer.state, states[-1])
    assert layer.window.tobytes() == np.concatenate([window, rows.x])[-3:].tobytes()


@pytest.mark.parametrize("shape", SHAPES)
def test_rounds_of_any_shape_leave_the_bits_of_plain_decoding(native, device, shape):
    plain = Layer(native, device, *shape, n_log=MAX_ROWS, seed=3)
    rounds = plain.copy()
    rng = np.random.default_rng(4)
    for n in (1, 3, 64, 16, 1, 33):
        rows, parents = plain.rows(n), drive.random_tree(rng, n)
        path = drive.root_path(parents, int(rng.integers(n)))
        out = rounds.verify(rows, parents)  # replays the round before, in the same pass
        rounds.pending = path
        for row in path:
            assert plain.append(rows.take([row])).tobytes() == out[[row]].tobytes()
    rounds.run(rounds.rows(1), FLUSH)
    assert rounds.state.tobytes() == plain.state.tobytes()
    assert rounds.window.tobytes() == plain.window.tobytes()


@pytest.mark.parametrize("shape", SHAPES)
def test_append_replays_what_is_pending_first(native, device, shape):
    flushed = Layer(native, device, *shape, n_log=8, seed=5)
    rows = flushed.rows(8)
    flushed.verify(rows, chain(8))
    pending = flushed.copy()
    pending.pending = [0, 1, 2]
    flushed.commit([0, 1, 2])
    more = flushed.rows(5)
    assert pending.append(more).tobytes() == flushed.append(more).tobytes()
    assert pending.state.tobytes() == flushed.state.tobytes()
    assert pending.window.tobytes() == flushed.window.tobytes()


def argmax(native: Library, device: str, logits: np.ndarray) -> np.ndarray:
    return native.op_run(device, "argmax", [logits], shape=(len(logits), 126), dtype=np.int32)[:, :2]


@pytest.mark.parametrize("rows", [1, 2, 64])
@pytest.mark.parametrize("n", [1, 31, 2048, 5003])
def test_argmax_takes_the_lowest_of_the_largest(native, device, rows, n):
    rng = np.random.default_rng(n)
    logits = np.round(random(rng, rows, n) * 2) / 2  # many ties
    assert argmax(native, device, logits).tolist() == [[int(i), 0] for i in logits.argmax(1)]


def test_argmax_over_a_real_vocabulary_with_the_winner_at_every_edge(native, device):
    logits = np.zeros((6, 248320), np.float32)
    for row, i in enumerate([0, 1, 4000, 124160, 248318, 248319]):
        logits[row, i] = 1
    assert argmax(native, device, logits)[:, 0].tolist() == [0, 1, 4000, 124160, 248318, 248319]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 1234, 4999])
def test_argmax_reports_a_value_that_is_not_finite(native, device, bad, where):
    logits = random(np.random.default_rng(1), 3, 5000)
    logits[1, where] = bad
    assert argmax(native, device, logits)[:, 1].tolist() == [0, 1, 0]


@pytest.mark.parametrize("n", [1, 5, 64])
def test_kv_move_brings_accepted_cells_down(native, device, n):
    rng = np.random.default_rng(n)
    k, v = random(rng, 100, 24), random(rng, 100, 8)
    path = np.sort(rng.choice(64, n, replace=False)).astype(np.int32)
    expected_k, expected_v = k.copy(), v.copy()
    for i, row in enumerate(path):
        expected_k[20 + i], expected_v[20 + i] = k[20 + row], v[20 + row]
    block = np.zeros(2 + MAX_ROWS, np.int32)
    block[:2] = 20, n
    block[2 : 2 + n] = path
    native.op_run(device, "kv_move", [k, v, block], shape=(1,), dtype=np.int32)
    assert k.tobytes() == expected_k.tobytes() and v.tobytes() == expected_v.tobytes()
