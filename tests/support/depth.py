"""Parts what README's test command runs from what only the gate does: more examples, deeper cases (.ci/run)."""

import pytest
from hypothesis import settings


def examples(n, **how):
    """Settings of a property that has n examples where others have a hundred."""
    return settings(max_examples=max(n * settings.default.max_examples // 100, 1), **how)


def deeper(*cases):
    """Returns cases of a parametrisation as long tests: ("a", *deeper("b", "c")). Tuples are of several arguments."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long) for case in cases]


def deeper_but(cases, *kept):
    """Returns all cases of a parametrisation of one argument, those that are not among `kept` as long tests."""
    return [case if case in kept else pytest.param(case, marks=pytest.mark.long) for case in cases]


def pairs(longest, longer, other, *kept):
    """Returns cases of a parametrisation of three arguments: each value of one with each value of another is in one of
    them. Those that are not among `kept` are long tests."""
    longest, longer, other = list(longest), list(longer), list(other)
    assert len(longest) >= len(longer) >= len(other)
    cases = [(a, b, other[(i + j) % len(other)]) for i, a in enumerate(longest) for j, b in enumerate(longer)]
    return [*kept, *deeper(*(case for case in cases if case not in kept))]
