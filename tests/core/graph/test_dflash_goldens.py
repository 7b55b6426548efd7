"""Compares DFlash drafters with the arithmetic of the published PyTorch code (tools/make_dflash_goldens.py):
the K and V of the context, and the logits of a block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import box_model
import drive
import gguf
import numpy as np
import pytest
import ref
import tiny_dflash
from checkout import GOLDENS
from depth import deeper_but
from dflash_goldens import context_of, error, full
from tiny import Config
from tiny_dflash import BOX, CASES, GEMMA4

from luce.convert.gemma4_layout import Config as Gemma4
from luce.convert.hf_dflash import DFlash
from luce.files.probe import probe
from luce.native import File, Library, Model, Source

# It is the largest error with F32 weights and f32 KV, of logits with standard deviations of 1.7 to 3.
CPU_BOUND = 1e-3
NAMES = [*CASES, "box"]

Files = tuple[Config, DFlash, Path, Path]


def f32(source: Path, path: Path) -> Path:
    """Makes the drafter in the box with its weights as they are stored, dequantised."""
    weights = ref.read_gguf(str(source))
    return tiny_dflash.write(path, tiny_dflash.Case(box_model.CONFIG, BOX, 0), weights)


@pytest.fixture
def files(tmp_path: Path) -> Callable[[str], Files]:
    def make(name: str) -> Files:
        if name == "box":
            target = box_model.write_f32(tmp_path / "target.gguf")
            return box_model.CONFIG, BOX, target, f32(box_model.DRAFTER, tmp_path / "drafter.gguf")
        return CASES[name].target, CASES[name].drafter, *tiny_dflash.files(tmp_path, CASES[name])

    return make


@pytest.mark.parametrize("name", deeper_but(NAMES, *CASES))
def test_context_and_blocks_are_those_of_the_published_code(
    name: str,
    files: Callable[[str], Files],
    native: Library,
    device: str,
    record_property: Callable[[str, object], None],
) -> None:
    golden = dict(np.load(GOLDENS / f"dflash-{name}.npz"))
    target, c, model_path, drafter_path = files(name)
    model = drive.open_model(native, model_path, device, drafter=drafter_path)
    tensors = tiny_dflash.weights(CASES[name]) if name in CASES else {}
    expected = full(c, golden["logits"], tensors.get("d2t"))
    bound = CPU_BOUND if device.startswith("cpu") else drive.CUDA_BOUND
    worst, worst_context = errors_of(model, target, c, golden, expected)
    record_property("max_abs_logit_error", worst)
    record_property("max_abs_context_error", worst_context)
    assert worst <= bound and worst_context <= bound


@pytest.mark.parametrize("name", GEMMA4)
def test_drafters_beside_gemma_4_are_those_of_the_published_code(name: str, native: Library, tmp_path: Path) -> None:
    """Their files say neither how embeddings are scaled nor how logits are capped: both are as the target does it. It
    runs on a CPU alone."""
    golden, case = dict(np.load(GOLDENS / f"dflash-gemma4-{name}.npz")), GEMMA4[name]
    target, drafter = tiny_dflash.files(tmp_path, case)
    model = drive.open_model(native, target, drafter=drafter)
    errors = errors_of(model, case.target, case.drafter, golden, golden["logits"])
    assert max(errors) <= CPU_BOUND


def errors_of(
    model: Model, target: Config | Gemma4, c: DFlash, golden: Mapping[str, np.ndarray], expected: np.ndarray
) -> tuple[float, float]:
    """Returns the largest error of a block's logits, and that of the context's K and V."""
    sequence = drive.open_sequence(model, n_ctx=128, blocks=1)
    prompt, anchor, at = golden["prompt"].tolist(), int(golden["anchor"]), golden["at"]
    worst_context = worst = 0.0
    for width in (0, 1, 7):  # It is a prefill, or verifies of so many rows.
        sequence.reset()
        if width:
            drive.chain_logits(sequence, prompt, width)
        else:
            drive.prefill(sequence, prompt)
        context = context_of(sequence, c, len(prompt))
        for kv, expected_kv in enumerate((golden["k"], golden["v"])):
            worst_context = max(worst_context, error(context[:, kv][:, at], expected_kv))
        for _ in range(2):  # A block leaves the context as it was.
            drive.draft(sequence, anchor, c.block_size - 1, Source.DFLASH)
            logits = np.stack([sequence.logits(row) for row in golden["rows"]])
            worst = max(worst, error(logits, expected))
        drafts = [0, *sequence.drafted(c.block_size - 1)]  # The anchor's row has none.
        best = zip(golden["rows"], logits.argmax(-1), strict=True)
        assert all(row == 0 or drafts[row] == token for row, token in best)
    return worst, worst_context


def test_cases_differ_where_it_matters() -> None:
    drafters = [case.drafter for case in CASES.values()]
    assert {c.head_dim for c in drafters} == {64, 128, 256}
    assert {sorted(set(c.causal)) == [False, True] for c in drafters} == {True, False}
    assert any(c.window for c in drafters) and any(c.yarn for c in drafters)
    assert {c.yarn.attention_factor for c in drafters if c.yarn} == {None, 1.7}
    assert len({c.block_size for c in drafters}) == 3
    assert any("d2t" in case.own for case in CASES.values())
    assert any(case.drafter.target_layer_ids[-1] == case.target.n_layer - 1 for case in CASES.values())
    beside_gemma = GEMMA4.values()
    assert all(case.drafter.embedding_scale is case.drafter.softcap is None for case in beside_gemma)
    assert any(case.target.n_shared_kv for case in beside_gemma) and any(case.own for case in beside_gemma)
    for name, case in GEMMA4.items():
        # The cap bends the largest logits.
        assert np.abs(np.load(GOLDENS / f"dflash-gemma4-{name}.npz")["logits"]).max() > 0.6 * case.target.softcap


def test_the_box_is_as_its_golden_takes_it() -> None:
    facts = probe(File(box_model.DRAFTER))
    found = facts.dflash
    assert found is not None and facts.block_count == BOX.n_layer
    assert found.target_layers == [layer + 1 for layer in BOX.target_layer_ids]
    assert (found.block_size, found.mask_token_id, found.causal) == (BOX.block_size, BOX.mask_token_id, False)
    reader = gguf.GGUFReader(box_model.DRAFTER)
    for key, value in (("rope.freq_base", BOX.rope_base), ("attention.layer_norm_rms_epsilon", BOX.eps)):
        assert np.isclose(reader.fields[f"dflash.{key}"].contents(), value, rtol=1e-6)


@pytest.mark.references
@pytest.mark.parametrize("name", [*CASES, *(f"gemma4-{name}" for name in GEMMA4)])
def test_goldens_are_what_torch_computes(name: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import make_dflash_goldens

    case = CASES[name] if name in CASES else GEMMA4[name.removeprefix("gemma4-")]
    made, golden = make_dflash_goldens.of_case(case), dict(np.load(GOLDENS / f"dflash-{name}.npz"))
    assert made.keys() == golden.keys()
    for key, value in golden.items():
        assert np.allclose(made[key], value, atol=1e-4), key
