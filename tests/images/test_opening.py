"""Opening of images: what is read, and one clear error for what is not."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from io import BytesIO

import numpy as np
import pytest
import tiny_vision

from luce.images.opening import MAX_BYTES, ImageError, image_size, open_image

Image = pytest.importorskip("PIL.Image")
RGB = tiny_vision.image(40, 24)


def saved(image, kind, **options):
    out = BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width, height, body=b"\0"):
    """Returns a PNG that says these sides, with these bytes of pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


def webp_of(width, height):
    """Returns an animated WebP's header that says these sides."""
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + sides + b"ANIM" + struct.pack("<I", 6) + b"\0" * 6
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "JPEG"])
def test_formats_are_found_by_their_bytes(kind):
    lossless = {"WEBP": {"lossless": True}}.get(kind, {})
    opened = open_image(saved(Image.fromarray(RGB), kind, **lossless))
    assert (opened.mode, opened.size) == ("RGB", (40, 24))
    if kind in ("PNG", "WEBP"):
        assert np.array_equal(np.asarray(opened), RGB)


def test_exif_turns_an_image():
    exif = Image.Exif()
    exif[0x0112] = 6  # It is to be turned by 90 degrees.
    opened = open_image(saved(Image.fromarray(RGB), "PNG", exif=exif))
    assert np.array_equal(np.asarray(opened), np.rot90(RGB, -1))


def test_transparency_is_dropped_and_not_laid_over_a_colour():
    clear = np.dstack([RGB, np.zeros(RGB.shape[:2], np.uint8)])
    assert np.array_equal(np.asarray(open_image(saved(Image.fromarray(clear), "PNG"))), RGB)


def test_the_first_frame_of_an_animation_is_read():
    frames = [Image.fromarray(x) for x in (RGB, RGB[::-1].copy())]
    data = saved(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    assert np.array_equal(np.asarray(open_image(data)), RGB)
    gif = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert np.array_equal(np.asarray(open_image(gif)), np.asarray(open_image(saved(frames[0], "GIF"))))


def test_cmyk_and_gray_of_sixteen_bits_become_rgb():
    cmyk = open_image(saved(Image.fromarray(RGB).convert("CMYK"), "JPEG", quality=95))
    assert np.abs(np.asarray(cmyk).astype(int) - RGB).mean() < 40  # JPEG softens the edges.
    gray = (np.arange(24 * 40, dtype=np.uint16) * 60).reshape(24, 40)
    opened = np.asarray(open_image(saved(Image.fromarray(gray), "PNG")))
    assert np.array_equal(opened[..., 0], gray >> 8) and np.array_equal(opened[..., 0], opened[..., 2])


def many_scans(n):
    """Returns a progressive JPEG whose last scan comes n times: each passes over all pixels."""
    data = saved(Image.fromarray(tiny_vision.image(64, 64)), "JPEG", progressive=True)
    begin = data.rindex(b"\xff\xda")
    return data[:begin] + data[begin:-2] * n + data[-2:]


HOSTILE = {
    "nothing": (b"", "no PNG, JPEG, WebP or GIF"),
    "text": (b"hello " * 100, "no PNG, JPEG, WebP or GIF"),
    "an SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no PNG, JPEG, WebP or GIF"),
    "a TIFF": (saved(Image.fromarray(RGB), "TIFF"), "no PNG, JPEG, WebP or GIF"),
    "a BMP": (saved(Image.fromarray(RGB), "BMP"), "no PNG, JPEG, WebP or GIF"),
    "a FITS": (f"{'SIMPLE  =                    T':80}{'END':2800}".encode(), "no PNG, JPEG, WebP or GIF"),
    "a bomb": (png_of(60000, 60000), "pixels: luce takes up to"),
    "a long bomb": (png_of(1, 2**31 - 1), "pixels: luce takes up to|damaged"),
    "a WebP bomb": (webp_of(16384, 16384), "16384 x 16384 pixels: luce takes up to"),
    "no pixels": (png_of(0, 10), "damaged|no PNG|0 x 10"),
    "a PNG that lacks pixels": (png_of(64, 64), "damaged"),
    "a PNG of wrong bytes": (saved(Image.fromarray(RGB), "PNG")[:60] + b"\0" * 200, "damaged|no PNG"),
    "half a JPEG": (saved(Image.fromarray(tiny_vision.image(200, 200)), "JPEG")[:2000], "damaged"),
    "half a WebP": (saved(Image.fromarray(tiny_vision.image(200, 200)), "WEBP")[:500], "damaged|no PNG"),
    "a WebP's name": (b"RIFF\0\0\0\0WEBP", "damaged"),
    "half a GIF": (saved(Image.fromarray(RGB), "GIF")[:100], "damaged|no PNG"),
    "passes without end": (many_scans(2000), "more than 100 scans"),
    "too many bytes": (b"\x89PNG" + b"\0" * MAX_BYTES, f"bytes: luce takes up to {MAX_BYTES}"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_bytes_are_one_clear_line_and_take_little_memory(what):
    data, said = HOSTILE[what]
    tracemalloc.start()
    try:
        with pytest.raises(ImageError, match=said) as raised:
            open_image(data)
        assert tracemalloc.get_traced_memory()[1] < (8 << 20) + len(data)
    finally:
        tracemalloc.stop()
    assert "\n" not in str(raised.value)


def test_any_damage_is_an_image_or_an_image_error():
    rng = np.random.default_rng(3)
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        whole = saved(Image.fromarray(tiny_vision.image(64, 64)), kind)
        for _ in range(150):
            bad = bytearray(whole)
            for at in rng.integers(0, len(bad), rng.integers(1, 6)):
                bad[at] = rng.integers(0, 256)
            try:
                assert open_image(bytes(bad[: rng.integers(1, len(bad) + 1)])).mode == "RGB"
            except ImageError:
                pass


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_size_is_known_of_the_header_alone(kind):
    whole = saved(Image.fromarray(tiny_vision.image(90, 70)), kind)
    assert image_size(whole) == open_image(whole).size == (90, 70)
    assert image_size(whole[: 3 * len(whole) // 4]) == (90, 70)
    with pytest.raises(ImageError):
        image_size(whole[:20])
