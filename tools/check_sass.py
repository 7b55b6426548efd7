#!/usr/bin/env python3
"""Checks the machine code of compiled CUDA kernels: conditions around what a whole warp does together, and memory.

A shuffle, vote, matrix product or matrix load takes part in all 32 lanes. The compiler may put a predicate in
front of one where the source has a condition: then lanes that are left out give values that nobody wrote.
That is an error here. Where it cannot prove that all lanes are there, it branches around (BRA.DIV) to a copy
that first waits for them: right, and slow where it is taken. These are counted, for each kernel.

That is checked in code of sm_90a. For other GPUs the compiler also guards products by conditions that a warp's
lanes share, which look the same here.

With --memory, in code for any GPU: a kernel may not keep values of its threads in memory, be it what does not fit
registers or an array that is indexed. It may not declare more than 48 KiB of shared memory, which no GPU grants it.
STACKS names what is left of the first, in bytes of a thread, by the compiler of CUDA 13.0. A kernel that has more is an
error. One that has less is told of: its number then gets smaller.

    pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
    tools/check_sass.py build/CMakeFiles/luce.dir/native/kernels/*.o
    tools/check_sass.py --memory build/CMakeFiles/luce.dir/native/kernels/*.o
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

TOGETHER = {"SHFL", "VOTE", "MATCH", "REDUX", "LDSM", "HMMA", "IMMA", "QMMA", "HGMMA", "IGMMA", "QGMMA"}
FUNCTION = re.compile(r"^\s*Function : (\S+)")
INSTRUCTION = re.compile(
    r"^\s*/\*(?P<at>[0-9a-f]{4,})\*/\s+(?:@!?(?P<guard>U?P\w+)\s+)?(?P<op>[A-Z][A-Z0-9_.]*)"
)

USED_BY = re.compile(r"^\s*Function (\S+):$")
ARCHITECTURE = re.compile(r"^arch = (sm_\w+)")
RESOURCES = re.compile(r"^\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) ")
MOST_SHARED = 48 * 1024
A100 = ("sm_80",)
HOPPER, BLACKWELL = ("sm_90a",), ("sm_120",)

# Bytes of a thread's stack, by GPUs and kernel: a pattern of its readable name. They have to shrink.
STACKS: list[tuple[tuple[str, ...], str, int]] = [
    # Which unit comes next, once for 256 keys, and of Q4_0 two addresses of longer units. With two steps of Q fewer in
    # registers, which helped before 9.0, as much is kept.
    (BLACKWELL, r"attention_kernel<256, 1>", 8),
    (BLACKWELL, r"attention_kernel<256, 2>", 16),
    # The gate's eight values, which are asked for ahead of the sums: behind them they would be waited for.
    (BLACKWELL, r"combine_kernel<F16Means, 2>", 32),
    # Two of a product's blocks are on a multiprocessor of 8.0: a tile's number is read once a tile.
    (A100, r"rowmm_kernel<[24], false, 0>", 8),
    # A multiprocessor of 8.0 has room for two blocks: with registers for one, 64 rows would take five waves, not three.
    (A100, r"moe_route_kernel", 32),
    # Sums of parts of K, of prompts alone: they are added to once a part.
    (A100, r"moe_many_kernel", 40),
    (HOPPER, r"moe_many_kernel", 24),
    (HOPPER, r"moe_wide_kernel<80>", 48),
    # Code for 9.0a was measured as it is.
    (HOPPER, r"deltanet_kernel<128, false, false>", 8),  # read once an item
    (HOPPER, r"attention_kernel<256, 8>", 8),  # once a unit of 256 keys
    (HOPPER, r"moe_few_kernel<2>", 48),  # once a part of K, behind its units; three blocks of 80 registers
    (HOPPER, r"rowmm_kernel<8, true, 0>", 24),  # where a type's weights and rows lie, once or twice a unit
]


@dataclass
class Kernel:
    """Holds what was found in one kernel. A predicate of the whole warp (UP0 ...) is no condition for a
    lane."""

    name: str
    together: int = 0  # It counts instructions of a whole warp.
    # Those of them that a lane's predicate guards are listed, as "00a0 SHFL.IDX".
    conditional: list[str] = field(default_factory=list)
    branched: int = 0  # It counts branches to copies that wait.


def kernels_of(lines: Iterable[str]) -> Iterator[Kernel]:
    """Reads what `cuobjdump -sass` prints."""
    kernel: Kernel | None = None
    for line in lines:
        if found := FUNCTION.match(line):
            if kernel is not None:
                yield kernel
            kernel = Kernel(found[1])
        elif (found := INSTRUCTION.match(line)) and kernel is not None:
            op, guard = found["op"], found["guard"]
            kernel.branched += op.startswith("BRA.DIV")
            if op.partition(".")[0] in TOGETHER:
                kernel.together += 1
                if guard is not None and not guard.startswith("U") and guard != "PT":
                    kernel.conditional.append(f"{found['at']} {op}")
    if kernel is not None:
        yield kernel


@dataclass(frozen=True)
class Usage:
    """Holds what a kernel takes on a GPU: a thread's registers and bytes of stack, a block's bytes of shared memory."""

    arch: str
    name: str
    registers: int
    stack: int
    shared: int


def usages_of(lines: Iterable[str]) -> Iterator[Usage]:
    """Reads what `cuobjdump -res-usage` prints of an object."""
    arch = name = ""
    for line in lines:
        if found := ARCHITECTURE.match(line):
            arch = found[1]
        elif found := USED_BY.match(line):
            name = found[1]
        elif (found := RESOURCES.match(line)) and name:
            yield Usage(arch, name, int(found[1]), int(found[2]), int(found[3]))
            name = ""


def known_stack(arch: str, name: str) -> int:
    """Returns the bytes of stack that a kernel of this readable name is known to have."""
    return max((n for archs, known, n in STACKS if arch in archs and re.fullmatch(known, name)), default=0)


def named(usages: list[Usage]) -> list[tuple[Usage, str]]:
    """Returns usages with their kernels' readable names, without the arguments."""
    names = readable(usage.name for usage in usages)
    return [(u, re.sub(r"\(\)$", "", name.removeprefix("void "))) for u, name in zip(usages, names, strict=True)]


