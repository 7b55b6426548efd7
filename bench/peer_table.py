"""Compares the rows of luce with those of llama.cpp, and makes the table of bench/peer_llamacpp.py."""

from __future__ import annotations

from typing import Any

from luce.bench.output import as_markdown
from luce.bench.summary import five_digits

Row = dict[str, Any]


def ratio(a: float | None, b: float | None) -> float | None:
    return five_digits(a / b) if a and b else None


def ratios(peer: Row, luce: Row, prefill: float | None = None) -> Row:
    """Says how many times faster luce is: `decode` by tokens/s, not of forced drafts, and `round` by the time
    of one."""
    forced = peer.get("forced_length") is not None
    found = {
        "prefill": ratio(prefill, peer.get("prefill_tok_per_s")),
        "decode": None if forced else ratio(luce["tok_per_s"], peer["tok_per_s"]),
        "round": ratio(peer["ms_per_round"], luce["ms_per_round"]),
    }
    return {"llamacpp": peer["name"], "luce": luce["mode"]} | found


def markdown(result: Row) -> str:
    """Makes the table of a result row."""

    def number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:,.{digits}f}"

    def speed(row: Row, name: str, digits: int) -> str:
        if row.get(name) is None:
            return ""
        low, high = row[f"{name}_spread"]
        return f"{number(row[name], digits)} [{number(low, digits)} {number(high, digits)}]"

    def cells(name: str, row: Row, prefill: Row, against: Row) -> list[str]:
        drafts = row.get("drafted")
        return [
            name,
            speed(row, "tok_per_s", 1),
            speed(prefill, "prefill_tok_per_s", 0),
            number(row["ms_per_round"], 2),
            number(row["mean_accepted_length"], 2) if drafts else "",
            f"{row['acceptance']:.0%}" if drafts else "",
            number(row.get("wrong_tokens"), 0),
            against.get("luce", ""),
            *(number(against.get(what), 2) for what in ("prefill", "decode", "round")),
        ]

    header = ["", "tok/s", "prefill", "ms/round", "tokens/round", "accepted", "wrong tokens",
              "beside luce's", "luce: x prefill", "x tok/s", "x round"]  # fmt: skip
    ours = [
        cells(f"luce {row['mode']}", row, result["luce_prefill"] if not at else {}, {})
        for at, row in enumerate(result["luce"])
    ]
    peers = [
        cells(row["name"], row, row, against)
        for row, against in zip(result["llamacpp"], result["ratios"], strict=True)
    ]
    said = "".join(
        f"\nluce {row['mode']}: {row['of_greedy']:.3f} of its greedy tok/s" for row in result["sampled"]
    )
    return as_markdown((header, ours + peers)) + said
