#!/usr/bin/env python3
"""Builds luce and its kernel checks to pretend, on a Hopper, to be a card of another generation.

    cmake -G Ninja -S . -B build -DLUCE_CUDA=ON && cmake --build build && cmake --install build --prefix .
    python3 tools/build_card.py "RTX 3090" build ../luce-3090
    cd ../luce-3090 && ./kernel_check check && python3 -m luce bench oracle

Kernels are compiled for the card's generation, without what only Hopper has, and then into Hopper's instructions;
launches are planned with the card's limits (tests/cuda/pretended/limits.cu). All else is the build's. Blocks that are
planned for the multiprocessors of the card may still be spread over more of Hopper's, which are faster too, and have
another cache before them: docs/gpus.md says what a figure of such a build means.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = ROOT / "tests/cuda/pretended/limits.cu"
GGML = ("luce-ggml", "luce-ggml-base", "luce-ggml-cpu", "luce-ggml-cuda")
WRAPPED = (  # tests/cuda/launches.cu has them
    "_ZN4luce4cuda13device_limitsERNS_12DeviceLimitsE",
    "cudaLaunchKernelExC",
    "__cudaGetKernel",
    "__cudaRegisterFunction",
)
# The code that is compiled for each. No Hopper runs code for 12.0: that of 9.0 has all that 12.0 has of it here, which
# is bulk copies and launches that overlap without wgmma, and it is told of the small shared memory.
CARDS = {
    "RTX 3060 12 GB": ["-gencode", "arch=compute_86,code=sm_90"],
    "RTX 3090": ["-gencode", "arch=compute_86,code=sm_90"],
    "RTX 4070": ["-gencode", "arch=compute_89,code=sm_90"],
    "RTX 4090": ["-gencode", "arch=compute_89,code=sm_90"],
    "RTX 5060 Ti 16 GB": ["-gencode", "arch=compute_90,code=sm_90", "-DSMALL_SHARED=1"],
    "RTX 5090": ["-gencode", "arch=compute_90,code=sm_90", "-DSMALL_SHARED=1"],
    "A100 80 GB": ["-gencode", "arch=compute_80,code=sm_90"],
}


def commands_of(build: Path) -> list[tuple[Path, Path, list[str], Path]]:
    """Lists (source, object, command, folder) of each file of libluce as a CUDA build compiles it."""
    found = []
    for entry in json.loads((build / "compile_commands.json").read_text()):
        command = shlex.split(entry["command"])
        output = Path(entry["directory"]) / command[command.index("-o") + 1]
        if "/luce.dir/" in str(output) and output.suffix == ".o":
            found.append((Path(entry["file"]), output, command, Path(entry["directory"])))
    if not any(source.suffix == ".cu" for source, *_ in found):
        sys.exit(f"{build} is not a build folder with -DLUCE_CUDA=ON")
    return found


def for_card(card: str, source: Path, output: Path, command: list[str]) -> list[str]:
    """Returns the command that compiles a kernel's file for a card, into another object."""
    kept = []
    words = iter(command)
    for word in words:
        if word in ("-o", "-c", "-MF", "-MT", "-gencode"):
            next(words)
        elif not word.startswith(("--generate-code", "-MD")):
            kept.append(word)
    kept += [*CARDS[card], f'-DLUCE_CARD="{card}"', f"-I{ROOT}/tests/cuda"]
    return [*kept, "-c", str(source), "-o", str(output)]


def run_all(commands: list[tuple[list[str], Path]]) -> None:
    """Runs them side by side; the output of one that fails ends the program."""

    def run(job: tuple[list[str], Path]) -> str:
        done = subprocess.run(job[0], cwd=job[1], capture_output=True, text=True, check=False)
        return f"{shlex.join(job[0])}\n{done.stderr[-3000:]}" if done.returncode else ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        failed = [text for text in pool.map(run, commands) if text]
    if failed:
        sys.exit(f"{len(failed)} of {len(commands)} failed:\n{failed[0]}")


def main() -> None:
    """Builds FOLDER/luce and FOLDER/kernel_check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("card", choices=CARDS)
    parser.add_argument("build", type=Path, help="the folder of a CUDA build of this tree, whose objects are used")
    parser.add_argument("folder", type=Path, help="gets luce/ and kernel_check")
    parser.add_argument("--no-checks", action="store_true", help="build no kernel_check")
    args = parser.parse_args()
    folder = args.folder.resolve()
    objects = folder / "objects"
    objects.mkdir(parents=True, exist_ok=True)

    jobs, kernels, host = [], [], []
    commands = commands_of(args.build.resolve())
    for source, output, command, cwd in commands:
        if source.suffix != ".cu":
            if not output.exists():
                sys.exit(f"{output} is missing: build {args.build} first")
            host.append(output)
            continue
        source = LIMITS if source.name == "device_limits.cu" else source
        kernels.append(objects / f"{source.parent.name}_{source.name}.o")
        jobs.append((for_card(args.card, source, kernels[-1], command), cwd))
    checks = []
    if not args.no_checks:
        kernel = next((command, cwd) for source, _, command, cwd in commands if source.suffix == ".cu")
        for source in sorted((ROOT / "tests/cuda").glob("*.cu")):
            checks.append(objects / f"{source.name}.o")
            jobs.append((for_card(args.card, source, checks[-1], kernel[0]), kernel[1]))
    run_all(jobs)

    lib = folder / "luce/lib"
    shutil.copytree(ROOT / "luce", folder / "luce", dirs_exist_ok=True)
    nvcc = next(word for _, _, command, _ in commands for word in command if Path(word).name == "nvcc")
    toolkit = Path(nvcc).parent.parent / "lib64"
    cuda = [f"-L{toolkit}", "-lcudart", "-lcublasLt"]
    with tempfile.NamedTemporaryFile("w", suffix=".rsp") as listed:
        listed.write("\n".join(map(str, [*host, *kernels])))
        listed.flush()
        linked = ["g++", "-shared", "-o", str(lib / "libluce.so"), f"@{listed.name}", f"-L{lib}"]
        linked += [f"-l{name}" for name in GGML] + [*cuda, "-lpthread", "-ldl", "-Wl,-z,nodelete"]
        run_all([([*linked, f"-Wl,-rpath,$ORIGIN:{toolkit}"], folder)])
    if checks:
        wraps = ["-Xlinker", ",".join(f"--wrap={name}" for name in WRAPPED)]
        program = [nvcc, "-o", str(folder / "kernel_check"), *map(str, [*checks, *kernels])]
        run_all([([*program, f"-L{toolkit}", "-lcublasLt", *wraps], folder)])
    print(f"{args.card}: {len(kernels)} kernels' and {len(checks)} checks' files, in {folder}")


if __name__ == "__main__":
    main()
