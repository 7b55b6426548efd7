"""Compares the draft tree with all paths of ranks, the lists it is made of, and a chain's lists."""

import itertools

import drive
import numpy as np
import pytest
import tiny
from depth import examples
from hypothesis import given
from hypothesis import strategies as st
from op_run import op_run
from step_ctl import Seq, step_ctl

from luce.errors import ArgumentError, NumericError, StateError
from luce.native import Form, Lists, Source
from luce.native.structs import Sampling
from luce.speculate.drafting import Drafter, Round

ANCHOR = 99


def lists_of(native, ids, scores, comb=False):
    made = Lists(native, len(ids), len(ids[0]), Form.CHAIN if comb else Form.INDEPENDENT)
    made.ids[0 : len(ids) * len(ids[0])] = list(np.ravel(ids))
    made.scores[0 : len(ids) * len(ids[0])] = list(np.ravel(scores))
    return made


def paths_of(tokens, parents, ids):
    """Returns the path of ranks of each row but the first, which is the anchor."""
    paths = {0: ()}
    for row in range(1, len(tokens)):
        above = paths[parents[row]]
        paths[row] = (*above, ids[len(above)].index(tokens[row]))
    return [paths[row] for row in range(1, len(tokens))]


@st.composite
def drafts(draw, best=0.0):
    """Draws ids and scores (depth, k), of a few values so that there are ties; a list may end early."""
    depth, k = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ids = [list(range(10 * d, 10 * d + k)) for d in range(depth)]
    value = st.sampled_from([best, best - 0.5, best - 1.0, best - 1.5, best - 3.0, -np.inf])
    scores = [sorted(draw(st.lists(value, min_size=k, max_size=k)), reverse=True) for _ in range(depth)]
    return ids, scores


def allowed(path, scores, comb):
    return all(scores[d][r] > -np.inf for d, r in enumerate(path)) and not (comb and any(path[:-1]))


@pytest.mark.sanitize
@examples(200)
@given(drafts=drafts(), budget=st.integers(0, 63), comb=st.booleans())
def test_the_tree_is_the_best_of_all_paths(native, drafts, budget, comb):
    """Its nodes have the largest sums of log-probabilities, and ties go to the smaller path."""
    ids, scores = drafts
    depth, k = len(ids), len(ids[0])
    every = [path for n in range(1, depth + 1) for path in itertools.product(range(k), repeat=n)]
    total = lambda path: sum(scores[d][r] for d, r in enumerate(path))  # noqa: E731
    best = sorted(
        (path for path in every if allowed(path, scores, comb)), key=lambda path: (-total(path), path)
    )
    tokens, parents = native.tree(ANCHOR, lists_of(native, ids, scores, comb), budget)
    found = paths_of(tokens, parents, ids)
    assert found == sorted(best[:budget])  # They come depth first, and better siblings first.
    assert (tokens[0], parents[0]) == (ANCHOR, -1)


@pytest.mark.sanitize
@examples(100)
@given(drafts=drafts(best=1.5), budget=st.integers(0, 63))
def test_a_node_comes_after_its_parent_and_its_better_siblings(native, drafts, budget):
    """It does so also where scores hold noise and may be above 0."""
    ids, scores = drafts
    depth, k = len(ids), len(ids[0])
    chosen: list[tuple[int, ...]] = []
    while len(chosen) < budget:
        open_ = [(*above, 0) for above in [(), *chosen] if len(above) < depth]
        open_ += [(*path[:-1], path[-1] + 1) for path in chosen if path[-1] + 1 < k]
        open_ = [path for path in open_ if path not in chosen and allowed(path, scores, False)]
        if not open_:
            break
        chosen.append(min(open_, key=lambda path: (-sum(scores[d][r] for d, r in enumerate(path)), path)))
    tokens, parents = native.tree(ANCHOR, lists_of(native, ids, scores), budget)
    assert paths_of(tokens, parents, ids) == sorted(chosen)


# ---- lists behind each candidate of the depth above


@st.composite
def conditional(draw, best=0.0):
    """Draws ids (depth, k) and scores (depth, k, k), of a few values so that there are ties; depth 0 has one list."""
    depth, k = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    ids = [draw(st.permutations(range(10 * d, 10 * d + k))) for d in range(depth)]
    value = st.sampled_from([best, best - 0.5, best - 1.0, best - 1.5, best - 3.0, -np.inf])
    lists = st.lists(st.lists(value, min_size=k, max_size=k), min_size=k, max_size=k)
    return ids, np.array([draw(lists) for _ in range(depth)], np.float32)


