"""Runs tools/compare_weights.py: the relative error of a GGUF's tensors against its checkpoint."""

import json
from dataclasses import replace

import compare_weights
import dflash_checkpoint as dflash
import gguf
import hf_checkpoint as hf
import numpy as np
import pytest
import tiny
from depth import deeper_but

from luce.convert.qwen35_layout import add_keys
from luce.convert.weight_types import MIXES

GROUPED, WIDE = hf.GROUPED, hf.WIDE


def rows_of(folder, path, capsys, *options):
    """Returns (exit status, rows by name) of --json."""
    capsys.readouterr()
    status = compare_weights.main([str(folder), str(path), "--json", *options])
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] == (status == 0)
    return status, {row["name"]: row for row in report["tensors"]}


def other_file(tmp_path, c, change):
    """Makes a GGUF whose tensors were changed after a right conversion."""
    tensors = tiny.layout(c, 1)
    change(tensors)
    return tiny.write(tmp_path / "other.gguf", c, tensors)


@pytest.mark.parametrize("kind", deeper_but(MIXES, "F16", "Q8_0", "Q4_K_M"))
def test_error_of_each_type(tmp_path, capsys, kind):
    folder = hf.save_qwen35(tmp_path / "hf", WIDE)
    status, rows = rows_of(folder, hf.convert_qwen35_to_gguf(folder, "--type", kind), capsys)
    assert status == 0 and rows.keys() == tiny.layout(WIDE, 1).keys()
    for row in rows.values():
        assert row["error"] <= hf.ROUND_TRIP[row["type"]] and row["status"] == "ok"
    assert kind in ("F32", "Q8_0") or any(row["error"] > 0 for row in rows.values())


def test_agrees_with_a_file_made_another_way(tmp_path, capsys):
    path = other_file(tmp_path, GROUPED, lambda tensors: None)
    status, rows = rows_of(hf.save_qwen35(tmp_path / "hf", GROUPED), path, capsys)
    assert status == 0 and all(row["error"] == 0 for row in rows.values())


def test_heads_in_the_wrong_order_stand_out(tmp_path, capsys):
    """v heads are left grouped, as transformers has them: five of six are in another's place."""
    hf_weights = tiny.weights(GROUPED, 1)
    name = "blk.0.attn_gate.weight"
    grouped = hf_weights["model.layers.0.linear_attn.in_proj_z.weight"]
    path = other_file(tmp_path, GROUPED, lambda tensors: tensors.update({name: grouped}))
    status, rows = rows_of(hf.save_qwen35(tmp_path / "hf", GROUPED), path, capsys)
    assert status == 1
    assert {n for n, row in rows.items() if row["status"] == "above"} == {name}
    assert rows[name]["error"] == pytest.approx(np.sqrt(2 * 4 / 6), abs=0.05)


def test_norm_without_its_one_stands_out(tmp_path, capsys):
    name = "blk.4.nextn.enorm.weight"
    path = other_file(tmp_path, GROUPED, lambda tensors: tensors.update({name: tensors[name] - 1}))
    status, rows = rows_of(hf.save_qwen35(tmp_path / "hf", GROUPED), path, capsys)
    assert status == 1 and rows[name]["status"] == "above" and 0.8 < rows[name]["error"] < 1.1


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path, capsys):
    def change(tensors):
        del tensors["blk.1.ffn_up.weight"]
        tensors["blk.9.ffn_up.weight"] = np.ones((8, 64), np.float32)
        tensors["blk.2.ffn_up.weight"] = tensors["blk.2.ffn_up.weight"][:100]

    status, rows = rows_of(
        hf.save_qwen35(tmp_path / "hf", GROUPED), other_file(tmp_path, GROUPED, change), capsys
    )
    assert status == 1
    bad = {name: row["status"] for name, row in rows.items() if row["status"] != "ok"}
    assert bad == {
        "blk.1.ffn_up.weight": "missing",
        "blk.9.ffn_up.weight": "extra",
        "blk.2.ffn_up.weight": "shape",
    }
    assert rows["blk.2.ffn_up.weight"]["shape"] == [64, 100]


def test_max_is_the_bound(tmp_path, capsys):
    folder = hf.save_qwen35(tmp_path / "hf", WIDE)
    path = hf.convert_qwen35_to_gguf(folder, "--type", "Q8_0")
    assert rows_of(folder, path, capsys, "--max", "0.0045")[0] == 0
    assert rows_of(folder, path, capsys, "--max", "0.001")[0] == 1


