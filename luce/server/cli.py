"""`luce serve` turns options into models and a listening server."""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from luce import native as _native
from luce.cli.command import FilePath, Finite, Interrupted
from luce.cli.keeping import PREFILL_MODEL
from luce.cli.options import (
    COPIES,
    DRAFT_DEVICE,
    DRAFTING,
    EXPERTS,
    KV_TYPE,
    QUIET,
    REPLICAS,
    SPLIT,
    THREADS,
    drafter_of,
    fetched,
    given,
    hf_option,
    idle_copies,
    idle_draft_device,
    idle_split,
    idle_threads,
    misplaced,
    options,
    options_of,
)
from luce.cli.seeing import MMPROJ, ImagePrefix, idle_images, mmproj_of
from luce.cli.terminal import printable
from luce.data import BOX
from luce.errors import Error, UnsupportedError
from luce.model.defaults import CORE_GPU_CHUNK, CPU_CHUNK, GPU_CHUNK
from luce.model.loaded import Settings
from luce.native.structs import MAX_U32, PAGE
from luce.planning.opened import Files
from luce.server import LOOPBACK
from luce.server.models import Models

if TYPE_CHECKING:
    from luce.server.log import Log

GIB = 1 << 30
MAX_CHUNK = 4096  # luce.h bounds n_chunk so.
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]*", re.I)


def named_paths(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Path]:
    """Splits name=path. A path alone is named as its file."""
    found: dict[str, Path] = {}
    for value in values:
        name, equals, path = value.partition("=")
        if not equals or "/" in name:
            name, path = "", value
        if not path:
            raise click.BadParameter("the path is empty.", ctx, param)
        name = name or re.sub(r"-\d{5}-of-\d{5}$", "", Path(path).stem)
        if name in found:
            raise click.BadParameter(f"two models are named {name!r}: name them, name=path.", ctx, param)
        found[name] = Path(path)
    return found


def whole_pages(ctx: click.Context, param: click.Parameter, value: int | None) -> int | None:
    """Refuses a chunk that is no multiple of a page, since the core takes no other."""
    if value is not None and value % PAGE:
        near = value - value % PAGE
        raise click.BadParameter(f"{value} is no multiple of {PAGE}: {near} or {near + PAGE} is.", ctx, param)
    return value


