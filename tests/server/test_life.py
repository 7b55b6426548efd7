"""Follows a server's life: it loads, is ready, drains, fails and ends, and tells of it."""

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from depth import deeper
from serving import HANG_S, Gate, serving, settings, until

import luce
from luce.data import BOX
from luce.decode.engine import Engine
from luce.decode.loop import Loop
from luce.errors import DeviceError
from luce.native import Engine as Native

LONG = {"prompt": "x", "temperature": 0, "max_tokens": 49_000, "stream": True}
ASKED = {"prompt": "import os", "temperature": 0, "max_tokens": 4}
ENDLESS = {"sequences": 2, "ctx": 50_000, "checkpoints": 0, "spec": "off"}


def health(server):
    said = httpx.get(f"{server.url}/health", timeout=HANG_S)
    return said.status_code, said.json()["status"]


# ---- loading


def test_it_tells_that_it_loads_and_requests_wait(native, monkeypatch):
    held = Gate(Engine.open)
    monkeypatch.setattr(Engine, "open", held)
    with serving({"box": BOX}, loading=True) as server, ThreadPoolExecutor(1) as pool:
        assert held.entered.wait(HANG_S)
        said = server.http.get("/health")
        assert (said.status_code, said.json()["status"]) == (503, "loading") and said.headers["retry-after"]
        assert said.json()["error"]["type"] == "unavailable_error"  # It is llama.cpp's word.
        assert server.http.get("/v1/models").json()["data"][0]["state"] == "loading"
        asked = pool.submit(server.post, "/v1/completions", **ASKED)
        until(lambda: len(server.listener.server_state.tasks) == 1, "a request waits")
        held.opened.set()
        assert asked.result().status_code == 200
        assert server.http.get("/health").json() == {"status": "ok", "state": "ready"}
        assert server.http.get("/v1/models").json()["data"][0]["state"] == "ready"


def test_who_waits_for_a_model_may_go(native, monkeypatch):
    """It is loaded for the others all the same, once."""
    held = Gate(Engine.open)
    monkeypatch.setattr(Engine, "open", held)
    with serving({"a": BOX, "b": BOX}) as server, ThreadPoolExecutor(1) as pool:
        assert server.http.get("/health").json()["status"] == "ok"  # Nobody has asked for a model yet.
        with server.asked("/v1/completions", model="a", **ASKED):
            assert held.entered.wait(HANG_S) and health(server) == (503, "loading")
        until(lambda: not server.listener.server_state.tasks, "it is forgotten")
        asked = pool.submit(server.post, "/v1/completions", model="a", **ASKED)
        held.opened.set()
        assert asked.result().status_code == 200 and health(server) == (200, "ok")
        until(lambda: not server.models.slots["a"].served.users, "nobody holds it")


def test_a_model_that_does_not_load_is_told_and_tried_again(native, tmp_path, monkeypatch):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    with serving({"a": BOX, "b": broken}) as server:
        for _ in range(2):
            assert server.post("/v1/completions", model="b", **ASKED).status_code == 500
        assert server.models.slots["b"].state == "unloaded" and health(server) == (200, "ok")
        broken.write_bytes(BOX.read_bytes())
        assert server.post("/v1/completions", model="b", **ASKED).status_code == 200


# ---- draining


@contextmanager
def streaming(server, **more):
    """Has a stream of which some was read. It gives read(), which reads the rest."""
    with server.http.stream("POST", "/v1/completions", json=LONG | more) as response:
        parts = response.iter_text()
        next(parts)
        yield lambda: "".join(parts)


def terminate(server):
    server.listener.handle_exit(signal.SIGTERM, None)


def refused(server, path="/v1/completions"):
    return httpx.post(f"{server.url}{path}", json=ASKED, timeout=HANG_S)


def test_it_drains(native, endless, monkeypatch):
    """What has begun goes on to its own end, and nothing else is begun; then the server ends."""
    step = Loop.step
    with serving({"m": endless}, settings(**ENDLESS)) as server, streaming(server, max_tokens=300) as read:
        held = Gate(step)
        monkeypatch.setattr(Loop, "step", lambda loop: held(loop))
        terminate(server)
        for path in ("/v1/completions", "/v1/messages", "/api/chat", "/nothing"):
            said = refused(server, path)
            assert said.status_code == 503 and said.headers["retry-after"]
            assert said.headers["connection"] == "close" and said.json()["error"]
        assert health(server) == (503, "draining")
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        assert server.thread.is_alive()
        held.opened.set()
        rest = read()
        assert '"finish_reason":"length"' in rest and '"predicted_n":300' in rest
        server.thread.join(HANG_S)
        assert not server.thread.is_alive()


