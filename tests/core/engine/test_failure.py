"""Rows that are not finite: their sequence fails alone, says so, heals, and leaves nothing behind. (Not under
sanitizers: ggml's own assertions end the process at a NaN.)"""

from __future__ import annotations

from collections.abc import Callable

import drive
import numpy as np
import pytest
from nan_model import BAD, open_engine, started, tokens_of

from luce.errors import ArgumentError, NumericError, StateError
from luce.native import Engine, Library, Model, Rows


def test_an_item_that_is_not_finite_fails_alone(native: Library, engine: Engine) -> None:
    """Status by item; choices of the failed one are not written, not even those of its good rows; its
    neighbours' choices and states are those without it."""
    sequences = started(engine)
    first, bad, last = sequences
    expected = [drive.verify(first, [1, 2]), drive.verify(last, [3])]
    states = [first.dump(), last.dump()]
    ffi = native.ffi
    items = ffi.new("luce_round_item[3]")
    rows = [[1, 2], [5, 6, BAD, 8], [3]]
    kept = [native.ints(row) for row in rows]
    for item, sequence, row, tokens in zip(items, sequences, rows, kept, strict=True):
        item.sequence, item.n, item.tokens = sequence.handle, len(row), tokens
    choices, tokens = ffi.new("int32_t[]", [-77] * 7), ffi.new("int32_t[]", [-77] * 7)
    statuses = ffi.new("luce_status[]", [99] * 3)
    verify = native.lib.luce_engine_verify
    for n_rows in (6, 8):
        assert verify(engine.handle, items, 3, choices, tokens, n_rows, statuses) == ArgumentError.code
    assert list(choices) == [-77] * 7 and list(statuses) == [99] * 3 and not bad.info.n_verified
    assert native.lib.luce_engine_begin(engine.handle, items, 3) == 0
    for n_rows, n_items in ((6, 3), (7, 2), (8, 3)):
        refused = native.lib.luce_engine_wait(
            engine.handle, choices, tokens, n_rows, statuses, n_items, ffi.NULL
        )
        assert refused == ArgumentError.code and list(choices) == [-77] * 7, "the step still waits"
    status = native.lib.luce_engine_wait(engine.handle, choices, tokens, 7, statuses, 3, ffi.NULL)
    assert status == NumericError.code
    assert "position 23" in native.text(native.lib.luce_last_error())
    assert list(statuses) == [0, NumericError.code, 0]
    assert list(choices) == [*expected[0], *[-77] * 4, *expected[1]]
    assert list(tokens) == [1, 2, *[-77] * 4, 3]
    assert [each.info.failed for each in sequences] == [0, 1, 0]
    assert [first.dump(), last.dump()] == states
    calls: list[Callable[[], object]] = [
        lambda: bad.prefill([1]), lambda: drive.verify(bad, [1]), lambda: drive.draft(bad, 1, 1),
        lambda: bad.commit([0]), lambda: bad.logits(0), lambda: bad.drafted(1), bad.dump, bad.checkpoint,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(StateError, match="failed"):
            call()
    with pytest.raises(StateError, match="failed"):
        engine.verify([Rows(first, [1]), Rows(bad, [1])])
    bad.reset()
    assert drive.decode(bad, tokens_of(5), 8, 2) == drive.decode(first, tokens_of(5), 8, 2)


def test_every_failed_item_has_its_status(engine: Engine) -> None:
    sequences = started(engine)
    found = engine.verify([Rows(each, [BAD]) for each in sequences])
    assert all(isinstance(each, NumericError) for each in found)
    assert all(each.info.failed for each in sequences)
    for each in sequences:
        each.reset()
    assert len({tuple(drive.greedy(each, [1, 2, 3], 6)) for each in sequences}) == 1


@pytest.mark.parametrize("where", ["first page", "second page", "chunk"])
def test_pages_of_nan_leave_nothing_behind(where: str, model: Model) -> None:
    """Their cells, the slot and the log are given to a sequence that goes on in the middle of such a page."""
    engine = open_engine(model, n_ctx=700, n_sequences=1, n_pages=3, n_rows=9)
    fresh = open_engine(model, n_ctx=700, n_sequences=1, n_pages=3, n_rows=9)
    prompts = {"first page": 100, "second page": 300, "chunk": 520}
    with fresh.sequence() as sequence:
        expected = drive.decode(sequence, tokens_of(prompts[where]), 20, (3, 0, 4), logits=True)
        state = sequence.dump()
    with engine.sequence() as sequence, pytest.raises(NumericError):
        drive.prefill(sequence, [BAD] * 700)  # It takes all three pages.
    for heal in ("close", "reset"):
        with engine.sequence() as sequence:
            if heal == "reset":
                with pytest.raises(NumericError):
                    drive.prefill(sequence, [BAD] * 256)
                sequence.reset()
            found = drive.decode(sequence, tokens_of(prompts[where]), 20, (3, 0, 4), logits=True)
            assert (found.tokens, found.accepted) == (expected.tokens, expected.accepted)
            assert np.stack(found.logits).tobytes() == np.stack(expected.logits).tobytes()
            assert sequence.dump() == state
            if heal == "reset":
                with pytest.raises(NumericError):
                    drive.verify(sequence, [BAD] * 9)
