"""Bounds what a HumanEval answer may take in all: its processes together, and what would outlive them."""

import os

import pytest
from sandbox_ways import confined

from luce.bench.sandbox import Limits, Verdict, check

HOARD = """
import os
reading, writing = os.pipe()
while True:
    try:
        if os.fork():
            continue
    except BlockingIOError:
        break
    held = []
    try:
        while True: held.append(bytes(1 << 20))
    except MemoryError:
        os.write(writing, bytes([len(held)]))
        while True: pass
sizes = os.read(reading, 1)
while len(sizes) < 3: sizes += os.read(reading, 1)
raise ValueError(sum(sizes))
"""


@confined
def test_memory_is_bounded_for_all_processes_together():
    """Three children take all they can at once: together it is less than the limit, and not next to nothing.
    """
    limits = Limits(60, memory_bytes=400 << 20, processes=4)
    why = check(HOARD, limits).why
    assert why.startswith("failed: ValueError: ")
    assert 100 < int(why.rpartition(" ")[2]) < 300


@confined
def test_a_program_has_one_process_unless_it_is_given_more():
    for start in ("os.fork()", "threading.Thread(target=print).start()"):
        assert not check(f"import os, threading\n{start}").passed


@confined
@pytest.mark.skipif(os.geteuid() != 0, reason="of Linux 6.12 for ordinary users")
def test_no_shared_segment_outlives_its_process():
    program = "import ctypes\nassert ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) == -1"
    assert check(program) == Verdict(True, "passed")