def memory_errors(usages: list[Usage]) -> list[str]:
    """Returns an error for each kernel that keeps more in memory than is known, or declares too much."""
    errors = []
    for usage, name in named(usages):
        known = known_stack(usage.arch, name)
        if usage.stack > known:
            errors.append(f"{usage.arch} {name}: a thread keeps {usage.stack} bytes in memory, {known} are known")
        if usage.shared > MOST_SHARED:
            errors.append(f"{usage.arch} {name}: it declares {usage.shared} bytes of shared memory")
    return errors


def shrunk(usages: list[Usage]) -> list[str]:
    """Returns what kernels keep in memory no longer, so that STACKS gets smaller."""
    listed = [(u, name, known_stack(u.arch, name)) for u, name in named(usages)]
    return [
        f"{u.arch} {name}: {u.stack} bytes of a thread's {known} are left in memory"
        for u, name, known in listed
        if u.stack < known
    ]


def disassembler() -> str:
    """Returns the path of cuobjdump: that of the PATH, or that of the package. Ends where there is none."""
    if known := shutil.which("cuobjdump"):
        return known
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(folder).glob("*/bin/cuobjdump")):
            return str(path)
    raise SystemExit("check_sass: there is no cuobjdump: install the packages above")


def readable(names: Iterable[str]) -> list[str]:
    """Returns names without mangling and without their arguments, where c++filt is there."""
    listed = list(names)
    if shutil.which("c++filt") and listed:
        done = subprocess.run(
            ["c++filt", "-p"], input="\n".join(listed), capture_output=True, text=True, check=True
        )
        listed = done.stdout.splitlines()
    return [name.replace("(anonymous namespace)::", "").replace("luce::", "") for name in listed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("objects", nargs="+", type=Path, metavar="OBJECT", help="of nvcc, or a library")
    parser.add_argument("--memory", action="store_true", help="check what kernels keep in memory, for any GPU")
    args = parser.parse_args()
    program = disassembler()

    def told(path: Path, *options: str) -> list[str]:
        made = subprocess.run([program, *options, str(path)], capture_output=True, text=True)
        if made.returncode:
            raise SystemExit(f"check_sass: {path}: {made.stderr.strip()}")
        return made.stdout.splitlines()

    pool = ThreadPoolExecutor(os.cpu_count())  # What takes time is cuobjdump.
    if args.memory:
        memory = pool.map(lambda path: list(usages_of(told(path, "-res-usage"))), args.objects)
        usages = [usage for of_object in memory for usage in of_object]
        if not all(u.arch for u in usages):
            raise SystemExit("check_sass: a cubin does not say which GPU it is for: give nvcc's objects")
        errors = memory_errors(usages)
        for line in [*(f"ERROR {e}" for e in errors), *(f"SHRUNK {s}" for s in shrunk(usages))]:
            print(line)
        archs = ", ".join(sorted({u.arch for u in usages}))
        print(f"{len(usages)} kernels of {archs}: {len(errors)} errors of memory")
        raise SystemExit(1 if errors or not usages else 0)
    code = pool.map(lambda path: list(kernels_of(told(path, "-arch", "sm_90a", "-sass"))), args.objects)
    found = [kernel for of_object in code for kernel in of_object]
    for kernel, name in sorted(
        zip(found, readable(k.name for k in found), strict=True), key=lambda pair: pair[1]
    ):
        if kernel.together or kernel.branched:
            print(f"{kernel.together:5d} together {kernel.branched:3d} branches  {name}")
        for place in kernel.conditional:
            print(f"ERROR {name}: {place} has a lane's predicate")
    bad = sum(len(kernel.conditional) for kernel in found)
    together, branched = sum(k.together for k in found), sum(k.branched for k in found)
    print(f"{len(found)} kernels, {together} instructions of a whole warp:", end=" ")
    print(f"{bad} conditional, {branched} branches around them")
    raise SystemExit(1 if bad or not found else 0)


if __name__ == "__main__":
    main()
