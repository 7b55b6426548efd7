"""Checks the command line: exit codes, one line an error, streams kept apart."""

import ast
import json
import re
import sys
from unittest import mock

import drive
import numpy as np
import pytest
import tiny
from click.testing import CliRunner
from command_line import one_line
from depth import deeper, examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tiny import rewritten

import luce
from luce import native as _native
from luce.cli.command import installing
from luce.cli.commands import read_prompt
from luce.cli.terminal import BAR_AFTER, printable
from luce.decode.generation import Generation
from luce.errors import NumericError


def test_text_goes_to_stdout_and_nothing_else(luce_):
    result = luce_("generate", "--gguf", "{}", "def main(", "-n", "8")
    assert result.exit_code == 0, result.stderr
    assert result.stdout and result.stderr == ""


def test_json_is_one_object(luce_):
    result = luce_("generate", "--gguf", "{}", "def main(", "-n", "8", "--json")
    found = json.loads(result.stdout)
    assert set(found) == {"text", "tokens", "prompt_tokens", "finish_reason", "truncated_by", "stats"}
    assert {
        "mode", "prefill_s", "decode_s", "tok_per_s", "rounds", "drafted", "accepted", "acceptance",
        "mean_accepted_length",
    } <= set(found["stats"])  # fmt: skip
    assert 1 <= len(found["tokens"]) <= 8
    assert found["finish_reason"] in ("length", "stop")
    assert found["stats"]["rounds"] == len(found["tokens"]) - 1


def test_streamed_text_is_the_text_of_the_object(luce_):
    asked = ("generate", "--gguf", "{}", "def main(", "-n", "30")
    text = json.loads(luce_(*asked, "--json").stdout)["text"]
    assert luce_(*asked).stdout == text


def test_tokens_are_those_of_the_engine(luce_, native, tiny_gguf, device):
    with drive.open_model(native, tiny_gguf, device) as model:
        expected = drive.greedy(drive.open_sequence(model, n_ctx=2048, kv_type="f16"), list(b"zq"), 8)
    found = json.loads(luce_("generate", "--gguf", "{}", "zq", "-n", "8", "--json").stdout)
    assert found["prompt_tokens"] == 2
    assert found["tokens"] == expected[: len(found["tokens"])]
    assert len(found["tokens"]) == 8 or found["finish_reason"] == "stop"


def test_the_same_seed_samples_the_same_tokens(luce_):
    def sampled(seed):
        flags = ("-n", "12", "--temp", "1.5", "--top-k", "100", "--top-p", "0.99", "--min-p", "0.001")
        result = luce_("generate", "--gguf", "{}", "x", *flags, "--seed", seed, "--json")
        return json.loads(result.stdout)["tokens"]

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_chat_applies_the_template(luce_):
    asked = ("generate", "--gguf", "{}", "-n", "1", "--json", "hi")
    raw, chat, system = (
        json.loads(luce_(*asked, *flags).stdout)["prompt_tokens"]
        for flags in ((), ("--chat",), ("--chat", "--system", "be brief"))
    )
    assert raw < chat < system


def test_a_stop_string_ends_the_text(luce_):
    asked = ("generate", "--gguf", "{}", "def main(", "-n", "60", "--json")
    text = json.loads(luce_(*asked).stdout)["text"]
    stop = next(char for char in text[1:] if char.isascii() and char.isalnum())
    found = json.loads(luce_(*asked, "--stop", stop, "--stop", "never there").stdout)
    assert found["text"] == text[: text.index(stop)]
    assert found["finish_reason"] == "stop"


def test_n_zero_prints_nothing(luce_):
    found = json.loads(luce_("generate", "--gguf", "{}", "x", "-n", "0", "--json").stdout)
    assert (found["text"], found["tokens"], found["finish_reason"]) == ("", [], "length")
    assert luce_("generate", "--gguf", "{}", "x", "-n", "0").stdout == ""


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_a_prompt_of_about_the_context(luce_, over):
    ctx = 40
    result = luce_("generate", "--gguf", "{}", "7" * (ctx + over), "--ctx", ctx, "--json")
    if over > 0:
        assert result.exit_code == 1
        assert "41 tokens" in one_line(result) and "context of 40" in result.stderr
    else:
        found = json.loads(result.stdout)
        assert found["prompt_tokens"] == ctx + over
        assert len(found["tokens"]) <= 1 - over
        assert found["finish_reason"] in ("length", "stop")


