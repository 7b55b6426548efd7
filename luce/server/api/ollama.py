"""Ollama's API: /api/chat and /api/generate as lines of JSON, and the routes that describe models."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterator
from datetime import datetime, timezone
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response

from luce.server.answer import Answer
from luce.server.api.body import Body, asked, read
from luce.server.api.fields import OLLAMA_CHAT, OLLAMA_GENERATE, OLLAMA_SHOW
from luce.server.api.openai import Form, held_to, length_of, penalties_of, stops_of, tools_of, within
from luce.server.ask import Ask, Message, Refused, continued, refuse, thinking
from luce.server.content import content_of, note_of, require_readable
from luce.server.models import Slot
from luce.server.response import Server, reply
from luce.text.conversation import call_of
from luce.text.dialects import GEMMA, QWEN
from luce.text.infill import Gap
from luce.text.pieces import Arguments, Call, CallBegin, CallEnd, Piece, Reasoning, Text, Whole

VERSION = "0.12.0"  # This API is that of Ollama of this version: clients ask for at least some.
REASONS = {"stop": "stop", "stop_string": "stop", "length": "length", "calls": "stop"}
ROLES = ("system", "user", "assistant", "tool")
DIGESTED = 1 << 20  # So many first bytes of a file are told by its digest.
# Go spells times so: "5m", "1h30m".
DURATION = re.compile(r"-?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|\u00b5s|ms|s|m|h))+|-?\d+")


class Options(msgspec.Struct, kw_only=True):
    """These options change what is said. Others, of how a model is loaded, are ignored."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    num_predict: int | float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None


class Asked(Body, kw_only=True):
    """This is what both bodies have in common."""

    model: str = ""
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | str | None = None
    keep_alive: int | float | str | None = None  # 0 unloads the model after the answer; others keep it.


class Function(msgspec.Struct):
    name: str
    arguments: Any = None


class FunctionCall(msgspec.Struct):
    function: Function
    id: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[FunctionCall] | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None
    images: list[Any] | None = None


class ChatBody(Asked, kw_only=True):
    API: ClassVar = OLLAMA_CHAT

    messages: list[ChatMessage] = []
    tools: list[dict[str, Any]] | None = None


class GenerateBody(Asked, kw_only=True):
    API: ClassVar = OLLAMA_GENERATE

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None


class ShowBody(Body, kw_only=True):
    API: ClassVar = OLLAMA_SHOW

    model: str = ""


def chat_ask(body: ChatBody, sees: bool = False) -> Ask:
    """Returns the request of a body, to a model that `sees` images or not. Raises
    Refused where it asks for what is not there."""
    tools, common = tools_of(body.tools), _common(body)
    turns = [(each.role, [{"type": "image"}] if each.images else each.content) for each in body.messages]
    if not sees:
        require_readable(turns, "messages")
    messages = [_message(message, sees) for message in body.messages]
    messages, continues = continued(messages, whole=common["constraint"] is not None)
    return Ask(messages=messages, tools=tools, continues=continues, **common)


def generate_ask(body: GenerateBody) -> Ask:
    """Returns the request of a body. Raises Refused where it asks for what is not there."""
    if body.suffix:
        return Ask(prompt=Gap(body.prompt, body.suffix), **_common(body))
    if body.raw:
        return Ask(prompt=body.prompt, special=True, **_common(body))
    system = [{"role": "system", "content": body.system}] if body.system else []
    return Ask(messages=[*system, {"role": "user", "content": body.prompt}], **_common(body))


def _common(body: Asked) -> dict[str, Any]:
    given = body.options or Options()
    new = given.num_predict
    if new is not None and not float(new).is_integer():
        raise refuse(f"num_predict is {new}: it has to be a whole number", "num_predict")
    effort = body.think if isinstance(body.think, str) else None
    return {
        "model": body.model,
        "max_tokens": length_of(None if new is None or new < 0 else int(new)),
        "sampling": within(temperature=given.temperature, top_p=given.top_p, top_k=given.top_k,
                           min_p=given.min_p, seed=given.seed),
        "penalties": penalties_of(given.presence_penalty, given.frequency_penalty, given.repeat_penalty),
        "stops": stops_of(given.stop),
        "variables": thinking(effort, body.think if isinstance(body.think, bool) else None),
        "stream": body.stream is not False,
    } | held_to(format=body.format)


def _message(message: ChatMessage, sees: bool) -> Message:
    if message.role not in ROLES:
        raise refuse(f"{message.role!r} is no role", "messages")
    found: Message
    if sees and message.images and message.role != "assistant":
        images = [{"type": "image", "data": image} for image in message.images]
        parts = [*images, {"type": "text", "text": message.content}]
        found = {"role": message.role, "content": content_of(parts, "messages", sees, role=message.role)}
    else:
        notes = [note_of("image") for _ in message.images or ()]
        found = {"role": message.role, "content": "\n".join(filter(None, [message.content, *notes]))}
    if message.thinking and message.role == "assistant":
        found["reasoning_content"] = message.thinking
    for call in message.tool_calls or ():
        calls = found.setdefault("tool_calls", [])
        calls.append(call_of(call.function.name, call.function.arguments, call.id))
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_name and message.role == "tool":
        found["name"] = message.tool_name
    return found


