"""Runs the NextN head through the core: its drafts against the numpy reference, every layout of files, heads
that do not fit, and what a draft refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import drive
import numpy as np
import pytest
import ref
import tiny
from depth import deeper, deeper_but
from tiny import Config

from luce.errors import (
    ArgumentError,
    ContextFull,
    Error,
    FileError,
    NumericError,
    StateError,
    UnsupportedError,
)
from luce.native import File, Library, Model

SMALL = Config(n_nextn=1)
SEED = 41
BOUND = 1e-3  # F32 rounding may change a logit so much on the CPU.
NEXTN = f"blk.{SMALL.n_layer}.nextn."

Write = Callable[..., Path]


@pytest.fixture
def bound(device: str) -> float:
    return BOUND if device.startswith("cpu") else drive.CUDA_BOUND


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Gives write(config, weights, name=..., **options), which returns the path of a tiny F32 file."""

    def make(c: Config, weights: tiny.Weights, name: str = "model", **options: Any) -> Path:
        return tiny.write(tmp_path / f"{name}.gguf", c, weights, **options)

    return make


@pytest.fixture
def small(native: Library, write: Write, device: str) -> Model:
    return drive.open_model(native, write(SMALL, tiny.layout(SMALL, SEED)), device, head=True)


# ---- what is drafted


class Trunk:
    """This is the reference's timeline with its head: what the core's sequence keeps."""

    def __init__(self, c: Config, weights: tiny.Weights, head: Config, head_weights: tiny.Weights):
        self.trunk, self.head = ref.Reference(c, weights), ref.NextN(head, weights | head_weights)
        self.hidden = np.zeros((0, c.n_embd))  # It is that of the last committed token, (1, E).

    def feed(self, tokens: list[int]) -> int:
        """Commits tokens; the choice after them."""
        step = self.trunk.step(tokens)
        self.trunk.commit(step, range(len(tokens)))
        before = np.concatenate([self.hidden, step.hidden[:-1]])
        self.head.follow(tokens[len(tokens) - len(before) :], before)
        self.hidden = step.hidden[-1:]
        return int(step.logits[-1].argmax())

    def draft(self, chain: list[int]) -> np.ndarray:
        return self.head.draft(chain, self.hidden[0])


def check_drafts(
    model: Model,
    reference: Trunk,
    bound: float,
    note: Callable[[str, object], None],
    n_prompt: int = 50,
    seed: int = 1,
    **params: int | str,
) -> None:
    """Runs rounds whose rows are accepted at random: each draft is the reference's choice after the same
    chain, but where two of its logits are closer than `bound`. Each draft of a chain adds its own rounding:
    on an H200 the seventh chose other experts where their logits were 0.0091 apart."""
    rng = np.random.default_rng(seed)
    n_vocab = model.info.n_vocab
    sequence = drive.open_sequence(model, n_ctx=768, n_draft=8, **params)
    prompt = [int(t) for t in rng.integers(0, n_vocab, n_prompt)]
    drive.prefill(sequence, prompt)
    reference.feed(prompt)
    clear, worst = 0, 0.0
    for number in range(12):
        n = number % 8 + 1
        rows = [int(t) for t in rng.integers(0, n_vocab, 6)]
        drive.draft(sequence, rows[0], n)
        drafts = sequence.drafted(n)
        reference.head.router_gap = math.inf
        logits = reference.draft([rows[0], *drafts[:-1]])
        if reference.head.router_gap > n * drive.ROUTER_GAP:  # Else a GPU may choose other experts.
            top = np.sort(logits)[:, -2:]
            clear += int((top[:, 1] - top[:, 0] > 2 * bound).sum())
            worst = max(worst, float((top[:, 1] - logits[range(n), drafts]).max()))
        # The rows are the anchor and what the head did not draft, since any rows may be committed.
        drive.verify(sequence, rows)
        kept = rows[: int(rng.integers(1, 7))]
        sequence.commit(range(len(kept)))
        reference.feed(kept)
    note("clear_drafts", clear)
    assert worst <= 2 * bound
    least = 30 if bound < 0.01 else 15  # CUDA's bound leaves fewer: 16 to 31 on an H100.
    assert clear >= least, "too few drafts say anything"
    assert reference.trunk.router_gap > drive.ROUTER_GAP, "a GPU may choose other experts: take another seed"


