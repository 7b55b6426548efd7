"""Grammars that a text is held to: what may come next after each token. llguidance reads and walks them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

from luce.errors import ArgumentError, UnsupportedError
from luce.tokenizer import Tokenizer

# Between the parts of a JSON text: bounded, so that no text is blanks without end.
_BLANKS = r"( |\n[ ]{0,20})?"


class Matcher(Protocol):
    """Where one text is in its grammar. The first call of mask() is for its first token."""

    def mask(self) -> bytes:
        """The tokens that may come next: token i where bit i % 8 of byte i // 8 is set."""

    def consume(self, token: int) -> None:
        """`token`, which the mask allowed, was chosen."""

    @property
    def is_stopped(self) -> bool:
        """Whether the text is complete and nothing may follow it."""


class Grammars:
    """Compiles grammars for the texts of one tokenizer. UnsupportedError: llguidance is not installed."""

    def __init__(self, tokenizer: Tokenizer):
        try:
            import llguidance
        except ImportError as error:
            raise UnsupportedError("grammars need the package llguidance", concerns="grammar") from error
        self._matcher = llguidance.LLMatcher
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(tokenizer)),
            n_vocab=tokenizer.n_vocab,
            eos_token=sorted(tokenizer.eos_ids),
        )

    def json_schema(self, schema: str | dict[str, Any]) -> Callable[[], Matcher]:
        """Of JSON texts that are valid under a JSON schema. ArgumentError: what of it cannot be held to."""
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
        except ValueError as error:
            raise ArgumentError(f"the schema is no JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise ArgumentError("the schema is no JSON object")
        options: Any = {"whitespace_pattern": _BLANKS}
        return self._compiled(self._matcher.grammar_from_json_schema(parsed, defaults=options))

    def lark(self, grammar: str) -> Callable[[], Matcher]:
        """Of a grammar in llguidance's form of Lark. ArgumentError says where it is wrong."""
        return self._compiled(self._matcher.grammar_from_lark(grammar))

    def _compiled(self, grammar: str) -> Callable[[], Matcher]:
        first = self._matcher(self._tokenizer, grammar, log_level=0)
        if first.is_error():
            raise ArgumentError("the grammar cannot be used: " + " ".join(first.get_error().split()))
        return lambda: _Walk(first.deep_copy())


class _Walk:
    """A Matcher over llguidance's."""

    def __init__(self, matcher: Any):
        self._matcher = matcher

    def mask(self) -> bytes:
        mask: bytes = self._matcher.compute_bitmask()
        self._check(not self._matcher.is_error())
        return mask

    def consume(self, token: int) -> None:
        self._check(self._matcher.consume_token(token))

    @property
    def is_stopped(self) -> bool:
        return bool(self._matcher.is_stopped())

    def _check(self, good: bool) -> None:
        if not good:
            why = self._matcher.get_error().partition("\n")[0]
            raise ArgumentError(f"the grammar cannot be followed further: {why}")


class _Vocabulary:
    """A Tokenizer as llguidance's TokenizerWrapper takes it."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_ids, default=0)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.bytes_of(token, special=True) for token in range(tokenizer.n_vocab)]
        self.special_token_ids = sorted(tokenizer.control.values())

    def __call__(self, text: bytes | str) -> list[int]:
        spelled = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(spelled, special=False)
