"""Checkpoints that leave their device: who wants room takes what is copied, and waits for nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import drive
import nan_model
import pytest
import tiny
from nan_model import tokens_of
from op_run import held_copies

from luce.native import Checkpoint, Engine, Library, Model
from luce.native import Sequence as Timeline

HANG_S = 300  # What has not happened after so many seconds waits for a copy that is held.
PAGE, STATE = 256, 0  # Portion STATE is copied first, then one page after the other, or on a GPU several.
T = TypeVar("T")


@pytest.fixture(scope="module")
def model(native: Library, tmp_path_factory: pytest.TempPathFactory, device: str) -> Model:
    path = nan_model.write(tmp_path_factory.mktemp("leaving") / "small.gguf", seed=85)
    return drive.open_model(native, path, device, head=True)


@pytest.fixture
def engine(model: Model) -> Iterator[Engine]:
    """Gives an engine with ten pages and one place for a checkpoint."""
    sizes = {"n_ctx": 1100, "n_sequences": 2, "n_checkpoints": 1, "n_chunk": PAGE, "n_pages": 10}
    with nan_model.open_engine(model, **sizes) as engine:
        yield engine


def in_time(call: Callable[[], T]) -> T:
    """Returns what a call returns that may not wait for what is held."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(call).result(HANG_S)
    finally:
        pool.shutdown(wait=False)


def read(sequence: Timeline, n: int, seed: int = 0) -> None:
    tokens = tokens_of(n, seed=seed)
    for begin in range(0, n, PAGE):
        sequence.prefill(tokens[begin : begin + PAGE], last=False)


def kept(engine: Engine, n: int) -> Checkpoint:
    with engine.sequence() as sequence:
        read(sequence, n)
        return sequence.checkpoint()


def test_a_prompt_takes_the_pages_that_are_copied(native: Library, engine: Engine) -> None:
    """Of four pages that leave two are copied, and the prompt needs these."""
    checkpoint = kept(engine, 4 * PAGE)
    before = bytes(checkpoint.save())
    assert engine.info.pages_free == 6
    with engine.sequence() as first, engine.sequence() as second:
        read(first, 4 * PAGE, seed=1)
        with held_copies(native, 3):
            checkpoint.to_host()
            assert engine.info.pages_free == 6, "those that leave count as free"
            in_time(lambda: read(second, 4 * PAGE, seed=2))
            assert engine.info.pages_free == 2, "two are still there"
            assert in_time(checkpoint.save) == before, "of each page it is where it lies"
        assert checkpoint.save() == before and not checkpoint.info.on_device
    checkpoint.close()
    assert engine.info.pages_free == 10


def test_a_checkpoint_takes_the_place_of_one_whose_state_is_copied(native: Library, engine: Engine) -> None:
    first = kept(engine, 2 * PAGE)
    before = bytes(first.save())
    with held_copies(native, STATE + 1):
        first.to_host()
        second = in_time(lambda: kept(engine, PAGE))
        assert second.info.on_device
    assert first.save() == before
    second.close()
    with engine.sequence() as sequence:
        sequence.resume(first)
        assert sequence.checkpoint().save() == before


@pytest.mark.parametrize("portion", [STATE, STATE + 1])
def test_one_that_is_closed_as_it_leaves_is_waited_for_by_nobody(
    native: Library, engine: Engine, portion: int
) -> None:
    checkpoint = kept(engine, 4 * PAGE)
    with held_copies(native, portion):
        checkpoint.to_host()
        in_time(checkpoint.close)
        assert (engine.info.pages_free, engine.info.checkpoints_free) == (10, 1)
        in_time(lambda: kept(engine, 4 * PAGE).close())
    assert engine.info.pages_free == 10


@pytest.mark.parametrize("interval", [1, 9])
def test_a_portion_may_have_no_bytes(native: Library, tmp_path: Path, device: str, interval: int) -> None:
    """Where all layers have attention there is no state, and where none has any there is no KV."""
    config = tiny.Config(interval=interval)
    path = tiny.write(tmp_path / "one_kind.gguf", config, tiny.layout(config, 86))
    sizes = {"n_ctx": 2 * PAGE, "n_sequences": 1, "n_checkpoints": 1, "n_chunk": PAGE}
    with drive.open_engine(drive.open_model(native, path, device), **sizes) as engine:
        checkpoint = kept(engine, PAGE)
        before = bytes(checkpoint.save())
        checkpoint.to_host()
        assert checkpoint.save() == before
        with engine.load_checkpoint(before) as loaded, engine.sequence() as sequence:
            sequence.resume(loaded)
            assert sequence.checkpoint().save() == before


def test_a_prompt_that_begins_with_one_that_leaves_has_the_bits_of_a_cold_one(
    native: Library, engine: Engine
) -> None:
    """Nothing of it is given back, then its place alone, then pages too: what is gone is waited for."""
    with engine.sequence() as cold:
        read(cold, 3 * PAGE)
        expected = cold.dump()
    for pages, place in ((0, False), (0, True), (2, True)):
        checkpoint, others = kept(engine, 3 * PAGE), []
        with engine.sequence() as sequence, ThreadPoolExecutor(1) as pool:
            with held_copies(native, 3):
                checkpoint.to_host()
                if place:
                    others.append(in_time(lambda: kept(engine, PAGE)))
                    others[0].close()
                if pages:
                    with engine.sequence() as taking:
                        in_time(lambda taking=taking: read(taking, 4 * PAGE, seed=3))
                        in_time(lambda: read(sequence, 4 * PAGE, seed=4))
                resumed = pool.submit(sequence.resume, checkpoint)
                if not place:
                    resumed.result(HANG_S)
            resumed.result(HANG_S)
            assert sequence.dump() == expected
        checkpoint.close()
        assert engine.info.pages_free == 10
