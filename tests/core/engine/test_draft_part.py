"""Chains that the NextN head drafts among the first tokens of the vocabulary alone: fewer rows of its output
are read, and where the choice among all tokens is one of these, it is the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import draft_part
import drive
import numpy as np
import pytest
import tiny
from click.testing import CliRunner
from depth import deeper, examples
from hypothesis import given
from hypothesis import strategies as st

from luce.cli.commands import cli
from luce.data import BOX
from luce.decode import engine
from luce.decode.events import Finished
from luce.decode.request import Request
from luce.errors import ArgumentError, StateError
from luce.native import File, Library, Model, Source
from luce.native import Sequence as Timeline
from luce.native.structs import Cost, EngineParams, Memory, Sampling
from luce.planning import opened as opened_files
from luce.planning.plan import Options
from luce.speculate.auto import Auto
from luce.speculate.auto import Source as Decided
from luce.speculate.drafting import Drafter, Limits, Round
from luce.speculate.estimates import HOPE, HOPE_WEIGHT
from luce.speculate.prices import Costs

PART = 128


@pytest.fixture(scope="module")
def model(native: Library, device: str, tmp_path_factory: pytest.TempPathFactory) -> Model:
    config = tiny.Config(n_nextn=1)
    path: Path = tmp_path_factory.mktemp("part") / "tiny.gguf"
    return drive.open_model(native, tiny.write(path, config, tiny.layout(config, seed=2)), device, head=True)


@pytest.fixture(scope="module")
def sequence(model: Model) -> Timeline:
    return drive.open_sequence(model, n_ctx=200, n_rows=9, n_draft=8, n_top=5, n_part=PART)


def drafts(sequence: Timeline, anchor: int, n: int, source: Source) -> list[int]:
    drive.draft(sequence, anchor, n, source)
    return sequence.drafted(n)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=3)], ids=str)
def test_drafts_are_those_among_all_tokens_up_to_the_first_beyond_the_part(
    sequence: Timeline, sampling: Sampling
) -> None:
    rng = np.random.default_rng(5)
    sequence.reset()
    sequence.set_sampling(sampling)
    drive.start(sequence, [1, 2, 3])
    shared, beyond = 0, 0
    for _ in range(60):
        anchor = int(rng.integers(0, sequence.engine.n_vocab))
        every = drafts(sequence, anchor, 8, Source.NEXTN)
        part = drafts(sequence, anchor, 8, Source.PART)
        same = next((at for at, token in enumerate(every) if token >= PART), 8)
        assert part[:same] == every[:same] and max(part) < PART
        shared, beyond = shared + same, beyond + (same < 8)
        drive.verify(sequence, [anchor])
        sequence.commit([0])
    assert shared > 10 and beyond > 10


def test_lists_are_of_the_part(sequence: Timeline) -> None:
    sequence.reset()
    sequence.set_sampling(Sampling())
    drive.start(sequence, [1, 2, 3])
    part = drafts(sequence, 7, 4, Source.PART)
    lists = sequence.lists(4, 5)
    found = [lists.at(depth) for depth in range(4)]
    assert [ids[0] for ids in found] == part
    assert all(len(set(ids)) == 5 and max(ids) < PART for ids in found)


@pytest.mark.parametrize(
    "wrong", [{"n_part": 100}, {"n_part": 1 << 20}, {"n_part": PART, "n_draft": 0}], ids=str
)
def test_parts_that_cannot_be_are_refused(model: Model, wrong: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match="n_part"):
        drive.open_engine(model, **{"n_ctx": 64, "n_rows": 4, "n_draft": 2} | wrong)


def test_an_engine_without_a_part_has_no_such_source(model: Model) -> None:
    sequence = drive.open_sequence(model, n_ctx=64, n_rows=4, n_draft=2)
    drive.start(sequence, [1, 2, 3])
    with pytest.raises(StateError, match="n_part"):
        drive.draft(sequence, 5, 2, Source.PART)


def test_a_draft_among_a_part_has_a_cost_of_its_own(sequence: Timeline, model: Model) -> None:
    costs = Costs(sequence.engine.costs())
    assert costs.draft(1) > 0 and costs.draft(1, part=True) > 0
    assert Costs(drive.open_engine(model, n_ctx=64, n_rows=4, n_draft=2).costs()).draft(1, part=True) == 0


@pytest.mark.parametrize("large", [*deeper(True), False])
def test_auto_drafts_among_a_part_of_a_large_vocabulary(
    device: str, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    """It does so on every device, and the tokens are those of plain decoding."""
    monkeypatch.setattr(opened_files, "PART", 1024 if large else 4096)  # The box has 4096 tokens.
    tokens = {}
    for spec in ("off", "auto"):
        options = Options(ctx=256, threads=1, spec=spec, device=device)
        with engine.Engine.open(BOX, options, keep_drafters=True) as opened:
            request = Request(tuple(opened.tokenizer.encode("def add(a, b):\n")), 48)
            *_, last = opened.generate(request)
            assert isinstance(last, Finished)
            tokens[spec] = last.tokens
            drafters = [d.name for d in getattr(opened._source(opened.native.sequence()), "drafters", [])]
    assert opened.info.n_part == (1024 if large else 0)
    assert drafters == (["mtp", "mtp-part"] if large else ["mtp"])
    assert tokens["auto"] == tokens["off"]


@pytest.mark.parametrize("named", [True, False])
def test_the_memory_of_a_plan_is_that_of_the_engine_which_auto_opens(
    device: str, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """It counts what the part takes, and where auto keeps no next best candidates, it counts none."""
    monkeypatch.setattr(opened_files, "PART", 1024)
    asked: list[EngineParams] = []
    real = File.plan_memory

    def plan_memory(self: File, name: str, params: EngineParams, *rest: Any, **more: Any) -> Memory:
        asked.append(params)
        return real(self, name, params, *rest, **more)

    monkeypatch.setattr(File, "plan_memory", plan_memory)
    with engine.Files(BOX, device=device if named else None) as files:
        chosen = files.plan(Options(ctx=256, threads=1, spec="auto"))
        needed = files.memory(chosen)
        with engine.Engine.open(files, chosen, keep_drafters=True) as opened:
            assert (opened.info.n_part, opened.info.n_top) == (asked[-1].n_part, asked[-1].n_top)
            assert opened.info.n_part == 1024
            assert opened.info.memory_bytes == needed.kv + needed.state + needed.compute


def test_what_drafting_among_a_part_gains_is_counted_by_costs() -> None:
    """A head of no cost among a part gains what its drafts cost, and one that costs the same loses what is
    outside of the part."""
    steps = [Cost(rows, 0, 1.0) for rows in (1, 2, 9)]
    free = draft_part.gains(Costs([*steps, Cost(1, 1, 0.5), Cost(1, 3, 0.0)]))
    same = draft_part.gains(Costs([*steps, Cost(1, 1, 0.5), Cost(1, 3, 0.5)]))
    assert {row["drafts_among_part"] for row in free} == {8} and min(row["gain"] for row in free) > 1.2
    assert max(row["gain"] for row in same) < 1
    row = next(row for row in same if (row["share"], row["coverage"]) == (0.6, 0.95))
    assert (row["drafts"], row["drafts_among_part"]) == (1, 1)
    assert row["gain"] == pytest.approx((1 + 0.6 * 0.95) / 1.6, rel=1e-4)


def test_an_oracle_is_drafted_for_among_a_part_of_its_vocabulary(device: str, tmp_path: Path) -> None:
    """Drafts among the part are right as often as those among all tokens where the token is of the part."""
    asked = "bench oracle --shape mini --accept 1 --coverage 0.9 --draft-head Q4_K --modes plain,mtp:1,"
    asked += "mtp-part:1:512 -n 300 --rounds 1 --prompts 2 --json --threads 1 --device cpu"
    args = asked.replace("--threads 1 --device cpu", f"--device {device}") if not device.startswith("cpu") else asked
    result = CliRunner().invoke(cli, args.split(), env={"XDG_CACHE_HOME": str(tmp_path)})
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    rows = {row["mode"]: row for row in found["modes"]}
    assert {row["wrong_tokens"] for row in rows.values()} == {0}
    assert rows["mtp:1"]["acceptance"] == 1 and 0.84 < rows["mtp-part:1:512"]["acceptance"] < 0.96
    assert (found["coverage"], found["draft_head"]) == (0.9, "Q4_K")
    (made,) = (path.name for path in (tmp_path / "luce").iterdir())
    assert made == "oracle-mini-1-covered-0.9-head-q4_k.gguf"


# ---- what auto makes of both heads, by counted costs

# An H200 takes so many milliseconds for a verify of the 27b, by its rows, and for a draft among all tokens
# and among the part (2026-11-22-draft-part-oracle-27b-h200.json; wider verifies are of 2026-11-22-kernels-
# h200.txt).
H200_MS = {1: 6.08, 2: 6.17, 4: 6.25, 8: 6.5, 9: 7.8, 16: 7.9, 32: 10.6}
H200_DRAFT_MS, H200_PART_MS = 0.385, 0.213


class NoLookups:
    def lookup(self, anchor: int, most: int) -> tuple[list[int], int]:
        return [], 0


def auto(part_ms: float | None = H200_PART_MS, known: Auto | None = None) -> tuple[Costs, Decided]:
    """Returns the costs, and an auto that drafts by them, among the part too where it has a cost."""
    verify = [Cost(rows, 0, H200_MS[min(w for w in H200_MS if w >= rows)]) for rows in range(1, 33)]
    text, sources = NoLookups(), [Source.NEXTN] if part_ms is None else [Source.NEXTN, Source.PART]
    costs = Costs([*verify, Cost(1, 1, H200_DRAFT_MS), *([Cost(1, 3, part_ms)] if part_ms else [])])
    drafters = [Drafter(text, by, 8, 1, PART) for by in sources]  # type: ignore[arg-type]
    return costs, (known or Auto(costs, 31)).source(text, drafters)  # type: ignore[arg-type]


def rate(fixed: tuple[int, int] | None, right: np.ndarray, inside: np.ndarray) -> float:
    """Returns tokens a millisecond of a text whose drafts are `right` by position, among the part where the
    token is `inside`: drafted by auto, or by `fixed`, a drafter's index and its drafts."""
    costs, runner = auto()
    n, at, took = len(right), 0, 0.0
    runner.begin(n)
    while at < n:
        depth, by, drafts = n - at - 1, 0, 0
        if fixed:
            by, drafts = fixed[0], min(fixed[1], depth)
        elif depth:
            runner.propose(0, limits := Limits(min(31, depth), depth))
            runner.draft(0, limits)
            by, drafts = runner.choice.drafter or 0, runner.choice.drafts
        hits = right[at : at + drafts] & (inside[at : at + drafts] | (by == 0))
        accepted = drafts if hits.all() else int(hits.argmin())
        took += costs.verify(1 + drafts) + drafts * costs.draft(1, part=by == 1)
        came = np.where(inside[at : at + accepted + 1], 0, PART)
        if not fixed and depth:
            runner.learn(Round(drafts, accepted, 0.0, 0.0, 0.0, tuple(came.tolist())))
        at += accepted + 1
    return n / took


