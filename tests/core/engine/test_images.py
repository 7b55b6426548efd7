"""Rows of images in prompts: against transformers (tests/goldens/vision-text.npz), and the same tokens and bits however
a prompt is cut, drafted behind, kept and resumed. Where rows come from does not matter here: most are random."""

from __future__ import annotations

import drive
import numpy as np
import op_run
import pytest
import tiny
import tiny_dflash
import tiny_vision
from checkout import GOLDENS
from hf_checkpoint import tensors_of
from image_prompts import Mixed, decoded, of_golden, open_engine
from op_run import Fault
from saved_bytes import HEADER, lag
from tiny_vision import IMAGE_PAD, TEXT, TINY

from luce.errors import ArgumentError, DeviceError, InternalError, UnsupportedError
from luce.images.pixels import Processor
from luce.native import File, ImageSpan, Prompt, Source, Tower
from luce.native.structs import Sampling

pytest.importorskip("PIL.Image")
PROCESSOR = Processor()
N = 32


@pytest.fixture(scope="module")
def model(native, tmp_path_factory, device):
    path = tiny_vision.write_text(tmp_path_factory.mktemp("images") / "model.gguf")
    with drive.open_model(native, path, device, head=True) as opened:
        yield opened


@pytest.fixture(scope="module")
def tower(native, tmp_path_factory, device):
    weights = tiny_vision.layout(TINY, tiny_vision.weights(TINY, 5))
    path = tiny_vision.write(tmp_path_factory.mktemp("tower") / "mmproj.gguf", TINY, weights)
    with File(path, native) as file, Tower(file, device) as opened:
        yield opened


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDENS / "vision-text.npz") as held:
        return dict(held)


@pytest.fixture(scope="module")
def asked(golden, tower):
    """The golden's prompt, with rows of luce's own tower."""
    return of_golden(golden["prompt"].tolist(), IMAGE_PAD, tower, PROCESSOR)


def words(n, seed):
    return np.random.default_rng(seed).integers(0, 250, n).tolist()


def rows(height, width, seed):
    return np.random.default_rng(seed).uniform(-1, 1, (height, width, TEXT.n_embd)).astype(np.float32)


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
            assert decoded(sequence, asked).tokens == wanted
            sequence.reset()
        asked.read(sequence)
        logits = [sequence.logits(0), *drive.chain_logits(sequence, wanted[:-1], 1)]
        bound = 0 if device == "cpu" else 2 * drive.CUDA_BOUND
        assert all(row[token] >= row.max() - bound for row, token in zip(logits, wanted, strict=True))


def test_logits_of_each_text_row_are_those_of_transformers(model, golden, asked, device):
    """Of the prompt cut behind each row of text: so positions ahead of, between and behind images are compared. K of a
    NextN head tells those of images' rows (test_image_drafters.py)."""
    with open_engine(model) as engine, engine.sequence() as sequence:
        for at, logits in zip(golden["at"].tolist(), golden["logits"], strict=True):
            sequence.reset()
            sequence.engine.prefill([asked.prompt(sequence, 0, at + 1)._replace(last=True)])
            bound = 2e-4 if device == "cpu" else drive.CUDA_BOUND
            assert np.abs(sequence.logits(0) - logits).max() < bound, at
            assert (golden["positions"][:, at] - at).tolist() == [lag(sequence.dump())] * 3


@pytest.mark.references
def test_the_golden_is_what_transformers_computes(golden):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import make_vision_goldens

    made = make_vision_goldens.text()
    assert made.keys() == golden.keys()
    assert all(np.allclose(made[key], value, atol=1e-4) for key, value in golden.items())


@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_drafts_behind_images_change_no_token(model, asked, greedy, gamma):
    with open_engine(model, n_draft=8) as engine, engine.sequence() as sequence:
        assert decoded(sequence, asked, gamma=gamma).tokens[:N] == greedy


