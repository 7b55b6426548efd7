"""`luce bench serve` turns options into rows of figures."""

from __future__ import annotations

from typing import Any

import click

from luce import native as _native
from luce.bench.flags import DRAFT_OPTION, MODEL_OPTIONS, OUTPUT_OPTIONS, numbers, require
from luce.bench.report import Measured, Report
from luce.bench.serve import (
    TIMING,
    Client,
    Row,
    conversation,
    first_tokens,
    luce_server,
    streams,
    table,
    turn_lengths,
    turn_of,
)
from luce.cli.options import DRAFT_DEVICE, RUN, SPLIT, given, names_assistant, options
from luce.cli.terminal import Display
from luce.data import BOX
from luce.errors import ArgumentError, about
from luce.files.tokenizer import Tokenizer
from luce.native.structs import MAX_U32
from luce.planning.opened import Files
from luce.planning.plan import SPECS, Options, require_supported
from luce.planning.split import names_of

LEAST = 100  # A conversation's last prompt has at least so many tokens.


@click.command("serve")
@click.option(
    "--modes",
    default="off,auto",
    show_default=True,
    help="Serve with each of these values of --spec, in turn.",
)
@click.option(
    "--lengths",
    callback=numbers(1, MAX_U32),
    default="32,128,512,2k,8k,30k",
    show_default=True,
    help="Await the first token of prompts of these lengths; if none are given, of those for which the model's context "
    "has room.",
)
@click.option(
    "--more",
    callback=numbers(1, MAX_U32),
    default="64",
    show_default=True,
    help="Await it again with so many new tokens behind each of these prompts, in turn.",
)
@click.option(
    "--streams",
    "counts",
    callback=numbers(1, 64),
    default="1,2,4,8,16",
    show_default=True,
    help="Send so many requests beside each other.",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(1, MAX_U32),
    default=128,
    show_default=True,
    help="Give each stream a prompt of so many tokens.",
)
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(2, MAX_U32),
    default=128,
    show_default=True,
    help="Ask for so many new tokens in each stream.",
)
@click.option(
    "--turns",
    type=click.IntRange(0, 1000),
    default=20,
    show_default=True,
    help="Hold a conversation of so many turns; 0 holds none.",
)
@click.option(
    "--conversation",
    "length",
    type=click.IntRange(LEAST, MAX_U32),
    default=30000,
    show_default=True,
    help="Let its last prompt have so many tokens; if no number is given, fewer where the model's context has less "
    "room.",
)
@options(MODEL_OPTIONS, DRAFT_OPTION, RUN, SPLIT, DRAFT_DEVICE, OUTPUT_OPTIONS)
def serve_bench(**flags: Any) -> None:
    """Measure first tokens, streams beside each other, and a conversation, over HTTP (needs luce[serve]).

    \b
    Examples:
      luce bench serve --lengths 512,1k --conversation 1500
      luce bench serve --lengths 30k --more 16,64,256,1k --streams 1,16
      luce bench serve --gguf model.gguf --modes off,mtp,auto --save results
    """
    modes = flags["modes"].split(",")
    if not set(modes) <= set(SPECS):
        raise click.BadParameter(f"of {', '.join(SPECS)}.", param_hint="'--modes'")
    of_use = _of_use(flags)
    for name, those in of_use.items():
        if flags[name] and not set(those) & set(modes):
            what = "a device" if name == "draft_device" else "a file"
            said = f"--{name.replace('_', '-')} names {what} that only {' and '.join(those)} draft with"
            raise click.UsageError(f"{said}, and --modes has none of them")
    if given("length") and not flags["turns"]:
        raise click.UsageError("--conversation is a length: --turns 0 has no conversation")
    require({name: value for name, value in flags.items() if name != "modes"} | {"plot": None})
    model = flags["gguf"] or BOX
    with Files(model, flags["mtp_gguf"], flags["device"], flags["draft"]) as files:
        with about(model):
            require_supported(files.facts)
        tokenizer, trained = files.tokenizer, files.facts.context_length or MAX_U32
        chosen = files.plan(Options(threads=flags["threads"], split=flags["split"]))
        device = chosen.device if len(names_of(chosen.device)) > 1 else _native.default().device(files.device).name
    needed = _needed(flags, trained)
    if flags["turns"] and min(turn_lengths(flags["turns"], flags["length"])) < (least := len(turn_of(tokenizer))):
        said = f"a conversation of {flags['length']} tokens is too short for {flags['turns']} turns of {least} or more"
        raise ArgumentError(f"{said}; give fewer --turns, or more by --conversation")
    rows: list[Row] = []
    with Display(flags["quiet"]) as display:
        display.spin("measuring")
        firsts = (1 + len(flags["more"])) * len(flags["lengths"])
        total = len(modes) * (firsts + len(flags["counts"]) + (flags["turns"] and flags["turns"] + 1))
        measured = Measured(_measure(flags, modes, needed, tokenizer))
        for row in measured:
            rows.append(row)
            display.count("serve", len(rows), total)
    listed = [row.as_json() for row in rows]
    report = Report("serve", model, device, chosen.threads, "rows", listed, table(listed), TIMING,
                    {name: flags[name] for name in ("prompt_tokens", "max_tokens", "turns")},
                    failure=measured.failure)  # fmt: skip
    report.put(flags | {"plot": None}, lambda *_: None)


