"""Checks the model in the box: real weights against transformers, its head against torch, speculation on
them, what ships."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import box_model
import drive
import numpy as np
import pytest
import ref
from checkout import GOLDENS, ROOT
from depth import deeper

from luce.files.tokenizer import Tokenizer
from luce.native import File, Library, Model
from luce.native import Sequence as Timeline

CHECKPOINT = ROOT / ".box" / "export" / "box"  # The box was made there, or its parts were unpacked there.

# These bound logit errors over 25 positions; the logits have standard deviation 4.1.
REF_BOUND = 1e-3  # It bounds numpy in float64 against transformers' F32, which measured 1.5e-5, the head too.
CPU_BOUND = 1e-3  # It bounds the core with F32 weights and f32 KV, which measured 1.5e-5.
# It bounds Q8_0 weights, whose products round activations to Q8_0 as well, which measured 0.36.
Q8_BOUND = 0.6
# It bounds the same file against the checkpoint that it was quantised from, which measured 0.48.
CHECKPOINT_BOUND = 0.8

Golden = dict[str, np.ndarray]
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def golden() -> Golden:
    return dict(np.load(GOLDENS / "box.npz"))


@pytest.fixture(scope="module")
def prompts(native: Library) -> list[list[int]]:
    with File(box_model.GGUF, native) as file:
        tokenizer = Tokenizer(file.kv)
    return [tokenizer.encode(text) for text in box_model.PROMPTS]


@pytest.fixture(scope="module")
def sequence(native: Library, device: str) -> Timeline:
    """Opens box.gguf as it ships, with f32 KV and its NextN head."""
    file = File(box_model.GGUF, native)
    model = Model(file, device, head=file)
    return drive.open_sequence(model, n_ctx=512, n_draft=4)


def errors(sequence: Timeline, prompt: np.ndarray, expected: np.ndarray) -> float:
    """Returns the max abs logit errors by verify steps of several widths and by one prefill."""
    worst = 0.0
    for width in (1, 7, len(prompt)):
        sequence.reset()
        worst = max(worst, float(np.abs(drive.chain_logits(sequence, prompt, width) - expected).max()))
    sequence.reset()
    drive.prefill(sequence, prompt)
    return max(worst, float(np.abs(sequence.logits(0) - expected[-1]).max()))


def check_greedy(sequence: Timeline, golden: Golden, name: str, error: float) -> None:
    """Checks the golden's greedy tokens, or, where `error` could change some, the others step by step."""
    prompt, greedy = golden["prompt"], golden[f"{name}greedy"]
    sequence.reset()
    if golden[f"{name}gap"].min() > 2 * error:
        assert drive.greedy(sequence, prompt, len(greedy)) == greedy.tolist()
        return
    choices = [drive.prefill(sequence, prompt)]
    for token in greedy[:-1]:
        choices += drive.verify(sequence, [token])
        sequence.commit([0])
    clear = golden[f"{name}gap"] > 2 * error
    assert np.array(choices)[clear].tolist() == greedy[clear].tolist()


def check_drafts(sequence: Timeline, golden: Golden, name: str, bound: float) -> int:
    """Checks the golden's drafts after every anchor, by one timeline that goes on token by token and, where
    logits were kept, from a prefill of all before. A chain counts up to where two logits are closer than 2 *
    bound. Returns how many drafts were compared."""
    expected = golden[f"{name}drafts"]
    prompt, greedy = golden["prompt"].tolist(), golden[f"{name}greedy"].tolist()
    clear = np.minimum.accumulate(golden[f"{name}draft_gap"], 1) > 2 * bound  # (N, 3)
    again = golden["draft_anchors"].tolist()

    def check(at: int) -> None:
        drive.draft(sequence, greedy[at], expected.shape[1])
        found = np.array(sequence.drafted(expected.shape[1]))
        assert found[clear[at]].tolist() == expected[at, clear[at]].tolist(), f"anchor {at}"

    sequence.reset()
    drive.prefill(sequence, prompt)
    for at, token in enumerate(greedy):
        check(at)
        drive.step(sequence, token)
    for at in again:
        sequence.reset()
        drive.prefill(sequence, prompt + greedy[:at])
        check(at)
    return int(clear.sum() + clear[again].sum())


