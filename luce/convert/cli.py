"""`luce convert` turns a checkpoint's folder, or a GGUF, into a GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from luce.cli import stdout
from luce.cli.command import FilePath
from luce.cli.options import QUIET, options
from luce.cli.terminal import printable
from luce.convert import dflash, tower
from luce.convert import gemma4 as gemma
from luce.convert import qwen35 as model
from luce.convert.gguf_output import Written
from luce.convert.hf_config import Section, read_config
from luce.convert.hf_gemma4 import is_gemma
from luce.convert.model_file import Say
from luce.convert.requantize import requantize
from luce.convert.weight_types import DEFAULT, MIXES
from luce.errors import Error, FileError
from luce.planning import cpus

DRAFTERS = ("DFlash", "DSpark", "Domino")  # Names of architectures of block drafters have one of these.


@click.command()
@click.argument("source", metavar="CHECKPOINT", type=FilePath(path_type=Path))
@click.argument("out", metavar="OUT.gguf", type=FilePath(path_type=Path))
@click.option(
    "--type",
    "kind",
    type=click.Choice(list(MIXES)),
    default=DEFAULT,
    show_default=True,
    help="Store the matrices in this type.",
)
@click.option("--no-mtp", is_flag=True, help="Write the trunk alone, without its NextN head.")
@click.option("--mtp-only", is_flag=True, help="Write the NextN head alone, for --mtp-gguf.")
@click.option("--mmproj", is_flag=True, help="Write the vision tower alone, for --mmproj, in F32, F16, BF16 or Q8_0.")
@click.option(
    "--tokenizer", type=FilePath(path_type=Path), metavar="DIR", help="Read tokenizer.json from this folder."
)
@click.option(
    "--target",
    type=FilePath(path_type=Path),
    metavar="GGUF|DIR",
    help="Take the tokenizer of this model, which the drafter drafts for.",
)
@click.option("--name", help="Write this name of the model into the file.  [default: the folder's]")
@click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    help="Use so many CPU threads.  [default: one for each usable CPU]",
)
@click.option("--force", is_flag=True, help="Replace OUT.gguf if it is there.")
@options(QUIET)
def convert(source: Path, out: Path, kind: str, quiet: bool, **flags: Any) -> None:
    """Convert CHECKPOINT to OUT.gguf, a new file.

    CHECKPOINT is the folder of a Qwen3.5/3.6/3.8 or Gemma 4 model, of a Gemma 4 assistant or of a drafter (DFlash,
    DFlash2 or DSpark, as their authors or speculators publish them): config.json, *.safetensors and, but for a
    drafter, the tokenizer; sampling is kept as generation_config.json has it. Or it is the GGUF of one, whose
    matrices get another type. The file is written whole, read back and compared, or not at all.

    \b
    Examples:
      luce convert Qwen3.5-9B qwen3.5-9b-q4_k_m.gguf --type Q4_K_M
      luce convert Qwen3.5-9B head.gguf --type Q8_0 --mtp-only
      luce convert Qwen3.5-9B mmproj.gguf --type F16 --mmproj
      luce convert Qwen3.6-27B-DFlash drafter.gguf --target qwen3.6-27b.gguf
      luce convert Qwen3.8-27B-DFlash2 drafter.gguf --target Qwen3.8-27B --type Q4_K_M
      luce convert gemma-4-31B-it gemma-4-31b-it-q4_k_m.gguf --type Q4_K_M
      luce convert gemma-4-31B-it-assistant assistant.gguf
      luce convert model-bf16.gguf model-q4_k_m.gguf --type Q4_K_M
    """
    flags["threads"] = flags["threads"] or cpus.usable()

    def say(text: str) -> None:
        if not quiet:
            click.echo(printable(text), err=True)

    try:
        written = _written(source, out, kind, flags, say)
    except OSError as error:
        raise Error(f"{error.filename or out}: {error.strerror or error}") from error
    stdout.put(f"wrote {written}\n")


def _written(source: Path, out: Path, kind: str, flags: dict[str, Any], say: Say) -> Written:
    if flags["no_mtp"] and flags["mtp_only"]:
        raise click.UsageError("--no-mtp and --mtp-only: give one of them")
    if flags["mmproj"] and kind not in tower.TYPES:
        raise click.UsageError(f"--mmproj: a tower is written as {', '.join(tower.TYPES)}, not as --type {kind}")
    if not source.exists():
        raise FileError(f"{source}: No such file or directory")
    if is_gguf(source):
        _refuse(flags, "a GGUF keeps its keys", "no_mtp", "mtp_only", "mmproj", "tokenizer", "target", "name")
        return requantize(source, out, kind, flags["threads"], say, flags["force"])
    if is_drafter(source):
        _refuse(flags, "this is a drafter", "no_mtp", "mtp_only", "mmproj", "tokenizer")
        given = flags["target"], flags["name"], flags["threads"]
        return dflash.convert(source, out, kind, *given, say, flags["force"])
    _refuse(flags, "this is no drafter", "target")
    if flags["mmproj"]:
        _refuse(flags, "--mmproj writes a vision tower alone", "no_mtp", "mtp_only", "tokenizer")
        return tower.convert(source, out, kind, flags["name"], flags["threads"], say, flags["force"])
    given = flags["tokenizer"], flags["name"], flags["threads"]
    if is_gemma(read_config(source)):
        _refuse(flags, "a Gemma 4 model has no NextN head: its assistant is a checkpoint", "no_mtp", "mtp_only")
        return gemma.convert(source, out, kind, *given, say, flags["force"])
    part = "trunk" if flags["no_mtp"] else "mtp" if flags["mtp_only"] else "all"
    return model.convert(source, out, kind, part, *given, say, flags["force"])


def _refuse(flags: dict[str, Any], why: str, *names: str) -> None:
    for name in names:
        if flags[name]:
            raise click.UsageError(f"{why}: --{name.replace('_', '-')} does not go with it")


def is_gguf(path: Path) -> bool:
    """Says whether a file begins as a GGUF does."""
    if not path.is_file():
        return False
    with path.open("rb") as f:
        return f.read(4) == b"GGUF"


def is_drafter(path: Path) -> bool:
    """Says whether config.json is a block drafter's."""
    folder = path.parent if path.is_file() else path
    if not (folder / "config.json").exists():
        return False
    config: Section = read_config(folder)
    named = any(kind in str(name) for name in config.get("architectures", list, []) for kind in DRAFTERS)
    keys = ("dflash_config", "target_layer_ids", "aux_hidden_state_layer_ids", "speculators_model_type")
    return named or any(key in config for key in keys)
