"""Runs `luce doctor`: what holds on the small model, what is found where something does not, and its report."""

from __future__ import annotations

import dataclasses
import json
import signal
from functools import partial

import make_doctor_answers
import numpy as np
import pytest
import tiny
import tiny_gemma4
from broken_core import Break, broken_core
from checkout import ROOT
from click.testing import CliRunner
from command_line import one_line
from depth import deeper

from luce import native as _native
from luce.cli.commands import cli as luce_cli
from luce.cli.terminal import print_verdict
from luce.data import BOX, BOX_DRAFTER
from luce.doctor import cli, kernels, machine, nvidia_smi, run, steps, tokens
from luce.doctor.checks import REPORT, Check, as_json, conclusion, judged, lines
from luce.doctor.run import Amount, Progress, cases_of, guarded, modes_of
from luce.doctor.tokens import Pace
from luce.errors import Cancelled, DeviceError, FileError, NumericError, OutOfMemory, UnsupportedError
from luce.native import engine as native_engine
from luce.native.structs import Device, EngineParams, GpuInfo
from luce.planning.opened import Files

FEW = Amount(tokens=10, prompts=1, seconds=600)  # Little is run, but all of it, however busy the machine is.
GROUPS = ["machine", "card", "bandwidth", "kernels", "rows", "drafts", "together", "prompts", "steps"]


@pytest.fixture
def few(monkeypatch):
    """Lets the command run little."""
    monkeypatch.setattr(cli, "Amount", lambda: FEW)


@pytest.fixture
def files():
    with Files(BOX, None, "cpu", BOX_DRAFTER) as opened:
        yield opened


@pytest.fixture
def engine(files):
    with files.load(run.plans_of(files, FEW)) as model:
        params = EngineParams(n_ctx=320, n_sequences=6, n_rows=64, n_threads=1)
        with _native.Engine(model, params) as opened:
            yield opened


def prompt_of(files):
    return list(cases_of(files, 1)[0].prompt)


def wrong_choices(monkeypatch, of):
    """Makes the last choice of an item of a step another token, where of(widths of the items, item)."""
    read = native_engine._Results.read

    def reading(self, status):
        found = read(self, status)
        for at, each in enumerate(found):
            if of(self.widths, at):
                each.choices[-1] ^= 1
        return found

    monkeypatch.setattr(native_engine._Results, "read", reading)


# ---- where all is well


