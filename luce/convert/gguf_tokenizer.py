"""Puts a tokenizer and chat template into a GGUF, from a Hugging Face folder or from another GGUF.

It reads tokenizer.json (vocabulary, merges, added tokens), tokenizer_config.json, generation_config.json and
config.json (ids of eos, pad, bos, mask) and chat_template.jinja. Keys follow llama.cpp's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import tokenizers

from luce.convert.hf_config import Section, read_json, text_config
from luce.errors import FileError, UnsupportedError
from luce.files import gemma4_vocabulary
from luce.files.bpe import SPLITS
from luce.files.tokenizer import Tokenizer
from luce.native import File

Note = Callable[[str], None]

# A converted file has to encode these as tokenizers does with the original: spaces, digits, marks, other
# scripts, line ends, code.
SAMPLE = (
    "def add(a, b):\n    return a + b  # I'm 3 333 years old\r\n\n\tx != y;\n"
    " naïve café e\u0301 日本語 हिन्दी 🚀👩\u200d🚀   trailing  "
)


def add_hf_tokenizer(w: gguf.GGUFWriter, folder: Path, n_vocab: int, note: Note) -> None:
    """Adds the keys of the tokenizer in `folder` for a model with n_vocab embedding rows. Ids that the
    tokenizer leaves unused become "[PADn]" of type unused. `note` is called with what was left out."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise FileError(f"{path} is missing: copy it beside config.json", concerns="tokenizer")
    top = Section(read_json(path), str(path))
    model = top.section("model")
    if model.get("type", str, "BPE") != "BPE":
        raise UnsupportedError(f"{model.where}: type is {model.values['type']!r}: luce has BPE")
    model.only("ignore_merges", False)
    tokens, types = _tokens(top, model, n_vocab)
    ids = {token: i for i, token in enumerate(tokens)}
    if model.get("byte_fallback", bool, False):
        _require_gemma4(top, model)
        w.add_tokenizer_model("gemma4")
        w.add_token_list(tokens)
        w.add_token_types(_gemma4_types(tokens, types))
        w.add_token_merges(_merges(model, spaces=True))
        _add_special_ids(w, folder, ids, lambda said: None)  # Its reader knows all of its ends.
        if (unknown := model.get("unk_token", str, None)) in ids:
            w.add_unk_token_id(ids[str(unknown)])
        w.add_add_bos_token(True)
        w.add_add_space_prefix(False)
    else:
        model.only("fuse_unk", False)
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre(_pre_tokenizer(top))
        w.add_token_list(tokens)
        w.add_token_types(types)
        w.add_token_merges(_merges(model))
        _add_special_ids(w, folder, ids, note)
        settings = _optional(folder, "tokenizer_config.json")
        w.add_add_bos_token(settings.get("add_bos_token", bool, False))
    template = _chat_template(folder)
    if template is None:
        note("no chat template: this file is not for chats")
    else:
        w.add_chat_template(template)


def _tokens(top: Section, model: Section, n_vocab: int) -> tuple[list[str], list[int]]:
    tokens = [""] * n_vocab
    types = [int(gguf.TokenType.UNUSED)] * n_vocab

    def put(where: str, token: str, index: object, kind: gguf.TokenType) -> None:
        if type(index) is not int or not 0 <= index < n_vocab:
            raise FileError(f"{where}: token {token!r} has id {index}, the embedding has {n_vocab} rows")
        tokens[index], types[index] = token, int(kind)

    for token, index in model.get("vocab", dict).items():
        put(model.where, token, index, gguf.TokenType.NORMAL)
    for added in top.get("added_tokens", list, []):
        entry = Section(added, f"{top.where}: added_tokens")
        kind = gguf.TokenType.CONTROL if entry.get("special", bool) else gguf.TokenType.USER_DEFINED
        put(entry.where, entry.get("content", str), entry.get("id", int), kind)
    unused = int(gguf.TokenType.UNUSED)
    named = [f"[PAD{i}]" if kind == unused else tokens[i] for i, kind in enumerate(types)]
    if len(set(named)) != n_vocab:
        twice = next(token for token in named if named.count(token) > 1)
        raise FileError(f"{top.where}: token {twice!r} has two ids")
    return named, types


def _merges(model: Section, spaces: bool = False) -> list[str]:
    """Returns merges as "a b"; files hold them so, or as pairs. A token may begin with a space where `spaces` says so:
    merges are split at their first space behind the first character."""
    merges = []
    for given in model.get("merges", list):
        merge = given if isinstance(given, str) else " ".join(given)
        left, right = gemma4_vocabulary.pairs([merge])[0]
        same = isinstance(given, str) or list(given) == [left, right]
        if not (same and right and (spaces or merge.count(" ") == 1)):
            raise FileError(f"{model.where}: merge {merge!r} is not two tokens")
        merges.append(merge)
    if not merges:
        raise FileError(f"{model.where}: key merges is empty")
    return merges


# These marks are shown: what a model calls and thinks stands between them.
_SHOWN = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>')


def _gemma4_types(tokens: list[str], types: list[int]) -> list[int]:
    """Returns the types of a vocabulary of characters: some marks are shown, and <0x0A> is a byte."""
    found = list(types)
    for i, token in enumerate(tokens):
        if token in _SHOWN and types[i] == gguf.TokenType.CONTROL:
            found[i] = int(gguf.TokenType.USER_DEFINED)
        elif gemma4_vocabulary.is_byte(token) and types[i] == gguf.TokenType.NORMAL:
            found[i] = int(gguf.TokenType.BYTE)
    return found


