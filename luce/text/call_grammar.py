"""Makes the grammars of calls of tools, in llguidance's Lark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache

from luce.errors import ArgumentError
from luce.server.ask import Tool
from luce.text.pattern import literal
from luce.text.schema import SchemaError, Signature, Value, signatures
from luce.text.structured import (
    THOUGHT,
    Constraint,
    answer_rules,
    json_rule,
    regex_rule,
    text_rule,
    with_grammars,
)

_END = "\n</parameter>\n"


def call_grammar(
    tools: Sequence[Tool],
    thinks: bool,
    required: bool,
    many: bool,
    constraint: Constraint | None = None,
    closed: bool = True,
) -> str:
    """Returns the grammar of text with calls of tools, each as the dialect spells it. Where `required`,
    there is at least one, and at once (after thoughts, if the prompt has begun some), or there is what
    `constraint` asks for instead. `many` allows more than one. Objects that list properties are `closed`.
    Raises ArgumentError, which names the tool, where a call cannot be held to a tool's schema."""
    rules = []
    for at, tool in enumerate(tools):
        rules.append(_function(f"f{at}", tool, closed))
    names = " | ".join(f"f{at}" for at in range(len(tools)))
    call = f'call: "<tool_call>\\n<function=" ({names}) "</function>\\n</tool_call>"\n'
    rest = f"text[suffix={text_rule(_END)}]: /(?s:.*)/\n"
    before = 'thought "\\n\\n"? ' if thinks else ""
    named: dict[str, str] = {}
    if required:
        calls = f"call{' (BLANK call)*' if many else ''}"
        start = f"start: {before}{calls if constraint is None else f'({calls} | answer)'}\n"
        start += "BLANK: /\\n{0,2}/\n"
        if constraint is not None:
            answer, named = answer_rules(constraint)
            start += answer
    else:
        free = 'lead[suffix="<tool_call>"]: /(?s:.*)/\nTAIL: /(?s:.*)/ & ~/(?s:.*<tool_call>.*)/\n'
        call = call.replace('"<tool_call>\\n', '"\\n')
        start = f"start: (lead call)* TAIL\n{free}" if many else f"start: TAIL | lead call\n{free}"
        thinks = False
    return with_grammars(start + (THOUGHT if thinks else "") + call + rest + "".join(rules), named)


def _function(rule: str, tool: Tool, closed: bool) -> str:
    """Returns the rules of one tool. Its parameters come in the order of its schema; those that are not
    required may be left out."""
    try:
        forms = _signatures(json.dumps(tool.parameters), tool.strict, closed)
    except SchemaError as error:
        raise ArgumentError(f"the tool {tool.name}: {error}") from error
    bodies, rules = [], ""
    for at, form in enumerate(forms):
        body, more = _parameters(f"{rule}_{at}" if at else rule, form)
        bodies.append(body)
        rules += more
    head = text_rule(f"{tool.name}>\n")
    body = bodies[0] if len(bodies) == 1 else "(" + " | ".join(each or '""' for each in bodies) + ")"
    return f"{rule}: {head} {body}\n{rules}"


@lru_cache(512)
def _signatures(schema: str, strict: bool, closed: bool) -> list[Signature]:
    """Returns the forms of a tool's calls: agents send the same tools again and again."""
    return signatures(json.loads(schema), exact=strict, closed=closed)


def _parameters(rule: str, form: Signature) -> tuple[str, str]:
    """Returns the parameters of a call, and the rules that they name."""
    parts, rules = [], ""
    for at, each in enumerate(form.parameters):
        name = f"{rule}_{at}"
        parts.append(name if each.required else f"{name}?")
        value, more = _value(name, each.value)
        rules += f"{name}: {text_rule(f'<parameter={each.name}>' + chr(10))} {value}\n{more}"
    if form.others:
        often = f"{{{form.least},{'' if form.most is None else form.most}}}"
        parts.append(f"{rule}_other{often if form.least or form.most is not None else '*'}")
        ways = []
        taken = " | ".join(text_rule(f"<parameter={each.name}>\n") for each in form.parameters)
        for at, (regex, value) in enumerate(form.others):
            way, key = f"{rule}_other{at}", f"{rule}_KEY{at}".upper()
            spelled, more = _value(way, value)
            ways.append(f"{key} {spelled}")
            rules += f"{key}: /<parameter=(?:{regex})>\\n/ & /<parameter=[^<>\\n]{{1,256}}>\\n/"
            rules += f"{f' & ~({taken})' if taken else ''}\n{more}"
        rules += f"{rule}_other: {' | '.join(ways)}\n"
    return " ".join(parts), rules


def _value(rule: str, value: Value) -> tuple[str, str]:
    """Returns a parameter's value and its end, and the rules that it names: text where it may be any string,
    else the strings that are listed or described, as they are, and JSON."""
    if value.text:
        return "text", ""
    ways, rules = [], ""
    found = [text_rule(text) for text in value.texts] + ([json_rule(value.json)] if value.json else [])
    if found:
        ways.append(f"({' | '.join(found)}) {text_rule(_END)}")
    if value.regexes:
        end, terminal = literal(_END), f"{rule}_text".upper()
        ways.append(f"{rule}_text")
        rules = f"{rule}_text[suffix={text_rule(_END)}]: {terminal}\n"
        rules += f"{terminal}: ({regex_rule(value.regexes)}) & ~/(?s:.*){end}(?s:.*)/\n"
    return f"({' | '.join(ways)})", rules
