"""Checks the arithmetic of `luce bench`: modes, turns, figures, tables. It has no model, and a clock of its
own."""

from __future__ import annotations

import contextlib
import csv
import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from luce.bench import output, sweep
from luce.bench.run import Case, Mode, Record, Settings, parse_modes, with_temperatures
from luce.bench.summary import quartiles, summarise
from luce.cli.terminal import Display, print_table
from luce.decode.stats import Stats
from luce.errors import Error
from luce.native import Drafts, Rows
from luce.native.structs import Sampling

CASES = [Case(f"p{i}", tuple(range(10 * (i + 1)))) for i in range(3)]


def stats(decode_s: float, n: int, rounds: int, drafted: list[int], accepted: list[int]) -> Stats:
    return Stats(
        mode="mtp" if drafted else "plain",
        prefill_s=0.5,
        decode_s=decode_s,
        tok_per_s=(n - 1) / decode_s,
        rounds=rounds,
        drafted=sum(drafted),
        accepted=sum(accepted),
        acceptance=sum(accepted) / sum(drafted) if drafted else None,
        acceptance_by_position=[a / d for a, d in zip(accepted, drafted, strict=True)],
        drafted_by_position=drafted,
        accepted_by_position=accepted,
        mean_accepted_length=(n - 1) / rounds,
        rounds_by_drafts=[],
        draft_s=0.1 * rounds,
        verify_s=0.2 * rounds,
        commit_s=0.3 * rounds,
    )


def record(mode: str, case: int, decode_s: float, turn: int = 0, tokens: int = 21, last: int = 0) -> Record:
    drafted, accepted = ([], []) if mode == "plain" else ([10, 5], [5, 2])
    rounds = tokens - 1 if mode == "plain" else 10
    ids = (*range(tokens - 1), last)
    return Record(CASES[case], mode, turn, ids, "", stats(decode_s, tokens, rounds, drafted, accepted))


def test_modes_are_read_and_named():
    assert parse_modes("plain, mtp,mtp:3,auto,lookup,lookup:63,dflash:07,mtp-tree:3:12,mtp-part:2:64k") == [
        Mode("plain", "off"), Mode("mtp", "mtp"), Mode("mtp:3", "mtp", 3), Mode("auto", "auto"),
        Mode("lookup", "lookup"), Mode("lookup:63", "lookup", None, 63), Mode("dflash:7", "dflash", None, 7),
        Mode("mtp-tree:3:12", "mtp", 3, 12), Mode("mtp-part:2:64k", "mtp", 2, part=65536),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain,",
        "fast",
        "mtp:0",
        "mtp:9",
        "mtp:x",
        "plain:1",
        "auto:",
        "mtp:",
        "lookup:64",
        "lookup:0",
        "mtp-tree",
        "mtp-tree:3",
        "mtp-tree:9:12",
        "mtp-tree:3:64",
        "mtp-tree:0:3",
        "mtp-part:3",
        "mtp-part:9:64k",
        "mtp-part:3:0",
    ],
)
def test_what_is_no_mode_is_named(text):
    with pytest.raises(ValueError, match="is not plain"):
        parse_modes(text)


def test_a_mode_named_twice_is_refused():
    with pytest.raises(ValueError, match="named twice"):
        parse_modes("mtp:2,plain,mtp:2")