def test_a_text_that_the_context_ends_says_so(luce_, endless):
    asked = ("generate", "--gguf", endless, "7" * 30, "--ctx", 40)
    found = luce_(*asked, "--json", "-n", 50)
    body = json.loads(found.stdout)
    assert (body["finish_reason"], body["truncated_by"], len(body["tokens"])) == ("length", "context", 11)
    assert found.exit_code == 0 and "context of 40 tokens (--ctx) is full" in found.stderr
    assert luce_(*asked, "-n", 50, "--quiet").stderr == ""
    budget = luce_(*asked, "--json", "-n", 11)
    assert json.loads(budget.stdout)["truncated_by"] == "max_tokens" and budget.stderr == ""


def test_stdin_is_the_prompt(luce_):
    piped = luce_("generate", "--gguf", "{}", "-n", "4", "--json", stdin="ab\n")
    assert json.loads(piped.stdout)["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("piped", "prompt", "joined"),
    [
        ("", "ask", "ask"),
        ("text", None, "text"),
        ("text\n", None, "text\n"),
        ("text", "ask", "text\nask"),
        ("text\n", "ask", "text\nask"),
        ("", "", ""),
        ("naïve", None, "naïve"),
    ],
)
def test_stdin_goes_before_the_prompt(piped, prompt, joined):
    with CliRunner().isolation(input=piped):
        assert read_prompt(prompt) == joined


def test_stdin_that_is_not_text_is_a_usage_error(luce_):
    result = luce_("generate", "--gguf", "{}", stdin=b"\xff\xfe")
    assert result.exit_code == 2 and "UTF-8" in result.stderr


def test_an_empty_prompt_says_so(luce_):
    result = luce_("generate", "--gguf", "{}", "")
    assert result.exit_code == 1 and "at least one token" in one_line(result)


@pytest.mark.parametrize(
    "args",
    [
        ["generate", "--gguf", "{}"],
        ["generate", "--gguf", "{}", "x", "y"],
        ["generate", "--gguf", "{}", "x", "--no-such-flag"],
        ["generate", "--gguf", "{}", "x", "--system", "s"],
        ["generate", "--gguf", "{}", "x", "--stop", ""],
        ["generate", "--gguf", "{}", "x", "--device", "toaster"],
        ["generate", "--gguf", "{}", "x", "--device", "cuda:"],
        ["generate", "--gguf", "{}", "x", "--kv-type", "q2_k"],
        *(
            ["generate", "--gguf", "{}", "x", flag, value]
            for flag, values in {
                "-n": ("-1", "1.5", "x", str(2**32)),
                "--temp": ("-0.1", "nan", "inf", "hot"),
                "--top-k": ("-1", str(2**31)),
                "--top-p": ("0", "1.01", "nan", "-1"),
                "--min-p": ("-0.1", "1", "nan"),
                "--seed": ("-1", str(2**64)),
                "--ctx": ("0", "-5", str(2**32)),
                "--threads": ("0", "-1", "513"),
            }.items()
            for value in values
        ),
        *(
            ["generate", "--gguf", "{}", "x", *flags]
            for flags in (
                ["--top-k", "40"],
                ["--top-p", "0.9"],
                ["--min-p", "0.1", "--temp", "0"],
                ["--seed", "0"],
                ["-p", "y"],
                ["--no-think"],
                ["--json", "--jsonl"],
                ["--quiet", "--verbose"],
            )
        ),
        ["probe-gguf"],
        ["probe-gguf", "{}", "--ctx", "0"],
        ["no-such-command"],
    ],
    ids=" ".join,
)
def test_usage_errors_exit_2(luce_, args):
    result = luce_(*args)
    assert result.exit_code == 2
    assert result.stdout == "" and "Error: " in result.stderr


def test_without_gguf_the_model_in_the_box_writes_python(luce_):
    result = luce_("generate", "def is_prime(n):", "-n", "60")
    assert result.exit_code == 0, result.stderr
    body = ast.parse("def is_prime(n):" + result.stdout).body[0]
    assert isinstance(body, ast.FunctionDef) and len(result.stdout.splitlines()) >= 3


@pytest.mark.parametrize("command", [["probe-gguf"], ["generate", "x", "--gguf"]])
@pytest.mark.parametrize("content", [None, b"", b"GGUF", b"not a GGUF at all", "folder"])
def test_what_is_not_a_gguf_is_one_line_and_exit_1(luce_, tmp_path, command, content):
    path = tmp_path / "broken.gguf"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    result = luce_(*command, path)
    assert result.exit_code == 1 and result.stdout == ""
    assert "broken.gguf" in one_line(result)


def test_a_context_past_the_trained_one_names_both(luce_):
    for asked in (("generate", "--gguf", "{}", "x"), ("probe-gguf", "{}")):
        line = one_line(luce_(*asked, "--ctx", "5000"))
        assert "a context of 5000 was asked, the model was trained for 2048" in line


