"""DFlash2 and DSpark drafters through the core give the tokens and the committed bytes of plain decoding, as chains
and as trees, whether their drafts are right or wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import drive
import numpy as np
import pytest
import tiny
import tiny_dflash2
from depth import deeper, pairs
from tiny_dflash2 import CASES, More

from luce.decode.engine import Engine
from luce.decode.events import Finished, Warned
from luce.decode.request import Request
from luce.errors import ArgumentError
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


def tokens_of(n: int, seed: int = 1) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 256, n)]


class Pair(NamedTuple):
    """A target and a drafter that it was opened with."""

    model: Model
    case: More


Opened = Callable[[str, Sequence[int]], Pair]


@pytest.fixture
def opened(native: Library, device: str, tmp_path: Path) -> Opened:
    """Opens a case with random weights, or with those that know a text by heart."""

    def open_(name: str, text: Sequence[int] = ()) -> Pair:
        case = replace(CASES[name], base=replace(CASES[name].base, target=replace(CASES[name].base.target, n_nextn=1)))
        made = tiny_dflash2.weights(case)
        if text:
            room = replace(case, top_k=63) if not case.markov else case
            case, made = tiny_dflash2.remembering(room, text)
        target = tiny.write(tmp_path / f"{name}.gguf", case.base.target, tiny.layout(case.base.target, case.base.seed))
        drafter = tiny_dflash2.write(tmp_path / f"{name}-{len(text)}.gguf", case, made)
        return Pair(drive.open_model(native, target, device, head=True, drafter=drafter), case)

    return open_


def grown(sequence: Timeline, out: drive.Decoded, n: int, case: More, budgets: Sequence[int]) -> None:
    """Runs rounds of trees until out holds n tokens."""
    while len(out.tokens) < n:
        budget, anchor = budgets[len(out.accepted) % len(budgets)], out.tokens[-1]
        drive.draft(sequence, anchor, case.n_draft, Source.DFLASH)
        lists = sequence.lists(case.n_draft, case.candidates, Form.CONDITIONAL)
        tokens, parents = sequence.tree(anchor, lists, budget)
        path, following = sequence.accept(tokens, parents, drive.verify(sequence, tokens, parents))
        sequence.commit(path)
        out.tokens += [*(tokens[row] for row in path[1:]), following]
        out.accepted.append(len(path) - 1)


@pytest.mark.parametrize(
    ("name", "sampling", "right"),
    pairs(CASES, SAMPLINGS, (True, False), *product(("dflash2-windows", "dspark-sinks"), ("greedy",), (True, False))))
def test_chains_and_trees_give_the_tokens_and_bytes_of_plain_decoding(
    right: bool, name: str, sampling: str, opened: Opened
) -> None:
    prompt = tokens_of(250, 5)  # Rounds go over the end of a page.
    plain = drive.open_sequence(opened(name, ()).model, n_ctx=512)
    plain.set_sampling(SAMPLINGS[sampling])
    expected = drive.decode(plain, prompt, N)
    model, case = opened(name, expected.tokens if right else ())
    engine = drive.open_engine(model, n_ctx=512, n_sequences=2, n_draft=2, blocks=1, n_top=1)
    drafted, plain = engine.sequence(), engine.sequence()
    for each in (drafted, plain):
        each.set_sampling(SAMPLINGS[sampling])
    expected = drive.decode(plain, prompt, N)
    most = case.n_draft
    found = drive.decode(drafted, prompt, N // 3, (most, 1, most), source=Source.DFLASH)
    chains = found.accepted[:]
    drive.go_on(drafted, found, N // 3 + 3, gamma=2)  # A round of the NextN head comes in between.
    n = len(found.accepted)
    grown(drafted, found, N, case, (3, 20, 1, 63))
    drive.go_on(plain, expected, len(found.tokens))
    assert found.tokens == expected.tokens[: len(found.tokens)]
    assert drafted.dump() == plain.dump()
    if right and sampling == "greedy":
        assert sum(chains) >= len(chains) and sum(found.accepted[n:]) > 3


@pytest.mark.parametrize("name", [*deeper("dflash2-causal", "dspark"), "dflash2-windows", *deeper("dspark-sinks")])
def test_sequences_in_company_draft_what_they_draft_alone(name: str, opened: Opened) -> None:
    """There are more blocks than fit into one step, of sequences of different lengths and settings."""
    model, case = opened(name, ())
    n, k = case.n_draft, case.candidates
    engine = drive.open_engine(model, n_ctx=400, n_sequences=11, blocks=1, n_rows=n + 1, n_top=1)
    sequences = [engine.sequence() for _ in range(11)]
    alone = []
    for seed, sequence in enumerate(sequences):
        sequence.set_sampling(list(SAMPLINGS.values())[seed % 3])
        drive.prefill(sequence, tokens_of(20 + 23 * seed, seed))
        drive.draft(sequence, seed, n, Source.DFLASH)
        lists = sequence.lists(n, k, Form.CONDITIONAL)
        alone.append((sequence.drafted(n), list(lists.ids), list(lists.scores)))
    engine.draft([Drafts(each, seed, n, Source.DFLASH) for seed, each in enumerate(sequences)])
    for sequence, expected in zip(sequences, alone, strict=True):
        lists = sequence.lists(n, k, Form.CONDITIONAL)
        assert (sequence.drafted(n), list(lists.ids), list(lists.scores)) == expected
    found = engine.verify([Rows(each, n=5) for each in sequences])
    for seed, (sequence, choices) in enumerate(zip(sequences, found, strict=True)):
        assert choices == drive.verify(sequence, [seed, *alone[seed][0][:4]])


@pytest.mark.parametrize("name", ["dflash2-windows", "dspark-reduced"])
def test_a_checkpoint_brings_the_drafters_context(name: str, opened: Opened) -> None:
    model, case = opened(name, ())
    engine = drive.open_engine(model, n_sequences=2, n_checkpoints=2, blocks=1, n_ctx=400, n_chunk=256, n_rows=17)
    cold, warm, prompt = engine.sequence(), engine.sequence(), tokens_of(300)

    def block(sequence: Timeline) -> list[int]:
        drive.draft(sequence, 5, case.n_draft, Source.DFLASH)
        return sequence.drafted(case.n_draft)

    drive.prefill(cold, prompt[:256], last=False)
    kept = cold.checkpoint()
    drive.prefill(cold, prompt[256:])
    expected, data = block(cold), kept.save()
    for source in (kept, engine.load_checkpoint(data)):
        drive.prefill(warm, tokens_of(30, seed=4))  # Another text comes in between.
        warm.resume(source)
        drive.prefill(warm, prompt[256:])
        assert block(warm) == expected
        assert warm.dump() == cold.dump()
        warm.reset()


@pytest.mark.parametrize("name", ["dflash2", "dspark"])
def test_the_first_draft_of_a_sequence_that_samples_has_the_targets_noise(
    name: str, opened: Opened, native: Library
) -> None:
    """It is what luce_sample takes of the scores behind the anchor: of the candidates, or of all of the vocabulary."""
    model, case = opened(name, ())
    sequence = drive.open_sequence(model, n_ctx=64, blocks=1, n_top=1, n_rows=9)
    drive.prefill(sequence, tokens_of(20))
    n, k, moved = case.n_draft, case.candidates, 0
    drive.draft(sequence, 9, n, Source.DFLASH)
    greedy = sequence.drafted(1)
    lists = sequence.lists(n, k, Form.CONDITIONAL)
    scores = np.full(case.base.target.n_vocab, -np.inf, np.float32)
    scores[list(lists.ids[0:k])] = list(lists.scores[0:k])
    if case.markov:
        w = tiny_dflash2.weights(case)
        scores = sequence.logits(0) + w["markov_w2.weight"] @ w["markov_w1.weight"][9]
    for seed in range(12):
        sampling = Sampling(temperature=4.0, top_k=10, top_p=0.95, seed=seed)
        sequence.set_sampling(sampling)
        drive.draft(sequence, 9, n, Source.DFLASH)
        assert sequence.drafted(1) == [native.sample(scores, sampling, 21)]
        moved += sequence.drafted(1) != greedy
        if not case.markov:  # The lists that a tree is grown of begin with what the chain has.
            assert [sequence.lists(n, k, Form.CONDITIONAL).at(i)[0] for i in range(n)] == sequence.drafted(n)
    assert moved > 3


@pytest.mark.parametrize("name", ["dflash2", *deeper("dspark", "dspark-reduced")])
@pytest.mark.parametrize(("spec", "budget"), [("dflash", None), ("dflash", 12), ("auto", 20)])
def test_generations_are_those_of_plain_decoding(
    name: str, spec: str, budget: int | None, native: Library, device: str, tmp_path: Path
) -> None:
    """Three requests share an engine, greedy and sampled."""
    case = CASES[name]
    requests = [
        Request(tuple(tokens_of(20 + 7 * at, at)), 24, sampling, ignore_eos=True)
        for at, sampling in enumerate(SAMPLINGS.values())
    ]
    found = {}
    for by in ("off", "heart", "wrong"):
        target, drafter = tiny_dflash2.files(tmp_path, case)
        if by == "heart":
            known, made = tiny_dflash2.remembering(replace(case, top_k=case.top_k and 63), found["off"][0])
            drafter = tiny_dflash2.write(tmp_path / "heart.gguf", known, made)
        options = Options(ctx=128, spec="off" if by == "off" else spec, threads=1, sequences=3)
        options = options if by == "off" else replace(options, budget=budget)
        with Files(target, device=device, drafter=drafter) as files, Engine.open(files, options) as engine:
            ends = {at: event for at, event in engine.run(requests) if isinstance(event, Finished)}
        found[by] = [ends[at].tokens for at in range(3)]
    assert found["heart"] == found["wrong"] == found["off"]


@pytest.mark.parametrize(("name", "where"), [
    ("dflash2", "selector_hidden.weight"), ("dflash2", "blk.1.attn_conv_base"), ("dspark", "markov_w1.weight"),
    ("dspark-reduced", "fc.weight"),
])  # fmt: skip
def test_a_drafter_of_nan_gives_one_warning_and_the_same_tokens(
    name: str, where: str, native: Library, device: str, tmp_path: Path
) -> None:
    case = CASES[name]
    target, _ = tiny_dflash2.files(tmp_path, case)
    weights = tiny_dflash2.weights(case)
    weights[where] = np.full_like(weights[where], np.nan)
    drafter = tiny_dflash2.write(tmp_path / "nan.gguf", case, weights)
    request = Request(tuple(tokens_of(20)), 24, ignore_eos=True)
    with Files(target, device=device, drafter=drafter) as files:
        ends = []
        for spec in ("off", "dflash"):
            with Engine.open(files, Options(ctx=128, spec=spec, threads=1)) as engine:
                events = list(engine.generate(request))
            assert isinstance(events[-1], Finished)
            ends.append(events[-1].tokens)
    warnings = [event.message for event in events if isinstance(event, Warned)]
    assert len(warnings) == 1 and "dflash drafting failed and is off" in warnings[0]
    assert ends[0] == ends[1] and len(ends[0]) == 24


@pytest.mark.parametrize(("name", "where"), [
    ("dflash2", "selector_predecessor.weight"), ("dflash2", "selector_successor.weight"),
    ("dspark", "markov_w1.weight"),
])  # fmt: skip
def test_tables_that_are_damaged_in_part_change_no_token(
    name: str, where: str, native: Library, device: str, tmp_path: Path
) -> None:
    """Scores behind some candidates are not numbers, and those behind others are."""
    case = CASES[name]
    target, _ = tiny_dflash2.files(tmp_path, case)
    weights = tiny_dflash2.weights(case)
    weights[where][1::4] = np.nan
    drafter = tiny_dflash2.write(tmp_path / "nan.gguf", case, weights)
    request = Request(tuple(tokens_of(20)), 24, SAMPLINGS["warm"], ignore_eos=True)
    found = []
    for spec, budget in (("off", None), ("dflash", None), ("dflash", 12)):
        options = Options(ctx=128, spec=spec, threads=1, budget=budget)
        with Files(target, device=device, drafter=drafter) as files, Engine.open(files, options) as engine:
            end = list(engine.generate(request))[-1]
        assert isinstance(end, Finished)
        found.append(end.tokens)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(("sure", "left"), [(20.0, 12), (-2.0, 12), (-20.0, 0)])
def test_a_tree_is_cut_where_the_confidence_head_sees_no_use(
    sure: float, left: int, native: Library, device: str, tmp_path: Path
) -> None:
    """What it says is added to the scores of a list. One that is never sure leaves no draft. The text is the same."""
    case, at = CASES["dspark"], np.log(1 / (1 + np.exp(-sure)))
    target, plain = tiny_dflash2.files(tmp_path, case)
    weights = tiny_dflash2.weights(case)
    weights["conf_proj.weight"] = np.zeros((1, case.base.drafter.n_embd + case.rank), np.float32)
    weights["conf_proj.bias"] = np.array([sure], np.float32)
    drafter = tiny_dflash2.write(tmp_path / "confident.gguf", case, weights)
    scores = []
    for path in (plain, drafter):
        sequence = drive.open_sequence(
            drive.open_model(native, target, device, drafter=path), n_ctx=64, n_rows=16, blocks=1, n_top=1
        )
        drive.prefill(sequence, tokens_of(20))
        drive.draft(sequence, 5, case.n_draft, Source.DFLASH)
        lists = sequence.lists(case.n_draft, case.candidates, Form.CONDITIONAL)
        scores.append(np.array(list(lists.scores)))
    tokens, _ = sequence.tree(5, lists, 12)
    assert len(tokens) == 1 + left
    there = np.isfinite(scores[0])
    if left:
        assert np.allclose(scores[1][there], scores[0][there] + at, atol=1e-5)
    else:
        assert np.isinf(scores[1]).all()
    found = []
    for spec, sampling in product(("off", "dflash"), SAMPLINGS.values()):
        options = Options(ctx=128, spec=spec, threads=1, budget=12 if spec == "dflash" else None)
        with Files(target, device=device, drafter=drafter) as files, Engine.open(files, options) as engine:
            events = list(engine.generate(Request(tuple(tokens_of(20)), 24, sampling, ignore_eos=True)))
        assert isinstance(events[-1], Finished) and not any(isinstance(event, Warned) for event in events)
        found.append(events[-1].tokens)
    assert found[:3] == found[3:]


def test_lists_are_asked_for_as_they_are(opened: Opened) -> None:
    model, case = opened("dflash2", ())
    sequence = drive.open_sequence(model, n_ctx=64, n_rows=8, n_draft=3, n_top=4, blocks=1)
    drive.prefill(sequence, tokens_of(20))
    drive.draft(sequence, 5, 3)
    assert len(sequence.lists(3, 4).at(2)) == 4
    with pytest.raises(ArgumentError, match="the lists have form 2, those of the last draft 0"):
        sequence.lists(3, 5, Form.CONDITIONAL)
    drive.draft(sequence, 5, 7, Source.DFLASH)
    for k, form, message in (
        (4, Form.CONDITIONAL, "keeps 5 candidates of a draft, got 4"),
        (4, Form.INDEPENDENT, "the lists have form 1, those of the last draft 2"),
    ):
        with pytest.raises(ArgumentError, match=message):
            sequence.lists(7, k, form)
    without = drive.open_sequence(model, n_ctx=64, n_rows=8, blocks=1)
    drive.prefill(without, tokens_of(20))
    drive.draft(without, 5, 7, Source.DFLASH)
    with pytest.raises(ArgumentError, match="keeps 0 candidates"):
        without.lists(7, 5, Form.CONDITIONAL)
