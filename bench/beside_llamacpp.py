#!/usr/bin/env python3
"""Plain decoding and prefill of one model, luce beside llama.cpp, in turn, in one run.

Outside the timing windows: loading, session opening, one warm-up of each side. Inside: for prefill, the
prompt's chunks to the choice of the next token; for decoding, `--n-gen` rounds of one row, each ending
when the host has the token. llama-bench times the same: `-p` tokens, then `-n` tokens, from an empty
context. Rounds alternate between the two, so that drift hits both alike; the table shows medians.

The peer is llama-bench of the llama.cpp in the same source archive as luce's ggml; `--build DIR` builds it
there (its weight repacking off, GGML_NATIVE on), `--llama-bench PATH` takes one that is built.

    python bench/beside_llamacpp.py model.gguf --device cpu --threads 2 --build /somewhere/peer
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from luce._native import File, Model, Session, SessionParams, default

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tools"))


def build_llama_bench(build: Path, cuda: bool) -> Path:
    """llama-bench from the pinned source archive."""
    fetch = [sys.executable, str(ROOT / "tools" / "fetch_ggml.py"), "--peer"]
    source = subprocess.run(fetch, check=True, capture_output=True, text=True).stdout.strip()
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_CPU_REPACK=OFF", "-DGGML_NATIVE=ON",
               "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
               "-DLLAMA_OPENSSL=OFF", f"-DGGML_CUDA={'ON' if cuda else 'OFF'}", "-DGGML_CUDA_NCCL=OFF"]  # fmt: skip
    for command in (
        ["cmake", "-G", "Ninja", "-S", source, "-B", str(build), *options],
        ["cmake", "--build", str(build), "--target", "llama-bench"],
    ):
        subprocess.run(command, check=True, stdout=sys.stderr)
    return build / "bin" / "llama-bench"


def luce_round(session: Session, prompt: list[int], n_gen: int) -> tuple[float, list[int], float]:
    """(prefill tokens/s, generated ids, decoded tokens/s): decoding starts from a prompt of one token."""
    session.reset()
    start = time.perf_counter()
    session.prefill(prompt)
    prefill = len(prompt) / (time.perf_counter() - start)
    session.reset()
    tokens = [session.prefill(prompt[-1:])]
    start = time.perf_counter()
    for _ in range(n_gen):
        tokens += session.verify(tokens[-1:])
        session.commit([0])
    return prefill, tokens, n_gen / (time.perf_counter() - start)


def llama_bench(
    binary: Path, model: Path, n_prompt: int, n_gen: int, threads: int, gpu: bool
) -> tuple[float, float]:
    """(prefill tokens/s, decoded tokens/s) of one run."""
    command = [str(binary), "-m", str(model), "-p", str(n_prompt), "-n", str(n_gen), "-t", str(threads),
               "-r", "1", "-fa", "1", "-ngl", "99" if gpu else "0", "-o", "json"]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    speed = {row["n_gen"] > 0: row["avg_ts"] for row in json.loads(done.stdout)}
    return speed[False], speed[True]


def oracle_errors(file: File, tokens: list[int]) -> int | None:
    """How many generated ids differ from what the oracle model must say; None for other models."""
    if "oracle.seed" not in file.kv:
        return None
    from make_oracle import Rule

    rule = Rule(len(file.kv["tokenizer.ggml.tokens"]), file.kv["oracle.seed"], file.kv["oracle.accept"])
    expected = rule.continuation(tokens[0], len(tokens) - 1)
    return sum(a != b for a, b in zip(tokens[1:], expected, strict=True))


def file_hash(path: Path) -> str:
    """SHA-256 of the whole file."""
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def said_by(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def measure(args: argparse.Namespace, binary: Path, say: Callable[[str], None]) -> dict[str, Any]:
    rng = np.random.Generator(np.random.PCG64(1))
    with File(args.model) as file, Model(file, args.device) as model:
        gpu = model.info.device != "cpu"
        prompt = [int(t) for t in rng.integers(0, model.info.n_vocab - 16, args.n_prompt)]
        params = SessionParams(n_ctx=max(args.n_prompt, args.n_gen + 1) + 64, n_threads=args.threads)
        with Session(model, params) as session:
            luce_round(session, prompt, 8)  # warm-up
            rows, wrong = [], 0
            for i in range(args.rounds):
                ours = luce_round(session, prompt, args.n_gen)
                peer = llama_bench(binary, args.model, args.n_prompt, args.n_gen, args.threads, gpu)
                wrong += oracle_errors(file, ours[1]) or 0
                rows.append((ours[2], peer[1], ours[0], peer[0]))
                decode, prefill = f"{ours[2]:.2f} / {peer[1]:.2f}", f"{ours[0]:.0f} / {peer[0]:.0f}"
                say(f"round {i + 1}: decode {decode}, prefill {prefill}")
            oracle = "oracle.seed" in file.kv
        device = next(d for d in default().devices() if d.name == model.info.device)
    names = ("luce_decode", "llamacpp_decode", "luce_prefill", "llamacpp_prefill")
    columns = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    medians = {name: statistics.median(column) for name, column in columns.items()}
    return {
        "bench": "plain beside llama.cpp",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "version": default().version,
        "commit": args.commit or said_by("git", "describe", "--always", "--dirty"),
        "device": device.description if gpu else f"{cpu_name()} ({args.threads} threads)",
        "driver": said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else "",
        "model": {
            "file": args.model.name,
            "bytes": args.model.stat().st_size,
            "sha256": file_hash(args.model),
        },
        "command": f"bench/beside_llamacpp.py {args.model.name} --device {args.device} "
                   f"--threads {args.threads} --n-prompt {args.n_prompt} --n-gen {args.n_gen} "
                   f"--rounds {args.rounds}",
        "wrong_tokens": wrong if oracle else None,
        "tok_per_s": {k: round(v, 2) for k, v in medians.items()},
        "spread": {k: [round(min(v), 2), round(max(v), 2)] for k, v in columns.items()},
        "decode_ratio": round(medians["luce_decode"] / medians["llamacpp_decode"], 4),
        "prefill_ratio": round(medians["luce_prefill"] / medians["llamacpp_prefill"], 4),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--n-prompt", type=int, default=512)
    parser.add_argument("--n-gen", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama-bench", type=Path)
    parser.add_argument("--build", type=Path, help="build llama-bench in this folder")
    parser.add_argument("--commit", help="of luce, where this is no git checkout")
    parser.add_argument("--save", type=Path, help="folder for the result row")
    args = parser.parse_args()
    if (args.llama_bench is None) == (args.build is None):
        parser.error("give --llama-bench PATH or --build DIR")
    binary = args.llama_bench or build_llama_bench(args.build, args.device != "cpu")
    result = measure(args, binary, lambda text: print(text, file=sys.stderr, flush=True))
    text = json.dumps(result, indent=1)
    print(text)
    if args.save:
        args.save.mkdir(parents=True, exist_ok=True)
        stem = f"{result['date'][:10]}-plain-{args.model.stem}-{'cpu' if args.device == 'cpu' else 'gpu'}"
        (args.save / f"{stem}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
