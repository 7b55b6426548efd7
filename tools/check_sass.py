#!/usr/bin/env python3
"""Checks the machine code of compiled CUDA kernels for conditions around what a whole warp does together.

A shuffle, vote, matrix product or matrix load takes part in all 32 lanes. The compiler may put a predicate in
front of one where the source has a condition: then lanes that are left out give values that nobody wrote.
That is an error here. Where it cannot prove that all lanes are there, it branches around (BRA.DIV) to a copy
that first waits for them: right, and slow where it is taken. These are counted, for each kernel.

It is for code of sm_90a. For other GPUs the compiler also guards products by conditions that a warp's
lanes share, which look the same here.

    pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
    tools/check_sass.py build/CMakeFiles/luce.dir/native/kernels/*.o
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

TOGETHER = {"SHFL", "VOTE", "MATCH", "REDUX", "LDSM", "HMMA", "IMMA", "QMMA", "HGMMA", "IGMMA", "QGMMA"}
FUNCTION = re.compile(r"^\s*Function : (\S+)")
INSTRUCTION = re.compile(
    r"^\s*/\*(?P<at>[0-9a-f]{4,})\*/\s+(?:@!?(?P<guard>U?P\w+)\s+)?(?P<op>[A-Z][A-Z0-9_.]*)"
)


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
    args = parser.parse_args()
    program, found = disassembler(), []
    for path in args.objects:
        made = subprocess.run([program, "-sass", str(path)], capture_output=True, text=True)
        if made.returncode:
            raise SystemExit(f"check_sass: {path}: {made.stderr.strip()}")
        found += kernels_of(made.stdout.splitlines())
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
