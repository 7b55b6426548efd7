"""Runs many sequences of one engine: what calls refuse and that they then change nothing, rows and drafts and
their order, cancelling."""

from __future__ import annotations

import threading
from collections.abc import Callable

import drive
import numpy as np
import pytest
from nan_model import SMALL, open_engine, started, state_of, tokens_of
from saved_bytes import HEADER

from luce.errors import (
    ArgumentError,
    Cancelled,
    ContextFull,
    Error,
    OutOfMemory,
    StateError,
)
from luce.native import Drafts, Engine, Library, Model, Rows
from luce.native.structs import Sampling

pytestmark = pytest.mark.sanitize


# ---- what a step refuses


def test_any_bad_item_of_a_verify_refuses_all(model: Model, engine: Engine) -> None:
    """It stands beside good ones, before or after them. Nothing is computed, nobody's state changes, and all
    go on."""
    sequences = started(engine)
    good, other, bad = sequences
    foreign, closed = (open_engine(model).sequence() for _ in range(2))
    foreign.prefill([1])
    closed.close()
    items: list[tuple[type[Error], Rows]] = [
        (ArgumentError, Rows(bad, [])),
        (ArgumentError, Rows(bad, [1] * 25)),
        (ArgumentError, Rows(bad, [1] * 65)),
        (ArgumentError, Rows(bad, [1, -1])),
        (ArgumentError, Rows(bad, [1, SMALL.n_vocab])),
        (ArgumentError, Rows(bad, [1, 2], [0, 0])),
        (ArgumentError, Rows(bad, [1, 2, 3], [-1, -1, 0])),
        (ArgumentError, Rows(bad, [1, 2], [-1, 1])),
        (ArgumentError, Rows(bad, [1, 2, 3], [-1, 2, 0])),
        (ArgumentError, Rows(bad, [1, 2, 3, 4], [-1, 0, 0, 1])),
        (ArgumentError, Rows(good, [1])),  # It is in the step already.
        (ArgumentError, Rows(foreign, [1])),
        (StateError, Rows(closed, [1])),
        (StateError, Rows(bad, n=1)),  # It has no draft.
        (StateError, Rows(bad, n=3)),
    ]
    before = state_of(engine, *sequences)
    for kind, item in items:
        pair = [Rows(good, [1, 2]), item]
        for step in (pair, pair[::-1], [Rows(other, [3]), item, Rows(good, [4])]):
            with pytest.raises(kind):
                engine.verify(step)
            assert state_of(engine, *sequences) == before
    assert foreign.info.n_past == 1 and not foreign.info.failed
    with pytest.raises(ArgumentError, match="64"):
        engine.verify([Rows(each, [1] * 24) for each in sequences])
    with pytest.raises(ArgumentError):
        engine.verify([])
    assert state_of(engine, *sequences) == before
    full = [Rows(each, [1] * n) for each, n in zip(sequences, (24, 24, 16), strict=True)]
    assert [len(choices) for choices in engine.verify(full) if isinstance(choices, list)] == [24, 24, 16]


def test_a_context_that_is_full_refuses_the_step(engine: Engine) -> None:
    sequences = started(engine)
    drive.prefill(sequences[0], tokens_of(276))  # It reaches 296 of 300.
    before = state_of(engine, *sequences)
    for n in (5, 24):
        with pytest.raises(ContextFull, match="300"):
            engine.verify([Rows(sequences[1], [1]), Rows(sequences[0], [1] * n)])
        assert state_of(engine, *sequences) == before
    with pytest.raises(ContextFull, match="300"):
        engine.draft([Drafts(sequences[1], 1, 4), Drafts(sequences[0], 1, 4)])
    assert state_of(engine, *sequences) == before
    engine.draft([Drafts(sequences[1], 1, 4), Drafts(sequences[0], 1, 3)])
    engine.verify([Rows(sequences[1], n=5), Rows(sequences[0], n=4)])


