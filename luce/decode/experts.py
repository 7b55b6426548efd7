"""Decides which experts have slots on the device, where the others are read in host memory: those that steps have used
most of late. No token depends on it, so nothing is at stake but time.

As a request begins, beside others or not, the counts of what steps have read since are added to scores, which fade:
what lies HALF_LIFE choices of a layer back counts half. Then the experts whose scores are largest move into slots, a
bounded number at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from luce.errors import Error
from luce.native import Engine
from luce.native.engine import ExpertMove

HALF_LIFE = 16384  # Choices of a layer: 2,048 tokens of which each has 8 experts.
# An expert takes another's slot where its score is so many times as large, and by so much larger: else those that are
# about equally used would take turns, and each copy takes as long as hundreds of reads on the device.
RATIO, MARGIN = 1.25, 4.0
# So many of a layer's experts move at a time, on average. Of the 35b-a3b they take some 600 MB, which PCIe 4 brings in
# about a fortieth of a second.
MOVES_PER_LAYER = 8


@dataclass(frozen=True)
class Use:
    """What steps have read since the opening: `read` experts, counted for each row, of which `hits` had a slot.
    `moved` counts experts that were given a slot. `failed` says why none moves any more."""

    read: int = 0
    hits: int = 0
    moved: int = 0
    failed: str = ""

    @property
    def share(self) -> float | None:
        """Returns the part of reads that found a slot, None before there were any."""
        return self.hits / self.read if self.read else None


def faded(scores: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Returns a layer's scores after these many more choices of each expert."""
    keep = 0.5 ** (sum(counts) / HALF_LIFE)
    return [score * keep + count for score, count in zip(scores, counts, strict=True)]


def moves_of(
    scores: Sequence[Sequence[float]], slots: Sequence[Sequence[int]], n_slots: int, most: int
) -> list[ExpertMove]:
    """Returns at most `most` moves, those that gain most first. For each layer `scores` has a number for each expert,
    and `slots` its slot or -1. Among equals the lowest expert comes first."""
    gains = list[tuple[float, ExpertMove]]()
    for layer, (score, slot_of) in enumerate(zip(scores, slots, strict=True)):
        inside = [had for had, slot in zip(score, slot_of, strict=True) if slot >= 0]
        outside = max((one for one, slot in zip(score, slot_of, strict=True) if slot < 0), default=0.0)
        if outside <= (RATIO * min(inside, default=0.0) + MARGIN if len(inside) == n_slots else 0.0):
            continue  # Nothing is to be gained here, which is the rule, and sorting takes a while.
        held = sorted((score[expert], expert, slot) for expert, slot in enumerate(slot_of) if slot >= 0)
        free = sorted(set(range(n_slots)) - {slot for _, _, slot in held})
        places = [(0.0, slot) for slot in free] + [(had, slot) for had, _, slot in held]
        coming = sorted((expert for expert, slot in enumerate(slot_of) if slot < 0), key=lambda each: -score[each])
        for at, (expert, (had, slot)) in enumerate(zip(coming, places, strict=False)):
            if score[expert] <= (0.0 if at < len(free) else RATIO * had + MARGIN):
                break
            gains.append((score[expert] - had, ExpertMove(layer, expert, slot)))
    gains.sort(key=lambda each: (-each[0], each[1]))
    return [move for _, move in gains[:most]]


class Experts:
    """Moves the experts of an engine whose slots hold some. All calls are of the thread that runs the engine."""

    def __init__(self, engine: Engine):
        info = engine.info
        self._engine, self._n_slots = engine, info.n_expert_slots
        self._scores = [[0.0] * info.n_experts] * info.n_expert_layers
        self._seen = [counts for counts, _ in engine.experts()]  # The opening has run steps too.
        self.use = Use()

    @classmethod
    def of(cls, engine: Engine) -> Experts | None:
        """Returns what moves the experts of an engine, None where it has none at home in host memory."""
        return cls(engine) if engine.info.n_expert_layers else None

    def settle(self) -> str:
        """Counts what was read since the last call, and moves experts into slots. It is called between requests. A
        failure leaves each expert where it can be read; then what is returned says, once, that none moves any more."""
        if self.use.failed:
            return ""
        read = hits = moved = 0
        failed = ""
        try:
            slots = list[list[int]]()
            for layer, (counts, slot_of) in enumerate(self._engine.experts()):
                new = [(now - then) % 2**32 for now, then in zip(counts, self._seen[layer], strict=True)]
                self._seen[layer], self._scores[layer] = counts, faded(self._scores[layer], new)
                read += sum(new)
                hits += sum(count for count, slot in zip(new, slot_of, strict=True) if slot >= 0)
                slots.append(slot_of)
            if read and self._n_slots:
                most = MOVES_PER_LAYER * len(slots)
                if moves := moves_of(self._scores, slots, self._n_slots, most):
                    self._engine.move_experts(moves)
                    moved = len(moves)
        except Error as error:
            failed = str(error)
        use = self.use
        self.use = Use(use.read + read, use.hits + hits, use.moved + moved, failed)
        return f"experts stay where they are from now on: {failed}" if failed else ""
