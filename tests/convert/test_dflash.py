"""Runs `luce convert`: z-lab-style DFlash drafters to GGUF, and GGUF drafters requantised."""

import json
import os
import signal
import subprocess
import sys

import box_model
import dflash_checkpoint
import hf_checkpoint as hf
import numpy as np
import pytest
import tiny
from depth import deeper_but
from dflash_checkpoint import (
    CONFIG,
    FF,
    GGUF_NAMES,
    HEADS,
    KV,
    LAYERS,
    TARGET,
    VOCAB,
    D,
    E,
    config_with,
    convert,
    save,
    weights,
)

from luce.convert import gguf_output
from luce.convert.weight_types import MIXES
from luce.files.probe import probe
from luce.native import File

target = dflash_checkpoint.target


def expected(made):
    """Returns the GGUF's tensors, which have other names and the same numbers."""
    top = {"fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm"}
    wanted = {}
    for name, x in made.items():
        stem = name.removesuffix(".weight")
        if stem in top:
            wanted[f"{top[stem]}.weight"] = x
        else:
            _, i, local = stem.split(".", 2)
            wanted[f"blk.{i}.{GGUF_NAMES[local]}.weight"] = x
    return wanted


def failure(folder, target, capsys, *options):
    args = [str(folder), str(folder.parent / "out.gguf"), "--target", str(target), *options]
    return hf.failure(args, capsys)


# ---- what is written


