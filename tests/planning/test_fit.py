"""Says whether a model fits into the memory, and with which context: what probe says is what generate
takes."""

import json

import pytest
import tiny

from luce.decode.engine import Engine
from luce.errors import ArgumentError
from luce.native.structs import Memory
from luce.planning.memory import _largest, fits
from luce.planning.opened import Files
from luce.planning.plan import AUTO_BUDGET, Options

CONFIG = tiny.Config(n_nextn=1, n_ctx=8192)


@pytest.fixture(scope="module")
def with_head(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("fit") / "head.gguf", CONFIG, tiny.layout(CONFIG, 1))


def test_the_parts_add_up_with_and_without_drafts(with_head, device):
    with Files(with_head, device=device) as files:
        plain, drafts = fits(files, Options())
    assert (plain.mode, plain.context, drafts.mode, drafts.context) == ("plain", 4096, "drafts", 4096)
    for way in (plain, drafts):
        memory = way.memory
        assert way.total == memory.weights + memory.kv + memory.state + memory.compute + memory.other
        assert way.fits and way.largest == 8192
    assert drafts.memory.weights > plain.memory.weights and drafts.memory.kv > plain.memory.kv


@pytest.mark.parametrize("drafts", [{"spec": "off"}, {"spec": "mtp", "gamma": 8, "budget": AUTO_BUDGET}])
def test_it_is_what_generate_opens(with_head, device, drafts):
    with Files(with_head, device=device) as files:
        way = fits(files, Options(ctx=300, kv_type="q8_0"))[drafts["spec"] == "mtp"]
        with Engine.open(files, Options(ctx=300, kv_type="q8_0", **drafts)) as engine:
            opened = engine.info.memory_bytes
    assert way.memory.kv + way.memory.state <= opened <= way.total - way.memory.weights


def test_what_the_memory_lacks_is_said(with_head, monkeypatch, device):
    """1000 bytes a position, 50,000 for the weights: half of the context fits, or nothing does."""
    for free, largest in ((50_000 + 4_096_000, 4096), (50_000, 0), (50_000 + 9_000_000, 8192)):

        def memory(self, device, params, head=None, drafter=None, cpu_experts=0, free=free, **_):
            return Memory(50_000, 1000 * params.n_ctx, 0, 0, 0, 1000 * params.n_ctx, free)

        monkeypatch.setattr("luce.native.File.plan_memory", memory)
        with Files(with_head, device=device) as files:
            way = fits(files, Options(ctx=5000))[0]
        assert way.fits == (largest == 8192) and way.largest <= largest <= way.largest * 1.01


@pytest.mark.parametrize("limit", [0, 1, 7, 1000, 262_143, 262_144])
def test_the_longest_context_is_found_to_a_part_in_256(limit):
    asked = []
    found = _largest(lambda context: asked.append(context) or context <= limit, 262_144)
    assert found <= limit <= found + (found >> 7) + 1 and len(asked) < 25


def test_a_context_beyond_the_trained_one_is_refused(with_head, device):
    with Files(with_head, device=device) as files, pytest.raises(ArgumentError, match="trained for 8192"):
        fits(files, Options(ctx=8193))


def test_probe_says_it(luce_, with_head):
    found = json.loads(luce_("probe-gguf", with_head, "--json", "--ctx", "512", "--device", "cpu").stdout)
    assert [(way["mode"], way["context"], way["fits"]) for way in found["fits"]] == [
        ("plain", 512, True), ("drafts", 512, True),
    ]  # fmt: skip
    text = luce_("probe-gguf", with_head).stdout
    assert "plain at 4096" in text and "drafts at 4096" in text
    assert "the longest context that fits is 8192" in text
    apart = json.loads(luce_("probe-gguf", "{}", "--mtp-gguf", with_head, "--json").stdout)
    assert [way["mode"] for way in apart["fits"]] == ["plain", "drafts"]
