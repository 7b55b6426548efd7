"""Items of OpenAI's Responses API as messages: what an agent sends back of a conversation.

Messages, thoughts, calls and what tools answered are read; an item that has nothing for a model, or that
nobody knows, is left out, since agents send each item for ever.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from luce.server.ask import Message, refuse, typed
from luce.server.content import content_of, note_of, output_of, require_readable, told_of
from luce.text.conversation import call_of

Item = dict[str, Any]
ROLES = ("user", "assistant", "system", "developer")
# Thoughts that come back as encrypted_content begin so: they are no secret, only text.
SEALED = "luce:"
# These items are calls of these tools, with their arguments in this field.
CALLS = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "computer_call": ("computer", "action"),
    "program": ("program", "code"),
}
# These are calls that the server answered, with arguments and answer in these fields.
ANSWERED = {
    "mcp_call": (None, "arguments", ("output", "error")),
    "file_search_call": ("file_search", "queries", ("results",)),
    "code_interpreter_call": ("code_interpreter", "code", ("outputs",)),
}
DECLARING = ("additional_tools", "tool_search_output")  # These items have tools.


def kind_of(item: Mapping[str, Any]) -> str:
    """Returns the type of an item, which messages and references need not give."""
    kind = item.get("type")
    if isinstance(kind, str) and kind:
        return kind
    return "message" if "role" in item or "id" not in item else "item_reference"


def declared(items: Sequence[Item]) -> list[Item]:
    """Returns the functions that items declare beside the request's tools."""
    tools = [typed(item.get("tools"), list[Item] | None, "input") or () for item in items
             if kind_of(item) in DECLARING]  # fmt: skip
    return [tool for each in tools for tool in each if tool.get("type") == "function"]


def configured(items: Sequence[Item], name: str, given: Item | None) -> Item | None:
    """Returns `reasoning` or `text` of a request as the last configuration_update among its items has it."""
    updates = [item[name] for item in items if kind_of(item) == "configuration_update" and item.get(name)]
    return typed(updates[-1], Item, "input") if updates else given


def messages_of(items: Sequence[Item], sees: bool = False) -> list[Message]:
    """Returns items as messages. Thoughts, text and calls that follow each other are one message of the
    assistant. Raises Refused where one is malformed, or an image is asked about."""
    if not sees:
        require_readable(_turns(items), "input")
    told = _Messages(sees)
    for item in items:
        told.take(item)
    return told.found


class _Messages:
    """Messages of the items that were taken so far."""

    def __init__(self, sees: bool) -> None:
        self.found: list[Message] = []
        self._sees = sees

    def take(self, item: Item) -> None:
        kind, id = kind_of(item), item.get("call_id") or item.get("id")
        if kind == "message":
            self._message(item)
        elif kind == "reasoning":
            if thought := _thought(item):
                self._assistant(new=True)["reasoning_content"] = thought
        elif kind == "image_generation_call":
            last = self._assistant()
            last["content"] = "\n".join(filter(None, [last["content"], note_of("image")]))
        elif kind == "function_call":
            self._call(item.get("name"), item.get("arguments"), id)
        elif kind == "custom_tool_call":
            self._call(item.get("name"), {"input": item.get("input")}, id)
        elif kind in CALLS:
            name, field = CALLS[kind]
            held = item.get(field)
            self._call(name, held if isinstance(held, Mapping) else {field: held}, id)
        elif kind in ANSWERED:
            self._answered(item, kind, id)
        elif kind.endswith("_output") and kind not in DECLARING:
            self._answer(told_of(item.get("output", item.get("result")), "input", self._sees), id)

    def _message(self, item: Item) -> None:
        role = item.get("role")
        text = content_of(item.get("content"), "input", self._sees, role=role)
        if role not in ROLES:
            raise refuse(f"{role!r} is no role", "input")
        if role != "assistant":
            self.found.append({"role": role, "content": text})
            return
        last = self._assistant()
        if last["content"] or "tool_calls" in last:
            last = self._assistant(new=True)
        last["content"] = text

    def _answered(self, item: Item, kind: str, id: Any) -> None:
        own, field, fields = ANSWERED[kind]
        told = [output_of(_results(item[each]), "input") for each in fields if item.get(each)]
        if told:
            held = item.get(field)
            self._call(own or item.get("name"), held if own is None else {field: held}, id)
            self._answer("\n".join(told), id)

    def _assistant(self, new: bool = False) -> Message:
        if new or not self.found or self.found[-1]["role"] != "assistant":
            self.found.append({"role": "assistant", "content": ""})
        return self.found[-1]

    def _call(self, name: Any, arguments: Any, id: Any) -> None:
        self._assistant().setdefault("tool_calls", []).append(call_of(str(name), arguments, id))

    def _answer(self, text: str | list[dict[str, Any]], id: Any) -> None:
        self.found.append({"role": "tool", "content": text, "tool_call_id": id})


def is_finished(items: Sequence[Item]) -> bool:
    """Says whether the last item is a message that was told to its end, behind which another one begins."""
    return bool(items) and items[-1].get("status") == "completed"


def _turns(items: Sequence[Item]) -> Iterator[tuple[str, Any]]:
    """Yields roles and contents of items as require_readable takes them."""
    for item in items:
        kind = kind_of(item)
        if kind == "message":
            yield str(item.get("role")), item.get("content")
        elif kind == "reasoning" or kind.endswith("_call"):
            yield "assistant", None


def _results(found: Any) -> Any:
    """Returns what a server's tool found, of which only the texts count where each has one."""
    if isinstance(found, list) and all(isinstance(each, Mapping) for each in found):
        texts = [each.get("text", each.get("logs")) for each in found]
        if all(isinstance(text, str) for text in texts):
            return "\n".join(texts)
    return found


def _thought(item: Mapping[str, Any]) -> str:
    """Returns the thoughts of a reasoning item as they were: from its content, or from its encrypted_content;
    else what another server summed up of them."""
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str) and sealed.startswith(SEALED):
        try:
            return base64.b64decode(sealed[len(SEALED) :], validate=True).decode()
        except ValueError:
            return ""
    for field in ("content", "summary"):
        parts = typed(item.get(field), list[Any] | None, "input") or ()
        if text := "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping)):
            return text
    return ""
