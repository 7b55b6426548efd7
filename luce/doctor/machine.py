"""The machine: its CPU, memory and build, its GPU, and its memory's bandwidth as measured."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator

from luce.bench.origin import cpu_name
from luce.cli.terminal import size
from luce.doctor import nvidia_smi
from luce.doctor.checks import Check
from luce.doctor.nvidia_smi import Reading
from luce.errors import Error, OutOfMemory
from luce.native import Library
from luce.native.library import CPU_INFO
from luce.native.structs import Device
from luce.planning import cpus

NEEDED = ("avx2", "fma", "f16c")
RAN_ON = (90,)  # Compute capabilities on which luce has run: an H100 and an H200.
SHARE = 0.6  # A copy reaches less of what clock and bus would give; below this share something is amiss.

WITH_CUDA = "with nvcc and cuBLAS of CUDA, pip install . -C cmake.define.LUCE_CUDA=ON builds luce for it"


def host(core: Library, device: Device) -> Iterator[Check]:
    """Yields what the CPU has, what memory is free, and what luce was built as."""
    yield processor(CPU_INFO.read_text(errors="replace") if CPU_INFO.exists() else "")
    own = next(each for each in core.devices() if each.name == "cpu")
    free = f"{size(own.memory_free)} of {size(own.memory_total)} free"
    figures = {"free": own.memory_free, "total": own.memory_total}
    yield Check("machine", "memory", "ok", free, figures=figures)
    yield Check("machine", "build", "ok", f"core {core.version}, on {device.name}", figures={"core": core.version})


def processor(info: str) -> Check:
    """Returns what /proc/cpuinfo says; the core would not load on a CPU that lacks what it was built for."""
    flags = next((line for line in info.splitlines() if line.startswith("flags")), "").split()
    lacking = [name for name in NEEDED if name not in flags] if flags else []
    name = cpu_name() if flags else platform.machine()
    found = f"{name}, {cpus.usable()} usable CPUs"
    figures = {"usable": cpus.usable(), "lacking": lacking}
    if lacking:
        found = f"{found}, without {', '.join(name.upper() for name in lacking)}"
        return Check("machine", "cpu", "bad", found, "AVX2, FMA and F16C", "luce does not run on this CPU", figures)
    return Check("machine", "cpu", "ok" if flags else "skipped", found, "AVX2, FMA and F16C", figures=figures)


def card(
    core: Library, device: Device, read: Callable[[], list[Reading] | str] = nvidia_smi.read
) -> Iterator[Check]:
    """Yields what is known of the GPU that the model runs on, or why there is none."""
    readings = read()
    if not device.is_gpu:
        yield _without(core, readings)
        return
    gpu = core.gpu_info(index_of(core, device))
    found = f"{device.description}, {size(device.memory_free)} of {size(device.memory_total)} free"
    tried = gpu.capability in RAN_ON
    if not tried:
        found += f"; luce has run on compute capability 9.0 alone, this is {_capability(gpu.capability)}"
    figures = vars(gpu) | {"memory_free": device.memory_free, "memory_total": device.memory_total}
    yield Check("card", "device", "ok" if tried else "note", found, "compute capability 8.0", figures=figures)
    runs, built = _cuda(gpu.driver_cuda), _cuda(gpu.built_cuda)
    yield Check(
        "card", "driver",
        "ok" if gpu.driver_cuda // 1000 >= gpu.built_cuda // 1000 else "bad",
        f"driver runs CUDA {runs}, luce has {built}", f"CUDA {gpu.built_cuda // 1000}.0 or later",
        f"a driver for CUDA {built}, or a luce built with an older toolkit",
    )  # fmt: skip
    if isinstance(readings, str):
        yield Check("card", "clocks", "skipped", f"clocks and power are not known: {readings}")
        return
    own = nvidia_smi.of_device(readings, gpu.pci)
    if own is None:
        yield Check("card", "clocks", "skipped", f"nvidia-smi lists no GPU at {gpu.pci}")
    else:
        yield clocks(own, "clocks")


def _without(core: Library, readings: list[Reading] | str) -> Check:
    """Returns why there is no GPU. One that nvidia-smi lists and luce does not take is worth a note."""
    why = core.missing_gpu or "the model runs on the CPU"
    if isinstance(readings, str) or not readings:
        return Check("card", "device", "skipped", f"no GPU: {why}")
    names = ", ".join(dict.fromkeys(reading.name for reading in readings))
    built = "built without CUDA" in why
    return Check("card", "device", "note", f"{names} is not used: {why}", remedy=WITH_CUDA if built else "")


def clocks(own: Reading, name: str) -> Check:
    """Returns the clocks of a reading, and what holds them down."""
    figures = {key: value for key, value in vars(own).items() if key not in ("pci", "name")}
    parts = [f"driver {own.driver}"] if own.driver else []
    if own.sm is not None and own.sm_max is not None:
        parts.append(f"SM clock {own.sm:.0f} of {own.sm_max:.0f} MHz")
    if own.watts_limit is not None:
        draws = "" if own.watts is None else f"{own.watts:.0f} of "
        parts.append(f"{draws}{own.watts_limit:.0f} W")
    if own.celsius is not None:
        parts.append(f"{own.celsius:.0f} C")
    notes = []
    if own.slowed_by:
        notes.append(f"slowed by {' and '.join(own.slowed_by)}")
    if own.watts_limit is not None and own.watts_default is not None and own.watts_limit < own.watts_default:
        notes.append(f"limited below its {own.watts_default:.0f} W")
    if own.mig:
        notes.append("MIG is on: this is a part of a GPU")
    found = ", ".join([*parts, *notes]) or "nvidia-smi says nothing of the clocks"
    remedy = "nvidia-smi -q -d PERFORMANCE,POWER,CLOCK says more" if notes else ""
    return Check("card", name, "note" if notes else "ok", found, "nothing holds the clocks down", remedy, figures)


def index_of(core: Library, device: Device) -> int:
    """Returns a device's index. What of it is free changes from call to call, and its name does not."""
    return [each.name for each in core.devices()].index(device.name)


