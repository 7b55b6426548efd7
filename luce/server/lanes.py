"""Threads beside the event loop for what may take long: reading bodies, making prompts, compiling grammars.

Work goes by what it costs. Little is done where it is asked for, and the rest in a lane with one thread: so a
prompt of 200,000 messages waits for others of its kind, and no others wait for it. One thread a lane, since
Python runs one at a time: more of them would take their turns from the loop and the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from luce.errors import OutOfMemory
from luce.server.ask import Refused

T = TypeVar("T")
# A cost is counted in bytes of JSON: what is SMALL takes about a millisecond, SHORT work has a lane for each
# model, and long conversations of agents are in the MIDDLE.
SMALL, SHORT, MIDDLE = 16 << 10, 64 << 10, 1 << 20
MESSAGE = 256  # A message costs as much as so many bytes beside its own.
TOKEN = 64  # So does a token of an answer, or an alternative to it.
MAX_WAITING = 32  # So many may wait in a lane.


class Lane:
    """One thread, or a few for work that waits for others, and a bounded queue before it. `most` is what its work costs
    at most."""

    def __init__(self, name: str, most: float, threads: int = 1):
        self.most, self._pool, self._inside = most, ThreadPoolExecutor(threads, name), 0

    async def run(self, make: Callable[[], T]) -> T:
        """Returns what `make` returns in the thread. Where the caller is cancelled, what has not begun does
        not begin. Raises what it raises, and Refused where as many wait as may, or memory lacks."""
        if self._inside > MAX_WAITING:
            raise Refused(503, "the server is busy with large requests", "busy", retry_after=5)
        self._inside += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, make)
        except (OutOfMemory, MemoryError) as error:
            raise Refused(503, str(error) or "out of memory", "busy", retry_after=5) from error
        finally:
            self._inside -= 1

    def begin(self) -> None:
        """Starts the thread, for which memory may lack later."""
        self._pool.submit(int).result()

    def close(self) -> None:
        """Ends the thread, once what it does is done. What waits is not begun."""
        self._pool.shutdown(cancel_futures=True)


LARGE = (Lane("luce-middle", MIDDLE), Lane("luce-large", float("inf")))
# How long a grammar takes its size hardly says: prompts without one wait for none.
GRAMMARS = (Lane("luce-grammar", SHORT), Lane("luce-large-grammar", float("inf")))

FETCHED = Lane("luce-fetched", float("inf"), threads=8)  # Images come from elsewhere.
PICTURES = Lane("luce-pictures", float("inf"))  # Images are opened.
IMAGES = Lane("luce-images", float("inf"))  # One is encoded after the other, on all of a model's threads.
SCORES = Lane("luce-scores", float("inf"))  # A scorer reads one prompt after the other.


def fitting(lanes: Sequence[Lane], cost: float) -> Lane:
    """Returns the first of the lanes that is for so much."""
    return next(lane for lane in lanes if cost <= lane.most)


async def beside(cost: float, make: Callable[[], T]) -> T:
    """Returns what `make` returns: here if it costs little, else in a lane. Raises as Lane.run does."""
    if cost <= SMALL:
        return make()
    return await fitting(LARGE, cost).run(make)
