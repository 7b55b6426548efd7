"""Says what the tests of the command line look for in what it printed."""


def one_line(result):
    """Returns the error line of a failure: nothing else is on stderr, and no traceback was suppressed."""
    assert isinstance(result.exception, SystemExit), result.exception
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("Error: "), result.stderr
    return lines[0]