def test_any_bad_item_of_a_draft_refuses_all(model: Model, engine: Engine) -> None:
    sequences = started(engine, 2)
    empty, foreign = engine.sequence(), open_engine(model).sequence()
    foreign.prefill([1])
    sequences.append(empty)
    items: list[tuple[type[Error], Drafts]] = [
        (ArgumentError, Drafts(sequences[1], 1, 0)),
        (ArgumentError, Drafts(sequences[1], 1, 5)),
        (ArgumentError, Drafts(sequences[1], -1, 2)),
        (ArgumentError, Drafts(sequences[1], SMALL.n_vocab, 2)),
        (ArgumentError, Drafts(sequences[0], 1, 1)),
        (ArgumentError, Drafts(foreign, 1, 1)),
        (StateError, Drafts(empty, 1, 1)),
    ]
    before = state_of(engine, *sequences)
    for kind, item in items:
        for step in ([Drafts(sequences[0], 1, 2), item], [item, Drafts(sequences[0], 1, 2)]):
            with pytest.raises(kind):
                engine.draft(step)
            assert state_of(engine, *sequences) == before
    with pytest.raises(ArgumentError):
        engine.draft([])
    for sequence in sequences[:2]:  # Nothing is booked as drafted.
        with pytest.raises(ArgumentError):
            sequence.drafted(1)
        with pytest.raises(StateError):
            drive.verify_draft(sequence, 1)


def test_a_prefill_has_at_most_a_chunk_and_may_begin_within_one(engine: Engine) -> None:
    sequence = engine.sequence()
    sequence.prefill(tokens_of(100))
    before = state_of(engine, sequence)
    for n in (257, 300):
        with pytest.raises(ArgumentError, match=f"{n} tokens of a prompt at once, expected at most 256"):
            sequence.prefill(tokens_of(n))
    assert state_of(engine, sequence) == before
    sequence.prefill(tokens_of(156))
    with pytest.raises(ContextFull):
        sequence.prefill(tokens_of(45))
    sequence.prefill(tokens_of(44))
    assert sequence.info.n_past == 300


def test_sequences_that_are_out_are_an_error(engine: Engine) -> None:
    sequences = [engine.sequence() for _ in range(3)]
    with pytest.raises(OutOfMemory, match="3"):
        engine.sequence()
    sequences[1].close()
    assert engine.info.sequences_free == 1
    engine.sequence()


# ---- rows, drafts and their order


def test_a_second_verify_replaces_the_first(engine: Engine) -> None:
    sequence, plain, _ = started(engine)
    plain.reset()
    drive.prefill(plain, tokens_of(20, 0))
    drive.verify(sequence, tokens_of(24), drive.random_tree(np.random.default_rng(1), 24))
    assert drive.verify(sequence, [4, 5, 6]) == drive.verify(plain, [4, 5, 6])
    assert sequence.info.n_verified == 3
    drive.verify(sequence, [4, 5, 6])
    with pytest.raises(ArgumentError):
        sequence.logits(3)
    with pytest.raises(ArgumentError):
        sequence.commit([0, 1, 2, 3])
    for each in (sequence, plain):
        each.commit([0, 1, 2])
    assert sequence.info.n_past == 23
    assert drive.verify(sequence, [9]) == drive.verify(plain, [9])


def test_fewer_rows_than_were_drafted(engine: Engine) -> None:
    """Several sequences verify rows of their own drafts, and some none at all."""
    sequences = started(engine)
    engine.draft([Drafts(each, at + 1, 4) for at, each in enumerate(sequences)])
    rows = [[at + 1, *each.drafted(4)] for at, each in enumerate(sequences)]
    for numbers in ((1, 5, 3), (5, 2, 1), (4, 4, 4)):
        step = [Rows(each, n=n) for each, n in zip(sequences, numbers, strict=True)]
        found = engine.verify(step[::-1])[::-1]
        said = [Rows(each, row[:n]) for each, row, n in zip(sequences, rows, numbers, strict=True)]
        assert engine.verify(said) == found
    engine.verify([Rows(sequences[1], [3, 4, 5])])  # These rows replace other tokens.
    engine.verify([Rows(sequences[1], n=3)])
    sequences[1].commit([0, 1])
    committed = np.frombuffer(sequences[1].dump(), "<i4", 23, offset=HEADER)
    assert committed.tolist() == [*tokens_of(21, 1), *rows[1][:2]]
    with pytest.raises(StateError):  # It is of the position before.
        drive.verify_draft(sequences[1], 1)
    assert drive.verify_draft(sequences[0], 4)


def test_drafts_of_separate_calls_are_each_sequences_own(engine: Engine) -> None:
    """One drafts after the other, and again: all are verified together from the device."""
    sequences = started(engine)
    expected = []
    for at, each in enumerate(sequences):
        drive.draft(each, at + 1, 4)
        expected.append(each.drafted(4))
    for at in (2, 0, 1, 2):
        drive.draft(sequences[at], at + 1, 2 + at % 3)
    found = engine.verify([Rows(each, n=3) for each in sequences])
    assert [each.drafted(2) for each in sequences] == [drafts[:2] for drafts in expected]
    said = [Rows(each, [at + 1, *expected[at][:2]]) for at, each in enumerate(sequences)]
    assert engine.verify(said) == found