def conditional_lists(native, ids, scores):
    depth, k = len(ids), len(ids[0])
    made = Lists(native, depth, k, Form.CONDITIONAL)
    made.ids[0 : depth * k] = list(np.ravel(ids))
    made.scores[0 : depth * k * k] = [float(x) for x in np.ravel(scores)]
    return made


def order(ids, scores, path):
    """Returns the candidates behind a path of candidates that can be chosen, best first."""
    row = scores[len(path), path[-1] if path else 0]
    return sorted((c for c in range(len(row)) if row[c] > -np.inf), key=lambda c: (-row[c], ids[len(path)][c]))


def paths(ids, scores, path=(), ranks=(), total=0.0):
    """Yields all paths of candidates: their sum of scores, their ranks, their tokens."""
    if ranks:
        yield total, ranks, tuple(ids[d][c] for d, c in enumerate(path))
    if len(path) < len(ids):
        for rank, c in enumerate(order(ids, scores, path)):
            score = float(scores[len(path), path[-1] if path else 0, c])
            yield from paths(ids, scores, (*path, c), (*ranks, rank), total + score)


def words_of(tokens, parents):
    return [tuple(tokens[r] for r in drive.root_path(parents, row))[1:] for row in range(1, len(tokens))]


@pytest.mark.sanitize
@examples(200)
@given(drafts=conditional(), budget=st.integers(0, 63))
def test_a_tree_of_conditional_lists_is_the_best_of_all_paths(native, drafts, budget):
    """Its nodes have the largest sums of log-probabilities, each behind what it follows, with children under every
    rank. Ties go to the smaller path of ranks."""
    ids, scores = drafts
    best = sorted(paths(ids, scores), key=lambda path: (-path[0], path[1]))[:budget]
    tokens, parents = native.tree(ANCHOR, conditional_lists(native, ids, scores), budget)
    assert words_of(tokens, parents) == [word for _, _, word in sorted(best, key=lambda path: path[1])]
    assert (tokens[0], parents[0]) == (ANCHOR, -1)


@pytest.mark.sanitize
@examples(100)
@given(drafts=conditional(best=1.5), budget=st.integers(0, 63))
def test_a_node_of_conditional_lists_comes_after_its_parent_and_its_better_siblings(native, drafts, budget):
    """It does so also where scores hold noise and may be above 0."""
    ids, scores = drafts
    left, chosen = list(paths(ids, scores)), []
    while left and len(chosen) < budget:
        taken = {ranks for _, ranks, _ in chosen}
        open_ = [
            path for path in left
            if (len(path[1]) == 1 or path[1][:-1] in taken)
            and (path[1][-1] == 0 or (*path[1][:-1], path[1][-1] - 1) in taken)
        ]  # fmt: skip
        chosen.append(min(open_, key=lambda path: (-path[0], path[1])))
        left.remove(chosen[-1])
    tokens, parents = native.tree(ANCHOR, conditional_lists(native, ids, scores), budget)
    assert words_of(tokens, parents) == [word for _, _, word in sorted(chosen, key=lambda path: path[1])]


@pytest.mark.sanitize
def test_conditional_trees_at_their_ends(native):
    scores = np.full((2, 2, 2), -np.inf, np.float32)
    scores[0, 0], scores[1, 0], scores[1, 1] = [-1.0, -0.1], [-0.2, -2.0], [-5.0, -0.1]
    lists = conditional_lists(native, [[4, 5], [6, 7]], scores)
    assert native.tree(9, lists, 2) == ([9, 5, 7], [-1, 0, 1])
    assert native.tree(9, lists, 9) == ([9, 5, 7, 6, 4, 6, 7], [-1, 0, 1, 1, 0, 4, 4])
    assert [lists.at(0), lists.at(1)] == [[5, 4], [7, 6]]  # The second is behind 5.
    scores[1, 1, 0] = np.nan
    with pytest.raises(NumericError):
        native.tree(9, conditional_lists(native, [[4, 5], [6, 7]], scores), 9)
    with pytest.raises(ArgumentError, match="the lists have form 3, expected 0 to 2"):
        wrong = native.struct("luce_lists", ids=lists.ids, scores=lists.scores, depth=1, k=2, form=3)
        lists.struct = wrong
        native.tree(9, lists, 3)


