"""Tests of how tools/gpu_check.sh shares its stages out among GPUs, and of what its sanitizers look at."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from checkout import ROOT

SCRIPT = ROOT / "tools" / "gpu_check.sh"


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


# A compiler that leaves what it was called with, and what a source includes, in place of an object.
NVCC = """#!/bin/bash
calls=$(dirname "$0")/calls
echo "$*" >>"$calls"
while (($#)); do
    case $1 in -o) to=$2 ;; -MF) deps=$2 ;; -c) source=$2 ;; esac
    shift
done
touch "$to"
[[ -z ${deps:-} ]] || c++ -MM -MG -x c++ -I native/kernels "$source" >"$deps"
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.long
def test_kernels_with_rings_are_compiled_again_for_racecheck_and_no_others(tmp_path: Path) -> None:
    program(tmp_path / "bin" / "nvcc", NVCC)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "ARCH": "90"}
    calls = tmp_path / "bin" / "calls"

    def compiled(*form: str) -> set[str]:
        calls.write_text("")
        subprocess.run([SCRIPT.parent / "build_checks.sh", tmp_path / "work", *form], env=env, check=True)
        lines = [line for line in calls.read_text().splitlines() if " -c " in line]
        assert all(("-DLUCE_EVERY_LANE_ARRIVES" in line) == bool(form) for line in lines)
        assert all("compute_90a" in line for line in lines)
        return {re.findall(r" -c \S*/(\S+\.cu) ", line)[0] for line in lines}

    everything = compiled()
    kernels = SCRIPT.parent.parent / "native" / "kernels"
    forms = re.findall(r"rowmm_kernel_of<(\d.*)>", (kernels / "matmul" / "forms.cu").read_text())
    assert len(forms) > 3  # Each is compiled by itself.
    rings = {f"form_{form.replace(', ', '_')}.cu" for form in forms} | {"norm_first.cu", "whole_k.cu"}
    assert ({path.name for path in kernels.rglob("*.cu")} - {"forms.cu"} | rings) < everything
    again = compiled("racecheck")
    assert {"attention.cu", *rings} <= again < everything and "conv.cu" not in again
    assert "kernel_check_racecheck" in calls.read_text() and "bench/racecheck_ring.cu" in calls.read_text()


SANITIZER = """#!/bin/bash
[[ $1 != --version ]] || { echo Version 1; exit; }
echo "$*" >>"$0.calls"
case $* in
    *racecheck_ring)
        echo "Race reported between Write access at void race<(Fill)0>(const uint4 *)"
        [[ ! -e $0.wrong ]] || echo "Race reported between Write access at void every_lane<(Fill)1>(x)" ;;
    *) echo "2 checks, 0 failed"; echo "= SUMMARY: 0 errors" ;;
esac
"""


def sanitized(tmp_path: Path, *, wrong: bool) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    work = tmp_path / "work"
    sanitizer = work / "site" / "nvidia" / "cu13" / "bin" / "compute-sanitizer"
    program(sanitizer, SANITIZER)
    if wrong:
        Path(f"{sanitizer}.wrong").touch()
    for name in ("kernel_check", "kernel_check_racecheck", "racecheck_ring"):
        program(work / name, "#!/bin/sh\n[ $1 != help ] || echo 'usage .. of these parts: rowmm capture'\n")
    (work / "done").mkdir(exist_ok=True)
    (work / "done" / "build-racecheck").touch()
    folders = {"GPU_WORK": str(work), "OUT": str(tmp_path / "out"), "GPU_KIT": str(tmp_path / "kit")}
    program(tmp_path / "bin" / "python3", "#!/bin/sh\n")  # It would say luce's version.
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    env = {**os.environ, **folders, "PATH": path}
    done = subprocess.run([SCRIPT, "sanitize"], env=env, capture_output=True, text=True, check=False)
    return done, Path(f"{sanitizer}.calls").read_text().splitlines()


def test_racecheck_alone_looks_at_the_build_in_which_every_lane_arrives(tmp_path: Path) -> None:
    done, calls = sanitized(tmp_path, wrong=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rings reported: race<(Fill)0>(" in done.stdout
    for tool, checks in (("racecheck", "_racecheck"), ("memcheck", ""), ("synccheck", "")):
        of_tool = [call for call in calls if f"--tool {tool}" in call and "few" in call]
        assert sorted(call.split("/")[-1] for call in of_tool) == [
            f"kernel_check{checks} few {part}" for part in ("capture", "rowmm")
        ]


def test_calls_that_fail_are_reported_in_all_parts_but_the_one_that_makes_them_fail(tmp_path: Path) -> None:
    _, calls = sanitized(tmp_path, wrong=False)
    silent = [call for call in calls if "--report-api-errors no" in call]
    assert [call.split()[-1] for call in silent] == ["capture"] and "--tool memcheck" in silent[0]


def test_a_racecheck_that_reports_a_ring_in_which_every_lane_arrives_fails(tmp_path: Path) -> None:
    done, _ = sanitized(tmp_path, wrong=True)
    assert done.returncode != 0 and "rings failed or was cut" in done.stdout


@pytest.mark.long
def test_racecheck_has_its_build_where_a_stage_needs_it_alone(tmp_path: Path) -> None:
    done = tmp_path / "work" / "done"
    done.mkdir(parents=True)
    for name in ("library", "checks", "racecheck"):
        (done / f"build-{name}").touch()
    folders = {
        "GPU_WORK": str(tmp_path / "work"),
        "OUT": str(tmp_path / "out"),
        "GPU_KIT": str(tmp_path / "kit"),
    }
    env = {**os.environ, **folders}
    for streams, needed in (("kernels suite", False), ("kernels sanitize", True)):
        # No oracle is needed, and the stages themselves fail at once: there is nothing of what they run.
        run = [SCRIPT, "together", streams]
        said = subprocess.run(run, env={**env, "WITHIN": "5"}, capture_output=True, text=True, check=False)
        assert ("-- build-racecheck: done before" in said.stdout) is needed, said.stdout
