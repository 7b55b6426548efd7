"""Conversations in simpler words, for chat templates that refuse them as they are.

Published templates raise where nobody asks (Qwen3.5), where roles do not alternate (Gemma 2, Mistral), where
there is a system message (Gemma 2), or at calls whose ids or number they do not know (Mistral, Llama 3).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]  # {"role", "content", ...} as templates take it


def ways(messages: Sequence[Message], attached: bool = False) -> Iterator[list[Message]]:
    """Yields the conversation as it is, then in ways that ask ever less of a template, each once: with a
    user's message, with roles by turns, with the system's words as a user's, and with calls and their answers
    as text. What tools answered is `attached` to the messages that called them where a template wants it so."""
    messages = _with_answers_attached(messages) if attached else messages
    yield (last := list(messages))
    for steps in (
        (_with_a_question,),
        (_with_a_question, _by_turns),
        (_with_a_question, _without_system, _by_turns),
        (_with_a_question, _calls_as_text, _by_turns),
        (_with_a_question, _calls_as_text, _without_system, _by_turns),
    ):
        way = list(messages)
        for step in steps:
            way = step(way)
        if way != last:
            yield (last := way)


def shows(prompt: str, messages: Sequence[Message]) -> bool:
    """Says whether a prompt has the words of the system, of the last user and of the last tool. A template
    that does not know a role, or expects others around it, may leave them out without a word."""
    for role in ("system", "user", "tool"):
        texts = [message["content"] for message in messages if message["role"] == role]
        text = texts[0 if role == "system" else -1] if texts else ""
        if isinstance(text, str) and (text := text.strip()) not in prompt:
            if json.dumps(text, ensure_ascii=False)[1:-1] not in prompt:
                return False
    return True


def _with_answers_attached(messages: Sequence[Message]) -> list[Message]:
    """Puts what tools answered into the message that called them, as `tool_responses`, and the text that follows
    them too, since that is of the same turn."""
    found: list[Message] = []
    names: dict[str, str] = {}
    for message in messages:
        last = found[-1] if found else {}
        if message["role"] == "tool" and last.get("tool_calls"):
            known, at = last.get("tool_responses", []), len(last.get("tool_responses", []))
            calls = last["tool_calls"]
            name = names.get(message.get("tool_call_id") or "", calls[min(at, len(calls) - 1)]["function"]["name"])
            answer = {"name": name, "response": message["content"]}
            found[-1] = {**last, "tool_responses": [*known, answer]}
        elif message["role"] == "assistant" and last.get("tool_responses") and not message.get("tool_calls"):
            text = "\n\n".join(filter(None, [last["content"], message["content"]]))
            found[-1] = {**last, "content": text}
        else:
            found.append(message)
            names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if call.get("id")}
    return found


def _with_a_question(messages: Sequence[Message]) -> list[Message]:
    """Adds a user's empty message behind the system's where there is no user's at all."""
    if any(message["role"] == "user" for message in messages):
        return list(messages)
    at = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return [*messages[:at], {"role": "user", "content": ""}, *messages[at:]]


def _by_turns(messages: Sequence[Message]) -> list[Message]:
    """Makes one message of neighbours of the same role, but of answers of tools, and lets a user begin."""
    found: list[Message] = []
    for message in messages:
        role = message["role"]
        if role == "assistant" and all(each["role"] == "system" for each in found):
            found.append({"role": "user", "content": ""})
        texts = [each["content"] for each in (*found[-1:], message)]
        if (
            found
            and role != "tool"
            and found[-1]["role"] == role
            and all(isinstance(text, str) for text in texts)
        ):
            found[-1] = _joined(found[-1], message)
        else:
            found.append(message)
    return found


def _joined(first: Message, second: Message) -> Message:
    found = {**first, **second}
    for key, between in (("content", "\n\n"), ("reasoning_content", "\n\n")):
        if texts := [each[key] for each in (first, second) if each.get(key)]:
            found[key] = between.join(texts)
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        found["tool_calls"] = calls
    return found


def _without_system(messages: Sequence[Message]) -> list[Message]:
    return [{**message, "role": "user"} if message["role"] == "system" else message for message in messages]


def _calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """Writes calls and what tools answered as Qwen's older models spell them."""
    found: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            found.append({"role": "user", "content": text})
            continue
        if calls := message.get("tool_calls"):
            called = [{key: call["function"][key] for key in ("name", "arguments")} for call in calls]
            spelled = [
                f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in called
            ]
            plain = {key: value for key, value in message.items() if key != "tool_calls"}
            message = {**plain, "content": "\n\n".join(filter(None, [message["content"], *spelled]))}
        found.append(message)
    return found


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
