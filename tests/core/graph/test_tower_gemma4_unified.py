"""The vision tower of Gemma 4's 12B: rows against transformers' (tests/goldens/gemma4-vision-unified.npz,
tools/make_gemma4_vision_goldens.py), in every type; files that are refused by name, and pixels as it takes them."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_gemma4_unified as unified
import tiny_vision
from checkout import GOLDENS

from luce.errors import ArgumentError, FileError, UnsupportedError
from luce.images.gemma4 import BudgetProcessor
from luce.images.pixels import Picture
from luce.images.sight import Sight
from luce.native import File, Tower

GRIDS = [(96, 48), (48, 144), (144, 144)]
PROCESSOR = BudgetProcessor(patch=48, merge=1, mean=(0.0,) * 3, std=(1.0,) * 3)
CUDA_ROWS = 0.004  # As of Qwen's towers (test_tower.py).


@pytest.fixture
def tower_of(tmp_path, device):
    """Opens towers, and closes them at the end."""
    opened = []

    def make(kind="F32", max_rows=0, **keys):
        opened.append(File(unified.write(tmp_path / "mmproj.gguf", kind, **keys)))
        opened.append(Tower(opened[-1], device, max_rows))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def rows_of(tower, index):
    p = Picture(tiny_vision.image(*GRIDS[index], index), PROCESSOR)
    return tower.encode(p.patches(), p.grid, 2)


def off(found, wanted):
    """Returns by what part of their norm rows are off."""
    assert found.shape == wanted.shape
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("index", range(len(GRIDS)))
def test_rows_are_those_of_transformers(tower_of, device, index):
    with np.load(GOLDENS / "gemma4-vision-unified.npz") as golden:
        wanted = golden[str(index)]
    found = rows_of(tower_of(), index)
    if device == "cpu":
        assert np.abs(found - wanted).max() < 1e-4
    assert off(found, wanted) < CUDA_ROWS


@pytest.mark.parametrize(("kind", "bound"), [("F16", 0.004), ("BF16", 0.03), ("Q8_0", 0.03)])
def test_rows_of_other_types(tower_of, device, kind, bound):
    with_f32 = rows_of(tower_of(), 1)
    found = rows_of(tower_of(kind), 1)
    assert 0 < off(found, with_f32) < (bound if device == "cpu" else bound + 2 * CUDA_ROWS)


def test_info_and_its_largest_image(tower_of):
    info = tower_of().info
    assert (info.n_out, info.n_embd, info.n_layer, info.patch, info.merge, info.max_rows) == (64, 64, 0, 48, 1, 280)
    assert tower_of(max_rows=16384).info.max_rows == 1120


def test_an_image_beyond_the_table_is_refused(tower_of):
    wide = Picture(tiny_vision.image(48 * 31, 48), PROCESSOR)
    with pytest.raises(ArgumentError, match="1 x 31 patches: the tower has positions for 30 a side"):
        tower_of().encode(wide.patches(), wide.grid, 1)


@pytest.mark.parametrize(
    ("keys", "error", "said"),
    [
        ({"projector_type": "gemma4v"}, FileError, "clip.vision.attention.head_count is 0"),
        ({"projector_type": "gemma4xv"}, UnsupportedError, "luce runs 'qwen3vl_merger', 'gemma4v' and 'gemma4uv'"),
        ({"patch_size": 8}, FileError, "v.patch_norm.1.weight is of shape"),
        ({"projection_dim": 65}, FileError, "mm.input_projection.weight is of shape"),
        ({"embedding_length": None}, FileError, "clip.vision.embedding_length is missing"),
    ],
)
def test_files_are_refused_by_name(tower_of, keys, error, said):
    with pytest.raises(error, match=said):
        tower_of(**keys)


def test_pixels_are_of_0_to_1_and_a_patch_of_48_a_side_is_a_row(tmp_path):
    """transformers' own patches, merged 3 x 3, have the same pixels in the order y, x, channel."""
    pytest.importorskip("PIL")
    with Sight(unified.write(tmp_path / "mmproj.gguf"), 1, "cpu", 70) as sight:
        rgb = tiny_vision.image(96, 48, 3)
        patches = Picture(rgb, sight.processor).patches()
        assert sight.processor.side == 48 and sight.processor.size_of(100, 40) == (624, 240) and sight.at_once == 70
    wanted = (rgb[:, 48:].astype(np.float32) / np.float32(255)).transpose(2, 0, 1).reshape(-1)
    assert patches.shape == (2, 3 * 48 * 48) and np.array_equal(patches[1], wanted)
