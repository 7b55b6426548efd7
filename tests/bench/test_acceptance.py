"""Drafts of an oracle model are right as often as was asked for, by depth, by rank and by class.

What is right is told by the cycle of tokens alone, and counted here: the rules are not asked for their own counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import prod, sqrt
from pathlib import Path

import drive
import gguf
import numpy as np
import peer_llamacpp
import pytest
import ref
from depth import deeper

from luce.bench.acceptance import CLASSES, MAX_RANKS, RANKS, Acceptance, acceptance, parse
from luce.bench.oracle_blocks import QType, noise_blocks, set_first
from luce.bench.oracle_drafter import BlockRule, make_drafter
from luce.bench.oracle_model import SHAPES, Oracle, Rule, make_oracle
from luce.native import File, Library, Source
from luce.native.structs import Form, Sampling

MINI = SHAPES["mini"]
# It falls and rises, is never and always right, and its last depth stands for the three after it.
UNEVEN = (0.74, 0.5, 0.9, 0.0, 1.0, 0.3)
RANKED = Acceptance((0.7, 0.4, 0.55), ((0.4, 0.2, 0.1), (0.5,), (0.2, 0.3, 0.1, 0.1, 0.05, 0.05, 0.05)))


def likely(hits: int, trials: int, chance: float) -> bool:
    """Says whether so many hits are within four standard deviations. By chance one of 16,000 is not."""
    return abs(hits - chance * trials) <= 4 * sqrt(chance * (1 - chance) * trials) + 1e-9


# ---- what is asked for


@pytest.mark.parametrize(
    ("kind", "name", "tokens"),
    [("mtp", "code", 4.9), ("mtp", "mixed", 3.3), ("mtp", "prose", 2.0),
     ("dflash", "code", 4.2), ("dflash", "mixed", 3.1), ("dflash", "prose", 2.1),
     ("dflash2", "code", 5.4), ("dflash2", "mixed", 3.9), ("dflash2", "prose", 2.5),
     ("dspark", "code", 5.4), ("dspark", "mixed", 3.9), ("dspark", "prose", 2.5)],
)  # fmt: skip
def test_a_class_has_the_tokens_a_round_that_are_reported_of_seven_drafts(
    kind: str, name: str, tokens: float
) -> None:
    chances = [*CLASSES[kind][name], *[CLASSES[kind][name][-1]] * 7][:7]
    assert round(1 + sum(prod(chances[:depth]) for depth in range(1, 8)), 1) == tokens
    assert Acceptance(CLASSES[kind][name]).tokens(7) == pytest.approx(tokens, abs=0.05)


def test_a_class_is_told_apart_by_the_kind_of_drafter() -> None:
    assert parse("mixed", "mtp", 8) == Acceptance((0.74, 0.72, 0.70, 0.69, 0.68), (), "mixed")
    of_blocks = (0.74, 0.70, 0.66, 0.63, 0.60, 0.58, 0.56)
    assert parse("mixed", "dflash", 15) == Acceptance(of_blocks, (RANKS,), "mixed")
    assert parse("dspark:prose", "dflash", 15).depths == (0.62, 0.60, 0.58, 0.57, 0.56, 0.55, 0.55)
    assert parse("dspark:prose", "dflash", 15).name == "dspark:prose"


def test_shares_by_depth_and_rank_are_parsed() -> None:
    assert parse(".74, .72,.70", "mtp", 8) == Acceptance((0.74, 0.72, 0.70))
    asked = parse("0.74/0.4/0.1,0.7", "dflash", 15)
    assert asked == Acceptance((0.74, 0.7), ((0.4, 0.1), ()))
    assert [asked.at(depth) for depth in (1, 2, 9)] == [0.74, 0.7, 0.7]
    assert [asked.ranks_at(depth) for depth in (1, 2, 9)] == [(0.4, 0.1), (), ()]


@pytest.mark.parametrize("text", ["0.8", "0.8,0.8", ".80"])
def test_one_chance_stays_one_number(text: str) -> None:
    asked = parse(text, "dflash", 15)
    assert (asked.constant, asked.as_json(), asked.slug) == (0.8, 0.8, "0.8")


def test_other_chances_make_other_files() -> None:
    asked = [parse(text, "dflash", 15) for text in ("mixed", "code", "dflash2:mixed", ".7,.6", ".7,.5", ".7/.1")]
    assert len({each.slug for each in asked}) == 6
    assert asked[0].slug.startswith("mixed-") and asked[2].slug.startswith("dflash2-mixed-")


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("fast", "mtp", "'fast' is no chance: give one from 0 to 1, several by depth (0.74,0.72,0.7), or a class:"),
        ("fast", "dflash", "or one of another kind of drafter, as dflash2:mixed"),
        (".7,,.6", "mtp", "'' is no chance"),
        (".7,1.5", "mtp", "'1.5' is not in the range 0 to 1"),
        ("-0.1", "mtp", "'-0.1' is not in the range 0 to 1"),
        ("nan", "mtp", "'nan' is not in the range 0 to 1"),
        ("inf", "dflash", "'inf' is not in the range 0 to 1"),
        (".1,.2,.3,.4,.5,.6,.7,.8,.9", "mtp", "has 9 depths: give at most 8"),
        (".74/.3", "mtp", "'.74/.3' has ranks, and a NextN head's drafts are a chain: give '.74'"),
        (".7/.6/.5", "dflash", "the others are right in 1.1: give shares whose sum is at most 1"),
        (".5" + "/.1" * (MAX_RANKS + 1), "dflash", "has 8 ranks after the first: give at most 7"),
        ("dflash2:mixed", "mtp", "'dflash2:mixed' is no chance"),
        ("mtp:mixed", "dflash", "'mtp:mixed' is no chance"),
        ("dflash3:mixed", "dflash", "'dflash3:mixed' is no chance"),
    ],
)  # fmt: skip
def test_what_is_no_acceptance_is_named_with_what_would_do(text: str, kind: str, said: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse(text, kind, 8)
    assert said in str(raised.value)


# ---- the NextN head, by depth


@pytest.mark.parametrize("kind", [QType.Q4_K, QType.Q6_K, QType.Q8_0])
@pytest.mark.parametrize("value", [1.3, 43.0, 190.0])
def test_the_first_weights_of_a_row_are_set_and_no_others(kind: QType, value: float) -> None:
    n, length = 32, gguf.GGML_QUANT_SIZES[kind][0]
    blocks = noise_blocks(kind, n * 512 // length, 1.0, 7).reshape(n, 512 // length, -1)
    before = gguf.quants.dequantize(blocks.reshape(-1, blocks.shape[-1]), kind).reshape(n, 512)
    chosen = np.random.default_rng(1).random((n, 64)) < 0.5
    set_first(blocks, kind, chosen, value)
    after = gguf.quants.dequantize(blocks.reshape(-1, blocks.shape[-1]), kind).reshape(n, 512)
    assert (after[:, 64:] == before[:, 64:]).all() and not after[:, :64][~chosen].any()
    assert after[:, :64][chosen] == pytest.approx(value, rel=0.07)
    assert len(np.unique(after[:, :64][chosen])) == 1


def test_a_value_that_a_type_does_not_hold_is_an_error() -> None:
    blocks = noise_blocks(QType.Q4_K, 1, 1.0, 7).reshape(1, 1, -1)
    with pytest.raises(ValueError, match="Q4_K does not hold 300"):
        set_first(blocks, QType.Q4_K, np.ones((1, 64), bool), 300)


@pytest.mark.parametrize("made", ["mixed", *deeper("mixed Q4_K", "Q6_K", "Q8_0")])
def test_every_token_counts_at_every_depth_of_the_head(made: str, tmp_path: Path) -> None:
    """The head's own product is done here for all tokens: of these, so many drafts are right."""
    kind, _, head = made.partition(" ")
    path = tmp_path / "x.gguf"
    rule = make_oracle(path, "mini", seed=3, accept=Acceptance(UNEVEN), kind=kind, draft_head=head or None)
    w, nextn = ref.read_gguf(str(path)), f"blk.{MINI.n_layer}.nextn."
    norm = lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True))  # noqa: E731
    tokens = np.arange(rule.n_cycle)
    hidden = norm(w["token_embd.weight"][tokens])
    for depth in range(1, 9):
        read = norm(w[nextn + "embed_tokens.weight"][tokens])
        hidden = norm(np.hstack([read, hidden]) @ w[nextn + "eh_proj.weight"].T)
        drafts = (hidden @ w[nextn + "shared_head_head.weight"].T).argmax(-1)
        right = drafts == rule.perm[tokens]
        assert right.sum() == round(UNEVEN[min(depth, 6) - 1] * rule.n_cycle), depth
        assert (right == rule.right(depth)[tokens]).all()
        tokens = rule.perm[tokens]


