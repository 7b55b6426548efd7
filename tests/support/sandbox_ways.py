"""Lists the ways in which this machine confines a program: a test of luce.bench.sandbox runs in each."""

import pytest

from luce.bench import sandbox

MISSING = sandbox.available()
BWRAP = sandbox.bubblewrap()
CONFINED = [
    pytest.param("bwrap", marks=pytest.mark.skipif(not BWRAP, reason="no bwrap works here")),
    pytest.param("own", marks=pytest.mark.skipif(MISSING is not None, reason=str(MISSING))),
]


def confined(test):
    """Runs the test with the namespaces of bubblewrap and with our own."""
    test = pytest.mark.parametrize("namespaces", CONFINED, indirect=True)(test)
    return pytest.mark.usefixtures("namespaces")(test)


def both(test):
    """Runs the test with the namespaces of bubblewrap, with our own, and with the limits alone."""
    return pytest.mark.parametrize("namespaces", [*CONFINED, "limits"], indirect=True)(test)


def use(way, monkeypatch):
    """Lets check() take this way from now on. Returns its argument `namespaces`."""
    monkeypatch.setattr(sandbox, "bubblewrap", lambda: BWRAP if way == "bwrap" else "")
    return way != "limits"
