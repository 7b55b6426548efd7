"""The window in which sequences that decode together are timed: it holds their rounds and nothing of their prompts."""

from types import SimpleNamespace

import pytest
from fake_core import FakeEngine, generation

from luce.bench.batch import together
from luce.decode.request import Request
from luce.errors import ArgumentError


def engine_of(native):
    """Returns what together() has of an engine, over a fake core."""
    return SimpleNamespace(
        native=native, experts=None, generation=lambda request, cancelled: generation(native, request)
    )


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("prefill", [0.0, 100.0])
def test_reading_prompts_is_no_part_of_the_rounds_time(ahead, prefill):
    native = FakeEngine(n_sequences=4, n_chunk=32, ahead=ahead, seconds={"prefill": prefill, "verify": 1.0})
    requests = [Request(tuple(bytes([65 + at]) * 7), 10, ignore_eos=True) for at in range(4)]
    found = together(engine_of(native), "plain", requests, clock=native.clock)
    # The first of the ten tokens is the prompt's; a round that was begun ahead is paid for in the turn before.
    assert (found.rounds, found.tokens, found.tokens_per_round) == (36, 36, 1.0)
    assert found.step_ms == pytest.approx(1000, rel=0.12)
    assert found.tok_per_s == pytest.approx(4, rel=0.12)
    assert found.tok_per_s_each == pytest.approx(found.tok_per_s / 4)


def test_sequences_that_never_decode_together_are_an_error():
    native = FakeEngine(n_sequences=2)
    with pytest.raises(ArgumentError, match="2 sequences of 1 new tokens never decode together"):
        together(engine_of(native), "plain", [Request((65,), 1), Request((66,), 1)], clock=native.clock)
