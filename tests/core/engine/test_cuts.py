"""Checks that where a prompt is cut changes no bit: not in one call and in many, beside others that decode and read,
nor where it is resumed from a checkpoint of another cutting, wherever that was kept meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import drive
import numpy as np
import pytest
import tiny
import tiny_gemma4
from depth import deeper_but
from hypothesis import example, given, settings
from hypothesis import strategies as st

from luce.convert.gemma4_layout import Config as Gemma4
from luce.errors import ArgumentError, UnsupportedError
from luce.native import Checkpoint, Engine, Library, Model
from luce.native import Sequence as Timeline
from luce.native.structs import PAGE

WIDE = tiny.Config(n_layer=3, interval=2, n_embd=256, n_ff=256, n_head=4, n_head_kv=2, n_v_head=4, state_size=64,
                   n_nextn=1)  # fmt: skip
# It has no recurrent state and no head, windows within a page and over one, and layers that read others' cells.
GEMMA = Gemma4(sliding=(True, True, False, True, False), window=300, n_embd=256, n_head_kv_swa=1, n_shared_kv=2,
                n_embd_per_layer=64, n_expert=4, n_expert_used=2, n_ff_expert=64)  # fmt: skip
N_CTX, N_MOST = 1024, 900
# Weights, and their KV.
KINDS = {"F32": "f32", "Q4_K": "q8_0", "Q8_0": "f16", "Q4_K experts": "f16", "F32 gemma4": "f32", "Q8_0 gemma4": "q8_0"}


@pytest.fixture(scope="module", params=deeper_but(KINDS, *(kind for kind in KINDS if kind != "Q4_K experts")))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str, native: Library, device: str, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("cuts") / "model.gguf"
    if "gemma4" in kind:
        tiny_gemma4.write(path, GEMMA, tiny_gemma4.layout(GEMMA, 7), kind.split()[0], quantize=native.quantize)
        return drive.open_model(native, path, device)
    config = tiny.with_experts(WIDE) if "experts" in kind else WIDE
    tiny.write(path, config, tiny.layout(config, 7), kind.split()[0], quantize=native.quantize)
    return drive.open_model(native, path, device, head=True)


@pytest.fixture(scope="module")
def open_engine(model: Model, kind: str) -> Callable[[int], Engine]:
    """Gives open_engine(n_chunk), of three sequences that may draft, where there is a head."""

    def opened(n_chunk: int) -> Engine:
        return drive.open_engine(
            model, n_ctx=N_CTX, n_sequences=3, n_checkpoints=3, n_rows=4, n_draft=0 if "gemma4" in kind else 3,
            n_chunk=n_chunk, kv_type=KINDS[kind],
        )  # fmt: skip

    return opened


@pytest.fixture(scope="module")
def whole(open_engine: Callable[[int], Engine]) -> Engine:
    """Gives the engine that reads any prompt here in one call."""
    engine = open_engine(N_CTX)
    if engine.info.n_cut > PAGE:  # ggml computes F32 cells on a GPU.
        pytest.skip("this engine's rows depend on where a prompt is cut")
    return engine


@pytest.fixture(scope="module")
def small(open_engine: Callable[[int], Engine]) -> Engine:
    return open_engine(PAGE)


def tokens_of(n: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, WIDE.n_vocab, n)]


def ends_of(n: int, begin: int, cut: int, most: int, wanted: list[int]) -> list[int]:
    """Returns where parts of a prompt of n tokens end that is read from `begin` on. Each has so many times `cut`
    tokens, in turn, and at most `most`."""
    ends, i = list[int](), 0
    while (at := ends[-1] if ends else begin) < n:
        part = min(wanted[i % len(wanted)] * cut, most) if wanted else most
        ends.append(min(at + part, n))
        i += 1
    return ends


def end_of(sequence: Timeline, first: int) -> tuple[list[int], list[bytes], bytes]:
    """Returns what comes after a prompt: tokens, the logits that chose them, and the state at the end."""
    out = drive.Decoded([first], [], [sequence.logits(0)])
    drive.go_on(sequence, out, 8, (3, 0, 2) if sequence.engine.info.n_drafters else 0, logits=True)
    return out.tokens, [row.tobytes() for row in out.logits], sequence.dump()


class Others:
    """Two sequences beside the one that reads: one decodes, and one reads prompts of its own."""

    def __init__(self, engine: Engine):
        self.decoding, self.reading = engine.sequence(), engine.sequence()
        self.anchor, self.cut = drive.start(self.decoding, tokens_of(9, 1)), engine.info.n_cut

    def work(self, seed: int) -> None:
        self.anchor = drive.verify(self.decoding, [self.anchor])[0]
        self.decoding.commit([0])
        if self.reading.info.n_past + 3 * self.cut > N_CTX:
            self.reading.reset()
        self.reading.prefill(tokens_of(1 + seed % 2 * self.cut, seed), last=seed % 3 == 0)

    def close(self) -> None:
        self.decoding.close()
        self.reading.close()


def moved(checkpoint: Checkpoint, where: str, engine: Engine) -> Checkpoint:
    """Moves a checkpoint about, or to bytes and into the engine."""
    if where == "file":
        return engine.load_checkpoint(checkpoint.save())
    if where != "device":
        checkpoint.to_host()
    if where == "host and back":
        checkpoint.to_device()
    return checkpoint


@pytest.mark.long
@settings(max_examples=12, deadline=None)
@given(
    n=st.integers(1, N_MOST),
    wanted=st.lists(st.integers(1, 8), max_size=6),
    others=st.booleans(),
    on_small=st.booleans(),
    kept=st.integers(0, N_MOST // 64),
    before=st.lists(st.integers(1, 8), max_size=3),
    where=st.sampled_from(["device", "host", "host and back", "file"]),
)
@example(n=833, wanted=[1], others=True, on_small=True, kept=0, before=[], where="device")
@example(n=833, wanted=[], others=False, on_small=False, kept=12, before=[1], where="file")
@example(n=833, wanted=[], others=False, on_small=False, kept=11, before=[1], where="file")
@example(n=769, wanted=[2, 1], others=True, on_small=True, kept=4, before=[3], where="host")
@example(n=769, wanted=[2, 1], others=True, on_small=True, kept=5, before=[3], where="host and back")
@example(n=400, wanted=[1], others=True, on_small=True, kept=3, before=[], where="device")
@example(n=PAGE, wanted=[1], others=False, on_small=True, kept=0, before=[], where="device")
def test_a_cut_changes_no_bit(
    whole: Engine, small: Engine, n: int, wanted: list[int], others: bool, on_small: bool, kept: int,
    before: list[int], where: str,
) -> None:  # fmt: skip
    """A prompt is read in one call, and in parts that end at any multiples of n_cut, in an engine of the same chunks
    or of small ones. It begins at a checkpoint of another prompt, which was cut in another way and is longer."""
    prompt, cut = tokens_of(n, n), whole.info.n_cut
    with whole.sequence() as sequence:
        first = sequence.prefill(prompt)
        assert first is not None
        expected = end_of(sequence, first)
    engine = small if on_small else whole
    begin, most, made = min(kept * cut, (n - 1) // cut * cut), engine.info.n_chunk, list[Checkpoint]()
    with engine.sequence() as sequence:
        if begin > 0:
            longer = prompt[:begin] + tokens_of(N_MOST, 2)
            at = 0
            for end in ends_of(begin, 0, cut, most, before):
                sequence.prefill(longer[at:end], last=False)
                at = end
            made = [sequence.checkpoint()]
            sequence.prefill(longer[begin : begin + 10])
            made.append(moved(made[0], where, engine))
            sequence.resume(made[1])
        beside = Others(engine) if others else None
        at, choice = begin, None
        for seed, end in enumerate(ends_of(n, begin, cut, most, wanted)):
            choice = sequence.prefill(prompt[at:end], last=end == n)
            at = end
            if beside and end < n:
                beside.work(seed)
        assert choice is not None
        assert end_of(sequence, choice) == expected
        if beside:
            beside.close()
        for checkpoint in made:
            checkpoint.close()


def test_where_ggml_multiplies_a_prompt_is_cut_at_its_chunks(native: Library, device: str, tmp_path: Path) -> None:
    """ggml's sums depend on how many rows an expert of a type that luce does not multiply has."""
    config = tiny.with_experts(WIDE)
    types, made = drive.type_of("IQ3_S"), partial(drive.quantize, native)
    path = tiny.write(tmp_path / "model.gguf", config, tiny.layout(config, 7), types, quantize=made)
    if not device.startswith("cpu"):
        with pytest.raises(UnsupportedError, match="ffn_gate_exps.weight has type IQ3_S"):
            drive.open_model(native, path, device)
        return
    engine = drive.open_engine(drive.open_model(native, path, device), n_ctx=512, n_chunk=512)
    assert engine.info.n_cut == 512


def test_an_engine_says_where_a_prompt_may_be_cut(whole: Engine, small: Engine, model: Model) -> None:
    assert whole.info.n_cut == small.info.n_cut == (64 if model.info.device.startswith("cpu") else 128)
    with small.sequence() as sequence:
        with pytest.raises(ArgumentError, match=r"257 tokens.*at most 256"):
            sequence.prefill(tokens_of(PAGE + 1, 1))
        assert sequence.info.n_past == 0
