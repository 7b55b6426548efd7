"""Vision towers of Gemma 4 from safetensors: the file has the checkpoint's numbers, in llama.cpp's names and shapes,
and runs."""

from __future__ import annotations

import re

import gguf
import numpy as np
import pytest
import tiny_gemma4_vision as vision
import tiny_vision
from hf_checkpoint import keys_of, relative_error, save, tensors_of, types_of

from luce.images.gemma4 import BudgetProcessor
from luce.images.pixels import Picture
from luce.native import File, Tower


def config_of(c, **keys):
    told = vision.hf_config(c) | {"model_type": "gemma4_vision", "rope_parameters": {"rope_theta": 100.0}} | keys
    return {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text", "hidden_size": c.n_out},
            "vision_config": told}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path):
    def make(name="small", drop=(), config=None, **keys):
        c, seed = vision.TOWERS[name]
        state = {f"model.{each}": x for each, x in vision.weights(c, seed).items() if each not in drop}
        return save(tmp_path / "tower", config or config_of(c, **keys), state, tokenizer=False)

    return make


def converted(luce_, folder, *words):
    out = folder.parent / "mmproj.gguf"
    result = luce_("convert", folder, out, "--mmproj", *words)
    assert result.exit_code == 0, result.stderr
    return out


@pytest.mark.parametrize("name", vision.TOWERS)
def test_a_tower_is_the_checkpoints(luce_, checkpoint, tmp_path, name):
    c, seed = vision.TOWERS[name]
    out = converted(luce_, checkpoint(name), "--type", "F32", "--name", "tiny")
    wanted = vision.write(tmp_path / "wanted.gguf", c, vision.layout(c, vision.weights(c, seed)))
    found, expected = tensors_of(out), tensors_of(wanted)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[each], x) for each, x in expected.items())
    picture = Picture(tiny_vision.image(96, 48), BudgetProcessor())
    rows = []
    for path in (out, wanted):
        with File(path) as file, Tower(file) as tower:
            rows.append(tower.encode(picture.patches(), picture.grid, 1))
    assert np.array_equal(*rows)


@pytest.mark.parametrize("name", vision.TOWERS)
def test_names_are_those_of_the_gguf_package(name):
    """gguf-py's table, which nobody here wrote, has all of them, and its names of transformers' tensors lead there.
    The bounds of products have the names of these."""
    known = gguf.MODEL_TENSORS[gguf.MODEL_ARCH.MMPROJ]
    patterns = {gguf.TENSOR_NAMES[tensor] for tensor in known}
    c, seed = vision.TOWERS[name]
    for each in vision.layout(c, vision.weights(c, seed)):
        stem = re.sub(r"\.(weight|(in|out)put_(min|max))$", "", each)
        assert re.sub(r"\.\d+\.", ".{bid}.", stem) in patterns, each


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_types(luce_, checkpoint, kind):
    out = converted(luce_, checkpoint(), "--type", kind)
    types, weights = types_of(out), tensors_of(out)
    assert types["v.blk.0.attn_q.weight"] == types["mm.input_projection.weight"] == kind
    assert types["v.blk.0.ln1.weight"] == types["v.position_embd.weight"] == types["v.blk.0.attn_q.input_min"] == "F32"
    assert types["v.patch_embd.weight"] == ("F16" if kind == "F16" else "F32")
    c, seed = vision.TOWERS["small"]
    for name, x in vision.layout(c, vision.weights(c, seed)).items():
        assert relative_error(weights[name], x) < 0.01, name


def test_keys(luce_, checkpoint):
    keys = keys_of(converted(luce_, checkpoint()))
    assert (keys["general.architecture"], keys["general.type"]) == ("clip", "mmproj")
    assert keys["clip.vision.projector_type"] == "gemma4v" and keys["clip.vision.projection_dim"] == 64
    assert keys["clip.vision.image_mean"] == [0.0] * 3 and keys["clip.vision.image_std"] == [1.0] * 3
    assert keys["clip.vision.image_size"] == 224 and "clip.vision.projector.scale_factor" not in keys


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"config": {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text"}}}, "key vision_config is"),
        ({"drop": ("embed_vision.embedding_projection.weight",)}, "embed_vision.embedding_projection.* is missing"),
        ({"num_hidden_layers": 4}, "layers.2.input_layernorm.weight is missing"),
        ({"hidden_size": 80, "head_dim": 40}, "is of shape .* expected"),
        ({"num_key_value_heads": 1}, "num_key_value_heads"),
        ({"hidden_activation": "gelu"}, "hidden_activation"),
        ({"model_type": "gemma4_other_vision"}, "model_type"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_theta"),
    ],
)
def test_what_is_wrong_is_named(luce_, checkpoint, tmp_path, given, said):
    result = luce_("convert", checkpoint(**given), tmp_path / "out.gguf", "--mmproj")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert re.search(said, line), line
    assert not (tmp_path / "out.gguf").exists()
