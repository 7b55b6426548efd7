"""What an answer is held to: a JSON schema, a regex, a choice, a grammar, or tags within free text.

Every API and every server has fields of its own for it. constraint_of() gives them one meaning:

    response_format             OpenAI: text, json_object (with llama.cpp's `schema`), json_schema, and
                                vLLM's structural_tag; Responses' `text.format`, Anthropic's
                                `output_config.format` and `output_format` likewise
    structured_outputs          vLLM: json, regex, choice, grammar, json_object or structural_tag
    guided_json, guided_regex, guided_choice, guided_grammar    vLLM before
    json_schema, grammar        llama.cpp; SGLang has `json_schema` too, as a string
    regex, ebnf, structural_tag SGLang
    format                      Ollama: "json", or a schema

A schema is held to as a whole, or refused. Where `strict` is said to be false, what of it cannot be enforced
is left out. Objects that list properties are closed (schema.py), unless `structured_outputs` has
`"disable_additional_properties": false`, which may stand beside another field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from luce.errors import ArgumentError
from luce.text.dialects import QWEN, Dialect
from luce.text.gbnf import is_gbnf, lark_rules
from luce.text.pattern import PatternError, whole
from luce.text.schema import WHITESPACE, translated

MAX_CHOICES = 10_000


class FieldError(ArgumentError):
    """A field of a request, by its name, that cannot be obeyed."""

    def __init__(self, field: str, message: str):
        self.field = field
        super().__init__(f"{field} {message}")


@dataclass(frozen=True)
class JsonSchema:
    """JSON that fits `schema`: all of it where it is `exact`. `whitespace` may stand between its parts."""

    schema: Any
    exact: bool = True
    closed: bool = True
    whitespace: str | None = WHITESPACE


@dataclass(frozen=True)
class Regex:
    """A text that a pattern of ECMA-262 matches as a whole."""

    pattern: str


@dataclass(frozen=True)
class Choice:
    """One of some texts."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Grammar:
    """A text of a grammar, in llguidance's Lark or in llama.cpp's GBNF."""

    text: str


@dataclass(frozen=True)
class Tags:
    """Free text, in which each trigger begins one of the structures: its begin, JSON of a schema, its end."""

    structures: tuple[tuple[str, Any, str], ...]
    triggers: tuple[str, ...]


OPTIONS = {
    "disable_any_whitespace", "disable_additional_properties", "disable_fallback", "whitespace_pattern"
}  # fmt: skip
Constraint = JsonSchema | Regex | Choice | Grammar | Tags
ANY_OBJECT = JsonSchema({"type": "object"})


# ---- fields of requests


def constraint_of(fields: Mapping[str, Any]) -> Constraint | None:
    """Returns what a request's fields, by their names, hold the answer to; None where they leave it free.
    Raises FieldError where one is not what it has to be, and where two of them ask for different things."""
    asked = [(name, value) for name, value in fields.items() if name in READERS and _is_given(value)]
    given = [(name, READERS[name](value, name)) for name, value in asked]
    found = [(name, constraint) for name, constraint in given if constraint is not None]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise FieldError(names, "both say what the answer has to be: give one of them")
    if not found:
        return None
    _, constraint = found[0]
    if isinstance(constraint, JsonSchema):
        constraint = replace(constraint, closed=constraint.closed and not opens_objects(fields))
        if pattern := fields.get("guided_whitespace_pattern"):
            constraint = replace(constraint, whitespace=_blank(pattern, "guided_whitespace_pattern"))
    return constraint


def _is_given(value: Any) -> bool:
    return value is not None and value is not False and value != ""


def opens_objects(fields: Mapping[str, Any]) -> bool:
    """Says whether a request leaves objects open that list properties and say nothing of others."""
    given = fields.get("structured_outputs")
    return isinstance(given, Mapping) and given.get("disable_additional_properties") is False


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise FieldError(field, "is no string")
    return value


def _blank(value: Any, field: str) -> str:
    """Reads a pattern of whitespace."""
    ways = whole(_regex(value, field).pattern)
    if [len(way) for way in ways] != [1]:
        raise FieldError(field, "cannot be enforced: it has look-around")
    return ways[0][0]


