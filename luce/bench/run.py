"""Modes in turn over the same prompts: each generation is one Record.

Every mode has a session of its own on the one model, so plain pays for nothing that drafting needs. Each is
warmed up. Then the modes take turns on every prompt, another one first each time, so that drift of the
machine hits all alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from luce._native import File
from luce.errors import ArgumentError
from luce.orchestrator import Failed, Finished
from luce.plan import MAX_GAMMA, Plan, Request, plan
from luce.probe import Facts, probe
from luce.session import TextSession, open_model
from luce.stats import Stats
from luce.structs import Sampling
from luce.tokenizer import Tokenizer

PLAIN = "plain"
WARM_UP_TOKENS = 32


@dataclass(frozen=True)
class Mode:
    """A way to decode, as --spec and --mtp-gamma say it. Named "plain", "mtp", "mtp:N" or "auto"."""

    name: str
    spec: str
    gamma: int | None = None


def parse_modes(text: str) -> list[Mode]:
    """ "plain,mtp:3,auto" as modes; ValueError names what is not one."""
    modes = []
    for name in text.split(","):
        kind, colon, number = name.strip().partition(":")
        if kind == "mtp" and number.isdecimal() and 1 <= int(number) <= MAX_GAMMA:
            modes.append(Mode(f"mtp:{int(number)}", "mtp", int(number)))
        elif colon or kind not in (PLAIN, "mtp", "auto"):
            raise ValueError(f"{name.strip()!r} is not plain, mtp, mtp:1 to mtp:{MAX_GAMMA} or auto")
        else:
            modes.append(Mode(kind, "off" if kind == PLAIN else kind))
    if len({mode.name for mode in modes}) < len(modes):
        raise ValueError(f"a mode is named twice in {text!r}")
    return modes


@dataclass(frozen=True)
class Case:
    """One prompt, as token ids. group: what its figures may be grouped by."""

    id: str
    prompt: tuple[int, ...]
    stops: tuple[str, ...] = ()
    group: str = ""


@dataclass(frozen=True)
class Settings:
    """How all modes run. None: luce's default."""

    max_tokens: int = 256
    rounds: int = 1  # of all prompts
    sampling: Sampling = field(default_factory=Sampling)
    device: str | None = None
    kv_type: str | None = None
    threads: int | None = None


@dataclass(frozen=True)
class Record:
    """One generation of one mode. round: 0, 1 ..."""

    case: Case
    mode: str
    round: int
    tokens: tuple[int, ...]
    text: str
    stats: Stats


class Bench:
    """The modes' sessions on one model; a context manager. What the files cannot do is an error here, before
    anything runs: UnsupportedError, ArgumentError, ContextFull, OutOfMemory, ..."""

    def __init__(
        self,
        file: File,
        tokenizer: Tokenizer,
        modes: Sequence[Mode],
        cases: Sequence[Case],
        settings: Settings,
        head: File | None = None,
        progress: Callable[[float], bool | None] | None = None,
    ):
        if not cases:
            raise ArgumentError("there are no prompts to run")
        self.modes, self.cases, self.settings = list(modes), list(cases), settings
        facts, head_facts = probe(file, device=settings.device or "auto"), probe(head) if head else None
        plans = {mode: self._plan(mode, facts, head_facts) for mode in modes}
        drafting = next((p for p in plans.values() if p.head), next(iter(plans.values())))
        with ExitStack() as opened:
            self.model = opened.enter_context(open_model(file, drafting, progress, head))
            self._sessions = {
                mode.name: opened.enter_context(TextSession(self.model, tokenizer, chosen))
                for mode, chosen in plans.items()
            }
            self._opened = opened.pop_all()
        self.threads = next(iter(self._sessions.values())).session.info.n_threads

    def _plan(self, mode: Mode, facts: Facts, head: Facts | None) -> Plan:
        longest = max(self.cases, key=lambda case: len(case.prompt))
        s, drafts = self.settings, mode.spec != "off"
        request = replace(
            self._request(longest, s.max_tokens),
            device=s.device, kv_type=s.kv_type, threads=s.threads,
            spec=mode.spec, mtp_gamma=mode.gamma,
        )  # fmt: skip
        chosen = plan(facts, request, head if drafts else None)
        if drafts and not chosen.head:
            raise ArgumentError(
                f"mode {mode.name}: there is no NextN head to draft with; give --mtp-gguf PATH"
            )
        return chosen

    def _request(self, case: Case, max_tokens: int) -> Request:
        return Request(case.prompt, max_tokens, self.settings.sampling, case.stops)

    def _generate(self, mode: str, case: Case, max_tokens: int, cancelled: Callable[[], bool]) -> Finished:
        last = None
        for event in self._sessions[mode].generate(self._request(case, max_tokens), cancelled):
            last = event
        if isinstance(last, Failed):
            raise last.error
        assert isinstance(last, Finished)
        return last

    def run(self, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Record]:
        """Warms every mode up, then yields a record for each generation; ends early when cancelled."""
        for mode in self.modes:
            self._generate(mode.name, self.cases[0], min(WARM_UP_TOKENS, self.settings.max_tokens), cancelled)
        for turn in range(self.settings.rounds):
            for index, case in enumerate(self.cases):
                first = (turn + index) % len(self.modes)
                for mode in self.modes[first:] + self.modes[:first]:
                    done = self._generate(mode.name, case, self.settings.max_tokens, cancelled)
                    if cancelled():
                        return
                    yield Record(case, mode.name, turn, done.tokens, done.text, done.stats)

    @property
    def total(self) -> int:
        """Records of a whole run."""
        return self.settings.rounds * len(self.cases) * len(self.modes)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()
