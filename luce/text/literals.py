"""Reads values as models write them: JSON, or literals as Python spells them."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_BRACKETS = {"(": "[", ")": "]"}
_TOKEN = re.compile(
    r"\s+|(?P<sign>[{}\[\]():,])|(?P<number>[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?![\w.])"
    r"|(?P<word>True|False|None|true|false|null)\b"
    r"|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")",
    re.S,
)


def decoded(text: str) -> Any:
    """Returns the value that a text spells as JSON, with line ends in strings or not, or as Python does:
    `{'a': None, 'b': (1, 2)}`. Raises ValueError where it spells none that JSON has."""
    try:
        return from_json(text)
    except ValueError:
        return from_json("".join(_as_json(text)))


def from_json(text: str) -> Any:
    """Returns the value that a text spells as JSON. Raises ValueError where it spells none."""
    try:
        return msgspec.json.decode(text)  # It refuses NaN, numbers beyond F64 and half a surrogate pair.
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def _as_json(text: str) -> Iterator[str]:
    """Yields Python's spelling as JSON. Raises ValueError where a part of it is none of a literal."""
    tokens, at = list[tuple[str, str]](), 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise ValueError(f"no value begins with {text[at : at + 20]!r}")
        if found.lastgroup:
            tokens.append((found.lastgroup, found[0]))
        at = found.end()
    for (kind, said), (_, after) in pairwise([*tokens, ("sign", "")]):
        if kind == "text":
            yield json.dumps(_string(said))
        elif kind == "sign" and not (said == "," and after in ("]", "}", ")")):
            yield _BRACKETS.get(said, said)
        elif kind != "sign":
            spelled = _WORDS.get(said) or _number(said)
            yield json.dumps(spelled) if after == ":" else spelled


def _number(said: str) -> str:
    number = float(said) if set(said) & set(".eE") else int(said)
    return json.dumps(number)  # NaN and infinity have no name that JSON's reader takes.


def _string(said: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Escapes that Python does not have are letters.
        try:
            return str(ast.literal_eval(said.replace("\r", "\\r").replace("\n", "\\n").replace("\0", "\\0")))
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"{said[:20]!r} is no string") from error
