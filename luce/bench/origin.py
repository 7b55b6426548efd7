"""What every recorded result says about where it came from, and the file it goes to."""

from __future__ import annotations

import hashlib
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from luce import _native
from luce.stdout import as_json

CHECKOUT = Path(__file__).resolve().parent.parent.parent


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
        return subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=CHECKOUT
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def checkout_commit() -> str:
    """The commit this package runs from, empty where it was installed from no checkout."""
    return said_by("git", "describe", "--always", "--dirty") if (CHECKOUT / ".git").exists() else ""


def cpu_name() -> str:
    """As /proc/cpuinfo says it."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def device_text(device: str, threads: int) -> str:
    """A device for people. device: as the core names it ("cpu", "cuda:0")."""
    if device == "cpu":
        return f"{cpu_name()} ({threads} threads)"
    return next(d.description for d in _native.default().devices() if d.name == device)


def command_text(words: Sequence[str]) -> str:
    """A command as the row keeps it: of absolute paths only the last part, which is nobody's machine."""

    def bare(word: str) -> str:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        return option + equals + (Path(value).name if Path(value).is_absolute() else value)

    return shlex.join(map(bare, words))


def origin(
    bench: str, device: str, model: Path, command: str, threads: int, commit: str | None
) -> dict[str, Any]:
    """The head of a result row. device: as the core names it. Reads the whole model for its hash."""
    gpu = device != "cpu"
    driver = said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else ""
    return {
        "bench": bench,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "version": _native.default().version,
        "commit": commit or checkout_commit() or "unknown",
        "device": device_text(device, threads),
        "driver": driver,
        "model": {"file": model.name, "bytes": model.stat().st_size, "sha256": file_hash(model)},
        "command": command,
    }


def write_row(folder: Path, name: str, result: dict[str, Any]) -> Path:
    """Writes the row to DATE-NAME.json in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['date'][:10]}-{name}.json"
    path.write_text(as_json(result, indent=1) + "\n", encoding="utf-8")
    return path
