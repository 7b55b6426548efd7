"""The oracle's DFlash drafter drafts what its rule says, and is accepted as it was asked to be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import drive
import numpy as np
import pytest
from depth import deeper

from luce.bench.acceptance import Acceptance, acceptance, parse
from luce.bench.oracle_drafter import ACCEPT, BlockRule, amplitudes, drafter_of, make_drafter
from luce.bench.oracle_model import SHAPES, Oracle, Rule
from luce.files.probe import probe
from luce.native import File, Form, Library, Source

# It is wide enough for blocks of 16, and otherwise small.
SHAPE = replace(SHAPES["mini"], n_layer=5, n_embd=1024, n_ff=256, n_vocab=4096)
MINI = SHAPES["mini"]


def test_the_27bs_drafter_has_its_published_shape() -> None:
    c = drafter_of(SHAPES["27b"])
    assert (c.n_layer, c.n_head, c.n_head_kv, c.head_dim, c.n_ff, c.block_size) == (5, 32, 8, 128, 17408, 16)
    assert c.target_layer_ids == (1, 16, 31, 46, 61)
    assert sum(ACCEPT**depth for depth in range(16)) == pytest.approx(8.31, abs=0.01)


def test_a_dflash2_for_the_27b_has_its_published_shape() -> None:
    c = drafter_of(SHAPES["27b"], "dflash2")
    assert (c.n_layer, c.n_head, c.n_head_kv, c.head_dim, c.n_ff, c.block_size) == (5, 32, 8, 128, 17408, 8)
    assert (c.conv_kernel, c.conv_group, c.selector_rank, c.selector_top_k) == (2, 16, 256, 16)
    assert c.target_layer_ids == (5, 19, 33, 47, 61)
    assert (set(c.sliding), c.window, set(c.causal)) == ({True}, 2048, {False})


def test_a_dspark_for_the_27b_has_published_layers() -> None:
    """They are RadixArk's. Of 8 rows 7 draft, as speculators aligns them."""
    c = drafter_of(SHAPES["27b"], "dspark")
    assert (c.n_layer, c.n_head, c.n_head_kv, c.head_dim, c.n_ff) == (5, 40, 8, 128, 17408)
    assert (c.kind, c.markov_rank, c.target_layer_ids) == ("DSpark", 256, (4, 16, 28, 40, 52))
    assert (c.block_size, c.from_anchor, set(c.sliding), set(c.causal)) == (8, False, {False}, {False})


@pytest.mark.parametrize("shape", SHAPES)
def test_scores_tell_the_depths_of_a_block_apart(shape: str) -> None:
    c = drafter_of(SHAPES[shape])
    a, _ = amplitudes(c)
    theta = c.rope_base ** (-np.arange(c.head_dim // 2) / (c.head_dim // 2))
    scores = np.cos(np.outer(np.arange(c.block_size), theta)) @ a
    assert scores[0] >= 1 - 1e-6 and scores[1:].max() <= -1 + 1e-6


@pytest.mark.parametrize("accept", [0.0, 0.5, 1.0, ACCEPT])
def test_each_depth_has_its_share_of_right_drafts(accept: float) -> None:
    rule = Rule(MINI.n_vocab, seed=4)
    blocks = BlockRule(rule, 16, accept)
    tokens = right = np.arange(rule.n_cycle)
    for depth in range(1, 16):
        right = rule.perm[right]
        share = (blocks.drafts[depth, tokens] == right).mean()
        assert share == pytest.approx(accept, abs=1 / rule.n_cycle)
        assert (blocks.drafts[depth, tokens] < rule.n_cycle).all()


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "accept"),
    [*deeper((MINI, 0.5), (SHAPE, ACCEPT)), (SHAPE, parse("dflash2:mixed", "dflash", 15)),
     *deeper((SHAPE, parse("dspark:mixed", "dflash", 15)))],
    ids=["mini", "wide", "dflash2", "dspark"],
)  # fmt: skip
def test_blocks_are_accepted_as_the_rule_says(
    config: object, accept: float | Acceptance, native: Library, device: str, tmp_path: Path
) -> None:
    assert isinstance(config, type(MINI))
    rule = Rule(config.n_vocab, seed=3)
    Oracle(config, rule).write(tmp_path / "model.gguf", "test", lambda written: None)
    blocks = make_drafter(tmp_path / "drafter.gguf", config, rule, accept, threads=1)
    most = blocks.block_size - 1
    facts = probe(File(tmp_path / "drafter.gguf", native)).dflash
    assert facts is not None and (facts.kind.lower(), facts.drafts) == (acceptance(accept).kind or "dflash", most)
    model = drive.open_model(native, tmp_path / "model.gguf", device, drafter=tmp_path / "drafter.gguf")
    sequence = drive.open_sequence(model, n_ctx=1024, n_rows=blocks.block_size, blocks=1, kv_type="f16")
    for prompt in ([1, 2, 7], [int(t) for t in np.random.default_rng(1).integers(0, rule.n_cycle, 400)]):
        found = drive.decode(sequence, prompt, 150, most, source=Source.DFLASH)
        assert found.tokens[:150] == rule.continuation(prompt[-1], 150)
        anchor, accepted = found.tokens[0], []
        for n in found.accepted:
            accepted.append(blocks.accepted(anchor, most))
            anchor = rule.continuation(anchor, n + 1)[-1]
        assert found.accepted == accepted


