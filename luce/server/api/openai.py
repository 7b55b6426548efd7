"""Has OpenAI's /v1/chat/completions and /v1/completions: their bodies, answers and events."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, ClassVar

import msgspec

from luce.server.answer import Answer, Whole
from luce.server.ask import (
    Ask,
    Message,
    Refused,
    Tool,
    budget_of,
    call_of,
    continued,
    refuse,
    thinking,
    typed,
)
from luce.server.content import require_readable, text_of, thoughts_of
from luce.text.pieces import Arguments, CallBegin, CallEnd, Piece, Reasoning, Text
from luce.text.structured import FIELDS, FieldError, constraint_of, opens_objects

REASONS = {"stop": "stop", "stop_string": "stop", "length": "length", "calls": "tool_calls"}
KINDS = {"not_found": "not_found_error", "auth": "authentication_error", "forbidden": "permission_error"}
CODES = {"too_long": "context_length_exceeded", "not_found": "model_not_found", "auth": "invalid_api_key",
         "busy": "server_busy", "no_route": "unknown_url",
         "no_previous": "previous_response_not_found"}  # fmt: skip
NAME = re.compile(r"[^<>\s]{1,256}")  # Calls spell the names of tools so.
MAX_STOPS, MAX_STOP = 16, 1024  # A request has at most so many stop strings, and each so many letters.


class Held(msgspec.Struct, kw_only=True):
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
    """This is what both bodies have in common."""

    # They are of other servers, and change what is said.
    REFUSED: ClassVar = (
        "min_tokens", "stop_token_ids", "use_beam_search", "mirostat", "dry_multiplier",
        "xtc_probability", "web_search_options", "functions", "suffix", "bad_words",
        "allowed_token_ids", "dynatemp_range",
    )  # fmt: skip
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
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    response_format: Any = None
    ignore_eos: bool | None = None


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


class ChatBody(Sampled, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None
    thinking_budget: int | None = None
    reasoning_budget_tokens: int | None = None  # llama.cpp calls it so.
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    audio: Any = None
    modalities: list[str] | None = None


class CompletionBody(Sampled, kw_only=True):
    prompt: str | list[Any]
    n_predict: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None


def sampling_of(body: Sampled) -> dict[str, Any]:
    """Returns the fields of structs.Sampling that are given."""
    if body.n not in (None, 1):
        raise refuse("n: one answer for a request; send as many requests", "n")
    found = within(
        temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, min_p=body.min_p, seed=body.seed
    )
    return found


def penalties_of(
    presence: float | None, frequency: float | None, repetition: float | None, bias: Any = None
) -> dict[str, Any]:
    """Returns the fields of structs.Penalties that are given."""
    found = within(presence=presence, frequency=frequency, repetition=repetition)
    if bias:
        try:
            found["bias"] = tuple((int(token), float(value)) for token, value in bias.items())
        except (ValueError, TypeError) as error:
            raise refuse("logit_bias has tokens' ids as keys, and numbers", "logit_bias") from error
    return found


def body_penalties(body: Sampled) -> dict[str, Any]:
    repetition = body.repetition_penalty if body.repetition_penalty is not None else body.repeat_penalty
    return penalties_of(body.presence_penalty, body.frequency_penalty, repetition, body.logit_bias)


RANGES = {"temperature": (0, 100), "top_p": (0, 1), "top_k": (-1, 2**31 - 1), "min_p": (0, 1),
          "seed": (-(2**63), 2**64 - 1), "presence": (-2, 2), "frequency": (-2, 2),
          "repetition": (0.01, 100)}  # fmt: skip


def within(**given: float | None) -> dict[str, Any]:
    """Returns the fields of structs.Sampling that are given. Raises Refused where one is out of its range."""
    found: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    for name, value in found.items():
        low, high = RANGES[name]
        if not low <= value <= high:
            name += "_penalty" if name in ("presence", "frequency", "repetition") else ""
            raise refuse(f"{name} is {value}: it has to be from {low} to {high}", name)
    if "top_k" in found:
        found["top_k"] = max(int(found["top_k"]), 0)  # Both -1 and 0 mean off.
    if "seed" in found:
        found["seed"] = int(found["seed"]) % 2**64
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


def message_of(message: ChatMessage) -> Message:
    """Returns a message as templates take it."""
    if message.role not in ("system", "developer", "user", "assistant", "tool", "function"):
        raise refuse(f"{message.role!r} is no role", "messages")
    found: Message = {"role": message.role, "content": text_of(message.content, "messages")}
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


def _messages_of(body: ChatBody, whole: bool) -> tuple[list[Message], bool]:
    """Returns the messages as templates take them, and whether the answer goes on behind the last one."""
    *before, last = body.messages
    if any(message.prefix for message in before) or (last.prefix and last.role != "assistant"):
        raise refuse("prefix is for the last message, of the assistant", "messages")
    require_readable([(message.role, message.content) for message in body.messages], "messages")
    asked = True if last.prefix else body.continue_final_message
    messages = [message_of(message) for message in body.messages]
    return continued(messages, asked, body.add_generation_prompt, whole)


def error_body(refused: Refused) -> dict[str, Any]:
    """Returns OpenAI's form of an error."""
    kind = KINDS.get(refused.kind, "invalid_request_error" if refused.status < 500 else "server_error")
    code = CODES.get(refused.kind)
    return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": code}}


