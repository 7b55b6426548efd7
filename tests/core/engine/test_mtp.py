"""MTP rounds through the core print the tokens of plain decoding, and accept what the oracle file sets.

What was compared is counted and recorded (identity.py); bench/identity_report.py makes a result row of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import box_model
import drive
import numpy as np
import pytest
import tiny
from depth import deeper, pairs
from drive import Decoded
from identity import Same
from tiny import Config

from luce.bench import oracle_model
from luce.bench.oracle_model import SHAPES, Rule
from luce.bench.oracle_tokenizer import MERGES, vocabulary
from luce.decode.events import Finished, Warned
from luce.decode.generation import Generation
from luce.decode.loop import Loop
from luce.decode.request import Request
from luce.errors import NumericError
from luce.files.tokenizer import Tokenizer
from luce.native import Checkpoint, File, Library, Model, Source
from luce.native import Sequence as Timeline
from luce.native.structs import Cost, Sampling
from luce.planning.plan import MAX_GAMMA
from luce.speculate.auto import Auto
from luce.speculate.drafting import Drafter, DraftSource, Fixed
from luce.speculate.prices import Costs

RANDOM = Config(n_layer=2, interval=2, n_embd=256, n_ff=256, n_head=4, n_head_kv=2, state_size=64,
                n_v_head=4, n_ctx=65536, n_nextn=1)  # fmt: skip
EXPERTS = tiny.with_experts(RANDOM)
GAMMAS = range(1, MAX_GAMMA + 1)
SAMPLINGS = {
    "greedy": Sampling(),
    "top-k": Sampling(temperature=0.7, top_k=40, seed=1),
    "top-p": Sampling(temperature=1.0, top_p=0.9, seed=2),
    "min-p": Sampling(temperature=1.5, top_k=200, top_p=0.97, min_p=0.02, seed=3),
}
# An oracle's right logit is 200 above the next: only such temperatures make it choose others at times.
HOT = {"greedy": 0.0, "top-k": 50.0, "top-p": 32.0, "min-p": 54.0}

# Greedy runs try every gamma; sampled ones, whose rounds are the same but for the choice, have them in turn.
TRIED = {"greedy": tuple(GAMMAS), "top-k": (1, 4, 8), "top-p": (2, 5, 7), "min-p": (3, 6, 8)}

BOX_PROMPTS = "def fibonacci(n):\n", "import os\n\n\nclass Store:\n    def __init__(self, path):\n"



@pytest.fixture(scope="session")
def oracle_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Gives oracle_file(accept), a file of the mini shape, or of another, made once."""
    folder = tmp_path_factory.mktemp("oracles")

    def make(accept: float, shape: str = "mini") -> Path:
        path = folder / f"{shape}-{accept}.gguf"
        if not path.exists():
            oracle_model.make_oracle(path, shape, seed=3, accept=accept)
        return path

    return make


def rule_of(accept: float) -> Rule:
    return Rule(SHAPES["mini"].n_vocab, 3, accept)


