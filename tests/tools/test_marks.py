"""What needs a package that luce[test] leaves out is marked: the gate runs what has the mark."""

from __future__ import annotations

import ast

import pytest
from checkout import TESTS

PACKAGES = {"references": ("torch", "transformers"), "clients": ("openai", "anthropic"), "long": ("matplotlib",)}


@pytest.mark.parametrize("mark", PACKAGES)
def test_what_needs_such_a_package_is_marked(mark):
    needing, unmarked = 0, []
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text()
        if "importorskip(" not in text:
            continue
        tree = ast.parse(text)
        for part in tree.body:
            code = ast.unparse(part)
            if not any(f"importorskip('{name}" in code for name in PACKAGES[mark]):
                continue
            needing += 1
            whole = tree if isinstance(part, ast.Assign) else part
            fixture = "pytest.fixture" in code  # Its tests are marked, by whoever asks for it.
            if not fixture and f"pytest.mark.{mark}" not in ast.unparse(whole):
                unmarked.append(f"{path.relative_to(TESTS)}:{part.lineno}")
    assert needing > 3 and unmarked == []