@pytest.fixture(scope="module")
def printed(native):
    """Gives what --json prints of the small model."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cli, "Amount", lambda: FEW)
        result = CliRunner().invoke(luce_cli, ["doctor", "--device", "cpu", "--json"])
    assert result.exit_code == 0 and result.stderr == "", result.output
    return result.stdout


@pytest.mark.long
def test_all_holds_on_the_small_model_in_ten_lines(luce_, printed, monkeypatch):
    checks = [Check(**check) for check in json.loads(printed)["checks"]]
    monkeypatch.setattr(cli, "examine", lambda *_: iter(checks))
    result = luce_("doctor", "--device", "cpu")
    assert result.exit_code == 0, result.output
    told = result.stdout.splitlines()
    assert [line.split()[1] for line in told] == [*GROUPS, "verdict"]
    assert not [line for line in told if line.startswith("bad")]
    assert "0 of 14 runs with mtp:3, mtp:1, mtp-tree:3:15, dflash, dflash:15, lookup:15, auto differ" in result.stdout
    assert "bits are equal at widths 1 to 64" in result.stdout
    drafted = {f"{check.group}.{check.name}": check.figures.get("drafts", {}) for check in checks}
    for name in ("drafts.tokens", "together.tokens", "prompts.kept"):
        assert drafted[name]["dflash"][0] > 0, name
    assert "measured" in result.stdout and "reckoned" in result.stdout


@pytest.mark.long
def test_the_report_says_what_it_is_of_and_all_that_was_compared(printed):
    report = json.loads(printed)
    assert set(report) == {
        "date", "luce", "core", "commit", "python", "system", "device", "model", "seconds",
        "holds", "verdict", "checks",
    }  # fmt: skip
    assert report["holds"] is True and report["device"]["name"] == "cpu"
    assert report["model"]["file"] == "box.gguf" and report["model"]["drafter"] == "box-dflash.gguf"
    assert str(BOX.parent) not in printed, "a report tells nothing of the machine's folders"
    for check in report["checks"]:
        assert set(check) == {field.name for field in dataclasses.fields(Check)}
    of = {f"{check['group']}.{check['name']}": check for check in report["checks"]}
    assert list(dict.fromkeys(check["group"] for check in report["checks"])) == GROUPS
    for form in ("", "mixture "):
        assert max(of[f"kernels.{form}logits"]["figures"]["errors"].values()) < 5e-5
        assert of[f"kernels.{form}drafts"]["found"].startswith("0 of 48 ")
        assert of[f"kernels.{form}prompts"]["figures"]["error"] < 5e-5
    assert set(of["kernels.products"]["figures"]["types"]) == set(kernels.TYPES)
    assert of["rows.widths"]["figures"] == {"steps": 64, "differ": 0, "rows": 64, "differing": []}
    assert of["drafts.tokens"]["figures"]["tokens"] == 14 * FEW.tokens
    assert of["together.tokens"]["figures"]["runs"] == 8
    drafts = of["drafts.tokens"]["figures"]["drafts"]
    assert list(drafts) == of["drafts.tokens"]["figures"]["modes"] and drafts["mtp:3"][0] >= drafts["mtp:3"][1] > 0
    assert list(of["together.tokens"]["figures"]["drafts"]) == ["auto", "dflash", "mtp:3"]
    assert list(of["prompts.kept"]["figures"]["drafts"]) == ["mtp", "dflash"]
    assert of["prompts.kept"]["figures"]["cached"] > 0
    assert set(of["steps.by rows"]["figures"]["ms"]) == {"1", "2", "4", "8", "16"}


def of_model(path, *, head=None, drafter=None):
    """Gives what is found of a model's rows and requests, by name."""
    amount = Amount(tokens=8, prompts=1, seconds=600)
    with Files(path, head, "cpu", drafter) as opened:
        given = run._Given(opened, None, None, Progress(), amount, 1)
        return {f"{check.group}.{check.name}": check for check in run._of_model(given)}


@pytest.mark.parametrize("n_ctx", [100, *deeper(256)])
def test_a_model_of_a_short_context_has_less_looked_at(tmp_path, n_ctx):
    config, seed = tiny_gemma4.CASES["dense"]
    config = dataclasses.replace(config, n_ctx=n_ctx)
    found = of_model(tiny_gemma4.write(tmp_path / "short.gguf", config, tiny_gemma4.layout(config, seed)))
    assert not [check for check in found.values() if check.verdict == "bad"], found
    if n_ctx == 256:
        assert found["rows.widths"].verdict == found["prompts.kept"].verdict == "ok"
        assert found["steps.by rows"].verdict == "ok"
    else:
        assert found["rows.widths"].found == "113 positions are needed, the model was trained for 100"
        assert found["prompts.kept"].found == "no room in the model's context to read prompts of 100 tokens"
    assert found["drafts.tokens"].verdict == "ok"


def test_a_file_whose_weights_are_not_finite_is_to_be_replaced(tmp_path):
    config = tiny.Config()
    weights = tiny.layout(config, seed=1)
    weights["output_norm.weight"][3] = np.nan
    found = of_model(tiny.write(tmp_path / "nan.gguf", config, weights))
    assert list(found) == ["rows.run", "drafts.run", "steps.run"]
    assert [check.verdict for check in found.values()] == ["bad", "skipped", "bad"]
    assert found["drafts.run"].found == "plain decoding fails as steps do"
    assert conclusion(found.values()).endswith("rows.run, steps.run. take another copy of the file")