@pytest.mark.parametrize("prefix", ["", "model."])
def test_tensors_keep_their_bits(tmp_path, target, prefix):
    made = weights()
    folder = save(tmp_path, made={prefix + name: x for name, x in made.items()})
    found, wanted = hf.tensors_of(convert(folder, target, "--type", "F32")), expected(made)
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_keys_are_the_config_s(tmp_path, target):
    keys = hf.keys_of(convert(save(tmp_path), target, "--name", "drafter"))
    wanted = {
        "block_count": LAYERS, "context_length": 4096, "embedding_length": E, "feed_forward_length": FF,
        "attention.head_count": HEADS, "attention.head_count_kv": KV, "attention.key_length": D,
        "attention.value_length": D, "rope.freq_base": 1e7, "rope.dimension_count": D, "vocab_size": VOCAB,
        "block_size": 16, "target_layers": [2, 5, 7], "attention.causal": False,
        "rope.dimension_sections": [D // 2, 0, 0, 0],
        "attention.layer_norm_rms_epsilon": float(np.float32(1e-6)),
    }  # fmt: skip
    assert {k.removeprefix("dflash."): v for k, v in keys.items() if k.startswith("dflash.")} == wanted
    assert keys["general.architecture"] == "dflash" and keys["general.name"] == "drafter"
    assert keys["tokenizer.ggml.mask_token_id"] == 300


def test_probe_reads_it_as_a_drafter(tmp_path, target):
    config = config_with(
        use_sliding_window=True, sliding_window=64, layer_types=["sliding_attention"] * LAYERS
    )
    with File(convert(save(tmp_path, config), target)) as file:
        facts = probe(file)
    assert facts.kind == "drafter" and facts.architecture == "dflash" and facts.vocab_size == VOCAB
    assert facts.dflash.target_layers == [2, 5, 7] and facts.dflash.mask_token_id == 300
    assert (facts.dflash.block_size, facts.dflash.sliding_window, facts.dflash.causal) == (16, 64, False)
    assert facts.dflash.sliding_window_pattern == [True] * LAYERS


def test_tokenizer_is_the_target_s(tmp_path, target):
    found = {
        k: v for k, v in hf.keys_of(convert(save(tmp_path), target)).items() if k.startswith("tokenizer")
    }
    wanted = {k: v for k, v in hf.keys_of(target).items() if k.startswith("tokenizer")}
    assert found == wanted | {"tokenizer.ggml.mask_token_id": 300}


def test_target_may_be_a_folder(tmp_path, target):
    from_gguf = hf.tensors_of(convert(save(tmp_path), target))
    folder = hf.save(tmp_path / "target", {"text_config": tiny.hf_config(TARGET)}, {})
    path = convert(save(tmp_path), folder)
    keys = hf.keys_of(path)
    assert len(keys["tokenizer.ggml.tokens"]) == VOCAB and keys["tokenizer.ggml.pre"] == "qwen35"
    assert "dflash.rope.dimension_sections" not in keys  # This folder's config has no mrope_section.
    assert all(np.array_equal(x, from_gguf[name]) for name, x in hf.tensors_of(path).items())


def test_drafter_with_a_tokenizer_needs_no_target(tmp_path):
    folder = hf.save(tmp_path / "hf", CONFIG, weights())
    assert hf.run(str(folder), str(tmp_path / "out.gguf")) == 0
    assert hf.keys_of(tmp_path / "out.gguf")["tokenizer.ggml.mask_token_id"] == 300


def test_drafter_without_a_tokenizer_asks_for_its_target(tmp_path, capsys):
    args = [str(save(tmp_path)), str(tmp_path / "out.gguf")]
    assert "no tokenizer.json; --target names the model" in hf.failure(args, capsys)


def test_target_folder_without_a_tokenizer_is_named(tmp_path, capsys):
    """luce takes the tokenizer from no other folder than the target's, so that the error speaks of none."""
    folder = hf.save(tmp_path / "target", {"text_config": tiny.hf_config(TARGET)}, {})
    (folder / "tokenizer.json").unlink()
    args = [str(save(tmp_path)), str(tmp_path / "out.gguf"), "--target", str(folder)]
    error = hf.failure(args, capsys)
    assert f"{folder} has no tokenizer.json: copy it beside config.json" in error
    assert "--tokenizer" not in error


@pytest.mark.parametrize(
    ("change", "named"),
    [({"n_embd": 128}, "hidden_size is 256, but 128"), ({"n_vocab": 400}, "vocab_size is 384, but 400"),
     ({"n_layer": 4}, "taps layer 6")],
)  # fmt: skip
def test_target_of_another_shape(tmp_path, capsys, change, named):
    c = tiny.Config(**({"n_layer": 8, "n_embd": E, "n_vocab": VOCAB} | change))
    other = tiny.write(tmp_path / "other.gguf", c, tiny.layout(c, 1))
    assert named in failure(save(tmp_path), other, capsys)


def test_shards_and_bf16_give_the_same_file(tmp_path, target):
    stored = {name: hf.bf16(x) for name, x in weights().items()}
    single = convert(save(tmp_path, made=stored), target).read_bytes()
    (tmp_path / "sharded").mkdir()
    assert convert(save(tmp_path / "sharded", made=stored, shards=3), target).read_bytes() == single


# ---- RoPE


@pytest.mark.parametrize(
    ("rope", "theta"),
    [
        ({"rope_parameters": {"rope_theta": 1e7}}, 1e7),
        ({"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": None}, 1e6),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_theta": 1e7}, "rope_theta": 1e6}, 1e7),
    ],
)
def test_rope_theta_is_found_nested_then_at_the_top(tmp_path, target, rope, theta):
    keys = hf.keys_of(convert(save(tmp_path, config_with(**rope)), target))
    assert keys["dflash.rope.freq_base"] == theta


@pytest.mark.parametrize("rope", [{"rope_parameters": None}, {"rope_parameters": {"rope_type": "default"}}])
def test_missing_rope_theta_stops(tmp_path, target, capsys, rope):
    said = failure(save(tmp_path, config_with(**rope)), target, capsys)
    assert "neither rope_parameters.rope_theta nor rope_theta" in said


@pytest.mark.parametrize("nested", [True, False])
def test_yarn_is_carried_over(tmp_path, target, nested):
    yarn = {"factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 32.0, "beta_slow": 1.0,
            "attention_factor": 1.25}  # fmt: skip
    change = (
        {"rope_parameters": yarn | {"rope_type": "yarn", "rope_theta": 1e7}}
        if nested
        else {"rope_parameters": None, "rope_theta": 1e7, "rope_scaling": yarn | {"type": "yarn"}}
    )
    keys = hf.keys_of(convert(save(tmp_path, config_with(**change)), target))
    found = {k.removeprefix("dflash.rope.scaling."): v for k, v in keys.items() if "rope.scaling" in k}
    assert found == {"type": "yarn", "factor": 4.0, "original_context_length": 1024, "yarn_attn_factor": 1.25,
                     "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0}  # fmt: skip


# ---- mask token, taps, block


@pytest.mark.parametrize(
    ("change", "mask"),
    [
        ({"dflash": {"mask_token_id": 299}, "mask_token_id": 5}, 299),
        ({"dflash": {"mask_token_id": None}, "mask_token_id": 5}, 5),
        ({"dflash": {"mask_token_id": 0}}, 0),
    ],
)
def test_mask_token_of_dflash_config_comes_first(tmp_path, target, change, mask):
    keys = hf.keys_of(convert(save(tmp_path, config_with(**change)), target))
    assert keys["tokenizer.ggml.mask_token_id"] == mask


def test_mask_token_of_the_tokenizer_comes_last(tmp_path):
    folder = hf.save(tmp_path / "hf", config_with(dflash={"mask_token_id": None}), weights())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["mask_token"] = "<|endoftext|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert hf.run(str(folder), str(tmp_path / "out.gguf")) == 0
    assert hf.keys_of(tmp_path / "out.gguf")["tokenizer.ggml.mask_token_id"] == hf.N_TOKENS - 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dflash": {"mask_token_id": None}}, "key mask_token_id is missing"),
        ({"dflash": {"mask_token_id": VOCAB}}, "key mask_token_id is 384"),
        ({"dflash": {"block_size": None}}, "key block_size is missing"),
        ({"dflash": {"block_size": 0}}, "key block_size is 0"),
        ({"dflash": {"target_layer_ids": None}}, "key target_layer_ids is missing"),
        ({"dflash": {"target_layer_ids": [4, 1, 6]}}, "key target_layer_ids is [4, 1, 6]"),
        ({"dflash": {"target_layer_ids": [1, 4, 8]}}, "key target_layer_ids is [1, 4, 8]"),
        ({"hidden_size": None}, "key hidden_size is missing"),
        ({"num_key_value_heads": None}, "key num_key_value_heads is missing"),
        ({"rms_norm_eps": "small"}, "key rms_norm_eps is 'small'"),
        ({"max_position_embeddings": None}, "key max_position_embeddings is missing"),
    ],
)
def test_missing_or_bad_key_is_named(tmp_path, target, capsys, change, named):
    assert named in failure(save(tmp_path, config_with(**change)), target, capsys)


