"""Tells a lack of memory from other failures, and asks for room where a lack of it would end the process, or
would leave it waiting for ever."""

from __future__ import annotations

import mmap
import resource
from pathlib import Path

from luce.errors import OutOfMemory

# glibc reserves HEAP for each thread that allocates, and a thread's stack has 8 MiB where ulimit -s says
# nothing else. Python then takes less than BEGINNING until the thread runs.
HEAP, STACK, BEGINNING = 64 << 20, 8 << 20, 2 << 20
# The dynamic loader says so of a library, and Python of a thread.
_LACKS = ("failed to map segment", "cannot allocate memory", "cannot map", "can't start new thread")


def require(n_bytes: int, whose: str) -> None:
    """Raises OutOfMemory where the address space has no room for so many bytes.

    Libraries in Rust abort, and numpy may crash, where they find no memory: what calls them asks before.
    """
    if not _has(n_bytes):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        left = max(0, resource.getrlimit(resource.RLIMIT_AS)[0] - pages * mmap.PAGESIZE) >> 20
        needed = f"{n_bytes >> 20} MiB of address space for {whose}"
        raise OutOfMemory(f"out of memory: {needed} are needed, {left} MiB are left (ulimit -v)")


def require_thread() -> None:
    """Raises OutOfMemory where a thread might find no memory as it starts. Python prints that it ended then,
    and waits for ever until it runs.

    A thread takes its stack, then a heap if there is one to be had, and then what Python needs. Without a
    heap each allocation takes pages of its own.
    """
    said = resource.getrlimit(resource.RLIMIT_STACK)[0]
    stack = STACK if said == resource.RLIM_INFINITY else said
    taken = stack + HEAP if _has(stack + HEAP) else stack
    require(taken + BEGINNING, "a thread")


def _has(n_bytes: int) -> bool:
    try:
        mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ).close()
    except OSError:
        return False
    return True


def lacks_memory(error: BaseException | None) -> bool:
    """Says whether a library or a thread lacked memory, which Python reports as an ImportError or as a
    RuntimeError. Whoever raised another error for it may have said more."""
    while error is not None:
        kinds = isinstance(error, ImportError | RuntimeError | OSError)
        if isinstance(error, MemoryError) or kinds and any(why in str(error).lower() for why in _LACKS):
            return True
        error = error.__cause__ or error.__context__
    return False
