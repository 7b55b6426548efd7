"""Has what happens in a generation: its states, and the events that it tells of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from luce.decode.request import Compressed
from luce.decode.stats import Stats
from luce.native.structs import Logprobs
from luce.speculate.drafting import Round


class State(Enum):
    IDLE = "idle"
    PREFILL = "prefill"
    DRAFT = "draft"
    VERIFY = "verify"
    COMMIT = "commit"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Started:
    """The request is accepted; the prefill begins after `cached` tokens, which a checkpoint holds. An earlier prompt
    began with the next `again` tokens too, which are read again."""

    prompt_tokens: int
    cached: int = 0
    again: int = 0


@dataclass(frozen=True)
class Prefilled:
    """Says that `done` of `total` prompt tokens are committed."""

    done: int
    total: int


class Tokens(NamedTuple):
    """Brings newly chosen ids, and the text that is now certain. The text may lag behind the ids, and ids
    may be empty. `logprobs` has one entry for each id where the request asks for them."""

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[Logprobs, ...] = ()


class Scored(NamedTuple):
    """Brings the log-probabilities of the next tokens of a prompt that is read for them, from its second one
    on."""

    logprobs: tuple[Logprobs, ...]


class Embedded(NamedTuple):
    """Brings the mean of a prompt's hidden states: (n_embd,), of Euclidean norm 1."""

    vector: tuple[float, ...]


@dataclass(frozen=True)
class Warned:
    """Says that something was lost that does not change the tokens."""

    message: str


@dataclass(frozen=True)
class Finished:
    """Ends a generation that went well. `reason` is "stop" (an end of text or a stop string), "length" or
    "cancelled". `truncated_by` says which bound a "length" met: "max_tokens" of the request, or the full
    "context".

    `tokens` end with the end-of-text token or with the one that completed the stop string; `text` does not.
    `cached` counts the prompt's tokens that a checkpoint held. `prompt_tokens` were read; `compressed` says what of the
    whole prompt they are, where text was left out.
    """

    reason: str
    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    stats: Stats
    truncated_by: str | None = None
    cached: int = 0
    compressed: Compressed | None = None


@dataclass(frozen=True)
class Failed:
    """Says that `error` ended the generation in `state`. What was emitted before is right."""

    error: Exception
    state: State


Event = Started | Prefilled | Scored | Embedded | Round | Tokens | Warned | Finished | Failed
