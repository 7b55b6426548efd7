"""Walks grammars with the tokens of the model in the box, for tests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

from luce.cli.command import BOX
from luce.files.tokenizer import Tokenizer
from luce.native import File
from luce.text.grammar import Grammars, Matcher

CLOSING = frozenset(b'"}]>),\n')


@cache
def box() -> tuple[Tokenizer, Grammars, list[bytes]]:
    """Returns the box's tokenizer, grammars over it, and the bytes of its tokens."""
    with File(BOX) as file:
        tokenizer = Tokenizer(file.kv)
    tokens = [tokenizer.bytes_of(token, special=True) for token in range(tokenizer.n_vocab)]
    return tokenizer, Grammars(tokenizer), tokens


def allowed(mask: bytes) -> Iterator[int]:
    """Yields the tokens of a mask."""
    for at, byte in enumerate(mask):
        while byte:
            yield 8 * at + (byte & -byte).bit_length() - 1
            byte &= byte - 1


def accepts(grammar: str, text: str) -> bool:
    """Says whether a text, token by token, is a whole text of a grammar."""
    tokenizer, grammars, _ = box()
    matcher = grammars.lark(grammar)()
    for token in tokenizer.encode(text, special=False):
        if matcher.is_stopped or not matcher.mask()[token // 8] >> token % 8 & 1:
            return False
        matcher.consume(token)
    return matcher.is_stopped or not tokenizer.eos_ids.isdisjoint(allowed(matcher.mask()))


def walk(grammar: str, seed: int, steps: int = 300) -> str | None:
    """Returns a random text of a grammar, or None where it does not end within so many tokens. Asserts that
    some token is allowed before each text is complete. The longer it gets, the more what ends it is chosen.
    """
    tokenizer, grammars, tokens = box()
    rng, matcher, text = random.Random(seed), grammars.lark(grammar)(), b""
    for step in range(steps):
        if matcher.is_stopped:
            return text.decode()
        choices = list(_mask(matcher))
        assert choices, f"nothing may follow {text!r}"
        ends = [token for token in choices if token in tokenizer.eos_ids]
        if ends and rng.random() < 0.3 + step / 50:
            return text.decode()
        choices = [token for token in choices if token not in tokenizer.eos_ids]
        closing = [token for token in choices if tokens[token] and CLOSING.issuperset(tokens[token])]
        few = [token for token in choices if len(tokens[token]) < 3]
        likely = rng.random()
        if closing and likely < 0.2 + step / 40:
            choices = closing
        elif few and likely < 0.9:
            choices = few
        token = rng.choice(choices)
        text += tokens[token]
        matcher.consume(token)
    return None


def _mask(matcher: Matcher) -> Iterator[int]:
    mask = matcher.mask()
    assert mask is not None
    return allowed(mask)