@pytest.mark.long
@pytest.mark.parametrize("share", [0.6, 0.8, 0.9])
@pytest.mark.parametrize("coverage", [0.26, 0.9, 0.95, 0.975])
def test_auto_drafts_among_the_part_where_the_text_is_of_it(share: float, coverage: float) -> None:
    """Texts of 256 tokens have at least 0.97 of the best fixed way's rate, and nothing is known of them."""
    rng = np.random.default_rng(7)
    texts = [(rng.random(256) < share, rng.random(256) < coverage) for _ in range(24)]
    of = {fixed: float(np.mean([rate(fixed, *text) for text in texts]))
          for fixed in (None, *((by, n) for by in (0, 1) for n in range(1, 9)))}  # fmt: skip
    best = max((of[fixed], fixed) for fixed in of if fixed)
    assert of[None] > 0.97 * best[0], best
    all_tokens = max(of[0, n] for n in range(1, 9))
    if coverage >= 0.975:
        assert best[1][0] == 1 and of[None] > 1.03 * all_tokens, "the part pays, and auto takes it"


# ---- what rounds of one show of the other


class Drafted:
    """These are a round's lists: the choices at each depth."""

    def __init__(self, choices: list[int]):
        self._choices = choices

    def at(self, depth: int) -> list[int]:
        return [self._choices[depth]]


