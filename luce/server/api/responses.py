"""OpenAI's /v1/responses: its body, answer and events, and the responses that were stored."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from luce.server.answer import Answer
from luce.server.api.body import asked
from luce.server.api.fields import RESPONSES
from luce.server.api.items import (
    SEALED,
    Item,
    configured,
    declared,
    is_finished,
    kind_of,
    messages_of,
)
from luce.server.api.openai import (
    Form,
    Talk,
    choice_of,
    error_body,
    held_to,
    length_of,
    may_call_twice,
    sampled,
    thought,
    tool_of,
)
from luce.server.ask import Ask, Message, Refused, continued, refuse, typed
from luce.server.lanes import beside
from luce.server.response import Server, reply
from luce.server.stored import Stored
from luce.text.pieces import Arguments, CallBegin, CallEnd, Piece, Reasoning, Text, Whole


class ResponsesBody(Talk, kw_only=True):
    API: ClassVar = RESPONSES

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    include: list[str] | None = None


def references(body: ResponsesBody) -> list[str]:
    """Returns the ids of the items that a body refers to."""
    items = body.input if isinstance(body.input, list) else []
    return [typed(item.get("id"), str, "input") for item in items if kind_of(item) == "item_reference"]


def conversation_of(body: ResponsesBody, stored: Stored) -> tuple[list[Item], list[Item]]:
    """Returns the items that a request goes on from, and those that it brings, with what they refer to in
    place of references. Raises Refused where something is not kept."""
    turns = stored.turns(body.previous_response_id) if body.previous_response_id else []
    before = [item for turn in turns for item in [*turn.input, *turn.output]]
    if isinstance(body.input, str):
        return before, [{"role": "user", "content": body.input}]
    known = {item["id"]: item for kept in stored.holders(references(body)) for item in kept.output}
    return before, [known[item["id"]] if kind_of(item) == "item_reference" else item for item in body.input]


def size_of(body: ResponsesBody, stored: Stored) -> int:
    """Returns the bytes of what a request refers to. Raises as conversation_of does."""
    turns = stored.turns(body.previous_response_id) if body.previous_response_id else []
    return sum(kept.size for kept in [*turns, *stored.holders(references(body))])


def responses_ask(body: ResponsesBody, items: list[Item] | None = None, sees: bool = False) -> Ask:
    """Returns the request of a body, to a model that `sees` images or not, whose conversation are `items`, or those of
    the body alone. Raises Refused where it asks for what is not there."""
    if "message.output_text.logprobs" in (body.include or ()):
        raise refuse("logprobs are not supported here: /v1/chat/completions has them", "include")
    if items is None:
        items = conversation_of(body, Stored())[1]
    messages: list[Message] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages += messages_of(items, sees)
    if not messages:
        raise refuse("input is empty", "input")
    functions = [tool for tool in body.tools or () if tool.get("type") == "function"]
    tools = {tool.name: tool for tool in map(tool_of, [*functions, *declared(items)])}
    choice, allowed = choice_of(body.tool_choice, [*tools.values()])
    form = typed((configured(items, "text", body.text) or {}).get("format"), dict[str, Any] | None, "text")
    held = held_to(body, **{"text.format": form})
    whole = held["constraint"] is not None or choice not in ("auto", "none")
    messages, continues = continued(messages, False if is_finished(items) else None, whole=whole)
    return Ask(
        messages=messages,
        tools=allowed,
        choice=choice,
        parallel_calls=may_call_twice(body.parallel_tool_calls, choice),
        max_tokens=length_of(body.max_output_tokens),
        continues=continues,
        **held,
        **sampled(body),
        **thought(body, (configured(items, "reasoning", body.reasoning) or {}).get("effort")),
    )


class ResponsesForm(Form):
    """Form of /v1/responses. `keep` takes the response at its end."""

    def __init__(
        self, answer: Answer, body: ResponsesBody, keep: Callable[[dict[str, Any]], None] | None = None
    ):
        super().__init__(answer)
        self._id, self._body, self._keep = _id("resp"), body, keep
        self._number = 0  # The next event has this number.
        self._output: list[dict[str, Any]] = []  # These items are done.
        self._item: dict[str, Any] | None = None  # This item is open.
        self._text = ""  # It is the open item's text.

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        body, ask = self._body, self.answer.ask
        return {
            "id": self._id,
            "object": "response",
            "created_at": self.answer.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": ask.model,
            "output": list(self._output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "store": self._keep is not None,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool for tool in body.tools or () if tool.get("type") == "function"],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": {},
        } | more

    def _ended(self) -> dict[str, Any]:
        answer, usage = self.answer, self.answer.usage
        cut = answer.reason == "length"
        ended = self._response(
            "incomplete" if cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            usage={
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.prompt + usage.completion,
            },
            timings=answer.timings(),
        )
        if self._keep is not None:
            self._keep(ended)
        return ended

    def whole(self, all: Whole) -> dict[str, Any]:
        if all.reasoning:
            self._output.append(_done(_reasoning(), all.reasoning))
        if all.text or not all.calls:
            self._output.append(_done(_message(), all.text))
        self._output += [_done(_call(call.name), call.arguments) for call in all.calls]
        return self._ended()

    def _event(self, kind: str, **values: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **values}
        self._number += 1
        return self.sse(event, kind)

    def begin(self) -> Iterator[bytes]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def _at(self, content: bool = True) -> dict[str, Any]:
        """Returns where the open item is."""
        assert self._item is not None
        at = {"item_id": self._item["id"], "output_index": len(self._output)}
        return at | {"content_index": 0} if content else at

    def _start(self, item: dict[str, Any]) -> Iterator[bytes]:
        yield from self._stop()
        self._item, self._text = item, ""
        yield self._event("response.output_item.added", output_index=len(self._output), item=item)
        if item["type"] == "message":
            yield self._event("response.content_part.added", **self._at(), part=_part(""))

    def _stop(self, status: str = "completed") -> Iterator[bytes]:
        item, text = self._item, self._text
        if item is None:
            return
        if item["type"] == "message":
            yield self._event("response.output_text.done", **self._at(), text=text, logprobs=[])
            yield self._event("response.content_part.done", **self._at(), part=_part(text))
        elif item["type"] == "reasoning":
            yield self._event("response.reasoning_text.done", **self._at(), text=text)
        elif status == "completed":
            yield self._event(
                "response.function_call_arguments.done", **self._at(False), name=item["name"], arguments=text
            )
        done = _done(item, text) | {"status": status}
        yield self._event("response.output_item.done", output_index=len(self._output), item=done)
        self._output.append(done)
        self._item = None

    def _is_open(self, kind: str) -> bool:
        return self._item is not None and self._item["type"] == kind

    def piece(self, piece: Piece) -> Iterator[bytes]:
        match piece:
            case Reasoning(text):
                if not self._is_open("reasoning"):
                    yield from self._start(_reasoning())
                self._text += text
                yield self._event("response.reasoning_text.delta", **self._at(), delta=text)
            case Text(text):
                if not self._is_open("message"):
                    yield from self._start(_message())
                self._text += text
                yield self._event("response.output_text.delta", **self._at(), delta=text, logprobs=[])
            case CallBegin(name):
                yield from self._start(_call(name))
            case Arguments(text):
                self._text += text
                yield self._event("response.function_call_arguments.delta", **self._at(False), delta=text)
            case CallEnd(whole):
                yield from self._stop("completed" if whole else "incomplete")

    def end(self) -> Iterator[bytes]:
        if not self._output and self._item is None:  # An answer without a word is a message too.
            yield from self._start(_message())
        yield from self._stop()
        ended = self._ended()
        yield self._event(f"response.{ended['status']}", response=ended)

    def failed(self, refused: Refused) -> Iterator[bytes]:
        error = error_body(refused)["error"]
        told = {"code": error["code"] or "server_error", "message": refused.message}
        yield self._event("response.failed", response=self._response("failed", error=told))


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message() -> dict[str, Any]:
    return {"id": _id("msg"), "type": "message", "status": "in_progress", "role": "assistant", "content": []}


def _reasoning() -> dict[str, Any]:
    return {"id": _id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": []}


def _call(name: str) -> dict[str, Any]:
    return {"id": _id("fc"), "type": "function_call", "status": "in_progress", "call_id": _id("call"),
            "name": name, "arguments": ""}  # fmt: skip


def _done(item: dict[str, Any], text: str) -> dict[str, Any]:
    """Returns an item with its text."""
    done = item | {"status": "completed"}
    if item["type"] == "message":
        return done | {"content": [_part(text)]}
    if item["type"] == "reasoning":
        sealed = SEALED + base64.b64encode(text.encode()).decode()
        return done | {"content": [{"type": "reasoning_text", "text": text}], "encrypted_content": sealed}
    return done | {"arguments": text}


# ---- routes


async def make_response(server: Server, request: Request) -> Response:
    stored, brought = server.stored, b""

    def whole(body: ResponsesBody) -> Ask:
        nonlocal brought
        before, items = conversation_of(body, stored)
        if body.store is not False:
            brought = msgspec.json.encode(items)
        return responses_ask(body, [*before, *items], server.models.sees)

    def begun(body: ResponsesBody) -> Ask:
        """What is referred to may be larger than the body: it is read beside, as its size asks for."""
        return Ask(model=body.model) if size_of(body, stored) else whole(body)

    body, ask = await asked(request, ResponsesBody, begun)
    if more := size_of(body, stored):
        size = ask.size + more
        ask = replace(await beside(size, lambda: whole(body)), size=size)

    def keep(response: dict[str, Any]) -> None:
        stored.keep(response, brought)

    kept = keep if body.store is not False else None
    return await server.answer(request, ask, lambda answer: ResponsesForm(answer, body, kept), error_body)


async def get_response(server: Server, request: Request) -> Response:
    kept = server.stored.get(request.path_params["id"])
    return Response(kept.response, media_type="application/json")


async def delete_response(server: Server, request: Request) -> Response:
    server.stored.delete(request.path_params["id"])
    return reply({"id": request.path_params["id"], "object": "response", "deleted": True})


async def list_input_items(server: Server, request: Request) -> Response:
    """Lists what a response's request brought, the newest first unless `order` is asc, in pages of `limit`.
    """
    kept = server.stored.get(request.path_params["id"])
    items = await beside(kept.size, lambda: [_listed(item, n) for n, item in enumerate(kept.input)])
    query = request.query_params
    if query.get("order", "desc") != "asc":
        items.reverse()
    limit = query.get("limit", "20")
    if not limit.isdecimal() or not 1 <= int(limit) <= 100:
        raise refuse(f"limit is {limit!r}: it has to be from 1 to 100", "limit")
    after = next((n for n, item in enumerate(items, 1) if item["id"] == query.get("after")), 0)
    page = items[after : after + int(limit)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    more = after + int(limit) < len(items)
    return reply({"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more})


def _listed(item: Item, n: int) -> Item:
    """Returns an item of a request as lists have it: with an id, and its text in parts."""
    found = {"type": kind_of(item), "id": f"item_{n}"} | {key: value for key, value in item.items() if value}
    if isinstance(found.get("content"), str) and found["type"] == "message":
        kind = "output_text" if found.get("role") == "assistant" else "input_text"
        found["content"] = [{"type": kind, "text": found["content"]}]
    return found


def routes(server: Server, routed: Callable[..., Route]) -> list[Route]:
    """Returns these routes, on a server."""
    return [
        routed(server, "/v1/responses", make_response, ["POST"]),
        routed(server, "/v1/responses/{id}", get_response, ["GET"]),
        routed(server, "/v1/responses/{id}", delete_response, ["DELETE"]),
        routed(server, "/v1/responses/{id}/input_items", list_input_items, ["GET"]),
    ]