@pytest.mark.long  # The small model's own run drafts with it too, beside a head.
def test_a_dflash_drafter_alone_drafts_for_requests_together_and_behind_kept_prompts(files, monkeypatch):
    monkeypatch.setattr(run, "modes_of", lambda _: run.parse_modes("plain,dflash,lookup:15,auto"))
    found = of_model(BOX, drafter=BOX_DRAFTER)
    for name in ("drafts.tokens", "together.tokens", "prompts.kept"):
        assert found[name].verdict == "ok" and found[name].figures["drafts"]["dflash"][0] > 0


@pytest.mark.parametrize("together", [False, *deeper(True)])
def test_a_mode_that_drafts_nothing_is_named(files, together):
    case = dataclasses.replace(cases_of(files, 1)[0], prompt=tuple(range(300, 320)))  # Nothing is said twice.
    modes = run.parse_modes("mtp:1,lookup:15")
    with files.load(run.plans_of(files, FEW)) as model:
        plain = tokens.plain_runs(files, model, [case], 1, Pace(60))
        compare = tokens.together if together else tokens.by_drafts
        check = compare(files, model, modes, plain, Pace(60))
    assert check.verdict == "ok" and check.found.endswith(", nothing drafted by lookup:15")
    assert check.figures["drafts"]["mtp:1"][0] > 0 and check.figures["drafts"]["lookup:15"] == [0, 0]


@pytest.mark.long
def test_a_model_without_a_head_is_drafted_for_from_its_text(luce_, few, tiny_gguf):
    result = luce_("doctor", "--device", "cpu", "--gguf", "{}")
    assert result.exit_code == 0, result.output
    assert "runs with lookup:15, auto differ" in result.stdout


def test_the_known_answers_are_those_of_the_goldens():
    for name, found in make_doctor_answers.answers().items():
        assert np.array_equal(np.load(kernels.ANSWERS)[name], found), f"run {ROOT / 'tools/make_doctor_answers.py'}"


# ---- where something is wrong


def test_a_token_that_differs_at_eight_rows_is_found_and_named(engine, files, monkeypatch):
    wrong_choices(monkeypatch, lambda widths, at: widths == [8])
    found = {check.name: check for check in tokens.by_width(engine, prompt_of(files), Pace(60))}
    assert found["widths"].verdict == "bad"
    assert found["widths"].found.startswith("1 of 64 steps differ from plain decoding: 8 rows: row 7 chooses ")
    assert found["tree"].verdict == found["together"].verdict == "ok"
    assert found["accepted"].verdict == "bad"  # One of its steps has eight rows.
    assert "rows.widths" in conclusion(found.values())


@pytest.mark.long
def test_a_bit_that_differs_is_found_where_no_token_does(engine, files, monkeypatch):
    logits = native_engine.Sequence.logits

    def other(self, row=0):
        found = logits(self, row)
        if row == 3:
            found[17] *= 1 + 2**-22
        return found

    monkeypatch.setattr(native_engine.Sequence, "logits", other)
    found = {check.name: check for check in tokens.by_width(engine, prompt_of(files), Pace(60))}
    assert "4 rows: the logits of row 3 differ by" in found["widths"].found
    assert found["widths"].figures["differ"] == 61


@pytest.mark.long
def test_rows_beside_others_and_samples_are_held_too(engine, files, monkeypatch):
    wrong_choices(monkeypatch, lambda widths, at: (len(widths), at) == (5, 1))
    found = {check.name: check for check in tokens.by_width(engine, prompt_of(files), Pace(60))}
    assert [name for name, check in found.items() if check.verdict == "bad"] == ["together"]
    monkeypatch.setattr(_native.Library, "sample", lambda self, logits, sampling, position: 5)
    found = {check.name: check for check in tokens.by_width(engine, prompt_of(files), Pace(60))}
    assert "samples are not the rule's: row 0 takes" in found["samples"].found


@pytest.mark.long
def test_a_mode_whose_tokens_differ_is_named_and_exits_1(luce_, few, monkeypatch):
    """The wrong choice comes where a round has drafts: of four rows, as chains of three have."""
    wrong_choices(monkeypatch, lambda widths, at: widths == [4])
    result = luce_("doctor", "--device", "cpu")
    assert result.exit_code == 1
    bad = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("bad")]
    assert {"rows", "drafts", "verdict"} <= set(bad) and "kernels" not in bad
    assert "mtp:3 on " in result.stdout and "report it with `luce doctor --json`" in result.stdout


