"""Checks what probe says of Gemma 4 models and assistants: published ones whose weights are a hole in the file."""

import json
from dataclasses import replace

import gguf
import pytest
import tiny_gemma4
from depth import deeper
from hollow import write_without_weights
from tiny_gemma4 import CASES, ORDERED, PUBLISHED

from luce.bench.oracle_tokenizer import add_gemma4_tokenizer
from luce.cli.terminal import facts_text
from luce.convert.gemma4_layout import CENTROIDS, ORDERING, add_keys, tensor_shapes
from luce.convert.weight_types import is_matrix
from luce.errors import FileError
from luce.files.probe import _layers, probe, what_it_holds
from luce.native import File
from luce.native.structs import EngineParams

KIB = 1024


def hollow(path, c, more=(), arch=None):
    w = gguf.GGUFWriter(path, arch or c.arch)
    add_keys(w, c, "hollow", file_type=0)
    add_gemma4_tokenizer(w, 384)
    shapes = tensor_shapes(c) | dict(more)
    write_without_weights(w, shapes, lambda name: "F16" if is_matrix(name, shapes[name]) else "F32")
    return path


@pytest.fixture
def facts_of(native, tmp_path):
    """Gives facts_of(config, ...), which writes a file and probes it."""

    def facts_of(c, **options):
        with File(hollow(tmp_path / "hollow.gguf", c, **options), native) as file:
            return probe(file)

    return facts_of


@pytest.mark.parametrize(("name", "tensors"), [("31B", 833), ("26B-A4B", 658), ("E2B", 601 - 60)])
def test_the_layout_has_as_many_tensors_as_published_files(name, tensors):
    """Those of E2B have K, V and a norm of the 20 layers that share others', too."""
    assert len(tensor_shapes(PUBLISHED[name])) == tensors


@pytest.mark.parametrize(("name", "of_global", "of_sliding"), [
    ("E2B", 3 * 1 * 512 * 4, 12 * 1 * 256 * 4),
    *deeper(("31B", 80 * KIB, 800 * KIB), ("26B-A4B", 20 * KIB, 200 * KIB), ("E4B", 4 * 2 * 512 * 4, 20 * 2 * 256 * 4)),
])  # fmt: skip
def test_keys_and_values_of_a_position_are_those_of_layers_that_have_them(facts_of, name, of_global, of_sliding):
    found = facts_of(PUBLISHED[name]).layers
    assert (found.kv_bytes_per_position, found.kv_bytes_per_position_swa) == (of_global, of_sliding)


@pytest.mark.parametrize(("name", "of_a_token"), [("12B", 16 * KIB), *deeper(("26B-A4B", 20 * KIB), ("31B", 80 * KIB))])
def test_a_plan_of_a_longer_context_has_cells_of_global_layers_alone(native, tmp_path, name, of_a_token):
    """Sliding layers have as many cells whatever the context is: less than for 3 windows and a chunk."""
    c = PUBLISHED[name]
    with File(hollow(tmp_path / "hollow.gguf", replace(c, n_vocab=384)), native) as file:
        short, long = (
            file.plan_memory("cpu", EngineParams(n_ctx=n, n_chunk=1024, n_rows=8, kv_type="f16")).kv
            for n in (32 * KIB, 100 * KIB)
        )
    assert long - short == 68 * KIB * of_a_token
    of_windows = 4 * sum(c.head_kv(i) * c.head(i) for i in range(c.n_layer) if c.sliding[i])  # bytes of a position
    assert short - 32 * KIB * of_a_token < (3 * c.window + 1024) * of_windows


def test_what_the_31b_is(facts_of):
    facts = facts_of(PUBLISHED["31B"])
    found = facts.layers
    assert (found.global_layers, found.sliding_layers, found.sliding_window) == (10, 50, 1024)
    assert (found.key_length, found.key_length_swa, found.head_count_kv, found.head_count_kv_swa) == (512, 256, 4, 16)
    assert (found.values_are_keys, found.shared_kv_layers, found.per_layer_embedding) == (True, 0, 0)
    assert found.final_logit_softcapping == 30 and found.target_embedding is None
    text = facts_text(facts)
    layers = "10 global of 4 KV heads of 512, 50 sliding of 16 of 256 with a window of 1024, V is K in the global ones"
    assert f"layers          {layers}\n" in text
    assert "F16 K and V     80.0 KiB a position in global layers, 800.0 KiB in sliding\n" in text
    assert "tokenizer       gemma4\n" in text and (facts.kind, facts.architecture) == ("model", "gemma4")