def test_a_prompt_past_the_trained_context_is_said_so(luce_):
    line = one_line(luce_("generate", "x " * 3000))
    assert line.endswith(" tokens or more, a context of 2048: the model takes no more")


def test_a_probe_of_nothing_names_what_it_takes(luce_):
    assert "name a file, or one of the hub by --hf" in luce_("probe-gguf").stderr


def test_a_device_that_is_not_there_is_named(luce_):
    assert "cuda:999" in one_line(luce_("generate", "--gguf", "{}", "x", "--device", "cuda:999"))


def test_chat_without_a_template_is_refused(luce_, tmp_path):
    config = tiny.Config()
    path = tiny.write(tmp_path / "raw.gguf", config, tiny.layout(config, 1), chat_template=None)
    assert "--raw" in one_line(luce_("generate", "--gguf", path, "x", "--chat"))
    assert luce_("generate", "--gguf", path, "x", "-n", "1").exit_code == 0


def test_a_model_that_gives_nan_fails_with_one_line(luce_, tmp_path):
    config = tiny.Config()
    tensors = tiny.layout(config, 1)
    tensors["output_norm.weight"] = np.full_like(tensors["output_norm.weight"], np.nan)
    path = tiny.write(tmp_path / "nan.gguf", config, tensors)
    result = luce_("generate", "--gguf", path, "x", "--json")
    assert result.exit_code == 1 and result.stdout == ""
    one_line(result)


@pytest.mark.parametrize(
    "template",
    [
        "{% for %}",
        *deeper("{{ 1 + }}", "{% endif %}"),
        "{{ " + "(" * 5000 + " }}",  # The parser raises a RecursionError.
        "{% if 1 %}" * 200 + "{% endif %}" * 200,  # Python's compiler does not take so many blocks.
        "{{ " + "9" * 5000 + " }}",  # int() does not take so many digits.
        "{{ raise_exception('no') }}",
        *deeper("{{ messages.nothing.at_all }}", "{{ 1 // 0 }}"),
    ],
    ids=range(9),
)
def test_a_malformed_chat_template_is_one_line(luce_, tmp_path, template):
    path = rewritten(tmp_path / "t.gguf", chat_template=template)
    result = luce_("generate", "--gguf", path, "x", "-n", "1", "--chat")
    assert result.exit_code == 1 and "tokenizer.chat_template" in one_line(result)
    assert luce_("generate", "--gguf", path, "x", "-n", "1").exit_code == 0


def test_a_failure_after_some_text_is_one_line_and_exit_1(luce_, monkeypatch):
    def fails_later(self, came):
        rounds.append(came)
        return self.fail(NumericError("injected")) if len(rounds) == 4 else landed(self, came)

    rounds, landed = [], Generation.landed
    monkeypatch.setattr(Generation, "landed", fails_later)
    result = luce_("generate", "--gguf", "{}", "def main(")
    assert result.exit_code == 1
    assert one_line(result) == "Error: injected"


def test_probe_json(luce_):
    found = json.loads(luce_("probe-gguf", "{}", "--json", "--ctx", "128").stdout)
    assert (found["architecture"], found["supported"], found["context"]) == ("qwen35", True, 128)
    assert "tensors" not in found


def test_probe_lists_tensors(luce_, tiny_gguf, native):
    with _native.File(tiny_gguf, native) as file:
        names = [tensor.name for tensor in file.tensors]
    found = json.loads(luce_("probe-gguf", "{}", "--json", "--tensors").stdout)
    assert [tensor["name"] for tensor in found["tensors"]] == names
    text = luce_("probe-gguf", "{}", "--tensors").stdout
    assert all(name in text for name in names)


def test_probe_for_people(luce_):
    result = luce_("probe-gguf", "{}")
    assert result.exit_code == 0 and result.stderr == ""
    for said in ("qwen35", "gpt2/qwen35", "56 tensors", "plain at 2048", "supported"):
        assert said in result.stdout


def test_version_names_luce_and_its_core(luce_, native):
    assert luce_("--version").stdout == f"luce {luce.__version__}, core {native.version}\n"


@pytest.mark.parametrize("command", [[], ["generate"], ["probe-gguf"], ["convert"]])
def test_help_has_examples(luce_, command):
    text = luce_(*command, "--help").stdout
    assert "Examples:" in text and "luce " in text


@pytest.mark.parametrize("command", [[], ["bench"]])
def test_help_lists_commands_in_whole_sentences(luce_, command):
    listed = luce_(*command, "--help").stdout.partition("Commands:\n")[2]
    rows = " ".join(listed.split("\n"))
    assert rows.count(". ") >= 6 and ".." not in rows, listed


