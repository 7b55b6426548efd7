"""Routes: a body is read and bounded, becomes an Ask, and its Answer goes back whole or as a stream."""

from __future__ import annotations

import asyncio
import hmac
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from luce.server.answer import Answer, Silence, Whole
from luce.server.api import about, anthropic, ollama, openai, responses
from luce.server.ask import Ask, Refused
from luce.server.body import read, reply
from luce.server.models import Models, closing
from luce.server.stored import Stored
from luce.server.unrouted import handlers, without_version
from luce.server.watch import Watch

LOOPBACK = ("127.0.0.1", "localhost", "::1")

ErrorBody = Callable[[Refused], dict[str, Any]]


class Form(Protocol):
    """Says how an API spells an answer."""

    media_type: str

    def whole(self, all: Whole) -> dict[str, Any]: ...
    def begin(self) -> Any: ...
    def piece(self, piece: Any) -> Any: ...
    def silence(self) -> bytes: ...
    def end(self) -> Any: ...
    def failed(self, refused: Refused) -> Any: ...


@dataclass(frozen=True)
class Access:
    """Says who may ask. `keys` holds the keys of which any is enough; empty, everyone may ask. `hosts` holds
    the names of this machine that a request may be for, which keeps out web pages that rebind a name; empty,
    any name will do."""

    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = LOOPBACK


class Server:
    """This is what the routes share."""

    def __init__(self, models: Models, watch: Watch):
        self.models, self.watch, self.stored = models, watch, Stored()
        self.started = int(time.time())

    async def answer(
        self, request: Request, ask: Ask, form: Callable[[Answer], Form], error_body: ErrorBody
    ) -> Response:
        """Returns the response to an ask."""
        if not ask.model:
            ask = replace(ask, model=self.models.name_of(""))
        answer = Answer(await self.models.get(ask.model), ask, self.watch)
        try:
            await answer.begin()
            shape = form(answer)
        except BaseException as error:
            answer.end(error.kind if isinstance(error, Refused) else "failed")
            raise
        if ask.stream:
            headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            stream = _stream(answer, shape)
            return StreamingResponse(stream, media_type=shape.media_type, headers=headers)
        try:
            whole = await _or_gone(request, _collect(answer))
            return reply(shape.whole(whole))
        except Refused as refused:
            answer.end(refused.kind)
            raise
        finally:
            answer.end()


async def _collect(answer: Answer) -> Whole:
    whole = Whole()
    async with aclosing(answer.pieces()) as pieces:
        async for piece in pieces:
            whole.add(piece)
    return whole


async def _stream(answer: Answer, form: Form) -> AsyncIterator[bytes]:
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


async def _or_gone(request: Request, work: Awaitable[Whole]) -> Whole:
    """Returns the result of `work`, unless the client goes away before."""
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
    headers = {"Retry-After": str(refused.retry_after)} if refused.retry_after else {}
    return reply(error_body(refused), refused.status, headers)


def error_body_of(path: str) -> ErrorBody:
    """Returns the form in which the API of a path has its errors."""
    if path.removeprefix("/v1").startswith("/messages"):
        return anthropic.error_body
    return ollama.error_body if path.startswith("/api/") else openai.error_body


Handler = Callable[[Server, Request], Awaitable[Response]]


