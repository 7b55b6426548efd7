"""What steps cost between the widths that were measured, and the gamma that auto picks by it."""

import random

import pytest
from fake_core import FakeEngine, expected, finish
from hypothesis import given, settings
from hypothesis import strategies as st

from luce.costs import Costs
from luce.drafting import NextN, Round
from luce.gamma import AutoGamma
from luce.plan import MAX_GAMMA
from luce.structs import Cost

# ---- costs


def test_costs_lie_on_lines_between_the_measured_widths():
    costs = Costs([Cost(8, 0, 14.0), Cost(1, 0, 10.0), Cost(4, 0, 12.0), Cost(1, 1, 0.5), Cost(3, 1, 1.5)])
    assert [costs.verify(rows) for rows in (1, 2, 4, 6, 8)] == pytest.approx([10, 10 + 2 / 3, 12, 13, 14])
    assert costs.verify(16) == 18.0  # by the last slope
    assert [costs.draft(n) for n in (1, 2, 3, 5)] == [0.5, 1.0, 1.5, 2.5]


def test_costs_that_were_not_measured_are_nothing():
    assert Costs([]).verify(3) == Costs([]).draft(1) == 0.0
    assert Costs([Cost(2, 0, 5.0)]).verify(1) == Costs([Cost(2, 0, 5.0)]).verify(9) == 5.0


@given(
    measured=st.dictionaries(st.integers(1, 64), st.floats(-1, 10), min_size=1),
    rows=st.integers(1, 200),
)
def test_costs_are_never_negative(measured, rows):
    costs = Costs(Cost(width, 0, seconds) for width, seconds in measured.items())
    assert costs.verify(rows) >= 0.0
    if rows in measured:
        assert costs.verify(rows) == max(measured[rows], 0.0)


# ---- the gamma that auto picks


def machine(step, draft):
    """Costs of verify steps (ms) of 1, 2 .. rows, and of a draft."""
    return Costs([Cost(rows, 0, ms) for rows, ms in enumerate(step, 1)] + [Cost(1, 1, draft)])


MACHINES = {
    "h200": machine([11.2 * r for r in (1, 1.06, 1.25, 1.48, 1.55, 1.7, 1.8, 1.9, 2.0)], 0.75),
    "h200 to come": machine([11.2 * (1.02 + 0.0075 * r) if r else 11.2 for r in range(9)], 0.35),
    "steps": machine([1, 1.1, 1.12, 1.5, 1.52, 1.9, 1.92, 2.3, 2.32], 0.05),
    "half price": machine([1 + 0.45 * r for r in range(9)], 0.05),
}
CPU = machine([1, 2.17, 2.8, 3.4, 4.3, 5.1, 5.9, 6.7, 7.5], 0.1)


def round_tokens(share, gamma):
    return sum(share**i for i in range(gamma + 1))


class Text:
    """Decodes: a draft at position i is accepted with share(tokens so far)."""

    def __init__(self, costs, share, seed=0):
        self.costs, self.share, self.random = costs, share, random.Random(seed)

    def decode(self, pace, tokens):
        """(seconds, gamma of each round); `expected`: tokens of its rounds on average over all luck"""
        pace.begin(tokens)
        done, seconds, gammas, self.expected = 1, 0.0, [], 0.0
        while done < tokens:
            left = tokens - done - 1
            gamma = pace.gamma(left, 1) if left else 0
            assert 0 <= gamma <= min(left, MAX_GAMMA)
            accepted = 0
            while accepted < gamma and self.random.random() < self.share(done):
                accepted += 1
            self.expected += round_tokens(self.share(done), gamma)
            seconds += self.costs.verify(gamma + 1) + gamma * self.costs.draft(1)
            pace.learn(Round(gamma, accepted, 0.0, 0.0, 0.0))
            done += accepted + 1
            gammas.append(gamma)
        return seconds, gammas


def auto_rate(costs, share, tokens, runs=50):
    """Tokens a second of so many runs, each as in a fresh process."""
    texts = [Text(costs, share, seed) for seed in range(runs)]
    seconds = sum(text.decode(AutoGamma(MAX_GAMMA, costs), tokens)[0] for text in texts)
    return sum(text.expected for text in texts) / seconds


