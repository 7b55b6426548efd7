"""Makes the grammars of calls of tools in Qwen's dialect, in llguidance's Lark.

A call may end as the parser lets it end (readings.py), so that no model is stuck that leaves out a line break or a
closer. Only a value of any text is hard to end: the others end where their JSON does. Such a text is cut at each
mark in it, since lexemes that end at different places cannot be told apart, and each mark is of the text or not:

    clean       text up to here, in which no call begins
    held        text in which one begins, which may be a whole one (`nest`)
    _d          the same where </parameter> was last: what follows must not be what follows a value
    text        text and the closer of its parameter
    textz       text and the end of the call, without that closer
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache

from luce.errors import ArgumentError
from luce.text.dialects import MAX_NAME
from luce.text.kinds import SchemaError
from luce.text.schema import Signature, Value, signatures
from luce.text.structured import (
    Constraint,
    answer_rules,
    json_rule,
    regex_rule,
    text_rule,
    thought_rules,
    with_grammars,
)
from luce.text.tool import Tool

_PROSE = r" \t\"'`(\[{=+,:|*"  # As in readings.py: a mark behind one of these is spoken of.
_ENDS = rf"""
WS: /[ \t\r\n]{{0,4}}/
ANY: /(?s:.*)/
PLACED: /((?s:.*)([^{_PROSE}]|\n[ \t]*))?/
JSON_END: WS "</parameter>"
TEXT_END: /(\r?\n)?<\/parameter>/
close[lazy]: WS ("</function>" WS)? "</tool_call>"
"""
_TEXTS = r"""
ENDED: /[ \t\r\n]{0,4}(<parameter=[^<>\n]+>|<\/function>|<\/tool_call>)(?s:.*)/
D: ANY "</parameter>"
C: ANY "<tool_call>"
N: ANY "</tool_call>"
Z: (PLACED "</function>" WS | /((?s:.*)\n)?[ \t]*/) "</tool_call>"
DE: D & ~ENDED
CE: C & ~ENDED
NE: N & ~ENDED
ZE: Z & ~ENDED
d[lazy]: D
de[lazy]: DE
c[lazy]: C
ce[lazy]: CE
n[lazy]: N
ne[lazy]: NE
z[lazy]: Z
ze[lazy]: ZE
hf[lazy]: WS "<function="
key[lazy]: WS /<parameter=[^<>\n]+>\n/
clean: "" | clean c | clean n | clean_d ce | clean_d ne
clean_d: clean d | clean_d de
head: clean c hf | clean_d ce hf | held c hf | held_d ce hf
held: head | head nest | held c | held n | held_d ce | held_d ne
held_d: held d | held_d de
nest: n | d nest | c nest | c hf nest | c hf nest nest | key nest
open: clean | clean_d
text: clean d | clean_d de | held d | held_d de
textz: clean z | clean_d ze | held z | held_d ze
"""


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
    rules = [_function(f"f{at}", tool.name, json.dumps(tool.parameters), tool.strict, closed)
             for at, tool in enumerate(tools)]  # fmt: skip
    rules.append("call: " + " | ".join(f"f{at}" for at in range(len(tools))) + "\n")
    before, thoughts = thought_rules(thinks)
    named: dict[str, str] = {}
    if required:
        calls = f'"<tool_call>\\n<function=" call{" (again begin call)*" if many else ""}'
        start = f"start: {before}{calls if constraint is None else f'({calls} | answer)'}\n"
        start += 'again[lazy]: /\\n{0,2}<tool_call>/\n'
        if constraint is not None:
            answer, named = answer_rules(constraint)
            start += answer
    else:
        free = 'lead[suffix="<tool_call>"]: /(?s:.*)/\nTAIL: /(?s:.*)/ & ~/(?s:.*<tool_call>.*)/\n'
        start = f"start: (lead begin call)* TAIL\n{free}" if many else f"start: TAIL | lead begin call\n{free}"
        thoughts = ""
    start += 'begin[lazy]: "\\n<function="\n'
    return with_grammars(start + thoughts + _ENDS + _TEXTS + "".join(rules), named)


@lru_cache(1024)
def _function(rule: str, name: str, schema: str, strict: bool, closed: bool) -> str:
    """Returns the rules of one tool, whose parameters have a schema, as JSON. They come in its order; those
    that are not required may be left out. Agents send the same tools again and again."""
    try:
        forms = signatures(json.loads(schema), exact=strict, closed=closed)
    except SchemaError as error:
        raise ArgumentError(f"the tool {name}: {error}") from error
    names = [f"{rule}_{at}" for at in range(len(forms))]
    rules = "".join(_form(each, form) for each, form in zip(names, forms, strict=True))
    return f"{rule}: {text_rule(f'{name}>' + chr(10))} ({' | '.join(names)})\n{rules}"


def _form(rule: str, form: Signature) -> str:
    """Returns the rules of a call behind its function's name. RULE_qN is all before parameter N, with closers;
    RULE_xN is as much where the last value, a text, is open: the next parameter, or the call's end, closes it."""
    lines, opened, ends = [f'{rule}_q0: ""'], False, list[str]()
    for at, each in enumerate(form.parameters):
        name, before = f"{rule}_{at}", [f"{rule}_q{at} {rule}_{at}_k"] + [f"{rule}_x{at} {rule}_{at}_t"] * opened
        mark = text_rule(f"<parameter={each.name}>\n")
        lines.append(f"{name}_k[lazy]: WS {mark}")
        lines += [f"{name}_t[lazy]: PLACED {mark}"] * opened
        value, more = _value(name, each.value)
        lines += more
        skipped = not each.required
        closed = [f"{way} {value}" for way in before] + [f"{rule}_q{at}"] * skipped
        lines.append(f"{rule}_q{at + 1}: {' | '.join(closed)}")
        left_open = [f"{way} open" for way in before] * each.value.text + [f"{rule}_x{at}"] * (skipped and opened)
        lines += [f"{rule}_x{at + 1}: {' | '.join(left_open)}"] * bool(left_open)
        ends = [*(ends if skipped else []), *([f"{way} textz" for way in before] * each.value.text)]
        opened = bool(left_open)
    all_of_them = f"{rule}_q{len(form.parameters)}"
    if form.others:
        more, last = _others(rule, form)
        lines += more
        ends = [*(ends if not form.least else []), *(f"{all_of_them} {way}" for way in last)]
        all_of_them += f" {rule}_others"
    return "\n".join([*lines, f"{rule}: {' | '.join([f'{all_of_them} close', *ends])}"]) + "\n"


