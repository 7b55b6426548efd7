"""Checks checkpoints: a resumed prompt goes on with the bits of a cold one, and what does not fit is
refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import drive
import nan_model
import numpy as np
import pytest
import tiny
from drive import Decoded
from nan_model import BAD, SMALL, state_of, tokens_of
from saved_bytes import HEADER
from tiny import Config

from luce.errors import ArgumentError, ContextFull, NumericError, OutOfMemory, StateError
from luce.native import Checkpoint, Engine, Library, Model
from luce.native import Sequence as Timeline
from luce.planning.split import names_of

WIDE = Config(n_layer=3, interval=2, n_embd=256, n_ff=256, n_head=4, n_head_kv=2, n_v_head=4, state_size=64,
              n_nextn=1)  # fmt: skip
SEED = 61


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture
def model_of(native: Library, folder: Path, device: str) -> Callable[..., Model]:
    """Gives model_of("F32"), which is SMALL, or of another type WIDE; "Q4_K experts" is a mixture of it. With
    head=False it has no head."""

    def make(kind: str = "F32", head: bool = True, seed: int = SEED) -> Model:
        path = folder / f"{kind}-{seed}.gguf"
        if not path.exists():
            c = SMALL if kind == "F32" else tiny.with_experts(WIDE) if "experts" in kind else WIDE
            weights = tiny.layout(c, seed)
            weights = nan_model.spoil(weights) if kind == "F32" else weights
            tiny.write(path, c, weights, kind.split()[0], quantize=native.quantize)
        return drive.open_model(native, path, device, head=head)

    return make


def open_engine(model: Model, **params: int | str) -> Engine:
    filled: dict[str, int | str] = {
        "n_ctx": 1100, "n_sequences": 2, "n_checkpoints": 4, "n_rows": 9, "n_draft": 8, "n_chunk": 256,
    }  # fmt: skip
    return drive.open_engine(model, **filled | params)


# ---- the bits of a cold prompt


def follow(
    sequence: Timeline, rest: list[int], anchor: int | None = None
) -> tuple[Decoded, list[bytes], bytes]:
    """Returns what comes after the rest of a prompt: tokens, acceptance and drafts, logits, and the state at
    the end. `anchor` is given where the prompt is over."""
    first = drive.start(sequence, rest) if rest else anchor
    assert first is not None
    out = Decoded([first], [], [sequence.logits(0)] if rest else [])
    drive.go_on(sequence, out, 16, (3, 0, 8, 1), logits=True)
    logits, out.logits = [row.tobytes() for row in out.logits], []
    return out, logits, sequence.dump()


def checkpoints_of(sequence: Timeline, prompt: list[int]) -> list[Checkpoint]:
    """Returns checkpoints at every end of a chunk of the prompt, made in a sequence of their own."""
    n_chunk, made = sequence.engine.info.n_chunk, []
    sequence.reset()
    for end in range(n_chunk, len(prompt) + 1, n_chunk):
        sequence.prefill(prompt[end - n_chunk : end], last=False)
        made.append(sequence.checkpoint())
    return made


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "kv_type", "n_chunk"),
    [("F32", "f32", 256), ("Q4_K", "q8_0", 512), ("Q4_K", "f16", 256), ("Q4_K experts", "f16", 512)],
)
def test_a_resumed_prompt_is_a_cold_one(
    kind: str, kv_type: str, n_chunk: int, model_of: Callable[..., Model]
) -> None:
    """For every position and every way that a checkpoint can go, in its engine and in another, tokens, what
    was accepted, logits and state are the same, bit for bit. That holds on every device: all steps are the
    same ones."""
    model, prompt = model_of(kind), tokens_of(1025)
    alone = open_engine(model, n_sequences=1, n_checkpoints=0, n_chunk=n_chunk, kv_type=kv_type).sequence()
    engine = open_engine(model, n_chunk=n_chunk, kv_type=kv_type)
    other = open_engine(model, n_ctx=1400, n_sequences=5, n_checkpoints=1, n_chunk=n_chunk, kv_type=kv_type)
    source, sequence, elsewhere = engine.sequence(), engine.sequence(), other.sequence()
    ends = [n_chunk + 1, 2 * n_chunk - 1, 1025]
    for n_prompt in ends:
        alone.reset()
        cold = follow(alone, prompt[:n_prompt])
        for made in checkpoints_of(source, prompt[:n_prompt]):
            rest, data = prompt[made.info.n_past : n_prompt], made.save()
            ways: list[tuple[str, Timeline, Checkpoint]] = [
                ("file", sequence, engine.load_checkpoint(data)),
                ("file elsewhere", elsewhere, other.load_checkpoint(data)),
                ("device", sequence, made),
            ]
            for name, into, checkpoint in ways:
                into.resume(checkpoint)
                assert into.info.n_past == checkpoint.info.n_past == n_prompt - len(rest)
                assert follow(into, rest) == cold, name
            assert made.save() == data == ways[0][2].save() == ways[1][2].save()
            made.to_host()
            sequence.resume(made)
            assert follow(sequence, rest) == cold, "host"
            made.to_device()
            assert made.info.on_device
            sequence.resume(made)
            assert follow(sequence, rest) == cold, "host and back"
            assert made.save() == data
            for _, _, checkpoint in ways:
                checkpoint.close()


def test_the_sequence_that_a_checkpoint_is_of_goes_on_as_if_there_were_none(
    model_of: Callable[..., Model],
) -> None:
    """It is made in the middle of a prompt, at its end, and with verified rows and a draft in between."""
    model, prompt = model_of(), tokens_of(600)
    engine = open_engine(model, n_sequences=1, n_checkpoints=2)
    sequence = engine.sequence()
    cold = follow(sequence, prompt)
    sequence.reset()
    sequence.prefill(prompt[:256])
    # It is not committed, so it leaves no trace.
    anchor_of_256 = drive.verify(sequence, tokens_of(5, seed=3))
    first = sequence.checkpoint()
    sequence.prefill(prompt[256:512], last=False)
    second = sequence.checkpoint()
    assert follow(sequence, prompt[512:]) == cold
    for checkpoint in (second, first, second):
        sequence.resume(checkpoint)
        assert follow(sequence, prompt[checkpoint.info.n_past :]) == cold
    sequence.resume(first)
    assert drive.verify(sequence, tokens_of(5, seed=3)) == anchor_of_256


def test_a_checkpoint_at_the_very_end_of_a_prompt(model_of: Callable[..., Model]) -> None:
    """There is nothing to prefill: the anchor is the caller's, and drafts may come at once."""
    sequence = open_engine(model_of(), n_sequences=1).sequence()
    prompt = tokens_of(512)
    anchor = drive.start(sequence, prompt)
    checkpoint = sequence.checkpoint()
    cold = follow(sequence, [], anchor)
    for _ in range(3):
        sequence.resume(checkpoint)
        assert follow(sequence, [], anchor) == cold


