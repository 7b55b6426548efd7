"""Reads a checkpoint's tokens, also where another thread closes it meanwhile."""

from __future__ import annotations

import threading

import pytest
from nan_model import tokens_of

from luce.errors import ArgumentError, StateError
from luce.native import Checkpoint, Engine, Library


def made(engine: Engine) -> Checkpoint:
    with engine.sequence() as sequence:
        sequence.prefill(tokens_of(256), last=False)
        return sequence.checkpoint()


@pytest.mark.parametrize("closed_after", [1, 2])
def test_another_thread_closes_a_checkpoint_while_its_tokens_are_read(
    engine: Engine, closed_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is closed after one call of the library. The tokens are whole, or an error says that it is closed.
    """
    checkpoint, check, calls = made(engine), Library.check, 0

    def closing(library: Library, status: int) -> None:
        nonlocal calls
        check(library, status)
        calls += 1
        if calls == closed_after:
            thread = threading.Thread(target=checkpoint.close)
            thread.start()
            thread.join()

    monkeypatch.setattr(Library, "check", closing)
    if closed_after == 1:
        with pytest.raises(StateError, match="the checkpoint is closed"):
            _ = checkpoint.tokens
    else:
        assert checkpoint.tokens == tokens_of(256)
    assert not checkpoint.is_open


@pytest.mark.sanitize
def test_tokens_go_to_a_buffer_of_their_size_alone(engine: Engine) -> None:
    checkpoint = made(engine)
    library, handle = checkpoint.library, checkpoint.handle
    out, tokens = library.struct("luce_checkpoint_info"), library.ffi.new("int32_t[]", [-7] * 257)
    get_info = library.lib.luce_checkpoint_get_info
    for n in (0, 255, 257):
        assert get_info(handle, out, tokens, n) == ArgumentError.code and out.n_past == 0
    assert set(tokens) == {-7}
    assert get_info(handle, out, tokens, 256) == 0
    assert list(tokens) == [*tokens_of(256), -7] and out.n_past == 256
    checkpoint.close()
    assert get_info(handle, out, tokens, 256) == ArgumentError.code
