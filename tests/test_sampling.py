"""The pure rules: which rows are accepted, and which token is chosen of its logits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luce.errors import NumericError
from luce.structs import Sampling

pytestmark = pytest.mark.sanitize


def test_accept_takes_a_chain_without_parents(native):
    assert native.accept([5, 6, 7, 8], None, [6, 7, 0, 0]) == ([0, 1, 2], 0)
    assert native.accept([5], None, [9]) == ([0], 9)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), n=st.integers(1, 64))
def test_accept_walks_along_the_choices(native, data, n):
    tokens = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    choices = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    parents, above = [-1], [0]
    for row in range(1, n):  # depth-first: below some row of the path to the one before
        depth = data.draw(st.integers(0, len(above) - 1))
        parents.append(above[depth])
        above = [*above[: depth + 1], row]
    path, row = [0], 0
    while children := [i for i in range(1, n) if parents[i] == row and tokens[i] == choices[row]]:
        row = children[0]
        path.append(row)
    assert native.accept(tokens, parents, choices) == (path, choices[row])


@given(row=st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=50))
def test_greedy_takes_the_lowest_id_of_the_largest(native, row):
    logits = np.array(row, np.float32)
    assert native.sample(logits, Sampling(), 0) == int(logits.argmax())


@settings(max_examples=300, deadline=None)
@given(
    row=st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=1, max_size=40),
    temperature=st.sampled_from([1e-45, 1e-38, 1e-30, 1e-10]),
    filters=st.sampled_from([{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 2, "top_p": 0.9}]),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_temperature_near_zero_takes_a_largest_logit(native, row, temperature, filters, seed):
    """However large logits become when they are divided by it."""
    logits = np.array(row, np.float32)
    sampling = Sampling(temperature=temperature, seed=seed, **filters)
    for position in range(4):
        token = native.sample(logits, sampling, position)
        gap = float(logits.max()) - float(logits[token])
        assert gap <= 88 * temperature, "exp of less is no number"


def test_equal_logits_share_at_any_temperature(native):
    """Near zero and at 1e30, and what is larger at the former takes all."""
    tied = np.array([3, 5, 5, 1], np.float32)
    for temperature in (1e-45, 1e-30, 1e30, 3e38):
        expected = {1, 2} if temperature < 1 else {0, 1, 2, 3}
        chosen = {native.sample(tied, Sampling(temperature=temperature, seed=4), at) for at in range(60)}
        assert chosen == expected
    huge = np.array([-3e38, 3e38, 0, 3e38], np.float32)
    for temperature in (1e-45, 1e-30, 1.0, 1e30, 3e38):
        assert native.sample(huge, Sampling(temperature=temperature, seed=4), 1) in (
            (1, 3) if temperature <= 1e30 else (0, 1, 2, 3)
        )
    single = np.array([1.0, 1.0000001], np.float32)
    assert {native.sample(single, Sampling(temperature=1e-30, seed=4), at) for at in range(30)} == {1}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logit_that_is_not_finite_is_an_error(native, bad, temperature):
    with pytest.raises(NumericError):
        native.sample(np.array([1, bad, 2], np.float32), Sampling(temperature=temperature), 0)
