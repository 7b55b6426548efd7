"""Vision towers: rows against transformers' (tests/goldens/vision-tower.npz, tools/make_vision_goldens.py), in every
type; and files that are refused by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import op_run
import pytest
import tiny
import tiny_vision
from checkout import GOLDENS
from depth import deeper, deeper_but
from tiny_vision import TINY

from luce.errors import ArgumentError, Cancelled, Error, FileError, UnsupportedError
from luce.images.pixels import Picture, Processor
from luce.native import File, Model, Tower

GRIDS = [(64, 64), (96, 64), (32, 288)]
SEED = 5
WEIGHTS = tiny_vision.layout(TINY, tiny_vision.weights(TINY, SEED))


# A GPU multiplies F32 as TF32, which has the bits of F16; so rows of a file in F32 are off by what those of a file in
# F16 are on a CPU: 0.0012 of their norm over these grids. On an H200 (2026-11-30) they were within this.
CUDA_ROWS = 0.004


@pytest.fixture
def tower_of(tmp_path, device):
    """Opens towers, and closes them at the end."""
    opened = []

    def make(kind="F32", tensors=WEIGHTS, config=TINY, where=device, max_rows=0, **keys):
        file = File(tiny_vision.write(tmp_path / "mmproj.gguf", config, tensors, kind, **keys))
        opened.append(file)
        opened.append(Tower(file, where, max_rows))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def picture(index):
    return Picture(tiny_vision.image(*GRIDS[index], index), Processor())


def rows_of(tower, index, threads=2):
    p = picture(index)
    return tower.encode(p.patches(), p.grid, threads)


def off(found, wanted):
    """Returns by what part of their norm rows are off."""
    assert found.shape == wanted.shape
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def wanted_rows(index):
    with np.load(GOLDENS / "vision-tower.npz") as golden:
        return golden[f"rows-{index}"]


@pytest.mark.parametrize("index", deeper_but(range(len(GRIDS)), 1))
def test_rows_are_those_of_transformers(tower_of, device, index):
    found, wanted = rows_of(tower_of(), index), wanted_rows(index)
    if device == "cpu":
        assert np.abs(found - wanted).max() < 1e-4
    assert off(found, wanted) < CUDA_ROWS


@pytest.mark.parametrize("index", deeper_but(range(4), 3))
def test_rows_are_those_of_llama_cpp(tower_of, device, index):
    """tools/make_llamacpp_reference.py gave it the same pixels. It has GELU by the tanh in the merger too, and
    from a table in F16: rows are off by so much, and no more."""
    size = (*GRIDS, (160, 128))[index]
    p = Picture(tiny_vision.image(*size, index), Processor())
    with np.load(GOLDENS / "llamacpp-reference.npz") as golden:
        wanted = golden[f"rows-{index}"]
    assert off(tower_of().encode(p.patches(), p.grid, 2), wanted) < (0.001 if device == "cpu" else CUDA_ROWS)


# ggml's GELU goes by a table in F16 on a CPU, where all else of a GPU's graph is F32.
@pytest.mark.parametrize("index", range(len(GRIDS)))
def test_the_graph_of_a_gpu_gives_rows_of_transformers(native, tower_of, index):
    with op_run.blocked_towers(native, 1 << 30):
        tower = tower_of(where="cpu")
    assert off(rows_of(tower, index), wanted_rows(index)) < 0.0005


@pytest.mark.parametrize("n_bytes", [1, 160 * 330 * 2 * 4])  # blocks of 64 queries; of 128, and a last one of 32
def test_blocks_of_queries_leave_what_all_at_once_leave(native, tower_of, n_bytes):
    wide = Picture(tiny_vision.image(320, 256, 4), Processor())  # 320 patches
    with op_run.blocked_towers(native, 1 << 30):
        whole = tower_of(where="cpu").encode(wide.patches(), wide.grid, 1)
    with op_run.blocked_towers(native, n_bytes):
        blocks = tower_of(where="cpu").encode(wide.patches(), wide.grid, 1)
    assert off(blocks, whole) < 1e-6
    assert off(blocks, tower_of(where="cpu").encode(wide.patches(), wide.grid, 1)) < 0.0005


def test_an_image_has_as_many_rows_as_the_tower_has_room_for(tower_of):
    tower, big = tower_of(max_rows=64), Picture(tiny_vision.image(320, 256, 4), Processor())
    assert tower.info.max_rows == 64 and 0 < tower.info.scratch_bytes < tower_of().info.scratch_bytes
    with pytest.raises(ArgumentError, match="an image of 80 tokens: .* has room for images of up to 64"):
        tower.encode(big.patches(), big.grid, 1)
    assert len(rows_of(tower, 0)) == 4
    for n in (1, 63, 16385):
        with pytest.raises(ArgumentError, match=f"max_rows is {n}, expected 0 or 64 to 16384"):
            tower_of(max_rows=n)


# The tolerance is what rounding of weights and activations does over three blocks; ffn_down is F16 in the Q8_0 file.
@pytest.mark.parametrize(("kind", "bound"), [("BF16", 0.03), ("Q8_0", 0.03), *deeper(("F16", 0.004))])
def test_rows_of_other_types(tower_of, device, kind, bound):
    config = replace(TINY, n_embd=64)
    tensors = tiny_vision.layout(config, tiny_vision.weights(config, SEED))
    with_f32 = rows_of(tower_of("F32", tensors, config), 1)
    found = rows_of(tower_of(kind, tensors, config), 1)
    assert 0 < off(found, with_f32) < (bound if device == "cpu" else bound + 2 * CUDA_ROWS)


def test_rows_depend_on_their_image_alone(tower_of):
    tower = tower_of()
    first = rows_of(tower, 2, 1)
    rows_of(tower, 0)
    assert np.array_equal(rows_of(tower, 2, 1), first)


def test_encoding_can_be_cancelled(tower_of):
    tower, p = tower_of(), picture(0)
    parts = []
    with pytest.raises(Cancelled):
        tower.encode(p.patches(), p.grid, 1, lambda part: parts.append(part) or len(parts) > 5)
    assert len(parts) == 6 and parts == sorted(parts)
    assert np.array_equal(rows_of(tower, 0), rows_of(tower_of(), 0)), "another encode goes on as if none had been"

    def fails(part):
        raise KeyError(part)

    with pytest.raises(KeyError):
        tower.encode(p.patches(), p.grid, 1, fails)


def test_info(tower_of):
    info = tower_of().info
    assert (info.n_out, info.n_embd, info.n_layer, info.patch, info.merge) == (64, 72, 3, 16, 2)
    other = dict(WEIGHTS) | {"mm.2.bias": WEIGHTS["mm.2.bias"] + 1}
    assert tower_of(tensors=other).info.identity != info.identity


def test_a_tower_of_another_width_does_not_fit_a_model(tmp_path, tower_of):
    c = tiny.Config(n_embd=96)
    with File(tiny.write(tmp_path / "m.gguf", c, tiny.layout(c, 1))) as file, Model(file, "cpu") as model:
        with File(tower_of().path) as mmproj, pytest.raises(FileError, match="width 64, and .* has width 96"):
            Tower(mmproj).require_fit(model)


def test_wrong_arguments_are_refused(tower_of):
    tower = tower_of()
    with pytest.raises(ArgumentError, match="3 x 4 patches, expected multiples of 2"):
        tower.encode(np.zeros((12, 768)), (3, 4))
    with pytest.raises(ValueError, match="the grid is 4 x 4"):
        tower.encode(np.zeros((12, 768)), (4, 4))


@pytest.mark.parametrize(
    ("keys", "error", "said"),
    [
        ({"projector_type": "gemma3"}, UnsupportedError, "is 'gemma3': luce runs 'qwen3vl_merger', 'gemma4v' and"),
        ({"is_deepstack_layers": [False, True, False]}, UnsupportedError, "is_deepstack_layers names a layer"),
        ({"block_count": None}, FileError, "clip.vision.block_count is missing"),
        ({"block_count": 4}, FileError, "v.blk.3.ln1.weight is missing"),
        ({"block_count": 2}, UnsupportedError, "tensor v.blk.2.* is not part of the vision tower"),
        ({"head_count": 5}, UnsupportedError, "5 heads of width 72"),
        ({"feed_forward_length": 101}, FileError, "v.blk.0.ffn_up.weight is of shape"),
        ({"projection_dim": 65}, FileError, "mm.2.weight is of shape {288, 64, 1, 1}, expected {288, 65, 1, 1}"),
        ({"image_size": 100}, FileError, "image_size is 100, expected a multiple of the patch size, 16"),
        ({"spatial_merge_size": 0}, FileError, "spatial_merge_size is 0, expected 1 to 8"),
    ],
)
def test_files_are_refused_by_name(tower_of, keys, error, said):
    with pytest.raises(error, match=said):
        tower_of(**keys)


def test_a_model_is_no_tower(tmp_path):
    c = tiny.Config()
    path = tiny.write(tmp_path / "m.gguf", c, tiny.layout(c, 1))
    with File(path) as file, pytest.raises(FileError, match="no vision tower"):
        Tower(file)


def test_types_that_towers_do_not_have_are_refused(tower_of, monkeypatch):
    monkeypatch.setattr(tiny_vision, "type_of", lambda name, shape, kind: "Q4_0" if name == "mm.2.weight" else "F32")
    with pytest.raises(UnsupportedError, match="mm.2.weight is Q4_0: luce takes F32, F16, BF16 or Q8_0 there"):
        tower_of()


def test_any_damage_is_a_tower_or_an_error(native, tmp_path):
    whole = tiny_vision.write(tmp_path / "whole.gguf", TINY, WEIGHTS).read_bytes()
    head, rng, opened = whole.index(b"v.blk.0.ln1.weight"), np.random.default_rng(9), 0
    for n in range(300):
        bad = bytearray(whole)
        for at in rng.integers(0, 2 * head, rng.integers(1, 4)):
            bad[at] = rng.integers(0, 256) if n % 2 else bad[at] ^ (1 << int(rng.integers(0, 8)))
        path = tmp_path / "bad.gguf"
        path.write_bytes(bad if n % 5 else bad[: rng.integers(0, len(bad))])
        try:
            with File(path, native) as file, Tower(file) as tower:
                side = tower.info.patch * tower.info.merge
                p = Picture(tiny_vision.image(2 * side, side), Processor(tower.info.patch, tower.info.merge))
                tower.encode(p.patches(), p.grid, 1)
                opened += 1
        except Error:
            pass
    assert 0 < opened < 300