@pytest.mark.long
def test_tokens_that_differ_of_requests_together_or_behind_kept_prompts_are_found(files, monkeypatch):
    modes, cases = modes_of(files), cases_of(files, 2)
    with files.load(run.plans_of(files, FEW)) as model:
        plain = tokens.plain_runs(files, model, cases, 8, Pace(60))
        with monkeypatch.context() as patched:
            wrong_choices(patched, lambda widths, at: (len(widths), at) == (4, 2))
            check = tokens.together(files, model, modes[:1], plain, Pace(60))
        assert check.verdict == "bad" and check.found.startswith("1 of 4 runs of 4 requests together differ: plain on ")
        assert tokens.together(files, model, modes[:1], plain, Pace(60)).verdict == "ok"
        resume = native_engine.Sequence.resume
        with monkeypatch.context() as patched:  # It goes on from nothing.
            patched.setattr(native_engine.Sequence, "resume", lambda self, checkpoint: resume(self, checkpoint) or
                            self.reset())  # fmt: skip
            prompt = run.long_prompt(files, 300)
            assert tokens.from_checkpoints(model, prompt, 1).found.startswith("3 of 3 ways to resume a prompt at 256")
            check = tokens.behind_kept_prompts(files, model, prompt, 8, ["off"], Pace(60))
        assert check.verdict == "bad" and "kept tokens: token " in check.found


def test_a_prompt_that_is_read_otherwise_than_steps_is_found(files, monkeypatch):
    prefill = native_engine.Sequence.prefill
    with files.load(run.plans_of(files, FEW)) as model:
        prompt = run.long_prompt(files, 150)
        check = tokens.read_both_ways(model, prompt, 1)
        assert check.verdict == "ok" and check.figures["apart"] < 0.1
        backwards = lambda self, ids, last=True: prefill(self, ids[::-1], last)  # noqa: E731
        monkeypatch.setattr(native_engine.Sequence, "prefill", backwards)
        check = tokens.read_both_ways(model, prompt, 1)
    assert check.verdict == "bad" and check.figures["apart"] > 0.5


def test_no_time_is_said_and_no_promise_is_broken_by_it(files):
    cases = cases_of(files, 2)
    now = iter(range(0, 30_000, 3))
    with files.load(run.plans_of(files, FEW)) as model:
        plain = tokens.plain_runs(files, model, cases, 8, Pace(5, clock=lambda: float(next(now))))
        assert len(plain.cases) == 1 and plain.n == tokens.LEAST_TOKENS
        check = tokens.by_drafts(files, model, modes_of(files)[1:], plain, Pace(0.0))
    assert check.figures["modes"] == ["mtp:3"] and "auto" in check.figures["no time for"]
    assert check.verdict == "ok"


def test_wrong_products_are_named_by_their_type(native, files, monkeypatch):
    quantize = native.quantize

    def other(type_id, rows):  # What the kernel is given is not what is compared with.
        made = quantize(type_id, rows)
        if type_id == kernels.QType.Q4_K:
            made[0, 0] ^= 0x40
        return made

    assert kernels.products(native, files.file).verdict == "ok"
    dequantize = kernels.dequantize
    monkeypatch.setattr(kernels, "dequantize", lambda rows, kind: dequantize(rows, kind) * (
        1.0001 if kind == kernels.QType.Q6_K else 1))  # fmt: skip
    check = kernels.products(native, files.file)
    assert check.verdict == "bad" and list(check.figures["wrong"]) == ["Q6_K"] and "Q6_K" in check.found


