"""Trees of lists that are conditional on the token before (DFlash2's, DSpark's) are chosen by what the lists were worth
rank by rank: auto takes them where runners-up are right, and chains where they are not."""

from __future__ import annotations

from itertools import product
from math import prod

import listed
import pytest
from depth import deeper, deeper_but, examples
from hypothesis import given
from hypothesis import strategies as st
from listed import MACHINES, K, Listed, Machine, Spent, chain, spend, tree
from replay import auto_of

from luce.bench.acceptance import CLASSES, RANKS
from luce.native import Form, Source
from luce.speculate.candidates import Offer, Steps, trees
from luce.speculate.choose import Search, Terms
from luce.speculate.drafting import Drafter
from luce.speculate.estimates import Estimates

N = 256
DFLASH2 = CLASSES["dflash2"]
SELDOM = (0.3,) * 7  # The first choice is right in so many cases.
NEVER, OFTEN = (0.0,), (0.7, 0.15, 0.05)  # So are the second, the third .. where it is wrong.


def taken(
    chances: tuple[float, ...], ranks: tuple[float, ...], on: Machine, way: object, seeds: range, kept: int = K
) -> Spent:
    """Returns what several texts take one after the other: auto knows later ones from those before."""
    out = Spent()
    for seed in seeds:
        spend(Listed(chances, ranks, seed, kept), N, on, way, out)  # type: ignore[arg-type]
    return out


def auto(chances: tuple[float, ...], ranks: tuple[float, ...], on: Machine, n: int = 8, kept: int = K) -> Spent:
    return taken(chances, ranks, on, auto_of(on.costs), range(n), kept)


@pytest.mark.parametrize("name", deeper_but(MACHINES, "27b on an H200"))
@pytest.mark.parametrize("cls", ["code", *deeper("mixed"), "prose"])
def test_chains_are_chosen_where_runners_up_are_never_right(name: str, cls: str) -> None:
    on, chances = MACHINES[name], DFLASH2[cls]
    found, chained = auto(chances, NEVER, on), taken(chances, NEVER, on, chain(7), range(8))
    assert found.trees < 0.08 * found.rounds, "some are tried"
    assert found.rate > 0.98 * chained.rate
    assert chained.rate > taken(chances, NEVER, on, tree(12), range(8)).rate


@pytest.mark.parametrize(
    ("name", "chances"),
    [("27b on an H200", SELDOM),
     *deeper(("cheap rows", SELDOM), ("cheap rows", DFLASH2["prose"]), ("cheap rows", DFLASH2["mixed"]),
             ("27b on an H200", DFLASH2["prose"]))],
)  # fmt: skip
def test_trees_are_chosen_where_runners_up_are_often_right(name: str, chances: tuple[float, ...]) -> None:
    on = MACHINES[name]
    found, chained = auto(chances, OFTEN, on), taken(chances, OFTEN, on, chain(7), range(8))
    best = max(taken(chances, OFTEN, on, tree(budget), range(8)).rate for budget in (12, 22, 31))
    assert found.trees > 0.75 * found.rounds
    assert found.rate > 0.95 * best and found.rate > 1.1 * chained.rate


@pytest.mark.parametrize("name", deeper_but(MACHINES, "27b on an H200"))
@pytest.mark.parametrize("cls", ["mixed", *deeper("code", "prose")])
def test_auto_has_what_the_best_of_chains_and_trees_has(name: str, cls: str) -> None:
    """Runners-up are right as often as the small model's DFlash drafter has them."""
    on, chances = MACHINES[name], DFLASH2[cls]
    ways = (chain(3), chain(7), tree(12), tree(22), tree(31))
    best = max(taken(chances, RANKS, on, way, range(12)).rate for way in ways)
    assert auto(chances, RANKS, on, 12).rate > 0.95 * best


@pytest.mark.parametrize("name", MACHINES)
def test_trees_end_where_sampling_leaves_lists_one_candidate(name: str) -> None:
    """What is not in a list that was read was not right in it. Where a short list said nothing, trees of one path went
    on, each of which waits for the host."""
    on, chances = MACHINES[name], DFLASH2["prose"]
    found, chained = auto(chances, OFTEN, on, kept=1), taken(chances, OFTEN, on, chain(7), range(8), 1)
    assert found.trees < 0.08 * found.rounds
    assert found.rate > 0.97 * chained.rate


@examples(20)
@given(
    name=st.sampled_from(sorted(MACHINES)),
    before=st.lists(
        st.tuples(st.sampled_from([SELDOM, *DFLASH2.values()]), st.sampled_from([NEVER, OFTEN])), max_size=3
    ),
)
def test_a_hopeless_text_is_at_most_3_percent_slower_than_plain_whatever_came_before(
    name: str, before: list[tuple[tuple[float, ...], tuple[float, ...]]]
) -> None:
    on = MACHINES[name]
    known = auto_of(on.costs)
    for seed, (chances, ranks) in enumerate(before):
        spend(Listed(chances, ranks, seed), N, on, known, Spent())
    for seed in range(2):
        hopeless = spend(Listed((0.0,) * 7, NEVER, 9 + seed), N, on, known, Spent())
        assert hopeless.seconds <= 1.03 * N


