"""Runs `luce convert`: safetensors of Gemma 4 and its assistants to GGUF."""

import json
import re
from dataclasses import replace

import dflash_checkpoint
import gguf
import hf_checkpoint as hf
import numpy as np
import pytest
import tiny_gemma4
from depth import deeper_but
from hf_checkpoint import save_gemma4
from tiny_gemma4 import ASSISTANT, CASES

from luce.convert.gemma4_layout import CENTROIDS, ORDERING, Config, rope_factors
from luce.convert.hf_config import Section
from luce.convert.hf_gemma4 import BLOCK, TOP, read_hparams
from luce.convert.weight_types import MIXES, choose

CONFIGS = {name: replace(c, fused_experts=True) for name, (c, _) in CASES.items()} 
ORDERED = replace(ASSISTANT, n_centroid=24, n_centroid_used=4)
CONFIGS |= {"assistant": ASSISTANT, "ordered": ORDERED}
DENSE, EXPERTS, PER_LAYER = CONFIGS["dense"], CONFIGS["experts"], CONFIGS["per-layer"]


def convert(folder, *options):
    """Writes out.gguf beside the folder."""
    return hf.convert_qwen35_to_gguf(folder, *options)


# ---- the same tensors and keys as a GGUF made another way


@pytest.mark.parametrize("name", deeper_but(CONFIGS, "experts", "per-layer-wide", "ordered"))
def test_tensors_have_the_bits_of_the_test_models(tmp_path, name):
    c = CONFIGS[name]
    found = hf.tensors_of(convert(save_gemma4(tmp_path / "hf", c), "--type", "F32"))
    wanted = tiny_gemma4.layout(c, 1)
    assert list(found) == list(wanted)
    assert all(np.array_equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("name", deeper_but(CONFIGS, "experts", "per-layer-wide", "ordered"))
def test_keys_are_those_of_the_test_models(tmp_path, name):
    c = CONFIGS[name]
    found = hf.keys_of(convert(save_gemma4(tmp_path / "hf", c), "--type", "F32", "--name", "tiny-other"))
    wanted = hf.keys_of(tiny_gemma4.write(tmp_path / "other.gguf", c, tiny_gemma4.layout(c, 1)))
    sampling = {"temp": 1.0, "top_k": 64, "top_p": pytest.approx(0.95)}
    wanted |= {f"general.sampling.{name}": value for name, value in sampling.items()} | {"general.type": "model"}
    assert found.pop("tokenizer.ggml.eot_token_id") == 1  # generation_config.json has 1, 106 and 50.
    assert found == wanted


@pytest.mark.parametrize("name", ["dense", "experts", "per-layer"])
def test_published_layout_gives_the_same_file(tmp_path, name):
    c = CONFIGS[name]
    plain = convert(save_gemma4(tmp_path / "hf", c)).read_bytes()
    (tmp_path / "published").mkdir()
    assert convert(save_gemma4(tmp_path / "published" / "hf", c, published=True)).read_bytes() == plain


def test_bf16_checkpoint_is_kept_to_the_bit(tmp_path):
    stored = {name: hf.bf16(x) for name, x in tiny_gemma4.weights(EXPERTS, 1).items()}
    folder = save_gemma4(tmp_path / "hf", EXPERTS)
    hf.save_file(folder / "model.safetensors", stored)
    widened = {name: (x.astype(np.uint32) << 16).view(np.float32) for name, x in stored.items()}
    wanted = tiny_gemma4.to_gguf_layout(EXPERTS, widened)
    for kind in ("BF16", "F32"):
        found = hf.tensors_of(convert(folder, "--type", kind))
        assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_names_are_those_of_the_gguf_package():
    """It maps transformers' names to GGUF's for llama.cpp's converter, but for the scales of a mixture's router."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, 1)
    own = {local: plain for local, plain in BLOCK.items() if not local.endswith(".scale")}
    for local, plain in own.items():
        stem = plain.removesuffix(".weight")
        assert names.get_name(f"model.layers.0.{stem}") + ".weight" == f"blk.0.{local}"
    for name, plain in TOP.items():
        if name.startswith(("nextn.", "masked_embd_")):
            continue  # They are of other architectures' names.
        stem = plain.removesuffix(".weight")
        found = names.get_name(f"model.{stem}") or names.get_name(stem)
        assert found + ".weight" == name


# ---- config.json


def config_of(c, **changed):
    """Returns a text model's config with other keys; None takes one away."""
    keys = tiny_gemma4.hf_config(c) | {"model_type": "gemma4_text"} | changed
    return Section({key: value for key, value in keys.items() if value is not None}, "config.json")


def saved_since_5_17(c, explicit=False):
    """Returns keys as transformers saves them since 5.17: what layers have of their own, by layer."""
    of_global = {"head_dim": c.head_dim, "num_key_value_heads": c.n_head_kv}
    of_sliding = {"head_dim": c.head_dim_swa, "num_key_value_heads": c.n_head_kv_swa}
    layers = {
        str(i): of_sliding if sliding else of_global
        for i, sliding in enumerate(c.sliding) if explicit or not sliding
    }  # fmt: skip
    return {"global_head_dim": None, "num_global_key_value_heads": None, "per_layer_config": layers}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("explicit", [False, True])
def test_heads_are_read_from_both_forms_of_the_config(name, explicit):
    c = CONFIGS[name]
    assert read_hparams(config_of(c)) == c
    assert read_hparams(config_of(c, **saved_since_5_17(c, explicit))) == c


def test_what_the_config_leaves_out_is_what_transformers_takes():
    c = Config(sliding=(True,) * 5 + (False, False), head_dim=512, n_head_kv=2, softcap=None)
    left_out = ("global_head_dim", "num_global_key_value_heads", "layer_types", "rope_parameters",
                "num_kv_shared_layers", "use_double_wide_mlp", "final_logit_softcapping", "tie_word_embeddings",
                "enable_moe_block", "attention_k_eq_v", "hidden_size_per_layer_input")  # fmt: skip
    assert read_hparams(config_of(c, **dict.fromkeys(left_out))) == c


def test_text_beside_images_is_causal():
    assert read_hparams(config_of(DENSE, use_bidirectional_attention="vision")) == DENSE


GLOBAL = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
SLIDING = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(("changed", "message"), [
    ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
    ({"attention_bias": True}, "attention_bias"),
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
    ({"layer_types": ["sliding_attention"] * 6}, "the last layer is sliding_attention"),
    ({"layer_types": ["linear_attention"] * 6}, "linear_attention"),
    ({"layer_types": ["full_attention"]}, "expected 6 strings"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"sliding_window": None}, "sliding_window is missing"),
    ({"num_kv_shared_layers": 7}, "num_kv_shared_layers is 7, of 6"),
    ({"num_kv_shared_layers": 5}, "no layer of their kind"),
    ({"enable_moe_block": True}, "num_experts is missing"),
    ({"rope_parameters": {"full_attention": GLOBAL, "sliding_attention": {"rope_type": "yarn"}}}, "rope_t"),
    ({"rope_parameters": {"full_attention": GLOBAL | {"factor": 2.0}, "sliding_attention": SLIDING}}, "factor is 2.0"),
    ({"rope_parameters": {"full_attention": GLOBAL | {"rope_type": "yarn"}, "sliding_attention": SLIDING}}, "yarn"),
    ({"rope_parameters": {"sliding_attention": SLIDING}}, "full_attention.*missing"),
    ({"rope_parameters": {"full_attention": GLOBAL | {"partial_rotary_factor": 2.0}, "sliding_attention": SLIDING}},
     "partial_rotary_factor is 2.0"),
    ({"per_layer_config": {"9": {"head_dim": 128}}}, "'9' is not one of 6 layers"),
    ({"per_layer_config": {"x": {}}}, "'x' is not one of 6 layers"),
    ({"per_layer_config": {"2": {"head_dim": 128}}}, "global layers differ in heads"),
    ({"per_layer_config": {"0": {"head_dim": 128}}}, "sliding layers differ in heads"),
    ({"per_layer_config": {"2": {"sliding_window": 3}}}, "sliding_window differs"),
    ({"per_layer_config": {"2": {"head_dim": "x"}}}, "head_dim is 'x'"),
])  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(tmp_path, capsys, changed, message):
    folder = save_gemma4(tmp_path / "hf", DENSE)
    hf.save(folder, config_of(DENSE, **changed).values, tiny_gemma4.weights(DENSE, 1), tokenizer=False)
    line = hf.failure([str(folder), str(tmp_path / "out.gguf")], capsys)
    assert re.search(message, line)


