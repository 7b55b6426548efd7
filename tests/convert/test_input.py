"""Checks what `luce convert` reads: config.json, the safetensors container, the tokenizer."""

import json
import os
import struct

import hf_checkpoint as hf
import pytest
import tiny
import tokenizers

from luce.convert.gguf_output import _hidden
from luce.convert.hf_config import Section, rope_theta
from luce.convert.safetensors_reader import Checkpoint
from luce.errors import FileError, UnsupportedError
from luce.files.tokenizer import Tokenizer
from luce.native import File

GROUPED = tiny.Config(n_v_head=6, n_nextn=1)


checkpoint = hf.save_qwen35
convert = hf.convert_qwen35_to_gguf


def failure(folder, capsys, *options):
    """Returns the line that a conversion to out.gguf beside the folder fails with."""
    return hf.failure([str(folder), str(folder.parent / "out.gguf"), *options], capsys)


# ---- RoPE base and other keys


@pytest.mark.parametrize(
    ("config", "theta"),
    [
        ({"rope_parameters": {"rope_theta": 1e7}}, 1e7),
        ({"rope_theta": 10000}, 1e4),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_theta": 1e7}, "rope_theta": 1e6}, 1e7),
        ({"rope_parameters": {"full_attention": {"rope_theta": 3.0}}}, 3.0),
    ],
)
def test_rope_theta_is_found_nested_then_at_the_top(config, theta):
    assert rope_theta(Section(config, "config.json")) == theta


@pytest.mark.parametrize(
    "config", [{}, {"rope_parameters": {}}, {"rope_parameters": None, "rope_theta": None}]
)
def test_missing_rope_theta_stops(config):
    with pytest.raises(FileError, match="neither rope_parameters.rope_theta nor rope_theta"):
        rope_theta(Section(config, "config.json"))


def test_missing_rope_theta_stops_the_conversion(tmp_path, capsys):
    folder = checkpoint(tmp_path / "hf", GROUPED)
    config = tiny.hf_config(GROUPED) | {"rope_parameters": {"partial_rotary_factor": 0.25}}
    (folder / "config.json").write_text(json.dumps(config))
    assert "neither rope_parameters.rope_theta nor rope_theta" in failure(folder, capsys)


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "num_hidden_layers", "head_dim", "rms_norm_eps", "linear_num_key_heads", "vocab_size"],
)
def test_missing_key_is_named(tmp_path, capsys, key):
    folder = checkpoint(tmp_path / "hf", GROUPED)
    config = tiny.hf_config(GROUPED)
    del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    assert f"key {key} is missing" in failure(folder, capsys)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": "64"}, "hidden_size is '64', expected an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"linear_value_head_dim": 64}, "linear_value_head_dim is 64"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types is"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types has ['sliding_attention']"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0}}, "rope_type is 'yarn'"),
    ],
)
def test_key_that_luce_cannot_follow_is_named(tmp_path, capsys, change, named):
    folder = checkpoint(tmp_path / "hf", GROUPED)
    (folder / "config.json").write_text(json.dumps(tiny.hf_config(GROUPED) | change))
    assert named in failure(folder, capsys)


# ---- the container


def header_of(folder):
    data = (folder / "model.safetensors").read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + n]), data[8 + n :]


def with_header(folder, header, body):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    return folder


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F16"},
        {"shape": [-64]},
        {"shape": [65]},
        {"data_offsets": [0, 1 << 60]},
        {"data_offsets": [256, 0]},
        {"data_offsets": [0, 256]},
        {"dtype": ["F32"]},
        {"dtype": {}},
        {"shape": [1] * 100 + [7]},
        {"shape": [10**30, 10**30]},
        {"shape": [64.0]},
    ],
)
def test_a_damaged_entry_is_refused_and_its_file_named(tmp_path, entry):
    folder = checkpoint(tmp_path / "hf", GROUPED)
    header, body = header_of(folder)
    header[NORM] |= entry
    with pytest.raises(FileError, match="model.safetensors: Error while deserializing header: "):
        Checkpoint(with_header(folder, header, body))


def test_a_quantised_tensor_is_named(tmp_path):
    folder = checkpoint(tmp_path / "hf", GROUPED)
    header, body = header_of(folder)
    header["quantised"] = {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [len(body), len(body) + 8]}
    with pytest.raises(UnsupportedError, match="tensor quantised is F8_E4M3: .*take the unquantised checkpoint"):
        Checkpoint(with_header(folder, header, body + bytes(8)))


