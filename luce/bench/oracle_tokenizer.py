"""Makes the small tokenizer of an oracle, whose words mean nothing; test models have it too. It is byte-level, or
Gemma 4's kind, with the marks that Gemma 4 has and at their ids."""

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


def vocabulary(n_vocab: int, filler: str, marks: tuple[str, ...] = ()) -> tuple[list[str], list[int]]:
    """Returns token strings and types: 256 bytes (the id is the byte's value), merge products, fillers (of
    type 1 or, for the default "[PAD", 5, which is unused), and as the last ids control tokens: `marks` and CONTROL."""
    tokens = BYTE_SYMBOLS + [a + b for a, b in MERGES]
    control = (*marks, *CONTROL)
    n_fill = n_vocab - len(tokens) - len(control)
    if n_fill < 0:
        raise ValueError(f"vocabulary of {n_vocab} cannot hold {len(tokens) + len(control)} tokens")
    types = [gguf.TokenType.NORMAL] * len(tokens)
    unused = filler.startswith("[PAD")
    end = "]" if unused else ""
    tokens += [f"{filler}{len(tokens) + i}{end}" for i in range(n_fill)]
    types += [gguf.TokenType.UNUSED if unused else gguf.TokenType.NORMAL] * n_fill
    return tokens + list(control), [*types, *[gguf.TokenType.CONTROL] * len(control)]


def add_tokenizer(w: gguf.GGUFWriter, n_vocab: int, filler: str = "[PAD", marks: tuple[str, ...] = ()) -> None:
    """Adds the keys of the tokenizer, which has vocabulary(n_vocab, filler, marks)."""
    tokens, types = vocabulary(n_vocab, filler, marks)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(PRE_TOKENIZER)
    w.add_token_list(tokens)
    w.add_token_types(types)
    w.add_token_merges([f"{a} {b}" for a, b in MERGES])
    w.add_bos_token_id(n_vocab - 3)
    w.add_eos_token_id(n_vocab - 1)
    w.add_pad_token_id(n_vocab - 3)
    w.add_add_bos_token(False)


# ---- Gemma 4's kind: words of characters, and bytes for what has no token

GEMMA4_MARKS = {
    0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>", 46: "<|tool>", 47: "<tool|>", 48: "<|tool_call>",
    49: "<tool_call|>", 50: "<|tool_response>", 51: "<tool_response|>", 52: '<|"|>', 98: "<|think|>",
    100: "<|channel>", 101: "<channel|>", 105: "<|turn>", 106: "<turn|>",
}  # fmt: skip
GEMMA4_SHOWN = (48, 49, 50, 51, 52, 100, 101)  # These marks are user-defined tokens; the others are control tokens.
GEMMA4_MERGES = (
    ("▁", "t"), ("h", "e"), ("▁", "a"), ("i", "n"), ("▁t", "he"), ("e", "r"), ("o", "n"), ("▁", "▁"), ("d", "e"),
    ("f", "▁"), ("de", "f"), ("r", "e"), ("in", "g"), ("▁▁", "▁▁"), ("l", "l"), ("\n", "\n"), ("c", "a"), ("ca", "ll"),
)  # fmt: skip
_GEMMA4_CHARACTERS = "▁\nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'\"()<>|/=+-*_{}[]é"


def gemma4_vocabulary(n_vocab: int, last: tuple[str, ...] = ()) -> tuple[list[str], list[int]]:
    """Returns token strings and types: the marks at Gemma 4's ids and, in the places between and behind them, the
    characters, products of merges, bytes and fillers; the control tokens `last` have the last ids."""
    words = [*_GEMMA4_CHARACTERS, *(a + b for a, b in GEMMA4_MERGES)]
    rest = [(word, gguf.TokenType.NORMAL) for word in words]
    rest += [(f"<0x{byte:02X}>", gguf.TokenType.BYTE) for byte in range(256)]
    marks = GEMMA4_MARKS | {n_vocab - len(last) + i: mark for i, mark in enumerate(last)}
    n_fill = n_vocab - len(marks) - len(rest)
    if n_fill < 0:
        raise ValueError(f"vocabulary of {n_vocab} cannot hold {n_vocab - n_fill} tokens")
    others, tokens, types = iter(rest), list[str](), list[int]()
    for i in range(n_vocab):
        shown = gguf.TokenType.USER_DEFINED if i in GEMMA4_SHOWN else gguf.TokenType.CONTROL
        filler = f"[PAD{i}]", gguf.TokenType.UNUSED
        token, kind = (marks[i], shown) if i in marks else next(others, filler)
        tokens.append(token)
        types.append(kind)
    return tokens, types


def add_gemma4_tokenizer(w: gguf.GGUFWriter, n_vocab: int, last: tuple[str, ...] = ()) -> None:
    """Adds the keys of the tokenizer, which has gemma4_vocabulary(n_vocab, last)."""
    tokens, types = gemma4_vocabulary(n_vocab, last)
    w.add_tokenizer_model("gemma4")
    w.add_token_list(tokens)
    w.add_token_types(types)
    w.add_token_merges([f"{a} {b}" for a, b in GEMMA4_MERGES])
    for add, mark in ((w.add_bos_token_id, "<bos>"), (w.add_eos_token_id, "<turn|>"), (w.add_unk_token_id, "<unk>"),
                      (w.add_pad_token_id, "<pad>"), (w.add_mask_token_id, "<mask>")):  # fmt: skip
        add(tokens.index(mark))
    w.add_add_bos_token(True)
    w.add_add_space_prefix(False)
