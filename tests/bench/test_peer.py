"""Runs bench/peer_llamacpp.py from end to end, with small programs in place of llama.cpp's, and its
arithmetic."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import llamacpp
import memory_share
import numpy as np
import peer_contexts
import peer_llamacpp
import pytest
from peer_llamacpp import (
    Configuration,
    Task,
    Turns,
    configurations,
    forced_length,
    luce_rows,
    ratios,
    server_row,
)
from peer_programs import PROGRAM, SERVER

from luce.bench import oracle_gemma4
from luce.bench.oracle_drafter import make_drafter
from luce.bench.oracle_model import SHAPES, Rule, make_oracle
from luce.bench.run import Case, Record, parse_modes
from luce.decode.stats import Tally
from luce.native import File

PLAIN, MTP2 = parse_modes("plain,mtp:2")

LLAMA_BENCH = """
print(json.dumps([
    {"n_prompt": int(option["-p"]), "n_gen": 0, "avg_ts": 100.0},
    {"n_prompt": 0, "n_gen": int(option["-n"]), "avg_ts": 20.0},
]))
"""
LLAMA_SERVER = """
print("loading ... " * 20000, file=sys.stderr, flush=True)  # more than a pipe holds
perm = json.loads((here / "perm.json").read_text())
drafts = int(option.get("--spec-draft-n-max", 0))

def answer(asked):  # every round takes 50 ms and a draft 5, and accepts one draft
    with (here / "calls").open("a") as calls:
        print(json.dumps(["asked", asked["n_predict"], asked["seed"]]), file=calls)
    tokens, n = asked["prompt"][-1:], asked["n_predict"]
    while len(tokens) <= n:
        tokens.append(perm[tokens[-1]])
    tokens[5] += "--spec-synth-len" not in option and drafts == 3  # one wrong token
    rounds = (n - 1) // 2 if drafts else n - 1
    ms = rounds * (50 + 5 * drafts)
    timings = {"predicted_n": n, "predicted_ms": ms, "predicted_per_second": 1000 * (n - 1) / ms}
    timings["prompt_per_second"] = 2.0 * len(asked["prompt"])
    if drafts:
        timings |= {"draft_n": drafts * rounds, "draft_n_accepted": n - 1 - rounds}
    return {"tokens": tokens[1:], "timings": timings}

