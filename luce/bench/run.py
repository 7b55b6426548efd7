"""Runs modes in turn over the same prompts: each generation is one Record.

Every mode has an engine of its own on the one model, so plain pays for nothing that drafting needs. Each is
warmed up. Then the modes take turns on every prompt, another one first each time, so that drift of the
machine hits all alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from luce.decode.engine import Engine
from luce.decode.events import Failed, Finished
from luce.decode.request import Request
from luce.decode.stats import Stats
from luce.errors import ArgumentError, ContextFull
from luce.native.structs import Sampling
from luce.planning.opened import Files
from luce.planning.plan import MAX_BUDGET, MAX_GAMMA, Options, Plain, Plan
from luce.planning.split import Split

PLAIN = "plain"
WARM_UP_TOKENS = 32


@dataclass(frozen=True)
class Mode:
    """This is a way to decode, by spec, gamma, budget and part of Options. It is named "plain", "auto", or by
    its spec and numbers. `drafter` is the index of its DFlash drafter among those that are compared. Its
    `temperature` goes before that of the settings, and `plain` names the mode that it is compared with."""

    name: str
    spec: str
    gamma: int | None = None
    budget: int | None = None
    part: int = 0
    drafter: int = 0
    temperature: float | None = None
    plain: str = PLAIN

    @property
    def opened(self) -> Mode:
        """Says what an engine is opened for. Modes share one where it does not learn."""
        return replace(self, name="", plain="", temperature=self.temperature if self.spec == "auto" else None)


def with_temperatures(modes: Sequence[Mode], temperatures: Sequence[float]) -> list[Mode]:
    """Returns the modes where several temperatures are compared: each once for each of them, as
    "mtp:3 T=0.7"."""
    if len(temperatures) < 2:
        return list(modes)
    return [
        replace(mode, name=f"{mode.name} T={t:g}", temperature=t, plain=f"{mode.plain} T={t:g}")
        for t in temperatures
        for mode in modes
    ]


def with_drafters(
    modes: Sequence[Mode], drafters: Sequence[Path], chains: Callable[[Path], bool] = lambda path: False
) -> list[Mode]:
    """Returns the modes where several drafters are compared: each that uses one, once for each of them, as
    "dflash:22@NAME". What `chains` is used by mtp, and the others by dflash. Raises ArgumentError where two
    drafters have the same name."""
    if len(drafters) < 2:
        return list(modes)
    names = [drafter.stem for drafter in drafters]
    if len(set(names)) < len(names):
        raise ArgumentError(f"drafters that are compared need names of their own: {', '.join(names)}")
    made: list[Mode] = []
    for mode in modes:
        uses = [mode.spec in ("auto", "mtp" if chains(drafter) else "dflash") for drafter in drafters]
        each = [replace(mode, name=f"{mode.name}@{name}", drafter=at) for at, name in enumerate(names) if uses[at]]
        made += each or [mode]
    return made


def parse_modes(text: str) -> list[Mode]:
    """Returns "plain,mtp:3,auto" as modes. ValueError names what is not one."""
    modes = [_mode(name.strip()) for name in text.split(",")]
    if len({mode.name for mode in modes}) < len(modes):
        raise ValueError(f"a mode is named twice in {text!r}")
    return modes


NUMBERED = {"mtp": MAX_GAMMA, "lookup": MAX_BUDGET, "dflash": MAX_BUDGET}  # These modes take a number.
TREES = f"mtp-tree:DRAFTS:CANDIDATES (to {MAX_GAMMA}:{MAX_BUDGET})"
PARTS = "mtp-part:DRAFTS:TOKENS (among the first TOKENS of the vocabulary; k is 1024)"
NAMES = ", ".join(
    [PLAIN, *(f"{kind}, {kind}:1 to {kind}:{most}" for kind, most in NUMBERED.items()), TREES, PARTS, "auto"]
)


def _mode(name: str) -> Mode:
    kind, colon, number = name.partition(":")
    if not colon and kind in (PLAIN, "auto", *NUMBERED):
        return Mode(kind, "off" if kind == PLAIN else kind)
    if kind == "mtp-tree" and (sizes := re.fullmatch(r"([1-9]\d?):([1-9]\d?)", number)):
        gamma, budget = map(int, sizes.groups())
        if gamma <= MAX_GAMMA and budget <= MAX_BUDGET:
            return Mode(f"mtp-tree:{gamma}:{budget}", "mtp", gamma, budget)
    if kind == "mtp-part" and (sizes := re.fullmatch(r"([1-8]):([1-9]\d{0,6})(k?)", number)):
        part = int(sizes[2]) * (1024 if sizes[3] else 1)
        return Mode(name, "mtp", int(sizes[1]), part=part)
    if kind in NUMBERED and number.isdecimal() and 1 <= int(number) <= NUMBERED[kind]:
        n = int(number)
        return Mode(f"{kind}:{n}", kind, gamma=n) if kind == "mtp" else Mode(f"{kind}:{n}", kind, budget=n)
    raise ValueError(f"{name!r} is not {NAMES}")


@dataclass(frozen=True)
class Case:
    """This is one prompt, as token ids. Its figures may be grouped by `group`. Errors name `where` it is
    from, or else its id."""

    id: str
    prompt: tuple[int, ...]
    stops: tuple[str, ...] = ()
    group: str = ""
    where: str = ""


@dataclass(frozen=True)
class Settings:
    """Says how all modes run; None means luce's default."""

    max_tokens: int = 256
    rounds: int = 1  # Each round runs all prompts.
    sampling: Sampling = field(default_factory=Sampling)
    kv_type: str | None = None
    threads: int | None = None
    cpu_experts: int | Literal["auto"] | None = None
    expert_slots: int | Literal["auto"] | None = None
    split: Split | None = None

    def at(self, temperature: float | None) -> Sampling:
        """Returns how tokens are sampled at a temperature; None means that of these settings."""
        if temperature is None:
            return self.sampling
        return replace(self.sampling, temperature=temperature) if temperature else Sampling()


