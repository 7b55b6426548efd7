"""Pixels for Gemma 4's towers: sizes and bytes are those of transformers (tools/make_gemma4_vision_goldens.py)."""

import hashlib
import io

import numpy as np
import pytest
import tiny_vision
from checkout import GOLDENS

from luce.errors import ArgumentError
from luce.images.gemma4 import BudgetProcessor, budget_of
from luce.images.opening import ImageError

Image = pytest.importorskip("PIL.Image")
SIZES = [(100, 40), (333, 517), (64, 64), (900, 30), (31, 640), (480, 336)]


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDENS / "gemma4-vision-pixels.npz") as held:
        return dict(held)


def test_sizes_are_those_of_transformers(golden):
    for budget, w, h, *to in golden["sizes"].tolist():
        processor = BudgetProcessor(budget=budget)
        if to == [0, 0]:
            with pytest.raises(ImageError, match="too thin"):
                processor.size_of(w, h)
        else:
            assert list(processor.size_of(w, h)) == to, (budget, w, h)
            assert processor.rows_of(w, h) == to[0] * to[1] // 48**2 <= budget


@pytest.mark.parametrize("i", range(len(SIZES)))
def test_bytes_are_those_of_transformers(golden, i):
    held = io.BytesIO()
    Image.fromarray(tiny_vision.image(*SIZES[i], i)).save(held, "PNG")
    picture = BudgetProcessor(budget=70).picture(held.getvalue())
    rows, columns = picture.grid
    whole = picture.rgb.reshape(rows, 16, columns, 16, 3).transpose(0, 2, 1, 3, 4).reshape(rows * columns, -1)
    assert np.array_equal(whole[::9], golden[f"patches-{i}"])
    assert hashlib.sha256(whole.tobytes()).digest() == golden[f"hash-{i}"].tobytes()


def test_patches_of_a_row_stand_together_from_minus_1_to_1():
    picture = BudgetProcessor().picture(png(96, 48))
    patches, (_, columns) = picture.patches(), picture.grid
    x = picture.rgb.astype(np.float32) / 255 * 2 - 1  # (height, width, 3)
    for at, (row, column) in enumerate((y, x) for y in range(3) for x in range(3, 6)):  # the prompt's second row
        wanted = x[16 * row : 16 * row + 16, 16 * column : 16 * column + 16].transpose(2, 0, 1).ravel()
        assert np.abs(patches[9 + at] - wanted).max() < 1e-6
    assert len(patches) == 9 * picture.rows and columns % 3 == 0


def png(width, height):
    held = io.BytesIO()
    Image.fromarray(tiny_vision.image(width, height)).save(held, "PNG")
    return held.getvalue()


def test_a_bound_on_tokens_is_the_next_smaller_budget():
    assert [budget_of(n) for n in (None, 70, 139, 280, 16384)] == [280, 70, 70, 280, 1120]
    with pytest.raises(ArgumentError, match="takes budgets of 70, 140, 280, 560, 1120"):
        budget_of(69)
