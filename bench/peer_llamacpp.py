"""llama.cpp of luce's own source archive as the peer: its build, llama-bench, llama-server."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def build(folder: Path, cuda: bool, target: str) -> Path:
    """The program `target`, built in `folder`: weight repacking off, GGML_NATIVE on, as luce is."""
    fetch = [sys.executable, str(ROOT / "tools" / "fetch_ggml.py"), "--peer"]
    source = subprocess.run(fetch, check=True, capture_output=True, text=True).stdout.strip()
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_CPU_REPACK=OFF", "-DGGML_NATIVE=ON",
               "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
               "-DLLAMA_OPENSSL=OFF", f"-DGGML_CUDA={'ON' if cuda else 'OFF'}",
               "-DGGML_CUDA_NCCL=OFF"]  # fmt: skip
    for command in (
        ["cmake", "-G", "Ninja", "-S", source, "-B", str(folder), *options],
        ["cmake", "--build", str(folder), "--target", target],
    ):
        subprocess.run(command, check=True, stdout=sys.stderr)
    return folder / "bin" / target


def llama_bench(
    binary: Path, model: Path, n_prompt: int, n_gen: int, threads: int, gpu: bool
) -> tuple[float, float]:
    """(prefill tokens/s, decoded tokens/s) of one run."""
    command = [str(binary), "-m", str(model), "-p", str(n_prompt), "-n", str(n_gen), "-t", str(threads),
               "-r", "1", "-fa", "1", "-ngl", "99" if gpu else "0", "-o", "json"]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    speed = {row["n_gen"] > 0: row["avg_ts"] for row in json.loads(done.stdout)}
    return speed[False], speed[True]


class LlamaServer:
    """llama-server on a loopback port, one stream; a context manager."""

    def __init__(self, binary: Path, model: Path, threads: int, gpu: bool, *options: str):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{s.getsockname()[1]}"
        command = [str(binary), "-m", str(model), "--port", self.url.rsplit(":", 1)[1], "--host", "127.0.0.1",
                   "-t", str(threads), "-ngl", "99" if gpu else "0", "-fa", "on", "-c", "4096", "-np", "1",
                   "--no-webui", *options]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def __enter__(self) -> LlamaServer:
        for _ in range(600):
            if self.process.poll() is not None:
                assert self.process.stderr is not None
                tail = self.process.stderr.read().decode(errors="replace")[-2000:]
                raise RuntimeError(f"llama-server ended with {self.process.returncode}: {tail}")
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=2):
                    return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise RuntimeError("llama-server did not come up within five minutes")

    def complete(self, prompt: list[int], n: int) -> dict[str, Any]:
        """Greedy: {tokens, timings} of n new tokens after a prompt of ids."""
        body = {"prompt": prompt, "n_predict": n, "temperature": 0, "cache_prompt": False,
                "return_tokens": True}  # fmt: skip
        request = urllib.request.Request(
            self.url + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as reply:
            answer: dict[str, Any] = json.loads(reply.read())
        return answer

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)
