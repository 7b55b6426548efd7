"""Facts of Gemma 4's vision towers that their files do not say."""

from __future__ import annotations

PROJECTOR = "gemma4v"
UNIFIED = "gemma4uv"  # Of the 12B: a patch of MERGE x MERGE of the others' patches is a row.
BUDGETS = (70, 140, 280, 560, 1120)  # Rows of an image: the models were trained with these.
USUAL = 280
MERGE = 3  # Patches a side of a row.
