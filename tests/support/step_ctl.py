"""Makes the control block of a step (StepCtl in kernels.h) as the int32 array that luce's ops take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from luce.native.structs import Sampling

MAX_ROWS = 64
PAGE = 256
HEAD, ROW, CHOICE = 4, 4, 8
# They count int32 values of StepCtl before its rows, of a RowCtl and of a SeqCtl.
SEQ = 12 + MAX_ROWS + CHOICE
SIZE = HEAD + MAX_ROWS * (ROW + SEQ)
UNUSED = -77  # No op may rely on it.


@dataclass
class Seq:
    """This is one sequence's part of a step. Rows are counted from its own first one, after `n_past`
    tokens."""

    slot: int = 0
    parents: Sequence[int] = ()  # Its rows have these, depth first; -1 stands for the committed tokens.
    n_past: int = 0
    pending: Sequence[int] = ()  # These rows of its last verify were accepted.
    bank: int = 0
    fresh: bool = False
    replay: bool = True  # The recurrent state does not hold the pending rows yet.
    move: bool = False  # KV of the pending rows lies where the verify wrote it.
    pages: int = 0
    n_rows: int | None = None  # A prefill has so many, and no parents.
    cells: int = 0  # In a prefill its cells begin there among all that are gathered.
    keep: Sequence[int] = ()  # Each row is kept there; -1 is nowhere.
    sampling: Sampling = Sampling()

    def depths(self) -> list[int]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths


def choice_ctl(sampling: Sampling) -> np.ndarray:
    """Returns ChoiceCtl as int32 (8,)."""
    made = np.zeros(
        1, [("seed", "u8"), ("min_mass", "u8"), ("scale", "f4"), ("top_k", "i4"), ("top_p", "u8")]
    )
    made["seed"] = sampling.seed
    made["min_mass"] = np.ceil(np.float64(np.float32(sampling.min_p)) * 2**40)
    if sampling.temperature > 0:
        temperature = np.float64(np.float32(sampling.temperature))
        made["scale"] = min(2 / temperature, float(np.finfo(np.float32).max))
    made["top_k"] = sampling.top_k
    made["top_p"] = np.ceil(np.float64(np.float32(sampling.top_p)) * 2**24) if sampling.top_p else 2**24
    return made.view(np.int32)


def step_ctl(*seqs: Seq) -> np.ndarray:
    """Returns int32 (SIZE,): the sequences one after another, then rows that only fill the step's width."""
    ctl = np.full(SIZE, UNUSED, np.int32)
    # Each row has seq, parent, position and keep.
    rows = ctl[HEAD : HEAD + MAX_ROWS * ROW].reshape(MAX_ROWS, ROW)
    parts = ctl[HEAD + MAX_ROWS * ROW :].reshape(MAX_ROWS, SEQ)
    rows[:, 0], rows[:, 3] = -1, -1
    row0 = 0
    for i, seq in enumerate(seqs):
        n_rows = len(seq.parents) if seq.n_rows is None else seq.n_rows
        n = len(seq.pending)
        debts = n if seq.replay or seq.move else 0, seq.move
        parts[i, :9] = seq.slot, seq.fresh, row0, n_rows, seq.n_past, seq.bank, *debts, seq.pages
        parts[i, 10] = seq.cells
        parts[i, 12 : 12 + n] = seq.pending
        parts[i, -CHOICE:] = choice_ctl(seq.sampling)
        for r, (parent, depth) in enumerate(zip(seq.parents, seq.depths(), strict=True)):
            keep = seq.keep[r] if seq.keep else -1
            rows[row0 + r] = i, row0 + parent if parent >= 0 else -1, seq.n_past + depth, keep
        row0 += n_rows
    ctl[:2] = len(seqs), row0
    return ctl


# Each region of chunks is its first position, a chunk's size, and the first chunk.
REGIONS = ((81920, 2048, 160), (32768, 1024, 112), (16384, 512, 80), (4096, 256, 32), (0, 128, 0))


def chunk_at(position: int) -> int:
    """Does what attention/chunks.h does."""
    for begin, size, index in REGIONS:
        if position >= begin:
            return index + (position - begin) // size
    raise AssertionError
