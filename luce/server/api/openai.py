"""Has OpenAI's /v1/chat/completions and /v1/completions: their bodies, answers and events."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import msgspec

from luce.native.structs import Logprobs
from luce.server.answer import Answer
from luce.server.api.body import Body
from luce.server.api.fields import CHAT, COMPLETIONS
from luce.server.ask import (
    Ask,
    Message,
    Refused,
    Thoughts,
    budget_of,
    continued,
    keep_of,
    refuse,
    thinking,
    typed,
)
from luce.server.content import content_of, require_readable, thoughts_of
from luce.server.watch import Usage
from luce.text.conversation import call_of
from luce.text.infill import Gap
from luce.text.pieces import Arguments, CallBegin, CallEnd, Piece, Reasoning, Text, Whole
from luce.text.structured import FIELDS, FieldError, constraint_of, opens_objects
from luce.text.tool import Tool

REASONS = {"stop": "stop", "stop_string": "stop", "length": "length", "calls": "tool_calls"}
KINDS = {"not_found": "not_found_error", "auth": "authentication_error", "forbidden": "permission_error"}
CODES = {"too_long": "context_length_exceeded", "not_found": "model_not_found", "auth": "invalid_api_key",
         "busy": "server_busy", "no_route": "unknown_url",
         "no_previous": "previous_response_not_found"}  # fmt: skip
NAME = re.compile(r"[^<>\s]{1,256}")  # Calls spell the names of tools so.
MAX_STOPS, MAX_STOP = 16, 1024  # A request has at most so many stop strings, and each so many letters.
MAX_PROMPTS = 2048  # A request has at most so many prompts.
LEAST, MOST = 1e-9, 1 - 2**-24  # These parts of the probability are of the most probable token alone.
BANNED = -1e30  # A token with this bias is never chosen.


class Held(Body, kw_only=True):
    """Fields of several servers that hold an answer to a schema or a grammar: luce.text.structured reads
    them."""

    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_whitespace_pattern: Any = None
    json_schema: Any = None
    grammar: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None


class Sampled(Held, kw_only=True):
    """This is what all bodies have in common. Fields with other names are here by their first ones
    (fields.py)."""

    model: str = ""
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    logit_bias: dict[str, float] | list[Any] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    response_format: Any = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    prefill: dict[str, Any] | None = None


class Talk(Sampled, kw_only=True):
    """This is what the bodies of conversations have in common."""

    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None
    thinking_budget: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    reasoning_format: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    function_call: dict[str, Any] | None = None  # It is the older form of tool_calls.
    thinking_blocks: list[Any] | None = None  # LiteLLM keeps Anthropic's thoughts so.
    prefix: bool | None = None  # DeepSeek and Mistral: the answer goes on behind this last message.


class ChatBody(Talk, kw_only=True):
    API: ClassVar = CHAT

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class CompletionBody(Sampled, kw_only=True):
    API: ClassVar = COMPLETIONS

    prompt: str | list[Any]
    suffix: str | None = None
    parse_special: bool | None = None
    add_special_tokens: bool | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None


def sampled(body: Sampled) -> dict[str, Any]:
    """Returns what an Ask has of a body's common fields."""
    stops = stops_of(body.stop)
    if body.include_stop_str_in_output and not stops:
        name = "include_stop_str_in_output"
        raise refuse(f"{name} keeps what `stop` has, and there is no `stop`", name)
    return {
        "model": body.model,
        "sampling": within(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k,
                           min_p=body.min_p, seed=body.seed),
        "penalties": penalties_of(body.presence_penalty, body.frequency_penalty, body.repetition_penalty,
                                  body.logit_bias),
        "stops": stops,
        "keeps_stop": bool(body.include_stop_str_in_output),
        "n": body.n or 1,
        "stream": bool(body.stream),
        "ignore_eos": bool(body.ignore_eos),
        **keep_of(body.prefill),
    }  # fmt: skip


