"""Runs a server in this process, on a free port: the real one, in a thread."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager

import httpx

from luce.plan import Options
from luce.server.app import LOOPBACK, Access, make_app
from luce.server.cli import Listener
from luce.server.models import Models, Settings
from luce.server.watch import Watch

CHUNK = 256  # A step prefills so few rows that short prompts have checkpoints.


def settings(*, host_bytes=1 << 30, cache_dir=None, max_waiting=64, **options):
    """Returns settings of two sequences of one thread, unless said otherwise."""
    filled = {"device": "cpu", "threads": 1, "sequences": 2, "checkpoints": 4, "chunk": CHUNK} | options
    return Settings(Options(**filled), host_bytes=host_bytes, cache_dir=cache_dir, max_waiting=max_waiting)


class Serving:
    """This is a server that runs: `url` is its address, and `models` what it serves."""

    def __init__(self, paths, how, access, watch):
        self.models = Models(paths, how)
        self.watch = watch
        flags = {"host": "127.0.0.1", "port": 0, "quiet": True}
        self._listener = Listener(make_app(self.models, watch, access), self.models, flags)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._listener.serve()))
        self._thread.start()
        while not self._listener.started:
            self._thread.join(0.01)
            assert self._thread.is_alive(), "the server did not start"
        port = self._listener.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=60)

    @property
    def scheduler(self):
        """Returns that of the one model that is loaded."""
        (slot,) = [slot for slot in self.models.slots.values() if slot.served]
        return slot.served.scheduler

    def post(self, path, **body):
        return self.http.post(path, json=body)

    def stop(self):
        self.http.close()
        self.models.stop()
        self._listener.should_exit = True
        self._thread.join()


@contextmanager
def serving(paths, how=None, keys=(), log=""):
    """Serves models by name; log: as Watch takes it."""
    running = Serving(paths, how or settings(), Access(tuple(keys), LOOPBACK), Watch(log))
    try:
        yield running
    finally:
        running.stop()


def until(condition, what):
    """Waits for it, for at most 30 seconds."""
    for _ in range(3000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"not within 30 seconds: {what}")
