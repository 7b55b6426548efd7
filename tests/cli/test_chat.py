"""Runs `luce chat`: a conversation over stdin, as a process of its own and in this one."""

import os
import pty
import re
import select
import signal
import subprocess
import termios

import pytest
import scripted_model
from depth import deeper
from tiny import rewritten

from luce.text.dialects import GEMMA

SCRIPT = {"hello": ["<think>\nA greeting.\n</think>\n\nHello!"], "long": ["words " * 400]}


@pytest.fixture(scope="module")
def scripted(native, tmp_path_factory):
    return scripted_model.write(tmp_path_factory.mktemp("talk") / "talk.gguf", SCRIPT)


def test_a_conversation(luce_, scripted):
    said = "SAY hello\n/help\n/nonsense\nfirst\\\nsecond\n/clear\nplain\n/quit\nnever\n"
    result = luce_("chat", "--gguf", scripted, "--device", "cpu", "--threads", "1", "--temp", "0", stdin=said)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("<think>\nA greeting.\n</think>\n\nHello!\n") == 2
    assert "/system TEXT" in result.stdout
    assert "/nonsense is no command" in result.stdout and "Fine." in result.stdout
    assert "never" not in result.stdout


def test_a_conversation_in_gemmas_dialect(luce_, tmp_path):
    """What a model thought is shown, and is no part of what it is told in the next turn."""
    script = {"hello": ["<|channel>thought\nA greeting.\n<channel|>Hello!"]}
    path = scripted_model.write(tmp_path / "gemma.gguf", script, dialect=GEMMA)
    words = ("chat", "--gguf", path, "--device", "cpu", "--threads", "1", "--temp", "0")
    result = luce_(*words, stdin="SAY hello\nSAY hello\n/think\nSAY hello\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("<|channel>thought\nA greeting.\n<channel|>Hello!\n") == 3
    assert "thinking is on" in result.stdout


# Qwen's templates think unless they are told not to; others only where they are told to.
OFF = "{% if enable_thinking is defined and enable_thinking is false %}no thoughts{% endif %}"
ON = "{% if enable_thinking is defined and enable_thinking %}thoughts{% endif %}"


@pytest.mark.parametrize(
    ("template", "flags", "first"),
    [(OFF, (), "off"), (ON, (), "on"), (OFF, ("--no-think",), "on"), (ON, ("--think",), "off")],
)
def test_think_switches_what_the_template_does(luce_, tmp_path, template, flags, first):
    path = rewritten(tmp_path / "think.gguf", chat_template="{{ messages[-1].content }}" + template)
    words = ("chat", "--gguf", path, "--device", "cpu", "--threads", "1", *flags)
    result = luce_(*words, stdin="/think\n/think\n")
    then = {"off": "on", "on": "off"}[first]
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == [f"thinking is {first}", f"thinking is {then}"]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ messages[-1].content }}", "which the chat template does not read"),
        ("{{ raise_exception('never') }}", "tokenizer.chat_template failed: never"),
    ],
)
def test_think_is_refused_where_it_would_do_nothing(luce_, tmp_path, template, why):
    path = rewritten(tmp_path / "think.gguf", chat_template=template)
    result = luce_("chat", "--gguf", path, "--device", "cpu", "--threads", "1", stdin="/think\n")
    assert result.exit_code == 0 and result.stdout == ""
    (said,) = result.stderr.splitlines()
    assert said.startswith("Error: ") and said.endswith(why)


def test_ctrl_c_stops_the_answer_alone(command, endless):
    sizes = ("-n", "200000", "--ctx", "200000", "--spec", "off")
    process = command("chat", "--gguf", endless, "--device", "cpu", *sizes, stdin=subprocess.PIPE)
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    assert process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(b"/help\n", timeout=60)
    assert process.returncode == 0 and b"/system TEXT" in out and b"Error" not in err


def test_a_conversation_that_is_too_long(luce_, scripted):
    said = "x " * 700 + "\nSAY hello\n"
    result = luce_(
        "chat", "--gguf", scripted, "--device", "cpu", "--threads", "1", "--ctx", "512", stdin=said
    )
    assert "Error:" in result.stderr and "/clear" in result.stderr and "Hello!" in result.stdout


