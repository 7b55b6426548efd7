"""Routes: a body is read and bounded (api/body.py), becomes an Ask, and is answered (response.py)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from luce.server import page
from luce.server.access import LOOPBACK, OPEN, Access, Guarded, shared
from luce.server.api import about, anthropic, embeddings, infill, ollama, openai, responses
from luce.server.api.body import asked, ignored
from luce.server.api.choices import forms
from luce.server.api.fields import COUNT, HEADER, in_header
from luce.server.ask import Refused
from luce.server.log import Logged
from luce.server.models import Models, stopping
from luce.server.response import ErrorBody, Server, refusal, reply
from luce.server.unrouted import handlers, without_version
from luce.server.watch import Watch

__all__ = ["LOOPBACK", "Access", "make_app"]


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
            server.watch.log.defect(error)
            return refusal(Refused(500, f"{type(error).__name__}: {error}", "failed"), error_body)

    return Route(path, naming(server, endpoint), methods=methods)


def naming(
    server: Server, endpoint: Callable[[Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """Returns the endpoint with a header that names the body's fields that are unknown."""

    async def named(request: Request) -> Response:
        ignored.set(())
        response = await endpoint(request)
        if names := ignored.get():
            server.watch.unknown_fields(request.url.path, names)
            response.headers[HEADER] = in_header(names)
        return response

    return named


# ---- OpenAI's routes


async def chat_completions(server: Server, request: Request) -> Response:
    make = partial(openai.chat_ask, sees=server.models.sees)
    body, ask = await asked(request, openai.ChatBody, make)
    form = forms(openai.ChatForm, openai.usage_wanted(body))
    return await server.answer(request, ask, form, openai.error_body)


async def completions(server: Server, request: Request) -> Response:
    body, ask = await asked(request, openai.CompletionBody, openai.completion_ask)
    form = forms(openai.CompletionForm, openai.usage_wanted(body))
    return await server.answer(request, ask, form, openai.error_body)


# ---- Anthropic's


async def messages(server: Server, request: Request) -> Response:
    _, ask = await asked(request, anthropic.MessagesBody, partial(anthropic.messages_ask, sees=server.models.sees))
    return await server.answer(request, ask, anthropic.MessagesForm, anthropic.error_body)


async def count_tokens(server: Server, request: Request) -> Response:
    make = partial(anthropic.messages_ask, sees=server.models.sees)
    _, ask = await asked(request, anthropic.MessagesBody, make, COUNT)
    served = await server.models.get(ask.model)
    return reply({"input_tokens": await served.count(ask)})


# ---- the application


async def root(server: Server, request: Request) -> Response:
    """Shows browsers the page, and answers what Ollama's clients ask first."""
    if page.is_wanted(request):
        return page.response()
    return await ollama.alive(server, request)


class Draining:
    """Turns new requests away while the server ends; those that have begun go on. /health and /metrics are
    answered to the end."""

    def __init__(self, app: ASGIApp, models: Models):
        self._app, self._models = app, models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._models.draining and scope["path"] not in (*OPEN, "/metrics"):
            response = refusal(stopping(), error_body_of(scope["path"]))
            response.headers["Connection"] = "close"
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def make_app(models: Models, watch: Watch, access: Access) -> ASGIApp:
    """Returns the application, which closes the models at its end."""
    server = Server(models, watch)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await models.close()

    routes = [
        routed(server, "/v1/chat/completions", chat_completions, ["POST"]),
        routed(server, "/v1/completions", completions, ["POST"]),
        routed(server, "/infill", infill.infill, ["POST"]),
        routed(server, "/v1/embeddings", embeddings.embeddings, ["POST"]),
        routed(server, "/api/embed", embeddings.embed, ["POST"], ollama.error_body),
        routed(server, "/api/embeddings", embeddings.embedding, ["POST"], ollama.error_body),
        routed(server, "/v1/messages", messages, ["POST"], anthropic.error_body),
        routed(server, "/v1/messages/count_tokens", count_tokens, ["POST"], anthropic.error_body),
        routed(server, "/api/chat", ollama.chat, ["POST"], ollama.error_body),
        routed(server, "/api/generate", ollama.generate, ["POST"], ollama.error_body),
        routed(server, "/api/show", ollama.show, ["POST"], ollama.error_body),
        routed(server, "/api/tags", ollama.tags, ["GET"], ollama.error_body),
        routed(server, "/api/ps", ollama.ps, ["GET"], ollama.error_body),
        routed(server, "/", root, ["GET"], ollama.error_body),
        routed(server, "/api/version", ollama.version, ["GET"], ollama.error_body),
        *responses.routes(server, routed),
        *about.routes(server, routed),
    ]
    missing = handlers(routes, lambda path, refused: refusal(refused, error_body_of(path)))
    routed_all = [*routes, *without_version(routes)]
    app = Draining(Starlette(routes=routed_all, lifespan=lifespan, exception_handlers=missing), models)
    guarded = Guarded(app, access, lambda path, refused: refusal(refused, error_body_of(path)))
    return Logged(shared(guarded, access), watch.log)