def test_top_level_block_and_taps(tmp_path, target):
    """Older configs have no dflash_config."""
    config = config_with(dflash_config=None, block_size=8, mask_token_id=7, target_layer_ids=[0, 3, 5])
    keys = hf.keys_of(convert(save(tmp_path, config), target))
    assert (keys["dflash.block_size"], keys["dflash.target_layers"]) == (8, [1, 4, 6])


# ---- windows and causality

SLIDING, FULL = "sliding_attention", "full_attention"
MIXED = [SLIDING, SLIDING, FULL]


@pytest.mark.parametrize(
    ("change", "window", "pattern"),
    [
        ({"layer_types": MIXED, "use_sliding_window": True, "sliding_window": 64}, 64, [True, True, False]),
        ({"layer_types": MIXED, "use_sliding_window": False, "sliding_window": 64}, None, None),
        ({"layer_types": [FULL] * 3, "use_sliding_window": True, "sliding_window": 64}, None, None),
        ({"dflash": {"use_swa": True, "swa_window_size": 32}}, 32, [True] * 3),
        ({"dflash": {"use_swa": True}, "sliding_window": 64}, 64, [True] * 3),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, 64, [False, True, True]),
        ({"sliding_window": None}, None, None),
    ],
)
def test_window_and_its_pattern(tmp_path, target, change, window, pattern):
    keys = hf.keys_of(convert(save(tmp_path, config_with(**change)), target))
    assert keys.get("dflash.attention.sliding_window") == window
    assert keys.get("dflash.attention.sliding_window_pattern") == pattern


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer_types": MIXED, "sliding_window": 64}, "key use_sliding_window is missing"),
        ({"layer_types": MIXED, "use_sliding_window": True}, "key sliding_window is missing"),
        ({"use_sliding_window": True, "sliding_window": 64}, "key max_window_layers is missing"),
        ({"layer_types": [SLIDING]}, "expected 3 strings"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types has ['linear_attention']"),
    ],
)
def test_window_is_never_guessed(tmp_path, target, capsys, change, named):
    assert named in failure(save(tmp_path, config_with(**change)), target, capsys)


