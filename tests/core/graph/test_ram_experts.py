"""Experts in host memory. One placement has one answer: all widths, thread counts and drafts agree.
On a CPU, where all experts are in host memory anyway, every placement has the same answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import drive
import numpy as np
import pytest
from depth import deeper_but
from mixture import CASES, CONFIG, tokens_of, written

from luce.errors import ArgumentError, UnsupportedError
from luce.native import Library
from luce.native.structs import Sampling


@pytest.fixture(scope="module")
def path_of(native: Library, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return written(native, tmp_path_factory.mktemp("ram"))


@pytest.mark.parametrize("kind", deeper_but(CASES, "F32"))
def test_one_placement_has_one_answer(
    kind: str, native: Library, path_of: Callable[[str], Path], device: str
) -> None:
    answers = []
    for n in range(CONFIG.n_layer + 1):
        model = drive.open_model(native, path_of(kind), device, cpu_experts=n)
        found = set()
        for n_threads, width in ((1, 1), (2, 5), (2, 16)):
            sequence = drive.open_sequence(model, n_ctx=128, n_threads=n_threads)
            drive.prefill(sequence, tokens_of(1, 9))
            found.add(drive.chain_logits(sequence, tokens_of(2, 16), width).tobytes())
        assert len(found) == 1
        answers += found
    if device.startswith("cpu"):
        assert len(set(answers)) == 1


def test_a_prompt_has_one_answer(native: Library, path_of: Callable[[str], Path], device: str) -> None:
    """Rows of a prefill are grouped by expert, and threads share the groups out in any way."""
    answers = set()
    for n in range(CONFIG.n_layer + 1) if device.startswith("cpu") else (CONFIG.n_layer,):
        model = drive.open_model(native, path_of("Q4_K"), device, cpu_experts=n)
        for n_threads in (1, 2, 5):
            sequence = drive.open_sequence(model, n_ctx=256, n_threads=n_threads)
            drive.prefill(sequence, tokens_of(6, 170))
            answers.add(drive.chain_logits(sequence, tokens_of(2, 4), 4).tobytes())
    assert len(answers) == 1


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=3)])
def test_drafts_change_no_token(
    sampling: Sampling, native: Library, path_of: Callable[[str], Path], device: str
) -> None:
    model = drive.open_model(native, path_of("Q4_K"), device, head=True, cpu_experts=1)
    sequence = drive.open_sequence(model, n_ctx=128, n_rows=9, n_draft=8)
    sequence.set_sampling(sampling)
    plain = drive.decode(sequence, tokens_of(4, 30), 30, logits=True)
    run = drive.decode(sequence, tokens_of(4, 30), 30, 3, logits=True)
    assert run.tokens == plain.tokens
    assert np.stack(run.logits).tobytes() == np.stack(plain.logits).tobytes()


def test_what_cannot_be_placed_is_refused(
    native: Library, path_of: Callable[[str], Path], tiny_gguf: Path, device: str
) -> None:
    """Opening refuses more layers than there are, a model without experts, and a type that only ggml
    multiplies."""
    with pytest.raises(ArgumentError, match="n_cpu_experts is 3, .* has 2 layers"):
        drive.open_model(native, path_of("Q4_K"), device, cpu_experts=3)
    with pytest.raises(ArgumentError, match="n_cpu_experts is 1, and .* has no experts: .* is qwen35"):
        drive.open_model(native, tiny_gguf, device, cpu_experts=1)
    with pytest.raises(UnsupportedError, match="IQ3_S.* are not multiplied in host memory"):
        drive.open_model(native, path_of("IQ3_S"), device, cpu_experts=1)