CONFIGS = {
    "small": SMALL,
    "tied": replace(SMALL, tied=True, n_k_head=1, n_v_head=3),
    "grouped": Config(n_embd=128, n_ff=192, n_head=4, n_head_kv=2, head_dim=128, rope_dim=32, n_k_head=2,
                      n_v_head=6, state_size=64, rope_base=1e6, n_nextn=1),
    "odd-sizes": replace(SMALL, n_embd=160, n_ff=96, n_head=5, n_head_kv=5, rope_dim=8, eps=1e-5),
    "two-heads": replace(SMALL, n_nextn=2, n_layer=2),
    "flags": replace(SMALL, n_layer=3, recurrent=(True, False, True)),
    "experts": tiny.with_experts(SMALL),
    "experts-fused": replace(SMALL, n_expert=6, n_expert_used=1, n_ff_expert=48, fused_experts=True),
}  # fmt: skip


SEEDS = {"experts": 6, "experts-fused": 4}  # Their tokens leave no router in doubt.


@pytest.mark.parametrize("name", deeper_but(CONFIGS, "small", "flags", "two-heads", "experts"))
def test_drafts_are_those_of_the_reference(
    name: str,
    native: Library,
    write: Write,
    device: str,
    bound: float,
    record_property: Callable[[str, object], None],
) -> None:
    c = CONFIGS[name]
    one = replace(c, n_nextn=1)
    weights = tiny.layout(one, SEED)
    if c.n_nextn > 1:  # Only the first block drafts.
        extra = {
            f"blk.{c.n_layer + 1}.{key}": x[::-1].copy()
            for key, x in ref.block_weights(weights, c.n_layer).items()
        }
        weights = weights | extra
    model = drive.open_model(native, write(c, weights), device, head=True)
    check_drafts(model, Trunk(one, weights, one, {}), bound, record_property, seed=SEEDS.get(name, 1))


@pytest.mark.parametrize("option", ["own-output", "own-embedding", "own-both", "no-head-norm"])
@pytest.mark.parametrize("tied", [False, *deeper(True)])
def test_optional_tensors(
    option: str,
    tied: bool,
    native: Library,
    write: Write,
    device: str,
    bound: float,
    record_property: Callable[[str, object], None],
) -> None:
    c = replace(SMALL, tied=tied)
    weights = tiny.with_own_output(c, tiny.layout(c, SEED), SEED)
    left_out = {
        "own-output": [NEXTN + "embed_tokens.weight"],
        "own-embedding": [NEXTN + "shared_head_head.weight"],
        "own-both": [],
        "no-head-norm": [NEXTN + name + ".weight" for name in
                         ("shared_head_norm", "embed_tokens", "shared_head_head")],
    }[option]  # fmt: skip
    weights = {name: x for name, x in weights.items() if name not in left_out}
    model = drive.open_model(native, write(c, weights), device, head=True)
    check_drafts(model, Trunk(c, weights, c, {}), bound, record_property)


@pytest.mark.parametrize("n_prompt", [*deeper(1, 256), 257, *deeper(600)])
def test_the_prompt_warms_the_head_chunk_by_chunk(
    n_prompt: int, small: Model, bound: float, record_property: Callable[[str, object], None]
) -> None:
    reference = Trunk(SMALL, tiny.layout(SMALL, SEED), SMALL, {})
    check_drafts(small, reference, bound, record_property, n_prompt, n_chunk=256)


# ---- where the head comes from


def drafts_of(model: Model) -> list[int]:
    sequence = drive.open_sequence(model, n_ctx=64, n_draft=8)
    drive.draft(sequence, drive.prefill(sequence, [5, 6, 7, 8]), 8)
    return sequence.drafted(8)


def test_any_layout_of_files_drafts_the_same(native: Library, write: Write, device: str) -> None:
    weights = tiny.layout(SMALL, SEED)
    alone = replace(SMALL, n_nextn=0)
    trunk = write(alone, tiny.layout(alone, SEED), "trunk")
    heads = {
        "own": write(SMALL, weights, "combined"),
        "head": write(SMALL, tiny.head_only(SMALL, weights), "head"),
        "with-top": write(
            SMALL, tiny.head_only(SMALL, weights, "token_embd.weight", "output_norm.weight"), "with-top"
        ),
        "bare": write(SMALL, tiny.head_only(SMALL, weights), "bare", tokenizer=False),
    }
    expected = drafts_of(drive.open_model(native, heads["own"], device, head=True))
    for name, path in heads.items():
        model = drive.open_model(native, trunk, device, head=path)
        assert model.info.has_head, name
        assert drafts_of(model) == expected, name


