"""Compares logits and greedy tokens with those of transformers and llama.cpp: the numpy reference, then the
core."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import drive
import make_goldens
import numpy as np
import pytest
import ref
import tiny
from checkout import GOLDENS, ROOT
from depth import deeper, deeper_but

from luce.bench.oracle_tokenizer import CONTROL
from luce.native import Library
from luce.native import Sequence as Timeline

CASES = make_goldens.CASES | make_goldens.LONG_CASES
CHUNK = 256  # A prompt goes in by chunks of so many where not all of it goes in at once.
TAILS_H = ROOT / "native" / "src" / "step" / "tails.h"
REF_BOUND = 1e-4  # It bounds float64 against transformers' F32, which measured 1.1e-5 .. 3.6e-5.
CPU_BOUND = 1e-3  # It is the core's largest error with F32 weights and f32 KV, of logits with std 2 .. 3.5.


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def golden(case: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDENS / f"{case}.npz"))


@pytest.fixture
def sequence(case: str, native: Library, device: str, tmp_path: Path) -> Timeline:
    config, seed = CASES[case]
    path = tiny.write(tmp_path / "f32.gguf", config, tiny.layout(config, seed))
    return drive.open_sequence(drive.open_model(native, path, device), n_ctx=512)


def test_cases_differ_where_it_matters() -> None:
    configs = [c for c, _ in make_goldens.CASES.values()]
    assert {c.head_dim for c in configs} == {64, 128, 256}
    assert {c.state_size for c in configs} == {16, 32, 64, 128}
    assert {c.tied for c in configs} == {True, False}
    assert {c.n_k_head == c.n_v_head for c in configs} == {True, False}
    assert len({c.n_layer for c in configs}) >= 4
    assert len({c.rope_base for c in configs}) >= 4
    mixtures = [c for c in configs if c.n_expert]
    assert {c.n_ff_shared > 0 for c in mixtures} == {c.tied for c in mixtures} == {True, False}
    assert {1, 4} <= {c.n_expert_used for c in mixtures} and {4, 16} <= {c.n_expert for c in mixtures}


def test_long_cases_reach_both_ways_of_a_gpus_prefill() -> None:
    """Prompts that are multiplied as a step, and by cuBLAS, and input widths that it takes or not."""
    (rows,) = re.findall(r"TAIL = (\d+);", TAILS_H.read_text())
    for longest in (int(rows) // 2, int(rows) - 1):
        assert {n <= longest for n in make_goldens.LONG_AT} == {True, False}
    configs = [c for c, _ in make_goldens.LONG_CASES.values()]
    assert {64, 128} < {c.state_size for c in configs}  # The DeltaNet chunks have these two alone.
    assert {c.n_embd % 8 == 0 for c in configs} == {c.n_ff % 8 == 0 for c in configs} == {True, False}


@pytest.mark.parametrize("case", deeper_but(CASES, "base", "pattern", "experts"))
def test_reference_agrees_with_transformers(case: str, golden: dict[str, np.ndarray]) -> None:
    config, seed = CASES[case]
    weights = tiny.layout(config, seed)
    logits = ref.Reference(config, weights).feed([*golden["prompt"], *golden["greedy"][:-1]])
    assert np.abs(logits[kept(golden)] - golden["logits"]).max() <= REF_BOUND
    assert logits[len(golden["prompt"]) - 1 :].argmax(-1).tolist() == golden["greedy"].tolist()


@pytest.mark.references
def test_goldens_are_what_transformers_computes(case: str, golden: dict[str, np.ndarray]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    make = make_goldens.golden if case in make_goldens.CASES else make_goldens.long_golden
    made = make(*CASES[case])
    assert made["prompt"].tolist() == golden["prompt"].tolist()
    assert np.abs(made["logits"] - golden["logits"]).max() <= REF_BOUND
    assert made["greedy"].tolist() == golden["greedy"].tolist()


@pytest.mark.parametrize("case", deeper_but(CASES, *make_goldens.CASES))
def test_llamacpp_writes_the_same_tokens(
    case: str, golden: dict[str, np.ndarray], sequence: Timeline, device: str
) -> None:
    """The tokens are llama.cpp's own greedy ones of the same file, up to a token that ended its text."""
    recorded = json.loads((GOLDENS / "llamacpp.json").read_text())
    tokens, (config, _) = recorded[case], CASES[case]
    assert len(tokens) == len(golden["greedy"]) or tokens[-1] >= config.n_vocab - len(CONTROL)
    assert tokens == golden["greedy"][: len(tokens)].tolist()
    if device.startswith("cpu"):
        assert drive.greedy(sequence, golden["prompt"], len(tokens)) == tokens