def _schema(value: Any, field: str) -> JsonSchema:
    """Reads a schema, which some clients send as a string."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise FieldError(field, "is no JSON") from error
    if not isinstance(value, Mapping):
        raise FieldError(field, "is no JSON schema, which is an object")
    return JsonSchema(value)


def _choice(value: Any, field: str) -> Choice:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise FieldError(field, "is no list of strings")
    texts = tuple(dict.fromkeys(value))
    if not 0 < len(texts) <= MAX_CHOICES:
        raise FieldError(field, f"has {len(texts)} strings: it has 1 to {MAX_CHOICES}")
    return Choice(texts)


def _regex(value: Any, field: str) -> Regex:
    pattern = _text(value, field)
    try:
        whole(pattern)
    except PatternError as error:
        raise FieldError(field, f"cannot be enforced: {error}") from error
    return Regex(pattern)


def _grammar(value: Any, field: str) -> Constraint:
    if isinstance(value, Mapping):  # So text-generation-inference has it.
        readers: dict[str, Callable[[Any, str], Constraint]] = {"json": _schema, "regex": _regex}
        reader = readers.get(str(value.get("type")))
        if reader is None:
            raise FieldError(field, "is neither a string nor of type json or regex")
        return reader(value.get("value"), field)
    return Grammar(_text(value, field))


def _tags(value: Any, field: str) -> Tags:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise FieldError(field, "is no JSON") from error
    if not isinstance(value, Mapping) or not isinstance(value.get("structures"), list):
        raise FieldError(field, 'is supported in the form {"structures": [...], "triggers": [...]} alone')
    structures, triggers = list[tuple[str, Any, str]](), value.get("triggers")
    if not isinstance(triggers, list) or not all(isinstance(each, str) and each for each in triggers):
        raise FieldError(field, "has no triggers, which are strings")
    for each in value["structures"]:
        begin, end = (each.get(key) if isinstance(each, Mapping) else None for key in ("begin", "end"))
        if not isinstance(begin, str) or not isinstance(end, str):
            raise FieldError(field, "has a structure without begin or end, which are strings")
        if not any(begin.startswith(trigger) for trigger in triggers):
            raise FieldError(field, f"has no trigger for {begin[:80]!r}")
        structures.append((begin, each.get("schema") or {}, end))
    if not structures:
        raise FieldError(field, "has no structures")
    return Tags(tuple(structures), tuple(dict.fromkeys(triggers)))


def _form(form: Any, field: str) -> Constraint | None:
    """Reads a response format. The schema stands in it, or below `json_schema`."""
    if not isinstance(form, Mapping):
        raise FieldError(field, "is no object")
    kind = str(form.get("type", "text"))
    held = form.get("json_schema")
    held = held if isinstance(held, Mapping) else form
    schema = held.get("schema", form.get("value"))
    if kind == "text":
        return None
    if kind in ("json_object", "json") and schema is None:
        return ANY_OBJECT
    if kind in ("json_object", "json", "json_schema"):
        if not isinstance(schema, Mapping):
            raise FieldError(field, f"{kind} has no schema, which is an object")
        return JsonSchema(schema, exact=held.get("strict") is not False)
    readers = {"regex": ("pattern", _regex), "grammar": ("grammar", _grammar)}
    if kind in readers:
        key, reader = readers[kind]
        return reader(form.get(key), field)
    if kind == "structural_tag":
        return _tags(form, field)
    raise FieldError(field, f"{kind!r} is none of text, json_object, json_schema with a schema")


def _structured(value: Any, field: str) -> Constraint | None:
    """Reads vLLM's structured_outputs, of which one field at most says what the answer has to be."""
    if not isinstance(value, Mapping):
        raise FieldError(field, "is no object")
    readers: dict[str, Callable[[Any, str], Constraint]] = {
        "json": _schema, "regex": _regex, "choice": _choice, "grammar": _grammar, "structural_tag": _tags,
        "json_object": lambda value, field: ANY_OBJECT,
    }  # fmt: skip
    strange = value.keys() - readers.keys() - OPTIONS
    if unknown := sorted(key for key in strange if value[key] is not None):
        raise FieldError(field, f"{unknown[0]!r} is not supported")
    given = [key for key in readers if value.get(key) not in (None, False)]
    if len(given) > 1:
        raise FieldError(field, f"{' and '.join(given)} exclude each other: give one of them")
    if not given:
        return None
    found = readers[given[0]](value[given[0]], f"{field}.{given[0]}")
    if isinstance(found, JsonSchema):
        if pattern := value.get("whitespace_pattern"):
            found = replace(found, whitespace=_blank(pattern, f"{field}.whitespace_pattern"))
        found = replace(found, whitespace=None) if value.get("disable_any_whitespace") else found
    return found


def _anthropics(value: Any, field: str) -> Constraint | None:
    if not isinstance(value, Mapping) or value.get("type") != "json_schema":
        raise FieldError(field, "is no json_schema with a schema")
    return _form(value, field)