def test_a_draft_rejects_rows_that_were_verified(engine: Engine) -> None:
    """Their places are the draft's, so that they are not committed any more."""
    for sequence in started(engine):
        drive.verify(sequence, [3, 4, 5])
        drive.draft(sequence, 3, 2)
        assert sequence.info.n_verified == 0
        with pytest.raises(StateError):
            sequence.commit([0])
        drive.verify_draft(sequence, 2)
        sequence.commit([0, 1])


@pytest.mark.parametrize("seed", range(4))
def test_drafts_after_paths_of_trees_are_those_of_plain_decoding(engine: Engine, seed: int) -> None:
    """What the accepted rows left to the head lies where it belongs, whichever step comes next: a draft, rows
    of another tree, a single row, or none before the state is read."""
    one, plain = engine.sequence(), engine.sequence()
    rng = np.random.default_rng(seed)
    for _ in range(6):
        for each in (one, plain):
            each.reset()
            drive.prefill(each, tokens_of(9, seed))
        for _ in range(int(rng.integers(1, 6))):
            n, anchor = int(rng.integers(1, 9)), int(rng.integers(8, 300))
            tokens, parents = tokens_of(n, int(rng.integers(1 << 30))), drive.random_tree(rng, n)
            if rng.random() < 0.5:
                for each in (one, plain):
                    drive.draft(each, anchor, 4)
                assert one.drafted(4) == plain.drafted(4)
            drive.verify(one, tokens, parents)
            path = drive.root_path(parents, int(rng.integers(n)))
            one.commit(path)
            for row in path:
                drive.step(plain, tokens[row])
        assert one.dump() == plain.dump()
        for each in (one, plain):
            drive.draft(each, 5, 4)
        assert one.drafted(4) == plain.drafted(4)


def test_a_draft_that_nobody_waited_for(engine: Engine) -> None:
    """Its sequence is reset, resumed or closed at once, and its slot and pages are used by the next step."""
    sequence, other = engine.sequence(), engine.sequence()
    prompt = tokens_of(260)
    expected = drive.decode(sequence, prompt, 10, 2)
    for how in ("reset", "resume", "close"):
        sequence.reset()
        sequence.prefill(prompt[:256], last=False)
        with sequence.checkpoint() as checkpoint:
            drive.prefill(other, tokens_of(20))
            engine.draft([Drafts(other, 5, 4), Drafts(sequence, 4, 4)])
            if how == "resume":
                sequence.resume(checkpoint)
                rest = drive.Decoded([drive.start(sequence, prompt[256:])])
                assert drive.go_on(sequence, rest, 10, 2) == expected
            elif how == "reset":
                assert drive.decode(sequence, prompt, 10, 2) == expected
            else:
                sequence.close()
                sequence = engine.sequence()
                assert drive.decode(sequence, prompt, 10, 2) == expected
        other.reset()


def test_a_draft_outlives_what_is_no_step(engine: Engine) -> None:
    """It is verified from the device, and its own tokens are booked, after checkpoints of its sequence, a
    save, a dump, and others' resets."""
    sequence, plain, other = (engine.sequence() for _ in range(3))
    for each in (sequence, plain):
        each.prefill(tokens_of(256), last=False)
    drive.draft(sequence, 3, 4)
    drafts = sequence.drafted(4)
    checkpoint = sequence.checkpoint()
    checkpoint.save()
    checkpoint.to_host()
    sequence.dump()
    other.reset()
    assert drive.verify_draft(sequence, 4) == drive.verify(plain, [3, *drafts])
    for each in (sequence, plain):
        each.commit([0, 1, 2])
    assert sequence.dump() == plain.dump()


def test_tokens_that_were_not_drafted_are_not_booked(engine: Engine) -> None:
    """Rows without tokens after a commit, a prefill, a reset or a resume are refused."""
    (sequence,) = started(engine, 1)

    def commit() -> None:
        drive.verify(sequence, [1])
        sequence.commit([0])

    def again() -> None:
        sequence.reset()
        sequence.prefill(tokens_of(256))

    for move in (commit, lambda: sequence.prefill([1, 2]), again):
        drive.draft(sequence, 3, 4)
        move()
        with pytest.raises(StateError):
            drive.verify_draft(sequence, 1)
        with pytest.raises(ArgumentError):
            sequence.drafted(1)
    checkpoint = sequence.checkpoint()
    drive.draft(sequence, 3, 4)
    sequence.resume(checkpoint)
    with pytest.raises(StateError):
        drive.verify_draft(sequence, 1)


