"""Checks that a program in the sandbox of `luce bench` has a bounded memory, whatever it starts."""

import sys

import pytest
from sandbox_ways import both, confined

from luce.bench.sandbox import Limits, Verdict, check


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
@both
@pytest.mark.parametrize("hog", ["x = 'x' * (1 << 30)", "x = []\nwhile True: x.append(bytes(1 << 20))"])
def test_a_memory_hog_is_stopped(namespaces, hog):
    assert check(hog, Limits(60, memory_bytes=256 << 20), namespaces) == Verdict(False, "memory")


@confined
def test_processes_share_the_memory_of_a_problem():
    """All that it may have take what they can, and hold it until each has said how much that was."""
    limits = Limits(60, memory_bytes=1 << 30, processes=4)
    program = (
        "import os\n"
        "(read, write), (waits, _) = os.pipe(), os.pipe()\n"
        "def take():\n"
        "    held = []\n"
        "    try:\n"
        "        while True: held.append(bytes(1 << 20))\n"
        "    except MemoryError: return held\n"
        f"for _ in range({limits.processes} - 1):\n"
        "    if not os.fork():\n"
        "        held = take()\n"
        "        os.write(write, b'%6d' % len(held))\n"
        "        os.read(waits, 1)\n"
        "held = take()\n"
        f"each = [len(held), *(int(os.read(read, 6)) for _ in range({limits.processes} - 1))]\n"
        f"assert min(each) > 100 and sum(each) <= {limits.memory_bytes >> 20}, each\n"
    )
    assert check(program, limits) == Verdict(True, "passed")
