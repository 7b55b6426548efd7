"""Runs `luce generate` on tiny Gemma 4 models: what is drafted, and how a prompt is read, changes no token."""

import json
from dataclasses import replace

import pytest
import tiny_gemma4
from click.testing import CliRunner
from depth import deeper, deeper_but
from tiny_gemma4 import CASES

from luce.bench import oracle_gemma4
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
def generate(files, device):
    """Gives generate(model, *flags), which returns what --json prints."""

    def run(model, *flags):
        args = ["generate", "--gguf", str(files[model]), "--device", device, "--json", "-n", "150", *flags, PROMPT]
        result = CliRunner().invoke(cli, args, input="")
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    return run


@pytest.fixture(scope="module")
def assistants(tmp_path_factory):
    """An assistant for each model, whose weights are random: what it drafts is wrong."""
    folder, own = tmp_path_factory.mktemp("assistants"), tiny_gemma4.ASSISTANT
    fitting = {
        "dense": own,
        "experts": replace(own, window=9),
        "per-layer": tiny_gemma4.ORDERED,
    }
    made = {name: tiny_gemma4.layout(c, tiny_gemma4.ASSISTANT_SEED) for name, c in fitting.items()}
    return {name: str(tiny_gemma4.write(folder / f"{name}.gguf", c, made[name])) for name, c in fitting.items()}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """A model and its assistant, of whose drafts three of four are right."""
    folder = tmp_path_factory.mktemp("oracle")
    target, assistant = folder / "target.gguf", folder / "assistant.gguf"
    oracle_gemma4.make_oracle(target, "gemma4-mini", seed=3)
    oracle_gemma4.make_assistant(assistant, target, "gemma4-mini", seed=3, accept=0.75)
    return str(target), str(assistant)


def run(*args, code=0):
    result = CliRunner().invoke(cli, [str(arg) for arg in args], input="")
    assert result.exit_code == code, result.stderr
    return result.stdout if code == 0 else result.stderr


@pytest.mark.long
@pytest.mark.parametrize("sampling", [*deeper([]), ["--temp", "0.8", "--top-k", "20", "--seed", "3"]])
@pytest.mark.parametrize("model", deeper_but(MODELS, "experts"))
def test_an_assistant_changes_no_token(generate, assistants, model, sampling):
    path = assistants[model]
    plain = generate(model, "--spec", "off", *sampling)
    for flags in (["--draft"], ["--mtp-gamma", "4", "--draft"], ["--spec", "mtp", "--mtp-gamma", "1", "--mtp-gguf"]):
        found = generate(model, *sampling, *flags, path)
        assert found["tokens"] == plain["tokens"] and found["stats"]["mode"] == "mtp", flags
        assert found["stats"]["drafted"] > 0
    for flags in (["--spec", "auto", "--draft"], ["--mtp-gguf"], ["--spec", "auto", "--tree-budget", "9", "--draft"]):
        found = generate(model, *sampling, *flags, path)
        assert found["tokens"] == plain["tokens"] and found["stats"]["mode"] in ("auto", "plain"), flags


@pytest.mark.long
def test_an_assistant_alone_chains(oracle, device):
    target, assistant = oracle
    args = ["generate", "--gguf", target, "--device", device, "--json", "--raw", "-n", "80"]
    plain = json.loads(run(*args, "--spec", "off", "w1 w2"))
    found = json.loads(run(*args, "--draft", assistant, "w1 w2"))
    assert found["tokens"] == plain["tokens"]
    stats = found["stats"]
    draft = stats["plan"]["draft"]
    assert draft["value"] == {"mode": "mtp", "gamma": 2, "head": "assistant", "budget": None, "part": 0}
    assert draft["reason"] == "the assistant that was given, by default 2 a round"
    assert 0.4 * stats["drafted"] < stats["accepted"] < stats["drafted"]


