"""Has Ollama's API: /api/chat and /api/generate as lines of JSON, and the routes that describe models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from luce.server.answer import Answer, Whole
from luce.server.api.openai import Form, held_to, length_of, penalties_of, stops_of, tools_of, within
from luce.server.ask import Ask, Message, Refused, call_of, refuse, thinking
from luce.server.body import read, reply
from luce.server.models import Slot
from luce.text.pieces import Arguments, Call, CallBegin, CallEnd, Piece, Reasoning, Text

if TYPE_CHECKING:
    from luce.server.app import Server

VERSION = "0.12.0"  # This API is that of Ollama of this version: clients ask for at least some.
REASONS = {"stop": "stop", "stop_string": "stop", "length": "length", "calls": "stop"}
ROLES = ("system", "user", "assistant", "tool")


class Options(msgspec.Struct, kw_only=True):
    """These options change what is said. Others, of how a model is loaded, are ignored."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | float | None = None
    min_p: float | None = None
    seed: int | float | None = None
    stop: str | list[str] | None = None
    num_predict: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None


class Asked(msgspec.Struct, kw_only=True):
    """This is what both bodies have in common."""

    REFUSED: ClassVar = ("template", "context", "suffix", "images")

    model: str = ""
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | str | None = None


class Function(msgspec.Struct):
    name: str
    arguments: Any = None


class FunctionCall(msgspec.Struct):
    function: Function


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[FunctionCall] | None = None
    images: Any = None


class ChatBody(Asked, kw_only=True):
    messages: list[ChatMessage] = []
    tools: list[dict[str, Any]] | None = None


class GenerateBody(Asked, kw_only=True):
    prompt: str = ""
    system: str | None = None
    raw: bool | None = None


class ShowBody(msgspec.Struct, kw_only=True):
    model: str = ""
    name: str = ""


def chat_ask(body: ChatBody) -> Ask:
    tools = tools_of(body.tools)
    messages = [_message(message) for message in body.messages]
    return Ask(messages=messages, tools=tools, **_common(body))


def generate_ask(body: GenerateBody) -> Ask:
    if body.raw:
        return Ask(prompt=body.prompt, **_common(body))
    system = [{"role": "system", "content": body.system}] if body.system else []
    return Ask(messages=[*system, {"role": "user", "content": body.prompt}], **_common(body))


def _common(body: Asked) -> dict[str, Any]:
    given = body.options or Options()
    new = given.num_predict
    effort = body.think if isinstance(body.think, str) else None
    return {
        "model": body.model,
        "max_tokens": length_of(None if new is not None and new < 0 else new),
        "sampling": within(temperature=given.temperature, top_p=given.top_p, top_k=given.top_k,
                           min_p=given.min_p, seed=given.seed),
        "penalties": penalties_of(given.presence_penalty, given.frequency_penalty, given.repeat_penalty),
        "stops": stops_of(given.stop),
        "variables": thinking(effort, body.think if isinstance(body.think, bool) else None),
        "stream": body.stream is not False,
    } | held_to(format=body.format)


def _message(message: ChatMessage) -> Message:
    if message.role not in ROLES:
        raise refuse(f"{message.role!r} is no role", "messages")
    if message.images:
        raise refuse("images are not supported: this model reads text alone", "messages")
    found: Message = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        found["reasoning_content"] = message.thinking
    for call in message.tool_calls or ():
        calls = found.setdefault("tool_calls", [])
        calls.append(call_of(call.function.name, call.function.arguments))
    return found


def error_body(refused: Refused) -> dict[str, Any]:
    """Returns Ollama's form of an error."""
    return {"error": refused.message}