def test_checkpoints_of_checkpoints(model_of: Callable[..., Model]) -> None:
    """A chain of resumes goes through the host, each a chunk longer, with junk decoded in between."""
    model, prompt = model_of(), tokens_of(900)
    engine = open_engine(model, n_sequences=2)
    sequence, junk = engine.sequence(), engine.sequence()
    cold = follow(sequence, prompt)
    sequence.reset()
    for begin in (0, 256, 512):
        sequence.prefill(prompt[begin : begin + 256], last=False)
        checkpoint = sequence.checkpoint()
        drive.chain_logits(sequence, tokens_of(20, seed=begin), 5)
        drive.chain_logits(junk, tokens_of(30, seed=begin), 7)
        checkpoint.to_host()
        sequence.reset()
        sequence.resume(checkpoint)
        assert sequence.checkpoint().save() == checkpoint.save()
    assert follow(sequence, prompt[768:]) == cold


def test_five_texts_from_one_prompt(model_of: Callable[..., Model]) -> None:
    """The acceptance is the same each time, whatever was decoded in between, and in a fork beside the first.
    """
    engine = open_engine(model_of(), n_checkpoints=1)
    sequence, other = engine.sequence(), engine.sequence()
    prompt = tokens_of(300)
    sequence.prefill(prompt[:256], last=False)
    checkpoint, seen = sequence.checkpoint(), []
    for turn in range(5):
        sequence.resume(checkpoint)
        anchor = drive.start(sequence, prompt[256:])
        drive.draft(sequence, anchor, 8)
        drafts = sequence.drafted(8)
        seen.append((drafts, drive.go_on(sequence, Decoded([anchor]), 40, 4)))
        drive.decode(other, tokens_of(30 + turn, seed=turn), 10, 3)
        drive.decode(sequence, tokens_of(270 + turn, seed=turn), 10, 3)
    assert all(each == seen[0] for each in seen)


