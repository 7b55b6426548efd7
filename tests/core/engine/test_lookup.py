"""Checks the lookup drafter: the rule against its own words, and what a sequence finds in its text."""

import drive
import pytest
from depth import examples
from fake_core import FakeEngine, Text, expected, finish, hashed
from hypothesis import given
from hypothesis import strategies as st
from op_run import lookup

from luce.errors import ArgumentError
from luce.speculate.drafting import TextLookup

GRAM, TRIALS, LONGEST = 4, 32, 256


def rule(tokens, most):
    """Applies the rule of luce_sequence_lookup, word for word."""
    n, best, matched = len(tokens), None, 0
    ends = [end for end in range(n - 2, GRAM - 2, -1) if tokens[end - 3 : end + 1] == tokens[-4:]]
    for end in ends[:TRIALS]:
        length = 0
        while length < LONGEST and length <= end and tokens[end - length] == tokens[n - 1 - length]:
            length += 1
        if length > matched:
            best, matched = end, length
    if best is None:
        return [], 0
    text = list(tokens)
    for _ in range(most):
        best += 1
        text.append(text[best])
    return text[n:], matched


@examples(300)
@given(
    words=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=4),
    order=st.lists(st.integers(0, 3), min_size=1, max_size=90),
    most=st.integers(0, 63),
)
@pytest.mark.sanitize
def test_lookup_is_its_rule(native, words, order, most):
    tokens = [token for at in order for token in words[at % len(words)]]
    assert lookup(native, tokens, most) == rule(tokens, most)


@pytest.mark.sanitize
def test_lookup_at_its_ends(native):
    assert lookup(native, [1, 2, 3, 4], 5) == ([], 0)
    assert lookup(native, [7] * 5, 3) == ([7] * 3, 4)
    assert lookup(native, [7] * 1000, 2) == ([7] * 2, LONGEST)
    # The text is periodic.
    assert lookup(native, [1, 2, 3, 4, 9, 1, 2, 3, 4], 7) == ([9, 1, 2, 3, 4, 9, 1], 4)
    newest = [1, 2, 3, 4, 9, 1, 2, 3, 4, 8, 1, 2, 3, 4]
    assert lookup(native, newest, 1) == ([8], 4)
    # The longest match wins.
    assert lookup(native, [6, *newest[:5], 5, *newest[1:10], 6, 1, 2, 3, 4], 1) == ([9], 5)
    with pytest.raises(ArgumentError):
        lookup(native, [], 1)


def test_a_sequence_looks_at_its_own_tokens(native, tiny_gguf, device):
    """It does so as they grow by prefill and by rounds, after a reset and after a resume."""
    model = drive.open_model(native, tiny_gguf, device)
    sequence = drive.open_sequence(model, n_ctx=600, n_chunk=256, n_checkpoints=1)
    text = [10, 11, 12, 13, 14, 15] * 43 + [20, 21, 22]
    agrees = lambda tokens, anchor: sequence.lookup(anchor, 9) == lookup(native, [*tokens, anchor], 9)  # noqa: E731
    assert sequence.lookup(5, 9) == ([], 0)
    drive.prefill(sequence, text[:256])
    checkpoint = sequence.checkpoint()
    assert agrees(text[:256], text[256]) and sequence.lookup(text[256], 9)[1] > 200
    drive.prefill(sequence, text[256:])
    assert agrees(text, 10) and agrees(text, 23)
    drive.verify(sequence, [20, 21, 22, 10, 11])
    assert agrees(text, 20)  # What is verified is not committed.
    sequence.commit([0, 1, 2, 3, 4])
    assert agrees([*text, 20, 21, 22, 10, 11], 12)
    sequence.resume(checkpoint)
    assert agrees(text[:256], text[256])
    sequence.reset()
    drive.prefill(sequence, [1, 2, 3, 4, 5, 1, 2, 3])
    assert agrees([1, 2, 3, 4, 5, 1, 2, 3], 4) and sequence.lookup(4, 3) == ([5, 1, 2], 4)
    with pytest.raises(ArgumentError):
        sequence.lookup(-1, 3)


@examples(60)
@given(
    budget=st.integers(1, 63),
    period=st.integers(1, 12),
    wrong=st.integers(2, 9),
    max_tokens=st.integers(0, 60),
    n_ctx=st.integers(9, 80),
)
def test_lookups_give_the_tokens_of_plain_decoding(budget, period, wrong, max_tokens, n_ctx):
    """The target repeats itself, but not always."""

    def choose(history):
        at = len(history) // (wrong * period)
        return (len(history) % period + (at if len(history) % wrong == 0 else 0)) % 256

    plain_core, core = FakeEngine(choose, n_ctx=n_ctx), FakeEngine(choose, n_ctx=n_ctx)
    plain = finish(plain_core, max_tokens=max_tokens)

    last = finish(core, max_tokens=max_tokens, source=TextLookup(Text(core), budget))
    assert (last.tokens, last.text, last.reason) == (plain.tokens, plain.text, plain.reason)
    assert core.committed == plain_core.committed


def test_a_lookup_drafts_as_many_as_asked():
    core = FakeEngine(lambda history: len(history) % 5)

    stats = finish(core, max_tokens=60, source=TextLookup(Text(core), 7)).stats
    assert stats.mode == "lookup" and set(stats.rounds_by_drafts[1:7]) <= {0, 1}
    assert stats.acceptance == 1.0 and stats.rounds_by_drafts[7] > 4
    nothing = finish(FakeEngine(), max_tokens=9, source=TextLookup(FakeEngine().sequence(), 7))
    assert nothing.tokens == expected(hashed, 9) and nothing.stats.drafted == 0
