"""Reads prompts of several sequences in one call, which has the bits of as many calls: logits, choices and all that the
caches hold, whatever lies side by side. What fails of one is that one's alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import drive
import nan_model
import numpy as np
import pytest
import tiny
import tiny_dflash
import tiny_gemma4
from depth import deeper_but
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nan_model import BAD
from op_run import Fault, counts, fault, poison
from tiny_gemma4 import Config as Gemma4

from luce.errors import ArgumentError, Cancelled, ContextFull, DeviceError, Error, NumericError, OutOfMemory, StateError
from luce.native import Engine, Library, Model, Prompt, Rows, Source
from luce.native import Sequence as Timeline
from luce.native.structs import PAGE, Penalties, Sampling

DENSE = tiny.Config(n_layer=3, interval=2, n_embd=256, n_ff=256, n_head=4, n_head_kv=2, n_v_head=4, state_size=64,
                    n_nextn=1)  # fmt: skip
# The weights, their KV, and whether a DFlash drafter is loaded beside the NextN head.
KINDS = {"F32": ("f32", True), "Q4_K": ("q8_0", False), "Q8_0 experts": ("f16", True), "F32 experts": ("f32", False)}
N_SEQUENCES, N_CTX, N_CHUNK, TAIL = 6, 1024, 1024, 128
SAMPLED = Sampling(temperature=0.9, top_k=30, seed=11)


@pytest.fixture(scope="module", params=deeper_but(KINDS, "Q4_K"))
def engine(
    request: pytest.FixtureRequest, native: Library, device: str, tmp_path_factory: pytest.TempPathFactory
) -> Engine:
    folder, (kv_type, has_blocks) = tmp_path_factory.mktemp("prompts"), KINDS[request.param]
    config = tiny.with_experts(DENSE) if "experts" in request.param else DENSE
    path = tiny.write(
        folder / "model.gguf", config, tiny.layout(config, 7), request.param.split()[0], quantize=native.quantize
    )
    drafter = None
    if has_blocks:
        blocks = tiny_dflash.drafter(config, n_layer=1, block_size=5, target_layer_ids=(0, config.n_layer - 1))
        case = tiny_dflash.Case(config, blocks, 7)
        drafter = tiny_dflash.write(folder / "dflash.gguf", case, tiny_dflash.weights(case))
    model = drive.open_model(native, path, device, head=True, drafter=drafter)
    made = drive.open_engine(
        model, n_ctx=N_CTX, n_sequences=N_SEQUENCES, n_checkpoints=1, n_rows=6, n_draft=3, n_chunk=N_CHUNK,
        kv_type=kv_type, blocks=int(has_blocks),
    )  # fmt: skip
    if made.info.n_cut >= PAGE:
        pytest.skip("ggml computes F32 cells on a GPU, so no steps are shared")
    return made


def tokens_of(n: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, DENSE.n_vocab, n)]


class Part:
    """What is read of one sequence: n tokens after `past` ones of its prompt, of which some may have been decoded."""

    def __init__(self, engine: Engine, seed: int, past: int, decoded: str, n: int, last: bool):
        self.sequence, self.tokens, self.last = engine.sequence(), tokens_of(past + n, seed)[past:], last
        if seed % 2:
            self.sequence.set_sampling(SAMPLED)
        if past:
            drive.prefill(self.sequence, tokens_of(past + n, seed)[:past])
        if past and decoded == "chain":  # Its rows are replayed, and shown to the head.
            for token in (1, 2):
                drive.verify(self.sequence, [token])
                self.sequence.commit([0])
        elif past and decoded == "tree":  # Its rows are moved too.
            drive.verify(self.sequence, [3, 4, 5, 6], [-1, 0, 0, 2])
            self.sequence.commit([0, 2, 3])

    @property
    def prompt(self) -> Prompt:
        return Prompt(self.sequence, self.tokens, self.last)

    def found(self, choice: int | None | Exception, source: Source | None) -> tuple[object, ...]:
        """Returns what has come of it: the choice and its logits, the state, and what is decoded then."""
        assert choice is None or isinstance(choice, int)
        logits = b"" if choice is None else self.sequence.logits(0).tobytes()
        state = self.sequence.dump()
        if choice is None:
            return choice, logits, state
        out = drive.go_on(self.sequence, drive.Decoded([choice]), 6, (3, 0), source=source or Source.NEXTN)
        return choice, logits, state, out.tokens, self.sequence.dump()


lengths = st.one_of(st.integers(1, 70), st.sampled_from([63, 64, 65, 127, 128, 129, 192, 256]), st.integers(1, 400))
pasts, ways = st.sampled_from([0, 0, 1, 64, 100, 128, 300]), st.sampled_from(["", "chain", "tree"])
parts_of = st.tuples(lengths, pasts, ways, st.booleans())
sources = st.sampled_from([Source.NEXTN, Source.DFLASH])
MIXED = [(1, 1, "chain", True), (200, 0, "", True), (256, 128, "tree", False), (5, 64, "", True)]
LATER = [(400, 300, "", True), (1, 300, "tree", True), (64, 0, "", False), (192, 64, "", True)]


@pytest.mark.long
@settings(max_examples=8, deadline=None)
@given(parts=st.lists(parts_of, min_size=1, max_size=N_SEQUENCES), source=sources)
@example(parts=[(128, 0, "", True)] * 6, source=Source.NEXTN)
@example(parts=[(1, 0, "", True)] * 6, source=Source.DFLASH)
@example(parts=MIXED, source=Source.NEXTN)
@example(parts=LATER, source=Source.DFLASH)
def test_prompts_have_in_company_the_bits_that_they_have_alone(
    engine: Engine, parts: list[tuple[int, int, str, bool]], source: Source
) -> None:
    """Dumps compare the caches of the model and of its drafters, and drafts go on from these."""
    by = source if any(each.n_block for each in engine.drafters) else Source.NEXTN
    expected = []
    for seed, (n, past, decoded, last) in enumerate(parts):
        alone = Part(engine, seed, past, decoded, n, last)
        choice = alone.sequence.prefill(alone.tokens, alone.last)
        expected.append(alone.found(choice, by))
        alone.sequence.close()
    together = [Part(engine, seed, past, decoded, n, last) for seed, (n, past, decoded, last) in enumerate(parts)]
    poison(engine)
    choices = engine.prefill([each.prompt for each in together])
    for each, choice, found in zip(together, choices, expected, strict=True):  # All can be read.
        assert choice is None or each.sequence.logits(0).tobytes() == found[1]
    states = [each.sequence.dump() for each in together]
    assert states == [found[2] for found in expected]
    for each, choice, found in zip(together, choices, expected, strict=True):
        assert choice == found[0]
        if choice is not None:
            out = drive.go_on(each.sequence, drive.Decoded([int(str(choice))]), 6, (3, 0), source=by)
            assert (out.tokens, each.sequence.dump()) == found[3:]
        each.sequence.close()


def read_alone(engine: Engine, prompts: list[list[int]]) -> list[tuple[int, bytes]]:
    """Returns the choice and the state after each prompt."""
    found = []
    for prompt in prompts:
        with engine.sequence() as sequence:
            found.append((drive.start(sequence, prompt), sequence.dump()))
    return found


def test_prompts_share_steps(engine: Engine, device: str) -> None:
    """Those of up to n_chunk rows in all, and tails of up to 127, are one step. On a CPU none is a tail of more than 64
    rows."""
    sequences = [engine.sequence() for _ in range(N_SEQUENCES)]

    def steps(n: int) -> int:
        before = counts(engine)[0]
        engine.prefill([Prompt(each, tokens_of(n, seed)) for seed, each in enumerate(sequences)])
        for each in sequences:
            each.reset()
        return counts(engine)[0] - before

    assert steps(TAIL) == 1
    assert steps(20) == 1
    assert steps(64) == 6  # Each is a tail, of which no two fit.
    assert steps(TAIL + 20) == 2
    assert steps(2 * TAIL) == 2  # They have more rows than a chunk.
    if device == "cpu":
        assert steps(65) == 1
        assert steps(TAIL + 100) == 2
    for each in sequences:
        each.close()


def test_the_cells_of_a_step_are_bounded(engine: Engine) -> None:
    """Prompts that go on from far on share no step where their cells would not fit, and have the same bits."""
    past = N_CTX - TAIL  # Elsewhere than at such a multiple a GPU's rows have other bits.
    prompts = [tokens_of(past + 30, seed) for seed in range(3)]
    expected = read_alone(engine, prompts)
    sequences = [engine.sequence() for _ in prompts]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        drive.prefill(sequence, prompt[:past], last=False)
    choices = engine.prefill([Prompt(each, prompt[past:]) for each, prompt in zip(sequences, prompts, strict=True)])
    assert [(choice, each.dump()) for choice, each in zip(choices, sequences, strict=True)] == expected
    for each in sequences:
        each.close()


def test_logits_of_all_may_be_read_after_the_call(engine: Engine) -> None:
    """Prompts that end at a multiple of 128 are read ahead of tails: their logits are there all the same, until the
    engine's next step, also where penalties bring them to the host."""
    lengths = (TAIL, 30, 2 * TAIL, TAIL + 100, 100)
    prompts = [tokens_of(n, seed) for seed, n in enumerate(lengths)]
    expected = []
    for prompt in prompts:
        with engine.sequence() as sequence:
            drive.prefill(sequence, prompt)
            expected.append((sequence.logits(0).tobytes(), sequence.choose(0)))
    sequences = [engine.sequence() for _ in prompts]
    sequences[2].set_penalties(Penalties(repetition=1.0, bias=((5, 0.0),)), 1)
    engine.prefill([Prompt(each, prompt) for each, prompt in zip(sequences, prompts, strict=True)])
    for each, (logits, choice) in zip(sequences, expected, strict=True):
        assert (each.logits(0).tobytes(), each.choose(0), each.logits(0).tobytes()) == (logits, choice, logits)
        with pytest.raises(ArgumentError, match="row 1"):
            each.logits(1)
    drive.verify(sequences[3], [1])
    for each in sequences[:3]:
        with pytest.raises(StateError, match="another step since"):
            each.logits(0)
    for each in sequences:
        each.close()


