"""Runs a chat template as transformers does: as Jinja in a sandbox, which bounds neither time nor memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from luce.errors import Error, TemplateFailed

KEY = "tokenizer.chat_template"


class ChatTemplate:
    """Jinja template in the environment that transformers gives it: sandboxed, trim_blocks, lstrip_blocks,
    break and continue, {% generation %}, raise_exception, strftime_now, tojson without HTML escapes."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        """Parses a template. `special_tokens` are variables such as bos_token and eos_token. Raises Error
        where it is malformed."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._special_tokens = dict(special_tokens or {})
        self._environment, self.source = environment, source
        try:
            self._template = environment.from_string(source)
        except Exception as error:
            # Beside its own errors, there is what Python's compiler says of the result.
            raise Error(f"{KEY} is not a valid template: {_one_line(error)}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Returns the prompt of `messages` ({"role", "content"}, ...). `variables` are the template's own,
        such as enable_thinking; None leaves one to the template. TemplateFailed says what the template
        refuses or fails at."""
        given = {name: value for name, value in variables.items() if value is not None}
        given |= {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(**(self._special_tokens | given))
        except MemoryError:
            raise
        except Exception as error:  # A template runs any expression, so it raises anything.
            raise TemplateFailed(f"{KEY} failed: {_one_line(error)}") from error

    def mentions(self) -> frozenset[str]:
        """Returns the names of the variables that it reads, and the single words that it has as texts."""
        syntax = self._environment.parse(self.source)
        texts = [each.value for each in syntax.find_all(nodes.Const) if isinstance(each.value, str)]
        read = meta.find_undeclared_variables(syntax)  # It folds what is constant.
        return frozenset(read) | {text for text in texts if text.isidentifier()}


class Generation(Extension):
    """Tag {% generation %}, with which trainers mark what the assistant says: its body, as it is."""

    tags = {"generation"}  # noqa: RUF012  Jinja reads it so.

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
