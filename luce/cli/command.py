"""Says what all commands share: failures as one line, option types, Ctrl-C, and the model in the box."""

from __future__ import annotations

import errno
import json
import math
import os
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

import click

from luce.cli import stdout
from luce.cli.terminal import printable
from luce.errors import Cancelled, Error, FileError, PipeClosed

COMMAND = "luce.cli.command"  # A context keeps the words of the command line under this key of its meta.
REMEDIES = {  # They say in words of the command line what helps, by Error.concerns.
    "tensor_split": "--split auto does",
    "nextn_head": "--mtp-gguf PATH names a file that has one",
    "drafter": "--draft PATH names a file that has one",
    "assistant": "--draft PATH names one",
    "draft_device": "leave --draft-device out",
    "not_a_head": "--draft PATH takes a drafter",
    "trunk": "--mtp-gguf PATH takes its head for the model of --gguf",
    "chat_template": "--raw takes the prompt as it is",
    "target": "--target names the model that it drafts for",
    "tokenizer": "--tokenizer DIR names the folder that has it",
    "f16": "--type BF16 or F32 holds them",
    "image_tokens": "--image-tokens N reduces images to N tokens",
    "existing_file": "--force replaces it",
    "problem_chat_template": "--class takes other prompts",
    "sandbox": "--unsafe-check runs the answers with limits alone, --no-check does not run them",
}
EXTRAS = ("grammar", "hub", "plot", "serve", "vision")  # What an error concerns may be one of pyproject.toml's extras.
# Writing to a stream fails with these.
WRITING = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class Interrupted(click.ClickException):
    """Ctrl-C was pressed: it gives one line and exit 130."""

    exit_code = 130

    def __init__(self) -> None:
        super().__init__("interrupted")


class ReaderLeft(click.ClickException):
    """Nobody reads stdout any more: the end, without a word, as a closed pipe ends other programs."""

    exit_code = 128 + signal.SIGPIPE

    def __init__(self) -> None:
        super().__init__("")

    def show(self, file: Any = None) -> None:
        pass


class Listed(click.Group):
    """Lists its commands in --help with their whole first sentences, of which click would cut the end."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(self.short_helps().items()))

    def short_helps(self) -> dict[str, str]:
        """Returns what is said of each command."""
        return {name: command.get_short_help_str(limit=200) for name, command in self.commands.items()}


class Commands(Listed):
    """Turns failures that luce reports into one line and exit 1, and an interrupt into one line and exit
    130. `later` names commands that are imported only when they are wanted: for each the module, in which it
    has its own name, and its help."""

    def __init__(self, *args: Any, later: Mapping[str, tuple[str, str]] | None = None, **options: Any):
        super().__init__(*args, **options)
        self._later = dict(later or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self._later])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self._later:
            command: click.Command = getattr(import_module(self._later[cmd_name][0]), cmd_name)
            return command
        return super().get_command(ctx, cmd_name)

    def short_helps(self) -> dict[str, str]:
        """Returns what is said of each command, for which nothing is imported."""
        return super().short_helps() | {name: short for name, (_, short) in self._later.items()}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[COMMAND] = ["luce", *args]
        with one_line():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with one_line():
            return super().invoke(ctx)


def lacks_memory(error: BaseException) -> bool:
    """Says whether a library or a thread lacked memory, which Python reports as an ImportError of the dynamic
    loader or as a RuntimeError."""
    lacks = ("failed to map segment", "cannot allocate memory", "can't start new thread")
    return isinstance(error, MemoryError) or any(why in str(error).lower() for why in lacks)


@contextmanager
def one_line() -> Iterator[None]:
    """Turns what fails within into one line and exit 1, and an interrupt into one line and exit 130."""
    try:
        try:
            yield
        except OSError as error:
            if error.filename is None and error.errno in WRITING:  # click writes --help by itself.
                raise stdout.failed(error) from error
            raise
        except click.exceptions.Exit as leaving:
            if leaving.exit_code == 0:
                stdout.put("")  # After --help: click says nothing where stdout is closed.
            raise
    except (Cancelled, KeyboardInterrupt):
        raise Interrupted() from None
    except PipeClosed as error:
        raise ReaderLeft() from error
    except Error as error:
        raise click.ClickException(printable(with_remedy(error))) from error
    except OSError as error:
        raise click.ClickException(printable(str(error))) from error
    except (MemoryError, RuntimeError, ImportError) as error:
        if not lacks_memory(error):
            raise
        raise click.ClickException("out of memory") from error


def with_remedy(error: Error) -> str:
    """Returns what a failure says, and what the command line has against it."""
    concerns = error.concerns or ""
    if concerns in EXTRAS:
        return f"{error}: {installing(concerns)}"
    remedy = REMEDIES.get(concerns)
    return f"{error}; {remedy}" if remedy else str(error)


def installing(extra: str) -> str:
    """Returns the pip command that adds an extra to this luce, from where it was installed: a clone, or else
    an index of packages."""
    from importlib.metadata import PackageNotFoundError, distribution

    source = "luce"
    try:
        origin = json.loads(distribution("luce").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    url = str(origin.get("url", ""))
    if "dir_info" in origin and url.startswith("file://"):
        source = unquote(urlsplit(url).path)
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}{shlex.quote(f'{source}[{extra}]')}"


@contextmanager
def text_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file of text, or a pipe: one that nobody writes to is empty, and is not waited for.
    What the system refuses, or is not UTF-8, is a FileError that names the file."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            os.set_blocking(file.fileno(), True)
            yield file
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: not UTF-8 text") from error


class FilePath(click.Path):
    """This is a path that is not empty, since an empty one would mean the working folder. Whether its file
    can be read, who opens it says: that is a failure, as with a file that is missing."""

    def __init__(self, *args: Any, **how: Any):
        super().__init__(*args, **{"readable": False} | how)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty.", param, ctx)
        return super().convert(value, param, ctx)


class Utf8(click.types.StringParamType):
    """This is text. It refuses bytes that are not UTF-8, of which Python makes halves of surrogate pairs."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(super().convert(value, param, ctx))
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail("it is not UTF-8 text.", param, ctx)
        return text


class Finite(click.FloatRange):
    """This is a FloatRange that also refuses nan and inf, which no comparison catches."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class CtrlC:
    """The first Ctrl-C asks to stop: it sets `pressed` and calls `on_press`. The second one is the ordinary
    interrupt. Where SIGINT is ignored (a background job), it stays so.

    Python runs the handler once the call of the core that runs has returned, which is after a step at most.
    What on_press does reaches the next call; who has no other call to make reads `pressed`.
    """

    def __init__(self) -> None:
        self.pressed = False
        self.on_press: Callable[[], object] = lambda: None
        self._before: Any = None

    def _press(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        signal.signal(signal.SIGINT, self._before)
        self.on_press()

    def __enter__(self) -> CtrlC:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)