def test_every_mode_runs_at_every_temperature_and_beside_plain_at_the_same_one():
    modes = parse_modes("plain,mtp:3,auto")
    assert with_temperatures(modes, [0.7]) == modes
    warm = with_temperatures(modes, [0.0, 0.7])
    assert [mode.name for mode in warm] == [
        "plain T=0", "mtp:3 T=0", "auto T=0", "plain T=0.7", "mtp:3 T=0.7", "auto T=0.7",
    ]  # fmt: skip
    assert {mode.plain for mode in warm[:3]} == {"plain T=0"} and warm[4].plain == "plain T=0.7"
    assert len({mode.opened for mode in warm}) == 4, "what auto learns at one temperature is of that one"
    asked = Settings(sampling=Sampling(0.7, top_k=20, seed=5))
    assert asked.at(0.0) == Sampling() and asked.at(None) == asked.sampling
    assert asked.at(1.5) == Sampling(1.5, top_k=20, seed=5)
    records = [
        replace(record(mode, 0, seconds, last=last), mode=f"{mode} T={t}", plain=f"plain T={t}")
        for mode, t, seconds, last in [
            ("plain", 0, 1.0, 1), ("mtp", 0, 0.5, 1), ("plain", 1, 2.0, 2), ("mtp", 1, 0.5, 3),
        ]
    ]  # fmt: skip
    rows = summarise(records, [r.mode for r in records])
    assert [(row.speedup, row.same_tokens) for row in rows] == [(1.0, 1), (2.0, 1), (1.0, 1), (4.0, 0)]


def test_what_each_source_had_accepted_is_added_up():
    """They are of a generation with both, one with the lookup alone, and one that drafted nothing."""
    of = lambda rounds, drafted, accepted: {  # noqa: E731
        "rounds": rounds, "drafted": drafted, "accepted": accepted,
    }  # fmt: skip
    sources = [{"lookup": of(4, 40, 30), "mtp": of(6, 12, 9)}, {"lookup": of(6, 50, 20)}, {}]
    records = [record("auto", at % 3, 1.0) for at in range(3)]
    records = [
        replace(r, stats=replace(r.stats, by_source=by)) for r, by in zip(records, sources, strict=True)
    ]
    (row,) = summarise(records, ["auto"])
    assert row.by_source == {
        "lookup": of(10, 90, 50) | {"accepted_a_round": 5.0}, "mtp": of(6, 12, 9) | {"accepted_a_round": 1.5},
    }  # fmt: skip
    assert "lookup 5.00 mtp 1.50" in str(output.mode_table([row.as_json()]))


def test_speeds_are_medians_and_ratios_are_of_pairs():
    plain = [record("plain", i, seconds) for i, seconds in enumerate((1.0, 2.0, 4.0))]
    mtp = [record("mtp", i, seconds) for i, seconds in enumerate((0.5, 0.8, 8.0))]
    first, second = summarise(plain + mtp, ["plain", "mtp"])
    assert (first.tok_per_s, second.tok_per_s) == (10.0, 25.0)  # They are 20 tokens in 2.0 and in 0.8 s.
    assert first.speedup == 1.0 and second.speedup == 2.0  # It is the median of 2, 2.5 and 0.5.
    assert first.end_to_end_tok_per_s == 21 / 2.5 and first.prefill_tok_per_s == 40.0
    assert second.tok_per_s_spread == [2.5, 40.0]


def test_rounds_and_acceptance_are_sums():
    (row,) = summarise([record("mtp", i, 1.0) for i in range(3)], ["mtp"])
    assert (row.rounds, row.drafted, row.accepted) == (30, 45, 21)
    assert row.acceptance == 21 / 45 and row.acceptance_by_position == [0.5, 0.4]
    assert row.mean_accepted_length == 2.0
    assert [row.draft_ms, row.verify_ms, row.commit_ms] == pytest.approx([100, 200, 300])
    assert row.same_tokens is None and row.speedup is None  # There is no plain mode beside it.


def test_same_tokens_counts_problems_that_agree_in_every_round():
    plain = [record("plain", i, 1.0, turn) for turn in range(2) for i in range(3)]
    mtp = [record("mtp", i, 1.0, turn, last=int((turn, i) == (1, 2))) for turn in range(2) for i in range(3)]
    first, second = summarise(plain + mtp, ["plain", "mtp"])
    assert (first.same_tokens, second.same_tokens, second.problems) == (3, 2, 3)