def test_a_separate_head_may_differ_inside(
    native: Library,
    write: Write,
    device: str,
    bound: float,
    record_property: Callable[[str, object], None],
) -> None:
    """It has heads, FFN, RoPE and trunk depth of its own: only the hidden size and the vocabulary have to
    fit."""
    alone = replace(SMALL, n_nextn=0)
    trunk = tiny.layout(alone, SEED)
    other = replace(SMALL, n_layer=3, n_head=4, n_head_kv=2, n_ff=96, rope_dim=32, rope_base=1e4, eps=1e-5)
    head = tiny.head_only(other, tiny.layout(other, SEED + 1))
    model = drive.open_model(native, write(alone, trunk, "trunk"), device, head=write(other, head, "head"))
    check_drafts(model, Trunk(alone, trunk, other, head), bound, record_property)


def test_the_head_that_is_named_wins_over_the_embedded_one(
    native: Library, write: Write, device: str
) -> None:
    mine, other = tiny.layout(SMALL, SEED), tiny.layout(SMALL, SEED + 1)
    both = write(SMALL, mine, "model")
    head = write(SMALL, tiny.head_only(SMALL, other), "head")
    swapped = mine | tiny.head_only(SMALL, other)
    expected = drafts_of(drive.open_model(native, write(SMALL, swapped, "swapped"), device, head=True))
    found = drafts_of(drive.open_model(native, both, device, head=head))
    assert found == expected != drafts_of(drive.open_model(native, both, device, head=True))


def test_a_head_is_loaded_only_where_it_is_asked_for(native: Library, write: Write, device: str) -> None:
    path = write(SMALL, tiny.layout(SMALL, SEED))
    plain, drafting = (drive.open_model(native, path, device, head=head) for head in (None, True))
    assert (plain.info.has_head, drafting.info.has_head) == (0, 1)
    assert plain.info.weight_bytes < drafting.info.weight_bytes
    with pytest.raises(ArgumentError, match="without a NextN head"):
        drive.open_sequence(plain, n_ctx=64, n_draft=1)
    needs = [
        drive.memory(native, path, device, head=head, n_draft=n) for head, n in ((None, 0), (True, 4))
    ]
    assert needs[1].kv > needs[0].kv and needs[1].weights > needs[0].weights


MISFITS = {
    "hidden size": (replace(SMALL, n_embd=96), {}, ("96", "64")),
    "vocabulary": (replace(SMALL, n_vocab=400), {}, ("400", "384")),
    "vocabulary of its tokens": (replace(SMALL, n_vocab=400), {"top": ()}, ("400", "384")),
    "architecture": (replace(SMALL, n_expert=4, n_expert_used=2, n_ff_expert=32, n_ff_shared=32), {},
                     ("qwen35moe", "qwen35")),
    "no head": (replace(SMALL, n_nextn=0), {}, ("nextn_predict_layers",)),
}  # fmt: skip


@pytest.mark.parametrize("what", MISFITS)
def test_a_head_that_does_not_fit_is_refused_with_both_values(
    what: str, native: Library, write: Write, device: str
) -> None:
    other, options, named = MISFITS[what]
    alone = replace(SMALL, n_nextn=0)
    trunk = write(alone, tiny.layout(alone, SEED), "trunk")
    dense = replace(other, n_expert=0)
    weights = tiny.layout(dense, SEED)
    if dense.n_nextn:
        weights = tiny.head_only(dense, weights, *options.get("top", ("token_embd.weight",)))
    head = write(other, weights, "head")
    for opens in (drive.open_model, drive.memory):
        with pytest.raises(FileError) as raised:
            opens(native, trunk, device, head=head)
        assert "head.gguf" in str(raised.value)
        assert all(value in str(raised.value) for value in named), raised.value


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("eh_proj", "missing"),
        ("eh_proj", "shape"),
        ("enorm", "missing"),
        ("enorm", "shape"),
        ("hnorm", "type"),
    ],
)
def test_a_damaged_head_names_its_tensor(
    name: str, how: str, native: Library, write: Write, device: str
) -> None:
    weights, tensor = tiny.layout(SMALL, SEED), NEXTN + name + ".weight"
    if how == "missing":
        del weights[tensor]
    elif how == "shape":
        weights[tensor] = weights[tensor][..., :-1].copy()
    types = {tensor: "F16"} if how == "type" else {}  # Norms are F32.
    path = write(SMALL, weights, type_of=lambda key: types.get(key, "F32"))
    with pytest.raises(Error, match=tensor.replace(".", r"\.")):
        drive.open_model(native, path, device, head=True)


