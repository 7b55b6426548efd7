#!/usr/bin/env python3
"""Feeds mutated GGUF files to the loader: it must refuse or accept each, and neither crash nor hang.

A case is made from (seed, number) alone, so that each can be made again. It begins with one of a few valid
files: its header is taken apart into keys and tensors, one to four mutations change values, types, counts,
lengths, names and order, or cut and overwrite bytes, and it is written to a file in memory (the weights are a
hole of zeros). The loader opens the file, hands out every key, string and tensor, and plans the memory of an
engine; with every 16th file that opens, `probe` and the tokenizer read it as well. A worker process does
that, best with a sanitizer build, which also ends it at 1 GB in one allocation or 2 GB in all. Where it dies,
hangs, or meets an error that is not for users, the case is kept in --findings and the next worker goes on.

    cmake -B build-asan -DLUCE_SANITIZE=ON && cmake --build build-asan
    cmake --install build-asan --prefix build-asan/package
    python tools/fuzz_loader.py --lib build-asan/package/luce/lib --count 1000000 --seed 1

Prints one JSON object: how many files, what became of them, and the findings.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))  # Its modules are used below.

import tiny
import tiny_gemma4_unified
import tiny_gemma4_vision
import tiny_vision

from luce import native as _native
from luce.bench.origin import checkout_commit
from luce.errors import Error, InternalError
from luce.files.probe import probe
from luce.files.tokenizer import Tokenizer
from luce.native import File, Library, Tower

ROOT = Path(__file__).resolve().parent.parent
HANG_SECONDS = 60
PROBE_EVERY = 16
MAX_FINDINGS = 20  # The run ends after so many.
NOT_BEGUN = 2**64 - 1
# GGUF's scalar types have these sizes in bytes.
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
EDGES = (0, 1, 2, 3, 7, 8, 31, 32, 64, 255, 256, 4096, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**32,
         2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1)  # fmt: skip


# ---- a header in pieces


@dataclass(frozen=True)
class Seed:
    """This is a valid file: version, its keys and tensors as the bytes of each, and the bytes of its
    weights."""

    name: str
    version: int
    keys: list[bytes]
    tensors: list[bytes]
    n_data: int
    beside: dict[str, bytes] = field(default_factory=dict)  # It holds the other parts of a split file.


def _text_end(data: bytes, at: int) -> int:
    return at + 8 + int(struct.unpack_from("<Q", data, at)[0])


def _key_end(data: bytes, at: int) -> int:
    at = _text_end(data, at)
    kind = struct.unpack_from("<I", data, at)[0]
    at += 4
    if kind == STRING:
        return _text_end(data, at)
    if kind != ARRAY:
        return at + SIZES[kind]
    kind, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if kind != STRING:
        return int(at + SIZES[kind] * count)
    for _ in range(count):
        at = _text_end(data, at)
    return at


def take_apart(path: Path, beside: tuple[Path, ...] = ()) -> Seed:
    data = path.read_bytes()
    version, n_tensors, n_keys = struct.unpack_from("<IQQ", data, 4)
    at, keys, tensors = 24, [], []
    for _ in range(n_keys):
        end = _key_end(data, at)
        keys.append(data[at:end])
        at = end
    for _ in range(n_tensors):
        dims = _text_end(data, at)
        end = dims + 4 + 8 * struct.unpack_from("<I", data, dims)[0] + 12
        tensors.append(data[at:end])
        at = end
    others = {other.name: other.read_bytes() for other in beside}
    return Seed(path.name, version, keys, tensors, len(data) - at, others)


def make_seeds(folder: Path) -> list[Seed]:
    """Makes a model with its head, in types of weights, as version 2, in parts, the head alone, one with
    experts, and the drafter in the box."""
    config = tiny.Config(n_nextn=1)
    tensors = tiny.layout(config, seed=1)
    whole = tiny.write(folder / "whole.gguf", config, tensors)
    quantised = tiny.write(folder / "quantised.gguf", config, tensors, "Q8_0")
    older = tiny.write_v2(whole, folder / "older.gguf")
    mixture = tiny.with_experts(tiny.Config(n_layer=2, interval=2, n_nextn=1, n_ff=32))
    experts = tiny.write(folder / "experts.gguf", mixture, tiny.layout(mixture, seed=1))
    head = tiny.write(folder / "head.gguf", config, tiny.head_only(config, tensors), tokenizer=False)
    first = tiny.write(folder / "split.gguf", config, tensors, tensors_per_part=30)
    parts = sorted(folder.glob("split-*.gguf"))
    second = parts[1]
    return [
        *[take_apart(path) for path in (whole, quantised, older, head, experts)],
        take_apart(first, tuple(path for path in parts if path != first)),
        take_apart(second, tuple(path for path in parts if path != second)),
        take_apart(ROOT / "luce/data/box-dflash.gguf"),
    ]


def make_tower_seeds(folder: Path) -> list[Seed]:
    """Makes a tower of each kind, which are opened as towers."""
    qwen = tiny_vision.layout(tiny_vision.TINY, tiny_vision.weights(tiny_vision.TINY, 5))
    gemma, seed = tiny_gemma4_vision.TOWERS["small"]
    laid = tiny_gemma4_vision.layout(gemma, tiny_gemma4_vision.weights(gemma, seed))
    return [
        take_apart(tiny_vision.write(folder / "mmproj-qwen.gguf", tiny_vision.TINY, qwen)),
        take_apart(tiny_gemma4_vision.write(folder / "mmproj-gemma4.gguf", gemma, laid)),
        take_apart(tiny_gemma4_unified.write(folder / "mmproj-unified.gguf")),
    ]


# ---- mutations


@dataclass(frozen=True)
class Parts:
    """This is what a case is put together from; `raw` changes the bytes of the whole header at the end."""

    version: int
    keys: list[bytes]
    tensors: list[bytes]
    n_keys: int
    n_tensors: int
    n_data: int
    raw: tuple[Callable[[bytes], bytes], ...] = ()


def _number(rng: random.Random, size: int, old: int) -> bytes:
    value = rng.choice((rng.choice(EDGES), old + rng.choice((-1, 1)), old ^ (1 << rng.randrange(8 * size))))
    return (value % (1 << (8 * size))).to_bytes(size, "little")


def _set_number(rng: random.Random, entry: bytes, at: int, size: int) -> bytes:
    if at < 0 or at + size > len(entry):
        return entry
    old = int.from_bytes(entry[at : at + size], "little")
    return entry[:at] + _number(rng, size, old) + entry[at + size :]


def _flip(rng: random.Random, data: bytes) -> bytes:
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if made:
            made[rng.randrange(len(made))] = rng.choice((rng.randrange(256), 0, 255))
    return bytes(made)


def _name_end(entry: bytes) -> int | None:
    """Says where a key's or tensor's name ends; None where an earlier mutation has broken it."""
    end = _text_end(entry, 0) if len(entry) >= 8 else len(entry)
    return end if end + 4 <= len(entry) else None


def _key_entry(rng: random.Random, entry: bytes) -> bytes:
    """Changes one field of a key: its name's length, its type, an array's type or length, its value, its
    bytes."""
    kind = _name_end(entry)
    if kind is None:
        return _flip(rng, entry)
    value_type = int.from_bytes(entry[kind : kind + 4], "little")
    choice = rng.randrange(6)
    if choice == 0:
        return _set_number(rng, entry, 0, 8)
    if choice == 1:
        return entry[:kind] + struct.pack("<I", rng.randrange(14)) + entry[kind + 4 :]
    if choice == 2 and value_type == ARRAY:
        return entry[: kind + 4] + struct.pack("<I", rng.randrange(14)) + entry[kind + 8 :]
    if choice == 3 and value_type in (STRING, ARRAY):
        return _set_number(rng, entry, kind + (4 if value_type == STRING else 8), 8)
    if choice == 4 and value_type in (6, 12):
        odd = rng.choice((float("nan"), float("inf"), -1.0, 0.0, 1e30))
        return entry[: kind + 4] + struct.pack("<f" if value_type == 6 else "<d", odd)
    if value_type in SIZES:
        return _set_number(rng, entry, kind + 4, SIZES[value_type])
    return entry[: kind + 4] + _flip(rng, entry[kind + 4 :])


def _tensor_entry(rng: random.Random, entry: bytes) -> bytes:
    """Changes one field of a tensor: its name, number of dimensions, a dimension, its type, its offset."""
    dims = _name_end(entry)
    if dims is None:
        return _flip(rng, entry)
    n = max(1, min(struct.unpack_from("<I", entry, dims)[0], 4))
    choice = rng.randrange(6)
    if choice == 0:
        return _set_number(rng, entry, 0, 8)
    if choice == 1:
        return _set_number(rng, entry, dims, 4)
    if choice == 2:
        return _set_number(rng, entry, dims + 4 + 8 * rng.randrange(n), 8)
    if choice == 3:
        return entry[:-12] + struct.pack("<I", rng.randrange(48)) + entry[-8:]
    if choice == 4:
        return _set_number(rng, entry, len(entry) - 8, 8)
    return _flip(rng, entry)


def _entries(rng: random.Random, entries: list[bytes], change: Callable[..., bytes]) -> list[bytes]:
    """Changes one entry, leaves it out, repeats it, or puts it in the place of another."""
    if not entries:
        return entries
    made, at = list(entries), rng.randrange(len(entries))
    choice = rng.randrange(10)
    if choice == 0:
        del made[at]
    elif choice == 1:
        made.insert(rng.randrange(len(made)), made[at])
    elif choice == 2:
        other = rng.randrange(len(made))
        made[at], made[other] = made[other], made[at]
    elif choice == 3:  # One tensor gets the name of another.
        other = made[rng.randrange(len(made))]
        mine, theirs = _name_end(made[at]), _name_end(other)
        made[at] = made[at][:mine] + other[theirs or 0 :]
    else:
        made[at] = change(rng, made[at])
    return made


def _mutate(rng: random.Random, p: Parts) -> Parts:
    choice = rng.randrange(20)
    if choice < 8:
        keys = _entries(rng, p.keys, _key_entry)
        return replace(p, keys=keys, n_keys=len(keys))
    if choice < 15:
        tensors = _entries(rng, p.tensors, _tensor_entry)
        return replace(p, tensors=tensors, n_tensors=len(tensors))
    if choice == 15:
        return replace(p, n_keys=int.from_bytes(_number(rng, 8, p.n_keys), "little"))
    if choice == 16:
        return replace(p, n_tensors=int.from_bytes(_number(rng, 8, p.n_tensors), "little"))
    if choice == 17:
        return replace(p, n_data=rng.choice((0, max(0, p.n_data - 1), p.n_data // 2, rng.randrange(p.n_data +
        1))))
    if choice == 18:
        cut = rng.random()
        return replace(p, n_data=0, raw=(*p.raw, lambda data: data[: int(len(data) * cut)]))
    inner = random.Random(rng.random())
    return replace(p, raw=(*p.raw, lambda data: _flip(inner, data)))


def make_case(seeds: list[Seed], seed: int, number: int) -> tuple[Seed, bytes, int]:
    """Returns the valid file that a case comes from, its header, and the bytes of weights after it."""
    rng = random.Random(f"{seed}:{number}")
    base = rng.choice(seeds)
    parts = Parts(base.version, base.keys, base.tensors, len(base.keys), len(base.tensors), base.n_data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        parts = _mutate(rng, parts)
    head = b"GGUF" + struct.pack("<IQQ", parts.version, parts.n_tensors, parts.n_keys)
    data = head + b"".join(parts.keys) + b"".join(parts.tensors)
    for change in parts.raw:
        data = change(data)
    return base, data, max(parts.n_data, 0)


# ---- one case


class Case:
    """Writes cases into a folder in memory and gives them to the loader."""

    def __init__(self, library: Library, folder: Path, seeds: list[Seed], seed: int):
        self.library, self.folder, self.seeds, self.seed = library, folder, seeds, seed
        for one in seeds:
            for name, data in one.beside.items():
                (folder / one.name.replace(".gguf", "")).mkdir(exist_ok=True)
                (folder / one.name.replace(".gguf", "") / name).write_bytes(data)

    def write(self, number: int) -> Path:
        base, data, n_data = make_case(self.seeds, self.seed, number)
        folder = self.folder / base.name.replace(".gguf", "")
        folder.mkdir(exist_ok=True)
        with (folder / base.name).open("wb") as file:
            file.write(data)
            file.truncate(len(data) + n_data)
        parts = sorted([*base.beside, base.name])
        return folder / parts[0]

    def run(self, number: int) -> tuple[str, str]:
        """Says what became of a file: ("opened", ""), or the error's kind and its text without numbers and
        names."""
        path = self.write(number)
        try:
            with File(path, self.library) as file:
                self._read(file)
                if number % PROBE_EVERY == 0:
                    probe(file, device="cpu")
                    Tokenizer(file.kv)
                if path.name.startswith("mmproj"):
                    Tower(file, "cpu").close()
                else:
                    file.plan_memory("cpu")
        except InternalError:
            raise
        except Error as error:
            text = str(error).replace(str(path.parent), "")
            return type(error).__name__, re.sub(r"[0-9]+|'[^']*'|(?<=key )\S+|(?<=ensor )\S+", "#", text)[:60]
        return "opened", ""

    def _read(self, file: File) -> None:
        """Reads every key, string and tensor, and the ends of each tensor's bytes."""
        lib, ffi = self.library.lib, self.library.ffi
        info, kv, tensor = file.info, self.library.struct("luce_kv"), self.library.struct("luce_tensor_info")
        for index in range(info.n_kv):
            self.library.check(lib.luce_file_get_kv(file.handle, index, kv))
            if kv.elem_type != STRING or kv.type != ARRAY:
                size = kv.count * SIZES.get(kv.elem_type, 1)
                bytes(ffi.buffer(kv.data, size)) if size else b""
            elif kv.count:
                starts, lengths = ffi.new("const char *[]", kv.count), ffi.new("uint64_t[]", kv.count)
                self.library.check(lib.luce_file_get_strings(file.handle, index, starts, lengths))
                bytes(ffi.buffer(starts[kv.count - 1], lengths[kv.count - 1]))
        for index in range(info.n_tensors):
            self.library.check(lib.luce_file_get_tensor(file.handle, index, tensor))
            data = ffi.cast("const uint8_t *", tensor.data)
            data[0] + data[tensor.size_bytes - 1]


