"""Confines itself, then runs a program: this script is the inside of sandbox.py. It imports nothing of luce.

It reads a job from stdin, {program, namespaces, bwrap, seconds, ...}, and writes lines to stdout. The first
of them counts: {passed, why}, or {cannot: the step that failed} where there is no sandbox to be had.

The keeper stays outside: it keeps the time, reads the report and gives the verdict. It forks bwrap, which makes the
namespaces and the file system, and starts this script again, as the program, which gives up every right, sets the
limits and runs what it was given. When bwrap dies, the kernel kills all in it. With limits alone the keeper forks the
program.
"""

import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

NOBODY = 65534
NEWUSER, NOSUID, NODEV, REMOUNT = 1 << 28, 1 << 1, 1 << 2, 1 << 5  # These are flags of unshare() and mount().
PDEATHSIG, SET_DUMPABLE, NO_NEW_PRIVS = 1, 4, 38  # These are options of prctl().
CAPABILITY_V3 = 0x20080522

STARTED = b"\0"  # run_inside() reports it first: bwrap did its part.

LINUX = sys.platform == "linux"
libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *args: Any) -> None:
    """Makes a system call by libc's function of that name. Raises OSError, which names it."""
    if getattr(libc, name)(*args) == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def die_with_parent() -> None:
    if LINUX:
        call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def write(proc: int, name: str, text: str) -> None:
    """Writes a file of /proc, of which proc is the folder: the new root has none."""
    file = os.open(name, os.O_WRONLY, dir_fd=proc)
    try:
        os.write(file, text.encode())
    except OSError as error:
        raise OSError(error.errno, f"/proc/{name}: {error.strerror}") from None
    finally:
        os.close(file)


def new_user_namespace(proc: int) -> None:
    """Moves this process into a new user namespace, where it is nobody, with all rights over it and none outside."""
    uid, gid = os.geteuid(), os.getegid()
    call("unshare", NEWUSER)
    write(proc, "self/setgroups", "deny")
    write(proc, "self/uid_map", f"{NOBODY} {uid} 1")
    write(proc, "self/gid_map", f"{NOBODY} {gid} 1")


