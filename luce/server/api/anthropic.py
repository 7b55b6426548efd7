"""Has Anthropic's /v1/messages and /v1/messages/count_tokens: their bodies, answers and events."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from luce.server.answer import Answer
from luce.server.api.body import Body
from luce.server.api.fields import MESSAGES
from luce.server.api.openai import Form, held_to, left_out, stops_of, tool_of, within
from luce.server.ask import Ask, Message, Refused, TooLong, budget_of, continued, keep_of, refuse
from luce.server.ask import thinking as thinking_of
from luce.server.content import content_of, require_readable, text_of, thoughts_of, told_of
from luce.text.conversation import call_of
from luce.text.pieces import Arguments, CallBegin, CallEnd, Piece, Reasoning, Text, Whole
from luce.text.tool import Tool

REASONS = {"stop": "end_turn", "stop_string": "stop_sequence", "length": "max_tokens", "calls": "tool_use"}
KINDS = {
    "not_found": "not_found_error", "no_route": "not_found_error", "busy": "overloaded_error",
    "auth": "authentication_error",
    "forbidden": "permission_error", "too_large": "request_too_large", "failed": "api_error",
}  # fmt: skip
BILLING = "x-anthropic-billing-header"  # A first system block begins so, with a line that changes.
SIGNATURE = "luce"  # Thoughts have it, since clients drop or rewrite those without one.


class MessagesBody(Body, kw_only=True):
    API: ClassVar = MESSAGES

    messages: list[dict[str, Any]]
    model: str = ""
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    prefill: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None  # It is the older place of output_config's format.


def messages_ask(body: MessagesBody, sees: bool = False) -> Ask:
    """Returns the request of a body, to a model that `sees` images or not. Raises
    Refused where it asks for what is not there."""
    if not body.messages:
        raise refuse("messages: at least one is needed", "messages")
    if body.max_tokens is not None and body.max_tokens < 1:
        raise refuse(f"max_tokens is {body.max_tokens}: at least 1", "max_tokens")
    messages: list[Message] = []
    if system := _system(body.system):
        messages.append({"role": "system", "content": system})
    if not sees:
        require_readable([(str(each.get("role")), each.get("content")) for each in body.messages], "messages")
    for message in body.messages:
        messages += _messages(message, sees)
    tools = [tool_of(tool, "input_schema") for tool in body.tools or () if "input_schema" in tool]
    choice, parallel = _choice(body.tool_choice, tools)
    config = body.output_config or {}
    enabled = (body.thinking or {}).get("type") in ("enabled", "adaptive")
    variables = thinking_of(config.get("effort") if enabled else None, enabled)
    budget = budget_of((body.thinking or {}).get("budget_tokens") if enabled else None, "budget_tokens")
    if budget is not None:
        variables["thinking_budget"] = budget
    held = held_to(None, **{"output_config.format": config.get("format"), "output_format": body.output_format})
    prefilled = body.messages[-1].get("role") == "assistant"
    whole = held["constraint"] is not None or choice not in ("auto", "none")
    messages, continues = continued(messages, prefilled or None, whole=whole)
    return Ask(
        model=body.model,
        messages=messages,
        tools=tools,
        choice=choice,
        parallel_calls=parallel,
        max_tokens=body.max_tokens,
        sampling=within(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k),
        stops=stops_of(body.stop_sequences),
        variables=variables,
        budget=budget,
        stream=bool(body.stream),
        continues=continues,
        outright=body.thinking is not None,
        **keep_of(body.prefill),
        **held,
    )


def _system(system: str | list[dict[str, Any]] | None) -> str:
    """Returns the system text as one, without what changes at each call."""
    blocks = [system] if isinstance(system, str) else [text_of([block], "system") for block in system or ()]
    told = [block.partition("\n")[2] if block.startswith(BILLING) else block for block in blocks]
    return "\n".join(filter(None, told))


def _messages(message: Mapping[str, Any], sees: bool) -> list[Message]:
    """Returns a message as templates take it. The answers of tools are messages of their own, before the
    text."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise refuse(f"{role!r} is no role", "messages")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    told: list[Any] = []
    calls: list[dict[str, Any]] = []
    answers: list[Message] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use":
            calls.append(call_of(str(block.get("name")), block.get("input") or {}, block.get("id")))
        elif kind == "tool_result":
            told_by = told_of(block.get("content"), "messages", sees)
            answers.append({"role": "tool", "content": told_by, "tool_call_id": block.get("tool_use_id")})
        elif kind != "redacted_thinking":
            told.append(block)
    found: Message = {"role": role, "content": content_of(told, "messages", sees, "\n", role)}
    if role == "assistant" and (thought := thoughts_of(told)):
        found["reasoning_content"] = thought
    if calls:
        found["tool_calls"] = calls
    return [*answers, found] if told or calls or not answers else answers


