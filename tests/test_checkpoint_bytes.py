"""Refuses saved checkpoints whose checksum is right and whose contents are not: of another version of luce,
or made by someone who knows the layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from nan_model import SMALL, tokens_of

from luce.errors import ArgumentError
from luce.native import Engine

HEADER = 56  # A saved checkpoint has so many bytes before its tokens.
VERSION, KV_TYPE, CHECKSUM, N_PAST, N_CHUNK = 8, 12, 32, 40, 44  # The header's fields are at these bytes.


@pytest.fixture
def saved(engine: Engine) -> bytes:
    with engine.sequence() as sequence:
        sequence.prefill(tokens_of(256), last=False)
        with sequence.checkpoint() as checkpoint:
            return bytes(checkpoint.save())


def total(data: bytes) -> int:
    """Sums bytes as the core's Checksum does: words of 64 bits, the last one filled up with zeros."""
    value = 0x9E3779B97F4A7C15 ^ len(data)
    for at in range(0, len(data), 8):
        value = (value ^ int.from_bytes(data[at : at + 8], "little")) * 0xFF51AFD7ED558CCD % 2**64
        value ^= value >> 32
    return value


def changed(saved: bytes, at: int, value: int) -> bytes:
    """Returns the bytes with 32 of their bits replaced, under a checksum that is right."""
    data = bytearray(saved)
    data[at : at + 4] = value.to_bytes(4, "little")
    data[CHECKSUM : CHECKSUM + 8] = bytes(8)
    checksum = total(bytes(data[:HEADER])) ^ total(bytes(data[HEADER:]))
    data[CHECKSUM : CHECKSUM + 8] = checksum.to_bytes(8, "little")
    return bytes(data)


CHANGES: dict[str, tuple[int, Callable[[int], int], str]] = {
    "an older version": (VERSION, lambda old: old - 1, "this version of luce"),
    "a newer version": (VERSION, lambda old: old + 1, "this version of luce"),
    "a KV type that there is none of": (KV_TYPE, lambda _: 10**6, "kv_type"),
    "no tokens": (N_PAST, lambda _: 0, "0 tokens"),
    "half a page": (N_PAST, lambda _: 128, "128 tokens"),
    "more tokens": (N_PAST, lambda _: 512, "token 256|layout"),
    "more tokens than memory": (N_PAST, lambda _: 2**32 - 256, "do not fit"),
    "other chunks": (N_CHUNK, lambda old: 2 * old, "chunks of 512"),
    "a negative token": (HEADER + 4, lambda _: 2**32 - 1, "token 1 is -1"),
    "a token that there is none of": (HEADER, lambda _: SMALL.n_vocab, f"token 0 is {SMALL.n_vocab}"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_right_checksum_does_not_make_bytes_right(what: str, engine: Engine, saved: bytes) -> None:
    at, change, said = CHANGES[what]
    old = int.from_bytes(saved[at : at + 4], "little")
    assert changed(saved, at, old) == saved, "the checksum is the core's"
    before = engine.info
    with pytest.raises(ArgumentError, match=said):
        engine.load_checkpoint(changed(saved, at, change(old)))
    assert engine.info == before
