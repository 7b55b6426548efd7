"""What goes to stdout is what was decoded, and where it cannot be written one line says so."""

import json
import math
import os
import signal
import subprocess
import sys

import pytest
from depth import deeper, deeper_but

from luce.cli import stdout
from luce.cli.stdout import as_json
from luce.files.tokenizer import Tokenizer

PIECES = [b"\x1b", b"[31", b"m", "é".encode(), b"\r\x00\x07", b"\xff"]


@pytest.fixture
def odd_text(monkeypatch):
    """Lets every token stand for a piece of an escape sequence, a control character or half a character."""
    monkeypatch.setattr(Tokenizer, "bytes_of", lambda self, token, special=False: PIECES[token % len(PIECES)])


def test_text_is_written_as_it_was_decoded(luce_, odd_text, endless):
    """That is so also without the newline that a terminal gets at the end."""
    asked = ("generate", "--gguf", endless, "ab", "-n", "40")
    text = json.loads(luce_(*asked, "--json").stdout)["text"]
    assert "\x1b" in text and luce_(*asked).stdout_bytes == text.encode()


@pytest.mark.parametrize("encoding", [*deeper("ascii", "latin-1"), "utf-16"])
def test_a_pipe_gets_utf_8_and_an_object_is_whole_in_any_encoding(process, encoding):
    locale = {"PYTHONIOENCODING": encoding}
    running = process("naïve £", "-n", "3", "--json", env=locale)
    found, stderr = running.communicate(timeout=60)
    assert stderr == b"" and json.loads(found.decode("ascii"))["finish_reason"] == "length"
    text, _ = process("naïve £", "-n", "3", env=locale).communicate(timeout=60)
    assert text == json.loads(found)["text"].encode()


def test_json_has_no_nan():
    value = {"a": [1.5, math.nan, (math.inf, -math.inf)], "b": {"c": math.nan, "d": "é\x1b"}}
    assert as_json(value) == r'{"a": [1.5, null, [null, null]], "b": {"c": null, "d": "\u00e9\u001b"}}'


COMMANDS = [
    ("generate", "--gguf", "{}", "ab", "-n", "4"),
    ("generate", "--gguf", "{}", "ab", "-n", "4", "--json"),
    ("generate", "--gguf", "{}", "ab", "-n", "4", "--jsonl"),
    ("probe-gguf", "{}", "--tensors"),
    ("probe-gguf", "{}", "--json"),
    ("devices",),
    ("bench", "sweep", "--rows", "1", "--ctx", "0", "--steps", "1", "--gammas", "1"),
    ("--help",),
    ("chat", "--gguf", "{}", "-n", "4", "--ctx", "300"),
]


def ended(command, tiny_gguf, words, out):
    """Returns the status and the lines on stderr of a command that writes there."""
    words = (tiny_gguf if word == "{}" else word for word in words)
    running = command(*words, stdout=out, stdin=subprocess.PIPE)
    os.close(out)
    _, stderr = running.communicate(b"ab", timeout=120)
    return running.returncode, stderr.decode().splitlines()


@pytest.mark.long
@pytest.mark.parametrize("words", COMMANDS)
def test_a_stdout_that_fails_is_one_line_and_exit_1(command, tiny_gguf, words):
    found = ended(command, tiny_gguf, words, os.open("/dev/full", os.O_WRONLY))
    assert found == (1, ["Error: stdout cannot be written: No space left on device"])


@pytest.mark.parametrize("words", deeper_but([*COMMANDS, ("--help",)], COMMANDS[0], ("--help",)))
def test_a_pipe_that_nobody_reads_is_a_quiet_end(command, tiny_gguf, words):
    """As behind `| head`: the status is that of a program which such a pipe ends."""
    reader, writer = os.pipe()
    os.close(reader)
    assert ended(command, tiny_gguf, words, writer) == (128 + signal.SIGPIPE, [])


def test_text_on_a_terminal_has_no_control_characters_but_line_breaks_and_tabs(monkeypatch, capsys):
    text = "a\tb\r\n\x1b]0;title\x07\x1b[2J\x7f\x9b0m\x00é\n"
    stdout.put_text(text)
    assert capsys.readouterr().out == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for piece in text:
        stdout.put_text(piece)
    said = capsys.readouterr().out
    assert said == "a\tb\n␛]0;title␇␛[2J␡�0m␀é\n"


