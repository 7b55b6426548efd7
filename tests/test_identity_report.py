"""Says what may differ between two runs, how it is counted, and the result row that is made of the counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import identity_report
import numpy as np
import pytest
from drive import Decoded
from identity import CUDA_GAP, Identity, Rule, greedy_rule

ROOT = Path(__file__).resolve().parent.parent


def run(tokens: list[int], at: int = 0, logits: tuple[float, ...] = (0.0, 0.0, 0.0)) -> Decoded:
    """Returns a run whose token `at` was chosen by these logits."""
    rows = [np.zeros(3, np.float32) for _ in tokens]
    rows[at] = np.array(logits, np.float32)
    return Decoded(tokens, [], rows)


def second(logits: np.ndarray, at: int) -> int:
    """Takes the second largest, which is another rule."""
    return int(np.argsort(logits)[-2])


def test_equal_runs_count_all_their_tokens() -> None:
    for exact in (True, False):
        counts = Identity()
        counts.compare(exact, run([0, 1, 2, 0]), run([0, 1, 2, 2]), 3)
        assert counts == Identity(runs_compared=1, tokens_compared=3)


def test_a_near_tie_counts_up_to_the_first_difference() -> None:
    counts = Identity()
    plain, found = run([0, 1, 2, 0, 1], 1, (0, 3.25, 3)), run([0, 2, 2, 1, 0], 1, (0, 3, 3.125))
    counts.compare(False, found, plain, 5)
    counts.compare(False, plain, plain, 5)
    counts.compare(False, run([1], 0, (0, 2, 2.125)), run([2], 0, (0, 2.25, 2)), 1, second)
    assert counts == Identity(
        runs_compared=3,
        runs_that_differ=2,
        greedy_runs_that_differ=1,
        tokens_compared=2 + 5 + 1,
        tokens_after_a_difference=3,
        max_abs_logit_difference_there=0.25,
        max_choice_gap_there=0.25,
        max_choice_gap_in_differences=1.0,
    )


@pytest.mark.parametrize(
    ("exact", "found", "plain", "rule", "match"),
    [
        (True, (0, 3, 3.125), (0, 3.25, 3), greedy_rule, "token 1: 2, not 1"),
        (False, (0, 3, 3), (0, 3, 3), greedy_rule, "the same logits"),
        (False, (0, 3, 3), (0, 3, 3), second, "the same logits"),
        (False, (0, 3, 3 + 2 * CUDA_GAP), (0, 3, 3), greedy_rule, "not a near-tie"),
        (False, (0, 3, 3 + 2 * CUDA_GAP), (0, 3, 3), second, "not a near-tie"),
        (False, (0, 3.25, 3), (0, 3.25, 2.875), greedy_rule, "not the choice of its logits"),
        (False, (0, 3.25, 3), (0, 3.25, 2.875), lambda logits, at: 1, "not the choice of its logits"),
    ],
)
def test_other_differences_fail_and_are_counted(
    exact: bool, found: tuple[float, ...], plain: tuple[float, ...], rule: Rule, match: str
) -> None:
    counts = Identity()
    with pytest.raises(AssertionError, match=match):
        counts.compare(exact, run([0, 2, 0], 1, found), run([0, 1, 0], 1, plain), 3, rule)
    assert (counts.runs_compared, counts.runs_that_differ, counts.tokens_compared) == (1, 1, 2)


TESTS = """
import pytest
from dataclasses import asdict
from identity import Identity

@pytest.fixture
def same(record_property):
    counts = Identity()
    yield counts
    for name, value in asdict(counts).items():
        record_property(name, value)

def test_equal(same):
    same.runs_compared, same.tokens_compared = 2, 80

@pytest.mark.parametrize("kind", ["Q4_K"])
def test_near(kind, same):
    same.runs_compared, same.runs_that_differ, same.greedy_runs_that_differ = 3, 2, 1
    same.tokens_compared, same.tokens_after_a_difference = 120, 37
    same.max_abs_logit_difference_there, same.max_choice_gap_there = 0.123456, 0.02
    same.max_choice_gap_in_differences = 0.25

def test_far(same):
    same.runs_compared, same.tokens_compared = 1, 1
    assert False