def _choice(choice: Mapping[str, Any] | None, tools: list[Tool]) -> tuple[str, bool]:
    kind = (choice or {}).get("type", "auto")
    parallel = not (choice or {}).get("disable_parallel_tool_use")
    if kind == "tool":
        name = (choice or {}).get("name")
        if name not in [tool.name for tool in tools]:
            raise refuse(f"tool_choice names {name!r}, which is no tool", "tool_choice")
        return str(name), parallel
    if kind == "any" and not tools:
        raise refuse("tool_choice requires a call, but there are no tools", "tool_choice")
    if kind not in ("auto", "any", "none"):
        raise refuse(f"tool_choice {kind!r} is none of auto, any, tool, none", "tool_choice")
    return "required" if kind == "any" else kind, parallel


def error_body(refused: Refused) -> dict[str, Any]:
    """Returns Anthropic's form of an error."""
    message = refused.message
    if isinstance(refused, TooLong):  # Clients know it by these words.
        message = f"prompt is too long: {refused.tokens} > {refused.most} maximum"
    kind = KINDS.get(refused.kind, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessagesForm(Form):
    """This is the form of /v1/messages."""

    def __init__(self, answer: Answer):
        super().__init__(answer)
        self._id = "msg_" + secrets.token_hex(12)
        self._index = -1  # It counts the block that is open.
        self._open = ""  # It is the kind of the open block.

    def _message(self, content: list[dict[str, Any]], ended: bool) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.answer.ask.model,
            "content": content,
            "stop_reason": self._reason() if ended else None,
            "stop_sequence": self.answer.stop_string,
            "usage": self._usage(),
            **self.answer.prefill(),
        }

    def _reason(self) -> str:
        finished = self.answer.finished
        if finished is not None and finished.truncated_by == "context":
            return "model_context_window_exceeded"
        return REASONS[self.answer.reason]

    def _usage(self) -> dict[str, Any]:
        usage = self.answer.usage
        return {
            "input_tokens": usage.prompt - usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.completion,
            **left_out(usage),
        }

    def whole(self, all: Whole) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if all.reasoning:
            content.append({"type": "thinking", "thinking": all.reasoning, "signature": SIGNATURE})
        if all.text:
            content.append({"type": "text", "text": all.text})
        content += [_block(call.name) | {"input": json.loads(call.arguments)} for call in all.calls]
        return self._message(content, ended=True)

    def begin(self) -> Iterator[bytes]:
        yield self._event("message_start", message=self._message([], ended=False))

    def _event(self, kind: str, **values: Any) -> bytes:
        return self.sse({"type": kind, **values}, kind)

    def _start(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._stop()
        self._index, self._open = self._index + 1, kind
        yield self._event("content_block_start", index=self._index, content_block=block)

    def _delta(self, **delta: Any) -> bytes:
        return self._event("content_block_delta", index=self._index, delta=delta)

    def _stop(self) -> Iterator[bytes]:
        if self._open == "thinking":
            yield self._delta(type="signature_delta", signature=SIGNATURE)
        if self._open:
            yield self._event("content_block_stop", index=self._index)
        self._open = ""

    def piece(self, piece: Piece) -> Iterator[bytes]:
        match piece:
            case Reasoning(text):
                if self._open != "thinking":
                    yield from self._start("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta(type="thinking_delta", thinking=text)
            case Text(text):
                if self._open != "text":
                    yield from self._start("text", {"type": "text", "text": ""})
                yield self._delta(type="text_delta", text=text)
            case CallBegin(name):
                yield from self._start("tool_use", _block(name))
            case Arguments(text):
                yield self._delta(type="input_json_delta", partial_json=text)
            case CallEnd():
                yield from self._stop()

    def silence(self) -> bytes:
        return self._event("ping")

    def end(self) -> Iterator[bytes]:
        yield from self._stop()
        delta = {"stop_reason": self._reason(), "stop_sequence": self.answer.stop_string}
        yield self._event("message_delta", delta=delta, usage=self._usage())
        yield self._event("message_stop")

    def failed(self, refused: Refused) -> Iterator[bytes]:
        yield self.sse(error_body(refused), "error")


def _block(name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": "toolu_" + secrets.token_hex(12), "name": name, "input": {}}