# ---- what is expected of a tree


def drafter(n: int = 7) -> Drafter:
    return Drafter(Listed(SELDOM, NEVER, 0), Source.DFLASH, n, K, form=Form.CONDITIONAL)


def estimates_of(chances: tuple[float, ...], ranks: tuple[float, ...]) -> tuple[Estimates, Drafter]:
    """Returns what is known after many rounds of such lists."""
    known, by, text = Estimates(), drafter(len(chances)), Listed(chances, ranks, 3)
    for text.at in range(4000):
        right = next((d for d in range(len(chances)) if text.rank(d)), len(chances))
        known.drafted(by, len(chances), right, text.rank(right) if right < len(chances) else None)
    return known, by


def test_a_trees_nodes_are_the_best_paths_of_ranks() -> None:
    """Each is worth the product of its ranks' shares, and comes after the one above and the better ones beside it."""
    known, by = Estimates(), drafter(3)
    for depth, rank in ((0, 1), (0, 1), (1, 2), (0, 3), (2, None), (1, 1), (0, 20)):
        known.drafted(by, 3, depth, rank)
    chances = known.chain(by, 3)
    ranks = known._ranks(by)
    firsts = [chances[0], chances[1] / chances[0], chances[2] / chances[1]]
    shares = [[first, *((1 - first) * rank for rank in ranks)] for first in firsts]
    paths = [path for n in (1, 2, 3) for path in product(range(len(ranks) + 1), repeat=n)]
    worth = {path: prod(shares[d][rank] for d, rank in enumerate(path)) for path in paths}
    expected: list[tuple[int, ...]] = []
    while len(expected) < 20:
        met = {(), *expected}
        open_ = [p for p in paths if p not in met and p[:-1] in met and (p[-1] == 0 or (*p[:-1], p[-1] - 1) in met)]
        expected.append(max(open_, key=lambda p: worth[p]))
    found = known.tree(by, chances, 20)
    assert [depth for _, depth in found] == [len(path) for path in expected]
    assert [chance for chance, _ in found] == pytest.approx([worth[path] for path in expected])
    assert len(known.tree(by, chances[:1], 99)) == len(ranks) + 1 and known.tree(by, [], 9) == []


@pytest.mark.long
@pytest.mark.parametrize("ranks", [*deeper((NEVER,)), OFTEN, *deeper((RANKS,))])
def test_a_tree_gives_the_tokens_that_are_expected_of_it(ranks: tuple[float, ...]) -> None:
    chances = DFLASH2["prose"]
    known, by = estimates_of(chances, ranks)
    for budget in (3, 12, 31):
        nodes = known.tree(by, known.chain(by, 7), budget)
        text, right = Listed(chances, ranks, 5), 0
        for text.at in range(2000):
            lists = text.lists(max(depth for _, depth in nodes), K)
            tokens, parents = text.tree(text.at, lists, budget)
            right += listed.accepted(listed.Draft(tuple(tokens[1:]), tuple(parents)), text.at)
        assert right / 2000 == pytest.approx(sum(chance for chance, _ in nodes), rel=0.08)


def test_texts_that_share_a_round_take_the_best_nodes_of_all() -> None:
    """Each has a tree of its own, as deep as its nodes go; none has more than it may."""
    on = MACHINES["cheap rows"]
    sure, vague = estimates_of(DFLASH2["code"], NEVER), estimates_of(SELDOM, OFTEN)
    by = sure[1]
    offers = []
    for (known, _), most in ((sure, 31), (vague, 5)):
        nodes = known.tree(by, known.chain(by, 7), most)
        offers.append(Offer(most, (), [known.chain(by, 7)], tree=lambda *_, nodes=nodes: nodes))
    steps = Steps(on.costs, [by], 2)
    search = Search(steps, Terms(1.0, on.costs.verify(2), 0.0), 0.0)
    search.tries(trees(offers, 0, 7, steps))
    assert search.found is not None
    of_sure, of_vague = search.found.choices
    assert of_vague.candidates <= 5 and of_vague.leaves > 0 and of_vague.drafts < 4
    assert of_sure.drafts == 7 and of_sure.candidates > of_vague.candidates
    assert search.found.tokens == pytest.approx(
        2 + sum(sum(chance for chance, _ in offer.tree(0, 7)[: choice.candidates])
                for offer, choice in zip(offers, (of_sure, of_vague), strict=True)))  # fmt: skip
