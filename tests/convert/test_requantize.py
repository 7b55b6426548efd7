"""Runs `luce convert` on a GGUF: a model, a head or a drafter with its matrices as another type."""

import math
import os
import resource
from dataclasses import replace

import dflash_checkpoint as dflash
import gguf
import hf_checkpoint as hf
import numpy as np
import pytest
import tiny
from hf_checkpoint import requantized

from luce.data import BOX

target = dflash.target
save, convert = dflash.save, dflash.convert


def test_requantized_drafter_equals_one_converted_at_once(tmp_path, target):
    folder = save(tmp_path)
    direct = convert(folder, target, "--type", "Q4_K_M").read_bytes()
    f32 = convert(folder, target, "--type", "F32")
    assert requantized(f32, tmp_path / "q4.gguf") == 0
    found, wanted = tmp_path / "q4.gguf", tmp_path / "direct.gguf"
    wanted.write_bytes(direct)
    assert hf.types_of(found) == hf.types_of(wanted)
    assert hf.keys_of(found) == hf.keys_of(wanted)
    ours, theirs = hf.tensors_of(found), hf.tensors_of(wanted)
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


def test_requantized_from_a_quantised_file_says_so(tmp_path, target, capsys):
    q8 = convert(save(tmp_path), target, "--type", "Q8_0")
    assert requantized(q8, tmp_path / "q4.gguf") == 0
    assert "the source is Q8_0 already" in capsys.readouterr().err


def test_requantize_keeps_older_names_and_keys(tmp_path):
    w = gguf.GGUFWriter(tmp_path / "old.gguf", "dflash-draft")
    w.add_uint32("dflash-draft.dflash.block_size", 16)
    w.add_bool("dflash-draft.flag", True)
    w.add_array("dflash-draft.pattern", [True, False])
    w.add_float64("dflash-draft.precise", 0.1)
    w.add_string("tokenizer.ggml.model", "gpt2")
    w.add_file_type(1)
    w.add_tensor("dflash.fc.weight", np.ones((4, 256), np.float16))
    w.add_tensor("dflash.hidden_norm.weight", np.ones(256, np.float32))
    w.add_tensor("d2t", np.arange(4, dtype=np.int64))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    assert requantized(tmp_path / "old.gguf", tmp_path / "new.gguf") == 0
    assert hf.types_of(tmp_path / "new.gguf") == {
        "dflash.fc.weight": "Q4_K", "dflash.hidden_norm.weight": "F32", "d2t": "I64",
    }  # fmt: skip
    old, new = hf.keys_of(tmp_path / "old.gguf"), hf.keys_of(tmp_path / "new.gguf")
    assert new == old | {"general.file_type": 15}


WIDE = tiny.Config(n_embd=256, n_ff=256, n_head=4, n_head_kv=4, n_v_head=8, n_nextn=1)
EXPERTS = replace(WIDE, n_expert=4, n_expert_used=2, n_ff_expert=256, n_ff_shared=256)


@pytest.mark.long
@pytest.mark.parametrize("c, part, kind", [
    (WIDE, (), "BF16"), (WIDE, (), "Q4_K_M"), (WIDE, ("--mtp-only",), "Q5_K_M"),
    (replace(WIDE, tied=True), (), "Q4_K_M"), (EXPERTS, (), "Q4_K_M"),
], ids=["plain", "dense", "head", "tied", "experts"])  # fmt: skip
def test_a_requantized_model_equals_one_converted_at_once(tmp_path, c, part, kind):
    folder = hf.save_qwen35(tmp_path / "hf", c)
    f32, direct, found = (tmp_path / f"{name}.gguf" for name in ("f32", "direct", "found"))
    assert hf.run(folder, f32, "--type", "F32", *part) == hf.run(folder, direct, "--type", kind, *part) == 0
    assert requantized(f32, found, kind) == 0
    assert hf.types_of(found) == hf.types_of(direct)
    assert hf.keys_of(found) == hf.keys_of(direct)
    ours, theirs = hf.tensors_of(found), hf.tensors_of(direct)
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


def test_requantize_refuses_what_luce_does_not_run(tmp_path, capsys):
    w = gguf.GGUFWriter(tmp_path / "other.gguf", "bert")
    w.add_tensor("blk.0.attn_q.weight", np.ones((4, 256), np.float16))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    assert requantized(tmp_path / "other.gguf", tmp_path / "x.gguf") == 1
    assert "architecture bert" in capsys.readouterr().err
    assert not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("context_length", "long", "expected a value of type int"),
        ("context_length", 0, "expected 1 to"),
        ("odd", math.nan, "expected numbers, found nan"),
        ("odd", [1.0, math.nan], "expected numbers, found nan"),
    ],
)
def test_what_is_wrong_with_a_source_names_it_once(tmp_path, capsys, monkeypatch, key, value, said):
    def add_keys(writer, *args, **options):
        tiny_keys(writer, *args, **options)
        writer.kv_data[0].pop(f"qwen35.{key}", None)
        writer.add_key_value(f"qwen35.{key}", value, gguf.GGUFValueType.get_type(value))

    tiny_keys, config = tiny.add_keys, tiny.Config()
    monkeypatch.setattr(tiny, "add_keys", add_keys)
    source = tiny.write(tmp_path / "odd.gguf", config, tiny.layout(config, 1))
    assert requantized(source, tmp_path / "out.gguf") == 1
    *_, line = capsys.readouterr().err.splitlines()  # Notes on types may come before.
    assert line.startswith(f"Error: {source}: key qwen35.{key}") and line.count(str(source)) == 1
    assert said in line


def test_requantize_refuses_its_own_input(tmp_path, target, capsys):
    path = convert(save(tmp_path), target)
    before = path.read_bytes()
    assert requantized(path, path) == 1 and path.read_bytes() == before


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "below a file", "too long"])
def test_what_is_no_file_is_not_replaced(tmp_path, capsys, kind):
    drafter, out = BOX.with_name("box-dflash.gguf"), tmp_path / "out.gguf"
    if kind == "folder":
        out.mkdir()
    elif kind == "pipe":
        os.mkfifo(out)
    elif kind == "device":
        out.symlink_to("/dev/null")
    elif kind == "below a file":
        out.write_text("x")
        out = out / "out.gguf"
    else:
        out = tmp_path / ("x" * 300)
    before = sorted((path.name, path.lstat().st_mode) for path in tmp_path.iterdir())
    assert requantized(drafter, out) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Error: ")]
    assert line.startswith(f"Error: {out}"[:40]) and "[Errno" not in line
    assert sorted((path.name, path.lstat().st_mode) for path in tmp_path.iterdir()) == before


def test_a_full_disk_is_one_line_and_leaves_no_file(tmp_path, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        assert requantized(BOX.with_name("box-dflash.gguf"), tmp_path / "out.gguf") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().err.endswith(f"Error: {tmp_path}/out.gguf: File too large\n")
    assert list(tmp_path.iterdir()) == []