def thought(body: Talk, effort: str | None) -> dict[str, Any]:
    """Returns what an Ask has of how a body wants thoughts: the template's variables among it."""
    variables = thinking(effort, body.enable_thinking)
    if body.preserve_thinking is not None:
        variables["preserve_thinking"] = body.preserve_thinking
    if body.thinking_budget is not None:
        variables["thinking_budget"] = body.thinking_budget
    more = body.chat_template_kwargs or {}
    if taken := {"messages", "tools", "self"} & more.keys():
        raise refuse(f"chat_template_kwargs names {min(taken)}, which is no variable", "chat_template_kwargs")
    variables |= more
    budget = budget_of(variables.get("thinking_budget"), "thinking_budget")
    kept: Thoughts = "within" if body.reasoning_format == "none" else "apart"
    return {
        "variables": variables,
        "budget": budget,
        "thoughts": "left out" if body.include_reasoning is False else kept,
    }


def penalties_of(
    presence: float | None, frequency: float | None, repetition: float | None, bias: Any = None
) -> dict[str, Any]:
    """Returns the fields of structs.Penalties that are given."""
    given = {"presence": presence, "frequency": frequency, "repetition": repetition}
    found: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if bias:
        pairs = bias.items() if isinstance(bias, dict) else bias
        try:
            found["bias"] = tuple((int(token), BANNED if by is False else float(by)) for token, by in pairs)
        except (ValueError, TypeError, OverflowError) as error:
            said = "logit_bias is {token: bias} or [[token, bias], ...], with the ids of tokens"
            raise refuse(said, "logit_bias") from error
    return found


def within(**given: float | None) -> dict[str, Any]:
    """Returns the fields of structs.Sampling that are given."""
    found: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if "top_k" in found:
        found["top_k"] = max(found["top_k"], 0)  # Both -1 and 0 mean off.
    if found.get("top_p") == 0:
        found["top_p"] = LEAST  # To the core 0 is off.
    if found.get("min_p") == 1:
        found["min_p"] = MOST
    if found.get("seed") == -1:
        del found["seed"]  # It asks for a random one.
    elif "seed" in found:
        found["seed"] %= 2**64
    return found


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS or any(not 0 < len(each) <= MAX_STOP for each in stops):
        raise refuse(f"at most {MAX_STOPS} stop strings of 1 to {MAX_STOP} letters", "stop")
    return stops


def length_of(*given: int | None) -> int | None:
    """Returns the first length that is given; -1 counts as none."""
    value = next((each for each in given if each is not None), None)
    if value is not None and value < -1:
        raise refuse(f"max_tokens is {value}", "max_tokens")
    return None if value == -1 else value


def held_to(body: Held | None = None, **more: Any) -> dict[str, Any]:
    """Returns the fields of Ask that say what the answer is held to, from a body's fields and `more`."""
    fields = {name: getattr(body, name, None) for name in FIELDS if name not in more} | more
    try:
        return {"constraint": constraint_of(fields), "open_objects": opens_objects(fields)}
    except FieldError as error:
        raise refuse(str(error), error.field) from error


def tools_of(tools: list[dict[str, Any]] | None) -> list[Tool]:
    found = []
    for tool in tools or ():
        if tool.get("type", "function") != "function":
            raise refuse(f"a tool of type {tool.get('type')!r} is not supported", "tools")
        found.append(tool_of(typed(tool.get("function", tool), dict[str, Any], "tools")))
    return found


class Allowed(msgspec.Struct):
    """Tools that tool_choice lets the model call."""

    mode: str = "auto"
    tools: list[dict[str, Any]] = []


class Parameters(msgspec.Struct):
    """This is what is read of a tool's schema."""

    properties: dict[str, Any] | None = None
    required: list[str] | None = None


def tool_of(function: dict[str, Any], schema: str = "parameters") -> Tool:
    """Returns the tool of a function, which has the schema of its parameters by that name."""
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise refuse("a tool has no name", "tools")
    if not NAME.fullmatch(name):
        raise refuse(f"a tool is named {name[:300]!r}: it has 1 to 256 letters but <, > and blanks", "tools")
    parameters = function.get(schema) or {"type": "object", "properties": {}}
    typed(parameters, Parameters, "tools")
    return Tool(name, parameters, str(function.get("description") or ""), bool(function.get("strict")))


