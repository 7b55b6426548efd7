"""Compares DFlash2 and DSpark drafters with their equations in torch (tools/make_dflash2_goldens.py): the K and V of
the context, the logits of a block, the lists behind each candidate, what a confidence head says there, and the greedy
drafts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import drive
import numpy as np
import pytest
import tiny_dflash2
from checkout import GOLDENS
from dflash_goldens import context_of, error, full
from tiny_dflash2 import CASES, PEERS

from luce.native import Form, Library, Source
from luce.native import Sequence as Timeline

CPU_BOUND = 1e-3  # The largest error of logits and scores, whose standard deviations are 1 to 2.2.
CUT = 0.05  # Behind a candidate where a confidence head says less than that, nothing is listed.


def listed(golden: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns scores (n, K, K) as the core lists them: the logarithm of what a confidence head says is added."""
    if "confidence" not in golden:
        return golden["scores"]
    said = golden["confidence"][:, :, None]
    with np.errstate(divide="ignore"):
        return np.where(said < CUT, -np.inf, golden["scores"] + np.log(said)).astype(np.float32)


def lists_of(sequence: Timeline, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the last draft's candidates (n, k) and their scores (n, k, k)."""
    lists = sequence.lists(n, k, Form.CONDITIONAL)
    ids, scores = list(lists.ids[0 : n * k]), list(lists.scores[0 : n * k * k])
    return np.reshape(ids, (n, k)), np.reshape(np.array(scores, np.float32), (n, k, k))


def check_near(
    golden: Mapping[str, np.ndarray], logits: np.ndarray, ids: np.ndarray, scores: np.ndarray, path: list[int]
) -> None:
    """Checks lists and drafts whose logits may be off by CUDA_BOUND: what is taken instead of the best is as good but
    for twice that."""
    off = 2 * drive.CUDA_BOUND
    for row, (best, others) in enumerate(zip(golden["candidates"], ids, strict=True)):
        assert error(np.sort(logits[row][others]), np.sort(logits[row][best])) <= off
        both = sorted(set(best) & set(others))
        at, expected_at = ([list(each).index(token) for token in both] for each in (others, best))
        for prior in both_priors(golden, ids, row):
            found, expected = scores[row][prior[0], at], listed(golden)[row][prior[1], expected_at]
            if np.isinf(expected).all():  # It is cut, and nearly all say so.
                assert np.isinf(found).all() or golden["confidence"][row][prior[1]] > 0.8 * CUT
                continue
            moved = found - expected  # Other candidates move all by one number.
            assert np.abs(moved - np.median(moved)).max() <= off
    for row, (token, best) in enumerate(zip(path, golden["path"], strict=True)):
        if token != best:  # Behind it there are other lists.
            prior = [*golden["candidates"][row - 1]].index(golden["path"][row - 1]) if row else 0
            of = dict(zip(golden["candidates"][row].tolist(), golden["scores"][row][prior], strict=True))
            assert of[best] - of[token] <= off
            break


def both_priors(golden: Mapping[str, np.ndarray], ids: np.ndarray, row: int) -> list[tuple[int, int]]:
    """Returns the places of the tokens that both lists above a row have, in ours and in the golden's."""
    if row == 0:
        return [(0, 0)]
    above, expected = ids[row - 1].tolist(), golden["candidates"][row - 1].tolist()
    return [(above.index(token), expected.index(token)) for token in above if token in expected]


@pytest.mark.parametrize("name", CASES)
def test_blocks_lists_and_drafts_are_those_of_the_equations(
    name: str, native: Library, device: str, tmp_path: Path
) -> None:
    golden, case = dict(np.load(GOLDENS / f"{name}.npz")), CASES[name]
    c, n, k = case.base.drafter, case.n_draft, case.candidates
    target, drafter = tiny_dflash2.files(tmp_path, case)
    model = drive.open_model(native, target, device, drafter=drafter)
    sequence = drive.open_sequence(model, n_ctx=128, blocks=1, n_top=1)
    prompt, anchor = golden["prompt"].tolist(), int(golden["anchor"])
    bound = CPU_BOUND if device.startswith("cpu") else drive.CUDA_BOUND
    expected = full(c, golden["logits"], tiny_dflash2.weights(case).get("d2t"))
    for width in (0, 1, 7):  # It is a prefill, or verifies of so many rows.
        sequence.reset()
        if width:
            drive.chain_logits(sequence, prompt, width)
        else:
            drive.prefill(sequence, prompt)
        context = context_of(sequence, c, len(prompt))
        for kv, expected_kv in enumerate((golden["k"], golden["v"])):
            assert error(context[:, kv][:, golden["at"]], expected_kv) <= bound
        for _ in range(2):  # A block leaves the context as it was.
            drive.draft(sequence, anchor, n, Source.DFLASH)
            rows = range(0 if case.anchor_drafts else 1, c.block_size)
            logits = np.stack([sequence.logits(row) for row in rows])
            assert error(logits, expected[rows.start :]) <= bound
        ids, scores = lists_of(sequence, n, k)
        if not device.startswith("cpu"):
            check_near(golden, expected[rows.start :], ids, scores, sequence.drafted(n))
            continue
        assert sequence.drafted(n) == golden["path"].tolist()
        assert np.array_equal(ids, golden["candidates"])
        assert np.array_equal(np.isinf(scores), np.isinf(listed(golden)))
        there = np.isfinite(scores)
        assert error(scores[there], listed(golden)[there]) <= CPU_BOUND


@pytest.mark.parametrize("name", PEERS)
def test_drafts_are_llama_cpps(name: str, native: Library, device: str, tmp_path: Path) -> None:
    """By its own driver, of the same files (tools/make_llamacpp_reference.py). They are compared up to one that is not
    ahead by more than may be off. On a GPU that is more than drafts differ by, and lists are held to torch's above."""
    if not device.startswith("cpu"):
        pytest.skip("llama.cpp's drafts were made by a CPU")
    case, golden, compared = PEERS[name], dict(np.load(GOLDENS / "llamacpp-reference.npz")), 0
    target, drafter = tiny_dflash2.files(tmp_path, case)
    model = drive.open_model(native, target, device, drafter=drafter)
    sequence = drive.open_sequence(model, n_ctx=128, blocks=1, n_top=1)
    n = case.n_draft
    for prompt, drafts in zip(golden[f"prompts-{name}"], golden[f"drafts-{name}"], strict=True):
        tokens = [int(token) for token in prompt if token >= 0]
        sequence.reset()
        drive.prefill(sequence, tokens[:-1])
        drive.draft(sequence, tokens[-1], n, Source.DFLASH)
        ids, scores = lists_of(sequence, n, case.candidates)
        sure, above = 0, 0
        while sure < n:
            best = np.argsort(-scores[sure, above])[:2]
            if not scores[sure, above][best[0]] - scores[sure, above][best[1]] > 2 * CPU_BOUND:
                break
            sure, above = sure + 1, int(best[0])
        assert sequence.drafted(n)[:sure] == drafts[:sure].tolist(), tokens
        compared += sure
    assert compared > 0.9 * golden[f"drafts-{name}"].size, compared


@pytest.mark.parametrize("name", ["dflash2", "dspark"])
def test_what_fc_gives_may_be_larger_than_f16_holds(name: str, native: Library, device: str, tmp_path: Path) -> None:
    """Real drafters have values near 1e4 there. A norm follows, so that a factor of all of them changes nothing."""
    golden, case = dict(np.load(GOLDENS / f"{name}.npz")), CASES[name]
    weights = tiny_dflash2.weights(case)
    weights["fc.weight"] *= 1e6
    target, _ = tiny_dflash2.files(tmp_path, case)
    model = drive.open_model(
        native, target, device, drafter=tiny_dflash2.write(tmp_path / "large.gguf", case, weights)
    )
    sequence = drive.open_sequence(model, n_ctx=128, blocks=1, n_top=1)
    bound = CPU_BOUND if device.startswith("cpu") else drive.CUDA_BOUND
    prompt = golden["prompt"].tolist()
    rows = range(0 if case.anchor_drafts else 1, case.base.drafter.block_size)
    for width in (0, 7):
        sequence.reset()
        if width:
            drive.chain_logits(sequence, prompt, width)
        else:
            drive.prefill(sequence, prompt)
        drive.draft(sequence, int(golden["anchor"]), case.n_draft, Source.DFLASH)
        logits = np.stack([sequence.logits(row) for row in rows])
        assert error(logits, golden["logits"][rows.start :]) <= bound


def test_sinks_take_their_part_in_each_layer(native: Library, device: str, tmp_path: Path) -> None:
    """With those of one layer far below all scores, drafts are others by far than the golden's."""
    golden, case = dict(np.load(GOLDENS / "dspark-sinks.npz")), CASES["dspark-sinks"]
    target, _ = tiny_dflash2.files(tmp_path, case)
    for layer in range(case.base.drafter.n_layer):
        weights = tiny_dflash2.weights(case)
        weights[f"blk.{layer}.attn_sinks.weight"][:] = -1e9
        path = tiny_dflash2.write(tmp_path / f"{layer}.gguf", case, weights)
        model = drive.open_model(native, target, device, drafter=path)
        sequence = drive.open_sequence(model, n_ctx=128, blocks=1, n_top=1)
        drive.prefill(sequence, golden["prompt"].tolist())
        drive.draft(sequence, int(golden["anchor"]), case.n_draft, Source.DFLASH)
        logits = np.stack([sequence.logits(row) for row in range(case.n_draft)])
        assert error(logits, golden["logits"]) > 100 * CPU_BOUND


def test_drafts_are_the_same_without_lists(native: Library, device: str, tmp_path: Path) -> None:
    for name, case in CASES.items():
        (folder := tmp_path / name).mkdir()
        target, drafter = tiny_dflash2.files(folder, case)
        golden = dict(np.load(GOLDENS / f"{name}.npz"))
        model = drive.open_model(native, target, device, drafter=drafter)
        found = []
        for lists in (0, 1):
            sequence = drive.open_sequence(model, n_ctx=128, blocks=1, n_top=lists)
            drive.prefill(sequence, golden["prompt"].tolist())
            drive.draft(sequence, int(golden["anchor"]), case.n_draft, Source.DFLASH)
            found.append(sequence.drafted(case.n_draft))
        assert found[0] == found[1]
        assert not device.startswith("cpu") or found[0] == golden["path"].tolist()


@pytest.mark.parametrize("name", ["dflash2-causal", "dspark-reduced"])
def test_tables_may_have_types_of_weights(name: str, native: Library, device: str, tmp_path: Path) -> None:
    """All matrices are F16 or Q8_0, those of which rows are looked up too: scores are near the golden's."""
    golden, case = dict(np.load(GOLDENS / f"{name}.npz")), CASES[name]
    target, _ = tiny_dflash2.files(tmp_path, case)
    for kind in ("F16", "Q8_0"):
        path = tmp_path / f"{kind}.gguf"
        tiny_dflash2.write(path, case, tiny_dflash2.weights(case), kind=kind)
        model = drive.open_model(native, target, device, drafter=path)
        sequence = drive.open_sequence(model, n_ctx=128, blocks=1, n_top=1)
        drive.prefill(sequence, golden["prompt"].tolist())
        drive.draft(sequence, int(golden["anchor"]), case.n_draft, Source.DFLASH)
        ids, scores = lists_of(sequence, 1, case.candidates)
        both = sorted(set(ids[0]) & set(golden["candidates"][0]))
        assert len(both) > 0.7 * case.candidates
        at, expected_at = ([list(each).index(token) for token in both] for each in (ids[0], golden["candidates"][0]))
        off = scores[0, 0][at] - golden["scores"][0, 0][expected_at]  # Other candidates move all by one number.
        assert 0 < np.abs(off - np.median(off)).max() < 0.3


def test_cases_differ_where_it_matters() -> None:
    cases = list(CASES.values())
    assert {case.taps for case in cases} == {0, 2, 3, 4, 8}
    assert {sorted(set(case.base.drafter.causal)) == [True] for case in cases} == {True, False}
    assert {case.anchor_drafts for case in cases if case.markov} == {True, False}
    assert {case.anchor_drafts for case in cases if not case.markov} == {True, False}
    assert {len(case.base.drafter.target_layer_ids) for case in cases} >= {2, 3, 5, 8}
    assert any(case.base.drafter.window and case.taps for case in cases)
    said = np.concatenate([np.load(GOLDENS / f"{name}.npz")["confidence"].ravel() for name, case in CASES.items()
                           if case.confidence])  # fmt: skip
    assert 0.05 < (said[said > 0] < CUT).mean() < 0.5 and np.abs(said - CUT).min() > 1e-3 * CUT
    for name in CASES:  # What the draft before adds decides which one is next.
        golden = dict(np.load(GOLDENS / f"{name}.npz"))
        assert (golden["path"] != golden["candidates"][:, 0]).any()


@pytest.mark.references
@pytest.mark.parametrize("name", CASES)
def test_goldens_are_what_torch_computes(name: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import make_dflash2_goldens

    made, golden = make_dflash2_goldens.of_case(CASES[name]), dict(np.load(GOLDENS / f"{name}.npz"))
    assert made.keys() == golden.keys()
    for key, value in golden.items():
        assert np.allclose(made[key], value, atol=1e-4), key
