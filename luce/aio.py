"""The Python API for asyncio: any number of answers at once, of which none blocks the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar, overload

from luce.decode.events import Event
from luce.decode.scheduler import put_all
from luce.errors import StateError
from luce.model.answer import Answer, Piece
from luce.model.loaded import in_thread_of
from luce.model.model import Batch, Info, Model, Prefix, Text, batch_of, opened
from luce.model.options import How, HowChat, HowReply, Loading, require_known
from luce.model.prompting import Asked, Message, Schema
from luce.model.stream import Pending

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")


class AsyncStream(Pending, AsyncIterator[Piece]):
    """Yields the pieces of an answer as they come, as luce.Stream does, for `async for`. Its request is made and
    handed to the engine as it is first read, or as answer() is awaited. It is an async context manager, which
    cancels it at its end; so does the cancellation of the task that reads it."""

    def __init__(self, model: Model, make: Callable[[], Asked]):
        self._model, self._make = model, make
        self._events = asyncio.Queue[list[Event]]()
        self._begun = self._left = False

    async def __anext__(self) -> Piece:
        try:
            if not self._begun:
                await self.begin()
            while not self._pieces:
                if self._ended():
                    raise StopAsyncIteration
                self._take(await self._events.get())
            return self._pieces.popleft()
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def begin(self, admitted: bool = False) -> None:
        """Makes the request and hands it to the engine, without a wait for what comes of it."""
        self._begun = True
        asked = await beside(self._make)
        super().__init__(self._model, asked, self._events.put_nowait)
        self.start(admitted)
        if self._left:
            self.cancel()

    def cancel(self) -> None:
        """Ends the answer as luce.Stream.cancel does. It may be called in the event loop's thread."""
        self._left = True
        if hasattr(self, "_job"):
            super().cancel()

    async def answer(self) -> Answer:
        """Returns the whole answer, for whose end it waits. Pieces that nobody took are dropped."""
        async for _ in self:
            pass
        assert self._reader.answer is not None
        return self._reader.answer

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


