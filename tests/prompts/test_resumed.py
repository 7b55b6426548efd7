"""Answers whose prompts go on from kept beginnings are those of a cold engine, bit for bit: in whichever chunks a
prompt is read, of whichever prompt the beginning was, and wherever it lies meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import drive
import numpy as np
import pytest
from depth import examples
from hypothesis import example, given
from hypothesis import strategies as st
from serving import until

from luce.data import BOX
from luce.decode.engine import Engine as Opened
from luce.decode.events import Event, Failed, Finished, Tokens
from luce.decode.request import Request
from luce.decode.scheduler import Job, Scheduler
from luce.files.tokenizer import Tokenizer
from luce.native import Engine, File, Library, Model
from luce.native import Sequence as Timeline
from luce.planning.plan import Options
from luce.prompts.cache import PrefixCache
from luce.prompts.disk import DiskCache

N_CTX, N_NEW = 1536, 3
# Pieces of conversations, of which none is as long as pages are, so that prompts part and go on within them.
LENGTHS = (40, 130, 270, 340)


@pytest.fixture(scope="module")
def box(native: Library, device: str) -> Model:
    return drive.open_model(native, BOX, device)


@pytest.fixture(scope="module")
def tokenizer(native: Library) -> Tokenizer:
    with File(BOX, native) as file:
        return Tokenizer(file.kv)


@pytest.fixture(scope="module")
def opened(box: Model) -> Callable[[int], Engine]:
    """Gives opened(n_chunk), each engine once."""
    engines = dict[int, Engine]()

    def run(n_chunk: int) -> Engine:
        if n_chunk not in engines:
            engines[n_chunk] = drive.open_engine(
                box, n_ctx=N_CTX, n_sequences=2, n_checkpoints=3, n_rows=4, n_chunk=n_chunk, kv_type="f16"
            )
        return engines[n_chunk]

    return run


def message(tokenizer: Tokenizer, piece: int, role: str) -> list[int]:
    words = np.random.default_rng(piece).integers(0, 4000, LENGTHS[piece % len(LENGTHS)])
    return [*tokenizer.encode(f"<|im_start|>{role}\n"), *(int(word) for word in words)]


def prompt_of(tokenizer: Tokenizer, pieces: Sequence[int]) -> list[int]:
    """A conversation of these messages, whose answer begins."""
    parts = [message(tokenizer, piece, ("user", "assistant")[turn % 2]) for turn, piece in enumerate(pieces)]
    return [*sum(parts, []), *tokenizer.encode("<|im_start|>assistant\n")]


Answer = tuple[list[int], list[bytes], bytes]  # Tokens, the logits that chose them, and the sequence's state.


def answered(sequence: Timeline) -> Answer:
    """What comes behind a prompt that was read."""
    anchor, tokens, logits = int(np.argmax(sequence.logits(0))), list[int](), [sequence.logits(0).tobytes()]
    for _ in range(N_NEW):
        tokens.append(anchor)
        anchor = drive.verify(sequence, [anchor])[0]
        logits.append(sequence.logits(0).tobytes())
        sequence.commit([0])
    return tokens, logits, sequence.dump()


COLD = dict[tuple[int, ...], Answer]()


def cold(engine: Engine, prompt: list[int]) -> Answer:
    """The answer of an engine that reads the whole prompt in one call and keeps nothing."""
    if tuple(prompt) not in COLD:
        with engine.sequence() as sequence:
            sequence.prefill(prompt)
            COLD[tuple(prompt)] = answered(sequence)
    return COLD[tuple(prompt)]


CONVERSATIONS = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=4), min_size=2, max_size=4)
SIZES = st.lists(st.integers(1, 4), max_size=3)  # Chunks have so many times n_cut, in turn.


@pytest.mark.long
@examples(5)
@given(
    conversations=CONVERSATIONS,
    sizes=SIZES,
    host=st.sampled_from([0, 3_000_000, 1 << 30]),
    n_chunk=st.sampled_from([256, 512]),
    starts=st.booleans(),
)
@example(conversations=[[3, 2], [3, 2, 0], [3, 2, 0, 1], [3, 6, 1]], sizes=[], host=0, n_chunk=512, starts=False)
@example(conversations=[[3, 2], [3, 2, 0], [3, 2, 0, 1], [3, 6, 1]], sizes=[1, 3], host=0, n_chunk=256, starts=True)
@example(conversations=[[3], [2], [6], [3, 1], [2, 0], [3]], sizes=[1], host=1 << 30, n_chunk=256, starts=False)
def test_answers_are_those_of_a_cold_engine(
    opened: Callable[[int], Engine], tokenizer: Tokenizer, conversations: list[list[int]], sizes: list[int], host: int,
    n_chunk: int, starts: bool,
) -> None:  # fmt: skip
    """Where it `starts` anew between prompts, what was kept is found in files, by engines of other chunks in turn."""
    engine, whole = opened(n_chunk), opened(N_CTX)
    with TemporaryDirectory() as folder:

        def cache_of(engine: Engine) -> PrefixCache:
            return PrefixCache(engine, tokenizer, host, DiskCache(Path(folder), "key", 1 << 30) if starts else None)

        cache = cache_of(engine)
        for turn, pieces in enumerate(conversations):
            prompt = prompt_of(tokenizer, pieces)
            with engine.sequence() as sequence:
                at = drive.read(cache, sequence, prompt, [size * engine.info.n_cut for size in sizes])
                assert at % engine.info.n_cut == 0
                assert answered(sequence) == cold(whole, prompt)
            if starts:
                cache.close()
                engine = opened((256, 512)[turn % 2])
                cache = cache_of(engine)
        cache.close()


def test_a_turn_goes_on_at_the_last_cut_of_the_one_before(
    opened: Callable[[int], Engine], tokenizer: Tokenizer
) -> None:
    """Less than n_cut tokens are read again of an agent's turn: its prompt, the answer and 64 new tokens."""
    engine = opened(512)
    cut = engine.info.n_cut
    cache, prompt = PrefixCache(engine, tokenizer), prompt_of(tokenizer, [2])
    with engine.sequence() as sequence:
        drive.read(cache, sequence, prompt)
        for _ in range(4):
            before, prompt = len(prompt), prompt + [7] * 64 + prompt_of(tokenizer, [1])[:64]
            assert drive.read(cache, sequence, prompt) == before // cut * cut
            assert cache.again(sequence) == before % cut
    cache.close()


