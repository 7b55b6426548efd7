"""Runs a server in this process, on a free port: the real one, in a thread."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from unittest import mock

import httpx

from luce.model.loaded import Settings
from luce.planning.plan import Options
from luce.server.access import LOOPBACK, Access
from luce.server.answer import Answer
from luce.server.app import make_app
from luce.server.listener import Listener
from luce.server.models import Models
from luce.server.watch import Watch

CHUNK = 256  # A step prefills so few rows that short prompts have checkpoints.
HANG_S = 300  # What has not happened after so many seconds will not, however busy the machine is.


def settings(*, host_bytes=1 << 30, cache_dir=None, max_waiting=64, scorer=None, draft_device=None, **options):
    """Returns settings of two sequences of one thread, unless said otherwise."""
    filled = {"device": "cpu", "threads": 1, "sequences": 2, "checkpoints": 4, "chunk": CHUNK} | options
    filled |= {"gaps": scorer is not None}
    how = {"host_bytes": host_bytes, "cache_dir": cache_dir, "max_waiting": max_waiting, "scorer": scorer}
    return Settings(Options(**filled), draft_device=draft_device, **how)


class Serving:
    """This is a server that runs: `url` is its address, and `models` what it serves."""

    def __init__(self, paths, how, access, watch, loading=False, drain_s=HANG_S, devices=None):
        self.models = Models(paths, how, devices)
        self.watch = watch
        self.listener = Listener(make_app(self.models, watch, access), self.models, watch.log, drain_s)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.listener.serve()))
        self.thread.start()
        while not (self.listener.ready.is_set() or loading and self.listener.started):
            self.thread.join(0.01)
            assert self.thread.is_alive(), "the server did not start"
        port = self.listener.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=HANG_S, verify=False)  # Else it reads all certificates.

    @property
    def scheduler(self):
        """Returns that of the one model that is loaded."""
        (slot,) = [slot for slot in self.models.slots.values() if slot.served]
        return slot.served.first.scheduler

    def post(self, path, **body):
        return self.http.post(path, json=body)

    @contextmanager
    def asked(self, path, **body):
        """Sends a request, and goes without its answer at the end of the block."""
        with closing(HTTPConnection(self.url.removeprefix("http://"))) as client:
            client.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            yield

    def stop(self):
        self.http.close()
        self.models.stop()
        self.listener.should_exit = True
        self.thread.join()


@contextmanager
def serving(paths, how=None, keys=(), log="", origins=(), **more):
    """Serves models by name; log: as Watch takes it. With `loading` it listens, and may still load. `drain_s`
    is the Listener's."""
    access = Access(tuple(keys), LOOPBACK, tuple(origins))
    running = Serving(paths, how or settings(), access, Watch(log), **more)
    try:
        yield running
    finally:
        running.stop()


def until(condition, what):
    """Waits for what no event tells of."""
    end = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end, f"not within {HANG_S} seconds: {what}"
        time.sleep(0.01)


class Gate:
    """Holds calls of `inner` until it is opened."""

    def __init__(self, inner):
        self.inner, self.entered, self.opened = inner, threading.Event(), threading.Event()

    def __call__(self, *args, **how):
        self.entered.set()
        assert self.opened.wait(HANG_S)
        return self.inner(*args, **how)


@contextmanager
def each_event_alone():
    """Lets answers take what happens one event at a time, however much comes at once. So the number of a
    stream's parts does not depend on the machine."""

    async def one(self, patience):
        events = await all_of_them(self, patience)
        self._events[:0] = events[1:]
        return events[:1]

    all_of_them = Answer._next_events
    with mock.patch.object(Answer, "_next_events", one):
        yield


def streamed(response):
    """Returns the data of a stream's events, up to its end."""
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: ")]
    *lines, end = [line.removeprefix("data: ") for line in lines]
    assert end == "[DONE]"
    return [json.loads(line) for line in lines]