@dataclass(frozen=True)
class Record:
    """This is one generation of one mode, which is compared with the mode `plain`. `round` counts from 0."""

    case: Case
    mode: str
    round: int
    tokens: tuple[int, ...]
    text: str
    stats: Stats
    plain: str = PLAIN


def mode_plan(
    files: Files, mode: Mode, cases: Sequence[Case], settings: Settings, sequences: int = 1
) -> Plan:
    """Returns the plan of a mode for the cases. Raises ArgumentError where there are none, and where the mode
    is to draft and cannot."""
    if not cases:
        raise ArgumentError("there are no prompts to run")
    asked = Options(
        kv_type=settings.kv_type,
        threads=settings.threads,
        sequences=sequences,
        cpu_experts=settings.cpu_experts,
        expert_slots=settings.expert_slots,
        split=settings.split,
        spec=mode.spec,
        gamma=mode.gamma,
        budget=mode.budget,
        part=mode.part,
    )
    longest = max(cases, key=lambda case: len(case.prompt))
    try:
        chosen = files.plan(asked, len(longest.prompt), settings.max_tokens)
    except ContextFull as error:
        raise ContextFull(f"{longest.where or longest.id}: {error}", error.concerns) from error
    if mode.spec != "off" and isinstance(chosen.draft, Plain):
        raise ArgumentError(f"mode {mode.name}: {chosen.reasons['draft']}", concerns="nextn_head")
    return chosen


class Bench:
    """These are the modes' engines on one model; it is a context manager. What the files cannot do is an
    error here, before anything runs: UnsupportedError, ArgumentError, ContextFull, OutOfMemory and others.
    Where several drafters are compared, `files` has the model with each of them, and it is loaded as
    often."""

    def __init__(
        self,
        files: Files | Sequence[Files],
        modes: Sequence[Mode],
        cases: Sequence[Case],
        settings: Settings,
        progress: Callable[[float], bool | None] | None = None,
    ):
        self.modes, self.cases, self.settings = list(modes), list(cases), settings
        each = [files] if isinstance(files, Files) else list(files)
        self._engines: dict[Mode, Engine] = {}  # They are keyed by Mode.opened.
        with ExitStack() as opened:
            for at, one in enumerate(each):
                plans = {m.opened: mode_plan(one, m, cases, settings) for m in modes if m.drafter == at}
                model = opened.enter_context(one.load(plans.values(), progress))
                for mode, chosen in plans.items():
                    self._engines[mode] = opened.enter_context(Engine.open(one, chosen, model=model))
            self._opened = opened.pop_all()
        self.model = self._engines[modes[0].opened].model
        self.threads = next(iter(self._engines.values())).info.n_threads

    def cancel(self) -> None:
        """Ends the generation that runs. A signal handler may call it."""
        for engine in self._engines.values():
            engine.cancel()

    def _generate(self, mode: Mode, case: Case, max_tokens: int, cancelled: Callable[[], bool]) -> Finished:
        request = Request(case.prompt, max_tokens, self.settings.at(mode.temperature), case.stops)
        last = None
        for event in self._engines[mode.opened].generate(request, cancelled):
            last = event
        if isinstance(last, Failed):
            raise last.error
        assert isinstance(last, Finished)
        return last

    def run(self, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Record]:
        """Warms every mode up, then yields a record for each generation; ends early when cancelled."""
        for mode in self.modes:
            self._generate(mode, self.cases[0], min(WARM_UP_TOKENS, self.settings.max_tokens), cancelled)
        for turn in range(self.settings.rounds):
            for index, case in enumerate(self.cases):
                first = (turn + index) % len(self.modes)
                for mode in self.modes[first:] + self.modes[:first]:
                    done = self._generate(mode, case, self.settings.max_tokens, cancelled)
                    if cancelled():
                        return
                    yield Record(case, mode.name, turn, done.tokens, done.text, done.stats, mode.plain)

    @property
    def total(self) -> int:
        """Returns the number of records of a whole run."""
        return self.settings.rounds * len(self.cases) * len(self.modes)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()
