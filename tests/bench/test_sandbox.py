"""Checks that a program in the sandbox of `luce bench` can do nothing to its verdict, the host or pytest."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sandbox_ways import both, confined

from luce.bench import jail, sandbox
from luce.bench.sandbox import Limits, Verdict, check
from luce.errors import InternalError, UnsupportedError

EARLY = Verdict(False, "failed: ended before its test did")

linux = pytest.mark.skipif(sys.platform != "linux", reason="of Linux")


def named(name):
    """Begins a program so that the process, and what it forks, is listed by that name."""
    return f"import ctypes, os, time\nctypes.CDLL(None).prctl(15, {name.encode()!r}, 0, 0, 0)\n"


def processes(name):
    """Returns the living processes of that name."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            state = (folder / "stat").read_text() if folder.name.isdigit() else ""
        except OSError:
            continue
        if f"({name})" in state and state.rpartition(") ")[2][0] not in "ZX":
            found.append(int(folder.name))
    return found


def wait_until(condition):
    end = time.monotonic() + 300  # It is less than what they sleep.
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


# ---- verdicts


@both
def test_a_right_program_passes(namespaces):
    program = "def f(a):\n    return a + 1\nassert f(1) == 2\n"
    assert check(program, namespaces=namespaces) == Verdict(True, "passed")


@both
@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("assert 1 == 2", "failed: AssertionError"),
        ("assert 1 == 2, 'not\\nequal'", "failed: AssertionError: not"),
        ("def f(:", "failed: SyntaxError: invalid syntax (program, line 1)"),
        ("raise ValueError('\\x1b[31m')", "failed: ValueError: ?[31m"),
        ("def f(): f()\nf()", "failed: RecursionError: maximum recursion depth exceeded"),
        ("import nothing_such", "failed: ModuleNotFoundError: No module named 'nothing_such'"),
        ("import luce", "failed: ModuleNotFoundError: No module named 'luce'"),
        ("x = '\ud800'", "failed: UnicodeEncodeError: 'utf-8' codec can't encode"),
        ("x = '\0'", "failed: "),
    ],
)
def test_a_wrong_program_fails_with_its_last_line(namespaces, program, why):
    verdict = check(program, namespaces=namespaces)
    assert not verdict.passed
    assert verdict.why.startswith(why)
    assert verdict.why.isprintable()


@both
def test_a_long_reason_is_cut(namespaces):
    assert len(check("raise ValueError('x' * 10**6)", namespaces=namespaces).why) == 200


@both
@pytest.mark.parametrize("leave", ["import sys; sys.exit(0)", "raise SystemExit", "quit()"])
def test_an_exit_before_the_test_is_no_pass(namespaces, leave):
    verdict = check(f"{leave}\nassert False", namespaces=namespaces)
    assert verdict.why.startswith(("failed: SystemExit", "failed: NameError: name 'quit'"))


@both
@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "import os; os.closerange(0, 256)",
        "import os\nfor fd in range(3, 64):\n"
        "    try: os.write(fd, b'passed')\n"
        "    except OSError: pass\n"
        "os._exit(0)",
        "import os\nif os.fork():\n    os._exit(0)",  # The child runs to the end.
    ],
)
def test_a_program_that_leaves_or_talks_is_no_pass(namespaces, program):
    verdict = check(program, namespaces=namespaces)
    # Within the limits there is no fork.
    assert verdict == EARLY or verdict.why.startswith("failed: BlockingIOError")


@both
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_signal_is_named(namespaces, number):
    verdict = check(f"import os; os.kill(os.getpid(), {int(number)})", namespaces=namespaces)
    assert verdict == Verdict(False, f"failed: ended by signal {int(number)}")


@both
def test_a_program_is_main_and_alone(namespaces):
    program = (
        "import sys, pickle\n"
        "class A: pass\n"
        "assert __name__ == '__main__' and sys.modules['__main__'].A is A\n"
        "pickle.loads(pickle.dumps(A()))\n"
        "assert not {'nonce', 'job', 'execute', 'jail'} & set(globals())\n"
    )
    assert check(program, namespaces=namespaces) == Verdict(True, "passed")


# ---- limits


@both
def test_an_endless_loop_is_stopped(namespaces):
    verdict = check("while True:\n    pass", Limits(seconds=0.5), namespaces)
    assert verdict == Verdict(False, "timed out")


