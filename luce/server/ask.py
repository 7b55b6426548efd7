"""Says what a request asks for, whatever API it came by, and how it is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from luce.text.structured import Constraint

Message = dict[str, Any]
EFFORTS = {
    "minimal": "low", "low": "low", "medium": "medium", "high": "xhigh", "xhigh": "xhigh", "max": "xhigh"
}  # fmt: skip


class Refused(Exception):
    """This is a request that is not answered. `status` is HTTP's. `kind` is "invalid", "too_long",
    "not_found", "busy", "auth", "forbidden", "too_large" or "failed", which each API names in its own way.
    `param` is the field that is to blame."""

    def __init__(
        self, status: int, message: str, kind: str = "invalid", param: str | None = None, retry_after: int = 0
    ):
        super().__init__(message)
        self.status, self.message, self.kind, self.param = status, message, kind, param
        self.retry_after = retry_after


class TooLong(Refused):
    """The prompt is longer than the context. Clients then drop older messages or sum them up. Where not all
    of its tokens were counted, it has `at_least` so many."""

    def __init__(self, tokens: int, most: int, at_least: bool = False):
        self.tokens, self.most = f"{'at least ' if at_least else ''}{tokens} tokens", most
        said = f"This model's maximum context length is {most} tokens, and the prompt has {self.tokens}."
        super().__init__(400, said, "too_long", "messages")


def refuse(message: str, param: str | None = None) -> Refused:
    """Returns the refusal of a request that asks for what cannot be done, or not here."""
    return Refused(400, message, param=param)


def typed(value: Any, kind: Any, param: str) -> Any:
    """Returns what a body has at some place, of the type that it has to have there. Raises Refused where it
    has another."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise refuse(f"{param}: {error}", param) from error


@dataclass(frozen=True)
class Tool:
    """This is a function that the model may call. `parameters` is a JSON schema."""

    name: str
    parameters: Mapping[str, Any]
    description: str = ""
    strict: bool = False

    @property
    def as_template(self) -> dict[str, Any]:
        """Returns the tool as chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Ask:
    """This is one request. `prompt` is raw text or tokens, or None where `messages` are to be put into the
    chat template, each {"role", "content", ...} as templates take them. `variables` are the template's own
    beside these. `sampling` has the fields that were given, by their names in structs.Sampling.

    `choice` of tools is "auto", "none", "required" or the name of one. `constraint` is what the text is held
    to, None for free text; in it and in tools' schemas, `open_objects` may have other properties than the
    listed ones. `logprobs` is how many alternatives to list for each token;
    None lists not even its own. `ignore_eos` is as in plan.Request. `max_tokens` None means until the
    context is full. Thoughts have at most `budget` tokens before they are ended; None leaves it to the model.
    """

    model: str
    messages: Sequence[Message] = ()
    prompt: str | Sequence[int] | None = None
    tools: Sequence[Tool] = ()
    choice: str = "auto"
    parallel_calls: bool = True
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    penalties: Mapping[str, Any] = field(default_factory=dict)
    stops: tuple[str, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    constraint: Constraint | None = None
    open_objects: bool = False
    logprobs: int | None = None
    stream: bool = False
    ignore_eos: bool = False
    budget: int | None = None


def text_of(content: Any, param: str, between: str = "") -> str:
    """Returns the text of a message's content: a string, or a list of parts, which all have to be text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise refuse(f"a part of type {kind!r} is not supported: this model reads text alone", param)
        text = part.get("text", part.get("refusal", "")) if isinstance(part, Mapping) else ""
        if not isinstance(text, str):
            raise refuse("the text of a part is no string", param)
        texts.append(text)
    return between.join(texts)


def arguments_of(text: Any) -> dict[str, Any]:
    """Returns a call's arguments as templates take them. What is no JSON object is kept as one value."""
    if isinstance(text, Mapping):
        return dict(text)
    try:
        found = json.loads(text or "{}")
    except (ValueError, TypeError, RecursionError):
        found = text
    return found if isinstance(found, dict) else {"arguments": found}


def call_of(name: str, arguments: Any, id: str | None = None) -> dict[str, Any]:
    """Returns a call of an assistant's message, as templates take it."""
    function = {"name": name, "arguments": arguments_of(arguments)}
    return {"id": id or "", "type": "function", "function": function}


def ordered(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages in an order that templates accept: one system message, which is the first. Later
    ones become a user's where they stand, so that the beginning of a prompt stays what it was."""
    system = []
    rest = list(messages)
    while rest and rest[0]["role"] in ("system", "developer"):
        system.append(rest.pop(0)["content"])
    found: list[Message] = []
    if text := "\n\n".join(filter(None, system)):
        found.append({"role": "system", "content": text})
    for message in rest:
        moved = message["role"] in ("system", "developer")
        found.append({**message, "role": "user"} if moved else message)
    return found


def budget_of(given: Any, param: str) -> int | None:
    """Returns how many tokens thoughts may have; -1 and None bound nothing."""
    if given is not None and (type(given) is not int or given < -1):
        raise refuse(f"{param} is {given!r}: it is a number of tokens, or -1", param)
    return None if given == -1 else given


def thinking(effort: str | None, enable: bool | None = None) -> dict[str, Any]:
    """Returns a template's variables that say how much to think."""
    found: dict[str, Any] = {}
    if effort == "none":
        enable = False
    elif effort is not None:
        if not isinstance(effort, str) or effort not in EFFORTS:
            raise refuse(f"{effort!r} is none of none, {', '.join(EFFORTS)}", "reasoning_effort")
        found["reasoning_effort"] = EFFORTS[effort]
    return found if enable is None else found | {"enable_thinking": enable}
