"""Writes the model in the box with tokens for filling gaps, and with a first token (BOS) before texts."""

from __future__ import annotations

from pathlib import Path

import gguf

from luce.data import BOX
from luce.text.infill import FILE, MIDDLE, PREFIX, REPOSITORY, SUFFIX

MARKS = [names[0] for names in (PREFIX, SUFFIX, MIDDLE, REPOSITORY, FILE)]


def write(path: Path) -> Path:
    """Writes a copy of the box whose last merged tokens are the marks, and whose BOS is <|endoftext|>."""
    reader = gguf.GGUFReader(BOX)
    held = {name: field.contents() for name, field in reader.fields.items()}
    tokens, kinds = held["tokenizer.ggml.tokens"], held["tokenizer.ggml.token_type"]
    merges = held["tokenizer.ggml.merges"][: -len(MARKS)]
    merged = [merge.replace(" ", "") for merge in held["tokenizer.ggml.merges"][-len(MARKS) :]]
    assert not any(word in merge.split(" ") for word in merged for merge in merges)
    for word, mark in zip(merged, MARKS, strict=True):
        at = tokens.index(word)
        tokens[at], kinds[at] = mark, int(gguf.TokenType.USER_DEFINED)
    changed = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
    }
    writer = gguf.GGUFWriter(path, held["general.architecture"])
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "tokenizer.ggml.add_bos_token"):
            continue
        kind, *rest = field.types
        value = changed.get(name, held[name])
        writer.add_key_value(name, value, kind, rest[-1] if rest else None)
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(True)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