def test_cuts_within_images_change_no_bit(model):
    with open_engine(model) as engine, engine.sequence() as sequence:
        cut = engine.info.n_cut
        assert cut == (64 if model.info.device == "cpu" else 128)
        LONG.read(sequence)
        whole = sequence.dump()
        for cuts in ((cut,), (2 * cut,), range(cut, len(LONG.tokens), cut)):
            sequence.reset()
            LONG.read(sequence, cuts)
            assert sequence.dump() == whole


def test_text_has_the_same_bits_in_a_step_with_images(model):
    """The first chunk has no image when it is cut ahead of one."""
    with open_engine(model) as engine, engine.sequence() as sequence:
        cut = engine.info.n_cut
        mixed = Mixed([words(cut, 8), rows(4, 4, 9), words(5, 10)])
        mixed.read(sequence)
        together = sequence.dump()
        sequence.reset()
        mixed.read(sequence, (cut,))
        assert sequence.dump() == together


def test_neighbours_with_and_without_images_change_no_bit(model):
    text = Mixed([words(70, 6)])
    with open_engine(model, n_sequences=3) as engine:
        sequences = [engine.sequence() for _ in range(3)]
        alone = []
        for sequence, mixed in zip(sequences, (text, LONG, text), strict=True):
            mixed.read(sequence)
            alone.append(sequence.dump())
            sequence.reset()
        prompts = (text, LONG, text)
        engine.prefill([m.prompt(s, 0, len(m.tokens)) for s, m in zip(sequences, prompts, strict=True)])
        assert [sequence.dump() for sequence in sequences] == alone


@pytest.mark.parametrize(
    ("kind", "error"), [(Fault.GRAPH, DeviceError), (Fault.SIZE, InternalError), (Fault.OP, DeviceError)]
)
def test_a_step_with_images_that_fails_fails_alone(native, model, kind, error):
    """A neighbour behind images has what it had, and the prompt is read anew with the bits that it has elsewhere."""
    with open_engine(model, n_sequences=2, n_draft=4) as engine:
        one, other = engine.sequence(), engine.sequence()
        cold = decoded(one, LONG, gamma=3).tokens
        LONG.read(other)
        first = drive.verify(other, [5, 6])
        for n in range(1, 9):  # A GPU's engine keeps the graphs of these instead.
            one.reset()
            drive.prefill(one, [5] * n)
        for after in {Fault.OP: (0, 1, 7, 20)}.get(kind, (0,)):
            one.reset()
            with op_run.fault(native, kind, after), pytest.raises(error):
                LONG.read(one)
            assert one.info.failed and not other.info.failed
            assert drive.verify(other, [5, 6]) == first
        one.reset()
        assert decoded(one, LONG, gamma=3).tokens == cold


def test_a_round_behind_images_that_fails_fails_its_sequences_alone(native, model):
    with open_engine(model, n_checkpoints=1, n_draft=4) as engine, engine.sequence() as sequence:
        cold = decoded(sequence, LONG, gamma=3).tokens
        sequence.reset()
        sequence.engine.prefill([LONG.prompt(sequence, 0, 2 * engine.info.n_cut)])
        with sequence.checkpoint() as kept:
            LONG.read(sequence)
            with op_run.fault(native, Fault.WAIT, 0), pytest.raises(DeviceError):
                drive.verify(sequence, [5, 6])
            assert sequence.info.failed
            sequence.resume(kept)  # It heals the sequence.
            assert decoded(sequence, LONG, gamma=3).tokens == cold


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


def test_a_checkpoint_behind_images_keeps_positions(model):
    """Behind the second image positions lag: text that is read on from there has the bits of a cold prompt."""
    with open_engine(model, n_checkpoints=1) as engine, engine.sequence() as sequence:
        LONG.read(sequence)
        cold = sequence.dump()
        sequence.reset()
        sequence.engine.prefill([LONG.prompt(sequence, 0, 256)])
        with sequence.checkpoint() as kept:
            sequence.reset()
            sequence.resume(kept)
            LONG.read(sequence)
            assert sequence.dump() == cold


