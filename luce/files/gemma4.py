"""Facts of Gemma 4's vision towers that their files do not say."""

from __future__ import annotations

PROJECTOR = "gemma4v"
BUDGETS = (70, 140, 280, 560, 1120)  # Rows of an image: the models were trained with these.
USUAL = 280
MERGE = 3  # Patches a side of a row.
