"""Has the flags that change logits before a choice: penalties, logit bias, and grammars to hold the text
to."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from luce.cli.command import FilePath, Finite, text_file
from luce.errors import FileError, about
from luce.files.tokenizer import Tokenizer
from luce.native.structs import Penalties
from luce.text.grammar import Grammars, Matcher

MAX_GRAMMAR = 16 << 20  # A grammar's or a schema's file has at most so many bytes.


class Bias(click.ParamType):
    """Parses ID=VALUE: a token id, and what is added to its logit."""

    name = "ID=VALUE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, float]:
        if isinstance(value, tuple):
            return value
        token, _, bias = str(value).partition("=")
        if not re.fullmatch(r"\d{1,9}", token) or not bias:
            self.fail(f"{value!r} is not ID=VALUE, a token id and a number.", param, ctx)
        return int(token), Finite(min=-100, max=100).convert(bias, param, ctx)


CHOICES = (
    click.option(
        "--repetition-penalty",
        type=Finite(min=0, min_open=True, max=100),
        default=1.0,
        show_default=True,
        metavar="R",
        help="Make tokens that occurred less likely: their logits are divided by R where positive, else "
        "multiplied; 1 is off, 1.1 is mild.",
    ),
    click.option(
        "--presence-penalty",
        type=Finite(min=-2, max=2),
        default=0.0,
        show_default=True,
        metavar="P",
        help="Subtract P, -2 to 2, from the logit of each token that was generated.",
    ),
    click.option(
        "--frequency-penalty",
        type=Finite(min=-2, max=2),
        default=0.0,
        show_default=True,
        metavar="P",
        help="Subtract P, -2 to 2, as often as the token was generated.",
    ),
    click.option(
        "--logit-bias",
        type=Bias(),
        multiple=True,
        help="Add VALUE, -100 to 100, to the logit of token ID: 42=-100 all but forbids it; may be repeated.",
    ),
    click.option(
        "--json-schema",
        type=FilePath(),
        metavar="FILE|JSON",
        help="Hold the text to JSON that is valid under this schema: a file, or the schema itself. Objects "
        "that list properties have no others, unless they say additionalProperties. "
        "This needs luce[grammar].",
    ),
    click.option(
        "--grammar",
        "grammar_file",
        type=FilePath(path_type=Path),
        metavar="FILE",
        help="Hold the text to this grammar, in llguidance's form of Lark or in llama.cpp's GBNF. "
        "This needs luce[grammar].",
    ),
)


def penalties_of(flags: Mapping[str, Any], n_vocab: int) -> Penalties:
    """Returns the penalties. A bias of a token that the model does not have is a usage error."""
    for token, _ in flags["logit_bias"]:
        if token >= n_vocab:
            problem = f"token {token} is not one of the model's {n_vocab}"
            raise click.BadParameter(problem, param_hint="'--logit-bias'")
    return Penalties(
        repetition=flags["repetition_penalty"],
        presence=flags["presence_penalty"],
        frequency=flags["frequency_penalty"],
        bias=tuple(flags["logit_bias"]),
    )


def grammar_of(flags: Mapping[str, Any], tokenizer: Tokenizer) -> Callable[[], Matcher] | None:
    """Returns what the text is held to; None is nothing."""
    schema, file = flags["json_schema"], flags["grammar_file"]
    if schema is None and file is None:
        return None
    from luce.text.structured import Grammar  # Texts that nothing holds start without it.

    grammars = Grammars(tokenizer)
    if file is None and _is_json(schema):
        return grammars.json_schema(schema)
    path = file or Path(schema)
    text = _read(path)
    with about(path):
        return grammars.held_to(Grammar(text)) if file is not None else grammars.json_schema(text)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return text.lstrip().startswith("{")  # What is wrong with it is then told as of a schema.
    except RecursionError:
        return True
    return True


def _read(path: Path) -> str:
    with text_file(path) as file:
        raw = file.read(MAX_GRAMMAR + 1)
        if len(raw) > MAX_GRAMMAR:
            raise FileError(f"{path}: more than {MAX_GRAMMAR >> 20} MiB: a grammar or a schema has fewer")
        if not raw:
            raise FileError(f"{path}: empty")
        return raw.decode()
