"""Prices of rounds, where the table of costs that they start from is off."""

import pytest

from luce.native.structs import Cost
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


def test_what_drafters_cost_beside_each_other_stays_as_it_was_measured():
    """All drafted rounds share a scale: those of a block that was measured twice as dear make chains cheaper than
    they are. So what a table says of one drafter has to be right."""
    prices, takes = prices_of(block=2 * BLOCK), VERIFY[8] + BLOCK
    block, chain = (work_of(prices, of) for of in (prices.costs.block(), 6 * prices.costs.draft()))
    for _ in range(20):
        prices.learn(block, takes)
    assert prices.seconds(block) == pytest.approx(takes)
    assert prices.seconds(chain) == pytest.approx((VERIFY[8] + 6 * CHAIN) * takes / (takes + BLOCK))
