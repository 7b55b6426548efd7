"""Drafts that stay on the device, the NextN chain, and the gamma that auto picks: over a fake core, with
a clock of its own."""

import random
from collections import Counter
from itertools import pairwise

import pytest
from fake_core import EOS, PROMPT, Chain, FakeCore, OnDevice, Trees, expected, finish, hashed, run, scripted
from hypothesis import given, settings
from hypothesis import strategies as st

from luce.drafting import FixedGamma, NextN, Round
from luce.errors import ArgumentError, ContextFull, DeviceError, NumericError, StateError
from luce.gamma import AutoGamma
from luce.orchestrator import State, Warned
from luce.plan import MAX_GAMMA

# ---- drafts on the device


def test_drafts_stay_on_the_device_until_they_are_verified():
    core = FakeCore()
    last = finish(core, max_tokens=10, source=OnDevice(core, length=3))
    assert last.tokens == expected(hashed, 10)
    assert core.committed == [*PROMPT, *last.tokens[:-1]]
    assert core.count("verify") == 1 and core.count("verify_draft") == 2  # the last token needs no drafts
    verbs = [verb for verb, _ in core.calls if verb in ("draft", "verify_draft", "drafted", "commit")]
    assert verbs == ["draft", "verify_draft", "drafted", "commit"] * 2 + ["commit"]


def test_drafts_on_the_device_end_with_what_is_of_use():
    core = FakeCore(n_rows=5, n_ctx=len(PROMPT) + 9, guess=lambda history: 0)
    assert finish(core, source=OnDevice(core)).tokens == expected(hashed, 10)
    lengths = [n for verb, (_, n) in ((v, d) for v, d in core.calls if v == "draft")]
    assert lengths == [4, 4, 4, 4, 4, 3, 2, 1]  # 4 rows, then what the context still holds


@pytest.mark.parametrize("verb", ["draft", "verify_draft", "drafted"])
@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("error", [ArgumentError, ContextFull, StateError])
def test_a_failure_of_a_draft_on_the_device_goes_on_plain(verb, number, error):
    core = FakeCore(fail={verb: (number, error("injected"))}, guess=lambda history: 65)
    events = run(core, source=OnDevice(core))
    warnings = [event.message for event in events if isinstance(event, Warned)]
    assert warnings == ["on device drafting failed and is off: injected"]
    assert events[-1].tokens == expected(hashed, 20)
    assert core.committed == [*PROMPT, *events[-1].tokens[:-1]]
    assert core.count("draft") == number + 1


def test_drafts_that_are_not_finite_cost_their_round_alone():
    core = FakeCore(fail={"drafted": (1, NumericError("the head's logits"))})
    events = run(core, max_tokens=20, source=OnDevice(core, length=3))
    assert [event.message for event in events if isinstance(event, Warned)]
    rounds = [(event.drafted, event.accepted) for event in events if isinstance(event, Round)]
    assert rounds == [(3, 3)] + [(0, 0)] * 15
    assert events[-1].tokens == expected(hashed, 20)


def test_a_draft_that_takes_the_session_along_is_a_failure():
    class Breaks(Chain):
        def draft(self, anchor, rows, depth):
            self.core.failed = 1
            raise DeviceError("lost")

    core = FakeCore()
    events = run(core, source=Breaks(core, hashed))
    assert isinstance(events[-1].error, DeviceError) and events[-1].state is State.DRAFT
    assert not any(isinstance(event, Warned) for event in events)


def test_acceptance_is_counted_by_position():
    core = FakeCore(scripted(PROMPT, [65, 66, 67, 68, 69, 70, EOS]))
    core.guess = scripted(PROMPT, [0, 66, 67, 0, 69, 0, 0])
    events = run(core, source=OnDevice(core, length=2))
    rounds = [(event.drafted, event.accepted) for event in events if isinstance(event, Round)]
    assert rounds == [(2, 2), (2, 1), (2, 0)]  # 65, then 66 67 68, 69 70, EOS
    stats = events[-1].stats
    assert (stats.rounds, stats.drafted, stats.accepted, stats.acceptance) == (3, 6, 3, 0.5)
    assert stats.acceptance_by_position == [2 / 3, 1 / 3]
    assert stats.rounds_by_drafts == [0, 0, 3]
    assert stats.mean_accepted_length == 2.0


def test_positions_of_a_tree_are_its_depths():
    core = FakeCore()
    right, wrong = (True, False)
    source = Trees(core, [[(0, wrong), (0, right), (2, wrong)]])  # two children of the anchor, one below
    stats = finish(core, max_tokens=5, source=source).stats
    assert stats.acceptance_by_position == [0.5, 0.0]
    assert stats.rounds_by_drafts == [0, 0, 1, 1]