def test_sampled_tokens_are_the_same_in_every_mode(model):
    sampling = Sampling(temperature=1.0, top_k=40, seed=5)
    with open_engine(model, n_draft=4) as engine, engine.sequence() as sequence:
        found = []
        for gamma in (0, 1, 4):
            sequence.reset()
            sequence.set_sampling(sampling)
            found.append(decoded(sequence, LONG, gamma=gamma).tokens[:N])
        assert found[0] == found[1] == found[2]


def test_other_rows_and_places_give_other_logits(model):
    with open_engine(model) as engine, engine.sequence() as sequence:
        seen = []
        for parts in (
            [words(9, 1), rows(3, 4, 2), words(9, 3)],
            [words(9, 1), rows(3, 4, 3), words(9, 3)],
            [words(9, 1), rows(3, 4, 2).reshape(4, 3, -1), words(9, 3)],
            [words(9, 1), rows(3, 4, 2).reshape(12, 1, -1), words(9, 3)],
        ):
            sequence.reset()
            Mixed(parts).read(sequence)
            seen.append(sequence.logits(0))
        for i, each in enumerate(seen):
            assert all(np.abs(each - other).max() > 1e-3 for other in seen[:i])


@pytest.mark.parametrize("gamma", [(0, 0, 3), (8, 0), (1, 4, 0, 0, 0)])
def test_rounds_of_all_kinds_behind_images_leave_the_same_state(model, gamma):
    """So plain rounds, whose rows the NextN head sees later, are rotated as those are that it sees at once."""
    with open_engine(model, n_draft=8) as engine, engine.sequence() as sequence:
        found = decoded(sequence, LONG, 40, gamma=gamma).tokens
        mixed = sequence.dump()
        sequence.reset()
        assert decoded(sequence, LONG, len(found)).tokens == found
        assert sequence.dump() == mixed


def test_rows_of_trees_behind_images_are_those_of_their_paths(model):
    """A row of a tree stands as deep behind the images as its path is long, and what is accepted leaves what plain
    rounds leave."""
    rng = np.random.default_rng(6)
    with open_engine(model, n_sequences=2) as engine:
        tree, plain = engine.sequence(), engine.sequence()
        LONG.read(tree)
        LONG.read(plain)
        for _ in range(6):
            n = int(rng.integers(2, 25))
            tokens, parents = rng.integers(0, 250, n).tolist(), drive.random_tree(rng, n)
            drive.verify(tree, tokens, parents)
            path = drive.root_path(parents, int(rng.integers(n)))
            found = [tree.logits(row).tobytes() for row in path]
            tree.commit(path)
            assert found == [drive.step(plain, tokens[row]).tobytes() for row in path]
        assert tree.dump() == plain.dump()


def state_of(sequence):
    """Returns all that was committed but the tokens' names: KV of all layers and drafters, recurrent state."""
    return sequence.dump()[HEADER + 4 * sequence.info.n_past :]


def as_images(tokens, table, begin, end):
    """Returns a prompt in which the embeddings of some tokens are images of one row each: such a row stands where text
    would."""
    images = [table[token].reshape(1, 1, -1) for token in tokens[begin:end]]
    return Mixed([tokens[:begin], *images, tokens[end:]])


@pytest.mark.parametrize("drafts", ["nextn", "dflash"])
def test_embeddings_as_images_leave_the_state_of_text(native, tmp_path, device, drafts):
    """What drafters keep of rows of images is what they keep of the same rows as text, bit for bit."""
    if drafts == "dflash":
        target, drafter = tiny_dflash.files(tmp_path, tiny_dflash.CASES["causal-windows"])
        opened, params = drive.open_model(native, target, device, drafter=drafter), {"blocks": 1}
    else:
        target = tiny_vision.write_text(tmp_path / "m.gguf")
        opened, params = drive.open_model(native, target, device, head=True), {"n_draft": 4}
    table, tokens = tensors_of(target)["token_embd.weight"], words(150, 3)
    with opened, open_engine(opened, **params) as engine, engine.sequence() as sequence:
        Mixed([tokens]).read(sequence)
        text = state_of(sequence)
        for cuts in ((), (engine.info.n_cut,)):
            sequence.reset()
            as_images(tokens, table, 40, 90).read(sequence, cuts)
            assert state_of(sequence) == text


