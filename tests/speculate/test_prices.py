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


def test_rounds_that_wait_for_their_host_say_nothing_of_a_drafters_steps():
    """A round that waits for tokens too may be a little shorter than others, which wait for the host as well."""
    for device in (1.2, 0.0):  # In plain steps, of which the host takes two; and in a table without costs.
        prices, drafted = Prices(Costs([Cost(1, 0, 1.0)] if device else [])), Work(device, drafted=True, by=0)
        for work, seconds in ((Work(device and 1.0), 2.0), (drafted, 2.2), (drafted._replace(turns=1), 2.1)):
            for _ in range(8):
                prices.learn(work, seconds)
        assert prices.scales(True, 2) == [1.0, 1.0]
        assert prices.seconds(drafted) == pytest.approx(2.2)


def test_a_table_without_costs_prices_and_books_nothing():
    """Plain rounds are seen all the same."""
    for paced in (False, True):
        prices = Prices(Costs([]), paced)
        for work in (Work(0.0), Work(0.0, drafted=True), Work(0.0, turns=1)) * 20:
            prices.learn(work, 2.0)
            assert prices.lost(work, 1, 1) == pytest.approx(0.0)


def sources_of(sequences):
    """Returns the sources of texts that decode together on a device whose head is dear to feed."""
    verify = [Cost(rows, 0, ms) for rows, ms in VERIFY.items()]
    auto = Auto(Costs([*verify, Cost(1, 1, CHAIN), Cost(1, 4, 0.1), Cost(32, 4, 3.0)]), 16, hidden=True)
    texts = [Text(Trace("", "", [0] * 400, [(0, 0, 0)] * 400)) for _ in range(sequences)]
    return [auto.source(text, [Drafter(text, Source.NEXTN, 8)]) for text in texts]


def test_a_round_is_booked_anew_once_it_is_known_what_plain_ones_of_as_many_texts_take():
    """Texts learn from each other, so what one pays for is settled in its next round, whatever that is."""
    (source,) = sources_of(1)
    prices, ledger = source.auto.prices, source.ledger
    alone, shared = (Work(VERIFY[8], n, drafted=True) for n in (1, 2))
    plain = Work(VERIFY[1]), Work(prices.costs.verify(2), 2)
    prices.learn(alone._replace(turns=1), VERIFY[8] + 1.0)  # Rounds are observed.
    ledger.book(alone, 1, prices)
    ledger.book(shared, 1, prices)
    before = prices.lost(alone, 1, 1), prices.lost(shared, 1, 1)
    assert min(before) > 0 and ledger.lost == pytest.approx(sum(before))
    for n in (1, 2):
        for _ in range(8):
            assert not prices.settled(n)
            prices.learn(plain[n - 1], 2 * VERIFY[1])  # The host takes as long.
            ledger.book(plain[n - 1], 1, prices)
        assert prices.settled(n) and ledger.lost == pytest.approx(before[1] if n == 1 else 0.0)
    prices.learn(plain[0], VERIFY[1])
    assert prices.lost(alone, 1, 1) > 0 and ledger.lost == pytest.approx(0.0)


@pytest.mark.parametrize("sequences", [1, 2])
def test_texts_that_share_a_round_feed_the_head_whether_it_drafts_or_not(sequences):
    """What a text owes that decoded alone before is no part of what drafts cost."""
    sources = sources_of(sequences)
    limits = Limits(16, 200, sequences)
    for source in sources:
        source.unfed = 10
        source.propose(0, limits)
    sources[0].draft(0, limits)
    choices, work = [source.choice for source in sources], sources[0].work
    owed = source.auto.prices.costs.feed(10) if sequences == 1 else 0.0
    assert work.drafted and owed + source.auto.steps(source.drafters, sequences).of(choices) == work.device


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
        source.propose(0, limits := Limits(16, 200, begun=begun))
        source.draft(0, limits)
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
