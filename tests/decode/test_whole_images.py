"""Chunks of prompts with images of which a chunk has all or nothing, since their rows see each other."""

import numpy as np
import pytest
from depth import examples
from fake_core import FakeEngine, generation
from hypothesis import given
from hypothesis import strategies as st

from luce.decode.events import Failed
from luce.decode.pipeline import Read
from luce.decode.request import Request
from luce.errors import ArgumentError
from luce.images.sight import Shown

N_CUT, N_CHUNK = 16, 64
PARTS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, N_CHUNK)), min_size=1, max_size=5)  # Text, then an image.


def reading(parts, n_behind, whole=True, n_chunk=N_CHUNK):
    """A generation that has begun, of a prompt of parts and text behind them."""
    prompt, images, name = [], [], -2
    for n_text, n_rows in parts:
        prompt += [65] * n_text
        images.append(Shown(len(prompt), np.zeros((n_rows, 4), np.float32), 1, n_rows))
        prompt += range(name, name - n_rows, -1)
        name -= n_rows
    prompt += [66] * n_behind
    core = FakeEngine(n_chunk=n_chunk, n_cut=N_CUT, whole_images=whole)
    one = generation(core, Request(tuple(prompt), 1, images=tuple(images)))
    return one, one.begin()


@examples(200)
@given(PARTS, st.integers(1, 60), st.lists(st.integers(-8, N_CHUNK), max_size=40))
def test_no_chunk_has_a_part_of_an_image(parts, n_behind, mosts):
    one, _ = reading(parts, n_behind)
    prompt, images, at = one._request.prompt, one._request.images, 0
    edges = {edge for image in images for edge in (image.at, image.end)}
    for most in [*mosts, *[N_CHUNK] * len(prompt)]:
        chunk = one.chunk(most)
        if chunk is None:
            assert most < N_CUT, "what is this long has a place where it may end"
            continue
        end = at + len(chunk.tokens)
        assert chunk.tokens == prompt[at:end] and chunk.last == (end == len(prompt))
        assert end % N_CUT == 0 or end in edges or end == len(prompt)
        inside = [image for image in images if at < image.end and image.at < end]
        assert [(span.at, span.first, len(span.rows)) for span in chunk.images] == [
            (image.at - at, 0, len(image.rows)) for image in inside
        ]
        assert len(chunk.tokens) <= most or (len(inside) == 1 and inside[0].at == at), "but a lone image may be longer"
        at = end
        if at == len(prompt):
            break
        one.landed(Read(None))
    assert at == len(prompt)


def test_images_that_may_be_cut_are_cut_as_text_is():
    one, _ = reading([(10, 50)], 10, whole=False)
    assert len(one.chunk(N_CUT).tokens) == N_CUT


@pytest.mark.parametrize("whole", [True, False])
def test_an_image_of_more_tokens_than_a_chunk_is_refused_before_it_is_read(whole):
    one, events = reading([(3, N_CHUNK + 1)], 5, whole)
    failed = [event.error for event in events if isinstance(event, Failed)]
    assert bool(failed) is whole
    if failed:
        assert isinstance(failed[0], ArgumentError) and "65 tokens, and this model reads one at once" in str(failed[0])
