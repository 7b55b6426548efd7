"""Runs `luce convert`: safetensors of Qwen3.5/3.6 to GGUF."""

import itertools
import os
import signal
import subprocess
import sys
from dataclasses import replace

import drive
import hf_checkpoint as hf
import numpy as np
import pytest
import tiny
from checkout import GOLDENS
from hf_checkpoint import GROUPED, WIDE
from make_goldens import CASES

from luce.convert import gguf_output
from luce.convert import qwen35 as convert_qwen35
from luce.convert.weight_types import MIXES, choose
from luce.errors import Error

CONFIGS = {
    "grouped": GROUPED,
    "equal-heads": tiny.Config(),
    "tied": replace(GROUPED, tied=True),
    "pattern": tiny.Config(n_layer=5, recurrent=(False, True, True, False, True), n_v_head=4),
}
checkpoint = hf.save_qwen35
convert = hf.convert_qwen35_to_gguf


def failure(folder, capsys, *options):
    """Returns the line that a conversion to out.gguf beside the folder fails with."""
    return hf.failure([str(folder), str(folder.parent / "out.gguf"), *options], capsys)


# ---- the same tensors and keys as a GGUF made another way


@pytest.mark.parametrize("name", CONFIGS)
def test_tensors_have_the_bits_of_the_test_models(tmp_path, name):
    c = CONFIGS[name]
    found = hf.tensors_of(convert(checkpoint(tmp_path / "hf", c), "--type", "F32"))
    wanted = tiny.layout(c, 1)
    assert list(found) == list(wanted)
    assert all(np.array_equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("name", CONFIGS)
def test_keys_are_those_of_the_test_models(tmp_path, name):
    c = replace(CONFIGS[name], n_vocab=hf.N_TOKENS)
    found = hf.keys_of(convert(checkpoint(tmp_path / "hf", c), "--type", "F32", "--name", "tiny-other"))
    wanted = hf.keys_of(tiny.write(tmp_path / "other.gguf", c, tiny.layout(c, 1)))
    del wanted["tokenizer.ggml.bos_token_id"]  # tokenizer_config.json has none.
    assert found == wanted | {"general.type": "model"}


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", ""])
def test_published_layout_gives_the_same_file(tmp_path, prefix):
    """It has text_config, model.language_model.*, a vision tower and model.mtp.*, as ForConditionalGeneration
    has them."""
    plain = convert(checkpoint(tmp_path / "hf", GROUPED)).read_bytes()
    weights = {}
    for name, x in tiny.weights(GROUPED, 1).items():
        name = f"model.{name}" if name.startswith("mtp.") else name
        weights[name.replace("model.", prefix, 1) if name.startswith("model.l") else name] = x
    weights["model.visual.blocks.0.attn.qkv.weight"] = np.ones((4, 4), np.float32)
    config = {"model_type": "qwen3_5", "text_config": tiny.hf_config(GROUPED), "vision_config": {"depth": 1}}
    (tmp_path / "published").mkdir()
    published = hf.save(tmp_path / "published" / "hf", config, weights)
    assert convert(published).read_bytes() == plain


def test_shards_give_the_same_file(tmp_path):
    single = convert(checkpoint(tmp_path / "hf", GROUPED)).read_bytes()
    (tmp_path / "sharded").mkdir()
    assert convert(checkpoint(tmp_path / "sharded" / "hf", GROUPED, shards=3)).read_bytes() == single


def test_bf16_checkpoint_is_kept_to_the_bit(tmp_path):
    weights = tiny.weights(GROUPED, 1)
    stored = {name: hf.bf16(x) for name, x in weights.items()}
    folder = hf.save(tmp_path / "hf", tiny.hf_config(GROUPED), stored)
    widened = {name: (x.astype(np.uint32) << 16).view(np.float32) for name, x in stored.items()}
    wanted = tiny.to_gguf_layout(GROUPED, widened)
    for kind in ("BF16", "F32"):
        found = hf.tensors_of(convert(folder, "--type", kind))
        assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_every_norm_of_the_head_gets_its_one(tmp_path):
    found = hf.tensors_of(convert(checkpoint(tmp_path / "hf", GROUPED)))
    weights = tiny.weights(GROUPED, 1)
    for local, name in {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden",
                        "shared_head_norm": "norm"}.items():  # fmt: skip
        assert np.array_equal(found[f"blk.4.nextn.{local}.weight"], weights[f"mtp.{name}.weight"] + 1)
    assert np.array_equal(found["blk.0.ssm_norm.weight"], weights["model.layers.0.linear_attn.norm.weight"])


@pytest.mark.parametrize("name", ["base", "grouped-s64-d128", "tied-grouped"])
def test_converted_file_gives_the_logits_of_transformers(tmp_path, name, native, device, record_property):
    """The goldens were made by transformers of the same weights, and their tokens are given to both."""
    c, seed = CASES[name]
    golden = np.load(GOLDENS / f"{name}.npz")
    path = convert(checkpoint(tmp_path / "hf", c, seed), "--type", "F32")
    sequence = drive.open_sequence(drive.open_model(native, path, device), n_ctx=256)
    found = drive.chain_logits(sequence, golden["prompt"].tolist(), 8)
    worst = float(np.abs(found - golden["logits"]).max())
    record_property("max_abs_logit_error", worst)
    assert worst < (1e-3 if device.startswith("cpu") else drive.CUDA_BOUND)


# ---- types


@pytest.mark.long
@pytest.mark.parametrize("kind", MIXES)
def test_round_trip_error_of_each_type(tmp_path, kind):
    path = convert(checkpoint(tmp_path / "hf", WIDE), "--type", kind)
    found, types, wanted = hf.tensors_of(path), hf.types_of(path), tiny.layout(WIDE, 1)
    for name, x in wanted.items():
        assert hf.relative_error(found[name], x) <= hf.ROUND_TRIP[types[name]], name
        assert tiny.quantizable(name) or types[name] == "F32"
    expected = {"Q4_K_M": {"Q4_K", "Q6_K", "Q8_0"}, "Q5_K_M": {"Q5_K", "Q6_K", "Q8_0"}}.get(kind, {kind})
    assert set(types.values()) == expected | {"F32"}
    assert hf.keys_of(path)["general.file_type"] == MIXES[kind].file_type


def test_mixes_give_more_bits_where_llama_cpp_does():
    shapes = {f"blk.{i}.{name}.weight": (256, 256) for i, name in itertools.product(
        range(16), ("attn_v", "attn_q", "ffn_down", "ssm_alpha"))}  # fmt: skip
    shapes |= {"output.weight": (512, 256), "token_embd.weight": (512, 256)}
    types, fallbacks = choose(MIXES["Q4_K_M"], shapes.items(), tied=False)
    better = [i for i in range(16) if types[f"blk.{i}.attn_v.weight"] == "Q6_K"]
    assert better == [0, 1, 4, 7, 10, 13, 14, 15] and not fallbacks
    assert better == [i for i in range(16) if types[f"blk.{i}.ffn_down.weight"] == "Q6_K"]
    assert (
        types["output.weight"] == "Q6_K"
        and types["token_embd.weight"] == types["blk.0.attn_q.weight"] == "Q4_K"
    )
    assert types["blk.3.ssm_alpha.weight"] == "Q8_0"
    assert choose(MIXES["Q4_K_M"], shapes.items(), tied=True)[0]["token_embd.weight"] == "Q6_K"


@pytest.mark.parametrize(("n_ff", "got"), [(96, "Q8_0"), (100, "F16")])
def test_rows_that_do_not_fit_fall_back_aloud(tmp_path, capsys, n_ff, got):
    c = replace(WIDE, n_ff=n_ff)
    types = hf.types_of(convert(checkpoint(tmp_path / "hf", c), "--type", "Q4_K_M"))
    assert {types[f"blk.{i}.ffn_down.weight"] for i in range(5)} == {got}
    said = capsys.readouterr().err
    assert f"rows of {n_ff} are no multiple of 256: {got} instead of Q4_K: blk.0.ffn_down.weight" in said


# ---- parts


def test_parts_are_those_that_were_asked_for(tmp_path, capsys):
    folder = checkpoint(tmp_path / "hf", GROUPED)
    every = hf.tensors_of(convert(folder))
    trunk_path = convert(folder, "--no-mtp")
    trunk, keys = hf.tensors_of(trunk_path), hf.keys_of(trunk_path)
    assert set(trunk) == {name for name in every if not name.startswith("blk.4.")}
    assert keys["qwen35.block_count"] == 4 and "qwen35.nextn_predict_layers" not in keys
    head_path = convert(folder, "--mtp-only")
    head, keys = hf.tensors_of(head_path), hf.keys_of(head_path)
    shared = {"token_embd.weight", "output_norm.weight", "output.weight"}
    assert set(head) == shared | {name for name in every if name.startswith("blk.4.")}
    assert keys["qwen35.block_count"] == 5 and keys["qwen35.nextn_predict_layers"] == 1
    assert all(np.array_equal(part[name], every[name]) for part in (trunk, head) for name in part)
    assert hf.run(folder, "x.gguf", "--no-mtp", "--mtp-only") == 2


def test_checkpoint_without_a_head(tmp_path, capsys):
    """Fine-tunes saved by transformers keep mtp_num_hidden_layers, but lose the tensors."""
    c = replace(GROUPED, n_nextn=0)
    config = tiny.hf_config(c) | {"mtp_num_hidden_layers": 1}
    folder = hf.save(tmp_path / "hf", config, tiny.weights(c, 1))
    assert "has no mtp.* tensors" in failure(folder, capsys, "--mtp-only")
    convert(folder)
    assert "the file will have no NextN head" in capsys.readouterr().err


def test_tied_head_that_was_saved_too_is_left_out(tmp_path, capsys):
    c = replace(GROUPED, tied=True)
    weights = tiny.weights(c, 1)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    path = convert(hf.save(tmp_path / "hf", tiny.hf_config(c), weights))
    assert (
        "output.weight" not in hf.types_of(path) and "lm_head.weight is left out" in capsys.readouterr().err
    )


# ---- tensors that are wrong


def changed(tmp_path, change):
    weights = tiny.weights(GROUPED, 1)
    change(weights)
    return hf.save(tmp_path / "hf", tiny.hf_config(GROUPED), weights)


def test_missing_tensor_is_named(tmp_path, capsys):
    folder = changed(tmp_path, lambda w: w.pop("model.layers.2.linear_attn.A_log"))
    assert "tensor layers.2.linear_attn.A_log is missing" in failure(folder, capsys)


def test_wrong_shape_is_named_with_both_shapes(tmp_path, capsys):
    name = "model.layers.3.self_attn.q_proj.weight"
    folder = changed(tmp_path, lambda w: w.update({name: np.zeros((128, 64), np.float32)}))
    said = failure(folder, capsys)
    assert f"tensor {name}: expected shape (256, 64)" in said and "found (128, 64)" in said


def test_tensor_without_a_place_is_named(tmp_path, capsys):
    name = "model.layers.3.self_attn.q_proj.bias"
    folder = changed(tmp_path, lambda w: w.update({name: np.zeros(256, np.float32)}))
    assert f"tensor {name} is not part of the qwen35" in failure(folder, capsys)


def test_nan_is_named(tmp_path, capsys):
    name = "model.layers.1.mlp.up_proj.weight"
    folder = changed(tmp_path, lambda w: w[name].__setitem__((3, 4), np.nan))
    assert "tensor blk.1.ffn_up.weight: value" in failure(folder, capsys)


def test_weight_beyond_f16_stops_f16_alone(tmp_path, capsys):
    name = "model.layers.1.mlp.up_proj.weight"
    folder = changed(tmp_path, lambda w: w[name].__setitem__((3, 4), 1e6))
    said = failure(folder, capsys, "--type", "F16")
    assert "blk.1.ffn_up.weight holds values that F16 cannot; --type BF16 or F32 holds them" in said
    convert(folder, "--type", "BF16")


def test_missing_tokenizer_names_the_remedy(tmp_path, capsys):
    folder = hf.save(tmp_path / "hf", tiny.hf_config(GROUPED), tiny.weights(GROUPED, 1), tokenizer=False)
    assert "--tokenizer DIR" in failure(folder, capsys)
    (tmp_path / "tok").mkdir()
    hf.save_tokenizer(tmp_path / "tok")
    convert(folder, "--tokenizer", str(tmp_path / "tok"))


# ---- whole or not at all


def test_failure_in_the_middle_keeps_what_was_there(tmp_path, capsys, monkeypatch):
    folder = checkpoint(tmp_path / "hf", GROUPED)
    out = tmp_path / "out.gguf"
    out.write_bytes(b"older")
    encode = gguf_output.Encoder.__call__

    def full(self, name, kind, rows):
        if name == "blk.2.ffn_up.weight":
            raise OSError(28, "No space left on device")
        return encode(self, name, kind, rows)

    monkeypatch.setattr(gguf_output.Encoder, "__call__", full)
    assert "No space left" in failure(folder, capsys)
    assert out.read_bytes() == b"older"


def test_kill_in_the_middle_leaves_no_output(tmp_path):
    folder = checkpoint(tmp_path / "hf", GROUPED)
    code = (
        "import os, signal\nfrom luce.cli.commands import cli\nfrom luce.convert import gguf_output\n"
        "encode = gguf_output.Encoder.__call__\n"
        "def killed(self, name, kind, rows):\n"
        "    if name == 'blk.2.ffn_up.weight': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return encode(self, name, kind, rows)\n"
        "gguf_output.Encoder.__call__ = killed\n"
        f"cli(['convert', {str(folder)!r}, {str(tmp_path / 'out.gguf')!r}])\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, timeout=120, env=environment, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert not list(tmp_path.glob("*.gguf"))
    convert(folder)


def test_bytes_that_change_on_the_disk_are_noticed(tmp_path, capsys, monkeypatch):
    write = gguf_output._write_tensor

    def flipped(out, planned, kind, encode):
        digest = write(out, planned, kind, encode)
        if planned.name == "output_norm.weight":
            out.seek(-1, 1)
            out.write(b"\x55")
        return digest

    monkeypatch.setattr(gguf_output, "_write_tensor", flipped)
    assert "tensor output_norm.weight reads back with other bytes" in failure(
        checkpoint(tmp_path / "hf", GROUPED), capsys
    )


def test_output_that_cannot_be_written(tmp_path):
    folder = checkpoint(tmp_path / "hf", GROUPED)
    for out in (tmp_path, tmp_path / "absent" / "x.gguf"):
        assert hf.run(str(folder), str(out)) == 1


def test_says_what_it_wrote(tmp_path, capsys):
    path = convert(checkpoint(tmp_path / "hf", GROUPED))
    said = capsys.readouterr()
    assert str(path) in said.out and "verified" in said.out and "Q8_0" in said.out
    assert "luce runs this file: 4 blocks, NextN head" in said.err


def test_wrong_checkpoint_path(tmp_path):
    with pytest.raises(Error, match="absent is not a folder"):
        convert_qwen35.convert(tmp_path / "absent", tmp_path / "x.gguf")