@pytest.mark.long
def test_it_is_known_what_is_read_again(opened: Callable[[int], Engine], tokenizer: Tokenizer) -> None:
    engine, words = opened(256), [int(word) for word in np.random.default_rng(5).integers(0, 4000, 1400)]
    cache = PrefixCache(engine, tokenizer)
    with engine.sequence() as sequence:
        found = []
        for prompt in (words[:1000], words[:1000], words[:700] + [1] * 300, words, words[500:]):
            found.append((drive.read(cache, sequence, prompt), cache.again(sequence)))
    # The first prompt is kept at its last cut. Where the third parts from it, nothing is.
    kept = 1000 // engine.info.n_cut * engine.info.n_cut
    assert found == [(0, 0), (kept, 1000 - kept), (0, 700), (kept, 1000 - kept), (0, 0)]
    cache.close()


@pytest.mark.long
def test_files_of_engines_with_other_chunks_are_used(
    opened: Callable[[int], Engine], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    prompt, found = prompt_of(tokenizer, [3, 3]), list[int]()
    for n_chunk in (256, N_CTX, 512):
        cache = PrefixCache(opened(n_chunk), tokenizer, 0, DiskCache(tmp_path, "key", 1 << 30))
        with opened(n_chunk).sequence() as sequence:
            found.append(drive.read(cache, sequence, prompt))
            assert answered(sequence) == cold(opened(N_CTX), prompt)
        cache.close()
        until(lambda: list(tmp_path.glob("*/*.prefix")), "a checkpoint is written")
    assert found == [0, *[len(prompt) // opened(256).info.n_cut * opened(256).info.n_cut] * 2]


def tokens_and_logprobs(events: list[Event]) -> list[tuple[int, Any]]:
    brought = [event for event in events if isinstance(event, Tokens)]
    return [pair for event in brought for pair in zip(event.ids, event.logprobs, strict=True)]


@pytest.mark.long
def test_answers_beside_others_are_those_alone(tokenizer: Tokenizer, device: str) -> None:
    """Prompts are read in chunks that depend on how long rounds take, and go on from each other's beginnings."""
    options = Options(device=device, threads=1, spec="off", ctx=N_CTX, chunk=512, checkpoints=4, sequences=3)
    prompts = [prompt_of(tokenizer, pieces) for pieces in ([0], [3, 2], [3, 2, 1], [3, 6])]
    new = [60, 8, 8, 8]
    asked = [Request(tuple(each), n, ignore_eos=True, logprobs=2) for each, n in zip(prompts, new, strict=True)]
    with Opened.open(BOX, options) as engine:

        def run(cache: PrefixCache | None, requests: list[Request]) -> list[list[tuple[int, Any]]]:
            scheduler = Scheduler(engine, cache, prefill_share=0.3)
            found: list[list[Event]] = [[] for _ in requests]
            for request, events in zip(requests, found, strict=True):
                scheduler.submit(Job(request, events.extend))
            until(lambda: all(events and isinstance(events[-1], (Finished, Failed)) for events in found), "all end")
            scheduler.close()
            assert not any(isinstance(events[-1], Failed) for events in found)
            return [tokens_and_logprobs(events) for events in found]

        alone = [run(None, [request])[0] for request in asked]
        cache = PrefixCache(engine.native, tokenizer)
        assert run(cache, asked) == alone
        assert run(cache, asked[::-1]) == alone[::-1] and cache.hits > 0
        cache.close()
