"""Starts threads. Where memory lacks that is OutOfMemory: Python would wait for ever for a thread that finds
none as it starts."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Thread
from typing import Any, TypeVar

from luce.room import require_thread

T = TypeVar("T")


class Pool(ThreadPoolExecutor):
    """Has up to so many threads, which start when there is work for them."""

    def __init__(self, threads: int, name: str):
        self._most, self._begun = threads, list[None]()
        super().__init__(threads, name, self._begun.append, (None,))  # Each thread begins with that call.

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Hands a call to a thread. Raises OutOfMemory where another one may be started and finds no room."""
        if len(self._begun) < self._most:
            require_thread()
        return super().submit(fn, *args, **kwargs)


def started(run: Callable[[], object], name: str) -> Thread:
    """Returns a thread that runs, and that the process does not wait for at its end."""
    require_thread()
    thread = Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


BESIDE = Pool(32, "luce-beside")  # A server's loop hands it what takes a while.