@pytest.mark.parametrize(
    ("change", "causal", "per_layer"),
    [
        ({"is_causal": True}, True, None),
        ({"is_causal": False, "dflash": {"causal": True}, "layer_types": MIXED}, False, None),
        ({"is_causal": None, "dflash": {"causal": True}, "layer_types": MIXED}, True, None),
        ({"is_causal": None}, False, None),
        ({"is_causal": None, "layer_types": [SLIDING] * 3}, True, None),
        ({"is_causal": None, "layer_types": MIXED}, None, [True, True, False]),
    ],
)
def test_causality_inside_the_block(tmp_path, target, change, causal, per_layer):
    change = change | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": LAYERS}
    keys = hf.keys_of(convert(save(tmp_path, config_with(**change)), target))
    assert keys.get("dflash.attention.causal") == causal
    assert keys.get("dflash.attention.causal_pattern") == per_layer


def test_softcap_and_embedding_scale(tmp_path, target):
    config = config_with(dflash={"final_logit_softcapping": 30.0, "input_embedding_scale": 16.0})
    keys = hf.keys_of(convert(save(tmp_path, config), target))
    assert keys["dflash.final_logit_softcapping"] == 30.0 and keys["dflash.embedding_scale"] == 16.0


# ---- what luce does not implement


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["DFlash3DraftModel"]}, "DFlash3DraftModel"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style"),
        ({"markov_rank": 64}, "markov_rank"),
        ({"dflash": {"selector_rank": 256}}, "selector_rank"),
        ({"dflash": {"conv_kernel_size": 2}}, "conv_kernel_size"),
        ({"dflash": {"attention_value_scale": 0.5}}, "attention_value_scale"),
        ({"dflash": {"something_new": 1}}, "something_new"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e7}}, "llama3"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0,
                              "original_max_position_embeddings": 1024, "mscale": 1.0}}, "mscale"),
        ({"rope_parameters": {FULL: {"rope_theta": 1e7}, SLIDING: {"rope_theta": 1e4}}}, "differ in RoPE"),
    ],
)  # fmt: skip
def test_key_that_luce_does_not_implement_is_named(tmp_path, target, capsys, change, named):
    assert named in failure(save(tmp_path, config_with(**change)), target, capsys)


@pytest.mark.parametrize(
    "name",
    ["markov_head.markov_w1.weight", "candidate_selector.hidden.weight", "layers.1.self_attn.sinks",
     "layers.0.attn_conv.base", "layers.2.post_feedforward_layernorm.weight", "confidence_head.proj.weight"],
)  # fmt: skip
def test_tensor_that_luce_does_not_implement_is_named(tmp_path, target, capsys, name):
    folder = save(tmp_path, made=weights() | {name: np.zeros(4, np.float32)})
    assert f"tensor {name}: luce does not implement" in failure(folder, target, capsys)


def test_absent_value_projection_is_named(tmp_path, target, capsys):
    made = weights()
    del made["layers.1.self_attn.v_proj.weight"]
    assert "tensor layers.1.self_attn.v_proj.weight is missing" in failure(
        save(tmp_path, made=made), target, capsys
    )


def test_wrong_shape_is_named_with_both_shapes(tmp_path, target, capsys):
    said = failure(save(tmp_path, made=weights(n_taps=2)), target, capsys)
    assert "tensor fc.weight: expected shape (256, 768)" in said and "found (256, 512)" in said