def test_a_token_of_a_mixture_reads_its_experts_and_the_dense_ffn(facts_of):
    c = PUBLISHED["26B-A4B"]
    facts = facts_of(c)
    experts = c.n_layer * 3 * c.n_ff_expert * c.n_embd
    assert (facts.experts, facts.experts_used) == (128, 8)
    assert facts.parameters - facts.active_parameters == experts * (128 - 8) + c.n_layer * 120
    assert 3.7e9 < facts.active_parameters < 4.1e9  # The name says A4B.


def test_a_token_of_a_small_model_reads_a_row_of_its_per_layer_embeddings(facts_of):
    c = PUBLISHED["E2B"]
    facts, table = facts_of(c), c.n_layer * c.n_embd_per_layer
    assert facts.parameters - facts.active_parameters == table * (c.n_vocab - 1)
    assert facts.layers.shared_kv_layers == 20 and not facts.layers.values_are_keys
    assert "the last 20 read others' K and V, each with an embedding of 256\n" in facts_text(facts)


@pytest.mark.long
def test_unused_keys_and_values_are_read_by_no_token(facts_of):
    c = PUBLISHED["E2B"]
    parts = {"attn_k.weight": (256, 1536), "attn_v.weight": (256, 1536), "attn_k_norm.weight": (256,)}
    more = {f"blk.{i}.{part}": shape for i in range(15, 35) for part, shape in parts.items()}
    assert facts_of(c, more=more).active_parameters == facts_of(c).active_parameters


@pytest.mark.parametrize("arch", ["gemma4-assistant", "gemma4_assistant"])
def test_an_assistant_says_what_it_fits(facts_of, native, tmp_path, arch):
    c = PUBLISHED["31B-assistant"]
    facts = facts_of(c, arch=arch)
    assert (facts.kind, facts.supported, facts.memory) == ("assistant", False, None)
    (reason,) = facts.reasons
    assert reason == "an assistant: it drafts for a Gemma 4 model of width 5376, it does not generate alone"
    text = facts_text(facts)
    said = "models with embedding 5,376, vocabulary 262,144 and the KV heads of these layers"
    assert f"drafts for      {said}\n" in text and "supported       beside a model, with --draft: " in text
    assert "1 global of 4 KV heads of 512, 3 sliding of 16 of 256 with a window of 1024, the last 4 read" in text
    with File(tmp_path / "hollow.gguf", native) as file:
        assert what_it_holds(file) == "a Gemma 4 assistant"


def test_forks_have_a_key_of_their_own_for_the_width(native, tmp_path):
    w = gguf.GGUFWriter(tmp_path / "fork.gguf", "gemma4_assistant")
    add_keys(w, PUBLISHED["31B-assistant"], "fork", file_type=0)
    for key in ("embedding_length_out", "nextn_predict_layers"):
        w.kv_data[0].pop(f"gemma4_assistant.{key}")
    w.add_uint32("gemma4_assistant.n_embd_backbone", 5376)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()
    with File(tmp_path / "fork.gguf", native) as file:
        facts = probe(file)
    assert facts.kind == "assistant" and facts.layers.target_embedding == 5376


