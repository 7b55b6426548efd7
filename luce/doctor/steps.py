"""What a step costs by rows, beside what reading the weights once would take at the bandwidth that was measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from luce.doctor import machine, nvidia_smi
from luce.doctor.checks import Check
from luce.doctor.nvidia_smi import Reading
from luce.doctor.tokens import Pace, verify
from luce.native import Engine, Rows

ROWS = (1, 2, 4, 8, 16)
WARM_UP, STEPS = 2, 12
WIDE = 2.0  # On a GPU 16 rows cost less than so many times one row, unless something is amiss.


def by_rows(
    engine: Engine, prompt: Sequence[int], read: int, bandwidth: int | None, is_gpu: bool, pace: Pace,
    clock: Callable[[], float] = time.perf_counter,
) -> Check:
    """Measures steps of ROWS rows, by turns: medians, from the call to the choices on the host. `read` counts the bytes
    that a token reads of the weights."""
    with engine.sequence() as line:
        line.prefill(prompt)
        tokens = (list(prompt) * max(ROWS))[: max(ROWS)]
        took: dict[int, list[float]] = {n: [] for n in ROWS}
        for turn in range(WARM_UP + STEPS):
            for n in ROWS:
                began = clock()
                verify(line, Rows(line, tokens[:n]))
                if turn >= WARM_UP or not pace.fits():
                    took[n].append(1000 * (clock() - began))
            if not pace.fits():
                break
    ms = {n: statistics.median(times) for n, times in took.items() if times}
    figures: dict[str, object] = {"ms": ms, "bytes": read}
    said = f"ms a step of {', '.join(map(str, ms))} rows: {', '.join(f'{each:.3g}' for each in ms.values())}"
    if bandwidth:
        floor = 1000 * read / bandwidth
        figures["reading_ms"] = floor
        said += f"; reading the weights once would take {floor:.2g} (reckoned from the measured bandwidth)"
    ratio = ms[max(ms)] / ms[min(ms)]
    wide = is_gpu and max(ms) == max(ROWS) and ratio > WIDE
    expected = "16 rows cost little more than one on a GPU"
    remedy = "docs/troubleshooting.md: It is slow" if wide else ""
    return Check("steps", "by rows", "note" if wide else "ok", said, expected, remedy, figures)


def clocks_under_load(
    engine: Engine, prompt: Sequence[int], pci: str, read: Callable[[], list[Reading] | str] = nvidia_smi.read
) -> Check:
    """Reads a GPU's clocks while steps run: at rest they are low, and nothing holds them down."""
    tokens = (list(prompt) * max(ROWS))[: max(ROWS)]
    with engine.sequence() as line, ThreadPoolExecutor(1) as pool:
        line.prefill(prompt)
        reading = pool.submit(read)
        while not reading.done():
            verify(line, Rows(line, tokens))
    found = reading.result()
    own = None if isinstance(found, str) else nvidia_smi.of_device(found, pci)
    if own is None:
        why = found if isinstance(found, str) else f"nvidia-smi lists no GPU at {pci}"
        return Check("steps", "clocks", "skipped", f"clocks under load are not known: {why}")
    check = machine.clocks(own, "clocks")
    return replace(check, group="steps", found=f"under load {check.found}")
