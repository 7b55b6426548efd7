"""Checks the op that chooses tokens, on --luce-device: every row as luce_sample chooses of the same
logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from depth import deeper
from op_run import op_run
from step_ctl import Seq, step_ctl

from luce.native import Library
from luce.native.structs import Sampling

CHOICE_WIDTH = 5372
HUGE = 2**64 - 1
SAMPLINGS = [
    Sampling(),
    Sampling(1.0, seed=1),
    Sampling(0.7, 20, 0.95, seed=2),
    Sampling(1.0, 0, 0.9, seed=HUGE),
    Sampling(1.5, 300, 0.97, 0.02, seed=4),
    Sampling(0.3, 0, 0.0, 0.1, seed=5),
    Sampling(1.0, 1, seed=6),
    Sampling(5.0, 40_000, 0.5, seed=7),
    Sampling(30.0, 3000, 0.0, seed=8),
    Sampling(1e-30, 0, 0.5, seed=9),
    Sampling(1e30, 0, 0.5, seed=10),
    Sampling(1e30, 1700, 0.3, 0.5, seed=11),
    Sampling(1e30, seed=12),
]


def choose(
    native: Library, device: str, logits: np.ndarray, samplings: Sequence[Sampling], past: Sequence[int]
) -> np.ndarray:
    """Returns [token, whether a logit is not finite] of each row, of a sequence each."""
    rows = [Seq(parents=[-1], n_past=n, sampling=each) for each, n in zip(samplings, past, strict=True)]
    shape = (len(logits), CHOICE_WIDTH)
    return op_run(native, device, "choose", [logits, step_ctl(*rows)], (1, 0, 0), shape=shape, dtype=np.int32)[
        :, :2
    ]


def check(native: Library, device: str, logits: np.ndarray, samplings: Sequence[Sampling]) -> None:
    past = [1000 * row for row in range(len(logits))]
    found = choose(native, device, logits, samplings, past)
    expected = [
        native.sample(row, sampling, n + 1) for row, sampling, n in zip(logits, samplings, past, strict=True)
    ]
    assert found.tolist() == [[token, 0] for token in expected]


@pytest.mark.parametrize("n", [1, 3, 62, 1001, 4096])
def test_rows_are_chosen_each_with_its_own_settings(native, device, n):
    rng = np.random.default_rng(n)
    samplings = [SAMPLINGS[row % len(SAMPLINGS)] for row in range(64)]
    logits = rng.normal(0, 3, (64, n)).astype(np.float32)
    logits[20:50] = np.round(logits[20:50] * 2) / 2  # There are many ties.
    logits[50:] = np.round(logits[50:] / 6)  # There is hardly anything but ties.
    check(native, device, logits, samplings)


@pytest.mark.parametrize("spread", [*deeper(0.0), 1e-6, *deeper(1.0), 8.0])
def test_a_real_vocabulary(native, device, spread):
    """Logits are flat too, where thousands of ids share a range of z."""
    logits = np.random.default_rng(3).normal(0, spread, (len(SAMPLINGS), 248_320)).astype(np.float32)
    check(native, device, logits, SAMPLINGS)


def test_the_winner_may_be_at_every_edge(native, device):
    at = [0, 1, 4000, 124_160, 248_318, 248_319]
    for sampling in (Sampling(), Sampling(0.01, 5, 0.9, seed=1), Sampling(0.01, seed=2)):
        logits = np.zeros((len(at), 248_320), np.float32)
        logits[np.arange(len(at)), at] = 1
        found = choose(native, device, logits, [sampling] * len(at), [5] * len(at))
        assert found[:, 0].tolist() == at


@pytest.mark.parametrize("sampling", SAMPLINGS[:4], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 1234, 4999])
def test_a_value_that_is_not_finite_is_reported(native, device, bad, where, sampling):
    logits = np.random.default_rng(1).normal(0, 1, (3, 5000)).astype(np.float32)
    logits[1, where] = bad
    assert choose(native, device, logits, [sampling] * 3, [5] * 3)[:, 1].tolist() == [0, 1, 0]


def test_rows_that_fill_a_width_are_greedy(native, device):
    logits = np.random.default_rng(1).normal(0, 1, (3, 500)).astype(np.float32)
    ctl = step_ctl(Seq(parents=[-1], sampling=Sampling(30.0, seed=3)))
    found = op_run(native, device, "choose", [logits, ctl], (1, 0, 0), shape=(3, CHOICE_WIDTH), dtype=np.int32)
    assert found[1:, 0].tolist() == logits[1:].argmax(1).tolist()


def test_choices_are_kept_for_later_rows_and_for_the_host(native, device):
    logits = np.random.default_rng(1).normal(0, 1, (5, 500)).astype(np.float32)
    logits[2, 7] = np.nan
    ctl = step_ctl(Seq(parents=[-1, 0, 1, 2], keep=[3, -1, 0, 7], sampling=Sampling(1.0, seed=3)))
    drafts, given = np.full((2, 8, 2), -1, np.int32)
    args = [logits, ctl, drafts, given]
    found = op_run(native, device, "choose", args, (1, 0, 0), shape=(5, CHOICE_WIDTH), dtype=np.int32)
    expected = np.full((8, 2), -1, np.int32)
    expected[[3, 0, 7]] = found[[0, 2, 3], :2]
    assert found[:, 1].tolist() == [0, 0, 1, 0, 0]
    assert np.array_equal(drafts, expected)
    assert np.array_equal(given, expected)
