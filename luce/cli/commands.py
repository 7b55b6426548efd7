"""Defines the command line: flags to a request, events to stdout. Usage errors exit 2, failures 1, Ctrl-C
130."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO

import click

import luce
from luce import native as _native
from luce.cli import stdout
from luce.cli.command import Commands, CtrlC, FilePath, Utf8, text_file
from luce.cli.keeping import KEEPING, compressed, idle_keeping
from luce.cli.options import (
    COPIES,
    DEVICE,
    DRAFT_DEVICE,
    DRAFTING,
    EXPERTS,
    HEAD,
    KV_TYPE,
    MODEL,
    QUIET,
    RUN,
    SLOTS,
    SPLIT,
    drafter_of,
    hf_option,
    idle_copies,
    idle_draft_device,
    idle_sampling,
    idle_slots,
    idle_split,
    idle_thinking,
    idle_threads,
    misplaced,
    model_path,
    options,
    options_of,
    sampling,
    sampling_of,
)
from luce.cli.sampling_options import CHOICES, grammar_of, penalties_of
from luce.cli.seeing import IMAGES, idle_images, marks, mmproj_of, picture_of, sight_of, with_images
from luce.cli.terminal import Display, devices_text, facts_text, printable, tensors_text
from luce.cli.writer import Writer
from luce.decode.request import Request
from luce.errors import ContextFull, Error, FileError, about
from luce.files.probe import probe
from luce.files.tokenizer import NFC_SHRINKS
from luce.model.defaults import with_room
from luce.model.loaded import Loaded, Settings
from luce.native.structs import MAX_U32
from luce.planning.memory import fits
from luce.planning.opened import Files
from luce.planning.plan import Options, require_supported


@click.group(
    cls=Commands,
    later={
        "bench": ("luce.bench.cli", "Measure decoding: every mode beside plain, in one run."),
        "chat": ("luce.cli.chat", "Talk with a model in the terminal."),
        "convert": ("luce.convert.cli", "Convert a checkpoint to GGUF."),
        "doctor": ("luce.doctor.cli", "Check on this machine what luce promises."),
        "serve": ("luce.server.cli", "Answer requests over HTTP."),
    },
    invoke_without_command=True,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option("--version", is_flag=True, help="Print the versions of luce and of its core.")
def cli(version: bool) -> None:
    """Exact speculative decoding of Qwen3.5 to 3.8 and Gemma 4 GGUF models on one machine.

    \b
    Examples:
      luce generate "def is_even(n):"
      luce generate --gguf model.gguf "def main("
      luce probe-gguf model.gguf

    \b
    This makes bash complete options; it is alike for zsh and fish:
      eval "$(_LUCE_COMPLETE=bash_source luce)"
    """
    if version:
        try:
            core = _native.default().version
        except Error as error:
            core = f"not available: {printable(str(error))}"
        stdout.put(f"luce {luce.__version__}, core {core}\n")
        click.get_current_context().exit()


@cli.command()
@click.argument("prompt", required=False, type=Utf8())
@click.option("-p", "--prompt", "named_prompt", type=Utf8(), help="Take PROMPT from this option.")
@click.option(
    "-f",
    "--file",
    "prompt_file",
    type=FilePath(path_type=Path),
    help="Take the prompt from this file, instead of stdin.",
)
@options(MODEL)
@hf_option
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(0, MAX_U32),
    default=512,
    show_default=True,
    help="Stop after so many tokens.",
)
@options(sampling(), CHOICES)
@click.option(
    "--ctx",
    type=click.IntRange(1, MAX_U32),
    help="Make room for so many tokens of prompt and text.  [default: 4096, or what the request needs]",
)
@options(RUN, DRAFT_DEVICE, SPLIT, EXPERTS, COPIES)
@click.option(
    "--chat/--raw",
    default=False,
    help="Put the prompt into the file's chat template, or take it as it is.  [default: raw]",
)
@click.option("--system", type=Utf8(), help="Begin the chat with this system message.")
@click.option(
    "--think/--no-think",
    default=None,
    help="Let the model think before it answers in a chat, or not.  [default: the template's]",
)
@click.option(
    "--special", is_flag=True, help="Take control tokens that PROMPT spells, like <|im_end|>, as such."
)
@options(IMAGES, KEEPING, DRAFTING)
@click.option("--stop", "stops", multiple=True, type=Utf8(), help="End before this text; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print one object at the end instead of the text.")
@click.option("--jsonl", is_flag=True, help="Print an object for each event as it happens, a line each.")
@options(QUIET)
@click.option(
    "--verbose", is_flag=True, help="Also print on stderr what was chosen and why, and the summary."
)
def generate(prompt: str | None, gguf: Path | None, **flags: Any) -> None:
    """Continue PROMPT: the text streams to stdout, everything else goes to stderr.

    What is piped to stdin is the prompt, or goes before PROMPT on a line of its own. Progress and the summary
    are shown on a terminal alone; what else stderr gets are warnings, which --quiet silences, and errors.

    \b
    Examples:
      luce generate "def is_even(n):"
      luce generate --gguf model.gguf "def main("
      luce generate --gguf model.gguf --chat "What is a KV cache?" --temp 0.7 --seed 1
      luce generate --gguf model.gguf --mtp-gamma 2 "def main("
      luce generate --gguf model.gguf --draft drafter.gguf "def main("
      luce generate --gguf model.gguf --spec lookup -f program.py
      luce generate -m model.gguf --mmproj mmproj.gguf --chat --image shot.png "What is wrong here?"
      luce generate -m model.gguf --chat "Name a city." --json-schema '{"type": "string"}'
      luce generate -m model.gguf --chat "Sing." --temp 1 --frequency-penalty 0.3 --logit-bias 198=-5
      cat notes.txt | luce generate --gguf model.gguf --chat "Summarise this." -n 200
      luce generate -m model.gguf -f notes.txt --jsonl | jq -j .text
    """
    if "" in flags["stops"]:
        raise click.BadParameter("a stop text is empty", param_hint="'--stop'")
    if prompt is not None and flags["named_prompt"] is not None:
        raise click.UsageError("PROMPT and --prompt: give one of them")
    prompt = prompt if prompt is not None else flags["named_prompt"]
    if problem := contradiction(flags):
        raise click.UsageError(problem)
    stdout.put("")  # This fails where stdout is closed, before there is work to lose.
    with ExitStack() as opened, Display(flags["quiet"], flags["verbose"]) as display:
        model = model_path(gguf, flags["hf"])
        flags["mmproj"] = mmproj_of(flags, flags["hf"])
        drafter = drafter_of(model, flags)
        where = flags["device"], drafter, flags["draft_device"]
        files = opened.enter_context(Files(model, flags["mtp_gguf"], *where))
        with about(files.file.path):
            require_supported(files.facts)
        for warning in files.warnings:
            display.warn(warning)
        trained = files.facts.context_length or MAX_U32
        most = flags["ctx"] or trained
        if flags["prefill_keep"] is not None:  # Only what is kept of it has to fit into --ctx.
            most = trained
        text = read_prompt(prompt, most * files.tokenizer.longest * NFC_SHRINKS, flags["prompt_file"])
        sight = opened.enter_context(seeing) if (seeing := sight_of(files, flags, display)) else None
        pictures = [picture_of(sight, path) for path in flags["images"]] if sight else []
        for path, picture in zip(flags["images"], pictures, strict=False):
            display.note(f"{path}: {picture.said}")
        display.spin("loading the model")
        ids = prompt_of(files, text, most, flags)
        placed = sight.placed(ids, marks(files.tokenizer)[1], pictures) if sight else None
        ids = fitting(placed.tokens if placed else ids, most, files, flags)
        if flags["prefill_keep"] is not None:
            display.spin("choosing what is read")
        if kept := compressed(files, ids, flags):
            ids = fitting(list(kept.of(ids)), flags["ctx"] or trained, files, flags)
        request = replace(make_request(files, ids, flags), compressed=kept)
        asked = with_room(options_of(flags, gaps=kept is not None), sight.at_once if sight else 0)
        n_prompt = len(request.prompt)
        how = Settings(asked), display.loading, n_prompt, request.max_tokens
        with sight.beside() if sight else nullcontext():
            loaded = opened.enter_context(Loaded(files, asked, *how))
        if sight and placed:
            sight.require_fit(loaded.engine.model)
            display.spin("reading images")
            request = replace(request, images=sight.shown(placed, lambda part: False))
            display.clear()
        with CtrlC() as ctrl_c:
            engine = loaded.engine
            display.explain(engine.plan, engine.info, engine.model.info.device)
            form = "json" if flags["as_json"] else "jsonl" if flags["jsonl"] else "text"
            writer = Writer(display, engine, asked, form, request.grammar is not None)
            running = loaded.run(request)
            ctrl_c.on_press = running.cancel
            if ctrl_c.pressed:
                running.cancel()
            for event in running:
                writer.on(event)
            writer.end(ctrl_c.pressed)


def contradiction(flags: Mapping[str, Any]) -> str | None:
    """Says what is wrong with flags that exclude each other, or of which one would be ignored."""
    if flags["system"] is not None and not flags["chat"]:
        return "--system needs --chat"
    if flags["think"] is not None and not flags["chat"]:
        return f"--{'think' if flags['think'] else 'no-think'} needs --chat"
    if flags["as_json"] and flags["jsonl"]:
        return "--json and --jsonl: give one of them"
    if flags["json_schema"] is not None and flags["grammar_file"] is not None:
        return "--json-schema and --grammar: give one of them"
    if flags["quiet"] and flags["verbose"]:
        return "--quiet and --verbose: give one of them"
    if flags["special"] and flags["chat"]:
        return "--special is for --raw: in a chat only the template spells control tokens"
    idle = idle_sampling(flags) or idle_threads(flags) or idle_copies(flags) or idle_split(flags)
    idle = idle or idle_draft_device(flags)
    return misplaced(flags) or idle or idle_images(flags, flags["hf"]) or idle_keeping(flags)


def read_prompt(prompt: str | None, most: int = sys.maxsize - 1, file: Path | None = None) -> str:
    """Returns PROMPT, what --file or else a piped stdin holds, or both: PROMPT last, on a line of its own.
    Raises ContextFull where there are more than `most` bytes, and then reads no more of them."""
    before = ""
    if file is not None:
        with text_file(file) as f:
            before = read_text(f, str(file), most)
        if prompt is None and not before:
            raise FileError(f"{file}: empty")
    elif sys.stdin is not None and not sys.stdin.isatty():
        try:
            before = read_text(sys.stdin.buffer, "stdin", most)
        except OSError as error:
            raise click.UsageError(f"stdin cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise click.UsageError("stdin is not UTF-8 text") from None
    if prompt is None and not before:
        raise click.UsageError("no prompt: give PROMPT, or pipe it to stdin")
    if prompt is None or not before:
        return before or prompt or ""
    return before + ("" if before.endswith("\n") else "\n") + prompt


def read_text(stream: BinaryIO, name: str, most: int) -> str:
    """Returns what a stream holds, at most so many bytes."""
    raw = bytearray()
    while len(raw) <= most and (piece := stream.read(1 << 16)):
        raw += piece
    if len(raw) > most:
        raise ContextFull(f"{name} gives more than {most:,} bytes: more tokens than the context holds")
    return raw.decode()


def prompt_of(files: Files, text: str, most: int, flags: Mapping[str, Any]) -> list[int]:
    """Returns the prompt's tokens, with a place for each image. A template spells out all special tokens itself, also
    the first one."""
    n_images = len(flags["images"])
    image = marks(files.tokenizer) if n_images else (0, 0, 0)
    if not flags["chat"]:
        ids = files.tokenizer.encode(text, special=flags["special"], add_bos=True, most=most)
        if n_images:
            from luce.images.sight import with_places

            ids = with_places(ids, n_images, image, files.tokenizer.bos_id)
    else:
        from luce.text.prompt import chat_template, prompt_ids  # Only a chat needs these.

        messages: list[dict[str, Any]] = [{"role": "user", "content": with_images(text, n_images)}]
        if flags["system"] is not None:
            messages.insert(0, {"role": "system", "content": flags["system"]})
        with about(files.file.path), closing(chat_template(files.file.kv)) as template:
            plain = [{**message, "content": text} if message["role"] == "user" else message for message in messages]
            if problem := idle_thinking(template, plain, flags["think"]):
                raise click.UsageError(problem)
            how = None, None, False, True, image
            ids = prompt_ids(template, files.tokenizer, messages, *how, enable_thinking=flags["think"])
    return ids


def fitting(ids: list[int], most: int, files: Files, flags: Mapping[str, Any]) -> list[int]:
    """Returns the prompt's tokens. Raises ContextFull where they are more than `most`."""
    if len(ids) > most:
        more = flags["ctx"] is not None and most < (files.facts.context_length or MAX_U32)
        remedy = "a larger --ctx has room for more" if more else "the model takes no more"
        raise ContextFull(f"a prompt of {len(ids)} tokens or more, a context of {most}: {remedy}")
    return ids


