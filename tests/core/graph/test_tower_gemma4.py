"""Vision towers of Gemma 4: rows against transformers' (tests/goldens/gemma4-vision-tower.npz,
tools/make_gemma4_vision_goldens.py), in every type; and files that are refused by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import op_run
import pytest
import tiny_gemma4_vision as vision
import tiny_vision
from checkout import GOLDENS
from tiny_gemma4_vision import TOWERS

from luce.errors import ArgumentError, Error, FileError, UnsupportedError
from luce.images.gemma4 import BudgetProcessor
from luce.images.pixels import Picture
from luce.native import File, Tower

GRIDS = [(96, 48), (48, 144), (144, 144)]
PROCESSOR = BudgetProcessor(mean=(0.5,) * 3, std=(0.5,) * 3)
CUDA_ROWS = 0.004  # As of Qwen's towers (test_tower.py).


@pytest.fixture
def tower_of(tmp_path, device):
    """Opens towers, and closes them at the end."""
    opened = []

    def make(name="large", kind="F32", config=None, tensors=None, where=device, max_rows=0, **keys):
        c, seed = TOWERS[name]
        c = config or c
        tensors = tensors or vision.layout(c, vision.weights(c, seed))
        opened.append(File(vision.write(tmp_path / "mmproj.gguf", c, tensors, kind, **keys)))
        opened.append(Tower(opened[-1], where, max_rows))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def rows_of(tower, index, threads=2):
    p = Picture(tiny_vision.image(*GRIDS[index], index), PROCESSOR)
    return tower.encode(p.patches(), p.grid, threads)


def wanted_rows(name, index):
    with np.load(GOLDENS / "gemma4-vision-tower.npz") as golden:
        return golden[f"{name}-{index}"]


def off(found, wanted):
    """Returns by what part of their norm rows are off."""
    assert found.shape == wanted.shape
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("index", range(len(GRIDS)))
def test_rows_are_those_of_transformers(tower_of, device, name, index):
    found, wanted = rows_of(tower_of(name), index), wanted_rows(name, index)
    if device == "cpu":
        assert np.abs(found - wanted).max() < 1e-4
    assert off(found, wanted) < CUDA_ROWS


# ggml's GELU goes by a table in F16 on a CPU, where all else of a GPU's graph is F32.
@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("n_bytes", [1 << 30, 1])  # one block; blocks of 64 queries
def test_the_graph_of_a_gpu_gives_rows_of_transformers(native, tower_of, name, n_bytes):
    with op_run.blocked_towers(native, n_bytes):
        tower = tower_of(name, where="cpu")
    for index in range(len(GRIDS)):
        assert off(rows_of(tower, index), wanted_rows(name, index)) < 0.001


@pytest.mark.parametrize(("kind", "bound"), [("F16", 0.004), ("BF16", 0.03), ("Q8_0", 0.03)])
def test_rows_of_other_types(tower_of, device, kind, bound):
    config = replace(TOWERS["large"][0], n_embd=64, n_ff=96)
    with_f32 = rows_of(tower_of(config=config), 1)
    found = rows_of(tower_of(config=config, kind=kind), 1)
    assert 0 < off(found, with_f32) < (bound if device == "cpu" else bound + 2 * CUDA_ROWS)


def test_info_and_its_largest_image(tower_of):
    info = tower_of().info
    assert (info.n_out, info.n_embd, info.n_layer, info.patch, info.merge, info.max_rows) == (64, 72, 3, 16, 3, 280)
    assert tower_of(max_rows=1120).info.max_rows == 1120
    assert tower_of(max_rows=16384).info.max_rows == 1120


def test_the_part_that_hears_is_left(tower_of):
    c, seed = TOWERS["small"]
    plain = vision.layout(c, vision.weights(c, seed))
    ones = np.ones((4, 4), np.float32)
    heard = {"a.conv1d.0.weight": ones, "mm.a.input_projection.weight": ones}
    assert np.array_equal(rows_of(tower_of("small", tensors=plain | heard), 0), rows_of(tower_of("small"), 0))


def test_bounds_of_products_matter(tower_of):
    c, seed = TOWERS["small"]
    hf = vision.weights(c, seed)
    wide = {name: np.float32(1e6) * np.sign(x) if name.endswith(vision.BOUNDS) else x for name, x in hf.items()}
    assert off(rows_of(tower_of("small", tensors=vision.layout(c, wide)), 1), wanted_rows("small", 1)) > 0.01


def test_an_image_beyond_the_table_is_refused(tower_of):
    wide = Picture(tiny_vision.image(48 * 30, 48), PROCESSOR)
    with pytest.raises(ArgumentError, match="3 x 90 patches: the tower has positions for 80 a side"):
        tower_of(max_rows=70).encode(wide.patches(), wide.grid, 1)


@pytest.mark.parametrize(
    ("keys", "error", "said"),
    [
        ({"projector_type": "gemma4xv"}, UnsupportedError, "luce runs 'qwen3vl_merger', 'gemma4v' and 'gemma4uv'"),
        ({"block_count": None}, FileError, "clip.vision.block_count is missing"),
        ({"block_count": 4}, FileError, "v.blk.3.ln1.weight is missing"),
        ({"block_count": 2}, UnsupportedError, "tensor v.blk.2.* is not part of the vision tower"),
        ({"head_count": 5}, UnsupportedError, "5 heads of width 72"),
        ({"feed_forward_length": 101}, FileError, "v.blk.0.ffn_gate.weight is of shape"),
        ({"projection_dim": 65}, FileError, "mm.input_projection.weight is of shape {72, 64, 1, 1}"),
    ],
)
def test_files_are_refused_by_name(tower_of, keys, error, said):
    with pytest.raises(error, match=said):
        tower_of(**keys)


def test_any_damage_is_a_tower_or_an_error(native, tmp_path):
    c, seed = TOWERS["small"]
    path = vision.write(tmp_path / "whole.gguf", c, vision.layout(c, vision.weights(c, seed)))
    whole = path.read_bytes()
    head, rng, opened = whole.index(b"v.blk.0.ln1.weight"), np.random.default_rng(9), 0
    for n in range(120):
        bad = bytearray(whole)
        for at in rng.integers(0, 2 * head, rng.integers(1, 4)):
            bad[at] = rng.integers(0, 256) if n % 2 else bad[at] ^ (1 << int(rng.integers(0, 8)))
        (tmp_path / "bad.gguf").write_bytes(bad if n % 5 else bad[: rng.integers(0, len(bad))])
        try:
            with File(tmp_path / "bad.gguf", native) as file, Tower(file) as tower:
                side = tower.info.patch * tower.info.merge
                processor = BudgetProcessor(tower.info.patch, tower.info.merge)
                p = Picture(tiny_vision.image(2 * side, side), processor)
                tower.encode(p.patches(), p.grid, 1)
                opened += 1
        except Error:
            pass
    assert 0 < opened < 120