def usage_of(answer: Answer) -> dict[str, Any]:
    usage = answer.usage
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached, "audio_tokens": 0},
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


class ChatForm(Form):
    """This is the form of /v1/chat/completions."""

    def __init__(self, answer: Answer, include_usage: bool = False):
        super().__init__(answer)
        self._id = "chatcmpl-" + secrets.token_hex(12)
        self._include_usage = include_usage
        self._calls = 0

    def _head(self, kind: str) -> dict[str, Any]:
        answer = self.answer
        return {"id": self._id, "object": kind, "created": answer.created, "model": answer.ask.model,
                "system_fingerprint": "luce"}  # fmt: skip

    def whole(self, all: Whole) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": all.text or None, "refusal": None}
        if not all.calls:
            message["content"] = all.text
        if all.reasoning:
            message["reasoning_content"] = all.reasoning
        if all.calls:
            message["tool_calls"] = [_call(call.name, call.arguments) for call in all.calls]
        reason = REASONS[self.answer.reason]
        choice = {"index": 0, "message": message, "logprobs": self._logprobs(), "finish_reason": reason}
        return self._head("chat.completion") | {
            "choices": [choice],
            "usage": usage_of(self.answer),
            "timings": self.answer.timings(),
        }

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
        choice = {"index": 0, "delta": delta, "logprobs": self._logprobs(), "finish_reason": reason}
        usage = {"usage": None} if self._include_usage else {}
        return self.sse(self._head("chat.completion.chunk") | {"choices": [choice]} | usage | more)

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

    def end(self) -> Iterator[bytes]:
        yield self._chunk({}, REASONS[self.answer.reason], timings=self.answer.timings())
        if self._include_usage:
            head = self._head("chat.completion.chunk")
            yield self.sse(head | {"choices": [], "usage": usage_of(self.answer)})
        yield b"data: [DONE]\n\n"

    def failed(self, refused: Refused) -> Iterator[bytes]:
        yield self.sse(error_body(refused))
        yield b"data: [DONE]\n\n"


def _call(name: str, arguments: str = "") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": "call_" + secrets.token_hex(12), "type": "function", "function": function}