def make_request(files: Files, prompt: list[int], flags: Mapping[str, Any]) -> Request:
    """Returns the flags that describe one generation."""
    return Request(
        prompt=tuple(prompt),
        max_tokens=flags["max_tokens"],
        sampling=sampling_of(flags),
        stops=flags["stops"],
        penalties=penalties_of(flags, files.tokenizer.n_vocab),
        grammar=grammar_of(flags, files.tokenizer),
    )


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects.")
def devices(as_json: bool) -> None:
    """List what luce can run on; the first is what --device auto takes.

    These are the CPU and NVIDIA GPUs of compute capability 8.0 and later. Where there is no GPU, a line on
    stderr says why.

    \b
    Examples:
      luce devices
      luce devices --json | jq -r '.[].name'
    """
    core = _native.default()
    found = core.devices()
    if as_json:
        stdout.put_json([asdict(device) for device in found], indent=2)
    else:
        stdout.put(devices_text(found) + "\n")
    if core.missing_gpu:
        remedy = "; with nvcc and cuBLAS of CUDA, pip install . -C cmake.define.LUCE_CUDA=ON builds one with it"
        without = "built without CUDA" in core.missing_gpu
        click.echo(f"No GPU: {printable(core.missing_gpu)}{remedy if without else ''}", err=True)