def test_a_source_learns_of_every_round_and_what_it_took():
    seconds = {"draft": 0.5, "verify_draft": lambda n: 1.0 + n, "verify": 1.0, "commit": 0.125}
    core = FakeCore(seconds=seconds)
    source = OnDevice(core, length=2)
    stats = finish(core, max_tokens=5, source=source).stats
    assert source.budgets == [5]
    assert source.rounds == [Round(2, 2, 0.5, 3.0, 0.125), Round(0, 0, 0.0, 1.0, 0.125)]
    assert (stats.draft_s, stats.verify_s, stats.commit_s) == (0.5, 4.0, 0.25)
    assert source.rounds[0].seconds == 3.625


# ---- the NextN chain


@pytest.mark.parametrize("gamma", range(MAX_GAMMA + 1))
def test_a_chain_is_as_long_as_asked(gamma):
    core = FakeCore()
    last = finish(core, max_tokens=1 + 3 * (gamma + 1), source=NextN(core, FixedGamma(gamma)))
    assert last.tokens == expected(hashed, 1 + 3 * (gamma + 1))
    assert last.stats.mode == "mtp"
    assert last.stats.rounds_by_drafts == [0] * gamma + [3]
    assert last.stats.acceptance == (1.0 if gamma else None)


@settings(max_examples=100, deadline=None)
@given(
    gammas=st.lists(st.integers(0, MAX_GAMMA), min_size=1, max_size=5),
    right=st.lists(st.booleans(), min_size=1, max_size=7),
    budget=st.integers(1, 40),
    n_ctx=st.integers(8, 60),
    end=st.integers(0, 50),
)
def test_any_gamma_and_acceptance_gives_the_tokens_of_plain_decoding(gammas, right, budget, n_ctx, end):
    class Any(FixedGamma):
        def gamma(self, limit):
            return min(gammas[len(core.calls) % len(gammas)], limit)

    choose = scripted(PROMPT, [*expected(hashed, end), EOS])
    guess = lambda history: choose(history) if right[len(history) % len(right)] else 0  # noqa: E731
    plain_core = FakeCore(choose, n_ctx=n_ctx)
    plain = finish(plain_core, max_tokens=budget)
    core = FakeCore(choose, n_ctx=n_ctx, guess=guess)
    last = finish(core, max_tokens=budget, source=NextN(core, Any(0)))
    assert (last.tokens, last.text, last.reason) == (plain.tokens, plain.text, plain.reason)
    assert core.committed == plain_core.committed
    assert core.count("draft") == core.count("drafted") == core.count("verify_draft")


# ---- the gamma that auto picks


class Machine:
    """Rounds of `costs[gamma]` plain rounds, whose draft at position i is accepted with share(i, tokens so
    far); the first round of a gamma takes `building` more, the head `catch_up` for each token it lags."""

    def __init__(self, costs, share, building=0.0, catch_up=0.0, jitter=0.0, seed=0):
        self.costs, self.share, self.building, self.catch_up = costs, share, building, catch_up
        self.jitter, self.random, self.built = jitter, random.Random(seed), set()

    def decode(self, auto, tokens):
        """(seconds, gamma of each round)"""
        auto.begin(tokens)
        done, seconds, lag, gammas = 1, 0.0, 0, []
        while done < tokens:
            left = tokens - done - 1
            gamma = auto.gamma(left) if left else 0
            assert 0 <= gamma <= min(left, MAX_GAMMA)
            accepted = 0
            while accepted < gamma and self.random.random() < self.share(accepted, done):
                accepted += 1
            took = self.costs[gamma] * max(self.random.gauss(1, self.jitter), 0.5)
            took += self.building * (gamma not in self.built) + self.catch_up * lag * (gamma > 0)
            lag = 0 if gamma else lag + 1
            self.built.add(gamma)
            auto.learn(Round(gamma, accepted, took / 8, took / 2, took * 3 / 8))
            seconds += took
            done += accepted + 1
            gammas.append(gamma)
        return seconds, gammas

    def rate(self, gamma):
        """Tokens a second at a constant share."""
        chance, tokens = 1.0, 1.0
        for position in range(gamma):
            chance *= self.share(position, 0)
            tokens += chance
        return tokens / self.costs[gamma]


def line(slope):
    return [1 + slope * gamma for gamma in range(MAX_GAMMA + 1)]


GPU, STEPS, CPU = line(0.05), [1, 1.1, 1.12, 1.5, 1.52, 1.9, 1.92, 2.3, 2.32], line(0.9)


