"""The `luce` command and `python -m luce`."""

import sys


def main() -> None:
    """Runs the command line; Ctrl-C while it is still being imported exits 130 as well."""
    try:
        from luce.cli import main as run

        run()
    except KeyboardInterrupt:
        print("Error: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
