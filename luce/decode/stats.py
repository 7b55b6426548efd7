"""Says what a generation took: rounds, drafts by position, seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from luce.speculate.drafting import Draft, Round


@dataclass(frozen=True)
class Stats:
    """This is what a generation took, with times in seconds. The first token comes from the prefill, so
    tok_per_s and mean_accepted_length (tokens a round) count the others. A figure is None where there is
    nothing to divide by.

    `mode` is the draft source, or "plain". `acceptance` is the accepted share of all drafts, and
    `acceptance_by_position` that of the drafts at depth 1, 2 ..., where drafts after a rejected one count as
    rejected. `rounds_by_drafts` counts the rounds with 0, 1, 2 ... drafts. `by_source` has for each source
    the rounds that it drafted in, its drafts, and the accepted ones of these. draft_s, verify_s and commit_s
    are spent in these calls; the rest of decode_s is the host's, and a GPU may work on the next round
    meanwhile. Of a round that was begun ahead verify_s counts its begin and what the host still waited for
    it; the begin of one with drafts counts to the wait for the round before it.
    """

    mode: str
    prefill_s: float
    decode_s: float
    tok_per_s: float | None
    rounds: int
    drafted: int
    accepted: int
    acceptance: float | None
    acceptance_by_position: list[float]
    drafted_by_position: list[int]
    accepted_by_position: list[int]
    mean_accepted_length: float | None
    rounds_by_drafts: list[int]
    draft_s: float
    verify_s: float
    commit_s: float
    by_source: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass
class Tally:
    """Counts rounds as they happen. `mode` is the source of drafts that name none. The generation `began` and had
    its `first` token at these times of a clock."""

    mode: str = "plain"
    began: float = 0.0
    first: float | None = None
    rounds: list[int] = field(default_factory=list)  # rounds[n] counts the rounds of n drafts.
    drafted: list[int] = field(default_factory=list)  # Each entry counts drafts of one depth, from 1.
    accepted: list[int] = field(default_factory=list)
    draft_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    sources: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, draft: Draft, done: Round) -> None:
        """Counts a round and what it verified."""
        _increment(self.rounds, done.drafted)
        self.draft_s += done.draft_s
        self.verify_s += done.verify_s
        self.commit_s += done.commit_s
        if not done.drafted:
            return
        for depth in draft.depths:
            _increment(self.drafted, depth - 1)
        for depth in range(done.accepted):
            _increment(self.accepted, depth)
        of = self.sources.setdefault(draft.source or self.mode, {"rounds": 0, "drafted": 0, "accepted": 0})
        of["rounds"] += 1
        of["drafted"] += done.drafted
        of["accepted"] += done.accepted

    def stats(self, now: float, tokens: int) -> Stats:
        """Returns the figures of a generation that has ended now, with so many tokens after the first."""
        first = now if self.first is None else self.first
        decode_s = now - first
        rounds, drafted, accepted = sum(self.rounds), sum(self.drafted), sum(self.accepted)
        by_position = self.accepted + [0] * (len(self.drafted) - len(self.accepted))
        return Stats(
            mode=self.mode,
            prefill_s=first - self.began,
            decode_s=decode_s,
            tok_per_s=tokens / decode_s if tokens and decode_s else None,
            rounds=rounds,
            drafted=drafted,
            accepted=accepted,
            acceptance=accepted / drafted if drafted else None,
            acceptance_by_position=[a / d for a, d in zip(by_position, self.drafted, strict=True)],
            drafted_by_position=list(self.drafted),
            accepted_by_position=by_position,
            mean_accepted_length=tokens / rounds if rounds else None,
            rounds_by_drafts=list(self.rounds),
            draft_s=self.draft_s,
            verify_s=self.verify_s,
            commit_s=self.commit_s,
            by_source={name: dict(self.sources[name]) for name in sorted(self.sources)},
        )


def _increment(counts: list[int], index: int) -> None:
    counts += [0] * (index + 1 - len(counts))
    counts[index] += 1
