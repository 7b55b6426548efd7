"""Walks grammars with the tokens of the model in the box, for tests."""

from __future__ import annotations

import random
from functools import cache
from typing import NamedTuple

import numpy as np

from luce.data import BOX
from luce.files.tokenizer import Tokenizer
from luce.native import File
from luce.text.grammar import Grammars, Matcher

CLOSING = frozenset(b'"}]>),\n')


class Box(NamedTuple):
    """What is known of the box's tokens: the bytes of each, and for each whether it ends a text, is of two bytes at
    most, and closes something."""

    tokenizer: Tokenizer
    grammars: Grammars
    tokens: list[bytes]
    ends: np.ndarray  # (n_vocab,) bool, as the others
    few: np.ndarray
    closing: np.ndarray


@cache
def box() -> Box:
    with File(BOX) as file:
        tokenizer = Tokenizer(file.kv)
    ids = range(tokenizer.n_vocab)
    tokens = [tokenizer.bytes_of(token, special=True) for token in ids]
    ends = np.array([token in tokenizer.eos_ids for token in ids])
    few = np.array([len(token) < 3 for token in tokens]) & ~ends
    closing = np.array([bool(token) and CLOSING.issuperset(token) for token in tokens]) & ~ends
    return Box(tokenizer, Grammars(tokenizer), tokens, ends, few, closing)


def allowed(matcher: Matcher) -> np.ndarray:
    """Returns for each token whether it may come next, (n_vocab,) bool."""
    mask = matcher.mask()
    assert mask is not None
    return np.unpackbits(np.frombuffer(mask, np.uint8), count=box().tokenizer.n_vocab, bitorder="little").astype(bool)


def accepts(grammar: str, text: str) -> bool:
    """Says whether a text, token by token, is a whole text of a grammar."""
    matcher = box().grammars.lark(grammar)()
    for token in box().tokenizer.encode(text, special=False):
        if matcher.is_stopped or not allowed(matcher)[token]:
            return False
        matcher.consume(token)
    return matcher.is_stopped or bool((allowed(matcher) & box().ends).any())


def walk(grammar: str, seed: int, steps: int = 300) -> str | None:
    """Returns a random text of a grammar, or None where it does not end within so many tokens. Asserts that some token
    is allowed before each text is complete. The longer it gets, the more likely it is that what ends it is chosen."""
    rng, matcher, text = random.Random(seed), box().grammars.lark(grammar)(), b""
    for step in range(steps):
        if matcher.is_stopped:
            return text.decode()
        choices = allowed(matcher)
        assert choices.any(), f"nothing may follow {text!r}"
        if (choices & box().ends).any() and rng.random() < 0.3 + step / 50:
            return text.decode()
        choices &= ~box().ends
        likely = rng.random()
        if likely < 0.2 + step / 40 and (choices & box().closing).any():
            choices &= box().closing
        elif likely < 0.9 and (choices & box().few).any():
            choices &= box().few
        token = int(rng.choice(np.flatnonzero(choices)))
        text += box().tokens[token]
        matcher.consume(token)
    return None
