"""What every recorded result says about where it came from."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from luce._native import default

ROOT = Path(__file__).resolve().parent.parent


def file_hash(path: Path) -> str:
    """SHA-256 of the whole file."""
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def said_by(*command: str) -> str:
    """A command's output, empty where it cannot be had."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def origin(
    bench: str, device: str, model: Path, command: str, threads: int, commit: str | None
) -> dict[str, Any]:
    """The head of a result row. device: as the core names it ("cpu", "cuda:0")."""
    gpu = device != "cpu"
    description = next(d.description for d in default().devices() if d.name == device)
    driver = said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else ""
    return {
        "bench": bench,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "version": default().version,
        "commit": commit or said_by("git", "describe", "--always", "--dirty"),
        "device": description if gpu else f"{cpu_name()} ({threads} threads)",
        "driver": driver,
        "model": {"file": model.name, "bytes": model.stat().st_size, "sha256": file_hash(model)},
        "command": command,
    }


def save(folder: Path | None, name: str, result: dict[str, Any]) -> None:
    """Prints the row and, with a folder, writes it to DATE-NAME.json there."""
    text = json.dumps(result, indent=1)
    print(text)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{result['date'][:10]}-{name}.json").write_text(text + "\n")