# ---- what is refused


def test_only_where_prefill_may_be_cut_is_a_checkpoint(model_of: Callable[..., Model]) -> None:
    engine = open_engine(model_of(), n_sequences=1)
    sequence, tokens = engine.sequence(), tokens_of(600)

    def refused() -> None:
        before = state_of(engine, sequence)
        with pytest.raises(StateError, match=r"multiple of \d+: the sequence has"):
            sequence.checkpoint()
        assert state_of(engine, sequence) == before

    refused()  # It is empty.
    for n in (1, 255, 257, 300):
        sequence.reset()
        drive.prefill(sequence, tokens[:n])
        refused()
    sequence.reset()
    drive.prefill(sequence, tokens[:250])
    drive.chain_logits(sequence, tokens[250:256], 6)
    assert sequence.info.n_past == 256
    refused()  # It has decoded.
    drive.prefill(sequence, tokens[256:512])
    refused()  # It stays so for good.
    sequence.reset()
    for part in (tokens[:100], tokens[100:256]):
        sequence.prefill(part, last=False)
    refused()  # It was not cut where a prompt may be.
    sequence.reset()
    sequence.prefill(tokens[:256], last=False)
    checkpoint = sequence.checkpoint()
    drive.chain_logits(sequence, tokens[:256], 8)
    refused()
    sequence.resume(checkpoint)
    sequence.prefill(tokens[256:512], last=False)
    sequence.checkpoint()


def test_a_page_that_has_begun_is_copied_and_the_others_are_shared(model_of: Callable[..., Model]) -> None:
    """A checkpoint of a page and a half needs a page of its own, and so does each sequence that goes on from it. Where
    none is free nothing changes."""
    model = model_of("Q4_K")
    engine = open_engine(model, n_ctx=1024, n_pages=5, kv_type="f16")  # Its prompts may be cut at 384.
    one, other, prompt = engine.sequence(), engine.sequence(), tokens_of(900)

    def free() -> int:
        return engine.info.pages_free

    drive.prefill(one, prompt[:256], last=False)
    one.prefill(prompt[256:384], last=False)
    assert free() == 3
    checkpoint = one.checkpoint()
    assert free() == 2
    other.resume(checkpoint)
    assert free() == 1 and other.dump() == one.dump()
    drive.prefill(one, prompt[384:512], last=False)
    drive.prefill(other, tokens_of(128, seed=5), last=False)
    assert free() == 1  # Each has written its own second page.
    one.resume(checkpoint)
    assert free() == 1
    drive.prefill(one, prompt[384:700], last=False)
    assert free() == 0
    before = state_of(engine, one, other)
    with pytest.raises(OutOfMemory, match="1 KV pages"):
        other.resume(checkpoint)
    assert state_of(engine, one, other) == before
    other.reset()
    assert free() == 1
    other.resume(checkpoint)
    with pytest.raises(OutOfMemory, match="1 KV pages"):
        other.checkpoint()
    with open_engine(model, n_ctx=1024, kv_type="f16").sequence() as cold:
        drive.prefill(cold, prompt[:384], last=False)
        assert cold.dump() == other.dump()
    one.reset()
    checkpoint.to_host()
    other.reset()
    assert free() == 5
    checkpoint.to_device()
    assert free() == 3
    checkpoint.close()
    assert free() == 5


