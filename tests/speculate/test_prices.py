"""Prices of rounds, where the table of costs that they start from is off."""

import random

import pytest
from replay import Text, Trace

from luce.native import Source
from luce.native.structs import Cost
from luce.speculate.auto import Auto
from luce.speculate.drafting import Drafter, Limits, Round
from luce.speculate.prices import Costs, Prices, Work

VERIFY, CHAIN, BLOCK = {1: 4.7, 8: 5.3}, 0.3, 1.1  # Milliseconds of a 27b's steps on an H200.


def prices_of(scale=1.0, block=BLOCK):
    """Returns prices whose table is `scale` times what steps take, and says this of a block. A plain round was seen."""
    verify = [Cost(rows, 0, scale * ms) for rows, ms in VERIFY.items()]
    prices = Prices(Costs([*verify, Cost(1, 1, scale * CHAIN), Cost(1, 2, scale * block)]))
    prices.learn(Work(prices.costs.verify(1)), VERIFY[1])
    return prices


def work_of(prices, drafting):
    return Work(prices.costs.verify(8) + drafting, drafted=True)


@pytest.mark.parametrize("scale", [0.8, 1.3])
def test_four_rounds_outvote_a_table_that_is_off_as_a_whole(scale):
    prices, takes = prices_of(scale), VERIFY[8] + BLOCK
    work = work_of(prices, prices.costs.block())
    for rounds in range(4):
        assert rounds == 3 or prices.seconds(work) == pytest.approx(scale * takes)
        prices.learn(work, takes)
    assert prices.seconds(work) == pytest.approx(takes)


def test_each_of_several_drafters_has_a_scale_of_its_own():
    """Those of a block that was measured twice as dear would make chains cheaper than they are."""
    prices, takes = prices_of(block=2 * BLOCK), VERIFY[8] + BLOCK
    block = work_of(prices, prices.costs.block())._replace(by=1)
    chain = work_of(prices, 6 * prices.costs.draft())._replace(by=0)
    for _ in range(20):
        prices.learn(block, takes)
    assert prices.seconds(block) == pytest.approx(takes)
    assert prices.seconds(chain) == pytest.approx(VERIFY[8] + 6 * CHAIN)
    assert prices.scales(True, 2) == pytest.approx([1.0, takes / (takes + BLOCK)])
    assert prices.scales(True, 1) == []  # A single one shares it with lookups.


def test_auto_finds_the_better_drafter_though_it_was_measured_dear():
    """A block that was measured at 3 ms and takes 1 is drafted all the same, and its rounds are priced as they are."""
    true, told = (Costs([*(Cost(rows, 0, ms) for rows, ms in VERIFY.items()), Cost(1, 1, CHAIN), Cost(1, 2, block)])
                  for block in (1.0, 3.0))  # fmt: skip
    auto, text = Auto(told, 16, hidden=True), Text(Trace("", "", [0] * 400, [(0, 0, 0)] * 400))
    drafters = [Drafter(text, Source.NEXTN, 8), Drafter(text, Source.DFLASH, 7)]
    source, rng, used = auto.source(text, drafters), random.Random(5), [0, 0]
    source.begin(400)
    begun, right = None, ((0.87, 0.85), (0.9, 0.88))
    for turn in range(60):
        source.draft(0, Limits(16, 200, begun=begun))
        choice, ahead, accepted = source.choice, begun is not None, 0
        took = true.verify(1 + choice.candidates) + (0 if ahead else 0.35)
        if choice.drafter is not None:
            took += drafters[choice.drafter].seconds(true, choice.drafts, 1)
            while accepted < choice.drafts and rng.random() < right[choice.drafter][accepted > 0]:
                accepted += 1
            used[choice.drafter] += turn >= 30
        begun, came = source.follows(), tuple(range(accepted + 1))
        source.learn(Round(choice.candidates, accepted, 0.0, 0.0, 0.0, came, ahead, not ahead, took))
    assert used[1] > 3 * used[0]