# ---- tensors that are there, or not


def stored(folder, c, **changed):
    """Saves a checkpoint with other tensors; None takes one away."""
    made = save_gemma4(folder, c)
    weights = tiny_gemma4.weights(c, 1) | {name.replace("__", "."): x for name, x in changed.items()}
    hf.save_file(made / "model.safetensors", {name: x for name, x in weights.items() if x is not None})
    return made


ONES = np.ones((4, 4), np.float32)


@pytest.mark.parametrize(("changed", "message"), [
    ({"model__layers__1__self_attn__v_proj__weight": None}, "layers.1.self_attn.v_proj.weight is miss.*blk.1.attn_v"),
    ({"model__layers__2__self_attn__v_proj__weight": ONES}, "layers.2.self_attn.v_proj.weight is not part"),
    ({"model__layers__0__layer_scalar": np.ones(2, np.float32)}, r"expected shape \(1,\)"),
    ({"model__layers__0__router__scale": ONES, "model__layers__0__x": ONES}, "router.scale .and 1 more. is not part"),
    ({"model__norm__weight": ONES}, "expected shape"),
    ({"norm__weight": np.ones(64, np.float32)}, "are the same tensor"),
])  # fmt: skip
def test_tensors_that_do_not_fit_the_config_are_named(tmp_path, capsys, changed, message):
    folder = stored(tmp_path / "hf", DENSE, **changed)
    assert re.search(message, hf.failure([str(folder), str(tmp_path / "out.gguf")], capsys))


