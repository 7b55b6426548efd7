"""Checks what probe says of models, heads, drafters and everything else."""

import json
import re
from dataclasses import replace
from functools import partial

import box_model
import drive
import gguf
import numpy as np
import pytest
import tiny
import tiny_dflash2
from depth import deeper

from luce.cli.terminal import facts_text, size
from luce.errors import FileError
from luce.files.probe import fact, probe
from luce.native import File

KEYS = {
    "kind", "architecture", "name", "file_type", "size_bytes", "parameters", "block_count",
    "nextn_predict_layers", "embedding_length", "context_length", "vocab_size", "experts", "experts_used",
    "active_parameters", "bytes_per_token", "quantization", "tokenizer", "chat_template", "supported",
    "reasons", "notes", "context", "memory", "dflash", "layers", "tower",
}  # fmt: skip


def write(path, architecture="qwen35", keys=(), tensors=()):
    """Writes a GGUF of (key, value) pairs and of (name, F32 array) pairs."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in dict(keys).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value < 0:
            writer.add_int32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, array in tensors:
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def facts_of(native):
    def facts_of(path, **asked):
        with File(path, native) as file:
            return probe(file, **asked)

    return facts_of


ZERO = np.zeros((4, 32), np.float32)


def test_a_model(facts_of, tiny_gguf):
    facts = facts_of(tiny_gguf)
    reader = gguf.GGUFReader(tiny_gguf)
    config = tiny.Config()
    assert (facts.kind, facts.supported, facts.reasons) == ("model", True, [])
    assert (facts.architecture, facts.name, facts.file_type) == ("qwen35", "tiny-tiny", "F32")
    assert facts.size_bytes == tiny_gguf.stat().st_size
    assert facts.parameters == sum(int(tensor.n_elements) for tensor in reader.tensors)
    assert (facts.block_count, facts.nextn_predict_layers) == (config.n_layer, 0)
    assert (facts.embedding_length, facts.vocab_size) == (config.n_embd, config.n_vocab)
    assert facts.quantization["F32"].tensors == len(reader.tensors)
    assert facts.quantization["F32"].bytes == sum(int(tensor.n_bytes) for tensor in reader.tensors)
    assert (facts.tokenizer, facts.chat_template, facts.dflash) == ("gpt2/qwen35", True, None)


def test_memory_grows_with_the_context(facts_of, tiny_gguf):
    small, large = (facts_of(tiny_gguf, ctx=ctx) for ctx in (256, 2048))
    assert (small.context, large.context) == (256, 2048)
    assert large.memory.kv > small.memory.kv
    assert large.memory.weights == small.memory.weights > 0


def test_json_has_the_documented_keys(facts_of, tiny_gguf):
    found = json.loads(json.dumps(facts_of(tiny_gguf).as_json()))
    assert set(found) == KEYS
    assert found["quantization"] == {"F32": {"tensors": 56, "bytes": found["quantization"]["F32"]["bytes"]}}
    parts = {"weights", "kv", "state", "experts", "compute", "other"}
    assert parts | {"total", "device_free", "devices"} == set(found["memory"])
    (only,) = found["memory"]["devices"]
    assert (only["first"], only["n_layers"]) == (0, 4)


def test_a_mix_is_counted_by_type(native, facts_of, tmp_path):
    config = tiny.Config(n_embd=256)
    path = tmp_path / "mix.gguf"
    kinds = {"output.weight": "Q6_K", "token_embd.weight": "Q4_K"}
    tiny.write(path, config, tiny.layout(config, 1), lambda name: kinds.get(name, "F32"),
               quantize=native.quantize)  # fmt: skip
    facts = facts_of(path)
    assert {name: share.tensors for name, share in facts.quantization.items() if name != "F32"} == {
        "Q6_K": 1,
        "Q4_K": 1,
    }
    assert facts.quantization["Q6_K"].bytes == 210 * config.n_vocab


def test_types_that_a_gpu_multiplies_a_row_at_a_time_are_named(native, facts_of, tmp_path):
    config = tiny.Config(n_embd=256, n_ff=256, n_nextn=1)
    kinds = {"blk.0.ffn_down.weight": "IQ2_XS", "blk.1.ffn_down.weight": "IQ3_S",
             "blk.1.ffn_up.weight": "IQ3_S", "output.weight": "IQ4_XS"}  # fmt: skip
    weights, quantize = tiny.layout(config, 1), partial(drive.quantize, native)
    path = tmp_path / "x.gguf"
    tiny.write(path, config, weights, lambda name: kinds.get(name, "F32"), quantize=quantize)
    facts = facts_of(path)
    share = sum(facts.quantization[kind].bytes for kind in ("IQ2_XS", "IQ3_S"))
    share /= sum(each.bytes for each in facts.quantization.values())
    (note,) = facts.as_json()["notes"]
    assert f"on a GPU, ggml multiplies the IQ3_S and IQ2_XS matrices ({share:.0%} of the bytes)" in note
    assert "exact" in note and "drafts gain little" in note
    assert facts.supported and f"\nnote            {note}" in facts_text(facts)


MIXTURE = tiny.Config(n_embd=256, n_expert=8, n_expert_used=2, n_ff_expert=256, n_ff_shared=256, n_nextn=1)


@pytest.mark.parametrize(
    ("part", "kind"),
    [("^output", "Q4_K"), ("^output", "IQ4_XS"), ("^token_embd", "IQ1_S"), ("exps", "IQ3_S")],
)
def test_what_a_gpu_multiplies_as_others_looks_up_or_refuses_has_no_note(
    native, facts_of, tmp_path, part, kind
):
    weights, quantize = tiny.layout(MIXTURE, 1), partial(drive.quantize, native)
    path = tmp_path / "x.gguf"
    type_of = lambda name: kind if re.search(part, name) else "F32"  # noqa: E731
    tiny.write(path, MIXTURE, weights, type_of, quantize=quantize)
    facts = facts_of(path)
    assert kind in facts.quantization and facts.notes == [] and "note" not in facts_text(facts)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tied", [*deeper(False), True])
def test_a_mixture_says_what_a_token_reads(facts_of, tmp_path, tied, fused):
    """It is all of the trunk but the experts that are not used, and the embedding where it is looked up
    alone."""
    config = replace(MIXTURE, tied=tied, fused_experts=fused)
    path = tiny.write(tmp_path / "x.gguf", config, tiny.layout(config, 1), "Q8_0")
    facts, read = facts_of(path), 0
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name == "token_embd.weight":
            read += int(tensor.n_elements) if tied else config.n_embd
        elif not tensor.name.startswith("blk.4."):
            read += int(tensor.n_elements) // (4 if "_exps" in tensor.name else 1)
    assert (facts.experts, facts.experts_used, facts.active_parameters) == (8, 2, read)
    assert 1.06 * read < facts.bytes_per_token < 1.2 * read  # 32 weights take 34 bytes, and some are F32.
    text = facts_text(facts)
    assert "\nexperts         8, of these 2 for a token\n" in text
    assert f"\na token reads   {size(facts.bytes_per_token)}, {read:,} parameters\n" in text


def test_a_dense_model_reads_all_of_its_trunk(facts_of, tiny_gguf):
    facts, config = facts_of(tiny_gguf), tiny.Config()
    lookup = (config.n_vocab - 1) * config.n_embd
    assert (facts.experts, facts.experts_used) == (None, None)
    assert facts.active_parameters == facts.parameters - lookup
    assert facts.bytes_per_token == 4 * facts.active_parameters
    assert "experts" not in facts_text(facts)


def test_what_is_no_model_reads_nothing_for_a_token(facts_of):
    facts = facts_of(box_model.DRAFTER)
    assert (facts.active_parameters, facts.bytes_per_token) == (None, None)
    assert "a token reads" not in facts_text(facts)


def test_the_file_type_is_what_the_key_says(facts_of, tmp_path):
    tensors = [("blk.0.x", ZERO)]
    for number, name in ((15, "Q4_K_M"), (18, "Q6_K"), (32, "BF16"), (0, "F32"), (7, "Q8_0"), (30, "IQ4_XS")):
        path = write(tmp_path / f"{number}.gguf", keys={"general.file_type": number}, tensors=tensors)
        assert facts_of(path).file_type == name


@pytest.mark.parametrize("keys", [{}, {"general.file_type": 999}])
def test_without_a_known_file_type_the_largest_share_counts(facts_of, tmp_path, keys):
    half = np.zeros((64, 64), np.float16)
    path = write(tmp_path / "x.gguf", keys=keys, tensors=[("blk.0.a", ZERO), ("blk.0.b", half)])
    assert facts_of(path).file_type == "F16"


def test_a_head_is_not_a_model(facts_of, tmp_path):
    keys = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    path = write(tmp_path / "head.gguf", keys=keys, tensors=[("blk.4.nextn.eh_proj.weight", ZERO)])
    facts = facts_of(path)
    assert (facts.kind, facts.supported, facts.memory) == ("head", False, None)
    assert "head only" in facts.reasons[0] and "--" not in facts.reasons[0]
    assert "\nsupported       beside a model, with --mtp-gguf: head only" in facts_text(facts)


def test_a_trunk_with_a_head_is_a_model(facts_of, tmp_path):
    keys = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    path = write(tmp_path / "both.gguf", keys=keys, tensors=[("blk.0.x", ZERO), ("blk.4.x", ZERO)])
    facts = facts_of(path)
    assert (facts.kind, facts.nextn_predict_layers) == ("model", 1)


DRAFTER = {
    "block_count": 5,
    "block_size": 16,
    "target_layers": [2, 17, 32, 47, 62],
    "attention.sliding_window": 2048,
    "attention.sliding_window_pattern": [True, False],
    "attention.causal": False,
}


@pytest.mark.parametrize(
    "prefix",
    ["dflash", "dflash-draft", "qwen35-dflash-draft.dflash", "gemma4-dflash-draft"],
)
def test_a_drafter_tells_its_settings(facts_of, tmp_path, prefix):
    keys = {f"{prefix}.{key}": value for key, value in DRAFTER.items()}
    keys["tokenizer.ggml.mask_token_id"] = 248070
    path = write(tmp_path / "d.gguf", prefix.split(".")[0], keys, [("blk.0.attn_q.weight", ZERO)])
    facts = facts_of(path)
    assert (facts.kind, facts.supported) == ("drafter", False)
    assert "drafts for a target" in facts.reasons[0]
    assert json.loads(json.dumps(facts.as_json()))["dflash"] == {
        "block_size": 16,
        "drafts": 15,
        "target_layers": [2, 17, 32, 47, 62],
        "mask_token_id": 248070,
        "sliding_window": 2048,
        "sliding_window_pattern": [True, False],
        "causal": False,
        "causal_pattern": None,
        "final_logit_softcapping": None,
        "embedding_scale": None,
        "target_architecture": prefix.split("-")[0] if "-dflash-draft" in prefix else None,
        "target_embedding": None,
        "target_vocabulary": None,
        "target_blocks": 62,
        "kv_bytes_per_position": None,
        "kind": "DFlash",
        "sample_from_anchor": False,
        **dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "markov_rank",
                         "draft_vocabulary", "logit_scale")),
        **dict.fromkeys(("confidence_head", "attention_sinks", "own_embedding", "own_output"), False),
    }


def drafter_of(tmp_path, keys, tensors=(), n_vocab=2048):
    """Writes the keys of a drafter of E 32 with these tensors, by GGUF's names and numpy's shapes."""
    kv = {f"dflash.{key}": value for key, value in DRAFTER.items()} | {"dflash.embedding_length": 32}
    kv |= {"dflash.vocab_size": n_vocab} | {f"dflash.{key}": value for key, value in keys.items()}
    made = [(name, np.zeros(shape, np.int64 if name == "d2t" else np.float32)) for name, shape in tensors]
    return write(tmp_path / "d.gguf", "dflash", kv, [("blk.0.attn_q.weight", ZERO), *made])


def test_a_dflash2_drafter_says_what_it_is(facts_of, tmp_path):
    keys = {"block_size": 8, "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16,
            "sample_from_anchor": False, "logit_scale": 0.5}  # fmt: skip
    facts = facts_of(drafter_of(tmp_path, keys))
    found = facts.as_json()["dflash"]
    assert (found["kind"], found["drafts"], found["sample_from_anchor"]) == ("DFlash2", 7, False)
    assert {key: found[key] for key in keys} == keys
    text = facts_text(facts)
    assert ("drafter         DFlash2 with convolutions of 2 taps in groups of 16 and a selector of rank 256 over the "
            "top 16, 7 drafts of a block of 8\n") in text  # fmt: skip
    assert "drafts for      models with embedding 32, vocabulary 2,048, 62 blocks or more\n" in text


MARKOV = [("markov_w1.weight", (2048, 8)), ("markov_w2.weight", (2048, 8))]


@pytest.mark.parametrize(("keys", "drafts"), [({}, 7), ({"sample_from_anchor": True}, 7),
                                              ({"sample_from_anchor": False}, 6)])  # fmt: skip
def test_a_markov_head_drafts_with_the_anchors_row_unless_the_file_says_otherwise(
    facts_of, tmp_path, keys, drafts
):
    facts = facts_of(drafter_of(tmp_path, {"block_size": 7} | keys, MARKOV))
    assert (facts.dflash.kind, facts.dflash.markov_rank, facts.dflash.drafts) == ("DSpark", 8, drafts)
    assert f"DSpark with a Markov head of rank 8, {drafts} drafts of a block of 7\n" in facts_text(facts)


def test_a_dspark_drafter_says_all_it_has(facts_of, tmp_path):
    reduced = [MARKOV[0], ("markov_w2.weight", (1000, 8)), ("output.weight", (1000, 32)), ("d2t", (1000,)),
               ("conf_proj.weight", (1, 40)), ("conf_proj.bias", (1,)), ("blk.0.attn_sinks.weight", (4,)),
               ("token_embd.weight", (2048, 32))]  # fmt: skip
    facts = facts_of(drafter_of(tmp_path, {"block_size": 8, "sample_from_anchor": True}, reduced))
    assert ("DSpark with a Markov head of rank 8, a confidence head and attention sinks, 8 drafts of a block of 8, "
            "among 1,000 tokens\n") in facts_text(facts)  # fmt: skip
    found = facts.as_json()["dflash"]
    assert (found["draft_vocabulary"], found["own_embedding"], found["own_output"]) == (1000, True, True)
    assert found["confidence_head"] and found["attention_sinks"] and found["target_vocabulary"] == 2048


@pytest.mark.parametrize("key", ["conv_kernel_size", "selector_rank", "selector_top_k", "block_size", "markov_rank"])
def test_a_drafters_negative_size_is_named(facts_of, tmp_path, key):
    with pytest.raises(FileError, match=f"dflash.{key}"):
        facts_of(drafter_of(tmp_path, {key: -1}))


def test_what_does_not_say_what_it_fits_is_said_to_be_unknown(facts_of, tmp_path):
    path = write(tmp_path / "d.gguf", "dflash", {}, [("blk.0.attn_q.weight", ZERO)])
    text = facts_text(facts_of(path))
    assert "drafter         DFlash, of a block of unknown size\n" in text
    assert "drafts for      unknown: the file does not say\n" in text


@pytest.mark.parametrize("name", tiny_dflash2.CASES)
def test_a_drafter_tells_how_many_drafts_its_blocks_make(facts_of, tmp_path, name):
    """They are as many as the core makes."""
    case = tiny_dflash2.CASES[name]
    path = tiny_dflash2.write(tmp_path / "d.gguf", case, tiny_dflash2.weights(case))
    dflash = facts_of(path).dflash
    assert (dflash.block_size, dflash.drafts) == (case.base.drafter.block_size, case.n_draft)


def test_the_drafter_of_the_box_says_what_it_fits(facts_of):
    dflash = facts_of(box_model.DRAFTER).dflash
    assert (dflash.block_size, dflash.mask_token_id, dflash.target_layers) == (16, 4095, [2, 5, 7, 10])
    assert (dflash.target_embedding, dflash.target_vocabulary, dflash.target_blocks) == (256, 4096, 10)
    assert dflash.kv_bytes_per_position == 4 * 2 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("keys", "tensors"),
    [
        ({}, []),
        ({"general.type": "adapter"}, [("blk.0.x", ZERO)]),
        ({"general.type": "mmproj"}, [("v", ZERO)]),
    ],
)
def test_a_file_without_a_model_is_something_else(facts_of, tmp_path, keys, tensors):
    facts = facts_of(write(tmp_path / "x.gguf", keys=keys, tensors=tensors))
    assert (facts.kind, facts.supported) == ("other", False)


def test_another_architecture_is_named(facts_of, tmp_path):
    facts = facts_of(write(tmp_path / "x.gguf", "llama", tensors=[("blk.0.x", ZERO)]))
    assert (facts.kind, facts.supported) == ("model", False)
    assert "llama" in facts.reasons[0]


def test_a_model_that_lacks_a_key_says_which(facts_of, tmp_path):
    facts = facts_of(write(tmp_path / "x.gguf", tensors=[("blk.0.x", ZERO)]))
    assert not facts.supported
    assert "qwen35." in facts.reasons[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.name", 3),
        ("general.file_type", "Q4_K"),
        ("qwen35.context_length", "long"),
        ("qwen35.context_length", [1, 2]),
        ("qwen35.block_count", 1.5),
        ("tokenizer.ggml.model", [1]),
        ("tokenizer.ggml.tokens", 5),
    ],
)
def test_a_key_of_the_wrong_type_is_named(facts_of, tmp_path, key, value):
    path = write(tmp_path / "x.gguf", keys={key: value}, tensors=[("blk.0.x", ZERO)])
    with pytest.raises(FileError, match=key):
        facts_of(path)


@pytest.mark.parametrize("name", ["context_length", "block_count", "expert_count", "nextn_predict_layers"])
def test_a_negative_count_is_named(facts_of, tmp_path, name):
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_int32(f"qwen35.{name}", -5)
    writer.add_tensor("blk.0.x", ZERO)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(FileError, match=f"key qwen35.{name}: expected a number of at least 0, found -5"):
        facts_of(path)


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dflash.target_layers", [1.0, NAN]),
        ("dflash.target_layers", [INFINITE]),
        ("dflash.target_layers", [0.5]),
        ("dflash.attention.sliding_window_pattern", [NAN]),
        ("dflash.final_logit_softcapping", NAN),
        ("dflash.embedding_scale", -INFINITE),
    ],
)
def test_numbers_that_are_none_are_an_error_that_names_the_key(facts_of, tmp_path, key, value):
    path = write(tmp_path / "d.gguf", "dflash", {key: value}, [("blk.0.x", ZERO)])
    with pytest.raises(FileError, match=f"key {key}: expected .*, found "):
        facts_of(path)


def test_a_fact_may_have_a_default_but_not_another_type():
    kv = {"an int": 3, "a bool": True, "a text": "x", "a list": ["x"], "numbers": np.arange(3).data}
    assert fact(kv, "an int", int) == 3
    assert fact(kv, "an int", float) == 3.0
    assert fact(kv, "none", int, 7) == 7
    with pytest.raises(FileError, match="none is missing"):
        fact(kv, "none", int)
    for key, kind in (
        ("a bool", int),
        ("an int", bool),
        ("a text", list),
        ("numbers", list),
        ("a list", str),
    ):
        with pytest.raises(FileError, match=f"{key}: expected .*, found "):
            fact(kv, key, kind)