@both
def test_a_loop_that_catches_all_is_stopped(namespaces):
    program = (
        "import signal\n"
        "for s in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(s, signal.SIG_IGN)\n"
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass\n"
    )
    assert check(program, Limits(seconds=0.5), namespaces) == Verdict(False, "timed out")


@both
def test_a_stopped_program_is_ended(namespaces):
    program = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    assert check(program, Limits(seconds=0.5), namespaces) == Verdict(False, "timed out")


@both
def test_a_huge_file_is_stopped(namespaces):
    program = "with open('big', 'wb') as file:\n    while True: file.write(bytes(1 << 20))"
    assert check(program, Limits(file_bytes=4 << 20), namespaces).why.startswith("failed: OSError: ")


@confined
def test_many_files_are_stopped():
    program = "for i in range(1000):\n    with open(str(i), 'wb') as file: file.write(bytes(1 << 20))"
    assert "No space left" in check(program, Limits(file_bytes=4 << 20)).why
    assert "No space left" in check("for i in range(10**6): open(str(i), 'w').close()").why


@both
def test_endless_output_goes_nowhere(namespaces):
    program = "import sys\nwhile True:\n    print('x' * 100000)\n    print('x' * 100000, file=sys.stderr)"
    assert check(program, Limits(seconds=0.5), namespaces) == Verdict(False, "timed out")


@both
def test_input_is_at_its_end(namespaces):
    assert check("import sys\nassert sys.stdin.read() == ''", namespaces=namespaces).passed


@both
def test_open_files_are_limited(namespaces):
    program = "import os\nx = [os.pipe() for _ in range(1000)]"
    assert "Too many open files" in check(program, namespaces=namespaces).why


@confined
def test_processes_are_limited_and_none_is_left():
    name = f"bomb{os.getpid()}"
    count = (
        "n = 1\n"
        "try:\n"
        "    while True:\n"
        "        if not os.fork(): os.setsid(); time.sleep(900)\n"
        "        n += 1\n"
        "except BlockingIOError: pass\n"
        "assert n == 6, n\n"
    )
    assert check(named(name) + count, Limits(processes=6)) == Verdict(True, "passed")
    wait_until(lambda: not processes(name))


@confined
def test_a_fork_bomb_is_stopped_and_leaves_nothing():
    name = f"bomb{os.getpid()}"
    bomb = "while True:\n    try: os.fork()\n    except OSError: pass\n"
    most, seconds = 0, 1
    while most < 2 and seconds < 60:  # On a busy machine nobody may look in a single second.
        with ThreadPoolExecutor(1) as pool:
            verdict = pool.submit(check, named(name) + bomb, Limits(seconds=seconds, processes=8))
            while not verdict.done():
                most = max(most, len(processes(name)))
        assert verdict.result() == Verdict(False, "timed out")
        seconds *= 30
    assert 2 <= most <= 8
    wait_until(lambda: not processes(name))


@linux
def test_with_limits_alone_what_stays_in_the_group_is_ended():
    name = f"stay{os.getpid()}"
    check(named(name) + "if not os.fork(): time.sleep(900)\n", Limits(processes=10**5), namespaces=False)
    wait_until(lambda: not processes(name))


# ---- the host


@confined
def test_no_file_of_the_host_can_be_written(tmp_path):
    name = f".luce-{os.getpid()}"
    write = "for path in {}:\n    try: open(path, 'w').write('x')\n    except OSError: pass\n"
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)  # Any user may write to a file there.
        targets = [Path(at, name) for at in (folder, Path.home(), "/tmp", "/dev/shm", sys.base_prefix)]
        assert check(write.format([str(path) for path in targets])).passed
        assert not [path for path in targets if path.exists()]
    assert check(write.format([str(tmp_path / "control")]), namespaces=False).passed
    assert (tmp_path / "control").exists()  # The program does write where it may.


