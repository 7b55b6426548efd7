"""What needs a package that luce[test] leaves out is marked: the gate runs what has the mark."""

from __future__ import annotations

import ast
from functools import cache

import pytest
from checkout import TESTS

PACKAGES = {"references": ("torch", "transformers"), "clients": ("openai", "anthropic"), "long": ("matplotlib",)}


@cache
def skipping():
    """Returns parts of modules that skip where a package lacks: path, line, code, and the code that has their marks."""
    found = []
    for path in TESTS.rglob("test_*.py"):
        if "importorskip(" not in (text := path.read_text()):
            continue
        tree = ast.parse(text)
        for part in tree.body:
            if "importorskip(" in (code := ast.unparse(part)):
                found.append((path, part.lineno, code, ast.unparse(tree) if isinstance(part, ast.Assign) else code))
    return found


@pytest.mark.parametrize("mark", PACKAGES)
def test_what_needs_such_a_package_is_marked(mark):
    needing, unmarked = 0, []
    for path, line, code, whole in skipping():
        if not any(f"importorskip('{name}" in code for name in PACKAGES[mark]):
            continue
        needing += 1
        fixture = "pytest.fixture" in code  # Its tests are marked, by whoever asks for it.
        if not fixture and f"pytest.mark.{mark}" not in whole:
            unmarked.append(f"{path.relative_to(TESTS)}:{line}")
    assert needing > 3 and unmarked == []
