"""Opening of images: PNG, JPEG, WebP and GIF by their bytes, as RGB. Sizes are bounded before anything is decoded."""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any

from luce.errors import ArgumentError, Error

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # Pillow has more, some of which decode without bounds (CVE-2026-40192).
MAX_BYTES = 32 << 20
MAX_PIXELS = 64 << 20  # 192 MB of RGB
MAX_SCANS = 100  # of a progressive JPEG, of which each passes over all of its pixels; photos have about ten


class ImageError(ArgumentError):
    """An image that cannot be read, or is larger than luce takes."""


def open_image(data: bytes) -> Image:
    """Returns the first frame as RGB, turned as its EXIF says. Transparency is dropped and not laid over a colour, as
    transformers does. Raises ImageError where the bytes are no image, are damaged, or have too many pixels, and Error
    where Pillow is missing."""
    with _reading(data) as (image, ImageOps):
        opened = image.open(BytesIO(data), formats=FORMATS)
        _bound(opened.size)
        opened.load()
        if opened.mode.startswith("I"):  # Gray of 16 bits: convert() would make all above 255 white.
            opened = opened.convert("I").point(lambda value: value * (1 / 256)).convert("L")
        turned: Image = ImageOps.exif_transpose(opened).convert("RGB")
        return turned


def image_size(data: bytes) -> tuple[int, int]:
    """Returns an image's width and height as its header has them, ahead of a turn by EXIF. Nothing is decoded. Raises
    what open_image raises of what a header shows."""
    with _reading(data) as (image, _):
        if _is_webp(data):
            return _webp_size(data)
        size: tuple[int, int] = image.open(BytesIO(data), formats=FORMATS).size
        _bound(size)
        return size


def _is_webp(data: bytes) -> bool:
    return data.startswith(b"RIFF") and data[8:12] == b"WEBP"


@contextmanager
def _reading(data: bytes) -> Iterator[tuple[Any, Any]]:
    """Gives Pillow's modules Image and ImageOps to read bytes with. What they raise becomes an ImageError."""
    if len(data) > MAX_BYTES:
        raise ImageError(f"the image has {len(data)} bytes: luce takes up to {MAX_BYTES}")
    if _is_webp(data):
        _bound(_webp_size(data))  # Pillow takes memory for all of its pixels as soon as it opens one.
    if data.startswith(b"\xff\xd8") and data.count(b"\xff\xda") > MAX_SCANS:
        raise ImageError(f"the JPEG has more than {MAX_SCANS} scans")
    image, ImageOps = pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # _bound is stricter.
            yield image, ImageOps
    except ImageError:
        raise
    except image.UnidentifiedImageError:
        raise ImageError("the bytes are no PNG, JPEG, WebP or GIF image") from None
    except image.DecompressionBombError:
        raise ImageError(f"the image has too many pixels: luce takes up to {MAX_PIXELS}") from None
    except MemoryError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, TypeError, struct.error, zlib.error) as error:
        raise ImageError(f"the image is damaged: {' '.join(str(error).split()) or type(error).__name__}") from None


def pillow() -> tuple[Any, Any]:
    """Returns Pillow's modules Image and ImageOps. Raises Error, which names the extra, where it is missing."""
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
