"""Drafts that stay on the device, and the NextN chain: over a fake core, with a clock of its own."""

import pytest
from depth import examples
from fake_core import EOS, PROMPT, FakeEngine, Text, expected, finish, hashed, nextn, run, scripted
from fake_sources import Chain, OnDevice, Trees
from hypothesis import given
from hypothesis import strategies as st

from luce.decode.events import State, Warned
from luce.errors import ArgumentError, ContextFull, DeviceError, OutOfMemory, StateError
from luce.native import Source
from luce.planning.plan import MAX_GAMMA
from luce.speculate.drafting import Draft, Drafter, Fixed, Round

# ---- drafts on the device


def test_drafts_stay_on_the_device_until_they_are_verified():
    core = FakeEngine()
    last = finish(core, max_tokens=10, source=OnDevice(length=3))
    assert last.tokens == expected(hashed, 10)
    assert core.committed == [*PROMPT, *last.tokens[:-1]]
    verbs = [verb for verb, _ in core.calls if verb in ("draft", "verify", "drafted", "commit")]
    assert verbs == ["draft", "verify", "commit"] * 2 + ["verify", "commit"]


def test_drafts_on_the_device_end_with_what_is_of_use():
    core = FakeEngine(n_rows=5, n_ctx=len(PROMPT) + 9, guess=lambda history: 0)
    assert finish(core, source=OnDevice()).tokens == expected(hashed, 10)
    lengths = [detail[0][1] for verb, detail in core.calls if verb == "draft"]
    assert lengths == [4, 4, 4, 4, 4, 3, 2, 1]  # There are 4 rows, then what the context still holds.


@pytest.mark.parametrize("verb", ["draft", "verify"])
@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("error", [ArgumentError, ContextFull, StateError, OutOfMemory])
def test_a_failure_of_a_draft_on_the_device_goes_on_plain(verb, number, error):
    core = FakeEngine(fail={verb: (number, error("injected"))}, guess=lambda history: 65)
    events = run(core, source=OnDevice())
    warnings = [event.message for event in events if isinstance(event, Warned)]
    assert warnings == ["on device drafting failed and is off: injected"]
    assert events[-1].tokens == expected(hashed, 20)
    assert core.committed == [*PROMPT, *events[-1].tokens[:-1]]
    assert core.count("draft") == number + 1


def test_drafts_that_are_not_finite_cost_their_round_alone():
    core = FakeEngine(guess=lambda history: None if len(history) > len(PROMPT) + 5 else hashed(history))
    events = run(core, max_tokens=20, source=OnDevice(length=3))
    (warning,) = [event.message for event in events if isinstance(event, Warned)]
    assert "not finite" in warning
    rounds = [(event.drafted, event.accepted) for event in events if isinstance(event, Round)]
    assert rounds == [(3, 3)] + [(0, 0)] * 15
    assert events[-1].tokens == expected(hashed, 20)


def test_a_draft_that_takes_the_sequence_along_is_a_failure():
    class Breaks(Chain):
        def draft(self, anchor, limits):
            self.core.last.failed = 1
            raise DeviceError("lost")

    core = FakeEngine()
    events = run(core, source=Breaks(core, hashed))
    assert isinstance(events[-1].error, DeviceError) and events[-1].state is State.DRAFT
    assert not any(isinstance(event, Warned) for event in events)


def test_acceptance_is_counted_by_position():
    core = FakeEngine(scripted(PROMPT, [65, 66, 67, 68, 69, 70, EOS]))
    core.guess = scripted(PROMPT, [0, 66, 67, 0, 69, 0, 0])
    events = run(core, source=OnDevice(length=2))
    rounds = [(event.drafted, event.accepted) for event in events if isinstance(event, Round)]
    assert rounds == [(2, 2), (2, 1), (2, 0)]  # The tokens are 65, then 66 67 68, 69 70, EOS.
    stats = events[-1].stats
    assert (stats.rounds, stats.drafted, stats.accepted, stats.acceptance) == (3, 6, 3, 0.5)
    assert stats.acceptance_by_position == [2 / 3, 1 / 3]
    assert stats.rounds_by_drafts == [0, 0, 3]
    assert stats.mean_accepted_length == 2.0


