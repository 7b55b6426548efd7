"""Images of Gemma 4's large models in the Python API: chunks have room for one, which is read at once."""

from __future__ import annotations

import pytest
import tiny_gemma4_vision as vision
import tiny_vision

import luce
from luce.model.defaults import with_room
from luce.planning.plan import Options

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("seen")
    vision.write_both(made, "dense")
    return made


@pytest.mark.long
def test_a_chunk_has_room_for_an_image_of_the_budget(folder, device):
    """On a CPU a chunk has 256 tokens where nobody asks, and this image has 529 of a budget of 560."""
    how = {"device": device, "threads": 1, "ctx": 1024, "image_tokens": 560}
    with luce.load(folder / "model.gguf", mmproj=folder / "mmproj.gguf", **how) as model:
        image = folder / "0.png"
        Image.fromarray(tiny_vision.image(100, 100, 3)).save(image)
        result = model.generate("AB", images=[image], max_tokens=4, temperature=0)
        assert result.prompt_tokens > 500 and len(result.tokens) == 4
        assert model.generate("AB", images=[image], max_tokens=4, temperature=0).tokens == result.tokens


def test_the_core_s_chunks_are_made_longer_where_they_have_no_room():
    on_cpu = Options(device="cpu")
    assert with_room(on_cpu, 0) == with_room(on_cpu, 280) == on_cpu, "512 are enough"
    assert with_room(on_cpu, 560).chunk == 768 and with_room(on_cpu, 1120).chunk == 1280
    assert with_room(Options(device="cuda:0"), 1120).chunk is None
    assert with_room(Options(device="cuda:0,cuda:1"), 1120).chunk == 1280, "several GPUs read 1024"
    assert with_room(Options(device="cuda", split=()), 1120).chunk == 1280
    assert with_room(Options(device="cpu", chunk=256), 1120).chunk == 256, "what was asked for is kept"
