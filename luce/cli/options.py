"""Has the options that several commands share, each declared once, and what is wrong with those that would be
ignored."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from luce import native as _native
from luce.cli.command import FilePath, Finite
from luce.data import BOX, BOX_DRAFTER
from luce.errors import Error
from luce.files.hub import fetch
from luce.native.files import is_assistant
from luce.native.structs import Sampling
from luce.planning.plan import DEFAULT_BUDGET, DEFAULT_GAMMA, MAX_BUDGET, MAX_GAMMA, SPECS, Options
from luce.planning.split import Split

if TYPE_CHECKING:  # Only a chat needs it.
    from luce.text.prompt import Template

Command = Callable[..., Any]
Option = Callable[[Command], Command]
KV_TYPES = ("f16", "q8_0", "q4_0", "f32")


def options(*groups: tuple[Option, ...]) -> Option:
    """Adds the options of all groups to a command, in this order."""
    each = [option for group in groups for option in group]
    return lambda command: reduce(lambda made, option: option(made), reversed(each), command)


# ---- which model, and where

hf_option = click.option(
    "--hf",
    metavar="REPO[:TYPE|FILE]",
    help="Take the GGUF from this repository of the hub, of a type like Q4_K_M or by its name; it is "
    "downloaded once. This needs luce[hub].",
)


def fetched(hf: str) -> Path:
    """Returns the hub's file, with a warning on stderr where only the cache has it."""
    return fetch(hf, warn=lambda line: click.echo(f"Warning: {line}", err=True))


def model_path(gguf: Path | None, hf: str | None) -> Path:
    """Returns the model that was asked for, be it by its path or by its place in the hub; else the one in
    the box."""
    if gguf is not None and hf is not None:
        raise click.UsageError("the path of a model and --hf: give one of them")
    return fetched(hf) if hf is not None else gguf or BOX


def device_name(ctx: click.Context, param: click.Parameter, value: str) -> str | None:
    """Checks a device's name: auto, which becomes None, cpu, cuda or cuda:N, or several of a kind."""
    one = r"(cpu|cuda:\d{1,4})"
    if not re.fullmatch(rf"auto|cuda|{one}(,{one})*", value):
        raise click.BadParameter(f"{value!r} is not auto, cpu, cuda, cuda:N or several: cuda:0,cuda:1.", ctx, param)
    return None if value == "auto" else value