BREAKS = [
    Break("deltanet.cpp", "std::sqrt(sum + 1e-6f)", "std::sqrt(sum + 1e-3f)", "kernels.logits"),
    Break("attention.cpp", "t.sum = t.sum * of_total", "t.sum = t.sum * 1.001f * of_total", "kernels.prompts"),
    # What lies more than eight chunks back is forgotten.
    Break("attention.cpp", "for (int32_t c = chunk_at(low); c < shared; c++)",
          "for (int32_t c = std::max(chunk_at(low), shared - 8); c < shared; c++)", "kernels.prompts"),
    Break("experts.cpp", "sigmoid(a.open[t])", "sigmoid(a.open[t] + 0.01f)", "kernels.mixture logits"),
    Break("matmul.cpp", "127.0f / largest", "126.0f / largest", "kernels.products"),
    Break("deltanet.cpp", "all(decay) * lanes::load<Floats>(from", "all(decay * 1.001f) * lanes::load<Floats>(from",
          "rows.widths"),
    # Plain decoding accepts one row a step, and so replays no second one.
    Break("deltanet.cpp", "cols.log[s.log_decay(seq.bank, row) + h],",
          "cols.log[s.log_decay(seq.bank, row) + h] * (p > 0 ? 1.001f : 1.0f),", "rows.accepted"),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("wrong", BREAKS, ids=lambda wrong: wrong.found_by)
def test_a_build_with_one_wrong_constant_is_found(command, native, tmp_path, wrong):
    library = broken_core(wrong, native.path.parent, tmp_path)
    running = command("doctor", "--device", "cpu", "--json", lib=library)
    stdout, stderr = running.communicate(timeout=600)
    assert running.returncode == 1, stderr
    report = json.loads(stdout)
    bad = {f"{check['group']}.{check['name']}" for check in report["checks"] if check["verdict"] == "bad"}
    assert wrong.found_by in bad, report["verdict"]
    assert not report["holds"] and wrong.found_by in report["verdict"]


# ---- how it ends


def test_what_cannot_be_run_is_an_error_before_anything_is_looked_at(luce_, few, tmp_path):
    assert "no-such.gguf" in one_line(luce_("doctor", "--gguf", tmp_path / "no-such.gguf"))
    said = one_line(luce_("doctor", "--device", "cpu", "--draft", BOX))
    assert "is neither a DFlash drafter nor an assistant: its architecture is qwen35" in said
    said = one_line(luce_("doctor", "--device", "cpu", "--mtp-gguf", BOX_DRAFTER))
    assert said.endswith("is a DFlash drafter and holds no NextN head; --draft PATH takes a drafter"), said
    assert "no device 'cuda:77'" in one_line(luce_("doctor", "--device", "cuda:77"))
    assert luce_("doctor", "--device", "gpu").exit_code == 2
    assert luce_("doctor", "--no-such-option").exit_code == 2


def test_ctrl_c_exits_130(command):
    running = command("doctor", "--device", "cpu")
    assert running.stdout.readline().startswith(b"ok       machine")
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=120)
    assert running.returncode == 130
    assert stderr.decode().splitlines() == ["Error: interrupted"]


def test_a_core_that_does_not_load_is_a_report(luce_, monkeypatch):
    def missing():
        raise DeviceError("libluce is for another CPU")

    monkeypatch.setattr(cli._native, "default", missing)
    result = luce_("doctor", "--json")
    assert result.exit_code == 1
    (check,) = json.loads(result.stdout)["checks"]
    assert check["found"] == "libluce is for another CPU" and check["verdict"] == "bad"


def test_what_fails_in_a_check_is_one_and_the_others_go_on():
    def failing(error):
        yield Check("rows", "first", "ok", "done")
        raise error

    def of(error):
        return [(check.verdict, check.found) for check in guarded("rows", lambda: failing(error))]

    assert of(DeviceError("it broke")) == [("ok", "done"), ("bad", "failed: it broke")]
    assert of(OutOfMemory("1 GiB needed")) == [("ok", "done"), ("skipped", "1 GiB needed")]
    assert of(UnsupportedError("not on a GPU")) == [("ok", "done"), ("skipped", "not on a GPU")]
    assert of(FileError("it ends early")) == [("ok", "done"), ("bad", "failed: it ends early")]
    assert of(OSError("no space left")) == [("ok", "done"), ("skipped", "failed: no space left")]
    with pytest.raises(Cancelled):
        of(Cancelled("interrupted"))
    remedies = {
        group: [check.remedy for check in guarded(group, lambda: failing(NumericError("not finite")))]
        for group in ("rows", "kernels")
    }
    assert remedies == {"rows": ["", run.COPY], "kernels": ["", REPORT]}, "the kernels have luce's own model"