def test_a_failed_sequence_has_no_checkpoint_and_is_healed_by_one(model_of: Callable[..., Model]) -> None:
    """Nothing of the NaN that it failed of is left."""
    engine = open_engine(model_of(), n_sequences=1)
    sequence, prompt = engine.sequence(), tokens_of(300)
    cold = follow(sequence, prompt)
    sequence.reset()
    sequence.prefill(prompt[:256], last=False)
    checkpoint = sequence.checkpoint()
    for rows in ([BAD], [1, 2, BAD], [BAD] * 9):
        for back in (checkpoint.to_device, checkpoint.to_host):
            sequence.reset()
            drive.prefill(sequence, [1, 2])
            with pytest.raises(NumericError):
                drive.verify(sequence, rows)
            assert sequence.info.failed
            with pytest.raises(StateError):
                sequence.checkpoint()
            back()
            sequence.resume(checkpoint)
            assert not sequence.info.failed
            assert follow(sequence, prompt[256:]) == cold
    sequence.reset()
    with pytest.raises(NumericError):
        drive.prefill(sequence, [*tokens_of(255), BAD] + tokens_of(9))
    with pytest.raises(StateError):
        sequence.checkpoint()
    sequence.resume(checkpoint)
    assert follow(sequence, prompt[256:]) == cold


@pytest.fixture
def saved(model_of: Callable[..., Model]) -> bytes:
    sequence = open_engine(model_of(), n_sequences=1, kv_type="f16").sequence()
    sequence.prefill(tokens_of(256), last=False)
    return bytes(sequence.checkpoint().save())


MISFITS: dict[str, tuple[dict[str, object], dict[str, int | str], str]] = {
    "other weights": ({"seed": SEED + 1}, {}, "model"),
    "other types": ({"kind": "Q4_K"}, {}, "model"),
    "no head": ({"head": False}, {"n_draft": 0}, "model|head"),
    "no drafts": ({}, {"n_draft": 0}, "NextN head"),
    "kv type": ({}, {"kv_type": "q8_0"}, "(?i)f16.*q8_0"),
}


@pytest.mark.parametrize("what", MISFITS)
def test_another_engines_bytes_are_refused_by_name(
    what: str, saved: bytes, model_of: Callable[..., Model]
) -> None:
    kind, params, match = MISFITS[what]
    filled: dict[str, int | str] = {"kv_type": "f16"} | params
    engine = open_engine(model_of(**kind), **filled)
    before = engine.info
    with pytest.raises(ArgumentError, match=match):
        engine.load_checkpoint(saved)
    assert engine.info == before


def test_what_other_arithmetic_computed_is_refused(native: Library, folder: Path, device: str) -> None:
    """A cold prompt would have other last bits with its experts on the CPU, and on another kind of GPU."""
    device = names_of(device)[0]  # Experts in host memory go with one device.
    config = tiny.Config(n_expert=4, n_expert_used=2, n_ff_expert=32, n_ff_shared=32)
    path = tiny.write(folder / "experts.gguf", config, tiny.layout(config, SEED))
    models = [drive.open_model(native, path, device, cpu_experts=n) for n in (0, 1)]
    engines = [drive.open_engine(model, n_ctx=512, n_chunk=256, n_checkpoints=1) for model in models]
    sequence = engines[0].sequence()
    sequence.prefill(tokens_of(256), last=False)
    data = sequence.checkpoint().save()
    engines[0].load_checkpoint(data)
    with pytest.raises(ArgumentError, match="experts of 1 layers on"):
        engines[1].load_checkpoint(data)