@examples(200)
@given(
    target=st.lists(st.integers(0, 9), min_size=2, max_size=9),
    every=st.lists(st.integers(0, 9), min_size=8, max_size=8),
    other=st.lists(st.integers(0, 4), min_size=8, max_size=8),
)
def test_a_round_among_the_part_shows_what_the_head_is_worth(
    target: list[int], every: list[int], other: list[int]
) -> None:
    """Tokens below 5 are of the part; `other` is what is chosen of it where the choice is none of it."""
    n = len(target) - 1
    first_outside = next((at for at, token in enumerate(every) if token >= 5), 8)
    part = every[:first_outside] + other[first_outside:]
    shown, misses = {}, {}
    for by, choices in ((Source.NEXTN, every), (Source.PART, part)):
        drafter = Drafter(None, by, 8, 1, 5)  # type: ignore[arg-type]
        drafter._lists = Drafted(choices)  # type: ignore[assignment]
        right = next((at for at in range(n) if choices[at] != target[at]), n)
        # The next choice comes too.
        tokens = tuple(target[: right + 1])
        trials, hits, _ = drafter.shown(Round(n, right, 0, 0, 0, tokens), n)
        shown[by], misses[by] = hits, hits < trials
        beyond = by is Source.PART and right < n and tokens[-1] >= 5
        assert hits == right and trials == (hits if beyond else n)
    if misses[Source.PART]:
        assert shown[Source.NEXTN] <= shown[Source.PART], "what the part has and misses, the whole misses too"


