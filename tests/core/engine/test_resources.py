"""Checks what an engine costs and takes: seconds by width, memory as it was planned, pages, threads, and no
leak."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import box_model
import drive
import op_run
import pytest
import tiny
from depth import deeper
from nan_model import BAD, open_engine, tokens_of
from op_run import Fault, fault
from split import two_stages

import luce
from luce.errors import DeviceError, NumericError
from luce.native import File, Library, Model, Rows
from luce.native.structs import EngineParams
from luce.planning.split import names_of
from luce.speculate.prices import Costs

# ---- seconds


@pytest.mark.usefixtures("timed")
def test_costs_are_listed_by_steps_and_rows(native: Library, model: Model, device: str) -> None:
    """Each number of rows costs what the width costs that a step of them gets."""
    engine = open_engine(model, n_rows=5, n_draft=4, n_sequences=4)
    ffi, lib, n = native.ffi, native.lib, native.ffi.new("uint32_t *")
    native.check(lib.luce_engine_costs(engine.handle, ffi.NULL, n))
    count = n[0]
    listed, n[0] = ffi.new("luce_cost[]", count + 1), count + 1
    native.check(lib.luce_engine_costs(engine.handle, listed, n))
    assert n[0] == count
    found = [(cost.step, cost.rows) for cost in listed[0:count]]
    most = {0: 20, 1: 4, 2: 5}  # A feed has at most as many rows as a sequence has in a step.
    assert found == [(step, rows) for step, n in most.items() for rows in range(1, n + 1)]
    assert all(0 < cost.seconds < 60 for cost in listed[0:count])
    seconds = [cost.seconds for cost in listed[0:20]]
    widths = [[11, 12], [13, 14, 15, 16], [17, 18, 19, 20]]  # Steps are as wide as the last of each.
    assert all(len({seconds[rows - 1] for rows in width}) == 1 for width in widths)
    n[0] = 1
    native.check(lib.luce_engine_costs(engine.handle, listed, n))
    assert n[0] == 1
    assert Costs(engine.costs()).verify(20) > 0 and Costs(engine.costs()).draft(2) > 0
    assert Costs(engine.costs()).feed(5) > 0 and Costs(engine.costs()).feed(0) == 0
    plain = drive.open_engine(model, n_ctx=64, n_rows=1)
    assert Costs(plain.costs()).draft(1) == Costs(plain.costs()).feed(1) == 0 and Costs(plain.costs()).verify(1) > 0


# ---- the process: its environment, and its end


# A process's environment as C has it, before the library is loaded and after a model has run.
ENVIRONMENT = """
import ctypes, sys
def environment():
    listed = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found = []
    while listed[len(found)]:
        found.append(listed[len(found)])
    return found
