"""Folders of the checkout that tests read."""

from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
GOLDENS = TESTS / "goldens"
HEADER = ROOT / "native" / "include" / "luce.h"
