"""Kills processes while the stages or ranks of a model compute: nobody waits for them, they leave nothing, and the next
process computes the same on the same devices."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import tiny
from cut_models import DENSE
from depth import deeper
from split import two_ranks, two_stages

import luce
from luce.native import Library
from luce.planning.split import names_of

HANG_S = 60

# Reads prompts whose chunks follow each other, drafts, and has rounds follow each other, for ever. Each time it says a
# number of all that was computed. A CPU's stages have threads, one of which is slow.
PROGRAM = """
import sys, zlib
from pathlib import Path
import drive, op_run
from luce import native as core
native = core.load(Path(sys.argv[1]))
with op_run.threads_of_stages(native, 1):
    model = drive.open_model(native, Path(sys.argv[2]), sys.argv[3], head=True)
    one = drive.open_sequence(model, n_ctx=1024, n_sequences=2, n_chunk=256, n_draft=3)
engine, other = one.engine, one.engine.sequence()
while True:
    said = 0
    for each in (one, other):
        each.reset()
        for at in range(0, 384, 128):
            each.prefill([7 + 3 * i % 200 for i in range(at, at + 128)], last=at == 256)
        said = zlib.crc32(each.logits(0).tobytes(), said)
    engine.begin([core.Rows(each, (5,)) for each in (one, other)])
    for n in range(8):
        drive.follow([one, other], [2, 0] if n % 4 == 3 else [])
        said = zlib.crc32(repr(engine.wait()).encode(), said)
    said = zlib.crc32(repr(engine.wait()).encode(), said)
    print(said, flush=True)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("killed") / "model.gguf"
    return tiny.write(path, DENSE, tiny.layout(DENSE, 5), "F32")


def start(native: Library, path: Path, devices: str) -> subprocess.Popen[str]:
    """Starts the program in a group of processes of its own."""
    paths = os.pathsep.join([str(Path(luce.__file__).parent.parent), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, native.path.parent, path, devices],
        env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def shared_memory(pid: int) -> set[str]:
    """Returns the files that a process has in memory that others can open, and its segments of System V."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    mapped = {line.split(maxsplit=5)[-1] for line in maps if " /dev/shm/" in line}
    opened = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()}
    segments = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    return mapped | {each for each in opened if each.startswith("/dev/shm/")} | {
        f"segment {fields[1]}" for fields in segments if int(fields[4]) == pid
    }


def memory_free(native: Library, devices: str) -> list[int]:
    """Returns that of each GPU; a CPU's is of all processes."""
    names = names_of(devices)
    return [each.memory_free for each in native.devices() if each.name in names and not each.name.startswith("cpu")]


def until(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + HANG_S
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


def no_process(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("cut", [two_stages, *deeper(two_ranks)])
def test_a_process_that_is_killed_leaves_nothing(
    cut: Callable[[str], str], native: Library, device: str, made: Path
) -> None:
    devices, before, said = cut(device), memory_free(native, device), set[str]()
    for number in (signal.SIGKILL, signal.SIGTERM):
        with start(native, made, devices) as process:
            try:
                assert process.stdout is not None
                said.add(process.stdout.readline())  # By now it reads prompts again.
                shared = shared_memory(process.pid)
                process.send_signal(number)
                rest, errors = process.communicate(timeout=HANG_S)
            finally:
                process.kill()
        assert (process.returncode, errors) == (-number, "")
        assert until(partial(no_process, process.pid))
        assert not {each for each in shared if each.startswith("segment") or Path(each).exists()}
        assert until(lambda: all(now >= was for now, was in zip(memory_free(native, device), before, strict=True)))
        said |= set(rest.splitlines(keepends=True))
    assert len(said) == 1 and said != {""}
