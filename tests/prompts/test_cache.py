"""Resumes beginnings of prompts that are kept: what is resumed is what a cold prompt gives, whatever was
dropped."""

import errno
import os
import signal
import stat
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import httpx
import numpy as np
import pytest
import tiny_gemma4
from depth import examples
from drive import open_engine, open_model, prefill, read
from hypothesis import example, given
from hypothesis import strategies as st
from saved_bytes import ARITHMETIC, BUILD, changed, former
from serving import HANG_S, Gate, serving, until
from serving import settings as serve_settings

from luce.convert.gemma4_layout import Config
from luce.data import BOX
from luce.decode.request import Request
from luce.errors import FileError, OutOfMemory
from luce.files.tokenizer import Tokenizer
from luce.native import Checkpoint, Engine, File
from luce.native.structs import Cost
from luce.prompts import cache as cache_module
from luce.prompts.cache import PrefixCache
from luce.prompts.disk import _HEAD, DiskCache

CHUNK = 256


@pytest.fixture(scope="module")
def model(native, tiny_gguf):
    with open_model(native, tiny_gguf) as model:
        yield model


@pytest.fixture(scope="module")
def tokenizer(native, tiny_gguf):
    with File(tiny_gguf, native) as file:
        return Tokenizer(file.kv)


@pytest.fixture(scope="module")
def last_cut(model):
    """Gives last_cut(n), the last place where a prompt of n tokens may be cut, at which it is kept."""
    with open_engine(model, n_ctx=512) as engine:
        cut = engine.info.n_cut
    return lambda n: n // cut * cut


@pytest.fixture
def opened(model):
    """Gives opened(**params), an engine with two sequences that ends with the test."""
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


def cold(engine, prompt):
    with engine.sequence() as sequence:
        prefill(sequence, prompt)
        return sequence.dump()


PARTS = [words(1, 300), words(2, 520), words(3, 40), words(4, 700)]


@pytest.mark.long
@examples(8)
@given(
    prompts=st.lists(st.lists(st.sampled_from(range(4)), min_size=1, max_size=2), min_size=2, max_size=7),
    host=st.sampled_from([0, 400_000, 1 << 30]),
)
@example(prompts=[[0, 1], [3], [1, 3], [0, 1], [3, 1], [1, 3], [3]], host=400_000)
def test_a_resumed_prompt_is_the_cold_one(model, tokenizer, prompts, host):
    """There are few places on the device, and none, few or many in host memory."""
    sizes = {"n_ctx": 2048, "n_sequences": 2, "n_checkpoints": 2, "n_chunk": CHUNK}
    with open_engine(model, **sizes) as engine, engine.sequence() as sequence:
        cache = PrefixCache(engine, tokenizer, host)
        for parts in prompts:
            prompt = sum((PARTS[part] for part in parts), ())
            past = read(cache, sequence, prompt)
            assert past % engine.info.n_cut == 0 and past < len(prompt)
            assert sequence.dump() == cold(engine, prompt)
            device, kept = cache.sizes()["device"], cache.sizes()["host"]
            assert device[0] <= 2 and kept[1] <= host
        sequence.reset()
        cache.close()
        assert engine.info.pages_free == engine.info.n_pages and engine.info.checkpoints_free == 2


def test_the_same_prompt_again_reads_what_is_behind_its_last_cut_alone(opened, tokenizer, last_cut):
    engine, kept = opened(), last_cut(1500)
    cache, prompt = PrefixCache(engine, tokenizer), words(5, 1500)
    with engine.sequence() as sequence:
        assert [read(cache, sequence, prompt) for _ in range(3)] == [0, kept, kept]
        assert read(cache, sequence, prompt + words(6, 300)) == kept
        assert read(cache, sequence, prompt[:600] + words(6, 10)) == 0  # Nothing was kept there.
        assert (cache.hits, cache.queries) == (kept * 3, 1500 * 3 + 1800 + 610)


def test_a_prompt_branches_ahead_of_windows_that_have_passed(native, tmp_path):
    """Of what a conversation reads on, keys behind its layers' windows go; a checkpoint keeps those of its own."""
    config = Config(sliding=(True, True, False, True, False), window=100, v_is_k=True)
    path = tiny_gemma4.write(tmp_path / "windows.gguf", config, tiny_gemma4.layout(config, 5))
    begin = words(5, 600)
    with open_model(native, path) as model, File(path, native) as file:
        with open_engine(model, n_ctx=2048, n_sequences=2, n_checkpoints=4, n_chunk=CHUNK) as engine:
            cache, cut = PrefixCache(engine, Tokenizer(file.kv)), engine.info.n_cut
            with engine.sequence() as sequence:
                assert read(cache, sequence, begin) == 0
                assert read(cache, sequence, begin + words(6, 900)) == 600 // cut * cut
                for prompt in (begin + words(7, 300), begin[:590] + words(8, 400)):
                    past = read(cache, sequence, prompt)
                    assert 590 // cut * cut == past
                    assert sequence.dump() == cold(engine, prompt)


def test_a_side_request_takes_no_conversation_away(opened, tokenizer, last_cut):
    """Each prompt of it has 300 tokens more; a cut that saves fewer than a side request's is not kept for long."""
    engine, talk = opened(), words(7, 1800)
    cache = PrefixCache(engine, tokenizer)
    with engine.sequence() as main, engine.sequence() as side:
        read(cache, main, talk[:900])
        for end in (1200, 1500, 1800):
            for n in range(3):  # Titles and summaries each say something else.
                read(cache, side, words(end + n, 200))
            assert read(cache, main, talk[:end]) == last_cut(end - 300)


def test_pages_come_back_when_they_are_needed(opened, tokenizer):
    engine = opened(n_sequences=1, n_checkpoints=8, n_pages=9)
    cache = PrefixCache(engine, tokenizer)
    with engine.sequence() as sequence:
        for seed in range(6):
            cache.free_pages(9)
            assert engine.info.pages_free == 9 or seed == 0
            read(cache, sequence, words(seed, 2000))
            sequence.reset()


@pytest.mark.long
def test_files_outlive_the_cache_and_damaged_and_foreign_ones_are_evicted(opened, tokenizer, tmp_path, last_cut):
    prompt, kept = words(9, 1000), last_cut(1000)

    def after_a_start(spoil=lambda path: None):
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

    assert after_a_start() == (0, True)
    (path,) = tmp_path.glob("*/*.prefix")
    assert after_a_start() == (kept, True)
    def elsewhere(path, field):
        """Makes the file one that another build saved, or that was computed on another device."""
        data = path.read_bytes()
        core = _HEAD.size + 4 * _HEAD.unpack_from(data)[1]
        path.write_bytes(data[:core] + changed(data[core:], field, 0x30303030))

    assert after_a_start(flip) == (0, True)
    assert after_a_start() == (kept, True)
    for field in (BUILD, ARITHMETIC):
        assert after_a_start(partial(elsewhere, field=field)) == (0, True)
        assert after_a_start() == (kept, True), "it was written anew"

    def of_before(path):
        """Makes the file one that luce of the former version left in chunks of 256."""
        data = path.read_bytes()
        core = _HEAD.size + 4 * _HEAD.unpack_from(data)[1]
        path.write_bytes(data[:core] + former(data[core:], 5, 256))

    assert after_a_start(of_before) == (0, True)
    assert after_a_start() == (kept, True), "it was written anew"
    assert after_a_start(lambda path: path.write_bytes(path.read_bytes()[:5000])) == (0, True)
    assert after_a_start(lambda path: path.unlink()) == (0, True)
    path.write_bytes(b"none of ours")
    (path.parent / "half.part").write_bytes(b"x")
    assert after_a_start() == (0, True)
    assert not list(tmp_path.glob("*/*.part"))


def test_a_file_is_told_by_its_tokens_and_not_by_its_name(tmp_path, monkeypatch):
    """Two beginnings of prompts have one name, so the second is written over the first."""
    monkeypatch.setattr("luce.prompts.disk._name", lambda tokens: "same.prefix")
    disk = DiskCache(tmp_path, "key", 1 << 20)
    first, second = np.arange(512, dtype=np.int32).reshape(2, 256)
    paths = [disk.write(tokens, lambda: bytes(100)) for tokens in (first, second)]
    until(lambda: disk.done == 2, "both are written")
    assert paths[0] == paths[1] and disk.read(paths[0], second) == bytes(100)
    with pytest.raises(FileError, match="other tokens"):
        disk.read(paths[0], first)
    disk.close()


def test_a_file_with_anothers_bytes_behind_its_tokens_is_evicted(opened, tokenizer, tmp_path, last_cut):
    prompts = words(9, 1000), words(10, 1000)
    for prompt in (*prompts, *prompts):
        engine = opened()
        cache = PrefixCache(engine, tokenizer, 0, DiskCache(tmp_path, "key", 1 << 30))
        with engine.sequence() as sequence:
            assert read(cache, sequence, prompt) == 0
            assert sequence.dump() == cold(engine, prompt)
            while cache.pending:
                cache.work()
            cache.close()
        files = list(tmp_path.glob("*/*.prefix"))
        if len(files) == 2:
            heads = [path.read_bytes()[: _HEAD.size + 4 * last_cut(1000)] for path in files]
            bodies = [path.read_bytes()[len(heads[0]) :] for path in files]
            for path, head, body in zip(files, heads, reversed(bodies), strict=True):
                path.write_bytes(head + body)


@pytest.mark.parametrize("lacks", [MemoryError, OutOfMemory])
def test_a_file_that_finds_no_memory_is_kept_and_passed_by(
    opened, tokenizer, tmp_path, monkeypatch, lacks, last_cut
):
    prompt, kept = words(9, 1000), last_cut(1000)

    def after_a_start():
        cache = PrefixCache(opened(), tokenizer, 0, DiskCache(tmp_path, "key", 1 << 30))
        assert cache.fetch(prompt, wait=True)
        with cache._engine.sequence() as sequence:
            past = read(cache, sequence, prompt)
            same = sequence.dump() == cold(cache._engine, prompt)
        while cache.pending:
            cache.work()
        cache.close()
        return past, same

    assert after_a_start() == (0, True)
    (path,) = tmp_path.glob("*/*.prefix")
    written = path.stat().st_ino
    with monkeypatch.context() as full:
        full.setattr(DiskCache, "read", mock.Mock(side_effect=lacks("x")))
        assert after_a_start() == (0, True)
    assert path.stat().st_ino == written and after_a_start() == (kept, True)


def test_files_are_bounded(tmp_path):
    disk = DiskCache(tmp_path, "key", 5000)
    paths = [disk.write(np.arange(n, dtype=np.int32), lambda: bytes(2000)) for n in (1, 2, 3)]
    disk.close()
    assert [path.exists() for path in paths] == [False, True, True]
    again = DiskCache(tmp_path, "key", 5000)
    assert sorted(len(tokens) for tokens, _, _ in again.found()) == [2, 3]
    assert not list(DiskCache(tmp_path, "another", 5000).found())
    again.close()


def test_files_are_private(tmp_path):
    """They hold what was said: also those of before, whatever the process's mask says."""
    folder, before = tmp_path / "new" / "cache", os.umask(0)
    try:
        disk = DiskCache(folder, "key", 1 << 20)
        path = disk.write(np.arange(3, dtype=np.int32), lambda: b"state")
        disk.close()
        modes = [stat.S_IMODE(each.stat().st_mode) for each in (folder, path.parent, path)]
        assert [oct(mode) for mode in modes] == ["0o700", "0o700", "0o600"]
        path.chmod(0o644)
        path.parent.chmod(0o755)
        DiskCache(folder, "key", 1 << 20).close()
        assert [oct(stat.S_IMODE(each.stat().st_mode)) for each in (path.parent, path)] == ["0o700", "0o600"]
    finally:
        os.umask(before)


def test_a_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
    """Who made it could read what is written there."""

    def forbidden(path, mode):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "chmod", forbidden)
    with pytest.raises(FileError, match="not permitted"):
        DiskCache(tmp_path, "key", 1 << 20)


def start(folder, command):
    process = command(
        "serve", "--port", "0", "--threads", "1", "--cache-dir", folder, stderr=subprocess.PIPE, text=True
    )
    line = process.stderr.readline()
    return process, line.strip().rpartition(" ")[2]


LONG = "def total(values):\n    result = 0\n    for value in values:\n        result += value\n" * 20


@contextmanager
def killed(folder, command):
    """Asks a server that is killed in the end. ask() returns (text, cached tokens) of one prompt."""
    process, url = start(folder, command)

    def ask():
        asked = {"prompt": LONG, "max_tokens": 8, "temperature": 0}
        found = httpx.post(f"{url}/v1/completions", json=asked, timeout=HANG_S).json()
        return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]

    try:
        yield ask
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


@pytest.mark.long
def test_a_server_that_is_killed_leaves_files_that_are_right_or_refused(command, tmp_path):
    """It is killed after a checkpoint was written, and in the middle of it."""
    with killed(tmp_path, command) as ask:
        text, cached = ask()
        assert cached == 0
        until(lambda: list(tmp_path.glob("*/*.prefix")), "a checkpoint is written")
    (path,) = tmp_path.glob("*/*.prefix")
    whole, part = path.read_bytes(), path.with_suffix(".part")
    with killed(tmp_path, command) as ask:
        found, cached = ask()
        assert found == text and cached > 0
    path.unlink()
    with ExitStack() as opened:
        with killed(tmp_path, command) as ask:
            os.mkfifo(part)  # What is written there waits for who reads it.
            assert ask() == (text, 0)
            half = opened.enter_context(part.open("rb")).read(4096)
    assert whole.startswith(half) and not path.exists()
    part.unlink()
    part.write_bytes(half)
    path.write_bytes(half)  # A disk that loses its power may leave it so.
    with killed(tmp_path, command) as ask:
        assert not part.exists() and ask() == (text, 0)
        until(lambda: path.exists() and path.read_bytes() == whole, "it is written again")


@pytest.mark.long
def test_files_fit_the_next_server_whatever_its_steps_cost(native, tmp_path, monkeypatch):
    """Drafts that did not pay when it was opened may pay the next time, and the other way round."""
    cached = []
    for price in (1.0, 9.0, 1.0):  # Two rows cost so much where one row costs 1.
        listed = [Cost(1, 0, 1.0), Cost(2, 0, price), Cost(64, 0, 64 * price), Cost(1, 1, 0.1)]
        monkeypatch.setattr(Engine, "costs", lambda engine, listed=listed: listed)
        with serving({"box": BOX}, serve_settings(cache_dir=tmp_path)) as server:
            found = server.post("/v1/completions", prompt=LONG, max_tokens=4, temperature=0).json()
            cached.append(found["usage"]["prompt_tokens_details"]["cached_tokens"])
            until(lambda: list(tmp_path.glob("*/*.prefix")), "a checkpoint is written")
    assert cached[0] == 0 < cached[1] == cached[2]


# ---- beside the work


def test_what_waits_to_be_written_is_written_at_the_end(opened, tokenizer, tmp_path, monkeypatch):
    """It waits because a disk is slow. One that does nothing any more holds up the end for a bounded time."""
    save = Gate(Checkpoint.save)
    monkeypatch.setattr(Checkpoint, "save", lambda checkpoint: save(checkpoint))

    def three(folder):
        cache = PrefixCache(opened(n_checkpoints=4), tokenizer, 1 << 30, DiskCache(folder, "key", 1 << 30))
        with cache._engine.sequence() as sequence:
            for seed in range(3):
                read(cache, sequence, words(seed, 600))
                cache.work()
        assert save.entered.wait(HANG_S) and cache.pending
        return cache

    slow = three(tmp_path / "slow")
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(slow.close, HANG_S)
        save.opened.set()
        closing.result()
    assert len(list(tmp_path.glob("slow/*/*.prefix"))) == 3
    save.entered.clear()
    save.opened.clear()
    three(tmp_path / "stuck").close(seconds=0)
    assert not list(tmp_path.glob("stuck/*/*.prefix"))
    save.opened.set()


@pytest.mark.long
def test_a_server_that_is_asked_to_end_leaves_what_it_keeps(command, tmp_path):
    process, url = start(tmp_path, command)
    for n in range(3):
        asked = {"prompt": f"# {n}\n{LONG}", "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=asked, timeout=HANG_S).status_code == 200
    process.terminate()
    process.communicate(timeout=HANG_S)
    assert len(list(tmp_path.glob("*/*.prefix"))) == 3


def test_streams_move_while_a_checkpoint_is_saved_or_loaded(native, tmp_path, monkeypatch):
    """As long as the save or the load lasts, others are answered; what waits for the load is then warm."""

    def asked(server, prompt, n=8):
        found = server.post("/v1/completions", prompt=prompt, max_tokens=n, temperature=0).json()
        return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]

    save, load = Gate(Checkpoint.save), Gate(Engine.load_checkpoint)
    monkeypatch.setattr(Checkpoint, "save", lambda checkpoint: save(checkpoint))
    monkeypatch.setattr(Engine, "load_checkpoint", lambda engine, data: load(engine, data))
    with serving({"box": BOX}, serve_settings(cache_dir=tmp_path)) as server:
        text, cached = asked(server, LONG)
        assert save.entered.wait(HANG_S) and cached == 0
        assert asked(server, LONG)[0] == text
        save.opened.set()
    with serving({"box": BOX}, serve_settings(cache_dir=tmp_path)) as server, ThreadPoolExecutor(2) as pool:
        body = {"prompt": "import os\n", "max_tokens": 400, "stream": True, "ignore_eos": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            parts = response.iter_text()
            next(parts)
            warm = pool.submit(asked, server, LONG)
            assert load.entered.wait(HANG_S)
            assert "[DONE]" in "".join(parts) and not warm.done()
        load.opened.set()
        found, cached = warm.result()
        assert found == text and cached > 0


def test_a_prompt_becomes_an_array_once(opened, tokenizer, monkeypatch):
    """What is looked for, cut and kept of a prompt are parts of one array."""
    cache, asked = PrefixCache(opened(n_checkpoints=8), tokenizer), Request(words(11, 1500))
    assert asked.key is asked.key and asked.key.tolist() == list(asked.prompt)
    with cache._engine.sequence() as sequence:
        for _ in range(2):
            at = cache.resume(sequence, asked.key)
            for end in [end for end in cache.ends(sequence) if end > at]:
                for begin in range(at, end, CHUNK):
                    sequence.prefill(asked.prompt[begin : min(begin + CHUNK, end)], last=False)
                at = end
                cache.reached(sequence)
            asked_for = cache._asked[sequence].tokens
            assert asked_for is asked.key
        assert cache._kept and all(np.shares_memory(kept.tokens, asked.key) for kept in cache._kept)


def test_a_turn_is_compared_with_the_one_before_alone(opened, tokenizer, monkeypatch):
    """What of a prompt was read before is the whole of the last turn's, and no other prompt has more of it."""
    cache, talk, compared, common = PrefixCache(opened(), tokenizer), words(12, 1800), [], cache_module._common
    monkeypatch.setattr(cache_module, "_common", lambda a, b: (compared.append(len(b)), common(a, b))[1])
    with cache._engine.sequence() as sequence:
        for end in range(600, 1801, 200):
            read(cache, sequence, talk[:end])
    assert compared == list(range(600, 1800, 200))


def test_what_leaves_has_the_host_memory_of_what_was_evicted(opened, tokenizer, tmp_path, monkeypatch):
    """That is freed in a thread of its own, which is waited for where nothing else is free. No file that is read
    meanwhile is waited for."""
    with opened().sequence() as sequence:
        cache = PrefixCache(sequence.engine, tokenizer, 0, DiskCache(tmp_path, "key", 1 << 30))
        read(cache, sequence, words(9, 600))
        cache.close()
    cache = PrefixCache(opened(n_checkpoints=1), tokenizer, 1 << 30, DiskCache(tmp_path, "key", 1 << 30))
    close, to_host, read_file = Checkpoint.close, Checkpoint.to_host, Gate(DiskCache.read)
    closed, found = list[Checkpoint](), list[int]()
    free = Gate(lambda checkpoint: (close(checkpoint), closed.append(checkpoint)))

    def leave(checkpoint):
        found.append(len(closed))
        if not closed:
            threading.Timer(0.2, free.opened.set).start()  # Who does not wait is back long before that.
            raise OutOfMemory("no host memory")
        to_host(checkpoint)

    try:
        with cache._engine.sequence() as sequence:
            for n in range(3):
                read(cache, sequence, words(n, 600))
            monkeypatch.setattr(DiskCache, "read", lambda *args: read_file(*args))
            assert not cache.fetch(words(9, 600), wait=False) and read_file.entered.wait(HANG_S)
            cache._host_bytes = 2 * cache._kept[-1].size
            monkeypatch.setattr(Checkpoint, "to_host", leave)
            monkeypatch.setattr(Checkpoint, "close", lambda self: (close if self.info.on_device else free)(self))
            read(cache, sequence, words(3, 600))
        assert found == [0, 1] and cache.sizes()["host"][0] == 2
        assert not cache.fetch(words(9, 600), wait=False)  # It is read still.
    finally:
        read_file.opened.set()
        free.opened.set()
        cache.close()


def test_who_runs_waits_for_no_host_memory_that_is_freed(opened, tokenizer, monkeypatch):
    """It has room for one beginning: the next one that leaves the device takes the place of the first."""
    engine = opened(n_checkpoints=1)
    cache = PrefixCache(engine, tokenizer, 1 << 30)
    close = Checkpoint.close
    held = Gate(close)
    monkeypatch.setattr(Checkpoint, "close", lambda self: (close if self.info.on_device else held)(self))
    try:
        with engine.sequence() as sequence:
            for n in range(4):
                cache._host_bytes = 1 << 30 if n < 2 else max(kept.size for kept in cache._kept)
                read(cache, sequence, words(n, 600))
            assert held.entered.wait(HANG_S) and not held.opened.is_set()
        assert {place: count for place, (count, _) in cache.sizes().items()} == {"device": 1, "host": 1, "disk": 0}
    finally:
        held.opened.set()
        cache.close()
