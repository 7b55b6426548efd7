"""Makes the small byte-level tokenizer of an oracle, whose words mean nothing; test models have it too."""

from __future__ import annotations

import gguf

from luce.convert.qwen35_layout import PRE_TOKENIZER
from luce.files.bpe import BYTE_SYMBOLS

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Merges are in rank order. Every product gets an id after the 256 bytes.
MERGES = (
    ("Ġ", "t"), ("h", "e"), ("Ġ", "a"), ("i", "n"), ("Ġt", "he"), ("e", "r"), ("o", "n"), ("Ġ", "Ġ"),
    ("d", "e"), ("f", "Ġ"), ("de", "f"), ("r", "e"), ("in", "g"), ("ĠĠ", "ĠĠ"), ("l", "l"), ("Ã", "©"),
)  # fmt: skip


def vocabulary(n_vocab: int, filler: str) -> tuple[list[str], list[int]]:
    """Returns token strings and types: 256 bytes (the id is the byte's value), merge products, fillers (of
    type 1 or, for the default "[PAD", 5, which is unused), and the control tokens as the last three ids."""
    tokens = BYTE_SYMBOLS + [a + b for a, b in MERGES]
    n_fill = n_vocab - len(tokens) - len(CONTROL)
    if n_fill < 0:
        raise ValueError(f"vocabulary of {n_vocab} cannot hold {len(tokens) + len(CONTROL)} tokens")
    types = [gguf.TokenType.NORMAL] * len(tokens)
    unused = filler.startswith("[PAD")
    end = "]" if unused else ""
    tokens += [f"{filler}{len(tokens) + i}{end}" for i in range(n_fill)]
    types += [gguf.TokenType.UNUSED if unused else gguf.TokenType.NORMAL] * n_fill
    return tokens + list(CONTROL), [*types, *[gguf.TokenType.CONTROL] * len(CONTROL)]


def add_tokenizer(w: gguf.GGUFWriter, n_vocab: int, filler: str = "[PAD") -> None:
    """Adds the keys of the tokenizer, which has vocabulary(n_vocab, filler)."""
    tokens, types = vocabulary(n_vocab, filler)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(PRE_TOKENIZER)
    w.add_token_list(tokens)
    w.add_token_types(types)
    w.add_token_merges([f"{a} {b}" for a, b in MERGES])
    w.add_bos_token_id(n_vocab - 3)
    w.add_eos_token_id(n_vocab - 1)
    w.add_pad_token_id(n_vocab - 3)
    w.add_add_bos_token(False)
