"""Turns a model's thinking on and off, by the variables that its chat template reads, else by how the prompt
ends.

Clients ask by `enable_thinking` (true, false) and `reasoning_effort` (minimal to max). Templates differ: one
reads `enable_thinking`, on or off by default, another `thinking`; one knows the efforts low, medium and
xhigh, another none at all. Where a template reads no switch, an empty block of thoughts at the prompt's end
turns thinking off, if the template or the vocabulary knows such blocks, and an open one in place of an empty
one turns it on. What cannot be turned is left as the template has it: an effort that no variable takes means
no more than on or off.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from luce.text.dialects import QWEN, Dialect

BEGIN = QWEN.think[0]  # Clients write thoughts into an answer's text so, whatever the dialect (pieces.py).
_CLOSE = QWEN.think[1]
SWITCHES = ("enable_thinking", "thinking")
EFFORTS = ("reasoning_effort", "thinking_effort")
SCALE = ("minimal", "low", "medium", "high", "xhigh", "max")
_QWEN = {"minimal": "low", "high": "xhigh", "max": "xhigh"}  # Qwen3.8 has low, medium and xhigh.
_NONE = ("none", "no_think")  # Templates whose only variable is an effort say off so.


def variables(asked: Mapping[str, Any], mentions: Collection[str]) -> dict[str, Any]:
    """Returns a template's variables with what is asked of thinking in the words that it reads. `mentions` is
    as in ChatTemplate."""
    found = dict(asked)
    think, effort = asked.get("enable_thinking"), asked.get("reasoning_effort")
    if think is not None:
        for name in SWITCHES:
            if name in mentions:
                found.setdefault(name, think)
    none = next((word for word in _NONE if word in mentions), None)
    if effort is None and think is not None and none is not None and not switches(mentions):
        effort = "high" if think else none
    if effort is not None:
        word = _nearest(effort, mentions) if effort in SCALE else effort
        found |= {name: word for name in EFFORTS if name in mentions or name in asked}
    return found


def switches(mentions: Collection[str]) -> bool:
    """Says whether a template reads a variable that turns thinking on and off."""
    return any(name in mentions for name in SWITCHES)


def _nearest(effort: str, mentions: Collection[str]) -> str:
    """Returns the effort that a template knows and that is nearest, the higher of two."""
    known = [SCALE.index(word) for word in SCALE if word in mentions]
    if effort in mentions or len(known) == 1:  # A single one is its default, and it takes others.
        return effort
    if not known:
        return _QWEN.get(effort, effort)
    at = SCALE.index(effort)
    return SCALE[min(known, key=lambda other: (abs(other - at), -other))]


def switched(prompt: str, think: bool | None, knows: bool, reads: bool, dialect: Dialect = QWEN) -> str:
    """Returns the prompt with its end as thinking is asked for. `knows` says that the model knows blocks of
    thoughts, and `reads` that its template reads a switch, so that a prompt that ends in no block is meant
    so.
    """
    solid, empty, begin = prompt.rstrip(), _empty(dialect).search(prompt), dialect.thought[0]
    if think and empty:
        return opened(prompt, dialect)
    if think is False and solid.endswith(begin):
        return solid + dialect.empty.removeprefix(begin)
    if think is False and knows and not (empty or reads):
        return prompt + dialect.empty
    return prompt  # Where no block was begun, a model begins to think by itself.


def opened(prompt: str, dialect: Dialect = QWEN) -> str:
    """Returns the prompt with an open block of thoughts at its end, in place of an empty one."""
    begin = dialect.thought[0]
    if prompt.rstrip().endswith(begin):
        return prompt
    empty = _empty(dialect).search(prompt)
    return f"{prompt[: empty.start()] if empty else prompt}{begin}\n"


@cache
def _empty(dialect: Dialect) -> re.Pattern[str]:
    """Returns the pattern of an empty block at a prompt's end."""
    return re.compile(rf"{re.escape(dialect.thought[0])}\s*{re.escape(dialect.think[1])}\s*\Z")


def said_of(message: Mapping[str, Any]) -> tuple[str, str | None]:
    """Returns the thoughts of an assistant's message and its text, which is None where the thoughts have not
    ended: there is no text behind them, or a block of thoughts in the content is left open."""
    thought, text = str(message.get("reasoning_content") or ""), str(message["content"])
    if not thought and text.lstrip().startswith(BEGIN):
        thought, closed, rest = text.lstrip().removeprefix(BEGIN).removeprefix("\n").partition(_CLOSE)
        return (thought.rstrip("\n"), rest.lstrip("\n")) if closed else (thought, None)
    return thought, None if thought and not text else text
