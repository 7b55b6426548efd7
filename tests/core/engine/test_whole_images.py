"""Images of Gemma 4's large models, whose rows see all of their image in sliding layers: against transformers
(tests/goldens/gemma4-vision-dense.npz, -experts.npz, -unified.npz), and the same tokens and bits however a prompt is
cut beside images, drafted behind, kept and resumed."""

from __future__ import annotations

import drive
import numpy as np
import pytest
import tiny_dflash
import tiny_gemma4_unified
import tiny_gemma4_vision as vision
from checkout import GOLDENS
from depth import deeper
from image_prompts import Mixed, decoded, of_golden, open_engine
from saved_bytes import HEADER
from split import two_stages

from luce.errors import ArgumentError, StateError
from luce.images.gemma4 import BudgetProcessor
from luce.native import File, Source, Tower
from luce.native.structs import Sampling

pytest.importorskip("PIL.Image")
PROCESSOR = BudgetProcessor(mean=(0.5,) * 3, std=(0.5,) * 3, budget=70)
UNIFIED = BudgetProcessor(patch=48, merge=1, mean=(0.0,) * 3, std=(1.0,) * 3, budget=70)
N = 32
N_EMBD = 64


@pytest.fixture(scope="module", params=["dense", *deeper("experts")])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(native, name, tmp_path_factory, device):
    """The model with its assistant."""
    folder = tmp_path_factory.mktemp("images")
    assistant = vision.write_assistant_of(folder / "assistant.gguf", name)
    with drive.open_model(native, vision.write_text(folder / "model.gguf", name), device, head=assistant) as opened:
        yield opened


@pytest.fixture(scope="module", params=["own", *deeper("unified")])
def golden(request, name):
    """What transformers answers with the tower of the 26B and 31B, or, for one model, with that of the 12B."""
    if request.param == "unified" and name != "dense":
        pytest.skip("one model has a golden with this tower")
    with np.load(GOLDENS / f"gemma4-vision-{'unified' if request.param == 'unified' else name}.npz") as held:
        return dict(held)


@pytest.fixture(scope="module")
def tower(native, golden, tmp_path_factory, device):
    path = tmp_path_factory.mktemp("tower") / "mmproj.gguf"
    if "0" in golden:  # Rows of its own tower.
        tiny_gemma4_unified.write(path)
    else:
        c, seed = vision.TOWERS["large"]
        vision.write(path, c, vision.layout(c, vision.weights(c, seed)))
    with File(path, native) as file, Tower(file, device) as opened:
        yield opened


@pytest.fixture(scope="module")
def asked(golden, tower):
    """The golden's prompt, with rows of luce's own tower."""
    processor = PROCESSOR if tower.info.merge == 3 else UNIFIED
    return of_golden(golden["prompt"].tolist(), vision.VOCABULARY_SIZE - 1, tower, processor)


def words(n, seed):
    return np.random.default_rng(seed).integers(60, 300, n).tolist()


def rows(height, width, seed):
    return np.random.default_rng(seed).uniform(-1, 1, (height, width, N_EMBD)).astype(np.float32)


# Images of 99, 21, 8 and 60 rows, of which the second and third are side by side; 371 tokens. Multiples of 64 are
# within the first and the last one, and a page ends in the last one. The tail of 128 begins within no image.
LONG = Mixed([words(30, 1), rows(9, 11, 2), words(3, 3), rows(7, 3, 4), rows(2, 4, 5), words(40, 6), rows(6, 10, 7),
              words(110, 8)])  # fmt: skip
# Of its 280 tokens the last 24 would be the tail, which would begin within the image: so it begins behind that.
CUT_TAIL = Mixed([words(110, 1), rows(12, 13, 2), words(14, 3)])
PROMPTS = pytest.mark.parametrize("prompt", [LONG, CUT_TAIL], ids=["long", "tail"])


def boundaries(prompt):
    return sorted({edge for at, rows, _, _ in prompt.spans for edge in (at, at + len(rows))})


def tail_of(prompt):
    """Returns where a prompt's tail begins: at the last multiple of 128, or behind the image that is there."""
    at = len(prompt.tokens) - len(prompt.tokens) % 128
    return next((first + len(rows) for first, rows, _, _ in prompt.spans if first < at < first + len(rows)), at)


def cuts_of(prompt, cut):
    """Returns places at which a prompt may be cut: multiples of `cut` outside images, and what is beside these."""
    within = lambda at: any(first < at < first + len(rows) for first, rows, _, _ in prompt.spans)  # noqa: E731
    return [at for at in range(cut, len(prompt.tokens), cut) if not within(at)]


@pytest.fixture(scope="module")
def greedy(model, golden, asked, device):
    """Greedy tokens: transformers', or on a GPU, whose logits may be off by CUDA_BOUND, its own without drafts."""
    if device == "cpu":
        return golden["greedy"].tolist()
    with open_engine(model) as engine, engine.sequence() as sequence:
        return decoded(sequence, asked).tokens