@pytest.mark.parametrize("error", [1e-5, 0.5, 0.25])
def test_errors(error, record_property):
    record_property("max_abs_logit_error", error)

def test_nothing_recorded():
    pytest.skip()
"""


@pytest.fixture(scope="module")
def xml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns what pytest writes of TESTS."""
    tmp_path = tmp_path_factory.mktemp("suite")
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    command += ["-o", f"pythonpath={ROOT / 'tests'}", "--rootdir", str(tmp_path), "--junitxml=tests.xml"]
    done = subprocess.run([*command, "test_some.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    return tmp_path / "tests.xml"


def test_the_row_sums_what_the_tests_recorded(
    xml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(xml), "--device", "a GPU", "--commit", "0123abc", "--save", str(tmp_path / "rows")]
    monkeypatch.setattr(sys, "argv", ["identity_report.py", *given])
    identity_report.main()
    shown = capsys.readouterr()
    (path,) = (tmp_path / "rows").iterdir()
    row = json.loads(path.read_text())
    assert json.loads(shown.out) == row
    assert path.name == f"{row['date'][:10]}-identity.json"
    assert (row["bench"], row["device"], row["commit"]) == ("token identity", "a GPU", "0123abc")
    assert row["suite"] == {"tests": 7, "failures": 1, "errors": 0, "skipped": 1}
    assert row["total"] == {
        "tests": 3,
        "runs_compared": 6,
        "runs_that_differ": 2,
        "greedy_runs_that_differ": 1,
        "tokens_compared": 201,
        "tokens_after_a_difference": 37,
        "share_of_tokens_that_differ": 0.00995,
        "max_abs_logit_difference_there": 0.123,
        "max_choice_gap_there": 0.02,
        "max_choice_gap_in_differences": 0.25,
    }
    assert [(test["test"], test["outcome"], test["runs_that_differ"]) for test in row["tests"]] == [
        ("test_some::test_equal", "passed", 0),
        ("test_some::test_near[Q4_K]", "passed", 2),
        ("test_some::test_far", "failure", 0),
    ]
    assert row["others"] == {"test_some::test_errors": {"max_abs_logit_error": [1e-5, 0.5]}}
    assert len(shown.err.splitlines()) == 6 and "test_near[Q4_K]" in shown.err
    assert shown.err.splitlines()[-1].split() == "0.5 max_abs_logit_error of test_some::test_errors".split()


def test_parts_of_a_suite_make_one_row(xml: Path) -> None:
    row = identity_report.report([xml, xml])
    assert row["suite"] == {"tests": 14, "failures": 2, "errors": 0, "skipped": 2}
    assert row["total"]["runs_compared"] == 12 and len(row["tests"]) == 6


def test_a_run_that_compared_nothing_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / "tests.xml"
    path.write_text('<testsuites><testsuite timestamp="2026-11-21T05:00:00+00:00"/></testsuites>')
    with pytest.raises(SystemExit, match="no test recorded compared runs"):
        identity_report.report([path])


def test_differences_may_only_fall(xml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = identity_report.report([xml])
    assert identity_report.risen(found, found) == []
    less = json.loads(json.dumps(found))
    near = next(test for test in less["tests"] if "near" in test["test"])
    near["runs_that_differ"], near["max_abs_logit_difference_there"] = 1, 0.1
    less["total"]["share_of_tokens_that_differ"] = 0.005
    name = "test_some::test_near[Q4_K]"
    expected = [
        f"{name}: runs_that_differ is 2, recorded 1",
        f"{name}: max_abs_logit_difference_there is 0.123, recorded 0.1",
        "all tests: share_of_tokens_that_differ is 0.00995, recorded 0.005",
    ]
    assert identity_report.risen(found, less) == expected and identity_report.risen(less, found) == []
    unknown = found | {"tests": [test for test in found["tests"] if test["test"] != name]}
    assert [line.partition(":")[0] for line in identity_report.risen(found, unknown)] == ["test_some"] * 3
    row = tmp_path / "row.json"
    row.write_text(json.dumps(less))
    monkeypatch.setattr(sys, "argv", ["identity_report.py", str(xml), "--device", "x", "--against", str(row)])
    with pytest.raises(SystemExit) as ended:
        identity_report.main()
    assert str(ended.value) == "\n".join(expected)