before = environment()
import drive
from pathlib import Path
from luce import native as core
native = core.load(Path(sys.argv[1]))
sequence = drive.open_sequence(drive.open_model(native, Path(sys.argv[2]), sys.argv[3]), n_threads=2)
drive.greedy(sequence, [1, 2, 3] * 20, 3)
print(len(before), set(environment()) ^ set(before))
"""


def test_a_process_keeps_its_environment(native: Library, tiny_gguf: Path, device: str) -> None:
    """Others embed the library, and their threads may read the environment while a write moves it."""
    paths = os.pathsep.join([str(Path(luce.__file__).parent.parent), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", ENVIRONMENT, native.path.parent, tiny_gguf, device],
        env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    count, changed = run.stdout.split(maxsplit=1)
    assert int(count) > 0 and changed == "set()\n", run.stdout + run.stderr


def test_what_computes_reads_no_environment(native: Library) -> None:
    """ggml has variables that change what it computes, such as GGML_CPU_TILED_MM. ggml-base reads how it is
    to say what went wrong, and ggml where it finds backends that luce does not load."""
    libraries = [each for each in native.path.parent.glob("libluce*.so")
                 if each.stem not in ("libluce-ggml", "libluce-ggml-base")]  # fmt: skip
    assert len(libraries) > 1
    for library in libraries:
        imported = subprocess.run(
            ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
        ).stdout
        assert "memcpy" in imported
        assert not re.search(r"\b((secure_)?getenv|(un)?setenv|putenv)\b", imported)


def test_what_is_open_at_exit_is_left_to_the_system(
    native: Library, small_gguf: Path, device: str, tmp_path: Path
) -> None:
    """An engine that was taken apart then would outlive the devices, and what their drivers have of them."""
    program, source = tmp_path / "left_open", Path(__file__).with_name("left_open.cpp")
    include = native.path.parent.parent / "include"
    subprocess.run(["c++", "-std=c++17", "-I", include, source, "-ldl", "-o", program], check=True)
    run = subprocess.run(
        [program, native.path, small_gguf, device], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


# ---- memory and pages


@pytest.mark.parametrize(
    "params",
    [
        *deeper({}),
        *deeper({"n_ctx": 2048, "n_sequences": 16, "n_checkpoints": 0, "n_rows": 5}),
        {"n_sequences": 2, "n_draft": 3, "n_part": 128},
        {"n_sequences": 1, "n_checkpoints": 8, "n_draft": 0, "n_rows": 1, "kv_type": "q8_0"},
        *deeper({"n_pages": 3, "n_ctx": 600, "kv_type": "f16"}),
        *deeper({"n_sequences": 64, "n_rows": 64, "n_draft": 8, "n_pages": 64}),
        *deeper({"n_sequences": 5, "n_draft": 3, "n_top": 63, "blocks": 1}),
    ],
    ids=str,
)
def test_an_engine_takes_what_was_planned(
    params: dict[str, int | str],
    native: Library,
    small_gguf: Path,
    device: str,
    record_property: Callable[[str, object], None],
) -> None:
    filled: dict[str, int | str] = {
        "n_ctx": 300, "n_sequences": 3, "n_checkpoints": 1, "n_rows": 24, "n_draft": 4, "n_chunk": 256,
        "n_threads": 1, "kv_type": "f32",
    }  # fmt: skip
    filled |= params
    drafter = box_model.DRAFTER if "blocks" in params else None
    path = small_gguf if drafter is None else box_model.GGUF
    with File(path, native) as file:
        own = None if drafter is None else File(drafter, native)
        plan = file.plan_memory(device, EngineParams(**filled), file, own)  # type: ignore[arg-type]
    weights = 0 if device.startswith("cpu") else plan.weights
    assert plan.total == plan.kv + plan.state + plan.compute + plan.other + weights
    layers = [each.n_layers for each in plan.devices] if "," in device else []
    model = drive.open_model(native, path, device, head=True, drafter=drafter, layers=layers)
    if device.startswith("cpu"):
        drive.open_engine(model, **filled).close()  # From here on there is what is kept for good.
    before, held = free_bytes(native, device), malloced()
    engine = drive.open_engine(model, **filled)
    for n in (256, 290):  # A chunk that ends a prompt, and one before a tail: an engine keeps a graph of each kind.
        with engine.sequence() as sequence:
            drive.decode(sequence, tokens_of(n), 4)
    taken = before - free_bytes(native, device)
    if not device.startswith("cpu"):
        record_property("taken_of_planned", taken / (plan.total - weights))
        assert taken <= plan.total - weights, "with captured graphs and ggml's pools"
    if device.startswith("cpu") and held is not None:
        grown = (malloced() or 0) - held
        assert 0.9 * plan.total < grown < plan.total + HARNESS, "with graphs and what ggml works in"
    assert engine.info.memory_bytes == plan.kv + plan.state + plan.compute
    assert engine.info.pages_free == engine.info.n_pages


HARNESS = 64 << 10  # Python and the test itself may hold so much more than before.


class Mallinfo(ctypes.Structure):
    _fields_ = [(f"field_{at}", ctypes.c_size_t) for at in range(10)]


def malloced() -> int | None:
    """Returns how many bytes this process holds of malloc(), or None where the C library cannot say."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return None
    gc.collect()
    mallinfo2.restype = Mallinfo
    said = mallinfo2()
    return said.field_7 + said.field_4  # These are of heaps, and of blocks that are mapped alone.


def test_tables_for_the_host_are_counted_where_its_memory_is_the_devices(
    native: Library, small_gguf: Path
) -> None:
    """With 63 candidates of each draft there are that many more ids and scores for each of 64 x 8 drafts."""
    with File(small_gguf, native) as file:
        params = [EngineParams(n_ctx=300, n_sequences=64, n_draft=8, n_top=n) for n in (1, 63)]
        one, many = (file.plan_memory("cpu", each, file).state for each in params)
    assert many - one == 62 * 8 * 64 * 8


