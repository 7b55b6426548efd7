"""Runs luce's DeltaNet ops, each alone on --luce-device, against numpy; and the bits steps rely on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import drive
import numpy as np
import pytest
import ref
from op_run import op_run
from step_ctl import MAX_ROWS, Seq, step_ctl

from luce.native import Library

VERIFY, APPEND = 0, 1  # They are DeltaMode's in kernels.h.
SHAPES = [(1, 1, 16), (2, 4, 32), (2, 2, 64), (3, 6, 64), (4, 4, 128), (2, 6, 128)]  # Hk, Hv, S


def random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@dataclass
class Rows:
    """These are inputs of some rows of one DeltaNet layer."""

    x: np.ndarray  # (T, C)
    alpha: np.ndarray  # (T, Hv)
    beta: np.ndarray  # (T, Hv)

    def take(self, rows: Sequence[int]) -> Rows:
        index = list(rows)
        return Rows(self.x[index], self.alpha[index], self.beta[index])


@dataclass
class Timeline:
    """A timeline is what the host keeps of a slot's sequence."""

    pending: list[int] = field(default_factory=list)  # These rows of its last verify were accepted.
    bank: int = 0
    fresh: bool = False


@dataclass
class Part:
    """This is one sequence's part of a step; parents are counted from its own first row, a prefill has
    none."""

    slot: int
    rows: Rows
    parents: Sequence[int] = ()


