"""The vision tower of Gemma 4's 12B from safetensors: the file has the checkpoint's numbers, in llama.cpp's names and
shapes, and runs."""

from __future__ import annotations

import re

import gguf
import numpy as np
import pytest
import tiny_gemma4_unified as unified
import tiny_vision
from hf_checkpoint import keys_of, relative_error, save, tensors_of, types_of

from luce.convert.gemma4_unified_tower import laid_out, shapes
from luce.images.gemma4 import BudgetProcessor
from luce.images.pixels import Picture
from luce.native import File, Tower


def config_of(**keys):
    told = unified.hf_config() | {"model_type": "gemma4_unified_vision"} | keys
    return {"model_type": "gemma4_unified", "text_config": {"hidden_size": unified.CONFIG.n_out},
            "vision_config": told}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path):
    def make(drop=(), **keys):
        state = {f"model.{each}": x for each, x in unified.weights().items() if each not in drop}
        return save(tmp_path / "tower", config_of(**keys), state, tokenizer=False)

    return make


def converted(luce_, folder, *words):
    out = folder.parent / "mmproj.gguf"
    result = luce_("convert", folder, out, "--mmproj", *words)
    assert result.exit_code == 0, result.stderr
    return out


def test_a_tower_is_the_checkpoints(luce_, checkpoint, tmp_path):
    out = converted(luce_, checkpoint(), "--type", "F32", "--name", "tiny")
    wanted = unified.write(tmp_path / "wanted.gguf")
    found, expected = tensors_of(out), tensors_of(wanted)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[each], x) for each, x in expected.items())
    picture = Picture(tiny_vision.image(96, 48), BudgetProcessor(patch=48, merge=1))
    rows = []
    for path in (out, wanted):
        with File(path) as file, Tower(file) as tower:
            rows.append(tower.encode(picture.patches(), picture.grid, 1))
    assert np.array_equal(*rows)


def test_names_are_those_of_the_gguf_package():
    """gguf-py's table, which nobody here wrote, has them."""
    patterns = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.MMPROJ]}
    stems = {re.sub(r"\.(weight|bias)$", "", name) for name in shapes(unified.CONFIG)}
    known = {re.sub(r"\.\d+$", ".{bid}", stem) for stem in stems} & patterns
    assert {"v.patch_embd", "v.position_embd", "mm.input_projection"} <= known


def test_pixels_are_laid_out_as_llamacpps_converter_does():
    """Its permutation: value i of a patch, by channel, row and column, is value `perm[i]` by row, column, channel."""
    c = unified.CONFIG
    p, hf = c.patch * c.merge, unified.weights()
    i = np.arange(p * p * 3)
    perm = i % (p * p) // p * p * 3 + i % p * 3 + i // (p * p)
    for name in ("v.patch_embd.weight", "v.patch_norm.1.weight", "v.patch_norm.1.bias"):
        stored = hf["vision_embedder." + ("patch_dense.weight" if "embd" in name else "patch_ln1." + name[15:])]
        assert np.array_equal(laid_out(name, shapes(c)[name], stored), stored[..., perm])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_types(luce_, checkpoint, kind):
    out = converted(luce_, checkpoint(), "--type", kind)
    types, weights, hf = types_of(out), tensors_of(out), tensors_of(unified.write(out.parent / "wanted.gguf"))
    assert types["v.patch_embd.weight"] == types["mm.input_projection.weight"] == kind
    assert types["v.patch_norm.1.weight"] == types["v.position_embd.weight"] == types["v.patch_embd.bias"] == "F32"
    assert all(relative_error(weights[name], x) < 0.01 for name, x in hf.items())


def test_keys(luce_, checkpoint):
    keys = keys_of(converted(luce_, checkpoint()))
    assert keys["clip.vision.projector_type"] == "gemma4uv" and keys["clip.vision.projection_dim"] == 64
    assert (keys["clip.vision.patch_size"], keys["clip.vision.block_count"]) == (16, 0)
    assert keys["clip.vision.image_mean"] == [0.0] * 3 and keys["clip.vision.image_std"] == [1.0] * 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"drop": ("embed_vision.embedding_projection.weight",)}, "embed_vision.embedding_projection.* is missing"),
        ({"drop": ("vision_embedder.pos_norm.bias",)}, "vision_embedder.pos_norm.bias is missing"),
        ({"mm_posemb_size": 31}, "pos_embedding is of shape .* expected"),
        ({"output_proj_dims": 32}, "output_proj_dims"),
        ({"patch_size": 8}, "is of shape .* expected"),
    ],
)
def test_what_is_wrong_is_named(luce_, checkpoint, tmp_path, given, said):
    result = luce_("convert", checkpoint(**given), tmp_path / "out.gguf", "--mmproj")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert re.search(said, line), line
    assert not (tmp_path / "out.gguf").exists()
