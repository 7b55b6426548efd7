"""Has the models that are served. Each has an engine, is loaded at first use, and is unloaded when another
needs memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from luce import native as _native
from luce.decode.engine import Engine
from luce.decode.events import Event, Failed, Finished
from luce.errors import Cancelled, DeviceError, FileError, LuceError, OutOfMemory, about
from luce.files.probe import fact
from luce.planning.memory import total
from luce.planning.opened import Files
from luce.planning.plan import Options
from luce.prompts.cache import PrefixCache
from luce.prompts.disk import DiskCache
from luce.prompts.turns import RULE
from luce.server.ask import Ask, Refused, TooLong, ordered
from luce.server.lanes import GRAMMARS, LARGE, MESSAGE, SHORT, Lane, fitting
from luce.server.scheduler import Happened, Scheduler, put_all
from luce.text.grammar import Grammars
from luce.text.infill import Gap, infill_ids
from luce.text.prompt import KEY, BoundedTemplate, chat_template, prompt_ids

T = TypeVar("T")
MAX_DEFAULT_CTX = 32768
LEAVING = 100  # It is looked so often, each 10 ms, whether a request has left the scheduler.
COUNTED = 4  # A prompt's tokens are counted up to so many contexts.
GPU_CHUNK, CPU_CHUNK = 1024, 256  # A step has so many prompt tokens.
# Qwen recommends these for precise tasks.
RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0}
# These keys give these options, of which each has at most so much.
KEYS = {name: f"general.sampling.{name}" for name in RECOMMENDED} | {"temperature": "general.sampling.temp"}
REPEAT = "general.sampling.penalty_repeat"
MOST = {"temperature": 1e6, "top_p": 1.0, "top_k": 2**31 - 1, "min_p": 1.0}


@dataclass(frozen=True)
class Settings:
    """Says how each model is served. `host_bytes` None is a quarter of the memory that is free."""

    options: Options = field(default_factory=Options)
    head: Path | None = None
    drafter: Path | None = None
    host_bytes: int | None = None
    cache_dir: Path | None = None
    disk_bytes: int = 32 << 30
    max_waiting: int = 64
    prefill_share: float = 0.75


class Served:
    """This is a model that is loaded: its files, engine, thread and cache. What happens to its requests is
    put in the thread of `loop`. A context that nobody asked for may `shrink` to fit the free memory; else
    OutOfMemory is raised. Where `cancelled` says so, loading ends and Cancelled is raised. Raises what
    opening them raises.

    `users` counts the requests that are prepared for it: it is not unloaded meanwhile, nor while its
    scheduler has any. `failed` is what its device reported last, "" while it works."""

    def __init__(
        self,
        path: Path,
        settings: Settings,
        loop: asyncio.AbstractEventLoop,
        shrink: bool = True,
        cancelled: Callable[[], bool] = lambda: False,
    ):
        self.users, self.failed = 0, ""
        with ExitStack() as opened:
            files = opened.enter_context(
                Files(path, settings.head, settings.options.device, settings.drafter)
            )
            with about(path):
                self.defaults = _sampling(files.file.kv)
                self.penalties = _penalties(files.file.kv)
            options = _with_defaults(files, settings.options, shrink)
            # Files have to fit the next server too, whose steps may measure otherwise.
            keep = settings.cache_dir is not None
            self.engine = opened.enter_context(
                Engine.open(files, options, lambda _: cancelled(), keep_drafters=keep)
            )
            if cancelled():
                raise Cancelled("loading was cancelled")
            self.info, self.tokenizer, self.facts = self.engine.info, files.tokenizer, files.facts
            self.lanes = (Lane("luce-prompts", SHORT), *LARGE)
            self.lanes[0].begin()
            opened.callback(self.lanes[0].close)
            self.template_source = str(files.file.kv[KEY]) if KEY in files.file.kv else ""
            self._templates = dict[Lane, BoundedTemplate]()  # Each makes one prompt at a time.
            for lane in self.lanes if self.template_source else ():
                with about(path):
                    self._templates[lane] = chat_template(files.file.kv)
                opened.callback(self._templates[lane].close)
            self.grammars = Grammars(self.tokenizer)
            self.cache = None
            if self.info.n_checkpoints:
                disk = _disk(self.engine, files, settings)
                host = settings.host_bytes
                host = _free_memory() // 4 if host is None else host
                self.cache = PrefixCache(self.engine.native, self.tokenizer, host, disk)
                opened.callback(self.cache.close)

            def hand_over(happened: Happened) -> None:
                with suppress(RuntimeError):  # The server has ended.
                    loop.call_soon_threadsafe(put_all, happened)

            self.scheduler = Scheduler(
                self.engine, self.cache, settings.max_waiting, settings.prefill_share, hand_over
            )
            opened.callback(self.scheduler.close)
            self._opened = opened.pop_all()

    @property
    def template(self) -> BoundedTemplate | None:
        """Returns the model's chat template, if it has one."""
        return self._templates.get(self.lanes[0])

    def note(self, last: Event) -> None:
        """Notes by the last event of a request whether the device works."""
        if isinstance(last, Finished):
            self.failed = ""
        elif isinstance(last, Failed) and isinstance(last.error, DeviceError):
            self.failed = str(last.error)

    async def prompt(self, ask: Ask) -> list[int]:
        """Returns the tokens of a conversation. Raises Refused where there is no template, or it fails."""
        if not self._templates:
            raise Refused(400, "the model has no chat template: ask /v1/completions")
        if len(ask.messages) > COUNTED * self.info.n_ctx:  # Each has a token at least.
            raise TooLong(len(ask.messages), self.info.n_ctx, at_least=True)
        lane = fitting(self.lanes, ask.size + MESSAGE * (len(ask.messages) + len(ask.tools)))

        def make(most: int) -> list[int]:
            tools = [] if ask.choice == "none" else [tool.as_template for tool in ask.tools]
            given = ordered(ask.messages), tools or None, most, ask.continues, ask.outright
            return prompt_ids(self._templates[lane], self.tokenizer, *given, **ask.variables)

        return await self._counted(make, lane)

    async def raw_prompt(self, text: str, special: bool = False, add_bos: bool = True) -> list[int]:
        """Returns the tokens of a prompt that is put into no template. Control tokens that it spells are such
        if `special`."""

        def make(most: int) -> list[int]:
            return self.tokenizer.encode(text, special=special, add_bos=add_bos, most=most)

        return await self._counted(make, fitting(self.lanes, len(text)))

    async def infill_prompt(self, gap: Gap) -> list[int]:
        """Returns the tokens of a prompt that asks for what fills a gap."""
        texts = [gap.suffix, gap.begun, *(text for _, text in gap.files)]
        lane = fitting(self.lanes, len(gap.prefix) + sum(map(len, texts)))
        return await self._counted(lambda most: infill_ids(self.tokenizer, gap, most), lane)

    async def _counted(self, make: Callable[[int], list[int]], lane: Lane) -> list[int]:
        """Returns the tokens of a prompt. Raises TooLong where it has COUNTED times as many as the context:
        it is not read to its end."""
        most = COUNTED * self.info.n_ctx
        tokens = await self._in(lane, lambda: make(most))
        if len(tokens) > most:
            raise TooLong(len(tokens), self.info.n_ctx, at_least=True)
        return tokens

    async def in_thread(self, make: Callable[[], T], cost: float = 0) -> T:
        """Runs what takes a while in a thread, and what costs so much beside what costs less (see lanes.py).
        Raises Refused where it failed."""
        return await self._in(fitting(self.lanes, cost), make)

    async def compiled(self, make: Callable[[], T], cost: float) -> T:
        """Runs what compiles a grammar, beside all else. Raises as in_thread does."""
        return await self._in(fitting(GRAMMARS, cost), make)

    async def _in(self, lane: Lane, make: Callable[[], T]) -> T:
        self.users += 1
        try:
            return await lane.run(make)
        except LuceError as error:
            raise Refused(400, str(error), param=error.concerns) from error
        finally:
            self.users -= 1

    def close(self) -> None:
        """Ends what runs, then frees everything."""
        self._opened.close()


