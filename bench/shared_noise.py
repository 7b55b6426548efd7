#!/usr/bin/env python3
"""Says how often the first draft of a NextN chain is accepted when sampling: measured in the core, and
expected.

Texts of the built-in prompts of `luce bench prompts` (those that are no chats) are sampled with one draft a
round. At each of these rounds tests/support/ref.py computes the target's and the head's logits in double precision,
and from them the probability that the draft is accepted: drawn greedily, p[argmax q]; with the target's
noise, that both take the same id, sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i); by rejection
sampling, which gives up the tokens of plain decoding, sum of min(p, q). `measured` is the core's share.

How often a draft is accepted depends on the text: one sampled at 1.0 is harder to guess than what people
write. So `same_texts` has every temperature on the same texts, prompts included, which were sampled at
TEXTS_AT: the core drafts and chooses after each of their tokens, and then takes the text's own next one.

    python bench/shared_noise.py --save bench/results
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))  # Its modules are used below.

import box_model
import numpy as np
import ref

from luce.bench import problems
from luce.bench.origin import command_text, origin, print_row
from luce.decode.engine import Engine
from luce.decode.events import Finished
from luce.decode.request import Request
from luce.native import Drafts, Rows, Source
from luce.native.structs import Sampling
from luce.planning.opened import Files
from luce.planning.plan import Options
from luce.speculate.drafting import Round

GREEDY, SHARED, REJECTION = range(3)
TEMPERATURES, TEXTS_AT = (1.0, 0.7), 0.7


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    weights = np.exp((logits - logits.max()) / temperature)
    return np.asarray(weights / weights.sum())


def accepted(p: np.ndarray, q: np.ndarray) -> tuple[float, float, float]:
    """Returns the probabilities that a draft of q is what p chooses: greedy, with shared noise, by
    rejection."""
    likely = np.flatnonzero(np.minimum(p, q) > 1e-6)  # The others add up to less than 0.005.
    shared = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in likely)
    return float(p[q.argmax()]), float(shared), float(np.minimum(p, q).sum())


def rounds_of(engine: Engine, request: Request) -> tuple[list[int], dict[int, bool]]:
    """Returns the text, prompt included, and of each round with a draft its anchor's position and whether the
    draft was accepted."""
    at, found = len(request.prompt), dict[int, bool]()
    for event in engine.generate(request):
        if isinstance(event, Round):
            if event.drafted:
                found[at] = event.accepted > 0
            at += 1 + event.accepted
    assert isinstance(event, Finished), event
    return [*request.prompt, *event.tokens], found


def expected(
    weights: dict[str, np.ndarray], text: list[int], anchors: list[int], temperature: float
) -> list[Any]:
    trunk, head = ref.Reference(box_model.CONFIG, weights), ref.NextN(box_model.CONFIG, weights)
    step, found = trunk.step(text), []
    for anchor in anchors:
        known = len(head.kv[0])
        head.follow(text[known + 1 : anchor], step.hidden[known : anchor - 1])
        q = softmax(head.draft([text[anchor]], step.hidden[anchor - 1])[0], temperature)
        found.append(accepted(softmax(step.logits[anchor], temperature), q))
    return found


def forced(engine: Engine, text: list[int], sampling: Sampling) -> dict[int, bool]:
    """Returns the same as rounds_of() of a text that is given: after each of its tokens, whether the core's
    draft is what the core chooses there."""
    found = dict[int, bool]()
    with engine.native.sequence() as sequence:
        sequence.set_sampling(sampling)
        sequence.prefill(text[:1], True)
        for at in range(1, len(text) - 1):
            engine.native.draft([Drafts(sequence, text[at], 1, Source.NEXTN)])
            (draft,) = sequence.drafted(1)
            (choices,) = engine.native.verify([Rows(sequence, [text[at]])])
            assert not isinstance(choices, Exception)
            sequence.commit([0])
            found[at] = choices[0] == draft
    return found


def sampled(engine: Engine, temperature: float, args: argparse.Namespace) -> Iterator[Any]:
    """Yields what rounds_of() returns of each text."""
    for seed in range(args.seeds):
        for problem in problems.builtin():
            if not problem.chat:
                prompt = tuple(engine.tokenizer.encode(problem.prompt))
                yield rounds_of(engine, Request(prompt, args.max_tokens, Sampling(temperature, seed=seed)))


def measure(temperature: float, texts: Iterable[Any]) -> dict[str, Any]:
    weights = ref.read_gguf(str(box_model.GGUF))
    probabilities: list[Any] = []
    right: list[bool] = []
    for text, rounds in texts:
        probabilities += expected(weights, text, list(rounds), temperature)
        right += rounds.values()
    means = np.mean(probabilities, axis=0)
    return {
        "temperature": temperature,
        "rounds": len(right),
        "measured": round(float(np.mean(right)), 4),
        "expected_shared_noise": round(float(means[SHARED]), 4),
        "expected_greedy_drafts": round(float(means[GREEDY]), 4),
        "expected_rejection_sampling": round(float(means[REJECTION]), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--max-tokens", type=int, default=96, help="of each text")
    parser.add_argument("--seeds", type=int, default=1, help="texts of each prompt and temperature")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--commit", help="of the row; default: the checkout's")
    parser.add_argument("--save", type=Path, help="write the row to this folder")
    args = parser.parse_args()
    options = Options(ctx=1024, threads=args.threads, spec="mtp", gamma=1, device="cpu")
    command = command_text(["bench/shared_noise.py", *sys.argv[1:]])
    with Files(box_model.GGUF, device="cpu") as files, Engine.open(files, options) as engine:
        row = origin("shared noise", "cpu", box_model.GGUF, command, args.threads, args.commit)
        row["temperatures"] = [measure(t, sampled(engine, t, args)) for t in TEMPERATURES]
        texts = [text for text, _ in sampled(engine, TEXTS_AT, args)]
        row["same_texts"] = [
            measure(t, ((text, forced(engine, text, Sampling(t, seed=at))) for at, text in enumerate(texts)))
            for t in TEMPERATURES
        ]
    print_row(row, args.save, "shared-noise-box-cpu")


if __name__ == "__main__":
    main()
