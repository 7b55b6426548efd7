"""Tells a lack of memory from other failures, and asks for room where a lack of it would end the process."""

from __future__ import annotations

import mmap
import resource
from pathlib import Path

from luce.errors import OutOfMemory

# The dynamic loader says so of a library, and Python of a thread.
_LACKS = ("failed to map segment", "cannot allocate memory", "cannot map", "can't start new thread")


def require(n_bytes: int, whose: str) -> None:
    """Raises OutOfMemory where the address space has no room for so many bytes.

    Libraries in Rust abort, and numpy may crash, where they find no memory: what calls them asks before.
    """
    try:
        mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ).close()
    except OSError:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        left = max(0, resource.getrlimit(resource.RLIMIT_AS)[0] - pages * mmap.PAGESIZE) >> 20
        needed = f"{n_bytes >> 20} MiB of address space for {whose}"
        raise OutOfMemory(f"out of memory: {needed} are needed, {left} MiB are left (ulimit -v)") from None


def lacks_memory(error: BaseException | None) -> bool:
    """Says whether a library or a thread lacked memory, which Python reports as an ImportError or as a
    RuntimeError. Whoever raised another error for it may have said more."""
    while error is not None:
        kinds = isinstance(error, ImportError | RuntimeError | OSError)
        if isinstance(error, MemoryError) or kinds and any(why in str(error).lower() for why in _LACKS):
            return True
        error = error.__cause__ or error.__context__
    return False
