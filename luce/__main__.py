"""The `luce` command and `python -m luce`."""

import mmap
import os
import sys

MIB = 1 << 20


def main() -> None:
    """Runs the command line. What goes wrong while it is still being imported is one line as well."""
    try:
        _require_room()
        from luce.cli import main as run
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except MemoryError:
        _fail("out of memory", 1)
    except (ImportError, OSError) as error:
        _fail(f"luce cannot start: {' '.join(str(error).split())[:500]}", 1)
    try:
        run()
    except KeyboardInterrupt:
        _fail("interrupted", 130)


def _require_room() -> None:
    """Raises MemoryError where the address space does not suffice to import luce.

    numpy's OpenBLAS takes 40 MiB a thread. Where it finds none, it ends the process or sends it an interrupt.
    CPython aborts where one MemoryError meets another. The figures are of Linux, x86-64 and numpy 2.
    """
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        mmap.mmap(-1, (72 + 41 * min(threads, 64)) * MIB, mmap.MAP_PRIVATE, mmap.PROT_READ).close()
    except OSError:
        raise MemoryError from None


def _fail(message: str, code: int) -> None:
    print(f"Error: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