# ---- worker and parent


def work(args: argparse.Namespace) -> None:
    """Runs cases first .. count - 1; says on stdout where it is and, at the end, what became of them."""
    library = _native.load(args.lib, ROOT / "native/include/luce.h")
    seeds_folder = args.folder / "seeds"
    seeds_folder.mkdir(exist_ok=True)
    _native.use(library)
    case = Case(library, args.folder, make_seeds(seeds_folder), args.seed)
    outcomes: Counter[str] = Counter()
    texts: set[str] = set()
    with args.progress.open("r+b", buffering=0) as progress:
        for number in range(args.first, args.count):
            progress.seek(0)
            progress.write(struct.pack("<Q", number))
            outcome, text = case.run(number)
            outcomes[outcome] += 1
            texts.add(text)
            if number % 1000 == 999 or number == args.count - 1:
                print(json.dumps({"outcomes": outcomes, "texts": sorted(texts)}), flush=True)
                outcomes, texts = Counter(), set()


def _sanitizer() -> dict[str, str]:
    """Returns what a Python that is built without the sanitizer needs for a library that is built with it."""
    names = [subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
             .stdout.strip() for name in ("libasan.so", "libstdc++.so")]  # fmt: skip
    return {
        "LD_PRELOAD": " ".join(names),
        "ASAN_OPTIONS": "detect_leaks=0:max_allocation_size_mb=1024:hard_rss_limit_mb=2048",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


class Fuzz:
    """These are the workers one after the other, what they said, and the findings."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args, self.folder = args, folder
        self.progress = folder / "progress"
        self.outcomes: Counter[str] = Counter()
        self.texts: set[str] = set()
        self.findings: list[dict[str, object]] = []
        self.done = 0

    def _at(self) -> int:
        return int(struct.unpack("<Q", self.progress.read_bytes())[0])

    def _start(self, first: int) -> subprocess.Popen[str]:
        a = self.args
        words = [sys.executable, __file__, "--worker", "--lib", a.lib, "--seed", a.seed, "--count", a.count]
        words += ["--first", first, "--folder", self.folder, "--progress", self.progress]
        env = os.environ | (_sanitizer() if a.sanitizer else {})
        with (self.folder / "stderr").open("w") as errors, (self.folder / "stdout").open("w") as said:
            return subprocess.Popen([str(word) for word in words], env=env, stdout=said, stderr=errors,
            text=True)

    def _wait(self, worker: subprocess.Popen[str]) -> str | None:
        """Waits for a worker. Returns None when it has done all, else what happened to it."""
        at, since = self._at(), time.monotonic()
        while True:
            try:
                status = worker.wait(1)
                return None if status == 0 else f"exit status {status}"
            except subprocess.TimeoutExpired:
                pass
            if self._at() != at:
                at, since = self._at(), time.monotonic()
            elif time.monotonic() - since > HANG_SECONDS:
                worker.kill()
                worker.wait()
                return f"hangs for {HANG_SECONDS} s"

    def run(self) -> None:
        first = self.args.first
        while first < self.args.count:
            self.progress.write_bytes(struct.pack("<Q", NOT_BEGUN))
            what = self._wait(self._start(first))
            for line in (self.folder / "stdout").read_text().splitlines():
                said = json.loads(line)
                self.outcomes.update(said["outcomes"])
                self.texts.update(said["texts"])
            self.done = (self._at() if self._at() != NOT_BEGUN else first - 1) - self.args.first + 1
            if what is None:
                return
            number = self._at()
            if number == NOT_BEGUN:
                sys.exit(f"the worker could not begin: {what}\n{(self.folder / 'stderr').read_text()}")
            self._keep(number, what)
            first = number + 1
            if len(self.findings) == MAX_FINDINGS:
                return

    def _keep(self, number: int, what: str) -> None:
        folder = self.args.findings / f"{self.args.seed}-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        errors = (self.folder / "stderr").read_text(errors="replace")
        (folder / "stderr.txt").write_text(errors)
        self.findings.append({"case": number, "what": what, "stderr": errors.strip().splitlines()[-1:]})
        print(f"case {number}: {what}; see {folder}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Feed mutated GGUF files to the loader.")
    parser.add_argument("--lib", type=Path, required=True, help="folder of the libluce to test")
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first case's number")
    parser.add_argument("--plain", dest="sanitizer", action="store_false", help="the build has no sanitizer")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--progress", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        fuzz = Fuzz(args, Path(folder))
        began, commit = time.monotonic(), checkout_commit()
        with suppress(KeyboardInterrupt):  # What was done until then is reported.
            fuzz.run()
        print(json.dumps({
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%MZ"), "commit": commit,
            "seed": args.seed, "first": args.first, "files": fuzz.done,
            "sanitizer": args.sanitizer,
            "seconds": round(time.monotonic() - began), "outcomes": dict(fuzz.outcomes.most_common()),
            "kinds_of_message": len(fuzz.texts), "findings": fuzz.findings,
        }, indent=1))  # fmt: skip
    sys.exit(1 if fuzz.findings else 0)


if __name__ == "__main__":
    main()