def test_reference_tree_rows_equal_their_root_paths() -> None:
    """The reference's own claims hold: a tree's row is its path, and replaying the log is decoding."""
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


def kept(golden: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the positions of the prompt whose logits a golden has."""
    return golden.get("at", np.arange(len(golden["prompt"])))


def core_error(sequence: Timeline, golden: dict[str, np.ndarray]) -> float:
    """Returns the max abs logit error over all positions that are kept, by prefill of each prefix and by
    verify steps."""
    prompt, expected, at = golden["prompt"], golden["logits"], kept(golden)
    worst = prefill_error(sequence, golden)
    for width in (1, 7, 40):
        sequence.reset()
        logits = drive.chain_logits(sequence, prompt, width)
        worst = max(worst, float(np.abs(logits[at] - expected).max()))
    return worst


def prefill_error(sequence: Timeline, golden: dict[str, np.ndarray]) -> float:
    worst = 0.0
    for position, row in zip(kept(golden), golden["logits"], strict=True):
        sequence.reset()
        drive.prefill(sequence, golden["prompt"][: position + 1])
        worst = max(worst, float(np.abs(sequence.logits(0) - row).max()))
    return worst


@pytest.mark.parametrize("case", deeper_but(CASES, *make_goldens.CASES))
def test_core_agrees_with_transformers(
    sequence: Timeline,
    golden: dict[str, np.ndarray],
    device: str,
    record_property: Callable[[str, object], None],
) -> None:
    error = core_error(sequence, golden)
    record_property("max_abs_logit_error", error)
    print(f"max abs logit error on {device}: {error:.2e}")
    assert error <= (CPU_BOUND if device.startswith("cpu") else drive.CUDA_BOUND)
    sequence.reset()
    greedy = golden["greedy"]
    if device.startswith("cpu"):
        assert drive.greedy(sequence, golden["prompt"], len(greedy)) == greedy.tolist()
        return
    # Two logits that move towards each other by `error` each may change places.
    choices = drive.choices(sequence, golden["prompt"], greedy)
    clear = golden["gap"] > 2 * error
    assert np.array(choices)[clear].tolist() == greedy[clear].tolist()


@pytest.mark.parametrize(
    "case, kind",
    [("long-s64-uneven", "F32"), *deeper(("long-s64-uneven", "F16"), ("long-s64-uneven", "BF16")),
     *deeper(*((case, "F32") for case in make_goldens.LONG_CASES if case != "long-s64-uneven"))],
)  # fmt: skip
def test_long_prompts_in_parts(
    case: str,
    kind: str,
    golden: dict[str, np.ndarray],
    native: Library,
    device: str,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """A prompt takes two calls, with weights that a GPU keeps in an order of its own."""
    config, seed = CASES[case]
    weights = tiny.layout(config, seed)
    path = tiny.write(tmp_path / "model.gguf", config, weights, kind)
    if kind != "F32":  # The reference has the rounded weights.
        logits = ref.Reference(config, ref.read_gguf(str(path))).feed(golden["prompt"])
        golden = golden | {"logits": logits[kept(golden)]}
    sequence = drive.open_sequence(drive.open_model(native, path, device), n_ctx=512, n_chunk=CHUNK)
    error = prefill_error(sequence, golden)
    record_property("max_abs_logit_error", error)
    assert error <= (CPU_BOUND if device.startswith("cpu") else drive.CUDA_BOUND)
