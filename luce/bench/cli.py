"""The commands of `luce bench` turn options into cases and modes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from luce.bench import batch, output, problems, sandbox, sweep
from luce.bench.acceptance import Acceptance, acceptance, parse
from luce.bench.compare import Stopped, compare, files_of, loading, no_more, settings_of
from luce.bench.flags import (
    DRAFT_OPTION,
    DRAFTS_OPTION,
    MODE_OPTIONS,
    MODEL_OPTIONS,
    OUTPUT_OPTIONS,
    PLOT,
    TEMPERATURES,
    Chances,
    numbers,
    require,
    rounds_option,
)
from luce.bench.oracle_drafter import ACCEPT, make_drafter, sharpness
from luce.bench.oracle_gemma4 import SHAPES as ASSISTED
from luce.bench.oracle_gemma4 import make_assistant
from luce.bench.oracle_gemma4 import make_oracle as make_assisted
from luce.bench.oracle_model import SHAPES, TYPES, Rule, make_oracle, wrong_tokens
from luce.bench.report import Measured, Report
from luce.bench.run import Case, Mode, Record
from luce.bench.serve_cli import serve_bench
from luce.bench.summary import summarise
from luce.cli.command import CtrlC, FilePath, Finite, Listed
from luce.cli.options import DRAFT_DEVICE, EXPERTS, HEAD, MODEL, RUN, SPLIT, given, options, sampling
from luce.cli.terminal import Display
from luce.data import BOX
from luce.decode.engine import Engine
from luce.errors import ArgumentError, Error
from luce.native.structs import MAX_U32
from luce.planning.opened import Files
from luce.planning.plan import MAX_BUDGET, MAX_GAMMA
from luce.speculate.prices import MAX_ROWS

SWEEP_CONTEXTS = (0, 4096, 32768)  # Of these, the contexts are taken that the model was trained for.
SWEEP_GAMMAS = [1, 2, 3, 4, 8]


@click.group(cls=Listed, no_args_is_help=True)
def bench() -> None:
    """Measure decoding: every mode beside plain, in one run.

    \b
    Examples:
      luce bench humaneval --modes plain,mtp,auto --limit 20
      luce bench prompts builtin --gguf model.gguf --modes plain,mtp:3 --md
      luce bench oracle --shape 27b --accept 0.8 --save results
      luce bench sweep --rows 1,2,4,8,16,32 --ctx 0,1k
    """


bench.add_command(serve_bench)


# ---- the commands


@bench.command()
@options(MODEL_OPTIONS, DRAFTS_OPTION, MODE_OPTIONS)
@click.option("--limit", type=click.IntRange(1, 164), help="Run only the first so many problems.")
@click.option("--unsafe-check", is_flag=True, help="Check answers without a sandbox, with the limits alone.")
@click.option("--no-check", is_flag=True, help="Do not run the answers.")
@options(TEMPERATURES, rounds_option(1), RUN, SPLIT, DRAFT_DEVICE, OUTPUT_OPTIONS, PLOT)
def humaneval(limit: int | None, unsafe_check: bool, no_check: bool, **flags: Any) -> None:
    """Run the 164 HumanEval problems: speed, acceptance, pass@1, and answers that equal plain's.

    The model's answers are run, each in a sandbox of its own, which bubblewrap (bwrap) makes.

    \b
    Examples:
      luce bench humaneval --limit 20
      luce bench humaneval --gguf model.gguf --modes plain,mtp:2,auto --save results
    """
    if unsafe_check and no_check:
        raise click.UsageError("--unsafe-check runs the answers, --no-check does not: give one of them")
    require(flags)
    listed = problems.humaneval()[:limit]
    if not (unsafe_check or no_check) and (missing := sandbox.available()):
        raise Error(f"the answers cannot be checked: {missing}", concerns="sandbox")
    by_id = {problem.id: problem for problem in listed}

    def check(records: list[Record], display: Display, stopped: Stopped) -> dict[str, Any]:
        verdicts: dict[str, bool] = {}
        passed = {}
        answers = [r for r in records if r.round == 0]
        for done, record in enumerate(answers):
            if stopped():  # What was measured is worth more than the answers that are left.
                break
            program = problems.program(by_id[record.case.id], problems.completion_text(record.text))
            if program not in verdicts:
                verdicts[program] = sandbox.check(program, namespaces=not unsafe_check).passed
            passed[record.mode, record.case.id] = verdicts[program]
            display.count("checking answers", done + 1, len(answers))
        return {"passed": passed}

    def cases(files: Files) -> list[Case]:
        return [Case(p.id, problems.tokens_of(p, files), problems.STOPS) for p in listed]

    flags |= {"bench": "humaneval"}
    after = no_more if no_check else check
    extra = {"sandbox": None if no_check else "limits" if unsafe_check else "bubblewrap"}
    compare(flags, flags["gguf"] or BOX, cases, after, extra).put(flags, output.plot_modes)


@bench.command()
@click.argument("source", metavar="[FILE|builtin]", default="builtin", type=FilePath())
@options(MODEL_OPTIONS, DRAFTS_OPTION, MODE_OPTIONS)
@click.option("--class", "group", metavar="NAME", help="Run only the prompts of this class.")
@click.option("--limit", type=click.IntRange(1), help="Run only the first so many prompts.")
@options(TEMPERATURES, rounds_option(3), RUN, SPLIT, DRAFT_DEVICE, OUTPUT_OPTIONS, PLOT)
def prompts(source: str, group: str | None, limit: int | None, **flags: Any) -> None:
    """Run the prompts of a file (JSONL: prompt, and if wanted id, class, chat), or else the built-in ones.

    The built-in ones are of four classes: code, narrative, chat, and edit, in which a file that was given is
    returned with a small change.

    \b
    Examples:
      luce bench prompts builtin --class code --limit 2
      luce bench prompts mine.jsonl --gguf model.gguf --modes plain,mtp:3 --csv
      luce bench prompts --draft f16.gguf --draft q4.gguf --modes plain,dflash:22
      luce bench prompts --draft drafter.gguf --modes plain,dflash,dflash:22,dflash:63 --temp 0,0.7,1,1.5
    """
    listed = problems.builtin() if source == "builtin" else problems.from_jsonl(Path(source))
    chosen = [p for p in listed if group in (None, p.cls)][:limit]
    if not chosen:
        there = ", ".join(sorted({p.cls for p in listed}))
        raise ArgumentError(f"no prompt is of class {group!r}: there are {there}")

    def cases(files: Files) -> list[Case]:
        return [Case(p.id, problems.tokens_of(p, files), (), p.cls, p.where) for p in chosen]

    def by_class(records: list[Record], display: Display, stopped: Stopped) -> dict[str, Any]:
        names = [mode.name for mode in flags["modes"]]
        for cls in dict.fromkeys(r.case.group for r in records):
            of_class = [r for r in records if r.case.group == cls]
            classes[cls] = [row.as_json() for row in summarise(of_class, names)]
        return {}

    classes: dict[str, Any] = {}
    flags |= {"bench": "prompts"}
    compare(flags, flags["gguf"] or BOX, cases, by_class, {"source": source, "classes": classes}).put(
        flags, output.plot_modes
    )


def make_once(path: Path, make: Callable[[], object]) -> None:
    """Makes the file, unless it is there."""
    if path.exists():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        make()
    except OSError as error:
        said = f"{error.filename}: {error.strerror}" if error.filename else error
        raise Error(f"the oracle model cannot be made: {said}; --cache names another folder") from error


def _require_of_assistant(shape: str, modes: list[Mode], accept: Acceptance) -> None:
    """Raises a usage error where options or modes are of other drafters than the assistant that the model has."""
    for name in ("draft_accept", "coverage", "draft_head"):
        if given(name):
            said = f"--{name.replace('_', '-')} is of other drafters"
            raise click.UsageError(f"{said}, and {shape} has an assistant")
    if accept.constant is None:
        raise click.UsageError(f"--accept is by depth, and the assistant of {shape} has one share: give a number")
    for mode in modes:
        if mode.spec == "dflash" or mode.part:
            raise click.UsageError(f"the mode {mode.name} is of other drafters, and {shape} has an assistant")


@bench.command()
@click.option(
    "--shape",
    type=click.Choice([*SHAPES, *ASSISTED]),
    default="27b",
    show_default=True,
    help="Make a model of this shape.",
)
@click.option(
    "--type",
    "kind",
    type=click.Choice(list(TYPES)),
    default="mixed",
    show_default=True,
    help="Make its matrices of this type; mixed is Q4_K with some Q5_K and Q6_K.",
)
@click.option(
    "--accept",
    type=Chances("mtp", MAX_GAMMA),
    metavar="SHARES|CLASS",
    default="0.8",
    show_default=True,
    help="Make this share of the NextN head's or assistant's drafts right; of a head also by depth as 0.74,0.72,0.7, "
    "or as reported of code, mixed or prose.",
)
@click.option(
    "--draft-accept",
    type=Chances("dflash", MAX_BUDGET),
    metavar="SHARES|CLASS",
    help="Make this share of a DFlash block's drafts right; modes of dflash make a drafter. By depth, each with "
    "the shares of second, third .. candidates where the first is wrong, as 0.74/0.4/0.1,0.7/0.4; or a class, as "
    f"mixed, dflash2:mixed or dspark:mixed.  [default: the class of --accept, else {ACCEPT:g}]",
)
@click.option(
    "--coverage",
    type=Finite(min=0.5, max=1),
    help="Let this share of the text be of the vocabulary's first 65,536 tokens.  [default: as of the "
    "vocabulary]",
)
@click.option(
    "--draft-head",
    type=click.Choice(["Q4_K"]),
    help="Give the NextN head a copy of the output of this type.  [default: the output's]",
)
@click.option(
    "--cache",
    type=FilePath(path_type=Path, file_okay=False),
    envvar="XDG_CACHE_HOME",
    default=Path("~/.cache"),
    help="Keep the model in luce/ of this folder.  [default: ~/.cache]",
)
@click.option(
    "--prompts",
    "n_prompts",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    help="Run so many random prompts.",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(1, 1 << 20),
    default=32,
    show_default=True,
    help="Give each so many tokens.",
)
@options(MODE_OPTIONS, TEMPERATURES, rounds_option(3), RUN, SPLIT, DRAFT_DEVICE, EXPERTS, OUTPUT_OPTIONS, PLOT)
def oracle(
    shape: str,
    kind: str,
    accept: Acceptance,
    draft_accept: Acceptance | None,
    coverage: float | None,
    draft_head: str | None,
    cache: Path,
    n_prompts: int,
    prompt_tokens: int,
    **flags: Any,
) -> None:
    """Run a model of a real shape with random weights, whose every token is known.

    What it costs is real, and each of its tokens is checked.

    A draft is right with the chance of its depth where all before it were. A class has the chances that are
    reported of texts of its kind, for each kind of drafter; with one of dflash2 or dspark the drafter is a DFlash2 or
    a DSpark.

    The file is made once (27b: 17 GiB, and 3 GiB for its drafter) and kept in the cache folder. One of Gemma 4 has
    an assistant in place of a head, in a file of its own.
    Its likeliest token leads by so much that sampling chooses it too: with --temp, the cost of sampling is
    measured, and the tokens are still known.

    \b
    Examples:
      luce bench oracle --shape 0.8b --modes plain,mtp:2
      luce bench oracle --shape 27b --temp 0,0.7 --top-k 20 --top-p 0.95
      luce bench oracle --shape 27b --accept 0.8 --modes plain,mtp:1,mtp:2,mtp:3 --save results
      luce bench oracle --shape 27b --accept mixed --modes plain,mtp:3,dflash,dflash:22,auto
      luce bench oracle --shape 0.8b --accept .74,.72,.70 --modes plain,mtp:3
      luce bench oracle --shape 27b --accept mixed --draft-accept dflash2:mixed --modes plain,mtp:3,dflash:22
      luce bench oracle --shape 27b --draft-accept .74/.4/.1,.7/.4 --modes plain,dflash,dflash:22
      luce bench oracle --shape 27b --coverage 0.975 --modes plain,mtp:3,mtp-part:3:64k
      luce bench oracle --shape 9b --type Q8_0 --modes plain
      luce bench oracle --shape gemma4-26b-a4b --prompt-tokens 2048
    """
    assisted = shape in ASSISTED
    if assisted:
        _require_of_assistant(shape, flags["modes"], accept)
    drafts_blocks = any(mode.spec == "dflash" for mode in flags["modes"])
    if given("draft_accept") and not drafts_blocks:
        raise click.UsageError("--draft-accept is of a DFlash drafter, and no mode is dflash")
    require(flags)
    folder = cache.expanduser() / "luce"
    typed = shape if kind == "mixed" else f"{shape}-{kind.lower()}"
    of_part = f"-covered-{coverage:g}" if coverage else ""
    of_head = f"-head-{draft_head.lower()}" if draft_head else ""
    drafted = "" if assisted else f"-{accept.slug}{of_part}{of_head}"
    path = folder / f"oracle-{typed}{drafted}.gguf"
    config = ASSISTED[shape] if assisted else SHAPES[shape]
    rule = Rule(config.n_vocab, 0, accept, coverage or 0.0)
    if draft_accept is None:
        draft_accept = parse(accept.name, "dflash", MAX_BUDGET) if accept.name else acceptance(ACCEPT)
    sampled = max(flags["temps"]) if draft_accept.ranks else 0.0  # Lists are as sharp as sampling needs.
    with Display(flags["quiet"]) as display:
        mib: Callable[[int, int], None] = lambda done, total: display.count(  # noqa: E731
            f"making {path.name}, MiB", done >> 20, total >> 20
        )
        if assisted:
            make_once(path, lambda: make_assisted(path, shape, 0, mib, kind))
            if any(mode.spec in ("mtp", "auto") for mode in flags["modes"]):
                assistant = folder / f"oracle-{typed}-assistant-{accept.slug}.gguf"
                share = accept.at(1)
                make_once(assistant, lambda: make_assistant(assistant, path, shape, 0, share, mib))
                flags["drafters"] = (assistant,)
        else:
            make_once(path, lambda: make_oracle(path, shape, 0, accept, mib, kind, rule.coverage, draft_head))
        if drafts_blocks:
            sharp = "" if sharpness(sampled) == 1 else f"-t{sampled:g}"
            drafter = folder / f"oracle-{shape}-drafter-{draft_accept.slug}{sharp}{of_part}.gguf"
            display.spin(f"making {drafter.name}")
            make = partial(make_drafter, drafter, SHAPES[shape], rule, draft_accept, temperature=sampled)
            make_once(drafter, make)
            flags["drafters"] = (drafter,)
    most = config.n_ctx - prompt_tokens + 1  # The last token needs no position.
    ids = np.random.default_rng(1).integers(0, rule.n_begin, (n_prompts, prompt_tokens))

    def cases(files: Files) -> list[Case]:
        return [Case(f"random {i}", tuple(map(int, row))) for i, row in enumerate(ids)]

    def wrong(record: Record) -> int:
        expected = rule.continuation(record.case.prompt[-1], min(flags["max_tokens"], most))
        return wrong_tokens(record.tokens, expected)

    flags |= {"bench": "oracle"}
    extra: dict[str, Any] = {"shape": shape, "type": kind, "prompt_tokens": prompt_tokens}
    extra |= {"accept": accept.as_json()} if "drafters" in flags or not assisted else {}
    if flags["cpu_experts"] is not None:
        extra["cpu_experts"] = flags["cpu_experts"]
    if flags["expert_slots"] is not None:
        extra["expert_slots"] = flags["expert_slots"]
    extra |= {"coverage": coverage} if coverage else {}
    extra |= {"draft_head": draft_head} if draft_head else {}
    asked = {"NextN": accept}
    if drafts_blocks:
        extra["draft_accept"] = draft_accept.as_json()
        asked["DFlash"] = draft_accept
    listed = [f"{name} {each}" for name, each in asked.items() if each.constant is None]
    note = f"Drafts are right by depth: {'. '.join(listed)}." if listed else ""
    compare(flags, path, cases, lambda *_: {"wrong": wrong}, extra, note).put(flags, output.plot_modes)


@bench.command("sweep")
@options(MODEL, HEAD)
@click.option(
    "--rows",
    callback=numbers(1, MAX_ROWS),
    default="1,2,4,8,16,32",
    show_default=True,
    help="Measure verify steps of so many rows.",
)
@click.option(
    "--ctx",
    "contexts",
    callback=numbers(0, MAX_U32),
    help="Measure after so many committed tokens; k is 1024.  [default: of 0,4k,32k those that fit]",
)
@click.option(
    "--gammas",
    callback=numbers(1, MAX_GAMMA),
    help="Measure whole rounds with so many drafts.  [default: 1,2,3,4,8 where there is a "
    "NextN head or an assistant]",
)
@click.option(
    "--steps",
    type=click.IntRange(1, 10_000),
    default=20,
    show_default=True,
    help="Measure each so many times.",
)
@options(RUN, SPLIT, OUTPUT_OPTIONS, PLOT)
def run_sweep(
    rows: list[int], contexts: list[int] | None, gammas: list[int] | None, steps: int, **flags: Any
) -> None:
    """Measure what a verify step costs by rows and by context, and a round by drafts.

    \b
    Examples:
      luce bench sweep
      luce bench sweep --gguf model.gguf --rows 1,2,4,8 --ctx 0,4k,32k --plot cost.png
    """
    require(flags)
    model = flags["gguf"] or BOX
    with ExitStack() as opened, Display(flags["quiet"]) as display, CtrlC() as ctrl_c:
        files = opened.enter_context(files_of(flags, model, None))
        facts = files.facts
        has_head = files.head is not None or facts.nextn_predict_layers > 0
        if gammas and not has_head:
            raise ArgumentError("--gammas needs a NextN head or an assistant and there is none", concerns="nextn_head")
        gammas = gammas if gammas is not None else SWEEP_GAMMAS if has_head else []
        trained, more = facts.context_length or MAX_U32, sweep.room(rows, gammas, steps)
        if contexts is None:
            contexts = [c for c in SWEEP_CONTEXTS if c + more <= trained] or [0]
        if max(*contexts, 1) + more > trained:
            most = max(*rows, max(gammas, default=0) + 1)
            needed = f"a context of {max(contexts)} with {most} rows and {steps} steps of each kind"
            raise ArgumentError(f"{needed}: the model was trained for {trained}")
        display.spin("loading the model")
        asked = sweep.engine_options(contexts, rows, gammas, steps, flags["threads"], flags["kv_type"])
        asked = replace(asked, split=flags["split"])
        engine = opened.enter_context(Engine.open(files, asked, loading(display, ctrl_c)))
        sequence = opened.enter_context(engine.native.sequence())
        found = []
        display.count("contexts", 0, len(contexts))
        stopped: Stopped = lambda: ctrl_c.pressed  # noqa: E731
        n_vocab = engine.model.info.n_vocab
        measured = Measured(sweep.costs(sequence, n_vocab, contexts, rows, gammas, steps, cancelled=stopped))
        for costs in measured:
            found += [cost.as_json() for cost in costs]
            display.count("contexts", len({c["ctx"] for c in found}), len(contexts))
        report = Report(
            "sweep",
            model,
            engine.model.info.device,
            engine.info.n_threads,
            "costs",
            found,
            output.cost_table(found),
            sweep.TIMING,
            {"steps": steps},
            ctrl_c.pressed,
            measured.failure,
        )
    report.put(flags, output.plot_costs)


@bench.command("batch")
@options(MODEL_OPTIONS, DRAFT_OPTION, MODE_OPTIONS)
@click.option(
    "--sequences",
    "counts",
    callback=numbers(1, MAX_ROWS),
    default="1,2,4,8,16",
    show_default=True,
    help="Decode so many sequences together.",
)
@options(sampling(), RUN, SPLIT, DRAFT_DEVICE, OUTPUT_OPTIONS, PLOT)
def run_batch(counts: list[int], **flags: Any) -> None:
    """Measure sequences that decode together, on luce's own prompts: tokens a second of all and of each.

    \b
    Examples:
      luce bench batch --sequences 1,4,16 --modes plain,mtp:2
      luce bench batch --gguf model.gguf -n 128 --save results
    """
    require(flags)
    model = flags["gguf"] or BOX
    with ExitStack() as opened, Display(flags["quiet"]) as display, CtrlC() as ctrl_c:
        files = opened.enter_context(files_of(flags, model, flags["draft"]))
        display.spin("loading the model")
        plain = [p for p in problems.builtin() if not p.chat]
        cases = [Case(p.id, problems.tokens_of(p, files)) for p in plain]
        progress = loading(display, ctrl_c)
        run = opened.enter_context(
            batch.Batch(files, flags["modes"], counts, cases, settings_of(flags), progress)
        )
        found: list[dict[str, Any]] = []
        display.count("batch", 0, run.total)
        measured = Measured(run.run(lambda: ctrl_c.pressed))
        for figures in measured:
            found.append(figures.as_json())
            display.count("batch", len(found), run.total)
        extra = {key: flags[key] for key in ("max_tokens", "temp", "top_k", "top_p", "min_p")}
        report = Report(
            "batch",
            model,
            run.model.info.device,
            run.threads,
            "batches",
            found,
            output.batch_table(found),
            batch.TIMING,
            extra,
            ctrl_c.pressed,
            measured.failure,
        )
    report.put(flags, output.plot_batches)
