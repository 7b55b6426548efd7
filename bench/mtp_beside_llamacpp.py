#!/usr/bin/env python3
"""The MTP chain on an oracle model, luce beside llama-server's draft-mtp, in one run, every token checked.

Outside the timing windows: loading, session opening, the prefill, a warm-up of every gamma. Inside:
rounds of draft, verify, accept and commit until n-gen tokens are out, with the host's time in each (a GPU's
draft is enqueued and shows up in verify). llama-server reports its own decoding speed
(predicted_per_second) for the same prompt and number of tokens.

    python bench/mtp_beside_llamacpp.py oracle-27b.gguf --gammas 0,1,2,3 --llama-server PATH
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from luce._native import File, Model, Session, SessionParams

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))
sys.path.append(str(Path(__file__).resolve().parent))

import peer_llamacpp  # noqa: E402
from beside_llamacpp import oracle_rule, wrong_tokens  # noqa: E402
from record import origin, save  # noqa: E402


def luce_run(session: Session, prompt: list[int], n_gen: int, gamma: int) -> dict[str, Any]:
    """One generation; seconds by phase, acceptance, tokens."""
    session.reset()
    tokens = [session.prefill(prompt)]
    phase = {"draft": 0.0, "verify": 0.0, "commit": 0.0}
    rounds = 0
    start = last = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        phase[name] += now - last
        last = now

    while len(tokens) <= n_gen:
        if gamma:
            session.draft(tokens[-1], gamma)
            lap("draft")
            choices = session.verify_draft(gamma)
            rows = [tokens[-1], *session.drafted(gamma)]
        else:
            rows = tokens[-1:]
            choices = session.verify(rows)
        lap("verify")
        path, _ = session.accept(rows, None, choices)
        session.commit(path)
        tokens += [choices[row] for row in path]
        rounds += 1
        lap("commit")
    seconds = time.perf_counter() - start
    n = len(tokens) - 1
    return {
        "tokens": tokens,
        "tok_per_s": n / seconds,
        "mean_accepted_length": n / rounds,
        "ms_per_round": 1000 * seconds / rounds,
        "ms": {name: 1000 * t / rounds for name, t in phase.items()},
    }


def luce_rows(args: argparse.Namespace, prompt: list[int]) -> tuple[str, list[dict[str, Any]]]:
    with File(args.model) as file, Model(file, args.device, head=file) as model:
        rule, top = oracle_rule(file), max(args.gammas)
        params = SessionParams(n_ctx=len(prompt) + args.n_gen + 64, n_rows=top + 1, n_draft=top,
                               n_threads=args.threads)  # fmt: skip
        with Session(model, params) as session:
            for gamma in args.gammas:
                luce_run(session, prompt, 32, gamma)
            runs = {gamma: [] for gamma in args.gammas}  # type: dict[int, list[dict[str, Any]]]
            for _ in range(args.rounds):
                for gamma in args.gammas:
                    runs[gamma].append(luce_run(session, prompt, args.n_gen, gamma))
            device = model.info.device
    rows = []
    for gamma, of_gamma in runs.items():
        best = sorted(of_gamma, key=lambda r: r["tok_per_s"])[len(of_gamma) // 2]
        rows.append({
            "gamma": gamma,
            "tok_per_s": round(best["tok_per_s"], 2),
            "spread": [round(f(r["tok_per_s"] for r in of_gamma), 2) for f in (min, max)],
            "mean_accepted_length": round(best["mean_accepted_length"], 3),
            "ms_per_round": round(best["ms_per_round"], 3),
            "ms": {name: round(ms, 3) for name, ms in best["ms"].items()},
            "wrong_tokens": sum(wrong_tokens(rule, r["tokens"]) for r in of_gamma) if rule else None,
        })  # fmt: skip
    return device, rows


def peer_rows(args: argparse.Namespace, prompt: list[int], gpu: bool) -> list[dict[str, Any]]:
    rows = []
    for gamma in args.gammas:
        options = ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(gamma)] if gamma else []
        with peer_llamacpp.LlamaServer(args.llama_server, args.model, args.threads, gpu, *options) as server:
            server.complete(prompt, 32)
            answers = [server.complete(prompt, args.n_gen) for _ in range(args.rounds)]
        speeds = [a["timings"]["predicted_per_second"] for a in answers]
        timings = answers[-1]["timings"]
        rows.append({
            "gamma": gamma,
            "tok_per_s": round(statistics.median(speeds), 2),
            "spread": [round(min(speeds), 2), round(max(speeds), 2)],
            "drafted": timings.get("draft_n"),
            "accepted": timings.get("draft_n_accepted"),
        })  # fmt: skip
        print(f"llama-server gamma {gamma}: {rows[-1]}", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--n-prompt", type=int, default=32)
    parser.add_argument("--n-gen", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gammas", type=lambda text: [int(g) for g in text.split(",")], default=[0, 1, 2, 3])
    parser.add_argument("--llama-server", type=Path, help="also measure this llama-server")
    parser.add_argument("--commit", help="of luce, where this is no git checkout")
    parser.add_argument("--save", type=Path, help="folder for the result row")
    args = parser.parse_args()
    rng = np.random.Generator(np.random.PCG64(1))
    with File(args.model) as file:
        n_vocab = len(file.kv["tokenizer.ggml.tokens"])
    prompt = [int(t) for t in rng.integers(0, n_vocab - 16, args.n_prompt)]
    device, ours = luce_rows(args, prompt)
    for row in ours:
        print(f"luce gamma {row['gamma']}: {row}", file=sys.stderr, flush=True)
    peer = peer_rows(args, prompt, device != "cpu") if args.llama_server else []
    command = (
        f"bench/mtp_beside_llamacpp.py {args.model.name} --device {args.device} --threads {args.threads} "
        f"--n-prompt {args.n_prompt} --n-gen {args.n_gen} --rounds {args.rounds} "
        f"--gammas {','.join(map(str, args.gammas))}"
    )
    result = origin("MTP beside llama.cpp", device, args.model, command, args.threads, args.commit)
    result |= {"luce": ours, "llamacpp": peer}
    save(args.save, f"mtp-{args.model.stem}-{'cpu' if device == 'cpu' else 'gpu'}", result)


if __name__ == "__main__":
    main()
