"""Prompts of text and rows of images for an engine, read in pieces."""

from __future__ import annotations

import drive
import numpy as np

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


def open_engine(model, **params):
    """Opens an engine as drive does; on a GPU with F16 cells, which users have there."""
    return drive.open_engine(model, **{"kv_type": "f32" if model.info.device.startswith("cpu") else "f16"} | params)


def decoded(sequence, mixed, n=N, gamma=0, cuts=(), **options):
    return drive.go_on(sequence, drive.Decoded([mixed.read(sequence, cuts)]), n, gamma, **options)
