"""Says where a recorded result came from, and which file it goes to."""

from __future__ import annotations

import hashlib
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from typing import Any

from luce import native as _native
from luce.cli.stdout import as_json
from luce.planning.split import names_of

CHECKOUT = Path(__file__).resolve().parent.parent.parent


def parts(path: Path) -> list[Path]:
    """Returns the files of a model. A split one ("x-00001-of-00003.gguf") has several parts, in their order.
    """
    split = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name, re.S)
    if split is None:
        return [path]
    name, count = split.groups()
    return [path.with_name(f"{name}-{part:05d}-of-{count}.gguf") for part in range(1, int(count) + 1)]


def file_hash(*paths: Path) -> str:
    """Returns the SHA-256 of whole files, one after the other. That of one file is its own."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as f:
            while block := f.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


def model_hash(model: Path) -> str:
    """Returns the SHA-256 of a model's files. Where `sha256sum FILE > FILE.sha256` has left that of a single
    file beside it, and the file has not changed since, it is not read again."""
    files = parts(model)
    beside = model.with_name(model.name + ".sha256")
    if len(files) == 1 and beside.is_file() and beside.stat().st_mtime_ns > model.stat().st_mtime_ns:
        digest, _, name = beside.read_text(errors="replace").strip().partition("  ")
        if re.fullmatch("[0-9a-f]{64}", digest) and Path(name).name == model.name:
            return digest
    return file_hash(*files)


def said_by(*command: str) -> str:
    """Returns a command's output, empty where it cannot be had."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=CHECKOUT
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def checkout_commit() -> str:
    """Returns the commit that this package runs from, empty where it was installed from no checkout."""
    return said_by("git", "describe", "--always", "--dirty") if (CHECKOUT / ".git").exists() else ""


def cpu_name() -> str:
    """Returns the CPU's name as /proc/cpuinfo gives it."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def device_text(device: str, threads: int) -> str:
    """Names a device for people, or several. `device` is as the core names it ("cpu", "cuda:0", "cuda:0,cuda:1")."""
    if device.startswith("cpu"):
        return f"{cpu_name()} ({threads} threads)"
    known = {each.name: each.description for each in _native.default().devices()}
    return ", ".join(known[name] for name in names_of(device))


def driver_version() -> str:
    """Returns the driver's version, which all GPUs of a machine share. Without nvidia-smi it is empty."""
    return said_by("nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader")


def command_text(words: Sequence[str]) -> str:
    """Returns a command as the row keeps it. Of an absolute path only the last part stays, which tells
    nothing of the machine."""

    def bare(word: str) -> str:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        return option + equals + (Path(value).name if Path(value).is_absolute() else value)

    return shlex.join(map(bare, words))


def origin(
    bench: str, device: str, model: Path, command: str, threads: int, commit: str | None
) -> dict[str, Any]:
    """Returns the head of a result row. `device` is as the core names it. It may read the whole model for
    its hash."""
    return {
        "bench": bench,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "version": _native.default().version,
        "commit": commit or checkout_commit() or "unknown",
        "device": device_text(device, threads),
        "driver": "" if device.startswith("cpu") else driver_version(),
        "model": {
            "file": model.name,
            "bytes": sum(part.stat().st_size for part in parts(model)),
            "sha256": model_hash(model),
        },
        "command": command,
    }


def print_row(row: dict[str, Any], folder: Path | None, name: str) -> None:
    """Prints a row to stdout. Into a folder it is written as well, and stderr names the file."""
    print(as_json(row, indent=1))
    if folder is not None:
        print(f"wrote {write_row(folder, name, row)}", file=sys.stderr)


def write_row(folder: Path, name: str, result: dict[str, Any]) -> Path:
    """Writes the row to DATE-NAME.json in the folder, or to DATE-NAME-2.json and so on: a row never replaces
    another one."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = folder / f"{result['date'][:10]}-{name}{'' if number == 1 else f'-{number}'}.json"
        try:
            with path.open("x", encoding="utf-8") as f:
                f.write(as_json(result, indent=1) + "\n")
        except FileExistsError:
            continue
        break
    return path
