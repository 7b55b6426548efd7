"""What one generation is asked: its prompt, its bounds, and how its tokens are chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from luce.images.sight import Shown
from luce.native.structs import Penalties, Sampling
from luce.text.grammar import Matcher


@dataclass(frozen=True)
class Request:
    """This is one generation. `prompt` holds token ids, and names below -1 of rows of its `images`. At most
    `max_tokens` >= 0 new ones follow; None means until the context is full. The text ends before any of `stops`.
    With `ignore_eos` an end-of-text token is a token like any other. `grammar` makes the matcher that the text is
    held to. `logprobs` is how many of the most probable tokens are listed beside each token; None lists nothing.

    `reads` asks for the prompt alone, and no token follows: "scores" are the logprobs of its own tokens,
    "vector" is the mean of its hidden states."""

    prompt: tuple[int, ...]
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    penalties: Penalties = field(default_factory=Penalties)
    grammar: Callable[[], Matcher] | None = None
    logprobs: int | None = None
    reads: Literal["", "scores", "vector"] = ""
    images: tuple[Shown, ...] = ()
