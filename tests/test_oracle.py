"""The oracle model says what its rule says, byte for byte reproducibly."""

from __future__ import annotations

import hashlib
from pathlib import Path

import drive
import gguf
import numpy as np
import pytest
import ref

from luce._native import Library
from luce.bench import oracle_model
from luce.bench.oracle_model import SHAPES, QType, Rule

CONTINUED = 64


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rule]:
    path = tmp_path_factory.mktemp("oracle") / "mini.gguf"
    return path, oracle_model.make_oracle(path, "mini", seed=3, accept=0.75)


def test_perm_is_one_cycle_that_spares_control_tokens() -> None:
    rule = Rule(2048, seed=5)
    walk = rule.continuation(0, rule.n_cycle)
    assert sorted(walk) == list(range(rule.n_cycle))
    assert walk[-1] == 0
    assert (rule.perm[rule.n_cycle :] == rule.perm[0]).all()


@pytest.mark.parametrize("accept", [0.0, 0.5, 0.8, 1.0])
def test_share_of_right_drafts(accept: float) -> None:
    rule = Rule(2048, accept=accept)
    tokens = np.arange(rule.n_cycle)
    right = rule.draft(tokens) == rule.successor(tokens)
    assert right.mean() == pytest.approx(accept, abs=1 / rule.n_cycle)


def test_same_seed_same_bytes(mini: tuple[Path, Rule], tmp_path: Path) -> None:
    again, other = tmp_path / "again.gguf", tmp_path / "other.gguf"
    oracle_model.make_oracle(again, "mini", seed=3, accept=0.75)
    oracle_model.make_oracle(other, "mini", seed=4, accept=0.75)
    digests = [hashlib.sha256(p.read_bytes()).hexdigest() for p in (mini[0], again, other)]
    assert digests[0] == digests[1] != digests[2]


def test_blocks_have_the_wanted_spread() -> None:
    for kind in (QType.Q4_K, QType.Q5_K, QType.Q6_K):
        for std in (1.0, 0.0625, oracle_model.NOISE):
            blocks = oracle_model.noise_blocks(kind, 4096, std, 1, 2)
            values = gguf.quants.dequantize(blocks, kind)
            assert values.std() == pytest.approx(std, rel=0.02)
            assert abs(values.mean()) < 0.01 * std


def test_weights_are_what_the_rule_needs(mini: tuple[Path, Rule]) -> None:
    path, rule = mini
    w = ref.read_gguf(str(path))
    c = SHAPES["mini"]
    embedding, head = w["token_embd.weight"], w["output.weight"]
    tokens = np.arange(rule.n_cycle)
    assert (head[rule.perm[tokens]] == embedding[tokens]).all()
    assert not head[rule.n_cycle :].any()
    nextn = f"blk.{c.n_layer}.nextn."
    inputs = np.hstack([w[nextn + "embed_tokens.weight"], np.ones_like(embedding)])
    passed = inputs @ w[nextn + "eh_proj.weight"].T
    assert (passed == embedding[rule.swap]).all()
    drafts = (passed @ w[nextn + "shared_head_head.weight"].T).argmax(-1)
    assert (drafts == rule.draft(np.arange(rule.n_vocab))).all()


def test_reference_follows_the_cycle(mini: tuple[Path, Rule]) -> None:
    path, rule = mini
    prompt = [72, 101, 108, 2046]
    model = ref.Reference(SHAPES["mini"], ref.read_gguf(str(path)), np.float32)
    assert model.greedy(prompt, 32) == rule.continuation(prompt[-1], 32)


def test_no_partial_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("stop")

    monkeypatch.setattr(oracle_model, "noise_blocks", fail)
    with pytest.raises(RuntimeError, match="stop"):
        oracle_model.make_oracle(tmp_path / "x.gguf", "mini")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0", "f32"])
def test_core_follows_the_cycle(mini: tuple[Path, Rule], native: Library, device: str, kv_type: str) -> None:
    path, rule = mini
    model = drive.open_model(native, path, device)
    assert model.info.n_nextn == 1
    sequence = drive.open_sequence(model, n_ctx=512, kv_type=kv_type)
    prompt = [int(t) for t in np.random.default_rng(1).integers(0, rule.n_vocab, 100)]
    expected = rule.continuation(prompt[-1], CONTINUED)
    assert drive.greedy(sequence, prompt, CONTINUED) == expected
    chain = expected[-1:] + rule.continuation(expected[-1], 63)
    assert drive.verify(sequence, chain) == rule.successor(np.array(chain)).tolist()