def unloads(body: Asked) -> bool:
    """Says whether a model is to be unloaded after the answer. Raises Refused where keep_alive is no time."""
    kept = body.keep_alive
    if isinstance(kept, str):
        if not DURATION.fullmatch(kept):
            raise refuse(f"keep_alive is {kept!r}: it is seconds, or a time such as 5m", "keep_alive")
        return not re.search("[1-9]", kept)
    return kept is not None and kept == 0


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
        self._calls = 0  # So many were told.

    def _object(self, reasoning: str = "", text: str = "", calls: list[Call] | None = None) -> dict[str, Any]:
        head = {"model": self.answer.ask.model, "created_at": _now(), "done": False}
        if not self._chat:
            return head | {"response": text} | ({"thinking": reasoning} if reasoning else {})
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if reasoning:
            message["thinking"] = reasoning
        if calls:
            message["tool_calls"] = [self._told(call) for call in calls]
        return head | {"message": message}

    def _told(self, call: Call) -> dict[str, Any]:
        function = {"index": self._calls, "name": call.name, "arguments": json.loads(call.arguments)}
        self._calls += 1
        return {"id": "call_" + secrets.token_hex(12), "function": function}

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
    body, ask = await asked(request, ChatBody, partial(chat_ask, sees=server.models.sees))
    if not body.messages:
        return await _only_load(server, body, {"message": {"role": "assistant", "content": ""}})
    return await _answered(server, request, body, ask)


async def generate(server: Server, request: Request) -> Response:
    body, ask = await asked(request, GenerateBody, generate_ask)
    if not body.prompt:
        return await _only_load(server, body, {"response": ""})
    return await _answered(server, request, body, ask)


async def _answered(server: Server, request: Request, body: Asked, ask: Ask) -> Response:
    unload, chats = unloads(body), isinstance(body, ChatBody)
    response = await server.answer(request, ask, lambda answer: LinesForm(answer, chats), error_body)
    if unload:
        response.background = BackgroundTask(server.models.unload, body.model)
    return response


async def _only_load(server: Server, body: Asked, empty: dict[str, Any]) -> Response:
    """Loads a model, or unloads it, since there is nothing to answer."""
    if unload := unloads(body):
        await server.models.unload(body.model)
    else:
        await server.models.get(body.model)
    head = {"model": body.model, "created_at": _now(), "done": True}
    return reply(head | empty | {"done_reason": "unload" if unload else "load"})


@cache
def _digest(path: Path, size: int, changed: float) -> str:
    """Returns 64 hex digits that tell files apart: of its size, time and first bytes, since a whole file
    takes minutes."""
    with path.open("rb") as file:
        return hashlib.sha256(f"{size} {changed} ".encode() + file.read(DIGESTED)).hexdigest()


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
    return {"name": name, "model": name, "modified_at": changed, "size": stat.st_size,
            "digest": _digest(slot.path, stat.st_size, stat.st_mtime), "details": _details(slot)}  # fmt: skip


async def tags(server: Server, request: Request) -> Response:
    return reply({"models": [_model(name, slot) for name, slot in server.models.slots.items()]})


async def ps(server: Server, request: Request) -> Response:
    loaded = []
    for name, slot in server.models.slots.items():
        if slot.served is not None:
            engines = [each.loaded.engine for each in slot.served.replicas.all]
            size = sum(each.info.memory_bytes + each.model.info.weight_bytes for each in engines)
            vram = 0 if engines[0].model.info.device.startswith("cpu") else size
            more = {"size": size, "size_vram": vram, "context_length": slot.served.info.n_ctx}
            loaded.append(_model(name, slot) | more | {"expires_at": "9999-12-31T23:59:59Z"})
    return reply({"models": loaded})


async def show(server: Server, request: Request) -> Response:
    body = await read(request, ShowBody)
    name = server.models.name_of(body.model)
    served = await server.models.get(name)
    listed = _model(name, server.models.slots[name])
    facts = served.facts
    info = {
        "general.architecture": facts.architecture,
        "general.parameter_count": facts.parameters,
        f"{facts.architecture}.context_length": served.info.n_ctx,
        f"{facts.architecture}.embedding_length": facts.embedding_length,
        f"{facts.architecture}.block_count": facts.block_count,
    }
    able = ["completion"] + (["tools"] if "tools" in served.template_source else [])
    able += ["vision"] if server.models.sees else []
    able += ["thinking"] if any(each.think[0] in served.template_source for each in (QWEN, GEMMA)) else []
    return reply(
        {
            "modelfile": "",
            "parameters": "\n".join(f"{name} {value}" for name, value in served.defaults.items()),
            "template": served.template_source,
            "details": listed["details"],
            "digest": listed["digest"],
            "modified_at": listed["modified_at"],
            "model_info": info,
            "capabilities": able,
        }
    )


async def version(server: Server, request: Request) -> Response:
    return reply({"version": VERSION})


async def alive(server: Server, request: Request) -> Response:
    """Answers what Ollama's clients ask first."""
    return Response("Ollama is running", media_type="text/plain")