@pytest.mark.parametrize("names", [(CENTROIDS, ORDERING), ("mtp.centroids.weight", "mtp.token_ordering.weight")])
def test_an_ordered_vocabulary_is_told(native, tmp_path, names):
    """Of a file that does not say how many clusters a draft looks at, the core looks at 32."""
    tensors = tiny_gemma4.layout(ORDERED, 1)
    tensors[names[0]], tensors[names[1]] = tensors.pop(CENTROIDS), tensors.pop(ORDERING)
    path = tiny_gemma4.write(tmp_path / "x.gguf", ORDERED, tensors)
    with File(path, native) as file:
        facts = probe(file)
    assert (facts.layers.clusters, facts.layers.clusters_used) == (24, 4)
    assert ", drafts of 4 of 24 clusters of the vocabulary\n" in facts_text(facts)
    c = replace(ORDERED, n_centroid=96, n_centroid_used=32)
    path = tiny_gemma4.write(tmp_path / "y.gguf", c, tiny_gemma4.layout(c, 1))
    with File(path, native) as file:
        kv = {key: value for key, value in file.kv.items() if key != "gemma4-assistant.centroid_top_k"}
        assert _layers(kv, "gemma4-assistant", file.tensors).clusters_used == 32
        off = kv | {"gemma4-assistant.use_ordered_embeddings": False}
        assert _layers(off, "gemma4-assistant", file.tensors).clusters is None


@pytest.mark.long
def test_json_has_all_of_it(facts_of):
    found = json.loads(json.dumps(facts_of(PUBLISHED["31B"]).as_json()))["layers"]
    assert found["sliding_window"] == 1024 and found["kv_bytes_per_position"] == 80 * KIB


@pytest.mark.parametrize("name", CASES)
def test_tiny_models_are_told_apart(native, tmp_path, name):
    c, _ = CASES[name]
    with File(hollow(tmp_path / "x.gguf", c), native) as file:
        found = probe(file).layers
    kinds = found.global_layers, found.sliding_layers
    assert kinds == (c.sliding.count(False), c.sliding.count(True))
    assert (found.head_count_kv, found.head_count_kv_swa) == (c.n_head_kv, c.n_head_kv_swa)
    assert (found.values_are_keys, found.final_logit_softcapping) == (c.v_is_k, c.softcap)


def without_pattern(path, c, **keys):
    """Writes a model without a pattern of windows, and with other keys."""
    w = gguf.GGUFWriter(path, c.arch)
    add_keys(w, c, "hollow", file_type=0)
    w.kv_data[0].pop("gemma4.attention.sliding_window_pattern")
    for key, value in keys.items():
        w.kv_data[0][f"gemma4.{key.replace('__', '.')}"] = value
    write_without_weights(w, tensor_shapes(c), lambda name: "F32")
    return path


def test_a_file_that_does_not_say_which_layers_slide(native, tmp_path):
    with File(without_pattern(tmp_path / "x.gguf", CASES["dense"][0]), native) as file:
        facts = probe(file)
    assert facts.layers.global_layers is None and facts.layers.kv_bytes_per_position is None
    assert "layers          unknown: the file does not say which of them slide\n" in facts_text(facts)


def test_a_pattern_of_another_model_is_no_error(native, tmp_path):
    number = gguf.GGUFValue(6, gguf.GGUFValueType.UINT32)
    path = without_pattern(tmp_path / "x.gguf", CASES["dense"][0], attention__sliding_window_pattern=number)
    with File(path, native) as file:
        assert probe(file).layers.global_layers is None


@pytest.mark.parametrize(("key", "value"), [
    ("attention__shared_kv_layers", gguf.GGUFValue("x", gguf.GGUFValueType.STRING)),
    ("attention__sliding_window", gguf.GGUFValue(-1, gguf.GGUFValueType.INT32)),
    ("attention__sliding_window_pattern", gguf.GGUFValue([1.5], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.FLOAT32)),
])  # fmt: skip
def test_a_malformed_key_is_named(native, tmp_path, key, value):
    path = without_pattern(tmp_path / "x.gguf", CASES["dense"][0], **{key: value})
    with File(path, native) as file, pytest.raises(FileError, match=key.replace("__", ".")):
        probe(file)


def test_a_window_of_equal_heads_has_one_number_of_them(native, tmp_path):
    c = replace(CASES["dense"][0], n_head_kv=2)
    path = tiny_gemma4.write(tmp_path / "x.gguf", c, tiny_gemma4.layout(c, 1))
    with File(path, native) as file:
        assert (probe(file).layers.head_count_kv, probe(file).layers.head_count_kv_swa) == (2, 2)
