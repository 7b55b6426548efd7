"""All checks, in order: the machine, the kernels on the small model, then what is promised of the given model."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from luce import native as _native
from luce.bench import problems
from luce.bench.run import Case, Mode, Settings, mode_plan, parse_modes
from luce.data import BOX
from luce.doctor import kernels, machine, steps, tokens
from luce.doctor.checks import REPORT, Check
from luce.doctor.tokens import Pace
from luce.errors import Cancelled, Error, FileError, NumericError, OutOfMemory, UnsupportedError
from luce.native import Library, Model
from luce.native.structs import Device, EngineParams, GpuInfo
from luce.planning import cpus
from luce.planning.opened import Files
from luce.planning.plan import MAX_THREADS, Plan
from luce.speculate.prices import MAX_ROWS

SEQUENCES = 4  # Of a step of several.
TOGETHER = ("plain", "mtp:3", "dflash", "auto")  # Modes in which requests run together.
PROMPT = 48  # Of a prompt so many tokens are taken.
COPY = "take another copy of the file"  # What helps where a model's weights are wrong or cannot be read.
LEAST_LONG, LONG = 100, 300  # Tokens of the prompt that is kept: some, and more than a KV page.
FAR = 1200  # The small model reads more than eight chunks of attention, which a GPU adds up in another way.


@dataclass(frozen=True)
class Amount:
    """How much is run: the new tokens of a request, how many prompts, and in how many seconds at most of a model whose
    steps are slow. On the small model all of it takes less."""

    tokens: int = 32
    prompts: int = 2
    seconds: float = 80.0


@dataclass(frozen=True)
class Progress:
    """Told what is done now, and asked whether to end."""

    say: Callable[[str], None] = lambda what: None
    cancelled: Callable[[], bool] = lambda: False


def examine(core: Library, files: Files, device: Device, progress: Progress, amount: Amount) -> Iterator[Check]:
    """Yields all checks of a machine and a model. What fails in one does not keep the others from being made."""
    threads = min(cpus.usable(), MAX_THREADS)
    found: list[Check] = []

    def told(group: str, what: str, make: Callable[[], Iterable[Check]]) -> Iterator[Check]:
        progress.say(what)
        for check in guarded(group, make):
            found.append(check)
            yield check
            if progress.cancelled():
                raise Cancelled("interrupted")

    yield from told("machine", "looking at the machine", lambda: machine.host(core, device))
    yield from told("card", "looking at the GPU", lambda: machine.card(core, device))
    yield from told("bandwidth", "measuring the memory", lambda: [machine.bandwidth(core, device, threads)])
    measured = next((check.figures.get("measured") for check in found if check.group == "bandwidth"), None)
    yield from told("kernels", "comparing kernels with known answers", lambda: _kernels(core, files, device, threads))
    gpu = core.gpu_info(machine.index_of(core, device)) if device.is_gpu else None
    given = _Given(files, gpu, measured, progress, amount, threads)
    yield from told("model", "loading the model", lambda: _of_model(given))


def guarded(group: str, make: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """Yields what `make` gives. What it raises is a check too: one that lacked memory or room, or that luce does not do
    with this file, was not made. Of a given model, what cannot be read or is not finite is the file's."""
    try:
        yield from make()
    except Cancelled:
        raise
    except (OutOfMemory, UnsupportedError) as error:
        yield Check(group, "run", "skipped", str(error))
    except (FileError, NumericError) as error:
        own = group == "kernels"  # These run on luce's own model.
        yield Check(group, "run", "bad", f"failed: {error}", remedy=REPORT if own else COPY)
    except Error as error:
        yield Check(group, "run", "bad", f"failed: {error}", remedy=REPORT)
    except OSError as error:
        yield Check(group, "run", "skipped", f"failed: {error}")


def _kernels(core: Library, files: Files, device: Device, threads: int) -> Iterator[Check]:
    with tempfile.TemporaryDirectory(prefix="luce-doctor-") as folder:
        with Files(BOX) as small:
            text = long_prompt(small, FAR)
        yield from kernels.known_answers(device.name, Path(folder), threads, text)
        yield kernels.products(core, files.file)
        if device.is_gpu:
            yield from kernels.against_the_cpu(device.name, Path(folder), threads)


@dataclass(frozen=True)
class _Given:
    """What the checks of a model are told: its files, its GPU if it is on one, and the memory's measured bandwidth."""

    files: Files
    gpu: GpuInfo | None
    bandwidth: int | None
    progress: Progress
    amount: Amount
    threads: int

    def pace(self, share: float) -> Pace:
        """Returns the pace of a check that has this share of the time."""
        return Pace(share * self.amount.seconds, self.progress.cancelled)


def _of_model(given: _Given) -> Iterator[Check]:
    """Yields what is promised of the model."""
    files, say = given.files, given.progress.say
    modes, cases = modes_of(files), cases_of(files, given.amount.prompts)
    plans = plans_of(files, given.amount)
    with files.load(plans, lambda _: given.progress.cancelled()) as model:
        costs, failed = list[Check](), set[str]()
        for check in guarded("rows", lambda: _of_rows(given, model, list(cases[0].prompt), costs)):
            if check.name == "run":
                failed.add(check.found)
            yield check
        say("decoding plainly")
        runs = list[tokens.Runs]()
        for check in guarded("drafts", lambda: _decoded_plainly(given, model, cases, runs)):
            again = check.found in failed
            yield replace(check, verdict="skipped", found="plain decoding fails as steps do") if again else check
        if runs:
            yield from _of_requests(given, model, modes, runs[0])
        yield from costs