def choice_of(choice: str | dict[str, Any] | None, tools: list[Tool]) -> tuple[str, list[Tool]]:
    """Returns "auto", "none", "required" or the name of a tool, and the tools that may be called."""
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(choice.get("allowed_tools", choice), tools)
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else choice.get("name")
        if name is None and choice.get("type") not in (None, "function"):
            raise refuse(f"tool_choice of type {choice['type']!r} is not supported", "tool_choice")
        if name not in [tool.name for tool in tools]:
            raise refuse(f"tool_choice names {name!r}, which is no tool", "tool_choice")
        return str(name), tools
    if choice not in (None, "auto", "none", "required"):
        raise refuse(f"tool_choice {choice!r} is none of auto, none, required, a function", "tool_choice")
    if choice == "required" and not tools:
        raise refuse("tool_choice requires a call, but there are no tools", "tool_choice")
    return choice or "auto", tools


def may_call_twice(parallel: bool | None, choice: str) -> bool:
    """Says whether an answer may have several calls: a function that is named is called once, in OpenAI's APIs."""
    return parallel is not False and choice in ("auto", "none", "required")


def _allowed(choice: Any, tools: list[Tool]) -> tuple[str, list[Tool]]:
    """Returns what choice_of does for {"mode": "auto" or "required", "tools": [...]}, of which tools that are
    no functions are left out, as they are elsewhere."""
    asked = typed(choice, Allowed, "tool_choice")
    if asked.mode not in ("auto", "required"):
        raise refuse(f"the mode {asked.mode!r} of tool_choice is neither auto nor required", "tool_choice")
    names = set()
    for each in asked.tools:
        if each.get("type", "function") == "function":
            function = each.get("function")
            name = function.get("name") if isinstance(function, dict) else each.get("name")
            if name not in [tool.name for tool in tools]:
                raise refuse(f"tool_choice allows {name!r}, which is no tool", "tool_choice")
            names.add(name)
    allowed = [tool for tool in tools if tool.name in names]
    return choice_of(asked.mode if allowed or asked.mode == "required" else "none", allowed)


def message_of(message: ChatMessage, sees: bool = False) -> Message:
    """Returns a message as templates take it."""
    if message.role not in ("system", "developer", "user", "assistant", "tool", "function"):
        raise refuse(f"{message.role!r} is no role", "messages")
    found: Message = {"role": message.role, "content": content_of(message.content, "messages", sees, role=message.role)}
    if message.role in ("tool", "function"):
        found["role"] = "tool"
        if message.name:
            found["name"] = message.name
    if message.role == "assistant":
        thought = message.reasoning_content or message.reasoning
        thought = thought or thoughts_of(message.content) or thoughts_of(message.thinking_blocks)
        if thought:
            found["reasoning_content"] = thought
    calls = list(message.tool_calls or ())
    if message.function_call and not calls:
        calls = [{"function": message.function_call}]
    if calls:
        found["tool_calls"] = []
        for call in calls:
            function = call.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise refuse("a call has no function with a name", "messages")
            found["tool_calls"].append(call_of(function["name"], function.get("arguments"), call.get("id")))
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    return found


def _messages_of(body: ChatBody, whole: bool, sees: bool) -> tuple[list[Message], bool]:
    """Returns the messages as templates take them, and whether the answer goes on behind the last one."""
    *before, last = body.messages
    if any(message.prefix for message in before) or (last.prefix and last.role != "assistant"):
        raise refuse("prefix is for the last message, of the assistant", "messages")
    if not sees:
        require_readable([(message.role, message.content) for message in body.messages], "messages")
    asked = True if last.prefix else body.continue_final_message
    messages = [message_of(message, sees) for message in body.messages]
    return continued(messages, asked, body.add_generation_prompt, whole)


def error_body(refused: Refused) -> dict[str, Any]:
    """Returns OpenAI's form of an error."""
    kind = KINDS.get(refused.kind, "invalid_request_error" if refused.status < 500 else "server_error")
    code = CODES.get(refused.kind)
    return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": code}}


