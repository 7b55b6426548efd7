"""Reports what a command of `luce bench` measured, in the form that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import click

from luce.bench import output
from luce.bench.origin import command_text, device_text, origin, write_row
from luce.cli import stdout
from luce.cli.command import COMMAND, Interrupted
from luce.cli.terminal import print_table
from luce.errors import Error

T = TypeVar("T")


class Measured(Generic[T]):
    """Collects what is measured, up to a failure. The failure is kept, so that what there is by then is not
    lost. One before the first result is raised."""

    def __init__(self, measuring: Iterable[T]):
        self._measuring = measuring
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[T]:
        begun = False
        try:
            for each in self._measuring:
                begun = True
                yield each
        except (Error, OSError, MemoryError) as error:
            if not begun:
                raise
            self.failure = error


@dataclass
class Report:
    """This is what a command measured, for every form of output. `extra` goes beside "modes" in the
    object."""

    bench: str
    model: Path
    device: str
    threads: int
    rows_name: str
    rows: list[dict[str, Any]]
    table: output.Table
    timing: str
    extra: dict[str, Any]
    interrupted: bool = False
    failure: Exception | None = None  # It ended the run early.

    def put(self, flags: dict[str, Any], plot: Callable[[Path, str, list[dict[str, Any]]], None]) -> None:
        """Writes to stdout, to --save and to --plot; then raises what ended the run early, if anything did.
        """
        device = device_text(self.device, self.threads)
        title = f"{self.bench}: {self.model.name} on {device}"
        body = self.extra | {
            "timing": self.timing,
            "interrupted": self.interrupted,
            "failure": None if self.failure is None else str(self.failure),
            self.rows_name: self.rows,
        }
        try:
            if flags["json"]:
                head = {"bench": self.bench, "model": self.model.name, "device": device}
                stdout.put_json(head | body)
            elif flags["csv"]:
                stdout.put(output.as_csv(self.rows))
            elif flags["md"]:
                stdout.put(f"{title}. {self.timing}\n\n{output.as_markdown(self.table)}")
            else:
                print_table(title, *self.table, self.timing)
        finally:  # A reader that has closed the pipe does not lose the row.
            if flags["save"] and self.rows:
                self._save(flags, body)
            if flags["plot"] and self.rows:
                plot(flags["plot"], title, self.rows)
        if self.failure is not None:
            raise self.failure
        if self.interrupted:
            raise Interrupted()

    def _save(self, flags: dict[str, Any], body: dict[str, Any]) -> None:
        folder, commit = flags["save"], flags["commit"]
        command = command_text(click.get_current_context().meta[COMMAND])
        kind = "cpu" if self.device.startswith("cpu") else "gpu"
        about = self.model.stem.removeprefix(f"{self.bench}-")
        try:
            head = origin(self.bench, self.device, self.model, command, self.threads, commit)
            path = write_row(folder, f"{self.bench}-{about}-{kind}", head | body)
        except OSError as error:
            said = error.strerror or error
            raise Error(f"{folder}: the result row cannot be written: {said}") from error
        if not flags["quiet"]:
            click.echo(f"wrote {path}", err=True)
