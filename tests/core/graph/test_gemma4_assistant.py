"""Compares an assistant's drafts and their chances with those of transformers: by its chain after prompts that are read in
one call, in steps, and after rows that were rejected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import drive
import numpy as np
import pytest
import tiny_gemma4
from checkout import GOLDENS
from tiny_gemma4 import ASSISTANT, ASSISTANT_SEED, CASES

from luce.native import Library
from luce.native import Sequence as Timeline

BOUND = 2e-3  # Logits with F32 weights and f32 KV may be off by so much.
N = 4
RANKS = 60


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDENS / "gemma4-assistant.npz"))


@pytest.fixture(scope="module")
def sequence(native: Library, tmp_path_factory: pytest.TempPathFactory) -> Timeline:
    folder, (config, seed) = tmp_path_factory.mktemp("assistant"), CASES["dense"]
    target = tiny_gemma4.write(folder / "target.gguf", config, tiny_gemma4.layout(config, seed))
    tensors = tiny_gemma4.layout(ASSISTANT, ASSISTANT_SEED)
    assistant = tiny_gemma4.write(folder / "assistant.gguf", ASSISTANT, tensors)
    model = drive.open_model(native, target, head=assistant)
    return drive.open_sequence(model, n_ctx=512, n_draft=8, n_rows=16, n_top=RANKS)


def read_whole(sequence: Timeline, tokens: list[int]) -> None:
    drive.prefill(sequence, tokens)


def read_in_steps(sequence: Timeline, tokens: list[int]) -> None:
    for token in tokens:
        drive.step(sequence, token)


def read_beside_rejected_rows(sequence: Timeline, tokens: list[int]) -> None:
    """Wrong rows lie between and behind the right ones, drafts ahead of them, and accepted rows are moved."""
    drive.verify(sequence, [9, 5, 4], [-1, 0, 1])  # Nothing of it is right.
    for at in range(0, len(tokens), 2):
        if at > 0:
            drive.draft(sequence, tokens[at], 3)
        pair = tokens[at : at + 2]
        rows = [*pair[:1], 5, 6, *pair[1:], 7, 8]
        drive.verify(sequence, rows, [-1, 0, 1, 0, *range(3, len(rows) - 1)])
        sequence.commit([0, 3] if len(pair) > 1 else [0])


WAYS: tuple[Callable[[Timeline, list[int]], None], ...] = (read_whole, read_in_steps, read_beside_rejected_rows)


@pytest.mark.parametrize("read", WAYS)
def test_drafts_agree_with_transformers(
    read: Callable[[Timeline, list[int]], None], golden: dict[str, np.ndarray], sequence: Timeline
) -> None:
    """A list has a draft's best tokens and their log-probabilities over the whole vocabulary."""
    errors = []
    for at, drafts, logits in zip(golden["at"], golden["drafts"], golden["logits"], strict=True):
        sequence.reset()
        prompt = [int(token) for token in golden["prompt"][:at]]
        read(sequence, prompt[:-1])
        drive.draft(sequence, prompt[-1], N)
        assert sequence.drafted(N) == drafts.tolist(), at
        lists = sequence.lists(N, RANKS)
        ids, scores = (np.array(list(part)).reshape(N, RANKS) for part in (lists.ids, lists.scores))
        chances = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        errors.append(np.abs(scores - np.take_along_axis(chances, ids, -1)).max())
    assert max(errors) <= BOUND, errors
