"""Has grammars that a text is held to: they say what may come next after each token. llguidance reads and
walks them."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from luce.errors import ArgumentError, UnsupportedError
from luce.files.tokenizer import Tokenizer

if TYPE_CHECKING:
    from luce.text.structured import Constraint

KEPT = 32  # So many compiled grammars are kept.
MAX_NODES = 1 << 22  # llguidance's tree of the tokens has a node for each beginning, and fewer than so many.


def beginnings(tokens: Iterable[bytes]) -> int:
    """Returns how many different beginnings the tokens have, themselves among them."""
    count, before = 0, b""
    for token in sorted(tokens):
        same, most = 0, min(len(before), len(token))
        while same < most and before[same] == token[same]:
            same += 1
        count += len(token) - same
        before = token
    return count


class Matcher(Protocol):
    """Knows where one text is in its grammar. The first call of mask() is for its first token."""

    def mask(self) -> bytes | None:
        """Returns the tokens that may come next: token i where bit i % 8 of byte i // 8 is set; None: any."""

    def consume(self, token: int) -> None:
        """Says that `token`, which the mask allowed, was chosen."""

    @property
    def is_stopped(self) -> bool:
        """Says whether the text is complete and nothing may follow it."""


class Grammars:
    """Compiles grammars for the texts of one tokenizer. Raises UnsupportedError where llguidance is not
    installed."""

    def __init__(self, tokenizer: Tokenizer):
        try:
            import llguidance
        except ModuleNotFoundError as error:
            raise UnsupportedError("grammars need the package llguidance", concerns="grammar") from error
        self._llguidance, self._tokenizer = llguidance, tokenizer
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._lock = Lock()  # Several threads may compile.

    @cached_property
    def _tokens(self) -> Any:
        """It is made when it is first needed: it takes a second for a large vocabulary."""
        ends, vocabulary = sorted(self._tokenizer.eos_ids) or None, _Vocabulary(self._tokenizer)
        nodes = beginnings(vocabulary.tokens)
        if nodes >= MAX_NODES:
            said = f"the vocabulary's tokens have {nodes:,} beginnings: for grammars they are too many"
            raise UnsupportedError(said)
        wrapper = self._llguidance.TokenizerWrapper(vocabulary)
        return self._llguidance.LLTokenizer(wrapper, eos_token=ends)

    def json_schema(self, schema: str | dict[str, Any]) -> Callable[[], Matcher]:
        """Compiles the grammar of JSON texts that are valid under a JSON schema. ArgumentError names what of
        the schema cannot be held to."""
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
        except ValueError as error:
            raise ArgumentError(f"the schema is no JSON: {error}") from error
        except RecursionError as error:
            raise ArgumentError("the schema is nested too deep") from error
        if not isinstance(parsed, dict):
            raise ArgumentError("the schema is no JSON object")
        from luce.text.structured import JsonSchema

        return self.held_to(JsonSchema(parsed))

    def held_to(self, constraint: Constraint) -> Callable[[], Matcher]:
        """Compiles the grammar of what a constraint asks for. Raises ArgumentError."""
        from luce.text.structured import grammar_of  # It is a quarter of what luce imports, and few texts need it.

        return self.lark(grammar_of(constraint))

    def lark(self, grammar: str) -> Callable[[], Matcher]:
        """Compiles a grammar in llguidance's form of Lark. ArgumentError says where it is wrong."""
        tokens = self._tokens
        matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = self._llguidance.LLMatcher(tokens, grammar, log_level=0)
            if matcher.is_error():
                raise ArgumentError(f"the grammar cannot be used: {_why(matcher)}")
        with self._lock:
            self._compiled[grammar] = matcher
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return lambda: _Walk(matcher.deep_copy())


def _why(matcher: Any) -> str:
    return " ".join(matcher.get_error().split())[:300]


class _Walk:
    """Is a Matcher over llguidance's."""

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
            raise ArgumentError(f"the grammar cannot be followed further: {_why(self._matcher)}")


class _Vocabulary:
    """Gives a Tokenizer the form of llguidance's TokenizerWrapper."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_ids, default=0)
        self.bos_token_id = tokenizer.bos_id
        control, ids = set(tokenizer.control.values()), range(tokenizer.n_vocab)
        self.tokens = [tokenizer.bytes_of(token, special=token in control) for token in ids]
        self.special_token_ids = sorted(control | tokenizer.eos_ids)

    def __call__(self, text: bytes | str) -> list[int]:
        spelled = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(spelled, special=False)