def _of_rows(given: _Given, model: Model, prompt: list[int], costs: list[Check]) -> Iterator[Check]:
    """Yields what is promised of the rows of steps, and adds to `costs` what they cost, which is told last."""
    n_ctx, trained = 4 * MAX_ROWS + PROMPT, given.files.facts.context_length
    if trained is not None and trained < n_ctx:
        n_ctx, least = trained, PROMPT + MAX_ROWS + 1
        if trained < least:
            why = f"{least} positions are needed, the model was trained for {trained}"
            yield Check("rows", "widths", "skipped", why)
            return
    params = EngineParams(n_ctx=n_ctx, n_sequences=2 + SEQUENCES, n_rows=MAX_ROWS, n_threads=given.threads)
    with _native.Engine(model, params) as engine:
        given.progress.say("comparing the rows of steps")
        yield from guarded("rows", lambda: tokens.by_width(engine, prompt, given.pace(0.25)))
        given.progress.say("timing steps")
        costs += guarded("steps", lambda: _costs(given, engine, prompt, model))


def _costs(given: _Given, engine: _native.Engine, prompt: list[int], model: Model) -> Iterator[Check]:
    read = given.files.facts.bytes_per_token or model.info.weight_bytes
    yield steps.by_rows(engine, prompt, read, given.bandwidth, given.gpu is not None, given.pace(0.125))
    if given.gpu is not None:
        yield steps.clocks_under_load(engine, prompt, given.gpu.pci)


def _decoded_plainly(given: _Given, model: Model, cases: Sequence[Case], runs: list[tokens.Runs]) -> list[Check]:
    """Adds to `runs` what all others are compared with; that is no check."""
    runs.append(tokens.plain_runs(given.files, model, cases, given.amount.tokens, given.pace(0.125)))
    return []


def _of_requests(given: _Given, model: Model, modes: Sequence[Mode], runs: tokens.Runs) -> Iterator[Check]:
    """Yields whether requests have the tokens of plain decoding."""
    files, amount, say = given.files, given.amount, given.progress.say
    say("decoding with drafts")
    yield from guarded("drafts", lambda: [tokens.by_drafts(files, model, modes[1:], runs, given.pace(0.25))])
    say("decoding requests together")
    together = [mode for mode in modes[::-1] if mode.name in TOGETHER]
    yield from guarded("together", lambda: [tokens.together(files, model, together, runs, given.pace(0.125))])
    say("reading prompts, and kept ones again")
    room = (files.facts.context_length or 2 * LONG) - amount.tokens - MAX_ROWS
    in_time = int(amount.seconds / 80 / max(runs.reading, 1e-9))
    long = min(LONG, in_time, room)
    if long < LEAST_LONG:
        lacks = "time" if in_time < LEAST_LONG else "room in the model's context"
        yield Check("prompts", "kept", "skipped", f"no {lacks} to read prompts of {LEAST_LONG} tokens")
        return
    prompt = long_prompt(files, long)
    specs = [spec for spec in ("mtp", "dflash") if any(mode.spec == spec for mode in modes)] or ["off"]
    yield from guarded("prompts", lambda: [
        tokens.read_both_ways(model, prompt, given.threads),
        tokens.from_checkpoints(model, prompt, given.threads),
        tokens.behind_kept_prompts(files, model, prompt, runs.n, specs, given.pace(0.125)),
    ])  # fmt: skip


def plans_of(files: Files, amount: Amount) -> list[Plan]:
    """Returns the plans of all modes, which the core has checked: raises what keeps it from running the files."""
    cases = cases_of(files, amount.prompts)
    plans = [mode_plan(files, mode, cases, Settings(amount.tokens)) for mode in modes_of(files)]
    for each in plans:
        files.memory(each)
    return plans


def modes_of(files: Files) -> list[Mode]:
    """Returns plain decoding, then every way to draft that the files have."""
    names = ["plain"]
    if files.head is not None or files.facts.nextn_predict_layers:
        names += ["mtp:3", "mtp:1", "mtp-tree:3:15"]
    if files.drafter is not None:
        names += ["dflash", "dflash:15"]
    return parse_modes(",".join([*names, "lookup:15", "auto"]))


def cases_of(files: Files, n: int | None, longest: int | None = PROMPT) -> list[Case]:
    """Returns the beginnings of luce's own prompts as the model's tokens: of `n` kinds, in which something is repeated
    first, for lookups to find."""
    listed = [problem for problem in problems.builtin() if not problem.chat]
    kinds = list({problem.cls: problem for problem in sorted(listed, key=lambda each: each.cls != "edit")}.values())
    made = []
    for problem in kinds[:n]:
        ids = problems.tokens_of(problem, files)
        made.append(Case(problem.id, ids[:longest]))
    return made


def long_prompt(files: Files, n: int) -> list[int]:
    """Returns n tokens of luce's own prompts, one after the other."""
    whole = [token for case in cases_of(files, None, None) for token in case.prompt]
    return (whole * (n // len(whole) + 1))[:n]


def about(core: Library | None, files: Files | None, device: Device | None, began: float) -> dict[str, object]:
    """Returns what the report is of."""
    from datetime import datetime, timezone
    from platform import platform, python_version

    import luce
    from luce.bench.origin import checkout_commit

    facts = files.facts if files is not None else None
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "luce": luce.__version__,
        "core": core.version if core else None,
        "commit": checkout_commit() or None,
        "python": python_version(),
        "system": platform(),
        "device": vars(device) if device else None,
        "model": {
            "file": files.file.path.name,
            "bytes": files.file.info.size_bytes,
            "architecture": facts.architecture,
            "file_type": facts.file_type,
            "drafter": files.drafter.path.name if files.drafter else None,
            "head": files.head.path.name if files.head else None,
        } if files is not None and facts is not None else None,
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip
