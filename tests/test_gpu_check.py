"""Tests of how tools/gpu_check.sh shares its stages out among GPUs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "tools" / "gpu_check.sh"


def called(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *args], capture_output=True, text=True, check=False)


def test_every_stage_is_of_one_gpu_and_four_of_them_take_under_ten_minutes() -> None:
    words = re.search(r'^all="(.*)"$', SCRIPT.read_text(), re.M)
    waits = re.search(r'^need_oracle="(.*)"$', SCRIPT.read_text(), re.M)
    assert words and waits
    for gpus in (1, 2, 4, 30):
        lines = [line.split() for line in called("shares", str(gpus)).stdout.splitlines()]
        stages = [stage for _, *of in lines for stage in of]
        assert {"build", "oracle", *stages} == set(words[1].split()) and len(set(stages)) == len(stages)
        assert len(lines) == min(gpus, len(stages))
        for _, *of in lines:
            needing = [stage in waits[1].split() for stage in of]
            assert needing == sorted(needing), "what needs the oracle comes last"
        if gpus == 4:
            assert max(int(seconds) for seconds, *_ in lines) < 480  # The rest is what starting takes.


def test_stages_that_are_named_are_shared_alone() -> None:
    assert called("shares", "2", "kernels", "suite", "peer").stdout.splitlines() == [
        "115 suite", "105 kernels peer",
    ]  # fmt: skip


def test_a_stage_that_there_is_not_is_refused_before_anything_runs() -> None:
    for args in (["nope"], ["together", "kernels", "suite nope"], ["share", "nope"], ["shares", "2", "nope"]):
        done = called(*args)
        assert (done.returncode, done.stdout) == (2, "")
        assert "no stage nope; there are build oracle" in done.stderr
