"""Has the models that are served. Each has an engine, or replicas on several devices, is loaded at first use, and is
unloaded when another needs memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event as Flag
from typing import Any, TypeVar

from luce.decode.request import Compressed
from luce.decode.scheduler import Job, put_all
from luce.errors import ArgumentError, Cancelled, Error, OutOfMemory, about
from luce.images.fetching import Allowed
from luce.images.opening import ImageError, image_size
from luce.images.sight import Placed, Shown, Sight, marks_of
from luce.model.defaults import penalties_of, sampling_of, with_defaults
from luce.model.loaded import Loaded, Settings, in_thread_of
from luce.planning import cpus
from luce.planning.opened import Files
from luce.planning.plan import MAX_THREADS, Options
from luce.planning.split import names_of
from luce.prompts.scorer import COUNTED, Scorer, longest_of
from luce.server.ask import Ask, Message, Refused, TooLong, refuse
from luce.server.lanes import FETCHED, GRAMMARS, IMAGES, LARGE, MESSAGE, PICTURES, SCORES, SHORT, Lane, fitting
from luce.server.replicas import Replicas
from luce.text.conversation import ordered
from luce.text.infill import Gap, infill_ids
from luce.text.prompt import KEY, BoundedTemplate, chat_template, prompt_ids

T = TypeVar("T")
log = logging.getLogger(__name__)
LEAVING = 100  # It is looked so often, each 10 ms, whether a request has left the scheduler.
FETCHED_BYTES = 64 << 20  # Images of one request that come by their addresses have so many.


class Served:
    """This is a model that is loaded: its files, and its replicas, of which each has an engine, a thread and a cache.
    There is one on each of `devices`, where it says none on that of the settings. What happens to its requests is
    put in the thread of `loop`. A context that nobody asked for may `shrink` to fit the free memory; else
    OutOfMemory is raised. Where `cancelled` says so, loading ends and Cancelled is raised. Raises what
    opening them raises.

    `users` counts the requests that are prepared for it: it is not unloaded meanwhile, nor while a scheduler has
    any."""

    def __init__(
        self,
        path: Path,
        settings: Settings,
        loop: asyncio.AbstractEventLoop,
        shrink: bool = True,
        cancelled: Callable[[], bool] = lambda: False,
        devices: Sequence[str | None] = (),
    ):
        self.users = 0
        device, *others = devices or (settings.options.device,)
        with ExitStack() as opened:
            files = opened.enter_context(Files(path, settings.head, device, settings.drafter, settings.draft_device))
            with about(path):
                self.defaults = sampling_of(files.file.kv)
                self.penalties = penalties_of(files.file.kv)
            self._sight: Sight | None = None
            self._allowed = Allowed(settings.image_urls)
            if settings.mmproj is not None:  # It takes its memory before the context is chosen.
                threads, device = settings.options.threads or min(cpus.usable(), 16), files.device or "auto"
                sight = Sight(settings.mmproj, threads, device, settings.image_tokens, log.warning)
                self._sight = opened.enter_context(sight)
            each = [files, *(files.on(other) for other in others)]
            at_once = self._sight.at_once if self._sight else 0
            each_own = [_options_of(one, settings.options, len(each)) for one in each]
            asked = _alike([with_defaults(one, its, shrink, at_once) for one, its in zip(each, each_own, strict=True)])
            events = in_thread_of(loop, put_all), "the server", in_thread_of(loop, self._move) if others else None
            replicas = list[Loaded]()
            with self._sight.beside() if self._sight else nullcontext():
                for one, options, own in zip(each, asked, settings.each_of(len(each)), strict=True):
                    loaded = Loaded(one, options, own, lambda _: cancelled(), 0, None, *events)
                    replicas.append(opened.enter_context(loaded))
            self.replicas, self.first = Replicas(path.stem, replicas), replicas[0]
            if cancelled():
                raise Cancelled("loading was cancelled")
            if self._sight is not None:
                self._sight.require_fit(self.first.engine.model)
                if warning := self._sight.misnamed(files.facts.name):
                    log.warning(warning)
                with about(path):
                    self._image = marks_of(files.tokenizer.control.get)
            self._scorer: Scorer | None = None
            if settings.scorer is not None:
                longest = longest_of(files.facts.context_length, self.first.info.n_ctx)
                where = device, settings.options.threads
                self._scorer = opened.enter_context(
                    Scorer(settings.scorer, files.tokenizer, files.file.kv, longest, *where)
                )
            self.info, self.tokenizer, self.facts = self.first.info, files.tokenizer, files.facts
            self.grammars = self.first.grammars
            self.lanes = (Lane("luce-prompts", SHORT), *LARGE)
            self.lanes[0].begin()
            opened.callback(self.lanes[0].close)
            self.template_source = str(files.file.kv[KEY]) if KEY in files.file.kv else ""
            self._templates = dict[Lane, BoundedTemplate]()  # Each makes one prompt at a time.
            for lane in self.lanes if self.template_source else ():
                with about(path):
                    self._templates[lane] = chat_template(files.file.kv)
                opened.callback(self._templates[lane].close)
            self._opened = opened.pop_all()

    @property
    def template(self) -> BoundedTemplate | None:
        """Returns the model's chat template, if it has one."""
        return self._templates.get(self.lanes[0])

    def _move(self, waiting: list[Job]) -> None:
        self.replicas.move(waiting)

    @property
    def n_replicas(self) -> int:
        return len(self.replicas.all)

    @property
    def n_sequences(self) -> int:
        """Returns how many requests run at once on all replicas."""
        return sum(each.loaded.info.n_sequences for each in self.replicas.all)

    async def prompt(self, ask: Ask) -> list[int]:
        """Returns the tokens of a conversation without rows of images, none of which is decoded. Raises as seen()
        does."""
        tokens, images = await self._spelled(ask)
        return [token for token in tokens if token != self._image[1]] if images else tokens

    async def count(self, ask: Ask) -> int:
        """Returns how many tokens a conversation has, rows of images among them. None of these is decoded."""
        tokens, images = await self._spelled(ask)
        return len(tokens) - len(images) + await self._rows(images)

    async def encoded(self, placed: Placed) -> tuple[Shown, ...]:
        """Returns the images of a prompt, of which those are encoded whose rows are not kept."""
        sight, gone = self._sight, Flag()
        if sight is None or not placed.at:
            return ()
        kept = await self._in(PICTURES, lambda: sight.kept(placed))
        if kept is not None:  # It waits for no other request's images.
            return kept
        try:
            return await self._in(IMAGES, lambda: sight.shown(placed, lambda part: gone.is_set()))
        finally:
            gone.set()  # Where the client left, or the server ends, the encode ends too.

    async def compressed(self, prompt: Sequence[int], keep: float, name: str | None) -> Compressed:
        """Returns what is read of a prompt. Raises Refused where the server has no scorer, or none of that name."""
        scorer, gone = self._scorer, Flag()
        if scorer is None:
            raise refuse("prefill: the server was started without a scorer, and reads prompts whole", "prefill")
        if name not in (None, scorer.name):
            raise refuse(f"prefill.model is {name!r}: the server has {scorer.name}", "prefill.model")
        if len(prompt) > scorer.n_ctx:
            raise TooLong(len(prompt), scorer.n_ctx)
        try:
            return await self._in(SCORES, lambda: scorer.compressed(prompt, keep, gone.is_set))
        finally:
            gone.set()

    async def seen(self, ask: Ask) -> Placed:
        """Returns the tokens of a conversation, with names for rows of images, and these images, which are opened and
        not encoded. Raises Refused where there is no template, it fails, or an image cannot be read, and TooLong ahead
        of decoding one."""
        tokens, images = await self._spelled(ask)
        sight = self._sight
        if sight is None or not images:
            return Placed(tokens, [])
        in_all = len(tokens) - len(images) + await self._rows(images)
        if in_all > self.info.n_ctx:
            raise TooLong(in_all, self.info.n_ctx)

        def place() -> Placed:
            return sight.placed(tokens, self._image[1], each_image(images, sight.picture))

        return await self._in(PICTURES, place)

    async def _spelled(self, ask: Ask) -> tuple[list[int], list[bytes]]:
        """Returns the tokens of a conversation, in which one stands for each image, and the images."""
        if not self._templates:
            raise Refused(400, "the model has no chat template: ask /v1/completions")
        if len(ask.messages) > COUNTED * self.info.n_ctx:  # Each has a token at least.
            raise TooLong(len(ask.messages), self.info.n_ctx, at_least=True)
        lane = fitting(self.lanes, ask.size + MESSAGE * (len(ask.messages) + len(ask.tools)))
        images = await self._brought(images_of(ask.messages))

        def make(most: int) -> list[int]:
            tools = [] if ask.choice == "none" else [tool.as_template for tool in ask.tools]
            places = self._image if images else ()
            given = ordered(ask.messages), tools or None, most, ask.continues, ask.outright, places
            return prompt_ids(self._templates[lane], self.tokenizer, *given, **ask.variables)

        return await self._counted(make, lane), images

    async def _brought(self, parts: Sequence[Mapping[str, Any]]) -> list[bytes]:
        """Returns the bytes of images, of which those that have addresses are fetched. Raises Refused where one cannot
        be."""
        found, left = list[bytes](), FETCHED_BYTES
        for n, part in enumerate(parts, 1):
            data: bytes | None = part.get("data")
            if data is None:
                try:
                    data = await self._in(FETCHED, partial(self._allowed.fetch, part["url"]))
                except Refused as error:
                    said = f"image {n} of {len(parts)}: {error.message}"
                    raise Refused(error.status, said, error.kind, "messages", error.retry_after) from error
                left -= len(data)
                if left < 0:
                    said = f"images that are fetched have more than {FETCHED_BYTES} bytes in all"
                    raise Refused(400, f"image {n} of {len(parts)}: {said}", param="messages")
            found.append(data)
        return found

    async def _rows(self, images: Sequence[bytes]) -> int:
        """Returns how many rows images have, of which the headers are read."""
        sight = self._sight
        if sight is None or not images:
            return 0
        rows_of = sight.processor.rows_of
        return await self._in(PICTURES, lambda: sum(each_image(images, lambda data: rows_of(*image_size(data)))))

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
        except Error as error:
            raise Refused(400, str(error), param=error.concerns) from error
        finally:
            self.users -= 1

    def close(self) -> None:
        """Ends what runs, then frees everything."""
        self._opened.close()


