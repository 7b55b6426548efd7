"""Runs the stage card: it writes the model card, every figure of it from the stages' reports or from the
files beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

from box.store import Store, say
from box.tokens import EXTRA_SHARE

FILES = ("box.gguf", "box-dflash.gguf")
PLOTS = ("box-loss.png", "box-acceptance.png")


def _rows(header: list[str], rows: list[list[object]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _sizes(folder: Path) -> str:
    rows: list[list[object]] = []
    for name in FILES:
        if (folder / name).exists():
            rows.append([f"`{name}`", f"{(folder / name).stat().st_size / 1e6:.2f} MB"])
    return _rows(["file", "size"], rows) if rows else ""


def _training(trunk: dict, pool: dict, nextn: dict, dflash: dict) -> str:
    calls, s, seen = trunk["calls"], trunk["settings"], trunk["tokens"]
    steps = sum(c["steps"] for c in calls)
    devices = " and ".join(dict.fromkeys(c["device"] for c in calls))
    rows: list[list[object]] = [
        ["trunk", f"{trunk['parameters']:,}", f"{steps:,} steps of {s['batch']} x {s['length']} tokens, "
         f"{seen / 1e6:.0f}M tokens in {trunk['seconds'] / 60:.1f} minutes on {devices}"],
    ]  # fmt: skip
    if nextn:
        rows.append(["NextN head", f"{nextn['parameters']:,}", f"{nextn['steps']:,} steps"])
    if dflash:
        taps = ", ".join(map(str, dflash["taps"]))
        rows.append(["DFlash drafter", f"{dflash['parameters']:,}",
                     f"{dflash['steps']:,} steps; taps the outputs of layers {taps}"])  # fmt: skip
    text = _rows(["part", "parameters", "training"], rows)
    if pool:
        text += (
            f"\n\nBoth heads learn from {pool['sequences']:,} sequences of {pool['length']} tokens: prompts "
            f"of {', '.join(map(str, pool['prompts']))} tokens from training files, continued by the trunk, "
            "half of them greedily and half sampled."
        )
    return text


def _evaluation(trunk: dict, nextn: dict, dflash: dict) -> str:
    rows: list[list[object]] = [["trunk: loss on held-out files, nats a token", trunk["held_out"][-1][1]]]
    if nextn:
        e = nextn["evaluation"]
        rows.append(["NextN: acceptance by draft position", e["acceptance_by_position"]])
        for gamma, value in e["mean_accepted_length"].items():
            rows.append([f"NextN: mean accepted length at gamma {gamma} (at most {int(gamma) + 1})", value])
    if dflash:
        e = dflash["evaluation"]
        rows.append(["DFlash: acceptance by draft position", e["acceptance_by_position"]])
        rows.append(["DFlash: mean accepted length, block 16", e["mean_accepted_length"]])
    return _rows(["greedy, held-out prompts", "result"], rows)


def _data(data: dict) -> str:
    rows = [[s["name"], s["version"], s["licence"], s["files"], s["bytes"] // 1000] for s in data["sources"]]
    return "\n".join(
        [
            f"{data['training_files']:,} files, {data['training_bytes'] / 1e6:.0f} MB, "
            f"{data['training_tokens'] / 1e6:.1f}M tokens; {data['held_out_files']:,} files are held out for "
            f"evaluation, chosen by content hash. {data['exact_duplicates']:,} exact duplicates and "
            f"{data['near_duplicates']:,} files mostly seen in others (over 60% of their four-line "
            f"shingles) were dropped. {EXTRA_SHARE:.0%} each were added of single documented functions and "
            "of the same as ChatML turns, mined from these files. None of the text is in this repository.",
            "",
            "Only packages whose METADATA names permissive licences alone were read, without vendored "
            "folders and without files that name a copyleft licence. HumanEval and what derives from it "
            "is excluded: packages by name, and files that mention it, define a function of a distinctive "
            "HumanEval name, quote one of its docstrings, or define three of its commoner names "
            "(`tools/box/corpus.py`).",
            "",
            _rows(["source", "version", "licence", "files", "KB"], rows),
        ]
    )


def write_card(store: Store, folder: Path) -> None:
    trunk, data = store.report("trunk"), store.report("data")
    if not trunk or not data:
        raise FileNotFoundError("the card needs the reports of stages data and trunk")
    pool, nextn, dflash = (store.report(name) for name in ("pool", "nextn", "dflash"))
    s = trunk["settings"]
    for name in PLOTS:
        if (store.state / name).exists():
            shutil.copy(store.state / name, folder / name)
    sections = [
        "# The model in the box",
        "A small Qwen3.5 (hybrid of Gated DeltaNet and full attention) that writes Python, with a NextN head "
        "in the same file and a DFlash drafter beside it. It is there to make demos, tests and measurements "
        "of speculation real: it completes code plausibly, it knows little, and its answers want checking. "
        "Made by `tools/box/` (see its README) with a fixed seed; this page is written by its stage `card`.",
        _sizes(folder),
        "## Model",
        f"{s['n_layer']} blocks, every {s['interval']}th with full attention; E {s['n_embd']}, feed-forward "
        f"{s['n_ff']}, {s['n_head']}/{s['n_head_kv']} attention heads of {s['head_dim']}, DeltaNet "
        f"{s['n_k_head']}/{s['n_v_head']} heads of {s['state_size']}, vocabulary {s['n_vocab']}, tied; "
        f"context {s['n_ctx']}, RoPE base {s['rope_base']:.0e}. Chat: ChatML.",
        _training(trunk, pool, nextn, dflash),
        "![loss](box-loss.png)",
        "## Evaluation",
        _evaluation(trunk, nextn, dflash),
        "Accepted length counts the tokens that a round emits, the trunk's own included. Each draft is "
        "compared with the trunk's greedy continuation of prompts from held-out files (BF16 activations).",
        "![acceptance](box-acceptance.png)",
        "## Data",
        _data(data),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "CARD.md").write_text("\n\n".join(part for part in sections if part) + "\n", encoding="utf-8")
    say("wrote CARD.md")