def test_a_layer_scale_may_be_a_scalar(tmp_path):
    scale = np.array(0.5, np.float32)
    found = hf.tensors_of(convert(stored(tmp_path / "hf", DENSE, model__layers__0__layer_scalar=scale)))
    assert found["blk.0.layer_output_scale.weight"].tolist() == [0.5]


def test_unused_keys_and_values_of_shared_layers_are_left_out(tmp_path, capsys):
    """Published checkpoints of the small models have them."""
    plain = convert(save_gemma4(tmp_path / "hf", PER_LAYER)).read_bytes()
    (tmp_path / "more").mkdir()
    parts = ("k_proj", "v_proj", "k_norm")
    folder = stored(tmp_path / "more" / "hf", PER_LAYER,
                    **{f"model__layers__{i}__self_attn__{part}__weight": ONES for i in range(4, 9) for part in parts})
    capsys.readouterr()
    assert convert(folder).read_bytes() == plain
    said = "self_attn.k_proj.weight and 14 more: left out, since these layers read another layer's K and V"
    assert said in capsys.readouterr().err


def test_the_copy_of_a_tied_embedding_is_left_out(tmp_path, capsys):
    copy = tiny_gemma4.weights(DENSE, 1)["model.embed_tokens.weight"]
    assert "output.weight" not in hf.types_of(convert(stored(tmp_path / "hf", DENSE, lm_head__weight=copy)))
    assert "lm_head.weight: left out, since config.json ties it" in capsys.readouterr().err


# ---- drafters

TARGET = replace(DENSE, sliding=(True, True, False) * 3, n_embd=dflash_checkpoint.E, n_vocab=dflash_checkpoint.VOCAB)


def target_of(folder, kind):
    """Returns a Gemma 4 target as a GGUF or as a folder."""
    if kind == "folder":
        return save_gemma4(folder / "target", TARGET)
    return tiny_gemma4.write(folder / "target.gguf", TARGET, tiny_gemma4.layout(TARGET, 1))


@pytest.mark.parametrize(("kind", "own"), [("gguf", False), ("folder", False), ("gguf", True)])
def test_a_dflash_drafter_scales_embeddings_and_caps_logits_as_its_target(tmp_path, kind, own):
    """Configs as z-lab publishes them say neither. Matrices of its own are no other case, as in the core
    (tests/core/model/test_drafter_files.py)."""
    ends = np.ones((dflash_checkpoint.VOCAB, dflash_checkpoint.E), np.float32)
    matrices = {"embed_tokens.weight": ends, "lm_head.weight": ends} if own else {}
    drafter = dflash_checkpoint.save(tmp_path, made=dflash_checkpoint.weights() | matrices)
    keys = hf.keys_of(dflash_checkpoint.convert(drafter, target_of(tmp_path, kind)))
    assert keys["dflash.embedding_scale"] == dflash_checkpoint.E**0.5 == 16
    assert keys["dflash.final_logit_softcapping"] == 30
    assert keys["tokenizer.ggml.model"] == "gemma4" and "dflash.rope.dimension_sections" not in keys


