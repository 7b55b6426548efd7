"""Beginnings of prompts that are kept: what is resumed is what a cold prompt gives, whatever was dropped."""

import signal
import subprocess

import httpx
import numpy as np
import pytest
from drive import open_engine, open_model, prefill
from hypothesis import example, given, settings
from hypothesis import strategies as st
from serving import until

from luce._native import File
from luce.server.cache import PrefixCache
from luce.server.disk import DiskCache
from luce.tokenizer import Tokenizer

CHUNK = 256


@pytest.fixture(scope="module")
def model(native, tiny_gguf):
    with open_model(native, tiny_gguf) as model:
        yield model


@pytest.fixture(scope="module")
def tokenizer(native, tiny_gguf):
    with File(tiny_gguf, native) as file:
        return Tokenizer(file.kv)


@pytest.fixture
def opened(model):
    """opened(**params): an engine with two sequences that ends with the test."""
    engines = []

    def run(**params):
        filled = {"n_ctx": 2048, "n_sequences": 2, "n_checkpoints": 2, "n_chunk": CHUNK} | params
        engines.append(open_engine(model, **filled))
        return engines[-1]

    yield run
    for engine in engines:
        engine.close()


def words(seed, n):
    return tuple(int(token) for token in np.random.default_rng(seed).integers(0, 256, n))


def read(cache, sequence, prompt):
    """Reads a prompt as a generation does: where it started."""
    past = cache.resume(sequence, prompt)
    at = past
    while at < len(prompt):
        end = min(at + CHUNK, len(prompt))
        sequence.prefill(prompt[at:end], end == len(prompt))
        if end == at + CHUNK:
            cache.reached(sequence, prompt)
        at = end
    return past


def cold(engine, prompt):
    with engine.sequence() as sequence:
        prefill(sequence, prompt)
        return sequence.dump()


PARTS = [words(1, 300), words(2, 520), words(3, 40), words(4, 700)]


@settings(max_examples=8, deadline=None)
@given(
    prompts=st.lists(st.lists(st.sampled_from(range(4)), min_size=1, max_size=2), min_size=2, max_size=7),
    host=st.sampled_from([0, 400_000, 1 << 30]),
)
@example(prompts=[[0, 1], [3], [1, 3], [0, 1], [3, 1], [1, 3], [3]], host=400_000)
def test_a_resumed_prompt_is_the_cold_one(model, tokenizer, prompts, host):
    """With few places on the device, and none, few or many in host memory."""
    sizes = {"n_ctx": 2048, "n_sequences": 2, "n_checkpoints": 2, "n_chunk": CHUNK}
    with open_engine(model, **sizes) as engine, engine.sequence() as sequence:
        cache = PrefixCache(engine, tokenizer, host)
        for parts in prompts:
            prompt = sum((PARTS[part] for part in parts), ())
            past = read(cache, sequence, prompt)
            assert past % CHUNK == 0 and past < len(prompt)
            assert sequence.dump() == cold(engine, prompt)
            device, kept = cache.sizes()["device"], cache.sizes()["host"]
            assert device[0] <= 2 and kept[1] <= host
        sequence.reset()
        cache.close()
        assert engine.info.pages_free == engine.info.n_pages and engine.info.checkpoints_free == 2


def test_the_same_prompt_again_reads_its_last_chunk_alone(opened, tokenizer):
    engine = opened()
    cache, prompt = PrefixCache(engine, tokenizer), words(5, 1500)
    with engine.sequence() as sequence:
        assert [read(cache, sequence, prompt) for _ in range(3)] == [0, 1280, 1280]
        assert read(cache, sequence, prompt + words(6, 300)) == 1280
        assert read(cache, sequence, prompt[:600] + words(6, 10)) == 0  # no end of a chunk was kept there
        assert (cache.hits, cache.queries) == (1280 * 3, 1500 * 3 + 1800 + 610)


def test_a_side_request_takes_no_conversation_away(opened, tokenizer):
    engine = opened()
    cache, talk = PrefixCache(engine, tokenizer), words(7, 1500)
    with engine.sequence() as main, engine.sequence() as side:
        read(cache, main, talk)
        for turn in range(1, 4):
            for n in range(3):  # titles, summaries: each says something else
                read(cache, side, words(100 * turn + n, 400))
            assert read(cache, main, talk + words(8, 100 * turn)) == 1280


def test_pages_come_back_when_they_are_needed(opened, tokenizer):
    engine = opened(n_sequences=1, n_checkpoints=8, n_pages=9)
    cache = PrefixCache(engine, tokenizer)
    with engine.sequence() as sequence:
        for seed in range(6):
            cache.free_pages(9)
            assert engine.info.pages_free == 9 or seed == 0
            read(cache, sequence, words(seed, 2000))
            sequence.reset()


def test_files_outlive_the_cache_and_damaged_ones_are_dropped(opened, tokenizer, tmp_path):
    prompt = words(9, 1000)

    def session(spoil=lambda path: None):
        engine = opened()
        disk = DiskCache(tmp_path, "key", 1 << 30)
        cache = PrefixCache(engine, tokenizer, 0, disk)
        for path in tmp_path.glob("*/*.prefix"):
            spoil(path)
        with engine.sequence() as sequence:
            past = read(cache, sequence, prompt)
            same = sequence.dump() == cold(engine, prompt)
            while cache.pending:
                cache.work()
            cache.close()
        return past, same

    def flip(path):
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)

    assert session() == (0, True)
    (path,) = tmp_path.glob("*/*.prefix")
    assert session() == (768, True)
    assert session(flip) == (0, True)
    assert session() == (768, True)
    assert session(lambda path: path.write_bytes(path.read_bytes()[:5000])) == (0, True)
    assert session(lambda path: path.unlink()) == (0, True)
    path.write_bytes(b"none of ours")
    (path.parent / "half.part").write_bytes(b"x")
    assert session() == (0, True)
    assert not list(tmp_path.glob("*/*.part"))


def test_files_are_bounded(tmp_path):
    disk = DiskCache(tmp_path, "key", 5000)
    paths = [disk.write(np.arange(n, dtype=np.int32), bytes(2000)) for n in (1, 2, 3)]
    disk.close()
    assert [path.exists() for path in paths] == [False, True, True]
    again = DiskCache(tmp_path, "key", 5000)
    assert sorted(len(tokens) for tokens, _, _ in again.found()) == [2, 3]
    assert not list(DiskCache(tmp_path, "another", 5000).found())
    again.close()


def start(folder, command):
    process = command(
        "serve", "--port", "0", "--threads", "1", "--cache-dir", folder, stderr=subprocess.PIPE, text=True
    )
    line = process.stderr.readline()
    return process, line.strip().rpartition(" ")[2]


def test_a_server_that_is_killed_leaves_files_that_are_right_or_refused(command, tmp_path):
    prompt = "def total(values):\n    result = 0\n    for value in values:\n        result += value\n" * 20
    asked = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    texts, cached = set(), []
    for _ in range(2):
        process, url = start(tmp_path, command)
        try:
            found = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()
            texts.add(found["choices"][0]["text"])
            cached.append(found["usage"]["prompt_tokens_details"]["cached_tokens"])
            until(lambda: list(tmp_path.glob("*/*.prefix")), "a checkpoint is written")
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
    assert len(texts) == 1 and cached[0] == 0 < cached[1]