def test_table_for_people(tmp_path, capsys):
    folder = hf.save_qwen35(tmp_path / "hf", GROUPED)
    path = hf.convert_qwen35_to_gguf(folder, "--type", "Q8_0")
    capsys.readouterr()
    assert compare_weights.main([str(folder), str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["tensor", "type", "shape", "rel.", "error"]
    assert lines[1].split()[:3] == ["token_embd.weight", "Q8_0", "64x384"]
    assert lines[-1].startswith("71 tensors, worst ") and lines[-1].endswith(", 0 not ok")


@pytest.mark.parametrize("option", ["--no-mtp", "--mtp-only"])
def test_parts_are_compared_with_their_part(tmp_path, capsys, option):
    folder = hf.save_qwen35(tmp_path / "hf", GROUPED)
    status, rows = rows_of(folder, hf.convert_qwen35_to_gguf(folder, option), capsys)
    assert status == 0 and ("blk.4.nextn.eh_proj.weight" in rows) == (option == "--mtp-only")
    assert ("blk.0.attn_qkv.weight" in rows) == (option == "--no-mtp")


def test_copy_of_a_tied_embedding_is_compared_with_it(tmp_path, capsys):
    c = replace(GROUPED, tied=True)
    path = other_file(
        tmp_path, c, lambda tensors: tensors.update({"output.weight": tensors["token_embd.weight"]})
    )
    status, rows = rows_of(hf.save_qwen35(tmp_path / "hf", c), path, capsys)
    assert status == 0 and rows["output.weight"]["error"] == 0


@pytest.mark.parametrize("good", [True, False])
def test_fused_experts_are_compared_half_by_half(tmp_path, capsys, good):
    config, weights = hf.moe(GROUPED, "fused")
    folder = hf.save(tmp_path / "hf", config, weights)
    tensors = hf.tensors_of(hf.convert_qwen35_to_gguf(folder, "--type", "F32"))
    for i in range(5):
        halves = [tensors.pop(f"blk.{i}.ffn_{half}_exps.weight") for half in ("gate", "up")]
        fused = np.concatenate(halves if good else halves[::-1], 1)
        tensors[f"blk.{i}.ffn_gate_up_exps.weight"] = fused
    c = replace(GROUPED, n_expert=4, n_expert_used=2, n_ff_expert=48, n_ff_shared=80)
    w = gguf.GGUFWriter(tmp_path / "fused.gguf", c.arch)
    add_keys(w, c, "fused", 0)
    for name, x in tensors.items():
        w.add_tensor(name, x)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    status, rows = rows_of(folder, tmp_path / "fused.gguf", capsys)
    assert status == (0 if good else 1)
    errors = {rows[f"blk.{i}.ffn_{half}_exps.weight"]["error"] for i in range(5) for half in ("gate", "up")}
    assert errors == {0.0} if good else min(errors) > 1


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_K_M"])
def test_drafters(tmp_path, capsys, kind):
    folder = hf.save(tmp_path / "hf", dflash.CONFIG, dflash.weights())
    assert hf.run(str(folder), str(tmp_path / "d.gguf"), "--type", kind) == 0
    status, rows = rows_of(folder, tmp_path / "d.gguf", capsys)
    assert status == 0 and len(rows) == 3 + 11 * dflash.LAYERS
    assert all(row["error"] <= hf.ROUND_TRIP[row["type"]] for row in rows.values())


def test_reduced_vocabulary_is_compared(tmp_path, capsys):
    made = dflash.weights() | {
        "lm_head.weight": np.ones((7, dflash.E), np.float32),
        "d2t": np.array([0, 0, 2, 2, 2, 9, 9], np.int64),
    }
    folder = hf.save(tmp_path / "hf", dflash.config_with(draft_vocab_size=7), made)
    assert hf.run(str(folder), str(tmp_path / "d.gguf")) == 0
    status, rows = rows_of(folder, tmp_path / "d.gguf", capsys)
    assert status == 0 and rows["d2t"]["error"] == 0 and rows["d2t"]["type"] == "I64"


def test_failures_are_one_line(tmp_path, capsys, tiny_gguf):
    assert compare_weights.main([str(tmp_path / "absent"), str(tiny_gguf)]) == 1
    assert compare_weights.main([str(tmp_path), str(tmp_path / "absent.gguf")]) == 1
    config, weights = hf.moe(GROUPED, "fused")
    assert compare_weights.main([str(hf.save(tmp_path / "hf", config, weights)), str(tiny_gguf)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("error: ") for line in lines)
    assert "the GGUF is qwen35, the checkpoint qwen35moe" in lines[2]
