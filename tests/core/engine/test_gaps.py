"""Prompts from which text was left out: against transformers (tests/goldens/keep-*.npz), and the same tokens and bits
however such a prompt is cut, drafted behind, kept and resumed, and whatever is read beside it."""

from __future__ import annotations

from dataclasses import replace

import drive
import make_goldens
import make_keep_goldens
import numpy as np
import pytest
import tiny
import tiny_dflash
import tiny_gemma4
import tiny_vision
from checkout import GOLDENS

from luce.errors import ArgumentError
from luce.native import ImageSpan, Prompt, Source
from luce.native.structs import Sampling

N = 32
BOUND = 1e-3  # As test_goldens.py has it for a CPU, of logits with std 2 to 3.5.
TOKENS = np.random.default_rng(3).integers(0, 250, 281).tolist()
GAPS = ((0, 9), (1, 3), (64, 500), (100, 1), (280, 7))


def item(sequence, tokens, gaps, begin=0, end=None):
    """Returns tokens begin .. end - 1 of a prompt as an item of a prefill."""
    end = len(tokens) if end is None else end
    here = tuple((at - begin, n) for at, n in gaps if begin <= at < end)
    return Prompt(sequence, tokens[begin:end], end == len(tokens), (), here)


def read(sequence, tokens=TOKENS, gaps=GAPS, cuts=()):
    """Reads what the sequence lacks of a prompt. Returns the choice behind it."""
    ends = [end for end in (*cuts, len(tokens)) if end > sequence.info.n_past]
    for end in ends:
        (choice,) = sequence.engine.prefill([item(sequence, tokens, gaps, sequence.info.n_past, end)])
    return choice


def decoded(sequence, n=N, gamma=0, cuts=(), **options):
    return drive.go_on(sequence, drive.Decoded([read(sequence, cuts=cuts)]), n, gamma, **options)


@pytest.fixture(scope="module")
def model(native, device, tmp_path_factory):
    config, seed = make_goldens.CASES["base"]
    config = replace(config, n_nextn=1)
    path = tiny.write(tmp_path_factory.mktemp("gaps") / "f32.gguf", config, tiny.layout(config, seed))
    with drive.open_model(native, path, device, head=True) as opened:
        yield opened


@pytest.mark.parametrize("case", make_keep_goldens.CASES)
def test_logits_and_tokens_are_those_of_transformers(native, tmp_path, device, case):
    config, seed = make_goldens.CASES[case]
    path = tiny.write(tmp_path / "f32.gguf", config, tiny.layout(config, seed))
    golden = dict(np.load(GOLDENS / f"keep-{case}.npz"))
    tokens, gaps = golden["prompt"].tolist(), [tuple(map(int, gap)) for gap in golden["gaps"]]
    opened, bound = drive.open_model(native, path, device), BOUND if device.startswith("cpu") else drive.CUDA_BOUND
    with opened as model, drive.open_engine(model, gaps=1) as engine, engine.sequence() as s:
        for at, logits in zip(golden["at"].tolist(), golden["logits"], strict=True):
            s.reset()
            engine.prefill([item(s, tokens, gaps, 0, at + 1)._replace(last=True)])
            assert np.abs(s.logits(0) - logits).max() < bound, at
        if not device.startswith("cpu"):  # Its rounding may choose another token.
            return
        s.reset()
        out = drive.Decoded([read(s, tokens, gaps)])
        assert drive.go_on(s, out, len(golden["greedy"])).tokens == golden["greedy"].tolist()


def test_a_gap_is_felt(model, device):
    """Without it the same tokens have other logits; one ahead of all tokens moves them alike, so that little
    changes."""
    with drive.open_engine(model, gaps=1) as engine, engine.sequence() as sequence:
        logits, bound = [], 0.02 if device.startswith("cpu") else drive.CUDA_BOUND
        for gaps in ((), ((0, 5000),), ((64, 500),), ((64, 501),), ((65, 500),)):
            sequence.reset()
            read(sequence, gaps=gaps)
            logits.append(sequence.logits(0))
        assert np.abs(logits[0] - logits[1]).max() < bound
        for i, each in enumerate(logits[1:], 1):
            assert all(np.abs(each - other).max() > 1e-4 for other in logits[2:] if other is not each), i


