"""Rows of images in prompts of Gemma 4's small models: against transformers
(tests/goldens/gemma4-vision-per-layer.npz), and the same tokens and bits however a prompt is cut, drafted behind, kept
and resumed."""

from __future__ import annotations

import drive
import numpy as np
import pytest
import tiny_gemma4
import tiny_gemma4_vision as vision
from checkout import GOLDENS
from image_prompts import Mixed, check_chain, decoded, of_golden, open_engine
from saved_bytes import HEADER

from luce.images.gemma4 import BudgetProcessor
from luce.native import File, Tower
from luce.native.structs import Sampling

pytest.importorskip("PIL.Image")
PROCESSOR = BudgetProcessor(mean=(0.5,) * 3, std=(0.5,) * 3, budget=70)
N = 32
N_EMBD = 64


@pytest.fixture(scope="module")
def model(native, tmp_path_factory, device):
    """The model with its assistant."""
    folder = tmp_path_factory.mktemp("images")
    path = vision.write_text(folder / "model.gguf", "per-layer")
    assistant = vision.write_assistant(folder / "assistant.gguf")
    with drive.open_model(native, path, device, head=assistant) as opened:
        yield opened


@pytest.fixture(scope="module")
def tower(native, tmp_path_factory, device):
    c, seed = vision.TOWERS["small"]
    path = tmp_path_factory.mktemp("tower") / "mmproj.gguf"
    with File(vision.write(path, c, vision.layout(c, vision.weights(c, seed))), native) as file:
        with Tower(file, device) as opened:
            yield opened


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDENS / "gemma4-vision-per-layer.npz") as held:
        return dict(held)


@pytest.fixture(scope="module")
def asked(golden, tower):
    """The golden's prompt, with rows of luce's own tower."""
    return of_golden(golden["prompt"].tolist(), vision.VOCABULARY_SIZE - 1, tower, PROCESSOR)


def words(n, seed):
    return np.random.default_rng(seed).integers(60, 300, n).tolist()


def rows(height, width, seed):
    return np.random.default_rng(seed).uniform(-1, 1, (height, width, N_EMBD)).astype(np.float32)


LONG = Mixed([words(30, 1), rows(9, 11, 2), words(41, 3), rows(7, 3, 4), words(90, 5)])  # 281 tokens


@pytest.fixture(scope="module")
def greedy(model, golden, asked, device):
    """Greedy tokens: transformers', or on a GPU, whose logits may be off by CUDA_BOUND, its own without drafts."""
    if device == "cpu":
        return golden["greedy"].tolist()
    with open_engine(model) as engine, engine.sequence() as sequence:
        return decoded(sequence, asked).tokens


def test_tokens_are_those_of_transformers(model, golden, asked, device):
    wanted = golden["greedy"].tolist()
    with open_engine(model) as engine, engine.sequence() as sequence:
        if device == "cpu":
            assert decoded(sequence, asked).tokens[:N] == wanted
            sequence.reset()
        asked.read(sequence)
        logits = [sequence.logits(0), *drive.chain_logits(sequence, wanted[:-1], 1)]
        bound = 0 if device == "cpu" else 2 * drive.CUDA_BOUND
        assert all(row[token] >= row.max() - bound for row, token in zip(logits, wanted, strict=True))


def test_logits_of_each_text_row_are_those_of_transformers(model, golden, asked, device):
    """Of the prompt cut behind each row of text: so positions ahead of, between and behind images are compared."""
    with open_engine(model) as engine, engine.sequence() as sequence:
        for at, logits in zip(golden["at"].tolist(), golden["logits"], strict=True):
            sequence.reset()
            sequence.engine.prefill([asked.prompt(sequence, 0, at + 1)._replace(last=True)])
            bound = 1e-3 if device == "cpu" else drive.CUDA_BOUND
            assert np.abs(sequence.logits(0) - logits).max() < bound, at


@pytest.mark.parametrize("gamma", [1, 3, 8, (0, 0, 3)])
def test_drafts_of_an_assistant_behind_images_change_no_token(model, asked, greedy, gamma):
    with open_engine(model, n_draft=8) as engine, engine.sequence() as sequence:
        assert decoded(sequence, asked, gamma=gamma).tokens[:N] == greedy


