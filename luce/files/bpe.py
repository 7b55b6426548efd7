"""Has byte-level BPE as Qwen's tokenizers have it: how text is cut into words, and how bytes are spelled.

It imports no other module of luce, so that the program that makes the model in the box can use it alone.
"""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# These are the regexes of pre-tokenizers by tokenizer.ggml.pre. In qwen35, marks (\p{M}) are parts of words.
SPLITS = {
    "qwen2": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}",
    "qwen35": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}",
}


def _byte_symbols() -> list[str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


# This is GPT-2's character for each byte: Latin-1 where that prints, else one from U+0100 on.
BYTE_SYMBOLS = _byte_symbols()
