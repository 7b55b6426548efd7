"""Declares the options that the commands of `luce bench` share."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import click

from luce.bench import output
from luce.bench.run import NAMES, Mode, parse_modes
from luce.command import KV_TYPES, MAX_U32, FilePath, Finite, device_name, without_temperature


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


Command = Callable[..., Any]
FORMS = ("json", "csv", "md")
MODEL_OPTIONS = (
    click.option("--gguf", type=FilePath(path_type=Path), help="The model.  [default: luce's own]"),
    click.option("--mtp-gguf", type=FilePath(path_type=Path), help="Take the NextN head from this GGUF."),
)
DRAFT_OPTION = (
    click.option("--draft", type=FilePath(path_type=Path), help="Modes dflash and auto use this drafter."),
)
DRAFTS_OPTION = (
    click.option("--draft", "drafters", type=FilePath(path_type=Path), multiple=True,
                 help="Modes dflash and auto use this drafter; of several, each in turn."),
)  # fmt: skip
RUN_OPTIONS = (
    click.option("--device", callback=device_name, default="auto", show_default=True,
                 metavar="auto|cpu|cuda[:N]", help="Where to run."),
    click.option("--threads", type=click.IntRange(1, 1024),
                 help="CPU threads.  [default: one for each usable CPU, to 16]"),
    click.option("--kv-type", type=click.Choice(KV_TYPES),
                 help="Type of the KV cache.  [default: f16]"),
)  # fmt: skip
MODE_OPTIONS = (
    click.option("--modes", callback=modes_of, default="plain,mtp,auto", show_default=True,
                 help=f"Modes to measure, in turn: {NAMES}."),
    click.option("-n", "--max-tokens", type=click.IntRange(1, MAX_U32), default=256, show_default=True,
                 help="New tokens of each generation, at most."),
)  # fmt: skip
SAMPLING_OPTIONS = (
    click.option("--temp", type=Finite(min=0), default=0.0, show_default=True,
                 help="Sampling temperature; 0 is greedy."),
    click.option("--top-k", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True,
                 help="Keep the k likeliest tokens; 0 keeps all."),
    click.option("--top-p", type=Finite(min=0, max=1, min_open=True), default=1.0, show_default=True,
                 help="Keep the likeliest tokens that reach this share."),
    click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=0, show_default=True,
                 help="The same seed samples the same tokens; on the CPU in every mode."),
)  # fmt: skip
OUTPUT_OPTIONS = (
    click.option("--json", is_flag=True, help="Print one object."),
    click.option("--csv", is_flag=True, help="Print CSV, a line for each mode."),
    click.option("--md", is_flag=True, help="Print a Markdown table."),
    click.option("--save", type=FilePath(path_type=Path, file_okay=False),
                 help="Also write a result row (date, commit, device, model hash ...) to this folder."),
    click.option("--commit", help="Commit for the row.  [default: the checkout's]"),
    click.option("--plot", type=FilePath(path_type=Path, dir_okay=False), help="Also draw this PNG."),
    click.option("--quiet", is_flag=True, help="Nothing on stderr but errors."),
)  # fmt: skip


def require(flags: dict[str, Any]) -> None:
    """Raises UsageError where a flag would be ignored, and LuceError where what is to be written cannot be.
    It is called before anything runs."""
    if len(forms := [f"--{form}" for form in FORMS if flags[form]]) > 1:
        raise click.UsageError(f"{' and '.join(forms)}: give one of them")
    if flags["commit"] is not None and flags["save"] is None:
        raise click.UsageError("--commit is of the row that --save writes: give both")
    if flags["plot"] is not None and flags["plot"].suffix != ".png":
        raise click.BadParameter(f"{flags['plot'].name!r} does not end with .png", param_hint="'--plot'")
    if "modes" in flags and flags.get("mtp_gguf") and all(mode.spec == "off" for mode in flags["modes"]):
        raise click.UsageError("--mtp-gguf names a NextN head to draft with, and no mode drafts")
    drafting = {mode.spec for mode in flags.get("modes", ())} & {"dflash", "auto"}
    drafter = flags.get("draft") or flags.get("drafters")
    if "modes" in flags and drafter and not drafting:
        raise click.UsageError("--draft names a DFlash drafter, and no mode is dflash or auto")
    if "seed" in flags and (problem := without_temperature(flags["temp"], "top_k", "top_p", "seed")):
        raise click.UsageError(problem)
    output.require(flags["save"], flags["plot"])


def options(*groups: tuple[Callable[[Command], Command], ...]) -> Callable[[Command], Command]:
    """Adds the options of all groups, in this order."""
    each = [option for group in groups for option in group]
    return lambda command: reduce(lambda made, option: option(made), reversed(each), command)


def rounds_option(default: int) -> tuple[Callable[[Command], Command], ...]:
    text = "Times that every prompt is run in every mode."
    return (
        click.option("--rounds", type=click.IntRange(1, 1000), default=default, show_default=True, help=text),
    )