def origins(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Refuses what no browser sends as an origin: one has no path."""
    for value in values:
        if not _ORIGIN.fullmatch(value):
            near = value.rstrip("/") if "://" in value else f"https://{value}"
            raise click.BadParameter(f"{value!r} is no origin, as {near} is.", ctx, param)
    return values


@click.command()
@click.option(
    "-m",
    "--gguf",
    "--model",
    "models",
    multiple=True,
    callback=named_paths,
    metavar="[NAME=]PATH",
    help="Serve this model; may be repeated: each of several is loaded at its first request.  [default: luce's own]",
)
@hf_option
@click.option("--alias", help="Give the only model this name.  [default: its file's]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Listen at this address.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="Listen at this port; 0 takes a free one.",
)
@click.option(
    "--parallel",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Run at most so many requests at once, on each replica.",
)
@click.option(
    "--ctx",
    type=click.IntRange(1, MAX_U32),
    help="Make room for so many tokens a request.  [default: what fits, at most 32768 and what was trained]",
)
@click.option(
    "--pages",
    type=click.IntRange(1, MAX_U32),
    help="Keep so many KV pages of 256 positions.  [default: enough for all contexts]",
)
@click.option(
    "--queue",
    type=click.IntRange(0, 1 << 20),
    default=64,
    show_default=True,
    help="Let at most so many requests wait; more are turned away.",
)
@click.option(
    "--chunk",
    type=click.IntRange(PAGE, MAX_CHUNK),
    callback=whole_pages,
    help=f"Read at most so many tokens of prompts in a step, a multiple of {PAGE}.  "
    f"[default: {CORE_GPU_CHUNK} on a GPU with memory to spare, {GPU_CHUNK} on others, {CPU_CHUNK} on a CPU, and more "
    "where an image of Gemma 4 takes more]",
)
@click.option(
    "--prefill-share",
    type=Finite(min=0, max=1, min_open=True),
    default=0.75,
    show_default=True,
    help="Let prompts take at most this part of the time from requests that are being answered; their steps are "
    "shorter then, where that does not make them slow.",
)
@click.option(
    "--checkpoints",
    type=click.IntRange(0, 1 << 16),
    default=16,
    show_default=True,
    help="Keep so many beginnings of prompts on the device; 0 keeps none anywhere.",
)
@click.option(
    "--cache-ram",
    type=Finite(min=0),
    metavar="GIB",
    help="Keep beginnings of prompts in so much host memory.  [default: a quarter of what is free]",
)
@click.option(
    "--cache-dir",
    type=FilePath(path_type=Path, file_okay=False),
    help="Keep beginnings of prompts in this folder too, where they outlive the server.",
)
@click.option(
    "--cache-disk",
    type=Finite(min=0),
    default=32.0,
    show_default=True,
    metavar="GIB",
    help="Let that folder hold so much for each model.",
)
@click.option(
    "--api-key", "keys", multiple=True, help="Answer only those who give this key; may be repeated."
)
@click.option(
    "--api-key-file",
    "key_file",
    type=FilePath(path_type=Path, dir_okay=False),
    help="Take such keys from this file, one a line. A list of this machine's processes shows what --api-key is given.",
)
@click.option("--no-auth", is_flag=True, help="Listen at an address of the network without a key.")
@click.option(
    "--origin",
    "origins",
    multiple=True,
    callback=origins,
    metavar="ORIGIN",
    help="Let web pages of this origin ask, beside those of this machine and of desktop apps; * stands for "
    "any letters but /, and alone for all pages; may be repeated.",
)
@click.option(
    "--shutdown-timeout",
    "drain",
    type=Finite(min=0),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Let requests end for so long after SIGTERM, while no others are taken.",
)
@options(REPLICAS, DRAFT_DEVICE, THREADS, KV_TYPE, SPLIT, EXPERTS, COPIES, MMPROJ, PREFILL_MODEL, DRAFTING)
@click.option(
    "--allow-image-urls",
    "image_urls",
    multiple=True,
    type=ImagePrefix(),
    metavar="PREFIX",
    help="Fetch images that requests name by addresses below this prefix, https://host/path or http, or read those of "
    "files below this folder; may be repeated.  [default: none; images come with requests]",
)
@click.option(
    "--log-json", is_flag=True, help="Print an object for each request on stderr, instead of a line."
)
@options(QUIET)
def serve(models: Mapping[str, Path], hf: str | None, **flags: Any) -> None:
    """Answer requests over HTTP: OpenAI's, Anthropic's and Ollama's APIs.

    A browser finds a page to chat with at the same address. A line for each request goes to stderr. Ctrl-C
    ends the server, and SIGTERM lets requests end before.

    \b
    Examples:
      luce serve
      luce serve --gguf model.gguf --ctx 65536 --parallel 8
      luce serve --gguf big=a.gguf --gguf small=b.gguf --cache-dir prompts
      luce serve --gguf model.gguf --device cuda:0 --device cuda:1
      luce serve --gguf big=a.gguf --gguf small=b.gguf --device big=cuda:0 --device small=cuda:1
      luce serve --host 0.0.0.0 --api-key KEY --origin https://chat.example.com
      luce serve --origin 'chrome-extension://*' --shutdown-timeout 60 --log-json
    """
    flags["keys"] += keys_of(flags["key_file"])
    if hf is not None:
        models = {**models, hf: fetched(hf)}
    models = models or {"box": BOX}
    if problem := contradiction(models, flags) or beside_one(models, flags, hf) or misplaced_replicas(models, flags):
        raise click.UsageError(problem)
    flags["mmproj"] = mmproj_of(flags, hf)
    if flags["alias"]:
        models = {flags["alias"]: next(iter(models.values()))}
    devices = {name: devices_for(name, flags) for name in models}
    try:  # --help does without these.
        from luce.server.access import Access
        from luce.server.app import make_app
        from luce.server.listener import Listener
        from luce.server.watch import Watch
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise UnsupportedError(f"luce serve needs the package {package}", concerns="serve") from error
    watch = Watch("" if flags["quiet"] else "json" if flags["log_json"] else "text")
    # The box's drafter fits no other model.
    drafter = drafter_of(next(iter(models.values())), flags) if len(models) == 1 else flags["draft"]
    served = Models(models, settings_of(flags, drafter, len(models) > 1), devices)
    for slot in served.slots.values():  # Those that are loaded later have to open too.
        with Files(slot.path, flags["mtp_gguf"], slot.devices[0]) as files, suppress(Error):
            for warning in () if flags["quiet"] else files.warnings:  # What fails here fails at loading too.
                click.echo(f"Warning: {printable(warning)}", err=True)
    hosts = (*LOOPBACK, flags["host"]) if flags["host"] in LOOPBACK else ()
    app = make_app(served, watch, Access(tuple(flags["keys"]), hosts, flags["origins"]))

    def say(urls: list[str]) -> None:
        if not flags["quiet"]:
            click.echo(f"luce serves {', '.join(models)} at {' '.join(urls)}", err=True)

    # The engine's thread waits for the others after each step, and so not for long.
    sys.setswitchinterval(0.001)
    with listening(flags["host"], flags["port"]) as opened, logging_to(watch.log):
        listener = Listener(app, served, watch.log, flags["drain"], say)
        listener.run([opened])
    if listener.interrupted:
        raise Interrupted


@contextmanager
def logging_to(log: Log) -> Iterator[None]:
    """Takes what the core and Python's libraries report into the log meanwhile."""
    from luce.server.log import FromPython

    handler, root = FromPython(log), logging.getLogger()
    root.addHandler(handler)
    _native.default().set_log(log.message)
    try:
        yield
    finally:
        _native.default().set_log(None)
        root.removeHandler(handler)


def listening(host: str, port: int) -> socket.socket:
    """Returns a socket that listens there, before anything is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        number = error.errno or 0  # A resolver's numbers are negative.
        said = os.strerror(number) if number > 0 else str(error.strerror or error).partition(" (while ")[0]
        remedy = "; --port N takes another" if error.errno == errno.EADDRINUSE else ""
        raise Error(f"cannot listen at {host} port {port}: {said}{remedy}") from error


def keys_of(path: Path | None) -> tuple[str, ...]:
    """Returns the keys that a file has, one a line."""
    if path is None:
        return ()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise Error(f"cannot read the keys of {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Error(f"{path} is not UTF-8 text: --api-key-file takes one key a line") from error
    if keys := tuple(line.strip() for line in lines if line.strip()):
        return keys
    raise click.UsageError(f"{path} has no key: --api-key-file takes one a line")


def contradiction(models: Mapping[str, Path], flags: Mapping[str, Any]) -> str | None:
    """Says what is wrong with flags that exclude each other, or of which one would be ignored."""
    if flags["alias"] == "":
        return "--alias is empty"
    if flags["alias"] and len(models) > 1:
        return "--alias names one model: give names as --gguf NAME=PATH"
    if flags["keys"] and flags["no_auth"]:
        return f"{'--api-key-file' if flags['key_file'] else '--api-key'} and --no-auth: give one of them"
    if "" in flags["keys"]:
        return "--api-key is empty"
    if flags["host"] not in LOOPBACK and not flags["keys"] and not flags["no_auth"]:
        return f"--host {flags['host']} lets others in: --api-key or --api-key-file asks for a key, --no-auth does not"
    if flags["host"] in LOOPBACK and flags["no_auth"]:
        return f"--no-auth is for an address of the network: --host {flags['host']} lets no others in"
    if given("cache_disk") and flags["cache_dir"] is None:
        return "--cache-disk bounds the folder of --cache-dir: give both"
    if flags["quiet"] and flags["log_json"]:
        return "--quiet and --log-json: give one of them"
    if flags["checkpoints"] == 0:
        for name in ("cache_ram", "cache_dir"):
            if flags[name] is not None:
                return f"--{name.replace('_', '-')} is for beginnings of prompts: --checkpoints 0 keeps none"
    return misplaced(flags)


def misplaced_replicas(models: Mapping[str, Path], flags: Mapping[str, Any]) -> str | None:
    """Says the same of flags that say where models and their replicas run."""
    names = [flags["alias"]] if flags["alias"] else list(models)
    if unknown := sorted(set(flags["devices"]) - {"", *names}):
        return f"--device {unknown[0]}= names no model that is served: {', '.join(names)}"
    if "" in flags["devices"] and all(name in flags["devices"] for name in names):
        return "--device without a name is for models that have none of their own: each has"
    each = [{**flags, "device": device} for name in names for device in devices_for(name, flags)]
    if flags["draft_device"] is not None and len(each) > 1:
        return "--draft-device is of one model on one set of devices: serve that one alone, without replicas"
    found = (idle_threads(one) or idle_copies(one) or idle_split(one) or idle_draft_device(one) for one in each)
    return next(filter(None, found), None)


def devices_for(name: str, flags: Mapping[str, Any]) -> tuple[str | None, ...]:
    """Returns on which devices a model has replicas: its own, those of all models, or one that is chosen."""
    return flags["devices"].get(name) or flags["devices"].get("") or (None,)


def beside_one(models: Mapping[str, Path], flags: Mapping[str, Any], hf: str | None) -> str | None:
    """Says the same of what is opened beside a model: towers and scorers."""
    if flags["mmproj"] is not None and len(models) > 1:
        return "--mmproj is the tower of one model: serve that one alone"
    if flags["prefill_model"] is not None and flags["mmproj"] is not None:
        return "--mmproj and --prefill-model: give one of them, since a prompt with images is read whole"
    if flags["prefill_model"] is not None and len(models) > 1:
        return "--prefill-model reads for one model: serve that one alone"
    if flags["image_urls"] and flags["mmproj"] is None:
        return "--allow-image-urls needs --mmproj, the file of the model's vision tower"
    return idle_images(flags, hf)


def settings_of(flags: Mapping[str, Any], drafter: Path | None = None, others: bool = False) -> Settings:
    """Returns how the flags say that models are served, with this drafter for each of them. `others` says that
    there are several."""
    asked = options_of(
        flags,
        others,
        sequences=flags["parallel"],
        checkpoints=flags["checkpoints"],
        pages=flags["pages"],
        chunk=flags["chunk"],
        gaps=flags["prefill_model"] is not None,
    )
    ram = flags["cache_ram"]
    return Settings(
        options=asked,
        head=flags["mtp_gguf"],
        drafter=drafter,
        draft_device=flags["draft_device"],
        mmproj=flags["mmproj"],
        image_tokens=flags["image_tokens"],
        image_urls=flags["image_urls"],
        scorer=flags["prefill_model"],
        host_bytes=None if ram is None else int(ram * GIB),
        cache_dir=flags["cache_dir"],
        disk_bytes=int(flags["cache_disk"] * GIB),
        max_waiting=flags["queue"],
        prefill_share=flags["prefill_share"],
    )
