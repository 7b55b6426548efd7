"""Runs bench/peer_gpus.py from end to end on a CPU that is named twice, with small programs in place of llama.cpp's."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import llamacpp
import peer_gpus
import pytest
from peer_programs import PROGRAM

from luce.bench.oracle_drafter import make_drafter
from luce.bench.oracle_model import SHAPES, Rule, make_oracle

LLAMA_BENCH = """
lengths = [int(n) for n in option["-p"].split(",")]
rows = [{"n_prompt": n, "n_gen": 0, "avg_ts": 100.0} for n in lengths]
print(json.dumps([*rows, {"n_prompt": 0, "n_gen": int(option["-n"]), "avg_ts": 20.0}]))
"""
BATCHED = """
if option.get("-sm") == "tensor":
    sys.exit("it cannot")
for n in option["-npl"].split(","):
    print(json.dumps({"pl": int(n), "speed_tg": 30.0 * int(n)}))
"""


def test_both_splits_stand_beside_llamacpps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, drafter = tmp_path / "oracle-mini.gguf", tmp_path / "drafter.gguf"
    make_oracle(model, "mini", kind="Q8_0")  # A rank of it has no whole block of Q4_K.
    make_drafter(drafter, SHAPES["mini"], Rule(SHAPES["mini"].n_vocab))
    for name, text in (("llama-bench", LLAMA_BENCH), (llamacpp.BATCHED, BATCHED)):
        program = tmp_path / name
        program.write_text(PROGRAM.format(python=sys.executable) + text)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    words = f"peer_gpus.py {model} --bin {tmp_path} --devices cpu,cpu --draft {drafter} --modes plain,mtp:2,dflash " \
            "--lengths 64,300 --counts 1,2 --n-gen 12 --rounds 1 --threads 1 --commit 0123abc"  # fmt: skip
    monkeypatch.setattr(sys, "argv", words.split())
    peer_gpus.main()
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["name"], row["device"], row.get("split")) for row in rows] == [
        ("luce", "cpu", None), ("luce", "cpu,cpu", None), ("luce", "cpu+cpu", None),
        ("llama.cpp", "cpu,cpu", "layer"), ("llama.cpp", "cpu,cpu", "tensor"), ("llama.cpp", "cpu", None),
    ]  # fmt: skip
    for row in rows[:3]:
        assert [each["mode"] for each in row["decoding"]] == ["plain", "mtp:2", "dflash"]
        assert all(each["wrong"] == 0 for each in row["decoding"])
        assert [(each["mode"], each["sequences"]) for each in row["together"]] == [
            (mode, n) for mode in ("plain", "mtp:2") for n in (1, 2)
        ]
    for row in rows:
        assert [each["tokens"] for each in row["prompts"]] == [64, 300] and row["prompts"][1]["prefill_tok_per_s"] > 0
    assert rows[3]["decoding"] == [{"mode": "plain", "tok_per_s": 20.0}] and rows[3]["together"][1]["tok_per_s"] == 60
    assert "it cannot" in rows[4]["error"]
    calls = [json.loads(line)[0] for line in (tmp_path / "calls").read_text().splitlines()]
    assert calls == ["llama-bench", llamacpp.BATCHED] * 3
