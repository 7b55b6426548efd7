"""Vision towers from safetensors: the file has the checkpoint's numbers, in llama.cpp's names and shapes, and runs."""

from __future__ import annotations

import re

import gguf
import numpy as np
import pytest
import tiny_vision
from hf_checkpoint import keys_of, relative_error, save, tensors_of, types_of
from tiny_vision import TINY

from luce.images.pixels import Picture, Processor
from luce.native import File, Tower

CONFIG = {"model_type": "qwen3_5", "vision_config": tiny_vision.hf_config(TINY)}


def having(**keys):
    return CONFIG | {"vision_config": CONFIG["vision_config"] | keys}


@pytest.fixture
def checkpoint(tmp_path):
    def make(config=CONFIG, prefix="model.visual.", drop=(), **tensors):
        state = {prefix + name: x for name, x in tiny_vision.weights(TINY, 5).items() if name not in drop}
        return save(tmp_path / "tower", config, state | tensors, tokenizer=False)

    return make


def converted(luce_, folder, *words):
    out = folder.parent / "mmproj.gguf"
    result = luce_("convert", folder, out, "--mmproj", *words)
    assert result.exit_code == 0, result.stderr
    return out


@pytest.mark.parametrize("prefix", ["model.visual.", "visual."])
def test_a_tower_is_the_checkpoints(luce_, checkpoint, tmp_path, prefix):
    out = converted(luce_, checkpoint(prefix=prefix), "--type", "F32", "--name", "tiny")
    wanted = tiny_vision.write(tmp_path / "wanted.gguf", TINY, tiny_vision.layout(TINY, tiny_vision.weights(TINY, 5)))
    found, expected = tensors_of(out), tensors_of(wanted)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], x) for name, x in expected.items())
    picture = Picture(tiny_vision.image(64, 96), Processor())
    rows = []
    for path in (out, wanted):
        with File(path) as file, Tower(file) as tower:
            rows.append(tower.encode(picture.patches(), picture.grid, 1))
    assert np.array_equal(*rows)


def test_names_are_those_of_the_gguf_package():
    """gguf-py's table, which nobody here wrote, has all of them."""
    known = gguf.MODEL_TENSORS[gguf.MODEL_ARCH.MMPROJ]
    patterns = {gguf.TENSOR_NAMES[tensor] for tensor in known}
    for name in tiny_vision.layout(TINY, tiny_vision.weights(TINY, 5)):
        parts = name.removesuffix(".1").removesuffix(".weight").removesuffix(".bias").split(".")
        number = next((part for part in parts if part.isdigit()), None)
        pattern = ".".join("{bid}" if part == number else part for part in parts)
        assert pattern in patterns or pattern.replace("{bid}", number or "") in patterns, name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_types(luce_, checkpoint, kind):
    out = converted(luce_, checkpoint(), "--type", kind)
    types, weights = types_of(out), tensors_of(out)
    assert types["v.blk.0.attn_qkv.weight"] == ("F16" if kind == "Q8_0" else kind), "rows of 72 do not fit Q8_0"
    assert types["mm.0.weight"] == kind and types["v.blk.0.attn_qkv.bias"] == types["v.position_embd.weight"] == "F32"
    assert types["v.patch_embd.weight"] == ("F16" if kind == "F16" else "F32")
    for name, x in tiny_vision.layout(TINY, tiny_vision.weights(TINY, 5)).items():
        assert relative_error(weights[name], x) < 0.01, name


def test_keys(luce_, checkpoint):
    keys = keys_of(converted(luce_, checkpoint()))
    assert (keys["general.architecture"], keys["general.type"]) == ("clip", "mmproj")
    assert keys["clip.projector_type"] == "qwen3vl_merger" and keys["clip.vision.projection_dim"] == 64
    assert keys["clip.vision.image_mean"] == keys["clip.vision.image_std"] == [0.5] * 3
    assert keys["clip.vision.image_size"] == 96


@pytest.mark.parametrize(
    ("config", "drop", "said"),
    [
        ({"model_type": "qwen3_5"}, (), "key vision_config is missing: the checkpoint has no vision tower"),
        (CONFIG, ("merger.norm.bias",), "tensor model.visual.merger.norm.bias is missing"),
        (having(deepstack_visual_indexes=[1]), (), "no deepstack"),
        (having(depth=4), (), "blocks.3.norm1.weight is missing"),
        (having(hidden_size=80), (), "is of shape .* expected"),
        (having(num_position_embeddings=37), (), "expected a square"),
    ],
)
def test_what_is_wrong_is_named(luce_, checkpoint, tmp_path, config, drop, said):
    result = luce_("convert", checkpoint(config, drop=drop), tmp_path / "out.gguf", "--mmproj")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert re.search(said, line), line
    assert not (tmp_path / "out.gguf").exists()