def _options_of(files: Files, options: Options, n: int) -> Options:
    """Returns the options of one of n replicas. CPUs that nobody counted out are shared."""
    threads = options.threads
    if n > 1 and threads is None and (files.device or "").startswith("cpu"):
        threads = max(1, min(cpus.usable(), MAX_THREADS) // n)
    return replace(options, device=files.device, threads=threads)


def _alike(options: Sequence[Options]) -> list[Options]:
    """Returns the options of replicas with the shortest context of any: a prompt that one takes fits all."""
    contexts = [each.ctx for each in options if each.ctx is not None]
    return [replace(each, ctx=min(contexts, default=None)) for each in options]


def each_image(images: Sequence[bytes], make: Callable[[bytes], T]) -> list[T]:
    """Returns what `make` makes of each image. An error says which image it is of."""
    found = list[T]()
    for n, data in enumerate(images, 1):
        try:
            found.append(make(data))
        except ImageError as error:
            raise ArgumentError(f"image {n} of {len(images)}: {error}", concerns="messages") from error
    return found


def images_of(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    """Returns the images of messages, in the order in which prompts have them, each with its `data` or `url`."""
    contents = (message["content"] for message in ordered(messages))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part for part in parts if part["type"] == "image"]


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
    `loading` loads it at present. It has a replica on each of `devices`; where it says none, one on that of the
    settings."""

    path: Path
    devices: tuple[str | None, ...] = ()
    served: Served | None = None
    used: float = 0.0
    loading: asyncio.Task[None] | None = None

    def may_share(self, other: Slot) -> bool:
        """Says whether a device of this model may be one of another's: unloading it makes room for that. What is on no
        GPU that was named by its number may be on any."""
        ours, theirs = ({name for each in slot.devices for name in names_of(each) or [""]} for slot in (self, other))
        named = all(name.startswith("cuda:") for name in ours | theirs)
        return not (ours and theirs and named) or bool(ours & theirs)

    @property
    def state(self) -> str:
        """Returns "unloaded", "loading", "ready", or "failed" where its device has."""
        if self.served is not None:
            return "ready" if self.served.replicas.working else "failed"
        return "unloaded" if self.loading is None else "loading"


class Models:
    """Holds models by their names. A single one answers to every name. `devices` says on which devices each has a
    replica, where that is not the one of the settings."""

    def __init__(
        self, paths: Mapping[str, Path], settings: Settings, devices: Mapping[str, Sequence[str | None]] | None = None
    ):
        self.sees = settings.mmproj is not None
        self.slots = {name: Slot(path, tuple((devices or {}).get(name, ()))) for name, path in paths.items()}
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

    @property
    def left_out(self) -> list[str]:
        """Returns the replicas whose devices have failed while others of their model go on."""
        loaded = [(name, slot.served) for name, slot in self.slots.items() if slot.served]
        return [f"{name} on {each.name}" for name, served in loaded for each in served.replicas.all if each.failed]

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

    def _idle(self, beside: Slot | None = None) -> list[Slot]:
        """Returns the models that are loaded and that nobody asks now, of those that may have a device in common with
        this one."""
        loaded = ((slot, slot.served) for slot in self.slots.values() if slot.served)
        idle = [slot for slot, served in loaded if not served.users and served.replicas.idle]
        return [slot for slot in idle if beside is None or slot.may_share(beside)]

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
            idle = self._idle(slot)
            try:
                given = slot.path, self._settings, loop, not idle, self._is_stopping, slot.devices
                return await loop.run_in_executor(None, Served, *given)
            except OutOfMemory as error:
                idle = self._idle(slot)
                if not idle:
                    raise Refused(503, str(error), "busy", retry_after=10) from error
                oldest = min(idle, key=lambda other: other.used)
                served, oldest.served = oldest.served, None
                assert served is not None
                await closing(served.close)
            except Cancelled as error:
                raise stopping() from error
            except Error as error:
                raise Refused(500, str(error), "failed") from error

    def _is_stopping(self) -> bool:
        return self._stopping

    def stop(self) -> None:
        """Ends what runs and what is loaded, soon. It may be called from a signal handler."""
        self._stopping = self.draining = True
        for slot in self.slots.values():
            if slot.served is not None:
                for each in slot.served.replicas.all:
                    each.loaded.scheduler.stop()

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