@pytest.mark.long
def test_a_dsparks_trees_find_what_its_chains_miss(native: Library, device: str, tmp_path: Path) -> None:
    """Its lists are conditional on the token before, and the same behind each: the right token is in them as asked."""
    rule, accept = Rule(SHAPE.n_vocab, seed=3), parse("dspark:mixed", "dflash", 15)
    Oracle(SHAPE, rule).write(tmp_path / "model.gguf", "test", lambda written: None)
    blocks = make_drafter(tmp_path / "drafter.gguf", SHAPE, rule, accept, threads=1)
    model = drive.open_model(native, tmp_path / "model.gguf", device, drafter=tmp_path / "drafter.gguf")
    (drafter,) = model.info.drafters
    assert (drafter.form, drafter.n_list, drafter.n_draft) == (Form.CONDITIONAL, 16, 7)
    sequence, met = drive.open_sequence(model, n_ctx=64, n_rows=8, blocks=1, n_top=1, kv_type="f16"), set()
    for anchor in range(40):
        sequence.reset()
        drive.prefill(sequence, [1, 2, anchor])
        drive.draft(sequence, anchor, 7, Source.DFLASH)
        lists = sequence.lists(7, 16, Form.CONDITIONAL)
        for depth in range(7):
            right, rank = int(blocks.right[depth + 1, anchor]), int(blocks.rank[depth + 1, anchor])
            found = lists.at(depth)
            assert (found.index(right) if right in found else -1) == rank, (anchor, depth)
            met.add(rank)
    assert met >= {-1, 0, 1, 2}


@pytest.mark.parametrize("shape", ["mini", *deeper("mini-moe")])
def test_bench_oracle_makes_and_measures_it(shape: str, luce_: object, tmp_path: Path) -> None:
    assert callable(luce_)
    modes = "plain,dflash,mtp:3,lookup,auto"
    args = ["bench", "oracle", "--shape", shape, "--modes", modes, "-n", 40, "--rounds", 1]
    result = luce_(*args, "--cache", tmp_path, "--draft-accept", 1, "--json", "--quiet")
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    rows = {row["mode"]: row for row in printed["modes"]}
    assert len(rows) == 5 and {row["wrong_tokens"] for row in rows.values()} == {0}
    assert rows["mtp:3"]["accepted"] > 0
    assert rows["dflash"]["mean_accepted_length"] > 3.5  # Blocks are of size 4.
    assert (tmp_path / "luce" / f"oracle-{shape}-drafter-1.gguf").exists()
