"""Runs `luce generate` with a NextN head: the flags over real files, what it prints, and the same tokens."""

import io
import json
from dataclasses import replace

import pytest
import tiny
from click.testing import CliRunner
from depth import deeper, deeper_but
from rich.console import Console

from luce.bench.oracle_model import make_oracle
from luce.cli.commands import cli
from luce.cli.terminal import Display, summary_line, timing_line
from luce.decode.events import Finished
from luce.decode.stats import Stats
from luce.planning.plan import DEFAULT_GAMMA, MAX_GAMMA

CONFIG = tiny.Config(n_nextn=1)
TRUNK = replace(CONFIG, n_nextn=0)
PROMPT = "def main("


def oracle(path):
    make_oracle(path, "mini", accept=0.75)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Makes a trunk, a trunk with a head, a head alone, one that does not fit, and no model at all."""
    folder, weights = tmp_path_factory.mktemp("mtp"), tiny.layout(CONFIG, 1)
    small = replace(CONFIG, n_embd=96)
    misfit = tiny.head_only(small, tiny.layout(small, 1))
    (folder / "text.gguf").write_text("not a GGUF")
    return {
        "trunk": tiny.write(folder / "trunk.gguf", TRUNK, tiny.layout(TRUNK, 1)),
        "combined": tiny.write(folder / "combined.gguf", CONFIG, weights),
        "head": tiny.write(folder / "head.gguf", CONFIG, tiny.head_only(CONFIG, weights)),
        "misfit": tiny.write(folder / "misfit.gguf", small, misfit),
        "oracle": oracle(folder / "oracle.gguf"),
        "text": folder / "text.gguf",
        "missing": folder / "missing.gguf",
    }


@pytest.fixture
def generate(native, files, device):
    """Gives generate(model, *flags), where names of files stand for their paths."""

    def run(model, *flags):
        args = ["generate", "--gguf", str(files[model]), PROMPT, "--device", device, "-n", "12"]
        args += [str(files.get(str(flag), flag)) for flag in flags]
        return CliRunner().invoke(cli, args, input="")

    return run


def stats_of(result):
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)["stats"]


@pytest.mark.parametrize("model", [*deeper("trunk"), "combined"])
@pytest.mark.parametrize("head", [None, *deeper("combined"), "head", *deeper("trunk")])
@pytest.mark.parametrize("spec", [None, "auto", "off", "mtp"])
def test_every_flag_of_speculation_against_every_file(generate, model, head, spec):
    tokens = json.loads(generate(model, "--json").stdout)["tokens"]
    for gamma in (None, 0, 3):
        flags = [
            *(["--spec", spec] if spec else []),
            *(["--mtp-gamma", gamma] if gamma is not None else []),
            *(["--mtp-gguf", head] if head else []),
        ]
        result = generate(model, *flags, "--json")
        has_head = head in ("combined", "head") or model == "combined"
        means = spec or ("auto" if gamma is None else "mtp")
        if spec == "off" and (gamma is not None or head):
            assert result.exit_code == 2 and "--spec off" in result.stderr, flags
        elif head == "trunk" or (means == "mtp" and not has_head and not (gamma == 0 and spec is None)):
            assert result.exit_code == 1 and "NextN head" in result.stderr, flags
            assert result.stdout == "" and len(result.stderr.splitlines()) == 1
        else:
            stats = stats_of(result)
            drafts = has_head and means != "off" and gamma != 0
            planned = stats["plan"]["draft"]["value"]
            assert stats["spec"] == means and stats["mode"] == planned["mode"], flags
            if means == "auto":  # What steps cost decides.
                assert planned["mode"] in ("auto", "plain")
                assert planned.get("gamma", 0) in (0, (MAX_GAMMA if gamma is None else gamma) * drafts), flags
            elif drafts:
                most, where = gamma or DEFAULT_GAMMA, "separate" if head else "embedded"
                expected = {"mode": "mtp", "gamma": most, "head": where, "budget": None, "part": 0}
                assert planned == expected, flags
                assert len(stats["rounds_by_drafts"]) <= 1 + most
            else:
                assert planned == {"mode": "plain"}, flags
            assert json.loads(result.stdout)["tokens"] == tokens, flags


@pytest.mark.parametrize("gamma", deeper_but(range(MAX_GAMMA + 1), 0, 3))
def test_any_gamma_prints_the_same_tokens(generate, gamma):
    for sampling in ((), ("--temp", "1.5", "--seed", 7), ("--temp", "2", "--top-k", "50")):
        asked = ("--json", *sampling)
        plain = json.loads(generate("combined", "--spec", "off", *asked).stdout)
        found = json.loads(generate("combined", "--mtp-gamma", gamma, *asked).stdout)
        assert (found["tokens"], found["text"], found["finish_reason"]) == (
            plain["tokens"], plain["text"], plain["finish_reason"],
        )  # fmt: skip


def test_the_object_tells_rounds_drafts_and_times(generate):
    stats = stats_of(generate("combined", "--mtp-gamma", "3", "--json"))
    assert stats["drafted"] == sum(n * rounds for n, rounds in enumerate(stats["rounds_by_drafts"])) > 0
    assert stats["rounds"] == sum(stats["rounds_by_drafts"])
    assert len(stats["acceptance_by_position"]) == 3
    assert stats["acceptance"] == stats["accepted"] / stats["drafted"]
    assert min(stats["draft_s"], stats["verify_s"], stats["commit_s"]) > 0
    assert stats["draft_s"] + stats["verify_s"] + stats["commit_s"] <= stats["decode_s"]


@pytest.mark.parametrize(
    "flags",
    [
        *(["--mtp-gamma", value] for value in ("-1", "9", "x", "1.5", "")),
        *(["--spec", value] for value in ("always", "", "none")),
    ],
    ids=" ".join,
)
def test_values_out_of_range_are_usage_errors(generate, flags):
    result = generate("combined", *flags)
    assert result.exit_code == 2 and flags[0] in result.stderr


SPEC_MATRIX = [  # Flags of drafting give words of the usage error, or what is missing, or None.
    (["--spec", "lookup"], None),
    (["--spec", "lookup", "--tree-budget", "63"], None),
    (["--spec", "auto", "--tree-budget", "5"], None),
    (["--tree-budget", "5"], None),
    (["--spec", "lookup", "--mtp-gamma", "2"], "--mtp-gamma"),
    (["--spec", "lookup", "--mtp-gguf", "head"], "--mtp-gguf"),
    (["--spec", "lookup", "--draft", "trunk"], "--draft"),
    (["--spec", "off", "--draft", "trunk"], "--draft"),
    (["--spec", "off", "--tree-budget", "5"], "--tree-budget"),
    (["--spec", "mtp", "--draft", "trunk"], "--draft"),
    (["--spec", "mtp", "--tree-budget", "5"], "--tree-budget"),
    (["--mtp-gamma", "2", "--tree-budget", "5"], "--tree-budget"),
    (["--mtp-gamma", "2", "--draft", "trunk"], "--draft"),
    (["--draft", "trunk", "--mtp-gguf", "head"], "--mtp-gguf"),
    (["--spec", "dflash", "--mtp-gguf", "head"], "--mtp-gguf"),
    (["--spec", "dflash", "--mtp-gamma", "2"], "--mtp-gamma"),
    (["--tree-budget", "0"], "--tree-budget"),
    (["--tree-budget", "64"], "--tree-budget"),
]


@pytest.mark.parametrize(("flags", "named"), SPEC_MATRIX, ids=lambda case: " ".join(case or ["works"]))
def test_flags_of_drafting_that_would_be_ignored_are_usage_errors(generate, flags, named):
    result = generate("combined", *flags)
    if named is None:
        assert result.exit_code == 0 and result.stdout == generate("combined", "--spec", "off").stdout
    else:
        assert result.exit_code == 2 and named in result.stderr


def test_a_drafter_that_was_not_given_is_named(generate):
    result = generate("combined", "--spec", "dflash")
    assert result.exit_code == 1 and "--draft" in result.stderr


@pytest.mark.parametrize("model", [*deeper("trunk"), "oracle"])
@pytest.mark.parametrize("sampling", deeper_but([(), ("--temp", "1.5", "--seed", 7)], ()))
def test_lookups_print_the_same_tokens(generate, model, sampling):
    """One model has no head, and one walks in circles."""
    asked = ("-n", 200, "--ctx", 256, "--json", *sampling)
    plain = json.loads(generate(model, "--spec", "off", *asked).stdout)
    for budget in (1, 15, 63):
        found = json.loads(generate(model, "--spec", "lookup", "--tree-budget", budget, *asked).stdout)
        assert found["tokens"] == plain["tokens"] and found["stats"]["mode"] == "lookup"


@pytest.mark.parametrize(("head", "named"), [("text", "text.gguf"), ("missing", "missing.gguf"),
                                             ("misfit", "96")])  # fmt: skip
def test_a_head_that_cannot_be_used_is_one_line(generate, head, named):
    for flags in ((), ("--mtp-gamma", "2"), ("--spec", "auto"), ("--spec", "mtp")):
        result = generate("combined", "--mtp-gguf", head, *flags)
        assert result.exit_code == 1 and result.stdout == ""
        assert len(result.stderr.splitlines()) == 1 and named in result.stderr


def test_a_head_alone_is_no_model(generate):
    for flags in ((), ("--mtp-gamma", "2")):
        result = generate("head", *flags)
        assert result.exit_code == 1 and "--mtp-gguf" in result.stderr


@pytest.mark.parametrize("budget", [0, 1, 2, 5])
@pytest.mark.parametrize("gamma", [1, 8])
def test_budgets_smaller_than_a_round(generate, budget, gamma):
    plain, found = (
        json.loads(generate("combined", *flags, "-n", budget, "--json").stdout)
        for flags in (("--spec", "off"), ("--mtp-gamma", gamma))
    )
    assert found["tokens"] == plain["tokens"] and len(found["tokens"]) <= budget


def finished(**changes):
    stats = Stats(mode="mtp", prefill_s=0.3, decode_s=2.0, tok_per_s=31.5, rounds=27, drafted=54, accepted=40,
                  acceptance=40 / 54, acceptance_by_position=[24 / 27, 16 / 27], mean_accepted_length=2.333,
                  drafted_by_position=[27, 27], accepted_by_position=[24, 16],
                  rounds_by_drafts=[0, 0, 27], draft_s=0.2, verify_s=1.75, commit_s=0.01)  # fmt: skip
    return Finished("length", "x", tuple(range(64)), 12, replace(stats, **changes), "max_tokens")


def test_the_summary_line():
    read, end = "read 12 tokens in 0.30 s; wrote 64 in 2.00 s, 31.5 a second; ", "cut at -n tokens"
    drafted = f"{read}40 of 54 drafted tokens were right; {end}"
    assert summary_line(finished()) == drafted
    plain = finished(mode="plain", drafted=0, accepted=0, acceptance=None, acceptance_by_position=[])
    assert summary_line(plain) == f"{read}nothing drafted; {end}"
    assert summary_line(replace(plain, reason="stop", truncated_by=None)).endswith("the text is complete")
    assert timing_line(finished()) == (
        "27 rounds of 2.33 tokens; drafts right by place: 89% 59%; drafting 0.20 s, verifying 1.75 s, "
        "committing 0.01 s"
    )
    assert "by place" not in timing_line(plain)
    out = io.StringIO()
    with Display(console=Console(file=out, force_terminal=True, width=200)) as display:
        display.summary(finished())
    assert drafted in out.getvalue()