def test_tokens_are_those_of_transformers(model, golden, asked, device):
    wanted = golden["greedy"].tolist()
    assert len(wanted) == N
    with open_engine(model) as engine, engine.sequence() as sequence:
        if device == "cpu":
            assert decoded(sequence, asked).tokens[:N] == wanted
            sequence.reset()
        asked.read(sequence)
        logits = [sequence.logits(0), *drive.chain_logits(sequence, wanted[:-1], 1)]
        bound = 0 if device == "cpu" else 2 * drive.CUDA_BOUND
        assert all(row[token] >= row.max() - bound for row, token in zip(logits, wanted, strict=True))


def test_logits_of_each_text_row_are_those_of_transformers(model, golden, asked, device):
    """Of the prompt cut behind each row of text: so positions ahead of, between and behind images are compared. Where
    rows of an image see only what is before them, these logits are others."""
    apart, bound = [], 1e-3 if device == "cpu" else drive.CUDA_BOUND
    with open_engine(model) as engine, engine.sequence() as sequence:
        each = zip(golden["at"].tolist(), golden["logits"], golden["causal"], strict=True)
        for at, logits, causal in each:
            sequence.reset()
            sequence.engine.prefill([asked.prompt(sequence, 0, at + 1)._replace(last=True)])
            assert np.abs(sequence.logits(0) - logits).max() < bound, at
            if at > asked.spans[0][0]:
                apart.append(np.abs(sequence.logits(0) - causal).max())
    assert min(apart) > 2 * drive.CUDA_BOUND


def test_no_rounding_chooses_other_experts():
    """So that each logit of the mixture's golden may be held to its bound on any GPU: of all rows in all layers the
    experts that are chosen are ahead of the others by twice what rounding to F16 moves such a distance, or more."""
    with np.load(GOLDENS / "gemma4-vision-experts.npz") as golden:
        margin, moved = golden["router-margin"], golden["router-moved"]
    config = vision.TEXTS["experts"][0][0]
    assert len(margin) == config.n_layer and config.n_expert > config.n_expert_used > 1
    assert (moved > 0).all() and (margin > 2 * moved).all() and margin.min() > drive.ROUTER_GAP


@pytest.mark.parametrize("gamma", [*deeper(1, 3), 8, (0, 0, 3)])
def test_drafts_of_an_assistant_behind_images_change_no_token(model, asked, greedy, gamma):
    with open_engine(model, n_draft=8) as engine, engine.sequence() as sequence:
        assert decoded(sequence, asked, gamma=gamma).tokens[:N] == greedy


@PROMPTS
def test_cuts_beside_images_change_no_bit(model, prompt):
    """At multiples of n_cut outside images, and ahead of and behind these. Cuts behind where the tail begins are left
    out: that is computed as rows of a round are."""
    with open_engine(model) as engine, engine.sequence() as sequence:
        assert engine.info.whole_images
        prompt.read(sequence)
        whole = sequence.dump()
        edges = [edge for edge in boundaries(prompt) if edge <= tail_of(prompt)]
        free = cuts_of(prompt, engine.info.n_cut)
        for cuts in (free[:1], free, edges, edges[:1], edges[1:2], sorted({*free, *edges})):
            sequence.reset()
            prompt.read(sequence, cuts)
            assert sequence.dump() == whole, cuts


def test_a_cut_within_an_image_is_refused(model):
    with open_engine(model) as engine, engine.sequence() as sequence:
        for begin, end in ((0, 64), (0, 31), (0, 128)):
            with pytest.raises(ArgumentError, match="see each other, so a part of a prompt has all of them or none"):
                engine.prefill([LONG.prompt(sequence, begin, end)])
            assert sequence.info.n_past == 0


def test_neighbours_with_and_without_images_change_no_bit(model):
    text = Mixed([words(70, 6)])
    prompts = (text, LONG, CUT_TAIL, text)
    with open_engine(model, n_sequences=4) as engine:
        sequences, alone = [engine.sequence() for _ in prompts], []
        for sequence, mixed in zip(sequences, prompts, strict=True):
            mixed.read(sequence)
            alone.append(sequence.dump())
            sequence.reset()
        engine.prefill([m.prompt(s, 0, len(m.tokens)) for s, m in zip(sequences, prompts, strict=True)])
        assert [sequence.dump() for sequence in sequences] == alone


