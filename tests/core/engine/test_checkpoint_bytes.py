"""Refuses saved checkpoints whose checksum is right and whose contents are not: of another version of luce,
or made by someone who knows the layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from nan_model import SMALL, tokens_of
from saved_bytes import ARITHMETIC, BUILD, HEADER, KV_TYPE, MODEL, N_CUT, N_PAST, VERSION, changed, former

from luce.errors import ArgumentError
from luce.native import Engine


@pytest.fixture
def saved(engine: Engine) -> bytes:
    with engine.sequence() as sequence:
        sequence.prefill(tokens_of(256), last=False)
        with sequence.checkpoint() as checkpoint:
            return bytes(checkpoint.save())


CHANGES: dict[str, tuple[int, Callable[[int], int], str]] = {
    "an older version": (VERSION, lambda old: old - 3, "has version 5, this version of luce has 8: read its prompt"),
    "a newer version": (VERSION, lambda old: old + 1, "has version 9, this version of luce has 8: read its prompt"),
    "none of luce's": (0, lambda _: 0, "no checkpoint that luce saved$"),
    "another build": (BUILD, lambda _: ord("x"), "was saved by build x of luce, this is build [0-9a-f]{16}$"),
    "other arithmetic": (ARITHMETIC, lambda _: 0x58545020, "was computed on .*PTX.*, this engine is on"),
    "another model": (MODEL, lambda old: old ^ 1, "another model"),
    "a KV type that there is none of": (KV_TYPE, lambda _: 10**6, "kv_type"),
    "no tokens": (N_PAST, lambda _: 0, "0 tokens"),
    "a part of a cut": (N_PAST, lambda _: 100, "100 tokens, cut at multiples of"),
    "half a page": (N_PAST, lambda _: 128, "layout|128 tokens, cut at multiples of"),
    "more tokens": (N_PAST, lambda _: 512, "token 256|layout"),
    "more tokens than memory": (N_PAST, lambda _: 2**32 - 256, "do not fit"),
    "other cuts": (N_CUT, lambda old: old + 5, r"multiples of \d+, this engine cuts at"),
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


@pytest.mark.parametrize("version", [4, 5, 6, 7])
def test_a_checkpoint_of_a_former_version_is_named_with_what_to_do(
    engine: Engine, saved: bytes, version: int
) -> None:
    before = engine.info
    said = f"has version {version}, this version of luce has 8: read its prompt again and save it anew$"
    with pytest.raises(ArgumentError, match=said):
        engine.load_checkpoint(former(saved, version, before.n_cut if version == 6 else before.n_chunk))
    assert engine.info == before
