"""What the tests do with a model: open it, decode plainly, grow random trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tiny

from luce._native import File, Library, Model, Session
from luce.structs import Memory, SessionParams

# Every ggml type that luce multiplies with.
WEIGHT_TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1",
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS",
    "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M",
)  # fmt: skip


def type_of(kind: str) -> Callable[[str], str]:
    """`kind` for every matrix; the embedding of IQ files is a K-quant, as in published ones."""

    def pick(name: str) -> str:
        if not tiny.quantizable(name):
            return "F32"
        return "Q4_K" if name == "token_embd.weight" and kind.startswith("IQ") else kind

    return pick

# Max abs logit error of F32 weights on CUDA, where cuBLAS multiplies F32 as TF32 (10 bits) from 4 rows on.
# Measured on an H100 over the goldens: 0.040 to 0.206, of logits with standard deviation 2 to 3.5. The
# measured error is reported, and decides which tokens must agree.
CUDA_BOUND = 0.25


# Where a NextN head is: none is loaded, in the model's own file, or in another.
Head = None | bool | Path


def open_model(native: Library, path: Path, device: str = "cpu", *, head: Head = None) -> Model:
    file = File(path, native)
    return Model(file, device, head=_head_file(file, head))


def memory(
    native: Library, path: Path, device: str = "cpu", *, head: Head = None, n_draft: int = 0
) -> Memory:
    """What a session of 64 positions that drafts would need."""
    file = File(path, native)
    params = SessionParams(n_ctx=64, n_rows=n_draft + 1, n_draft=n_draft)
    return file.plan_memory(device, params, _head_file(file, head))


def _head_file(file: File, head: Head) -> File | None:
    if isinstance(head, Path):
        return File(head, file.library)
    return file if head else None


def open_session(model: Model, **params: int | str) -> Session:
    """f32 KV, 64 rows and 1 thread unless said otherwise: threads that wait for each other on a busy machine
    cost tests five times what they save (test_invariance compares 1 and 2)."""
    filled = {"n_rows": 64, "n_threads": 1, "kv_type": "f32"} | params
    return Session(model, SessionParams(**filled))  # type: ignore[arg-type]


def step(session: Session, token: int) -> np.ndarray:
    """Plain decoding of one token: its logits."""
    session.verify([token])
    logits = session.logits(0)
    session.commit([0])
    return logits


def greedy(session: Session, prompt: Sequence[int], n: int) -> list[int]:
    """The n tokens that follow the prompt."""
    out = [session.prefill(prompt)]
    while len(out) < n:
        (choice,) = session.verify(out[-1:])
        session.commit([0])
        out.append(choice)
    return out


@dataclass
class Decoded:
    """tokens: after the prompt; accepted: drafts of each round; logits: (V,) that chose each token, where
    they were asked for."""

    tokens: list[int]
    accepted: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)


def decode(
    session: Session, prompt: Sequence[int], n: int, gamma: int | Sequence[int] = 0, *, logits: bool = False
) -> Decoded:
    """At least n tokens after the prompt, from an empty timeline. gamma: drafts of all rounds, or of each."""
    session.reset()
    out = Decoded([session.prefill(prompt)])
    if logits:
        out.logits.append(session.logits(0))
    return go_on(session, out, n, gamma, logits=logits)


def go_on(
    session: Session, out: Decoded, n: int, gamma: int | Sequence[int] = 0, *, logits: bool = False
) -> Decoded:
    """Rounds until out holds n tokens, the last of which is the anchor."""
    while len(out.tokens) < n:
        size = gamma if isinstance(gamma, int) else gamma[len(out.accepted) % len(gamma)]
        anchor = out.tokens[-1]
        if size:
            session.draft(anchor, size)
            choices = session.verify_draft(size)
            rows = [anchor, *session.drafted(size)]
        else:
            rows, choices = [anchor], session.verify([anchor])
        path, following = session.accept(rows, None, choices)
        if logits:
            out.logits += [session.logits(row) for row in path]
        session.commit(path)
        out.tokens += [*(rows[row] for row in path[1:]), following]
        out.accepted.append(len(path) - 1)
    return out


def chain_logits(session: Session, tokens: Sequence[int], width: int) -> np.ndarray:
    """Logits (rows, V) of tokens verified and committed `width` at a time."""
    out = []
    for i in range(0, len(tokens), width):
        rows = tokens[i : i + width]
        session.verify(rows)
        out += [session.logits(r) for r in range(len(rows))]
        session.commit(range(len(rows)))
    return np.stack(out)


def random_tree(rng: np.random.Generator, n: int) -> list[int]:
    """Parents of n rows in depth-first order: each new row hangs below some row of the last path."""
    parents, path = [-1], [0]
    for row in range(1, n):
        keep = int(rng.integers(1, len(path) + 1)) if rng.random() < 0.5 else len(path)
        parents.append(path[keep - 1])
        path = [*path[:keep], row]
    return parents


def root_path(parents: Sequence[int], row: int) -> list[int]:
    """Rows from row 0 down to `row`."""
    rows = [row]
    while parents[rows[-1]] >= 0:
        rows.append(parents[rows[-1]])
    return rows[::-1]
