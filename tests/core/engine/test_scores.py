"""What a verify gives each position (luce_sequence_get_scores): against transformers' eager attention
(tests/goldens/keep-*.npz), and against a plain softmax over the core's own keys where rows are a tree."""

from __future__ import annotations

import drive
import make_goldens
import make_keep_goldens
import numpy as np
import pytest
import tiny
from checkout import GOLDENS
from depth import deeper

from luce.errors import ArgumentError, StateError
from luce.native import Prompt

ROWS = make_keep_goldens.ROWS


def bound(device):
    """Shares are 0 to 1, and of the goldens 0.003 in the mean. A GPU's products round activations to F16."""
    return 1e-5 if device.startswith("cpu") else 5e-3


def opened_model(native, tmp_path, device, case):
    config, seed = make_goldens.CASES[case]
    return drive.open_model(native, tiny.write(tmp_path / "f32.gguf", config, tiny.layout(config, seed)), device)


def opened(native, tmp_path, device, case, **params):
    return drive.open_engine(opened_model(native, tmp_path, device, case), scores=1, n_ctx=600, **params)


@pytest.mark.parametrize("threads", [*deeper(1), 3])
@pytest.mark.parametrize("case", make_keep_goldens.CASES)
def test_scores_are_those_of_transformers(native, tmp_path, device, case, threads):
    """With gaps and without, of the best head alone, of some and of all, and of the first positions alone."""
    golden = dict(np.load(GOLDENS / f"keep-{case}.npz"))
    tokens, first = golden["prompt"].tolist(), len(golden["prompt"]) - ROWS
    gaps = [tuple(map(int, gap)) for gap in golden["gaps"]]
    assert max(at for at, _ in gaps) < first
    with opened(native, tmp_path, device, case, gaps=1, n_threads=threads) as engine, engine.sequence() as sequence:
        for shares, here in ((golden["shares"], gaps), (golden["plain"], ())):
            sequence.reset()
            engine.prefill([Prompt(sequence, tokens[:256], False, (), tuple(g for g in here if g[0] < 256))])
            rest = tuple((at - 256, n) for at, n in here if at >= 256)
            engine.prefill([Prompt(sequence, tokens[256:first], False, (), rest)])
            drive.verify(sequence, tokens[first:])
            best = np.sort(shares, axis=0)[::-1]
            for n_best in (1, 2, len(shares), 0, 1000):
                expected = best[: min(n_best, len(best)) or len(best)].mean(0)
                found = sequence.scores(len(tokens), n_best)
                assert np.abs(found - expected).max() < bound(device)
                assert np.array_equal(sequence.scores(9, n_best), found[:9])


def test_scores_of_all_heads_add_up_to_one(native, tmp_path, device):
    with opened(native, tmp_path, device, "base") as engine, engine.sequence() as sequence:
        sequence.prefill(list(range(200)), last=False)
        drive.verify(sequence, [5, 6, 7])
        assert abs(sequence.scores(203).sum() - 1) < 1e-5
        assert sequence.scores(203)[202] > 0


def test_a_verify_that_is_not_committed_leaves_no_trace(native, tmp_path, device):
    """So rows can be scored, and others with a token more after them."""
    with opened(native, tmp_path, device, "base") as engine, engine.sequence() as sequence:
        sequence.prefill(list(range(200)), last=False)
        drive.verify(sequence, [5, 6, 7])
        first = sequence.scores(203)
        drive.verify(sequence, [9, 9, 9, 9, 9])
        assert not np.array_equal(sequence.scores(203), first)
        drive.verify(sequence, [5, 6, 7])
        assert np.array_equal(sequence.scores(203), first)


def test_rows_of_a_tree_see_their_ancestors_alone(native, tmp_path, device):
    """Each path of a tree of two has the scores of the rows that it has as a chain; its scores are their mean."""
    with opened(native, tmp_path, device, "pattern") as engine, engine.sequence() as sequence:
        sequence.prefill(list(range(90)), last=False)
        drive.verify(sequence, [1])
        root = sequence.scores(90)
        each = []
        for leaf in (2, 3):
            drive.verify(sequence, [1, leaf])
            each.append(2 * sequence.scores(90) - root)
        drive.verify(sequence, [1, 2, 3], [-1, 0, 0])
        assert np.abs(sequence.scores(90) - (root + each[0] + each[1]) / 3).max() < bound(device)


def test_scores_are_of_an_engine_that_keeps_them(native, tmp_path, device):
    model = opened_model(native, tmp_path, device, "base")
    with drive.open_engine(model, scores=1) as engine, engine.sequence() as sequence:
        with pytest.raises(StateError):
            sequence.scores(1)
        sequence.prefill(list(range(20)))
        with pytest.raises(StateError, match="no verify"):
            sequence.scores(1)
        drive.verify(sequence, [5])
        for n in (0, 22):
            with pytest.raises(ArgumentError, match=f"scores of {n} positions, of which there are 1 to 21"):
                sequence.scores(n)
        sequence.commit([0])
        assert len(sequence.scores(21)) == 21
        with drive.open_engine(model) as other, other.sequence() as plain:
            drive.verify(plain, [5])
            with pytest.raises(ArgumentError, match="opened without scores"):
                plain.scores(1)
        with pytest.raises(ArgumentError, match="n_sequences is 2"):
            drive.open_engine(model, scores=1, n_sequences=2)