def test_positions_of_a_tree_are_its_depths():
    core = FakeEngine()
    right, wrong = (True, False)
    # The anchor has two children, and the right one has one.
    source = Trees(core, [[(0, wrong), (0, right), (2, wrong)]])
    stats = finish(core, max_tokens=5, source=source).stats
    assert stats.acceptance_by_position == [0.5, 0.0]
    assert stats.rounds_by_drafts == [0, 0, 1, 1]


def test_a_source_learns_of_every_round_and_what_it_took():
    seconds = {"draft": 0.5, "verify": lambda widths: float(sum(widths)), "commit": 0.125}
    core = FakeEngine(seconds=seconds)
    source = OnDevice(length=2)
    stats = finish(core, max_tokens=5, source=source).stats
    assert source.budgets == [5]
    tokens = expected(hashed, 5)
    assert source.rounds == [
        Round(2, 2, 0.5, 3.0, 0.125, tokens[1:4]),
        Round(0, 0, 0.0, 1.0, 0.125, tokens[4:], seconds=1.125),  # From the first round's end: its commit, too.
    ]  # fmt: skip
    assert (stats.draft_s, stats.verify_s, stats.commit_s) == (0.5, 4.0, 0.25)


# ---- the NextN chain


@pytest.mark.parametrize("gamma", range(MAX_GAMMA + 1))
def test_a_chain_is_as_long_as_asked(gamma):
    core = FakeEngine()
    last = finish(core, max_tokens=1 + 3 * (gamma + 1), source=nextn(core, gamma))
    assert last.tokens == expected(hashed, 1 + 3 * (gamma + 1))
    assert last.stats.mode == "mtp"
    assert last.stats.rounds_by_drafts == [0] * gamma + [3]
    assert last.stats.acceptance == (1.0 if gamma else None)


@examples(100)
@given(
    gammas=st.lists(st.integers(0, MAX_GAMMA), min_size=1, max_size=5),
    right=st.lists(st.booleans(), min_size=1, max_size=7),
    budget=st.integers(1, 40),
    n_ctx=st.integers(8, 60),
    end=st.integers(0, 50),
)
def test_any_gamma_and_acceptance_gives_the_tokens_of_plain_decoding(gammas, right, budget, n_ctx, end):
    class Any(Fixed):
        def draft(self, anchor, limits):
            gamma = min(gammas[len(core.calls) % len(gammas)], limits.candidates, limits.depth)
            return self._drafter.draft(anchor, gamma) if gamma else Draft()

    choose = scripted(PROMPT, [*expected(hashed, end), EOS])
    guess = lambda history: choose(history) if right[len(history) % len(right)] else 0  # noqa: E731
    plain_core = FakeEngine(choose, n_ctx=n_ctx)
    plain = finish(plain_core, max_tokens=budget)
    core = FakeEngine(choose, n_ctx=n_ctx, guess=guess)
    last = finish(core, max_tokens=budget, source=Any(Drafter(Text(core), Source.NEXTN, MAX_GAMMA), 0))
    assert (last.tokens, last.text, last.reason) == (plain.tokens, plain.text, plain.reason)
    assert core.committed == plain_core.committed
    assert not core.count("drafted"), "the tokens come with the choices"
    rows = [sum(widths) for verb, widths in core.calls if verb == "verify"]
    drafts = [detail[0][1] for verb, detail in core.calls if verb == "draft"]
    assert sum(rows) == len(rows) + sum(drafts), "each draft is verified"


@pytest.mark.parametrize(
    ("draft", "depth"),
    [
        (Draft(), 0),
        (Draft((), (-1,)), 0),
        (Draft((1, 2)), 2),
        (Draft((1, 2, 3), (-1, 0, 0, 1)), 2),
        (Draft(on_device=3), 3),
    ],
)
def test_a_draft_is_as_deep_as_its_deepest_candidate(draft, depth):
    assert draft.depth == depth