def test_checks_and_wrong_tokens_are_counted_by_mode():
    records = [record(mode, i, 1.0, last=i) for i in range(3) for mode in ("plain", "mtp")]
    passed = {("plain", "p0"): True, ("plain", "p1"): False, ("mtp", "p0"): True}
    plain, mtp = summarise(records, ["plain", "mtp"], passed, wrong=lambda r: int(r.tokens[-1] > 1))
    assert (plain.passed, plain.pass_at_1, plain.wrong_tokens) == (1, 0.5, 1)
    assert (mtp.passed, mtp.pass_at_1) == (1, 1.0)


def test_a_generation_of_one_token_has_no_speed():
    one = Record(CASES[0], "plain", 0, (5,), "x", Stats(
        mode="plain", prefill_s=0.5, decode_s=0.0, tok_per_s=None, rounds=0, drafted=0, accepted=0,
        acceptance=None, acceptance_by_position=[], drafted_by_position=[], accepted_by_position=[],
        mean_accepted_length=None, rounds_by_drafts=[], draft_s=0, verify_s=0, commit_s=0,
    ))  # fmt: skip
    (row,) = summarise([one], ["plain"])
    assert row.tok_per_s is None and row.tok_per_s_spread is None and row.draft_ms is None
    assert row.end_to_end_tok_per_s == 2.0
    assert output.mode_table([row.as_json()])[0] == ["mode", "end to end", "prefill", "same tokens"]


def test_quartiles():
    assert quartiles([]) is None
    assert quartiles([3.0, 1.0]) == [1.0, 3.0]
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == [2.0, 4.0]


def test_tables_say_the_same_in_every_form():
    rows = [
        row.as_json() for row in summarise([record("plain", 0, 3.0), record("mtp", 0, 1.0)], ["plain", "mtp"])
    ]
    header, cells = output.mode_table(rows)
    assert header[:3] == ["mode", "tok/s", "x plain"] and cells[1][:3] == ["mtp", "20.0 [20.0 20.0]", "3.00"]
    assert "pass@1" not in header  # Nothing was checked.
    lines = output.as_markdown((header, cells)).splitlines()
    assert len(lines) == 4 and lines[1].startswith("| --- | ---: |") and lines[3].startswith("| mtp | 20.0")
    plain, mtp = csv.DictReader(io.StringIO(output.as_csv(rows)))
    assert (
        float(mtp["speedup"]) == 3.0 and mtp["acceptance_by_position"] == "0.5 0.4" and plain["passed"] == ""
    )


def test_a_plot_needs_its_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(Error, match="a plot needs the package matplotlib"):
        output.require(None, Path("x.png"))


