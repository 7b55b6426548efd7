"""Requests of what users write: text, tokens or messages, tools, and options."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from numbers import Integral
from threading import Lock
from typing import Any

from luce.decode.request import Request
from luce.errors import ArgumentError, ContextFull, UnsupportedError, about
from luce.model.defaults import penalties_of, sampling_of
from luce.model.loaded import Loaded
from luce.model.options import Chosen, How, HowChat, chosen
from luce.planning.opened import Files
from luce.text.conversation import arguments_of, ordered
from luce.text.dialects import QWEN, Opening
from luce.text.held import Held
from luce.text.prompt import BoundedTemplate, chat_template, opening_of, prompt_ids
from luce.text.speech import Speech
from luce.text.structured import Constraint, Grammar, JsonSchema
from luce.text.tool import Tool

Message = Mapping[str, Any]  # {"role": ..., "content": ...}, with the fields that chat templates read.
Schema = Mapping[str, Any] | str  # A JSON schema, or its text.
MAX_TOKENS, MAX_CHAT_TOKENS = 512, 2048  # So many tokens follow at most where nothing was said.
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Asked:
    """A request, and the parser of its answer; without one, text is text."""

    request: Request
    parser: Speech | None = None


class Prompting:
    """Makes requests for one model, in any thread. It is a context manager."""

    def __init__(self, files: Files, loaded: Loaded):
        self._files, self._loaded, self._tokenizer = files, loaded, files.tokenizer
        self._template: BoundedTemplate | None = None
        self._turn = Lock()  # A template renders one prompt at a time.
        self._opened = ExitStack()

    # ---- text

    def text(self, prompt: str | Sequence[int], schema: Schema | None, how: How) -> Asked:
        """Returns the request that continues a text, or tokens. Raises ArgumentError, ContextFull, and TypeError
        for an option that there is not."""
        options = chosen(how, self._tokenizer.n_vocab, MAX_TOKENS)
        return Asked(self._request(self.tokens(prompt), options, Held(constraint=_constraint(schema, options))))

    def tokens(self, prompt: str | Sequence[int]) -> list[int]:
        """Returns the tokens of a text, which begin with the model's first token where it has one, or tokens as
        they are."""
        n_ctx, n_vocab = self._loaded.info.n_ctx, self._tokenizer.n_vocab
        if isinstance(prompt, str):
            ids = self._tokenizer.encode(prompt, special=False, add_bos=True, most=n_ctx)
        elif isinstance(prompt, bytes | bytearray) or not _is_of(Integral, prompt):
            raise ArgumentError(f"the prompt is {prompt!r:.80}: it is a text, or token ids")
        else:
            ids = [int(token) for token in prompt]
            for token in ids:
                if not 0 <= token < n_vocab:
                    raise ArgumentError(f"the prompt has the token {token}, which is none of the model's {n_vocab}")
        return self._fitting(ids)

    # ---- conversations

    def chat(self, messages: Sequence[Message], how: HowChat) -> Asked:
        """Returns the request that answers messages. Raises as text() does, UnsupportedError where the file has
        no chat template, and TemplateFailed where it refuses them."""
        options = chosen(how, self._tokenizer.n_vocab, MAX_CHAT_TOKENS, self._recommended, HowChat)
        declared = [tool_of(tool) for tool in how.get("tools", ())]
        tool_choice, think = how.get("tool_choice", "auto"), how.get("think")
        names = [tool.name for tool in declared]
        if tool_choice not in ("auto", "none", "required", *names):
            raise ArgumentError(f"tool_choice is {tool_choice!r:.80}: it is auto, none, required or a tool's name")
        if tool_choice not in ("auto", "none") and not declared:
            raise ArgumentError(f"tool_choice is {tool_choice}, and there are no tools")
        held = Held(declared, tool_choice, constraint=_constraint(how.get("schema"), options))
        shown = [] if tool_choice == "none" else declared
        ids = self.messages(messages, shown, {} if think is None else {"enable_thinking": think})
        if think is not None and ids == self.messages(messages, shown, {"enable_thinking": not think}):
            raise UnsupportedError(f"think is {think}, and the chat template has nothing to turn thinking on and off")
        opening = opening_of(self._tokenizer, ids)
        return Asked(self._request(ids, options, held, opening), held.parser(opening))

    def messages(self, messages: Sequence[Message], tools: Sequence[Tool], how: Mapping[str, Any]) -> list[int]:
        """Returns the tokens of a conversation, as the chat template writes it. `how` is as in prompt_ids."""
        if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
            raise ArgumentError(f"the messages are {messages!r:.80}: they are a list of messages")
        said, most = ordered([message_of(each) for each in messages]), self._loaded.info.n_ctx
        if not said:
            raise ArgumentError("there are no messages")
        shown = [tool.as_template for tool in tools] or None
        with self._turn, about(self._files.file.path):
            if self._template is None:
                self._template = chat_template(self._files.file.kv)
                self._opened.callback(self._template.close)
            ids = prompt_ids(self._template, self._tokenizer, said, shown, most, **how)
        return self._fitting(ids)

    def _recommended(self) -> dict[str, Any]:
        """Returns what the file says of sampling in a chat, else what Qwen recommends."""
        with about(self._files.file.path):
            kv = self._files.file.kv
            return sampling_of(kv) | {f"{name}_penalty": value for name, value in penalties_of(kv).items()}

    # ---- both

    def _request(self, ids: list[int], options: Chosen, held: Held, opening: Opening | None = None) -> Request:
        lark = None if held.is_free else held.lark(opening or Opening(QWEN))
        return Request(
            tuple(ids),
            options.max_tokens,
            options.sampling,
            options.stops,
            options.ignore_eos,
            options.penalties,
            self._loaded.grammars.lark(lark) if lark else None,
            options.logprobs,
        )

    def _fitting(self, ids: list[int]) -> list[int]:
        """Returns the tokens of a prompt, which an engine can read. The rest of one that is far too long was
        not even encoded."""
        n_ctx = self._loaded.info.n_ctx
        if not ids:
            raise ArgumentError("the prompt is empty")
        if len(ids) > n_ctx:
            trained = self._files.facts.context_length or n_ctx
            remedy = "luce.load with a larger ctx has room for more" if n_ctx < trained else "the model takes no more"
            raise ContextFull(f"a prompt of at least {len(ids)} tokens, a context of {n_ctx}: {remedy}")
        return ids

    def close(self) -> None:
        self._opened.close()


def _is_of(kind: type, values: object) -> bool:
    return isinstance(values, Sequence) and all(isinstance(each, kind) for each in values)


def _constraint(schema: Schema | None, options: Chosen) -> Constraint | None:
    if schema is not None and options.grammar is not None:
        raise ArgumentError("schema and grammar both say what the answer has to be: give one of them")
    if options.grammar is not None:
        return Grammar(options.grammar)
    if schema is None:
        return None
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"the schema is no JSON: {error}") from error
    if not isinstance(schema, Mapping):
        raise ArgumentError("the schema is no JSON object")
    return JsonSchema(dict(schema))


def tool_of(given: Mapping[str, Any]) -> Tool:
    """Returns a tool of {"name", "description", "parameters"}, which may stand below "function", as OpenAI's
    clients write it."""
    found = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        raise ArgumentError(f"a tool is {given!r:.80}: it is a mapping with a name and parameters")
    parameters = found.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise ArgumentError(f"the parameters of {found['name']} are no JSON schema, which is an object")
    return Tool(found["name"], parameters, str(found.get("description") or ""), bool(found.get("strict")))


def message_of(given: Message) -> dict[str, Any]:
    """Returns a message as chat templates take it. The arguments of its calls may be JSON, as OpenAI's clients
    write them."""
    if not isinstance(given, Mapping) or given.get("role") not in ROLES:
        raise ArgumentError(f"a message is {given!r:.80}: it is a mapping whose role is one of {', '.join(ROLES)}")
    content = given.get("content")
    if content is not None and not isinstance(content, str):
        raise ArgumentError(f"the content of a message is {content!r:.80}: it is a text")
    if content is None and given["role"] != "assistant":
        raise ArgumentError(f"a message is {given!r:.80}: it has no content, which is a text")
    found = {**given, "content": content or ""}
    if calls := given.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in calls]
    return found


def _call(given: Any) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ArgumentError(f"a call of a message is {given!r:.80}: it has a function with a name and arguments")
    return {**given, "function": {**function, "arguments": arguments_of(function.get("arguments"))}}