def test_flags_that_contradict_an_assistant_are_refused(files, assistants):
    path, args = assistants["dense"], ["generate", "--gguf", files["dense"], PROMPT]
    said = run(*args, "--draft", path, "--mtp-gguf", path, code=2)
    assert "--draft names an assistant, and --mtp-gguf what drafts in its place: give one of them" in said
    said = run(*args, "--spec", "dflash", "--draft", path, code=2)
    assert "--draft names an assistant, which drafts chains, --spec dflash drafts with a DFlash drafter" in said
    assert "--spec off drafts nothing" in run(*args, "--spec", "off", "--draft", path, code=2)
    assert "--spec lookup drafts from the text" in run(*args, "--spec", "lookup", "--draft", path, code=2)
    assert "--tree-budget" in run(*args, "--tree-budget", "5", "--draft", path, code=2)


@pytest.mark.parametrize("flag", ["--draft", "--mtp-gguf"])
def test_an_assistant_of_another_model_is_one_error_that_names_both(files, assistants, flag):
    said = run("generate", "--gguf", files["per-layer"], "--device", "cpu", flag, assistants["dense"], PROMPT, code=1)
    assert said.count("\n") == 1 and str(files["per-layer"]) in said and assistants["dense"] in said
    assert "head_count_kv in sliding layers is 2, and the model has 1. Take the assistant that was made for" in said
    said = run("generate", "--device", "cpu", flag, assistants["dense"], PROMPT, code=1)
    assert said.count("\n") == 1 and "it is an assistant of Gemma 4, and the model is one of qwen35" in said


@pytest.mark.parametrize("flags", [["--spec", "mtp"], ["--mtp-gamma", "2"]])
def test_an_assistant_is_asked_for_where_none_is_given(files, flags):
    said = run("generate", "--gguf", files["dense"], *flags, PROMPT, code=1)
    assert "no assistant to draft with: Gemma 4's are files of their own; --draft PATH names one" in said
    assert "nextn_predict_layers" not in said


def test_an_assistant_is_no_model(assistants):
    said = run("generate", "--gguf", assistants["dense"], "--device", "cpu", PROMPT, code=1)
    assert "an assistant: it drafts for a Gemma 4 model of width 64, it does not generate alone" in said


def test_probe_counts_an_assistant(files, assistants):
    args = ["probe-gguf", files["dense"], "--device", "cpu", "--ctx", "600", "--json"]
    plain, both = (json.loads(run(*args, *more))["fits"] for more in ([], ["--draft", assistants["dense"]]))
    assert [way["mode"] for way in plain] == ["plain"] and [way["mode"] for way in both] == ["plain", "drafts"]
    more, less = both[1]["memory"], both[0]["memory"]
    assert more["weights"] > less["weights"] and more["state"] > less["state"]


@pytest.mark.long
@pytest.mark.parametrize("temp", ["0", *deeper("30")])
def test_benches_draft_with_an_assistant(oracle, assistants, temp, device):
    """Trees have the next best candidates beside each draft of the chain. Where noise decides, it is the same one."""
    target, assistant = oracle
    args = ["bench", "prompts", "--gguf", target, "--limit", "1", "--rounds", "1", "-n", "16", "--device", device]
    modes = "plain,mtp:3,mtp-tree:3:11,mtp-part:2:512,auto"
    found = json.loads(run(*args, "--temp", temp, "--modes", modes, "--draft", assistant, "--json"))
    assert [each["same_tokens"] for each in found["modes"]] == [1] * 5
    _, chains, trees, *_ = found["modes"]
    assert 0 < chains["accepted"] and chains["drafted"] < trees["drafted"]
    assert (chains["accepted"] == chains["drafted"]) == (temp == "30")
    said = run(*args, "--modes", "plain,dflash", "--draft", assistant, code=2)
    assert "--draft names an assistant, and no mode is mtp or auto" in said


@pytest.mark.parametrize("sampling", [[], *deeper(["--temp", "0.5", "--top-k", "20", "--seed", "3"])])
@pytest.mark.parametrize("model", deeper_but(MODELS, "per-layer"))
def test_drafts_change_no_token(generate, model, sampling):
    plain = generate(model, "--spec", "off", *sampling)
    assert len(set(plain["tokens"])) > 3 and plain["stats"]["drafted"] == 0
    for flags in (*LOOKUPS, *OTHERS):
        assert generate(model, *flags, *sampling)["tokens"] == plain["tokens"], flags


def test_what_followed_earlier_is_drafted(generate):
    assert generate("experts", "--spec", "lookup")["stats"]["accepted"] > 0