def test_a_wrong_draft_shows_its_rank_behind_the_right_ones(native):
    class Listed:
        tree = native.tree

        def lists(self, depth, k, form):
            assert (depth, k, form) == (2, 2, Form.CONDITIONAL)
            scores = np.full((2, 2, 2), -np.inf, np.float32)
            scores[0, 0], scores[1, 0], scores[1, 1] = [-1.0, -0.1], [-0.2, -2.0], [-5.0, -0.1]
            return conditional_lists(native, [[4, 5], [6, 7]], scores)

    drafter = Drafter(Listed(), Source.DFLASH, 2, ranks=2, form=Form.CONDITIONAL)
    drafter.draft(ANCHOR, 2, 3).grow()
    for tokens, expected in (((5, 6), (2, 1, 1)), ((5, 8), (2, 1, 2)), ((4, 6), (2, 0, 1)), ((5, 7), (2, 2, None))):
        assert drafter.shown(Round(3, 1, 0.0, 0.0, 0.0, tokens), 2) == expected


def test_every_budget_of_a_block_is_spent(native):
    rng = np.random.default_rng(3)
    scores = np.sort(np.log(rng.random((15, 63), np.float32)))[:, ::-1]
    ids = [list(range(100 * d, 100 * d + 63)) for d in range(15)]
    for budget in range(1, 64):
        tokens, parents = native.tree(ANCHOR, lists_of(native, ids, scores), budget)
        assert len(tokens) == len(set(zip(tokens, parents, strict=True))) == budget + 1


@pytest.mark.sanitize
def test_trees_at_their_ends(native):
    lists = lists_of(native, [[1, 2]], [[-1.0, -2.0]])
    assert native.tree(5, lists, 0) == ([5], [-1])
    assert native.tree(5, lists, 9) == ([5, 1, 2], [-1, 0, 0])
    assert native.tree(5, lists_of(native, [[-1, 2]], [[-1.0, -2.0]]), 9) == ([5], [-1])
    with pytest.raises(ArgumentError, match="64 rows at most: an anchor and a tree of 64 are more"):
        native.tree(5, lists, 64)
    with pytest.raises(NumericError):
        native.tree(5, lists_of(native, [[1, 2]], [[np.nan, -2.0]]), 3)


# ---- lists


def topk(native, device, logits, k, keep):
    lists = np.full((max(keep) + 2, 2 * k), -5, np.int32)
    ctl = step_ctl(Seq(parents=[-1] * len(logits), keep=keep))
    width = 64 * (2 * k + 2)
    op_run(native, device, "topk", [logits, ctl, lists], [k], shape=(len(logits), width), dtype=np.int32)
    return lists[:, :k], lists[:, k:].view(np.float32), lists


@pytest.mark.parametrize("k", [1, 7, 63])
@pytest.mark.parametrize("n", [5, 64, 5000])
def test_lists_are_the_best_logits_in_order(native, device, k, n):
    rng = np.random.default_rng(n)
    logits = (np.round(rng.standard_normal((4, n)) * 8) / 8).astype(np.float32)  # There are ties.
    logits[2, 3:] = -np.inf
    ids, scores, raw = topk(native, device, logits, k, [2, 0, 3, -1])
    assert (raw[1] == -5).all() and (raw[4] == -5).all()  # These entries are nobody's.
    for row, at in enumerate([2, 0, 3]):
        order = [i for i in np.argsort(-logits[row], kind="stable")[:k] if logits[row, i] > -np.inf]
        assert ids[at].tolist() == [*order, *[-1] * (k - len(order))]
        exact = logits[row].astype(np.float64)
        exact = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
        assert np.abs(scores[at][: len(order)] - exact[order]).max() < 1e-5
        assert np.isneginf(scores[at][len(order) :]).all()


