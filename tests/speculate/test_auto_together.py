"""Checks what auto drafts where several texts decode together: as deep as that pays for all of them."""

import itertools
import random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import MACHINES, STEPS_27B, Repeats, line, runner

from luce.native import Source
from luce.planning.plan import AUTO_BUDGET, MAX_GAMMA
from luce.speculate.acceptance import Known
from luce.speculate.company import Company, Wish, best_depth
from luce.speculate.drafting import Drafter, Limits, Round
from luce.speculate.runner import MAX_ROWS, Runner

STEPS = [1.0, *(1 + (rows - 4) / 10 for rows in range(1, MAX_ROWS + 1))]  # They are of four texts.
DRAFTING = [n / 10 for n in range(MAX_GAMMA + 1)]


def wish(*chances, beside=0, gain=0.0, by=0):
    return Wish(chances, beside, gain, DRAFTING, by)


def test_drafts_go_as_deep_as_pays_for_all_who_wait_for_them():
    """A row costs a tenth of a plain round, and so does one more draft."""
    assert best_depth([], 4, STEPS) == 0
    assert best_depth([wish(0.9)], 4, STEPS) == 1  # 4.9 tokens in 1.2 rounds are more than 4 in a plain one.
    assert best_depth([wish(0.7)], 4, STEPS) == best_depth([wish(0.5)] * 4, 4, STEPS) == 0
    assert best_depth([wish(0.7)] * 2, 4, STEPS) == best_depth([wish(0.7, beside=1, gain=0.7)], 4, STEPS) == 1
    assert best_depth([wish(0.9, 0.8, 0.7)] * 4, 4, STEPS) == 3
    assert best_depth([wish(0.9, 0.8, 0.7), *[wish(0.9)] * 3], 4, STEPS) == 1
    assert best_depth([wish(*[0.9] * 8)] * 16, 4, STEPS) == 8  # Twelve have left meanwhile.


def test_texts_draft_what_paid_for_all_in_the_last_round():
    company = Company()

    def together(*wishes):
        """Returns how deep each may draft in a round; None is a text that wishes nothing."""
        found = []
        for wished in wishes:
            number = company.begin(4, STEPS)
            found.append(company.wishes(wished) if wished else 0)
        company.end(number, 0.0)
        return found

    deep, one = wish(0.9, 0.8, 0.7), wish(0.9)
    assert together(deep, deep, one, one) == [3, 3, 1, 1]  # Nothing is known of the others yet.
    assert together(deep, one, deep, deep) == [2, 1, 2, 2]
    assert together(deep, one, None, None) == [2, 1, 0, 0]
    assert together(wish(0.5), None, None, None) == [1, 0, 0, 0]
    assert together(wish(0.5), None, None, None) == [0] * 4
    assert together(None, deep, None) == [0] * 3
    assert together(None, None, None) == [0] * 3  # The last text has ended.


def test_a_round_is_the_same_for_all_its_texts():
    """It is so where rounds are begun ahead, where one text after the other ends one and begins the next, and
    where one comes as the first of them."""
    company = Company()
    assert [company.begin(3, STEPS) for _ in range(3)] == [0, 0, 0]
    for number in range(3):
        for _ in range(3):
            company.end(number, 1.0)
            assert company.begin(3, STEPS) == number + 1
    company.end(3, 1.0)
    company.end(3, 1.0)
    assert [company.begin(4, STEPS) for _ in range(3)] == [4, 4, 4]


def test_texts_that_end_leave_nothing_behind():
    """A round whose texts have all been cancelled is over as well."""
    company = Company()
    for number in range(3):
        for _ in range(3):
            assert company.begin(3, STEPS) == number
            company.wishes(wish(0.9))
            company.end(-1, 2.0)
    assert company.spare == 2.0 and company.wishes(wish(0.9, 0.8)) == 1
    assert len(company._wishes) == 4 and len(company._spares) == 3
    company.disband()
    assert company.spare is None and company.wishes(wish(0.9, 0.8)) == 2


def test_who_drafts_pays_for_who_waits():
    company = Company()
    company.begin(4, STEPS)
    assert company.owes(1.0, STEPS) == 0.0 and company.spare is None
    company.end(0, 9.0)
    company.begin(4, STEPS)
    company.drafts(2, 0.2)
    company.drafts(1, 0.1)
    assert company.owes(1.0, STEPS) == pytest.approx(4 * (0.3 + 0.2) / 2)
    company.end(1, 1.0)
    company.end(1, 4.0)
    company.begin(4, STEPS)
    assert company.owes(1.0, STEPS) == 0.0 and company.spare == 2.5


def test_drafters_draft_one_after_the_other():
    """Two of them take twice as long as one, however many texts each drafts for."""
    assert best_depth([wish(0.9)] * 2, 4, STEPS) == best_depth([wish(0.9), wish(0.9, by=1)], 4, STEPS) == 1
    assert best_depth([wish(0.7)] * 2, 4, STEPS) == 1
    assert best_depth([wish(0.7), wish(0.7, by=1)], 4, STEPS) == 0
    company = Company()
    company.begin(4, STEPS)
    for drafting, by in ((0.2, 0), (0.1, 0), (0.3, 1), (0.0, None)):
        company.drafts(1, drafting, by)
    assert company.owes(1.0, STEPS) == pytest.approx(0.4 + 0.2 + 0.3)


