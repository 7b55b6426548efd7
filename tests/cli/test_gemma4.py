"""Runs `luce generate` on tiny Gemma 4 models: what is drafted, and how a prompt is read, changes no token."""

import json

import pytest
import tiny_gemma4
from click.testing import CliRunner
from tiny_gemma4 import CASES

from luce.cli.commands import cli

MODELS = ("dense", "experts", "per-layer")
PROMPT = "hello there hello there"
LOOKUPS = (["--spec", "lookup"], ["--spec", "lookup", "--tree-budget", "7"], ["--spec", "auto"])
OTHERS = (["--threads", "1"], ["--ctx", "600"])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma4")
    return {
        name: tiny_gemma4.write(folder / f"{name}.gguf", CASES[name][0], tiny_gemma4.layout(*CASES[name]))
        for name in MODELS
    }


@pytest.fixture
def generate(native, files):
    """Gives generate(model, *flags), which returns what --json prints."""

    def run(model, *flags):
        args = ["generate", "--gguf", str(files[model]), "--device", "cpu", "--json", "-n", "150", *flags, PROMPT]
        result = CliRunner().invoke(cli, args, input="")
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    return run


@pytest.mark.parametrize("flags", [["--mtp-gguf"], ["--draft"], ["--spec", "dflash", "--draft"]])
def test_an_assistant_is_refused_by_what_it_is(native, files, tmp_path, flags):
    tensors = tiny_gemma4.layout(tiny_gemma4.ASSISTANT, tiny_gemma4.ASSISTANT_SEED)
    path = tiny_gemma4.write(tmp_path / "assistant.gguf", tiny_gemma4.ASSISTANT, tensors)
    result = CliRunner().invoke(cli, ["generate", "--gguf", str(files["dense"]), *flags, str(path), PROMPT], input="")
    assert result.exit_code == 1 and result.stdout == ""
    assert "is an assistant of Gemma 4, with which luce does not draft yet" in result.stderr
    assert result.stderr.count("\n") == 1 and "--mtp-gguf" not in result.stderr


@pytest.mark.parametrize("flags", [["--spec", "mtp"], ["--mtp-gamma", "2"]])
def test_no_head_is_asked_for_that_gemma_4_does_not_have(native, files, flags):
    result = CliRunner().invoke(cli, ["generate", "--gguf", str(files["dense"]), *flags, PROMPT], input="")
    assert result.exit_code == 1 and "Gemma 4 has none" in result.stderr
    assert "--mtp-gguf" not in result.stderr and "nextn_predict_layers" not in result.stderr


@pytest.mark.parametrize("sampling", [[], ["--temp", "0.5", "--top-k", "20", "--seed", "3"]])
@pytest.mark.parametrize("model", MODELS)
def test_drafts_change_no_token(generate, model, sampling):
    plain = generate(model, "--spec", "off", *sampling)
    assert len(set(plain["tokens"])) > 3 and plain["stats"]["drafted"] == 0
    for flags in (*LOOKUPS, *OTHERS):
        assert generate(model, *flags, *sampling)["tokens"] == plain["tokens"], flags


def test_what_followed_earlier_is_drafted(generate):
    assert generate("experts", "--spec", "lookup")["stats"]["accepted"] > 0
