"""An assistant changes no token, and its drafts depend on what is committed alone: not on rows that were rejected, on
company, or on where a text was resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import drive
import numpy as np
import pytest
import tiny_gemma4
from depth import deeper, deeper_but, pairs
from drive import Decoded
from identity import Same
from op_run import poison
from tiny_gemma4 import ASSISTANT, ASSISTANT_SEED, CASES, ORDERED

from luce.bench import oracle_gemma4
from luce.bench.oracle_model import Rule
from luce.convert.gemma4_layout import Config
from luce.errors import ArgumentError, Cancelled, NumericError
from luce.native import Drafts, Engine, File, Library, Model, Rows, Source
from luce.native import Sequence as Timeline
from luce.native.structs import PAGE, DrafterParams, EngineParams, Sampling

SHAPE, ACCEPT = "gemma4-mini", 0.75
SAMPLINGS = {
    "greedy": Sampling(),
    "top-k": Sampling(temperature=0.7, top_k=40, seed=1),
    "min-p": Sampling(temperature=1.5, top_k=200, top_p=0.97, min_p=0.02, seed=3),
}
GAMMAS = (1, 2, 3, 4, 8)
# Models of several windows and of layers that share K and V, and the assistant of each.
SEVERAL: dict[str, tuple[Config, int, Config]] = {
    "golden": (*CASES["dense"], ASSISTANT),
    "window-7": (
        Config(sliding=(True, False, True, False), window=7, v_is_k=True), 3, replace(ASSISTANT, window=7)),
    "window-300": (
        Config(sliding=(True, False, True, False), window=300, v_is_k=True), 3, replace(ASSISTANT, window=300)),
    "shared": (*CASES["per-layer"], replace(ASSISTANT, window=11, v_is_k=False, n_head_kv_swa=1)),
    "experts": (*CASES["experts"], replace(ASSISTANT, window=9)),
    "ordered": (*CASES["per-layer"], ORDERED),
}  # fmt: skip


class Files(NamedTuple):
    target: Path
    assistant: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Files]:
    """Gives files(name): of SEVERAL, whose assistants have random weights and are always wrong, or "oracle", whose
    drafts are right as often as its rule says."""
    folder, made = tmp_path_factory.mktemp("assistants"), dict[str, Files]()

    def make(name: str) -> Files:
        if name not in made:
            target, assistant = folder / f"{name}.gguf", folder / f"{name}-assistant.gguf"
            if name == "oracle":
                oracle_gemma4.make_oracle(target, SHAPE, seed=3)
                oracle_gemma4.make_assistant(assistant, target, SHAPE, seed=3, accept=ACCEPT)
            else:
                config, seed, own = SEVERAL[name]
                tiny_gemma4.write(target, config, tiny_gemma4.layout(config, seed))
                tiny_gemma4.write(assistant, own, tiny_gemma4.layout(own, ASSISTANT_SEED))
            made[name] = Files(target, assistant)
        return made[name]

    return make


@pytest.fixture(scope="module")
def model_of(native: Library, device: str, files: Callable[[str], Files]) -> Callable[[str], Model]:
    made = dict[str, Model]()

    def make(name: str) -> Model:
        if name not in made:
            made[name] = drive.open_model(native, files(name).target, device, head=files(name).assistant)
        return made[name]

    return make


RULE = Rule(oracle_gemma4.SHAPES[SHAPE].n_vocab, 3, ACCEPT)


def tokens_of(n: int, seed: int = 1, n_vocab: int = 384) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, n_vocab, n)]


def drafts_of(sequence: Timeline, anchor: int, n: int = 4) -> list[int]:
    drive.draft(sequence, anchor, n)
    return sequence.drafted(n)


def accepted_by_rule(anchor: int, gamma: int, n: int) -> list[int]:
    """Returns the accepted drafts of each round until n tokens are there, the first of them the anchor."""
    found, have = [], 1
    while have < n:
        token, right = anchor, 0
        while right < gamma and RULE.draft(token) == RULE.successor(token):
            token, right = int(RULE.successor(token)), right + 1
        anchor = int(RULE.successor(token))
        found.append(right)
        have += right + 1
    return found


# ---- the same tokens


@pytest.mark.parametrize(
    ("name", "kv_type", "sampling"),
    pairs((*SEVERAL, "oracle"), ("f32", "f16", "q8_0"), SAMPLINGS,
          ("shared", "f16", "min-p"), ("ordered", "f16", "min-p"), ("oracle", "f16", "min-p")))  # fmt: skip
def test_every_gamma_gives_the_tokens_of_plain_decoding(
    name: str, kv_type: str, sampling: str, model_of: Callable[[str], Model], same: Same
) -> None:
    chosen, n, model = SAMPLINGS[sampling], 40, model_of(name)
    sequence = drive.open_sequence(model, n_ctx=256, n_rows=9, n_draft=8, kv_type=kv_type)
    sequence.set_sampling(chosen)
    prompt, accepted = tokens_of(30), 0
    without = drive.open_sequence(model, n_ctx=256, n_rows=1, kv_type=kv_type)
    without.set_sampling(chosen)
    plain = drive.decode(without, prompt, n).tokens
    same(drive.decode(sequence, prompt, n).tokens, plain, n)
    for gamma in GAMMAS:
        found = drive.decode(sequence, prompt, n, gamma)
        same(found.tokens, plain, n)
        accepted += sum(found.accepted)
    same(drive.decode(sequence, prompt, n, (3, 0, 8, 1, 0, 0, 5)).tokens, plain, n)
    if name == "oracle" and sampling == "greedy":
        assert accepted > 60, "rounds of all kinds are wanted"


@pytest.mark.parametrize("gamma", deeper_but(GAMMAS, 3))
def test_acceptance_is_what_the_file_sets(gamma: int, model_of: Callable[[str], Model]) -> None:
    """A prompt in several chunks, and one that is shorter than a window."""
    sequence = drive.open_sequence(model_of("oracle"), n_ctx=1024, n_rows=9, n_draft=8, n_chunk=256, kv_type="f16")
    for prompt in ([3, 1, 4], tokens_of(600)):
        found = drive.decode(sequence, prompt, 100, gamma)
        assert found.tokens[1:100] == RULE.continuation(found.tokens[0], 99)
        assert found.accepted == accepted_by_rule(found.tokens[0], gamma, 100)


# ---- what a draft depends on


@pytest.mark.parametrize("name", deeper_but(SEVERAL, "window-7", "ordered"))
def test_any_turns_leave_the_tokens_bytes_and_drafts_of_plain_decoding(
    name: str, model_of: Callable[[str], Model]
) -> None:
    """Chains, trees with moved rows and rejected ones take turns, over scratch and free pages that are poisoned."""
    engine = drive.open_engine(model_of(name), n_ctx=1024, n_draft=8, n_rows=40, n_sequences=2, n_chunk=PAGE)
    sequence, plain = engine.sequence(), engine.sequence()
    rng, prompt = np.random.default_rng(5), tokens_of(240)
    assert drive.start(sequence, prompt) == drive.start(plain, prompt)
    for number in range(24):
        rows = tokens_of(int(rng.integers(1, 30)), int(rng.integers(1 << 30)))
        poison(engine)
        for n in rng.integers(1, 9, int(rng.integers(0, 3))):
            drafts_of(sequence, rows[0], int(n))
        parents = drive.random_tree(rng, len(rows))
        drive.verify(sequence, rows, parents)
        path = drive.root_path(parents, int(rng.integers(len(rows))))
        sequence.commit(path)
        for token in (rows[row] for row in path):
            drive.step(plain, token)
        poison(engine)
        assert drafts_of(sequence, 9, 8) == drafts_of(plain, 9, 8)
        if number % 6 == 5:
            assert sequence.dump() == plain.dump()


def test_rejected_rows_leave_no_trace_in_drafts(model_of: Callable[[str], Model]) -> None:
    sequence = drive.open_sequence(model_of("golden"), n_ctx=256, n_draft=8, n_rows=9)
    drive.prefill(sequence, tokens_of(30))
    before = drafts_of(sequence, 7, 8)
    for junk in ([1, 2, 3, 4], [8, 8, 8, 8, 8, 8, 8, 8]):
        drive.verify(sequence, junk)
        assert drafts_of(sequence, 7, 8) == before
    drive.verify(sequence, [7, 300, 300, 300])
    sequence.commit([0])
    after = drafts_of(sequence, 9, 8)
    sequence.reset()
    drive.prefill(sequence, tokens_of(30))
    drive.step(sequence, 7)
    assert drafts_of(sequence, 9, 8) == after


def test_company_changes_neither_tokens_nor_drafts(model_of: Callable[[str], Model], same: Same) -> None:
    engine = drive.open_engine(model_of("oracle"), n_ctx=512, n_draft=8, n_rows=9, n_sequences=4)
    alone = drive.open_sequence(model_of("oracle"), n_ctx=512, n_draft=8, n_rows=9)
    prompts, gammas = [tokens_of(n, n) for n in (5, 70, 300, 31)], [4, 1, 3, 0]
    together = drive.decode_together([engine.sequence() for _ in prompts], prompts, 40, gammas)
    for prompt, gamma, found in zip(prompts, gammas, together, strict=True):
        single = drive.decode(alone, prompt, 40, gamma)
        same(found.tokens, single.tokens, 40)
        assert found.accepted == single.accepted
    wrong = drive.open_engine(model_of("golden"), n_ctx=512, n_draft=8, n_rows=9, n_sequences=4)
    lone = drive.open_sequence(model_of("golden"), n_ctx=512, n_draft=8, n_rows=9)
    sequences = [wrong.sequence() for _ in prompts]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        drive.prefill(sequence, prompt)
    wrong.draft([Drafts(each, 7, n, Source.NEXTN) for each, n in zip(sequences, (4, 8, 1, 3), strict=True)])
    for sequence, prompt, n in zip(sequences, prompts, (4, 8, 1, 3), strict=True):
        lone.reset()
        drive.prefill(lone, prompt)
        assert sequence.drafted(n) == drafts_of(lone, 7, n)


@pytest.mark.parametrize("where", ["bytes", *deeper("device", "host")])
@pytest.mark.parametrize("name", deeper_but(("window-7", "window-300", "shared"), "window-7", "window-300"))
def test_a_resumed_text_has_the_same_drafts(
    name: str, where: str, model_of: Callable[[str], Model], same: Same
) -> None:
    """Pages behind windows are gone by then, and what is free is NaN."""
    engine = drive.open_engine(model_of(name), n_ctx=5 * PAGE, n_draft=8, n_rows=20, n_sequences=2, n_checkpoints=2,
                               n_chunk=PAGE)  # fmt: skip
    sequence, other = engine.sequence(), engine.sequence()
    prompt = tokens_of(3 * PAGE + 30)
    drive.prefill(sequence, prompt[: 3 * PAGE], last=False)
    kept = sequence.checkpoint()
    if where == "host":
        kept.to_host()
    elif where == "bytes":
        kept = engine.load_checkpoint(kept.save())
    plain = None
    for _ in range(2):
        first = drive.start(sequence, prompt[3 * PAGE :])
        drafts = drafts_of(sequence, first, 8)
        found = drive.go_on(sequence, Decoded([first]), 40, 4)
        plain = plain or (drafts, found.tokens)
        assert drafts == plain[0]
        same(found.tokens, plain[1], 40)
        other.reset()
        drive.prefill(other, tokens_of(PAGE + 9, 4))
        sequence.reset()
        poison(engine)
        sequence.resume(kept)
    other.resume(kept)
    assert drafts_of(other, 5, 8) == drafts_of(sequence, 5, 8)


# ---- rounds, lists and engines


def test_rounds_that_draft_on_the_device_give_the_tokens_of_plain_decoding(
    model_of: Callable[[str], Model]
) -> None:
    engine = drive.open_engine(model_of("oracle"), n_ctx=512, n_draft=8, n_rows=9, n_sequences=2)
    sequence, plain = engine.sequence(), engine.sequence()
    expected = drive.greedy(plain, tokens_of(60), 40)
    for n in GAMMAS:
        sequence.reset()
        out = [drive.start(sequence, tokens_of(60))]
        engine.begin([Rows(sequence, n=n + 1, anchor=out[0], source=Source.NEXTN)])
        while len(out) < len(expected):
            drive.follow([sequence], [n])
            (done,) = engine.wait()
            assert not isinstance(done, Exception) and engine.under_way == 1
            path, following = sequence.accept(done.tokens, None, done.choices)
            out += [*(done.tokens[row] for row in path[1:]), following]
        engine.wait()
        assert out[: len(expected)] == expected, n


def test_a_list_has_several_assistants(device: str, native: Library, files: Callable[[str], Files]) -> None:
    """They have no KV of their own, and nothing is fed to them; a part of the vocabulary is one's first tokens."""
    target, assistant = files("golden")
    other = target.with_name("other.gguf")
    tiny_gemma4.write(other, ASSISTANT, tiny_gemma4.layout(ASSISTANT, 5))
    drafters = [(File(assistant, native), None), (File(other, native), "assistant")]
    model = Model(File(target, native), device, drafters=drafters)  # type: ignore[arg-type]
    uses = (DrafterParams(1, 3), DrafterParams(0, 8), DrafterParams(0, 4, 128))
    engine = Engine(model, EngineParams(n_ctx=256, n_rows=9, n_threads=1, kv_type="f32", drafters=uses))
    assert [each.kind for each in model.info.drafters] == ["assistant"] * 2
    assert [(each.n_draft, each.n_part, each.n_block, each.form, each.has_kv) for each in engine.drafters] == [
        (3, 0, 0, 0, 0), (8, 0, 0, 0, 0), (4, 128, 0, 0, 0)]  # fmt: skip
    assert {cost.drafts for cost in engine.costs()} == {0, 1, 3}, "no feed"
    sequence = engine.sequence()
    drive.prefill(sequence, tokens_of(30))
    found = []
    for index, n in enumerate((3, 8, 4)):
        engine.draft([Drafts(sequence, 7, n, index)])
        found.append(sequence.drafted(n))
    assert found[0] != found[1][:3] and all(token < 128 for token in found[2])
    one = drive.open_model(native, target, device, head=assistant)
    alone = drive.open_sequence(one, n_ctx=256, n_draft=8, n_rows=9)
    drive.prefill(alone, tokens_of(30))
    assert drafts_of(alone, 7, 8) == found[1]
    with pytest.raises(ArgumentError, match="n_draft is 9 of drafters"):
        Engine(model, EngineParams(n_ctx=64, drafters=(DrafterParams(0, 9),)))


