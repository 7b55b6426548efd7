"""Plans launches for the cards that people have: a plan is a pure function of what a device can do, without a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND = ["c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/native/kernels", f"-I{ROOT}/native/src"]
SOURCES = sorted((ROOT / "tests/cuda/launch_plans").glob("*.cpp"))


def test_plans_fit_every_card(tmp_path: Path) -> None:
    program = tmp_path / "launch_plans"
    checked = ["-O1", "-fsanitize=undefined", "-fno-sanitize-recover"]
    subprocess.run([*COMMAND, *checked, *SOURCES, "-o", program], check=True)
    ran = subprocess.run([program], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    reserves = [line for line in ran.stdout.splitlines() if line.startswith("| ")]
    page = (ROOT / "docs/gpus.md").read_text()
    assert len(reserves) == 13
    assert not [line for line in reserves if line not in page], "docs/gpus.md's table of reserves"


def test_plans_include_no_header_of_cuda() -> None:
    made = subprocess.run([*COMMAND, "-M", *SOURCES], capture_output=True, text=True, check=True)
    assert "launch_plan.h" in made.stdout and "cuda" not in made.stdout.replace("tests/cuda", "")
