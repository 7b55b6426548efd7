"""Computes the worked example of docs/speculation.md, so that the page says what the code does."""

import pytest
import replay
from checkout import ROOT
from machines import Fresh

from luce.native import Source
from luce.speculate.candidates import Offer, Steps
from luce.speculate.choose import MARGIN, Search, Terms, chains_of
from luce.speculate.drafting import Drafter
from luce.speculate.ledger import BET, Ledger
from luce.speculate.prices import Prices, Work

PAGE = " ".join((ROOT / "docs" / "speculation.md").read_text().split())
COSTS = replay.MACHINES["27b on an H200"]
CHAIN = [0.8**n for n in range(1, 9)]  # Each draft is right with 0.8, where those before it are.
STEPS = Steps(COSTS, [Drafter(Fresh(), Source.NEXTN, 8)], 1)


def rate(n):
    """Returns (tokens, price, tokens for each plain round's time) of a round of n drafts."""
    tokens, price = 1 + sum(CHAIN[:n]), STEPS.chains[0][n - 1] if n else STEPS.plain
    return tokens, price, tokens / price


@pytest.mark.parametrize("n", range(9))
def test_the_table_has_what_rounds_give_and_take(n):
    assert "| {} | {:.2f} | {:.3f} | {:.2f} |".format(n, *rate(n)) in PAGE


def test_the_formula_takes_the_line_that_the_page_names():
    search = Search(STEPS, Terms(1.0, STEPS.plain, 0.0, stake=9.0), MARGIN)
    found = search.tries_all([Offer(31, (), [CHAIN])], chains_of([Offer(31, (), [CHAIN])], STEPS))
    best = max(range(9), key=lambda n: rate(n)[2])
    assert found.rows == best and f"The formula takes {best} drafts" in PAGE


def test_the_ledger_ends_the_trials_that_the_page_counts():
    """Each round of the best chain is wrong, and the next one may lose half of what is left."""
    ledger, best = Ledger(256), max(range(9), key=lambda n: rate(n)[2])
    loss, stakes = Prices(COSTS).lost(Work(STEPS.chains[0][best - 1], drafted=True), 1, 1), []
    while (stake := BET * ledger.rest()) >= loss:
        stakes.append(stake)
        ledger.lost += loss
    lost = ledger.lost
    assert f"allows {ledger.rest() + lost:.2f} plain rounds" in PAGE
    assert f"the first may lose {stakes[0]:.2f}, the second {stakes[1]:.2f}" in PAGE
    assert f"each loses {loss:.3f}" in PAGE
    assert f"20 tokens may lose {Ledger(20).rest():.2f} plain rounds" in PAGE
    assert f"after {len(stakes)} such rounds, {lost:.2f} plain rounds are lost" in PAGE
