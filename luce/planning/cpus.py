"""Counts the CPUs that this process may use: its affinity and the quota of its control groups count."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path


def usable(root: Path = Path("/")) -> int:
    """Returns the number of usable CPUs, at least 1. `root` is that of the file system whose /proc and /sys
    say it."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min([count, *(math.ceil(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> list[float]:
    """Returns the CPUs' worth of time that the process's control groups, each with its parents, are given."""
    found: list[float | None] = []
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # Version 2 has one line, "0::/a/b".
                found += [_version_2(folder) for folder in _up(root / "sys/fs/cgroup", path)]
            elif "cpu" in controllers.split(","):
                found += [_version_1(folder) for folder in _up(root / "sys/fs/cgroup/cpu", path)]
    return [quota for quota in found if quota is not None]


def _up(top: Path, path: str) -> list[Path]:
    """Yields the group's folder and those above it; in a container `top` may be the group itself."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _version_2(folder: Path) -> float | None:
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return int(quota) / int(period)  # A quota of "max" is no number and raises.
    return None


def _version_1(folder: Path) -> float | None:
    with suppress(OSError, ValueError):
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return quota / int((folder / "cpu.cfs_period_us").read_text()) if quota > 0 else None
    return None
