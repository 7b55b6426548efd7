"""Says what a stage leaves behind, and how it travels.

`work/state` is small and complete: tokenizer, checkpoints, reports. publish() writes it as a tar cut
into parts below the size that one returned file may have; on a machine without it, unpack() restores
it from such parts. `work/corpus` and `work/pool` are made again where they are missing.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import time
from pathlib import Path

import torch
import torch._dynamo.utils
from safetensors.torch import load_file, save_file
from torch import Tensor

PART_BYTES = 15 * 1024 * 1024
STARTED = time.monotonic()  # The command began about then. train.py sets it before it imports torch.


class Deadline:
    """Ends `until` seconds after the command began, less `reserve` for finishing."""

    def __init__(self, until: float, reserve: float):
        self.end = STARTED + until - reserve
        self.begin = time.monotonic()

    def restart(self) -> None:
        """Counts progress from now: after compilation."""
        self.begin = time.monotonic()

    def progress(self) -> float:
        return (time.monotonic() - self.begin) / max(self.end - self.begin, 1e-3)

    def left(self) -> float:
        return self.end - time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f}s] {text}", flush=True)


class Store:
    def __init__(self, work: Path, out: Path | None = None, parts: Path | None = None):
        self.work, self.out = work, out
        self.state = work / "state"
        if parts is not None and not self.state.exists() and (parts / "state.json").exists():
            unpack(parts, self.state)
            say(f"restored {sorted(p.name for p in self.state.iterdir())}")
        self.state.mkdir(parents=True, exist_ok=True)

    def report(self, name: str) -> dict:
        path = self.state / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def write_report(self, name: str, value: dict) -> None:
        path = self.state / f"{name}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(value) + "\n", encoding="utf-8")
        temporary.replace(path)

    def weights(self, name: str) -> dict[str, Tensor] | None:
        """Returns a checkpoint widened to F32, or None."""
        path = self.state / f"{name}.safetensors"
        if not path.exists():
            return None
        return {key: value.float() for key, value in load_file(path).items()}

    def write_weights(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Writes matrices as F16 (ten bits of mantissa; weights are far from its limits), the rest F32."""
        kept = {}
        for key, value in tensors.items():
            value = value.detach().float().cpu()
            if not value.isfinite().all():
                raise FloatingPointError(f"{name}: {key} has a value that is not finite: not saved")
            kept[key] = (value.half() if value.ndim == 2 else value).contiguous()
        path = self.state / f"{name}.safetensors"
        temporary = path.with_suffix(".tmp")
        save_file(kept, temporary, metadata={"format": "pt"})
        temporary.replace(path)

    def publish(self) -> None:
        if self.out is not None:
            pack(self.state, self.out)


def pack(state: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(state.iterdir()):
            if path.suffix != ".tmp":
                tar.add(path, path.name)
    data = buffer.getvalue()
    for old in out.glob("state.tar.*"):
        old.unlink()
    count = 0
    for at in range(0, len(data), PART_BYTES):
        (out / f"state.tar.{count}").write_bytes(data[at : at + PART_BYTES])
        count += 1
    facts = {"parts": count, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (out / "state.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")


def unpack(parts: Path, state: Path) -> None:
    facts = json.loads((parts / "state.json").read_text(encoding="utf-8"))
    data = b"".join((parts / f"state.tar.{i}").read_bytes() for i in range(facts["parts"]))
    if hashlib.sha256(data).hexdigest() != facts["sha256"]:
        raise ValueError(f"{parts}: the parts do not belong together (sha256 differs)")
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.extractall(state, filter="data")


def compilation() -> str:
    """Says what was compiled so far, and the memory it took: a fall-back to eager shows here."""
    stats = torch._dynamo.utils.counters["stats"]
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return f"{stats.get('unique_graphs', 0)} graphs compiled, {peak:.1f} GiB at most"


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def prepare_torch(seed: int) -> torch.device:
    """Sets seeds, TF32 for what stays F32, and compilation that falls back to eager where it fails."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    # cuDNN builds a plan for every new length, which takes 0.1 s a token.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch._dynamo.config.suppress_errors = True
    torch._dynamo.config.recompile_limit = 32
    return device()