def test_what_a_drafter_s_config_says_wins(tmp_path):
    config = dflash_checkpoint.config_with(input_embedding_scale=2.5, final_logit_softcapping=7.0)
    keys = hf.keys_of(dflash_checkpoint.convert(dflash_checkpoint.save(tmp_path, config), target_of(tmp_path, "gguf")))
    assert (keys["dflash.embedding_scale"], keys["dflash.final_logit_softcapping"]) == (2.5, 7.0)


def test_dspark_s_backbone_of_gemma_4_is_refused_by_name(tmp_path, capsys):
    config = dflash_checkpoint.config_with(architectures=["Gemma4DSparkModel"], markov_rank=8)
    args = [str(dflash_checkpoint.save(tmp_path, config)), str(tmp_path / "out.gguf")]
    message = hf.failure(args, capsys)
    assert "architectures: Gemma4DSparkModel, a DSpark drafter with layers like Gemma 4's own, is not DFlash" in message


# ---- RoPE's factors, assistants, types


@pytest.mark.parametrize(("head_dim", "partial", "turning"), [(512, 0.25, 64), (128, 0.5, 32), (64, 1.0, 32)])
def test_factors_leave_pairs_standing(head_dim, partial, turning):
    factors = rope_factors(Config(head_dim=head_dim, rope_partial=partial))
    assert factors.tolist() == [1.0] * turning + [np.float32(1e30)] * (head_dim // 2 - turning)


def test_an_assistant_says_what_it_drafts_for(tmp_path, capsys):
    changed = {"masked_embedding__centroids__weight": ONES, "masked_embedding__token_ordering": np.arange(4)}
    path = convert(stored(tmp_path / "hf", ASSISTANT, **changed))
    err = capsys.readouterr().err
    assert "masked_embedding.centroids.weight and 1 more: left out, since use_ordered_embeddings of config.json" in err
    assert "an assistant: it drafts for a Gemma 4 model of width 64" in err
    keys = hf.keys_of(path)
    assert keys["general.architecture"] == "gemma4-assistant"
    assert keys["gemma4-assistant.embedding_length_out"] == 64
    assert keys["gemma4-assistant.nextn_predict_layers"] == keys["gemma4-assistant.attention.shared_kv_layers"] == 4


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_an_ordered_vocabulary_is_stored_as_it_is(tmp_path, kind):
    """Of a draft its centroids decide a lot, and are few: they are F32 in any file, also in one that is made of it."""
    path = convert(save_gemma4(tmp_path / "hf", ORDERED), "--type", kind)
    wanted = tiny_gemma4.layout(ORDERED, 1)
    files = [path]
    if kind == "F32":
        files.append(tmp_path / "small.gguf")
        assert hf.requantized(path, files[1]) == 0
    for file in files:
        types, found, keys = hf.types_of(file), hf.tensors_of(file), hf.keys_of(file)
        assert (types[CENTROIDS], types[ORDERING]) == ("F32", "I32")
        assert found[CENTROIDS].tobytes() == wanted[CENTROIDS].tobytes()
        assert np.array_equal(found[ORDERING].ravel(), wanted[ORDERING])
        assert keys["gemma4-assistant.centroid_top_k"] == 4


def test_a_config_that_does_not_say_the_sizes_has_transformers(tmp_path):
    keys = {"use_ordered_embeddings": True, "backbone_hidden_size": 64, "text_config": tiny_gemma4.hf_config(ORDERED)}
    c = read_hparams(Section(keys, "config.json"))
    assert (c.n_centroid, c.n_centroid_used) == (2048, 32)


@pytest.mark.parametrize(("changed", "message"), [
    ({"masked_embedding__token_ordering": np.zeros(384, np.int64)}, "token_ordering is no order of 384 tokens"),
    ({"masked_embedding__token_ordering": np.arange(384, dtype=np.float32)}, "is no order of 384 tokens"),
    ({"masked_embedding__token_ordering": np.arange(383)}, r"token_ordering: expected shape \(384,\)"),
    ({"masked_embedding__token_ordering": None}, "token_ordering is missing"),
    ({"masked_embedding__centroids__weight": None}, "centroids.weight is missing"),
    ({"masked_embedding__centroids__weight": ONES}, r"centroids.weight: expected shape \(24, 32\)"),
])  # fmt: skip
def test_what_is_no_ordered_vocabulary_is_named(tmp_path, capsys, changed, message):
    folder = stored(tmp_path / "hf", ORDERED, **changed)
    assert re.search(message, hf.failure([str(folder), str(tmp_path / "out.gguf")], capsys))


def test_clusters_have_one_size(tmp_path, capsys):
    folder = save_gemma4(tmp_path / "hf", replace(ORDERED, n_centroid=25))
    line = hf.failure([str(folder), str(tmp_path / "out.gguf")], capsys)
    assert "384 tokens do not go into 25 clusters of one size" in line


def test_rows_that_are_no_multiples_of_256_are_q8_0_and_it_is_said(tmp_path, capsys):
    c = replace(EXPERTS, n_embd=256, n_ff=192, n_ff_expert=96)
    path = convert(save_gemma4(tmp_path / "hf", c), "--type", "Q4_K_M")
    types, err = hf.types_of(path), capsys.readouterr().err
    assert types["blk.0.ffn_down.weight"] == types["blk.1.ffn_down_exps.weight"] == "Q8_0"
    assert types["blk.0.ffn_gate_up_exps.weight"] == types["blk.0.attn_q.weight"] == "Q4_K"
    assert types["token_embd.weight"] == "Q6_K" and types["blk.0.ffn_gate_inp.weight"] == "F32"
    for row, name in ((192, "blk.0.ffn_down.weight"), (96, "blk.0.ffn_down_exps.weight")):
        assert re.search(f"rows of {row} are no multiple of 256: Q8_0 instead of .*{name}", err)


def test_what_llama_cpp_leaves_unquantised_loses_little():
    shapes = {"per_layer_model_proj.weight": (256, 256), "per_layer_token_embd.weight": (256, 256)}
    types, fallbacks = choose(MIXES["Q4_K_M"], shapes.items(), tied=True)
    assert types == {"per_layer_model_proj.weight": "Q8_0", "per_layer_token_embd.weight": "Q4_K"} and not fallbacks


def test_flags_of_nextn_heads_do_not_go_with_it(tmp_path, capsys):
    folder = save_gemma4(tmp_path / "hf", DENSE)
    assert hf.run(folder, tmp_path / "out.gguf", "--no-mtp") == 2
    assert "its assistant is a checkpoint: --no-mtp does not go with it" in capsys.readouterr().err


# ---- tokenizers


@pytest.mark.parametrize(("key", "value"), [
    ("normalizer", {"type": "NFC"}),
    ("normalizer", {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}]}),
    ("normalizer", {"type": "Replace", "pattern": {"String": " "}, "content": "_"}),
    ("pre_tokenizer", {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}),
    ("fuse_unk", False),
])  # fmt: skip
def test_another_tokenizer_with_byte_fallback_is_refused(tmp_path, capsys, key, value):
    folder = save_gemma4(tmp_path / "hf", DENSE)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    (tokenizer["model"] if key == "fuse_unk" else tokenizer)[key] = value
    path.write_text(json.dumps(tokenizer))
    line = hf.failure([str(folder), str(tmp_path / "out.gguf")], capsys)
    assert f"key byte_fallback is true and {key} is " in line and "as in Gemma 4" in line


def test_a_merge_that_could_be_split_elsewhere_is_named(tmp_path, capsys):
    folder = save_gemma4(tmp_path / "hf", DENSE)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["merges"].append(["a b", "c"])
    path.write_text(json.dumps(tokenizer))
    assert "merge 'a b c' is not two tokens" in hf.failure([str(folder), str(tmp_path / "out.gguf")], capsys)


# ---- a GGUF as the source


def test_an_assistant_s_gguf_gets_another_type(tmp_path):
    c = replace(ASSISTANT, n_embd=256, n_ff=512, n_embd_out=512)
    plain = convert(save_gemma4(tmp_path / "hf", c), "--type", "F32")
    assert hf.requantized(plain, tmp_path / "small.gguf") == 0
    types, keys = hf.types_of(tmp_path / "small.gguf"), hf.keys_of(tmp_path / "small.gguf")
    assert types["token_embd.weight"] == "Q6_K" and types["nextn.pre_projection.weight"] == "Q4_K"
    assert types["rope_freqs.weight"] == types["blk.0.layer_output_scale.weight"] == "F32"
    wanted = hf.keys_of(plain) | {"general.file_type": 15}
    assert keys == wanted
