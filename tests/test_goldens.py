"""Logits and greedy tokens against transformers: the numpy reference, then the core."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import drive
import make_goldens
import numpy as np
import pytest
import ref
import tiny

from luce._native import Library
from luce._native import Sequence as Timeline

ROOT = Path(__file__).resolve().parent.parent

CASES = make_goldens.CASES
REF_BOUND = 1e-4  # float64 against transformers' F32: measured 1.1e-5 .. 3.6e-5
CPU_BOUND = 1e-3  # max abs logit error of the core, F32 weights, f32 KV; logits have std 2 .. 3.5


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def golden(case: str) -> dict[str, np.ndarray]:
    return dict(np.load(ROOT / "tests" / "goldens" / f"{case}.npz"))


@pytest.fixture
def sequence(case: str, native: Library, device: str, tmp_path: Path) -> Timeline:
    config, seed = CASES[case]
    path = tiny.write(tmp_path / "f32.gguf", config, tiny.layout(config, seed))
    return drive.open_sequence(drive.open_model(native, path, device), n_ctx=256)


def test_cases_differ_where_it_matters() -> None:
    configs = [c for c, _ in CASES.values()]
    assert {c.head_dim for c in configs} == {64, 128, 256}
    assert {c.state_size for c in configs} == {16, 32, 64, 128}
    assert {c.tied for c in configs} == {True, False}
    assert {c.n_k_head == c.n_v_head for c in configs} == {True, False}
    assert len({c.n_layer for c in configs}) >= 4
    assert len({c.rope_base for c in configs}) >= 4


def test_reference_agrees_with_transformers(case: str, golden: dict[str, np.ndarray]) -> None:
    config, seed = CASES[case]
    weights = tiny.layout(config, seed)
    logits = ref.Reference(config, weights).feed(golden["prompt"])
    assert np.abs(logits - golden["logits"]).max() <= REF_BOUND
    assert ref.Reference(config, weights).greedy(golden["prompt"], 64) == golden["greedy"].tolist()


def test_goldens_are_what_transformers_computes(case: str, golden: dict[str, np.ndarray]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    made = make_goldens.golden(*CASES[case])
    assert made["prompt"].tolist() == golden["prompt"].tolist()
    assert np.abs(made["logits"] - golden["logits"]).max() <= REF_BOUND
    assert made["greedy"].tolist() == golden["greedy"].tolist()


def test_reference_tree_rows_equal_their_root_paths() -> None:
    """The reference's own claims: a tree's row is its path, and replaying the log is decoding."""
    rng = np.random.default_rng(5)
    config, seed = CASES["grouped-s64-d128"]
    weights = tiny.layout(config, seed)
    timeline, plain = ref.Reference(config, weights), ref.Reference(config, weights)
    for _ in range(4):
        tokens = rng.integers(0, config.n_vocab, 9)
        parents = drive.random_tree(rng, 9)
        tree = timeline.step(tokens, parents)
        path = drive.root_path(parents, int(rng.integers(9)))
        timeline.commit(tree, path)
        logits = plain.feed(tokens[path])
        assert np.abs(tree.logits[path] - logits).max() < 1e-11
    for i, state in timeline.state.items():
        assert np.abs(state - plain.state[i]).max() < 1e-12
        assert np.abs(timeline.conv[i] - plain.conv[i]).max() < 1e-12


def core_error(sequence: Timeline, golden: dict[str, np.ndarray]) -> float:
    """Max abs logit error over every position, by prefill of each prefix and by verify steps."""
    prompt, expected = golden["prompt"], golden["logits"]
    worst = 0.0
    for n in range(1, len(prompt) + 1):
        sequence.reset()
        drive.prefill(sequence, prompt[:n])
        worst = max(worst, float(np.abs(sequence.logits(0) - expected[n - 1]).max()))
    for width in (1, 7, 40):
        sequence.reset()
        logits = drive.chain_logits(sequence, prompt, width)
        worst = max(worst, float(np.abs(logits - expected).max()))
    return worst


def test_core_agrees_with_transformers(
    sequence: Timeline,
    golden: dict[str, np.ndarray],
    device: str,
    record_property: Callable[[str, object], None],
) -> None:
    error = core_error(sequence, golden)
    record_property("max_abs_logit_error", error)
    print(f"max abs logit error on {device}: {error:.2e}")
    assert error <= (CPU_BOUND if device == "cpu" else drive.CUDA_BOUND)
    sequence.reset()
    greedy = golden["greedy"]
    if device == "cpu":
        assert drive.greedy(sequence, golden["prompt"], len(greedy)) == greedy.tolist()
        return
    # Two logits that move towards each other by `error` each may change places.
    choices = [drive.prefill(sequence, golden["prompt"])]
    for token in greedy[:-1]:
        choices += drive.verify(sequence, [token])
        sequence.commit([0])
    clear = golden["gap"] > 2 * error
    assert np.array(choices)[clear].tolist() == greedy[clear].tolist()
