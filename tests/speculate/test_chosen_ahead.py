"""Checks what auto chooses before a round is due, and what it takes a drafter's next best candidates for."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import GPU, Repeats, drafts, line, runner

from luce.speculate.acceptance import Acceptance
from luce.speculate.drafting import Limits, Round
from luce.speculate.runner import BET


def played(rounds, prepare):
    """Returns what rounds draft: each has a share of right drafts, whether a lookup is found and right, and
    the sequences that share it. `prepare` says after which rounds the source has time."""
    text, found = Repeats(random.Random(5), 1.0, 1.0), []
    auto = runner(GPU, text=text, ranks=8)
    auto.begin(400)
    for at, (right, looks, sequences, rows) in enumerate(rounds):
        text.fires = float(looks)
        draft = auto.draft(7, Limits(rows, 64, sequences))
        accepted = min(draft.on_device, right) if draft.on_device else text.right if draft.size else 0
        auto.learn(Round(draft.size, accepted, 0, 0, 0, (1,) * (accepted + 1)))
        if prepare(at):
            auto.prepare()
        found.append((auto._choice, auto._lost))
    return found


@settings(max_examples=60, deadline=None)
@given(
    rounds=st.lists(
        st.tuples(
            st.integers(0, 8), st.booleans(), st.sampled_from([1, 1, 1, 2]), st.sampled_from([31, 31, 4])
        ),
        max_size=60,
    ),
    every=st.integers(1, 3),
)
def test_what_is_chosen_ahead_of_a_round_is_what_would_be_chosen_in_it(rounds, every):
    assert played(rounds, lambda at: at % every == 0) == played(rounds, lambda at: False)


def test_a_choice_ahead_leaves_what_the_round_may_lose_that_has_begun():
    """It is made before that round is over, as where a device works beside the host."""
    auto, sizes = runner(GPU), []
    auto.begin(256)
    for _ in range(255):
        sizes.append(drafts(auto, 31))
        auto.prepare()
        ahead = auto._ready.choice.price - 1 if auto._ready.choice.drafts else 0.0
        assert ahead <= BET * (auto._allowance() - auto._lost - (auto._choice.price - 1)) + 1e-9
        auto.learn(Round(sizes[-1], 0, 0.0, 0.0, 0.0, (1,)))
        assert auto._lost <= auto._allowance()
    assert sizes[0] > 1 and 0 < sum(map(bool, sizes)) < 128


def test_next_best_candidates_count_at_all_depths_and_only_where_they_were_seen():
    learned = Acceptance(4, ranks=3)
    before = learned.leaves(2)
    for _ in range(6):
        learned.add(2, 0)  # No candidates were seen.
    share = next(learned.shares(1))
    assert len(before) == 4 and learned.leaves(1)[0] == pytest.approx((1 - share) * Acceptance.BEST_HOPE)
    for _ in range(6):
        learned.add(2, 0, 3)  # None of them was right.
    assert learned.leaves(1)[0] < 0.1 * (1 - next(learned.shares(1)))
    for _ in range(20):
        learned.add(4, 2, 1)  # At depth 3 the second best was right.
    first, *_ = learned.leaves(1)
    assert first > 0.6 * (1 - next(learned.shares(1)))


def test_next_best_candidates_are_taken_where_rows_are_cheap():
    """Drafts are right with 0.6, and else the second best is; its row costs a hundredth of a step."""
    source, sizes = runner(GPU, ranks=8), []
    rng = random.Random(4)
    source.begin(512)
    for _ in range(100):
        draft = source.draft(7, Limits(31, 31))
        n, leaves = draft.on_device, source._choice.leaves
        right = 0
        while right < n and rng.random() < 0.6:
            right += 1

        class Seen:
            def at(self, depth):
                return list(range(1, 9))

        source._drafters[0]._lists = Seen()
        tokens = [1] * right + [2]
        accepted = right + (right < n and leaves > 0)
        source.learn(Round(n + leaves, accepted, 0, 0, 0, tuple(tokens)))
        sizes.append((n, leaves))
    assert all(n > 1 and leaves > 0 for n, leaves in sizes[10:])
    cheap = line((1, 1.0), (2, 1.5), (4, 2.4), (32, 16.0), draft=0.02)
    assert drafts(runner(cheap, ranks=8), 31) > 0 and runner(cheap, ranks=8)._choice.leaves == 0
