"""Serves a model by several engines: any gives the same tokens, a conversation goes on where it is kept, and one whose
device fails is left out."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from op_run import fault, round_fault
from serving import HANG_S, serving, settings, until

from luce.data import BOX
from luce.server.models import Slot
from luce.server.replicas import Replicas

TWO = {"box": ("cpu", "cpu")}
NAMES = ["cpu", "cpu#2"]


@pytest.fixture(scope="module")
def one(native):
    with serving({"box": BOX}) as server:
        yield server


@pytest.fixture(scope="module")
def two(native):
    with serving({"box": BOX}, settings(), devices=TWO) as server:
        yield server


@pytest.fixture
def endless_two(endless):
    """Serves two replicas of a model that never ends a text, of one sequence each."""
    how = settings(ctx=60_000, checkpoints=0, spec="off", sequences=1)
    with serving({"endless": endless}, how, log="text", devices={"endless": ("cpu", "cpu")}) as server:
        yield server


def replicas(server):
    (slot,) = server.models.slots.values()
    return slot.served.replicas.all


def told(server):
    """Returns (requests that run, those that wait) of each replica, as /v1/models tells it."""
    (model,) = server.http.get("/v1/models").json()["data"]
    return [(each["running"], each["waiting"]) for each in model["replicas"]]


@contextmanager
def answering(server, **more):
    """Has an answer under way that nobody reads on."""
    asked = {"prompt": "x", "temperature": 0, "max_tokens": 50_000, "stream": True} | more
    with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=HANG_S) as response:
        parts = response.iter_lines()
        next(parts)
        yield parts


def test_either_gives_the_tokens_of_one_engine(one, two):
    """Answers beside each other go to both, with drafts, greedy and sampled."""
    how = {"max_tokens": 24, "top_k": 0}
    asked = [{"prompt": f"def f{n}(a, b):\n", "temperature": n % 2, "seed": n} | how for n in range(8)]
    alone = [one.post("/v1/completions", **each).json()["choices"] for each in asked]
    before = [each.asked for each in replicas(two)]
    with ThreadPoolExecutor(4) as pool:
        beside = list(pool.map(lambda each: two.post("/v1/completions", **each).json()["choices"], asked))
    assert beside == alone
    assert all(each.asked > last for each, last in zip(replicas(two), before, strict=True)), "both were asked"


def test_several_answers_of_one_request_run_on_both(one, two):
    asked = {"prompt": "class A:\n", "n": 4, "max_tokens": 16, "temperature": 1, "seed": 5, "top_k": 0}
    found, right = (server.post("/v1/completions", **asked).json()["choices"] for server in (two, one))
    assert found == right and len(found) == 4


@pytest.mark.long
def test_a_prompt_goes_on_where_its_beginning_is_kept(one, two):
    """Two texts are kept on one replica each; what goes on after one of them reads the rest alone."""
    texts = [f"# {word}\n" + "".join(f"{word}_{n} = {n}\n" for n in range(60)) for word in ("apple", "pear")]
    greedy = {"max_tokens": 4, "temperature": 0}
    for text in texts:
        assert two.post("/v1/completions", prompt=text, **greedy).json()["usage"]["prompt_tokens"] > 256
    sizes = [each.loaded.cache.sizes()["device"][0] for each in replicas(two)]
    assert all(sizes), "who was asked longest ago was asked next, so each keeps one"
    for text in (texts[0], texts[0], texts[1], texts[0]):
        longer = text + "last = "
        said = two.post("/v1/completions", prompt=longer, **greedy).json()
        cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > said["usage"]["prompt_tokens"] - 128
        assert said["choices"] == one.post("/v1/completions", prompt=longer, **greedy).json()["choices"]


def test_who_is_idle_is_asked_before_who_is_not(endless_two):
    with answering(endless_two), answering(endless_two):
        assert told(endless_two) == [(1, 0), (1, 0)]
        with ThreadPoolExecutor(2) as pool:
            short = {"prompt": "y", "max_tokens": 1, "temperature": 0}
            waiting = [pool.submit(endless_two.post, "/v1/completions", **short) for _ in range(2)]
            until(lambda: told(endless_two) == [(1, 1), (1, 1)], "one waits behind each")
            shown = endless_two.http.get("/metrics").text
            assert 'luce:replica_requests_waiting{model="endless",replica="cpu#2"} 1.0' in shown
            assert "luce:num_requests_waiting 2.0" in shown
            for each in replicas(endless_two):
                each.loaded.scheduler.interrupt()
            assert [each.result().status_code for each in waiting] == [200, 200]


def test_one_that_fails_is_left_out_and_what_waited_there_goes_to_the_other(native, endless_two, caplog, capfd):
    """The core fails in a step of the only one that runs: its request is told so, and nobody else's is."""
    caplog.set_level(logging.WARNING, "luce.server.replicas")
    short = {"prompt": "y", "max_tokens": 3, "temperature": 0}
    right = endless_two.post("/v1/completions", **short).json()["choices"]
    first, second = replicas(endless_two)
    with answering(endless_two) as lost, ThreadPoolExecutor(1) as pool:
        failing = first if told(endless_two)[0] == (1, 0) else second
        other = second if failing is first else first
        other.failed = "for now"  # So that the next one waits here.
        waiting = pool.submit(endless_two.post, "/v1/completions", **short)
        until(lambda: failing.loaded.scheduler.waiting, "one waits")
        other.failed = ""
        capfd.readouterr()
        with fault(native, round_fault("cpu")):
            *_, last = [line for line in lost if line.startswith("data: ") and "error" in line]
        assert "asked for it" in last
        assert waiting.result().json()["choices"] == right
        told_of = []
        until(lambda: told_of.append(capfd.readouterr().err) or 'reason="length"' in "".join(told_of), "its line")
        lines = [line for line in "".join(told_of).splitlines() if 'reason="length"' in line]
        assert lines and f'replica="{other.name}"' in lines[0]
    assert failing.failed and not other.failed
    assert [record.getMessage() for record in caplog.records if "left out" in record.getMessage()] == [
        f"endless: {failing.name} has failed and is left out, 1 of 2 go on: {failing.failed}"
    ]
    said = endless_two.http.get("/health")
    assert said.status_code == 200 and said.json()["left_out"] == [f"endless on {failing.name}"]
    shown = endless_two.http.get("/metrics").text
    assert f'luce:replica_failed{{model="endless",replica="{failing.name}"}} 1.0' in shown
    before = failing.asked
    assert [endless_two.post("/v1/completions", **short).json()["choices"] for _ in range(3)] == [right] * 3
    assert failing.asked == before, "it was given nothing"


