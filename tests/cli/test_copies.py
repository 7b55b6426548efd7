"""F16 copies of matrices for prompts take memory that was left: not where other models want it too."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from luce.cli.options import options_of
from luce.server.cli import settings_of


@pytest.mark.parametrize("asked, scorer, others, keeps", [
    (None, None, False, True),
    (None, Path("small.gguf"), False, False),
    (None, None, True, False),
    ("auto", Path("small.gguf"), True, True),
    ("off", None, False, False),
])  # fmt: skip
def test_copies_leave_memory_to_other_models_unless_asked(
    asked: str | None, scorer: Path | None, others: bool, keeps: bool
) -> None:
    flags = defaultdict[str, Any](lambda: None, prompt_copies=asked, prefill_model=scorer)
    assert options_of(flags, others).copies is keeps
    flags |= {"parallel": 1, "checkpoints": 8, "cache_disk": 1.0}
    assert settings_of(flags, None, others).options.copies is keeps
