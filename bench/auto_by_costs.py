#!/usr/bin/env python3
"""Records which drafts would be right where, and prices auto and every fixed way to draft by counted costs.

Plain decoding writes the built-in prompts of `luce bench prompts` with the box. At each position eight drafts
of the NextN head are drafted and a lookup is made, and both are held against the tokens that came. What these
rounds would cost, on the machines of tests/support/replay.py and by their own tables, needs no clock: the same record
gives the same figures anywhere. `ratio` is auto's tokens a unit of cost by those of the best fixed way.

--held-out records other texts, on which no constant of auto was chosen: other prompts, HumanEval's, and the
built-in ones sampled. --alike prices auto with other values of estimates.ALIKE on all recorded texts, texts
of other acceptance and machines. A class of texts at a time is held out: the value that is best on the others
is judged on it.

    python bench/auto_by_costs.py --save bench/results
    python bench/auto_by_costs.py --held-out --max-tokens 160 --save bench/results
    python bench/auto_by_costs.py --alike
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))  # Its modules are used below.

import box_model
import replay

from luce.bench import problems
from luce.bench.origin import command_text, origin, write_row
from luce.cli.stdout import as_json
from luce.decode.engine import Engine
from luce.native import Drafts, Rows, Source
from luce.native.structs import Sampling
from luce.planning.opened import Files
from luce.planning.plan import AUTO_BUDGET, Options
from luce.speculate import estimates
from luce.speculate.prices import Costs

HELD_OUT = Path(__file__).with_name("held_out.jsonl")
ALIKE = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)  # These values of estimates.ALIKE are compared.


def prefix(proposed: list[int], tokens: list[int]) -> int:
    """Counts the proposed tokens that are right before the first wrong one."""
    wrong = (at for at, (one, true) in enumerate(zip(proposed, tokens, strict=False)) if one != true)
    return next(wrong, min(len(proposed), len(tokens)))


def trace_of(engine: Engine, prompt: tuple[int, ...], most: int, sampling: Sampling) -> dict[str, str]:
    """Returns a trace of the first `most` tokens after a prompt, as replay.recorded reads it."""
    chunk, tokens, heads, found = engine.info.n_chunk, list[int](), list[list[int]](), []
    with engine.native.sequence() as sequence:
        sequence.set_sampling(sampling)
        for begin in range(0, len(prompt), chunk):
            part = prompt[begin : begin + chunk]
            choice = sequence.prefill(part, begin + chunk >= len(prompt))
        assert choice is not None
        tokens.append(choice)
        while len(tokens) < most and tokens[-1] not in engine.tokenizer.eos_ids:
            anchor = tokens[-1]
            found.append(sequence.lookup(anchor, AUTO_BUDGET))
            engine.native.draft([Drafts(sequence, anchor, replay.GAMMA, Source.NEXTN)])
            lists = sequence.lists(replay.GAMMA, 1)
            heads.append([lists.at(depth)[0] for depth in range(replay.GAMMA)])
            (choices,) = engine.native.verify([Rows(sequence, [anchor])])
            assert not isinstance(choices, Exception)
            sequence.commit([0])
            tokens.append(choices[0])
    lookups = (
        f"{len(proposed)}:{prefix(proposed, tokens[at + 1 :])}:{matched}"
        for at, (proposed, matched) in enumerate(found)
    )
    drafts = (str(prefix(head, tokens[at + 1 :])) for at, head in enumerate(heads))
    return {"drafts": "".join(drafts), "lookups": " ".join(lookups)}


def record(
    files: Files, engine: Engine, texts: Iterable[problems.Problem], most: int, sampling: Sampling
) -> list[dict[str, str]]:
    """Returns the traces of texts. The class of sampled ones says the temperature."""
    t = sampling.temperature
    return [
        {
            "id": each.id,
            "cls": f"{each.cls} T={t:g}" if t else each.cls,
            **trace_of(engine, problems.tokens_of(each, files), most, sampling),
        }
        for each in texts
    ]


def record_held_out(files: Files, engine: Engine, most: int) -> list[dict[str, str]]:
    """Returns the traces of texts that no constant was chosen on."""
    other = [replace(each, cls=f"other {each.cls}") for each in problems.from_jsonl(HELD_OUT)]
    found = record(files, engine, other, most, Sampling())
    found += record(files, engine, problems.humaneval()[::12], most, Sampling())
    for seed, t in ((11, 0.7), (12, 1.0)):
        found += record(files, engine, problems.builtin(), most, Sampling(t, seed=seed))
    return found


def ratios(path: Path) -> list[dict[str, Any]]:
    """Divides auto by the best fixed way, by machine and class."""
    found = []
    for name, costs in replay.MACHINES.items():
        by_class = replay.against_the_best(replay.recorded(path), costs).items()
        classes = {cls: {"ratio": round(ratio, 4), "best": best} for cls, (ratio, best) in by_class}
        found.append({"machine": name, "classes": classes})
    return found


# ---- how much of what earlier texts have shown a text starts from


def auto_rates(
    traces: Sequence[replay.Trace], costs: Costs, known: float
) -> dict[str, float]:
    """Returns auto's tokens a unit of cost, by class, where a text starts from `known` trials at most. The
    texts come in an order of chance, as those of a server do."""
    shuffled, kept = random.Random(1).sample(traces, len(traces)), estimates.ALIKE
    estimates.ALIKE = known
    try:
        memory = replay.auto_of(costs)
        return replay.rates(shuffled, lambda trace: replay.auto_cost(trace, costs, memory))
    finally:
        estimates.ALIKE = kept


def leave_one_out(traces: Sequence[replay.Trace], machines: dict[str, Costs]) -> dict[str, Any]:
    """Judges ALIKE. `gain` has auto's rate with each value by that with one trial, as a geometric mean over
    machines, by class. `folds` has for each class the value that is best on the others, and its rate on the
    class by that of the value that estimates.py has."""
    rates = {(name, k): auto_rates(traces, costs, k) for name, costs in machines.items() for k in ALIKE}
    classes = sorted({trace.cls for trace in traces})

    def gain(k: float, among: Iterable[str]) -> float:
        logs = (math.log(rates[name, k][c] / rates[name, ALIKE[0]][c]) for name in machines for c in among)
        return math.exp(statistics.fmean(logs))

    folds = {}
    for held_out in classes:
        others = [c for c in classes if c != held_out]
        chosen = max(ALIKE, key=lambda k: gain(k, others))
        folds[held_out] = {
            "chosen": chosen,
            "by_ours": round(gain(chosen, [held_out]) / gain(estimates.ALIKE, [held_out]), 4),
        }
    return {
        "known": estimates.ALIKE,
        "gain": {f"{k:g}": {c: round(gain(k, [c]), 4) for c in classes} | {"all": round(gain(k, classes), 4)}
                 for k in ALIKE},
        "folds": folds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--max-tokens", type=int, default=256, help="of each text")
    parser.add_argument("--commit", help="of the row; default: the checkout's")
    parser.add_argument("--save", type=Path, help="record, and write the row to this folder")
    parser.add_argument("--held-out", action="store_true", help="record texts that nothing was chosen on")
    parser.add_argument("--alike", action="store_true", help="compare values of estimates.ALIKE")
    args = parser.parse_args()
    if args.alike:
        every = [*replay.recorded(), *replay.recorded(replay.HELD_OUT), *replay.oracles()]
        print(as_json(leave_one_out(every, replay.MACHINES | replay.OTHER_MACHINES), indent=1))
        return
    if args.save:
        options = Options(threads=1, spec="mtp", gamma=replay.GAMMA, budget=replay.GAMMA, device="cpu")
        command = command_text(["bench/auto_by_costs.py", *sys.argv[1:]])
        row = origin("traces", "cpu", box_model.GGUF, command, 1, args.commit)
        with Files(box_model.GGUF, device="cpu") as files, Engine.open(files, options) as engine:
            if args.held_out:
                row["traces"] = record_held_out(files, engine, args.max_tokens)
            else:
                row["traces"] = record(files, engine, problems.builtin(), args.max_tokens, Sampling())
        print(write_row(args.save, f"traces{'-held-out' if args.held_out else ''}-box-cpu", row))
    print(as_json({"machines": ratios(replay.HELD_OUT if args.held_out else replay.RECORDED)}, indent=1))


if __name__ == "__main__":
    main()