@pytest.mark.parametrize(
    "name",
    ["blk.4.attn_q.bias", "blk.4.nextn.extra.weight", "blk.5.attn_norm.weight", "rope_freqs.weight"],
)
@pytest.mark.parametrize("whole", [False, True], ids=["alone", "beside a trunk"])
def test_a_tensor_that_a_head_file_would_hide_is_refused(
    name: str, whole: bool, native: Library, write: Write, device: str
) -> None:
    """It is refused as in a model's file: what is not understood is not ignored."""
    alone = replace(SMALL, n_nextn=0)
    trunk, weights = write(alone, tiny.layout(alone, SEED), "trunk"), tiny.layout(SMALL, SEED)
    if not whole:
        weights = tiny.head_only(SMALL, weights, "token_embd.weight", "output_norm.weight")
    head = write(SMALL, weights | {name: np.ones(64, np.float32)}, "head")
    for opens in (drive.open_model, drive.memory):
        with pytest.raises(UnsupportedError, match=name.replace(".", r"\.")) as raised:
            opens(native, trunk, device, head=head)
        assert "head.gguf" in str(raised.value)


def test_two_tables_of_rows_that_are_widened(
    native: Library, write: Write, device: str, bound: float, record_property: Callable[[str, object], None]
) -> None:
    """CUDA has no rows of IQ4_NL: both embeddings are widened on upload, each to its own."""
    tables = "token_embd.weight", NEXTN + "embed_tokens.weight"
    weights = tiny.with_own_output(SMALL, tiny.layout(SMALL, SEED), SEED)
    types = dict.fromkeys(tables, "IQ4_NL")
    path = write(SMALL, weights, type_of=lambda name: types.get(name, "F32"), quantize=native.quantize)
    stored = ref.read_gguf(str(path))
    assert not np.array_equal(stored[tables[0]], weights[tables[0]])
    model = drive.open_model(native, path, device, head=True)
    check_drafts(model, Trunk(SMALL, stored, SMALL, {}), bound, record_property)
    tokens = [int(t) for t in np.random.default_rng(1).integers(0, SMALL.n_vocab, 30)]
    expected = ref.Reference(SMALL, stored).feed(tokens)
    found = drive.chain_logits(drive.open_sequence(model, n_ctx=64), tokens, 10)
    assert np.abs(found - expected).max() <= bound


# ---- what a draft refuses


def test_a_draft_needs_a_sequence_that_drafts(small: Model) -> None:
    sequence = drive.open_sequence(small, n_ctx=64)
    drive.prefill(sequence, [1, 2])
    with pytest.raises(StateError):
        drive.draft(sequence, 3, 1)


def test_a_draft_needs_a_committed_token(small: Model) -> None:
    sequence = drive.open_sequence(small, n_ctx=64, n_draft=4)
    with pytest.raises(StateError, match="prefill"):
        drive.draft(sequence, 3, 1)
    drive.prefill(sequence, [1])
    drive.draft(sequence, 3, 1)


@pytest.mark.parametrize("n", [0, 5, 8, 2**31])
def test_the_number_of_drafts_is_checked(n: int, small: Model) -> None:
    sequence = drive.open_sequence(small, n_ctx=64, n_draft=4)
    drive.prefill(sequence, [1])
    with pytest.raises(ArgumentError, match="1 to 4"):
        drive.draft(sequence, 3, n)
    assert not sequence.info.failed


@pytest.mark.parametrize("token", [-1, SMALL.n_vocab, 2**31 - 1])
def test_the_anchor_is_checked(token: int, small: Model) -> None:
    sequence = drive.open_sequence(small, n_ctx=64, n_draft=4)
    drive.prefill(sequence, [1])
    with pytest.raises(ArgumentError):
        drive.draft(sequence, token, 1)
    assert not sequence.info.failed


@pytest.mark.parametrize("n_draft", [9, 64])
def test_a_sequence_drafts_at_most_eight(n_draft: int, small: Model) -> None:
    with pytest.raises(ArgumentError, match="n_draft"):
        drive.open_sequence(small, n_ctx=64, n_draft=n_draft)


