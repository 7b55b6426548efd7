"""Lists the ways in which this machine confines a program: a test of luce.bench.sandbox runs in each."""

import pytest

from luce.bench import sandbox

MISSING = sandbox.available()
BWRAP = pytest.param(True, id="bwrap", marks=pytest.mark.skipif(MISSING is not None, reason=str(MISSING)))


def confined(test):
    """Runs the test where bubblewrap works."""
    return pytest.mark.skipif(MISSING is not None, reason=str(MISSING))(test)


def both(test):
    """Runs the test in bubblewrap's namespaces, and with the limits alone."""
    return pytest.mark.parametrize("namespaces", [BWRAP, pytest.param(False, id="limits")])(test)