def test_what_attention_leaves_by_chunk_is_counted_by_the_type_of_its_cells(
    native: Library, device: str, tmp_path: Path
) -> None:
    """On a GPU the means of a step's chunks take most of its memory where a context is long: D values a
    chunk, row and head, in F32 for F32 cells and in F16 for all others, beside two sums. What a prompt's rows
    leave by range, 256 MiB at most, is less. A CPU leaves none."""
    rows, heads, dim, n_ctx = 64, 128, 128, 260_000
    config = tiny.Config(n_head=heads, n_head_kv=1, head_dim=dim, n_ctx=n_ctx)
    path = tiny.write(tmp_path / "heads.gguf", config, tiny.layout(config, seed=82))
    with File(path, native) as file:
        plans = {
            kind: file.plan_memory(device, EngineParams(n_ctx=n_ctx, n_rows=rows, n_chunk=256, kv_type=kind))
            for kind in ("f32", "f16", "q8_0", "q4_0")
        }
    # Chunks have 128 positions up to 4096, 256 up to 16384, 512 up to 32768, 1024 up to 81920, then 2048.
    chunks = 32 + 48 + 32 + 48 + -(-(n_ctx + rows - 81920) // 2048)
    halves = rows * heads * chunks * dim // 2 * 4
    if device.startswith("cpu"):
        assert plans["f16"].compute < rows * heads * chunks * (dim // 2 + 2) * 4
    else:
        assert plans["f32"].compute - plans["f16"].compute == pytest.approx(halves, rel=0.02)
        assert plans["f16"].compute == plans["q8_0"].compute == plans["q4_0"].compute


def free_bytes(native: Library, device: str) -> int:
    gc.collect()
    return next(each.memory_free for each in native.devices() if each.name.startswith(names_of(device)[0]))


def test_default_pages_are_enough_for_all_sequences_at_once(model: Model) -> None:
    """Each ends its context with a step's widest tree."""
    engine = open_engine(model, n_checkpoints=0)
    sequences = [engine.sequence() for _ in range(3)]
    for seed, sequence in enumerate(sequences):
        drive.prefill(sequence, tokens_of(298, seed))
    assert len(engine.verify([Rows(each, [1] * 20, [-1] + [0] * 19) for each in sequences])) == 3
    for sequence in sequences:
        sequence.commit([0, 19])
        assert sequence.info.n_past == 300 and len(sequence.dump()) > 0


def test_pages_come_back(model: Model) -> None:
    """Resets and closes give them back, also where a draft or rows that were not committed had taken them."""
    engine = open_engine(model)
    free = engine.info.pages_free
    sequence = engine.sequence()
    assert engine.info.pages_free == free, "an empty one has none"
    drive.prefill(sequence, tokens_of(254))
    assert engine.info.pages_free == free - 1
    drive.draft(sequence, 1, 4)
    assert engine.info.pages_free == free - 2 == free - sequence.info.n_pages
    sequence.reset()
    assert engine.info.pages_free == free and sequence.info.n_pages == 0
    drive.prefill(sequence, tokens_of(256))
    with pytest.raises(NumericError):
        drive.verify(sequence, [BAD, 1])
    assert engine.info.pages_free == free - 2
    sequence.close()
    assert engine.info.pages_free == free and engine.info.sequences_free == 3


# ---- threads, and leaks


def test_two_engines_in_two_threads(model: Model) -> None:
    """Each decodes what it decodes alone, while engines are opened and closed beside the steps of the other.
    """
    prompts = [tokens_of(260, seed) for seed in (1, 2)]
    with open_engine(model, n_ctx=400) as engine:
        expected = [drive.decode(engine.sequence(), prompt, 30, 3) for prompt in prompts]
    found: list[list[drive.Decoded]] = [[], []]

    def work(at: int) -> None:
        for _ in range(3):
            with open_engine(model, n_ctx=400) as engine, engine.sequence() as sequence:
                for _ in range(3):
                    found[at].append(drive.decode(sequence, prompts[at], 30, 3))

    threads = [threading.Thread(target=work, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[each] * 9 for each in expected]


def test_one_engine_in_several_threads(model: Model) -> None:
    """Calls wait for each other: each thread drives a sequence of its own, between others' steps."""
    engine = open_engine(model, n_ctx=400)
    prompts = [tokens_of(257 + seed, seed) for seed in range(3)]
    sequences = [engine.sequence() for _ in prompts]
    expected = [drive.decode(each, prompt, 25, 3) for each, prompt in zip(sequences, prompts, strict=True)]
    found: list[list[drive.Decoded]] = [[], [], []]

    def work(at: int) -> None:
        for _ in range(4):
            found[at].append(drive.decode(sequences[at], prompts[at], 25, 3))

    threads = [threading.Thread(target=work, args=(at,)) for at in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[each] * 4 for each in expected]


@pytest.mark.long
@pytest.mark.parametrize("cut", ["one", "two", "drafts apart", "ranks"])
def test_a_hundred_engines_leak_nothing(
    cut: str, native: Library, small_gguf: Path, device: str, record_property: Callable[[str, object], None]
) -> None:
    """They are opened, used with drafts, a tree, a checkpoint and a failure, and closed; as many fail while
    they are opened. In several stages or ranks their model is opened and closed with each, and on a CPU some have
    threads. Device memory comes back to the byte on each device, host memory up to what allocators keep. On a CPU
    no thread, no open file and not a kilobyte an engine is left."""
    several = cut != "one"
    names = two_stages(device).split(",") if several else names_of(device)[:1]
    apart = cut == "drafts apart"
    where = ("+" if cut == "ranks" else ",").join(names[:1] if apart else names)

    def opened() -> Model:
        return drive.open_model(native, small_gguf, where, head=True, draft_device=names[1] if apart else None)

    model = opened()

    def once(number: int) -> None:
        nonlocal model
        threads = several and names[0] == "cpu" and number % 30 == 0  # One of the stages sleeps ahead of its work.
        if several:
            model.close()
            model = opened()
        with op_run.threads_of_stages(native, number) if threads else nullcontext():
            engine = open_engine(model, n_ctx=600, n_rows=5, n_sequences=2, n_threads=2)
        with engine, engine.sequence() as one, engine.sequence() as two:
            drive.prefill(one, tokens_of(256), last=False)
            with one.checkpoint() as checkpoint:
                drive.decode(two, tokens_of(10), 6, 3)
                drive.verify(one, tokens_of(5), [-1, 0, 1, 1, 0])
                checkpoint.to_host()
                two.resume(checkpoint)
                with engine.load_checkpoint(checkpoint.save()) as loaded:
                    one.resume(loaded)
            (failed,) = engine.verify([Rows(two, [BAD])])
            assert isinstance(failed, NumericError)

    def free() -> list[int]:
        return [free_bytes(native, name) for name in names]

    def fail_to_open(after: int) -> None:
        with fault(native, Fault.OP, after), suppress(DeviceError):
            open_engine(model, n_rows=2, n_draft=1, n_sequences=1).close()

    for number in range(10):
        once(number)
        fail_to_open(number)
    before, peak, held, open_now = free(), peak_bytes(), malloced(), threads_and_files()
    for number in range(90):
        once(number)
        fail_to_open(5 * number)
    if not device.startswith("cpu"):
        record_property("device_bytes_left", [was - now for was, now in zip(before, free(), strict=True)])
        assert free() == before
    assert peak_bytes() - peak < 64 << 20, "90 engines of more than 1 MB each"
    if device.startswith("cpu"):
        for _ in range(100):  # The system may count a thread that has just ended.
            if threads_and_files() != open_now:
                time.sleep(0.01)
        assert threads_and_files() == open_now
        assert held is None or (malloced() or 0) - held < HARNESS


def threads_and_files() -> tuple[int, int]:
    """Returns how many threads this process has, and how many open files; zeros where /proc is not."""
    here = Path("/proc/self")
    found = [len(list(each.iterdir())) for each in (here / "task", here / "fd") if each.exists()]
    return (found[0], found[1]) if found else (0, 0)


def peak_bytes() -> int:
    """Returns the most resident memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@pytest.mark.parametrize("n_ctx", [*deeper(300, 700), 1111, *deeper(1900)])
@pytest.mark.parametrize("head", [False, True])
def test_every_chunk_of_a_context_fits_the_buffers_that_were_counted(native, tmp_path, device, n_ctx, head):
    """Chunks with and without a choice, of all lengths of context: none takes more than the largest did."""
    config = tiny.Config(n_nextn=1, n_ctx=2048)
    path = tiny.write(tmp_path / "model.gguf", config, tiny.layout(config, seed=2))
    model = drive.open_model(native, path, device, head=head)
    sequence = drive.open_sequence(model, n_ctx=n_ctx, n_draft=1 if head else 0, n_rows=2, n_chunk=256)
    tokens = [1 + i % 50 for i in range(n_ctx)]
    for last in (False, True):
        sequence.reset()
        for begin in range(0, n_ctx, 256):
            sequence.prefill(tokens[begin : begin + 256], last)