def bandwidth(core: Library, device: Device, threads: int) -> Check:
    """Measures what the memory gives, beside what clock and bus would. Its figure "measured" is in bytes a second."""
    index = index_of(core, device)
    try:
        measured = core.bandwidth(index, threads)
    except OutOfMemory as error:
        return Check("bandwidth", "memory", "skipped", str(error))
    how = "copying" if device.is_gpu else f"reading with {threads} threads"
    found = f"{per_second(measured)} measured by {how}"
    sheet = core.gpu_info(index).bandwidth if device.is_gpu else 0
    figures = {"measured": measured, "sheet": sheet or None}
    if not sheet:
        return Check("bandwidth", "memory", "ok", f"{found}; the memory's own is not known", figures=figures)
    found += f", {measured / sheet:.0%} of the {per_second(sheet)} of its clock and bus"
    low = measured < SHARE * sheet
    remedy = "another program may use the GPU: nvidia-smi lists them" if low else ""
    return Check("bandwidth", "memory", "note" if low else "ok", found, f"{SHARE:.0%} or more", remedy, figures)


def per_second(count: float) -> str:
    """Returns bytes a second for people, as data sheets count them: "4.80 TB/s", "23.1 GB/s"."""
    return f"{count / 1e12:.2f} TB/s" if count >= 1e12 else f"{count / 1e9:.1f} GB/s"


def failed(error: Error) -> Check:
    """Returns the check of a core that cannot be loaded."""
    return Check("machine", "core", "bad", str(error), "a core that loads", "reinstall luce: docs/troubleshooting.md")


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _capability(number: int) -> str:
    return f"{number // 10}.{number % 10}"
