"""The oracle model says what its rule says, byte for byte reproducibly."""

from __future__ import annotations

import hashlib
from pathlib import Path

import drive
import gguf
import numpy as np
import pytest
import ref
import tiny
from depth import deeper

from luce.bench import oracle_model
from luce.bench.oracle_model import SHAPES, QType, Rule
from luce.native import Library
from luce.planning.plan import part_of

CONTINUED = 64


@pytest.fixture(scope="module", params=["mini mixed", *deeper("mini-moe mixed", "mini Q6_K", "mini Q8_0")])
def made(request: pytest.FixtureRequest) -> tuple[str, str]:
    """These are the shape and the type of the matrices."""
    shape, kind = str(request.param).split()
    return shape, kind


@pytest.fixture(scope="module")
def shape(made: tuple[str, str]) -> str:
    return made[0]


@pytest.fixture(scope="module")
def mini(made: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rule]:
    path = tmp_path_factory.mktemp("oracle") / "x.gguf"
    return path, oracle_model.make_oracle(path, made[0], seed=3, accept=0.75, kind=made[1])


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


@pytest.mark.parametrize("coverage", [0.5, 0.9, 1.0])
def test_text_has_its_share_of_tokens_of_the_part(coverage: float) -> None:
    rule, part = Rule(2048, coverage=coverage), part_of(2048)
    n = round(part / coverage)
    walk = rule.continuation(5, 2 * n)
    assert walk[:n] == walk[n:] and len(set(walk[:n])) == n, "a text stays in its cycle"
    assert set(walk) >= set(range(part))
    thirds = [np.mean(third < part) for third in np.array_split(np.array(walk[:n]), 3)]
    assert thirds == pytest.approx([coverage] * 3, abs=0.06), "the others are spread evenly"
    assert sorted(rule.perm[: rule.n_cycle]) == list(range(rule.n_cycle))


@pytest.mark.long
def test_a_head_of_another_type_drafts_the_same(tmp_path: Path) -> None:
    types, values = [], []
    for name, kind in (("as", None), ("q4", "Q4_K")):
        oracle_model.make_oracle(tmp_path / name, "mini", seed=3, draft_head=kind)
        types.append({t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / name).tensors})
        values.append(ref.read_gguf(str(tmp_path / name)))
    changed = {name for name in types[0] if types[0][name] != types[1][name]}
    assert {types[1][name] for name in changed} == {"Q4_K"} and len(changed) == 1
    assert all((values[0][name] == values[1][name]).all() for name in values[0])


def test_same_seed_same_bytes(made: tuple[str, str], mini: tuple[Path, Rule], tmp_path: Path) -> None:
    again, other = tmp_path / "again.gguf", tmp_path / "other.gguf"
    oracle_model.make_oracle(again, made[0], seed=3, accept=0.75, kind=made[1])
    oracle_model.make_oracle(other, made[0], seed=4, accept=0.75, kind=made[1])
    digests = [hashlib.sha256(p.read_bytes()).hexdigest() for p in (mini[0], again, other)]
    assert digests[0] == digests[1] != digests[2]


def test_blocks_have_the_wanted_spread() -> None:
    for kind in (QType.Q4_K, QType.Q5_K, QType.Q6_K, QType.Q8_0):
        for std in (1.0, 0.0625, oracle_model.NOISE):
            blocks = oracle_model.noise_blocks(kind, 4096, std, 1, 2)
            values = gguf.quants.dequantize(blocks, kind)
            assert values.std() == pytest.approx(std, rel=0.02)
            assert abs(values.mean()) < 0.01 * std


def test_weights_are_what_the_rule_needs(shape: str, mini: tuple[Path, Rule]) -> None:
    path, rule = mini
    w = ref.read_gguf(str(path))
    c = SHAPES[shape]
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


def test_matrices_have_the_type_that_was_asked_for(made: tuple[str, str], mini: tuple[Path, Rule]) -> None:
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(mini[0]).tensors}
    matrices = {kind for name, kind in types.items() if tiny.quantizable(name)}
    assert matrices == ({"Q4_K", "Q5_K", "Q6_K"} if made[1] == "mixed" else {made[1]})
    assert {kind for name, kind in types.items() if not tiny.quantizable(name)} == {"F32"}


@pytest.mark.long
def test_a_random_router_chooses_all_experts(tmp_path: Path) -> None:
    """So steps over different tokens cost what different tokens cost."""
    c = SHAPES["mini-moe"]
    oracle_model.make_oracle(tmp_path / "x.gguf", "mini-moe")
    w = ref.read_gguf(str(tmp_path / "x.gguf"))
    x = w["token_embd.weight"] / w["token_embd.weight"].std(-1, keepdims=True)
    chosen = np.argsort(-x @ w["blk.1.ffn_gate_inp.weight"].T, -1)[:, : c.n_expert_used]
    counts = np.bincount(chosen.ravel(), minlength=c.n_expert)
    assert counts.min() > 0.8 * counts.mean() and counts.max() < 1.2 * counts.mean()


def test_the_35b_has_its_published_shape() -> None:
    c = SHAPES["35b-a3b"]
    shapes = {t.name: t.shape for t in oracle_model.tensors_of(c)}
    trunk = sum(np.prod(shape) for name, shape in shapes.items() if not name.startswith("blk.40."))
    assert trunk / 1e9 == pytest.approx(34.66, abs=0.01)  # llama.cpp counts Qwen3.5-35B-A3B so.
    assert [i for i in range(40) if f"blk.{i}.attn_q.weight" in shapes] == list(range(3, 40, 4))
    for block in (0, 40):
        assert shapes[f"blk.{block}.ffn_gate_exps.weight"] == (256, 512, 2048)
        assert shapes[f"blk.{block}.ffn_down_shexp.weight"] == (2048, 512)
    assert shapes["blk.3.attn_q.weight"] == (2 * 16 * 256, 2048)
    assert shapes["blk.3.attn_k.weight"] == (2 * 256, 2048)
    assert shapes["blk.0.attn_qkv.weight"] == ((16 + 16 + 32) * 128, 2048)


def test_reference_follows_the_cycle(shape: str, mini: tuple[Path, Rule]) -> None:
    path, rule = mini
    prompt = [72, 101, 108, 2046]
    model = ref.Reference(SHAPES[shape], ref.read_gguf(str(path)), np.float32)
    assert model.greedy(prompt, 32) == rule.continuation(prompt[-1], 32)


def test_no_partial_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("stop")

    monkeypatch.setattr(oracle_model, "noise_blocks", fail)
    with pytest.raises(RuntimeError, match="stop"):
        oracle_model.make_oracle(tmp_path / "x.gguf", "mini")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", *deeper("q4_0", "f32")])
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