def test_a_graph_of_other_rows_moves_no_bit(model: Model) -> None:
    """An engine writes a prompt's plain graph once and resizes it: its bits are those of an engine that reads nothing
    else, for one row and many, of one prompt and of several."""
    lengths = (70, 1, 200, 3, TAIL, 64, 129)

    def read(engine: Engine, some: tuple[int, ...]) -> list[tuple[int | None | NumericError, bytes, bytes]]:
        sequences = [engine.sequence() for _ in some]
        prompts = [[token for token in tokens_of(2 * n, n) if token != BAD][:n] for n in some]
        choices = engine.prefill([Prompt(each, one) for each, one in zip(sequences, prompts, strict=True)])
        ended = zip(choices, sequences, strict=True)
        found = [(choice, each.logits(0).tobytes(), each.dump()) for choice, each in ended]
        for each in sequences:
            each.close()
        return found

    def opened() -> Engine:
        return nan_model.open_engine(model, n_sequences=3, n_pages=6, n_checkpoints=0)

    with opened() as used:
        for some in [*((n,) for n in lengths), (70, 3), (1, 1), (5, 200, 1)]:
            with opened() as fresh:
                assert read(used, some) == read(fresh, some), some


def test_a_prompt_that_goes_on_has_no_logits_whatever_is_beside_it(engine: Engine) -> None:
    one, other = engine.sequence(), engine.sequence()
    assert engine.prefill([Prompt(one, tokens_of(TAIL, 1), last=False), Prompt(other, tokens_of(TAIL, 2))])[0] is None
    with pytest.raises(StateError):
        one.logits(0)
    assert other.logits(0).any()
    one.close()
    other.close()


