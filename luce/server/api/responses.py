"""Has OpenAI's /v1/responses: its body, answer and events. Nothing is stored between requests."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from luce.server.answer import Answer, Whole
from luce.server.api.openai import Form, Held, choice_of, error_body, held_to, length_of, tool_of, within
from luce.server.ask import Ask, Message, Refused, call_of, refuse, text_of, thinking, typed
from luce.text.pieces import Arguments, CallBegin, CallEnd, Piece, Reasoning, Text

# This stands before thoughts that come back as encrypted_content: they are no secret, only text.
SEALED = "luce:"


class ResponsesBody(Held, kw_only=True):
    REFUSED: ClassVar = ("prompt",)

    input: str | list[dict[str, Any]]
    model: str = ""
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None


def responses_ask(body: ResponsesBody) -> Ask:
    """Returns the request of a body. Raises Refused where it asks for what is not there."""
    for name in ("previous_response_id", "conversation", "background", "top_logprobs"):
        if getattr(body, name):
            raise refuse(f"{name} is not supported: send the whole conversation as input", name)
    if "message.output_text.logprobs" in (body.include or ()):
        raise refuse("logprobs are not supported here: /v1/chat/completions has them", "include")
    messages: list[Message] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    messages += _messages(items)
    if not messages:
        raise refuse("input is empty", "input")
    tools = [tool_of(tool) for tool in body.tools or () if tool.get("type") == "function"]
    form = typed((body.text or {}).get("format"), dict[str, Any] | None, "text")
    return Ask(
        model=body.model,
        messages=messages,
        tools=tools,
        choice=choice_of(body.tool_choice, tools),
        parallel_calls=body.parallel_tool_calls is not False,
        max_tokens=length_of(body.max_output_tokens),
        sampling=within(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, min_p=body.min_p,
                        seed=body.seed),
        variables=thinking((body.reasoning or {}).get("effort")),
        stream=bool(body.stream),
        **held_to(body, **{"text.format": form}),
    )  # fmt: skip


def _messages(items: list[dict[str, Any]]) -> list[Message]:
    """Returns items as messages. Thoughts, text and calls that follow each other are one message of the
    assistant."""
    found: list[Message] = []

    def assistant(new: bool) -> Message:
        if new or not found or found[-1]["role"] != "assistant":
            found.append({"role": "assistant", "content": ""})
        return found[-1]

    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            role, text = item.get("role"), text_of(item.get("content"), "input")
            if role not in ("user", "assistant", "system", "developer"):
                raise refuse(f"{role!r} is no role", "input")
            if role != "assistant":
                found.append({"role": role, "content": text})
                continue
            last = assistant(new=False)
            if last["content"] or "tool_calls" in last:
                last = assistant(new=True)
            last["content"] = text
        elif kind == "reasoning":
            if text := _thought(item):
                assistant(new=True)["reasoning_content"] = text
        elif kind == "function_call":
            call = call_of(str(item.get("name")), item.get("arguments"), item.get("call_id"))
            assistant(new=False).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            text = text_of(item.get("output"), "input")
            found.append({"role": "tool", "content": text, "tool_call_id": item.get("call_id")})
        else:
            raise refuse(f"an item of type {kind!r} is not supported", "input")
    return found


def _thought(item: Mapping[str, Any]) -> str:
    """Returns the thoughts of a reasoning item as they were: from its content, or from its
    encrypted_content."""
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str) and sealed.startswith(SEALED):
        try:
            return base64.b64decode(sealed[len(SEALED) :], validate=True).decode()
        except ValueError:
            return ""
    parts = typed(item.get("content"), list[Any] | None, "input")
    return "".join(str(part.get("text", "")) for part in parts or () if isinstance(part, Mapping))


class ResponsesForm(Form):
    """This is the form of /v1/responses."""

    def __init__(self, answer: Answer, body: ResponsesBody):
        super().__init__(answer)
        self._id, self._body = _id("resp"), body
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
            "parallel_tool_calls": ask.parallel_calls,
            "previous_response_id": None,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "store": False,
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
        return self._response(
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