@pytest.mark.parametrize(
    "header",
    [b'{"a":' * 100_000, b"[" * 100_000, b"[]", b'{"a": ' + b"9" * 5000 + b"}", b"\xff\xfe"],
    ids=range(5),
)
def test_a_hostile_header_is_refused_and_its_file_named(tmp_path, header):
    folder = checkpoint(tmp_path / "hf", GROUPED)
    with pytest.raises(FileError, match="model.safetensors: Error while deserializing header: "):
        Checkpoint(with_header(folder, header, b""))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_what_is_no_file_is_named(tmp_path, capsys, name, kind):
    folder = checkpoint(tmp_path / "hf", GROUPED)
    (folder / name).unlink()
    os.mkfifo(folder / name) if kind == "fifo" else (folder / name).mkdir()
    assert name in failure(folder, capsys)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", "1" + "0" * 400, '"1"'])
def test_a_number_that_is_none_is_named(tmp_path, capsys, value):
    folder = checkpoint(tmp_path / "hf", GROUPED)
    text = json.dumps(tiny.hf_config(GROUPED) | {"rms_norm_eps": 7.25})
    (folder / "config.json").write_text(text.replace("7.25", value))
    assert "key rms_norm_eps is " in failure(folder, capsys)


def test_truncated_file_at_any_length(tmp_path):
    folder = checkpoint(tmp_path / "hf", GROUPED)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for size in (0, 1, 7, 8, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(FileError, match="model.safetensors"):
            Checkpoint(folder)


def test_an_empty_file_is_said_to_be_empty(tmp_path, capsys):
    folder = checkpoint(tmp_path / "hf", GROUPED)
    path = folder / "model.safetensors"
    path.write_bytes(b"")
    assert failure(folder, capsys) == f"Error: {path}: the file is empty"


def test_what_fails_with_the_unfinished_file_names_the_output(tmp_path):
    """The name of a hidden file means nothing to who asked for another."""
    with pytest.raises(FileError) as caught, _hidden(tmp_path / "out.gguf") as part:
        part.write_bytes(b"")
        File(part)
    assert str(caught.value) == f"{tmp_path / 'out.gguf'}: the file is empty"
    with pytest.raises(OSError) as refused, _hidden(tmp_path / "out.gguf") as part:
        part.mkdir()
        part.write_bytes(b"")
    assert str(refused.value.filename) == str(tmp_path / "out.gguf")


def test_an_output_whose_hidden_name_is_too_long_is_named(tmp_path, capsys):
    folder, out = checkpoint(tmp_path / "hf", GROUPED), tmp_path / ("o" * 245 + ".gguf")
    assert hf.failure([str(folder), str(out)], capsys) == f"Error: {out}: File name too long"


def test_shards_that_do_not_fit_their_index(tmp_path):
    folder = checkpoint(tmp_path / "hf", GROUPED, shards=2)
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(
        json.dumps({"weight_map": weight_map | {"absent.weight": next(iter(weight_map.values()))}})
    )
    with pytest.raises(FileError, match="tensor absent.weight is not in"):
        Checkpoint(folder)
    index.write_text(json.dumps({"weight_map": {"x": "../../elsewhere.safetensors"}}))
    with pytest.raises(FileError, match="not the name of a file beside it"):
        Checkpoint(folder)
    index.unlink()
    with pytest.raises(FileError, match="2 .safetensors files, but no model.safetensors.index.json"):
        Checkpoint(folder)


# ---- tokenizer


def test_tokenizer_of_the_file_gives_the_ids_of_the_original(tmp_path):
    folder = checkpoint(tmp_path / "hf", GROUPED)
    original = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    with File(convert(folder)) as file:
        made = Tokenizer(file.kv)
    for text in ("the def in <|im_start|>user\n12 é\r\n<|im_end|>", "  \t x=1;  ", "日本語 हिन्दी e\u0301"):
        assert made.encode(text) == original.encode(text, add_special_tokens=False).ids
    assert made.eos_ids == {hf.N_TOKENS - 1, hf.N_TOKENS - 3}


def test_ids_and_template_come_from_their_files(tmp_path):
    folder = checkpoint(tmp_path / "hf", GROUPED)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [274, 272], "bos_token_id": 272})
    )
    keys = hf.keys_of(convert(folder))
    assert keys["tokenizer.chat_template"] == "{{ messages }}"
    found = [keys[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "bos", "padding")]
    assert found == [274, 272, 272, 272]
    assert "tokenizer.ggml.mask_token_id" not in keys


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="x"), "splits by ['x']"),
        (lambda t: t["added_tokens"][0].update(id=384), "has id 384, the embedding has 384 rows"),
        (lambda t: t["model"].update(type="Unigram"), "type is 'Unigram'"),
        (lambda t: t["model"].update(merges=["a b c"]), "merge 'a b c' is not two tokens"),
        (lambda t: t["model"].update(byte_fallback=True), "byte_fallback"),
        (lambda t: t.update(normalizer={"type": "Lowercase"}), "rules that luce's tokenizer lacks"),
    ],
)
def test_tokenizer_that_luce_lacks_is_named(tmp_path, capsys, change, named):
    folder = checkpoint(tmp_path / "hf", GROUPED)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    change(tokenizer)
    path.write_text(json.dumps(tokenizer))
    assert named in failure(folder, capsys)