def _needed(flags: dict[str, Any], trained: int) -> int:
    """Returns how many tokens the context has to have, and leaves out of lengths that were not given what a model that
    was trained for so many has no room for. Raises ArgumentError where those that were given need more."""
    behind = max(256, *flags["more"])  # What follows a prompt has at most so many tokens.
    if not given("lengths"):
        flags["lengths"] = [n for n in flags["lengths"] if n + behind <= trained] or flags["lengths"][:1]
    if not given("length"):
        flags["length"] = max(LEAST, min(flags["length"], trained - behind))
    longest = max(*flags["lengths"], flags["length"] if flags["turns"] else 0)
    stream = flags["prompt_tokens"] + flags["max_tokens"]
    for n, said in ((longest + behind, "--lengths, --more and --conversation"),
                    (stream, "--prompt-tokens and --max-tokens")):  # fmt: skip
        if n > trained:
            asked = f"prompts with what follows have up to {n} tokens, and the model was trained for {trained}"
            raise ArgumentError(f"{asked}; give less by {said}")
    return max(longest + behind, stream)


def _of_use(flags: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Returns which modes read the files that the flags name, or have drafters."""
    own = "mtp" if names_assistant(flags["draft"]) else "dflash"
    return {"draft_device": ("mtp", "dflash", "auto"), "mtp_gguf": ("mtp", "auto"), "draft": (own, "auto")}


def _measure(flags: dict[str, Any], modes: list[str], ctx: int, tokenizer: Tokenizer) -> Any:
    of_use = _of_use(flags)
    for mode in modes:
        words = ["--spec", mode, "--ctx", str(ctx), "--parallel", str(max(flags["counts"]))]
        for name in ("device", "draft_device", "threads", "kv_type", "mtp_gguf", "draft"):
            if flags[name] is not None and mode in of_use.get(name, (mode,)):
                words += [f"--{name.replace('_', '-')}", str(flags[name])]
        if (split := flags["split"]) is not None:
            words += ["--split", split if split == "tensor" else ",".join(map(str, split)) or "auto"]
        with luce_server(flags["gguf"] or BOX, *words) as server:
            client = Client(server.url, tokenizer)
            client.complete(client.tokens(32), 16)  # This warms up.
            yield from first_tokens(client, mode, flags["lengths"], flags["more"])
            yield from streams(client, mode, flags["counts"], flags["prompt_tokens"], flags["max_tokens"])
            if flags["turns"]:
                yield from conversation(client, mode, flags["turns"], flags["length"], 64)
