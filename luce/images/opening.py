"""Opening of images: PNG, JPEG, WebP and GIF by their bytes, as RGB. Sizes are bounded before anything is decoded."""

from __future__ import annotations

import struct
import warnings
import zlib
from io import BytesIO
from typing import TYPE_CHECKING, Any

from luce.errors import ArgumentError, Error

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # Pillow has more, some of which decode without bounds (CVE-2026-40192).
MAX_BYTES = 32 << 20
MAX_PIXELS = 64 << 20  # 192 MB of RGB


class ImageError(ArgumentError):
    """An image that cannot be read, or is larger than luce takes."""


def open_image(data: bytes) -> Image:
    """Returns the first frame as RGB, turned as its EXIF says. Transparency is dropped and not laid over a colour, as
    transformers does. Raises ImageError where the bytes are no image, are damaged, or have too many pixels, and Error
    where Pillow is missing."""
    if len(data) > MAX_BYTES:
        raise ImageError(f"the image has {len(data)} bytes: luce takes up to {MAX_BYTES}")
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        _bound(_webp_size(data))  # Pillow takes memory for all of its pixels as soon as it opens one.
    image, ImageOps = _pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # _bound is stricter.
            opened = image.open(BytesIO(data), formats=FORMATS)
            _bound(opened.size)
            opened.load()
            if opened.mode.startswith("I"):  # Gray of 16 bits: convert() would make all above 255 white.
                opened = opened.convert("I").point(lambda value: value * (1 / 256)).convert("L")
            turned: Image = ImageOps.exif_transpose(opened).convert("RGB")
            return turned
    except image.UnidentifiedImageError:
        raise ImageError("the bytes are no PNG, JPEG, WebP or GIF image") from None
    except image.DecompressionBombError:
        raise ImageError(f"the image has too many pixels: luce takes up to {MAX_PIXELS}") from None
    except MemoryError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, TypeError, struct.error, zlib.error) as error:
        raise ImageError(f"the image is damaged: {' '.join(str(error).split()) or type(error).__name__}") from None


def _pillow() -> tuple[Any, Any]:
    """Returns Pillow's modules Image and ImageOps."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise Error("images need Pillow", "vision") from None
    return Image, ImageOps


def _bound(size: tuple[int, int]) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise ImageError(f"the image has {width} x {height} pixels")
    if width * height > MAX_PIXELS:
        raise ImageError(f"the image has {width} x {height} pixels: luce takes up to {MAX_PIXELS} in all")


def _webp_size(data: bytes) -> tuple[int, int]:
    """Returns the width and height of a WebP file's canvas (RFC 9649)."""
    kind = data[12:16]
    if kind == b"VP8X" and len(data) >= 30:
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8L" and len(data) >= 25:
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 " and len(data) >= 30:
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise ImageError("the image is damaged: its WebP header is cut off")