def system_folders() -> dict[str, str]:
    """Returns what a program needs of the host, as folder to real folder: the system's libraries and this
    Python."""
    folders = {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/nix/store"}
    folders |= {sys.base_prefix, sys.base_exec_prefix}
    return {folder: os.path.realpath(folder) for folder in sorted(folders) if os.path.isdir(folder)}


def tmpfs_options(job: dict[str, Any], mode: str) -> bytes:
    return f"size={job['file_bytes']},nr_inodes=4096,mode={mode}".encode()


def forbid_shared_segments(proc: int) -> None:
    """Forbids System V's shared segments, which would outlive the limits of their makers. Ordinary users may
    do so since Linux 6.12."""
    with contextlib.suppress(OSError):
        write(proc, "sys/kernel/shmall", "0")


def give_up_rights(proc: int) -> None:
    """Becomes nobody, without a capability, in a user namespace that cannot make another one."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        call("prctl", SET_DUMPABLE, 1, 0, 0, 0)  # Without it, /proc/self would stay root's.
    new_user_namespace(proc)
    write(proc, "sys/user/max_user_namespaces", "0")
    call("capset", (ctypes.c_uint32 * 2)(CAPABILITY_V3, 0), (ctypes.c_uint32 * 6)())


def set_limits(job: dict[str, Any]) -> None:
    limits = {
        "CPU": math.ceil(job["seconds"]) + 1,  # A single thread meets the wall time first.
        "AS": job["memory_bytes"] // (job["processes"] if job["namespaces"] else 1),
        "NPROC": job["processes"],
        "FSIZE": job["file_bytes"],
        "NOFILE": job["open_files"],
        "CORE": 0,
        "MSGQUEUE": 0,
    }
    if sys.platform == "darwin":
        del limits["AS"]  # macOS refuses it.
    for name, value in limits.items():
        if kind := getattr(resource, f"RLIMIT_{name}", None):
            hard = resource.getrlimit(kind)[1]
            most = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (most, most))


def reason(error: BaseException) -> str:
    if not isinstance(error, OSError):
        return repr(error)
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)


def say(**line: Any) -> None:
    os.write(1, json.dumps(line).encode() + b"\n")


def fork(work: Callable[[], None]) -> int:
    """Runs work in a new process, which ends with it. Returns the id of that process."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException as error:
        say(cannot=reason(error))
    finally:
        os._exit(1)


def status_of(child: int) -> int:
    """Waits for it, and for orphans on the way. Its exit status as shells count: 128 + N after signal N."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def execute(program: str, nonce: bytes, report: int) -> None:
    """Runs the program as a fresh __main__. Reports the nonce if it ran to its end, else what happened."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    pid = os.getpid()
    try:
        exec(compile(program, "program", "exec", dont_inherit=True), main.__dict__)
        word = nonce
    except MemoryError:
        word = b"memory"
    except BaseException as error:
        text = f"failed: {type(error).__name__}: {str(error)[:1000]}".strip(": \n")
        word = text.partition("\n")[0].encode(errors="replace")
    if os.getpid() == pid:  # A child that the program forked does not report.
        os.write(report, word)
    os._exit(0)


def run_program(job: dict[str, Any], proc: int | None, nonce: bytes, report: int) -> None:
    die_with_parent()
    if proc is not None:
        os.setsid()
        give_up_rights(proc)
        os.close(proc)
    if LINUX:
        call("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
    set_limits(job)
    os.dup2(2, 1)  # Descriptor 2 is /dev/null: only the keeper and init have a say.
    execute(job["program"], nonce, report)


def run_bwrap(job: dict[str, Any], proc: int, nonce: bytes, report: int) -> None:
    """Becomes bwrap, which becomes init and starts run_inside()."""
    die_with_parent()
    handed = os.memfd_create("job", 0)  # The job is a file, since stdin is at its end for the program.
    os.write(handed, json.dumps({**job, "nonce": nonce.decode()}).encode())
    os.lseek(handed, 0, os.SEEK_SET)
    for fd in (proc, report):
        os.set_inheritable(fd, True)
    words = ["--die-with-parent", *(f"--unshare-{kind}" for kind in ("pid", "net", "ipc", "uts"))]
    if os.geteuid() != 0:
        words += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    for right in ("SYS_ADMIN", "SETUID", "SETGID"):  # It has these rights until give_up_rights().
        words += ["--cap-add", f"CAP_{right}"]
    for folder, source in system_folders().items():
        for parent in list(Path(folder).parents)[-2::-1]:
            # The folders that bwrap makes by itself would be the caller's alone.
            words += ["--dir", str(parent)]
        words += ["--ro-bind", source, folder]
    words += ["--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp", "--clearenv", "--"]
    python = [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", Path(__file__).read_text()]
    os.execv(job["bwrap"], ["bwrap", *words, *python, *map(str, (handed, proc, report))])


def run_inside(handed: int, proc: int, report: int) -> None:
    """Does what bwrap leaves to do: it limits the tmpfs, then runs the program."""
    with open(handed) as file:
        job = json.load(file)
    os.write(report, STARTED)
    os.environ.clear()  # noqa: TID251 - bwrap sets PWD
    sys.argv[1:] = []
    forbid_shared_segments(proc)
    call("mount", None, b"/tmp", None, REMOUNT | NOSUID | NODEV, tmpfs_options(job, "1777"))
    os.chmod("/tmp", 0o1777)
    run_program(job, proc, job["nonce"].encode(), report)


def verdict(report: bytes, nonce: bytes, status: int, late: bool) -> tuple[bool, str]:
    if report == nonce and status == 0:
        return True, "passed"
    if late:
        return False, "timed out"
    if report == b"memory" or report.startswith(b"failed: "):
        return False, report.decode(errors="replace")
    if status > 128:
        return False, f"failed: ended by signal {status - 128}"
    return False, "failed: ended before its test did"


def keep(job: dict[str, Any]) -> None:
    nonce = os.urandom(16).hex().encode()
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY) if job["namespaces"] else None
    die_with_parent()
    reading, report = os.pipe()

    def inside() -> None:
        os.close(reading)
        if proc is None:
            run_program(job, None, nonce, report)
        else:
            run_bwrap(job, proc, nonce, report)

    start = time.monotonic()
    child = fork(inside)

    def stop(number: int, frame: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, job["seconds"])
    status = status_of(child)
    signal.setitimer(signal.ITIMER_REAL, 0)
    late = time.monotonic() - start >= job["seconds"]
    os.close(report)
    os.set_blocking(reading, False)  # With limits alone, a process that is left over may hold the other end.
    try:
        heard = os.read(reading, 4096)
    except BlockingIOError:
        heard = b""
    if proc is not None and not heard.startswith(STARTED) and not late:
        say(cannot=f"bwrap ended with status {status} before the program started")
    heard = heard.removeprefix(STARTED)
    passed, why = verdict(heard, nonce, status, late)
    say(passed=passed, why=why)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this program at once, and process 1 is spared.
    try:
        if sys.argv[1:]:
            run_inside(*map(int, sys.argv[1:]))
        else:
            keep(json.load(sys.stdin))
    except OSError as error:
        say(cannot=reason(error))
