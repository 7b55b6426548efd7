"""Models and sequences through the core: every layer pattern against the numpy reference, prefill in
any chunks, the edges of the context, arguments, failures, and lifetimes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import drive
import make_goldens
import numpy as np
import pytest
import ref
import tiny
from depth import deeper, deeper_but
from tiny import Config

from luce.errors import ArgumentError, ContextFull, Error, FileError, NumericError, StateError
from luce.native import File, Library, Model
from luce.native import Sequence as Timeline

SMALL = Config()
SEED = 31
CHUNK_BOUND = 1e-3  # With F32, chunking, or the reference, may change a logit so much.


@pytest.fixture
def bound(device: str) -> float:
    return CHUNK_BOUND if device.startswith("cpu") else drive.CUDA_BOUND


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Gives write(config, weights), which returns the path of a tiny F32 model."""

    def make(c: Config = SMALL, weights: tiny.Weights | None = None) -> Path:
        return tiny.write(tmp_path / "model.gguf", c, tiny.layout(c, SEED) if weights is None else weights)

    return make


@pytest.fixture
def model(native: Library, write: Callable[..., Path], device: str) -> Model:
    return drive.open_model(native, write(), device)


def tokens_of(n: int, c: Config = SMALL, seed: int = 1) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, c.n_vocab, n)]


def prompt_logits(sequence: Timeline, tokens: Sequence[int]) -> np.ndarray:
    sequence.reset()
    drive.prefill(sequence, tokens)
    return sequence.logits(0)


# ---- what is computed


@pytest.mark.parametrize(
    "c",
    [
        replace(SMALL, recurrent=(True, True, True), n_layer=3),
        replace(SMALL, recurrent=(False, False), n_layer=2),
        replace(SMALL, recurrent=(True,), n_layer=1),
        replace(SMALL, recurrent=(False, True, False, True, True), n_layer=5),
        replace(SMALL, interval=2),
        replace(SMALL, interval=1),
        replace(SMALL, tied=True, n_k_head=1, n_v_head=3),
        replace(SMALL, n_embd=160, n_ff=96, n_head=5, n_head_kv=5, rope_dim=8),
    ],
    ids=["all-deltanet", "all-full", "one-block", "mixed", "interval-2", "interval-1", "tied", "odd-sizes"],
)
def test_layer_pattern_against_the_reference(
    c: Config, native: Library, write: Callable[..., Path], device: str, bound: float
) -> None:
    tokens = tokens_of(33, c)
    expected = ref.Reference(c, tiny.layout(c, SEED)).feed(tokens)
    sequence = drive.open_sequence(drive.open_model(native, write(c), device), n_ctx=64)
    assert np.abs(drive.chain_logits(sequence, tokens, 33) - expected).max() <= bound
    assert np.abs(prompt_logits(sequence, tokens) - expected[-1]).max() <= bound


def test_blocks_may_have_head_counts_of_their_own(
    native: Library, tmp_path: Path, device: str, bound: float
) -> None:
    """The keys are arrays then. KV, projections and the groups of heads that share KV differ by block."""
    c = replace(SMALL, n_layer=4, recurrent=(False, True, False, False), head_dim=64)
    counts = [(2, 1), (5, 5), (6, 2), (18, 1)]  # The second block has no attention.
    weights = tiny.layout(c, SEED)
    for i, (h, hkv) in enumerate(counts):
        own = tiny.layout(replace(c, n_head=h, n_head_kv=hkv), SEED + i)
        weights |= {name: x for name, x in own.items() if name.startswith(f"blk.{i}.attn_")}
    heads, heads_kv = zip(*counts, strict=True)
    path = tiny.write(tmp_path / "heads.gguf", replace(c, n_head=heads, n_head_kv=heads_kv), weights)
    tokens = tokens_of(33, c)
    expected = ref.Reference(c, weights).feed(tokens)
    sequence = drive.open_sequence(drive.open_model(native, path, device), n_ctx=64)
    assert np.abs(drive.chain_logits(sequence, tokens, 33) - expected).max() <= bound
    assert np.abs(prompt_logits(sequence, tokens) - expected[-1]).max() <= bound
    short = tiny.write(tmp_path / "short.gguf", replace(c, n_head=heads[:3], n_head_kv=heads_kv), weights)
    with pytest.raises(FileError, match=r"head_count has 3 entries, expected 4"):
        drive.open_model(native, short, device)


