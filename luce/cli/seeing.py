"""Has the options of commands that show images to a model, and what opens them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import click

from luce.cli.command import FilePath, text_file
from luce.cli.terminal import Display
from luce.errors import ArgumentError, about
from luce.files.tokenizer import Tokenizer
from luce.images.fetching import Allowed
from luce.images.opening import MAX_BYTES
from luce.images.pixels import Picture
from luce.images.sight import FEWEST_TOKENS, MOST_TOKENS, Sight, marks_of
from luce.planning import cpus
from luce.planning.opened import Files


class ProjectorPath(FilePath):
    """The path of a file, or auto."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == AUTO else super().convert(value, param, ctx)


AUTO = "auto"  # The vision tower beside the hub's model.
MMPROJ = (
    click.option("--mmproj", type=ProjectorPath(path_type=Path), metavar="FILE",
                 help="See images with the vision tower of this GGUF, of Qwen3.5 to 3.8 or Gemma 4, or with --hf of "
                 "the one beside the model: auto. It needs luce[vision]."),
    click.option("--image-tokens", type=click.IntRange(FEWEST_TOKENS, MOST_TOKENS), metavar="N",
                 help=f"Reduce images that take more tokens than N, {FEWEST_TOKENS} to {MOST_TOKENS}; for Gemma 4 the "
                 "largest budget of 70 to 1120 within N.  [default: none is reduced, and one that is too large for "
                 "memory is refused; for Gemma 4 280]"),
)  # fmt: skip
IMAGES = (
    *MMPROJ,
    click.option("--image", "images", multiple=True, type=FilePath(path_type=Path), metavar="FILE",
                 help="Show this PNG, JPEG, WebP or GIF before the prompt, or with --special where the prompt spells "
                 "<|image_pad|>, or Gemma 4 <|image|>; may be repeated."),
)  # fmt: skip


class ImagePrefix(click.ParamType):
    """A prefix of the addresses of images, or a folder."""

    name = "prefix"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            Allowed([value])
        except ArgumentError as error:
            self.fail(str(error), param, ctx)
        return value


def idle_images(flags: Mapping[str, Any], hf: str | None) -> str | None:
    """Says what is wrong with the options of images, where one would be ignored or cannot be met. `hf` is the place of
    the model in the hub, where it is there."""
    if flags["mmproj"] == AUTO and hf is None:
        return "--mmproj auto is the vision tower beside the model of --hf: give both, or name the tower's file"
    for name, given in (("--image", flags.get("images")), ("--image-tokens", flags["image_tokens"])):
        if given and flags["mmproj"] is None:
            return f"{name} needs --mmproj, the file of the model's vision tower"
    if flags["mmproj"] is not None and "images" in flags and not flags["images"]:
        return "--mmproj needs --image"
    return None


def mmproj_of(flags: Mapping[str, Any], hf: str | None) -> Path | None:
    """Returns the file of the tower: the one that was named, or the hub's beside the model."""
    if flags["mmproj"] != AUTO or hf is None:
        return cast("Path | None", flags["mmproj"])
    from luce.files.hub import fetch_projector

    return fetch_projector(hf, warn=lambda line: click.echo(f"Warning: {line}", err=True))


def sight_of(files: Files, flags: Mapping[str, Any], display: Display) -> Sight | None:
    """Opens the tower of `mmproj`, and warns where its name is of another model."""
    if flags["mmproj"] is None:
        return None
    threads = flags["threads"] or min(cpus.usable(), 16)
    sight = Sight(flags["mmproj"], threads, files.device or "auto", flags["image_tokens"], display.warn)
    if warning := sight.misnamed(files.facts.name):
        display.warn(warning)
    return sight


def picture_of(sight: Sight, path: Path) -> Picture:
    """Opens an image. What the system refuses, or is no image, is an error that names the file."""
    with text_file(path) as file:
        data = file.read(MAX_BYTES + 1)
    with about(path):
        return sight.picture(data)


def marks(tokenizer: Tokenizer) -> tuple[int, int, int]:
    """Returns the tokens that begin an image, stand for a row of it, and end it; UnsupportedError where it has none."""
    return marks_of(tokenizer.control.get)


def with_images(text: str, n_images: int) -> str | list[dict[str, str]]:
    """Returns the content of a message with images before its text."""
    return [*[{"type": "image"}] * n_images, {"type": "text", "text": text}] if n_images else text