def test_the_target_follows_its_cycle_beside_the_slots(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    rule = make_oracle(path, "mini", seed=3, accept=Acceptance(UNEVEN))
    model = ref.Reference(MINI, ref.read_gguf(str(path)), np.float32)
    assert model.greedy([72, 101, 108, 2046], 32) == rule.continuation(2046, 32)


@pytest.mark.long
def test_acceptance_of_a_head_by_depth_is_what_was_asked(native: Library, device: str, tmp_path: Path) -> None:
    asked = (0.74, 0.5, 0.9, 0.6)
    rule = Rule(MINI.n_vocab, 3, Acceptance(asked))
    Oracle(MINI, rule).write(tmp_path / "model.gguf", "test", lambda written: None)
    model = drive.open_model(native, tmp_path / "model.gguf", device, head=True)
    sequence = drive.open_sequence(model, n_ctx=2048, n_draft=6, kv_type="f16")
    trials, hits = [0] * 6, [0] * 6
    for prompt in ([1, 2, 7], [44, 1900]):
        found = drive.decode(sequence, prompt, 900, 6)
        assert found.tokens == rule.continuation(prompt[-1], len(found.tokens))
        anchor = found.tokens[0]
        for n in found.accepted:
            at, expected = anchor, 0
            while expected < 6 and rule.right(expected + 1)[at]:
                at, expected = int(rule.perm[at]), expected + 1
            assert n == expected
            anchor = rule.continuation(anchor, n + 1)[-1]
            for depth in range(min(n + 1, 6)):
                trials[depth] += 1
                hits[depth] += depth < n
    assert trials[0] > 500
    for depth, (hit, trial) in enumerate(zip(hits, trials, strict=True)):
        assert likely(hit, trial, asked[min(depth, 3)]), (depth, hit, trial)


def test_a_constant_acceptance_has_the_file_it_had(tmp_path: Path) -> None:
    """Rows that were recorded name it, and its drafts are still those of exchanged rows."""
    paths = [tmp_path / name for name in ("number", "list", "depths")]
    for path, accept in zip(paths, (0.75, Acceptance((0.75, 0.75)), Acceptance((0.75, 0.7))), strict=True):
        make_oracle(path, "mini", seed=3, accept=accept)
    number, listed, depths = (path.read_bytes() for path in paths)
    assert number == listed != depths
    embedding, read = (ref.read_gguf(str(paths[0]))[name] for name in
                       ("token_embd.weight", f"blk.{MINI.n_layer}.nextn.embed_tokens.weight"))  # fmt: skip
    moved = (embedding != read).any(-1)[:-3]
    assert moved.sum() == round(0.25 * (MINI.n_vocab - 3))


def test_what_the_drafts_are_by_depth_is_not_told() -> None:
    with pytest.raises(ValueError, match="right"):
        Rule(2048, 3, Acceptance((0.7, 0.6))).draft(np.arange(3))


# ---- blocks, by depth and rank


def test_shares_by_depth_and_rank_are_counts_over_all_anchors() -> None:
    rule = Rule(MINI.n_vocab, seed=4)
    blocks = BlockRule(rule, 6, RANKED)
    anchors = right = np.arange(rule.n_cycle)
    for depth in range(1, 6):
        right = rule.perm[right]
        lists = blocks.lists(depth, anchors)
        assert all(len(set(row[row >= 0])) == (row >= 0).sum() >= MAX_RANKS + 1 for row in lists)
        assert lists.max() < rule.n_cycle and (lists[:, 0] == blocks.drafts[depth, anchors]).all()
        at = min(depth, 3) - 1
        counts = (lists == right[:, None]).sum(0)
        first = counts[0]
        assert abs(first - RANKED.depths[at] * rule.n_cycle) <= 1
        for rank in range(1, lists.shape[1]):
            share = RANKED.ranks[at][rank - 1] if rank <= len(RANKED.ranks[at]) else 0.0
            assert abs(counts[rank] - share * (rule.n_cycle - first)) <= 1, (depth, rank)


def test_depths_are_right_independently_of_each_other() -> None:
    rule = Rule(MINI.n_vocab, seed=4)
    blocks, anchors = BlockRule(rule, 6, RANKED), np.arange(rule.n_cycle)
    before, right = np.ones(rule.n_cycle, bool), anchors
    for depth in range(1, 6):
        right = rule.perm[right]
        hit = blocks.drafts[depth, anchors] == right
        assert likely(int((hit & before).sum()), int(before.sum()), RANKED.at(depth))
        before &= hit


@pytest.mark.parametrize("temperature", [1.0, *deeper(0.0)])
@pytest.mark.parametrize(
    "asked", [*deeper(RANKED), parse("mixed", "dflash", 15), *deeper(Acceptance((0.3, 0.0), ((0.6, 0.3),)))],
    ids=["asked", "mixed", "seldom"],
)  # fmt: skip
def test_lists_of_the_core_are_right_by_depth_and_rank(
    asked: Acceptance, temperature: float, native: Library, device: str, tmp_path: Path
) -> None:
    """Every fifth token is an anchor. Of the drafter's own candidates, the target's token is at the rank that the
    rule says, in their first choices at temperature 1 too, though others be right more often."""
    rule = Rule(MINI.n_vocab, seed=3)
    Oracle(MINI, rule).write(tmp_path / "model.gguf", "test", lambda written: None)
    blocks = make_drafter(tmp_path / "drafter.gguf", MINI, rule, asked, threads=1, temperature=temperature)
    most = blocks.block_size - 1
    model = drive.open_model(native, tmp_path / "model.gguf", device, drafter=tmp_path / "drafter.gguf")
    sequence = drive.open_sequence(model, n_ctx=512, n_rows=16, blocks=1, n_top=16, kv_type="f16")
    drive.start(sequence, [1, 2, 7])
    sequence.set_sampling(Sampling(temperature=temperature, seed=5))
    ranks = Counts(most)
    for anchor in range(0, rule.n_cycle, 5):
        drive.draft(sequence, anchor, most, Source.DFLASH)
        first, lists = sequence.drafted(most), sequence.lists(most, 12, form=Form.INDEPENDENT)
        for depth, token in enumerate(rule.continuation(anchor, most), start=1):
            listed = lists.at(depth - 1)
            assert listed[0] == first[depth - 1]
            ranks.add(depth, listed.index(token) if token in listed else -1)
            if not temperature:
                n = 1 + len(asked.ranks_at(depth))
                assert listed[:n] == blocks.lists(depth, np.array([anchor]))[0, :n].tolist()
    for depth in range(1, most + 1):
        ranks.check(depth, asked, ranked=not temperature)


class Counts:
    """The ranks of the target's tokens by depth."""

    def __init__(self, most: int):
        self.found: list[list[int]] = [[] for _ in range(most + 1)]

    def add(self, depth: int, rank: int) -> None:
        self.found[depth].append(rank)

    def check(self, depth: int, asked: Acceptance, ranked: bool) -> None:
        """Sampled, noise reorders what is behind the first choice, so that only that one counts."""
        found = self.found[depth]
        wrong = [rank for rank in found if rank]
        assert likely(len(found) - len(wrong), len(found), asked.at(depth)), depth
        for rank, share in enumerate(asked.ranks_at(depth) if ranked else (), start=1):
            assert likely(wrong.count(rank), len(wrong), share), (depth, rank)


def test_trees_find_runners_up_as_deep_as_they_are_worth(native: Library, device: str, tmp_path: Path) -> None:
    """The tree's nodes have the highest chances, by the shares that were asked for. A chain of three has 0.56 of
    the sum of the best seven nodes' chances. Levels round scores a little."""
    asked = Acceptance((0.5, 0.5, 0.5), ((0.6, 0.2),))  # At a depth: 0.5, 0.3, 0.1.
    rule = Rule(MINI.n_vocab, seed=3)
    Oracle(MINI, rule).write(tmp_path / "model.gguf", "test", lambda written: None)
    blocks = make_drafter(tmp_path / "drafter.gguf", MINI, rule, asked, threads=1)
    model = drive.open_model(native, tmp_path / "model.gguf", device, drafter=tmp_path / "drafter.gguf")
    sequence = drive.open_sequence(model, n_ctx=512, n_rows=16, blocks=1, n_top=16, kv_type="f16")
    drive.start(sequence, [1, 2, 7])
    best = sum(best_chances([0.5, 0.3, 0.1], depth=3, budget=7))
    for anchor in range(0, 400, 25):
        drive.draft(sequence, anchor, 3, Source.DFLASH)
        tokens, parents = sequence.tree(anchor, sequence.lists(3, 12, form=Form.INDEPENDENT), 7)
        chances = {0: (1.0, 0)}
        for row in range(1, len(tokens)):
            above, depth = chances[parents[row]]
            rank = blocks.lists(depth + 1, np.array([anchor]))[0].tolist().index(tokens[row])
            chances[row] = above * [0.5, 0.3, 0.1, *[0.0] * 6][rank], depth + 1
        assert sum(chance for chance, depth in chances.values() if depth) > 0.95 * best


def best_chances(ranks: Sequence[float], depth: int, budget: int) -> list[float]:
    """Returns the chances of the best nodes of all trees so deep."""
    nodes, level = list[float](), [1.0]
    for _ in range(depth):
        level = [above * chance for above in level for chance in ranks]
        nodes += level
    return sorted(nodes, reverse=True)[:budget]


# ---- luce bench


def test_bench_says_the_class_and_the_chances_by_depth(luce_: Callable[..., object], tmp_path: Path) -> None:
    args = ["bench", "oracle", "--shape", "mini", "--accept", "mixed", "--modes", "plain,mtp:3,dflash", "-n", 24,
            "--rounds", 1, "--cache", tmp_path, "--quiet"]  # fmt: skip
    result = luce_(*args, "--json", "--save", tmp_path / "rows")
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    assert printed["accept"] == {"class": "mixed", "by_depth": [0.74, 0.72, 0.70, 0.69, 0.68]}
    assert printed["draft_accept"] == {
        "class": "mixed", "by_depth": [0.74, 0.70, 0.66, 0.63, 0.60, 0.58, 0.56], "by_rank": [list(RANKS)],
    }  # fmt: skip
    (row,) = (tmp_path / "rows").iterdir()
    assert json.loads(row.read_text())["accept"] == printed["accept"]
    assert {each["wrong_tokens"] for each in printed["modes"]} == {0}
    shown = luce_(*args, "--md")
    assert "NextN mixed 0.74 0.72 0.7 0.69 0.68" in shown.stdout and "DFlash mixed 0.74 0.7 0.66" in shown.stdout
    assert len(list((tmp_path / "luce").iterdir())) == 2, "files are made once"


@pytest.mark.long
def test_bench_takes_a_class_of_another_drafter_and_lists(luce_: Callable[..., object], tmp_path: Path) -> None:
    args = ["bench", "oracle", "--shape", "mini", "--modes", "plain,dflash", "-n", 16, "--rounds", 1, "--cache",
            tmp_path, "--quiet", "--json"]  # fmt: skip
    printed = json.loads(luce_(*args, "--accept", ".74,.72", "--draft-accept", "dflash2:mixed").stdout)
    assert printed["accept"] == {"class": None, "by_depth": [0.74, 0.72]}
    assert printed["draft_accept"]["class"] == "dflash2:mixed"
    assert printed["draft_accept"]["by_depth"] == [0.80, 0.78, 0.77, 0.76, 0.75, 0.74, 0.73]
    trees = ["plain,dflash,dflash:12" if arg == "plain,dflash" else arg for arg in args]
    printed = json.loads(luce_(*trees, "--draft-accept", "dspark:mixed").stdout)
    assert len(printed["modes"]) == 3
    assert printed["draft_accept"]["class"] == "dspark:mixed"
    assert {each["wrong_tokens"] for each in printed["modes"]} == {0}
    printed = json.loads(luce_(*args).stdout)
    assert (printed["accept"], printed["draft_accept"]) == (0.8, 0.9033), "a number stays one"
    assert "right by depth" not in printed["timing"]
    names = {path.name for path in (tmp_path / "luce").iterdir()}
    assert {"oracle-mini-0.8.gguf", "oracle-mini-drafter-0.9033.gguf"} < names


@pytest.mark.parametrize("option", ["--accept", "--draft-accept"])
def test_bench_names_a_bad_value(luce_: Callable[..., object], option: str) -> None:
    result = luce_("bench", "oracle", "--shape", "mini", "--modes", "dflash", option, ".7,much")
    assert result.exit_code == 2 and "'much' is no chance: give one from 0 to 1" in result.stderr


@pytest.mark.parametrize("accept", [0.75, Acceptance((0.7, 0.6), (), "mixed")])
def test_the_file_says_its_acceptance(accept: float | Acceptance, tmp_path: Path) -> None:
    make_oracle(tmp_path / "x.gguf", "mini", seed=3, accept=accept)
    with File(tmp_path / "x.gguf") as file:
        rule = peer_llamacpp.oracle_rule(file.kv)
    assert rule is not None and acceptance(rule.accept) == acceptance(accept) and rule.seed == 3