def test_checkpoints_begin_where_shared_steps_end(engine: Engine) -> None:
    prompts = [tokens_of(300, seed) for seed in range(3)]
    expected = read_alone(engine, prompts)
    sequences = [engine.sequence() for _ in prompts]
    engine.prefill([Prompt(each, prompt[:256], last=False) for each, prompt in zip(sequences, prompts, strict=True)])
    with sequences[1].checkpoint() as checkpoint:
        sequences[2].resume(checkpoint)
    choices = engine.prefill([Prompt(sequences[2], prompts[1][256:]), Prompt(sequences[0], prompts[0][256:])])
    found = [(choice, each.dump()) for choice, each in zip(choices, (sequences[2], sequences[0]), strict=True)]
    assert found == [expected[1], expected[0]]
    for each in sequences:
        each.close()


@pytest.mark.long
def test_prompts_of_sliding_layers_have_the_bits_that_they_have_alone(
    native: Library, device: str, tmp_path: Path
) -> None:
    """Some are longer than the window, whose pages behind it are free by then, and some go on from there."""
    config = Gemma4(sliding=(True, True, False, True, False), window=300, n_embd=256, n_head_kv_swa=1, n_shared_kv=2,
                    n_embd_per_layer=32)  # fmt: skip
    weights = tiny_gemma4.layout(config, 7)
    path = tiny_gemma4.write(tmp_path / "model.gguf", config, weights, "Q8_0", quantize=native.quantize)
    model = drive.open_model(native, path, device)
    engine = drive.open_engine(model, n_ctx=N_CTX, n_sequences=N_SEQUENCES, n_rows=6, n_chunk=N_CHUNK)
    lengths = [(40, 0), (700, 0), (256, 512), (90, 640), (129, 0), (1, 320)]  # Rows that are read, and those ahead.

    def begun(at: int) -> tuple[Timeline, list[int]]:
        n, past = lengths[at]
        sequence, tokens = engine.sequence(), [token % config.n_vocab for token in tokens_of(past + n, at)]
        if past:
            drive.prefill(sequence, tokens[:past], last=False)
        return sequence, tokens[past:]

    def found(sequence: Timeline, choice: object) -> tuple[object, ...]:
        out = drive.go_on(sequence, drive.Decoded([int(str(choice))]), 6)
        return sequence.logits(0).tobytes(), out.tokens, sequence.dump()

    expected = []
    for at in range(len(lengths)):
        sequence, rest = begun(at)
        expected.append(found(sequence, sequence.prefill(rest)))
        sequence.close()
    for order in ([0, 1, 2], [3, 4, 5, 0], [5, 2, 1]):
        together = [begun(at) for at in order]
        poison(engine)
        choices = engine.prefill([Prompt(sequence, rest) for sequence, rest in together])
        for at, (sequence, _), choice in zip(order, together, choices, strict=True):
            assert found(sequence, choice) == expected[at], at
            sequence.close()