serve()
"""


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("oracle") / "oracle-mini-0.8.gguf"
    make_oracle(path, "mini")
    return path


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Makes a folder with a llama-bench and a llama-server."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "perm.json").write_text(json.dumps(Rule(2048).perm.tolist()))
    for name, text in (("llama-bench", PROGRAM + LLAMA_BENCH), ("llama-server", SERVER + LLAMA_SERVER)):
        (folder / name).write_text(text.replace("{python}", sys.executable))
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, oracle: Path, programs: Path, device: str):
    def run(*options: str, model: Path = oracle) -> None:
        given = [str(model), "--bin", str(programs), "--device", device, "--threads", "1", "--n-gen", "21"]
        given += ["--n-prompt", "64", *options]
        monkeypatch.setattr(sys, "argv", ["peer_llamacpp.py", *given])
        peer_llamacpp.main()

    return run


@pytest.mark.long
def test_one_command_measures_both_sides(
    command, programs: Path, tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows"
    command("--rounds", "2", "--modes", "plain,mtp:2,mtp:3,auto", "--synthetic", "3.5,0.5",
            "--commit", "0123abc", "--save", str(rows))  # fmt: skip
    shown = capsys.readouterr()
    (path,) = rows.iterdir()
    result = json.loads(path.read_text())
    assert json.loads(shown.out) == result
    kind = "cpu" if device.startswith("cpu") else "gpu"
    assert path.name == f"{result['date'][:10]}-peer-oracle-mini-0.8-{kind}.json"
    assert result["commit"] == "0123abc" and "--synthetic 3.5,0.5" in result["command"]
    assert "Outside the timing windows: loading" in result["timing"]
    # A plain step does not read the NextN head.
    assert 0 < result["bytes_per_token"] < result["model"]["bytes"]

    assert [row["mode"] for row in result["luce"]] == ["plain", "mtp:2", "mtp:3", "auto"]
    for row in result["luce"]:
        assert (row["tokens"], row["wrong_tokens"]) == (42, 0)
    assert result["luce_prefill"]["n_prompt"] == 64 and result["luce_prefill"]["prefill_tok_per_s"] > 0

    bench, plain, two, two_forced, three, three_long, three_forced = result["llamacpp"]
    assert (bench["tok_per_s"], bench["prefill_tok_per_s"], bench["ms_per_round"]) == (20, 100, 50)
    assert (plain["tok_per_s"], plain["rounds"], plain["wrong_tokens"]) == (20, 40, 0)
    assert (two["name"], two["drafted"], two["accepted"]) == ("llama-server mtp:2", 40, 20)
    assert (two["ms_per_round"], two["mean_accepted_length"], two["acceptance"]) == (60, 2, 0.5)
    assert (two["wrong_tokens"], three["wrong_tokens"], three_forced["wrong_tokens"]) == (0, 2, None)
    forced = [(row["forced_length"], row["options"][3]) for row in (two_forced, three_long, three_forced)]
    assert forced == [(1.75, "2"), (3.5, "3"), (1.875, "3")]
    length = result["luce"][1]["mean_accepted_length"]
    assert two_forced["compared_with"].startswith(f"luce mtp:2, a round's time: {length} tokens a round")

    against = {row["llamacpp"]: row for row in result["ratios"]}
    luce = {row["mode"]: row for row in result["luce"]}
    found = against["llama-bench"]
    assert found["decode"] == pytest.approx(luce["plain"]["tok_per_s"] / 20, rel=1e-4)
    assert found["prefill"] == pytest.approx(result["luce_prefill"]["prefill_tok_per_s"] / 100, rel=1e-4)
    assert against["llama-server mtp:2"]["round"] == pytest.approx(
        60 / luce["mtp:2"]["ms_per_round"], rel=1e-4
    )
    assert against[two_forced["name"]]["decode"] is None

    lines = [line for line in shown.err.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(result["luce"]) + len(result["llamacpp"])
    assert len({line.count("|") for line in lines}) == 1
    assert "| llama-server mtp:2 | 33.3 [33.3 33.3] |  | 60.00 | 2.00 | 50% | 0 |" in shown.err


def test_the_programs_are_asked_for_the_same(command, programs: Path, device: str) -> None:
    command("--rounds", "2", "--modes", "plain,mtp:2", "--synthetic", "2.5")
    calls = [json.loads(line) for line in (programs / "calls").read_text().splitlines()]
    # There are a warm-up and the rounds.
    asked = [["asked", 21, 0]] + [["asked", 21, seed] for seed in range(2)]
    where = ["-dev", "none"] if device.startswith("cpu") else ["-dev", f"CUDA{device.partition(':')[2] or 0}"]
    bench = ["-p", "64", "-n", "21", "-t", "1"]
    names = [call[0] for call in calls]
    assert names == ["llama-bench"] * 2 + ["llama-server", "asked", "asked", "asked"] * 3
    for call in calls[:2]:
        assert call[3:9] == bench and call[call.index("-dev") :][:2] == where
    servers = [call for call in calls if call[0] == "llama-server"]
    draft = ["--spec-type", "draft-mtp", "--spec-draft-n-max", "2"]
    ends = [[], draft, [*draft, "--spec-synth-len", "2.5"]]
    assert [call[call.index("--no-webui") + 1 :] for call in servers] == ends
    assert all(call[call.index("-dev") :][:2] == where for call in servers)
    assert [call for call in calls if call[0] == "asked"] == asked * 3


def test_a_dflash_drafter_drafts_on_both_sides(
    command, programs: Path, oracle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """luce drafts blocks and trees, greedily and sampled; llama-server drafts blocks of the same file."""
    drafter = tmp_path / "drafter.gguf"
    make_drafter(drafter, SHAPES["mini"], Rule(2048))
    command("--rounds", "1", "--modes", "plain,dflash,dflash:5", "--draft", str(drafter),
            "--temp", "0,0.7", "--top-k", "20", "--save", str(tmp_path / "rows"))  # fmt: skip
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    (path,) = (tmp_path / "rows").iterdir()
    assert "-peer-dflash-oracle-mini-" in path.name
    assert "--draft drafter.gguf --temp 0,0.7 --top-k 20 --top-p 1" in result["command"]
    modes = ["plain T=0", "dflash T=0", "dflash:5 T=0", "plain T=0.7", "dflash T=0.7", "dflash:5 T=0.7"]
    assert [(row["mode"], row["wrong_tokens"]) for row in result["luce"]] == [(mode, 0) for mode in modes]
    assert all("dflash" in row["by_source"] for row in result["luce"] if "dflash" in row["mode"])
    block, tree = result["llamacpp"][2:]
    assert block["name"] == tree["name"] == "llama-server dflash" and block["drafted"] == 30
    assert block["options"] == [
        "-md", "drafter.gguf", "--spec-type", "draft-dflash", "--spec-draft-n-max", "3",
    ]  # fmt: skip
    assert [row["luce"] for row in result["ratios"][2:]] == ["dflash T=0", "dflash:5 T=0"]
    assert "| dflash:5 T=0 |" in shown.err
    speed = {row["mode"]: row["tok_per_s"] for row in result["luce"]}
    assert {row["mode"]: row["of_greedy"] for row in result["sampled"]} == {
        f"{mode} T=0.7": pytest.approx(speed[f"{mode} T=0.7"] / speed[f"{mode} T=0"], rel=1e-4)
        for mode in ("plain", "dflash", "dflash:5")
    }
    servers = [json.loads(line) for line in (programs / "calls").read_text().splitlines()]
    asked = [call[call.index("--no-webui") + 1 :] for call in servers if call[0] == "llama-server"]
    assert asked == [[], ["-md", str(drafter), *block["options"][2:]]], "it is loaded once for both modes"


@pytest.fixture
def assisted(programs: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Returns an oracle of Gemma 4's shape and its assistant. llama-server says what the oracle does."""
    model, assistant, shape = tmp_path / "oracle-gemma4-mini.gguf", tmp_path / "assistant.gguf", "gemma4-mini"
    rule = oracle_gemma4.make_oracle(model, shape)
    oracle_gemma4.make_assistant(assistant, model, shape)
    (programs / "perm.json").write_text(json.dumps(rule.perm.tolist()))
    return model, assistant