def _ollamas(value: Any, field: str) -> Constraint | None:
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        if value != "json":
            raise FieldError(field, f"{value!r} is neither json nor a schema")
        return ANY_OBJECT
    return _schema(value, field)


READERS: dict[str, Callable[[Any, str], Constraint | None]] = {
    "response_format": _form, "text.format": _form,
    "output_config.format": _anthropics, "output_format": _anthropics,
    "structured_outputs": _structured, "guided_json": _schema, "guided_regex": _regex,
    "guided_choice": _choice, "guided_grammar": _grammar, "json_schema": _schema, "grammar": _grammar,
    "regex": _regex, "ebnf": _grammar, "structural_tag": _tags, "format": _ollamas,
}  # fmt: skip
FIELDS = (*READERS, "guided_whitespace_pattern")


# ---- grammars


def grammar_of(
    constraint: Constraint, thinks: bool = False, dialect: Dialect = QWEN, may_think: bool = False
) -> str:
    """Returns the grammar of answers, as Grammars.lark takes it. Thoughts come before them that the prompt has begun
    (`thinks`), or that the model may begin (`may_think`). Raises SchemaError or ArgumentError where no text can be
    held to the constraint."""
    rules, named = answer_rules(constraint)
    before, thoughts = thought_rules(thinks, dialect, may_think)
    if not before and isinstance(constraint, Grammar) and named:
        return constraint.text
    return with_grammars(f"start: {before}answer\n{thoughts}{rules}", named)


def thought_rules(thinks: bool, dialect: Dialect = QWEN, may_think: bool = False) -> tuple[str, str]:
    """Returns the part of a rule that takes the thoughts before an answer, and the rules that it names."""
    rules = f"thought[suffix={text_rule(dialect.think[1])}]: /(?s:.*)/\n"
    if thinks:
        return ('thought "\\n\\n"? ' if dialect is QWEN else "thought "), rules
    return (f"({text_rule(dialect.thought[0])} thought)? ", rules) if may_think else ("", "")


def with_grammars(rules: str, named: Mapping[str, str]) -> str:
    """Returns a grammar whose rules name others, each a grammar of its own."""
    if not named:
        return rules
    others = [{"name": name, "lark_grammar": text} for name, text in named.items()]
    return json.dumps({"grammars": [{"lark_grammar": rules}, *others]})


def answer_rules(constraint: Constraint) -> tuple[str, dict[str, str]]:
    """Returns Lark's rules, of which `answer` is what a constraint asks for, and the grammars they name."""
    match constraint:
        case JsonSchema(schema, exact, closed, whitespace):
            return f"answer: {json_rule(translated(schema, exact, closed, whitespace))}\n", {}
        case Regex(pattern):
            return f"answer: ANSWER\nANSWER: {regex_rule(whole(pattern))}\n", {}
        case Choice(texts):
            return f"answer: {' | '.join(map(text_rule, texts))}\n", {}
        case Grammar(text) if is_gbnf(text):
            return lark_rules(text, "answer"), {}
        case Grammar(text):
            return "answer: @text\n", {"text": text}
    return _tag_rules(constraint), {}


def _tag_rules(tags: Tags) -> str:
    """Returns the rules of free text in which each trigger begins a structure."""
    anything, marks = "/(?s:.*)/", " | ".join(map(text_rule, tags.triggers))
    lines = [f"TAIL: {anything} & ~({anything} ({marks}) {anything})"]
    ways = list[str]()
    for n, trigger in enumerate(tags.triggers):
        lines.append(f"lead{n}[suffix={text_rule(trigger)}]: {anything}")
        inner = list[str]()
        for begin, schema, end in tags.structures:
            if next(each for each in tags.triggers if begin.startswith(each)) == trigger:
                head, tail = (text_rule(each) if each else "" for each in (begin[len(trigger) :], end))
                inner.append(f"{head} {json_rule(translated(schema))} {tail}")
        ways += [f"lead{n} ({' | '.join(inner)})"] if inner else []
    return f"answer: ({' | '.join(ways)})* TAIL\n" + "\n".join(lines) + "\n"


def json_rule(schema: Mapping[str, Any]) -> str:
    """Returns a translated schema as a part of a rule."""
    return f"%json {json.dumps(schema)}"


def regex_rule(ways: Iterable[tuple[str, ...]]) -> str:
    """Returns texts that match all regexes of one of the ways (pattern.py) as what a terminal is."""
    found = ["(" + " & ".join(f"/{each}/" if each else '""' for each in way) + ")" for way in ways]
    return " | ".join(found)


def text_rule(text: str) -> str:
    """Returns a literal as a part of a rule."""
    return json.dumps(text, ensure_ascii=False)
