"""Does with a model what the tests need: opens engines and sequences, decodes, grows random trees.

A test that drives a sequence alone opens it with `open_sequence(model)`. It then takes prefill, draft,
verify, step, decode ... of this module, whose steps have this sequence alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny

from luce.decode.generation import Prefixes
from luce.native import CHOSEN, Drafts, Engine, File, IntArray, Library, Model, Rows, Source
from luce.native import Sequence as Timeline
from luce.native.structs import EngineParams, Memory

# luce multiplies with each of these types of ggml.
WEIGHT_TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1",
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS",
    "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M", "MXFP4", "NVFP4", "TQ1_0", "TQ2_0",
)  # fmt: skip


def type_of(kind: str) -> Callable[[str], str]:
    """Returns `kind` for every matrix; the embedding of IQ files is a K-quant, as in published ones."""

    def pick(name: str) -> str:
        if not tiny.quantizable(name):
            return "F32"
        return "Q4_K" if name == "token_embd.weight" and kind.startswith("IQ") else kind

    return pick


# These begin, since they take seconds.
SLOW = [tiny.QType[kind] for kind in WEIGHT_TYPES if kind.startswith(("IQ1", "IQ2", "IQ3"))]


def quantize(native: Library, kind: int, rows: np.ndarray) -> np.ndarray:
    """Returns the core's blocks. Of slow types it returns random ones, as large as `rows`: any bits of theirs
    are weights."""
    if kind not in SLOW:
        return native.quantize(kind, rows)
    n, size = gguf.GGML_QUANT_SIZES[tiny.QType(kind)]
    shape = (rows.shape[0], rows.shape[1] // n, size)
    blocks = np.random.default_rng(rows.shape).integers(0, 256, shape, np.uint8)
    spread = gguf.quants.dequantize(with_scale(blocks[0], kind, 1.0), tiny.QType(kind)).std()
    return with_scale(blocks, kind, float(rows.std() / spread)).reshape(shape[0], -1)


def with_scale(blocks: np.ndarray, kind: int, scale: float) -> np.ndarray:
    """Returns the blocks with this F16 scale. It is their first value, but of IQ1_M the high bits of the last
    four."""
    made, bits = blocks.copy(), np.array(scale, np.float16).view(np.uint16)
    if kind == tiny.QType.IQ1_M:
        words = made[..., -8:].view(np.uint16)
        words &= 0x0FFF
        words |= (bits >> np.array([0, 4, 8, 12], np.uint16)) << 12
    else:
        made[..., :2] = bits.reshape(1).view(np.uint8)
    return made


# F32 weights' logits may be off by so much on CUDA, whose matmul rounds activations to F16. On an H200
# (2026-11-22) they were off by 0.0901 at most over the goldens, and by 0.158 at most in what else is held to
# this (test_model.py's trees). Logits have standard deviation 2 to 3.5. It decides which tokens must agree.
CUDA_BOUND = 0.17
# The logits of a router's experts may be so close: closer ones may change places by a GPU's rounding. On an
# H200 the cases whose closest were 0.0002 and 0.0008 apart failed, and those of 0.0032 and more passed. How
# far rounding moves them depends on the model: of a Gemma 4 two that were 0.0049 apart changed places, where
# transformers rounded to F16 moves such pairs by up to 0.011; its goldens keep that distance (gemma4_rounding.py).
ROUTER_GAP = 0.003


# It says where a NextN head is: none is loaded, in the model's own file, or in another.
Head = None | bool | Path


def open_model(
    native: Library,
    path: Path,
    device: str = "cpu",
    *,
    head: Head = None,
    drafter: Path | None = None,
    cpu_experts: int = 0,
    layers: Sequence[int] = (),
    draft_device: str | None = None,
    experts_at_home: bool = False,
) -> Model:
    file = File(path, native)
    own = None if drafter is None else File(drafter, native)
    return Model(
        file, device, head=_head_file(file, head), drafter=own, cpu_experts=cpu_experts, layers=layers,
        draft_device=draft_device,
        experts_at_home=experts_at_home,
    )  # fmt: skip


def memory(native: Library, path: Path, device: str = "cpu", *, head: Head = None, n_draft: int = 0) -> Memory:
    """Returns what an engine with a sequence of 64 positions that drafts would need."""
    file = File(path, native)
    params = EngineParams(n_ctx=64, n_draft=n_draft)
    return file.plan_memory(device, params, _head_file(file, head))


def _head_file(file: File, head: Head) -> File | None:
    if isinstance(head, Path):
        return File(head, file.library)
    return file if head else None


def open_engine(model: Model, **params: int | str) -> Engine:
    """Opens an engine with f32 KV, 64 rows and 1 thread unless said otherwise. Threads that wait for each
    other on a busy machine cost tests five times what they save (test_invariance compares 1 and 2)."""
    filled = {"n_rows": 64, "n_threads": 1, "kv_type": "f32"} | params
    return Engine(model, EngineParams(**filled))  # type: ignore[arg-type]


def open_sequence(model: Model, **params: int | str) -> Timeline:
    """Opens the one sequence of an engine of its own, which is its `engine`."""
    return open_engine(model, **params).sequence()


# ---- one step of one sequence


def prefill(sequence: Timeline, tokens: Sequence[int], *, last: bool = True) -> int | None:
    """Reads all of a prompt, or its next part, cut where chunks end. Returns the choice after it if it is the
    last part."""
    chunk, past = sequence.engine.info.n_chunk, sequence.info.n_past
    ends = [*range(chunk - past % chunk, len(tokens), chunk), len(tokens)]
    choice = None
    for begin, end in zip([0, *ends], ends, strict=False):
        choice = sequence.prefill(tokens[begin:end], last and end == len(tokens))
    return choice


def read(cache: Prefixes, sequence: Any, prompt: Sequence[int], sizes: Sequence[int] = ()) -> int:
    """Reads a prompt as a generation does that goes on from a kept beginning, in chunks that have so many tokens in
    turn, or n_chunk. Returns where it went on."""
    at = past = cache.resume(sequence, tuple(prompt))
    n_chunk = sequence.engine.info.n_chunk
    ends, most = cache.ends(sequence), cycle([min(size, n_chunk) for size in sizes] or [n_chunk])
    while at < len(prompt):
        end = min(next((end for end in ends if at < end), len(prompt)), at + next(most), len(prompt))
        sequence.prefill(prompt[at:end], end == len(prompt))
        if end in ends:
            cache.reached(sequence)
        at = end
    return past


def start(sequence: Timeline, prompt: Sequence[int]) -> int:
    """Reads a whole prompt. Returns the first token after it."""
    choice = prefill(sequence, prompt)
    assert choice is not None
    return choice


def draft(sequence: Timeline, anchor: int, n: int, source: Source = Source.NEXTN) -> None:
    """Drafts a chain of n, which stay on the device."""
    sequence.engine.draft([Drafts(sequence, anchor, n, source)])


def follow(sequences: Sequence[Timeline], drafts: Sequence[int] = (), source: Source = Source.NEXTN) -> None:
    """Begins a round after what the round ahead chooses, which has these sequences, with so many drafts of
    each."""
    counts = drafts or [0] * len(sequences)
    rows = [Rows(each, n=n + 1, anchor=CHOSEN, source=source) for each, n in zip(sequences, counts, strict=True)]
    sequences[0].engine.begin(rows)


def verify(sequence: Timeline, tokens: IntArray, parents: IntArray | None = None) -> list[int]:
    """Returns the target's choice after each row; raises NumericError where the logits were not finite."""
    return _alone(sequence, Rows(sequence, tokens, parents))