def routed(
    server: Server, path: str, handler: Handler, methods: list[str], error_body: ErrorBody = openai.error_body
) -> Route:
    """Makes a route whose refusals have the form of its API."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(server, request)
        except Refused as refused:
            return refusal(refused, error_body)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            # It is a defect: the client is told in its own form, and the rest goes on.
            traceback.print_exc()
            return refusal(Refused(500, f"{type(error).__name__}: {error}", "failed"), error_body)

    return Route(path, endpoint, methods=methods)


# ---- OpenAI's routes


async def chat_completions(server: Server, request: Request) -> Response:
    body = await read(request, openai.ChatBody)
    usage = openai.usage_wanted(body)
    ask = openai.chat_ask(body)
    return await server.answer(request, ask, lambda a: openai.ChatForm(a, usage), openai.error_body)


async def completions(server: Server, request: Request) -> Response:
    body = await read(request, openai.CompletionBody)
    usage, ask = openai.usage_wanted(body), openai.completion_ask(body)
    before = ""
    if body.echo:
        model = await server.models.get(ask.model)
        before = ask.prompt if isinstance(ask.prompt, str) else model.tokenizer.decode(ask.prompt or ())
    return await server.answer(
        request, ask, lambda a: openai.CompletionForm(a, usage, before), openai.error_body
    )


# ---- Anthropic's


async def messages(server: Server, request: Request) -> Response:
    ask = anthropic.messages_ask(await read(request, anthropic.MessagesBody))
    return await server.answer(request, ask, anthropic.MessagesForm, anthropic.error_body)


async def count_tokens(server: Server, request: Request) -> Response:
    ask = anthropic.messages_ask(await read(request, anthropic.MessagesBody))
    served = await server.models.get(ask.model)
    return reply({"input_tokens": len(await served.prompt(ask))})


class Guarded:
    """Turns away requests without a key and web pages of other sites."""

    def __init__(self, app: ASGIApp, access: Access):
        self._app = app
        self._keys = [key.encode() for key in access.keys]
        self._hosts = access.hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refused := self._refused(scope)):
            body = error_body_of(scope["path"])(refused)
            await reply(body, refused.status)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refused(self, scope: Scope) -> Refused | None:
        headers = {name: value for name, value in scope["headers"]}
        if self._hosts:
            origin = headers.get(b"origin", b"").decode("latin-1")
            origin = origin.partition("://")[2] or origin  # That of a page without a site is "null".
            for name in (headers.get(b"host", b"").decode("latin-1"), origin):
                if name and _host(name) not in self._hosts:
                    return Refused(403, f"requests for {name!r} are not answered here", "forbidden")
        if self._keys and scope["path"] != "/health":
            bearer = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
            given = bearer or headers.get(b"x-api-key", b"")
            matches = [hmac.compare_digest(given, key) for key in self._keys]
            if not any(matches):
                return Refused(401, "the API key is missing or wrong", "auth")
        return None


def _host(name: str) -> str:
    """Returns the host without its port: "[::1]:8080" gives "::1"."""
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].lower()


def make_app(models: Models, watch: Watch, access: Access) -> ASGIApp:
    """Returns the application, which closes the models at its end."""
    server = Server(models, watch)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await closing(models.close)

    routes = [
        routed(server, "/v1/chat/completions", chat_completions, ["POST"]),
        routed(server, "/v1/completions", completions, ["POST"]),
        routed(server, "/v1/messages", messages, ["POST"], anthropic.error_body),
        routed(server, "/v1/messages/count_tokens", count_tokens, ["POST"], anthropic.error_body),
        routed(server, "/api/chat", ollama.chat, ["POST"], ollama.error_body),
        routed(server, "/api/generate", ollama.generate, ["POST"], ollama.error_body),
        routed(server, "/api/show", ollama.show, ["POST"], ollama.error_body),
        routed(server, "/api/tags", ollama.tags, ["GET"], ollama.error_body),
        routed(server, "/api/ps", ollama.ps, ["GET"], ollama.error_body),
        routed(server, "/", ollama.alive, ["GET"], ollama.error_body),
        routed(server, "/api/version", ollama.version, ["GET"], ollama.error_body),
        *responses.routes(server, routed),
        *about.routes(server, routed),
    ]
    missing = handlers(routes, lambda path, refused: refusal(refused, error_body_of(path)))
    routed_all = [*routes, *without_version(routes)]
    return Guarded(Starlette(routes=routed_all, lifespan=lifespan, exception_handlers=missing), access)
