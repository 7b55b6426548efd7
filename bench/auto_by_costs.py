#!/usr/bin/env python3
"""Records which drafts would be right where, and prices auto and every fixed way to draft by counted costs.

Plain decoding writes the built-in prompts of `luce bench prompts` with the box. At each position eight drafts
of the NextN head are drafted and a lookup is made, and both are held against the tokens that came. What these
rounds would cost, on the machines of tests/replay.py and by their own tables, needs no clock: the same record
gives the same figures anywhere. `ratio` is auto's tokens a unit of cost by those of the best fixed way.

    PYTHONPATH=tests python bench/auto_by_costs.py --save bench/results
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import box_model
import replay

from luce._native import Drafts, Rows, Source
from luce.bench import problems
from luce.bench.origin import command_text, origin, write_row
from luce.engine import Engine, Files
from luce.plan import AUTO_BUDGET, Options
from luce.stdout import as_json
from luce.structs import Sampling


def prefix(proposed: list[int], tokens: list[int]) -> int:
    """Counts the proposed tokens that are right before the first wrong one."""
    wrong = (at for at, (one, true) in enumerate(zip(proposed, tokens, strict=False)) if one != true)
    return next(wrong, min(len(proposed), len(tokens)))


def trace_of(engine: Engine, prompt: tuple[int, ...], most: int) -> dict[str, str]:
    """Returns a trace of the first `most` tokens after a prompt, as replay.recorded reads it."""
    chunk, tokens, heads, found = engine.info.n_chunk, list[int](), list[list[int]](), []
    with engine.native.sequence() as sequence:
        sequence.set_sampling(Sampling())
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


def record(files: Files, engine: Engine, most: int) -> list[dict[str, str]]:
    return [
        {"id": each.id, "cls": each.cls, **trace_of(engine, problems.tokens_of(each, files), most)}
        for each in problems.builtin()
    ]


def ratios(path: Path) -> list[dict[str, Any]]:
    """Divides auto by the best fixed way, by machine and class."""
    found = []
    for name, costs in replay.MACHINES.items():
        by_class = replay.against_the_best(replay.recorded(path), costs).items()
        classes = {cls: {"ratio": round(ratio, 4), "best": best} for cls, (ratio, best) in by_class}
        found.append({"machine": name, "classes": classes})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--max-tokens", type=int, default=256, help="of each text")
    parser.add_argument("--commit", help="of the row; default: the checkout's")
    parser.add_argument("--save", type=Path, help="record, and write the row to this folder")
    args = parser.parse_args()
    if args.save:
        options = Options(threads=1, spec="mtp", gamma=replay.GAMMA, budget=replay.GAMMA, device="cpu")
        command = command_text(["bench/auto_by_costs.py", *sys.argv[1:]])
        row = origin("traces", "cpu", box_model.GGUF, command, 1, args.commit)
        with Files(box_model.GGUF, device="cpu") as files, Engine.open(files, options) as engine:
            row["traces"] = record(files, engine, args.max_tokens)
        print(write_row(args.save, "traces-box-cpu", row))
    print(as_json({"machines": ratios(replay.RECORDED)}, indent=1))


if __name__ == "__main__":
    main()