TREE_SEEDS = {"experts-one-used": 9000, "experts-16-tied": 61000}  # Their tokens leave no router in doubt.


@pytest.mark.parametrize("case", deeper_but(make_goldens.CASES, "base", "tied-s16", "pattern", "experts"))
def test_tree_against_the_reference(
    case: str, native: Library, write: Callable[..., Path], device: str, bound: float
) -> None:
    """It has 64 rows, once bushy and once a chain with leaves, after steps that were committed in part."""
    c, seed = make_goldens.CASES[case]
    weights = tiny.layout(c, seed)
    timeline = ref.Reference(c, weights)
    sequence = drive.open_sequence(drive.open_model(native, write(c, weights), device), n_ctx=256)
    timeline.feed(tokens_of(12, c))
    drive.prefill(sequence, tokens_of(12, c))
    rng = np.random.default_rng(seed)
    # It is a spine of even rows, and each has one odd leaf.
    comb = [-1, *(r - 2 + r % 2 for r in range(1, 64))]
    for parents in (drive.random_tree(rng, 64), comb, drive.random_tree(rng, 30)):
        tokens = tokens_of(len(parents), c, seed=len(parents) + TREE_SEEDS.get(case, 0))
        expected = timeline.step(tokens, parents)
        choices = drive.verify(sequence, tokens, parents)
        found = np.stack([sequence.logits(r) for r in range(len(parents))])
        assert np.abs(found - expected.logits).max() <= bound
        assert choices == found.argmax(-1).tolist()
        path = drive.root_path(parents, len(parents) - 1)
        timeline.commit(expected, path)
        sequence.commit(path)
    assert timeline.router_gap > drive.ROUTER_GAP, "a GPU may choose other experts: take another seed"


def test_key_forms_and_containers_say_the_same(native: Library, tmp_path: Path, device: str) -> None:
    """An interval or an array of layers, NextN, version 2 and a split file give the same bits."""
    weights = tiny.layout(SMALL, SEED)
    plain = tiny.write(tmp_path / "plain.gguf", SMALL, weights)
    array = replace(SMALL, recurrent=(True, True, True, False))
    nextn = [replace(c, n_nextn=1) for c in (SMALL, array)]
    paths = [
        plain,
        tiny.write(tmp_path / "array.gguf", array, weights),
        tiny.write(tmp_path / "nextn.gguf", nextn[0], tiny.layout(nextn[0], SEED)),
        tiny.write(tmp_path / "nextn-array.gguf", nextn[1], tiny.layout(nextn[1], SEED)),
        tiny.write_v2(plain, tmp_path / "v2.gguf"),
        tiny.write(tmp_path / "split.gguf", SMALL, weights, tensors_per_part=11),
    ]
    tokens = tokens_of(20)
    results = []
    for path in paths:
        model = drive.open_model(native, path, device)
        assert model.info.n_layer == 4
        assert model.info.n_nextn == ("nextn" in path.name)
        sequence = drive.open_sequence(model, n_ctx=64)
        results.append(drive.chain_logits(sequence, tokens, 4).tobytes())
    assert len(set(results)) == 1
    with File(paths[-1], native) as split, File(paths[-2], native) as v2:
        assert split.info.n_parts == 6 and split.info.n_tensors == len(weights)
        assert v2.info.version == 2


def test_a_later_or_missing_part_is_an_error(native: Library, tmp_path: Path) -> None:
    first = tiny.write(tmp_path / "s.gguf", SMALL, tiny.layout(SMALL, SEED), tensors_per_part=20)
    second = Path(str(first).replace("-00001-", "-00002-"))
    with pytest.raises(FileError):
        File(second, native)
    second.unlink()
    with pytest.raises(FileError, match="00002"):
        File(first, native)


