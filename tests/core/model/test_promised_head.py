"""Files whose keys and tensors disagree on their NextN blocks: the tensors decide."""

from __future__ import annotations

import json
from dataclasses import replace

import drive
import pytest
import tiny

from luce.errors import FileError, UnsupportedError
from luce.files.probe import probe
from luce.native import File
from luce.planning.plan import Auto, Mtp, Options, plan, trunk_layers

CONFIG = tiny.Config(n_layer=4, n_nextn=1)
TRUNK = replace(CONFIG, n_nextn=0)
PROMPT = [5, 6, 7, 8]
HEAD_KEY = "qwen35.nextn_predict_layers"


def write(tmp_path, tensors, blocks, nextn, of=CONFIG, name="odd"):
    """Writes tensors of `of` in a file whose keys have so many blocks, of these so many NextN."""
    keys = replace(of, n_layer=blocks - nextn, n_nextn=nextn)
    return tiny.write(tmp_path / f"{name}.gguf", keys, tensors)


def without_head(of=CONFIG):
    return {name: x for name, x in tiny.layout(of, 1).items() if not name.startswith(f"blk.{of.n_layer}.")}


def tokens_of(native, path, drafts=0):
    model = drive.open_model(native, path, head=bool(drafts))
    sequence = drive.open_sequence(model, n_ctx=64, n_draft=drafts)
    return drive.decode(sequence, PROMPT, 12, drafts).tokens, model.info


def facts_of(native, path):
    with File(path, native) as file:
        return probe(file)


# block_count and nextn_predict_layers, of a file that has four blocks of a trunk and no head.
@pytest.mark.parametrize("blocks, nextn, named", [(5, 1, "blk.4 is not in the file"),
                                                   (6, 2, "blk.4 and blk.5 are not in the file"),
                                                   (4, 1, "blk.3 is no head: without nextn.*")])  # fmt: skip
@pytest.mark.parametrize("of", [CONFIG, tiny.with_experts(CONFIG)], ids=["dense", "experts"])
def test_a_head_that_is_only_promised_is_left_out(native, tmp_path, of, blocks, nextn, named):
    path = write(tmp_path, without_head(of), blocks, nextn, of)
    right = tiny.write(tmp_path / "right.gguf", replace(of, n_nextn=0), without_head(of))
    (tokens, info), (expected, _) = tokens_of(native, path), tokens_of(native, right)
    assert tokens == expected and (info.n_layer, info.n_nextn) == (4, 0)
    facts, wanted = facts_of(native, path), facts_of(native, right)
    assert (facts.kind, facts.supported) == ("model", True)
    assert (facts.block_count, facts.nextn_predict_layers, trunk_layers(facts)) == (4, 0, 4)
    assert facts.active_parameters == wanted.active_parameters
    assert facts.bytes_per_token == wanted.bytes_per_token
    (said,) = facts.warnings
    assert f".nextn_predict_layers is {nextn}" in said and named in said
    assert facts.as_json()["notes"] == [said] and not wanted.warnings


def test_a_file_that_lacks_one_of_two_heads_has_the_other(native, tmp_path):
    path = write(tmp_path, tiny.layout(CONFIG, 1), 6, 2)
    right = tiny.write(tmp_path / "right.gguf", CONFIG, tiny.layout(CONFIG, 1))
    (tokens, info), (expected, _) = tokens_of(native, path, 2), tokens_of(native, right, 2)
    assert tokens == expected and (info.n_layer, info.n_nextn) == (4, 1)
    facts = facts_of(native, path)
    assert (facts.block_count, facts.nextn_predict_layers) == (5, 1) and "blk.5" in facts.warnings[0]


@pytest.mark.parametrize("blocks", [4, 5])
def test_a_head_that_no_key_mentions_is_one(native, tmp_path, blocks):
    path = write(tmp_path, tiny.layout(CONFIG, 1), blocks, 0)
    right = tiny.write(tmp_path / "right.gguf", CONFIG, tiny.layout(CONFIG, 1))
    (tokens, info), (expected, _) = tokens_of(native, path, 2), tokens_of(native, right, 2)
    assert tokens == expected and (info.n_layer, info.n_nextn, info.has_head) == (4, 1, 1)
    facts = facts_of(native, path)
    assert (facts.block_count, facts.nextn_predict_layers, facts.warnings) == (5, 1, [])
    assert any("blk.4 is taken for a NextN head" in note and HEAD_KEY in note for note in facts.notes)
    chosen = plan(facts, Options(spec="mtp"))
    assert isinstance(chosen.draft, Mtp) and chosen.draft.head == "embedded"


