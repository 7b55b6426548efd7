"""Pixels as a Qwen tower takes them: an image is stretched to whole merged patches, and cut into patches."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from math import ceil, floor, sqrt
from typing import TYPE_CHECKING

from luce.images.opening import ImageError, open_image

if TYPE_CHECKING:
    import numpy as np

VERSION = 1  # of what this file makes of an image: it changes whenever a pixel may
MAX_RATIO = 200  # of the longer side to the shorter


@dataclass(frozen=True)
class Processor:
    """What a tower says of its pixels: `patch` pixels a side of a patch, `merge` patches a side of a row, and the mean
    and deviation of each channel. Images are stretched into min_pixels..max_pixels, by default transformers', of which
    a thin or a small image may miss max_pixels; it does not miss reduced_to rows. Those of more than most_rows are
    refused."""

    patch: int = 16
    merge: int = 2
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    min_pixels: int = 65536
    max_pixels: int = 16777216
    reduced_to: int | None = None
    most_rows: int | None = None

    @property
    def side(self) -> int:
        """Returns the pixels of a row's side."""
        return self.patch * self.merge

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Returns the width and height that an image is stretched to: transformers' smart_resize, in the same doubles,
        which rounds halves to even. Raises ImageError where one side is more than 200 times the other, and where the
        image has too many rows."""
        side = self.side
        if max(width, height) > MAX_RATIO * min(width, height):
            raise ImageError(f"the image has {width} x {height} pixels: a side may be {MAX_RATIO} times the other")
        w, h = round(width / side) * side, round(height / side) * side
        if w * h > self.max_pixels:
            shrink = sqrt(height * width / self.max_pixels)
            w, h = (max(side, floor(length / shrink / side) * side) for length in (width, height))
        elif w * h < self.min_pixels:
            grow = sqrt(self.min_pixels / (height * width))
            w, h = (ceil(length * grow / side) * side for length in (width, height))
        if self.reduced_to is not None and w * h > self.reduced_to * side**2:  # Neither formula is within it.
            shrink = sqrt(w * h / (self.reduced_to * side**2))
            w, h = (max(1, floor(length / shrink / side)) for length in (w, h))
            longer = self.reduced_to // min(w, h)
            w, h = min(w, longer) * side, min(h, longer) * side
        if self.most_rows is not None and w * h // side**2 > self.most_rows:
            what = f"the image takes {w * h // side**2} tokens, as {w} x {h} pixels"
            raise ImageError(f"{what}: there is memory for {self.most_rows} at once, so reduce it", "image_tokens")
        return w, h

    def rows_of(self, width: int, height: int) -> int:
        """Returns how many rows of a prompt an image of this size takes. Only its header is needed for that."""
        w, h = self.size_of(width, height)
        return w * h // self.side**2

    def picture(self, data: bytes) -> Picture:
        """Opens an image and stretches it, with Pillow's bicubic filter. Raises what open_image and size_of raise."""
        import numpy as np

        image = open_image(data)  # It says what to install where Pillow is missing.
        from PIL import Image

        size = self.size_of(*image.size)
        stretched = image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)
        return Picture(np.asarray(stretched), self)


@dataclass(frozen=True, eq=False)
class Picture:
    """A stretched image: `rgb` uint8 (height, width, 3)."""

    rgb: np.ndarray
    processor: Processor

    @property
    def grid(self) -> tuple[int, int]:
        """Returns the rows and columns of patches."""
        height, width, _ = self.rgb.shape
        return height // self.processor.patch, width // self.processor.patch

    @property
    def rows(self) -> int:
        """Returns how many rows of a prompt the image takes."""
        return self.grid[0] * self.grid[1] // self.processor.merge**2

    @property
    def said(self) -> str:
        """Says what the image takes: "it takes 2040 tokens, as 1920 x 1088 pixels"."""
        height, width, _ = self.rgb.shape
        return f"it takes {self.rows} tokens, as {width} x {height} pixels"

    def key(self, tower: bytes) -> bytes:
        """Returns what the rows that `tower` makes of the image are known by, 32 bytes: a hash of the pixels with their
        size, of this file's version, and of the tower."""
        return hashlib.sha256(self._hash + tower).digest()

    @cached_property
    def _hash(self) -> bytes:
        height, width, _ = self.rgb.shape
        return hashlib.sha256(f"{VERSION} {width}x{height} ".encode() + self.rgb.tobytes()).digest()

    def patches(self) -> np.ndarray:
        """Returns the patches F32 (n, 3 * patch * patch), with values by channel, y and x. Patches of one row stand
        together: 2x2 blocks in raster order, within a block y before x."""
        import numpy as np

        p, m = self.processor.patch, self.processor.merge
        rows, columns = self.grid
        x: np.ndarray = self.rgb.astype(np.float32) / np.float32(255)
        x = (x - np.array(self.processor.mean, np.float32)) / np.array(self.processor.std, np.float32)
        x = x.reshape(rows // m, m, p, columns // m, m, p, 3)  # block y, y, pixel y, block x, x, pixel x, channel
        return np.ascontiguousarray(x.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(rows * columns, 3 * p * p)
