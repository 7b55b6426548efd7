"""docs/gpus.md's tables of what is reckoned are bench/reckon.py's."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
RECKON = runpy.run_path(str(ROOT / "bench/reckon.py"))


def test_the_page_has_the_tables_as_they_are_reckoned() -> None:
    page = (ROOT / "docs/gpus.md").read_text()
    assert RECKON["written"](page) == page


def test_every_card_of_the_table_is_read() -> None:
    cards = RECKON["cards"]()
    listed = (ROOT / "tests/cuda/cards.h").read_text().split("CARDS[] = {")[1].split("};")[0].count("{")
    assert len(cards) == listed
    assert (cards["RTX 3090"].multiprocessors, cards["RTX 3090"].bandwidth) == (82, 936)
    assert (cards["H200"].multiprocessors, cards["H200"].memory) == (132, 141)


def test_a_faster_memory_alone_helps_a_step_that_reads() -> None:
    cards, dense, step = RECKON["cards"](), RECKON["models"]()[0], RECKON["step"]
    assert step(cards["RTX 5090"], dense, 1) < step(cards["RTX 4090"], dense, 1) < step(cards["RTX 3090"], dense, 1)
    by_hand = 16.2e9 / (0.9 * 936e9) * 1e3 + 2  # ms of bytes and of launches
    assert step(cards["RTX 3090"], dense, 1) == pytest.approx(by_hand, rel=0.01)
    assert step(cards["RTX 3090"], dense, 32) > step(cards["RTX 3090"], dense, 16)


def test_a_file_fits_where_the_table_of_what_fits_has_a_context() -> None:
    cards, fits = RECKON["cards"](), RECKON["fits"]
    smallest = {
        model.name: min(card.memory for card in cards.values() if card.memory <= 32 and fits(card, model))
        for model in RECKON["models"]()
    }
    assert smallest == {"27B, Q4_K": 24, "9B, Q8_0": 12, "9B, Q6_K": 12, "35B-A3B, Q4_K": 24}