@pytest.mark.parametrize(
    ("origin", "said"),
    [
        (None, "pip install 'luce[serve]'"),
        ("no JSON", "pip install 'luce[serve]'"),
        ('{"url": "https://example.org/luce.whl", "archive_info": {}}', "pip install 'luce[serve]'"),
        ('{"url": "file:///home/a%20b/luce", "dir_info": {}}', "pip install '/home/a b/luce[serve]'"),
        (
            '{"url": "file:///src/luce", "dir_info": {"editable": true}}',
            "pip install -e '/src/luce[serve]'",
        ),
    ],
    ids=range(5),
)
def test_what_adds_an_extra_names_where_luce_was_installed_from(monkeypatch, origin, said):
    installed = mock.Mock(read_text=lambda name: origin if name == "direct_url.json" else None)
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: installed)
    assert installing("serve") == said


LACKING = {  # By its extra: a package, words that need it, and what they say without it.
    "grammar": ("llguidance", ["--json-schema", "{ }"], "grammars need the package llguidance"),
    "hub": ("huggingface_hub", ["--hf", "owner/repo"], "the hub needs the package huggingface_hub"),
}


@pytest.mark.parametrize("extra", LACKING)
def test_a_command_whose_extra_is_missing_says_how_to_add_it(luce_, extra):
    package, words, said = LACKING[extra]
    with mock.patch.dict(sys.modules, {package: None}):
        result = luce_("generate", "x", *words)
    assert (result.exit_code, result.stdout) == (1, "")
    assert one_line(result) == f"Error: {said}: {installing(extra)}"


def test_what_few_runs_need_is_imported_by_them_alone(command):
    """`luce generate` starts in the time of its imports."""
    running = command("generate", "--help", env={"PYTHONPROFILEIMPORTTIME": "1"})
    _, imported = running.communicate(timeout=60)
    names = {line.rpartition("|")[2].strip() for line in imported.decode().splitlines()}
    assert "luce.cli.commands" in names
    few_need = {"rich", "jinja2", "gguf", "matplotlib", "luce.bench", "luce.convert", "importlib.metadata"}
    assert not few_need & names


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "\udcff"),
        ("generate", "--chat", "\udcff"),
        ("generate", "-p", "\udcff"),
        ("generate", "x", "--stop", "\udcff"),
        ("generate", "x", "--chat", "--system", "\udcff"),
        ("chat", "--system", "\udcff"),
    ],
)
def test_bytes_that_are_no_text_are_said_to_be_of_the_option_that_holds_them(luce_, words):
    result = luce_(*words, "--gguf", "{}")
    assert result.exit_code == 2
    assert "not UTF-8 text" in result.stderr and ".gguf" not in result.stderr


def test_control_characters_do_not_reach_the_terminal():
    assert printable("a\x1b[31m\nb\tc\x00é") == "a\\x1b[31m b c\\x00é"


@pytest.mark.sanitize
@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 11_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_header_bytes_are_an_error_or_harmless(luce_, tiny_gguf, tmp_path, changes):
    raw = bytearray(tiny_gguf.read_bytes())
    for place, value in changes:
        raw[place] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(raw)
    for args in (("probe-gguf", path, "--json"), ("generate", "--gguf", path, "x", "-n", "1", "--ctx", "8")):
        result = luce_(*args)
        if result.exit_code:
            assert result.exit_code == 1 and one_line(result)


def test_a_long_prefill_gets_a_bar(monkeypatch):
    import io

    from rich.console import Console

    from luce.cli.terminal import Display

    def shown(elapsed):
        out = io.StringIO()
        clock = iter([0.0, elapsed, elapsed])
        monkeypatch.setattr("luce.cli.terminal.time.perf_counter", lambda: next(clock))
        with Display(console=Console(file=out, force_terminal=True, width=100)) as display:
            display.spin("reading the prompt")
            display.prefill(512, 1024)
        return out.getvalue()

    assert "512/1024" in shown(BAR_AFTER)
    assert "512/1024" not in shown(BAR_AFTER / 4)


@pytest.mark.parametrize(
    ("flags", "piped", "joined"),
    [
        (["-p", "ask"], "", "ask"),
        (["-f", "{file}"], "", "OF IT\n"),
        (["-f", "{file}", "ask"], "", "OF IT\nask"),
        (["-f", "{file}", "-p", "ask"], "not read", "OF IT\nask"),
        (["-p", "ask"], "text", "text\nask"),
    ],
)
def test_the_prompt_may_come_from_options(luce_, tmp_path, flags, piped, joined):
    path = tmp_path / "prompt.txt"
    path.write_text("OF IT\n")
    words = [str(path) if word == "{file}" else word for word in flags]
    found = luce_("generate", "-m", "{}", *words, "-n", "1", "--json", stdin=piped)
    assert json.loads(found.stdout)["prompt_tokens"] == len(joined)


