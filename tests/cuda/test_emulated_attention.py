"""Runs checks of the kernels around attention on a CPU, as test_emulated_kernels does."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from test_emulated_kernels import build

PARTS: dict[str, list[str]] = {
    "attention_plan": [],
    "attention_heads": ["attention_heads.cu", "norm_rope.cu", "kv_pages.cu"],
    "nextn": ["nextn.cu", "rowmm_pack.cu"],
}


@pytest.mark.parametrize("part", PARTS)
def test_kernels_around_attention(part: str, tmp_path: Path) -> None:
    program = build(tmp_path, PARTS[part], [f"{part}_check.cu"], f"check_{part}(false)")
    run = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
