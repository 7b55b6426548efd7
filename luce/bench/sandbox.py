"""Runs a program that nobody has read: a model's completion and the test of its problem.

The program runs in Linux namespaces of its own (user, process, mount, network, ipc, uts), as nobody, without
a capability or a way to get one. It sees the system's libraries and Python's folder, read-only, and a small
tmpfs, where it starts; no file of the user, no network, no variable of the environment, no process but its
own. When it ends, or its time does, everything that it started ends with it. Bubblewrap makes the namespaces;
jail.py is what happens around it and inside.

It passes if it runs to its end: only then jail.py reports a nonce, so leaving early is no pass. What remains:
- a program that searches its interpreter for the nonce can forge a pass; that harms only the score;
- memory_bytes is shared out among as many processes as there may be; what they keep in files that have no
  name (memfd) is extra, at most open_files of file_bytes, and before Linux 6.12, for ordinary users, so are
  System V's shared segments;
- Python and the system's libraries can be read, and the kernel itself is the wall;
- with limits alone memory_bytes holds for each process, and the program has all the caller's rights to
  files, network and processes, what leaves its process group outlives it, and for root the limit of
  processes has no effect.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from luce.errors import InternalError, UnsupportedError

JAIL = Path(__file__).with_name("jail.py")
# The probe needs Python's own folder and the system's libraries.
PROBE = "import ctypes, hashlib, math, random, re, typing"
GRACE_S = 10.0  # Starting and ending may take so long beside the time itself, which jail.py keeps.


@dataclass(frozen=True)
class Limits:
    """This is what one program may use."""

    seconds: float = 5.0  # It is wall time, above 0. One process has a second more of CPU time.
    # It bounds address space: in namespaces that of all processes together, else that of each.
    memory_bytes: int = 512 << 20
    processes: int = 1  # It counts threads too, at one time.
    file_bytes: int = 4 << 20  # It bounds one file and, in namespaces, all files together.
    open_files: int = 16


@dataclass(frozen=True)
class Verdict:
    """This is what became of a program."""

    passed: bool
    why: str  # It is one printable line: passed, timed out, memory, or failed with the traceback's last line.


def check(program: str, limits: Limits = Limits(), namespaces: bool = True) -> Verdict:
    """Runs the program, which passes if it runs to its end without an exception.

    namespaces=False sets the limits, in a temporary folder and with an empty environment, and confines
    nothing else. Raises UnsupportedError where this machine has no bubblewrap, or none that works.
    """
    bwrap = shutil.which("bwrap") if namespaces else ""
    if bwrap is None:
        raise UnsupportedError("no sandbox here: bubblewrap (bwrap) is not installed", concerns="sandbox")
    ways = {"namespaces": namespaces, "bwrap": bwrap}
    job = json.dumps({"program": program, **ways, **asdict(limits)})
    with nullcontext("/") if namespaces else _temporary() as folder:
        status, said = _run(job, folder, limits.seconds + GRACE_S)
    if status is None:
        return Verdict(False, "timed out")
    if not said:
        if status < 0:  # With limits alone, a program can kill its keeper.
            return Verdict(False, f"failed: ended the check by signal {-status}")
        raise InternalError(f"the check's Python, {sys.executable}, ended with status {status}")
    answer = json.loads(said.partition(b"\n")[0])
    if cannot := answer.get("cannot"):
        if not namespaces:
            raise InternalError(f"the check could not start: {cannot}")
        raise UnsupportedError(f"no sandbox here: {cannot}", concerns="sandbox")
    return Verdict(answer["passed"], _one_line(answer["why"]))


@cache
def available() -> str | None:
    """Returns None where a program runs in bubblewrap on this machine, which is tried once; else one line that
    says why not."""
    try:
        verdict = check(PROBE)
    except UnsupportedError as error:
        return str(error)
    return None if verdict.passed else f"no sandbox here: Python does not run in it ({verdict.why})"


def _run(job: str, folder: str, seconds: float) -> tuple[int | None, bytes]:
    """Returns the exit status of jail.py, None where it outlived the seconds, and what it said."""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(JAIL)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={},
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(job.encode(), timeout=seconds)
            return process.returncode, said
        except subprocess.TimeoutExpired:
            return None, b""
        finally:  # This is done on an interrupt too.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="luce-check-", ignore_cleanup_errors=True)


def _one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:200]