class AsyncModel:
    """A model for one event loop, with the methods of luce.Model: `async with luce.AsyncModel(path, ...)` opens
    it, with the options of luce.load, and closes it."""

    def __init__(self, path: str | Path | None = None, **options: Unpack[Loading]):
        require_known(options, Loading)
        self._path, self._options = path, options
        self._model: Model | None = None

    @property
    def model(self) -> Model:
        """Returns the model. Raises StateError where it is not open."""
        if self._model is None:
            raise StateError("the model is not open: `async with` opens it")
        return self._model

    async def open(self) -> AsyncModel:
        """Opens the model, as luce.load does. Where the task is cancelled meanwhile, it is closed again."""
        hand_over = in_thread_of(asyncio.get_running_loop(), put_all)
        opening = asyncio.ensure_future(beside(partial(opened, self._path, self._options, hand_over)))
        try:
            self._model = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_late)
            raise
        return self

    async def close(self) -> None:
        """Ends what runs and frees all memory; a second call does nothing."""
        if self._model is not None:
            await beside(self._model.close)

    async def __aenter__(self) -> AsyncModel:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- text

    def stream(self, prompt: Text, *, schema: Schema | None = None, **how: Unpack[How]) -> AsyncStream:
        """Continues a prompt, and returns the pieces as they come."""
        model = self.model
        return AsyncStream(model, lambda: model.text(prompt, schema, how))

    @overload
    async def generate(self, prompt: str, *, schema: Schema | None = None, **how: Unpack[How]) -> Answer: ...
    @overload
    async def generate(
        self, prompt: Batch, *, schema: Schema | None = None, **how: Unpack[How]
    ) -> list[Answer]: ...
    @overload
    async def generate(
        self, prompt: Sequence[int], *, schema: Schema | None = None, **how: Unpack[How]
    ) -> Answer: ...

    async def generate(
        self, prompt: Text | Batch, *, schema: Schema | None = None, **how: Unpack[How]
    ) -> Answer | list[Answer]:
        """Continues a prompt to its end; several are one batch."""
        single, prompts = batch_of(prompt)
        streams = [self.stream(each, schema=schema, **how) for each in prompts]
        try:
            for n, stream in enumerate(streams):
                await stream.begin(admitted=n > 0)
            answers = [await stream.answer() for stream in streams]
            return answers[0] if single else answers
        finally:
            for stream in streams:
                stream.cancel()

    # ---- conversations

    async def chat(self, messages: Sequence[Message], **how: Unpack[HowChat]) -> Answer:
        """Answers messages, as luce.Model.chat does."""
        return await self.chat_stream(messages, **how).answer()

    def chat_stream(self, messages: Sequence[Message], **how: Unpack[HowChat]) -> AsyncStream:
        """Answers messages, and returns the pieces as they come."""
        model = self.model
        return AsyncStream(model, lambda: model.conversation(messages, how))

    # ---- beginnings

    async def prefix(
        self, beginning: str | Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> AsyncPrefix:
        """Reads a beginning and keeps it, as luce.Model.prefix does."""
        model = self.model
        pin, asked = await beside(lambda: model.pinned(beginning, tools))
        try:
            await AsyncStream(model, lambda: asked).answer()
        except BaseException:
            pin.release()
            raise
        return AsyncPrefix(self, Prefix(model, beginning, tools, pin), tools)

    # ---- what it is

    @property
    def info(self) -> Info:
        return self.model.info

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        """Returns the tokens of a text, as luce.Model.encode does."""
        return self.model.encode(text, special=special, bos=bos)

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """Returns the text of tokens, as luce.Model.decode does."""
        return self.model.decode(tokens, special=special)


class AsyncPrefix:
    """A beginning that a model has read and keeps: luce.Prefix for asyncio."""

    def __init__(self, model: AsyncModel, prefix: Prefix, tools: Sequence[Mapping[str, Any]]):
        self._model, self._prefix, self._tools = model, prefix, tools
        self.beginning, self.kept_tokens = prefix.beginning, prefix.kept_tokens

    def stream(self, rest: str, *, schema: Schema | None = None, **how: Unpack[How]) -> AsyncStream:
        """Continues the beginning and `rest`."""
        return self._model.stream(self._prefix.text(rest), schema=schema, **how)

    @overload
    async def generate(self, rest: str, *, schema: Schema | None = None, **how: Unpack[How]) -> Answer: ...
    @overload
    async def generate(
        self, rest: list[str], *, schema: Schema | None = None, **how: Unpack[How]
    ) -> list[Answer]: ...

    async def generate(
        self, rest: str | list[str], *, schema: Schema | None = None, **how: Unpack[How]
    ) -> Answer | list[Answer]:
        """Continues the beginning and `rest` to the end; several are one batch."""
        if isinstance(rest, str):
            return await self._model.generate(self._prefix.text(rest), schema=schema, **how)
        return await self._model.generate([self._prefix.text(each) for each in rest], schema=schema, **how)

    async def chat(self, messages: Sequence[Message], **how: Unpack[HowReply]) -> Answer:
        """Answers the beginning and more messages, with its tools."""
        return await self.chat_stream(messages, **how).answer()

    def chat_stream(self, messages: Sequence[Message], **how: Unpack[HowReply]) -> AsyncStream:
        """Answers the beginning and more messages, and returns the pieces as they come."""
        require_known(how, HowReply)
        return self._model.chat_stream(self._prefix.messages(messages), tools=self._tools, **how)

    def close(self) -> None:
        """Lets the beginning be evicted; a second call does nothing."""
        self._prefix.close()

    async def __aenter__(self) -> AsyncPrefix:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


async def beside(make: Callable[[], T]) -> T:
    """Returns what `make` returns in a thread beside the event loop. Raises what it raises."""
    return await asyncio.get_running_loop().run_in_executor(None, make)


def _close_late(opening: asyncio.Future[Model]) -> None:
    """Closes a model that was opened for nobody."""
    if not opening.cancelled() and opening.exception() is None:
        Thread(target=opening.result().close, name="luce-close").start()
