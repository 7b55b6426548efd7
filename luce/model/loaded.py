"""A model with all that answers requests on it: its files, engine, engine's thread, and kept beginnings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from luce.decode.engine import Engine
from luce.decode.events import Event, Failed, Finished
from luce.decode.request import Request
from luce.decode.scheduler import Happened, Job, Scheduler, put_all
from luce.native import Progress
from luce.planning.opened import Files
from luce.planning.plan import Options
from luce.text.grammar import Grammars

if TYPE_CHECKING:  # Who keeps no beginnings imports none of these, nor numpy.
    import asyncio

    from luce.prompts.cache import PrefixCache
    from luce.prompts.disk import DiskCache

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """How a model is opened and asked. `host_bytes` None is a quarter of the memory that is free. At most
    `max_waiting` requests wait for a sequence; None bounds nothing."""

    options: Options = field(default_factory=Options)
    head: Path | None = None
    drafter: Path | None = None
    draft_device: str | None = None
    mmproj: Path | None = None  # Of the server alone, as what follows: others open towers and scorers themselves.
    image_tokens: int | None = None
    image_urls: tuple[str, ...] = ()
    scorer: Path | None = None
    host_bytes: int | None = None
    cache_dir: Path | None = None
    disk_bytes: int = 32 << 30
    max_waiting: int | None = 64
    prefill_share: float = 0.75

    def each_of(self, n: int) -> list[Settings]:
        """Returns the settings of each of n replicas: those of one, of which they share bytes and places to wait."""
        if n == 1:
            return [self]
        host = _free_memory() // 4 if self.host_bytes is None else self.host_bytes
        waiting = None if self.max_waiting is None else -(-self.max_waiting // n)
        one = replace(self, host_bytes=host // n, disk_bytes=self.disk_bytes // n, max_waiting=waiting)
        folders = [self.cache_dir and self.cache_dir / f"replica-{i}" for i in range(1, n)]
        return [one, *(replace(one, cache_dir=folder) for folder in folders)]


class Loaded:
    """An engine of opened files, its thread, and the beginnings of prompts that are kept. Engine.open says what
    `options`, `progress`, `prompt` and `new` are, and what is raised; Scheduler says it of `hand_over`,
    `owner` and `lost`. The files stay the caller's to close."""

    def __init__(
        self,
        files: Files,
        options: Options,
        settings: Settings,
        progress: Progress | None = None,
        prompt: int = 0,
        new: int | None = None,
        hand_over: Callable[[Happened], None] = put_all,
        owner: str = "the model",
        lost: Callable[[list[Job]], None] | None = None,
    ):
        with ExitStack() as opened:
            # Files of checkpoints have to fit the next process too, whose steps may measure otherwise.
            keep = settings.cache_dir is not None
            self.engine = opened.enter_context(
                Engine.open(files, options, progress, prompt, new, keep_drafters=keep)
            )
            self.info, self.tokenizer, self.facts = self.engine.info, files.tokenizer, files.facts
            self.cache = _cache(self.engine, files, settings) if self.info.n_checkpoints else None
            if self.cache:
                opened.callback(self.cache.close)
            self.scheduler = Scheduler(
                self.engine, self.cache, settings.max_waiting, settings.prefill_share, hand_over, owner, lost
            )
            opened.callback(self.scheduler.close)
            self._opened = opened.pop_all()

    @cached_property
    def grammars(self) -> Grammars:
        """Compiles grammars. Raises UnsupportedError where luce[grammar] is not installed."""
        return Grammars(self.tokenizer)

    def run(self, request: Request) -> Running:
        """Begins with a request, of which nothing else waits for a place."""
        return Running(self.scheduler, request)

    def close(self) -> None:
        """Ends what runs, then frees everything; a second call does nothing."""
        self._opened.close()

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Running:
    """Yields the events of one request, up to exactly one Finished or Failed, to the thread that asked."""

    def __init__(self, scheduler: Scheduler, request: Request):
        self._scheduler, self._events = scheduler, SimpleQueue[list[Event]]()
        self._job = Job(request, self._events.put)
        scheduler.submit(self._job)

    def __iter__(self) -> Iterator[Event]:
        last: Event | None = None
        while not isinstance(last, (Finished, Failed)):
            for last in self._events.get():
                yield last

    def cancel(self) -> None:
        """Ends the request, and all others that run, after the engine's present step at most. A signal handler
        may call it."""
        self._job.cancelled = True
        self._scheduler.interrupt()


def _cache(engine: Engine, files: Files, settings: Settings) -> PrefixCache:
    from luce.prompts.cache import PrefixCache

    host = _free_memory() // 4 if settings.host_bytes is None else settings.host_bytes
    return PrefixCache(engine.native, files.tokenizer, host, _disk(engine, files, settings))


def _disk(engine: Engine, files: Files, settings: Settings) -> DiskCache | None:
    """Returns the folder of this file's checkpoints. There is one for each way in which they differ."""
    if settings.cache_dir is None:
        return None
    layout = [(tensor.name, tensor.type, tensor.shape) for tensor in files.file.tensors]
    from luce.prompts.disk import DiskCache
    from luce.prompts.turns import rule

    plan = engine.plan
    key = [
        files.file.info.size_bytes,
        layout,
        plan.kv_type,
        engine.info.n_cut,
        rule(engine.info.n_cut),
        plan.drafts > 0,
        plan.blocks,
    ]
    return DiskCache(settings.cache_dir, repr(key), settings.disk_bytes)


def _free_memory() -> int:
    """Returns the bytes of host memory that can be had."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 << 30


def in_thread_of(loop: asyncio.AbstractEventLoop, do: Callable[[T], None]) -> Callable[[T], None]:
    """Returns what does the same in the thread of an event loop: with put_all a `hand_over`."""

    def there(given: T) -> None:
        with suppress(RuntimeError):  # The loop has ended, and with it who waited.
            loop.call_soon_threadsafe(do, given)

    return there