def test_a_part_of_an_ordered_vocabulary_has_first_tokens_alone(
    device: str, native: Library, files: Callable[[str], Files]
) -> None:
    """Of the clusters of most rows some tokens are below 128, which are those of the part."""
    target, assistant = files("ordered")
    model = Model(File(target, native), device, drafters=[(File(assistant, native), None)])
    uses = (DrafterParams(0, 8), DrafterParams(0, 8, 128))
    engine = Engine(model, EngineParams(n_ctx=256, n_rows=9, n_threads=1, kv_type="f32", drafters=uses))
    sequence = engine.sequence()
    drive.prefill(sequence, tokens_of(30))
    found = []
    for index in range(2):
        engine.draft([Drafts(sequence, 7, 8, index)])
        found.append(sequence.drafted(8))
    assert max(found[0]) >= 128 > max(found[1]) and len(set(found[1])) > 2


def test_a_context_takes_no_memory_of_it(native: Library, files: Callable[[str], Files]) -> None:
    target, assistant = files("golden")
    file, head = File(target, native), File(assistant, native)
    for n_ctx in (256, 2048):
        params = EngineParams(n_ctx=n_ctx, n_rows=9)
        plain = file.plan_memory("cpu", params)
        drafting = file.plan_memory("cpu", replace(params, n_draft=8), head)
        assert drafting.kv == plain.kv
        loaded = sum(tensor.size_bytes for tensor in head.tensors)
        scales = 4 * ASSISTANT.n_layer  # They are numbers, and no tensors of the core's.
        assert drafting.weights - plain.weights == loaded - scales
        rows = 2 * 9 + 1
        assert drafting.state - plain.state >= 4 * rows * CASES["dense"][0].n_embd


