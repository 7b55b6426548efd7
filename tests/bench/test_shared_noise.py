"""Checks how bench/shared_noise.py counts: drafts on a given text, and the probabilities beside them."""

from __future__ import annotations

import box_model
import numpy as np
import pytest
import shared_noise

from luce.decode.engine import Engine
from luce.decode.request import Request
from luce.native.structs import Sampling
from luce.planning.opened import Files
from luce.planning.plan import Options


def test_drafts_on_a_given_text_are_right_where_they_were_when_it_was_written(device: str) -> None:
    """A text is sampled with drafts, and then drafted on again token by token: each round's outcome comes
    again. The prompt is one token, which both read in the same step."""
    sampling = Sampling(0.7, seed=4)
    with (
        Files(box_model.GGUF, device=device) as files,
        Engine.open(files, Options(ctx=256, threads=1, spec="mtp", gamma=1)) as engine,
    ):
        prompt = tuple(engine.tokenizer.encode("def is_even(n):\n"))[:1]
        text, rounds = shared_noise.rounds_of(engine, Request(prompt, 80, sampling, ignore_eos=True))
        found = shared_noise.forced(engine, text, sampling)
    assert list(found) == list(range(1, len(text) - 1))
    same = [found[at] == right for at, right in rounds.items() if at in found]
    assert len(same) > 30 and all(same)
    assert 0.2 < np.mean(list(rounds.values())) < 0.95, "rounds of both kinds are wanted"


def test_probabilities_are_those_of_drawing_with_the_noise() -> None:
    rng = np.random.default_rng(1)
    p, q = (shared_noise.softmax(rng.normal(0, 2, 12), 1.0) for _ in range(2))
    greedy, shared, rejection = shared_noise.accepted(p, q)
    noise = rng.gumbel(size=(200_000, 12))
    target, draft = ((np.log(x) + noise).argmax(-1) for x in (p, q))
    assert shared == pytest.approx((target == draft).mean(), abs=0.005)
    assert greedy == pytest.approx((target == q.argmax()).mean(), abs=0.005)
    assert shared < rejection == pytest.approx(np.minimum(p, q).sum())