@pytest.mark.parametrize("costs", [GPU, STEPS, line(0.15), line(0.4), CPU], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("jitter", [0.0, 0.03])
def test_auto_comes_close_to_the_best_gamma(costs, share, jitter):
    """All but 5% of the best rate, once it has learned."""
    machine = Machine(costs, lambda position, done: share, building=2.0, catch_up=0.01, jitter=jitter)
    auto = AutoGamma(MAX_GAMMA)
    machine.decode(auto, 512)
    best = max(machine.rate(gamma) for gamma in range(MAX_GAMMA + 1))
    tokens, (seconds, gammas) = 4096, machine.decode(auto, 4096)
    assert tokens / seconds > 0.93 * best, Counter(gammas)


def test_auto_drafts_nothing_where_each_row_costs_its_full_price():
    for share in (0.0, 0.5, 0.9):
        machine = Machine(line(1.0), lambda position, done, share=share: share)
        _, gammas = machine.decode(AutoGamma(MAX_GAMMA), 512)
        assert sum(gamma > 0 for gamma in gammas) <= 8 and max(gammas) <= 2


@settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(st.floats(0.0, 1.5), min_size=MAX_GAMMA, max_size=MAX_GAMMA),
    before=st.floats(0, 1),
    after=st.floats(0, 1),
    decline=st.floats(0.7, 1),
    period=st.integers(10, 600),
    building=st.floats(0, 2),
    catch_up=st.floats(0, 0.04),
    seed=st.integers(0, 2**32),
)
def test_auto_is_never_slower_than_plain_by_more_than_5_percent(
    steps, before, after, decline, period, building, catch_up, seed
):
    """Over 512 tokens, whatever rounds cost, whatever is accepted, and though that changes all the time."""
    costs = [1.0]
    for step in steps:
        costs.append(costs[-1] + step)

    def share(position, done):
        return (before if done // period % 2 == 0 else after) * decline**position

    machine = Machine(costs, share, building, catch_up, seed=seed)
    seconds, gammas = machine.decode(AutoGamma(MAX_GAMMA), 512)
    plain = 511 + building
    assert seconds <= 1.05 * plain, Counter(gammas)


@pytest.mark.parametrize("costs", [GPU, line(0.3)], ids=str)
def test_auto_follows_a_change_of_acceptance(costs):
    def gammas(before, after):
        machine = Machine(costs, lambda position, done: before if done < 1500 else after)
        return machine.decode(AutoGamma(MAX_GAMMA), 3000)[1]

    rises, falls = gammas(0.02, 0.9), gammas(0.9, 0.0)
    assert sum(rises[:1000]) < 100 and sum(gamma > 0 for gamma in rises[-100:]) > 80
    assert sum(gamma > 0 for gamma in falls[:100]) > 70 and sum(falls[-500:]) < 60


def test_trials_that_fail_get_rarer():
    _, gammas = Machine(line(0.3), lambda position, done: 0.0).decode(AutoGamma(MAX_GAMMA), 4096)
    trials = [at for at, (last, gamma) in enumerate(pairwise(gammas)) if gamma and not last]
    gaps = [b - a for a, b in pairwise(trials)]
    assert len(trials) >= 5
    assert all(b > 1.5 * a or b > 1000 for a, b in pairwise(gaps)), gaps


def test_auto_stays_within_its_bound_and_its_limit():
    machine = Machine(GPU, lambda position, done: 1.0)
    _, gammas = machine.decode(AutoGamma(3), 512)
    assert max(gammas) == 3
    with_limit = AutoGamma(MAX_GAMMA)
    Machine(GPU, lambda position, done: 1.0).decode(with_limit, 512)
    assert [with_limit.gamma(limit) for limit in (1, 2)] == [1, 2] or with_limit.gamma(2) == 0


def test_what_auto_learned_of_costs_holds_for_the_next_text():
    machine, auto = Machine(GPU, lambda position, done: 0.9), AutoGamma(MAX_GAMMA)
    machine.decode(auto, 512)
    _, gammas = machine.decode(auto, 64)
    assert gammas[0] > 0


def test_one_slow_round_changes_nothing():
    """A hiccup of the machine, in any of the first rounds."""
    for slow in range(20):
        auto, gammas = AutoGamma(MAX_GAMMA), []
        for number in range(120):
            gammas.append(auto.gamma(MAX_GAMMA))
            took = GPU[gammas[-1]] * (20 if number == slow else 1)
            auto.learn(Round(gammas[-1], gammas[-1], 0.0, took, 0.0))
        assert sum(gammas[-20:]) > 100, slow


def test_auto_decodes_the_same_tokens_on_any_machine():
    for costs in (GPU, CPU, STEPS):
        core = FakeCore(seconds={"verify": 1.0, "verify_draft": costs.__getitem__})
        last = finish(core, max_tokens=300, source=NextN(core, AutoGamma(MAX_GAMMA)))
        assert last.tokens == expected(hashed, 300)
        if costs is not CPU:
            assert last.stats.tok_per_s > 2
