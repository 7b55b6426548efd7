"""Pixels as a tower of Gemma 4 takes them: an image has a budget of rows, and is stretched to about as many."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, sqrt

from luce.errors import ArgumentError
from luce.files.gemma4 import BUDGETS, MERGE, USUAL
from luce.images.opening import ImageError
from luce.images.pixels import Processor


def budget_of(tokens: int | None) -> int:
    """Returns the budget of images of at most so many tokens. Raises ArgumentError where none is so small."""
    if tokens is None:
        return USUAL
    if tokens < BUDGETS[0]:
        raise ArgumentError(f"images of {tokens} tokens: this model takes budgets of {', '.join(map(str, BUDGETS))}")
    return max(budget for budget in BUDGETS if budget <= tokens)


@dataclass(frozen=True)
class BudgetProcessor(Processor):
    """What a tower says of its pixels, and a budget of rows, which all images are stretched for."""

    merge: int = MERGE
    budget: int = USUAL

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Returns the width and height that an image is stretched to: transformers' get_aspect_ratio_preserving_size,
        in the same doubles. Raises ImageError where the image is too thin for any."""
        side, pixels = self.side, self.budget * self.side**2
        factor = sqrt(pixels / (height * width))
        w, h = (floor(factor * length / side) * side for length in (width, height))
        if h == 0:
            w, h = min(floor(width / height), self.budget) * side, side
        elif w == 0:
            w, h = side, min(floor(height / width), self.budget) * side
        if w == 0 or h == 0 or w * h > pixels:
            raise ImageError(f"the image has {width} x {height} pixels: it is too thin for {self.budget} tokens")
        return w, h