# ---- prefill in chunks


@pytest.mark.parametrize("n_prompt", [1, *deeper(2, 511, 512), 513, *deeper(1025)])
def test_chunk_size_changes_rounding_only(
    n_prompt: int, model: Model, bound: float, record_property: Callable[[str, object], None]
) -> None:
    tokens = tokens_of(n_prompt)
    timeline = ref.Reference(SMALL, tiny.layout(SMALL, SEED))
    expected = [timeline.feed(tokens)[-1]]
    follow = []
    for _ in range(12):
        follow.append(int(expected[-1].argmax()))
        expected.append(timeline.feed(follow[-1:])[-1])
    worst, choices = 0.0, []
    for n_chunk in (256, 512, 1024, 4096):
        sequence = drive.open_sequence(model, n_ctx=1100, n_chunk=n_chunk)
        logits = [prompt_logits(sequence, tokens), *drive.chain_logits(sequence, follow, 1)]
        worst = max(worst, float(np.abs(np.stack(logits) - np.stack(expected)).max()))
        choices.append([int(row.argmax()) for row in logits])
    record_property("max_abs_logit_error", worst)
    print(f"{n_prompt} tokens in chunks of 256 to 4096: logits within {worst:.1e} of the reference")
    assert worst <= bound
    top = np.sort(np.stack(expected), axis=1)
    clear = top[:, -1] - top[:, -2] > 2 * worst  # Two logits that move towards each other may change places.
    for found in choices:
        assert np.array(found)[:-1][clear[:-1]].tolist() == np.array(follow)[clear[:-1]].tolist()


def test_prompt_split_at_chunk_multiples_gives_the_same_bits(model: Model) -> None:
    tokens = tokens_of(1100)
    sequence = drive.open_sequence(model, n_ctx=1280, n_chunk=256)
    whole = prompt_logits(sequence, tokens)
    state = sequence.dump()
    for cuts in ((256,), (512, 768), (256, 512, 768, 1024)):
        sequence.reset()
        for part in np.split(np.array(tokens), cuts):
            drive.prefill(sequence, part)  # There is a choice after each part, which changes nothing.
        assert sequence.info.n_past == 1100
        assert sequence.logits(0).tobytes() == whole.tobytes()
        assert sequence.dump() == state


def test_prefill_after_decoding(model: Model, bound: float) -> None:
    """Prefill may start anywhere, also inside a chunk."""
    tokens = tokens_of(600)
    sequence = drive.open_sequence(model, n_ctx=640, n_chunk=256)
    drive.prefill(sequence, tokens[:240])
    drive.chain_logits(sequence, tokens[240:263], 5)
    drive.prefill(sequence, tokens[263:])
    expected = ref.Reference(SMALL, tiny.layout(SMALL, SEED)).feed(tokens)[-1]
    assert np.abs(sequence.logits(0) - expected).max() <= bound


# ---- the edges of the context


@pytest.mark.parametrize("n_ctx", [1, 31, 32, 256, 257])
def test_prompt_of_exactly_the_context(n_ctx: int, model: Model) -> None:
    sequence = drive.open_sequence(model, n_ctx=n_ctx)
    drive.prefill(sequence, tokens_of(n_ctx))
    assert sequence.info.n_past == n_ctx
    with pytest.raises(ContextFull):
        drive.verify(sequence, [1])
    with pytest.raises(ContextFull):
        drive.prefill(sequence, [1])
    assert not sequence.info.failed


def test_prompt_past_the_context_changes_nothing(model: Model) -> None:
    sequence = drive.open_sequence(model, n_ctx=32)
    with pytest.raises(ContextFull):
        drive.prefill(sequence, tokens_of(33))
    assert sequence.info.n_past == 0
    drive.prefill(sequence, tokens_of(31))
    before = sequence.info.n_past
    with pytest.raises(ContextFull):
        drive.verify(sequence, [1, 2])
    with pytest.raises(ContextFull):
        drive.prefill(sequence, [1, 2])
    assert sequence.info.n_past == before
    drive.verify(sequence, [1])
    sequence.commit([0])
    assert sequence.info.n_past == 32


