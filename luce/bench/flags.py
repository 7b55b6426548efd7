"""Declares the options that the commands of `luce bench` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from luce.bench import output
from luce.bench.acceptance import Acceptance, parse
from luce.bench.run import NAMES, Mode, parse_modes
from luce.cli.command import FilePath, Finite
from luce.cli.options import (
    HEAD,
    MODEL,
    QUIET,
    Option,
    idle_draft_device,
    idle_sampling,
    idle_split,
    idle_threads,
    names_assistant,
    sampling,
)
from luce.native.structs import MAX_U32


def modes_of(ctx: click.Context, param: click.Parameter, value: str) -> list[Mode]:
    try:
        return parse_modes(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def numbers(low: int, high: int) -> Callable[[click.Context, click.Parameter, str | None], list[int] | None]:
    """Parses "1,2,4k" as numbers within [low, high]; k is 1024."""

    def parse(ctx: click.Context, param: click.Parameter, value: str | None) -> list[int] | None:
        if value is None:
            return None
        found = []
        for part in value.split(","):
            digits, k = part.strip().removesuffix("k"), part.strip().endswith("k")
            number = int(digits) * (1024 if k else 1) if digits.isdecimal() and len(digits) <= 10 else -1
            if not low <= number <= high:
                raise click.BadParameter(
                    f"{part.strip()!r} is not a number from {low} to {high}.", ctx, param
                )
            found.append(number)
        return list(dict.fromkeys(found))

    return parse


def temperatures(ctx: click.Context, param: click.Parameter, value: str) -> list[float]:
    """Parses "0,0.7,1" as temperatures."""
    return list(dict.fromkeys(Finite(min=0).convert(part.strip(), param, ctx) for part in value.split(",")))


class Chances(click.ParamType):
    """Parses how often drafts are right, as acceptance.parse() does for a kind of drafter."""

    name = "chances"

    def __init__(self, kind: str, most: int):
        self.kind, self.most = kind, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Acceptance:
        if isinstance(value, Acceptance):
            return value
        try:
            return parse(value, self.kind, self.most)
        except ValueError as error:
            self.fail(str(error), param, ctx)


FORMS = ("json", "csv", "md")
MODEL_OPTIONS = (*MODEL, *HEAD)
DRAFT_OPTION = (
    click.option("--draft", type=FilePath(path_type=Path),
                 help="Draft with this DFlash drafter in the modes dflash and auto, or with this assistant in mtp and "
                 "auto."),
)  # fmt: skip
DRAFTS_OPTION = (
    click.option("--draft", "drafters", type=FilePath(path_type=Path), multiple=True,
                 help="Draft with this DFlash drafter in the modes dflash and auto, or with this assistant in mtp and "
                 "auto; of several, with each in turn."),
)  # fmt: skip
MODE_OPTIONS = (
    click.option("--modes", callback=modes_of, default="plain,mtp,auto", show_default=True,
                 help=f"Measure these modes, in turn: {NAMES}."),
    click.option("-n", "--max-tokens", type=click.IntRange(1, MAX_U32), default=256, show_default=True,
                 help="Stop each generation after so many tokens."),
)  # fmt: skip
TEMPERATURES: tuple[Option, ...] = (
    click.option("--temp", "temps", callback=temperatures, default="0", show_default=True,
                 help="Sample at this temperature, and of several (0,0.7,1) at each in turn; 0 is greedy."),
    *sampling()[1:],
)  # fmt: skip
OUTPUT_OPTIONS = (
    click.option("--json", is_flag=True, help="Print one object."),
    click.option("--csv", is_flag=True, help="Print CSV, a line for each row of the table."),
    click.option("--md", is_flag=True, help="Print a Markdown table."),
    click.option("--save", type=FilePath(path_type=Path, file_okay=False),
                 help="Also write a result row (date, commit, device, model hash ...) to this folder."),
    click.option("--commit", help="Write this commit into the row.  [default: the checkout's]"),
    *QUIET,
)  # fmt: skip
PLOT = (click.option("--plot", type=FilePath(path_type=Path, dir_okay=False), help="Also draw this PNG."),)


def require(flags: dict[str, Any]) -> None:
    """Raises UsageError where a flag would be ignored, and Error where what is to be written cannot be.
    It is called before anything runs."""
    if len(forms := [f"--{form}" for form in FORMS if flags[form]]) > 1:
        raise click.UsageError(f"{' and '.join(forms)}: give one of them")
    if flags["commit"] is not None and flags["save"] is None:
        raise click.UsageError("--commit is of the row that --save writes: give both")
    if flags["plot"] is not None and flags["plot"].suffix != ".png":
        raise click.BadParameter(f"{flags['plot'].name!r} does not end with .png", param_hint="'--plot'")
    if "modes" in flags and flags.get("mtp_gguf") and all(mode.spec == "off" for mode in flags["modes"]):
        raise click.UsageError("--mtp-gguf names a NextN head or an assistant to draft with, and no mode drafts")
    specs = {mode.spec for mode in flags.get("modes", ())}
    drafters = flags.get("drafters") or ((flags["draft"],) if flags.get("draft") else ())
    for drafter in drafters if "modes" in flags else ():
        chains = names_assistant(drafter)
        own = "mtp" if chains else "dflash"
        if not specs & {own, "auto"}:
            what = "an assistant" if chains else "a DFlash drafter"
            raise click.UsageError(f"--draft names {what}, and no mode is {own} or auto")
    if flags.get("draft_device") and "modes" in flags and not specs & {"mtp", "dflash", "auto"}:
        raise click.UsageError("--draft-device is where drafters lie, and no mode has one")
    if problem := idle_split(flags) or (idle_draft_device(flags) if "draft_device" in flags else None):
        raise click.UsageError(problem)
    if problem := (idle_sampling(flags) if "top_k" in flags else None) or idle_threads(flags):
        raise click.UsageError(problem)
    output.require(flags["save"], flags["plot"])


def rounds_option(default: int) -> tuple[Option, ...]:
    text = "Run every prompt so many times in every mode."
    return (
        click.option("--rounds", type=click.IntRange(1, 1000), default=default, show_default=True, help=text),
    )
