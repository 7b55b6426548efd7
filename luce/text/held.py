"""What an answer is held to: calls of tools, and a constraint on its text, as one grammar and one parser."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from luce.errors import ArgumentError
from luce.files.tokenizer import Tokenizer
from luce.text.call_grammar import call_grammar
from luce.text.grammar import Matcher
from luce.text.parser import Parser
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

    def parser(self, thinks: bool) -> Parser:
        """Returns the parser of an answer, whose prompt ends within thoughts if it `thinks`."""
        return Parser(self.parameters, thinks, self.calls)

    def lark(self, thinks: bool) -> str | None:
        """Returns the grammar of an answer, as Grammars.lark takes it. Raises ArgumentError for a schema that
        no text can be held to."""
        how: dict[str, Any] = {"many": self.many, "closed": not self.open_objects}
        if self.calls == "required":
            tools = [tool for tool in self.tools if self.choice in ("required", tool.name)]
            return call_grammar(tools, thinks, required=True, **how)
        if self.calls == "instead" and isinstance(self.constraint, Tags):
            raise ArgumentError("tags and tools exclude each other: give tool_choice none, or the tags as tools")
        if self.calls == "instead":
            return call_grammar(self.tools, thinks, required=True, constraint=self.constraint, **how)
        if self.constraint is not None:
            return grammar_of(self.constraint, thinks)
        return call_grammar(self.tools, thinks, required=False, **how) if self.calls == "strict" else None

    def bounded(
        self, tokenizer: Tokenizer, most: int, thinks: bool, grammar: Callable[[], Matcher] | None
    ) -> Callable[[], Matcher]:
        """Returns the grammar whose thoughts have at most so many tokens."""
        calls = bool(self.tools) and self.choice == "auto" and self.calls in ("", "strict")
        return lambda: Budget(tokenizer, most, thinks, calls, grammar() if grammar else None)