def _with_defaults(files: Files, options: Options, shrink: bool) -> Options:
    """Fills in what nobody asked for: as long a context as was trained and fits, within reason, and chunks
    that are short enough for others to go on between them. Raises OutOfMemory where the context would have
    to shrink and may not."""
    if options.chunk is None:
        gpu = _native.default().devices()[0].is_gpu if options.device is None else options.device != "cpu"
        options = replace(options, chunk=GPU_CHUNK if gpu else CPU_CHUNK)
    if options.ctx is not None:
        return options
    ctx = min(files.facts.context_length or MAX_DEFAULT_CTX, MAX_DEFAULT_CTX)
    while ctx > 4096:
        needed = files.memory(files.plan(replace(options, ctx=ctx)))
        if total(needed) <= needed.device_free:
            break
        if not shrink:
            said = f"{total(needed)} bytes are needed for a context of {ctx}, {needed.device_free} are free"
            raise OutOfMemory(said)
        ctx //= 2
    return replace(options, ctx=ctx)


def _sampling(kv: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the file's own sampling, else what Qwen recommends. FileError names a key with which no token
    can be sampled."""
    found: dict[str, Any] = {}
    for name, key in KEYS.items():
        value, most = fact(kv, key, float, float(RECOMMENDED[name])), MOST[name]
        if not 0 <= value <= most:
            raise FileError(f"key {key}: {value:g} is not within 0 and {most:g}")
        found[name] = type(RECOMMENDED[name])(value)
    return found


def _penalties(kv: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the file's own repetition penalty, if it has one. FileError names one that is no penalty."""
    value = fact(kv, REPEAT, float, 1.0)
    if not 0.01 <= value <= 100:
        raise FileError(f"key {REPEAT}: {value:g} is not within 0.01 and 100")
    return {"repetition": value} if value != 1 else {}


def _disk(engine: Engine, files: Files, settings: Settings) -> DiskCache | None:
    """Returns the folder of this file's checkpoints. There is one for each way in which they differ."""
    if settings.cache_dir is None:
        return None
    layout = [(tensor.name, tensor.type, tensor.shape) for tensor in files.file.tensors]
    plan = engine.plan
    key = [
        files.file.info.size_bytes,
        layout,
        plan.kv_type,
        engine.info.n_chunk,
        RULE,
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


async def closing(close: Callable[[], None]) -> None:
    """Closes what takes a while to close, here where there is no thread to be had for it."""
    try:
        work = asyncio.get_running_loop().run_in_executor(None, close)
    except OutOfMemory:
        close()
    else:
        await work


@dataclass(eq=False)
class Slot:
    """This is a model by its name, loaded or not. `used` is the time of day when it was asked last, and
    `loading` loads it at present."""

    path: Path
    served: Served | None = None
    used: float = 0.0
    loading: asyncio.Task[None] | None = None

    @property
    def state(self) -> str:
        """Returns "unloaded", "loading", "ready", or "failed" where its device has."""
        if self.served is not None:
            return "failed" if self.served.failed else "ready"
        return "unloaded" if self.loading is None else "loading"


class Models:
    """Holds models by their names. A single one answers to every name."""

    def __init__(self, paths: Mapping[str, Path], settings: Settings):
        self.slots = {name: Slot(path) for name, path in paths.items()}
        self._settings = settings
        self._turn = asyncio.Lock()  # One model is loaded at a time.
        self.draining = self._stopping = False

    @property
    def state(self) -> str:
        """Returns "draining" where no more requests are taken, "failed" where a model's device has failed,
        "loading" where a model is loaded and no other is there, or else "ready"."""
        states = {slot.state for slot in self.slots.values()}
        if self.draining:
            return "draining"
        if "failed" in states:
            return "failed"
        return "loading" if "loading" in states and "ready" not in states else "ready"

    def name_of(self, asked: str) -> str:
        """Returns the name that a request means. Raises Refused where it means none."""
        if asked in self.slots:
            return asked
        if (untagged := asked.removesuffix(":latest")) in self.slots:  # Ollama's clients add it.
            return untagged
        if len(self.slots) == 1:
            return next(iter(self.slots))
        if asked == "any":
            loaded = [(slot.used, name) for name, slot in self.slots.items() if slot.served]
            if not loaded:
                raise Refused(400, "model any is the one that was used last: none is loaded", param="model")
            return max(loaded)[1]
        known = ", ".join(self.slots)
        raise Refused(404, f"model {asked!r} is not served here: {known}", "not_found", "model")

    async def get(self, asked: str) -> Served:
        """Returns the model of a request, loaded. Raises Refused where there is none of that name, or it
        cannot be loaded now. Who waits for it may be cancelled: it is loaded for the others all the same."""
        slot = self.slots[self.name_of(asked)]
        slot.used = time.time()
        while slot.served is None:
            if slot.loading is None:
                slot.loading = asyncio.ensure_future(self._load(slot))
            await asyncio.shield(slot.loading)
        return slot.served

    async def unload(self, asked: str) -> None:
        """Unloads a model, unless others ask it. The request that was answered last may still be leaving the
        scheduler."""
        slot = self.slots[self.name_of(asked)]
        for _ in range(LEAVING):
            if slot.served is None or slot in self._idle():
                break
            await asyncio.sleep(0.01)
        async with self._turn:
            if slot.served is not None and slot in self._idle():
                served, slot.served = slot.served, None
                await closing(served.close)

    def _idle(self) -> list[Slot]:
        """Returns the models that are loaded and that nobody asks now."""
        loaded = ((slot, slot.served) for slot in self.slots.values() if slot.served)
        return [slot for slot, served in loaded if not served.users and served.scheduler.idle]

    async def _load(self, slot: Slot) -> None:
        try:
            async with self._turn:
                slot.served = await self._loaded(slot)
        finally:
            slot.loading = None

    async def _loaded(self, slot: Slot) -> Served:
        """Loads a model. As long as memory lacks, it unloads others, those that were used longest ago first:
        before it makes do with a shorter context than it would have alone."""
        loop = asyncio.get_running_loop()
        while True:
            if self._stopping:
                raise stopping()
            idle = self._idle()
            try:
                given = slot.path, self._settings, loop, not idle, self._is_stopping
                return await loop.run_in_executor(None, Served, *given)
            except OutOfMemory as error:
                idle = self._idle()
                if not idle:
                    raise Refused(503, str(error), "busy", retry_after=10) from error
                oldest = min(idle, key=lambda other: other.used)
                served, oldest.served = oldest.served, None
                assert served is not None
                await closing(served.close)
            except Cancelled as error:
                raise stopping() from error
            except LuceError as error:
                raise Refused(500, str(error), "failed") from error

    def _is_stopping(self) -> bool:
        return self._stopping

    def stop(self) -> None:
        """Ends what runs and what is loaded, soon. It may be called from a signal handler."""
        self._stopping = self.draining = True
        for slot in self.slots.values():
            if slot.served is not None:
                slot.served.scheduler.stop()

    async def close(self) -> None:
        """Unloads all models, also those that are being loaded."""
        self.stop()
        loading = [slot.loading for slot in self.slots.values() if slot.loading is not None]
        await asyncio.gather(*loading, return_exceptions=True)
        await closing(self._unload)

    def _unload(self) -> None:
        for slot in self.slots.values():
            served, slot.served = slot.served, None
            if served is not None:
                served.close()


def stopping() -> Refused:
    """Returns the refusal of a request that comes while the server ends."""
    return Refused(503, "the server is shutting down", "busy", retry_after=5)