@pytest.mark.long
def test_plots_are_written(tmp_path: Path):
    pytest.importorskip("matplotlib")
    rows = [
        row.as_json() for row in summarise([record("plain", 0, 3.0), record("mtp", 0, 1.0)], ["plain", "mtp"])
    ]
    output.plot_modes(tmp_path / "modes.png", "a title", rows)
    cost = sweep.Cost(0, 2, 1, 3.0, [2.0, 4.0], 1.5, 1.0).as_json()
    output.plot_costs(tmp_path / "costs.png", "a title", [cost])
    for name in ("modes.png", "costs.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(Error, match="cannot write the plot: No such file or directory$"):
        output.plot_modes(tmp_path / "no folder" / "x.png", "a title", rows)


class Steps:
    """This is a sequence whose steps take 10 seconds for each row, and one for each 1000 positions, by its
    clock; a draft half a second. A device that has read 4000 positions is hot, and takes a tenth longer."""

    def __init__(self, other: Steps | None = None) -> None:
        self.past, self.device = 0, other.device if other else SimpleNamespace(now=0.0, hot=False, ran=[])
        self.engine = self.info = self
        self.n_chunk = 512

    @property
    def now(self) -> float:
        return float(self.device.now)

    def sequence(self) -> contextlib.nullcontext[Steps]:
        return contextlib.nullcontext(Steps(self))

    def reset(self) -> None:
        self.past = 0

    def prefill(self, tokens: list[int], last: bool) -> None:
        assert tokens and len(tokens) <= self.n_chunk and not last
        self.past += len(tokens)
        self.device.now += 100.0
        self.device.hot = self.device.hot or self.past >= 4000

    def verify(self, items: list[Rows]) -> list[list[int]]:
        (item,) = items
        past = cast("Steps", item.sequence).past
        self.device.now += (10 * item.n + past // 1000) * (1.1 if self.device.hot else 1)
        self.device.ran.append((past, item.n))
        return [[0] * item.n]

    def commit(self, path: list[int]) -> None:
        self.past += len(path)

    def checkpoint(self) -> contextlib.closing[Any]:
        assert self.past > 0 and self.past % 256 == 0  # A real one is refused elsewhere.
        return contextlib.closing(SimpleNamespace(past=self.past, close=lambda: None))

    def resume(self, checkpoint: Any) -> None:
        self.past = checkpoint.past

    def draft(self, items: list[Drafts]) -> None:
        (item,) = items
        self.device.now += item.n / 2


def test_sweep_compares_with_one_row_at_the_same_context_and_with_one_at_0_on_the_same_device():
    sequence = Steps()
    by_context = list(sweep.costs(sequence, 100, [4000, 0], [1, 2], [1], 3, clock=lambda: sequence.now))
    assert [[(c.ctx, c.rows, c.gamma) for c in costs] for costs in by_context] == [
        [(ctx, 1, 0), (ctx, 2, 0), (ctx, 2, 1)] for ctx in (0, 4000)
    ]
    assert sequence.past == 4000 - 4000 % 256  # There it could go on to another context.
    at_0, at_4000 = by_context
    assert [c.ms for c in at_0] == pytest.approx([10_000, 20_000, 20_500])
    assert [c.ratio for c in at_0] == pytest.approx([1, 2, 2.05])
    assert [c.over for c in at_0] == pytest.approx([0, 10_000, 10_500])
    assert [c.ms for c in at_4000] == pytest.approx([15_400, 26_400, 26_900])
    assert [c.ratio for c in at_4000] == pytest.approx([1, 264 / 154, 269 / 154])
    assert [c.over for c in at_4000] == pytest.approx([4400, 15_400, 15_900])


def test_at_context_0_alone_one_sequence_takes_turns_with_itself_in_an_engine_of_one():
    """An engine of several sequences may lay out its steps for all of them, and luce generate has one."""
    assert sweep.engine_options([0], [1, 8], [2], 3, None, None).sequences == 1
    assert sweep.engine_options([0, 40], [1, 8], [2], 3, None, None).sequences == 2
    steps = Steps()
    steps.sequence = None  # type: ignore[method-assign, assignment]  # There is no other.
    (costs,) = sweep.costs(steps, 100, [0], [1, 2], [1], 3, clock=lambda: steps.now)
    assert [c.over for c in costs] == pytest.approx([0, 10_000, 10_500])
    assert [past for past, _ in steps.device.ran] == [*range(1, 6), *range(1, 11), *range(1, 11)]


def test_a_sweep_fits_into_the_room_that_it_asks_for():
    asked = (([0], [1, 4], [2], 3), ([700, 0, 20], [8], [], 5), ([9, 1300], [2], [7], 1))
    for contexts, rows, gammas, steps in asked:
        options = sweep.engine_options(contexts, rows, gammas, steps, None, None)
        sequence = Steps()
        list(sweep.costs(sequence, 100, contexts, rows, gammas, steps, clock=lambda one=sequence: one.now))
        ran = sequence.device.ran
        assert options.ctx is not None
        assert max(past + n for past, n in ran) <= options.ctx < max(contexts) + 40
        assert {past for past, _ in ran} >= {max(ctx, 1) for ctx in contexts}


def test_each_kind_of_step_takes_turns_with_context_0_from_few_rows_to_many():
    steps = Steps()
    list(sweep.costs(steps, 100, [4000], [4, 1], [1], 8, clock=lambda: steps.now))
    plain, others = steps.device.ran[:20], steps.device.ran[20:]
    turns = [tuple(plain[i : i + 2]) for i in range(0, 20, 2)]
    turns += [tuple(others[i : i + 3]) for i in range(0, len(others), 3)]
    near = [{(past // 1000, n) for past, n in turn} for turn in turns]
    assert near == [{(0, 1), (4, 1), (4, n)} for n in (1, 2, 4) for _ in range(10)]
    orders = {tuple((past // 1000, n) for past, n in turn) for turn in turns}
    assert len(orders) == 8  # Each of two or three comes first.


def test_a_device_that_slows_down_under_some_steps_is_compared_with_itself_then():
    class Busy(Steps):
        """This device takes twice as long from its first step of four rows on, as one whose clock fell."""

        def verify(self, items: list[Rows]) -> list[list[int]]:
            self.device.slow = getattr(self.device, "slow", False) or items[0].n == 4
            for _ in range(2 if self.device.slow else 1):
                found = super().verify(items)
            return found

        def sequence(self) -> contextlib.nullcontext[Steps]:
            return contextlib.nullcontext(Busy(self))

    steps = Busy()
    at_0, at_4000 = sweep.costs(steps, 100, [0, 4000], [1, 2, 4], [], 9, clock=lambda: steps.now)
    assert [c.ratio for c in at_0] == pytest.approx([1, 2, 4])
    assert [c.ratio for c in at_4000] == pytest.approx([1, 24 / 14, 44 / 14])


def test_a_sweep_that_is_cancelled_yields_what_is_whole():
    steps, calls = Steps(), iter(range(10**6))
    found = list(sweep.costs(steps, 100, [0, 4000], [1], [], 3, lambda: steps.now, lambda: next(calls) > 8))
    assert [c[0].ctx for c in found] == [0]


@pytest.mark.parametrize("columns", [200, 80, 20])
def test_no_figure_is_cut_on_a_narrow_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(
        "rich.console.Console",
        lambda **options: Console(force_terminal=True, width=columns, color_system=None),
    )
    rows = [
        row.as_json() for row in summarise([record("plain", 0, 3.0), record("mtp", 0, 1.0)], ["plain", "mtp"])
    ]
    print_table("a title", *output.mode_table(rows), "notes")
    shown = capsys.readouterr().out
    assert "…" not in shown and ("end to end" in shown) == (columns > 20)
    assert ("20.0 [20.0 20.0]" in shown) == (columns > 20)


def test_the_bar_shows_running_figures_on_a_terminal_alone():
    shown = io.StringIO()
    with Display(console=Console(file=shown, force_terminal=True, width=120)) as display:
        display.spin("loading")
        display.count("humaneval", 2, 492, "plain 1500 tok/s")
        display.count("humaneval", 3, 492, "plain 1640, mtp 1289 tok/s")
    assert "humaneval" in shown.getvalue() and "3/492" in shown.getvalue()
    assert "plain 1640, mtp 1289 tok/s" in shown.getvalue()
    piped = io.StringIO()
    with Display(console=Console(file=piped)) as display:
        display.count("humaneval", 3, 492, "plain 1640 tok/s")
    assert piped.getvalue() == ""


def test_a_log_has_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    clock = [1000.0]
    monkeypatch.setattr("luce.cli.terminal.time.perf_counter", lambda: clock[0])
    for quiet in (False, True):
        with Display(quiet) as display:
            for done in range(492):
                display.count("humaneval", done + 1, 492, "plain 1640 tok/s" if done > 60 else "")
                clock[0] += 0.5
        lines = capsys.readouterr().err.splitlines()
        assert quiet or lines[:2] == ["humaneval: 61 of 492", "humaneval: 121 of 492, plain 1640 tok/s"]
        assert len(lines) == (0 if quiet else 492 // 60)
