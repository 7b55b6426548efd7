"""Routes that say what is served, count tokens and show metrics."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import luce
from luce.server.api.body import Body, asked, read
from luce.server.api.fields import DETOKENIZE, TEMPLATE, TOKENIZE
from luce.server.api.openai import ChatBody, chat_ask
from luce.server.ask import Refused
from luce.server.response import Server, reply

STATES = {
    "loading": "the model is being loaded: requests wait for it",
    "draining": "the server is shutting down",
    "failed": "the device of a model has failed",
}


class TokenizeBody(Body, kw_only=True):
    API: ClassVar = TOKENIZE

    content: str | None = None
    model: str = ""
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Body, kw_only=True):
    API: ClassVar = DETOKENIZE

    tokens: list[int]
    model: str = ""


def model_of(name: str, server: Server) -> dict[str, Any]:
    """Returns a model as /v1/models lists it."""
    slot = server.models.slots[name]
    served = slot.served
    found: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": server.started,
        "owned_by": "luce",
        "loaded": served is not None,
        "state": slot.state,
        "last_used_ms": int(slot.used * 1000) or None,
        # As llama.cpp says it.
        "architecture": {
            "input_modalities": ["text", "image"] if server.models.sees else ["text"],
            "output_modalities": ["text"],
        },
    }
    if served is not None:
        found["max_model_len"] = served.info.n_ctx
        found["replicas"] = [each.as_json() for each in served.replicas.all]
        found["meta"] = {
            "n_ctx": served.info.n_ctx,
            "n_ctx_train": served.facts.context_length,
            "n_vocab": served.tokenizer.n_vocab,
            "n_embd": served.facts.embedding_length,
            "n_params": served.facts.parameters,
            "size": served.facts.size_bytes,
        }
    return found


async def list_models(server: Server, request: Request) -> Response:
    return reply({"object": "list", "data": [model_of(name, server) for name in server.models.slots]})


async def one_model(server: Server, request: Request) -> Response:
    name = request.path_params["name"]
    if name not in server.models.slots:
        name = name.removesuffix(":latest")
    if name not in server.models.slots:
        raise Refused(404, f"model {name!r} is not served here", "not_found", "model")
    return reply(model_of(name, server))


async def health(server: Server, request: Request) -> Response:
    """Says how the server is: 200 and "ok" where it answers, with the replicas that are left out, if any are; else
    503 and "loading", "draining" or "failed"."""
    state = server.models.state
    if state == "ready":  # llama.cpp's clients look for this word.
        failed = server.models.left_out
        return reply({"status": "ok", "state": state} | ({"left_out": failed} if failed else {}))
    retry = {} if state == "failed" else {"Retry-After": "5"}
    error = {"code": 503, "message": STATES[state], "type": "unavailable_error"}
    return reply({"status": state, "state": state, "error": error}, 503, retry)


async def metrics(server: Server, request: Request) -> Response:
    return Response(server.watch.scrape(server.models), media_type=CONTENT_TYPE_LATEST)


async def props(server: Server, request: Request) -> Response:
    """Returns the settings of requests that say nothing of them."""
    asked = request.query_params.get("model") or next(iter(server.models.slots))
    served = await server.models.get(asked)
    return reply(
        {
            "model_alias": server.models.name_of(asked),
            "build_info": f"luce {luce.__version__}",
            "total_slots": served.n_sequences,
            "replicas": [each.as_json() for each in served.replicas.all],
            "chat_template": served.template_source,
            "modalities": {"vision": server.models.sees, "audio": False},
            "default_generation_settings": {
                "n_ctx": served.info.n_ctx,
                "params": served.defaults | served.penalties,
            },
            "speculation": served.first.engine.plan.as_json()["draft"],
        }
    )


async def tokenize(server: Server, request: Request) -> Response:
    body = await read(request, TokenizeBody)
    text, special, bos = body.content, bool(body.parse_special), bool(body.add_special)
    if text is None:
        raise Refused(400, "content is missing", param="content")
    served = await server.models.get(body.model)

    def make() -> Response:
        tokens = served.tokenizer.encode(text, special=special, add_bos=bos)
        if not body.with_pieces:
            return reply({"tokens": tokens, "count": len(tokens)})
        pieces = ((token, served.tokenizer.bytes_of(token, special=True)) for token in tokens)
        listed = [{"id": id, "piece": _piece(raw)} for id, raw in pieces]
        return reply({"tokens": listed, "count": len(tokens)})

    return await served.in_thread(make, len(text))


def _piece(raw: bytes) -> str | list[int]:
    """Returns the bytes of a token as text, or as numbers where they are a part of a character."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


async def detokenize(server: Server, request: Request) -> Response:
    body = await read(request, DetokenizeBody)
    served = await server.models.get(body.model)
    tokens, n_vocab = body.tokens, served.tokenizer.n_vocab
    if tokens and not 0 <= min(tokens) <= max(tokens) < n_vocab:
        raise Refused(400, f"a token is none of {n_vocab}", param="tokens")

    def make() -> Response:
        return reply({"content": served.tokenizer.decode(tokens, special=True)})

    return await served.in_thread(make, 8 * len(tokens))


async def apply_template(server: Server, request: Request) -> Response:
    _, ask = await asked(request, ChatBody, partial(chat_ask, sees=server.models.sees), TEMPLATE)
    served = await server.models.get(ask.model)
    tokens = await served.prompt(ask)

    def make() -> Response:
        return reply({"prompt": served.tokenizer.decode(tokens, special=True), "tokens": tokens})

    return await served.in_thread(make, ask.size)


def routes(server: Server, routed: Callable[..., Route]) -> list[Route]:
    """Returns these routes, on a server."""
    return [
        routed(server, "/v1/models", list_models, ["GET"]),
        routed(server, "/models", list_models, ["GET"]),
        routed(server, "/v1/models/{name:path}", one_model, ["GET"]),
        routed(server, "/health", health, ["GET"]),
        routed(server, "/v1/health", health, ["GET"]),
        routed(server, "/metrics", metrics, ["GET"]),
        routed(server, "/props", props, ["GET"]),
        routed(server, "/tokenize", tokenize, ["POST"]),
        routed(server, "/detokenize", detokenize, ["POST"]),
        routed(server, "/apply-template", apply_template, ["POST"]),
    ]
