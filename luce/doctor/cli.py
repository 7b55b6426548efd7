"""The command `luce doctor`."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import click

from luce import native as _native
from luce.cli import stdout
from luce.cli.command import CtrlC, FilePath
from luce.cli.options import DEVICE, HEAD, MODEL, QUIET, options
from luce.cli.terminal import Display, print_verdict
from luce.data import BOX, BOX_DRAFTER
from luce.doctor import machine
from luce.doctor.checks import Check, as_json, conclusion, lines
from luce.doctor.run import Amount, Progress, about, examine, plans_of
from luce.errors import Error
from luce.planning.opened import Files
from luce.planning.plan import require_supported


@click.command()
@options(MODEL, HEAD)
@click.option("--draft", type=FilePath(path_type=Path),
              help="Also draft with the drafter of this GGUF: a DFlash drafter, or an assistant.")  # fmt: skip
@options(DEVICE)
@click.option("--json", "as_object", is_flag=True, help="Print the whole report as one object.")
@options(QUIET)
def doctor(
    gguf: Path | None, mtp_gguf: Path | None, draft: Path | None, device: str | None, as_object: bool, quiet: bool
) -> None:
    """Check on this machine what luce promises, in ten lines; exit 1 where a promise does not hold.

    It looks at the CPU, the GPU, its driver and clocks; measures the memory's bandwidth; holds the kernels to known
    answers; compares a model's tokens with those of plain decoding, in steps of many rows, with drafts, of
    requests together and behind kept prompts; and times steps. That takes less than two minutes: of a slow
    model less is compared. What --json prints is welcome in a bug report.

    \b
    Examples:
      luce doctor
      luce doctor --gguf model.gguf --draft drafter.gguf
      luce doctor --gguf model.gguf --json > report.json
    """
    if device is not None and "," in device:
        raise click.UsageError(f"--device {device}: doctor looks at one device at a time")
    stdout.put("")  # This fails where stdout is closed, before there is work to lose.
    began, found = time.perf_counter(), list[Check]()
    with ExitStack() as opened, Display(quiet) as display, CtrlC() as ctrl_c:
        try:
            core = _native.default()
        except Error as error:
            finish([machine.failed(error)], as_object, about(None, None, None, began))
            return
        where = core.device(device)
        drafter = BOX_DRAFTER if draft is None and gguf is None else draft
        files = opened.enter_context(Files(gguf or BOX, mtp_gguf, where.name, drafter))
        require_supported(files.facts)
        for warning in files.warnings:
            display.warn(warning)
        amount = Amount()
        plans_of(files, amount)  # What keeps the files from running is an error, not a check.
        progress = Progress(display.spin, lambda: ctrl_c.pressed)
        for check in examine(core, files, where, progress, amount):
            ended = found and found[-1].group != check.group
            if ended and not as_object:
                show(found, display)
            found.append(check)
        if not as_object:
            show(found, display)
        display.clear()
        report = about(core, files, where, began)
    finish(found, as_object, report)


def show(found: list[Check], display: Display) -> None:
    """Prints the line of the group that ended."""
    line = lines(found)[-1]
    display.clear()
    print_verdict(line.verdict, line.group, line.text)


def finish(found: list[Check], as_object: bool, report: dict[str, object]) -> None:
    """Prints the verdict, or the whole report, and exits with 1 where something is bad."""
    bad = any(check.verdict == "bad" for check in found)
    if as_object:
        stdout.put_json(as_json(found, report), indent=1)
    else:
        print_verdict("bad" if bad else "ok", "verdict", conclusion(found))
    if bad:
        raise click.exceptions.Exit(1)
