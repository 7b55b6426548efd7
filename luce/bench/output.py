"""Tables as CSV, Markdown and PNG; luce/cli/terminal.py prints those on the terminal."""

from __future__ import annotations

import csv
import io
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from luce.errors import Error, UnsupportedError

Table = tuple[list[str], list[list[str]]]  # It has a header, and rows of the same length.


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Returns every field of every row. A list's numbers are separated by blanks."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in row.items()})
    return out.getvalue()


def as_markdown(table: Table) -> str:
    """Returns a pipe table with the first column left and figures right."""
    header, rows = table
    ruler = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ruler, *rows)) + "\n"


def mode_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Makes a table of ModeRow.as_json() of each mode. Columns without a figure are left out."""
    columns = {
        "mode": lambda r: r["mode"],
        "tok/s": lambda r: _spread(r["tok_per_s"], r["tok_per_s_spread"]),
        "x plain": lambda r: _number(r["speedup"], 2),
        "end to end": lambda r: _number(r["end_to_end_tok_per_s"], 1),
        "prefill": lambda r: _number(r["prefill_tok_per_s"], 0),
        "accepted": lambda r: _share(r["acceptance"]),
        "by position": lambda r: " ".join(_share(x) for x in r["acceptance_by_position"]),
        "tokens/round": lambda r: _number(r["mean_accepted_length"] if r["drafted"] else None, 2),
        "by source": lambda r: " ".join(
            f"{name} {of['accepted_a_round']:.2f}" for name, of in r.get("by_source", {}).items()
        ),
        "same tokens": lambda r: _of(r["same_tokens"], r["problems"]),
        "pass@1": lambda r: _share(r["pass_at_1"]),
        "wrong tokens": lambda r: _number(r["wrong_tokens"], 0),
    }  # type: dict[str, Any]
    filled = {name: [show(row) for row in rows] for name, show in columns.items()}
    kept = {name: cells for name, cells in filled.items() if any(cells)}
    return list(kept), [list(cells) for cells in zip(*kept.values(), strict=True)]


def cost_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Makes a table of Cost.as_json() of each step."""
    header = ["step", "context", "ms", "x one row", "ms over one row at 0"]
    return header, [
        [
            f"draft {r['gamma']}, verify {r['rows']}" if r["gamma"] else f"verify {r['rows']}",
            str(r["ctx"]),
            _spread(r["ms"], r["ms_spread"]),
            _number(r["ratio"], 2),
            _number(r["over"], 2),
        ]
        for r in rows
    ]


def batch_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Makes a table of Together.as_json() of each mode and count of sequences."""
    header = ["mode", "sequences", "tok/s", "each", "x first", "ms a round", "tokens/round", "accepted"]
    return header, [
        [
            r["mode"],
            str(r["sequences"]),
            _number(r["tok_per_s"], 1),
            _number(r["tok_per_s_each"], 1),
            _number(r["speedup"], 2),
            _number(r["step_ms"], 2),
            _number(r["tokens_per_round"], 2),
            _share(r["acceptance"]),
        ]
        for r in rows
    ]


def plot_modes(path: Path, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Plots the speed and acceptance of the modes as bars."""
    figure, (left, right) = _pyplot().subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    names = [row["mode"] for row in rows]
    speeds = [row["tok_per_s"] or 0.0 for row in rows]
    low_high = [row["tok_per_s_spread"] or [s, s] for row, s in zip(rows, speeds, strict=True)]
    errors = [[max(s - lo, 0) for s, (lo, _) in zip(speeds, low_high, strict=True)],
              [max(hi - s, 0) for s, (_, hi) in zip(speeds, low_high, strict=True)]]  # fmt: skip
    left.bar(names, speeds, yerr=errors, capsize=3)
    left.set_ylabel("decode tok/s (median, quartiles)")
    for row in rows:
        if row["acceptance_by_position"]:
            shares = row["acceptance_by_position"]
            right.plot(range(1, len(shares) + 1), shares, marker="o", label=row["mode"])
    right.set_ylim(0, 1)
    right.xaxis.get_major_locator().set_params(integer=True)
    right.set_xlabel("draft position")
    right.set_ylabel("accepted")
    if right.lines:
        right.legend()
    _finish(figure, title, path)


def plot_costs(path: Path, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Plots the ratio to one row, by rows, with a line for each context."""
    figure, axis = _pyplot().subplots(figsize=(6, 3.6), layout="constrained")
    for ctx in dict.fromkeys(row["ctx"] for row in rows):
        for drafted, label in ((False, f"verify, context {ctx}"), (True, f"draft and verify, context {ctx}")):
            line = [r for r in rows if r["ctx"] == ctx and bool(r["gamma"]) == drafted]
            if line:
                axis.plot([r["rows"] for r in line], [r["ratio"] for r in line], marker="o", label=label)
    axis.set_xlabel("rows")
    axis.set_ylabel("cost, one row = 1")
    axis.set_ylim(bottom=0)
    axis.legend()
    _finish(figure, title, path)


def plot_batches(path: Path, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Plots the tokens a second of all sequences, by their number, with a line for each mode."""
    figure, axis = _pyplot().subplots(figsize=(6, 3.6), layout="constrained")
    for mode in dict.fromkeys(row["mode"] for row in rows):
        line = [row for row in rows if row["mode"] == mode]
        axis.plot([r["sequences"] for r in line], [r["tok_per_s"] for r in line], marker="o", label=mode)
    axis.set_xlabel("sequences")
    axis.set_ylabel("tokens a second in all")
    axis.set_ylim(bottom=0)
    axis.legend()
    _finish(figure, title, path)


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UnsupportedError("a plot needs the package matplotlib", concerns="plot") from None
    return pyplot


def require(save: Path | None, plot: Path | None) -> None:
    """Raises Error where a result row or a plot cannot be written. It is called before anything runs."""
    if plot is not None:
        _pyplot()
        written = plot if os.path.exists(plot) else plot.parent
        if not os.path.isdir(plot.parent) or not os.access(written, os.W_OK):
            raise Error(f"{plot}: the plot cannot be written there")
    if save is not None:
        try:
            save.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=save) as trial:
                trial.write(bytes(1 << 16))
        except OSError as error:
            raise Error(f"{save}: the result row cannot be written there: {error.strerror}") from error


def _finish(figure: Any, title: str, path: Path) -> None:
    figure.suptitle(title, fontsize=10)
    try:
        figure.savefig(path, dpi=130, format="png")
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise Error(f"{path}: cannot write the plot: {said}") from error
    finally:
        _pyplot().close(figure)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _of(part: int | None, whole: int) -> str:
    return "" if part is None else f"{part} of {whole}"


def _spread(value: float | None, spread: list[float] | None) -> str:
    if value is None:
        return ""
    digits = 1 if value >= 10 else 2
    return _number(value, digits) + (
        f" [{_number(spread[0], digits)} {_number(spread[1], digits)}]" if spread else ""
    )