def test_depth_not_rows_decides_whether_a_tree_fits(model: Model) -> None:
    sequence = drive.open_sequence(model, n_ctx=32)
    drive.prefill(sequence, tokens_of(30))
    wide = [-1] + [0] * 63
    assert len(drive.verify(sequence, tokens_of(64), wide)) == 64
    with pytest.raises(ContextFull):
        drive.verify(sequence, [1, 2, 3], [-1, 0, 1])
    drive.verify(sequence, tokens_of(64), wide)
    sequence.commit([0, 63])
    assert sequence.info.n_past == 32


def test_last_rows_of_the_context_are_right(model: Model, bound: float) -> None:
    tokens = tokens_of(70)
    sequence = drive.open_sequence(model, n_ctx=70)
    drive.prefill(sequence, tokens[:6])
    found = drive.chain_logits(sequence, tokens[6:], 64)
    expected = ref.Reference(SMALL, tiny.layout(SMALL, SEED)).feed(tokens)[6:]
    assert np.abs(found - expected).max() <= bound


# ---- arguments


@pytest.mark.parametrize("token", [-1, SMALL.n_vocab, 2**31 - 1, -(2**31)])
def test_token_out_of_range_is_refused(token: int, model: Model) -> None:
    sequence = drive.open_sequence(model, n_ctx=32)
    drive.prefill(sequence, [1, 2])
    for call in (drive.prefill, drive.verify):
        with pytest.raises(ArgumentError):
            call(sequence, [3, token])
    assert sequence.info.n_past == 2 and not sequence.info.failed


@pytest.mark.parametrize("n", [0, 5, 64, 65])
def test_number_of_rows_is_checked(n: int, model: Model) -> None:
    sequence = drive.open_sequence(model, n_ctx=128, n_rows=4)
    drive.prefill(sequence, [1])
    with pytest.raises(ArgumentError):
        drive.verify(sequence, [1] * n)


@pytest.mark.parametrize(
    "params",
    [
        {"n_rows": 65}, {"n_chunk": 4097}, {"n_chunk": 100}, {"n_chunk": 4352}, {"kv_type": "q2_k"},
        {"kv_type": ""}, {"n_sequences": 65}, {"n_checkpoints": 1025}, {"n_pages": 1 << 23}, {"n_draft": 1},
        {"n_threads": 513}, {"n_ctx": 1 << 31},
    ],
    ids=str,
)  # fmt: skip
def test_engine_parameters_are_checked(params: dict[str, int | str], model: Model) -> None:
    with pytest.raises(ArgumentError, match=next(iter(params))):
        drive.open_engine(model, **{"n_ctx": 32} | params)


def test_empty_prompt_is_refused(model: Model) -> None:
    sequence = drive.open_sequence(model, n_ctx=32)
    with pytest.raises(ArgumentError):
        sequence.prefill([])


@pytest.mark.parametrize(
    "parents",
    [[0, 0, 1], [-1, -1, 0], [-1, 1, 1], [-1, 0, 3], [-1, 0, -2], [-1, 0, 0, 1]],
    ids=["root", "two-roots", "itself", "later", "negative", "not-depth-first"],
)
def test_parents_are_checked(parents: list[int], model: Model) -> None:
    sequence = drive.open_sequence(model, n_ctx=32)
    drive.prefill(sequence, [1])
    with pytest.raises(ArgumentError):
        drive.verify(sequence, [1] * len(parents), parents)


@pytest.mark.parametrize("path", [[], [1], [0, 2], [0, 0], [0, 1, 3], [0, 4], [0, -1]])
def test_commit_path_is_checked(path: list[int], model: Model) -> None:
    sequence = drive.open_sequence(model, n_ctx=32)
    drive.prefill(sequence, [1])
    drive.verify(sequence, [1, 2, 3, 4], [-1, 0, 1, 0])
    with pytest.raises(ArgumentError):
        sequence.commit(path)
    assert sequence.info.n_past == 1 and not sequence.info.failed
    sequence.commit([0, 1, 2])
    assert sequence.info.n_past == 4