# ---- types


@pytest.mark.parametrize("kind", deeper_but(MIXES, "F16", "Q8_0", "Q4_K_M"))
def test_round_trip_error_of_each_type(tmp_path, target, kind):
    made = weights()
    path = convert(save(tmp_path, made=made), target, "--type", kind)
    found, types = hf.tensors_of(path), hf.types_of(path)
    for name, x in expected(made).items():
        assert hf.relative_error(found[name], x) <= hf.ROUND_TRIP[types[name]], name
        assert types[name] == "F32" or ("norm" not in name and x.ndim == 2)


def test_rows_that_do_not_fit_fall_back_aloud(tmp_path, target, capsys):
    folder = save(tmp_path, config_with(intermediate_size=96), weights(ff=96))
    types = hf.types_of(convert(folder, target, "--type", "Q4_K_M"))
    assert {types[f"blk.{i}.ffn_down.weight"] for i in range(LAYERS)} == {"Q8_0"}
    assert types["blk.0.ffn_up.weight"] == "Q4_K"
    assert "rows of 96 are no multiple of 256: Q8_0 instead of Q4_K" in capsys.readouterr().err


# ---- a vocabulary of its own


@pytest.mark.parametrize("absolute", [True, False])
def test_reduced_vocabulary_is_stored_as_ids(tmp_path, target, absolute):
    ids = np.array([3, 4, 5, 90, 91, 200, 383], np.int64)
    made = weights() | {
        "lm_head.weight": np.ones((7, E), np.float32),
        "d2t": ids if absolute else ids - np.arange(7),
        "t2d": np.zeros(VOCAB, np.uint8),
    }
    path = convert(save(tmp_path, config_with(draft_vocab_size=7), made), target)
    assert np.array_equal(hf.tensors_of(path)["d2t"], ids) and hf.types_of(path)["d2t"] == "I64"
    assert hf.tensors_of(path)["output.weight"].shape == (7, E)


@pytest.mark.parametrize("d2t", [[0, 0, -5], [1, 1, VOCAB], [5, 4, 4]])
def test_reduced_vocabulary_that_points_nowhere(tmp_path, target, capsys, d2t):
    made = weights() | {"lm_head.weight": np.ones((3, E), np.float32), "d2t": np.array(d2t, np.int64)}
    assert "tensor d2t" in failure(save(tmp_path, config_with(draft_vocab_size=3), made), target, capsys)


# ---- usage


@pytest.mark.parametrize(
    "args",
    [["out.gguf"], [box_model.GGUF, "out.gguf", "--target", "t.gguf"],
     [box_model.GGUF, "out.gguf", "--no-mtp"],
     ["drafter", "out.gguf", "--type", "Q3_K"], ["drafter", "out.gguf", "--threads", "-1"]],
)  # fmt: skip
def test_usage_errors_exit_2(args):
    assert hf.run(*args) == 2


def test_options_may_stand_between_the_paths(tmp_path, target):
    folder = save(tmp_path)
    args = [str(folder), "--target", str(target), "--type", "F16", str(tmp_path / "out.gguf")]
    assert hf.run(*args) == 0


# ---- whole or not at all


def test_failure_in_the_middle_leaves_nothing(tmp_path, target, capsys, monkeypatch):
    def full(self, name, kind, rows):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_output.Encoder, "__call__", full)
    assert "No space left" in failure(save(tmp_path), target, capsys)


def test_kill_in_the_middle_leaves_no_output(tmp_path, target):
    folder = save(tmp_path)
    args = [str(folder), str(tmp_path / "out.gguf"), "--target", str(target)]
    code = (
        "import os, signal\nfrom luce.cli.commands import cli\nfrom luce.convert import gguf_output\n"
        "gguf_output.Encoder.__call__ = lambda *args: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"cli(['convert', *{args!r}])\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, timeout=120, env=environment, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert not list(tmp_path.glob("*.gguf"))