def test_a_cancelled_run_is_no_difference(native, files):
    device = native.devices()[-1]
    progress = Progress(cancelled=lambda: True)
    with pytest.raises(Cancelled):
        list(run.examine(native, files, device, progress, FEW))
    with files.load(run.plans_of(files, FEW)) as model, pytest.raises(Cancelled):
        tokens.plain_runs(files, model, cases_of(files, 1), 8, Pace(60, lambda: True))


def test_a_line_tells_the_worst_and_the_verdict_names_it():
    checks = [
        judged("rows", "widths", True, "equal", "equal"),
        judged("rows", "tree", False, "row 3 differs", "equal", "see the docs", row=3),
        Check("card", "clocks", "note", "slowed by heat"),
        Check("steps", "by rows", "skipped", "no time"),
    ]
    rows, card, of_steps = [(line.group, line.verdict, line.text) for line in lines(checks)]
    assert rows == ("rows", "bad", "row 3 differs") and card == ("card", "note", "slowed by heat")
    assert of_steps == ("steps", "skipped", "no time")
    assert conclusion(checks) == "a promise does not hold here: rows.tree. see the docs"
    assert conclusion(checks[2:]) == "what was looked at holds; to know: card.clocks; not looked at: steps.by rows"
    report = as_json(checks, {"luce": "1"})
    assert report["luce"] == "1" and report["holds"] is False and report["checks"][1]["figures"] == {"row": 3}


def test_on_a_terminal_a_long_text_goes_on_below_itself(capsys, monkeypatch):
    import rich.console

    terminal = partial(rich.console.Console, force_terminal=True, width=60, color_system=None)
    monkeypatch.setattr(rich.console, "Console", terminal)
    print_verdict("bad", "rows", "1 of 64 steps differ from plain decoding: 8 rows: row 7 chooses 5\x1b[2J, not 4")
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.split()[:3] == ["bad", "rows", "1"] and second.startswith(" " * 20)
    assert "\x1b[2J" not in first + second


# ---- the machine


H200 = (  # A line of nvidia-smi, but for the bits of what holds the clocks down.
    "00000000:0F:00.0, 580.95.05, P0, 1980, 1980, 3201, 3201, 121.35, 700.00, 700.00, 34, Disabled, {}, {}, NVIDIA H200"
)
SM = GpuInfo("0000:0F:00.0", 4_900_000_000_000, 90, 132, 13000, 13000)
CARD = Device("cuda:0", "NVIDIA H200", 100 << 30, 140 << 30, 1)


class Core:
    """Stands for a core with one GPU, whose memory gives `measured` bytes a second."""

    missing_gpu = ""

    def __init__(self, gpu=SM, measured=4_200_000_000_000):
        self.gpu, self.measured = gpu, measured

    def devices(self):
        return [CARD, Device("cpu", "a CPU", 1 << 30, 2 << 30, 0)]

    def gpu_info(self, index):
        assert index == 0
        return self.gpu

    def bandwidth(self, index, threads):
        if isinstance(self.measured, Exception):
            raise self.measured
        return self.measured


def h200(bits="0x0000000000000001", other="[N/A]", **changed):
    (reading,) = nvidia_smi.parse(H200.format(bits, other), nvidia_smi.FIELDS)
    return dataclasses.replace(reading, **changed)