def test_goldens_text_is_the_tokenizers(native: Library, golden: Golden) -> None:
    with File(box_model.GGUF, native) as file:
        tokenizer = Tokenizer(file.kv)
    text = tokenizer.decode(golden["prompt"])
    assert text.startswith("import unittest\n")
    assert tokenizer.encode(text) == golden["prompt"].tolist()


def test_reference_agrees_with_transformers(golden: Golden) -> None:
    weights = ref.read_gguf(str(box_model.GGUF))
    logits = ref.Reference(box_model.CONFIG, weights).feed(golden["prompt"])
    assert np.abs(logits - golden["stored_logits"]).max() <= REF_BOUND


def test_core_in_f32_agrees_with_transformers(
    native: Library, device: str, golden: Golden, tmp_path: Path, record_property: Record
) -> None:
    """The file holds box.gguf's weights in F32."""
    path = box_model.write_f32(tmp_path / "box-f32.gguf")
    sequence = drive.open_sequence(drive.open_model(native, path, device), n_ctx=256)
    error = errors(sequence, golden["prompt"], golden["stored_logits"])
    record_property("max_abs_logit_error", error)
    print(f"max abs logit error on {device}: {error:.2e}")
    assert error <= (CPU_BOUND if device.startswith("cpu") else drive.CUDA_BOUND)
    check_greedy(sequence, golden, "stored_", error)


@pytest.mark.long
def test_reference_head_agrees_with_torch(golden: Golden, record_property: Record) -> None:
    """ref.NextN, with which test_head compares the core, is held to the head that the box trained."""
    weights = ref.read_gguf(str(box_model.GGUF))
    trunk, head = ref.Reference(box_model.CONFIG, weights), ref.NextN(box_model.CONFIG, weights)
    text = [*golden["prompt"].tolist(), *golden["stored_greedy"].tolist()]
    step = trunk.step(text)
    worst = 0.0
    for at, expected in zip(golden["draft_anchors"], golden["stored_draft_logits"], strict=True):
        n, drafts = len(golden["prompt"]) + at, golden["stored_drafts"][at]
        head.follow(text[len(head.kv[0]) + 1 : n], step.hidden[len(head.kv[0]) : n - 1])
        logits = head.draft([text[n], *drafts[:-1]], step.hidden[n - 1])  # (3, V)
        assert logits.argmax(-1).tolist() == drafts.tolist()
        worst = max(worst, float(np.abs(logits - expected).max()))
    record_property("max_abs_logit_error", worst)
    print(f"max abs logit error: {worst:.2e}")
    assert worst <= REF_BOUND


@pytest.mark.long
def test_drafts_in_f32_are_those_of_torch(
    native: Library, device: str, golden: Golden, tmp_path: Path, record_property: Record
) -> None:
    path = box_model.write_f32(tmp_path / "box-f32.gguf")
    sequence = drive.open_sequence(drive.open_model(native, path, device, head=True), n_ctx=256, n_draft=3)
    n = check_drafts(sequence, golden, "stored_", CPU_BOUND if device.startswith("cpu") else drive.CUDA_BOUND)
    record_property("clear_drafts", n)
    assert n >= 100, "too few drafts say anything"


@pytest.mark.parametrize(("name", "bound"), [("stored_", Q8_BOUND), ("", CHECKPOINT_BOUND)])
def test_drafts_of_the_file_are_those_of_torch(
    sequence: Timeline, golden: Golden, name: str, bound: float, record_property: Record
) -> None:
    n = check_drafts(sequence, golden, name, bound)
    record_property("clear_drafts", n)
    assert n >= 50, "too few drafts say anything"


@pytest.mark.parametrize(("name", "bound"), [("stored_", Q8_BOUND), ("", CHECKPOINT_BOUND)])
def test_core_on_the_file_agrees_with_transformers(
    sequence: Timeline, device: str, golden: Golden, name: str, bound: float, record_property: Record
) -> None:
    error = errors(sequence, golden["prompt"], golden[f"{name}logits"])
    record_property("max_abs_logit_error", error)
    print(f"max abs logit error on {device}: {error:.2e}")
    assert error <= bound
    check_greedy(sequence, golden, name, error)


