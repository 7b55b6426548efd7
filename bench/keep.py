#!/usr/bin/env python3
"""Says what is lost where only a part of a prompt is read, with the box as the model and as its own scorer.

Loss is that of the next 64 tokens of a file, in nats a token, behind 1,500 tokens of it: all of them, or a share that
the scorer chose, the newest lines, the first (a quarter) and the newest, or the newest (a quarter) and others at
random, each of as many tokens. Files are luce's own, which the box was not trained on. A needle is a line with a
definition among such a file's lines, at 20, 50 or 80 per cent of it, and the prompt ends where its value is wanted:
found says how often the line is read, right how often the value's tokens are then the likeliest one after the other,
and the loss is theirs. All of it is computed on a CPU. It cannot say how a large model with a small one of its family
does, nor of 100,000 tokens of prompt: the box has 3 attention layers, and a context of 2,048.

    python bench/keep.py --save bench/results
"""

from __future__ import annotations

import argparse
import random
import string
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from luce.bench.origin import command_text, origin, print_row
from luce.data import BOX
from luce.decode import engine as decode
from luce.decode.request import Compressed
from luce.files.tokenizer import Tokenizer
from luce.native import Engine, Prompt, Rows
from luce.planning.opened import Files
from luce.planning.plan import Options
from luce.prompts.scorer import Scorer
from luce.prompts.spans import Line, Span, budget_of, chosen, joined

METHOD = " ".join(__doc__.split("\n\n")[1].split())
ROOT = Path(__file__).resolve().parent.parent
FILES = ("luce/model/model.py", "luce/server/models.py", "luce/text/schema.py", "luce/prompts/cache.py",
         "luce/files/probe.py", "luce/decode/generation.py", "luce/convert/hf_dflash.py", "luce/text/places.py",
         "luce/bench/oracle_model.py", "luce/planning/plan.py", "luce/cli/commands.py", "luce/server/api/openai.py",
         "luce/doctor/tokens.py", "luce/text/readings.py", "luce/text/gbnf.py", "luce/text/pattern.py")  # fmt: skip
PROMPT, NEXT = 1500, 64
SHARES = (0.5, 0.25, 0.1)
DEPTHS = (0.2, 0.5, 0.8)
# A line, what the prompt ends with, and what is then wanted; {n} is a name and {v} a value, new in each prompt.
NEEDLES = {
    "a constant": ("MAX_{n} = {v}\n", "\n\ndef test_it():\n    assert MAX_{n} == ", "{v}"),
    "a keyword's default": ("def load_{n}(path, limit={v}):\n", "\n\n# By default the limit of load_{n} is ", "{v}"),
    "a key of a dictionary": ('    "{n}_port": {v},\n', '\n\nassert settings["{n}_port"] == ', "{v}"),
    "an attribute": ("    {n}_timeout = {v}\n", "\n\nassert client.{n}_timeout == ", "{v}"),
}


class Reader:
    """The model, which reads parts of prompts."""

    def __init__(self, engine: Engine):
        self.engine, self.sequence = engine, engine.sequence()

    def follows(self, kept: Compressed, tokens: Sequence[int], after: Sequence[int]) -> tuple[float, bool]:
        """Returns the loss of tokens after a prompt, and whether each is the likeliest."""
        self.sequence.reset()
        read, gaps, chunk = kept.of(tokens), kept.gaps, self.engine.info.n_chunk
        for begin in range(0, len(read), chunk):
            end = min(begin + chunk, len(read))
            here = tuple((at - begin, n) for at, n in gaps if begin <= at < end)
            self.engine.prefill([Prompt(self.sequence, read[begin:end], end == len(read), (), here)])
        rows = [self.sequence.logits(0)]
        if len(after) > 1:
            self.engine.verify([Rows(self.sequence, after[:-1])])
            rows += [self.sequence.logits(row) for row in range(len(after) - 1)]
        losses = [float(np.logaddexp.reduce(z.astype(np.float64)) - z[t]) for z, t in zip(rows, after, strict=True)]
        return fmean(losses), all(int(z.argmax()) == t for z, t in zip(rows, after, strict=True))


def ways(scorer: Scorer, tokens: Sequence[int], keep: float, seed: int) -> dict[str, Compressed]:
    """Returns what is read of a prompt in each way."""
    scored = scorer.compressed(tokens, keep)
    budget = max(budget_of(len(tokens), keep), scored.read)
    lines = [Line(first, end) for first, end in scorer.lines(tokens)]
    newest = _first_that_fit(lines[::-1], budget)
    quarter = budget // 4
    around = _first_that_fit([line for line in lines if line.end <= quarter] + lines[::-1], budget)
    shuffled = [Line(line.first, line.end, line.end > len(tokens) - quarter) for line in lines]
    noise = np.random.default_rng(seed).random(len(tokens))
    spans = {"newest": newest, "first and newest": around, "random": chosen(shuffled, noise.tolist(), budget)}
    of = {way: Compressed(way, keep, len(tokens), tuple(each)) for way, each in spans.items()}
    return {"scorer": scored} | of


