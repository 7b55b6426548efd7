"""What a model runs with where nobody asked, on GPUs that are not here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from luce.errors import OutOfMemory
from luce.model.defaults import CORE_GPU_CHUNK, CPU_CHUNK, GPU_CHUNK, SPARE, with_defaults
from luce.native.structs import DeviceMemory, Memory
from luce.planning.plan import Options

WEIGHTS, OF_A_POSITION, OF_A_ROW = 16_000_000_000, 70_000, 300_000


@dataclass
class Card:
    """Files of a model that takes so much on a GPU with `free` bytes. `asked` are the plans that were counted."""

    free: int
    facts: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(context_length=262_144))
    asked: list[Options] = field(default_factory=list)

    def plan(self, options: Options) -> Options:
        return options

    def memory(self, options: Options) -> Memory:
        self.asked.append(options)
        kv, compute = OF_A_POSITION * (options.ctx or 0), OF_A_ROW * (options.chunk or 0)
        total = WEIGHTS + kv + compute
        one = DeviceMemory("cuda:0", 0, 64, WEIGHTS, kv, 0, compute, 0, total, self.free)
        return Memory(WEIGHTS, kv, 0, compute, 0, total, self.free, devices=(one,))


def needed(ctx: int, chunk: int) -> int:
    return WEIGHTS + OF_A_POSITION * ctx + OF_A_ROW * chunk


GPU = Options(device="cuda:0")


@pytest.mark.parametrize("ctx", [None, 4096])
def test_a_gpu_with_memory_to_spare_reads_long_chunks(ctx):
    enough = int(needed(ctx or 32768, CORE_GPU_CHUNK) / (1 - SPARE)) + 1
    for free, chunk in ((enough, CORE_GPU_CHUNK), (enough - 2, GPU_CHUNK)):
        chosen = with_defaults(Card(free), replace(GPU, ctx=ctx), shrink=True)
        assert (chosen.chunk, chosen.ctx) == (chunk, ctx or 32768)


def test_whether_memory_is_spare_is_asked_without_copies():
    """These take half of what is left, however much that is."""
    card = Card(10**11)
    assert with_defaults(card, GPU, shrink=False).copies
    assert [each.copies for each in card.asked] == [False, True]


def test_a_context_shrinks_with_short_chunks_as_before():
    free = needed(16384, GPU_CHUNK) + 1
    assert with_defaults(Card(free), GPU, shrink=True) == replace(GPU, ctx=16384, chunk=GPU_CHUNK)
    with pytest.raises(OutOfMemory):
        with_defaults(Card(free), GPU, shrink=False)


def test_chunks_of_several_gpus_and_of_a_cpu_stay_short():
    for device, chunk in (("cuda:0,cuda:1", GPU_CHUNK), ("cpu", CPU_CHUNK)):
        assert with_defaults(Card(10**12), Options(device=device), shrink=True).chunk == chunk


def test_what_was_asked_for_stays():
    card = Card(10**12)
    asked = replace(GPU, chunk=512, ctx=1024)
    assert with_defaults(card, asked, shrink=True) == asked and not card.asked
    assert with_defaults(card, replace(GPU, ctx=1024), shrink=True, image=3000).chunk == 3072