def test_calls_out_of_order(model: Model) -> None:
    sequence = drive.open_sequence(model, n_ctx=32)
    with pytest.raises(StateError):
        sequence.commit([0])
    with pytest.raises(Error):
        sequence.logits(0)
    drive.prefill(sequence, [1, 2])
    with pytest.raises(Error):
        sequence.logits(1)
    drive.verify(sequence, [3])
    sequence.commit([0])
    with pytest.raises(StateError):
        sequence.commit([0])


# ---- failure and reuse


def nan_model(native: Library, write: Callable[..., Path], device: str) -> Model:
    weights = tiny.layout(SMALL, SEED)
    weights["token_embd.weight"][7] = np.nan
    return drive.open_model(native, write(weights=weights), device)


@pytest.mark.parametrize("how", ["prefill", "prefill-early", "verify", "verify-last-row"])
def test_non_finite_logits_fail_the_sequence(
    how: str, native: Library, write: Callable[..., Path], device: str
) -> None:
    sequence = drive.open_sequence(nan_model(native, write, device), n_ctx=64)
    clean = drive.greedy(sequence, [1, 2, 3], 6)
    sequence.reset()
    with pytest.raises(NumericError):
        if how.startswith("prefill"):
            drive.prefill(sequence, [1, 2, 7] if how == "prefill" else [1, 7, 2, 3])
        else:
            drive.prefill(sequence, [1, 2])
            drive.verify(sequence, [7] if how == "verify" else [1, 2, 3, 7])
    assert sequence.info.failed
    calls = (drive.prefill, [1]), (drive.verify, [1]), (Timeline.commit, [0])
    for call, argument in calls:
        with pytest.raises(StateError):
            call(sequence, argument)
    with pytest.raises(StateError):
        sequence.dump()
    sequence.reset()
    assert not sequence.info.failed
    assert drive.greedy(sequence, [1, 2, 3], 6) == clean


def test_a_reused_sequence_gives_the_same_bits(model: Model) -> None:
    tokens = tokens_of(40)
    sequence = drive.open_sequence(model, n_ctx=256)
    first = drive.chain_logits(sequence, tokens, 8)
    for other in (200, 3, 77):
        sequence.reset()
        drive.prefill(sequence, tokens_of(other, seed=other))
        drive.verify(sequence, tokens_of(9, seed=4), drive.random_tree(np.random.default_rng(other), 9))
        sequence.reset()
        assert sequence.info.n_past == 0 and sequence.info.n_verified == 0
        assert drive.chain_logits(sequence, tokens, 8).tobytes() == first.tobytes()


def test_two_engines_of_one_model_do_not_meet(model: Model) -> None:
    tokens = [tokens_of(24, seed=s) for s in (5, 6)]
    alone = []
    for each in tokens:
        with drive.open_sequence(model, n_ctx=64) as sequence:
            alone.append(np.stack([drive.step(sequence, t) for t in each]))
    pair = [drive.open_sequence(model, n_ctx=64) for _ in range(2)]
    mixed = [[drive.step(s, each[i]) for s, each in zip(pair, tokens, strict=True)] for i in range(24)]
    for i, expected in enumerate(alone):
        assert np.stack([row[i] for row in mixed]).tobytes() == expected.tobytes()


def test_children_outlive_their_parents(native: Library, write: Callable[..., Path], device: str) -> None:
    file = File(write(), native)
    model = Model(file, device)
    sequence = drive.open_sequence(model, n_ctx=64)
    expected = sequence.prefill([1, 2, 3])
    file.close()
    model.close()
    sequence.engine.close()
    sequence.reset()
    assert sequence.prefill([1, 2, 3]) == expected
    with pytest.raises(StateError):
        drive.verify(sequence, [expected])
    sequence.close()
    sequence.close()
    with pytest.raises(StateError):
        drive.verify(sequence, [1])