def test_an_engine_for_gaps_reads_whole_prompts_as_others_do(model):
    states = []
    for gaps in (0, 1):
        with drive.open_engine(model, gaps=gaps, n_draft=4) as engine, engine.sequence() as sequence:
            found = drive.decode(sequence, TOKENS, N, gamma=3).tokens
            states.append((found, sequence.dump()))
    assert states[0] == states[1]


@pytest.mark.parametrize("gamma", [1, 3, 8, (0, 0, 3), (8, 0), (1, 4, 0, 0, 0)])
def test_drafts_behind_gaps_change_no_token_and_leave_the_same_state(model, gamma):
    with drive.open_engine(model, gaps=1, n_draft=8) as engine, engine.sequence() as sequence:
        found = decoded(sequence, 40, gamma=gamma).tokens
        mixed = sequence.dump()
        sequence.reset()
        assert decoded(sequence, len(found)).tokens == found
        assert sequence.dump() == mixed


def test_a_head_sees_positions_behind_gaps(model):
    """Its KV of the prompt is rotated to them: another gap leaves another state of the head's layer."""
    with drive.open_engine(model, gaps=1, n_draft=2) as engine, engine.sequence() as sequence:
        drafts = []
        for gaps in (GAPS, ((64, 500),), ()):
            sequence.reset()
            anchor = read(sequence, gaps=gaps)
            drive.draft(sequence, anchor, 2)
            drafts.append(sequence.dump())
        assert len(set(drafts)) == 3


@pytest.mark.parametrize("case", ["plain", "causal-windows"])
def test_blocks_behind_gaps_change_no_token(native, tmp_path, device, case):
    target, drafter = tiny_dflash.files(tmp_path, tiny_dflash.CASES[case])
    with (
        drive.open_model(native, target, device, drafter=drafter) as model,
        drive.open_engine(model, gaps=1, blocks=1) as engine,
        engine.sequence() as sequence,
    ):
        n = engine.drafters[0].n_draft
        found = decoded(sequence, gamma=n, source=Source.DFLASH).tokens[:N]
        sequence.reset()
        assert decoded(sequence).tokens[:N] == found


def test_cuts_change_no_bit(model):
    with drive.open_engine(model, gaps=1) as engine, engine.sequence() as sequence:
        n_cut = engine.info.n_cut
        assert n_cut == (64 if model.info.device.startswith("cpu") else 128)
        read(sequence)
        whole = sequence.dump()
        for cuts in ((n_cut,), (2 * n_cut,), tuple(range(n_cut, len(TOKENS), n_cut))):
            sequence.reset()
            read(sequence, cuts=cuts)
            assert sequence.dump() == whole


def test_neighbours_change_no_bit(model):
    with drive.open_engine(model, gaps=1, n_sequences=3) as engine:
        sequences, prompts = [engine.sequence() for _ in range(3)], ((TOKENS[:70], ()), (TOKENS, GAPS), (TOKENS, ()))
        alone = []
        for sequence, (tokens, gaps) in zip(sequences, prompts, strict=True):
            read(sequence, tokens, gaps)
            alone.append(sequence.dump())
            sequence.reset()
        engine.prefill([item(s, *prompt) for s, prompt in zip(sequences, prompts, strict=True)])
        assert [sequence.dump() for sequence in sequences] == alone


def test_sampled_tokens_are_the_same_in_every_mode(model):
    with drive.open_engine(model, gaps=1, n_draft=4) as engine, engine.sequence() as sequence:
        found = []
        for gamma in (0, 1, 4):
            sequence.reset()
            sequence.set_sampling(Sampling(temperature=1.0, top_k=40, seed=5))
            found.append(decoded(sequence, gamma=gamma).tokens[:N])
        assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("n_cuts", [1, 2])