@pytest.mark.parametrize("words", [("ab", "-n", "2"), ("ab", "-n", "2", "--json")])
def test_a_stdout_that_is_closed_is_one_line(command, tiny_gguf, words):
    running = command("generate", "--gguf", tiny_gguf, *words, stdout=None, preexec_fn=lambda: os.close(1))
    assert running.communicate(timeout=60)[1].decode().splitlines() == ["Error: stdout is closed"]
    assert running.returncode == 1


HELPS = [(), ("bench", "prompts"), ("generate",), ("convert",), ("bench",)]


@pytest.mark.parametrize("words", deeper_but(HELPS, HELPS[0]))
def test_help_for_a_stdout_that_is_closed_is_one_line(command, words):
    running = command(*words, "--help", stdout=None, preexec_fn=lambda: os.close(1))
    assert running.communicate(timeout=60)[1].decode().splitlines() == ["Error: stdout is closed"]
    assert running.returncode == 1


def test_a_reader_that_leaves_ends_the_text(process, endless):
    running = process("ab", "-n", "200000", gguf=endless)
    assert running.stdout.read(1)
    running.stdout.close()
    stderr = running.stderr.read().decode()
    assert running.wait(timeout=60) == 128 + signal.SIGPIPE
    assert stderr == ""


def test_a_stderr_that_is_closed_changes_nothing(process, endless):
    """The warning of a full context goes nowhere, least of all to stdout."""
    asked = ("7" * 30, "--ctx", "40", "-n", "50")
    expected, warned = process(*asked, gguf=endless).communicate(timeout=60)
    running = process(*asked, gguf=endless, stderr=None, preexec_fn=lambda: os.close(2))
    assert running.communicate(timeout=60)[0] == expected and running.returncode == 0
    assert b"Warning: " in warned


# ---- stderr


def shown_on_a_terminal(process, *args, interrupt=False, **options):
    """Returns (stdout, what a terminal showed as stderr, exit code) of a process whose stderr is a terminal.
    """
    ours, theirs = os.openpty()
    running = process(*args, stderr=theirs, **options)
    os.close(theirs)
    if interrupt:
        running.stdout.read(1)
        running.send_signal(signal.SIGINT)
    shown = b""
    while True:
        try:
            chunk = os.read(ours, 4096)
        except OSError:  # Linux says so that the other end is closed.
            break
        if not chunk:
            break
        shown += chunk
    os.close(ours)
    stdout = running.stdout.read().decode(errors="replace")
    return stdout, shown.decode(), running.wait(timeout=60)


def test_a_terminal_sees_a_spinner_and_one_summary_line(process):
    stdout, shown, code = shown_on_a_terminal(process, "ab", "-n", "3")
    assert code == 0 and "loading the model" in shown and "reading the prompt: 2 tokens" in shown
    assert "read 2 tokens in" in shown and "nothing drafted" in shown
    assert "tokens" not in stdout


def test_quiet_silences_the_terminal(process):
    assert shown_on_a_terminal(process, "ab", "-n", "3", "--quiet")[1:] == ("", 0)


def test_ctrl_c_keeps_the_summary(process, endless):
    _, shown, code = shown_on_a_terminal(process, "ab", "-n", "200000", gguf=endless, interrupt=True)
    lines = shown.replace("\r", "").rstrip("\n").split("\n")
    assert code == 130 and lines[-1] == "Error: interrupted"
    assert "read 2 tokens in" in shown and "interrupted" in shown


def test_without_a_terminal_stderr_has_warnings_and_errors_alone(process, endless):
    _, nothing = process("ab", "-n", "3", gguf=endless).communicate(timeout=60)
    _, warned = process("7" * 30, "--ctx", "40", "-n", "50", gguf=endless).communicate(timeout=60)
    assert nothing == b"" and warned.decode().splitlines() == [
        "Warning: the text ends because the context of 40 tokens (--ctx) is full"
    ]