class Layer:
    """A layer is one DeltaNet layer's weights, and by slot its states and logs, driven through op_run."""

    def __init__(
        self, native: Library, device: str, hk: int, hv: int, s: int, *, n_log: int, seed: int, slots: int = 1
    ):
        self.native, self.device, self.hk, self.hv, self.s, self.n_log = native, device, hk, hv, s, n_log
        self.rng = np.random.default_rng(seed)
        self.n_slots, self.c = slots, (2 * hk + hv) * s
        self.w = random(self.rng, self.c, 4)
        self.dt, self.a = random(self.rng, hv), -np.exp(random(self.rng, hv))
        self.window = random(self.rng, slots, 3, self.c)
        self.state = random(self.rng, slots, hv, s, s)
        log_size = -(-(n_log * (self.c + hv * s) + 2 * n_log * (hk * s + hv)) // 4) * 4
        self.log = np.full((slots, log_size), np.nan, np.float32)
        self.timelines = [Timeline() for _ in range(slots)]

    def rows(self, n: int) -> Rows:
        return Rows(*(random(self.rng, n, width) for width in (self.c, self.hv, self.hv)))

    def copy(self) -> Layer:
        other = object.__new__(Layer)
        other.__dict__ = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in self.__dict__.items()}
        other.timelines = [Timeline(list(t.pending), t.bank, t.fresh) for t in self.timelines]
        return other

    def forget(self, slot: int) -> None:
        """Empties the slot, and fills it with junk."""
        self.window[slot], self.state[slot], self.log[slot] = np.nan, np.nan, np.nan
        self.timelines[slot] = Timeline(fresh=True)

    def run(self, mode: int, parts: Sequence[Part], width: int) -> np.ndarray:
        """Returns (width, Hv, S): what leaves the recurrence. Rows of no part are NaN, and none is written.
        """
        seqs = []
        for part in parts:
            line, n_rows = self.timelines[part.slot], len(part.rows.x)
            parents = part.parents if mode == VERIFY else ()
            seqs.append(Seq(part.slot, parents, 0, line.pending, line.bank, line.fresh, n_rows=n_rows))
        ctl = step_ctl(*seqs)
        n = sum(len(part.rows.x) for part in parts)
        inputs = [np.full((width, size), np.nan, np.float32) for size in (self.c, self.hv, self.hv)]
        for array, name in zip(inputs, ("x", "alpha", "beta"), strict=True):
            array[:n] = np.concatenate([getattr(part.rows, name) for part in parts])
        x, alpha, beta = inputs
        params = (self.n_log, self.n_slots, self.hk, self.hv, self.s, mode, len(parts))
        args = [x, self.w, self.window, self.log, ctl]
        conv = op_run(self.native, self.device, "deltanet_conv", args, params, shape=(width, self.c))
        args = [conv, alpha, beta, self.dt, self.a, self.state, self.log, ctl]
        out = op_run(self.native, self.device, "deltanet", args, params, shape=(width, self.hv * self.s))
        for part in parts:
            line = self.timelines[part.slot]
            line.pending, line.fresh = [], False
            line.bank ^= int(mode == VERIFY and len(part.rows.x) > 0)
        assert np.isnan(conv[n:]).all() and np.isnan(out[n:]).all()
        return out.reshape(width, self.hv, self.s)

    def verify(self, rows: Rows, parents: Sequence[int], slot: int = 0) -> np.ndarray:
        return self.run(VERIFY, [Part(slot, rows, parents)], len(rows.x))

    def append(self, rows: Rows, slot: int = 0) -> np.ndarray:
        return self.run(APPEND, [Part(slot, rows)], len(rows.x))

    def commit(self, path: Sequence[int], slot: int = 0) -> None:
        """Accepts rows of the last verify and replays them at once, in a step without rows."""
        self.timelines[slot].pending = list(path)
        self.run(VERIFY, [Part(slot, self.rows(0))], 1)

    def reference(self, rows: Rows, parents: Sequence[int]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns float64 (T, Hv, S) outputs of rows of slot 0, and the state after each."""
        states: list[np.ndarray] = []
        out = []
        for t, parent in enumerate(parents):
            chain = [t]
            while len(chain) < 4 and parents[chain[-1]] >= 0:
                chain.append(parents[chain[-1]])
            taps = np.concatenate([self.window[0], rows.x[chain[::-1]]])[-4:].astype(np.float64)
            y = ref.silu(np.einsum("tc,ct->c", taps, self.w.astype(np.float64)))
            q, k, v = np.split(y.reshape(-1, self.s), [self.hk, 2 * self.hk])
            of_head = np.arange(self.hv) % self.hk
            q, k = ref.l2_norm(q)[of_head], ref.l2_norm(k)[of_head]
            decay = np.exp(self.a * ref.softplus(rows.alpha[t].astype(np.float64) + self.dt))
            before = states[parent] if parent >= 0 else self.state[0].astype(np.float64)
            state, _, o = ref.delta_step(before, q, k, v, decay, ref.sigmoid(rows.beta[t].astype(np.float64)))
            states.append(state)
            out.append(o)
        return np.stack(out), states


def chain(n: int) -> list[int]:
    return list(range(-1, n - 1))


def close(found: np.ndarray, expected: np.ndarray) -> None:
    """Compares float32 sums of up to 64 dependent updates with float64, relative to the largest value."""
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
    close(layer.state[0], states[path[-1]])
    assert layer.window[0].tobytes() == np.concatenate([window[0], rows.x[path]])[-3:].tobytes()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [1, 2, 5, 64, 200])
def test_appended_rows_match_the_reference(native, device, shape, n):
    layer = Layer(native, device, *shape, n_log=1, seed=n)
    rows, window = layer.rows(n), layer.window[0].copy()
    expected, states = layer.reference(rows, chain(n))
    close(layer.append(rows), expected)
    close(layer.state[0], states[-1])
    assert layer.window[0].tobytes() == np.concatenate([window, rows.x])[-3:].tobytes()


@pytest.mark.parametrize("shape", SHAPES)
def test_rounds_of_any_shape_leave_the_bits_of_plain_decoding(native, device, shape):
    plain = Layer(native, device, *shape, n_log=MAX_ROWS, seed=3)
    rounds = plain.copy()
    rng = np.random.default_rng(4)
    for n in (1, 3, 64, 16, 1, 33):
        rows, parents = plain.rows(n), drive.random_tree(rng, n)
        path = drive.root_path(parents, int(rng.integers(n)))
        out = rounds.verify(rows, parents)  # It replays the round before in the same pass.
        rounds.timelines[0].pending = path
        for row in path:
            assert plain.append(rows.take([row])).tobytes() == out[[row]].tobytes()
    rounds.commit(path)
    assert rounds.state.tobytes() == plain.state.tobytes()
    assert rounds.window.tobytes() == plain.window.tobytes()


@pytest.mark.parametrize("shape", SHAPES)
def test_append_replays_what_is_pending_first(native, device, shape):
    flushed = Layer(native, device, *shape, n_log=8, seed=5)
    rows = flushed.rows(8)
    flushed.verify(rows, chain(8))
    pending = flushed.copy()
    pending.timelines[0].pending = [0, 1, 2]
    flushed.commit([0, 1, 2])
    more = flushed.rows(5)
    assert pending.append(more).tobytes() == flushed.append(more).tobytes()
    assert pending.state.tobytes() == flushed.state.tobytes()
    assert pending.window.tobytes() == flushed.window.tobytes()


@pytest.mark.parametrize("shape", SHAPES)
def test_sequences_of_a_step_have_the_bits_that_they_have_alone(native, device, shape):
    together = Layer(native, device, *shape, n_log=12, seed=6, slots=5)
    alone = together.copy()
    rng = np.random.default_rng(7)
    for _ in range(5):
        parts = []
        for slot in rng.permutation(5)[: rng.integers(1, 6)].tolist():
            if rng.random() < 0.3:
                together.forget(slot)
                alone.forget(slot)
            n = int(rng.integers(0, 13))
            parts.append(Part(slot, together.rows(n), drive.random_tree(rng, n) if n else ()))
        before = together.copy()
        out = together.run(VERIFY, parts, MAX_ROWS)
        first = 0
        for part in parts:
            n = len(part.rows.x)
            expected = alone.run(VERIFY, [part], max(n, 1))
            assert out[first : first + n].tobytes() == expected[:n].tobytes()
            first += n
            path = drive.root_path(part.parents, int(rng.integers(n))) if n else []
            together.timelines[part.slot].pending = alone.timelines[part.slot].pending = path
        for name in ("state", "window", "log"):
            now, then = getattr(together, name), getattr(before, name)
            assert now.tobytes() == getattr(alone, name).tobytes()
            for slot in set(range(5)) - {part.slot for part in parts}:
                assert now[slot].tobytes() == then[slot].tobytes()


@pytest.mark.parametrize("shape", SHAPES)
def test_appended_sequences_have_the_bits_that_they_have_alone(native, device, shape):
    """Some are new, and some have rows to replay first. Their rows are fewer than the conv's taps, or many."""
    together = Layer(native, device, *shape, n_log=4, seed=9, slots=6)
    for slot in (0, 3):
        together.verify(together.rows(4), chain(4), slot)
        together.timelines[slot].pending = [0, 1, 2][: slot + 1]
    together.forget(1)
    together.forget(4)
    alone = together.copy()
    for lengths in ((1, 2, 3, 70, 1), (40, 1, 5, 2, 64)):
        parts = [Part(slot, together.rows(n)) for slot, n in zip((3, 1, 4, 0, 5), lengths, strict=True)]
        untouched = together.state[2].copy()
        out = together.run(APPEND, parts, sum(lengths))
        expected = np.concatenate([alone.append(part.rows, part.slot) for part in parts])
        assert out.tobytes() == expected.tobytes()
        for name in ("state", "window"):
            assert getattr(together, name).tobytes() == getattr(alone, name).tobytes()
        assert together.state[2].tobytes() == untouched.tobytes()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_fresh_sequence_starts_from_zeros_whatever_its_slot_holds(native, device, shape):
    clean = Layer(native, device, *shape, n_log=4, seed=8, slots=2)
    clean.window[1], clean.state[1] = 0, 0
    junk = clean.copy()
    junk.forget(1)
    rows, more = clean.rows(4), clean.rows(3)
    assert junk.verify(rows, chain(4), 1).tobytes() == clean.verify(rows, chain(4), 1).tobytes()
    assert not junk.state[1].any() and not junk.window[1].any()
    junk.timelines[1].pending, clean.timelines[1].pending = [0, 1], [0, 1]
    _append_both(junk, clean, more)
    junk.forget(1)
    clean.window[1], clean.state[1] = 0, 0
    _append_both(junk, clean, more)


def _append_both(a: Layer, b: Layer, rows: Rows) -> None:
    assert a.append(rows, 1).tobytes() == b.append(rows, 1).tobytes()
    assert a.state.tobytes() == b.state.tobytes() and a.window.tobytes() == b.window.tobytes()
