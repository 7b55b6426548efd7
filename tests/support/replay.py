"""Replays texts by counted costs: which drafts would have been right at each position is recorded once, so
that any way to draft can be priced on any machine's table of costs, without a clock.

A trace of a text has for each position of an anchor how many of eight NextN drafts are right, and how many
tokens a lookup proposes there, how many of these are right, and how long its match is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from checkout import ROOT

from luce.bench.oracle_model import Rule
from luce.native import Form, Source
from luce.native.structs import Cost
from luce.planning.plan import AUTO_BUDGET
from luce.speculate.auto import Auto
from luce.speculate.auto import Source as Decided
from luce.speculate.drafting import Draft, Drafter, Limits, Round
from luce.speculate.prices import Costs

RECORDED = ROOT / "bench" / "results" / "2026-11-21-traces-box-cpu.json"
HELD_OUT = RECORDED.with_name("2026-11-22-traces-held-out-box-cpu.json")  # Nothing was chosen on these.
GAMMA, WRONG = 8, -1

# Machines have a draft's cost, and that of a verify by its width, in plain steps. The first is of
# 2026-11-21-steps-h200.txt (after), the second of the verify_ms of 2026-11-21-prompts-box-cpu-3.json.
_TABLES = {
    "27b on an H200": (0.055, "1:1 2:1.03 3:1.04 4:1.05 6:1.07 8:1.09 9:1.25 10:1.27 12:1.29 16:1.32 20:1.46 "
                       "24:1.49 32:1.58"),
    "box on two cores": (0.14, "1:1 2:1.25 3:1.55 4:1.83 5:2.1 6:2.35 7:2.6 8:2.85 9:3.15 10:3.4 12:4 "
                         "16:5.2 20:6.5 24:7.7 32:10.2"),
    "box on one core": (0.1, "1:1 2:1.1 3:1.3 4:1.55 5:1.8 6:2.05 7:2.3 8:2.6 9:2.9 10:3.2 12:3.8 16:5 "
                        "20:6.25 24:7.5 32:10"),
    "between": (0.06, "1:1 2:1.05 3:1.12 4:1.2 5:1.28 6:1.35 7:1.42 8:1.5 9:1.6 10:1.7 12:1.9 16:2.3 20:2.8 "
                "24:3.2 32:4"),
    "dear rows": (0.1, "1:1 2:1.6 3:2.2 4:2.9 5:3.5 6:4.1 7:4.8 8:5.4 9:6 10:6.6 12:7.8 16:10.2 20:12.6 "
                  "24:15 32:20"),
}  # fmt: skip


@dataclass(frozen=True)
class Trace:
    """A trace is a text. `drafts` has a count of right drafts by position; `lookups` has (proposed, right,
    matched)."""

    id: str
    cls: str
    drafts: Sequence[int]
    lookups: Sequence[tuple[int, int, int]]


def recorded(path: Path = RECORDED) -> list[Trace]:
    """Reads what bench/auto_by_costs.py wrote: a digit and "proposed:right:matched" for each position."""
    return [
        Trace(
            each["id"],
            each["cls"],
            [int(digit) for digit in each["drafts"]],
            [tuple(map(int, entry.split(":"))) for entry in each["lookups"].split()],  # type: ignore[misc]
        )
        for each in json.loads(path.read_text())["traces"]
    ]


def oracles() -> list[Trace]:
    """Texts of oracle models, one for each of several shares of right drafts: no token comes twice, so a
    lookup finds nothing."""
    found = []
    for seed, share in enumerate((0.15, 0.4, 0.6, 0.8, 0.95)):
        rule = Rule(2048, seed, share)
        tokens = np.array(rule.continuation(seed, 200 + GAMMA))
        right = rule.draft(tokens[:-1]) == tokens[1:]
        drafts = [next((n for n in range(GAMMA) if not right[at + n]), GAMMA) for at in range(199)]
        found.append(Trace(f"oracle {share}", f"oracle {share}", drafts, [(0, 0, 0)] * 199))
    return found


def machine(verify: dict[int, float], draft: float) -> Costs:
    """Returns the costs of a machine whose steps have these widths, in any unit: other rows cost the next
    width."""
    width = {rows: min(w for w in verify if w >= rows) for rows in range(1, max(verify) + 1)}
    return Costs([*(Cost(rows, 0, verify[w]) for rows, w in width.items()), Cost(1, 1, draft)])


def _parsed(draft: float, table: str) -> Costs:
    entries = (entry.split(":") for entry in table.split())
    return machine({int(width): float(cost) for width, cost in entries}, draft)


MACHINES = {name: _parsed(*table) for name, table in _TABLES.items()}

# Nothing was chosen on these machines: they are estimates of the 27b on an H200 by ggml's kernels and at its
# limits, of a mixture whose rows read experts of their own, and of a GPU whose head is dear beside its steps.
OTHER_MACHINES = {name: _parsed(*table) for name, table in {
    "ggml's kernels": (0.067, "1:1 2:1.06 4:1.48 8:2.18 16:2.2 32:2.47 64:3.4"),
    "at its limits": (0.03, "1:1 2:1.02 4:1.04 8:1.08 16:1.15 32:1.4 64:2"),
    "a mixture": (0.12, "1:1 2:1.4 3:1.7 4:2 6:2.4 8:2.8 12:3.4 16:3.9 24:4.6 32:5.1"),
    "a dear head": (0.3, "1:1 2:1.03 4:1.05 8:1.1 16:1.3 32:1.7"),
}.items()}  # fmt: skip


class Text:
    """This is a text that is replayed, at the position of its anchor. Its true token at position i is i.

    A trace holds no lists of candidates, so whoever asks for one is replayed in a way that was not recorded.
    """

    def __init__(self, trace: Trace):
        self.trace, self.at = trace, 0

    def lookup(self, anchor: int, most: int) -> tuple[list[int], int]:
        proposed, right, matched = self.trace.lookups[self.at]
        tokens = [self.at + 1 + i if i < right else WRONG for i in range(proposed)]
        return tokens[:most], matched

    def lists(self, depth: int, k: int, form: Form = Form.CHAIN) -> Any:
        raise NotImplementedError

    tree: Any = lists


# It takes a text, the most rows, a depth, and what the round was begun with. It gives drafts, the tokens of a
# lookup, and what the next round may be begun with.
Way = Callable[[Text, int, int, Draft | None], tuple[int, int, Draft | None]]


def mtp(gamma: int) -> Way:
    chain = Draft(on_device=gamma)
    return lambda text, rows, depth, begun: (min(gamma, depth), 0, chain)


def lookup(most: int) -> Way:
    return lambda text, rows, depth, begun: (0, len(text.lookup(0, min(most, depth))[0]), None)


FIXED = {f"mtp:{n}": mtp(n) for n in range(1, GAMMA + 1)} | {
    f"lookup:{n}": lookup(n) for n in (3, 5, 7, 8, 11, 15, 19, 23, 31)
}


def cost_of(
    trace: Trace,
    costs: Costs,
    way: Way,
    learn: Callable[[Round], None] = lambda done: None,
    between: float = 0.0,
    seen: Callable[[float], float] = lambda took: took,
) -> float:
    """Returns what the rounds of a text cost, from its first token to its last. The host takes `between`
    before each, unless it was begun ahead. Who learns sees that a round took `seen(took)`."""
    text, end, seconds, begun = Text(trace), len(trace.drafts), 0.0, None
    while text.at < end:
        depth = end - text.at - 1  # The last token is chosen, not drafted.
        drafts, looked, follows = way(text, AUTO_BUDGET, depth, begun) if depth else (0, 0, None)
        ahead, took = begun is not None, 0.0
        if begun is not None:
            drafts, looked = begun.size, 0
        else:
            took += between
        begun = None if looked or not follows or follows.size > depth - drafts - 1 else follows
        right = min(drafts, trace.drafts[text.at]), min(looked, trace.lookups[text.at][1])
        candidates = drafts + looked - min(right)  # What both propose and is right is verified once.
        took += costs.verify(1 + candidates) + drafts * costs.draft(1)
        seconds += took
        came = range(text.at + 1, text.at + 2 + max(right))
        learn(Round(candidates, max(right), 0.0, 0.0, 0.0, tuple(came), ahead, not ahead, seen(took)))
        text.at += len(came)
    return seconds


def auto_of(costs: Costs, hidden: bool = True) -> Auto:
    """Returns an engine's auto, which knows no text. `hidden` says that rounds are begun ahead, as those of a GPU."""
    return Auto(costs, AUTO_BUDGET, hidden)


