"""The team of threads that shares a CPU's work (native/src/step/threads.h)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from checkout import ROOT


@pytest.mark.long
def test_helpers_stay_through_long_parts(tmp_path: Path) -> None:
    program, source = tmp_path / "check", ROOT / "native/src"
    sources = [ROOT / "tests/core/step/threads_check.cpp", source / "step/threads.cpp"]
    subprocess.run(
        ["c++", "-std=c++17", "-O1", "-pthread", "-I", source, *sources, "-o", program], check=True
    )
    run = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout
