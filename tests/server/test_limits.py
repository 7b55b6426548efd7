"""Checks what bounds a server: pages, bodies, headers, other sites' pages, and what it says of itself."""

import math
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import tiny
from depth import deeper
from serving import HANG_S, serving, settings, until

from luce.cli.command import installing
from luce.data import BOX
from luce.decode.loop import MAX_ROWS
from luce.errors import FileError
from luce.files.tokenizer import Tokenizer
from luce.model import defaults
from luce.server.api import body
from luce.server.listener import MAX_HEADERS

PAGE = 256


@pytest.fixture(scope="module")
def server(native):
    with serving({"box": BOX}) as running:
        yield running


def prompt(n):
    """Returns some hundred tokens that begin unlike those of another n."""
    return f"# {n}\n" + f"def total_{n}(values):\n    return sum(values)\n" * 42


@pytest.mark.long
def test_requests_wait_for_pages_and_each_gets_its_answer(native):
    """Where pages lack for all at once: checkpoints go first, then the newest request waits."""
    asked = [{"prompt": prompt(n), "max_tokens": 100, "ignore_eos": True, "temperature": 0} for n in range(4)]

    def answers(pool, **how):
        with serving({"box": BOX}, settings(sequences=3, checkpoints=6, ctx=1024, **how)) as server:
            found = list(pool.map(lambda one: server.post("/v1/completions", **one).json(), asked))
            until(lambda: server.scheduler.idle, "all have ended")
            return found[0]["usage"]["prompt_tokens"], [one["choices"][0]["text"] for one in found]

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(4) as all_of_them:
        tokens, expected = answers(one)
        most, taken = (-(-(tokens + 100 + rows) // PAGE) for rows in (MAX_ROWS, 0))
        pages = 2 * most + 1  # Two requests need them, and one is for checkpoints.
        assert pages < 3 * taken
        assert answers(all_of_them, pages=pages, host_bytes=1 << 20)[1] == expected


@pytest.mark.long
def test_a_prompt_of_many_contexts_is_not_read_to_its_end(native):
    """Others wait meanwhile. Up to some contexts it is, and its tokens are counted."""
    with serving({"box": BOX}, settings(ctx=256)) as server:
        for lines, exact in ((200, True), (1_000_000, False)):
            text = "a 1\n" * lines
            said = [{"role": "user", "content": text}]
            for path, asked in (("completions", {"prompt": text}), ("chat/completions", {"messages": said})):
                error = server.post(f"/v1/{path}", **asked).json()["error"]
                told = re.search("the prompt has (at least )?([0-9]+) tokens[.]$", error["message"])
                tokens = int(told[2])
                assert error["code"] == "context_length_exceeded" and (told[1] is None) == exact
                assert 4 * 256 < tokens < 200_000 or exact
                if exact:
                    same = "/tokenize" if "prompt" in asked else "/apply-template"
                    assert tokens == len(server.post(same, **asked).json()["tokens"])
        counted = server.post("/v1/messages/count_tokens", messages=said).json()
        claude_codes = r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)"
        told = re.search(claude_codes, counted["error"]["message"])
        assert int(told[1]) > 4 * int(told[2]) == 4 * 256


def test_a_long_prompt_does_not_hold_up_a_short_one(server, monkeypatch):
    encode, begun, answered = Tokenizer.encode, threading.Event(), threading.Event()

    def slow(self, text, **how):
        if len(text) > 1 << 20:
            begun.set()
            assert answered.wait(HANG_S)
        return encode(self, text, **how)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    text, short = "x " * (1 << 20), {"prompt": "import os", "max_tokens": 2}
    said = {"messages": [{"role": "user", "content": text}]}
    for path, asked, status in (
        ("/v1/completions", {"prompt": text}, 400),
        ("/v1/messages", said, 400),
        ("/tokenize", {"content": text}, 200),
    ):
        begun.clear()
        answered.clear()
        with ThreadPoolExecutor(1) as pool:
            long = pool.submit(httpx.post, server.url + path, json=asked, timeout=HANG_S)
            assert begun.wait(HANG_S)
            assert server.post("/v1/completions", **short).status_code == 200
            answered.set()
            assert long.result().status_code == status


def test_bodies_and_headers_are_bounded(server, monkeypatch):
    monkeypatch.setattr(body, "MAX_BODY", 1000)
    refused = server.post("/v1/completions", prompt="x" * 1000)
    assert refused.status_code == 413 and refused.json()["error"]["message"]
    assert server.post("/v1/messages", messages=["x" * 1000]).json()["type"] == "error"
    for size, right in ((MAX_HEADERS // 2, 200), (2 * MAX_HEADERS, 400)):
        assert server.http.get("/health", headers={"X": "x" * size}).status_code == right


def test_paths_reach_no_files(server):
    for path in ("/../../etc/passwd", "/v1/models/../../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd"):
        found = httpx.get(httpx.URL(server.url).copy_with(raw_path=path.encode()))
        assert found.status_code == 404 and "root:" not in found.text


def test_what_it_says_of_itself(server):
    said = server.http.get("/props").json()
    assert said["default_generation_settings"]["params"] == defaults.RECOMMENDED and said["total_slots"] == 2
    text = "def f(ä):\n"
    tokens = server.post("/tokenize", content=text).json()["tokens"]
    assert server.post("/detokenize", tokens=tokens).json() == {"content": text}
    assert server.post("/detokenize", tokens=[1 << 20]).status_code == 400


def test_a_files_own_sampling_comes_first():
    kv = {"general.sampling.temp": 1, "general.sampling.top_k": 40.0}
    assert defaults.sampling_of(kv) == {**defaults.RECOMMENDED, "temperature": 1.0, "top_k": 40}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("temp", "warm", "expected a value of type float, found a value of type str"),
        ("temp", math.nan, "expected a finite number, found nan"),
        ("temp", -1.0, "-1 is not within 0 and 1e+06"),
        ("top_k", math.inf, "expected a finite number, found inf"),
        ("top_p", ["x"], "expected a value of type float, found an array of strings"),
        ("min_p", 1.5, "1.5 is not within 0 and 1"),
    ],
)
def test_sampling_of_a_file_that_is_none_is_named(key, value, said):
    with pytest.raises(FileError, match=re.escape(f"key general.sampling.{key}: {said}")):
        defaults.sampling_of({f"general.sampling.{key}": value})


@pytest.mark.long
def test_a_file_of_odd_sampling_is_one_line(command, tmp_path, monkeypatch):
    def add_keys(writer, *args, **options):
        tiny_keys(writer, *args, **options)
        writer.add_string("general.sampling.temp", "warm")

    tiny_keys, config = tiny.add_keys, tiny.Config()
    monkeypatch.setattr(tiny, "add_keys", add_keys)
    path = tiny.write(tmp_path / "odd.gguf", config, tiny.layout(config, 1))
    running = command("serve", "--gguf", path, "--device", "cpu", "--port", "0", "--ctx", "512")
    try:
        _, stderr = running.communicate(timeout=60)
    finally:
        running.kill()
    (said,) = stderr.decode().splitlines()
    assert running.returncode == 1 and said.startswith(f"Error: {path}: key general.sampling.temp: "), said


@pytest.mark.long
@pytest.mark.parametrize("missing", ["uvicorn", *deeper("starlette", "prometheus_client")])
def test_without_its_extra_the_command_says_what_to_install(missing, tmp_path):
    """Its help needs no extra. A process of its own has imported none of them yet."""
    program = f"import sys; sys.modules[{missing!r}] = None; from luce.cli.commands import main; main()"
    said = f"Error: luce serve needs the package {missing}: {installing('serve')}\n"
    for words, expected in (["--help"], (0, "")), ([], (1, said)):
        command = [sys.executable, "-c", program, "serve", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
        assert (done.returncode, done.stderr) == expected