def test_pages_are_asked_for_by_verifies_alone(model_of: Callable[[str], Model]) -> None:
    sequence = drive.open_sequence(model_of("golden"), n_ctx=2 * PAGE, n_draft=8, n_rows=9, n_pages=1, n_chunk=PAGE)
    drive.prefill(sequence, tokens_of(PAGE))
    assert len(drafts_of(sequence, 7, 8)) == 8 and sequence.info.n_pages == 1


def test_a_cancel_ends_a_draft_and_the_text_goes_on(model_of: Callable[[str], Model]) -> None:
    sequence = drive.open_sequence(model_of("oracle"), n_ctx=256, n_draft=4, n_rows=5)
    expected = drive.decode(sequence, [5, 6], 30, 4)
    found = drive.decode(sequence, [5, 6], 12, 4)
    sequence.engine.cancel()
    with pytest.raises(Cancelled):
        drive.draft(sequence, found.tokens[-1], 4)
    assert drive.go_on(sequence, found, 30, 4).tokens[:30] == expected.tokens[:30]


@pytest.mark.parametrize("name", ["golden", "ordered"])
def test_damaged_weights_are_the_drafts_error_alone(
    name: str, device: str, native: Library, files: Callable[[str], Files], tmp_path: Path
) -> None:
    config = SEVERAL[name][2]
    weights: Any = tiny_gemma4.layout(config, ASSISTANT_SEED)
    weights["output_norm.weight"][:] = np.nan
    damaged = tiny_gemma4.write(tmp_path / "damaged.gguf", config, weights)
    target = files(name).target
    model = drive.open_model(native, target, device, head=damaged)
    sequence = drive.open_sequence(model, n_ctx=128, n_draft=4, n_rows=5)
    expected = drive.decode(sequence, [1, 2, 3], 20).tokens
    found = drive.decode(sequence, [1, 2, 3], 5)
    drive.draft(sequence, found.tokens[-1], 4)
    with pytest.raises(NumericError, match="not finite"):
        sequence.drafted(4)
    assert drive.go_on(sequence, found, 20).tokens == expected
