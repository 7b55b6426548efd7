"""Tests of how layers are shared out among devices: shares, what is free, and what is said where it does not fit. The
devices are pretended ones, for which the CPU stands in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cut_models
import op_run
import pytest

from luce.decode.engine import Engine
from luce.decode.request import Request
from luce.errors import ArgumentError, OutOfMemory
from luce.native import Library
from luce.native.structs import Device
from luce.planning.memory import fits
from luce.planning.opened import Files
from luce.planning.plan import Options
from luce.planning.split import Split, devices_of, layers_of

MIB = 1 << 20
CPU = Device("cpu", "", 0, 0, is_gpu=0)
GPUS = [Device(f"cuda:{n}", "", 0, 0, is_gpu=1) for n in range(3)]
PAIR = "fake:0,fake:1"


@pytest.fixture
def pair(native: Library) -> Iterator[None]:
    """Gives two devices, the second of which has a third of what the first has."""
    with op_run.pretended_devices(native, {"fake:0": 300 * MIB, "fake:1": 100 * MIB}):
        yield


@pytest.mark.parametrize(
    ("device", "split", "found"),
    [(None, None, None), ("cuda", None, "cuda"), ("cuda", (), "cuda:0,cuda:1,cuda:2"),
     (None, (1, 1, 2), "cuda:0,cuda:1,cuda:2"), ("cuda:2,cuda:0", (3, 1), "cuda:2,cuda:0"),
     (None, "tensor", "cuda:0+cuda:1+cuda:2"), ("cuda:2,cuda:0", "tensor", "cuda:2+cuda:0")],
)  # fmt: skip
def test_a_split_is_over_all_gpus_or_those_that_are_named(
    device: str | None, split: Split | None, found: str | None
) -> None:
    assert devices_of(device, split, [*GPUS, CPU]) == found


@pytest.mark.parametrize(
    ("device", "split", "known", "said"),
    [(None, (), [CPU], "there is no GPU"), ("cuda:1", "tensor", GPUS, "there is one: cuda:1"),
     ("cuda", (1, 1), [GPUS[0], CPU], "there is one: cuda:0"),
     ("cuda", (1, 1), GPUS, "a split of 2 parts was asked for over 3 devices")],
)  # fmt: skip
def test_what_cannot_be_split_is_said(
    device: str | None, split: Split, known: list[Device], said: str
) -> None:
    with pytest.raises(ArgumentError, match=said):
        devices_of(device, split, known)


@pytest.mark.parametrize(
    ("shares", "n", "layers"),
    [((3, 1), 64, (48, 16)), ((48, 16), 64, (48, 16)), ((1, 1, 1), 64, (22, 21, 21)), ((1, 1000), 4, (1, 3)),
     ((1000, 1, 1), 3, (1, 1, 1))],
)  # fmt: skip
def test_shares_become_layers(shares: tuple[int, ...], n: int, layers: tuple[int, ...]) -> None:
    found = layers_of(shares, n)
    assert sorted(found) == sorted(layers) and sum(found) == n and min(found) >= 1


def test_there_are_as_many_layers_as_devices() -> None:
    with pytest.raises(ArgumentError, match="5 devices were asked for, and the model has 4 layers"):
        layers_of((1,) * 5, 4)


@pytest.mark.usefixtures("pair")
def test_auto_goes_by_what_is_free(tiny_gguf: Path) -> None:
    """Longer contexts fill the devices up: each has a like part of its memory taken."""
    with Files(tiny_gguf, device=PAIR) as files:
        chosen = files.plan(Options(ctx=2048, kv_type="f32", sequences=8, spec="off"))
        memory = files.memory(chosen)
    assert sum(chosen.layers) == 4 and chosen.layers[0] > chosen.layers[1]
    assert [each.n_layers for each in memory.devices] == list(chosen.layers)
    assert memory.total == sum(each.total for each in memory.devices) and memory.fits


@pytest.mark.usefixtures("pair")
def test_what_was_asked_is_opened_and_counts_by_device(tiny_gguf: Path) -> None:
    asked = Options(device=PAIR, split=(1, 3), ctx=512, spec="off", threads=1)
    with Files(tiny_gguf, device=PAIR) as files, Engine.open(files, asked) as engine:
        assert engine.plan.layers == (1, 3) and engine.model.info.device == PAIR
        first, last = files.memory(engine.plan).devices
        assert (first.first, first.n_layers, last.first, last.n_layers) == (0, 1, 1, 3)
        assert engine.info.memory_bytes <= first.total + last.total - first.weights - last.weights


def test_a_device_that_lacks_memory_is_named_with_what_it_lacks(native: Library, tiny_gguf: Path) -> None:
    with (
        op_run.pretended_devices(native, {"fake:0": 300 * MIB, "fake:1": MIB // 4}),
        Files(tiny_gguf, device=PAIR) as files,
    ):
        chosen = files.plan(Options(split=(2, 2), ctx=512, spec="off"))
        with pytest.raises(OutOfMemory, match=r"^fake:1 lacks [\d,]+ bytes: its 2 layers from 2 on"):
            files.load([chosen])
        (way,) = (way for way in fits(files, Options(split=(2, 2), ctx=512)) if way.mode == "plain")
        assert not way.fits and [each.parts <= each.free for each in way.memory.devices] == [True, False]


@pytest.mark.parametrize("device", [PAIR, "fake:0+fake:1"])
def test_a_model_that_no_device_holds_alone_runs_on_two(native: Library, device: str, tmp_path: Path) -> None:
    path, _ = cut_models.files(tmp_path, "dense")
    asked = Options(ctx=512, spec="off", threads=1, chunk=256)
    request = Request((5, 9, 8, 6), 8, ignore_eos=True)

    def text(where: str) -> tuple[int, ...]:
        with Files(path, device=where) as files, Engine.open(files, asked) as engine:
            *_, last = engine.generate(request)
        return last.tokens

    with op_run.pretended_devices(native, {"fake:0": 900 * MIB}), Files(path, device="fake:0") as files:
        needed = files.memory(files.plan(asked)).total
    with op_run.pretended_devices(native, {"fake:0": needed * 9 // 10, "fake:1": needed * 9 // 10}):
        for alone in ("fake:0", "fake:1"):
            with Files(path, device=alone) as files:
                assert not files.memory(files.plan(asked)).fits
        with Files(path, device=device) as files:
            assert files.memory(files.plan(asked)).fits
        found = text(device)
    assert len(found) == 8 and (device != PAIR or found == text("cpu"))
