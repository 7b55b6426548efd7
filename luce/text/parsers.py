"""Gives each dialect its parser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from luce.text.dialects import GEMMA, Opening
from luce.text.gemma import GemmaParser
from luce.text.parser import Parser
from luce.text.speech import Speech


def parser_of(opening: Opening, tools: Mapping[str, Any] | None = None, held: str = "") -> Speech:
    """Returns the parser of an answer that begins so. `tools` and `held` are as in Parser."""
    parser = GemmaParser if opening.dialect is GEMMA else Parser
    return parser(tools, opening.within, held)
