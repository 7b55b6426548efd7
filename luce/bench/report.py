"""What a command of `luce bench` measured, in the form that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from luce import stdout
from luce.bench import output
from luce.bench.origin import command_text, device_text, origin, write_row
from luce.command import COMMAND, Interrupted
from luce.errors import LuceError
from luce.render import print_table


@dataclass
class Report:
    """What a command measured, for every form of output. extra: beside "modes" in the object."""

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

    def put(self, flags: dict[str, Any], plot: Callable[[Path, str, list[dict[str, Any]]], None]) -> None:
        """To stdout, to --save and --plot; then Ctrl-C's exit, if that is why it ends here."""
        device = device_text(self.device, self.threads)
        title = f"{self.bench}: {self.model.name} on {device}"
        body = self.extra | {
            "timing": self.timing,
            "interrupted": self.interrupted,
            self.rows_name: self.rows,
        }
        try:
            if flags["form"] == "json":
                head = {"bench": self.bench, "model": self.model.name, "device": device}
                stdout.put_json(head | body)
            elif flags["form"] == "csv":
                stdout.put(output.as_csv(self.rows))
            elif flags["form"] == "md":
                stdout.put(f"{title}. {self.timing}\n\n{output.as_markdown(self.table)}")
            else:
                print_table(title, *self.table, self.timing)
        finally:  # a reader that has closed the pipe does not lose the row
            if flags["save"] and self.rows:
                self._save(flags["save"], body, flags["commit"])
            if flags["plot"] and self.rows:
                plot(flags["plot"], title, self.rows)
        if self.interrupted:
            raise Interrupted()

    def _save(self, folder: Path, body: dict[str, Any], commit: str | None) -> None:
        command = command_text(click.get_current_context().meta[COMMAND])
        kind = "cpu" if self.device == "cpu" else "gpu"
        about = self.model.stem.removeprefix(f"{self.bench}-")
        try:
            head = origin(self.bench, self.device, self.model, command, self.threads, commit)
            path = write_row(folder, f"{self.bench}-{about}-{kind}", head | body)
        except OSError as error:
            raise LuceError(f"{folder}: the result row cannot be written: {error}") from error
        click.echo(f"wrote {path}", err=True)
