"""The `luce` command and `python -m luce`."""

import sys


def main() -> None:
    """Runs the command line; what goes wrong while it is still being imported is one line as well."""
    try:
        from luce.cli import main as run
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except MemoryError:
        _fail("out of memory", 1)
    except (ImportError, OSError) as error:
        _fail(f"luce cannot start: {' '.join(str(error).split())[:500]}", 1)
    try:
        run()
    except KeyboardInterrupt:
        _fail("interrupted", 130)


def _fail(message: str, code: int) -> None:
    print(f"Error: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
