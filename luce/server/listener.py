"""A server's life: it listens, loads, answers, drains and ends.

    listening ──▶ loading ──▶ ready ──SIGTERM──▶ draining ──▶ ended, exit code 0
                     └───────────┴──── Ctrl-C ─────────┴────▶ ended, exit code 130

It listens before its model is loaded, so that /health can tell; requests wait meanwhile. SIGTERM: new
requests are turned away, and those that have begun have `drain_s` seconds; then they end, and their clients
are told. Ctrl-C, or another SIGTERM, ends them at once. However often a signal comes, models are closed
before the process ends.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from luce.errors import Cancelled, Error
from luce.server.ask import Refused
from luce.server.connection import KEEP_ALIVE_S, connections_of
from luce.server.log import Log
from luce.server.models import Models

MAX_HEADERS = 64 << 10  # A request's head has at most so many bytes.
TOLD_S = 5  # Clients whose answers are broken off have so long to read that.


class Listener(uvicorn.Server):
    """uvicorn's server of one application. `on_ready` is called with the addresses when requests are answered
    at once: where there is one model, it is loaded by then. `interrupted` says that Ctrl-C has ended it."""

    def __init__(
        self,
        app: ASGIApp,
        models: Models,
        log: Log,
        drain_s: float = 10.0,
        on_ready: Callable[[list[str]], object] = lambda urls: None,
    ):
        super().__init__(
            uvicorn.Config(
                app,
                port=0,
                loop="auto",
                http=connections_of(log),
                ws="none",
                log_config=None,
                log_level="error",  # What it warns of has a line in our log.
                access_log=False,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=MAX_HEADERS,
                timeout_graceful_shutdown=TOLD_S,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        self._models, self._log, self._drain_s, self._on_ready = models, log, drain_s, on_ready
        self._ends = float("inf")  # It drains until this time.
        self._told = False  # The log says that it drains.
        self._loading: asyncio.Task[Any] | None = None
        self._failure: BaseException | None = None
        self.ready = threading.Event()
        self.interrupted = False

    def run(self, sockets: Any = None) -> None:
        """Answers until a signal ends it. Raises what kept its only model from being loaded."""
        super().run(sockets)
        if self._failure:
            raise self._failure

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self._loading = asyncio.ensure_future(self._load())

    async def _load(self) -> None:
        """Loads the model, where there is one, and says that all is ready."""
        if len(self._models.slots) == 1:
            try:
                await self._models.get(next(iter(self._models.slots)))
            except Exception as error:
                cause = error.__cause__ if isinstance(error, Refused) else error
                if not isinstance(cause, Cancelled):
                    self._failure = cause or Error(str(error))
                self.should_exit = True
                return
        names = (socket.getsockname()[:2] for server in self.servers for socket in server.sockets)
        self._on_ready([f"http://{f'[{host}]' if ':' in host else host}:{port}" for host, port in names])
        self.ready.set()

    async def on_tick(self, counter: int) -> bool:
        """Says, ten times a second, whether it is time to end."""
        if self._ends < float("inf") and not self._told:
            self._told = True
            left = f"{len(self.server_state.tasks)} under way have {self._drain_s:g} seconds to end"
            self._log.message(1, f"no more requests are taken; {left}")
        idle = not self.server_state.tasks
        if self.should_exit or (self._models.draining and (idle or time.monotonic() >= self._ends)):
            self._models.stop()
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: Any = None) -> None:
        await super().shutdown(sockets)
        if self._loading is not None:
            await asyncio.gather(self._loading, return_exceptions=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles Ctrl-C and SIGTERM, between any two lines of Python: it only sets flags."""
        self.interrupted |= sig == signal.SIGINT
        if sig == signal.SIGTERM and not self._models.draining and self.ready.is_set():
            self._ends = time.monotonic() + self._drain_s
            self._models.draining = True
        else:
            self._models.stop()
            self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """Handles the signals meanwhile. (uvicorn would raise them again afterwards.)"""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {each: signal.getsignal(each) for each in signals}
        for each in signals:
            if before[each] is not signal.SIG_IGN:  # A background job of a shell ignores Ctrl-C.
                signal.signal(each, self.handle_exit)
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
