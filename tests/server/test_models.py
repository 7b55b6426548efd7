"""Serves several models: loaded at first use, unloaded when another needs the memory, never while one is
asked."""

import shutil

import httpx
import pytest
from serving import HANG_S, serving, settings, until

from luce.errors import OutOfMemory
from luce.server import models


@pytest.fixture
def room(monkeypatch):
    """Leaves memory for so many models, where a test does not say another number: one."""
    held, most = [], [1]

    class Narrow(models.Served):
        def __init__(self, *args):
            if len(held) == most[0]:
                raise OutOfMemory("needed 2, free 1")
            super().__init__(*args)
            held.append(self)

        def close(self):
            held.remove(self)
            super().close()

    monkeypatch.setattr(models, "Served", Narrow)
    return most


@pytest.fixture
def two(room, endless, tmp_path):
    """Runs a server of two models, a and b."""
    other = shutil.copy(endless, tmp_path / "b.gguf")
    with serving({"a": endless, "b": other}, settings(ctx=20_000, checkpoints=0, spec="off")) as server:
        yield server


def ask(server, model, **more):
    return server.post("/v1/completions", model=model, prompt="x", max_tokens=2, temperature=0, **more)


def loaded(server):
    return [each["id"] for each in server.http.get("/v1/models").json()["data"] if each["loaded"]]


def test_models_come_and_go(two):
    assert loaded(two) == []
    refused = ask(two, "any")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "model"
    assert ask(two, "nobody").status_code == 404
    assert ask(two, "a").status_code == 200 and loaded(two) == ["a"]
    assert ask(two, "any").json()["model"] == "any"
    assert ask(two, "b").status_code == 200 and loaded(two) == ["b"]
    assert all(each["last_used_ms"] for each in two.http.get("/v1/models").json()["data"])


def test_a_model_that_is_asked_stays(two):
    asked = {"model": "a", "prompt": "x", "max_tokens": 19_000, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{two.url}/v1/completions", json=asked, timeout=HANG_S) as response:
        parts = response.iter_bytes()
        next(parts)
        refused = ask(two, "b")
        assert refused.status_code == 503 and refused.headers["retry-after"] and loaded(two) == ["a"]
    until(lambda: two.scheduler.idle, "the first model is free")
    until(lambda: ask(two, "b").status_code == 200, "the second one takes its place")


def test_the_model_that_was_used_longest_ago_goes_first(room, tiny_gguf):
    room[0] = 2
    with serving(dict.fromkeys("abc", tiny_gguf), settings(ctx=512, checkpoints=0, spec="off")) as server:
        for model, left in (("a", "a"), ("b", "ab"), ("a", "ab"), ("c", "ac"), ("b", "bc"), ("c", "bc")):
            assert ask(server, model).status_code == 200 and loaded(server) == list(left)
        assert ask(server, "any").status_code == 200 and ask(server, "a").status_code == 200
        assert loaded(server) == ["a", "c"]  # The name "any" stood for c.


def test_beginnings_take_a_quarter_of_the_free_memory_unless_it_is_said(tiny_gguf, monkeypatch):
    monkeypatch.setattr("luce.model.loaded._free_memory", lambda: 4000)
    for said, taken in ((None, 1000), (0, 0), (7, 7)):
        with serving({"a": tiny_gguf}, settings(ctx=512, host_bytes=said, spec="off")) as server:
            assert server.models.slots["a"].served.first.cache._host_bytes == taken


def test_another_model_leaves_before_a_context_shrinks(endless, monkeypatch):
    """Where nobody says how long it is to be, it does not depend on what nobody asks any more."""
    held, kv = [], []

    class Counted(models.Served):
        def __init__(self, *args):
            super().__init__(*args)
            held.append(self)

        def close(self):
            held.remove(self)
            super().close()

    def has_room(memory):
        kv.append(memory.kv)  # The first is that of 32768 positions, which has room alone.
        return not held or memory.kv <= kv[0] / 3

    monkeypatch.setattr(models, "Served", Counted)
    monkeypatch.setattr("luce.native.structs.Memory.has_room", property(has_room))
    with serving({"a": endless, "b": endless}, settings(checkpoints=0, spec="off")) as server:

        def lengths():
            listed = server.http.get("/v1/models").json()["data"]
            return {each["id"]: each["max_model_len"] for each in listed if each["loaded"]}

        assert ask(server, "a").status_code == 200 and lengths() == {"a": 32768}
        assert ask(server, "b").status_code == 200 and lengths() == {"b": 32768}
        asked = {"model": "b", "prompt": "x", "max_tokens": 30_000, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=HANG_S) as response:
            parts = response.iter_bytes()
            next(parts)
            assert ask(server, "a").status_code == 200 and lengths() == {"a": 8192, "b": 32768}
