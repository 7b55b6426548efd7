"""An oracle of Gemma 4's shape says what its rule says."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import gguf
import hf_checkpoint as hf
import numpy as np
import pytest
from click.testing import CliRunner
from depth import deeper
from gemma4_reference import AssistantReference, Reference
from tiny_gemma4 import PUBLISHED

from luce.bench import oracle_gemma4
from luce.bench.oracle_gemma4 import SHAPES
from luce.bench.oracle_model import Rule
from luce.cli.commands import cli
from luce.native import Library

TOKENS = np.array([5, 1999, 300, 301, 5, 7, 2044, 0] * 10)  # More than the windows of 64.


@pytest.fixture(scope="module", params=["gemma4-mini-moe mixed", *deeper("gemma4-mini mixed", "gemma4-mini Q8_0")])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Rule]:
    """Gives the shape, the file and its rule."""
    shape, kind = str(request.param).split()
    path = tmp_path_factory.mktemp("oracle") / f"{shape}.gguf"
    return shape, path, oracle_gemma4.make_oracle(path, shape, seed=3, kind=kind)


@pytest.fixture(scope="module")
def reference(made: tuple[str, Path, Rule]) -> Reference:
    shape, path, _ = made
    return Reference(SHAPES[shape], hf.tensors_of(path))


@pytest.mark.long
def test_the_model_says_what_the_rule_says(made: tuple[str, Path, Rule], reference: Reference) -> None:
    rule = made[2]
    logits = reference.logits(TOKENS)
    assert logits.argmax(-1).tolist() == rule.successor(TOKENS).tolist()
    best, second = np.sort(logits, -1)[:, -1], np.sort(logits, -1)[:, -2]
    assert (best < 30).all() and (best - second > 10).all(), "the cap bends logits, and sampling chooses the same"


def test_the_mixture_chooses_all_of_its_experts(reference: Reference) -> None:
    c = reference.c
    if not c.n_expert:
        return
    used = reference.routed(0, reference.embedded(np.arange(512))) > 0
    assert (used.sum(-1) == c.n_expert_used).all()
    assert used.mean(0).min() > 0.5 * c.n_expert_used / c.n_expert


def test_same_seed_same_bytes(made: tuple[str, Path, Rule], tmp_path: Path) -> None:
    shape, path, _ = made
    digests = []
    for seed in (3, 4):
        oracle_gemma4.make_oracle(tmp_path / "again.gguf", shape, seed=seed)
        digests.append(hashlib.sha256((tmp_path / "again.gguf").read_bytes()).hexdigest())
    same = hf.keys_of(path)["general.file_type"] == 15
    assert (digests[0] == hashlib.sha256(path.read_bytes()).hexdigest()) is same and digests[0] != digests[1]


def test_types_are_those_that_fit_the_rows(made: tuple[str, Path, Rule]) -> None:
    shape, path, _ = made
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    if shape == "gemma4-mini-moe":
        assert {types[f"blk.{i}.ffn_down.weight"] for i in range(6)} == {"Q8_0"}
        assert {types[f"blk.{i}.ffn_down_exps.weight"] for i in range(6)} == {"Q8_0"}
        assert types["blk.0.ffn_gate_up_exps.weight"] == types["blk.0.attn_q.weight"] == "Q4_K"
        assert types["output.weight"] == "Q6_K"


@pytest.mark.parametrize(("shape", "published"), [("gemma4-31b", "31B"), ("gemma4-26b-a4b", "26B-A4B")])
def test_shapes_are_the_published_ones(shape: str, published: str) -> None:
    """But for the output matrix, which is a tensor of its own."""
    own, other = vars(SHAPES[shape]), vars(PUBLISHED[published])
    assert {key for key in own if own[key] != other[key]} == {"tied"}


@pytest.mark.parametrize("accept", [0.5, *deeper(1.0)])
def test_an_assistant_drafts_what_its_rule_says(
    made: tuple[str, Path, Rule], reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accept: float
) -> None:
    shape, path, spoken = made
    rule = oracle_gemma4.make_assistant(tmp_path / "a.gguf", path, shape, seed=3, accept=accept)
    states = reference.states(TOKENS[:20])  # All texts below begin so.
    monkeypatch.setattr(reference, "states", lambda tokens: states)
    assistant = AssistantReference(oracle_gemma4.assistant_of(shape), hf.tensors_of(tmp_path / "a.gguf"), reference)
    right = 0
    for last in range(100, 108):
        drafts, logits = assistant.drafts(np.append(TOKENS[:20], last), 3)
        expected = [last]
        for _ in drafts:
            expected.append(int(rule.draft(np.array([expected[-1]]))[0]))
        assert drafts == expected[1:]
        assert (np.diff(np.sort(logits, -1)[:, -2:]) > 5).all()
        right += drafts[0] == spoken.continuation(last, 1)[0]
    assert right == 8 if accept == 1 else 0 < right < 8


def test_an_assistant_has_its_target_s_heads() -> None:
    own, other = oracle_gemma4.assistant_of("gemma4-31b"), PUBLISHED["31B-assistant"]
    assert own == other


@pytest.mark.parametrize(("options", "message"), [
    (["--accept", "0.7,0.6"], "--accept is by depth, and the assistant of gemma4-mini has one share: give a number"),
    (["--accept", "mixed"], "--accept is by depth"),
    (["--draft-head", "Q4_K"], "--draft-head is of other drafters, and gemma4-mini has an assistant"),
    (["--coverage", "0.9"], "--coverage is of other drafters"),
    (["--draft-accept", "0.9", "--modes", "mtp"], "--draft-accept is of other drafters"),
    (["--modes", "dflash"], "the mode dflash is of other drafters, and gemma4-mini has an assistant"),
    (["--modes", "mtp-part:2:1k"], "the mode mtp-part:2:1k is of other drafters"),
])  # fmt: skip
def test_options_of_other_drafters_are_refused(options: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["bench", "oracle", "--shape", "gemma4-mini", *options])
    assert result.exit_code == 2 and message in result.stderr


def test_an_oracle_drafts_with_its_assistant(native: Library, device: str, tmp_path: Path) -> None:
    args = ["bench", "oracle", "--shape", "gemma4-mini", "--accept", "0.5", "--modes", "plain,mtp:3", "--rounds", "1"]
    args += ["-n", "200", "--device", device, "--cache", str(tmp_path), "--json"]
    result = CliRunner().invoke(cli, args)
    assert result.exit_code == 0, result.stderr
    made = json.loads(result.stdout)
    assert made["accept"] == 0.5 and made["drafters"] == ["oracle-gemma4-mini-assistant-0.5.gguf"]
    plain, chains = made["modes"]
    assert plain["wrong_tokens"] == chains["wrong_tokens"] == 0
    shares = chains["acceptance_by_position"]
    assert all(abs(share - expected) < 0.15 for share, expected in zip(shares, (0.5, 0.25, 0.125), strict=True))
