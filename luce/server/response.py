"""Turns an Ask into a response: its answer whole, or as a stream of events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from luce.server.answer import Answer, Silence
from luce.server.ask import Ask, Refused
from luce.server.lanes import TOKEN, beside
from luce.server.log import noted
from luce.server.models import Models
from luce.server.several import Several, answer_to
from luce.server.stored import Stored
from luce.server.watch import Watch

T = TypeVar("T")
ErrorBody = Callable[[Refused], dict[str, Any]]


def reply(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


class Form(Protocol):
    """Says how an API spells an answer."""

    media_type: str

    def whole(self, all: Any) -> dict[str, Any]: ...
    def begin(self) -> Any: ...
    def piece(self, piece: Any) -> Any: ...
    def silence(self) -> bytes: ...
    def end(self) -> Any: ...
    def failed(self, refused: Refused) -> Any: ...


class Server:
    """This is what the routes share."""

    def __init__(self, models: Models, watch: Watch):
        self.models, self.watch, self.stored = models, watch, Stored()
        self.started = int(time.time())

    async def answer(
        self, request: Request, ask: Ask, form: Callable[[Any], Form], error_body: ErrorBody
    ) -> Response:
        """Returns the response to an ask."""
        if not ask.model:
            ask = replace(ask, model=self.models.name_of(""))
        answer, shape = await _or_gone(request, self._begun(ask, form))
        if ask.stream:
            return Stream(answer, shape)
        try:
            whole = await _or_gone(request, answer.collect())
            return await beside(TOKEN * answer.values, lambda: reply(shape.whole(whole)))
        except Refused as refused:
            answer.end(refused.kind)
            raise
        finally:
            answer.end()

    async def _begun(self, ask: Ask, form: Callable[[Any], Form]) -> tuple[Answer | Several, Form]:
        """Returns the answer that the engine has begun with, and its form."""
        answer = answer_to(await self.models.get(ask.model), ask, self.watch)
        try:
            await answer.begin()
            return answer, form(answer)
        except BaseException as error:
            gone = isinstance(error, asyncio.CancelledError)
            answer.end(error.kind if isinstance(error, Refused) else "gone" if gone else "failed")
            raise


class Stream(StreamingResponse):
    """An answer as events. However it ends, also where it never begins since the client is gone, so does what
    is generated for it."""

    def __init__(self, answer: Answer | Several, form: Form):
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        self._answer, self._events = answer, _stream(answer, form)
        super().__init__(self._events, media_type=form.media_type, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            self._answer.end()


async def _stream(answer: Answer | Several, form: Form) -> AsyncGenerator[bytes, None]:
    """Yields the events of an answer, of which one is always the last. Where the client goes away, the
    answer is cancelled."""
    try:
        for event in form.begin():
            yield event
        async with aclosing(answer.pieces()) as pieces:
            async for piece in pieces:
                if isinstance(piece, Silence):
                    yield form.silence()
                    continue
                for event in form.piece(piece):
                    yield event
        for event in form.end():
            yield event
    except Refused as refused:
        answer.end(refused.kind)
        for event in form.failed(refused):
            yield event
    finally:
        answer.end()


async def _or_gone(request: Request, work: Awaitable[T]) -> T:
    """Returns the result of `work`, unless the client goes away before: ClientDisconnect is raised then."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def refusal(refused: Refused, error_body: ErrorBody) -> Response:
    """Returns the response to a request that is not answered, and notes why for its line in the log."""
    if record := noted():
        record.error = refused.kind
    headers = {"Retry-After": str(refused.retry_after)} if refused.retry_after else {}
    return reply(error_body(refused), refused.status, headers)