@pytest.fixture(scope="session")
def random_file(native: Library, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives random_file(type), a random model of that weight type, made once; "Q4_K experts" is a mixture."""
    folder, made = tmp_path_factory.mktemp("random"), {}

    def make(kind: str) -> Path:
        if kind not in made:
            c, type_of = EXPERTS if "experts" in kind else RANDOM, drive.type_of(kind.split()[0])
            path, weights = folder / f"{kind}.gguf", tiny.layout(c, 5)
            made[kind] = tiny.write(path, c, weights, type_of, quantize=partial(drive.quantize, native))
        return made[kind]

    return make


@pytest.fixture
def model_of(
    native: Library,
    oracle_file: Callable[..., Path],
    random_file: Callable[[str], Path],
    device: str,
) -> Callable[[str], Model]:
    """Gives model_of("oracle"), of acceptance 0.75, or of the type of a random model."""

    def make(name: str) -> Model:
        shape = {"oracle": "mini", "oracle experts": "mini-moe"}.get(name)
        path = oracle_file(0.75, shape) if shape else random_file(name)
        return drive.open_model(native, path, device, head=True)

    return make


def prompt_of(n: int, n_vocab: int = RANDOM.n_vocab, seed: int = 1) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, n_vocab, n)]


def walk(rule: Rule, anchor: int, gamma: int, n: int) -> list[int]:
    """Returns the accepted drafts of each round until n tokens are there, the first of them the anchor."""
    return [accepted for _, accepted in rounds_of(rule, anchor, gamma, n, n + gamma)]


def rounds_of(rule: Rule, anchor: int, gamma: int, n: int, budget: int) -> list[tuple[int, int]]:
    """Returns (drafted, accepted) of each round until n tokens are there, with no drafts past `budget`
    tokens."""
    rounds, have = [], 1
    while have < n:
        drafted = min(gamma, budget - have - 1)
        token, accepted = anchor, 0
        while accepted < drafted and rule.draft(token) == rule.successor(token):
            token, accepted = int(rule.successor(token)), accepted + 1
        anchor = int(rule.successor(token))
        rounds.append((drafted, accepted))
        have += accepted + 1
    return rounds


# ---- the same tokens


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_token_is_the_choice_of_its_logits(
    sampling: str, native: Library, model_of: Callable[[str], Model]
) -> None:
    """It is so by the rule for logits on the host, wherever the core chooses."""
    sequence = drive.open_sequence(model_of("Q4_K"), n_ctx=256, n_rows=9, n_draft=8)
    chosen, prompt = SAMPLINGS[sampling], prompt_of(30)
    sequence.set_sampling(chosen)
    for gamma in (0, 3, 8):
        run = drive.decode(sequence, prompt, 40, gamma, logits=True)
        assert run.tokens == [
            native.sample(logits, chosen, at) if chosen.temperature else int(logits.argmax())
            for at, logits in enumerate(run.logits, len(prompt))
        ]


@pytest.mark.parametrize(
    ("name", "sampling", "kv_type"),
    pairs(("F32", "Q4_K", "oracle", "Q4_K experts", "oracle experts", "IQ3_S"), SAMPLINGS, ("f16", "q8_0")))
def test_every_gamma_gives_the_tokens_of_plain_decoding(
    name: str, sampling: str, kv_type: str, model_of: Callable[[str], Model], same: Same
) -> None:
    chosen, n = SAMPLINGS[sampling], 40
    if "oracle" in name:
        chosen = replace(chosen, temperature=HOT[sampling])
    model = model_of(name)
    sequence = drive.open_sequence(model, n_ctx=256, n_rows=9, n_draft=8, kv_type=kv_type)
    sequence.set_sampling(chosen)
    prompt, accepted = prompt_of(30), 0
    plain = drive.decode(sequence, prompt, n).tokens
    for gamma in TRIED[sampling]:
        found = drive.decode(sequence, prompt, n, gamma)
        same(found.tokens, plain, n)
        accepted += sum(found.accepted)
    same(drive.decode(sequence, prompt, n, (3, 0, 8, 1, 0, 0, 5)).tokens, plain, n)
    without = drive.open_sequence(model, n_ctx=256, n_rows=1, kv_type=kv_type)
    without.set_sampling(chosen)
    same(drive.decode(without, prompt, n).tokens, plain, n)
    if "oracle" in name:
        assert accepted > 6 * len(TRIED[sampling]), "rounds of all kinds are wanted"
        oracle = plain[:1] + rule_of(0.75).continuation(plain[0], n - 1)
        assert (plain == oracle) is (sampling == "greedy")


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("prompt", [BOX_PROMPTS[0], *deeper(BOX_PROMPTS[1])], ids=["function", "class"])
def test_the_box_prints_the_same_code_at_every_gamma(
    prompt: str, sampling: str, native: Library, device: str, same: Same
) -> None:
    file = File(box_model.GGUF, native)
    tokenizer, model = Tokenizer(file.kv), Model(file, device, head=file)
    sequence = drive.open_sequence(model, n_ctx=256, n_rows=9, n_draft=8, kv_type="f16")
    chosen = replace(SAMPLINGS[sampling], temperature=SAMPLINGS[sampling].temperature / 2)
    sequence.set_sampling(chosen)
    ids, accepted = tokenizer.encode(prompt, add_bos=True), 0
    plain = drive.decode(sequence, ids, 48).tokens
    for gamma in TRIED[sampling]:
        found = drive.decode(sequence, ids, 48, gamma)
        same(found.tokens, plain, 48)
        accepted += sum(found.accepted)
    assert accepted > 12 * len(TRIED[sampling]), "a trained head"


@pytest.mark.long
@pytest.mark.parametrize("name", ["Q4_K", "oracle"])
@pytest.mark.parametrize(
    ("kv_type", "lengths"), [("f16", (511, 513, 2048, 4095, 4096, 4097, 6000)), ("q8_0", (513, 4097))]
)
def test_long_prompts(
    kv_type: str, lengths: Iterable[int], name: str, model_of: Callable[[str], Model], same: Same
) -> None:
    """Acceptance does not jump anywhere, tokens do not change. Each prompt begins with the shorter ones, and
    all runs share the chunks that were read before."""
    prompt, n = prompt_of(max(lengths)), 24
    sizes = {"n_ctx": len(prompt) + 48, "n_checkpoints": 2, "n_rows": 9, "n_draft": 8, "n_chunk": 512,
             "kv_type": kv_type}  # fmt: skip
    sequence = drive.open_sequence(model_of(name), **sizes)
    kept: Checkpoint | None = None

    def begin() -> int:
        sequence.resume(kept) if kept else sequence.reset()
        return kept.info.n_past if kept else 0

    def run(gamma: int, n_prompt: int) -> Decoded:
        out = Decoded([drive.start(sequence, prompt[begin() : n_prompt])])
        return drive.go_on(sequence, out, n, gamma)

    for n_prompt in lengths:
        whole = (n_prompt - 1) // 512 * 512
        if whole > (done := begin()):
            drive.prefill(sequence, prompt[done:whole], last=False)
            kept = sequence.checkpoint()
        plain = run(0, n_prompt).tokens
        for gamma in (2, 8):
            found = run(gamma, n_prompt)
            same(found.tokens, plain, n)
            if name == "oracle":
                assert found.accepted == walk(rule_of(0.75), plain[0], gamma, n)


@pytest.mark.long
def test_a_prompt_far_longer_than_any_default(model_of: Callable[[str], Model], same: Same) -> None:
    """It has 9000 tokens at a context of 65536: the head's context is the sequence's."""
    model, prompt = model_of("Q4_K"), prompt_of(9000)
    sizes = {"n_ctx": 65536, "n_rows": 4, "n_draft": 3, "n_chunk": 1024, "n_checkpoints": 1}
    sequence = drive.open_sequence(model, n_pages=48, kv_type="q8_0", **sizes)
    drive.prefill(sequence, prompt[:8192], last=False)
    kept, runs = sequence.checkpoint(), []
    for gamma in (0, 3):
        sequence.resume(kept)
        first = Decoded([drive.start(sequence, prompt[8192:])])
        runs.append(drive.go_on(sequence, first, 12, gamma).tokens)
    same(runs[1], runs[0], 12)


@pytest.mark.parametrize("n_chunk", [256, *deeper(512), 2048])
def test_chunks_do_not_change_acceptance(n_chunk: int, model_of: Callable[[str], Model]) -> None:
    sequence = drive.open_sequence(model_of("oracle"), n_ctx=1500, n_rows=5, n_draft=4, n_chunk=n_chunk)
    found = drive.decode(sequence, prompt_of(1300), 60, 4)
    assert found.accepted == walk(rule_of(0.75), found.tokens[0], 4, 60)


def test_layouts_of_files_decode_the_same(
    native: Library, oracle_file: Callable[[float], Path], tmp_path: Path, device: str
) -> None:
    """The head is in the model's file, alone in another, or in another beside a trunk."""
    both, c = oracle_file(0.75), SHAPES["mini"]
    mine = f"blk.{c.n_layer}."
    alone = replace(c, n_nextn=0)
    trunk = tiny.copy(both, tmp_path / "trunk.gguf", alone, lambda name: not name.startswith(mine))
    head = tiny.copy(both, tmp_path / "head.gguf", c, lambda name: name.startswith(mine))
    expected = walk(rule_of(0.75), rule_of(0.75).continuation(7, 1)[0], 3, 80)
    for path, where in ((both, True), (trunk, head), (trunk, both), (both, head)):
        model = drive.open_model(native, path, device, head=where)
        sequence = drive.open_sequence(model, n_ctx=256, n_rows=4, n_draft=3)
        found = drive.decode(sequence, [1, 2, 7], 80, 3)
        assert found.tokens[:80] == rule_of(0.75).continuation(7, 80)
        assert found.accepted == expected


# ---- acceptance


@pytest.mark.parametrize(
    ("accept", "gamma"), [*product((0.0, 0.75, 1.0), (1, 3, 8)), *deeper((0.5, 1), (0.5, 8)),
                          *deeper(*((0.75, gamma) for gamma in GAMMAS if gamma not in (1, 3, 8)))])  # fmt: skip
def test_acceptance_is_what_the_file_sets(
    accept: float, gamma: int, native: Library, oracle_file: Callable[[float], Path], device: str
) -> None:
    rule, n = rule_of(accept), 120
    model = drive.open_model(native, oracle_file(accept), device, head=True)
    sequence = drive.open_sequence(model, n_ctx=256, n_rows=gamma + 1, n_draft=gamma, kv_type="f16")
    found = drive.decode(sequence, [3, 1, 4], n, gamma)
    assert found.tokens[:n] == rule.continuation(4, n)
    assert found.accepted == walk(rule, found.tokens[0], gamma, n)
    if accept in (0.0, 1.0):
        assert set(found.accepted) == {int(accept) * gamma}


def test_the_same_prompt_has_the_same_acceptance_every_time(model_of: Callable[[str], Model]) -> None:
    for name in ("oracle", "F32"):
        sequence = drive.open_sequence(model_of(name), n_ctx=512, n_rows=9, n_draft=8)
        first = None
        for turn in range(5):
            sequence.reset()
            drive.prefill(sequence, prompt_of(40 + turn, seed=turn))  # Another text comes in between.
            drafted = []
            found = drive.decode(sequence, prompt_of(100), 1)
            for _ in range(10):
                drive.draft(sequence, found.tokens[-1], 8)
                drafted.append(sequence.drafted(8))
                drive.go_on(sequence, found, len(found.tokens) + 1, 5)
            first = first or (found, drafted)
            assert (found, drafted) == first


@pytest.mark.parametrize("pause", [1, *deeper(9, 63), 64, *deeper(65, 600)])
def test_after_a_pause_acceptance_is_that_of_the_rule(pause: int, model_of: Callable[[str], Model]) -> None:
    """Drafts come, then plain rounds, then drafts again."""
    rule, sequence = rule_of(0.75), drive.open_sequence(model_of("oracle"), n_ctx=1024, n_rows=9, n_draft=8)
    found = drive.decode(sequence, [1, 2], 20, 4)
    drive.go_on(sequence, found, len(found.tokens) + pause, 0)
    later = drive.go_on(sequence, Decoded(found.tokens[-1:]), 80, 4)
    assert later.tokens[:80] == found.tokens[-1:] + rule.continuation(found.tokens[-1], 79)
    assert later.accepted == walk(rule, found.tokens[-1], 4, 80)


@pytest.mark.parametrize("kind", ["F32", "Q4_K"])
@pytest.mark.parametrize("pause", [1, *deeper(9, 63), 64, *deeper(65, 600)])
def test_a_pause_leaves_no_trace_in_the_drafts(
    kind: str, pause: int, model_of: Callable[[str], Model]
) -> None:
    """The same text with drafts before each token, with none for a while, and with rows that are not right
    beside each, has the same drafts after it. Steps of one row feed the head later than those of more.
    """
    model, text = model_of(kind), prompt_of(pause + 30, seed=2)
    paused, always, wide = (
        drive.open_sequence(model, n_ctx=1024, n_rows=9, n_draft=8, kv_type="f16") for _ in range(3)
    )
    for sequence in (paused, always, wide):
        drive.prefill(sequence, prompt_of(20))
        for at, token in enumerate(text[:-1]):
            if sequence is always or at < 10:
                drive.draft(sequence, token, 1 + at % 8)
            drive.verify(sequence, [token, 1, 1] if sequence is wide and at != 20 else [token])
            sequence.commit([0])
    drafts = []
    for sequence in (paused, always, wide):
        drive.draft(sequence, text[-1], 8)
        drafts.append(sequence.drafted(8))
    assert drafts[0] == drafts[1] == drafts[2]
    assert paused.dump() == always.dump() == wide.dump()


# ---- through the orchestrator


SourceOf = Callable[[Timeline], DraftSource]


def chains(gamma: int) -> SourceOf:
    return lambda sequence: Fixed(Drafter(sequence, Source.NEXTN, MAX_GAMMA), gamma)


def as_it_pays(costs: Costs) -> SourceOf:
    auto = Auto(costs, MAX_GAMMA)
    return lambda sequence: auto.source(sequence, [Drafter(sequence, Source.NEXTN, MAX_GAMMA)])


def generate(
    model: Model, source_of: SourceOf | None, prompt: list[int], n: int
) -> tuple[Finished, list[str]]:
    """Returns the end and the warnings of a generation."""
    n_draft = MAX_GAMMA if model.info.has_head else 0
    engine = drive.open_engine(model, n_ctx=512, n_rows=n_draft + 1, n_draft=n_draft)
    sequence, request, loop = engine.sequence(), Request(tuple(prompt), n), Loop(engine)
    source = source_of(sequence) if source_of else None
    loop.add(Generation(sequence, engine.info, tokenizer_of(model), request, source))
    events = []
    while loop.running:
        events += [event for _, event in loop.step()]
    last = events[-1]
    assert isinstance(last, Finished), last
    return last, [event.message for event in events if isinstance(event, Warned)]


def tokenizer_of(model: Model) -> Tokenizer:
    tokens, types = vocabulary(model.info.n_vocab, "Ġw")
    return Tokenizer({
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen35", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([int(t) for t in types], np.int32).data,
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in MERGES],
    })  # fmt: skip