@pytest.mark.parametrize("endless_input", ["/dev/zero", *deeper("lines that go on", "an open quote")])
def test_an_endless_message_is_refused(command, scripted, endless_input):
    """A process that kept what it reads would take a gigabyte in a few seconds."""
    words = ("chat", "--gguf", scripted, "--device", "cpu", "--threads", "1", "--ctx", "2048")
    line = {"lines that go on": "x\\", "an open quote": "x"}.get(endless_input)
    opening = '"""' if endless_input == "an open quote" else ""
    shell = f"printf '%s' '{opening}'; exec yes '{line}'" if line else "exec cat /dev/zero"
    with subprocess.Popen(["sh", "-c", shell], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as source:
        running = command(*words, stdin=source.stdout)
        source.stdout.close()
        try:
            _, stderr = running.communicate(timeout=60)
        finally:
            running.kill()
            source.kill()
    assert running.returncode == 1
    (said,) = stderr.decode().splitlines()
    assert said == "Error: stdin gives a message of more tokens than the context holds"


def test_stdin_that_is_no_text_is_a_usage_error(command, scripted, tmp_path):
    words = ("chat", "--gguf", scripted, "--device", "cpu", "--threads", "1", "--ctx", "512")
    (tmp_path / "odd").write_bytes(b"\xff\xfe\n")
    with open(tmp_path / "odd", "rb") as odd:
        running = command(*words, stdin=odd)
        _, stderr = running.communicate(timeout=60)
    assert running.returncode == 2 and b"stdin is not UTF-8 text" in stderr and b"Traceback" not in stderr


class Terminal:
    """Runs `luce chat` on a terminal of its own: what it shows, and what is typed."""

    def __init__(self, command, gguf):
        self.screen, tty = pty.openpty()
        words = ("--gguf", gguf, "--device", "cpu", "--threads", "1", "--temp", "0")
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), tty)
        self.running = command("chat", *words, env={"TERM": "xterm", "COLUMNS": "200"}, **streams)
        self.tty, self.shown = tty, ""

    def until(self, what):
        """Reads until `what`, a pattern, is shown, and returns all that was shown since the last call."""
        while not re.search(what, self.shown):
            assert select.select([self.screen], [], [], 60)[0], self.shown
            self.shown += os.read(self.screen, 1 << 16).decode()
        shown, self.shown = self.shown, ""
        return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", shown)

    def type(self, text):
        os.write(self.screen, text.encode())


@pytest.fixture
def terminal(command, scripted):
    opened = Terminal(command, scripted)
    yield opened
    opened.running.kill()
    opened.running.wait()
    os.close(opened.screen)
    os.close(opened.tty)


PROMPT = r"\n(\x1b\[[?0-9;]*[A-Za-z])*> "


def test_a_terminal_gets_a_banner_and_a_line_with_the_speed_after_each_answer(terminal):
    shown = terminal.until("> ")
    assert "a context of" in shown and "/help" in shown
    terminal.type("SAY hello\n")
    shown = terminal.until(r"a second[^\n]*" + PROMPT)
    assert "Hello!" in shown and re.search(r"wrote \d+ in [\d.]+ s, [\d.]+ a second", shown)


def test_pasted_lines_are_one_message(terminal):
    terminal.until("> ")
    terminal.type("\x1b[200~SAY hello\n/quit\x1b[201~")
    terminal.type("\n")
    shown = terminal.until(r"wrote \d+ in[^\n]*" + PROMPT)
    assert shown.count("Hello!") == 1
    assert terminal.running.poll() is None


def test_keys_that_are_typed_meanwhile_are_not_echoed_into_the_answer(terminal):
    terminal.until("> ")
    terminal.type("SAY long\n")
    terminal.until("words words")
    assert not termios.tcgetattr(terminal.tty)[3] & termios.ECHO
    terminal.type("SAY hello\n")
    shown = terminal.until("Hello!")
    answer, ended, then = shown.partition("wrote ")
    assert ended and "hello" not in answer and "SAY hello" in then