@pytest.mark.parametrize("blocks, nextn", [(8, 0), (8, 1), (3, 0), (3, 1)])
def test_a_head_in_the_middle_is_refused(native, tmp_path, blocks, nextn):
    path = write(tmp_path, tiny.layout(CONFIG, 1), blocks, nextn)
    with pytest.raises(FileError, match=rf"block_count is {blocks} .*blk\.4 is a NextN block"):
        drive.open_model(native, path)


def test_part_of_a_head_is_no_head_that_is_missing(native, tmp_path):
    part = "blk.4.nextn.enorm.weight"
    tensors = without_head() | {part: tiny.layout(CONFIG, 1)[part]}
    with pytest.raises(FileError, match=r"blk\.4\.attn_norm\.weight is missing"):
        drive.open_model(native, write(tmp_path, tensors, 5, 1))


def test_its_plan_drafts_without_a_head(native, tmp_path):
    facts = facts_of(native, write(tmp_path, without_head(), 5, 1))
    chosen = plan(facts, Options())
    assert isinstance(chosen.draft, Auto) and (chosen.draft.head, chosen.draft.gamma) == (None, 0)
    with pytest.raises(UnsupportedError, match="lacks the NextN head that it promises") as raised:
        plan(facts, Options(spec="mtp"))
    assert raised.value.concerns == "nextn_head"
    with pytest.raises(UnsupportedError, match=f"the head's file holds no NextN head: .*{HEAD_KEY} is 1"):
        plan(facts, Options(spec="mtp"), facts)


# ---- the commands


@pytest.fixture
def lacking(tmp_path):
    return write(tmp_path, without_head(), 5, 1, name="lacking")


@pytest.fixture
def head(tmp_path):
    return tiny.write(tmp_path / "head.gguf", CONFIG, tiny.head_only(CONFIG, tiny.layout(CONFIG, 1)))


WARNING = "lacking.gguf: the file lacks the NextN head that it promises"


@pytest.mark.parametrize("flags", [(), ("--spec", "off"), ("--spec", "lookup"), ("--json",)])
def test_generate_warns_once_and_runs(luce_, lacking, flags):
    result = luce_("generate", "-m", lacking, "-n", "6", *flags, "def f(")
    assert result.exit_code == 0 and result.stdout
    assert result.stderr.count("Warning: ") == 1 and WARNING in result.stderr
    assert not luce_("generate", "-m", lacking, "-n", "6", "--quiet", *flags, "def f(").stderr


def test_a_head_of_another_file_does(luce_, lacking, head):
    words = ("generate", "-m", lacking, "-n", "12", "--json", "def f(")
    result = luce_(*words, "--mtp-gguf", head, "--spec", "mtp")
    assert result.exit_code == 0 and not result.stderr
    found = json.loads(result.stdout)
    assert found["stats"]["drafted"] > 0 and found["tokens"] == json.loads(luce_(*words).stdout)["tokens"]


def test_spec_mtp_says_that_the_head_is_missing(luce_, lacking):
    result = luce_("generate", "-m", lacking, "--spec", "mtp", "x")
    assert result.exit_code == 1 and "lacks the NextN head that it promises" in result.stderr
    assert "--mtp-gguf PATH names a file that has one" in result.stderr


def test_probe_has_a_note(luce_, lacking):
    result = luce_("probe-gguf", lacking)
    assert result.exit_code == 0 and "note            the file lacks the NextN head" in result.stdout
    found = json.loads(luce_("probe-gguf", "--json", lacking).stdout)
    assert found["supported"] and (found["block_count"], found["nextn_predict_layers"]) == (4, 0)


def test_chat_warns_once(luce_, lacking):
    result = luce_("chat", "-m", lacking, "--device", "cpu", "-n", "2", stdin="hello\nagain\n")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("Warning: ") == 1 and WARNING in result.stderr


@pytest.mark.long
def test_serve_warns_once(command, lacking):
    words = ("serve", "--gguf", lacking, "--port", "0", "--device", "cpu", "--ctx", "256")
    with command(*words, text=True) as process:
        said = []
        while not said or "luce serves" not in said[-1]:
            said.append(process.stderr.readline())
            assert said[-1], said
        process.terminate()
    assert sum("Warning: " in line for line in said) == 1 and any(WARNING in line for line in said)
