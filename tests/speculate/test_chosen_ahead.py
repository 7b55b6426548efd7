"""Checks what auto takes a drafter's next best candidates for."""

import random

import pytest
from machines import GPU, Fresh, drafts, line, runner

from luce.native import Source
from luce.speculate.drafting import Drafter, Limits, Round
from luce.speculate.estimates import Estimates


def test_next_best_candidates_count_at_all_depths_and_only_where_they_were_seen():
    learned, drafter = Estimates(), Drafter(Fresh(), Source.NEXTN, 4, 3)

    def leaves(n):
        """Returns the chances beside a chain of n drafts: of a tree's nodes those that are none of the chain's."""
        chain = learned.chain(drafter, n)
        found = [chance for chance, _ in learned.tree(drafter, chain, 99)]
        for chance in chain:
            found.remove(min(found, key=lambda each: abs(each - chance)))
        return found

    before = leaves(2)
    for _ in range(6):
        learned.drafted(drafter, 2, 0, None)  # No candidates were seen.
    share = learned.chain(drafter, 1)[0]
    assert len(before) == 4 and leaves(1)[0] == pytest.approx((1 - share) / 2)
    for _ in range(6):
        learned.drafted(drafter, 2, 0, 3)  # None of them was right.
    assert leaves(1)[0] < 0.1 * (1 - learned.chain(drafter, 1)[0])
    for _ in range(20):
        learned.drafted(drafter, 4, 2, 1)  # At depth 3 the second best was right.
        learned.fade()
    assert leaves(1)[0] > 0.6 * (1 - learned.chain(drafter, 1)[0])


def test_next_best_candidates_are_taken_where_rows_are_cheap():
    """Drafts are right with 0.6, and else the second best is; its row costs a hundredth of a step."""
    source, sizes = runner(GPU, ranks=8), []
    rng = random.Random(4)
    source.begin(512)
    for _ in range(100):
        source.propose(7, Limits(31, 31))
        draft = source.draft(7, Limits(31, 31))
        n, leaves = draft.on_device, source.choice.leaves
        right = 0
        while right < n and rng.random() < 0.6:
            right += 1

        class Seen:
            def at(self, depth):
                return list(range(1, 9))

        source.drafters[0]._lists = Seen()
        tokens = [1] * right + [2]
        accepted = right + (right < n and leaves > 0)
        source.learn(Round(n + leaves, accepted, 0, 0, 0, tuple(tokens)))
        sizes.append((n, leaves))
    assert all(n > 1 and leaves > 0 for n, leaves in sizes[10:])
    cheap = line((1, 1.0), (2, 1.5), (4, 2.4), (32, 16.0), draft=0.02)
    source = runner(cheap, ranks=8)
    assert drafts(source, 31) > 0 and source.choice.leaves == 0
