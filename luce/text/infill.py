"""Prompts that ask for what stands between two texts, with the tokens that models were trained on for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from luce.errors import UnsupportedError
from luce.files.tokenizer import Tokenizer

# Families spell these tokens so: Qwen and CodeGemma, StarCoder and Granite, DeepSeek.
PREFIX = ("<|fim_prefix|>", "<fim_prefix>", "<｜fim▁begin｜>")
SUFFIX = ("<|fim_suffix|>", "<fim_suffix>", "<｜fim▁hole｜>")
MIDDLE = ("<|fim_middle|>", "<fim_middle>", "<｜fim▁end｜>")
REPOSITORY, FILE = ("<|repo_name|>", "<reponame>"), ("<|file_sep|>", "<file_sep>")
NAMES = "repository\n", "file\n"  # These follow the tokens of a repository and of the file with the gap.


@dataclass(frozen=True)
class Gap:
    """A place between `prefix` and `suffix`; what is there begins with `begun`. `files` are others of the
    repository, each (name, text). The prefix may be tokens."""

    prefix: str | Sequence[int]
    suffix: str
    begun: str = ""
    files: Sequence[tuple[str, str]] = ()


def infill_ids(tokenizer: Tokenizer, gap: Gap, most: int | None = None) -> list[int]:
    """Returns the prompt: BOS where the file asks for it, the other files, then PREFIX prefix SUFFIX suffix
    MIDDLE begun. What texts spell are letters, no control tokens. Of many more tokens than `most`, only the
    first are returned, which are more than `most`. Raises UnsupportedError where the vocabulary lacks one of
    the three tokens."""
    parts: list[str | Sequence[int]] = [*_files(tokenizer, gap.files)]
    for names, text in ((PREFIX, gap.prefix), (SUFFIX, gap.suffix), (MIDDLE, gap.begun)):
        token = _token(tokenizer, names)
        if token is None:
            raise UnsupportedError(f"the model fills no gaps: its vocabulary has no {names[0]}", "suffix")
        parts += [[token], text]
    ids = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    for part in parts:
        if most is not None and len(ids) > most:
            break
        left = None if most is None else most - len(ids)
        ids += tokenizer.encode(part, special=False, most=left) if isinstance(part, str) else part
    return ids


def _files(tokenizer: Tokenizer, files: Sequence[tuple[str, str]]) -> list[str | Sequence[int]]:
    """Returns what stands before the file with the gap: the other files, each behind the token of a file."""
    repository, file = _token(tokenizer, REPOSITORY), _token(tokenizer, FILE)
    if repository is None or file is None:
        return [f"{name}\n{text}\n" for name, text in files]
    parts: list[str | Sequence[int]] = [[repository], NAMES[0]] if files else []
    for name, text in files:
        parts += [[file], f"{name}\n{text}\n"]
    return [*parts, [file], NAMES[1]] if files else []


def _token(tokenizer: Tokenizer, names: Sequence[str]) -> int | None:
    return next((token for name in names if (token := tokenizer.added(name)) is not None), None)
