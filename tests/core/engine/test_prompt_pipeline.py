"""Chunks of a prompt follow each other through the stages of a model, of which it may have one: the host makes the next
chunk ready meanwhile. On a CPU a stage has a thread of its own here, as a GPU's has a stream, and one stage after the
other is slow: a wait that is missing shows in the bits."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import drive
import op_run
import pytest
import tiny
from cut_models import DENSE
from depth import deeper
from op_run import Fault
from split import held, stages, two_stages

from luce.errors import DeviceError
from luce.native import Library, Prompt, Sequence

CHUNK = 64
PROMPT = [7 + 3 * i % 200 for i in range(9 * CHUNK + 5)]
LAYERS: dict[int, tuple[int, ...]] = {1: (), 2: (2, 2), 3: (1, 2, 1)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipeline") / "model.gguf"
    return tiny.write(path, DENSE, tiny.layout(DENSE, 5), "F32")


def read(native: Library, made: Path, device: str, layers: tuple[int, ...] = (), wait: bool = False) -> list[bytes]:
    """Returns logits and state behind a prompt of many chunks, of another length beside it, and of the first again;
    with `wait` no chunk begins before the last one has ended."""
    model = drive.open_model(native, made, device, head=True, layers=layers)
    one = drive.open_sequence(model, n_ctx=1024, n_sequences=2, n_chunk=256, n_draft=3)
    other, found = one.engine.sequence(), []
    for sequence, prompt in ((one, PROMPT), (other, PROMPT[3:200]), (one, PROMPT[40:500])):
        sequence.reset()
        for at in range(0, len(prompt), CHUNK):
            rows = prompt[at : at + CHUNK]
            sequence.engine.prefill([Prompt(sequence, rows, last=at + CHUNK >= len(prompt))])
            if wait:
                sequence.engine.finish_prompts()
        found += [sequence.logits(0).tobytes(), drive.step(sequence, 11).tobytes(), bytes(sequence.dump())]
    one.engine.close()
    model.close()
    return found


@pytest.mark.parametrize(("slow", "n"), [(1, 3), *deeper((0, 1), (0, 2), (0, 3), (1, 2), (2, 3))])
def test_chunks_that_overlap_have_the_bits_of_chunks_that_are_waited_for(
    native: Library, device: str, made: Path, n: int, slow: int
) -> None:
    if (several := stages(device, n)) is None:
        pytest.skip("there is no such stage")
    one = device.split(",")[0]
    whole = held(one, read(native, made, one, wait=True))
    with op_run.threads_of_stages(native, slow) if one == "cpu" else nullcontext():
        assert held(one, read(native, made, several, LAYERS[n])) == whole


@pytest.mark.long
def test_rows_of_chunks_wait_in_host_memory_too(native: Library, device: str, made: Path) -> None:
    two, one = two_stages(device), device.split(",")[0]
    with op_run.parted_devices(native):
        found = read(native, made, two, LAYERS[2])
    assert held(one, found) == held(one, read(native, made, one))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("fault", [Fault.OP, Fault.WAIT])
def test_a_chunk_that_fails_ends_in_an_error_that_names_the_device(
    native: Library, device: str, made: Path, fault: Fault, n: int
) -> None:
    one = device.split(",")[0]
    if (several := stages(device, n)) is None:
        pytest.skip("there is no such stage")
    with op_run.threads_of_stages(native, n - 1) if one == "cpu" else nullcontext():
        model = drive.open_model(native, made, several, head=True, layers=LAYERS[n])
        sequence = drive.open_sequence(model, n_ctx=1024, n_chunk=256)
    either = several.replace(",", "|")
    with op_run.fault(native, fault, 0 if fault == Fault.WAIT else 40), pytest.raises(DeviceError, match=either):
        for at in range(0, 8 * CHUNK, CHUNK):
            sequence.engine.prefill([Prompt(sequence, PROMPT[at : at + CHUNK], last=False)])
        sequence.engine.prefill([Prompt(sequence, PROMPT[:3], last=True)])
    sequence.reset()  # What was under way has ended, and the next prompt is read.
    assert drive.prefill(sequence, PROMPT[:CHUNK]) is not None
    sequence.engine.close()
    model.close()


def test_a_graph_of_prompts_that_is_kept_gives_the_bits_of_a_new_one(native: Library, device: str, made: Path) -> None:
    """Lengths of four graphs come back in another order, and on another sequence; then others are read between them."""
    one = device.split(",")[0]
    with op_run.threads_of_stages(native, 0) if one == "cpu" else nullcontext():
        model = drive.open_model(native, made, one, head=True)
        sequence = drive.open_sequence(model, n_ctx=1024, n_sequences=2, n_chunk=256)
    other = sequence.engine.sequence()

    def read(by: Sequence, n: int) -> bytes:
        by.reset()
        assert drive.prefill(by, PROMPT[:n]) is not None
        return by.logits(0).tobytes() + bytes(by.dump())

    kept = (CHUNK, 256, 100, 128)
    new = {n: read(sequence, n) for n in kept}
    with op_run.fault(native, Fault.GRAPH):  # None is built,
        assert {n: read(by, n) for n in reversed(kept) for by in (other, sequence)} == new
        with pytest.raises(DeviceError, match="no host memory"):  # and one of another shape would be.
            read(other, 101)
    for many in (range(1, 12), range(129, 257, 12)):  # They take the places of those that were kept.
        for n in many:
            read(other, n)
        assert {n: read(sequence, n) for n in kept} == new
    sequence.engine.close()
    model.close()