def test_nvidia_smi_is_read_as_it_prints():
    text = f"{H200.format('0x0000000000000004', '0x0000000000000004')}\n" + (
        "00000000:41:00.0, 535.183.01, P8, 210, 2100, 405, 9501, [N/A], [N/A], [Not Supported], 51, [N/A], [N/A], "
        "0x0000000000000060, NVIDIA GeForce RTX 3090, of another maker\n\n"
    )
    first, second = nvidia_smi.parse(text, nvidia_smi.FIELDS)
    assert first.driver == "580.95.05" and first.sm == 1980 and first.watts == 121.35 and not first.mig
    assert first.slowed_by == ("its power limit",)
    assert second.watts is second.watts_limit is None and second.memory_max == 9501
    assert second.slowed_by == ("heat (software)", "heat (hardware)")
    assert second.name == "NVIDIA GeForce RTX 3090, of another maker"
    assert nvidia_smi.of_device([first, second], "0000:41:00.0") is second
    assert nvidia_smi.of_device([first, second], "0000:42:00.0") is None
    assert nvidia_smi.of_device([first, second], "") is None
    assert nvidia_smi.parse("", nvidia_smi.FIELDS) == []
    assert nvidia_smi.parse("a warning of the driver", nvidia_smi.FIELDS) != [], "a line alone may be a bus id"
    (short,) = nvidia_smi.parse("00000000:0F:00.0, 470.1", nvidia_smi.FIELDS)
    assert short.driver == "470.1" and short.sm is None and short.slowed_by == ()
    (units,) = nvidia_smi.parse("00000000:0F:00.0, 1980 MHz", ("pci.bus_id", "clocks.sm"))
    assert units.sm == 1980
    assert nvidia_smi.reasons("Active") == () and nvidia_smi.reasons(None) == ()


def test_fields_that_a_driver_lacks_are_left_out():
    asked = []

    def old(command):
        fields = command[1].partition("=")[2].split(",")
        asked.append(fields)
        if "clocks_event_reasons.active" in fields:
            return 2, 'Field "clocks_event_reasons.active" is not a valid field to query.\n'
        return 0, ", ".join(["00000000:0F:00.0", "470.57", *["[N/A]"] * (len(fields) - 4), "0x8", "Tesla V100"])

    (reading,) = nvidia_smi.read(old)
    assert len(asked) == 2 and reading.slowed_by == ("hardware slowdown",) and reading.name == "Tesla V100"


@pytest.mark.parametrize(
    "code, said, why",
    [
        (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "couldn't communicate"),
        (127, "No such file or directory", "No such file"),
        (124, "no answer in 20 seconds", "no answer"),
        (6, "", "exit 6"),
        (2, "".join(f'Field "{name}" is not a valid field to query.' for name in nvidia_smi.FIELDS), "none of the"),
    ],
)
def test_a_failing_nvidia_smi_is_said(code, said, why):
    assert why in nvidia_smi.read(lambda command: (code, said))


def found_of(checks):
    return {check.name: check for check in checks}


def test_a_gpu_at_its_best_is_fine():
    found = found_of(machine.card(Core(), CARD, lambda: [h200()]))
    assert [check.verdict for check in found.values()] == ["ok", "ok", "ok"]
    assert found["clocks"].found == "driver 580.95.05, SM clock 1980 of 1980 MHz, 121 of 700 W, 34 C"
    assert found["driver"].found == "driver runs CUDA 13.0, luce has 13.0"
    check = machine.bandwidth(Core(), CARD, 4)
    assert check.verdict == "ok" and check.found == (
        "4.20 TB/s measured by copying, 86% of the 4.90 TB/s of its clock and bus"
    )


def test_what_slows_a_gpu_is_told():
    def clocks(reading):
        return found_of(machine.card(Core(), CARD, lambda: [reading]))["clocks"]

    assert clocks(h200("0x40")).verdict == "note" and "slowed by heat (hardware)" in clocks(h200("0x40")).found
    assert "limited below its 700 W" in clocks(h200(watts_limit=350.0)).found
    assert "MIG is on" in clocks(h200(mig=True)).found
    nothing = clocks(nvidia_smi.Reading("00000000:0F:00.0", "a GPU"))
    assert nothing.verdict == "ok" and nothing.found == "nvidia-smi says nothing of the clocks"
    assert machine.bandwidth(Core(measured=10**12), CARD, 4).verdict == "note"
    assert machine.bandwidth(Core(measured=OutOfMemory("256 MiB")), CARD, 4).verdict == "skipped"


