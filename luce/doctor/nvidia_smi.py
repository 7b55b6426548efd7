"""Reads what nvidia-smi says of the GPUs: driver, clocks, power, and what slows them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# The fields that are asked for; a driver that lacks one is asked without it. The name is last: it may hold a comma.
FIELDS = (
    "pci.bus_id", "driver_version", "pstate", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem",
    "power.draw", "power.limit", "power.default_limit", "temperature.gpu", "mig.mode.current",
    "clocks_event_reasons.active", "clocks_throttle_reasons.active", "name",
)  # fmt: skip
# NVML's bits of what holds the clocks down (nvml.h: nvmlClocksEventReason..). That nothing runs is no matter.
REASONS = {
    0x02: "clocks that an application set",
    0x04: "its power limit",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "the power supply's brake",
    0x100: "clocks that a display asks for",
}
WAIT_S = 20  # A driver that has to wake up takes some seconds.


@dataclass(frozen=True)
class Reading:
    """What nvidia-smi says of one GPU; None where it does not say. Clocks are in MHz, power in W."""

    pci: str
    name: str
    driver: str | None = None
    pstate: str | None = None
    sm: float | None = None
    sm_max: float | None = None
    memory: float | None = None
    memory_max: float | None = None
    watts: float | None = None
    watts_limit: float | None = None
    watts_default: float | None = None
    celsius: float | None = None
    mig: bool = False
    slowed_by: tuple[str, ...] = ()


Run = Callable[[Sequence[str]], tuple[int, str]]  # It returns a command's exit code, and what it printed.


def _run(command: Sequence[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, errors="replace")
    except subprocess.TimeoutExpired:
        return 124, f"no answer in {WAIT_S} seconds"
    except OSError as error:
        return 127, error.strerror or str(error)
    return done.returncode, done.stdout + done.stderr


def read(run: Run = _run) -> list[Reading] | str:
    """Returns a reading of each GPU, or why there is none."""
    if run is _run and shutil.which("nvidia-smi") is None:
        return "there is no nvidia-smi on the PATH"
    fields = list(FIELDS)
    while fields:
        code, said = run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"])
        if code == 0:
            return parse(said, fields)
        unknown = [name for name in re.findall(r'[Ff]ield "([^"]+)" is not a valid', said) if name in fields]
        if not unknown:
            return f"nvidia-smi failed: {' '.join(said.split())[:200] or f'exit {code}'}"
        fields = [name for name in fields if name not in unknown]
    return "nvidia-smi knows none of the fields that were asked for"


def parse(text: str, fields: Sequence[str]) -> list[Reading]:
    """Reads the lines of --format=csv,noheader,nounits. What is missing, or no value, is None."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",", len(fields) - 1)]
        of = {name: cell for name, cell in zip(fields, cells, strict=False) if not _is_none(cell)}
        if "pci.bus_id" not in of and "name" not in of:
            continue  # A warning, or an empty line.
        found.append(
            Reading(
                pci=of.get("pci.bus_id", ""),
                name=of.get("name", ""),
                driver=of.get("driver_version"),
                pstate=of.get("pstate"),
                sm=_number(of.get("clocks.sm")),
                sm_max=_number(of.get("clocks.max.sm")),
                memory=_number(of.get("clocks.mem")),
                memory_max=_number(of.get("clocks.max.mem")),
                watts=_number(of.get("power.draw")),
                watts_limit=_number(of.get("power.limit")),
                watts_default=_number(of.get("power.default_limit")),
                celsius=_number(of.get("temperature.gpu")),
                mig=of.get("mig.mode.current", "").lower() == "enabled",
                slowed_by=reasons(of.get("clocks_event_reasons.active") or of.get("clocks_throttle_reasons.active")),
            )
        )
    return found


def reasons(bits: str | None) -> tuple[str, ...]:
    """Returns in words what "0x0000000000000004" says, but that the GPU is idle."""
    try:
        active = int(bits or "0", 16)
    except ValueError:
        return ()
    return tuple(words for bit, words in REASONS.items() if active & bit)


def of_device(readings: Sequence[Reading], pci: str) -> Reading | None:
    """Returns the reading of the GPU at a place that CUDA writes "0000:0F:00.0", and nvidia-smi "00000000:0F:00.0"."""
    domain, _, rest = pci.lower().partition(":")
    for reading in readings:
        its_domain, _, its_rest = reading.pci.lower().partition(":")
        if rest and rest == its_rest and domain.lstrip("0") == its_domain.lstrip("0"):
            return reading
    return None


def _is_none(cell: str) -> bool:
    return not cell or cell.startswith("[") or cell in ("N/A", "Not Supported")


def _number(text: str | None) -> float | None:
    """Returns the number that a cell begins with: units are left out, but older drivers write them."""
    match = re.match(r"-?\d+(\.\d+)?", text or "")
    return float(match[0]) if match else None