def one_device(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Checks the name of one device."""
    if value is not None and not re.fullmatch(r"cpu|cuda:\d{1,4}", value):
        raise click.BadParameter(f"{value!r} is not cpu or cuda:N.", ctx, param)
    return value


def replica_devices(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> dict[str, tuple[str | None, ...]]:
    """Returns by the names of models where each has replicas; "" stands for those that were not named."""
    found: dict[str, tuple[str | None, ...]] = {}
    for value in values:
        name, _, device = value.rpartition("=")
        found[name] = (*found.get(name, ()), device_name(ctx, param, device))
    for devices in found.values():
        if wrong := unlike(devices):
            raise click.BadParameter(wrong, ctx, param)
    return found


def unlike(devices: Sequence[str | None]) -> str | None:
    """Says what is wrong with the devices of replicas: each has its own GPUs, and all are of a kind, since a request
    has the same tokens on any."""
    if len(devices) < 2:
        return None
    if any(device in (None, "cuda") for device in devices):
        return "replicas have devices of their own: name each GPU by its number, cuda:0."
    names = [name for device in devices for name in (device or "").split(",")]
    twice = sorted({name for name in names if name != "cpu" and names.count(name) > 1})
    if twice:
        return f"{twice[0]} has two replicas of one model: give each its own GPU."
    if len({name.partition(":")[0] for name in names}) > 1:
        return "a CPU and a GPU may have different tokens, and replicas the same: name devices of one kind."
    return None


def shares(ctx: click.Context, param: click.Parameter, value: str | None) -> Split | None:
    """Checks shares of layers, 3,1; auto becomes none at all."""
    if value is None or value == "auto":
        return None if value is None else ()
    if value == "tensor":
        return "tensor"
    if not re.fullmatch(r"[1-9]\d{0,3}(,[1-9]\d{0,3})+", value):
        raise click.BadParameter(f"{value!r} is neither auto, tensor nor shares of the layers like 3,1.", ctx, param)
    return tuple(int(share) for share in value.split(","))


def number_or_auto(of: str, digits: int) -> Callable[..., int | str | None]:
    """Returns what checks a number of something, of at most so many digits, or auto."""

    def checked(ctx: click.Context, param: click.Parameter, value: str | None) -> int | str | None:
        if value is None or value == "auto":
            return value
        if not re.fullmatch(rf"\d{{1,{digits}}}", value):
            raise click.BadParameter(f"{value!r} is neither a number of {of} nor auto.", ctx, param)
        return int(value)

    return checked


MODEL = (
    click.option("-m", "--gguf", "--model", "gguf", type=FilePath(path_type=Path),
                 help="Run the model of this GGUF; of a split one, name the first part.  "
                 "[default: luce's own, which writes Python]"),
)  # fmt: skip
HEAD = (
    click.option("--mtp-gguf", type=FilePath(path_type=Path),
                 help="Draft with the NextN (MTP) head in this GGUF, or with the assistant that it is: a small model "
                 "made to draft for --gguf's.  [default: the head in the model's own file, where there is one]"),
)  # fmt: skip
DEVICE = (
    click.option("--device", callback=device_name, default="auto", show_default=True,
                 metavar="auto|cpu|cuda[:N]", help="Take this device; auto takes CUDA if there is any. With several, "
                 "cuda:0,cuda:1, each has consecutive layers of the model."),
)  # fmt: skip
DRAFT_DEVICE = (
    click.option("--draft-device", callback=one_device, metavar="cpu|cuda:N",
                 help="Keep what drafts (--draft, or a NextN head) on this device, which has no layers of the model. "
                 "The output goes along, since drafts are made and checked by it; an assistant stays with the layers.  "
                 "[default: the last of --device]"),
)  # fmt: skip
SPLIT = (
    click.option("--split", callback=shares, metavar="auto|A,B|tensor",
                 help="Share the layers out among several devices, which without --device are all GPUs: 3,1 gives the "
                 "first three of four, and numbers that add up to the layers are layers; auto goes by what is free. "
                 "tensor gives each device an equal part of every matrix, so that all work on each token at once "
                 "(--device cuda:0,cuda:1 --split tensor): tokens are the same in every mode, and may be others than "
                 "on one device.  [default: auto with several devices]"),
)  # fmt: skip
KV_TYPE = (
    click.option(
        "--kv-type", type=click.Choice(KV_TYPES), help="Keep the KV cache in this type.  [default: f16]"
    ),
)
THREADS = (
    click.option("--threads", type=click.IntRange(1, 512),
                 help="Use so many CPU threads; a model on a GPU uses them for --cpu-experts alone.  "
                 "[default: one for each usable CPU, to 16]"),
)  # fmt: skip
QUIET = (click.option("--quiet", is_flag=True, help="Print nothing on stderr but errors."),)
SLOTS = (
    click.option("--expert-slots", callback=number_or_auto("experts", 5), metavar="N|auto",
                 help="Keep all experts in host memory, where the GPU reads them, and on the GPU those N of each "
                 "layer that were used most of late: they move between requests. auto takes as many as there is room "
                 "for, and leaves host memory alone where all have. No token depends on it."),
)  # fmt: skip
EXPERTS = (
    *SLOTS,
    click.option("--cpu-experts", callback=number_or_auto("layers", 4), metavar="N|auto",
                 help="Keep the experts of the first N layers in host memory, where the CPU multiplies them, "
                 "and the rest of the model on the GPU; auto keeps those that the GPU has no room for. One N "
                 "has the same tokens in every mode; another N may have others."),
)  # fmt: skip
COPIES = (
    click.option("--prompt-copies", type=click.Choice(("auto", "off")),
                 help="Keep F16 copies of the layers' matrices on a GPU, with which prompts are read faster; auto "
                 "makes as many as fit into half of what is left of its memory. No token depends on it.  "
                 "[default: auto; off where several models share its memory]"),
)  # fmt: skip
RUN = (*DEVICE, *THREADS, *KV_TYPE)
REPLICAS = (
    click.option("--device", "devices", multiple=True, callback=replica_devices, metavar="[NAME=]auto|cpu|cuda[:N]",
                 help="Take this device; with several, cuda:0,cuda:1, each has consecutive layers of the model. May be "
                 "repeated: each then has a replica, the whole model with an engine of its own. NAME= says it of one "
                 "model.  [default: auto]"),
)  # fmt: skip


def idle_split(flags: Mapping[str, Any]) -> str | None:
    """Says what is wrong with --split where one device was named, or another number of them."""
    split, device = flags["split"], flags["device"]
    if split is None or device in (None, "cuda"):  # All GPUs are meant.
        return None
    n = len(device.split(","))
    if n == 1:
        return f"--split shares a model out among several devices, and --device {device} is one"
    if split == "tensor":
        return None
    return f"--split has {len(split)} shares, and --device names {n} devices" if len(split) not in (0, n) else None


def idle_draft_device(flags: Mapping[str, Any]) -> str | None:
    """Says what is wrong with --draft-device where nothing drafts on a device, or where the model has it too."""
    device = flags["draft_device"]
    if device is None:
        return None
    if (spec := flags.get("spec")) in ("off", "lookup"):
        return f"--draft-device is where drafters lie, --spec {spec} has none: give one of them"
    if device != "cpu" and device in (flags["device"] or "").split(","):
        return f"--draft-device {device} is one of --device {flags['device']}, where layers lie: leave it out"
    return None


def idle_copies(flags: Mapping[str, Any]) -> str | None:
    """Says what is wrong with --prompt-copies where the model runs on the CPU."""
    if flags["prompt_copies"] is None or not _device_of(flags).startswith("cpu"):
        return None
    return "--prompt-copies is for a model on a GPU: the CPU multiplies matrices as they are"


def _device_of(flags: Mapping[str, Any]) -> str:
    return flags["device"] or next(iter(_native.default().devices())).name


def idle_slots(flags: Mapping[str, Any]) -> str | None:
    """Says what is wrong with --expert-slots where the model runs on the CPU."""
    if flags.get("expert_slots") is None or not _device_of(flags).startswith("cpu"):
        return None
    return "--expert-slots is for a model on a GPU: on the CPU all experts are in host memory"


def idle_threads(flags: Mapping[str, Any]) -> str | None:
    """Says what is wrong with --threads where the model runs on a GPU, and with --cpu-experts where it does
    not, and of --expert-slots likewise, which do not go together."""
    experts, slots = flags.get("cpu_experts") is not None, flags.get("expert_slots") is not None
    if experts and slots:
        return "--cpu-experts has the CPU multiply experts, --expert-slots the GPU: give one of them"
    if wrong := idle_slots(flags):
        return wrong
    if flags["threads"] is None and not experts:
        return None
    device = _device_of(flags)
    if experts:
        why = "--cpu-experts is for a model on a GPU: on the CPU all experts are in host memory"
        return why if device.startswith("cpu") else None
    if device.startswith("cpu"):
        return None
    return f"--threads are the CPU's, and {device} uses none: --device cpu does"


# ---- sampling


def sampling(temp: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> tuple[Option, ...]:
    """Returns the options of sampling, with these defaults."""
    return (
        click.option("--temp", type=Finite(min=0), default=temp, show_default=True,
                     help="Sample at this temperature; 0 is greedy."),
        click.option("--top-k", type=click.IntRange(0, 2**31 - 1), default=top_k, show_default=True,
                     help="Sample from the k most probable tokens; 0 is off. It needs --temp above 0."),
        click.option("--top-p", type=Finite(min=0, max=1, min_open=True), default=top_p, show_default=True,
                     help="Sample from the fewest tokens that reach p; 1 is off. It needs --temp above 0."),
        click.option("--min-p", type=Finite(min=0, max=1, max_open=True), default=0.0, show_default=True,
                     help="Sample from tokens at least p times as probable as the first. It needs --temp "
                     "above 0."),
        click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=0, show_default=True,
                     help="Sample with this seed: it gives the same tokens on every run, and in every mode. "
                          "Of GPUs, this was tried on Hopper's."),
    )  # fmt: skip


def warmest(flags: Mapping[str, Any]) -> float:
    """Returns the temperature, or the highest of several."""
    return float(max(flags["temps"]) if "temps" in flags else flags["temp"])


def sampling_of(flags: Mapping[str, Any]) -> Sampling:
    """Returns how tokens are sampled. Greedy decoding has no use for the defaults of the other options."""
    if warmest(flags) == 0:
        return Sampling()
    return Sampling(warmest(flags), flags["top_k"], flags["top_p"], flags["min_p"], flags["seed"])


def given(name: str) -> bool:
    """Says whether the running command was given this option, be it with the value of its default."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def idle_sampling(flags: Mapping[str, Any]) -> str | None:
    """Says what is wrong with options of sampling that were given where nothing is sampled."""
    for name in ("top_k", "top_p", "min_p", "seed"):
        if warmest(flags) == 0 and given(name):
            return f"--{name.replace('_', '-')} needs --temp above 0: greedy decoding ignores it"
    return None


# ---- thinking


def idle_thinking(
    template: Template, messages: Sequence[Mapping[str, Any]], think: bool | None
) -> str | None:
    """Says what is wrong with --think and --no-think where the template makes the same prompt of these
    messages with either as without. What it fails at is for the prompt's own rendering to say."""
    if think is None:
        return None
    try:
        prompts = {template.render(messages, enable_thinking=each) for each in (None, True, False)}
    except Error:
        return None
    flag = "--think" if think else "--no-think"
    return None if len(prompts) > 1 else f"{flag} sets enable_thinking, which the chat template does not read"


# ---- drafting

DRAFTING = (
    click.option("--spec", type=click.Choice(SPECS),
                 help="Draft tokens and verify them together: with the NextN head or an assistant (mtp), with a DFlash "
                 "drafter (dflash), with what followed earlier in the text (lookup), never (off), or as it "
                 "pays (auto). The tokens stay the same.  [default: auto]"),
    click.option("--mtp-gamma", type=click.IntRange(0, MAX_GAMMA), metavar="N",
                 help=f"Draft N tokens a round with the NextN head or an assistant, 0 to {MAX_GAMMA}; with --spec auto "
                 f"at most N.  [default: {DEFAULT_GAMMA} with --spec mtp]"),
    *HEAD,
    click.option("--draft", type=FilePath(path_type=Path),
                 help="Draft with the DFlash, DFlash2 or DSpark drafter of this GGUF, or with the assistant that it "
                 "is; alone it means --spec dflash, or mtp of an assistant."),
    click.option("--tree-budget", type=click.IntRange(1, MAX_BUDGET), metavar="N",
                 help=f"Verify at most N candidates a round, 1 to {MAX_BUDGET}.  [default: {DEFAULT_BUDGET} "
                 "with --spec lookup]"),
)  # fmt: skip

# Each flag of drafting does this, and it is of use in these modes of --spec.
_OF_DRAFTING = {
    "mtp_gamma": ("drafts with a NextN head or an assistant", ("auto", "mtp")),
    "mtp_gguf": ("names a NextN head or an assistant to draft with", ("auto", "mtp")),
    "draft": ("names a DFlash drafter", ("auto", "dflash")),
    "assistant": ("names an assistant, which drafts chains", ("auto", "mtp")),  # With --draft, too.
    "tree_budget": ("bounds the candidates of a tree or a lookup", ("auto", "dflash", "lookup")),
}
_SPECS = {
    "off": "drafts nothing",
    "mtp": "drafts chains of a NextN head or an assistant",
    "dflash": "drafts with a DFlash drafter",
    "lookup": "drafts from the text",
}


def misplaced(flags: Mapping[str, Any]) -> str | None:
    """Says what is wrong with flags of drafting that the mode would ignore. A chain's length alone asks for
    mtp, and a drafter alone for dflash, or an assistant for mtp."""
    chains = names_assistant(flags["draft"])
    if chains and flags["mtp_gguf"] is not None:
        return "--draft names an assistant, and --mtp-gguf what drafts in its place: give one of them"
    implied = {"mtp_gamma": "mtp", "draft": "mtp" if chains else "dflash"}
    asking = "spec" if flags["spec"] else next((name for name in implied if flags[name] is not None), None)
    if asking is None:
        return None
    spec = flags["spec"] if asking == "spec" else implied[asking]
    for name in ("mtp_gamma", "mtp_gguf", "draft", "tree_budget"):
        does, specs = _OF_DRAFTING["assistant" if chains and name == "draft" else name]
        if flags[name] is not None and spec not in specs:
            flag = "--" + name.replace("_", "-")
            of = f"--spec {spec}" if asking == "spec" else f"--{asking.replace('_', '-')} without --spec"
            remedy = "give one of them" if asking == "spec" else "--spec auto takes both"
            return f"{flag} {does}, {of} {_SPECS[spec]}: {remedy}"
    return None


def names_assistant(path: Path | None) -> bool:
    """Says whether a file is an assistant. Who opens it says what is wrong with it."""
    if path is None:
        return False
    try:
        with _native.File(path) as file:
            return is_assistant(file.kv.get("general.architecture"))
    except Error:
        return False


def drafter_of(model: Path, flags: Mapping[str, Any]) -> Path | None:
    """Returns the file of the drafter: the one that was named, or the box's own where the box is to
    draft with one."""
    if flags["draft"] is not None or model != BOX:
        return flags["draft"]
    spec = flags["spec"] or ("auto" if flags["mtp_gamma"] is None else "mtp")
    return BOX_DRAFTER if spec in ("auto", "dflash") else None


def options_of(flags: Mapping[str, Any], others: bool = False, **more: Any) -> Options:
    """Returns what the flags ask of an engine, and what `more` does. `others` says that other models want memory."""
    of_drafter = None if flags["draft"] is None else "mtp" if names_assistant(flags["draft"]) else "dflash"
    copies = flags["prompt_copies"]
    return Options(
        ctx=flags["ctx"],
        kv_type=flags["kv_type"],
        threads=flags["threads"],
        cpu_experts=flags["cpu_experts"],
        expert_slots=flags["expert_slots"],
        copies=copies == "auto" if copies else not others and flags["prefill_model"] is None,
        split=flags["split"],
        spec=flags["spec"] or of_drafter,
        gamma=flags["mtp_gamma"],
        budget=flags["tree_budget"],
        **more,
    )
