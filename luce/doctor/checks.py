"""What doctor finds: checks, each of one thing, and the report of all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

# ok: it is as luce promises. bad: it is not. note: no promise is broken, but there is something to know. skipped: it
# was not looked at, and `found` says why.
Verdict = Literal["ok", "note", "skipped", "bad"]
_WORST: tuple[Verdict, ...] = ("bad", "note", "ok", "skipped")


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: its name, the line of the report that it belongs to (`group`), what was found and
    what it should be, and what helps where that differs. `figures` are numbers for the report alone. A `minor` one is
    not told in its line where it is ok."""

    group: str
    name: str
    verdict: Verdict
    found: str
    expected: str = ""
    remedy: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    minor: bool = False


def judged(group: str, name: str, holds: bool, found: str, expected: str, remedy: str = "", **figures: Any) -> Check:
    """Returns the check of something that luce promises."""
    return Check(group, name, "ok" if holds else "bad", found, expected, "" if holds else remedy, figures)


@dataclass(frozen=True)
class Line:
    """All checks of one group, as people read them: the worst verdict, and what was found. Where something is bad, only
    that is told."""

    group: str
    verdict: Verdict
    text: str


def lines(checks: Iterable[Check]) -> list[Line]:
    """Returns a line for each group, in the order in which they begin."""
    groups: dict[str, list[Check]] = {}
    for check in checks:
        groups.setdefault(check.group, []).append(check)
    made = []
    for group, own in groups.items():
        worst = next(verdict for verdict in _WORST if any(check.verdict == verdict for check in own))
        told = [check for check in own if check.verdict == worst] if worst == "bad" else [
            check for check in own if check.verdict != "ok" or not check.minor
        ]  # fmt: skip
        made.append(Line(group, worst, "; ".join(check.found for check in told)))
    return made


def conclusion(checks: Iterable[Check]) -> str:
    """Returns the verdict in a line."""
    listed = list(checks)
    bad = [check for check in listed if check.verdict == "bad"]
    if bad:
        names = ", ".join(dict.fromkeys(f"{check.group}.{check.name}" for check in bad))
        remedies = "; ".join(dict.fromkeys(check.remedy for check in bad if check.remedy))
        return f"a promise does not hold here: {names}. {remedies or REPORT}"
    noted = [f"{check.group}.{check.name}" for check in listed if check.verdict == "note"]
    skipped = [f"{check.group}.{check.name}" for check in listed if check.verdict == "skipped"]
    parts = [f"to know: {', '.join(noted)}"] if noted else []
    parts += [f"not looked at: {', '.join(skipped)}"] if skipped else []
    return f"what was looked at holds{'; ' if parts else ''}{'; '.join(parts)}"


REPORT = "This is a defect of luce: report it with `luce doctor --json`"


def as_json(checks: Iterable[Check], about: dict[str, Any]) -> dict[str, Any]:
    """Returns the whole report: `about` is of what it is, "holds" whether no promise is broken."""
    listed = list(checks)
    return about | {
        "holds": all(check.verdict != "bad" for check in listed),
        "verdict": conclusion(listed),
        "checks": [asdict(check) for check in listed],
    }