@pytest.mark.parametrize("name", vision.ASSISTANTS)
def test_drafts_behind_images_are_those_of_transformers(name, native, tmp_path, device, asked):
    """Of the prompt cut behind tokens of text, of which the first stand directly behind an image."""
    golden, compared = dict(np.load(GOLDENS / f"gemma4-vision-{name}.npz")), 0
    logits, bound = golden["logits"], 2e-3 if device == "cpu" else drive.CUDA_BOUND
    if name == "assistant-ordered":  # Tokens of clusters that are not looked at are never chosen.
        logits = np.where(logits == logits.min(-1, keepdims=True), -1e30, logits)
    path = vision.write_text(tmp_path / "model.gguf", "per-layer")
    assistant = vision.write_assistant(tmp_path / "assistant.gguf", name)
    with drive.open_model(native, path, device, head=assistant) as opened:
        with open_engine(opened, n_draft=8, n_top=60) as engine, engine.sequence() as sequence:
            for at, drafts, of in zip(golden["at"].tolist(), golden["drafts"], logits, strict=True):
                sequence.reset()
                engine.prefill([asked.prompt(sequence, 0, at - 1)._replace(last=True)])
                drive.draft(sequence, asked.tokens[at - 1], len(drafts))
                compared += check_chain(sequence, drafts, of, bound)
    assert compared == logits[..., 0].size or (device != "cpu" and compared >= 12)


def test_cuts_within_images_change_no_bit(model):
    with open_engine(model) as engine, engine.sequence() as sequence:
        cut = engine.info.n_cut
        LONG.read(sequence)
        whole = sequence.dump()
        for cuts in ((cut,), (2 * cut,), range(cut, len(LONG.tokens), cut)):
            sequence.reset()
            LONG.read(sequence, cuts)
            assert sequence.dump() == whole


def test_neighbours_with_and_without_images_change_no_bit(model):
    text = Mixed([words(70, 6)])
    prompts = (text, LONG, text)
    with open_engine(model, n_sequences=3) as engine:
        sequences, alone = [engine.sequence() for _ in range(3)], []
        for sequence, mixed in zip(sequences, prompts, strict=True):
            mixed.read(sequence)
            alone.append(sequence.dump())
            sequence.reset()
        engine.prefill([m.prompt(s, 0, len(m.tokens)) for s, m in zip(sequences, prompts, strict=True)])
        assert [sequence.dump() for sequence in sequences] == alone


@pytest.mark.parametrize("times", [1, 2])  # The first lies within the first image.
def test_a_resumed_prompt_has_the_bits_of_a_cold_one(model, times):
    with open_engine(model, n_checkpoints=2, n_draft=4) as engine, engine.sequence() as sequence:
        n_past = times * engine.info.n_cut
        cold = decoded(sequence, LONG, gamma=3).tokens
        state = sequence.dump()
        sequence.reset()
        sequence.engine.prefill([LONG.prompt(sequence, 0, n_past)])
        with sequence.checkpoint() as kept, engine.load_checkpoint(kept.save()) as loaded:
            assert loaded.tokens == LONG.tokens[:n_past]
            for checkpoint in (kept, loaded):
                sequence.reset()
                sequence.resume(checkpoint)
                assert decoded(sequence, LONG, gamma=3).tokens == cold
                assert sequence.dump() == state


def test_sampled_tokens_are_the_same_in_every_mode(model):
    with open_engine(model, n_draft=4) as engine, engine.sequence() as sequence:
        found = []
        for gamma in (0, 1, 4):
            sequence.reset()
            sequence.set_sampling(Sampling(temperature=1.0, top_k=40, seed=5))
            found.append(decoded(sequence, LONG, gamma=gamma).tokens[:N])
        assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("shape", [(5, 10), (50, 1)])
def test_the_first_tokens_embedding_as_an_image_leaves_the_state_and_drafts_of_text(model, shape):
    """Rows of images have that token's per-layer embeddings, are not scaled, and stand at one position each, however
    many they are a side: so such an image is the same as the token, bit for bit, for the model and its assistant."""
    config, seed = vision.TEXTS["per-layer"][0]
    row = tiny_gemma4.layout(config, seed)["token_embd.weight"][0] * np.float32(N_EMBD**0.5)
    image = np.broadcast_to(row, (*shape, N_EMBD)).astype(np.float32)
    before, behind = words(40, 1), words(30, 3)
    with open_engine(model, n_draft=4) as engine, engine.sequence() as sequence:
        found = []
        for parts in ([before + [0] * 50 + behind], [before, image, behind]):
            sequence.reset()
            anchor = Mixed(parts).read(sequence)
            state = sequence.dump()[HEADER + 4 * sequence.info.n_past :]
            drive.draft(sequence, anchor, 4)
            found.append((state, sequence.drafted(4)))
        assert found[0] == found[1]


def test_other_rows_give_other_logits(model):
    with open_engine(model) as engine, engine.sequence() as sequence:
        seen = []
        for seed in (2, 3):
            sequence.reset()
            Mixed([words(9, 1), rows(3, 4, seed), words(9, 3)]).read(sequence)
            seen.append(sequence.logits(0))
        assert np.abs(seen[0] - seen[1]).max() > 1e-3