def test_json_lines_are_the_events_as_they_happen(luce_, endless):
    asked = ("generate", "--gguf", endless, "7" * 30, "--ctx", "40", "-n", "50")
    lines = [json.loads(line) for line in luce_(*asked, "--jsonl").stdout.splitlines()]
    assert lines[0] == {"event": "started", "prompt_tokens": 30}
    assert [line["event"] for line in lines[1:-1]] == ["tokens"] * 11
    last = lines[-1]
    assert last["event"] == "finished" and last["truncated_by"] == "context"
    assert sum((line["tokens"] for line in lines[1:-1]), []) == last["tokens"]
    assert "".join(line["text"] for line in lines[1:-1]) == last["text"]
    whole = json.loads(luce_(*asked, "--json").stdout)
    assert set(last) - {"event"} == set(whole) and last["tokens"] == whole["tokens"]


def test_json_lines_end_with_the_failure(luce_, monkeypatch):
    monkeypatch.setattr(Generation, "landed", lambda self, came: self.fail(NumericError("injected")))
    result = luce_("generate", "--gguf", "{}", "def main(", "--jsonl")
    assert result.exit_code == 1 and one_line(result) == "Error: injected"
    assert json.loads(result.stdout.splitlines()[-1]) == {"event": "failed", "message": "injected"}


def test_verbose_says_what_was_chosen_and_why(luce_, device):
    stderr = luce_("generate", "--gguf", "{}", "x", "-n", "3", "--verbose").stderr
    for said in ("ctx 2048: the model was trained for 2048", "kv_type f16: the default",
                 f"device {device.partition(':')[0]}", "draft auto: the default", "read 1 tokens in ",
                 "wrote 3 in ", "of 1.00 tokens"):  # fmt: skip
        assert said in stderr, stderr
    for left in ("rows", "chunk", "pages"):
        assert re.search(rf"^{left} [1-9]\d*: ", stderr, re.M), stderr


def test_thinking_is_what_was_asked_for(luce_, tmp_path):
    template = "{{ 7 if enable_thinking is not defined else 88 if enable_thinking else 999 }}"
    path = rewritten(tmp_path / "t.gguf", chat_template=template)
    for flags, length in (([], 1), (["--think"], 2), (["--no-think"], 3)):
        found = luce_("generate", "--gguf", path, "x", "--chat", "-n", "1", "--json", *flags)
        assert json.loads(found.stdout)["prompt_tokens"] == length


def test_a_cpus_free_memory_is_what_the_system_calls_available(native):
    """A file cache that can be dropped counts as free, and what programs hold does not."""

    def available():
        (line,) = (line for line in open("/proc/meminfo") if line.startswith("MemAvailable:"))
        return int(line.split()[1]) << 10

    before = available()
    (cpu,) = (device for device in native.devices() if device.name == "cpu")
    most = max(before, available()) + (1 << 30)
    assert cpu.memory_free <= most and cpu.memory_free < cpu.memory_total  # ggml's figure is the total.


def test_devices_say_why_there_is_no_gpu(luce_, native):
    """CMake's own reason is among it where luce was built without CUDA."""
    result = luce_("devices", "--json")
    if any(device.is_gpu for device in native.devices()):
        assert result.stderr == ""
    else:
        (line,) = result.stderr.splitlines()
        assert line.startswith("No GPU: ")
        if "cpu)" in native.version:
            assert "built without CUDA (" in result.stderr and "LUCE_CUDA=ON" in result.stderr


def test_a_gpu_that_is_asked_for_and_missing_is_explained(luce_):
    result = luce_("generate", "x", "--device", "cuda:9")
    assert result.exit_code == 1
    line = one_line(result)  # The model's file is not blamed.
    assert line.startswith("Error: no device 'cuda:9': this machine has ")


def test_devices_are_those_of_the_core(luce_, native):
    listed = json.loads(luce_("devices", "--json").stdout)
    assert [device["name"] for device in listed] == [device.name for device in native.devices()]
    assert "cpu" in luce_("devices").stdout


@pytest.mark.long
def test_completion_knows_commands_and_options(command):
    for words, said in (("luce ", "bench"), ("luce generate --no-", "--no-think"), ("luce conv", "convert")):
        asked = {"_LUCE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        assert said in command(env=asked).communicate(timeout=60)[0].decode()