def test_who_may_lose_more_pays_what_others_have_lost_beyond_what_they_may():
    company = Company()
    company.begin(2, STEPS)
    assert company.end(0, 20.0) == 20.0 and company.end(0, -8.0) == 0.0
    company.begin(2, STEPS)
    assert company.spare == 6.0
    assert company.end(1, 21.0) == 13.0 and company.end(1, 0.0) == 0.0
    company.begin(2, STEPS)
    assert company.spare == 6.5
    assert company.end(2, 5.0) == 5.0 and company.end(2, -7.0) == 0.0
    company.disband()
    company.begin(2, STEPS)
    assert company.end(3, 4.0) == 0.0 and company.end(3, 4.0) == 1.0  # What was left is paid by who comes.


class One(NamedTuple):
    """This is a text of so many tokens, which begins with a round. Its drafts are right with a share."""

    repeats: Repeats
    share: float
    begins: int
    tokens: int


def lost(costs, texts):
    """Returns how many plain rounds texts lose together that wait for each other. A plain round is one of
    those that decode then."""
    known, done, lost = Known(), [1] * len(texts), 0.0
    sources = []
    for one in texts:
        head = Drafter(one.repeats, Source.NEXTN, MAX_GAMMA)
        sources.append(Runner(one.repeats, costs, [head], AUTO_BUDGET, known))
        sources[-1].begin(one.tokens)
    for at in itertools.count():
        if all(n >= one.tokens for n, one in zip(done, texts, strict=True)):
            return lost
        running = [k for k, one in enumerate(texts) if one.begins <= at and done[k] < one.tokens]
        n, rows, deepest, rounds = len(running), len(running), 0, []
        for k in running:
            left = max(texts[k].tokens - done[k] - 1, 1)
            drafts = sources[k].draft(7, Limits(min(MAX_ROWS // n - 1, left), left, n)).on_device
            looked = sources[k]._choice.lookup
            rows, deepest = rows + drafts + looked, max(deepest, drafts)
            rounds.append((k, drafts, looked))
        assert rows <= MAX_ROWS
        if running:
            lost += n * (costs.verify(rows) + deepest * costs.draft(n)) / costs.verify(n)
        for k, drafts, looked in rounds:
            text, accepted = texts[k].repeats, 0
            while accepted < drafts and text.random.random() < texts[k].share:
                accepted += 1
            accepted = max(accepted, min(looked, text.right))
            came = (*[1] * accepted, 1 if text.right > accepted else 2)
            sources[k].learn(Round(drafts + looked, accepted, 0.0, 0.0, 0.0, came))
            sources[k].prepare()
            done[k] += accepted + 1
            lost -= accepted + 1


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.floats(0.0, 1.2), min_size=6, max_size=6),
    draft=st.floats(0, 0.5),
    texts=st.lists(st.tuples(*[st.floats(0, 1)] * 4, st.integers(0, 99)), min_size=2, max_size=8),
    tokens=st.integers(64, 256),
    seed=st.integers(0, 2**32),
)
def test_no_company_is_slower_than_plain_by_more_than_3_percent(steps, draft, texts, tokens, seed):
    """It is so whatever rounds cost, whatever is right of each text's drafts and lookups, and however texts
    come and go."""
    points, ms = [(1, 1.0)], 1.0
    for rows, step in zip((2, 4, 8, 16, 32, 64), steps, strict=True):
        ms += step * rows / 2
        points.append((rows, ms))
    rng = random.Random(seed)
    company = [
        One(Repeats(rng, first, later, fires), share, begins, tokens)
        for first, later, fires, share, begins in texts
    ]
    assert lost(line(*points, draft=draft), company) <= 0.03 * tokens * len(texts)


def test_what_a_text_lost_beside_others_is_not_held_against_those_who_come_later():
    """Beside texts whose drafts are right, one whose are wrong loses more than it may, but they gain more.
    When its loss was held against those who came after them, these drafted nothing for hundreds of rounds."""
    rng = random.Random(0)
    right = [One(Repeats(rng, 0, 0, 0.0), 0.9, 90 * n, 256) for n in range(4)]
    wrong = One(Repeats(rng, 0, 0, 0.0), 0.0, 0, 600)
    assert lost(line(*STEPS_27B.items(), draft=0.349), [*right, wrong]) < -140 * len(right)


class Agrees(Company):
    """This is a company in which the drafts of each text pay for all, or those of none."""

    def __init__(self, agrees):
        super().__init__()
        self.agrees = agrees

    def wishes(self, wish):
        return len(wish.chances) * self.agrees


@pytest.mark.parametrize(("agrees", "drafters"), [(True, {0, None}), (False, {None})])
def test_a_lookup_is_verified_where_drafts_do_not_pay_for_all(agrees, drafters):
    text = Repeats(random.Random(5), 0.9, 0.7)
    auto, found = runner(MACHINES["h200 to come"], text=text), []
    auto.begin(400)
    auto._company = Agrees(agrees)
    for _ in range(60):
        draft = auto.draft(7, Limits(20, 20, 2))
        found.append(auto._choice)
        accepted = min(text.right, draft.size)
        auto.learn(Round(draft.size, accepted, 0.0, 0.0, 0.0, (1,) * (accepted + 1)))
    assert {choice.drafter for choice in found} == drafters
    assert all(choice.lookup for choice in found[30:])