@pytest.mark.parametrize("why", ["the time is over", "another SIGTERM", "Ctrl-C"])
def test_what_does_not_end_in_time_is_ended_and_told(native, endless, why):
    drain_s = 0.0 if why == "the time is over" else HANG_S
    with serving({"m": endless}, settings(**ENDLESS), drain_s=drain_s) as server, streaming(server) as read:
        terminate(server)
        if drain_s:
            assert refused(server).status_code == 503 and server.thread.is_alive()
            server.listener.handle_exit(signal.SIGINT if why == "Ctrl-C" else signal.SIGTERM, None)
        rest = read()
        assert '"message":"the server is shutting down"' in rest and rest.endswith("data: [DONE]\n\n")
        server.thread.join(HANG_S)
        assert not server.thread.is_alive() and server.models.slots["m"].served is None


# ---- a device that fails


def test_a_device_that_failed_is_told_until_it_works_again(native, monkeypatch):
    def gone(self, *args):
        raise DeviceError("the device is gone")

    with serving({"box": BOX}) as server:
        assert server.post("/v1/completions", **ASKED).status_code == 200 and health(server) == (200, "ok")
        with monkeypatch.context() as broken:
            broken.setattr(Native, "prefill", gone)
            assert server.post("/v1/completions", **ASKED).status_code == 500
            assert health(server) == (503, "failed")
            assert server.http.get("/v1/models").json()["data"][0]["state"] == "failed"
        assert server.post("/v1/completions", prompt=3).status_code == 400
        assert health(server) == (503, "failed")  # A request that did not reach it says nothing of it.
        assert server.post("/v1/completions", **ASKED).status_code == 200 and health(server) == (200, "ok")


# ---- the command, and its signals

PROGRAM = """
import sys, time
from luce.planning.opened import Files
from luce.errors import Cancelled
from luce.server.models import Served
from luce.cli.commands import main

def say(word):
    print(word, file=sys.stderr, flush=True)

def slow_load(self, plans, progress=None):  # As an upload to a GPU takes long.
    say("loading")
    while not progress(0.5):
        time.sleep(0.01)
    raise Cancelled("cancelled")

def slow_close(self, close=Served.close):
    say("closing")
    time.sleep(0.5)
    close(self)
    say("closed")

if "slow load" in sys.argv[1]:
    Files.load = slow_load
Served.close = slow_close
del sys.argv[1]
main()
"""


@contextmanager
def running(how, *words):
    """Runs `luce serve`, whose models say when they are closed."""
    command = [sys.executable, "-c", PROGRAM, how, "serve", "--port", "0", "--threads", "1", *words]
    path = os.pathsep.join([str(Path(luce.__file__).parent.parent), *sys.path])
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        cwd="/",  # Beside the checkout -c would import luce from there.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "code"), [*deeper((signal.SIGINT, 130)), (signal.SIGTERM, 0)])
def test_a_signal_while_it_loads_ends_it_at_once(number, code):
    with running("slow load") as process:
        assert process.stderr.readline() == "loading\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=HANG_S)
        assert said == ("Error: interrupted\n" if code == 130 else "") and process.returncode == code


@pytest.mark.long
def test_ctrl_c_several_times_never_leaves_models_open():
    with running("") as process:
        assert process.stderr.readline().startswith("luce serves box at ")
        for _ in range(3):
            process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "closing\n"
        for _ in range(3):
            process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=HANG_S)[1]
        assert said == "closed\nError: interrupted\n" and process.returncode == 130


@pytest.mark.parametrize("device", ["cpu", *deeper("cpu,cpu")])
def test_sigterm_drains_and_exits_with_0(endless, device):
    words = ("--gguf", endless, "--ctx", "50000", "--spec", "off", "--log-json", "--device", device)
    with running("", *words, "--shutdown-timeout", "600") as process:
        url = process.stderr.readline().split()[-1]
        lines = []
        reader = threading.Thread(target=lambda: lines.extend(process.stderr))
        reader.start()
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=HANG_S) as response:
            parts = response.iter_text()
            next(parts)
            process.send_signal(signal.SIGTERM)
            until(lambda: httpx.get(f"{url}/health").json()["status"] == "draining", "it drains")
            process.send_signal(signal.SIGTERM)
            assert "".join(parts).endswith("data: [DONE]\n\n")
        assert process.wait(HANG_S) == 0
        reader.join()
    assert [line for line in lines if not line.startswith("{")] == ["closing\n", "closed\n"]
    told = [json.loads(line) for line in lines if line.startswith("{")]
    assert [line["level"] for line in told if "message" in line] == ["info"]
    assert [line["status"] for line in told if line.get("path") == "/v1/completions"] == [200]


@pytest.mark.long
def test_a_single_model_that_does_not_load_ends_it(native, tmp_path):
    """It listens by then, and says why on stderr in one line."""
    path = tmp_path / "cut.gguf"
    path.write_bytes(BOX.read_bytes()[:100_000])
    with running("", "--gguf", path) as process:
        _, said = process.communicate(timeout=HANG_S)
        assert process.returncode == 1 and said.startswith("Error: ") and said.count("\n") == 1
