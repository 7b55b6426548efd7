#!/usr/bin/env python3
"""Writes docs/cli.md, the page of the command line, from the commands' own help.

    python tools/make_cli_page.py
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # luce, where it is not installed.

import click

from luce.cli.commands import cli

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
HEAD = """# Command line

Made by `tools/make_cli_page.py` from the commands' own help. Text goes to stdout exactly as it is decoded, everything
else to stderr; `--json` prints one object. An error is a line on stderr, with `--json` too.
Usage errors exit with 2, failures with 1, Ctrl-C with 130.
"""


def sections(command: click.Command, ctx: click.Context) -> Iterator[str]:
    """Yields a section for the command and for each command below it."""
    name = ctx.command_path
    yield f"\n## {name}\n\n```\n{command.get_help(ctx).rstrip()}\n```\n"
    if isinstance(command, click.Group):
        for below in command.list_commands(ctx):
            found = command.get_command(ctx, below)
            assert found is not None
            yield from sections(found, context(found, below, ctx))


def context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    widths = {"terminal_width": 100, "max_content_width": 100}
    return click.Context(command, parent, name, **command.context_settings | widths)


def page() -> str:
    """Returns the page's text."""
    return HEAD + "".join(sections(cli, context(cli, "luce", None)))


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
