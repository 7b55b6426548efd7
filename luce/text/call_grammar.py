"""Makes the grammars that an answer is held to, JSON of a schema or calls of tools, in llguidance's Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from luce.server.ask import Tool
from luce.text.grammar import WHITESPACE
from luce.text.pieces import TEXT, alternatives, choices_of, types_of

ANY_OBJECT = {"type": "object"}
_THOUGHT = 'thought[suffix="</think>"]: /(?s:.*)/\n'


def json_grammar(schema: dict[str, Any], thinks: bool) -> str:
    """Returns the grammar of JSON texts of a schema; {} is any object. `thinks` puts thoughts that the
    prompt has begun before them."""
    before = 'thought "\\n\\n"? ' if thinks else ""
    return f"start: {before}json\n{_THOUGHT if thinks else ''}json: {_json(schema or ANY_OBJECT)}\n"


def call_grammar(
    tools: Sequence[Tool], thinks: bool, required: bool, many: bool, schema: Mapping[str, Any] | None = None
) -> str:
    """Returns the grammar of text with calls of tools, each as the dialect spells it. Where `required`,
    there is at least one, and at once (after thoughts, if the prompt has begun some), or there is JSON of
    `schema` instead. `many` allows more than one."""
    rules = []
    for at, tool in enumerate(tools):
        rules.append(_function(f"f{at}", tool))
    names = " | ".join(f"f{at}" for at in range(len(tools)))
    call = f'call: "<tool_call>\\n<function=" ({names}) "</function>\\n</tool_call>"\n'
    rest = 'text[suffix="\\n</parameter>\\n"]: /(?s:.*)/\n'
    before = 'thought "\\n\\n"? ' if thinks else ""
    if required:
        calls = f"call{' (BLANK call)*' if many else ''}"
        start = f"start: {before}{calls if schema is None else f'({calls} | json)'}\nBLANK: /\\n{{0,2}}/\n"
        start += "" if schema is None else f"json: {_json(dict(schema) or ANY_OBJECT)}\n"
    else:
        free = 'lead[suffix="<tool_call>"]: /(?s:.*)/\nTAIL: /(?s:.*)/ & ~/(?s:.*<tool_call>.*)/\n'
        call = call.replace('"<tool_call>\\n', '"\\n')
        start = f"start: (lead call)* TAIL\n{free}" if many else f"start: TAIL | lead call\n{free}"
        thinks = False
    return start + (_THOUGHT if thinks else "") + call + rest + "".join(rules)


def _function(rule: str, tool: Tool) -> str:
    """Returns the rules of one tool. Its parameters come in the order of its schema; those that are not
    required may be left out."""
    properties = tool.parameters.get("properties") or {}
    required = tool.parameters.get("required") or ()
    parts, rules = [], ""
    for at, (key, schema) in enumerate(properties.items()):
        name = f"{rule}_{at}"
        parts.append(name if key in required else f"{name}?")
        rules += f"{name}: {_text(f'<parameter={key}>' + chr(10))} {_value(schema, tool)}\n"
    head = _text(f"{tool.name}>\n")
    return f"{rule}: {' '.join([head, *parts])}\n{rules}"


def _value(schema: Any, tool: Tool) -> str:
    """Returns the rule of a parameter's value and its end: text where it may be any string, else the strings
    that are listed, as they are, and JSON."""
    end, root = _text("\n</parameter>\n"), tool.parameters
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    found = list[str]()
    for each in alternatives(schema, root):
        if choices := choices_of(each):
            found += [_text(one) for one in choices if isinstance(one, str)]
            others = [one for one in choices if not isinstance(one, str)]
            found += [_json({"enum": others})] if others else []
        elif TEXT.isdisjoint(types_of(each, root)):
            found.append(_json(dict(each) | shared))
        else:
            return "text"
    return f"({' | '.join(found)}) {end}" if found else "text"


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps(schema | {'x-guidance': {'whitespace_pattern': WHITESPACE}})}"


def _text(text: str) -> str:
    """Returns a literal."""
    return json.dumps(text, ensure_ascii=False)
