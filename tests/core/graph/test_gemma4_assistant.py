"""Compares an assistant's drafts and their chances with those of transformers: by its chain after prompts that are read
in one call, in steps, and after rows that were rejected; and with those of numpy where transformers has no golden."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import drive
import numpy as np
import pytest
import tiny_gemma4
from checkout import GOLDENS
from depth import deeper
from gemma4_reference import AssistantReference, Reference
from tiny_gemma4 import ASSISTANT, ASSISTANT_SEED, CASES, ORDERED, ORDERED_SEED, PAIRS

from luce.convert.gemma4_layout import Config
from luce.native import Library
from luce.native import Sequence as Timeline
from luce.native.structs import Sampling

BOUND = 2e-3  # Logits with F32 weights and f32 KV may be off by so much.
N = 4
RANKS = 60
NEVER = -1e30


# Goldens, each of a model of CASES and its assistant.
GOLDEN: dict[str, tuple[str, Config, int]] = {
    "assistant": ("dense", ASSISTANT, ASSISTANT_SEED),
    "assistant-ordered": ("per-layer", ORDERED, ORDERED_SEED),
}


@pytest.fixture(scope="module", params=GOLDEN)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def golden(name: str) -> dict[str, np.ndarray]:
    """Tokens of clusters that are not looked at are never chosen. (transformers gives them the smallest logit.)"""
    golden = dict(np.load(GOLDENS / f"gemma4-{name}.npz"))
    if GOLDEN[name][1].n_centroid:
        golden["logits"] = never_chosen(golden["logits"])
    return golden


def never_chosen(logits: np.ndarray) -> np.ndarray:
    return np.where(logits == logits.min(-1, keepdims=True), NEVER, logits)


def bound_of(device: str) -> float:
    """Returns by how much logits may be off there."""
    return BOUND if device == "cpu" else drive.CUDA_BOUND


@pytest.fixture(scope="module")
def opened(
    name: str, native: Library, device: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Timeline, float]:
    folder, (case, own, own_seed) = tmp_path_factory.mktemp("assistant"), GOLDEN[name]
    config, seed = CASES[case]
    target = tiny_gemma4.write(folder / "target.gguf", config, tiny_gemma4.layout(config, seed))
    assistant = tiny_gemma4.write(folder / "assistant.gguf", own, tiny_gemma4.layout(own, own_seed))
    bound = bound_of(device)
    model = drive.open_model(native, target, device, head=assistant)
    return drive.open_sequence(model, n_ctx=512, n_draft=8, n_rows=16, n_top=RANKS), bound


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
    read: Callable[[Timeline, list[int]], None], golden: dict[str, np.ndarray], opened: tuple[Timeline, float]
) -> None:
    """A list has a draft's best tokens and their log-probabilities over the whole vocabulary. A draft is compared where
    those before it are the same, which they have to be where the best token is ahead by more than may be off."""
    (sequence, bound), errors, compared = opened, list[float](), 0
    for at, drafts, logits in zip(golden["at"], golden["drafts"], golden["logits"], strict=True):
        sequence.reset()
        prompt = [int(token) for token in golden["prompt"][:at]]
        read(sequence, prompt[:-1])
        drive.draft(sequence, prompt[-1], N)
        best = np.sort(logits, -1)
        sure = [*(best[:, -1] - best[:, -2] > 2 * bound), False].index(False)
        assert sequence.drafted(N)[:sure] == drafts[:sure].tolist(), at
        lists, n = sequence.lists(N, RANKS), min(sure + 1, N)
        ids, scores = (np.array(list(part)).reshape(N, RANKS)[:n] for part in (lists.ids, lists.scores))
        chances = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        errors.append(np.abs(scores - np.take_along_axis(chances[:n], ids, -1)).max())
        compared += n
    assert max(errors) <= bound, errors
    assert compared == len(golden["at"]) * N or (bound > BOUND and compared >= 14)


# ---- by the reference in numpy, which the golden holds to transformers

OTHERS: dict[str, tuple[str, Config]] = {  # A model of CASES, and an assistant that fits it.
    "dense": ("dense", ASSISTANT),
    "shared K and V": ("per-layer", replace(ASSISTANT, window=11, v_is_k=False, n_head_kv_swa=1)),
    "experts": ("experts", replace(ASSISTANT, window=9)),
    "published head sizes": (
        "wide-heads", replace(ASSISTANT, window=15, n_head=2, n_head_kv_swa=1, head_dim=512, head_dim_swa=256,
                              n_embd_out=128)),
    "a head of its own": ("dense", replace(ASSISTANT, tied=False)),
    "a narrower window": ("dense", replace(ASSISTANT, window=5)),
    "global layers first": ("dense", replace(ASSISTANT, sliding=(False, True, False))),
    "a cap": ("dense", replace(ASSISTANT, softcap=3.0)),
    "an ordered vocabulary": ("per-layer", ORDERED),
    "an ordered vocabulary and a head of its own": ("per-layer", replace(ORDERED, tied=False, n_centroid=96)),
}  # fmt: skip


class Followed(AssistantReference):
    """Gives the logits of each draft of a chain behind the drafts that were made before it."""

    def chain(self, tokens: np.ndarray, drafted: list[int]) -> Iterator[np.ndarray]:
        states, kv = self.target.states(tokens[:-1])
        self.first, token, state = len(tokens) - 1, int(tokens[-1]), states[-1]
        for following in drafted:
            x = self.projected(token, state)[None]
            for layer in range(self.c.n_layer):
                x = self.block(layer, x, None, {layer: self.seen(layer, kv)})
            normed = self.norm(x[0], "output_norm.weight")
            logits = self.scored(normed)
            yield never_chosen(logits) if self.c.n_centroid else logits
            token, state = following, self.passed_on(x[0], normed)


@pytest.mark.parametrize("sampling", [*deeper(Sampling(), Sampling(1.0, seed=5)), Sampling(0.8, 30, seed=9)])
@pytest.mark.parametrize("name", OTHERS)
def test_drafts_are_those_of_the_reference(
    name: str, sampling: Sampling, native: Library, device: str, tmp_path: Path
) -> None:
    """A draft is drawn with the noise of the token that it guesses, though all are at one position. On a GPU it is what
    is drawn where its logit is higher by as much as two may be off."""
    (case, own), n = OTHERS[name], 6
    config, seed = CASES[case]
    weights, of_own = tiny_gemma4.layout(config, seed), tiny_gemma4.layout(own, 17)
    target = tiny_gemma4.write(tmp_path / "target.gguf", config, weights)
    assistant = tiny_gemma4.write(tmp_path / "assistant.gguf", own, of_own)
    bound = bound_of(device)
    sequence = drive.open_sequence(
        drive.open_model(native, target, device, head=assistant), n_ctx=512, n_draft=8, n_rows=16
    )
    sequence.set_sampling(sampling)
    reference = Followed(own, of_own, Reference(config, weights))
    for length in (2, 14, 40):
        tokens = np.random.default_rng(length).integers(0, config.n_vocab, length)
        sequence.reset()
        drive.prefill(sequence, tokens[:-1].tolist())
        drive.draft(sequence, int(tokens[-1]), n)
        drafted = sequence.drafted(n)
        for i, logits in enumerate(reference.chain(tokens, drafted)):
            logits[drafted[i]] += 0 if device == "cpu" else 2 * bound
            drawn = native.sample(logits.astype(np.float32), sampling, length + i)
            assert drafted[i] == (drawn if sampling.temperature else logits.argmax()), (length, i)


# ---- by llama.cpp's own driver (tools/make_llamacpp_reference.py)


@pytest.mark.parametrize("i", range(len(PAIRS)), ids=[name for name, _ in PAIRS])
def test_drafts_are_llama_cpps(native: Library, device: str, tmp_path: Path, i: int) -> None:
    """They are compared up to one that is not ahead by more than may be off: on a CPU more than 90 of 100 are."""
    name, assistant = PAIRS[i]
    config, seed = CASES[name]
    target = tiny_gemma4.write(tmp_path / "target.gguf", config, tiny_gemma4.layout(config, seed))
    drafter = tiny_gemma4.write(tmp_path / "assistant.gguf", assistant, tiny_gemma4.layout(assistant, ASSISTANT_SEED))
    model = drive.open_model(native, target, device, head=drafter)
    sequence = drive.open_sequence(model, n_ctx=512, n_draft=8, n_top=2)
    golden, bound, compared = dict(np.load(GOLDENS / "llamacpp-reference.npz")), bound_of(device), 0
    for prompt, drafts in zip(golden[f"prompts-{i}"], golden[f"drafts-{i}"], strict=True):
        sequence.reset()
        tokens = [int(token) for token in prompt if token >= 0]
        drive.prefill(sequence, tokens[:-1])
        drive.draft(sequence, tokens[-1], N)
        best = np.array(list(sequence.lists(N, 2).scores)).reshape(N, 2)
        sure = [*(best[:, 0] - best[:, 1] > 2 * bound), False].index(False)
        assert sequence.drafted(N)[:sure] == drafts[:sure].tolist(), tokens
        compared += sure
    assert compared > (0.9 if device == "cpu" else 0.5) * golden[f"drafts-{i}"].size