def _require_gemma4(top: Section, model: Section) -> None:
    """Raises UnsupportedError where a tokenizer with byte fallback does anything to a text but Gemma 4's: ▁ for a
    space, and no words (a split at spaces finds none)."""
    normalizer, split = top.section("normalizer").values, top.section("pre_tokenizer").values
    steps = normalizer.get("normalizers", [normalizer])
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": gemma4_vocabulary.BLANK}
    found = {
        "fuse_unk": (model.get("fuse_unk", bool, False), True),
        "normalizer": (steps, [blanks]),
        "pre_tokenizer": ([split.get("type"), split.get("pattern")] if split else None, ["Split", {"String": " "}]),
    }
    for key, (value, wanted) in found.items():
        if value != wanted and not (key == "pre_tokenizer" and value is None):
            raise UnsupportedError(
                f"{top.where}: key byte_fallback is true and {key} is {value}: with byte fallback luce implements "
                f"{wanted}, as in Gemma 4"
            )


def _pre_tokenizer(top: Section) -> str:
    """Returns tokenizer.ggml.pre: the name of the regex that splits text into words."""
    steps = top.get("pre_tokenizer", dict)
    found = [
        step.get("pattern", {}).get("Regex")
        for step in [steps, *steps.get("pretokenizers", [])]
        if step.get("type") == "Split"
    ]
    for name, regex in SPLITS.items():
        if found == [regex]:
            return name
    raise UnsupportedError(f"{top.where}: pre_tokenizer splits by {found}: luce has {', '.join(SPLITS)}")


def _optional(folder: Path, name: str) -> Section:
    path = folder / name
    return Section(read_json(path) if path.exists() else {}, str(path))


def _special(section: Section, name: str) -> str | None:
    """Returns a special token. tokenizer_config.json gives it as a string, or as an object with `content`."""
    value = section.values.get(f"{name}_token")
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _add_special_ids(w: gguf.GGUFWriter, folder: Path, ids: dict[str, int], note: Note) -> None:
    settings = _optional(folder, "tokenizer_config.json")
    generation = _optional(folder, "generation_config.json")
    config = text_config(_optional(folder, "config.json"))
    add = {"bos": w.add_bos_token_id, "eos": w.add_eos_token_id, "pad": w.add_pad_token_id,
           "mask": w.add_mask_token_id}  # fmt: skip
    ends: list[int] = []
    for name, add_id in add.items():
        found = []
        token = _special(settings, name)
        if token is not None and token not in ids:
            raise FileError(f"{settings.where}: {name}_token {token!r} is not in the vocabulary")
        if token is not None:
            found.append(ids[token])
        for section in (generation, config):
            value = section.values.get(f"{name}_token_id")
            found += value if isinstance(value, list) else [] if value is None else [value]
        for index in found:
            if type(index) is not int or not 0 <= index < len(ids):
                raise FileError(f"{folder}: {name}_token_id {index!r} is not one of {len(ids)} tokens")
        if found:
            add_id(found[0])
        if name == "eos":
            ends = list(dict.fromkeys(found))
    if not ends:
        note("no eos token in tokenizer_config.json, generation_config.json or config.json")
    if len(ends) > 1:
        w.add_eot_token_id(ends[1])
    if len(ends) > 2:
        note(f"GGUF has room for two tokens that end a text: {ends[2:]} are left out")


def _chat_template(folder: Path) -> str | list[dict[str, str]] | None:
    """Returns chat_template.jinja, which wins as in transformers, else tokenizer_config.json's."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = _optional(folder, "tokenizer_config.json").values.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    if isinstance(template, list) and all({"name", "template"} <= entry.keys() for entry in template):
        return template
    raise FileError(f"{folder}/tokenizer_config.json: key chat_template is neither text nor named texts")


def check_tokenizer(file: File, folder: Path) -> None:
    """Checks that the finished file encodes SAMPLE and every added token as tokenizers does with
    tokenizer.json."""
    try:
        original = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # The tokenizers package raises bare Exceptions.
        raise FileError(f"{folder}/tokenizer.json: {error}") from error
    text = SAMPLE + "x".join(token.content for token in original.get_added_tokens_decoder().values())
    made = Tokenizer(file.kv).encode(text)
    wanted = original.encode(text, add_special_tokens=False).ids
    if made != wanted:
        at = next((i for i, (a, b) in enumerate(zip(made, wanted, strict=False)) if a != b), -1)
        raise UnsupportedError(
            f"{folder}/tokenizer.json has rules that luce's tokenizer lacks: of a sample text, token {at} "
            f"is {made[at]}, expected {wanted[at]}"
        )


# ---- keys of an existing GGUF


def copy_keys(w: gguf.GGUFWriter, file: File, wanted: Callable[[str], bool]) -> None:
    """Copies the keys of `file` that are wanted, with their types. FileError names the file and a key whose
    number is none."""
    library = file.library
    for index, key in enumerate(file.kv):
        if not wanted(key):
            continue
        entry = library.struct("luce_kv")
        library.check(library.lib.luce_file_get_kv(file.handle, index, entry))
        value: Any = file.kv[key]
        value = value.tolist() if isinstance(value, memoryview) else value
        if isinstance(value, list) and not value:
            continue  # An empty array says nothing, and the writer has none.
        each = value if isinstance(value, list) else [value]
        if any(isinstance(one, float) and math.isnan(one) for one in each):
            raise FileError(f"{file.path}: key {key}: expected numbers, found nan")
        array = entry.type == gguf.GGUFValueType.ARRAY
        sub_type = gguf.GGUFValueType(entry.elem_type) if array else None
        w.add_key_value(key, value, gguf.GGUFValueType(entry.type), sub_type)
