"""Presses Ctrl-C at any moment: exit 130, one line, and nothing of it is lost."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import drive
import pytest
from checkout import HEADER
from command_line import one_line

from luce import native as _native
from luce.cli.command import CtrlC
from luce.decode.generation import Generation


@pytest.fixture
def press(foreground, monkeypatch):
    """Gives press(), which is Ctrl-C while the engine's thread is here, and returns when it was handled."""
    handled, handle = threading.Event(), CtrlC._press

    def handling(self, *args):
        handle(self, *args)
        handled.set()

    def press():
        for _ in range(60):  # One that comes just before that thread waits is seen when it next wakes.
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            if handled.wait(1):
                return
        raise AssertionError("Ctrl-C was not handled")

    monkeypatch.setattr(CtrlC, "_press", handling)
    return press


def test_ctrl_c_while_text_streams_exits_130(process, endless):
    running = process("ab", "-n", "200000", gguf=endless)
    assert running.stdout.read(1)
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=60)
    assert running.returncode == 130
    assert stderr.decode().splitlines() == ["Error: interrupted"]


@pytest.mark.parametrize("verb", ["begin", "chunk", "offer", "landed", "emit"])
@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_in_any_state_exits_130(luce_, endless, monkeypatch, press, verb, as_json):
    pressed = []

    def interrupted(self, *given):
        if not pressed:
            pressed.append(True)
            press()
        return original(self, *given)

    original = getattr(Generation, verb)
    monkeypatch.setattr(Generation, verb, interrupted)
    before = signal.getsignal(signal.SIGINT)
    result = luce_("generate", "--gguf", endless, "ab", *(["--json"] if as_json else []))
    assert result.exit_code == 130
    assert one_line(result) == "Error: interrupted"
    if as_json:
        assert json.loads(result.stdout)["finish_reason"] == "cancelled"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_does_not_wait_for_the_round(luce_, endless, monkeypatch, press):
    def interrupted(self, landed):
        press()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        raise AssertionError("the second one was ignored")

    monkeypatch.setattr(Generation, "landed", interrupted)
    result = luce_("generate", "--gguf", endless, "ab")
    assert result.exit_code == 130 and one_line(result) == "Error: interrupted"


@pytest.mark.usefixtures("foreground")
@pytest.mark.parametrize(
    "place",
    [
        "planning.opened.probe",
        "planning.opened.Tokenizer",
        "planning.opened.plan",
        "decode.engine.Engine.__init__",
    ],
)
@pytest.mark.parametrize("words", [["generate", "ab"], ["chat"]], ids=["generate", "chat"])
def test_ctrl_c_while_loading_exits_130(luce_, monkeypatch, place, words):
    def interrupted(*args, **options):
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it was ignored")

    monkeypatch.setattr(f"luce.{place}", interrupted)
    result = luce_(words[0], "--gguf", "{}", *words[1:])
    assert result.exit_code == 130 and one_line(result) == "Error: interrupted"


@pytest.mark.parametrize(("call", "budget"), [("prefill", 1), ("prefill", 9), ("commit", 2)])
def test_ctrl_c_in_a_call_of_the_core_is_not_lost(luce_, monkeypatch, press, call, budget):
    """Python sees the signal when the call returns: the text may be whole by then."""

    def interrupted(self, *args):
        result = original(self, *args)
        monkeypatch.setattr(of, call, original)
        press()
        return result

    of = _native.Engine if call == "prefill" else _native.Sequence
    original = getattr(of, call)
    monkeypatch.setattr(of, call, interrupted)
    result = luce_("generate", "--gguf", "{}", "ab", "-n", budget, "--json")
    assert result.exit_code == 130 and one_line(result) == "Error: interrupted"
    found = json.loads(result.stdout)
    whole = len(found["tokens"]) == budget
    assert found["finish_reason"] == ("length" if whole else "cancelled") and whole == (budget < 9)


@pytest.mark.parametrize("call", ["draft", "verify"])
def test_ctrl_c_cancels_the_next_step_of_the_core(luce_, endless, monkeypatch, press, call):
    """It does so between the draft and the verify of a round too, where the generation itself is not asked. On a GPU,
    rounds are begun: some behind the round ahead with their drafts in one call, and in a turn that ends a round the
    next one too, before anybody is asked."""
    steps, begun = [], []

    def step(name, original):
        def run(self, items):
            steps.append(name)
            begun.extend(["begin"] if original is begin else [])
            if name == call and steps.count(name) == 2:
                press()
            return original(self, items)

        return run

    begin = _native.Engine.begin
    for name, verb in (("draft", "draft"), ("verified", "verify"), ("begin", "verify")):
        monkeypatch.setattr(_native.Engine, name, step(verb, getattr(_native.Engine, name)))
    head = ["--mtp-gguf", endless, "--mtp-gamma", "2"]
    result = luce_("generate", "--gguf", endless, "ab", *head, "--json")
    assert result.exit_code == 130 and one_line(result) == "Error: interrupted"
    assert steps[:2] == ["draft", "verify"] and steps[-1] == call
    assert 2 <= steps.count(call) <= 2 + bool(begun), "at most the round that was begun meanwhile ends"


def test_ctrl_c_stays_ignored_in_the_background(luce_, monkeypatch):
    def interrupted(self, landed):
        signal.raise_signal(signal.SIGINT)
        return original(self, landed)

    original = Generation.landed
    monkeypatch.setattr(Generation, "landed", interrupted)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert luce_("generate", "--gguf", "{}", "ab", "-n", "3").exit_code == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_cancel_waits_for_no_lock(native, tiny_gguf, device, tmp_path):
    """A signal handler may have interrupted the one who holds it: cffi's, when it looks a function up. The
    FFI has a lock where the header was parsed at the start."""
    shutil.copy(HEADER, tmp_path)
    core = _native.load(native.path.parent, tmp_path / "luce.h")
    with drive.open_model(core, tiny_gguf, device) as model, drive.open_engine(model, n_ctx=64) as engine:
        with core.ffi._lock:
            thread = threading.Thread(target=engine.cancel, daemon=True)
            thread.start()
            thread.join(timeout=120)
            assert not thread.is_alive()


@pytest.mark.parametrize("module", ["click", "tokenizers", "luce.cli.options", "luce.decode.engine"])
def test_ctrl_c_during_an_import_is_told_once(tmp_path, module):
    program = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Presses:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Presses())\n"
        "sys.argv = ['luce', 'generate', 'x', '-n', '1']\n"
        "from luce.__main__ import main\n"
        "main()\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Error: interrupted\n")


def test_ctrl_c_at_the_very_end_is_told_once(tmp_path):
    """A second one, while Python ends, prints no traceback."""
    program = (
        "import atexit, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "atexit.register(signal.raise_signal, signal.SIGINT)\n"
        "from luce.cli import commands\n"
        "commands.probe = lambda *a: signal.raise_signal(signal.SIGINT)\n"
        "from luce.data import BOX\n"
        "sys.argv = ['luce', 'probe-gguf', str(BOX)]\n"
        "from luce.__main__ import main\n"
        "main()\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Error: interrupted\n")
