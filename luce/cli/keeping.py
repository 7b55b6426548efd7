"""Has the options of commands that read only a part of long prompts, and what opens the model that chooses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from luce.cli.command import FilePath, Finite
from luce.planning.opened import Files

if TYPE_CHECKING:  # Who reads whole prompts imports none of it.
    from luce.decode.request import Compressed
    from luce.prompts.scorer import Scorer

PREFILL_MODEL = (
    click.option("--prefill-model", type=FilePath(path_type=Path),
                 help="Let the small model of this GGUF, which has the same tokenizer, choose what of long prompts is "
                 "read. This is lossy: see docs/prefill-keep.md."),
)  # fmt: skip
KEEPING = (
    *PREFILL_MODEL,
    click.option("--prefill-keep", type=Finite(min=0, max=1, min_open=True), metavar="SHARE",
                 help="Read this share of the prompt, above 0 and at most 1, and leave the rest out. It needs "
                 "--prefill-model."),
)  # fmt: skip


def idle_keeping(flags: Mapping[str, Any]) -> str | None:
    """Says what is wrong with the options of reading a part, where one would be ignored or cannot be met."""
    if flags["prefill_keep"] is not None and flags["prefill_model"] is None:
        return "--prefill-keep needs --prefill-model, the file of the model that chooses what is read"
    if flags["prefill_keep"] is None and flags["prefill_model"] is not None:
        return "--prefill-model needs --prefill-keep, the share of the prompt that is read"
    if flags["prefill_model"] is not None and flags["mmproj"] is not None:
        return "--mmproj and --prefill-model: give one of them, since a prompt with images is read whole"
    return None


def scorer_of(files: Files, flags: Mapping[str, Any], ctx: int, whole: bool = False) -> Scorer | None:
    """Opens the scorer that was named: with `whole` for a prompt of `ctx` tokens, else for those beside a model with
    such a context."""
    if flags["prefill_model"] is None:
        return None
    from luce.prompts.scorer import Scorer, longest_of

    longest = ctx if whole else longest_of(files.facts.context_length, ctx)
    how = flags["device"], flags["threads"]
    return Scorer(flags["prefill_model"], files.tokenizer, files.file.kv, longest, *how, whole=whole)


def compressed(files: Files, ids: Sequence[int], flags: Mapping[str, Any]) -> Compressed | None:
    """Returns what of a prompt is read, chosen by a scorer that is open meanwhile; None where all of it is."""
    scorer = scorer_of(files, flags, len(ids), whole=True)
    if scorer is None:
        return None
    with scorer:
        return scorer.compressed(ids, flags["prefill_keep"])
