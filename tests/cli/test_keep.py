"""Reading a part of a prompt on the command line: the same tokens in every mode, a report of what was read, and one
clear line for what cannot be. The box scores for itself."""

from __future__ import annotations

import json

import pytest
import tiny
from checkout import ROOT
from command_line import one_line

from luce.data import BOX
from luce.files.tokenizer import Tokenizer
from luce.native import File

RUN = ("--device", "cpu", "--threads", "1")
MODES = [("--spec", "off"), ("--mtp-gamma", "3"), ("--spec", "dflash"), ("--spec", "lookup"), ()]
TEXT = (ROOT / "luce" / "decode" / "generation.py").read_text()[:2500]


@pytest.fixture(scope="module")
def tokenizer():
    with File(BOX) as file:
        yield Tokenizer(file.kv)


@pytest.fixture
def generate(luce_, tmp_path):
    (tmp_path / "prompt.txt").write_text(TEXT)

    def run(*words, keep="0.2", model=BOX, **how):
        kept = ("--prefill-keep", keep, "--prefill-model", model) if keep else ()
        return luce_("generate", "-f", tmp_path / "prompt.txt", *kept, *RUN, *words, **how)

    return run


def answer(result):
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_tokens_are_the_same_in_every_mode(generate):
    found = [answer(generate("--json", "-n", "24", *mode)) for mode in MODES]
    assert all(each["prefill"] == found[0]["prefill"] for each in found)
    assert all(each["tokens"] == found[0]["tokens"] for each in found)
    assert sum(each["stats"]["drafted"] for each in found) > 0


@pytest.mark.long
def test_sampled_tokens_are_the_same_in_every_mode(generate):
    how = ("--json", "-n", "24", "--temp", "1", "--seed", "3")
    found = [answer(generate(*how, *mode))["tokens"] for mode in MODES]
    assert all(each == found[0] for each in found)


def test_the_report_says_what_was_read(generate, tokenizer):
    found, whole = answer(generate("--json", "-n", "1")), len(tokenizer.encode(TEXT, add_bos=True))
    report = found["prefill"]
    assert report["model"] == "box.gguf" and report["keep"] == 0.2
    assert report["read"] == found["prompt_tokens"] == sum(end - first for first, end in report["spans"])
    assert report["read"] + report["left_out"] == whole
    assert 0 < report["read"] <= 0.2 * whole + 1
    assert report["spans"][0][0] == 0 and report["spans"][-1][1] == whole


def test_the_summary_says_what_was_left_out(generate):
    summary = generate("-n", "1", "--verbose").stderr
    assert ", left " in summary and " out (lossy)" in summary


@pytest.mark.long
def test_a_share_of_one_reads_all_with_the_tokens_of_a_whole_prompt(generate):
    found, whole = (answer(generate("--json", "-n", "12", keep=keep)) for keep in ("1", None))
    assert found["tokens"] == whole["tokens"] and found["prefill"]["left_out"] == 0
    assert "prefill" not in whole


@pytest.mark.long
def test_only_what_is_read_has_to_fit_into_the_context(generate):
    assert "larger --ctx" in one_line(generate("--ctx", "400", "-n", "4", keep=None))
    assert len(answer(generate("--json", "--ctx", "400", "-n", "4"))["tokens"]) == 4
    assert "larger --ctx" in one_line(generate("--ctx", "100", "-n", "4"))


def test_a_scorer_with_another_tokenizer_is_refused(generate, tmp_path):
    config = tiny.Config()
    path = tiny.write(tmp_path / "other.gguf", config, tiny.layout(config, seed=1))
    line = one_line(generate("-n", "4", model=path))
    assert "cannot score prompts of this model: key tokenizer.ggml.tokens has" in line


def test_a_chat_reads_parts(luce_):
    said = "\n".join(f"x{i} = {i}" for i in range(400)).replace("\n", "\\\n")
    how = ("--temp", "0", "-n", "4", "--prefill-keep", "0.2", "--prefill-model", BOX)
    result = luce_("chat", *RUN, *how, stdin=f"{said}\nand now?\n/quit\n")
    assert result.exit_code == 0, result.stderr
