"""Has what is particular to Gemma 4's tokenizer: tokens are spelled in characters, with ▁ for a space, text is cut into
no words, and what has no token is written in bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import tokenizers
from tokenizers import models, normalizers

from luce.errors import FileError

BLANK = "▁"
# These end a text whatever the keys say: the end of all, of a turn, and of a call, which waits for its answer.
ENDS = {"<eos>": 1, "<turn|>": 106, "<|tool_response>": 50}
BOS = "<bos>", 2
# The marks of thoughts, calls and strings are of what a model says, although some files call them control tokens.
SAID = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>')
_UNKNOWN = "<unk>"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Lines are cut off where runs of line ends begin or end, since no token spans such a place.
_PIECE = re.compile(r".{4096,}?(?:(?<=[^\n])(?=\n)|(?<=\n)(?=[^\n]))", re.S)


def is_byte(spelled: str) -> bool:
    """Says whether a token stands for one byte, as <0x0A> does."""
    return _BYTE.fullmatch(spelled) is not None


def bytes_of(spelled: str) -> bytes:
    """Returns what a token that is no control token adds to the text."""
    found = _BYTE.fullmatch(spelled)
    return bytes([int(found[1], 16)]) if found else spelled.replace(BLANK, " ").encode()


def pairs(merges: Iterable[str]) -> list[tuple[str, str]]:
    """Splits merges at their first space behind the first character, which may be a space itself."""
    cuts = ((merge, merge.find(" ", 1)) for merge in merges)
    return [(merge[:at], merge[at + 1 :]) if at > 0 else (merge, "") for merge, at in cuts]


def build(vocabulary: Mapping[str, int], merges: Sequence[str]) -> tokenizers.Tokenizer:
    """Returns the tokenizer without its added tokens. FileError names keys that do not fit each other."""
    unknown = _UNKNOWN if _UNKNOWN in vocabulary else None
    try:
        bpe = tokenizers.Tokenizer(
            models.BPE(
                vocab=dict(vocabulary), merges=pairs(merges), unk_token=unknown, fuse_unk=True, byte_fallback=True
            )
        )
    except Exception as error:  # The tokenizers package raises bare Exceptions.
        raise FileError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error
    bpe.normalizer = normalizers.Replace(" ", BLANK)
    return bpe


def piece(spelled: Iterable[str]) -> re.Pattern[str] | None:
    """Returns a pattern of pieces that long texts can be cut into, or None where a token spans the end of a line."""
    return None if any("\n" in token and token.strip("\n") for token in spelled) else _PIECE
