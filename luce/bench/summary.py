"""Turns records into one row of figures for each mode, by pure arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from luce.bench.run import Record

TIMING = (
    "tok/s: decoding, from the first new token to the end, all of a round. prefill: the prompt. end to end: "
    "both. Outside: loading, opening, warm-up, checks. Medians over prompts, quartiles in brackets; modes "
    "take turns."
)


@dataclass(frozen=True)
class ModeRow:
    """These are one mode's figures; None where there is nothing to say.

    `tok_per_s` is the median over records of the decoding speed, and `tok_per_s_spread` its quartiles.
    `end_to_end_tok_per_s` counts prefill and decoding time. `speedup` is the median over prompts of
    tok_per_s divided by plain's on the same prompt in the same round. `mean_accepted_length` is in tokens a
    round. draft_ms, verify_ms and commit_ms are means a round.

    `acceptance` is that of all drafts, `acceptance_by_position` that of those at depth 1, 2 ... `by_source`
    has for each source the rounds that it drafted in, its drafts, the accepted ones, and the mean of these a
    round.

    `same_tokens` counts the problems whose tokens equal plain's in every round. `passed` counts those whose
    answer passed its check, and `pass_at_1` is their share. `wrong_tokens` counts those that an oracle model
    did not allow.
    """

    mode: str
    problems: int
    tokens: int
    tok_per_s: float | None
    tok_per_s_spread: list[float] | None
    end_to_end_tok_per_s: float | None
    prefill_tok_per_s: float | None
    speedup: float | None
    rounds: int
    drafted: int
    accepted: int
    acceptance: float | None
    acceptance_by_position: list[float] = field(default_factory=list)
    mean_accepted_length: float | None = None
    draft_ms: float | None = None
    verify_ms: float | None = None
    commit_ms: float | None = None
    by_source: dict[str, dict[str, float]] = field(default_factory=dict)
    same_tokens: int | None = None
    passed: int | None = None
    pass_at_1: float | None = None
    wrong_tokens: int | None = None

    def as_json(self) -> dict[str, object]:
        """Returns all fields, with figures of five digits."""
        return {
            name: [five_digits(x) for x in value] if isinstance(value, list)
            else five_digits(value) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }  # fmt: skip


def five_digits(value: float) -> float:
    """Rounds a figure as results keep it."""
    return float(f"{value:.5g}")


def summarise(
    records: Sequence[Record],
    modes: Sequence[str],
    passed: Mapping[tuple[str, str], bool] | None = None,
    wrong: Callable[[Record], int] | None = None,
) -> list[ModeRow]:
    """Returns a row for each mode that has records. `passed` tells by (mode, case id) whether the answers of
    round 0 that were checked passed. `wrong` counts the tokens of a record that are known to be wrong."""
    plain = {(r.mode, r.case.id, r.round): r for r in records if r.mode == r.plain}
    rows = []
    for mode in modes:
        of_mode = [r for r in records if r.mode == mode]
        if of_mode:
            rows.append(_row(mode, of_mode, plain, passed, wrong))
    return rows


def _row(
    mode: str,
    records: Sequence[Record],
    plain: Mapping[tuple[str, str, int], Record],
    passed: Mapping[tuple[str, str], bool] | None,
    wrong: Callable[[Record], int] | None,
) -> ModeRow:
    stats = [r.stats for r in records]
    speeds = [s.tok_per_s for s in stats if s.tok_per_s]
    ids = {r.case.id for r in records}
    found = [(r, plain.get((r.plain, r.case.id, r.round))) for r in records]
    paired = [(r, p) for r, p in found if p is not None]
    unlike = {r.case.id for r, p in paired if r.tokens != p.tokens}
    ratios = [r.stats.tok_per_s / p.stats.tok_per_s for r, p in paired
              if r.stats.tok_per_s and p.stats.tok_per_s]  # fmt: skip
    rounds, drafted = sum(s.rounds for s in stats), sum(s.drafted for s in stats)
    accepted = sum(s.accepted for s in stats)
    decoded = sum(max(len(r.tokens) - 1, 0) for r in records)
    checked = [ok for (m, _), ok in passed.items() if m == mode] if passed is not None else []
    per_round: Callable[[float], float | None] = lambda s: 1000 * s / rounds if rounds else None  # noqa: E731
    return ModeRow(
        mode=mode,
        problems=len(ids),
        tokens=sum(len(r.tokens) for r in records),
        tok_per_s=statistics.median(speeds) if speeds else None,
        tok_per_s_spread=quartiles(speeds),
        end_to_end_tok_per_s=_median(
            len(r.tokens) / (r.stats.prefill_s + r.stats.decode_s)
            for r in records if r.stats.prefill_s + r.stats.decode_s > 0
        ),
        prefill_tok_per_s=_median(
            len(r.case.prompt) / r.stats.prefill_s for r in records if r.stats.prefill_s > 0
        ),
        speedup=_median(ratios),
        rounds=rounds,
        drafted=drafted,
        accepted=accepted,
        acceptance=accepted / drafted if drafted else None,
        acceptance_by_position=_by_position(records),
        mean_accepted_length=decoded / rounds if rounds else None,
        draft_ms=per_round(sum(s.draft_s for s in stats)),
        verify_ms=per_round(sum(s.verify_s for s in stats)),
        commit_ms=per_round(sum(s.commit_s for s in stats)),
        by_source=_by_source(records),
        same_tokens=len({r.case.id for r, _ in paired} - unlike) if paired else None,
        passed=sum(checked) if checked else None,
        pass_at_1=sum(checked) / len(checked) if checked else None,
        wrong_tokens=sum(map(wrong, records)) if wrong else None,
    )  # fmt: skip


def _by_position(records: Sequence[Record]) -> list[float]:
    depth = max(len(r.stats.drafted_by_position) for r in records)
    drafted, accepted = [0] * depth, [0] * depth
    for r in records:
        for at, (d, a) in enumerate(
            zip(r.stats.drafted_by_position, r.stats.accepted_by_position, strict=True)
        ):
            drafted[at] += d
            accepted[at] += a
    return [a / d for a, d in zip(accepted, drafted, strict=True)]


def _by_source(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for name in sorted({name for r in records for name in r.stats.by_source}):
        of = [r.stats.by_source[name] for r in records if name in r.stats.by_source]
        found[name] = {key: sum(each[key] for each in of) for key in ("rounds", "drafted", "accepted")}
        found[name]["accepted_a_round"] = five_digits(found[name]["accepted"] / found[name]["rounds"])
    return found


def _median(values: object) -> float | None:
    found = list(values)  # type: ignore[call-overload]
    return statistics.median(found) if found else None


def quartiles(values: Sequence[float]) -> list[float] | None:
    """Returns the [first, third] quartile, or of fewer than four values the least and the greatest."""
    if len(values) < 4:
        return [min(values), max(values)] if values else None
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]