def rounds_before_it_gives_up(runner: Decided, token: int) -> int:
    """Returns how many rounds of a text are drafted in whose drafts are never right, up to the first without
    drafts."""
    runner.begin(256)
    for n in range(256):
        runner.propose(0, limits := Limits(31, 31))
        runner.draft(0, limits)
        drafts = runner.choice.drafts
        if not drafts:
            return n
        runner.learn(Round(drafts, 0, 0.0, 0.0, 0.0, (token,)))
    return 256


def test_a_head_that_is_never_right_is_given_up_as_soon_where_it_drafts_among_a_part_too() -> None:
    """It is one head, and a text without a token of the part says so by itself: nothing has to be tried with
    drafts among the part. Where the text is of the part its cheaper drafts are tried for longer."""
    alone = rounds_before_it_gives_up(auto(None)[1], PART)
    assert 0 < alone < 32
    assert rounds_before_it_gives_up(auto()[1], PART) == alone
    assert alone < rounds_before_it_gives_up(auto()[1], 0) < 2 * alone


def test_how_much_of_a_text_is_of_the_part_is_learned_without_drafts() -> None:
    """The next text starts from it."""
    known, chosen = auto()[1].auto, []
    for token in (0, PART, 0):  # Texts of the part, of the others, and of the part again.
        runner = auto(known=known)[1]
        runner.begin(256)
        for _ in range(200):
            runner.propose(0, limits := Limits(31, 31))
            runner.draft(0, limits)
            runner.learn(Round(0, 0, 0.0, 0.0, 0.0, (token,)))
        runner.begin(256)  # What may be lost is there again.
        runner.propose(0, limits := Limits(31, 31))
        runner.draft(0, limits)
        chosen.append(runner.choice.drafter)
    assert chosen == [1, 0, 1]
    assert 0 < known.known.of(("part", PART)).share(0, HOPE, HOPE_WEIGHT) < 1