@pytest.mark.parametrize("accept", [0.0, 0.75, 1.0])
@pytest.mark.parametrize("n", [1, 2, *deeper(8, 9), 10, *deeper(11, 100)])
def test_budgets_of_all_sizes(
    accept: float, n: int, native: Library, oracle_file: Callable[[float], Path], device: str
) -> None:
    model = drive.open_model(native, oracle_file(accept), device, head=True)
    expected = tuple(rule_of(accept).continuation(9, n))
    costs = Costs([Cost(1, 0, 1.0), Cost(9, 0, 2.0), Cost(1, 1, 0.1)])
    sources = {"plain": [None], "mtp": [chains(n) for n in (0, 1, 5, 8)], "auto": [as_it_pays(costs)]}
    for mode, each in sources.items():
        for source in each:
            last, warnings = generate(model, source, [1, 9], n)
            assert (last.tokens, last.reason, warnings) == (expected, "length", [])
            assert last.stats.mode == mode


def test_stats_are_those_of_the_rule(model_of: Callable[[str], Model]) -> None:
    last, _ = generate(model_of("oracle"), chains(3), [1, 9], 200)
    rounds, stats = rounds_of(rule_of(0.75), last.tokens[0], 3, 200, 200), last.stats
    by_position = [(sum(d > i for d, _ in rounds), sum(a > i for _, a in rounds)) for i in range(3)]
    assert stats.rounds == len(rounds)
    assert stats.rounds_by_drafts == [sum(d == i for d, _ in rounds) for i in range(4)]
    assert (stats.drafted, stats.accepted) == tuple(map(sum, zip(*rounds, strict=True)))
    assert stats.acceptance_by_position == [accepted / drafted for drafted, accepted in by_position]
    assert stats.mean_accepted_length == 199 / len(rounds)
    assert 0 < stats.draft_s + stats.verify_s + stats.commit_s <= stats.decode_s