def test_a_sequence_verifies_what_it_drafts(small: Model) -> None:
    with pytest.raises(ArgumentError, match="n_rows"):
        drive.open_sequence(small, n_ctx=64, n_draft=4, n_rows=4)


@pytest.mark.parametrize("room", range(10))
def test_drafts_end_with_the_context(room: int, small: Model) -> None:
    """`room` positions are left; the last draft's row takes one after the anchor's."""
    sequence = drive.open_sequence(small, n_ctx=32, n_draft=8)
    anchor = drive.prefill(sequence, [1] * (32 - room))
    for n in range(1, 9):
        if n < room:
            drive.draft(sequence, anchor, n)
            assert len(drive.verify_draft(sequence, n)) == n + 1
        else:
            with pytest.raises(ContextFull):
                drive.draft(sequence, anchor, n)
    assert sequence.info.n_past == 32 - room and not sequence.info.failed


def test_rows_without_tokens_need_a_draft(small: Model) -> None:
    sequence = drive.open_sequence(small, n_ctx=64, n_draft=4)
    anchor = drive.prefill(sequence, [1, 2])
    with pytest.raises(StateError):
        drive.verify_draft(sequence, 1)
    drive.draft(sequence, anchor, 2)
    with pytest.raises(StateError):
        drive.verify_draft(sequence, 3)
    drive.verify_draft(sequence, 2)
    sequence.commit([0])
    with pytest.raises(StateError):  # The draft was of the position before.
        drive.verify_draft(sequence, 2)
    sequence.reset()
    drive.prefill(sequence, [1, 2])
    with pytest.raises(StateError):
        drive.verify_draft(sequence, 2)


def test_a_draft_is_read_before_or_after_its_verify(small: Model) -> None:
    sequence = drive.open_sequence(small, n_ctx=64, n_draft=4)
    anchor = drive.prefill(sequence, [1, 2])
    drive.draft(sequence, anchor, 4)
    before = sequence.drafted(4)
    choices = drive.verify_draft(sequence, 4)
    assert sequence.drafted(4) == before
    assert sequence.drafted(2) == before[:2]
    assert drive.verify(sequence, [anchor, *before]) == choices
    assert drive.verify_draft(sequence, 2) == choices[:3]
    for n in (0, 5):
        with pytest.raises(ArgumentError):
            sequence.drafted(n)


def test_a_second_draft_replaces_the_first(small: Model) -> None:
    sequence = drive.open_sequence(small, n_ctx=64, n_draft=4)
    anchor = drive.prefill(sequence, [1, 2, 3])
    drive.draft(sequence, anchor, 4)
    expected = sequence.drafted(4)
    other = (anchor + 1) % SMALL.n_vocab
    drive.draft(sequence, other, 2)
    assert drive.verify_draft(sequence, 2) == drive.verify(sequence, [other, *sequence.drafted(2)])
    drive.draft(sequence, anchor, 4)
    assert sequence.drafted(4) == expected


def test_drafts_that_are_not_finite_leave_the_sequence_usable(
    native: Library, write: Write, device: str
) -> None:
    weights = tiny.layout(SMALL, SEED)
    weights[NEXTN + "eh_proj.weight"][:] = np.nan
    sequence = drive.open_sequence(
        drive.open_model(native, write(SMALL, weights), device, head=True), n_ctx=64, n_draft=4
    )
    expected = drive.greedy(drive.open_sequence(drive.open_model(native, write(SMALL, weights), device)),
                            [1, 2, 3], 8)  # fmt: skip
    found = [drive.prefill(sequence, [1, 2, 3])]
    while len(found) < 8:
        drive.draft(sequence, found[-1], 4)
        choices = drive.verify_draft(sequence, 4)
        with pytest.raises(NumericError, match="draft"):
            sequence.drafted(4)
        assert not sequence.info.failed
        sequence.commit([0])
        found.append(choices[0])
    assert found == expected


def test_a_head_file_may_be_closed_after_the_model_is_open(
    native: Library, write: Write, device: str
) -> None:
    weights = tiny.layout(SMALL, SEED)
    path = write(SMALL, weights)
    head = write(SMALL, tiny.head_only(SMALL, weights), "head")
    with File(path, native) as file, File(head, native) as other:
        model = Model(file, device, head=other)
    assert drafts_of(model) == drafts_of(drive.open_model(native, path, device, head=True))