@cli.command("probe-gguf")
@click.argument("path", type=FilePath(path_type=Path), required=False)
@hf_option
@click.option("--json", "as_json", is_flag=True, help="Print one object.")
@click.option("--tensors", is_flag=True, help="List every tensor too.")
@click.option(
    "--ctx", type=click.IntRange(1, MAX_U32), help="State the memory for a context of so many tokens."
)
@options(KV_TYPE, HEAD)
@click.option("--draft", type=FilePath(path_type=Path), help="Say what it takes with this DFlash drafter or assistant.")
@options(DEVICE, DRAFT_DEVICE, SPLIT, SLOTS)
def probe_gguf(path: Path | None, hf: str | None, as_json: bool, tensors: bool, **flags: Any) -> None:
    """Say what a GGUF holds, whether luce can run it, and whether it fits into the memory.

    \b
    Examples:
      luce probe-gguf model.gguf --ctx 32768
      luce probe-gguf model.gguf --json | jq .quantization
    """
    if path is None and hf is None:
        raise click.UsageError("Missing argument 'PATH': name a file, or one of the hub by --hf.")
    if wrong := idle_split(flags) or idle_draft_device(flags) or idle_slots(flags):
        raise click.UsageError(wrong)
    path = model_path(path, hf)
    with Files(path, flags["mtp_gguf"], flags["device"], flags["draft"], flags["draft_device"]) as files:
        with about(path):
            facts = probe(files.file, flags["ctx"], flags["device"] or "auto")
        if not facts.supported:
            refuse_what_runs(flags)
        asked = Options(
            ctx=flags["ctx"], kv_type=flags["kv_type"], split=flags["split"], expert_slots=flags["expert_slots"]
        )
        ways = fits(files, asked) if facts.supported else []
        if as_json:
            listed = {"tensors": [asdict(tensor) for tensor in files.file.tensors]} if tensors else {}
            stdout.put_json(facts.as_json() | {"fits": [asdict(way) for way in ways]} | listed, indent=2)
        else:
            stdout.put(facts_text(facts, ways) + "\n")
            if tensors:
                stdout.put("\n" + tensors_text(files.file.tensors) + "\n")


def refuse_what_runs(flags: Mapping[str, Any]) -> None:
    """Raises a usage error where a flag says how a model is to run, of a file that cannot be run."""
    for name in ("ctx", "kv_type", "mtp_gguf", "draft", "draft_device", "expert_slots"):
        if flags[name] is not None:
            flag = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{flag} is for a file that luce can run, which this one is not")


def main() -> None:
    """Runs the `luce` command."""
    stdout.prepare()
    cli(prog_name="luce")