def _first_that_fit(lines: Sequence[Line], budget: int) -> list[Span]:
    kept = set[tuple[int, int]]()
    for line in lines:
        if sum(end - first for first, end in kept) + len(line) > budget:
            break
        kept.add((line.first, line.end))
    return joined(sorted(kept))


def losses(scorer: Scorer, reader: Reader, tokenizer: Tokenizer, say: Callable[[str], None]) -> dict[str, Any]:
    found: dict[str, list[float]] = defaultdict(list)
    read: dict[str, list[int]] = defaultdict(list)
    for seed, name in enumerate(FILES):
        tokens = tokenizer.encode((ROOT / name).read_text())
        at = max((len(tokens) - PROMPT - NEXT) // 2, 0)
        tokens, after = tokens[at : at + PROMPT], tokens[at + PROMPT : at + PROMPT + NEXT]
        whole = Compressed("whole", 1, len(tokens), ((0, len(tokens)),))
        found["whole"].append(reader.follows(whole, tokens, after)[0])
        for keep in SHARES:
            for way, kept in ways(scorer, tokens, keep, seed).items():
                found[f"{way}, {keep:.0%}"].append(reader.follows(kept, tokens, after)[0])
                read[f"{way}, {keep:.0%}"].append(kept.read)
        say(name)
    return {
        way: {"loss": round(fmean(each), 4)} | ({"tokens": round(fmean(read[way]))} if way in read else {})
        for way, each in found.items()
    }


def needles(scorer: Scorer, reader: Reader, tokenizer: Tokenizer, say: Callable[[str], None]) -> dict[str, Any]:
    rng = random.Random(7)
    found: dict[str, list[tuple[bool, bool, float]]] = defaultdict(list)
    for kind, (line, asks, wants) in NEEDLES.items():
        for depth in DEPTHS:
            for name in rng.sample(FILES, 3):
                words = {"n": "".join(rng.choices(string.ascii_lowercase, k=5)).upper(), "v": rng.randint(100, 999)}
                words["n"] = words["n"] if "MAX" in line else str(words["n"]).lower()
                text = (ROOT / name).read_text().splitlines(keepends=True)
                hay = tokenizer.encode("".join(text))[:PROMPT]
                before = tokenizer.decode(hay[: int(len(hay) * depth)])
                before = before[: before.rindex("\n") + 1]
                rest = tokenizer.decode(hay)[len(before) :]
                parts = [before, line.format(**words), rest + asks.format(**words)]
                first, needle, last = (tokenizer.encode(part) for part in parts)
                tokens, after = [*first, *needle, *last], tokenizer.encode(wants.format(**words))
                middle = len(first) + len(needle) // 2
                for keep in (1.0, 0.25, 0.1):
                    for way, kept in ways(scorer, tokens, keep, 1).items():
                        if keep < 1 or way == "scorer":
                            loss, right = reader.follows(kept, tokens, after)
                            has = any(begin <= middle < end for begin, end in kept.spans)
                            key = "whole" if keep == 1 else f"{way}, {keep:.0%}"
                            found[f"{kind}: {key}"].append((has, right, loss))
                            found[f"all: {key}"].append((has, right, loss))
        say(kind)
    return {
        key: {"found": sum(has for has, _, _ in each), "right": sum(right for _, right, _ in each), "of": len(each),
              "loss": round(fmean(loss for _, _, loss in each), 4)}
        for key, each in found.items()
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", type=Path, help="write the row into this folder too")
    args = parser.parse_args()

    def say(what: str) -> None:
        print(what, file=sys.stderr, flush=True)

    asked = Options("cpu", ctx=2048, threads=args.threads, rows=NEXT, spec="off", gaps=True)
    with Files(BOX, device="cpu") as files, decode.Engine.open(files, asked) as engine:
        tokenizer = files.tokenizer
        with Scorer(BOX, tokenizer, files.file.kv, device="cpu", threads=args.threads) as scorer:
            reader = Reader(engine.native)
            found = {
                "losses": losses(scorer, reader, tokenizer, say),
                "needles": needles(scorer, reader, tokenizer, say),
            }
    head = origin("keep", "cpu", BOX, command_text(["bench/keep.py", *sys.argv[1:]]), args.threads, None)
    print_row(head | {"method": METHOD} | found, args.save, "keep-box-cpu")


if __name__ == "__main__":
    main()
