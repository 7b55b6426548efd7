"""Counts the CPUs: what affinity and the control groups' quotas leave, and what a build needs of one."""

import json
import os
import platform

import pytest
from checkout import HEADER

from luce import native as _native
from luce.errors import Error
from luce.planning import cpus

V2 = "0::/user.slice/luce.scope\n"
V1 = "3:memory:/x\n4:cpu,cpuacct:/docker/abc\n"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        (None, {}, 8),
        (V2, {}, 8),
        (V2, {"user.slice/luce.scope/cpu.max": "max 100000"}, 8),
        (V2, {"user.slice/luce.scope/cpu.max": "200000 100000"}, 2),
        (V2, {"user.slice/luce.scope/cpu.max": "250000 100000"}, 3),
        (V2, {"user.slice/luce.scope/cpu.max": "10000 100000"}, 1),
        (V2, {"user.slice/luce.scope/cpu.max": "max 100000", "user.slice/cpu.max": "400000 100000"}, 4),
        (V2, {"cpu.max": "300000 100000"}, 3),  # In a container the path is the host's.
        (V2, {"user.slice/luce.scope/cpu.max": "9900000 100000"}, 8),
        (V2, {"user.slice/luce.scope/cpu.max": "nonsense"}, 8),
        (V1, {"cpu/docker/abc/cpu.cfs_quota_us": "-1", "cpu/docker/abc/cpu.cfs_period_us": "100000"}, 8),
        (V1, {"cpu/docker/abc/cpu.cfs_quota_us": "1500", "cpu/docker/abc/cpu.cfs_period_us": "1000"}, 2),
        (V1, {"cpu/cpu.cfs_quota_us": "500000", "cpu/cpu.cfs_period_us": "100000"}, 5),
        ("garbage", {}, 8),
    ],
)
def test_a_quota_of_the_control_groups_counts(tmp_path, monkeypatch, groups, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    if groups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert cpus.usable(tmp_path) == expected


def test_generate_takes_the_cpus_of_its_affinity(process):
    one = {min(os.sched_getaffinity(0))}
    running = process("ab", "-n", "1", "--json", preexec_fn=lambda: os.sched_setaffinity(0, one))
    stats = json.loads(running.communicate(timeout=60)[0])["stats"]
    assert stats["threads"] == stats["plan"]["threads"]["value"] == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("sse4_2 avx2 fma f16c bmi1 abm avx512f avx512_vnni", None),
        ("sse4_2 avx2 fma f16c bmi1 abm", "another CPU: this one lacks avx512f, avx512vnni; build it"),
        ("sse4_2 avx bmi1 abm", "needs a CPU with AVX2, FMA and F16C: this one lacks avx2, fma, f16c"),
        ("", None),  # It is not told.
    ],
)
def test_a_library_for_another_cpu_is_refused_before_it_is_loaded(tmp_path, monkeypatch, flags, said):
    (tmp_path / "libluce.so").write_text("not a library")
    (tmp_path / "cpu-features.txt").write_text("sse42 avx2 fma f16c bmi lzcnt avx512f avx512vnni\n")
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\nmodel: 1\n")
    monkeypatch.setattr("luce.native.library.CPU_INFO", tmp_path / "cpuinfo")
    with pytest.raises(Error, match=said or "cannot load"):
        _native.load(tmp_path, HEADER)


def test_the_build_says_what_it_needs_of_the_cpu(native):
    features = native.path.with_name("cpu-features.txt").read_text().split()
    assert {"avx2", "fma", "f16c"} <= set(features) or platform.machine() not in ("x86_64", "AMD64")
