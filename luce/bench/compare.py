"""Compares modes over cases for a command of `luce bench`: shows how far it is, and makes the report."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from luce.bench import output
from luce.bench.flags import require
from luce.bench.report import Measured, Report
from luce.bench.run import Bench, Case, Record, Settings, with_drafters, with_temperatures
from luce.bench.summary import TIMING, summarise
from luce.cli.command import CtrlC
from luce.cli.options import names_assistant, sampling_of
from luce.cli.terminal import Display
from luce.data import BOX, BOX_DRAFTER
from luce.errors import Error
from luce.planning.opened import Files

Stopped = Callable[[], bool]
# This returns more arguments of summarise().
After = Callable[[list[Record], Display, Stopped], dict[str, Any]]


def settings_of(flags: dict[str, Any]) -> Settings:
    """Returns how the flags say that all modes run."""
    return Settings(
        flags["max_tokens"],
        flags.get("rounds", 1),
        sampling_of(flags),
        flags["kv_type"],
        flags["threads"],
        flags.get("cpu_experts"),
        flags.get("expert_slots"),
        flags["split"],
    )


def files_of(flags: dict[str, Any], model: Path, drafter: Path | None) -> Files:
    """Opens the model, with the file of a NextN head that the flags name, and a drafter's. The box has its
    own for modes that draft with one."""
    specs = {mode.spec for mode in flags.get("modes", ())}
    if drafter is None and model == BOX and specs & {"auto", "dflash"}:
        drafter = BOX_DRAFTER
    return Files(model, flags.get("mtp_gguf"), flags["device"], drafter, flags.get("draft_device"))


def no_more(records: list[Record], display: Display, stopped: Stopped) -> dict[str, Any]:
    """Returns nothing: there are no checks and no known tokens."""
    return {}


def loading(display: Display, ctrl_c: CtrlC) -> Callable[[float], bool]:
    """Returns what shows how the weights are loaded, and ends that after Ctrl-C."""

    def progress(fraction: float) -> bool:
        display.loading(fraction)
        return ctrl_c.pressed

    return progress


def whole_turns(records: list[Record], n_modes: int) -> list[Record]:
    """Drops an unfinished turn where there is a whole one, so that all modes ran the same prompts."""
    return records[: len(records) // n_modes * n_modes] or records


def compare(
    flags: dict[str, Any],
    model: Path,
    cases_of: Callable[[Files], list[Case]],
    after: After = no_more,
    extra: dict[str, Any] | None = None,
    note: str = "",
) -> Report:
    """Runs all modes over the cases that cases_of() makes of the opened files. `after` looks at all records,
    `extra` goes beside the figures, and `note` is told with them. Ctrl-C and failures end it early, with what
    was measured by then."""
    require(flags)
    drafters = flags.get("drafters", ())
    temps = flags["temps"]
    flags["modes"] = with_temperatures(with_drafters(flags["modes"], drafters, names_assistant), temps)
    with ExitStack() as opened, Display(flags["quiet"]) as display, CtrlC() as ctrl_c:
        files = [opened.enter_context(files_of(flags, model, each)) for each in drafters or (None,)]
        display.spin("loading the model")
        cases, names = cases_of(files[0]), [mode.name for mode in flags["modes"]]
        progress = loading(display, ctrl_c)
        with Bench(files, flags["modes"], cases, settings_of(flags), progress) as run:
            ctrl_c.on_press = run.cancel
            records: list[Record] = []
            display.count(flags["bench"], 0, run.total)
            measured = Measured(run.run(lambda: ctrl_c.pressed))
            for record in measured:
                records.append(record)
                display.count(flags["bench"], len(records), run.total, running(records, names))
            device, threads = run.model.info.device, run.threads
        records = whole_turns(records, len(names))
        more: dict[str, Any] = {}
        try:
            more = after(records, display, lambda: ctrl_c.pressed)
        except Error as error:  # What was measured stays.
            measured.failure = measured.failure or error
        rows = [row.as_json() for row in summarise(records, names, **more)]
        report = Report(
            flags["bench"],
            model,
            device,
            threads,
            "modes",
            rows,
            output.mode_table(rows),
            f"{TIMING} {note}".rstrip(),
            {
                "problems": len({r.case.id for r in records}),
                "max_tokens": flags["max_tokens"],
                "temp": temps[0] if len(temps) == 1 else temps,
                **{key: flags[key] for key in ("top_k", "top_p", "min_p")},
                "rounds": flags["rounds"],
                "threads": threads,
                "drafters": [each.name for each in drafters],
            }
            | (extra or {}),
            ctrl_c.pressed,
            measured.failure,
        )
    return report


def running(records: list[Record], names: list[str]) -> str:
    """Returns the medians so far, as "plain 44, mtp 61 tok/s"."""
    rows = summarise(records, names)
    speeds = ", ".join(f"{row.mode} {row.tok_per_s:.0f}" for row in rows if row.tok_per_s)
    return f"{speeds} tok/s" if speeds else ""