@pytest.mark.skipif(not CHECKPOINT.exists(), reason="the training checkpoint is not here")
def test_checkpoint_in_f32_agrees_with_transformers(
    native: Library, device: str, golden: Golden, tmp_path: Path
) -> None:
    import convert_qwen35

    path = tmp_path / "box-f32.gguf"
    convert_qwen35.convert(CHECKPOINT, path, "F32", say=lambda text: None)
    sequence = drive.open_sequence(drive.open_model(native, path, device, head=True), n_ctx=256, n_draft=3)
    error = errors(sequence, golden["prompt"], golden["logits"])
    print(f"max abs logit error on {device}: {error:.2e}")
    bound = CPU_BOUND if device.startswith("cpu") else drive.CUDA_BOUND
    assert error <= bound
    check_greedy(sequence, golden, "", error)
    check_drafts(sequence, golden, "", bound)


# ---- speculation


def rounds(sequence: Timeline, prompt: Sequence[int], n: int, gamma: int) -> tuple[list[int], list[int]]:
    """Returns at least n greedy tokens by rounds of gamma drafts, and how many each round accepted."""
    sequence.reset()
    tokens, accepted = [drive.prefill(sequence, prompt)], []
    while len(tokens) < n:
        drive.draft(sequence, tokens[-1], gamma)
        choices = drive.verify_draft(sequence, gamma)
        path, _ = sequence.accept([tokens[-1], *sequence.drafted(gamma)], None, choices)
        sequence.commit(path)
        tokens += [choices[row] for row in path]
        accepted.append(len(path) - 1)
    return tokens[:n], accepted


@pytest.fixture(scope="module")
def with_two_drafts(sequence: Timeline, prompts: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """Decodes 96 tokens after each prompt. Returns them, and the accepted drafts of each round."""
    return [rounds(sequence, prompt, 96, 2) for prompt in prompts]


@pytest.mark.long
@pytest.mark.parametrize("gamma", [2, *deeper(1, 4)])
def test_drafts_change_no_token(
    gamma: int,
    sequence: Timeline,
    prompts: list[list[int]],
    with_two_drafts: list[tuple[list[int], list[int]]],
) -> None:
    for prompt, (with_two, _) in zip(prompts, with_two_drafts, strict=True):
        sequence.reset()
        plain = drive.greedy(sequence, prompt, 96)
        assert plain == (with_two if gamma == 2 else rounds(sequence, prompt, 96, gamma)[0])


def test_head_is_accepted_as_in_training(with_two_drafts: list[tuple[list[int], list[int]]]) -> None:
    """The card says 0.86 for the first draft and 2.57 tokens a round, over many held-out prompts."""
    accepted = [n for _, each in with_two_drafts for n in each]
    first, mean = np.mean(np.array(accepted) > 0), 1 + np.mean(accepted)
    print(f"{len(accepted)} rounds: first draft {first:.3f}, {mean:.3f} tokens a round")
    assert first >= 0.65
    assert mean >= 2.0


# ---- what ships


def test_files_are_small_and_what_the_card_says(native: Library) -> None:
    files = (box_model.GGUF, box_model.DRAFTER)
    assert sum(path.stat().st_size for path in files) <= 24e6
    card = (box_model.DATA / "CARD.md").read_text(encoding="utf-8")
    for path in files:
        assert f"| `{path.name}` | {path.stat().st_size / 1e6:.2f} MB |" in card
    for plot in re.findall(r"!\[.*?\]\((.*?)\)", card):
        assert (box_model.DATA / plot).exists()
    with File(box_model.GGUF, native) as trunk, File(box_model.DRAFTER, native) as drafter:
        assert trunk.kv["general.architecture"] == "qwen35"
        assert drafter.kv["general.architecture"] == "dflash"
        assert trunk.kv["tokenizer.ggml.tokens"] == drafter.kv["tokenizer.ggml.tokens"]
        assert "tokenizer.chat_template" in trunk.kv
