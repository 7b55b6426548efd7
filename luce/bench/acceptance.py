"""Says how often drafts of an oracle model are right: by depth, by rank, and by classes of texts.

The chance of a depth is that its first choice is right where all before it were. The chances of ranks are of
the cases in which that first choice is wrong: in so many of them the second candidate is right, in so many the
third, and so on; in what is left, none. Depths beyond the last one are as that one is.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

MAX_RANKS = 7  # A list of an oracle drafter has so many candidates beside its first choice.

# Chances by depth, estimated from what others report of Qwen3.8-27B: code and math greedy, mixed and prose at
# temperature 1. A round of seven drafts has 4.9, 3.3 and 2.0 tokens with the NextN head, 4.2, 3.1 and 2.1
# with DFlash, and 5.4, 3.9 and 2.5 with DFlash2 or DSpark.
CLASSES: dict[str, dict[str, tuple[float, ...]]] = {
    "mtp": {
        "code": (0.87, 0.85, 0.84),
        "mixed": (0.74, 0.72, 0.70, 0.69, 0.68),
        "prose": (0.52, 0.48, 0.45),
    },
    "dflash": {
        "code": (0.87, 0.82, 0.78, 0.74, 0.71, 0.68, 0.66),
        "mixed": (0.74, 0.70, 0.66, 0.63, 0.60, 0.58, 0.56),
        "prose": (0.58, 0.50, 0.45, 0.42, 0.40),
    },
    "dflash2": {
        "code": (0.90, 0.89, 0.88, 0.87, 0.86, 0.85, 0.84),
        "mixed": (0.80, 0.78, 0.77, 0.76, 0.75, 0.74, 0.73),
        "prose": (0.62, 0.60, 0.58, 0.57, 0.56, 0.55, 0.55),
    },
}
# Where the first candidate is wrong, the others are right so often, of every class and depth: counted once, over the
# 676 such cases of the small model's DFlash drafter in the 24 built-in prompts. No source has it of larger ones.
RANKS = (0.40, 0.135, 0.08, 0.065, 0.035, 0.03, 0.015)
CLASSES["dspark"] = CLASSES["dflash2"]
NAMES = tuple(CLASSES["mtp"])


@dataclass(frozen=True)
class Acceptance:
    """Chances by depth, and `ranks` by depth for drafters that have lists: after the first, shares of the cases in
    which that one is wrong. `name` is a class, or empty."""

    depths: tuple[float, ...]
    ranks: tuple[tuple[float, ...], ...] = ()
    name: str = ""

    def at(self, depth: int) -> float:
        """Returns the chance of a depth, which counts from 1."""
        return self.depths[min(depth, len(self.depths)) - 1]

    def ranks_at(self, depth: int) -> tuple[float, ...]:
        """Returns the chances of the second, third .. candidate of a depth, where the first is wrong."""
        return self.ranks[min(depth, len(self.ranks)) - 1] if self.ranks else ()

    @property
    def kind(self) -> str:
        """Names the drafter that a class is of, as "dflash2"; empty where that is not said."""
        return self.name.rpartition(":")[0]

    @property
    def constant(self) -> float | None:
        """Returns the one chance of all depths, None where they differ or there are ranks."""
        return self.depths[0] if len(set(self.depths)) == 1 and not any(self.ranks) else None

    def tokens(self, drafts: int) -> float:
        """Returns the mean tokens of a round of a chain of so many drafts, the target's own among them."""
        return 1 + sum(accumulate((self.at(depth) for depth in range(1, drafts + 1)), mul))

    @property
    def slug(self) -> str:
        """Names files: the constant chance, or the class and a hash of all chances."""
        if self.constant is not None:
            return f"{self.constant:g}"
        digest = hashlib.sha256(repr((self.depths, self.ranks)).encode()).hexdigest()[:8]
        return f"{self.name.replace(':', '-') or 'depths'}-{digest}"

    def as_json(self) -> float | dict[str, Any]:
        """Returns what result rows hold: the constant chance, or the class and the lists."""
        if self.constant is not None and not self.name:
            return self.constant
        found: dict[str, Any] = {"class": self.name or None, "by_depth": list(self.depths)}
        return found | ({"by_rank": [list(each) for each in self.ranks]} if self.ranks else {})

    def __str__(self) -> str:
        named = f"{self.name} " if self.name else ""
        said = named + " ".join(f"{chance:g}" for chance in self.depths)
        if any(self.ranks):
            said += ", where that is wrong " + "; ".join(
                " ".join(f"{chance:g}" for chance in each) for each in dict.fromkeys(self.ranks)
            )
        return said


def acceptance(of: float | Acceptance) -> Acceptance:
    """Returns one chance for all depths as an Acceptance."""
    return of if isinstance(of, Acceptance) else Acceptance((float(of),))


def parse(text: str, kind: str, most: int) -> Acceptance:
    """Parses "0.8", "0.74,0.72,0.7" by depth, "0.74/0.3/0.1,0.7/0.3" by depth and rank, "mixed", or
    "dflash2:mixed" for a drafter of another kind than `kind`, a key of CLASSES. Raises ValueError, which names
    the value and what would do. There are at most `most` depths; only block drafters have ranks."""
    blocks = kind != "mtp"
    of, colon, name = text.strip().rpartition(":")
    if name in NAMES and (not colon or (blocks and of in CLASSES and of != "mtp")):
        return Acceptance(CLASSES[of or kind][name], (RANKS,) if blocks else (), text.strip())
    parts = text.split(",")
    if len(parts) > most:
        raise ValueError(f"{text!r} has {len(parts)} depths: give at most {most}, the last one stands for all after")
    chances = [[_chance(each, kind) for each in part.split("/")] for part in parts]
    for part, (_, *others) in zip(parts, chances, strict=True):
        if others and not blocks:
            said = f"{part.strip()!r} has ranks, and a NextN head's drafts are a chain"
            raise ValueError(f"{said}: give {part.strip().split('/')[0]!r}")
        if len(others) > MAX_RANKS:
            raise ValueError(f"{part.strip()!r} has {len(others)} ranks after the first: give at most {MAX_RANKS}")
        if sum(others) > 1 + 1e-9:
            raise ValueError(
                f"{part.strip()!r}: of the cases in which the first candidate is wrong, the others are right in "
                f"{sum(others):g}: give shares whose sum is at most 1"
            )
    ranks = tuple(tuple(others) for _, *others in chances)
    return Acceptance(tuple(first for first, *_ in chances), ranks if any(ranks) else ())


def _chance(text: str, kind: str) -> float:
    try:
        chance = float(text)
    except ValueError:
        classes = ", ".join(NAMES)
        if kind != "mtp":
            classes += f", or one of another kind of drafter, as dflash2:{NAMES[1]}"
        shares = "give one from 0 to 1, several by depth (0.74,0.72,0.7)"
        raise ValueError(f"{text.strip()!r} is no chance: {shares}, or a class: {classes}") from None
    if not (math.isfinite(chance) and 0 <= chance <= 1):
        raise ValueError(f"{text.strip()!r} is not in the range 0 to 1")
    return chance
