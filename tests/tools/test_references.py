"""What needs torch or transformers is marked: .ci/references runs what has the mark, and elsewhere it is skipped."""

from __future__ import annotations

import ast

from checkout import TESTS


def test_what_needs_a_reference_is_marked():
    needing, unmarked = 0, []
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text()
        if 'importorskip("t' not in text:
            continue
        tree = ast.parse(text)
        for part in tree.body:
            code = ast.unparse(part)
            if "importorskip('torch" not in code and "importorskip('transformers" not in code:
                continue
            needing += 1
            whole = tree if isinstance(part, ast.Assign) else part
            if "pytest.mark.references" not in ast.unparse(whole):
                unmarked.append(f"{path.relative_to(TESTS)}:{part.lineno}")
    assert needing > 9 and unmarked == []
