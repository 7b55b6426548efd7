"""Says what a request asks for, whatever API it came by, and how it is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from luce.text.infill import Gap
from luce.text.structured import Constraint
from luce.text.thinking import SCALE
from luce.text.tool import Tool

Message = dict[str, Any]
Thoughts = Literal["apart", "within", "left out"]  # Where an answer has them: "within" is within its text.
EFFORTS = ("none", *SCALE)


class Refused(Exception):
    """This is a request that is not answered. `status` is HTTP's. `kind` is "invalid", "too_long",
    "not_found", "no_route", "no_previous", "busy", "auth", "forbidden", "too_large" or "failed", which each
    API names in its own way. `param` is the field that is to blame."""

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
class Ask:
    """This is one request. `prompt` is raw text, tokens or a gap to fill, or None where `messages` are to be
    put into the chat template, each {"role", "content", ...} as templates take them. `variables` are the
    template's own beside these. `sampling` has the fields that were given, by their names in
    structs.Sampling.

    Control tokens that a raw text spells are such if `special`; `add_bos` begins it with the model's first
    token. There are `n` answers to each of several `prompts`, of which `prompt` is the first. `echo` puts the
    prompt before the answer. `scored` lists the log-probabilities of its tokens, with so many alternatives.
    `embeds` asks for its vector, and for no answer.

    `choice` of tools is "auto", "none", "required" or the name of one. `constraint` is what the text is held to,
    None for free text; in it and in tools' schemas, `open_objects` may have other properties than those listed.
    `logprobs` is how many alternatives to list for each token; None lists not even its own. `ignore_eos` is as in
    plan.Request. `max_tokens` None means until the context is full. `keeps_stop` leaves the stop string that
    ended the text in it. Thoughts have at most `budget` tokens before they are ended; None leaves it to the
    model; `thoughts` says where they are told. With `continues`, the last message is the assistant's, and the
    answer goes on behind it. Thinking that is asked for `outright` is on or off whatever the template reads
    (text/thinking.py). `keep` is the share of the
    prompt that is read, and None reads it whole; `scorer` is the model that has to choose it, where one is named.
    `size` is that of its body in bytes, which says about how long its prompt takes to make.
    """

    model: str
    messages: Sequence[Message] = ()
    prompt: str | Sequence[int] | Gap | None = None
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
    keep: float | None = None
    scorer: str | None = None
    continues: bool = False
    outright: bool = True
    size: int = 0
    prompts: Sequence[str | Sequence[int] | Gap] = ()
    n: int = 1
    special: bool = False
    add_bos: bool = True
    echo: bool = False
    scored: int | None = None
    embeds: bool = False
    keeps_stop: bool = False
    thoughts: Thoughts = "apart"


def keep_of(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns what an Ask has of a body's `prefill`, whose `model` is the only one that there is."""
    if given is None:
        return {}
    keep: Any = given.get("keep")
    if type(keep) not in (int, float) or not 0 < keep <= 1:
        raise refuse(f"prefill.keep is {keep!r}: it is the share of the prompt that is read, above 0 and at most 1",
                     "prefill.keep")  # fmt: skip
    return {"keep": float(keep), "scorer": typed(given.get("model"), str | None, "prefill.model")}


def budget_of(given: Any, param: str) -> int | None:
    """Returns how many tokens thoughts may have; -1 and None bound nothing."""
    if given is not None and (type(given) is not int or given < -1):
        raise refuse(f"{param} is {given!r}: it is a number of tokens, or -1", param)
    return None if given == -1 else given


def continued(
    messages: list[Message], asked: bool | None = None, begin: bool | None = None, whole: bool = False
) -> tuple[list[Message], bool]:
    """Returns the messages and whether the answer goes on behind the last one, which it does where that is
    the assistant's. `asked` says that it has to, or may not; `begin` asks for a new message; a `whole`
    answer, as JSON or a call, has no beginning elsewhere. An empty last message is dropped. Raises Refused
    where what is asked for cannot be."""
    name, last = "continue_final_message", messages[-1] if messages else {}
    if asked and begin:
        raise refuse(f"{name} and add_generation_prompt exclude each other", name)
    if last.get("role") != "assistant":
        if asked:
            raise refuse(f"{name}: the last message is not the assistant's", "messages")
        return messages, False
    if asked is False or begin or (whole and not asked):
        return messages, False
    if last.get("tool_calls"):
        if asked:
            said = "the last message has tool calls, and cannot be continued: answer them"
            raise refuse(said, "messages")
        return messages, False
    if whole:
        said = "an answer that is held to a schema or a call cannot continue the last message"
        raise refuse(said, "messages")
    return (messages, True) if last["content"] or last.get("reasoning_content") else (messages[:-1], False)


def thinking(effort: str | None, enable: bool | None = None) -> dict[str, Any]:
    """Returns what is asked of thinking, as prompt_ids takes it. An effort turns it on, none and minimal off,
    unless `enable` says otherwise."""
    found: dict[str, Any] = {}
    if effort is not None:
        if not isinstance(effort, str) or effort not in EFFORTS:
            raise refuse(f"{effort!r} is none of {', '.join(EFFORTS)}", "reasoning_effort")
        off = effort in ("none", "minimal")
        found = {} if off else {"reasoning_effort": effort}
        enable = not off if enable is None else enable
    return found if enable is None else found | {"enable_thinking": enable}
