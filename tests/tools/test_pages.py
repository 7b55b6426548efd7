"""Pages and tables that scripts make are what the scripts make of the tree as it is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import make_benchmark_table
import make_cli_page
import make_fit_table
import pytest
from checkout import ROOT

from luce.cli.commands import cli

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(?:sh|console)\n(.*?)^```$", re.S | re.M)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")


def test_the_page_of_the_command_line_is_its_help() -> None:
    assert make_cli_page.PAGE.read_text(encoding="utf-8") == make_cli_page.page(), "run tools/make_cli_page.py"


@pytest.mark.parametrize("page", make_benchmark_table.PAGES, ids=lambda page: page.name)
def test_the_tables_of_figures_are_those_of_recorded_rows(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == make_benchmark_table.made(text), "run tools/make_benchmark_table.py"


@pytest.mark.long
def test_the_table_of_what_fits_is_probes_arithmetic() -> None:
    """Of each model a row is made anew: those of other types come of the same arithmetic, and each takes seconds."""
    text = make_fit_table.PAGE.read_text(encoding="utf-8")
    for line in make_fit_table.table(types=("Q4_K_M",)).splitlines():
        assert f"\n{line}\n" in text, "run tools/make_fit_table.py"


def understood(words: list[str]) -> None:
    """Raises UsageError where luce has no such command or option, or an option lacks its value."""
    command, context = cli, click.Context(cli, info_name=words[0])
    rest = words[1:]
    while True:
        _, rest, _ = command.make_parser(context).parse_args(rest)
        if not isinstance(command, click.Group) or rest in ([], ["VALUE"]):
            return
        name, inner, rest = command.resolve_command(context, rest)
        command, context = inner, click.Context(inner, info_name=name, parent=context)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "cli.md"], ids=lambda page: page.name)
def test_commands_that_a_page_shows_are_understood(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    lines = [line.removeprefix("$ ") for block in BLOCK.findall(text) for line in block.splitlines()]
    shown = [shlex.split(line, comments=True) for line in lines if line.startswith("luce ")]
    named = [[*found.split(), "VALUE"] for found in re.findall(r"(?<!`)`(luce [^`]*)`", BLOCK.sub("", text))]
    for words in [*shown, *named]:
        if not {"COMMAND", "...", "serves"} & set(words):  # `luce serves NAME at URL` is what a server says.
            understood(words)


def test_links_between_pages_lead_somewhere() -> None:
    lost = [
        (page.name, target)
        for page in PAGES
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert not lost


def test_paths_that_pages_name_are_there() -> None:
    """Those of Python may be named from its package on, and files without their ending. A build makes some."""
    made = {"luce/lib"}
    named = re.compile(r"`((?:luce|native|tests|tools|bench|docs|\.ci)/[\w./-]+)`")
    shown = {(page.name, name) for page in PAGES for name in named.findall(page.read_text(encoding="utf-8"))}
    lost = [
        (page, name)
        for page, name in sorted(shown)
        if "NAME" not in name
        and name not in made
        and not any((folder / name).exists() or [*folder.glob(f"{name}.*")] for folder in (ROOT, ROOT / "luce"))
    ]
    assert lost == []


@pytest.mark.parametrize("page", ["contributing.md", "architecture.md"])
def test_a_page_for_developers_names_every_chapter(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    chapters = {path.parent.name for path in (ROOT / "luce").glob("*/__init__.py")}
    assert {name for name in chapters if f"`{name}`" not in text} == set()


def test_rows_that_pages_name_are_recorded() -> None:
    rows = {path.stem for path in (ROOT / "bench" / "results").iterdir()}
    for page in (ROOT / "docs").glob("*.md"):
        for name in re.findall(r"`(\d{4}-\d\d-\d\d-[\w.-]*?)(?:\.(?:json|txt))?`", page.read_text(encoding="utf-8")):
            assert name in rows, f"{page.name} names {name}"


def test_a_row_is_the_newest_of_its_kind_or_something_cites_it() -> None:
    """The kind is the row's name without its date and its number. Those of before are in the repository's history."""
    rows = sorted((ROOT / "bench" / "results").iterdir())
    newest = {}
    for row in rows:
        date, kind, number = re.fullmatch(r"(\d{4}-\d\d-\d\d)-(.*?)(?:-(\d+))?", row.stem).groups()
        kind += row.suffix
        newest[kind] = max(newest.get(kind, ("", 0, row)), (date, int(number or 1), row))
    cited = "\n".join(
        path.read_text(encoding="utf-8")
        for path in [*PAGES, *(path for of in ("tools", "tests", "bench") for path in ROOT.glob(f"{of}/**/*.py"))]
    )
    kept = {row for *_, row in newest.values()}
    kept |= {row for row in rows if re.search(re.escape(row.stem) + r"(?![\w-])", cited)}
    assert [row.name for row in rows if row not in kept] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