def test_lists_of_a_sequence_that_samples_hold_its_noise(native, device, tmp_path):
    """After the draft they have, of those that the filters keep, the largest sums of log-probability and
    noise, as luce_sample would choose them one after the other."""
    config = tiny.Config(n_nextn=1)
    path = tiny.write(tmp_path / "m.gguf", config, tiny.layout(config, 3))
    engine = drive.open_engine(drive.open_model(native, path, device, head=True), n_draft=2, n_top=63)
    sequence = engine.sequence()
    anchor = drive.start(sequence, [1, 2, 3])

    def listed(sampling):
        sequence.set_sampling(sampling)
        drive.draft(sequence, anchor, 2)
        made = sequence.lists(2, 63)
        return [
            (made.at(depth), list(made.scores[63 * depth : 63 * depth + 63]), sequence.drafted(2)[depth])
            for depth in range(2)
        ]

    ids, scores, _ = listed(Sampling())[0]
    logits = np.full(384, -1e30, np.float32)
    logits[ids] = scores
    for seed in range(4):
        sampling = Sampling(temperature=0.8, seed=seed)
        found, noisy, drafted = listed(sampling)[0]
        left, order = logits.copy(), []
        while len(order) < 20:
            order.append(native.sample(left, sampling, 4))  # It is of position 3 + 1.
            left[order[-1]] = -1e30
        assert drafted == order[0], "the draft is drawn with the noise"
        assert found[:20] == order
        assert noisy == sorted(noisy, reverse=True)
    kept, scores, drafted = listed(Sampling(temperature=0.8, top_k=5, seed=3))[0]
    assert set(kept) - {-1, drafted} <= set(ids[:5]) and len(set(kept) - {-1}) in (5, 6)
    assert np.isneginf(scores[6:]).all()
    tight = listed(Sampling(temperature=0.8, top_p=1e-6, seed=3))[0]
    assert set(tight[0]) - {-1, tight[2]} <= {ids[0]}


def test_the_lists_of_a_chain_begin_with_its_drafts(native, device, tmp_path):
    config = tiny.Config(n_nextn=1)
    path = tiny.write(tmp_path / "m.gguf", config, tiny.layout(config, 3))
    model = drive.open_model(native, path, device, head=True)
    engine = drive.open_engine(model, n_draft=5, n_top=6, n_sequences=2)
    a, b = engine.sequence(), engine.sequence()
    anchors = [drive.start(sequence, prompt) for sequence, prompt in ((a, [1, 2, 3]), (b, [9, 8]))]
    for sequence, anchor, n in zip((a, b), anchors, (5, 3), strict=True):
        drive.draft(sequence, anchor, n)
    for sequence, n in ((a, 5), (b, 3)):
        lists = sequence.lists(n, 6)
        assert [lists.at(depth)[0] for depth in range(n)] == sequence.drafted(n)
        for depth in range(n):
            scores = list(lists.scores[6 * depth : 6 * depth + 6])
            assert scores == sorted(scores, reverse=True) and sum(np.exp(scores)) < 1.0001
            assert len(set(lists.at(depth))) == 6
        assert a.lists(2, 1).at(1) == a.lists(2, 6).at(1)[:1]
    for depth, k, error in ((4, 6, ArgumentError), (3, 7, ArgumentError), (3, 0, ArgumentError)):
        with pytest.raises(error):
            b.lists(depth, k)
    drive.verify_draft(a, 5)
    assert a.lists(5, 6).at(0)[0] == a.drafted(1)[0]  # They hold until the timeline moves on.
    a.commit([0])
    with pytest.raises((ArgumentError, StateError)):
        a.lists(1, 1)
    for wrong in ({"n_top": 64, "n_draft": 1}, {"n_top": 1}):
        with pytest.raises(ArgumentError, match="n_top"):
            drive.open_engine(model, **wrong)


class Listing:
    """Stands in for a sequence whose head drafts 10, 20 .., with the tokens above each as the next best."""

    def __init__(self, native):
        self.tree, self.native = native.tree, native

    def lists(self, depth, k, form):
        ids = [[10 * at + i for i in range(k)] for at in range(1, depth + 1)]
        return lists_of(self.native, ids, [[0] * k] * depth)


@pytest.mark.parametrize("budget", [3, 20])
def test_a_wrong_draft_shows_a_rank_where_the_next_best_ones_were_read(native, budget):
    """A tree of any budget reads them all."""
    drafter = Drafter(Listing(native), Source.NEXTN, 4, ranks=8)
    drafter.draft(ANCHOR, 4, budget).grow()
    assert drafter.shown(Round(4, 1, 0.0, 0.0, 0.0, (10, 24)), 4) == (4, 1, 4)
    assert drafter.shown(Round(4, 1, 0.0, 0.0, 0.0, (10, 88)), 4) == (4, 1, 8)
