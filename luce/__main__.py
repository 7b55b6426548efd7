"""`python -m luce`: the same as the `luce` command."""

from luce.cli import main

if __name__ == "__main__":
    main()
