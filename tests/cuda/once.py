"""What processes of one run share: a file or folder that who needs it first makes, while the others wait."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def shared(factory: pytest.TempPathFactory, name: str) -> Path:
    """Returns a folder of this name that all processes of a run have."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def once(path: Path, make: Callable[[Path], object]) -> Path:
    """Returns the path, which `make` makes elsewhere where it is not there yet: all of it, or nothing."""
    with locked(path.with_name(f"{path.name}.lock")):
        if not path.exists():
            part = path.with_name(f"{path.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            make(part)
            part.rename(path)
    return path