def _others(rule: str, form: Signature) -> tuple[list[str], list[str]]:
    """Returns the rules of parameters that a schema does not list, and how the call may end without the last
    one's closer."""
    lines, ways, ends = list[str](), list[str](), list[str]()
    taken = " | ".join(text_rule(f"<parameter={each.name}>\n") for each in form.parameters)
    for at, (regex, value) in enumerate(form.others):
        way, key = f"{rule}_other{at}", f"{rule}_KEY{at}".upper()
        spelled, more = _value(way, value)
        lines += more
        named = rf"/<parameter=(?:{regex})>\n/ & /<parameter=[^<>\n]{{1,{MAX_NAME}}}>\n/"
        lines.append(f"{key}: {named}{f' & ~({taken})' if taken else ''}")
        lines.append(f"{way}_k[lazy]: WS {key}")
        ways.append(f"{way}_k {spelled}")
        ends += [f"{way}_k textz"] * value.text
    least, most = form.least, form.most
    lines.append(f"{rule}_other: {' | '.join(ways)}")
    lines.append(f"{rule}_others: {rule}_other{_often(least, most)}")
    before = "" if most == 1 else f"{rule}_other{_often(max(least - 1, 0), None if most is None else most - 1)} "
    return lines, [f"{before}{end}" for end in ends if most != 0]


def _often(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}" if least or most is not None else "*"


def _value(rule: str, value: Value) -> tuple[str, list[str]]:
    """Returns a parameter's value and its end, and the rules that it names: text where it may be any string,
    else the strings that are listed or described, as they are, and JSON."""
    if value.text:
        return "text", []
    ways, rules = list[str](), list[str]()
    if value.texts:
        ways.append(f"({' | '.join(map(text_rule, value.texts))}) TEXT_END")
    if value.json:
        ways.append(f"{json_rule(value.json)} JSON_END")
    if value.regexes:
        # A line break ahead of the closer is the closer's, so a text that ends in one has another behind it.
        terminal = f"{rule}_text".upper()
        ways.append(f"{rule}_text")
        rules.append(f"{rule}_text[lazy]: ({terminal}_R /\\r?\\n/ | {terminal}_N) \"</parameter>\"")
        rules.append(rf"{terminal}: ({regex_rule(value.regexes)}) & ~/(?s:.*)<\/parameter>(?s:.*)/")
        rules.append(rf"{terminal}_R: {terminal} & ~/(?s:.*)\r/")
        rules.append(rf"{terminal}_N: {terminal} & ~/(?s:.*)\n/")
    return f"({' | '.join(ways)})", rules