class LinesForm(Form):
    """This is the form of /api/chat, and of /api/generate, which puts the text into `response`."""

    media_type = "application/x-ndjson"

    def __init__(self, answer: Answer, chat: bool):
        super().__init__(answer)
        self._chat = chat
        self._call = Call("", "")  # This call is open. The API has no parts of calls.

    def _object(self, reasoning: str = "", text: str = "", calls: list[Call] | None = None) -> dict[str, Any]:
        head = {"model": self.answer.ask.model, "created_at": _now(), "done": False}
        if not self._chat:
            return head | {"response": text} | ({"thinking": reasoning} if reasoning else {})
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if reasoning:
            message["thinking"] = reasoning
        if calls:
            functions = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls]
            message["tool_calls"] = [{"function": function} for function in functions]
        return head | {"message": message}

    def _ended(self) -> dict[str, Any]:
        times, usage = self.answer.timings(), self.answer.usage
        read, decode = (int(times.get(f"{name}_ms", 0) * 1e6) for name in ("prompt", "predicted"))
        return {
            "done": True,
            "done_reason": REASONS[self.answer.reason],
            "total_duration": read + decode,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": read,
            "eval_count": usage.completion,
            "eval_duration": decode,
        }

    def _line(self, value: dict[str, Any]) -> bytes:
        return msgspec.json.encode(value) + b"\n"

    def whole(self, all: Whole) -> dict[str, Any]:
        return self._object(all.reasoning, all.text, all.calls) | self._ended()

    def piece(self, piece: Piece) -> Iterator[bytes]:
        match piece:
            case Reasoning(text):
                yield self._line(self._object(reasoning=text))
            case Text(text):
                yield self._line(self._object(text=text))
            case CallBegin(name):
                self._call = Call(name, "")
            case Arguments(text):
                self._call = Call(self._call.name, self._call.arguments + text)
            case CallEnd(whole=True):
                yield self._line(self._object(calls=[self._call]))

    def silence(self) -> bytes:
        return self._line(self._object())

    def end(self) -> Iterator[bytes]:
        yield self._line(self._object() | self._ended())

    def failed(self, refused: Refused) -> Iterator[bytes]:
        yield self._line(error_body(refused))


def _now() -> str:
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


# ---- routes


async def chat(server: Server, request: Request) -> Response:
    body = await read(request, ChatBody)
    if not body.messages:
        return await _only_load(server, body, {"message": {"role": "assistant", "content": ""}})
    return await server.answer(request, chat_ask(body), lambda a: LinesForm(a, chat=True), error_body)


async def generate(server: Server, request: Request) -> Response:
    body = await read(request, GenerateBody)
    if not body.prompt:
        return await _only_load(server, body, {"response": ""})
    return await server.answer(request, generate_ask(body), lambda a: LinesForm(a, chat=False), error_body)


async def _only_load(server: Server, body: Asked, empty: dict[str, Any]) -> Response:
    await server.models.get(body.model)
    head = {"model": body.model, "created_at": _now(), "done": True, "done_reason": "load"}
    return reply(head | empty)


def _details(slot: Slot) -> dict[str, Any]:
    served = slot.served
    facts = served.facts if served else None
    size = f"{facts.parameters / 1e9:.1f}B" if facts else ""
    return {
        "parent_model": "",
        "format": "gguf",
        "family": facts.architecture if facts else "",
        "families": [facts.architecture] if facts else [],
        "parameter_size": size,
        "quantization_level": (facts.file_type or "") if facts else "",
    }


def _model(name: str, slot: Slot) -> dict[str, Any]:
    stat = slot.path.stat()
    changed = datetime.fromtimestamp(stat.st_mtime, timezone.utc).isoformat()
    return {"name": name, "model": name, "modified_at": changed, "size": stat.st_size, "digest": "",
            "details": _details(slot)}  # fmt: skip


async def tags(server: Server, request: Request) -> Response:
    return reply({"models": [_model(name, slot) for name, slot in server.models.slots.items()]})


async def ps(server: Server, request: Request) -> Response:
    loaded = []
    for name, slot in server.models.slots.items():
        if slot.served is not None:
            size = slot.served.engine.info.memory_bytes + slot.served.engine.model.info.weight_bytes
            vram = 0 if slot.served.engine.model.info.device == "cpu" else size
            more = {"size": size, "size_vram": vram, "context_length": slot.served.info.n_ctx}
            loaded.append(_model(name, slot) | more | {"expires_at": "9999-12-31T23:59:59Z"})
    return reply({"models": loaded})


async def show(server: Server, request: Request) -> Response:
    body = await read(request, ShowBody)
    name = server.models.name_of(body.model or body.name)
    served = await server.models.get(name)
    facts = served.facts
    info = {
        "general.architecture": facts.architecture,
        "general.parameter_count": facts.parameters,
        f"{facts.architecture}.context_length": served.info.n_ctx,
        f"{facts.architecture}.embedding_length": facts.embedding_length,
        f"{facts.architecture}.block_count": facts.block_count,
    }
    able = ["completion"] + (["tools"] if "tools" in served.template_source else [])
    able += ["thinking"] if "<think>" in served.template_source else []
    return reply(
        {
            "modelfile": "",
            "parameters": "\n".join(f"{name} {value}" for name, value in served.defaults.items()),
            "template": served.template_source,
            "details": _details(server.models.slots[name]),
            "model_info": info,
            "capabilities": able,
        }
    )


async def version(server: Server, request: Request) -> Response:
    return reply({"version": VERSION})


async def alive(server: Server, request: Request) -> Response:
    """Answers what Ollama's clients ask first."""
    return Response("Ollama is running", media_type="text/plain")
