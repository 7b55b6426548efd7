"""What a generation may want next, and is then told the result of: a Chunk or a Turn of here, or what the core takes
itself, Drafts (the result is None) or Rows (it is a Verified). The loop puts the wants of many generations into one
step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from luce.native import Drafts, Rows


@dataclass(frozen=True)
class Chunk:
    """Asks for the next tokens of a prompt to be committed in one step. The answer is the choice after them
    where they are the prompt's last, else None. `left` counts the tokens of the prompt after them."""

    tokens: tuple[int, ...]
    last: bool
    left: int = 0


@dataclass(frozen=True)
class Turn:
    """Says that a round may begin. The answer is a Share."""


class Share(NamedTuple):
    """This is what a sequence gets of the next step: at most `rows` rows, the anchor's among them, of a step
    that `sequences` share."""

    rows: int
    sequences: int = 1


@dataclass(frozen=True)
class Proposed:
    """Says that the draft source knows of the round. The answer is None, once those of all its texts do."""


Want = Chunk | Turn | Proposed | Drafts | Rows
WANTS = (Chunk, Turn, Proposed, Drafts, Rows)