def left_out(usage: Usage) -> dict[str, int]:
    """Returns how many tokens of the prompt were left out, where some may be."""
    return {} if usage.left_out is None else {"left_out_tokens": usage.left_out}


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached, "audio_tokens": 0, **left_out(usage)},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
            "audio_tokens": 0,
        },
    }


class Form:
    """This is what the answers of an API have in common: whole() is one body, the others give events as
    bytes."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer):
        self.answer = answer

    def sse(self, data: Any, event: str | None = None) -> bytes:
        """Returns one event of a stream."""
        head = f"event: {event}\n".encode() if event else b""
        return head + b"data: " + msgspec.json.encode(data) + b"\n\n"

    def begin(self) -> Iterator[bytes]:
        """Returns the events before all pieces."""
        return iter(())

    def end(self) -> Iterator[bytes]:
        """Returns the events after all pieces."""
        return iter(())

    def silence(self) -> bytes:
        """Returns what tells the client that the stream lives."""
        return b": keep-alive\n\n"


class Told(NamedTuple):
    """Which events of a stream have the usage: a last one, and each with what there is so far."""

    last: bool = False
    each: bool = False


class ChoiceForm(Form):
    """The form of an answer that is one of the choices of a request, the one at `index`. Those of one request
    have the same `id`. finish() gives the events at the end of a choice, and close() those at the end of all.
    """

    KIND, CHUNK = "", ""  # The kinds of its body and of its events.
    ID = ""  # Its ids begin so.

    def __init__(self, answer: Answer, told: Told = Told(), id: str = "", index: int = 0):  # noqa: B008
        super().__init__(answer)
        self.id, self.index, self._told = id or self.ID + secrets.token_hex(12), index, told

    def _head(self, kind: str) -> dict[str, Any]:
        answer = self.answer
        return {"id": self.id, "object": kind, "created": answer.created, "model": answer.ask.model,
                "system_fingerprint": "luce"}  # fmt: skip

    def _event(self, choice: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        usage = (
            {"usage": usage_body(self.answer.usage) if self._told.each else None} if self._told.last else {}
        )
        choices = [{"index": self.index, **choice, "finish_reason": reason}]
        return self.sse(self._head(self.CHUNK) | {"choices": choices} | usage | more)

    def _spelled(self, token: int) -> str:
        return self.answer.model.tokenizer.decode([token], special=True)

    def whole(self, all: Whole) -> dict[str, Any]:
        raise NotImplementedError

    def piece(self, piece: Piece) -> Iterator[bytes]:
        raise NotImplementedError

    def finish(self) -> Iterator[bytes]:
        raise NotImplementedError

    def close(self, usage: Usage) -> Iterator[bytes]:
        if self._told.last:
            yield self.sse(self._head(self.CHUNK) | {"choices": [], "usage": usage_body(usage)})
        yield b"data: [DONE]\n\n"

    def end(self) -> Iterator[bytes]:
        yield from self.finish()
        yield from self.close(self.answer.usage)

    def failed(self, refused: Refused) -> Iterator[bytes]:
        yield self.sse(error_body(refused))
        yield b"data: [DONE]\n\n"


class ChatForm(ChoiceForm):
    """The form of /v1/chat/completions."""

    KIND, CHUNK, ID = "chat.completion", "chat.completion.chunk", "chatcmpl-"
    _calls = 0

    def whole(self, all: Whole) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": all.text or None, "refusal": None}
        if not all.calls:
            message["content"] = all.text
        if all.reasoning:
            message["reasoning_content"] = all.reasoning
        if all.calls:
            message["tool_calls"] = [_call(call.name, call.arguments) for call in all.calls]
        reason = REASONS[self.answer.reason]
        choice = {"index": self.index, "message": message, "logprobs": self._logprobs(),
                  "finish_reason": reason}  # fmt: skip
        usage, timings = usage_body(self.answer.usage), self.answer.timings()
        told = {"choices": [choice], "usage": usage, "timings": timings, **self.answer.prefill()}
        return self._head(self.KIND) | told | self._scored()

    def _scored(self) -> dict[str, Any]:
        """Returns the log-probabilities of the prompt's tokens, where they are asked for, as vLLM lists them:
        null for the first, else by the ids of the token itself and of the most probable ones, which have
        ranks."""
        if self.answer.ask.scored is None:
            return {}
        listed: list[dict[str, Any] | None] = [None]
        for token, found in zip(self.answer.prompt[1:], self.answer.prompt_logprobs, strict=True):
            ranks = {id: rank for rank, (id, _) in enumerate(found.top, start=1)}
            listed.append(
                {
                    str(id): {"logprob": p, "rank": ranks.get(id), "decoded_token": self._spelled(id)}
                    for id, p in {token: found.logprob, **dict(found.top)}.items()
                }
            )
        return {"prompt_logprobs": listed}

    def _logprobs(self) -> dict[str, Any] | None:
        """Returns the log-probabilities of the tokens since the last call."""
        said = self.answer.take_logprobs()
        if not said:
            return None

        def entry(token: int, logprob: float) -> dict[str, Any]:
            raw = self.answer.model.tokenizer.bytes_of(token, special=True)
            return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

        content = [
            entry(token, found.logprob) | {"top_logprobs": [entry(*each) for each in found.top]}
            for token, found in said
        ]
        return {"content": content, "refusal": None}

    def _chunk(self, delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        return self._event({"delta": delta, "logprobs": self._logprobs()}, reason, **more)

    def begin(self) -> Iterator[bytes]:
        yield self._chunk({"role": "assistant", "content": ""})

    def piece(self, piece: Piece) -> Iterator[bytes]:
        match piece:
            case Reasoning(text):
                yield self._chunk({"reasoning_content": text})
            case Text(text):
                yield self._chunk({"content": text})
            case CallBegin(name):
                yield self._chunk({"tool_calls": [{"index": self._calls, **_call(name)}]})
            case Arguments(text):
                part = {"index": self._calls, "function": {"arguments": text}}
                yield self._chunk({"tool_calls": [part]})
            case CallEnd():
                self._calls += 1

    def finish(self) -> Iterator[bytes]:
        told = {**self.answer.prefill(), **self._scored()}
        yield self._chunk({}, REASONS[self.answer.reason], timings=self.answer.timings(), **told)


def _call(name: str, arguments: str = "") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": "call_" + secrets.token_hex(12), "type": "function", "function": function}


class CompletionForm(ChoiceForm):
    """The form of /v1/completions."""

    KIND, CHUNK, ID = "text_completion", "text_completion", "cmpl-"

    def __init__(self, answer: Answer, told: Told = Told(), id: str = "", index: int = 0):  # noqa: B008
        super().__init__(answer, told, id, index)
        self._before = answer.echoed  # It is not told yet.
        self._offset = 0 if self._scores else len(self._before)

    @property
    def _scores(self) -> bool:
        """Says whether the prompt's tokens have log-probabilities too, which come with the first others."""
        return self.answer.ask.scored is not None

    def _logprobs(self) -> dict[str, Any] | None:
        """Returns the log-probabilities of the tokens since the last call, first those of the prompt."""
        said: list[tuple[int, Logprobs | None]] = [*self.answer.take_logprobs()]
        if self._scores and self._offset == 0:
            said[:0] = zip(self.answer.prompt, (None, *self.answer.prompt_logprobs), strict=True)
        if not said:
            return None
        texts = [self._spelled(token) for token, _ in said]
        *offsets, self._offset = accumulate(map(len, texts), initial=self._offset)
        return {
            "tokens": texts,
            "token_logprobs": [found and found.logprob for _, found in said],
            "top_logprobs": [found and {self._spelled(t): p for t, p in found.top} for _, found in said],
            "text_offset": offsets,
        }

    def _echo(self) -> str:
        """Returns the prompt's text where it is echoed and was not yet."""
        before, self._before = self._before, ""
        return before

    def whole(self, all: Whole) -> dict[str, Any]:
        choice = {"index": self.index, "text": self._echo() + all.text, "logprobs": self._logprobs(),
                  "finish_reason": REASONS[self.answer.reason]}  # fmt: skip
        usage, timings = usage_body(self.answer.usage), self.answer.timings()
        told = {"choices": [choice], "usage": usage, "timings": timings, **self.answer.prefill()}
        return self._head(self.KIND) | told

    def _chunk(self, text: str, reason: str | None = None, **more: Any) -> bytes:
        return self._event({"text": text, "logprobs": self._logprobs()}, reason, **more)

    def begin(self) -> Iterator[bytes]:
        if self._before and not self._scores:
            yield self._chunk(self._echo())

    def piece(self, piece: Piece) -> Iterator[bytes]:
        if isinstance(piece, Text):
            yield self._chunk(self._echo() + piece.text)

    def finish(self) -> Iterator[bytes]:
        told = {"timings": self.answer.timings(), **self.answer.prefill()}
        yield self._chunk(self._echo(), REASONS[self.answer.reason], **told)


