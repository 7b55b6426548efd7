"""Runs `luce chat`: a conversation over stdin, as a process of its own and in this one."""

import signal
import subprocess

import pytest
import scripted_model

SCRIPT = {"hello": ["<think>\nA greeting.\n</think>\n\nHello!"], "long": ["words " * 60]}


@pytest.fixture(scope="module")
def scripted(native, tmp_path_factory):
    return scripted_model.write(tmp_path_factory.mktemp("talk") / "talk.gguf", SCRIPT)


def test_a_conversation(luce_, scripted):
    said = "SAY hello\n/help\n/think\n/nonsense\nfirst\\\nsecond\n/clear\nplain\n/quit\nnever\n"
    result = luce_("chat", "--gguf", scripted, "--device", "cpu", "--threads", "1", "--temp", "0", stdin=said)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("<think>\nA greeting.\n</think>\n\nHello!\n") == 2
    assert "/system TEXT" in result.stdout and "thinking is on" in result.stdout
    assert "/nonsense is no command" in result.stdout and "Fine." in result.stdout
    assert "never" not in result.stdout


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
