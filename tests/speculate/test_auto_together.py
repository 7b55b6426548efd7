"""Checks what auto drafts where several texts decode together: as deep as that pays for all of them."""

import itertools
import random
from typing import NamedTuple

import pytest
from depth import examples
from hypothesis import given
from hypothesis import strategies as st
from machines import STEPS_27B, Repeats, line

from luce.native import Source
from luce.planning.plan import AUTO_BUDGET, MAX_GAMMA
from luce.speculate.auto import Auto
from luce.speculate.drafting import Drafter, Limits, Round
from luce.speculate.ledger import BET
from luce.speculate.prices import MAX_ROWS


class One(NamedTuple):
    """This is a text of so many tokens, which begins with a round. Its drafts are right with a share."""

    repeats: Repeats
    share: float
    begins: int
    tokens: int


def lost(costs, texts):
    """Returns how many plain rounds texts lose together that wait for each other. A plain round is one of
    those that decode then."""
    auto, done, lost = Auto(costs, AUTO_BUDGET), [1] * len(texts), 0.0
    sources = []
    for one in texts:
        head = Drafter(one.repeats, Source.NEXTN, MAX_GAMMA)
        sources.append(auto.source(one.repeats, [head]))
        sources[-1].begin(one.tokens)
    for at in itertools.count():
        if all(n >= one.tokens for n, one in zip(done, texts, strict=True)):
            return lost
        running = [k for k, one in enumerate(texts) if one.begins <= at and done[k] < one.tokens]
        n, rows, deepest, rounds = len(running), len(running), 0, []
        limits = {}
        for k in running:
            left = max(texts[k].tokens - done[k] - 1, 1)
            limits[k] = Limits(min(MAX_ROWS // n - 1, left), left, n)
            sources[k].propose(7, limits[k])
        for k in running:
            drafts = sources[k].draft(7, limits[k]).on_device
            looked = sources[k].choice.lookup
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
            done[k] += accepted + 1
            lost -= accepted + 1


@pytest.mark.long
@examples(60)
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


def together(costs, rights, rounds, tokens=256, looked=None):
    """Decodes texts of which each draft is right or wrong, in the same rounds. Returns their sources, and what
    each verified in each round."""
    auto, shape = Auto(costs, AUTO_BUDGET), []
    texts = [Repeats(random.Random(1), 1, 1, float(looked == at)) for at in range(len(rights))]
    sources = [auto.source(text, [Drafter(text, Source.NEXTN, MAX_GAMMA)]) for text in texts]
    limits = Limits(MAX_ROWS // len(rights) - 1, 60, len(rights))
    for source in sources:
        source.begin(tokens)
    for _ in range(rounds):
        for source in sources:
            source.propose(7, limits)
        for source in sources:
            source.draft(7, limits)
        shape.append([source.choice for source in sources])
        for source, right, text in zip(sources, rights, texts, strict=True):
            choice = source.choice
            accepted = max(choice.drafts if right else 0, min(choice.lookup, text.right))
            source.learn(Round(choice.candidates, accepted, 0.0, 0.0, 0.0, (1,) * (accepted + 1)))
    return sources, shape


def test_who_may_lose_more_pays_what_others_have_lost_beyond_what_they_may():
    """What is paid is neither more nor less than what was lost."""
    sources, _ = together(line(*STEPS_27B.items(), draft=0.349), [True, True, False], 60)
    auto, paid = sources[0].auto, [source.ledger.paid for source in sources]
    assert paid[2] < 0 < min(paid[:2]) and sum(paid) + auto.debt == pytest.approx(0, abs=1e-9)
    assert min(source.rest(3) for source in sources) > -1e-9


def test_a_debt_of_texts_that_have_ended_is_paid_by_those_who_come():
    """So what all texts of an engine have lost is never more than what all may."""
    costs = line(*STEPS_27B.items(), draft=0.349)
    sources, _ = together(costs, [True, True], 4)
    auto = sources[0].auto
    auto.debt = 3.0
    rests = [source.rest(2) for source in sources]
    assert auto._stake(sources, 2) == pytest.approx(BET * (sum(rests) - 3.0) / 2)
    assert auto.debt == 0 and sum(source.rest(2) for source in sources) == pytest.approx(sum(rests) - 3.0)


def test_a_lookup_is_verified_beside_texts_that_have_none():
    """Only the text that it is of verifies it, and those without hope verify nothing beside it."""
    _, shape = together(line((1, 1.0), (64, 3.0), draft=0.5), [False] * 3, 40, looked=1)
    assert all(of[1].lookup > 8 for of in shape[5:])
    assert not any(of[0].candidates or of[2].candidates for of in shape[25:])


def test_drafts_go_as_deep_as_pays_for_all_who_wait_for_them():
    """One text alone drafts as deep as it goes. Beside others whose drafts are wrong, each draft more has all of
    them wait, so it drafts less."""
    costs = line((1, 1.0), (64, 1.6), draft=0.3)
    deepest = []
    for wrong in (0, 1, 3):
        _, shape = together(costs, [True] + [False] * wrong, 60, tokens=2000)
        deepest.append(max(choice.drafts for choice in shape[-1]))
    assert deepest[0] == MAX_GAMMA > deepest[-1] and deepest == sorted(deepest, reverse=True)