def chat_ask(body: ChatBody, sees: bool = False) -> Ask:
    """Returns the request of a body, to a model that `sees` images or not. Raises
    Refused where it asks for what is not there."""
    if body.top_logprobs is not None and not body.logprobs:
        raise refuse("top_logprobs needs logprobs", "top_logprobs")
    if not body.messages:
        raise refuse("there is no message", "messages")
    tools = tools_of(body.tools)
    choice, tools = choice_of(body.tool_choice, tools)
    held, thinks = held_to(body, response_format=body.response_format), thought(body, body.reasoning_effort)
    if body.add_generation_prompt is not None:
        thinks["variables"]["add_generation_prompt"] = body.add_generation_prompt
    whole = held["constraint"] is not None or choice not in ("auto", "none")
    messages, continues = _messages_of(body, whole, sees)
    return Ask(
        messages=messages,
        tools=tools,
        choice=choice,
        parallel_calls=may_call_twice(body.parallel_tool_calls, choice),
        max_tokens=length_of(body.max_completion_tokens, body.max_tokens),
        continues=continues,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        scored=body.prompt_logprobs,
        **held,
        **sampled(body),
        **thinks,
    )


def completion_ask(body: CompletionBody) -> Ask:
    """Returns the request of a body. Raises Refused where it asks for what is not there."""
    prompts: Sequence[str | list[int] | Gap] = prompts_of(body.prompt, "prompt")
    if suffix := body.suffix:
        prompts = [Gap(prompt, suffix) for prompt in prompts if not isinstance(prompt, Gap)]
    if body.best_of not in (None, body.n or 1):
        raise refuse(f"best_of is {body.best_of}: it has to be n, no answer is thrown away", "best_of")
    return Ask(
        prompt=prompts[0],
        prompts=prompts,
        special=body.parse_special is not False,
        add_bos=body.add_special_tokens is not False,
        max_tokens=length_of(body.max_tokens, 16),
        logprobs=body.logprobs,
        echo=bool(body.echo),
        scored=body.logprobs if body.echo else None,
        **held_to(body, response_format=body.response_format),
        **sampled(body),
    )


