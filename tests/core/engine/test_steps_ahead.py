"""Begins steps before their tokens are known: the choices and the committed bytes are those of steps one by
one, whatever comes in between."""

from __future__ import annotations

from collections.abc import Sequence as Items

import drive
import pytest
from nan_model import BAD, open_engine, started, state_of, tokens_of
from op_run import fault, round_fault

from luce.errors import (
    ArgumentError,
    Cancelled,
    ContextFull,
    DeviceError,
    NumericError,
    OutOfMemory,
    StateError,
)
from luce.native import CHOSEN, Drafts, Engine, Library, Model, Rows, Verified
from luce.native import Sequence as Timeline
from luce.native.structs import Penalties, Sampling


def begin(sequences: Items[Timeline], anchors: Items[int]) -> None:
    pairs = zip(sequences, anchors, strict=True)
    sequences[0].engine.begin([Rows(sequence, [anchor]) for sequence, anchor in pairs])


def chosen(engine: Engine) -> list[int]:
    """Returns the choices of the step that was begun first, which has one row of each sequence."""
    found = []
    for each in engine.wait():
        assert isinstance(each, Verified), each
        found += each.choices
    return found


def one_by_one(sequences: Items[Timeline], anchors: Items[int], rounds: int) -> list[list[int]]:
    """Returns the choices of each of so many rounds, of which all are committed."""
    found = []
    for _ in range(rounds):
        begin(sequences, anchors)
        anchors = chosen(sequences[0].engine)
        for sequence in sequences:
            sequence.commit([0])
        found.append(anchors)
    return found


def ahead(sequences: Items[Timeline], anchors: Items[int], rounds: int) -> list[list[int]]:
    """Returns the same of rounds that are begun ahead. One more is begun and left."""
    engine, found = sequences[0].engine, []
    begin(sequences, anchors)
    for _ in range(rounds):
        drive.follow(sequences)
        found.append(chosen(engine))
    return found


@pytest.mark.parametrize("rounds", [1, 2, 30, 250])
@pytest.mark.sanitize
def test_steps_that_follow_are_those_one_by_one(model: Model, rounds: int) -> None:
    """The head is fed in between, pages are taken, one sequence samples, and a step too many leaves no
    trace."""
    texts, states = [], []
    for decode in (one_by_one, ahead):
        engine = open_engine(model)
        sequences = started(engine)
        sequences[1].set_sampling(Sampling(temperature=1.0, seed=5))
        texts.append(decode(sequences, (3, 4, 5), rounds))
        states.append([each.dump() for each in sequences])
        drive.draft(sequences[2], texts[-1][-1][2], 3)
        states[-1].append(bytes(sequences[2].drafted(3)[0].to_bytes(4, "little")))
    assert texts[0] == texts[1] and states[0] == states[1]
    assert len({tuple(text) for text in zip(*texts[0], strict=True)}) == 3


@pytest.mark.sanitize
def test_other_calls_let_steps_end_and_keep_their_results(model: Model) -> None:
    """They are of other sequences, of a sequence of the step, and of the engine."""
    plain = open_engine(model)
    expected = one_by_one(started(plain), (3, 4, 5), 3)
    calls = {
        "prefill": lambda engine, others, of: others[0].prefill([1, 2]),
        "dump": lambda engine, others, of: of[0].info.failed or others[0].dump(),
        "draft": lambda engine, others, of: engine.draft([Drafts(others[0], 3, 2)]),
        "checkpoint": lambda engine, others, of: others[1].checkpoint().to_host(),
        "penalties": lambda engine, others, of: of[1].set_penalties(Penalties(), 0),
        "infos": lambda engine, others, of: (engine.info, of[0].info.n_past),
        "lookup": lambda engine, others, of: of[0].lookup(3, 4),
        "open": lambda engine, others, of: engine.sequence().close(),
    }
    for name, call in calls.items():
        engine = open_engine(model, n_sequences=6)
        sequences, others = started(engine), [engine.sequence() for _ in range(2)]
        drive.prefill(others[0], tokens_of(7))
        drive.prefill(others[1], tokens_of(256), last=False)
        found = ahead(sequences, (3, 4, 5), 1)
        call(engine, others, sequences)
        found.append(chosen(engine))
        for sequence in sequences:
            sequence.commit([0])
        begin(sequences, found[-1])
        found.append(chosen(engine))
        assert found == expected, name


@pytest.mark.sanitize
def test_a_step_that_has_ended_can_be_followed(model: Model, engine: Engine) -> None:
    expected = one_by_one(started(open_engine(model)), (3, 4, 5), 2)
    sequences = started(engine, 3)
    begin(sequences, (3, 4, 5))
    sequences[0].set_sampling(Sampling())  # This lets it end.
    drive.follow(sequences)
    assert [chosen(engine), chosen(engine)] == expected


@pytest.mark.sanitize
def test_what_cannot_be_followed_changes_nothing(engine: Engine) -> None:
    one, two, _ = started(engine)
    for nothing in (lambda: drive.follow([one, two]), engine.wait):
        with pytest.raises(StateError):
            nothing()
    begin([one, two], (3, 4))
    with pytest.raises(ArgumentError, match="1 items, but the round ahead has 2"):
        drive.follow([one])
    with pytest.raises(ArgumentError, match="in all items or in none"):
        engine.begin([Rows(one, n=1, anchor=CHOSEN), Rows(two, [5])])
    drive.follow([one, two])
    with pytest.raises(StateError, match="wait"):
        drive.follow([one, two])
    assert len(chosen(engine)) == 2 == len(chosen(engine))
    with pytest.raises(StateError, match="no round ahead"):
        drive.follow([one, two])
    begin([one, two], (3, 4))
    two.reset()
    with pytest.raises(StateError, match="item 1"):
        drive.follow([one, two])
    assert len(chosen(engine)) == 2 and one.info.n_verified == 1


