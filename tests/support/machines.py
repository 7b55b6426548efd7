"""Machines by what their steps cost, and texts whose drafts are right by chance: what auto is tested on."""

from luce.native import Source
from luce.native.structs import Cost
from luce.planning.plan import AUTO_BUDGET, MAX_GAMMA
from luce.speculate.auto import Auto
from luce.speculate.drafting import Drafter, Limits
from luce.speculate.prices import Costs

OWED = AUTO_BUDGET + 1  # A sequence owes its head so many rows at most.


def machine(step, draft, feed=0.0):
    """Returns the costs of verify steps (ms) of 1, 2 .. rows, of a draft, and of a feed of a row: one of all
    rows that can be owed costs twice as much."""
    feeds = [Cost(1, 4, feed), Cost(OWED, 4, 2 * feed)]
    return Costs([Cost(rows, 0, ms) for rows, ms in enumerate(step, 1)] + [Cost(1, 1, draft), *feeds])


MACHINES = {
    "h200": machine([11.2 * r for r in (1, 1.06, 1.25, 1.48, 1.55, 1.7, 1.8, 1.9, 2.0)], 0.75),
    "h200 to come": machine([11.2 * (1.02 + 0.0075 * r) if r else 11.2 for r in range(9)], 0.35),
    "steps": machine([1, 1.1, 1.12, 1.5, 1.52, 1.9, 1.92, 2.3, 2.32], 0.05),
    "half price": machine([1 + 0.45 * r for r in range(9)], 0.05),
}
CPU = machine([1, 2.17, 2.8, 3.4, 4.3, 5.1, 5.9, 6.7, 7.5], 0.1)


class Fresh:
    """This is a text in which nothing repeats."""

    def lookup(self, anchor, most):
        return [], 0


def runner(costs, gamma=MAX_GAMMA, text=None, ranks=1, budget=AUTO_BUDGET):
    text = text or Fresh()
    return Auto(costs, budget).source(text, [Drafter(text, Source.NEXTN, gamma, ranks)])


def drafts(source, limit, sequences=1):
    """Returns how many it drafts."""
    if not limit:
        return 0
    source.propose(1, limits := Limits(limit, limit, sequences))
    return source.draft(1, limits).on_device


class Repeats:
    """This is a text of which a lookup knows what follows, right with a chance at its first token and another
    one at each that follows right ones."""

    def __init__(self, rng, first, later, fires=1.0, matched=9):
        self.random, self.first, self.later, self.fires, self.matched = rng, first, later, fires, matched
        self.right = 0  # So many tokens of the last proposal were right.

    def lookup(self, anchor, most):
        if self.random.random() >= self.fires or not most:
            self.right = 0
            return [], 0
        self.right = int(self.random.random() < self.first)
        while self.right and self.right < most and self.random.random() < self.later:
            self.right += 1
        return [1] * self.right + [0] * (most - self.right), self.matched  # Every right token is 1.


def line(*points, draft=0.1):
    return Costs([*(Cost(rows, 0, ms) for rows, ms in points), Cost(1, 1, draft)])


GPU = line((1, 1.0), (8, 1.07), (16, 1.2), (32, 1.5), (64, 2.4), draft=0.035)
BOX = line((1, 1.0), (2, 1.25), (4, 1.6), (8, 2.4), (16, 4.2), (32, 8.0), draft=0.1)
STEEP = line((1, 1.0), (2, 2.2), (4, 4.3), (64, 64.0), draft=0.5)


# They are in ms. The first are of an H200, where it was left alone and where its host was busy
# (bench/results/2026-11-23-rounds-h200.txt).
STEPS_27B = {1: 5.41, 2: 5.54, 4: 5.68, 8: 5.82, 9: 6.46, 16: 6.75, 32: 8.5}