def auto_cost(
    trace: Trace, costs: Costs, auto: Auto, between: float = 0.0, seen: Callable[[float], float] = lambda took: took
) -> float:
    """Returns the same, of auto, which has decoded other texts before."""
    source: list[Decided] = []

    def way(text: Text, rows: int, depth: int, begun: Draft | None) -> tuple[int, int, Draft | None]:
        if not source:
            source.append(auto.source(text, [Drafter(text, Source.NEXTN, GAMMA)]))
            source[0].begin(len(trace.drafts) + 1)
        source[0].propose(text.at, limits := Limits(min(rows, depth), depth, begun=begun))
        source[0].draft(text.at, limits)
        return source[0].choice.drafts, source[0].choice.lookup, source[0].follows()

    def learn(done: Round) -> None:
        if source:
            source[0].learn(done)

    return cost_of(trace, costs, way, learn, between, seen)


def rates(traces: Sequence[Trace], cost: Callable[[Trace], float]) -> dict[str, float]:
    """Returns tokens a unit of cost, by class of texts."""
    tokens, seconds = dict[str, int](), dict[str, float]()
    for trace in traces:
        tokens[trace.cls] = tokens.get(trace.cls, 0) + len(trace.drafts)
        seconds[trace.cls] = seconds.get(trace.cls, 0.0) + cost(trace)
    return {cls: tokens[cls] / seconds[cls] for cls in tokens}


def against_the_best(
    traces: Sequence[Trace], costs: Costs, between: float = 0.0
) -> dict[str, tuple[float, str]]:
    """Returns, by class, auto's rate as a part of that of the best fixed way, plain included, and the name of
    that way. The host takes `between` before each round but those that are begun ahead, as plain ones are."""
    known = auto_of(costs)
    auto = rates(traces, lambda trace: auto_cost(trace, costs, known, between))

    def of(way: Way) -> dict[str, float]:
        return rates(traces, lambda trace: cost_of(trace, costs, way, between=between))

    fixed = {name: of(way) for name, way in FIXED.items()}
    fixed["plain"] = dict.fromkeys(auto, 1 / costs.verify(1))
    best = {cls: max((of[cls], name) for name, of in fixed.items()) for cls in auto}
    return {cls: (auto[cls] / rate, name) for cls, (rate, name) in best.items()}