def test_a_head_that_is_not_finite_is_dropped(native: Library, tmp_path: Path, device: str) -> None:
    weights = tiny.layout(RANDOM, 5)
    path = tiny.write(tmp_path / "plain.gguf", RANDOM, weights)
    weights[f"blk.{RANDOM.n_layer}.nextn.hnorm.weight"][:] = np.nan
    damaged = tiny.write(tmp_path / "damaged.gguf", RANDOM, weights)
    expected, _ = generate(drive.open_model(native, path, device), None, [1, 2, 3], 30)
    found, warnings = generate(drive.open_model(native, damaged, device, head=True), chains(4), [1, 2, 3], 30)
    assert found.tokens == expected.tokens
    assert len(warnings) == 1 and "not finite" in warnings[0]
    assert found.stats.drafted == 0


def test_a_sequence_decodes_after_a_failure(native: Library, tmp_path: Path, device: str) -> None:
    weights = tiny.layout(RANDOM, 5)
    weights["token_embd.weight"][7] = np.nan
    path = tiny.write(tmp_path / "nan.gguf", RANDOM, weights)
    sequence = drive.open_sequence(
        drive.open_model(native, path, device, head=True), n_ctx=128, n_rows=5, n_draft=4
    )
    clean = drive.decode(sequence, [1, 2, 3], 12, 4)
    assert 7 not in clean.tokens
    drive.draft(sequence, clean.tokens[-1], 4)
    with pytest.raises(NumericError):
        drive.verify(sequence, [7, 1])
    assert sequence.info.failed
    assert drive.decode(sequence, [1, 2, 3], 12, 4) == clean