def test_another_head_is_refused(native: Library, folder: Path, device: str) -> None:
    trunk = replace(SMALL, n_nextn=0)
    path = tiny.write(folder / "trunk.gguf", trunk, tiny.layout(trunk, SEED))
    engines = []
    for seed in (1, 2):
        head = tiny.head_only(SMALL, tiny.layout(SMALL, seed))
        file = tiny.write(folder / f"head-{seed}.gguf", SMALL, head)
        engines.append(open_engine(drive.open_model(native, path, device, head=file), n_ctx=256, n_rows=9))
    sequence = engines[0].sequence()
    sequence.prefill(tokens_of(256), last=False)
    data = sequence.checkpoint().save()
    with pytest.raises(ArgumentError, match="model"):
        engines[1].load_checkpoint(data)
    engines[0].load_checkpoint(data)


def test_damaged_bytes_are_refused(saved: bytes, model_of: Callable[..., Model]) -> None:
    """They are cut anywhere, grown, have any bit of the header, the first tokens and some of the rest
    flipped, or fields exchanged for others that look right."""
    engine = open_engine(model_of(), kv_type="f16")
    before, rng = engine.info, np.random.default_rng(1)
    cuts = [0, 1, 7, 8, HEADER - 1, HEADER, HEADER + 4, HEADER + 1024, len(saved) // 2, len(saved) - 1]
    damaged = [saved[:cut] for cut in cuts] + [saved + b"\0", saved + saved, saved[8:], b"\0" * len(saved)]
    bits = [*range(8 * (HEADER + 32)), *(int(b) for b in rng.integers(0, 8 * len(saved), 300))]
    for bit in bits:
        data = bytearray(saved)
        data[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(data))
    for at, value in [(24, len(saved) - 4), (40, 0), (40, 512), (40, 2**32 - 1), (44, 0), (48, 2)]:
        damaged.append(saved[:at] + value.to_bytes(4, "little") + saved[at + 4 :])
    for data in damaged:
        with pytest.raises(ArgumentError):
            engine.load_checkpoint(data)
    assert engine.info == before
    assert engine.load_checkpoint(saved).save() == saved


def test_a_state_is_no_checkpoint(model_of: Callable[..., Model]) -> None:
    """Dumped bytes may be of a sequence that decoding brought where it is."""
    engine = open_engine(model_of(), n_sequences=1)
    sequence = engine.sequence()
    drive.chain_logits(sequence, tokens_of(256), 8)
    with pytest.raises(ArgumentError, match="no checkpoint"):
        engine.load_checkpoint(sequence.dump())


def test_a_checkpoint_resumes_in_its_own_engine_only(model_of: Callable[..., Model]) -> None:
    model = model_of()
    engines = [open_engine(model) for _ in range(2)]
    sequences = [engine.sequence() for engine in engines]
    for sequence in sequences:
        sequence.prefill(tokens_of(256), last=False)
    checkpoint, before = sequences[0].checkpoint(), state_of(engines[1], sequences[1])
    with pytest.raises(ArgumentError, match="another engine"):
        sequences[1].resume(checkpoint)
    assert state_of(engines[1], sequences[1]) == before


def test_a_context_without_room_is_an_error_that_changes_nothing(model_of: Callable[..., Model]) -> None:
    model = model_of()
    source = open_engine(model, n_sequences=1).sequence()
    drive.prefill(source, tokens_of(512), last=False)
    data = source.checkpoint().save()
    small, exact = (open_engine(model, n_ctx=n, n_sequences=1) for n in (512, 513))
    for engine in (small, exact):
        sequence, checkpoint = engine.sequence(), engine.load_checkpoint(data)
        drive.prefill(sequence, tokens_of(20))
        before = state_of(engine, sequence)
        if engine is small:
            with pytest.raises(ContextFull, match="512.*512"):
                sequence.resume(checkpoint)
            assert state_of(engine, sequence) == before
        else:
            sequence.resume(checkpoint)
            assert sequence.prefill([1]) is not None


# ---- beside the steps


@pytest.fixture
def large(native: Library, folder: Path, device: str) -> tuple[Engine, Timeline, Checkpoint]:
    """Gives a checkpoint of 32 MiB, and another sequence, which decodes."""
    c = replace(SMALL, n_layer=2, interval=2, n_head=16, n_head_kv=16, head_dim=256, n_nextn=0)
    path = tiny.write(folder / "large.gguf", c, tiny.layout(c, SEED))
    engine = open_engine(drive.open_model(native, path, device), n_draft=0, kv_type="f32", n_ctx=1280)
    source, sequence = engine.sequence(), engine.sequence()
    for begin in range(0, 1024, 256):
        source.prefill(tokens_of(1024)[begin : begin + 256], last=False)
    drive.prefill(sequence, [1, 2])
    return engine, sequence, source.checkpoint()


class Saving:
    """Runs luce_checkpoint_save in a thread. It writes `data`: the tokens, then the rest a piece at a time,
    and the header last."""

    def __init__(self, checkpoint: Checkpoint):
        library, size = checkpoint.library, checkpoint.info.size_bytes
        self.data = np.zeros(size, np.uint8)
        save, handle = library.lib.luce_checkpoint_save, checkpoint.handle
        n, into = library.ffi.new("uint64_t *", size), library.ffi.from_buffer("char[]", self.data)
        self.status = 0
        self._thread = threading.Thread(target=lambda: setattr(self, "status", save(handle, into, n)))
        self._thread.start()
        while self._thread.is_alive() and not self.data[HEADER : HEADER + 8].any():
            pass

    @property
    def under_way(self) -> bool:
        return not self.data[:8].any()

    def join(self) -> int:
        self._thread.join()
        return self.status


@pytest.mark.long
def test_steps_go_on_beside_a_save(large: tuple[Engine, Timeline, Checkpoint]) -> None:
    """A step is begun and ended within it, and its bytes are those of a save with nothing beside it."""
    _, sequence, checkpoint = large
    alone, ended_within = bytes(checkpoint.save()), 0
    for n in range(8):
        saving = Saving(checkpoint)
        if n % 3:
            [checkpoint.to_device, checkpoint.to_host][n % 2]()
        drive.verify(sequence, [3])
        ended_within += saving.under_way
        assert saving.join() == 0 and saving.data.tobytes() == alone
    assert ended_within > 0


@pytest.mark.long
def test_a_checkpoint_that_is_closed_while_it_is_saved(large: tuple[Engine, Timeline, Checkpoint]) -> None:
    """Its pages are free at once, and the save fails; unless it was over before."""
    engine, _, checkpoint = large
    source, failed = engine.load_checkpoint(checkpoint.save()), 0
    checkpoint.close()
    free = engine.info.pages_free
    for _ in range(8):
        copy = engine.load_checkpoint(source.save())
        copy.to_device()
        saving = Saving(copy)
        copy.close()
        assert engine.info.pages_free == free
        status = saving.join()
        assert status in (0, StateError.code) and (status == 0) != saving.under_way
        failed += status != 0
    assert failed > 0


# ---- lifetimes


def test_handles_close_in_any_order(native: Library, folder: Path, device: str) -> None:
    """A checkpoint outlives the sequence that it is of, and both their engine and model."""
    c = replace(SMALL, n_layer=2, interval=2)
    path = tiny.write(folder / "order.gguf", c, tiny.layout(c, SEED))
    for order in ("scem", "mecs", "ecms", "cmse"):
        model = drive.open_model(native, path, device, head=True)
        engine = open_engine(model, n_ctx=300)
        sequence, other = engine.sequence(), engine.sequence()
        sequence.prefill(tokens_of(256), last=False)
        checkpoint = sequence.checkpoint()
        data = checkpoint.save()
        handles = {"m": model, "e": engine, "s": sequence, "c": checkpoint}
        for letter in order:
            handles[letter].close()
            if letter == "e":
                with pytest.raises(StateError):
                    engine.sequence()
            if checkpoint.is_open:
                assert checkpoint.save() == data
                other.resume(checkpoint)
            assert other.prefill([1, 2, 3]) is not None
        other.close()
