"""Checks what auto drafts where several texts decode together: as deep as that pays for all of them."""

import itertools
import random
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from machines import STEPS_27B, Repeats, line, runner

from luce.native import Source
from luce.planning.plan import AUTO_BUDGET, MAX_GAMMA
from luce.speculate.auto import Auto
from luce.speculate.drafting import Drafter, Limits, Round
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
