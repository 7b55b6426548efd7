"""Reads the committed state as bytes: after any rounds it is that of plain decoding; reading it changes
nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import drive
import numpy as np
import pytest
import tiny
from depth import deeper, deeper_but
from tiny import Config

from luce.errors import ArgumentError, NumericError, StateError
from luce.native import Library, Model
from luce.native import Sequence as Timeline

SMALL = Config(n_nextn=1)
WIDE = Config(n_layer=3, interval=2, n_embd=256, n_ff=256, n_head=4, n_head_kv=2, n_v_head=4, state_size=64,
              n_nextn=1)  # fmt: skip
SEED = 51


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dump")


@pytest.fixture
def model_of(native: Library, folder: Path, device: str) -> Callable[..., Model]:
    """Gives model_of("F32"), which is SMALL, or of another type WIDE. With head=False it has no head."""

    def make(kind: str = "F32", head: bool = True) -> Model:
        path = folder / f"{kind}.gguf"
        if not path.exists():
            c = SMALL if kind == "F32" else WIDE
            tiny.write(path, c, tiny.layout(c, SEED), kind, quantize=native.quantize)
        return drive.open_model(native, path, device, head=head)

    return make


def tokens_of(n: int, seed: int = 1) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, SMALL.n_vocab, n)]


def random_round(sequence: Timeline, rng: np.random.Generator, n_draft: int) -> list[int]:
    """Runs one round of any kind, with a random part of it accepted. Returns the tokens it committed."""
    rows = [int(t) for t in rng.integers(0, SMALL.n_vocab, int(rng.integers(1, 25)))]
    parents = drive.random_tree(rng, len(rows)) if rng.random() < 0.5 else list(range(-1, len(rows) - 1))
    kinds = ["rows", "draft", "draft, fewer rows", "draft, other rows", "two verifies", "two drafts"]
    kind = str(rng.choice(kinds if n_draft else ["rows", "two verifies"]))
    if "draft" in kind:
        n = int(rng.integers(1, n_draft + 1))
        if kind == "two drafts":
            drive.draft(sequence, rows[-1], n_draft)
            drive.verify_draft(sequence, 1)
        drive.draft(sequence, rows[0], n)
        if kind == "draft, other rows":
            if rng.random() < 0.5:
                rows[0] = (rows[0] + 1) % SMALL.n_vocab  # It is not what was drafted after.
        else:
            n = int(rng.integers(0, n)) if "fewer" in kind else n
            drive.verify_draft(sequence, n)
            rows, parents = [rows[0], *sequence.drafted(max(n, 1))[:n]], list(range(-1, n))
    if kind == "two verifies":
        drive.verify(sequence, tokens_of(9, int(rng.integers(99))))
    if kind in ("rows", "two verifies", "draft, other rows"):
        drive.verify(sequence, rows, parents)
    path = drive.root_path(parents, int(rng.integers(len(rows))))
    path = path[: int(rng.integers(1, len(path) + 1))]
    sequence.commit(path)
    return [rows[row] for row in path]


@pytest.mark.parametrize("kv_type", deeper_but(("f32", "f16", "q8_0", "q4_0"), "q8_0"))
@pytest.mark.parametrize("kind", [*deeper("F32"), "Q4_K"])
@pytest.mark.parametrize("n_draft", [0, 8])
def test_any_rounds_leave_the_bytes_of_plain_decoding(
    n_draft: int, kind: str, kv_type: str, model_of: Callable[..., Model]
) -> None:
    """Chains and trees with random accept patterns, drafted or fed, against one token after the other, over
    the ends of pages; the bytes are compared after each of some rounds, and after many without a look in
    between."""
    model = model_of(kind, head=n_draft > 0)
    engine = drive.open_engine(model, n_ctx=1024, n_sequences=2, n_rows=32, n_draft=n_draft, kv_type=kv_type)
    sequence, plain = engine.sequence(), engine.sequence()
    for seed, every in ((1, 1), (2, 5), (3, 30)):
        rng = np.random.default_rng(seed)
        for each in (sequence, plain):
            each.reset()
            drive.prefill(each, tokens_of(100 + 50 * seed))
        for number in range(1, 31):
            for token in random_round(sequence, rng, n_draft):
                drive.step(plain, token)
            if number % every == 0:
                assert sequence.dump() == plain.dump(), f"round {number}"


def test_prefill_after_any_round_pays_what_it_left(model_of: Callable[..., Model]) -> None:
    """A prompt goes on after a tree was committed, or after rows that never were."""
    engine = drive.open_engine(model_of(), n_ctx=512, n_sequences=2, n_rows=32, n_draft=8)
    sequence, plain = engine.sequence(), engine.sequence()
    for seed in range(6):
        rng = np.random.default_rng(seed)
        for each in (sequence, plain):
            each.reset()
            drive.prefill(each, tokens_of(200))
        for token in random_round(sequence, rng, 8):
            drive.step(plain, token)
        if seed % 2:
            drive.draft(sequence, 3, 5)
            drive.verify(sequence, tokens_of(7))
        for each in (sequence, plain):
            drive.prefill(each, tokens_of(90, seed=2))
        assert sequence.dump() == plain.dump()


def test_a_draft_between_a_verify_and_its_commit_leaves_no_trace(model_of: Callable[..., Model]) -> None:
    """Its rows take the place of those that were verified: they are rejected, and cannot be committed."""
    engine = drive.open_engine(model_of(), n_ctx=256, n_sequences=2, n_rows=9, n_draft=8)
    sequence, plain = engine.sequence(), engine.sequence()
    for each in (sequence, plain):
        drive.prefill(each, tokens_of(30))
    drive.verify(sequence, [5, 6, 7])
    drive.draft(sequence, 9, 8)
    assert sequence.info.n_verified == 0
    with pytest.raises(StateError):
        sequence.commit([0, 1, 2])
    drive.verify(sequence, [5, 6, 7])
    sequence.commit([0, 1, 2])
    for token in (5, 6, 7):
        drive.step(plain, token)
    assert sequence.dump() == plain.dump()


def test_reading_a_state_does_not_change_it(model_of: Callable[..., Model]) -> None:
    sequence = drive.open_sequence(model_of(), n_ctx=128, n_rows=9, n_draft=8)
    drive.prefill(sequence, tokens_of(30))
    first = sequence.dump()
    assert sequence.dump() == first
    drive.draft(sequence, 5, 8)  # Nothing is committed.
    drive.verify_draft(sequence, 8)
    assert sequence.dump() == first
    with pytest.raises(StateError):  # The verified rows were dropped.
        sequence.commit([0])
    assert sequence.info.n_past == 30 and sequence.info.n_verified == 0


def test_a_draft_is_there_to_verify_after_a_look_at_the_state(model_of: Callable[..., Model]) -> None:
    """What is booked as drafted is what was drafted, also where other rows were verified in between."""
    sequence = drive.open_sequence(model_of(), n_ctx=128, n_rows=9, n_draft=8)
    drive.prefill(sequence, tokens_of(30))
    drive.verify(sequence, [4, 5, 6])
    sequence.commit([0, 1])
    drive.draft(sequence, 5, 8)
    drafts = sequence.drafted(8)
    choices = drive.verify_draft(sequence, 8)
    sequence.dump()
    assert drive.verify_draft(sequence, 8) == choices
    drive.verify(sequence, tokens_of(9, seed=7))
    assert drive.verify_draft(sequence, 8) == choices == drive.verify(sequence, [5, *drafts])
    drive.verify_draft(sequence, 8)
    sequence.commit(range(9))
    found = sequence.dump()
    sequence.reset()
    drive.prefill(sequence, tokens_of(30))
    for token in (4, 5, 5, *drafts):
        drive.step(sequence, token)
    assert sequence.dump() == found


def test_the_size_is_that_of_the_committed_tokens(model_of: Callable[..., Model]) -> None:
    sequence = drive.open_sequence(model_of(), n_ctx=512, n_rows=5, n_draft=4)
    empty, sizes = len(sequence.dump()), []
    for n in (1, 2, 3, 10):
        sequence.reset()
        drive.prefill(sequence, tokens_of(n))
        sizes.append(len(sequence.dump()))
    assert empty < sizes[0]
    assert sizes[1] > sizes[0] and sizes[2] - sizes[1] == sizes[1] - sizes[0] == (sizes[3] - sizes[2]) / 7


def test_a_failed_sequence_has_no_state(native: Library, folder: Path, device: str) -> None:
    weights = tiny.layout(SMALL, SEED)
    weights["token_embd.weight"][7] = np.nan
    path = tiny.write(folder / "nan.gguf", SMALL, weights)
    model = drive.open_model(native, path, device, head=True)
    sequence = drive.open_sequence(model, n_ctx=64, n_rows=5, n_draft=4)
    drive.prefill(sequence, [1, 2])
    state = sequence.dump()
    with pytest.raises(NumericError):
        drive.verify(sequence, [7])
    with pytest.raises(StateError):
        sequence.dump()
    sequence.reset()
    drive.prefill(sequence, [1, 2])
    assert sequence.dump() == state


def test_a_buffer_that_is_too_small_names_both_sizes(native: Library, model_of: Callable[..., Model]) -> None:
    engine = drive.open_engine(model_of(), n_ctx=300, n_rows=5, n_draft=4, n_chunk=256, n_checkpoints=1)
    sequence = engine.sequence()
    drive.prefill(sequence, tokens_of(256))
    checkpoint = sequence.checkpoint()
    size, buffer = native.ffi.new("uint64_t *"), native.ffi.new("char[4000000]")
    for call, handle in (
        (native.lib.luce_sequence_dump, sequence.handle),
        (native.lib.luce_checkpoint_save, checkpoint.handle),
    ):
        native.check(call(handle, native.ffi.NULL, size))
        needed = size[0]
        assert needed < 4000000
        size[0] = needed - 1
        with pytest.raises(ArgumentError, match=f"{needed - 1}.*{needed}"):
            native.check(call(handle, buffer, size))
        size[0] = 4000000
        native.check(call(handle, buffer, size))
        assert size[0] == needed
