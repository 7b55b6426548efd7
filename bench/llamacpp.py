"""Builds llama.cpp of luce's own source archive as the peer, and runs its programs."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from luce import native as _native
from luce.bench.origin import print_row
from luce.errors import Error

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ("llama-bench", "llama-server")
BATCHED = "llama-batched-bench"
START_S, ANSWER_S = 600, 1800  # A server that has said nothing for so long is given up.


class PeerError(Exception):
    """This is what one of llama.cpp's programs failed with."""


def build(folder: Path, cuda: bool) -> Path:
    """Returns the folder of PROGRAMS, built in `folder`. Weight repacking is off and GGML_NATIVE on, as luce
    has it."""
    fetch = [sys.executable, str(ROOT / "tools" / "fetch_ggml.py"), "--peer"]
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_CPU_REPACK=OFF", "-DGGML_NATIVE=ON",
               "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
               "-DLLAMA_OPENSSL=OFF", f"-DGGML_CUDA={'ON' if cuda else 'OFF'}",
               "-DGGML_CUDA_NCCL=OFF"]  # fmt: skip
    try:
        source = subprocess.run(fetch, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        for command in (
            ["cmake", "-G", "Ninja", "-S", source, "-B", str(folder), *options],
            ["cmake", "--build", str(folder), "--target", *PROGRAMS, BATCHED],
        ):
            subprocess.run(command, check=True, stdout=sys.stderr)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PeerError(f"llama.cpp cannot be built: {error}") from error
    return folder / "bin"


def compare(
    program: str,
    name: str,
    args: argparse.Namespace,
    measure: Callable[[argparse.Namespace], tuple[str, dict[str, Any]]],
    table: Callable[[dict[str, Any]], str],
    timing: str,
) -> None:
    """Builds llama.cpp if args.build says where, measures, prints the table on stderr and the row on stdout,
    and writes the row to args.save. measure: gives the device and the row. name: of the row's file. Ends the
    program where any of that fails."""
    try:
        if args.build:
            cuda = args.device != "cpu" and any(d.name != "cpu" for d in _native.default().devices())
            args.bin = build(args.build, cuda)
        device, row = measure(args)
        print(f"{args.model.name} on {row['device']}. {timing}\n\n{table(row)}", file=sys.stderr)
        print_row(row, args.save, f"{name}-{args.model.stem}-{'cpu' if device == 'cpu' else 'gpu'}")
    except (Error, PeerError, OSError) as error:
        raise SystemExit(f"{program}: error: {error}") from None


def placement(device: str, between: str = ",") -> list[str]:
    """Returns the options that put all of a model on one device, as the core names it: "cpu", "cuda:0", or on several:
    "cuda:0,cuda:1". llama-bench has a slash between these: with commas it takes one after the other."""
    if device == "cpu":
        # Without -dev, a CUDA build still multiplies prompts on the GPU.
        return ["-dev", "none", "-ngl", "0"]
    names = [f"CUDA{one.partition(':')[2] or 0}" for one in device.split(",")]
    return ["-dev", between.join(names), "-ngl", "99"]


def experts_on_cpu(layers: int) -> list[str]:
    """Returns the options that keep the experts of so many layers in host memory, computed by the CPU."""
    return ["-ncmoe", str(layers)] if layers else []


def llama_bench(
    binary: Path, model: Path, lengths: Sequence[int], n_gen: int, threads: int, device: str, *options: str
) -> tuple[dict[int, float], float]:
    """Returns prefill tokens/s by length of the prompt, each in an empty context, and decoded tokens/s of n_gen tokens
    (0: none, and 0.0), after a warm-up of each. The model is loaded once."""
    command = [str(binary), "-m", str(model), "-p", ",".join(map(str, lengths)), "-n", str(n_gen), "-t", str(threads),
               "-r", "1", "-fa", "1", *placement(device, "/"), *options, "-o", "json"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PeerError(f"llama-bench ended with {done.returncode}: {done.stderr[-2000:]}")
    rows = json.loads(done.stdout)
    decoded = [row["avg_ts"] for row in rows if row["n_gen"] > 0]
    return {row["n_prompt"]: row["avg_ts"] for row in rows if row["n_gen"] == 0}, decoded[0] if decoded else 0.0


def llama_batched_bench(
    binary: Path,
    model: Path,
    n_prompt: int,
    n_gen: int,
    counts: Sequence[int],
    threads: int,
    device: str,
    *options: str,
) -> dict[int, float]:
    """Returns decoded tokens/s in all, by number of sequences that decode together."""
    context = max(counts) * (n_prompt + n_gen)
    command = [str(binary), "-m", str(model), "-npp", str(n_prompt), "-ntg", str(n_gen),
               "-npl", ",".join(map(str, counts)), "-c", str(context), "-t", str(threads), "-fa", "on",
               *placement(device), *options, "--output-format", "jsonl"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PeerError(f"llama-batched-bench ended with {done.returncode}: {done.stderr[-2000:]}")
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    speed = {row["pl"]: row["speed_tg"] for row in rows}
    if set(speed) != set(counts):
        raise PeerError(f"llama-batched-bench measured {sorted(speed)} sequences, not {sorted(counts)}")
    return speed


def port_of(process: int) -> int | None:
    """Returns the loopback port that a process listens at, as the kernel's tables have it; None: it listens
    at none yet."""
    opened = set()
    for each in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):  # It may have been closed meanwhile.
            opened.add(os.readlink(each))
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, _, _, _, _, _, inode = line.split()[:10]
        if state == "0A" and f"socket:[{inode}]" in opened:  # That state is LISTEN.
            return int(local.partition(":")[2], 16)
    return None


class LlamaServer:
    """Runs llama-server on a loopback port with `slots` streams of n_ctx positions each, as a context
    manager. Raises PeerError."""

    def __init__(
        self,
        binary: Path,
        model: Path,
        threads: int,
        device: str,
        *options: str,
        n_ctx: int = 4096,
        slots: int = 1,
        variables: Mapping[str, str] | None = None,
    ):
        self.environment = os.environ | dict(variables or {})
        # The server takes a free port by itself: one that was found free here may be another's by then.
        self.command = [str(binary), "-m", str(model), "--port", "0", "--host", "127.0.0.1",
                        "-t", str(threads), *placement(device), "-fa", "on", "-c", str(slots * n_ctx),
                        "-np", str(slots),
                        "--no-webui", *options]  # fmt: skip

    def __enter__(self) -> LlamaServer:
        self.log = tempfile.TemporaryFile()  # A pipe would fill up: nobody reads it while the server writes.
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.DEVNULL, stderr=self.log, env=self.environment
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise PeerError(f"llama-server ended with {self.process.returncode}: {self._log_tail()}")
            try:
                if port := port_of(self.process.pid):
                    self.url = f"http://127.0.0.1:{port}"
                    with urllib.request.urlopen(self.url + "/health", timeout=2):
                        return
            except OSError:  # It answers 503 while it loads.
                pass
            time.sleep(0.1)
        raise PeerError(f"llama-server did not come up within {START_S} s: {self._log_tail()}")

    def complete(self, prompt: list[int], n: int, seed: int = 0, **fields: Any) -> dict[str, Any]:
        """Returns {tokens, timings} of n new greedy tokens after a prompt of ids. `seed` is that of forced
        acceptance. `fields` are of the request's body, beside or in place of those here."""
        body = {"prompt": prompt, "n_predict": n, "temperature": 0, "seed": seed, "cache_prompt": False,
                "return_tokens": True} | fields  # fmt: skip
        request = urllib.request.Request(
            self.url + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
                answer: dict[str, Any] = json.loads(reply.read())
        except urllib.error.HTTPError as error:
            raise PeerError(f"llama-server refused: {error.read()[:500]!r}") from error
        except (OSError, http.client.HTTPException) as error:
            raise PeerError(f"llama-server gave no answer: {error}: {self._log_tail()}") from error
        return answer

    def log_text(self) -> str:
        """Returns all that the server has written to its log."""
        fd = self.log.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")

    def _log_tail(self) -> str:
        # The server writes on where this descriptor stands, so reading must not move it.
        fd = self.log.fileno()
        return os.pread(fd, 2000, max(0, os.fstat(fd).st_size - 2000)).decode(errors="replace")

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()
