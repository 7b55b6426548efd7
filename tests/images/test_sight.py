"""Sight of a model: names of rows, rows that are encoded once, and kept beginnings of prompts with images."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
import tiny_vision
from depth import deeper_but
from tiny_vision import IMAGE_PAD, VISION_END, VISION_START

from luce.decode.events import Finished, Started, Tokens
from luce.decode.request import Request
from luce.errors import ArgumentError, Cancelled, OutOfMemory
from luce.images.opening import ImageError
from luce.images.sight import Sight
from luce.model.loaded import Loaded, Settings
from luce.native import Tower
from luce.planning.opened import Files
from luce.planning.plan import Options

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("sight")
    tiny_vision.write_both(made)
    return made


@pytest.fixture
def sight(folder, device):
    with Sight(folder / "mmproj.gguf", 1, device) as opened:
        yield opened


@pytest.fixture
def encoded(monkeypatch):
    """Counts the images that are encoded."""
    grids, encode = [], Tower.encode

    def counted(self, patches, grid, *more):
        grids.append(grid)
        return encode(self, patches, grid, *more)

    monkeypatch.setattr(Tower, "encode", counted)
    return grids


def picture(sight, seed, size=(64, 96), kind="PNG"):
    out = BytesIO()
    Image.fromarray(tiny_vision.image(*size, seed)).save(out, kind)
    return sight.processor.picture(out.getvalue())


def test_rows_have_one_name_where_their_pixels_are_the_same(sight):
    first, other, again = (picture(sight, seed) for seed in (1, 2, 1))
    tokens, at = sight.placed([7, IMAGE_PAD, 8, IMAGE_PAD, IMAGE_PAD], IMAGE_PAD, [first, other, again])
    n = first.rows
    assert [place for place, _ in at] == [1, n + 2, 2 * n + 2]
    names = [tokens[place : place + n] for place, _ in at]
    assert names[0] == names[2] and not set(names[0]) & set(names[1])
    assert len(set(names[0])) == n and max(*names[0], *names[1]) < -1
    assert tokens == [7, *names[0], 8, *names[1], *names[2]]


def test_the_format_of_a_file_does_not_matter(sight):
    names = {sight.placed([IMAGE_PAD], IMAGE_PAD, [picture(sight, 1, kind=kind)]).tokens[0] for kind in ("PNG", "GIF")}
    assert len(names) == 2, "a GIF has a palette, and so other pixels"
    assert sight.placed([IMAGE_PAD], IMAGE_PAD, [picture(sight, 1)]).tokens[0] in names


def test_an_image_is_encoded_once(sight, encoded):
    pictures = [picture(sight, 1), picture(sight, 2), picture(sight, 1)]
    placed = sight.placed([IMAGE_PAD] * 3, IMAGE_PAD, pictures)
    shown = sight.shown(placed)
    assert len(encoded) == 2 and sight.shown(placed)[0].rows is shown[0].rows and len(encoded) == 2
    assert shown[0].rows is shown[2].rows
    assert [(each.height * each.width, len(each.rows)) for each in shown] == [(p.rows, p.rows) for p in pictures]


def test_rows_are_kept_within_bytes(sight, encoded, monkeypatch):
    first, second, third = (sight.placed([IMAGE_PAD], IMAGE_PAD, [picture(sight, seed)]) for seed in (1, 2, 3))
    monkeypatch.setattr("luce.images.sight.ROW_BYTES", 2 * sight.shown(first)[0].rows.nbytes)
    sight.shown(second)
    sight.shown(first)
    assert len(encoded) == 2
    sight.shown(third)  # What was wanted longest ago makes room.
    sight.shown(first)
    assert len(encoded) == 3
    sight.shown(second)
    assert len(encoded) == 4


def test_all_images_of_one_request_are_kept_and_that_is_said_once(folder, device, encoded, monkeypatch):
    said = []
    with Sight(folder / "mmproj.gguf", 1, device, say=said.append) as sight:
        talk = sight.placed([IMAGE_PAD] * 3, IMAGE_PAD, [picture(sight, seed) for seed in (1, 2, 3)])
        monkeypatch.setattr("luce.images.sight.ROW_BYTES", 1)
        sight.shown(talk)
        sight.shown(talk)
        assert len(encoded) == 3 and len(said) == 1 and "the images of one request take" in said[0]
        sight.shown(sight.placed([IMAGE_PAD], IMAGE_PAD, [picture(sight, 4)]))  # Another's have the room now.
        sight.shown(talk)
        assert len(encoded) == 7


def test_beside_a_model_on_several_devices_a_tower_is_on_the_first(folder, device):
    with Sight(folder / "mmproj.gguf", 1, f"{device},nowhere") as sight:
        assert len(sight.shown(sight.placed([IMAGE_PAD], IMAGE_PAD, [picture(sight, 1)]))) == 1


@pytest.mark.parametrize("size", deeper_but([(1600, 1400), (100, 100), (6000, 40), (40, 6000), (320, 256)], (320, 256)))
def test_images_are_reduced_to_a_number_of_tokens(folder, device, size):
    with Sight(folder / "mmproj.gguf", 1, device, tokens=64) as sight:
        seen = picture(sight, 1, size)
        assert seen.rows <= 64 and seen.rows == sight.processor.rows_of(*size)
        (shown,) = sight.shown(sight.placed([IMAGE_PAD], IMAGE_PAD, [seen]))
        assert len(shown.rows) == seen.rows


def test_numbers_of_tokens_that_no_image_may_have_are_refused(folder):
    for n in (63, 16385):
        with pytest.raises(ArgumentError, match=f"images of {n} tokens: expected 64 to 16384"):
            Sight(folder / "mmproj.gguf", tokens=n)


def test_what_a_tower_holds_of_a_gpu_is_told_where_memory_lacks(sight, monkeypatch):
    monkeypatch.setattr(sight, "on_gpu", True)
    told = r"needs 9 GB; the vision tower holds 0\.\d GB beside it, for images of up to 16384 tokens"
    with pytest.raises(OutOfMemory, match=told) as caught, sight.beside():
        raise OutOfMemory("needs 9 GB")
    assert caught.value.concerns == "image_tokens"


def test_images_too_large_for_memory_are_refused_before_they_are_decoded(sight, monkeypatch):
    monkeypatch.setattr(sight, "processor", replace(sight.processor, most_rows=70))
    with pytest.raises(ImageError, match="takes 80 tokens, as 320 x 256 pixels: there is memory for 70 at once"):
        sight.processor.rows_of(320, 256)
    with pytest.raises(ImageError, match="there is memory for 70"):
        picture(sight, 1, (320, 256))


def test_encoding_is_cancelled(sight):
    placed = sight.placed([IMAGE_PAD], IMAGE_PAD, [picture(sight, 3)])
    with pytest.raises(Cancelled):
        sight.shown(placed, lambda part: True)


def test_spans_are_what_a_chunk_has_of_an_image(sight):
    (shown,) = sight.shown(sight.placed([1, 2, IMAGE_PAD, 3], IMAGE_PAD, [picture(sight, 1)]))
    n = len(shown.rows)
    assert shown.span(0, 2) is None and shown.span(2 + n, 3 + n) is None
    whole, part = shown.span(0, 3 + n), shown.span(5, 9)
    assert (whole.at, whole.first, len(whole.rows)) == (2, 0, n)
    assert (part.at, part.first, len(part.rows)) == (0, 3, 4) and np.array_equal(part.rows, shown.rows[3:7])


def test_other_numbers_of_images_are_refused(sight):
    with pytest.raises(ArgumentError, match="places for 2 images, and 1 were given"):
        sight.placed([IMAGE_PAD, IMAGE_PAD], IMAGE_PAD, [picture(sight, 1)])


@pytest.fixture(scope="module")
def loaded(folder, device):
    options = Options(ctx=1024, checkpoints=8, threads=1, device=device)
    with Files(folder / "model.gguf", device=device) as files, Loaded(files, options, Settings(options)) as opened:
        yield opened


def run(loaded, sight, tokens, pictures, n=12):
    """Returns how many tokens of a prompt were kept, and the answer's."""
    placed = sight.placed(tokens, IMAGE_PAD, pictures)
    request = Request(tuple(placed.tokens), n, images=sight.shown(placed), ignore_eos=True)
    events = list(loaded.run(request))
    (started,) = (event for event in events if isinstance(event, Started))
    assert isinstance(events[-1], Finished), events[-1]
    return started.cached, [token for event in events if isinstance(event, Tokens) for token in event.ids]


def test_beginnings_with_images_are_kept_by_their_pixels(loaded, sight, encoded):
    image, text = [VISION_START, IMAGE_PAD, VISION_END], [65 + i % 26 for i in range(200)]
    prompt = [*text[:70], *image, *text]
    first, other = picture(sight, 1), picture(sight, 2)
    cold, answer = run(loaded, sight, prompt, [first])
    assert cold == 0
    kept, again = run(loaded, sight, [*prompt, 66, 67], [picture(sight, 1)])
    assert kept > 70 + first.rows and len(encoded) == 1
    assert run(loaded, sight, prompt, [first])[1] == answer
    cached, another = run(loaded, sight, prompt, [other])
    assert cached <= 70 and another != answer
    assert run(loaded, sight, [*prompt, 66, 67], [first])[1] == again