def test_a_resumed_prompt_has_the_bits_of_a_cold_one(model, n_cuts):
    with drive.open_engine(model, gaps=1, n_checkpoints=2, n_draft=4) as engine, engine.sequence() as sequence:
        n_past = n_cuts * engine.info.n_cut
        cold = decoded(sequence, gamma=3).tokens
        state = sequence.dump()
        sequence.reset()
        engine.prefill([item(sequence, TOKENS, GAPS, 0, n_past)])
        with sequence.checkpoint() as kept, engine.load_checkpoint(kept.save()) as loaded:
            for checkpoint in (kept, loaded):
                sequence.reset()
                sequence.resume(checkpoint)
                assert decoded(sequence, gamma=3).tokens == cold
                assert sequence.dump() == state


def test_checkpoints_with_gaps_are_of_engines_for_gaps(model):
    with (
        drive.open_engine(model, gaps=1, n_checkpoints=1) as engine,
        drive.open_engine(model, n_checkpoints=1) as other,
        engine.sequence() as sequence,
    ):
        engine.prefill([item(sequence, TOKENS, GAPS, 0, 256)])
        with sequence.checkpoint() as kept, pytest.raises(ArgumentError, match="256 tokens take 769 positions"):
            other.load_checkpoint(kept.save())


def test_sliding_layers_read_what_is_there(native, tmp_path):
    """A window counts the tokens that are there. Cuts change nothing behind gaps of a model that has such."""
    config, seed = tiny_gemma4.CASES["dense"]
    path = tiny_gemma4.write(tmp_path / "gemma.gguf", config, tiny_gemma4.layout(config, seed))
    with drive.open_model(native, path) as model, drive.open_engine(model, gaps=1) as engine, engine.sequence() as s:
        read(s)
        whole, logits = s.dump(), s.logits(0)
        s.reset()
        read(s, cuts=(64, 192))
        assert s.dump() == whole
        s.reset()
        read(s, gaps=())
        assert np.abs(s.logits(0) - logits).max() > 1e-3


@pytest.mark.parametrize(
    ("gaps", "said"),
    [
        (((5, 0),), "gap 0 leaves 0 positions out ahead of token 5"),
        (((5, 1), (5, 1)), "gap 1 leaves 1 positions out ahead of token 5"),
        (((9, 1), (5, 1)), "gap 1 leaves 1 positions out ahead of token 5"),
        (((20, 1),), "ahead of one of 20 tokens"),
        (((5, 1 << 30),), "1073741824 positions at most"),
        (((5, 2**32 - 1), (6, 2**32 - 1)), "1073741824 positions at most"),
    ],
)
def test_gaps_that_are_none_are_refused(model, gaps, said):
    with drive.open_engine(model, gaps=1) as engine, engine.sequence() as sequence:
        with pytest.raises(ArgumentError, match=said):
            engine.prefill([Prompt(sequence, TOKENS[:20], True, (), gaps)])
        assert sequence.info.n_past == 0


def test_an_engine_without_gaps_refuses_them(model):
    with drive.open_engine(model) as engine, engine.sequence() as sequence:
        with pytest.raises(ArgumentError, match="opened without gaps"):
            read(sequence)


def test_gaps_and_images_come_in_items_of_their_own(native, tmp_path):
    """Text with gaps may stand ahead of an image and behind it: positions go on from there."""
    path = tiny_vision.write_text(tmp_path / "model.gguf")
    rows = np.random.default_rng(2).uniform(-1, 1, (6, tiny_vision.TEXT.n_embd)).astype(np.float32)
    names = [-10 - i for i in range(6)]
    with drive.open_model(native, path) as model, drive.open_engine(model, gaps=1) as engine, engine.sequence() as s:
        image = (ImageSpan(rows, 0, 0, 2, 3),)
        with pytest.raises(ArgumentError, match="items of their own"):
            engine.prefill([Prompt(s, [*names, 5], False, image, ((6, 3),))])
        logits = []
        for before, behind in (((), ()), (((20, 7),), ()), ((), ((3, 9),))):
            s.reset()
            engine.prefill([Prompt(s, TOKENS[:64], False, (), before)])
            engine.prefill([Prompt(s, names, False, image)])
            engine.prefill([Prompt(s, TOKENS[64:90], True, (), behind)])
            logits.append(s.logits(0))
        assert all(np.abs(a - b).max() > 1e-4 for a, b in ((logits[0], logits[1]), (logits[0], logits[2])))