def verify_draft(sequence: Timeline, n: int) -> list[int]:
    """Verifies the last draft's anchor and its first n tokens."""
    return _alone(sequence, Rows(sequence, n=n + 1))


def _alone(sequence: Timeline, rows: Rows) -> list[int]:
    (choices,) = sequence.engine.verify([rows])
    if isinstance(choices, Exception):
        raise choices
    return choices


# ---- decoding


def step(sequence: Timeline, token: int) -> np.ndarray:
    """Decodes one token plainly. Returns its logits."""
    verify(sequence, [token])
    logits = sequence.logits(0)
    sequence.commit([0])
    return logits


def choices(sequence: Timeline, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Returns what is chosen after the prompt, and after each of the tokens behind it but the last."""
    chosen = [start(sequence, prompt)]
    for token in tokens[:-1]:
        chosen += verify(sequence, [token])
        sequence.commit([0])
    return chosen


def greedy(sequence: Timeline, prompt: Sequence[int], n: int) -> list[int]:
    """Returns the n tokens that follow the prompt."""
    out = [start(sequence, prompt)]
    while len(out) < n:
        (choice,) = verify(sequence, out[-1:])
        sequence.commit([0])
        out.append(choice)
    return out


@dataclass
class Decoded:
    """Decoded is what was decoded: the tokens after the prompt, the accepted drafts of each round, and the
    logits (V,) that chose each token, where they were asked for."""

    tokens: list[int]
    accepted: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)


def decode(
    sequence: Timeline,
    prompt: Sequence[int],
    n: int,
    gamma: int | Sequence[int] = 0,
    *,
    logits: bool = False,
    source: Source = Source.NEXTN,
) -> Decoded:
    """Decodes at least n tokens after the prompt, from an empty timeline. `gamma` counts the drafts of all
    rounds, or of each."""
    sequence.reset()
    out = Decoded([start(sequence, prompt)])
    if logits:
        out.logits.append(sequence.logits(0))
    return go_on(sequence, out, n, gamma, logits=logits, source=source)


def go_on(
    sequence: Timeline,
    out: Decoded,
    n: int,
    gamma: int | Sequence[int] = 0,
    *,
    logits: bool = False,
    source: Source = Source.NEXTN,
) -> Decoded:
    """Runs rounds until out holds n tokens, the last of which is the anchor."""
    while len(out.tokens) < n:
        size = gamma if isinstance(gamma, int) else gamma[len(out.accepted) % len(gamma)]
        anchor = out.tokens[-1]
        if size:
            draft(sequence, anchor, size, source)
            choices = verify_draft(sequence, size)
            rows = [anchor, *sequence.drafted(size)]
        else:
            rows, choices = [anchor], verify(sequence, [anchor])
        path, following = sequence.accept(rows, None, choices)
        if logits:
            out.logits += [sequence.logits(row) for row in path]
        sequence.commit(path)
        out.tokens += [*(rows[row] for row in path[1:]), following]
        out.accepted.append(len(path) - 1)
    return out


def decode_together(
    sequences: Sequence[Timeline],
    prompts: Sequence[Sequence[int]],
    n: int,
    gamma: int | Sequence[int] = 0,
) -> list[Decoded]:
    """Decodes at least n tokens after each prompt, with all sequences of one engine in each step. `gamma`
    counts the drafts of all sequences, or of each. Those that have n tokens leave the steps."""
    engine = sequences[0].engine
    gammas = [gamma] * len(sequences) if isinstance(gamma, int) else gamma
    out = []
    for sequence, prompt in zip(sequences, prompts, strict=True):
        sequence.reset()
        out.append(Decoded([start(sequence, prompt)]))
    while going := [at for at, each in enumerate(out) if len(each.tokens) < n]:
        drafting = [at for at in going if gammas[at]]
        if drafting:
            engine.draft([Drafts(sequences[at], out[at].tokens[-1], gammas[at]) for at in drafting])
        rows = [Rows(sequences[at], None if gammas[at] else out[at].tokens[-1:], n=gammas[at] + 1) for at in going]
        for at, choices in zip(going, engine.verify(rows), strict=True):
            if isinstance(choices, Exception):
                raise choices
            drafts = sequences[at].drafted(gammas[at]) if gammas[at] else []
            tokens = [out[at].tokens[-1], *drafts]
            path, following = sequences[at].accept(tokens, None, choices)
            sequences[at].commit(path)
            out[at].tokens += [*(tokens[row] for row in path[1:]), following]
            out[at].accepted.append(len(path) - 1)
    return out


def chain_logits(sequence: Timeline, tokens: Sequence[int], width: int) -> np.ndarray:
    """Returns logits (rows, V) of tokens verified and committed `width` at a time."""
    out = []
    for i in range(0, len(tokens), width):
        rows = tokens[i : i + width]
        verify(sequence, rows)
        out += [sequence.logits(r) for r in range(len(rows))]
        sequence.commit(range(len(rows)))
    return np.stack(out)


def random_tree(rng: np.random.Generator, n: int) -> list[int]:
    """Returns the parents of n rows in depth-first order: each new row hangs below some row of the last
    path."""
    parents, path = [-1], [0]
    for row in range(1, n):
        keep = int(rng.integers(1, len(path) + 1)) if rng.random() < 0.5 else len(path)
        parents.append(path[keep - 1])
        path = [*path[:keep], row]
    return parents


def root_path(parents: Sequence[int], row: int) -> list[int]:
    """Returns the rows from row 0 down to `row`."""
    rows = [row]
    while parents[rows[-1]] >= 0:
        rows.append(parents[rows[-1]])
    return rows[::-1]
