"""Says how runs are compared and counted, and the result row that is made of the counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import identity_report
import pytest
from checkout import ROOT
from identity import Identity


def test_equal_runs_count_all_their_tokens() -> None:
    counts = Identity()
    counts.compare([0, 1, 2, 0], [0, 1, 2, 2], 3)
    assert counts == Identity(runs_compared=1, tokens_compared=3)


def test_a_difference_fails_and_is_counted() -> None:
    counts = Identity()
    with pytest.raises(AssertionError, match="token 1: 2, not 1"):
        counts.compare([0, 2, 0], [0, 1, 0], 3)
    assert counts == Identity(runs_compared=1, runs_that_differ=1, tokens_compared=2)


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
def test_differs(kind, same):
    same.runs_compared, same.runs_that_differ, same.tokens_compared = 3, 2, 120
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
    command += ["-o", f"pythonpath={ROOT / 'tests/support'}", "--rootdir", str(tmp_path), "--junitxml=tests.xml"]
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
    assert row["suite"] == {"tests": 6, "failures": 1, "errors": 0, "skipped": 1}
    assert row["total"] == {"tests": 2, "runs_compared": 5, "runs_that_differ": 2, "tokens_compared": 200}
    assert [(test["test"], test["outcome"], test["runs_that_differ"]) for test in row["tests"]] == [
        ("test_some::test_equal", "passed", 0),
        ("test_some::test_differs[Q4_K]", "failure", 2),
    ]
    assert row["others"] == {"test_some::test_errors": {"max_abs_logit_error": [1e-5, 0.5]}}
    assert len(shown.err.splitlines()) == 5 and "test_differs[Q4_K]" in shown.err
    assert shown.err.splitlines()[-1].split() == "0.5 max_abs_logit_error of test_some::test_errors".split()


def test_parts_of_a_suite_make_one_row(xml: Path) -> None:
    row = identity_report.report([xml, xml])
    assert row["suite"] == {"tests": 12, "failures": 2, "errors": 0, "skipped": 2}
    assert row["total"]["runs_compared"] == 10 and len(row["tests"]) == 4


def test_a_run_that_compared_nothing_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / "tests.xml"
    path.write_text('<testsuites><testsuite timestamp="2026-11-21T05:00:00+00:00"/></testsuites>')
    with pytest.raises(SystemExit, match="no test recorded compared runs"):
        identity_report.report([path])


def test_differences_may_only_fall(xml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = identity_report.report([xml])
    assert identity_report.risen(found, found) == []
    name = "test_some::test_differs[Q4_K]"
    lacking = found | {"tests": [test for test in found["tests"] if test["test"] != name]}
    assert identity_report.risen(lacking, found) == []
    assert identity_report.risen(found, lacking) == [f"{name}: 2 runs differ, recorded 0"]
    row = tmp_path / "row.json"
    row.write_text(json.dumps(found).replace('"runs_that_differ": 2', '"runs_that_differ": 1'))
    monkeypatch.setattr(sys, "argv", ["identity_report.py", str(xml), "--device", "x", "--against", str(row)])
    with pytest.raises(SystemExit) as ended:
        identity_report.main()
    assert str(ended.value) == f"{name}: 2 runs differ, recorded 1"


def test_rows_of_before_bound_those_to_come(xml: Path) -> None:
    found, rows = identity_report.report([xml]), list((ROOT / "bench" / "results").glob("*-identity*.json"))
    assert rows
    for row in rows:
        recorded = json.loads(row.read_text())
        assert identity_report.risen(recorded, recorded) == []
        lines = identity_report.risen(found, recorded)
        assert lines == ["test_some::test_differs[Q4_K]: 2 runs differ, recorded 0"]
