"""What `luce convert` writes over, and the sampling that it keeps."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import dflash_checkpoint as dflash
import hf_checkpoint as hf
import numpy as np
import pytest
import tiny
from click.testing import CliRunner
from serving import serving, settings

from luce.cli.commands import cli
from luce.convert.gguf_output import _hidden
from luce.data import BOX
from luce.errors import FileError

CONFIG = tiny.Config(n_layer=4, n_nextn=1, n_vocab=hf.N_TOKENS)
target = dflash.target


def convert(*args):
    return CliRunner().invoke(cli, ["convert", *map(str, args)])


@pytest.fixture
def sources(tmp_path, target):
    """Gives the arguments of each kind of conversion, but for the output: of a model, its head, a drafter and
    two GGUFs."""
    (tmp_path / "drafter").mkdir()
    model, drafter = hf.save_qwen35(tmp_path / "model", CONFIG), dflash.save(tmp_path / "drafter")
    return {
        "model": (model,),
        "head": (model, "--mtp-only"),
        "drafter": (drafter, "--target", target),
        "gguf": (tiny.write(tmp_path / "model.gguf", CONFIG, tiny.layout(CONFIG, 1)),),
        "drafter's gguf": (BOX.with_name("box-dflash.gguf"),),
    }


@pytest.mark.parametrize("kind", ["model", "head", "drafter", "gguf", "drafter's gguf"])
def test_a_file_is_replaced_only_where_that_is_asked(sources, tmp_path, kind):
    (source, *flags), out = sources[kind], tmp_path / "out.gguf"
    out.write_text("precious")
    before = sorted(tmp_path.iterdir())
    refused = convert(source, out, *flags)
    assert refused.exit_code == 1
    assert refused.stderr.splitlines()[-1] == f"Error: {out} is there already; --force replaces it"
    assert out.read_text() == "precious" and sorted(tmp_path.iterdir()) == before
    done = convert(source, out, *flags, "--force")
    assert done.exit_code == 0 and out.read_bytes()[:4] == b"GGUF", done.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_what_fails_replaces_nothing(sources, tmp_path):
    (source,), out = sources["model"], tmp_path / "out.gguf"
    (source / "config.json").write_text("{}")
    out.write_text("precious")
    assert convert(source, out, "--force").exit_code == 1 and out.read_text() == "precious"


def test_the_input_is_not_replaced_whatever_is_asked(sources):
    (source,) = sources["gguf"]
    before = source.read_bytes()
    refused = convert(source, source, "--force")
    assert refused.exit_code == 1 and "is the input" in refused.stderr and source.read_bytes() == before


def test_a_file_that_comes_meanwhile_is_not_replaced(tmp_path):
    out = tmp_path / "out.gguf"
    with pytest.raises(FileError, match=f"^{out} is there already$"), _hidden(out) as part:
        part.write_text("new")
        out.write_text("precious")
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"] and out.read_text() == "precious"


# ---- sampling


def keys_of(tmp_path, config, *flags, name="m"):
    folder = hf.save_qwen35(tmp_path / name, CONFIG)
    if config is not None:
        (folder / "generation_config.json").write_text(json.dumps(config))
    assert hf.run(folder, tmp_path / f"{name}.gguf", *flags) == 0
    found = hf.keys_of(tmp_path / f"{name}.gguf")
    return {key.removeprefix("general.sampling."): value for key, value in found.items() if "sampling" in key}


def real(value):
    return float(np.float32(value))


QWEN = {
    "bos_token_id": 1, "do_sample": True, "eos_token_id": [2, 3], "pad_token_id": 1, "temperature": 1.0,
    "top_k": 20, "top_p": 0.95, "transformers_version": "4.57.0.dev0",
}  # fmt: skip


@pytest.mark.parametrize(
    "config, keys",
    [
        (None, {}),
        ({"eos_token_id": 2}, {}),
        (QWEN, {"temp": 1.0, "top_k": 20, "top_p": real(0.95)}),
        ({"temperature": 0}, {"temp": 0.0}),
        ({"temperature": None, "top_p": 1, "min_p": 0.05}, {"top_p": 1.0, "min_p": real(0.05)}),
        ({"repetition_penalty": 1.05, "top_k": 0}, {"penalty_repeat": real(1.05), "top_k": 0}),
        ({"repetition_penalty": 1.05, "penalty_repeat": 1.1}, {"penalty_repeat": real(1.1)}),
        ({"top_k": -1}, {"top_k": 0}),
    ],
)
def test_the_sampling_of_generation_config_is_kept(tmp_path, config, keys):
    """Keys and types are those that llama.cpp's converter writes."""
    assert keys_of(tmp_path, config) == keys


def test_it_is_kept_when_matrices_get_another_type(tmp_path):
    keys = keys_of(tmp_path, QWEN, "--type", "F32")
    assert hf.run(tmp_path / "m.gguf", tmp_path / "q8.gguf", "--type", "Q8_0") == 0
    found = hf.keys_of(tmp_path / "q8.gguf")
    assert {key: found[f"general.sampling.{key}"] for key in keys} == keys and keys


@pytest.mark.parametrize(
    "key, value", [("temperature", "hot"), ("temperature", -1), ("top_p", 1.5), ("min_p", -0.1),
                   ("top_k", 1.5), ("repetition_penalty", 0), ("top_p", True)],
)  # fmt: skip
def test_sampling_that_is_none_is_named(tmp_path, capsys, key, value):
    folder = hf.save_qwen35(tmp_path / "m", CONFIG)
    (folder / "generation_config.json").write_text(json.dumps({key: value}))
    said = hf.failure([str(folder), str(tmp_path / "m.gguf")], capsys)
    assert f"{folder}/generation_config.json: key {key} is {value!r}"[:-1] in said


def test_a_generation_config_that_is_no_json_is_named(tmp_path, capsys):
    folder = hf.save_qwen35(tmp_path / "m", CONFIG)
    (folder / "generation_config.json").write_text("{")
    assert "generation_config.json: " in hf.failure([str(folder), str(tmp_path / "m.gguf")], capsys)


def test_a_server_samples_so(tmp_path):
    """What a request does not say is as the checkpoint has it."""
    keys_of(tmp_path, QWEN | {"repetition_penalty": 2.5, "min_p": 0.25}, name="m")
    path = Path(tmp_path / "m.gguf")
    with serving({"m": path}, settings(ctx=256)) as server:
        params = server.http.get("/props").json()["default_generation_settings"]["params"]
        wanted = {"temperature": 1.0, "top_k": 20, "top_p": 0.95, "min_p": 0.25, "repetition": 2.5}
        assert params == pytest.approx(wanted)
        ask = {"model": "m", "prompt": "ab ab ab", "max_tokens": 12, "seed": 3}
        said = dict(wanted, repetition_penalty=2.5)
        said.pop("repetition")
        texts = [
            server.post("/v1/completions", **ask, **more).json()["choices"][0]["text"]
            for more in ({}, said, said | {"repetition_penalty": 1.0}, said | {"temperature": 0})
        ]
        assert texts[0] == texts[1] and texts[0] not in texts[2:]


def test_a_new_file_has_the_rights_that_the_user_gives_new_files(tmp_path, target):
    """The unfinished file beside it is nobody else's business, and the finished one is like any other."""
    folder, before = dflash.save(tmp_path), os.umask(0o027)
    try:
        out = dflash.convert(folder, target)
    finally:
        os.umask(before)
    assert oct(stat.S_IMODE(out.stat().st_mode)) == "0o640"
