"""What an answer is held to: calls of tools, and a constraint on its text, as one grammar and one parser."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from luce.errors import ArgumentError
from luce.files.tokenizer import Tokenizer
from luce.text.call_grammar import call_grammar
from luce.text.dialects import GEMMA, Opening
from luce.text.gemma_grammar import gemma_call_grammar
from luce.text.grammar import Matcher
from luce.text.parsers import parser_of
from luce.text.speech import Speech
from luce.text.structured import Constraint, Tags, grammar_of
from luce.text.thoughts import Budget
from luce.text.tool import Tool


@dataclass(frozen=True)
class Held:
    """Calls of `tools`, and a `constraint` on the text, of which None leaves it free. `choice` of tools is
    "auto", "none", "required" or the name of one. `many` calls may be in an answer, or one. In the constraint
    and in the tools' schemas, `open_objects` may have other properties than those listed."""

    tools: Sequence[Tool] = ()
    choice: str = "auto"
    many: bool = True
    constraint: Constraint | None = None
    open_objects: bool = False

    @property
    def calls(self) -> str:
        """Returns whether a grammar makes calls well-formed, as Parser takes it."""
        if self.choice not in ("auto", "none"):
            return "required"
        if self.choice == "none" or not self.tools:
            return ""
        if self.constraint is not None:
            return "instead"
        return "strict" if all(tool.strict for tool in self.tools) else ""

    @property
    def is_free(self) -> bool:
        """Says whether the answer may be any text."""
        return not self.calls and self.constraint is None

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Returns the schemas of the functions that may be called, by name."""
        return {} if self.choice == "none" else {tool.name: tool.parameters for tool in self.tools}

    def parser(self, opening: Opening) -> Speech:
        """Returns the parser of an answer."""
        return parser_of(opening, self.parameters, self.calls)

    def lark(self, opening: Opening) -> str | None:
        """Returns the grammar of an answer, as Grammars.lark takes it. Raises ArgumentError for a schema that
        no text can be held to."""
        if self.calls == "required":
            tools = [tool for tool in self.tools if self.choice in ("required", tool.name)]
            return self._calls(tools, opening, required=True)
        if self.calls == "instead" and isinstance(self.constraint, Tags):
            raise ArgumentError("tags and tools exclude each other: give tool_choice none, or the tags as tools")
        if self.calls == "instead":
            return self._calls(self.tools, opening, required=True)
        if self.constraint is not None:
            return grammar_of(self.constraint, opening.within, opening.dialect, opening.may_think)
        return self._calls(self.tools, opening, required=False) if self.calls == "strict" else None

    def _calls(self, tools: Sequence[Tool], opening: Opening, required: bool) -> str:
        """Returns the grammar of calls, or of what the constraint asks for instead of them."""
        how: dict[str, Any] = {"required": required, "many": self.many, "closed": not self.open_objects}
        how["constraint"] = self.constraint if self.calls == "instead" else None
        if opening.dialect is GEMMA:
            return gemma_call_grammar(tools, opening, **how)
        return call_grammar(tools, opening.within, **how)

    def bounded(
        self, tokenizer: Tokenizer, most: int, opening: Opening, grammar: Callable[[], Matcher] | None
    ) -> Callable[[], Matcher]:
        """Returns the grammar whose thoughts have at most so many tokens."""
        calls = bool(self.tools) and self.choice == "auto" and self.calls in ("", "strict")
        return lambda: Budget(
            tokenizer, most, opening.within, calls, grammar() if grammar else None, opening.dialect
        )
