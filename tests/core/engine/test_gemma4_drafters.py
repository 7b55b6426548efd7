"""Block drafters beside Gemma 4 on the CPU give the tokens and the committed bytes of plain decoding: as chains and as
trees, greedy and sampled, in company, after checkpoints, whether their drafts are right or wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import drive
import numpy as np
import pytest
import tiny_dflash
import tiny_dflash2
import tiny_gemma4
from depth import deeper, deeper_but, pairs
from tiny_dflash import GEMMA4, Case, drafter
from tiny_dflash2 import More

from luce.decode.engine import Engine
from luce.decode.events import Finished
from luce.decode.request import Request
from luce.native import Drafts, Form, Library, Model, Rows, Source
from luce.native import Sequence as Timeline
from luce.native.structs import Sampling
from luce.planning.opened import Files
from luce.planning.plan import Options

SAMPLINGS = {
    "greedy": Sampling(),
    "warm": Sampling(temperature=0.7, top_k=20, top_p=0.95, seed=1),
    "hot": Sampling(temperature=1.3, min_p=0.02, seed=2),
}
N = 40  # So many tokens are decoded.
_EXPERTS = tiny_gemma4.CASES["experts"]
_OF = {"sliding": (True, False), "causal": (True, False), "window": 20}
# Drafters with layers like Qwen3's, of each kind: with lists that depend on nothing, and on the token before.
CASES: dict[str, Case | More] = {
    "dense": GEMMA4["dense"],
    "per-layer": GEMMA4["per-layer"],
    "experts, DFlash2": More(
        base=Case(_EXPERTS[0], drafter(_EXPERTS[0], block_size=6, target_layer_ids=(0, 2, 4), **_OF), _EXPERTS[1]),
        rank=8, taps=2, group=16, top_k=8),
    "dense, DSpark": More(
        base=replace(GEMMA4["dense"], drafter=drafter(GEMMA4["dense"].target, block_size=7, **_OF)), rank=8,
        markov=True),
}  # fmt: skip


def base_of(case: Case | More) -> Case:
    return case.base if isinstance(case, More) else case


def n_draft(case: Case | More) -> int:
    return case.n_draft if isinstance(case, More) else case.drafter.block_size - 1


def tokens_of(n: int, seed: int = 1) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 256, n)]


class Pair(NamedTuple):
    """A target and a drafter that it was opened with."""

    model: Model
    case: Case | More


def files_of(folder: Path, name: str, text: Sequence[int] = ()) -> tuple[Path, Path, Case | More]:
    """Writes a target, and a drafter with random weights, or one that knows a text: by heart, or where its lists do not
    depend on the token before, which tokens it has most often."""
    case = CASES[name]
    made = tiny_dflash2.weights(case) if isinstance(case, More) else tiny_dflash.weights(case)
    if text and isinstance(case, More):
        case, made = tiny_dflash2.remembering(replace(case, top_k=63) if not case.markov else case, text)
    elif text and isinstance(case, Case):
        counts, ones = np.bincount(text, minlength=case.target.n_vocab), np.ones(case.drafter.n_embd, np.float32)
        made["output.weight"] = np.outer(counts, ones / len(ones)).astype(np.float32)
        made |= {"output_norm.weight": ones, "token_embd.weight": np.tile(ones, (len(counts), 1))}
        made |= {key: 0 * x for key, x in made.items() if key.endswith(("attn_output.weight", "ffn_down.weight"))}
        case = replace(case, own=("token_embd.weight", "output.weight"))
    target = tiny_dflash.write_target(folder / f"{name}.gguf", base_of(case))
    path = folder / f"{name}-{len(text)}.gguf"
    written = tiny_dflash2.write(path, case, made) if isinstance(case, More) else tiny_dflash.write(path, case, made)
    return target, written, case


Opened = Callable[[str, Sequence[int]], Pair]


@pytest.fixture
def opened(native: Library, tmp_path: Path) -> Opened:
    def open_(name: str, text: Sequence[int] = ()) -> Pair:
        target, drafter, case = files_of(tmp_path, name, text)
        return Pair(drive.open_model(native, target, drafter=drafter), case)

    return open_


def grown(sequence: Timeline, out: drive.Decoded, n: int, case: Case | More, budgets: Sequence[int]) -> None:
    """Runs rounds of trees until out holds n tokens."""
    form, k = (Form.CONDITIONAL, case.candidates) if isinstance(case, More) else (Form.INDEPENDENT, 16)
    while len(out.tokens) < n:
        budget, anchor = budgets[len(out.accepted) % len(budgets)], out.tokens[-1]
        drive.draft(sequence, anchor, n_draft(case), Source.DFLASH)
        tokens, parents = sequence.tree(anchor, sequence.lists(n_draft(case), k, form), budget)
        path, following = sequence.accept(tokens, parents, drive.verify(sequence, tokens, parents))
        sequence.commit(path)
        out.tokens += [*(tokens[row] for row in path[1:]), following]
        out.accepted.append(len(path) - 1)


def block_of(sequence: Timeline, anchor: int, n: int) -> tuple[list[int], np.ndarray]:
    """Returns the drafts of a block, and its logits (rows, V)."""
    drive.draft(sequence, anchor, n, Source.DFLASH)
    return sequence.drafted(n), np.stack([sequence.logits(row) for row in range(n)])


@pytest.mark.parametrize(
    ("name", "sampling", "right"), pairs(CASES, SAMPLINGS, (True, False), ("per-layer", "hot", False)))
def test_chains_and_trees_give_the_tokens_and_bytes_of_plain_decoding(
    right: bool, name: str, sampling: str, opened: Opened
) -> None:
    prompt = tokens_of(250, 5)  # Many windows have passed, and rounds go over the end of a page.
    plain = drive.open_sequence(opened(name, ()).model, n_ctx=512)
    plain.set_sampling(SAMPLINGS[sampling])
    expected = drive.decode(plain, prompt, N)
    model, case = opened(name, expected.tokens if right else ())
    engine = drive.open_engine(model, n_ctx=512, n_sequences=2, blocks=1, n_top=16)
    drafted, plain = engine.sequence(), engine.sequence()
    for each in (drafted, plain):
        each.set_sampling(SAMPLINGS[sampling])
    expected = drive.decode(plain, prompt, N)
    most = n_draft(case)
    found = drive.decode(drafted, prompt, N // 2, (most, 1, most), source=Source.DFLASH)
    drive.go_on(drafted, found, N // 2 + 2)  # Plain rounds come in between.
    grown(drafted, found, N, case, (3, 20, 1, 63))
    drive.go_on(plain, expected, len(found.tokens))
    assert found.tokens == expected.tokens[: len(found.tokens)]
    assert drafted.dump() == plain.dump()
    if right:
        assert sum(found.accepted) > 0
        assert not isinstance(case, More) or sampling != "greedy" or sum(found.accepted) > N // 4


@pytest.mark.parametrize("name", deeper_but(CASES, "dense, DSpark"))
def test_sequences_in_company_draft_what_they_draft_alone(name: str, opened: Opened) -> None:
    """There are more blocks than fit into one step, of sequences of different lengths and settings."""
    model, case = opened(name, ())
    n = n_draft(case)
    engine = drive.open_engine(model, n_ctx=400, n_sequences=9, blocks=1, n_rows=n + 1, n_top=4)
    sequences, alone = [engine.sequence() for _ in range(9)], []
    for seed, sequence in enumerate(sequences):
        sequence.set_sampling(list(SAMPLINGS.values())[seed % 3])
        drive.prefill(sequence, tokens_of(3 + 29 * seed, seed))
        alone.append(block_of(sequence, seed, n)[0])
    engine.draft([Drafts(each, seed, n, Source.DFLASH) for seed, each in enumerate(sequences)])
    assert [each.drafted(n) for each in sequences] == alone
    found = engine.verify([Rows(each, n=5) for each in sequences])
    for seed, (sequence, choices) in enumerate(zip(sequences, found, strict=True)):
        assert choices == drive.verify(sequence, [seed, *alone[seed][:4]])


@pytest.mark.parametrize("name", deeper_but(CASES, "experts, DFlash2"))
def test_a_checkpoint_brings_the_drafters_context(name: str, opened: Opened) -> None:
    """From the device, from host memory and from bytes: the trunk has let go what is behind its windows by then, and
    the drafter sees it still."""
    model, case = opened(name, ())
    engine = drive.open_engine(model, n_sequences=2, n_checkpoints=2, blocks=1, n_ctx=700, n_chunk=256, n_rows=17)
    cold, warm, prompt, n = engine.sequence(), engine.sequence(), tokens_of(560), n_draft(case)
    drive.prefill(cold, prompt[:512], last=False)
    kept = cold.checkpoint()
    drive.prefill(cold, prompt[512:])
    expected, dumped, data = block_of(cold, 5, n), cold.dump(), kept.save()
    for where in ("device", "host", "bytes"):
        if where == "host":
            kept.to_host()
        drive.prefill(warm, tokens_of(560, seed=4))  # Another text comes in between.
        warm.resume(engine.load_checkpoint(data) if where == "bytes" else kept)
        drive.prefill(warm, prompt[512:])
        found = block_of(warm, 5, n)
        assert found[0] == expected[0] and np.array_equal(found[1], expected[1])
        assert warm.dump() == dumped
        warm.reset()


@pytest.mark.parametrize("name", deeper_but(CASES, "dense"))
@pytest.mark.parametrize(("spec", "budget"), [("auto", 20), *deeper(("dflash", None), ("dflash", 12))])
def test_generations_are_those_of_plain_decoding(name: str, spec: str, budget: int | None, tmp_path: Path) -> None:
    """Three requests share an engine, greedy and sampled."""
    requests = [
        Request(tuple(tokens_of(20 + 7 * at, at)), 24, sampling, ignore_eos=True)
        for at, sampling in enumerate(SAMPLINGS.values())
    ]
    found: dict[str, list[tuple[int, ...]]] = {}
    for by in ("off", "right", "wrong"):
        text = [token for tokens in found["off"] for token in tokens] if by == "right" else []
        target, drafter, _ = files_of(tmp_path, name, text)
        options = Options(ctx=128, spec=spec, threads=1, sequences=3, budget=budget)
        options = Options(ctx=128, spec="off", threads=1, sequences=3) if by == "off" else options
        with Files(target, device="cpu", drafter=drafter) as files, Engine.open(files, options) as engine:
            ends = {at: event for at, event in engine.run(requests) if isinstance(event, Finished)}
        found[by] = [tuple(ends[at].tokens) for at in range(3)]
    assert found["right"] == found["wrong"] == found["off"]