@confined
def test_no_file_of_the_user_can_be_read(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    secret.chmod(0o666)
    for path in (secret, Path(__file__), "/etc/passwd", "/proc/self/environ", "/dev/null"):
        assert check(f"open({str(path)!r})").why.startswith("failed: FileNotFoundError"), path
    assert check("import os\nassert os.getcwd() == '/tmp' and os.listdir() == []").passed


@both
def test_the_folder_of_a_program_is_removed(namespaces, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').close()\nos.chmod('a/b', 0)"
    assert check(program, namespaces=namespaces).passed
    assert not list(tmp_path.iterdir())


@confined
def test_the_network_is_out_of_reach():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        connect = f"import socket\nsocket.create_connection({address!r}, 2)"
        # The namespaces of bwrap have a loopback device of their own.
        nobody_there = ("failed: OSError: [Errno 101]", "failed: ConnectionRefusedError")
        assert check(connect).why.startswith(nobody_there)
        outside = "import socket\nsocket.create_connection(('192.0.2.1', 80), 2)"
        assert check(outside).why.startswith("failed: OSError: [Errno 101]")
        assert check(connect, namespaces=False).passed
    with socket.socket(socket.AF_UNIX) as server:
        name = f"\0luce-{os.getpid()}"
        server.bind(name)
        server.listen()
        connect = f"import socket\nsocket.socket(socket.AF_UNIX).connect({name!r})"
        assert check(connect).why.startswith("failed: ConnectionRefusedError")
        assert check(connect, namespaces=False).passed


@both
def test_the_environment_is_empty(namespaces, monkeypatch):
    monkeypatch.setenv("LUCE_SECRET", "x")
    program = "import os\nassert set(os.environ) <= {'LC_CTYPE'}, os.environ"
    assert check(program, namespaces=namespaces) == Verdict(True, "passed")


@both
def test_no_open_file_of_the_caller_is_inherited(namespaces, tmp_path):
    with open(tmp_path / "file", "w") as file:
        os.set_inheritable(file.fileno(), True)
        program = (
            "import os, stat\n"
            "def kind(fd):\n"
            "    try: return stat.S_IFMT(os.fstat(fd).st_mode)\n"
            "    except OSError: return None\n"
            "kinds = [kind(fd) for fd in range(64)]\n"
            "assert kinds.count(stat.S_IFIFO) == 2 and kinds.count(stat.S_IFCHR) == 2, kinds\n"
            # They are the input, the output twice, and the report.
            "assert len([k for k in kinds if k]) == 4, kinds\n"
        )
        assert check(program, namespaces=namespaces) == Verdict(True, "passed")


@both
@pytest.mark.parametrize(
    "kill", ["os.killpg(0, 9)", "os.kill(os.getppid(), 9)", "os.kill(0, 9)", "os.kill(os.getppid(), 2)"]
)
def test_a_program_that_kills_around_itself_hurts_nobody(namespaces, kill):
    verdict = check(f"import os, time\n{kill}\ntime.sleep(0.2)\nassert False", namespaces=namespaces)
    assert not verdict.passed
    assert verdict.why.startswith("failed: ")


@confined
def test_a_program_sees_no_other_process():
    program = f"import os\nassert os.getpid() == 2 and os.getppid() == 1\nos.kill({os.getpid()}, 0)"
    assert check(program).why.startswith("failed: ProcessLookupError")


@confined
def test_a_program_has_no_rights_and_gets_none():
    program = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "assert os.getresuid() == (65534,) * 3 and os.getresgid() == (65534,) * 3\n"
        "assert set(os.getgroups()) <= {65534}\n"
        "assert libc.prctl(39, 0, 0, 0, 0) == 1, 'may gain privileges'\n"
        "sets = (ctypes.c_uint32 * 6)()\n"
        "assert libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), sets) == 0 and not any(sets), list(sets)\n"
        "for flags in (1 << 28, 1 << 17, 1 << 28 | 1 << 17, 1 << 30):\n"
        "    assert libc.unshare(flags) == -1, f'unshare {flags}'\n"
        "assert libc.mount(b'none', b'/usr/lib', None, 32 | 4096, None) == -1, 'remount'\n"
        "assert libc.umount2(b'/usr/lib', 2) == -1, 'unmount'\n"
        "assert libc.chroot(b'/tmp') == -1, 'chroot'\n"
        "assert libc.ptrace(16, 1, 0, 0) == -1, 'ptrace'\n"
        "assert libc.sethostname(b'x', 1) == -1, 'host name'\n"
        "for become in (os.setuid, os.setgid):\n"
        "    try: become(0)\n"
        "    except OSError: continue\n"
        "    assert False, become\n"
    )
    assert check(program) == Verdict(True, "passed")


# ---- the caller


@confined
def test_checks_run_side_by_side():
    with ThreadPoolExecutor(4) as pool:
        passed = list(pool.map(lambda i: check(f"assert {i} % 3").passed, range(24)))
    assert passed == [bool(i % 3) for i in range(24)]


@linux
@both
def test_an_interrupt_ends_the_program(namespaces):
    name = f"int{os.getpid()}"

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            check(named(name) + "time.sleep(900)", Limits(seconds=900), namespaces)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    wait_until(lambda: not processes(name))


@linux
@both
def test_the_program_dies_with_its_caller(namespaces, tmp_path):
    name = f"die{os.getpid()}"
    call = (
        "from luce.bench import sandbox\n"
        f"sandbox.check({named(name) + 'time.sleep(900)'!r}, sandbox.Limits(seconds=900), {namespaces})"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", call], env=environment) as caller:
        try:
            wait_until(lambda: processes(name))
        finally:
            caller.kill()
    wait_until(lambda: not processes(name))


def nobodys_python():
    """Returns a Python 3.10+ that user nobody can run, or None."""
    nobody = {"user": jail.NOBODY, "group": jail.NOBODY, "extra_groups": []}
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            probe = [python, "-c", "import sys, ctypes; sys.exit(sys.version_info < (3, 10))"]
            if subprocess.run(probe, stderr=subprocess.DEVNULL, cwd="/", **nobody).returncode == 0:
                return python
        except OSError:
            continue
    return None


@confined
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests are an ordinary user's")
def test_an_ordinary_user_has_the_sandbox_too():
    python = nobodys_python()
    if python is None:
        pytest.skip("no Python here that an ordinary user can run")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        copy = Path(shutil.copy(sandbox.JAIL, folder))
        copy.chmod(0o644)
        caller = (
            "import os, sys\nfrom pathlib import Path\nfrom luce.bench import sandbox\n"
            f"sandbox.JAIL, sys.executable = Path({str(copy)!r}), {python!r}\n"
                f"os.setgroups([]); os.setgid({jail.NOBODY}); os.setuid({jail.NOBODY})\n"
            "right = sandbox.check('import os, hashlib; assert os.getpid() == 2')\n"
            f"wrong = sandbox.check({f'open({str(copy)!r})'!r})\n"
            "print(sandbox.available(), right.why, wrong.why, sep='; ')\n"
        )
        said = subprocess.run([sys.executable, "-c", caller], capture_output=True, text=True).stdout
    assert said.startswith("None; passed; failed: FileNotFoundError")


# ---- refusals


def answering(monkeypatch, status, **line):
    said = json.dumps(line).encode() if line else b""
    monkeypatch.setattr(sandbox, "_run", lambda *args: (status, said))


@confined
def test_a_bubblewrap_that_does_not_work_is_refused(monkeypatch, tmp_path):
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: str(broken))
    message = "no sandbox here: bwrap ended with status 1 before the program started"
    assert sandbox.available.__wrapped__() == message
    with pytest.raises(UnsupportedError) as caught:
        check("pass")
    assert (str(caught.value), caught.value.concerns) == (message, "sandbox")


@linux
def test_a_python_that_does_not_run_in_it_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: f"/usr/bin/{name}")  # It may not be installed here.
    answering(monkeypatch, 0, passed=False, why="failed: PermissionError: [Errno 13] hashlib.py")
    why = "failed: PermissionError: [Errno 13] hashlib.py"
    assert sandbox.available.__wrapped__() == f"no sandbox here: Python does not run in it ({why})"


def test_a_machine_without_bubblewrap_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    message = "no sandbox here: bubblewrap (bwrap) is not installed"
    assert sandbox.available.__wrapped__() == message
    with pytest.raises(UnsupportedError, match="is not installed"):
        check("pass")
    assert check("pass", namespaces=False) == Verdict(True, "passed")


def test_a_check_that_cannot_start_is_no_verdict(monkeypatch):
    answering(monkeypatch, 1)
    with pytest.raises(InternalError, match="^the check's Python, .*, ended with status 1$"):
        check("pass", namespaces=False)
    answering(monkeypatch, 0, cannot="setrlimit")
    with pytest.raises(InternalError, match="^the check could not start: setrlimit$"):
        check("pass", namespaces=False)
