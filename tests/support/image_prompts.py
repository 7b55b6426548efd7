"""Prompts of text and rows of images for an engine, read in pieces, and drafts behind them."""

from __future__ import annotations

import drive
import numpy as np
import tiny_vision

from luce.images.pixels import Picture
from luce.native import ImageSpan, Prompt

N = 32


class Mixed:
    """A prompt of text and images. `parts` are tokens, or the rows (height, width, n_embd) of an image; image i has
    names from -1000 * (i + 1) down, unless `names` says others."""

    def __init__(self, parts, names=None):
        self.tokens, self.spans = [], []
        for part in parts:
            if isinstance(part, np.ndarray):
                height, width, n_embd = part.shape
                name = names[len(self.spans)] if names else -1000 * (len(self.spans) + 1)
                rows = part.reshape(-1, n_embd)
                self.spans.append((len(self.tokens), rows, height, width))
                self.tokens += range(name, name - len(rows), -1)
            else:
                self.tokens += part

    def prompt(self, sequence, begin, end):
        """Returns the tokens begin .. end - 1 as an item of a prefill."""
        images = []
        for at, rows, height, width in self.spans:
            first, last = max(begin, at), min(end, at + len(rows))
            if first < last:
                images.append(ImageSpan(rows[first - at : last - at], first - begin, first - at, height, width))
        return Prompt(sequence, self.tokens[begin:end], end == len(self.tokens), tuple(images))

    def read(self, sequence, cuts=()):
        """Reads what the sequence lacks. Returns the choice behind it."""
        ends = [end for end in (*cuts, len(self.tokens)) if end > sequence.info.n_past]
        for end in ends:
            (choice,) = sequence.engine.prefill([self.prompt(sequence, sequence.info.n_past, end)])
        return choice


def of_golden(tokens, row, tower, processor):
    """Returns a prompt of a golden, whose tokens `row` stand in the places of rows of images, with those that luce's
    own tower makes of tiny_vision.PICTURES."""
    from PIL import Image

    parts, pictures, at = [[]], iter(tiny_vision.pictures()), 0
    while at < len(tokens):
        if tokens[at] != row:
            parts[-1].append(tokens[at])
            at += 1
            continue
        image = Image.fromarray(next(pictures))
        stretched = image.resize(processor.size_of(*image.size), Image.Resampling.BICUBIC)
        picture = Picture(np.asarray(stretched), processor)
        height, width = (side // processor.merge for side in picture.grid)
        parts += [tower.encode(picture.patches(), picture.grid, 1).reshape(height, width, -1), []]
        at += picture.rows
    assert next(pictures, None) is None
    return Mixed(parts)


def check_chain(sequence, drafts, logits, bound):
    """Compares the last draft, of an engine with lists, with the best tokens `drafts` (n,) of logits (n, V), of which
    each stands behind those before it: the tokens, and of the lists' tokens the chances. A draft is compared where
    those before it are ahead by more than may be off. Returns how many were."""
    n, best = len(drafts), np.sort(logits, -1)
    sure = [*(best[:, -1] - best[:, -2] > 2 * bound), False].index(False)
    assert sequence.drafted(n)[:sure] == drafts[:sure].tolist()
    ranks, compared = sequence.engine.info.n_top, min(sure + 1, n)
    lists = sequence.lists(n, ranks)
    ids, scores = (np.array(list(part)).reshape(n, ranks)[:compared] for part in (lists.ids, lists.scores))
    chances = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    assert np.abs(scores - np.take_along_axis(chances[:compared], ids, -1)).max() <= bound
    return compared


def open_engine(model, **params):
    """Opens an engine as drive does; on a GPU with F16 cells, which users have there."""
    return drive.open_engine(model, **{"kv_type": "f32" if model.info.device.startswith("cpu") else "f16"} | params)


def decoded(sequence, mixed, n=N, gamma=0, cuts=(), **options):
    return drive.go_on(sequence, drive.Decoded([mixed.read(sequence, cuts)]), n, gamma, **options)