def prompts_of(given: str | list[Any], param: str) -> tuple[str | list[int], ...]:
    """Returns one or several prompts, each a text or a list of tokens."""
    if isinstance(given, str):
        return (given,)
    if given and type(given[0]) not in (str, list):
        return (tokens_of(given, param),)
    if not 0 < len(given) <= MAX_PROMPTS:
        raise refuse(f"{param} has {len(given)} texts: 1 to {MAX_PROMPTS} are taken", param)
    return tuple(each if isinstance(each, str) else tokens_of(each, param) for each in given)


def tokens_of(given: Any, param: str) -> list[int]:
    """Returns the ids of tokens; whole numbers may be written as 5.0."""
    with suppress(msgspec.ValidationError):  # Of tens of thousands it tells soonest.
        return msgspec.convert(given, list[int])
    listed: list[Any] = given if isinstance(given, list) else [None]
    if not set(map(type, listed)) <= {int, float} or any(token != int(token) for token in listed):
        raise refuse(f"{param} is neither texts nor lists of tokens", param)
    return [int(token) for token in listed]


def usage_wanted(body: Sampled) -> Told:
    """Returns which events of a stream have the usage; none where there is no stream."""
    options = body.stream_options or {}
    return Told(bool(options.get("include_usage")), bool(options.get("continuous_usage_stats")))
