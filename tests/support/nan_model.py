"""Makes a small random model with a head, in which one token is NaN: it fails whoever reads it, and nobody
else may notice."""

from __future__ import annotations

from pathlib import Path

import drive
import numpy as np
import tiny
from tiny import Config, Weights

from luce.native import Engine, Model, Sequence

SMALL = Config(n_nextn=1)
BAD = 7  # This token's row is NaN.


def spoil(weights: Weights) -> Weights:
    """Makes the embedding of BAD NaN, and its logit 0: nothing chooses or drafts it."""
    weights["token_embd.weight"][BAD] = np.nan
    weights["output.weight"][BAD] = 0
    return weights


def write(path: Path, seed: int) -> Path:
    return tiny.write(path, SMALL, spoil(tiny.layout(SMALL, seed)))


def tokens_of(n: int, seed: int = 1) -> list[int]:
    """Returns n tokens that are not BAD."""
    tokens = np.random.default_rng(seed).integers(0, SMALL.n_vocab, n)
    return [int(t) for t in np.where(tokens == BAD, BAD + 1, tokens)]


def open_engine(model: Model, **params: int | str) -> Engine:
    """Opens an engine of three sequences of 300 positions and one checkpoint, with rows for drafts and trees.
    """
    filled: dict[str, int | str] = {
        "n_ctx": 300, "n_sequences": 3, "n_checkpoints": 1, "n_rows": 24, "n_draft": 4, "n_chunk": 256,
    }  # fmt: skip
    return drive.open_engine(model, **filled | params)


def started(engine: Engine, n: int = 3) -> list[Sequence]:
    """Opens sequences with prompts of their own."""
    sequences = [engine.sequence() for _ in range(n)]
    for seed, sequence in enumerate(sequences):
        drive.prefill(sequence, tokens_of(20 + seed, seed))
    return sequences


def state_of(engine: Engine, *sequences: Sequence) -> list[object]:
    """Returns what a call that does nothing leaves as it was. Reading it rejects rows that are verified."""
    infos: list[object] = [engine.info, *(each.info for each in sequences)]
    return [*infos, *(b"" if each.info.failed else each.dump() for each in sequences)]