def test_logits_are_those_of_the_engines_last_step(engine: Engine) -> None:
    """Another sequence's step takes them; they are never a neighbour's."""
    first, second, third = started(engine)
    with pytest.raises(StateError):
        first.logits(0)
    third.logits(0)
    engine.verify([Rows(second, [1, 2]), Rows(first, [3])])
    assert first.logits(0).tobytes() != second.logits(0).tobytes()
    rejected = second.logits(1).tobytes()
    second.commit([0])  # This is no step.
    assert second.logits(1).tobytes() == rejected
    with pytest.raises(StateError):
        third.logits(0)
    with pytest.raises(ArgumentError):
        first.logits(1)
    drive.draft(third, 1, 1)
    for sequence in (first, second, third):
        with pytest.raises(StateError):
            sequence.logits(0)


def test_sampling_is_each_sequences_own(engine: Engine) -> None:
    """One step has greedy and sampled rows, each by its own seed."""
    settings = [Sampling(), Sampling(temperature=1.5, seed=3), Sampling(temperature=1.5, seed=4)]
    sequences, alone = [engine.sequence() for _ in settings], []
    for sequence, sampling in zip(sequences, settings, strict=True):
        sequence.set_sampling(sampling)
        alone.append(drive.decode(sequence, tokens_of(9), 12).tokens)
    assert len({tuple(tokens) for tokens in alone}) == 3
    found = drive.decode_together(sequences, [tokens_of(9)] * 3, 12)
    assert [each.tokens for each in found] == alone


# ---- cancel


def test_a_cancel_takes_the_next_call_and_no_other(engine: Engine) -> None:
    sequences = started(engine)
    first = sequences[0]
    before = state_of(engine, *sequences)
    calls: list[Callable[[], object]] = [
        lambda: first.prefill(tokens_of(9)),
        lambda: drive.verify(first, [1]),
        lambda: drive.draft(first, 1, 2),
    ]
    for call in calls:
        engine.cancel()
        engine.cancel()  # To cancel twice is to cancel once.
        with pytest.raises(Cancelled):
            call()
        assert state_of(engine, *sequences) == before
        assert all(not each.info.failed for each in sequences)
    for call in calls[1:]:
        call()
    engine.cancel()
    first.reset()  # It needs no step, so it is not what is cancelled.
    with pytest.raises(Cancelled):
        drive.prefill(first, tokens_of(20, 0))
    drive.prefill(first, tokens_of(20, 0))


def test_a_cancel_from_another_thread_ends_a_long_prompt(model: Model) -> None:
    """While steps run, one after the other, it takes effect within a step, at a chunk's end, from where the
    prompt goes on."""
    engine = open_engine(model, n_ctx=2048, n_sequences=2)
    sequence, plain = engine.sequence(), engine.sequence()
    prompt, steps = tokens_of(2048), 0
    asked, done = threading.Event(), threading.Event()

    def cancel() -> None:
        asked.wait()
        engine.cancel()
        done.set()

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(Cancelled):
        while True:
            sequence.reset()
            for begin in range(0, 2048, 256):
                was_done = done.is_set()
                sequence.prefill(prompt[begin : begin + 256], last=False)
                assert not was_done, "a step that began after cancel() had returned went on"
                steps += 1
                if steps == 2:
                    asked.set()
    thread.join()
    n_past = sequence.info.n_past
    assert n_past % 256 == 0 and not sequence.info.failed
    for each, rest in ((sequence, prompt[n_past:]), (plain, prompt)):
        drive.prefill(each, rest)
    assert sequence.dump() == plain.dump()


def test_a_cancel_of_one_engine_is_not_anothers(native: Library, model: Model) -> None:
    engines = [open_engine(model) for _ in range(2)]
    first, second = (started(engine, 1)[0] for engine in engines)
    engines[0].cancel()
    drive.verify(second, [1])
    with pytest.raises(Cancelled):
        drive.verify(first, [1])
    handle = engines[0].handle
    engines[0].close()
    assert native.lib.luce_engine_cancel(handle) == ArgumentError.code, "its sequence keeps it alive"
    first.prefill([1])
    first.close()
    engines[0].cancel()  # A closed engine ignores it.
    message = native.text(native.lib.luce_last_error())
    for gone in (handle, native.ffi.NULL):
        assert native.lib.luce_engine_cancel(gone) == ArgumentError.code
    assert native.text(native.lib.luce_last_error()) == message, "a signal handler may not touch it"
    drive.verify(second, [1])
