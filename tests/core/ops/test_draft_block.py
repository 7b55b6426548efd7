"""Compares the ops of blocks whose drafts depend on each other with numpy, on --luce-device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from op_run import op_run
from step_ctl import Seq, step_ctl

from luce.native import Library
from luce.native.structs import Sampling

NOWHERE = -5  # It stands in entries that nobody may write.


def block_ctl(blocks: int, rows: int, first: int, samplings: Sequence[Sampling] = ()) -> np.ndarray:
    """Returns the control of blocks of `rows` rows, of which those from `first` on draft. Entries are in no order."""
    n = rows - first
    entries = np.random.default_rng(blocks).permutation(blocks * n)
    made = []
    for b in range(blocks):
        keep = [*[-1] * first, *entries[b * n : (b + 1) * n].tolist()]
        sampling = samplings[b % len(samplings)] if samplings else Sampling()
        made.append(Seq(parents=range(-1, rows - 1), n_past=30 * b, keep=keep, sampling=sampling))
    return step_ctl(*made)


def entries_of(ctl: np.ndarray, rows: int) -> list[int]:
    return ctl[4 : 4 + 4 * rows].reshape(rows, 4)[:, 3].tolist()


@pytest.mark.parametrize(("e", "groups", "taps"), [(64, 4, 2), (48, 48, 3), (256, 1, 5)])
def test_a_convolution_ends_where_its_block_begins(
    native: Library, device: str, e: int, groups: int, taps: int
) -> None:
    rng, rows = np.random.default_rng(e), 4
    x, base = (rng.standard_normal(shape).astype(np.float32) for shape in ((3 * rows, e), (2, taps, e)))
    added = rng.standard_normal((3 * rows, 2, taps, groups)).astype(np.float32)
    for side in (0, 1):
        expected = np.zeros_like(x, np.float64)
        for t in range(3 * rows):
            for tap in range(min(taps, t % rows + 1)):
                kernel = base[side, tap] + added[t, side, tap].repeat(e // groups)
                expected[t] += kernel.astype(np.float64) * x[t - tap]
        args = [x, added.reshape(3 * rows, -1), base, block_ctl(3, rows, 1)]
        found = op_run(native, device, "block_conv", args, (side,), shape=x.shape, dtype=np.float32)
        assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_a_rows_candidates_are_its_best(native: Library, device: str) -> None:
    rng = np.random.default_rng(2)
    logits = np.round(rng.standard_normal((5, 700)) * 8).astype(np.float32) / 8  # There are ties.
    logits[3, 11] = np.nan
    logits[4, 600] = np.inf
    for k in (1, 16, 63):
        planes = 3 + -(-64 * (2 * k + 2) // k)  # There is room behind the results.
        found = op_run(native, device, "candidates", [logits], (k,), shape=(planes, 5 * k), dtype=np.int32)
        index, tokens, bits = found[:3].reshape(3, 5, k)
        best = np.argsort(-logits, axis=-1, kind="stable")[:3, :k]
        assert np.array_equal(index[:3], best) and np.array_equal(tokens, index)
        assert np.array_equal(bits[:3].view(np.float32), np.take_along_axis(logits[:3], best, -1))
        assert np.isnan(bits[3:].copy().view(np.float32)).all() and (index >= 0).all() and (index < 700).all()


def test_the_token_before_is_the_draft_above_or_the_anchor(native: Library, device: str) -> None:
    drafts = np.stack([np.arange(100, 108), np.zeros(8)], -1).astype(np.int32)
    tokens = np.array([7, 1, 1, 8, 1, 1], np.int32)
    for first in (0, 1):
        ctl = block_ctl(2, 3, first)
        entries = entries_of(ctl, 6)
        for row in range(first, 3):
            expected = [7, 8] if row == first else [100 + entries[row - 1], 100 + entries[row + 2]]
            found = op_run(
                native, device, "prior_tokens", [tokens, drafts, ctl], (2, row, 2, 1000), shape=(2,), dtype=np.int32
            )
            assert found.tolist() == expected


SAMPLINGS = [Sampling(), Sampling(1.0, seed=3), Sampling(0.8, 4, 0.9, seed=4), Sampling(2.0, 0, 0.0, 0.1, seed=5)]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("listed", [True, False])
def test_a_lattice_is_walked_by_what_each_candidate_adds(
    native: Library, device: str, first: int, gated: bool, listed: bool
) -> None:
    rng, blocks, rows, k, r = np.random.default_rng(first), 5, 6, 7, 24
    n, T = rows - first, 5 * 6
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    ids = np.stack([rng.permutation(1000)[:k] for _ in range(T)]).astype(np.int32)
    z, anchors, before, behind = normal(T, k), normal(T, r), normal(T, k, r), normal(T, k, r) * 0.4
    gates = normal(T, r) if gated else None
    ctl = block_ctl(blocks, rows, first, SAMPLINGS)
    entries = entries_of(ctl, T)
    drafts = np.full((blocks * n + 2, 2), NOWHERE, np.int32)
    given, lists = drafts.copy(), np.full((blocks * n + 2, k + k * k + 3), NOWHERE, np.int32)
    candidates = np.stack([ids, ids, z.view(np.int32)]).reshape(3, T * k)
    args = [candidates, anchors, before.reshape(T * k, r), behind.reshape(T * k, r), gates, ctl, drafts, given]
    op_run(
        native, device, "lattice", [*args, lists if listed else None], (int(first == 0), 1), shape=(T, k * k),
        dtype=np.float32,
    )  # fmt: skip
    for b in range(blocks):
        chosen = None
        for row in range(b * rows + first, (b + 1) * rows):
            gate = gates[row] if gates is not None else 1.0
            froms = anchors[b * rows][None] if chosen is None else before[row - 1]
            scores = z[row] + np.einsum("ar,br->ab", froms * gate, behind[row])
            if listed:
                entry = lists[entries[row]]
                assert entry[:k].tolist() == ids[row].tolist()
                soft = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
                found = entry[k : k + soft.size].view(np.float32).reshape(soft.shape)
                assert np.abs(found - soft).max() < 1e-5
                assert (entry[k + soft.size :] == NOWHERE).all()
            spread = np.full(1000, -np.inf, np.float32)
            spread[ids[row]] = scores[chosen or 0]
            position = 30 * b + row - b * rows + (first == 0)
            expected = native.sample(spread, SAMPLINGS[b % len(SAMPLINGS)], position)
            assert drafts[entries[row]].tolist() == given[entries[row]].tolist() == [expected, 0]
            chosen = ids[row].tolist().index(expected)
    assert (drafts[-2:] == NOWHERE).all() and (lists[-2:] == NOWHERE).all()


def test_a_score_that_is_not_finite_marks_its_draft(native: Library, device: str) -> None:
    k, r, T = 3, 4, 4
    ids, z = np.arange(T * k, dtype=np.int32).reshape(T, k), np.zeros((T, k), np.float32)
    z[2, 1] = np.nan
    ones = np.ones((T, r), np.float32)
    pairs = np.ones((T * k, r), np.float32)
    ctl, drafts = block_ctl(1, T, 1), np.full((3, 2), NOWHERE, np.int32)
    args = [np.stack([ids, ids, z.view(np.int32)]).reshape(3, T * k), ones, pairs, pairs, None, ctl, drafts]
    op_run(
        native, device, "lattice", [*args, drafts.copy(), None], (0, 1), shape=(T, k * k), dtype=np.float32
    )
    assert drafts[entries_of(ctl, T)[1:]].tolist() == [[3, 0], [6, 1], [9, 0]]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("of_tokens", "biased"), [(True, True), (False, True), (True, False)])
def test_confidence_is_of_the_state_and_of_each_candidate_above(
    native: Library, device: str, first: int, of_tokens: bool, biased: bool
) -> None:
    """It stands in the lists behind the scores, and nothing else of them is written."""
    rng, blocks, rows, k, r, e = np.random.default_rng(first), 3, 5, 6, 16, 48
    n, T = rows - first, blocks * rows
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    hidden, anchors, before = normal(T, e), normal(T, r), normal(T, k, r)
    head, bias = normal(1, e + r if of_tokens else e), normal(1) if biased else None
    ctl = block_ctl(blocks, rows, first)
    entries = entries_of(ctl, T)
    lists = np.full((blocks * n + 2, k + k * k + k + 3), NOWHERE, np.int32)
    args = [hidden, anchors, before.reshape(T * k, r), head, bias, ctl, lists]
    op_run(native, device, "confidence", args, (), shape=(T, k), dtype=np.float32)
    for row in range(T):
        if entries[row] < 0:
            continue
        at = row % rows
        above = anchors[row - at][None] if at == first else before[row - 1]
        x = hidden[row] @ head[0, :e] + (bias[0] if bias is not None else 0) + above[:, : head.size - e] @ head[0, e:]
        entry = lists[entries[row]]
        assert np.abs(entry[k + k * k :][: len(above)].view(np.float32) + np.log1p(np.exp(-x))).max() < 1e-4
        lists[entries[row], k + k * k :][: len(above)] = NOWHERE
    assert (lists == NOWHERE).all()