@pytest.mark.sanitize
def test_a_full_context_is_not_followed(engine: Engine) -> None:
    one, two, _ = started(engine)
    drive.prefill(two, tokens_of(299 - two.info.n_past))
    begin([one, two], (3, 4))
    with pytest.raises(ContextFull, match="position 300 of a context of 300"):
        drive.follow([one, two])
    choices = chosen(engine)
    assert len(choices) == 2 and one.info.n_verified == two.info.n_verified == 1
    begin([one], choices[:1])
    drive.follow([one])


@pytest.mark.sanitize
def test_pages_that_lack_are_not_followed(model: Model) -> None:
    engine = open_engine(model, n_pages=3, n_sequences=3)
    one, two, three = started(engine)
    drive.prefill(two, tokens_of(255 - two.info.n_past))
    begin([one, two], (3, 4))
    before = engine.info
    with pytest.raises(OutOfMemory, match="1 KV pages"):
        drive.follow([one, two])
    assert engine.info == before
    assert len(chosen(engine)) == 2
    two.commit([0])
    assert two.info.n_past == 256 and one.info.n_verified == 1
    three.close()
    begin([one, two], (3, 4))
    drive.follow([one, two])


# A checked build of ggml ends where a norm meets such values.
def test_logits_that_are_not_finite_fail_one_sequence_in_both_steps(model: Model, engine: Engine) -> None:
    expected = one_by_one(started(open_engine(model)), (3, 4, 5), 2)
    sequences = started(engine)
    begin(sequences, (3, BAD, 5))
    drive.follow(sequences)
    for right in expected:
        first, failed, third = engine.wait()
        assert isinstance(first, Verified) and isinstance(third, Verified)
        assert [first.choices, third.choices] == [right[:1], right[2:]] and isinstance(failed, NumericError)
        assert "position 21 are not finite" in str(failed)
    assert [each.info.failed for each in sequences] == [0, 1, 0]
    sequences[1].reset()
    drive.prefill(sequences[1], tokens_of(21, 1))
    sequences[0].commit([0])
    sequences[2].commit([0])
    begin(sequences, (expected[1][0], 4, expected[1][2]))
    assert chosen(engine)[1] == expected[0][1]


@pytest.mark.sanitize
def test_cancelling_stops_the_step_that_would_follow(engine: Engine) -> None:
    sequences = started(engine)
    begin(sequences, (3, 4, 5))
    engine.cancel()
    with pytest.raises(Cancelled):
        drive.follow(sequences)
    assert len(chosen(engine)) == 3
    assert [each.info.n_verified for each in sequences] == [1, 1, 1]


def test_a_wait_that_fails_writes_nothing(native: Library, engine: Engine) -> None:
    """A step that it was asked for with other rows can be waited for again."""
    sequences, ffi = started(engine), native.ffi
    choices, tokens = ffi.new("int32_t[]", [77] * 3), ffi.new("int32_t[]", [77] * 3)
    statuses, left = ffi.new("luce_status[]", [77] * 3), ffi.new("uint32_t *", 77)

    def wait(rows: int) -> int:
        call = native.lib.luce_engine_wait
        return int(call(engine.handle, choices, tokens, rows, statuses, 3, left))

    assert wait(3) == StateError.code
    begin(sequences, (3, 4, 5))
    assert wait(2) == ArgumentError.code
    assert [*choices, *tokens, *statuses, left[0]] == [77] * 10
    assert wait(3) == 0 and [*statuses] == [0] * 3 and [*tokens] == [3, 4, 5] and left[0] == 0


@pytest.mark.sanitize
def test_a_device_that_fails_fails_all_sequences(native: Library, engine: Engine, device: str) -> None:
    sequences = started(engine)
    begin(sequences, (3, 4, 5))
    after = 3 if device.startswith("cpu") else 0
    with fault(native, round_fault(device), after), pytest.raises(DeviceError, match="asked for it"):
        drive.follow(sequences)
    assert len(chosen(engine)) == 3, "the step before it was done"
    assert all(each.info.failed for each in sequences)
    for each in sequences:
        each.reset()
    assert not any(each.info.failed for each in sequences)


@pytest.mark.sanitize
def test_sequences_and_engines_are_closed_while_a_step_is_under_way(model: Model) -> None:
    engine = open_engine(model, n_sequences=3)
    sequences = started(engine)
    ahead(sequences, (3, 4, 5), 2)
    sequences[1].close()
    assert engine.info.sequences_free == 1
    assert len(engine.wait()) == 3
    begin(sequences[::2], (3, 5))
    sequences[0].close()
    with pytest.raises(StateError, match="item 0 of the round ahead was closed"):
        drive.follow(sequences[::2])
    again = started(engine, 2)
    assert len(engine.wait()) == 2
    begin([*again, sequences[2]], (3, 4, 5))
    drive.follow([*again, sequences[2]])
    engine.close()
    assert [each.info.n_past for each in again] == [21, 22]
    for each in again:
        each.close()


@pytest.mark.sanitize
def test_a_step_nobody_waits_for_leaves_no_trace(engine: Engine) -> None:
    sequences = started(engine)
    before = state_of(engine, *sequences)
    begin(sequences, (3, 4, 5))
    assert state_of(engine, *sequences) == before
    begin(sequences, (5, 4, 3))
    begin(sequences[:1], (9,))
    assert len(chosen(engine)) == 1
    with pytest.raises(StateError):
        engine.wait()
    assert [each.dump() for each in sequences] == before[4:]
    assert state_of(engine, *sequences) == before