class CompletionForm(Form):
    """This is the form of /v1/completions. `before` is the prompt's text where it is echoed."""

    def __init__(self, answer: Answer, include_usage: bool = False, before: str = ""):
        super().__init__(answer)
        self._id = "cmpl-" + secrets.token_hex(12)
        self._include_usage, self._before = include_usage, before
        self._offset = len(before)

    def _logprobs(self) -> dict[str, Any] | None:
        """Returns the log-probabilities of the tokens since the last call."""
        said = self.answer.take_logprobs()
        if not said:
            return None
        text_of = self.answer.model.tokenizer.decode
        texts = [text_of([token], special=True) for token, _ in said]
        begin, self._offset = self._offset, self._offset + sum(map(len, texts))
        return {
            "tokens": texts,
            "token_logprobs": [found.logprob for _, found in said],
            "top_logprobs": [{text_of([t], special=True): p for t, p in found.top} for _, found in said],
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=begin)),
        }

    def _object(self, text: str, reason: str | None, **more: Any) -> dict[str, Any]:
        answer = self.answer
        choice = {"index": 0, "text": text, "logprobs": self._logprobs(), "finish_reason": reason}
        head = {"id": self._id, "object": "text_completion", "created": answer.created}
        return head | {"model": answer.ask.model, "system_fingerprint": "luce", "choices": [choice]} | more

    def whole(self, all: Whole) -> dict[str, Any]:
        reason, usage = REASONS[self.answer.reason], usage_of(self.answer)
        return self._object(self._before + all.text, reason, usage=usage, timings=self.answer.timings())

    def begin(self) -> Iterator[bytes]:
        if self._before:
            yield self.sse(self._object(self._before, None))

    def piece(self, piece: Piece) -> Iterator[bytes]:
        if isinstance(piece, Text):
            yield self.sse(self._object(piece.text, None))

    def end(self) -> Iterator[bytes]:
        yield self.sse(self._object("", REASONS[self.answer.reason], timings=self.answer.timings()))
        if self._include_usage:
            yield self.sse(self._object("", None, usage=usage_of(self.answer)) | {"choices": []})
        yield b"data: [DONE]\n\n"

    def failed(self, refused: Refused) -> Iterator[bytes]:
        yield self.sse(error_body(refused))
        yield b"data: [DONE]\n\n"


def chat_ask(body: ChatBody) -> Ask:
    """Returns the request of a body. Raises Refused where it asks for what is not there."""
    if body.audio is not None or (body.modalities and body.modalities != ["text"]):
        raise refuse("audio is not supported", "audio")
    if body.top_logprobs is not None and not (body.logprobs and 0 <= body.top_logprobs <= 20):
        raise refuse("top_logprobs is from 0 to 20, and needs logprobs", "top_logprobs")
    if not body.messages:
        raise refuse("there is no message", "messages")
    tools = tools_of(body.tools)
    variables = thinking(body.reasoning_effort, body.enable_thinking)
    if body.preserve_thinking is not None:
        variables["preserve_thinking"] = body.preserve_thinking
    if body.thinking_budget is not None:
        variables["thinking_budget"] = body.thinking_budget
    more = body.chat_template_kwargs or {}
    if taken := {"messages", "tools", "self"} & more.keys():
        raise refuse(f"chat_template_kwargs names {min(taken)}, which is no variable", "chat_template_kwargs")
    variables |= more
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    budget = variables.get("thinking_budget", body.reasoning_budget_tokens)
    choice, tools = choice_of(body.tool_choice, tools)
    held = held_to(body, response_format=body.response_format)
    whole = held["constraint"] is not None or choice not in ("auto", "none")
    messages, continues = _messages_of(body, whole)
    return Ask(
        model=body.model,
        messages=messages,
        tools=tools,
        choice=choice,
        parallel_calls=body.parallel_tool_calls is not False,
        max_tokens=length_of(body.max_completion_tokens, body.max_tokens),
        sampling=sampling_of(body),
        penalties=body_penalties(body),
        stops=stops_of(body.stop),
        variables=variables,
        budget=budget_of(budget, "thinking_budget"),
        continues=continues,
        **held,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        stream=bool(body.stream),
        ignore_eos=bool(body.ignore_eos),
    )


def completion_ask(body: CompletionBody) -> Ask:
    """Returns the request of a body. Raises Refused where it asks for what is not there."""
    prompt = body.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt):
        raise refuse("several prompts: send a request for each", "prompt")
    if body.best_of not in (None, 1):
        raise refuse("best_of is not supported", "best_of")
    if body.logprobs is not None and not 0 <= body.logprobs <= 20:
        raise refuse("logprobs is from 0 to 20", "logprobs")
    new = length_of(body.max_tokens, body.n_predict, 16)
    return Ask(
        model=body.model,
        prompt=prompt,
        max_tokens=new,
        sampling=sampling_of(body),
        penalties=body_penalties(body),
        stops=stops_of(body.stop),
        **held_to(body, response_format=body.response_format),
        logprobs=body.logprobs,
        stream=bool(body.stream),
        ignore_eos=bool(body.ignore_eos),
    )


def usage_wanted(body: Sampled) -> bool:
    return bool((body.stream_options or {}).get("include_usage"))