@PROMPTS
def test_a_resumed_prompt_has_the_bits_of_a_cold_one(model, prompt):
    """Resumed at every place where a checkpoint may be made: multiples of n_cut outside images."""
    with open_engine(model, n_checkpoints=2, n_draft=4) as engine, engine.sequence() as sequence:
        cold = decoded(sequence, prompt, gamma=3).tokens
        state = sequence.dump()
        for n_past in cuts_of(prompt, engine.info.n_cut):
            sequence.reset()
            prompt.read(sequence)
            sequence.reset()
            # In parts that end beside images too.
            for begin, end in zip((0, *boundaries(prompt)), (*boundaries(prompt), n_past), strict=True):
                if begin < min(end, n_past):
                    sequence.engine.prefill([prompt.prompt(sequence, begin, min(end, n_past))])
            if sequence.info.n_past < n_past:
                sequence.engine.prefill([prompt.prompt(sequence, sequence.info.n_past, n_past)])
            with sequence.checkpoint() as kept, engine.load_checkpoint(kept.save()) as loaded:
                for checkpoint in (kept, loaded):
                    sequence.reset()
                    sequence.resume(checkpoint)
                    assert decoded(sequence, prompt, gamma=3).tokens == cold, n_past
                    assert sequence.dump() == state, n_past


def test_no_checkpoint_is_within_an_image_or_beside_one(model):
    """But at a multiple of n_cut, which the image's end may be."""
    with open_engine(model, n_checkpoints=1) as engine, engine.sequence() as sequence:
        sequence.engine.prefill([LONG.prompt(sequence, 0, 30)])
        with pytest.raises(StateError):
            sequence.checkpoint()


def test_several_stages_have_the_bits_of_one(native, name, tmp_path, device):
    """Each stage has what its rows see, since each has sliding layers."""
    path, found = vision.write_text(tmp_path / "m.gguf", name), []
    n, sliding = vision.TEXTS[name][0][0].n_layer, vision.TEXTS[name][0][0].sliding
    layers = (n // 2, n - n // 2)
    assert any(sliding[: layers[0]]) and any(sliding[layers[0] :])
    for where, cut in ((device.split(",")[0], ()), (two_stages(device), layers)):
        with drive.open_model(native, path, where, layers=cut) as model, open_engine(model, kv_type="f16") as engine:
            sequence = engine.sequence()
            tokens = decoded(sequence, LONG, n=4).tokens
            found.append((tokens, sequence.dump()[HEADER:]))
    assert found[0] == found[1]


def test_blocks_of_a_dflash_drafter_behind_images_change_no_token(native, tmp_path, device):
    target, drafter = tiny_dflash.files(tmp_path, tiny_dflash.GEMMA4["dense"])
    with drive.open_model(native, target, device, drafter=drafter) as opened:
        with open_engine(opened, blocks=1) as engine, engine.sequence() as sequence:
            plain = decoded(sequence, LONG).tokens
            sequence.reset()
            assert decoded(sequence, LONG, gamma=5, source=Source.DFLASH).tokens[:N] == plain[:N]


def test_sampled_tokens_are_the_same_in_every_mode(model):
    with open_engine(model, n_draft=4) as engine, engine.sequence() as sequence:
        found = []
        for gamma in (0, 1, 4):
            sequence.reset()
            sequence.set_sampling(Sampling(temperature=1.0, top_k=40, seed=5))
            found.append(decoded(sequence, LONG, gamma=gamma).tokens[:N])
        assert found[0] == found[1] == found[2]


def test_text_ahead_of_an_image_has_the_state_that_it_has_without_it(model):
    """Rows of text see none of an image behind them, and K and V of their cells are the same bits."""
    text = words(64, 1)
    with open_engine(model) as engine, engine.sequence() as sequence:
        sequence.engine.prefill([Mixed([text, words(9, 2)]).prompt(sequence, 0, 64)])
        alone = sequence.dump()
        sequence.reset()
        sequence.engine.prefill([Mixed([text, rows(5, 5, 3), words(9, 2)]).prompt(sequence, 0, 64)])
        assert sequence.dump() == alone


def test_a_row_sees_the_image_s_last_row_and_no_row_of_the_next_image(model):
    """Images that stand side by side are two: the first one's cells do not depend on the second one's rows."""
    first, behind = rows(6, 8, 2), words(20, 3)
    with open_engine(model, n_checkpoints=1) as engine, engine.sequence() as sequence:
        found = []
        for second in (rows(4, 4, 5), rows(4, 4, 6)):
            sequence.reset()
            prompt = Mixed([words(16, 1), first, second, behind])
            sequence.engine.prefill([prompt.prompt(sequence, 0, 64)])  # The first one ends there.
            cut = sequence.dump()
            sequence.reset()
            prompt.read(sequence)
            found.append((cut, sequence.logits(0)))
        assert found[0][0] == found[1][0] and np.abs(found[0][1] - found[1][1]).max() > 1e-3
        last = first.copy()
        last[-1, -1] += 0.5
        sequence.reset()
        sequence.engine.prefill([Mixed([words(16, 1), last, behind]).prompt(sequence, 0, 64)])
        changed = np.frombuffer(sequence.dump(), np.uint8) != np.frombuffer(found[0][0], np.uint8)
        # Cells of rows ahead of the last one change too: from the second layer on they are made of what they saw.
        assert changed.mean() > 0.3