def best_rate(costs, *shares):
    """Of the best gamma over equal parts of a text with these shares."""

    def seconds(gamma):
        price = costs.verify(gamma + 1) + gamma * costs.draft(1)
        return sum(price / round_tokens(share, gamma) for share in shares)

    return len(shares) / min(map(seconds, range(MAX_GAMMA + 1)))


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("accepted", [0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95])
def test_auto_has_97_percent_of_the_best_gamma_over_256_tokens(name, accepted):
    """In a fresh process, with all that it tries."""
    costs = MACHINES[name]
    assert auto_rate(costs, lambda done: accepted, 256) > 0.97 * best_rate(costs, accepted)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize(("before", "after"), [(0.9, 0.0), (0.0, 0.9), (0.8, 0.3), (0.3, 0.8)])
def test_auto_follows_a_text_that_changes(name, before, after):
    costs = MACHINES[name]
    rate = auto_rate(costs, lambda done: before if done < 256 else after, 512, runs=15)
    assert rate > 0.97 * best_rate(costs, before, after)


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.floats(0.0, 1.5), min_size=MAX_GAMMA, max_size=MAX_GAMMA),
    draft=st.floats(0, 0.5),
    before=st.floats(0, 1),
    after=st.floats(0, 1),
    period=st.integers(10, 600),
    seed=st.integers(0, 2**32),
)
def test_auto_is_never_slower_than_plain_by_more_than_3_percent(steps, draft, before, after, period, seed):
    """In no run of 256 tokens, whatever rounds cost and whatever is accepted."""
    widths = [1.0]
    for step in steps:
        widths.append(widths[-1] + step)
    costs = machine(widths, draft)
    share = lambda done: before if done // period % 2 == 0 else after  # noqa: E731
    seconds, gammas = Text(costs, share, seed).decode(AutoGamma(MAX_GAMMA, costs), 256)
    assert seconds <= 1.03 * 255, gammas


@pytest.mark.parametrize("accepted", [0.0, 0.5, 0.95, 1.0])
def test_auto_drafts_nothing_where_no_acceptance_can_pay(accepted):
    for costs in (CPU, machine([1 + r for r in range(9)], 0.0), Costs([])):
        _, gammas = Text(costs, lambda done: accepted).decode(AutoGamma(MAX_GAMMA, costs), 512)
        assert not any(gammas)


def test_trials_of_a_hopeless_text_are_few():
    costs = MACHINES["h200"]
    seconds, _ = Text(costs, lambda done: 0.0).decode(AutoGamma(MAX_GAMMA, costs), 4096)
    assert seconds < 1.015 * 4095 * costs.verify(1)


def test_auto_stays_within_its_bound_and_its_limit():
    costs = MACHINES["h200 to come"]
    auto = AutoGamma(3, costs)
    assert max(Text(costs, lambda done: 1.0).decode(auto, 512)[1]) == 3
    assert [auto.gamma(limit) for limit in (0, 1, 2, 9)] == [0, 1, 2, 3]


def test_what_pays_for_one_sequence_may_not_pay_for_many():
    """Rows are cheap up to 8 of a step, and dear beyond."""
    costs = Costs([Cost(1, 0, 1.0), Cost(8, 0, 1.1), Cost(64, 0, 8.0), Cost(1, 1, 0.01)])
    auto = AutoGamma(MAX_GAMMA, costs)
    Text(costs, lambda done: 0.8).decode(auto, 256)
    gammas = [auto.gamma(MAX_GAMMA, sequences) for sequences in (1, 2, 4, 32)]
    assert gammas == sorted(gammas, reverse=True) and gammas[0] > 3 and gammas[-1] == 0


def test_auto_decodes_the_same_tokens_on_any_machine():
    for costs in (*MACHINES.values(), CPU):
        core = FakeEngine()
        last = finish(core, max_tokens=300, source=NextN(AutoGamma(MAX_GAMMA, costs)))
        assert last.tokens == expected(core.choose, 300)
        assert (last.stats.drafted > 0) == (costs is not CPU)