# ---- what fails


@pytest.fixture
def small(model: Model) -> Iterator[Engine]:
    """Gives an engine whose pages do not suffice for all of its sequences."""
    with nan_model.open_engine(model, n_sequences=4, n_pages=5, n_checkpoints=0) as engine:
        yield engine


def test_any_bad_item_refuses_all_and_is_named(model: Model, small: Engine) -> None:
    good, bad, full = (small.sequence() for _ in range(3))
    foreign, closed = nan_model.open_engine(model).sequence(), small.sequence()
    closed.close()
    full.prefill(nan_model.tokens_of(250), last=False)
    items: list[tuple[type[Error], str, Prompt]] = [
        (ArgumentError, "item 1: .*at least one", Prompt(bad, [])),
        (ArgumentError, "item 1: token 1 is -1", Prompt(bad, [1, -1])),
        (ArgumentError, "item 1: 257 tokens", Prompt(bad, [1] * 257)),
        (ContextFull, "item 1: 51 tokens after 250", Prompt(full, [1] * 51)),
        (ArgumentError, "item 1: the sequence is another", Prompt(foreign, [1])),
        (ArgumentError, "item 1: the sequence is in", Prompt(good, [1])),
        (StateError, "closed", Prompt(closed, [1])),
    ]
    before = nan_model.state_of(small, good, bad, full)
    for kind, message, item in items:
        with pytest.raises(kind, match=message):
            small.prefill([Prompt(good, [1, 2]), item, Prompt(full if item.sequence is bad else bad, [3])])
        assert nan_model.state_of(small, good, bad, full) == before
    with pytest.raises(ArgumentError, match="1 to 64"):
        small.prefill([])


def test_one_without_pages_is_named_and_the_others_can_go_on(small: Engine) -> None:
    prompts = [nan_model.tokens_of(n, n) for n in (290, 291, 200)]
    expected = read_alone(small, prompts)
    sequences, fourth = [small.sequence() for _ in prompts], small.sequence()
    for sequence, prompt in zip(sequences, prompts, strict=True):
        drive.prefill(sequence, prompt[:TAIL], last=False)
    fourth.prefill(prompts[0][:TAIL], last=False)  # All have a page, and one is left.
    items = [Prompt(each, prompt[TAIL:]) for each, prompt in zip(sequences, prompts, strict=True)]
    before = nan_model.state_of(small, *sequences)
    with pytest.raises(OutOfMemory, match="item 1: 2 KV pages of 256 positions are needed, 1 of 5 are free"):
        small.prefill(items)
    assert nan_model.state_of(small, *sequences) == before
    choices = small.prefill([items[0], items[2]])
    assert [(choices[0], sequences[0].dump()), (choices[1], sequences[2].dump())] == [expected[0], expected[2]]