def test_an_assistant_drafts_on_both_sides(
    command, assisted: tuple[Path, Path], programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, assistant = assisted
    options = ("--rounds", "1", "--draft", str(assistant))
    command(*options, "--modes", "plain,mtp:1,mtp:2", "--save", str(tmp_path / "rows"), model=model)
    result = json.loads(capsys.readouterr().out)
    (path,) = (tmp_path / "rows").iterdir()
    assert "-peer-assistant-oracle-gemma4-mini-" in path.name
    assert "--draft assistant.gguf" in result["command"]
    assert [(row["mode"], row["wrong_tokens"]) for row in result["luce"]] == [("plain", 0), ("mtp:1", 0), ("mtp:2", 0)]
    assert all(row["drafted"] > row["accepted"] > 0 for row in result["luce"][1:])
    assert [row["luce"] for row in result["ratios"]] == ["plain", "plain", "mtp:1", "mtp:2"]
    servers = [json.loads(line) for line in (programs / "calls").read_text().splitlines()]
    asked = [call[call.index("--no-webui") + 1 :] for call in servers if call[0] == "llama-server"]
    drafts = ["-md", str(assistant), "--spec-type", "draft-mtp", "--spec-draft-n-max"]
    assert asked == [[], [*drafts, "1"], [*drafts, "2"]]
    for modes, said in (("plain", "no mode is mtp or auto"), ("plain,mtp:1,dflash", "a mode is dflash")):
        with pytest.raises(SystemExit) as ended:
            command(*options, "--modes", modes, model=model)
        assert ended.value.code == 2 and f"--draft names an assistant, and {said}" in capsys.readouterr().err


def test_long_prompts_are_read_by_both_sides(
    oracle: Path, programs: Path, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Each side decodes behind the same prompts, and luce in each of its modes."""
    given = [str(oracle), "--bin", str(programs), "--device", device, "--threads", "1", "--n-gen", "21"]
    given += ["--lengths", "300,40", "--modes", "plain,mtp:2", "--save", str(tmp_path / "rows")]
    monkeypatch.setattr(sys, "argv", ["peer_contexts.py", *given])
    peer_contexts.main()
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    (path,) = (tmp_path / "rows").iterdir()
    assert "-contexts-oracle-mini-0.8-" in path.name
    assert "--lengths 300,40 --modes plain,mtp:2" in result["command"]
    rows = result["contexts"]
    assert sorted((row["name"], row["context"]) for row in rows) == [
        (name, n) for name in ("llama-server", "luce mtp:2", "luce plain") for n in (40, 300)
    ]
    assert all(row["wrong_tokens"] == 0 and row["prefill_tok_per_s"] > 0 < row["tok_per_s"] for row in rows)
    peers = [row for row in rows if row["name"] == "llama-server"]
    assert [(row["prefill_tok_per_s"], row["tok_per_s"]) for row in peers] == [(600, 20), (80, 20)]
    calls = [json.loads(line) for line in (programs / "calls").read_text().splitlines()]
    assert [call[0] for call in calls] == ["llama-server", "asked", "asked", "asked"]
    assert int(calls[0][calls[0].index("-c") + 1]) >= 321
    assert "| llama-server | 300 | 600 | 20.0 | 0 |" in shown.err


def test_the_short_prompt_is_that_of_bench_oracle(oracle: Path) -> None:
    with File(oracle) as file:
        task = peer_llamacpp.task_of(file.kv, 64, 32, 10)
    assert task.short == np.random.default_rng(1).integers(0, Rule(2048).n_cycle, (1, 32))[0].tolist()
    assert len(task.long) == 64 and task.expected == Rule(2048).continuation(task.short[-1], 10)


@pytest.mark.parametrize(
    ("value", "drafts", "length"),
    [(0, 3, 1), (1, 3, 1), (0.5, 1, 1.5), (0.5, 3, 1.875), (0.8, 2, 2.44), (4, 3, 4), (4, 2, None)],
)
def test_entries_of_synthetic_are_lengths_or_chances(value: float, drafts: int, length: float | None) -> None:
    assert forced_length(value, drafts) == length


def test_a_server_is_loaded_once_for_each_configuration() -> None:
    modes = parse_modes("plain,mtp,mtp:1,mtp:2,mtp-tree:2:9,auto,dflash:22,dflash,dflash:8")
    drafter = Path("drafter.gguf")
    found = configurations(modes, [2.44, 0.8], (drafter, 2))
    assert found == [
        Configuration(PLAIN),
        *(Configuration(parse_modes("mtp:1")[0], forced, 1) for forced in (None, 1.8)),
        *(Configuration(MTP2, forced, 2) for forced in (None, 2.44)),
        *(Configuration(parse_modes("dflash")[0], forced, 2, drafter) for forced in (None, 2.44)),
    ]
    assert Configuration(PLAIN).options == []
    beside = [[mode.name for mode in one.beside(modes)] for one in found]
    trees = ["dflash:22", "dflash", "dflash:8"]
    assert beside == [["plain"], *[["mtp:1"]] * 2, *[["mtp:2", "mtp-tree:2:9"]] * 2, trees, trees]


def test_a_round_of_luce_is_all_of_its_decoding() -> None:
    def record(mode: str, decode_s: float, rounds: int, tokens: list[int]) -> Record:
        tally = Tally(mode, began=-0.1, first=0.0, rounds=[rounds], draft_s=0.01)
        return Record(Case("random", (5,)), mode, 0, tuple(tokens), "", tally.stats(decode_s, 3))

    turns = Turns("cpu", 2)
    turns.records = [record("plain", 0.3, 3, [6, 7, 8, 9]), record("plain", 0.9, 3, [6, 7, 8, 9])]
    turns.records += [record("mtp:2", 0.2, 2, [6, 7, 0, 9])]
    plain, mtp = luce_rows([PLAIN, MTP2], turns, Task([1], [5], 4, [6, 7, 8, 9]))
    assert (plain["ms_per_round"], plain["tok_per_s_spread"], plain["wrong_tokens"]) == (200, [3.3333, 10], 0)
    assert (mtp["ms_per_round"], mtp["tok_per_s"], mtp["wrong_tokens"]) == (100, 15, 1)
    (other,) = luce_rows([PLAIN], turns, Task([1], [5], 4, None))
    assert other["wrong_tokens"] is None


def test_a_row_sums_the_rounds() -> None:
    task = Task([1], [2], 4, [7, 8, 9, 10])
    timings = {"predicted_per_second": 30.0, "predicted_ms": 100.0, "draft_n": 4, "draft_n_accepted": 1}
    answers = [
        {"tokens": [7, 8, 9, 10], "timings": timings},
        {"tokens": [7, 8, 8], "timings": timings | {"predicted_per_second": 20.0, "predicted_ms": 60.0}},
    ]
    luce = {"mode": "mtp:2", "tok_per_s": 50.0, "ms_per_round": 30.0, "mean_accepted_length": 2.0}
    row = server_row(Configuration(MTP2), answers, task, luce)
    assert (row["tok_per_s"], row["tok_per_s_spread"], row["ms_per_round"]) == (25, [20, 30], 55)
    assert (row["rounds"], row["drafted"], row["accepted"], row["acceptance"]) == (3, 8, 2, 0.25)
    assert (row["mean_accepted_length"], row["wrong_tokens"]) == (1.6667, 2)
    assert ratios(row, luce) == {"llamacpp": "llama-server mtp:2", "luce": "mtp:2", "prefill": None,
                                 "decode": 2.0, "round": 1.8333}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--modes", "mtp:2"], "--modes needs plain"),
        (["--modes", "plain,fast"], "'fast' is not plain, mtp"),
        (["--modes", "plain", "--synthetic", "2"], "--synthetic needs an mtp:N"),
        (["--modes", "plain,dflash"], "modes of dflash need a drafter: --draft names it"),
        (["--modes", "plain,mtp:2", "--draft", "x.gguf"], "x.gguf"),
        (["--temp", "0.7"], "invalid temperatures value: '0.7'"),
        (["--synthetic", "4.5"], "rounds of 3 drafts accept 1 to 4 tokens"),
        (["--synthetic", "nan"], "rounds of 3 drafts accept 1 to 4 tokens"),
        (["--synthetic", "many"], "'many'"),
        (["--n-gen", "1"], "at least 2"),
        (["--rounds", "0"], "invalid count value: '0'"),
        (["--bin", "nowhere"], "there is no llama-bench in nowhere"),
        (["--build", "here"], "not allowed with argument"),
    ],
)
def test_what_cannot_be_measured_is_a_usage_error(
    command, options: list[str], message: str, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(*options)
    assert ended.value.code == 2 and message in capsys.readouterr().err
    assert not (programs / "calls").exists()


@pytest.mark.parametrize(("program", "said"), [("llama-bench", "no memory"), ("llama-server", "no memory")])
def test_a_program_that_fails_is_quoted_and_nothing_is_saved(
    command, programs: Path, tmp_path: Path, program: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (programs / program).write_text(f"#!/bin/sh\necho {said} >&2\nexit 3\n")
    with pytest.raises(SystemExit) as ended:
        command("--rounds", "1", "--modes", "plain", "--save", str(tmp_path / "rows"))
    assert ended.value.code == f"peer_llamacpp: error: {program} ended with 3: {said}\n"
    assert capsys.readouterr().out == "" and not (tmp_path / "rows").exists()


def test_a_row_that_cannot_be_written_is_one_line_after_the_figures(
    command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="^peer_llamacpp: error: .*Not a directory"):
        command("--rounds", "1", "--modes", "plain", "--save", str(tmp_path / "file" / "rows"))
    assert json.loads(capsys.readouterr().out)["llamacpp"]


def test_a_server_does_not_outlive_its_block(programs: Path, oracle: Path) -> None:
    with llamacpp.LlamaServer(programs / "llama-server", oracle, 2, "cpu") as server:
        process = server.process
        assert len(server.complete([5], 6)["tokens"]) == 6
        os.kill(process.pid, 0)
        # It is the server that chose the port, so no other program can have taken it before.
        assert server.command[server.command.index("--port") + 1] == "0"
        assert server.url == f"http://127.0.0.1:{llamacpp.port_of(process.pid)}"
    assert process.poll() is not None


def test_a_build_makes_all_programs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cmake here writes its arguments."""
    tools = tmp_path / "tools"
    tools.mkdir()
    cmake = tools / "cmake"
    cmake.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n')
    cmake.chmod(cmake.stat().st_mode | stat.S_IXUSR)
    fetch = tmp_path / "tools" / "fetch_ggml.py"
    fetch.write_text("import sys\nassert sys.argv[1:] == ['--peer']\nprint('/the/source')\n")
    monkeypatch.setattr(llamacpp, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    assert llamacpp.build(tmp_path / "peer", cuda=True) == tmp_path / "peer" / "bin"
    configure, make = (tmp_path / "calls").read_text().splitlines()
    assert "-S /the/source" in configure and "-DGGML_CUDA=ON" in configure
    assert make == f"--build {tmp_path}/peer --target llama-bench llama-server llama-batched-bench"
    cmake.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(llamacpp.PeerError, match="llama.cpp cannot be built"):
        llamacpp.build(tmp_path / "peer", cuda=False)


def test_shares_of_the_memory_are_of_the_weights_that_a_plain_step_reads() -> None:
    row = {
        "version": "1", "commit": "x", "device": "a GPU", "driver": "d", "date": "2026-11-21", "command": "c",
        "model": {"file": "a.gguf"}, "bytes_per_token": 8_000_000_000,
        "luce": [{"mode": "mtp:2", "tok_per_s": 900.0}, {"mode": "plain", "tok_per_s": 440.0}],
        "llamacpp": [{"name": "llama-bench", "tok_per_s": 220.0}, {"name": "llama-server", "tok_per_s": 1.0}],
    }  # fmt: skip
    speed = {"read_bytes_per_s": 4.4e12, "copy_bytes_per_s": 2e12, "nominal_bytes_per_s": 4.8e12}
    result = memory_share.measure([row, row | {"date": "2026-11-22"}], speed)
    assert result["date"] == "2026-11-22" and result["memory"] == speed
    file = result["files"][0]
    assert (file["luce"]["share_of_read_speed"], file["luce"]["share_of_nominal"]) == (0.8, 0.73333)
    assert file["llama.cpp"]["share_of_read_speed"] == 0.4 and file["luce"]["bytes_per_s"] == 3.52e12
    assert "| a.gguf | luce | 440.0 | 8.00 | 3.520 | 80.0% | 73.3% |" in memory_share.markdown(result)
    with pytest.raises(ValueError, match="several devices"):
        memory_share.measure([row, row | {"device": "another"}], speed)