def test_blocks_behind_images_change_no_token(native, tmp_path, device):
    target, drafter = tiny_dflash.files(tmp_path, tiny_dflash.CASES["causal-windows"])
    with drive.open_model(native, target, device, drafter=drafter) as opened:
        width = opened.info.n_embd
        image = np.random.default_rng(2).uniform(-1, 1, (5, 7, width)).astype(np.float32)
        mixed = Mixed([words(30, 1), image, words(60, 2)])
        with open_engine(opened, blocks=1) as engine, engine.sequence() as sequence:
            plain = decoded(sequence, mixed).tokens
            sequence.reset()
            found = decoded(sequence, mixed, gamma=5, source=Source.DFLASH).tokens
            assert found[:N] == plain[:N]


def test_lookup_finds_text_and_no_rows_of_images(model):
    image, said = rows(2, 3, 4), words(6, 1)
    with open_engine(model) as engine, engine.sequence() as sequence:
        Mixed([said, [7, 8, 9], image, said[:-1]]).read(sequence)
        assert sequence.lookup(said[-1], 2)[0] == [7, 8]
        assert sequence.lookup(said[-1], 4) == ([], 0), "the fourth draft would be a row of an image"
        sequence.reset()
        Mixed([[1], image, [5], image], [-50, -50]).read(sequence)  # The same image twice.
        assert sequence.lookup(5, 3) == ([], 0)


def test_penalties_skip_rows_of_images(model):
    from luce.native.structs import Penalties

    with open_engine(model) as engine, engine.sequence() as sequence:
        sequence.set_penalties(Penalties(repetition=1.3, presence=0.5), 0)
        Mixed([words(5, 1), rows(2, 2, 2), words(3, 3)]).read(sequence)
        logits, seen = sequence.logits(0).copy(), set(words(5, 1) + words(3, 3))
        for token in seen:
            logits[token] = logits[token] * 1.3 if logits[token] < 0 else logits[token] / 1.3
            logits[token] -= 0.5
        assert sequence.choose(0) == logits.argmax()


def span(n=4, at=0, first=0, height=2, width=2, n_embd=TEXT.n_embd):
    return ImageSpan(np.zeros((n, n_embd), np.float32), at, first, height, width)


@pytest.mark.parametrize(
    ("tokens", "images", "said"),
    [
        ([-2, -3, -4, -5], (), "token 0 is -2, expected 0 to 399"),
        ([-2, -3, -4, -5, -6], (span(),), "token 4 is -6, and is of no image"),
        ([-2, 2, -4, -5], (span(),), "image span 0: its rows want names below -1"),
        ([-2, -1, -4, -5], (span(),), "image span 0: its rows want names below -1"),
        ([-2, -3, -4], (span(),), "image span 0 has rows 0 and 4 more"),
        ([-2, -3, -4, -5], (span(n_embd=8),), "of width 8, expected .* of width 64"),
        ([-2, -3, -4, -5], (span(height=1),), "rows 0 to 4 of an image of 1 x 2"),
        ([-2, -3, -4, -5], (span(first=2, height=4),), "rows 2 to 6 of an image of 4 x 2, at position 0"),
        ([-2] * 8, (span(), span(at=2)), "image span 1 has rows 2 and 4 more"),
    ],
)
def test_wrong_spans_are_refused(model, tokens, images, said):
    with open_engine(model) as engine, engine.sequence() as sequence:
        with pytest.raises(ArgumentError, match=said):
            engine.prefill([Prompt(sequence, tokens, True, images)])
        assert sequence.info.n_past == 0


def test_a_model_without_axes_takes_no_images(native, tmp_path, device):
    c = tiny.Config(rope_sections=(1, 1, 1, 0))
    with drive.open_model(native, tiny.write(tmp_path / "m.gguf", c, tiny.layout(c, 1)), device) as opened:
        with open_engine(opened) as engine, engine.sequence() as sequence:
            with pytest.raises(UnsupportedError, match="its rows have no three axes"):
                engine.prefill([Prompt(sequence, [-2] * 4, True, (span(),))])
