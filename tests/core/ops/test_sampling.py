"""Checks the pure rules: which rows are accepted, and which token is chosen of its logits."""

import itertools

import numpy as np
import pytest
import sampling_rule
from depth import deeper, examples
from hypothesis import given
from hypothesis import strategies as st
from op_run import sampling_run

from luce.errors import NumericError
from luce.native.structs import Sampling

pytestmark = pytest.mark.sanitize


def test_accept_takes_a_chain_without_parents(native):
    assert native.accept([5, 6, 7, 8], None, [6, 7, 0, 0]) == ([0, 1, 2], 0)
    assert native.accept([5], None, [9]) == ([0], 9)


@examples(300)
@given(data=st.data(), n=st.integers(1, 64))
def test_accept_walks_along_the_choices(native, data, n):
    tokens = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    choices = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    parents, above = [-1], [0]
    for row in range(1, n):  # Rows go depth first: below some row of the path to the one before.
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


@examples(300)
@given(
    row=st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=1, max_size=40),
    temperature=st.sampled_from([1e-45, 1e-38, 1e-30, 1e-10]),
    filters=st.sampled_from([{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 2, "top_p": 0.9}]),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_temperature_near_zero_takes_a_largest_logit(native, row, temperature, filters, seed):
    """It does so however large logits become when they are divided by it."""
    logits = np.array(row, np.float32)
    sampling = Sampling(temperature=temperature, seed=seed, **filters)
    for position in range(4):
        token = native.sample(logits, sampling, position)
        gap = float(logits.max()) - float(logits[token])
        assert gap <= 28 * max(temperature, 6e-39), "it could never win"


def test_equal_logits_share_at_any_temperature(native):
    """They share near zero and at 1e30, and what is larger at the former takes all."""
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


@pytest.mark.parametrize("bad", [[np.nan], [np.inf], [-np.inf, -np.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error(native, bad, temperature):
    for row in (bad, [1, 2, *bad]) if np.inf in bad or len(bad) == 1 else (bad,):
        with pytest.raises(NumericError):
            native.sample(np.array(row, np.float32), Sampling(temperature=temperature), 0)


def test_a_logit_of_minus_infinity_is_never_chosen(native):
    """It never is, whatever the filters: grammars use it."""
    row = np.full(300, -np.inf, np.float32)
    row[[7, 200]] = [-3.0, -4.0]
    for filters in ({}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.01}, {"top_k": 250, "top_p": 0.999}):
        for temperature in (0.0, 1e-30, 1.0, 1e30):
            sampling = Sampling(temperature=temperature, seed=3, **filters)
            chosen = {native.sample(row, sampling, at) for at in range(40)}
            assert chosen == ({7, 200} if temperature >= 1 else {7})


# ---- the rule against numpy's


def test_the_reference_has_the_published_philox():
    """It gives Random123's known answers of philox4x32 with 10 rounds."""
    of = sampling_rule.philox
    assert of((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert of((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = of((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))
    assert pi == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**64 - 1), n=st.integers(1, 40))
def test_equal_logits_take_the_largest_random_word(native, seed, position, n):
    """That says that the core's words are those of the reference, at every seed, position and id."""
    words = sampling_rule.words(seed, position, n)
    token = native.sample(np.zeros(n, np.float32), Sampling(temperature=1.0, seed=seed), position)
    assert token == int(words.argmax())


def test_the_noise_is_accurate_to_its_last_bits(native):
    """exp, log and what is made of them are held to double precision, over the whole range and at its ends.
    """
    rng = np.random.default_rng(5)
    ends = [0, 1, 2, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1, 2**32 // 3, 2**32 // 3 * 2]
    near = [abs(base - (1 << k)) for base in (0, 2**32) for k in range(32)]
    words = np.concatenate([rng.integers(0, 2**32, 400_000), ends, near]).astype(np.uint32)
    z = np.append(-27.5 * rng.random(len(words) - 4), [0, -27.5, -1e-7, -np.log(2) / 2]).astype(np.float32)
    minus_log, gumbel, bound, mass = sampling_run(native, words, z)
    exact = sampling_rule.minus_log_uniform(words)
    assert ulps(minus_log, exact).max() <= 2
    assert ulps(gumbel, -np.log(minus_log.astype(np.float64)), floor=0.5).max() <= 2
    assert np.abs(gumbel + np.log(exact)).max() <= 3e-6
    assert gumbel.min() > -3.14 and gumbel.max() < 22.88
    assert (gumbel < bound).all()
    exact = np.exp(z.astype(np.float64)) * 2.0**40
    assert (np.abs(mass - np.floor(exact)) <= 1 + exact * 2.0**-23).all()
    assert mass.min() >= 1 and mass[z == 0] == [2**40]


def ulps(found, exact, floor=0.0):
    """Returns errors in units of the last place of F32, near zero in those of `floor`."""
    return np.abs(found - exact) / np.spacing(np.maximum(np.abs(exact), floor).astype(np.float32))


@examples(400)
@given(
    data=st.data(),
    temperature=st.sampled_from([1e-30, 0.05, 0.7, 1.0, 1.5, 100.0, 1e30]),
    top_k=st.sampled_from([0, 1, 2, 7, 40, 1000]),
    top_p=st.sampled_from([0.0, 1e-9, 0.3, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 1e-9, 0.05, 0.5, 0.999]),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**33),
)
def test_the_token_is_the_references(native, data, temperature, top_k, top_p, min_p, seed, position):
    """Logits have many ties. The reference's doubles may differ where two scores all but tie."""
    n, digits = data.draw(st.integers(1, 700)), data.draw(st.integers(0, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = np.round(rng.normal(0, data.draw(st.sampled_from([0.1, 3.0, 30.0])), n), digits)
    logits = logits.astype(np.float32)
    sampling = Sampling(temperature, top_k, top_p, min_p, seed)
    scores = sampling_rule.scores(logits, sampling, position)
    token = native.sample(logits, sampling, position)
    assert np.isfinite(scores[token]) and scores[token] >= scores.max() - 1e-5 * max(1, abs(scores.max()))


FILTERS = [
    {"top_k": k, "top_p": p, "min_p": m} for k, p, m in itertools.product([0, 12], [0.0, 0.9], [0.0, 0.03])
]


@pytest.mark.parametrize("temperature", [0.5, *deeper(1.0, 1.5)])
@pytest.mark.parametrize("filters", FILTERS, ids=lambda f: "-".join(map(str, f.values())))
def test_tokens_have_the_frequencies_of_the_renormalised_softmax(native, filters, temperature):
    """A chi-square test runs over seeds and positions. The seeds are fixed, so it does not fail by chance."""
    logits = np.random.default_rng(2).normal(0, 2, 40).astype(np.float32)
    expected = sampling_rule.kept_probabilities(logits, Sampling(temperature, **filters))
    draws = 6000
    counts = np.zeros(40)
    for draw in range(draws):
        sampling = Sampling(temperature, seed=draw * 2**40 + 7, **filters)
        counts[native.sample(logits, sampling, draw % 5)] += 1
    assert not counts[expected == 0].any()
    likely = expected * draws >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    wanted = np.append(expected[likely], expected[~likely].sum()) * draws
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 3, freedom