def test_what_is_not_known_of_a_gpu_is_skipped_and_others_are_noted():
    found = found_of(machine.card(Core(), CARD, lambda: "there is no nvidia-smi on the PATH"))
    assert found["clocks"].verdict == "skipped" and "no nvidia-smi" in found["clocks"].found
    other = [h200(pci="00000000:99:00.0")]
    assert found_of(machine.card(Core(), CARD, lambda: other))["clocks"].verdict == "skipped"
    ampere = dataclasses.replace(SM, capability=86, bandwidth=0, driver_cuda=12040)
    found = found_of(machine.card(Core(ampere), CARD, lambda: [h200()]))
    assert found["device"].verdict == "note" and "this is 8.6" in found["device"].found
    assert found["driver"].verdict == "bad" and "driver runs CUDA 12.4, luce has 13.0" in found["driver"].found
    assert "is not known" in machine.bandwidth(Core(ampere), CARD, 4).found


def test_a_gpu_that_luce_does_not_use_is_noted(native):
    cpu = native.devices()[-1]
    (check,) = machine.card(native, cpu, lambda: [h200()])
    assert check.verdict == "note" and "NVIDIA H200 is not used" in check.found
    (check,) = machine.card(native, cpu, lambda: "there is no nvidia-smi on the PATH")
    assert check.verdict == "skipped"


def test_a_cpu_without_what_luce_needs_is_bad():
    assert machine.processor("flags : fpu avx2 fma f16c\n").verdict == "ok"
    check = machine.processor("flags : fpu avx2\n")
    assert check.verdict == "bad" and "without FMA, F16C" in check.found
    assert machine.processor("").verdict == "skipped"


def test_clocks_are_read_while_steps_run(engine, files):
    check = steps.clocks_under_load(engine, prompt_of(files), "0000:0F:00.0", lambda: [h200("0x4")])
    assert check.verdict == "note" and check.found.startswith("under load driver") and "its power limit" in check.found
    check = steps.clocks_under_load(engine, prompt_of(files), "0000:0F:00.0", lambda: "no nvidia-smi")
    assert check.verdict == "skipped"


@pytest.mark.long
def test_what_is_looked_at_on_a_gpu_runs_with_the_cpu_in_its_place(native, files, monkeypatch):
    pretended, free = dataclasses.replace(native.devices()[-1], is_gpu=1), iter(range(1 << 30, 1 << 31))
    listed = lambda self: [dataclasses.replace(pretended, memory_free=next(free))]  # noqa: E731  It changes all the time.
    monkeypatch.setattr(_native.Library, "devices", listed)
    monkeypatch.setattr(_native.Library, "gpu_info", lambda self, index: SM)
    found = {f"{check.group}.{check.name}": check for check in
             run.examine(native, files, pretended, Progress(), Amount(8, 1, 20))}  # fmt: skip
    assert not [check for check in found.values() if check.verdict == "bad"]
    for mix in kernels.MIXES:
        for form in ("", "mixture "):
            error = found[f"kernels.{form}{mix} against the CPU"].figures["error"]
            assert 0 < error < (0.01 if mix == "F16" else kernels.QUANTISED_BOUND), "KV in F16 is rounded"
    assert found["card.device"].verdict == "ok" and found["card.driver"].verdict == "ok"
    assert found["steps.clocks"].verdict in ("ok", "note", "skipped")
    assert "of its clock and bus" in found["bandwidth.memory"].found


@pytest.mark.long
def test_steps_are_reckoned_by_the_measured_bandwidth(engine, files):
    check = steps.by_rows(engine, prompt_of(files), 20_000_000, 10_000_000_000, False, Pace(60))
    assert check.figures["reading_ms"] == 2.0 and set(check.figures["ms"]) == set(steps.ROWS)
    assert "would take 2 (reckoned from the measured bandwidth)" in check.found
    now = iter(x * x for x in range(10_000))  # Later calls seem to take longer: so do steps of more rows.
    wide = steps.by_rows(engine, prompt_of(files), 1, None, True, Pace(60), clock=lambda: float(next(now)))
    assert "reckoned" not in wide.found
