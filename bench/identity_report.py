#!/usr/bin/env python3
"""Says how many pairs of runs the tests compared, decoded in different ways, and how many of them differed in
a token (tests/support/identity.py), as a result row.

Reads what tests recorded: `pytest --luce-device cuda --junitxml tests.xml`. The tokens of a pair of runs are
compared up to their first difference, which is then one token; what follows is another text.

    python bench/identity_report.py tests*.xml --device "NVIDIA H100 80GB HBM3" --commit 0123abc --save FOLDER

With --against, a recorded row is a ratchet: the runs that differ may only fall, test by test.

The suite may have run in parts, each with a file of its own. The largest errors that tests report are printed
too: tests/support/drive.py's CUDA_BOUND is set by them.
"""

from __future__ import annotations

import argparse
import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from luce.bench.origin import checkout_commit, write_row

Row = dict[str, Any]
COUNTS = ("runs_compared", "runs_that_differ", "tokens_compared")


def number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else float(f"{value:.3g}")


def outcome(case: ElementTree.Element) -> str:
    found = [tag for tag in ("failure", "error", "skipped") if case.find(tag) is not None]
    return found[0] if found else "passed"


def recorded(suite: ElementTree.Element) -> list[Row]:
    """Returns the tests that recorded something: name, outcome and their figures."""
    rows = []
    for case in suite.iter("testcase"):
        figures = {p.get("name", ""): number(p.get("value", "")) for p in case.iter("property")}
        if figures:
            module = case.get("classname", "").rpartition(".")[2]
            rows.append({"test": f"{module}::{case.get('name')}", "outcome": outcome(case)} | figures)
    return rows


def total(rows: list[Row]) -> Row:
    """Adds up what tests that compared runs recorded."""
    return {"tests": len(rows)} | {name: sum(row[name] for row in rows) for name in COUNTS}


def ranges(rows: list[Row]) -> dict[str, dict[str, list[float]]]:
    """Returns the smallest and largest of all else that was recorded, by test function."""
    out: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        of_test = out.setdefault(row["test"].partition("[")[0], {})
        for name, value in row.items():
            if name not in ("test", "outcome"):
                low, high = of_test.get(name, (value, value))
                of_test[name] = [min(low, value), max(high, value)]
    return out


def report(paths: Sequence[Path]) -> Row:
    """Makes a result row (date, suite, total, tests and others) of a suite that ran in as many parts."""
    roots = [ElementTree.parse(path).getroot() for path in paths]
    suites = [root if root.tag == "testsuite" else root[0] for root in roots]
    rows = [row for suite in suites for row in recorded(suite)]
    identity = [row for row in rows if "runs_compared" in row]
    if not identity:
        raise SystemExit(f"{', '.join(map(str, paths))}: no test recorded compared runs")
    when = min(datetime.fromisoformat(suite.get("timestamp", "")) for suite in suites)
    return {
        "date": when.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "suite": {
            name: sum(int(suite.get(name, 0)) for suite in suites)
            for name in ("tests", "failures", "errors", "skipped")
        },
        "total": total(identity),
        "tests": identity,
        "others": ranges([row for row in rows if "runs_compared" not in row]),
    }


def risen(found: Row, recorded: Row) -> list[str]:
    """Returns a line for each test of which more runs differ than a recorded row says. Of a test that the row
    lacks none may."""
    before = {row["test"]: row["runs_that_differ"] for row in recorded["tests"]}
    return [
        f"{row['test']}: {row['runs_that_differ']} runs differ, recorded {before.get(row['test'], 0)}"
        for row in found["tests"]
        if row["runs_that_differ"] > before.get(row["test"], 0)
    ]


def table(found: Row) -> str:
    lines = ["".join(f"{head:>11}" for head in ("runs", "differ", "tokens")) + "  test"]
    for row in [*found["tests"], found["total"] | {"test": "all"}]:
        lines.append("".join(f"{row[name]:11g}" for name in COUNTS) + f"  {row['test']}")
    errors = [
        (figures[name][1], name, test)
        for test, figures in found["others"].items()
        for name in figures
        if name.endswith("_error")
    ]
    lines += [f"{value:11g}  {name} of {test}" for value, name, test in sorted(errors, reverse=True)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("xml", type=Path, nargs="+", help="of pytest --junitxml")
    parser.add_argument("--device", required=True, help='what the tests ran on: "NVIDIA H100 80GB HBM3"')
    parser.add_argument("--commit", help="of luce there; default: of this checkout")
    parser.add_argument("--save", type=Path, help="folder for the result row")
    parser.add_argument("--against", type=Path, help="a recorded row: exit 1 where more runs differ")
    args = parser.parse_args()
    found = report(args.xml)
    print(table(found), file=sys.stderr)
    row: Row = {
        "bench": "token identity",
        "date": found["date"],
        "commit": args.commit or checkout_commit() or "unknown",
        "device": args.device,
        "command": " ".join(["pytest --luce-device cuda --junitxml tests.xml; bench/identity_report.py",
                             *(path.name for path in args.xml)]),
    } | found
    print(json.dumps(row, indent=1))
    if args.save is not None:
        write_row(args.save, "identity", row)
    if args.against is not None and (lines := risen(found, json.loads(args.against.read_text()))):
        sys.exit("\n".join(lines))


if __name__ == "__main__":
    main()