def test_where_all_have_failed_the_server_has(native, endless_two):
    short = {"prompt": "y", "max_tokens": 3, "temperature": 0}
    for left in (200, 503):
        with fault(native, round_fault("cpu")):
            assert endless_two.post("/v1/completions", **short).status_code == 500
        assert endless_two.http.get("/health").status_code == left
    assert endless_two.post("/v1/completions", **short).status_code == 200, "who is asked all the same may work again"
    said = endless_two.http.get("/health")
    assert said.status_code == 200 and len(said.json()["left_out"]) == 1


def test_the_server_tells_of_each(two):
    (model,) = two.http.get("/v1/models").json()["data"]
    assert [(each["device"], each["state"]) for each in model["replicas"]] == [(name, "ready") for name in NAMES]
    props = two.http.get("/props").json()
    assert props["total_slots"] == 4 and [each["device"] for each in props["replicas"]] == NAMES
    assert two.http.get("/health").json() == {"status": "ok", "state": "ready"}


def test_the_log_says_which_one_answered(native, capfd):
    with serving({"box": BOX}, log="text", devices=TWO) as server:
        for _ in NAMES:
            server.post("/v1/completions", prompt="x", max_tokens=2)
    said = capfd.readouterr().err
    assert all(f'replica="{name}"' in said for name in NAMES)


def test_all_end_with_the_server(endless):
    """Both answers that run are told of it, and no thread is left."""
    before = set(threading.enumerate())
    how = settings(ctx=60_000, checkpoints=0, spec="off", sequences=1)
    with serving({"endless": endless}, how, devices={"endless": ("cpu", "cpu")}) as server:
        with answering(server) as one, answering(server) as other:
            assert told(server) == [(1, 0), (1, 0)]
            server.models.stop()
            for parts in (one, other):
                assert any("shutting down" in line or "cancelled" in line for line in parts)
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not [name for name in left if name.startswith(("luce-engine", "luce-cache"))]


@pytest.mark.long
def test_files_of_beginnings_are_kept_for_each(native, tmp_path):
    """A server that is started again finds on each replica what that one kept."""
    text = "# a\n" + "".join(f"value_{n} = {n}\n" for n in range(60))
    greedy = {"prompt": text, "max_tokens": 2, "temperature": 0}
    for again in (False, True):
        with serving({"box": BOX}, settings(cache_dir=tmp_path), devices=TWO) as server:
            if not again:
                with ThreadPoolExecutor(2) as pool:  # Neither has it yet, so both are asked.
                    list(pool.map(lambda _: server.post("/v1/completions", **greedy), NAMES))
                assert all(each.loaded.cache.sizes()["device"][0] for each in replicas(server))
            else:
                assert all(each.loaded.cache.sizes()["disk"][0] for each in replicas(server))
                usage = server.post("/v1/completions", **greedy).json()["usage"]
                assert usage["prompt_tokens_details"]["cached_tokens"] > 256


def test_a_model_makes_room_for_those_that_share_its_devices_alone():
    def slot(*devices):
        return Slot(BOX, devices)

    one = slot("cuda:0", "cuda:1")
    assert one.may_share(slot("cuda:1,cuda:2")) and one.may_share(slot(None)) and one.may_share(slot("cuda"))
    assert not one.may_share(slot("cuda:2")) and slot().may_share(slot())


def test_devices_of_two_kinds_are_told_of(two, caplog, monkeypatch):
    """Their tokens may differ, which one who names both should know."""
    caplog.set_level(logging.WARNING, "luce.server.replicas")
    loaded = [each.loaded for each in replicas(two)]
    Replicas("box", loaded)
    assert not caplog.records
    kinds = iter(["an H200", "an RTX 4090"])
    monkeypatch.setattr("luce.server.replicas._described", lambda name: [next(kinds)])
    monkeypatch.setattr("luce.server.replicas._numbered", lambda names, at: str(at))
    Replicas("box", loaded)
    assert "an H200, an RTX 4090 may differ" in caplog.text
