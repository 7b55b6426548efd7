"""Pixels as transformers has them (tests/goldens/vision-pixels.npz, tools/make_vision_goldens.py), and sizes."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
import tiny_vision
from checkout import GOLDENS

from luce.images.opening import ImageError
from luce.images.pixels import Processor

Image = pytest.importorskip("PIL.Image")
SMALL = Processor(min_pixels=4096, max_pixels=9216)
PIXELS = [(64, 64), (33, 47), (300, 200), (80, 80), (112, 48), (10, 90), (150, 31), (97, 101), (64, 96), (5, 5),
          (1000, 20), (77, 130)]  # fmt: skip


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDENS / "vision-pixels.npz") as held:
        return dict(held)


def png(rgb):
    out = BytesIO()
    Image.fromarray(rgb).save(out, "PNG")
    return out.getvalue()


def test_sizes_are_those_of_transformers(golden):
    for width, height, *after in golden["sizes"].tolist():
        assert list(Processor().size_of(width, height)) == after, (width, height)


@pytest.mark.parametrize("index", range(len(PIXELS)))
def test_patches_are_those_of_transformers_byte_for_byte(golden, index):
    picture = SMALL.picture(png(tiny_vision.image(*PIXELS[index], index)))
    found, wanted = picture.patches(), golden[f"patches-{index}"]
    assert found.shape == wanted.shape == (4 * picture.rows, 768)
    assert np.array_equal(np.rint((found * 0.5 + 0.5) * 255).astype(np.uint8), wanted)
    assert np.abs(found[0] - golden[f"first-{index}"]).max() < 1e-6
    assert picture.rows == SMALL.rows_of(*PIXELS[index])


def test_rows_of_known_sizes():
    known = {(100, 100): 64, (1280, 720): 880, (1920, 1080): 2040, (3840, 2160): 8160}
    assert {size: Processor().rows_of(*size) for size in known} == known


def test_images_are_reduced_to_a_number_of_rows():
    sides = np.random.default_rng(6).integers(1, 9000, (3000, 2)).tolist()
    for n in (64, 80, 1000):
        reduced = Processor(max_pixels=n * 1024, reduced_to=n)
        for width, height in [(100, 40), (1000, 5), (20, 4000), *sides]:
            if max(width, height) > 200 * min(width, height):
                continue
            w, h = reduced.size_of(width, height)
            assert w > 0 and h > 0 and w % 32 == 0 and h % 32 == 0 and reduced.rows_of(width, height) <= n
            whole = Processor().rows_of(width, height)
            assert whole > n or (w, h) == Processor().size_of(width, height), "it has few enough"


def test_a_thin_image_is_refused_with_its_size():
    with pytest.raises(ImageError, match="1 x 65535 pixels: a side may be 200 times"):
        Processor().rows_of(1, 65535)


def test_keys_tell_pixels_sizes_and_towers_apart():
    rgb = tiny_vision.image(64, 128)
    turned = rgb.reshape(64, 128, 3)  # the same bytes in another shape
    keys = {SMALL.picture(png(x)).key(tower) for x in (rgb, turned, rgb ^ 1) for tower in (b"a", b"b")}
    assert len(keys) == 6
    assert SMALL.picture(png(rgb)).key(b"a") in keys
