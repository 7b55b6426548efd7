"""Saved sessions: after any rounds the bytes are those of plain decoding, a restored session goes on as if
it had never left, and what does not fit is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import drive
import numpy as np
import pytest
import tiny
from drive import Decoded
from tiny import Config

from luce._native import Library, Model, Session
from luce.errors import ArgumentError, LuceError, NumericError, StateError

SMALL = Config(n_nextn=1)
WIDE = Config(n_layer=3, interval=2, n_embd=256, n_ff=256, n_head=4, n_head_kv=2, n_v_head=4, state_size=64,
              n_nextn=1)  # fmt: skip
SEED = 51


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("save")


@pytest.fixture
def model_of(native: Library, folder: Path, device: str) -> Callable[..., Model]:
    """model_of("F32"): SMALL; of another type: WIDE. head=False: without its head."""

    def make(kind: str = "F32", head: bool = True, seed: int = SEED) -> Model:
        path = folder / f"{kind}-{seed}.gguf"
        if not path.exists():
            c = SMALL if kind == "F32" else WIDE
            tiny.write(path, c, tiny.layout(c, seed), kind, quantize=native.quantize)
        return drive.open_model(native, path, device, head=head)

    return make


def tokens_of(n: int, seed: int = 1) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, SMALL.n_vocab, n)]


def random_round(session: Session, rng: np.random.Generator, n_draft: int) -> list[int]:
    """One round of any kind, with a random part of it accepted: the tokens it committed."""
    rows = [int(t) for t in rng.integers(0, SMALL.n_vocab, int(rng.integers(1, 25)))]
    parents = drive.random_tree(rng, len(rows)) if rng.random() < 0.5 else list(range(-1, len(rows) - 1))
    kind = rng.choice(["rows", "draft", "draft, other rows", "two verifies"] if n_draft else ["rows"])
    if kind.startswith("draft"):
        n = int(rng.integers(1, n_draft + 1))
        session.draft(rows[0], n)
        if kind == "draft":
            session.verify_draft(n)
            rows, parents = [rows[0], *session.drafted(n)], list(range(-1, n))
        elif rng.random() < 0.5:
            rows[0] = (rows[0] + 1) % SMALL.n_vocab  # not what was drafted after
    if kind == "two verifies":
        session.verify(tokens_of(9, int(rng.integers(99))))
    if kind != "draft":
        session.verify(rows, parents)
    path = drive.root_path(parents, int(rng.integers(len(rows))))
    path = path[: int(rng.integers(1, len(path) + 1))]
    session.commit(path)
    return [rows[row] for row in path]


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("kind", ["F32", "Q4_K"])
@pytest.mark.parametrize("n_draft", [0, 8])
def test_any_rounds_save_the_bytes_of_plain_decoding(
    n_draft: int,
    kind: str,
    kv_type: str,
    model_of: Callable[..., Model],
    device: str,
    record_property: Callable[[str, object], None],
) -> None:
    """Chains and trees with random accept patterns, drafted or fed, against one token after the other; the
    bytes are compared after each of some rounds, and after many without a look in between."""
    model, differ = model_of(kind, head=n_draft > 0), 0.0
    for seed, every in ((1, 1), (2, 5), (3, 30)):
        rng = np.random.default_rng(seed)
        session, plain = (
            drive.open_session(model, n_ctx=1024, n_rows=32, n_draft=n_draft, kv_type=kv_type)
            for _ in range(2)
        )
        for each in (session, plain):
            each.prefill(tokens_of(21))
        for number in range(1, 31):
            for token in random_round(session, rng, n_draft):
                drive.step(plain, token)
            if number % every == 0:
                found, expected = session.save(), plain.save()
                assert len(found) == len(expected)
                if device == "cpu":
                    assert found == expected, f"round {number}"
                pair = [np.frombuffer(data, np.uint8) for data in (found, expected)]
                differ = max(differ, float((pair[0] != pair[1]).mean()))
    record_property("share_of_differing_bytes", differ)


def test_reading_a_state_does_not_change_it(model_of: Callable[..., Model]) -> None:
    session = drive.open_session(model_of(), n_ctx=128, n_rows=9, n_draft=8)
    session.prefill(tokens_of(30))
    first = session.save()
    assert session.save() == first
    session.draft(5, 8)  # nothing is committed
    session.verify_draft(8)
    assert session.save() == first
    with pytest.raises(StateError):  # the verified rows were dropped
        session.commit([0])
    assert session.info.n_past == 30 and session.info.n_verified == 0


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("kind", ["F32", "Q4_K"])
def test_a_restored_session_goes_on_as_if_it_had_never_left(
    kind: str, kv_type: str, model_of: Callable[..., Model], device: str
) -> None:
    """In the same session, and in another with other sizes: tokens, drafts, acceptance and bytes."""
    model = model_of(kind)
    stays = drive.open_session(model, n_ctx=256, n_rows=9, n_draft=8, kv_type=kv_type)
    found = drive.decode(stays, tokens_of(40), 20, (2, 0, 5))
    saved = stays.save()
    stays.draft(found.tokens[-1], 8)
    drafts = stays.drafted(8)
    expected = drive.go_on(stays, Decoded(found.tokens[-1:]), 60, (3, 8, 0, 1))
    end = stays.save()
    others = [
        stays,
        drive.open_session(model, n_ctx=len(tokens_of(40)) + 120, n_rows=9, n_draft=8, kv_type=kv_type),
        drive.open_session(
            model, n_ctx=2048, n_rows=64, n_draft=8, n_chunk=7, n_threads=1, kv_type=kv_type
        ),
    ]
    for session in others:
        session.restore(saved)
        assert session.info.n_past == 40 + len(found.tokens) - 1
        assert session.save() == saved
        session.draft(found.tokens[-1], 8)
        again = session.drafted(8)
        later = drive.go_on(session, Decoded(found.tokens[-1:]), 60, (3, 8, 0, 1))
        if device == "cpu":
            assert (again, later, session.save()) == (drafts, expected, end)
        else:
            assert len(later.tokens) >= 60


def test_a_restored_session_may_read_more_text(model_of: Callable[..., Model]) -> None:
    session = drive.open_session(model_of(), n_ctx=256, n_rows=5, n_draft=4, n_chunk=16)
    session.prefill(tokens_of(32))
    saved = session.save()
    choice = session.prefill(tokens_of(50, seed=2))
    expected = session.save()
    session.reset()
    session.restore(saved)
    assert session.prefill(tokens_of(50, seed=2)) == choice
    assert session.save() == expected


def test_five_texts_from_one_saved_prompt(model_of: Callable[..., Model]) -> None:
    """Prefix reuse: the same acceptance each time, whatever was decoded in between."""
    session = drive.open_session(model_of(), n_ctx=256, n_rows=9, n_draft=8)
    anchor = session.prefill(tokens_of(100))
    saved, seen = session.save(), []
    for turn in range(5):
        session.restore(saved)
        session.draft(anchor, 8)
        drafts = session.drafted(8)
        seen.append((drafts, drive.go_on(session, Decoded([anchor]), 40, 4)))
        drive.decode(session, tokens_of(30 + turn, seed=turn), 10, 3)
    assert all(each == seen[0] for each in seen)


def test_an_empty_timeline_can_be_saved(model_of: Callable[..., Model]) -> None:
    session = drive.open_session(model_of(), n_ctx=64, n_rows=5, n_draft=4)
    empty = session.save()
    expected = drive.decode(session, [1, 2, 3], 10, 2)
    session.restore(empty)
    assert session.info.n_past == 0
    with pytest.raises(StateError):
        session.draft(1, 1)
    assert drive.decode(session, [1, 2, 3], 10, 2) == expected


def test_the_size_is_that_of_the_committed_tokens(model_of: Callable[..., Model]) -> None:
    session = drive.open_session(model_of(), n_ctx=512, n_rows=5, n_draft=4)
    sizes = []
    for n in (1, 2, 3, 10):
        session.reset()
        session.prefill(tokens_of(n))
        sizes.append(len(session.save()))
    assert sizes[1] > sizes[0] and sizes[2] - sizes[1] == sizes[1] - sizes[0] == (sizes[3] - sizes[2]) / 7


# ---- what does not fit


def filled(model: Model, **params: int | str) -> Session:
    """A session of 64 positions, 20 of them committed."""
    filled_in = {"n_ctx": 64, "n_rows": 5, "n_draft": 4, "kv_type": "f16"} | params
    session = drive.open_session(model, **filled_in)  # type: ignore[arg-type]
    session.prefill(tokens_of(20))
    return session


def refused(session: Session, data: bytes, match: str = "") -> None:
    """restore(data) is an ArgumentError, and the session is as it was."""
    before = session.save()
    with pytest.raises(ArgumentError, match=match):
        session.restore(data)
    assert not session.info.failed
    assert session.save() == before


def test_another_model_is_refused(model_of: Callable[..., Model]) -> None:
    refused(filled(model_of()), filled(model_of(seed=SEED + 1)).save(), "model")
    refused(filled(model_of()), filled(model_of("Q4_K")).save(), "model")


def test_another_head_is_refused(native: Library, folder: Path, device: str) -> None:
    trunk = replace(SMALL, n_nextn=0)
    weights = tiny.layout(trunk, SEED)
    path = tiny.write(folder / "trunk.gguf", trunk, weights)
    sessions = []
    for seed in (1, 2):
        head = tiny.head_only(SMALL, tiny.layout(SMALL, seed))
        file = tiny.write(folder / f"head-{seed}.gguf", SMALL, head)
        sessions.append(filled(drive.open_model(native, path, device, head=file)))
    refused(sessions[0], sessions[1].save(), "model")


def test_another_kv_type_is_refused_with_both(model_of: Callable[..., Model]) -> None:
    model = model_of()
    for mine, other in (("f16", "q8_0"), ("q8_0", "f16"), ("f32", "q4_0")):
        match = f"(?i){other}.*{mine}"
        refused(filled(model, kv_type=mine), filled(model, kv_type=other).save(), match)


def test_a_context_that_is_too_small_is_refused_with_both(model_of: Callable[..., Model]) -> None:
    model = model_of()
    saved = filled(model)
    small, exact = (drive.open_session(model, n_ctx=n, n_rows=5, n_draft=4, kv_type="f16") for n in (19, 20))
    with pytest.raises(ArgumentError, match="20.*19"):
        small.restore(saved.save())
    exact.restore(saved.save())
    assert exact.save() == saved.save()


def test_with_and_without_a_head_do_not_mix(model_of: Callable[..., Model]) -> None:
    model = model_of()
    drafting, plain = filled(model), filled(model, n_draft=0)
    refused(drafting, plain.save(), "NextN head")
    refused(plain, drafting.save(), "NextN head")


def test_damaged_bytes_are_refused(model_of: Callable[..., Model]) -> None:
    """Cut anywhere, grown, or with any bit of the first part and some of the rest flipped."""
    session = filled(model_of())
    data = session.save()
    rng = np.random.default_rng(1)
    cuts = [0, 1, 7, 8, 47, 48, 49, 128, len(data) // 2, len(data) - 1]
    for cut in cuts:
        with pytest.raises(ArgumentError):
            session.restore(data[:cut])
    for extra in (b"\0", data):
        with pytest.raises(ArgumentError):
            session.restore(data + extra)
    bits = [*range(8 * 130), *(int(b) for b in rng.integers(0, 8 * len(data), 500))]
    for bit in bits:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ArgumentError):
            session.restore(bytes(damaged))
    assert not session.info.failed
    assert session.save() == data


def test_a_failed_session_saves_nothing(native: Library, folder: Path, device: str) -> None:
    weights = tiny.layout(SMALL, SEED)
    weights["token_embd.weight"][7] = np.nan
    path = tiny.write(folder / "nan.gguf", SMALL, weights)
    session = filled(drive.open_model(native, path, device, head=True), n_draft=4)
    session.reset()
    session.prefill([1, 2])
    saved = session.save()
    with pytest.raises(NumericError):
        session.verify([7])
    with pytest.raises(LuceError):
        session.save()
    session.reset()
    session.restore(saved)
    assert session.save() == saved


def test_a_buffer_that_is_too_small_names_both_sizes(native: Library, model_of: Callable[..., Model]) -> None:
    session = filled(model_of())
    size, buffer = native.ffi.new("uint64_t *"), native.ffi.new("char[100000]")
    native.check(native.lib.luce_session_save(session.handle, native.ffi.NULL, size))
    needed = size[0]
    size[0] = needed - 1
    with pytest.raises(ArgumentError, match=f"{needed - 1}.*{needed}"):
        native.check(native.lib.luce_session_save(session.handle, buffer, size))