def test_a_cancel_does_nothing_to_any(small: Engine) -> None:
    sequences = [small.sequence() for _ in range(3)]
    before = nan_model.state_of(small, *sequences)
    small.cancel()
    with pytest.raises(Cancelled):
        small.prefill([Prompt(each, [1, 2, 3]) for each in sequences])
    assert nan_model.state_of(small, *sequences) == before
    assert len(small.prefill([Prompt(each, [1, 2, 3]) for each in sequences])) == 3


def test_one_that_is_not_finite_fails_alone(small: Engine) -> None:
    prompts = [nan_model.tokens_of(n, n) for n in (40, 128, 130)]
    expected = read_alone(small, prompts)
    for bad in range(3):
        sequences = [small.sequence() for _ in prompts]
        spoilt = [prompt if at != bad else [*prompt[:-1], BAD] for at, prompt in enumerate(prompts)]
        found = small.prefill([Prompt(each, prompt) for each, prompt in zip(sequences, spoilt, strict=True)])
        assert isinstance(found[bad], NumericError) and sequences[bad].info.failed
        for at in {0, 1, 2} - {bad}:
            assert (found[at], sequences[at].dump()) == expected[at]
        with pytest.raises(StateError, match="item 0: the sequence has failed"):
            small.prefill([Prompt(sequences[bad], [1]), Prompt(sequences[bad - 1], [1])])
        for each in sequences:
            each.close()


@pytest.mark.parametrize("after", [0, 5, 40])
def test_a_step_that_fails_fails_all_of_the_call(native: Library, small: Engine, after: int) -> None:
    prompts = [nan_model.tokens_of(n, n) for n in (128, 40, 150)]
    expected = read_alone(small, prompts)
    sequences, other = [small.sequence() for _ in prompts], small.sequence()
    first = drive.start(other, prompts[0])
    with fault(native, Fault.OP, after), pytest.raises(DeviceError, match="asked for it"):
        small.prefill([Prompt(each, prompt) for each, prompt in zip(sequences, prompts, strict=True)])
    assert all(each.info.failed for each in sequences) and not other.info.failed
    assert drive.verify(other, [first])
    for each in sequences:
        each.reset()
    other.close()
    found = small.prefill([Prompt(each, prompt) for each, prompt in zip(sequences, prompts, strict=True)])
    assert [(choice, each.dump()) for choice, each in zip(found, sequences, strict=True)] == expected


def test_rounds_that_are_under_way_land_first(small: Engine) -> None:
    one, other = small.sequence(), small.sequence()
    anchor = drive.start(one, nan_model.tokens_of(20))
    small.begin([Rows(one, [anchor])])
    small.prefill([Prompt(other, nan_model.tokens_of(30))])
    (found,) = small.wait()
    assert not isinstance(found, Exception) and one.info.n_verified == 1


def test_where_rows_depend_on_their_number_each_prompt_has_steps_of_its_own(
    native: Library, device: str, tmp_path: Path
) -> None:
    """ggml's sums depend on how many rows an expert of a type that luce does not multiply has."""
    config = tiny.with_experts(DENSE)
    types, made = drive.type_of("IQ3_S"), partial(drive.quantize, native)
    path = tiny.write(tmp_path / "model.gguf", config, tiny.layout(config, 7), types, quantize=made)
    if not device.startswith("cpu"):
        pytest.skip("a GPU has no such experts")
    engine = drive.open_engine(drive.open_model(native, path, device), n_ctx=512, n_chunk=PAGE, n_sequences=3)
    assert engine.info.n_cut == PAGE
    prompts = [tokens_of(n, n) for n in (30, TAIL, 40)]
    expected = read_alone(engine, prompts)
    sequences, before = [engine.sequence() for _ in prompts], counts(engine)[0]
    choices = engine.prefill([Prompt(each, prompt) for each, prompt in zip(sequences, prompts, strict=True)])
    assert counts(engine)[0] - before == 3
    assert [(choice, each.dump()) for choice, each in zip(choices, sequences, strict=True)] == expected
