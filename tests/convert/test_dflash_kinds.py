"""Runs `luce convert` on DFlash2 and DSpark drafters, in each layout that is published, by their configs' spelling.

What is written is compared with what llama.cpp reads: names, dims (fastest first) and keys are stated here.
"""

import json
import pickle

import dflash_checkpoint
import gguf
import hf_checkpoint as hf
import numpy as np
import pytest
import tiny
from depth import deeper, deeper_but
from dflash_checkpoint import FF, GGUF_NAMES, HEADS, KV, LAYERS, VOCAB, D, E, save, weights

from luce.convert.cli import is_drafter
from luce.convert.hf_dflash import target_ids
from luce.files.probe import probe
from luce.native import File

target = dflash_checkpoint.target

R, TOP, TAPS, GROUP, MARKOV = 8, 5, 2, 16, 8
SLIDING, FULL = "sliding_attention", "full_attention"

# What the layers of all of them are. A copy of this is a config's top level, or lies in transformer_layer_config.
LAYER_KEYS = {
    "model_type": "qwen3", "hidden_size": E, "intermediate_size": FF, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": D, "hidden_act": "silu",
    "attention_bias": False, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "vocab_size": VOCAB,
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}}

ZLAB = LAYER_KEYS | ROPE | {
    "architectures": ["DFlash2DraftModel"], "num_target_layers": 8, "is_causal": False,
    "layer_types": [SLIDING] * LAYERS, "sliding_window": 64, "use_sliding_window": True,
    "tie_word_embeddings": False,
    "dflash_config": {
        "block_size": 8, "conv_group_size": GROUP, "conv_kernel_size": TAPS, "mask_token_id": 300,
        "selector_rank": R, "selector_top_k": TOP, "target_layer_ids": [1, 4, 6],
    },
}  # fmt: skip
SPECULATORS_2 = {
    "architectures": ["DFlash2DraftModel"], "speculators_model_type": "dflash2", "speculators_version": "0.9.0",
    "speculators_config": {"algorithm": "dflash2", "default_proposal_method": "greedy", "proposal_methods": [
        {"proposal_type": "greedy", "speculative_tokens": 7}]},
    "transformer_layer_config": LAYER_KEYS | ROPE | {"layer_types": [SLIDING, SLIDING, FULL], "sliding_window": 64,
                                                     "use_sliding_window": True},
    "aux_hidden_state_layer_ids": [2, 5, 7], "block_size": 8, "mask_token_id": 300, "draft_vocab_size": VOCAB,
    "target_hidden_size": None, "conv_kernel_size": TAPS, "conv_group_size": GROUP, "selector_rank": R,
    "selector_top_k": TOP, "draft_ffn_type": "dense",
}  # fmt: skip
RADIXARK = LAYER_KEYS | {
    "architectures": ["DSparkDraftModel"], "num_target_layers": 8, "layer_types": [FULL] * LAYERS, "block_size": 7,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7, "factor": 32.0,
                        "original_max_position_embeddings": 8192},
    "sliding_window": None, "use_sliding_window": False,
    "dflash_config": {
        "attention_mode": "gqa", "projector_type": "dspark", "markov_head_type": "vanilla", "markov_rank": MARKOV,
        "enable_confidence_head": True, "confidence_head_with_markov": True, "confidence_head_alpha": 1.0,
        "mask_token_id": 300, "target_layer_ids": [1, 4, 6],
    },
}  # fmt: skip
DEEPSEEK = LAYER_KEYS | ROPE | {
    "architectures": ["Qwen3DSparkModel"], "block_size": 7, "num_target_layers": 8, "target_layer_ids": [-1, 3, 6],
    "mask_token_id": 300, "markov_rank": MARKOV, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True, "num_anchors": 512, "tie_word_embeddings": False,
    "layer_types": [FULL] * LAYERS,
}  # fmt: skip
REDHAT = {
    "architectures": ["Qwen3DSparkModel"], "speculators_model_type": "dspark", "sample_from_anchor": True,
    "transformer_layer_config": LAYER_KEYS | ROPE | {"layer_types": [SLIDING] * LAYERS, "sliding_window": 64},
    "aux_hidden_state_layer_ids": [2, 5, 7], "block_size": 8, "mask_token_id": 300, "draft_vocab_size": 40,
    "markov_rank": MARKOV, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True, "sliding_window_non_causal": False,
}  # fmt: skip
IDS = np.sort(np.random.default_rng(3).permutation(VOCAB)[:40]).astype(np.int64)


def draw(*shape, seed=9):
    return np.random.default_rng([seed, *shape]).uniform(-1, 1, shape).astype(np.float32)


def convolutions():
    made = {}
    for i in range(LAYERS):
        for part in ("attention_conv", "mlp_conv"):
            seed = 2 * i + (part == "mlp_conv")
            made[f"layers.{i}.{part}.base_kernel"] = draw(2, TAPS, E, seed=seed)
            projection = draw(2 * TAPS * E // GROUP, E, seed=seed)
            made[f"layers.{i}.{part}.kernel_projection.weight"] = projection
    return made


def selector():
    of = "candidate_selector."
    return {
        of + "predecessor_codebook": draw(VOCAB, R), of + "successor_codebook": draw(VOCAB, R, seed=10),
        of + "hidden_projection.weight": draw(R, E),
    }  # fmt: skip


def markov(vocab=VOCAB, prefix="markov_head."):
    return {f"{prefix}markov_w1.weight": draw(VOCAB, MARKOV), f"{prefix}markov_w2.weight": draw(vocab, MARKOV, seed=10)}


def confidence(name="confidence_head.proj"):
    return {f"{name}.weight": draw(1, E + MARKOV), f"{name}.bias": draw(1)}


def own_ends(vocab=VOCAB):
    return {"embed_tokens.weight": draw(VOCAB, E), "lm_head.weight": draw(vocab, E, seed=10)}


DFLASH2 = weights() | convolutions() | selector()
REDUCED = own_ends(40) | {"d2t": IDS - np.arange(40), "t2d": np.isin(np.arange(VOCAB), IDS).astype(np.uint8)}
CHECKPOINTS = {
    "z-lab": (ZLAB, DFLASH2),
    "speculators": (SPECULATORS_2, DFLASH2 | own_ends()),
    "RadixArk": (RADIXARK, weights() | markov() | confidence()),
    "deepseek-ai": (DEEPSEEK, weights() | markov() | confidence() | own_ends()),
    "RedHatAI": (REDHAT, weights() | markov(40) | confidence() | REDUCED),
}


def backbone(made):
    """Returns the tensors that DFlash has too, by GGUF's names."""
    top = {"fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm", "embed_tokens": "token_embd",
           "lm_head": "output"}  # fmt: skip
    found = {f"{of}.weight": made[f"{name}.weight"] for name, of in top.items() if f"{name}.weight" in made}
    for i in range(LAYERS):
        for name, of in GGUF_NAMES.items():
            found[f"blk.{i}.{of}.weight"] = made[f"layers.{i}.{name}.weight"]
    return found


def convert(tmp_path, target, config, made, *options):
    return dflash_checkpoint.convert(save(tmp_path, config, made), target, *options)


def failure(tmp_path, target, capsys, config, made):
    folder = save(tmp_path, config, made)
    return hf.failure([str(folder), str(tmp_path / "out.gguf"), "--target", str(target)], capsys)


def changed(config, **changes):
    """Returns a config with keys changed or removed (None); `inside` changes those of dflash_config, and `layers`
    those of transformer_layer_config."""
    config = json.loads(json.dumps(config))
    places = {"inside": config.get("dflash_config"), "layers": config.get("transformer_layer_config")}
    of_places = {name: changes.pop(name, {}) for name in places}
    for place, values in [*((places[name], values) for name, values in of_places.items()), (config, changes)]:
        for key, value in values.items():
            place.pop(key, None)
            if value is not None:
                place[key] = value
    return config


def dims_of(path):
    """Maps names to dims as ggml has them, fastest first."""
    with File(path) as file:
        return {tensor.name: tensor.shape for tensor in file.tensors}


def dflash_keys(path):
    found = hf.keys_of(path)
    return {key.removeprefix("dflash."): value for key, value in found.items() if key.startswith("dflash.")}


SIZES = {
    "block_count": LAYERS, "context_length": 4096, "embedding_length": E, "feed_forward_length": FF,
    "attention.head_count": HEADS, "attention.head_count_kv": KV, "attention.key_length": D,
    "attention.value_length": D, "attention.layer_norm_rms_epsilon": float(np.float32(1e-6)),
    "rope.freq_base": 1e7, "rope.dimension_count": D, "vocab_size": VOCAB,
    "rope.dimension_sections": [D // 2, 0, 0, 0],
}  # fmt: skip
OF_DFLASH2 = {"conv_kernel_size": TAPS, "conv_group_size": GROUP, "selector_rank": R, "selector_top_k": TOP}
WINDOW = {"attention.sliding_window": 64}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 8192}
KEYS = {
    "z-lab": OF_DFLASH2 | WINDOW | {
        "block_size": 8, "target_layers": [2, 5, 7], "sample_from_anchor": False, "attention.causal": False,
        "attention.sliding_window_pattern": [True] * LAYERS},
    "speculators": OF_DFLASH2 | WINDOW | {
        "block_size": 8, "target_layers": [2, 5, 7], "sample_from_anchor": False, "attention.causal": False,
        "attention.sliding_window_pattern": [True, True, False]},
    "RadixArk": YARN | {
        "block_size": 7, "target_layers": [2, 5, 7], "sample_from_anchor": True, "attention.causal": False,
        "has_confidence_head": True},
    "deepseek-ai": {
        "block_size": 7, "target_layers": [0, 4, 7], "sample_from_anchor": True, "attention.causal": False,
        "has_confidence_head": True},
    "RedHatAI": WINDOW | {
        "block_size": 8, "target_layers": [2, 5, 7], "sample_from_anchor": True, "attention.causal": True,
        "attention.sliding_window_pattern": [True] * LAYERS, "has_confidence_head": True},
}  # fmt: skip
CONVOLVES = "DFlash2 with convolutions of 2 taps in groups of 16 and a selector of rank 8 over the top 5"
SAID = {
    "z-lab": f"{CONVOLVES}, 7 drafts of a block of 8",
    "speculators": f"{CONVOLVES}, 7 drafts of a block of 8",
    "RadixArk": "DSpark with a Markov head of rank 8 and a confidence head, 7 drafts of a block of 7",
    "deepseek-ai": "DSpark with a Markov head of rank 8 and a confidence head, 7 drafts of a block of 7",
    "RedHatAI": "DSpark with a Markov head of rank 8 and a confidence head, 8 drafts of a block of 8, among 40 tokens",
}  # fmt: skip


# ---- what is written


@pytest.mark.parametrize("layout", CHECKPOINTS)
def test_every_key_is_as_llama_cpp_reads_it(tmp_path, target, layout):
    path = convert(tmp_path, target, *CHECKPOINTS[layout])
    assert dflash_keys(path) == SIZES | KEYS[layout]
    keys = hf.keys_of(path)
    assert keys["general.architecture"] == "dflash" and keys["tokenizer.ggml.mask_token_id"] == 300


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
def test_tensors_of_dflash2(tmp_path, target, layout):
    config, made = CHECKPOINTS[layout]
    path = convert(tmp_path, target, config, made, "--type", "F32")
    found, wanted, dims = hf.tensors_of(path), backbone(made), dims_of(path)
    for i in range(LAYERS):
        for part, of in (("attention_conv", "attn"), ("mlp_conv", "ffn")):
            wanted[f"blk.{i}.{of}_conv_base"] = made[f"layers.{i}.{part}.base_kernel"]
            wanted[f"blk.{i}.{of}_conv_proj.weight"] = made[f"layers.{i}.{part}.kernel_projection.weight"]
            assert dims[f"blk.{i}.{of}_conv_base"] == (E, TAPS, 2)
            assert dims[f"blk.{i}.{of}_conv_proj.weight"] == (E, 2 * TAPS * E // GROUP)
    wanted["selector_predecessor.weight"] = made["candidate_selector.predecessor_codebook"]
    wanted["selector_successor.weight"] = made["candidate_selector.successor_codebook"]
    wanted["selector_hidden.weight"] = made["candidate_selector.hidden_projection.weight"]
    assert dims["selector_predecessor.weight"] == dims["selector_successor.weight"] == (R, VOCAB)
    assert dims["selector_hidden.weight"] == (E, R)
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("layout", ["RadixArk", "deepseek-ai", "RedHatAI"])
def test_tensors_of_dspark(tmp_path, target, layout):
    config, made = CHECKPOINTS[layout]
    path = convert(tmp_path, target, config, made, "--type", "F32")
    found, dims, drafted = hf.tensors_of(path), dims_of(path), 40 if layout == "RedHatAI" else VOCAB
    wanted = backbone(made) | {
        "markov_w1.weight": made["markov_head.markov_w1.weight"],
        "markov_w2.weight": made["markov_head.markov_w2.weight"],
        "conf_proj.weight": made["confidence_head.proj.weight"],
        "conf_proj.bias": made["confidence_head.proj.bias"],
    }
    wanted |= {"d2t": IDS} if layout == "RedHatAI" else {}
    assert found.keys() == wanted.keys(), "t2d follows from d2t"
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    assert dims["markov_w1.weight"] == (MARKOV, VOCAB) and dims["markov_w2.weight"] == (MARKOV, drafted)
    assert dims["conf_proj.weight"] == (E + MARKOV, 1) and dims["conf_proj.bias"] == (1,)
    assert ("token_embd.weight" in found) == (layout != "RadixArk")
    if drafted == 40:
        assert dims["output.weight"] == (E, 40) and hf.types_of(path)["d2t"] == "I64"


@pytest.mark.parametrize("layout", deeper_but(CHECKPOINTS, "z-lab", "deepseek-ai"))
@pytest.mark.parametrize("kind", ["Q4_K_M", *deeper("Q8_0")])
def test_small_tensors_stay_f32(tmp_path, target, layout, kind):
    types = hf.types_of(convert(tmp_path, target, *CHECKPOINTS[layout], "--type", kind))
    small = {name for name in types if "conv_base" in name or "conf_proj" in name or "norm" in name}
    assert {types[name] for name in small} == {"F32"}
    rest = {name for name in types if name not in small and name != "d2t"}
    assert not {types[name] for name in rest} & {"F32"}


@pytest.mark.parametrize("layout", CHECKPOINTS)
def test_probe_says_what_it_is_and_which_models_it_fits(tmp_path, target, layout):
    with File(convert(tmp_path, target, *CHECKPOINTS[layout])) as file:
        facts = probe(file)
    assert facts.kind == "drafter" and facts.dflash.what == SAID[layout]
    assert facts.dflash.fits == f"models with embedding {E}, vocabulary {VOCAB}, 7 blocks or more"
    found = facts.as_json()["dflash"]
    assert (found["target_embedding"], found["target_vocabulary"], found["target_blocks"]) == (E, VOCAB, 7)
    assert found["drafts"] == {"RadixArk": 7, "deepseek-ai": 7, "RedHatAI": 8}.get(layout, 7)


@pytest.mark.parametrize("layout", ["z-lab", "RadixArk"])
def test_a_projector_says_what_a_drafter_is_that_is_named_as_those_before_it(tmp_path, target, layout):
    config, made = CHECKPOINTS[layout]
    projector = {"z-lab": "dflash2", "RadixArk": "dspark"}[layout]
    older = changed(config, architectures=["DFlashDraftModel"], inside={"projector_type": projector})
    with File(convert(tmp_path, target, older, made)) as file:
        assert probe(file).dflash.what == SAID[layout]


@pytest.mark.parametrize("layout", CHECKPOINTS)
def test_a_checkpoint_of_each_layout_is_taken_for_a_drafter(tmp_path, layout):
    assert is_drafter(save(tmp_path, *CHECKPOINTS[layout]))


@pytest.mark.parametrize("layout", ["z-lab", "RedHatAI"])
def test_a_gguf_of_it_takes_another_type(tmp_path, target, layout):
    made = convert(tmp_path, target, *CHECKPOINTS[layout], "--type", "F32")
    assert hf.run(str(made), str(tmp_path / "q8.gguf"), "--type", "Q8_0") == 0
    assert hf.types_of(tmp_path / "q8.gguf") == hf.types_of(
        dflash_checkpoint.convert(save(tmp_path, *CHECKPOINTS[layout]), target, "--type", "Q8_0", "--force")
    )
    assert dflash_keys(tmp_path / "q8.gguf") == SIZES | KEYS[layout]


@pytest.mark.parametrize(
    "name", ["markov_gate.weight", "markov_w2.scale", "blk.0.post_ffw_norm.weight", "rope_freqs.weight"]
)
def test_a_gguf_with_more_than_luce_knows_keeps_its_type(tmp_path, capsys, name):
    writer = gguf.GGUFWriter(tmp_path / "d.gguf", "dflash")
    for tensor in ("blk.0.attn_q.weight", "markov_w1.weight", "markov_w2.weight", name):
        writer.add_tensor(tensor, draw(4, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    said = hf.failure([str(tmp_path / "d.gguf"), str(tmp_path / "out.gguf")], capsys)
    assert f"tensor {name}: luce does not implement drafters that have it" in said


def test_names_of_other_tools_are_the_same_tensors(tmp_path, target):
    plain = weights() | markov() | confidence()
    other = weights() | markov(prefix="") | confidence("confidence_proj")
    (tmp_path / "other").mkdir()
    found = convert(tmp_path, target, RADIXARK, plain).read_bytes()
    assert convert(tmp_path / "other", target, RADIXARK, other).read_bytes() == found


@pytest.mark.parametrize(("layout", "left_out"), [("speculators", ["embed_tokens.weight", "lm_head.weight"]),
                                                  ("RedHatAI", ["embed_tokens.weight"])])  # fmt: skip
def test_what_is_the_targets_may_be_left_out(tmp_path, target, layout, left_out):
    """speculators saves no embedding, and a head only of a reduced vocabulary."""
    config, made = CHECKPOINTS[layout]
    made = {name: x for name, x in made.items() if name not in left_out}
    found = hf.tensors_of(convert(tmp_path, target, config, made))
    assert "token_embd.weight" not in found and ("output.weight" in found) == (layout == "RedHatAI")


def test_what_speculators_keeps_of_the_target_is_left_out(tmp_path, target):
    config, made = CHECKPOINTS["speculators"]
    more = {"verifier_norm.weight": draw(E), "verifier_lm_head.weight": draw(VOCAB, E)}
    assert not any("verifier" in name for name in dims_of(convert(tmp_path, target, config, made | more)))


def test_attention_sinks_of_dspark(tmp_path, target):
    sinks = {f"layers.{i}.self_attn.sinks": draw(HEADS, seed=i) for i in range(LAYERS)}
    config, made = CHECKPOINTS["RadixArk"]
    path = convert(tmp_path, target, config, made | sinks)
    found = hf.tensors_of(path)
    for i in range(LAYERS):
        assert np.array_equal(found[f"blk.{i}.attn_sinks.weight"], sinks[f"layers.{i}.self_attn.sinks"])
        assert hf.types_of(path)[f"blk.{i}.attn_sinks.weight"] == "F32"


def test_scales_and_cap_of_dflash2(tmp_path, target):
    scales = {"input_embedding_scale": 16.0, "output_multiplier": 0.1875, "final_logit_softcapping": 20.0}
    keys = dflash_keys(convert(tmp_path, target, changed(ZLAB, inside=scales), DFLASH2))
    assert (keys["embedding_scale"], keys["logit_scale"], keys["final_logit_softcapping"]) == (16.0, 0.1875, 20.0)


# ---- how rows and drafts are aligned


@pytest.mark.parametrize(
    ("layout", "said", "drafts"),
    [("z-lab", None, 7), ("z-lab", True, 8), ("z-lab", False, 7),
     ("speculators", None, 7), ("speculators", True, 8),
     ("RadixArk", None, 7), ("RadixArk", False, 6), ("RadixArk", True, 7),
     ("deepseek-ai", None, 7), ("deepseek-ai", False, 6),
     ("RedHatAI", None, 7), ("RedHatAI", True, 8), ("RedHatAI", False, 7)],
)  # fmt: skip
def test_the_anchors_row_drafts_as_the_layout_has_it(tmp_path, target, layout, said, drafts):
    """Where the key is missing it does in DSpark of its authors, and in nothing else."""
    config, made = CHECKPOINTS[layout]
    path = convert(tmp_path, target, changed(config, sample_from_anchor=said), made)
    block = 7 if layout in ("RadixArk", "deepseek-ai") else 8
    assert dflash_keys(path)["sample_from_anchor"] == (drafts == block)
    with File(path) as file:
        assert probe(file).dflash.drafts == drafts


def test_the_key_may_lie_in_dflash_config(tmp_path, target):
    config = changed(RADIXARK, inside={"sample_from_anchor": False})
    assert dflash_keys(convert(tmp_path, target, config, CHECKPOINTS["RadixArk"][1]))["sample_from_anchor"] is False


@pytest.mark.parametrize(
    ("layout", "said", "causal"),
    [("speculators", None, False), ("speculators", True, False), ("speculators", False, [True, True, False]),
     ("RedHatAI", None, True), ("RedHatAI", False, True), ("RedHatAI", True, False)],
)  # fmt: skip
def test_windows_of_speculators_are_causal_unless_they_say_otherwise(tmp_path, target, layout, said, causal):
    config, made = CHECKPOINTS[layout]
    keys = dflash_keys(convert(tmp_path, target, changed(config, sliding_window_non_causal=said), made))
    found = keys["attention.causal_pattern"] if isinstance(causal, list) else keys["attention.causal"]
    assert found == causal and len({"attention.causal", "attention.causal_pattern"} & keys.keys()) == 1


# ---- confidence


@pytest.mark.parametrize("said", [False, None])
def test_a_confidence_head_may_read_the_hidden_row_alone(tmp_path, target, said):
    config, made = CHECKPOINTS["RadixArk"]
    config = changed(config, inside={"confidence_head_with_markov": said})
    path = convert(tmp_path, target, config, made | {"confidence_head.proj.weight": draw(1, E)})
    assert dims_of(path)["conf_proj.weight"] == (E, 1)


def test_a_drafter_without_a_confidence_head(tmp_path, target):
    config = changed(RADIXARK, inside={"enable_confidence_head": False})
    path = convert(tmp_path, target, config, weights() | markov())
    assert dflash_keys(path)["has_confidence_head"] is False and "conf_proj.weight" not in dims_of(path)
    with File(path) as file:
        assert probe(file).dflash.what == "DSpark with a Markov head of rank 8, 7 drafts of a block of 7"


@pytest.mark.parametrize(
    ("inside", "made", "said"),
    [({}, {}, "tensor confidence_head.proj.weight is missing"),
     ({"enable_confidence_head": False}, confidence(), "key enable_confidence_head is false, but there is the tensor"),
     ({"confidence_head_with_markov": False}, confidence(), "expected shape (1, 256) (conf_proj.weight)")],
)  # fmt: skip
def test_a_confidence_head_that_does_not_fit_its_config(tmp_path, target, capsys, inside, made, said):
    config = changed(RADIXARK, inside=inside)
    assert said in failure(tmp_path, target, capsys, config, weights() | markov() | made)


# ---- reduced vocabularies


def test_even_ids_are_told_from_distances_by_t2d():
    """The distances 0, 1, 2, 3 are all different, as ids are."""
    ids = np.arange(0, 8, 2)
    assert target_ids(ids - np.arange(4), 10, drafted=ids).tolist() == [0, 2, 4, 6]
    assert target_ids(ids, 10, drafted=ids).tolist() == [0, 2, 4, 6]
    assert target_ids(ids - np.arange(4), 10, offsets=True).tolist() == [0, 2, 4, 6]


def test_even_ids_of_a_whole_checkpoint(tmp_path, target):
    ids = np.arange(0, 80, 2, dtype=np.int64)
    config, made = CHECKPOINTS["RedHatAI"]
    made = {name: x for name, x in made.items() if name != "t2d"} | {"d2t": ids - np.arange(40)}
    assert np.array_equal(hf.tensors_of(convert(tmp_path, target, config, made))["d2t"], ids)
    marked = made | {"d2t": ids, "t2d": np.isin(np.arange(VOCAB), ids).astype(np.uint8)}
    path = convert(tmp_path, target, config, marked, "--force")
    assert np.array_equal(hf.tensors_of(path)["d2t"], ids), "ids that t2d marks are ids"


@pytest.mark.parametrize("missing", ["d2t", "lm_head.weight"])
def test_a_reduced_vocabulary_needs_its_ids_and_its_head(tmp_path, target, capsys, missing):
    config, made = CHECKPOINTS["RedHatAI"]
    made = {name: x for name, x in made.items() if name != missing}
    said = failure(tmp_path, target, capsys, config, made)
    assert f"tensor {missing} is missing: draft_vocab_size is 40 of 384" in said


def test_an_embedding_alone_would_serve_as_the_head(tmp_path, target, capsys):
    made = {name: x for name, x in CHECKPOINTS["deepseek-ai"][1].items() if name != "lm_head.weight"}
    said = failure(tmp_path, target, capsys, DEEPSEEK, made)
    assert "tensor embed_tokens.weight is there without lm_head.weight" in said and "add the target's" in said
    path = convert(tmp_path, target, changed(DEEPSEEK, tie_word_embeddings=True), made)
    assert "output.weight" not in dims_of(path) and "token_embd.weight" in dims_of(path)


# ---- what is refused, by name


@pytest.mark.parametrize(
    ("layout", "change", "said"),
    [
        ("RadixArk", {"inside": {"markov_head_type": "gated"}}, "key markov_head_type is 'gated': a gated Markov head"),
        ("RadixArk", {"inside": {"markov_head_type": "rnn"}}, "'rnn': a recurrent Markov head"),
        ("deepseek-ai", {"markov_head_type": "gated"}, "a gated Markov head"),
        ("RedHatAI", {"markov_head_type": "rnn"}, "a recurrent Markov head"),
        ("RadixArk", {"inside": {"markov_head_type": "deep"}}, "markov_head_type is 'deep': luce implements 'vanilla'"),
        ("RadixArk", {"inside": {"projector_type": "domino"}}, "projector_type is 'domino': a Domino drafter, whose"),
        ("RadixArk", {"inside": {"projector_type": "other"}}, "key projector_type is 'other'"),
        ("z-lab", {"architectures": ["DominoDraftModel"]}, "DominoDraftModel, a Domino drafter"),
        ("deepseek-ai", {"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel, a DSpark drafter with layers"),
        ("RadixArk", {"architectures": ["Lfm2DSparkDraftModel"]}, "Lfm2DSparkDraftModel is not DFlashDraftModel"),
        ("RadixArk", {"model_type": "deepseek_v4"}, "key model_type is 'deepseek_v4': luce implements 'qwen3'"),
        ("RedHatAI", {"speculators_model_type": "eagle3"}, "key speculators_model_type is 'eagle3'"),
        ("speculators", {"target_hidden_size": 512}, "key target_hidden_size is 512, hidden_size 256"),
        ("speculators", {"draft_ffn_type": "moe"}, "key draft_ffn_type is 'moe'"),
        ("speculators", {"draft_vocab_size": 40}, "draft_vocab_size is 40 of 384: luce implements a selector over all"),
        ("z-lab", {"shift_label": True}, "key shift_label is True"),
        ("z-lab", {"inside": {"markov_rank": 8}}, "markov_rank is of DSpark drafters, and this is a DFlash2"),
        ("z-lab", {"architectures": ["DFlash2DraftModel", "DSparkDraftModel"]}, "drafters of several kinds"),
        ("z-lab", {"inside": {"attention_value_scale": 0.5}}, "attention_value_scale"),
        ("z-lab", {"inside": {"new_feature": 1}}, "key new_feature is 1"),
    ],
)  # fmt: skip
def test_what_luce_does_not_implement_is_named(tmp_path, target, capsys, layout, change, said):
    config, made = CHECKPOINTS[layout]
    assert said in failure(tmp_path, target, capsys, changed(config, **change), made)


@pytest.mark.parametrize(
    ("tensor", "said"),
    [("markov_head.gate_proj.weight", "it is of a gated Markov head"),
     ("markov_head.joint_proj.weight", "it is of a recurrent Markov head"),
     ("prefix_gru.weight_ih_l0", "it is of a Domino drafter"), ("embed_proj.0.weight", "it is of a Domino drafter"),
     ("layers.0.post_feedforward_layernorm.weight", "luce does not implement drafters with it")],
)  # fmt: skip
def test_a_tensor_that_no_key_tells_of_is_named(tmp_path, target, capsys, tensor, said):
    config, made = CHECKPOINTS["RadixArk"]
    found = failure(tmp_path, target, capsys, config, made | {tensor: draw(4)})
    assert f"tensor {tensor}" in found and said in found


@pytest.mark.parametrize(
    ("layout", "change", "said"),
    [
        ("z-lab", {"inside": {"conv_kernel_size": None}}, "key conv_kernel_size is missing"),
        ("z-lab", {"inside": {"selector_top_k": None}}, "key selector_top_k is missing"),
        ("z-lab", {"inside": {"conv_group_size": 24}}, "conv_group_size is 24, which does not divide hidden_size"),
        ("z-lab", {"inside": {"selector_rank": 0}}, "key selector_rank is 0"),
        ("z-lab", {"inside": {"target_layer_ids": [-1, 4, 6]}}, "key target_layer_ids is [-1, 4, 6]"),
        ("RadixArk", {"inside": {"markov_rank": None}}, "key markov_rank is missing"),
        ("RadixArk", {"inside": {"sample_from_anchor": "yes"}}, "key sample_from_anchor is 'yes'"),
        ("RedHatAI", {"aux_hidden_state_layer_ids": [5, 2, 7]}, "key aux_hidden_state_layer_ids is [5, 2, 7]"),
        ("RedHatAI", {"aux_hidden_state_layer_ids": [2, 5, 9]}, "taps layer 8"),
        ("RedHatAI", {"layers": {"sliding_window": None}}, "key sliding_window is missing"),
        ("RedHatAI", {"layers": {"hidden_size": None}}, "transformer_layer_config: key hidden_size is missing"),
        ("deepseek-ai", {"target_layer_ids": [-2, 3, 6]}, "key target_layer_ids is [-2, 3, 6]"),
    ],
)  # fmt: skip
def test_a_missing_or_bad_key_is_named(tmp_path, target, capsys, layout, change, said):
    config, made = CHECKPOINTS[layout]
    assert said in failure(tmp_path, target, capsys, changed(config, **change), made)


@pytest.mark.parametrize(
    ("layout", "tensor"),
    [("z-lab", "layers.1.attention_conv.base_kernel"), ("z-lab", "candidate_selector.successor_codebook"),
     ("RadixArk", "markov_head.markov_w2.weight"), ("RadixArk", "layers.0.self_attn.v_proj.weight")],
)  # fmt: skip
def test_a_missing_or_misshapen_tensor_is_named(tmp_path, target, capsys, layout, tensor):
    config, made = CHECKPOINTS[layout]
    without = {name: x for name, x in made.items() if name != tensor}
    assert f"tensor {tensor} is missing" in failure(tmp_path, target, capsys, config, without)
    turned = made | {tensor: np.ascontiguousarray(made[tensor].T)}
    assert f"tensor {tensor}: expected shape" in failure(tmp_path, target, capsys, config, turned)


def test_another_targets_sizes_are_refused(tmp_path, capsys):
    c = tiny.Config(n_layer=5, n_embd=E, n_vocab=VOCAB)
    other = tiny.write(tmp_path / "other.gguf", c, tiny.layout(c, 1))
    config, made = CHECKPOINTS["RedHatAI"]
    assert "key target_layer_ids taps layer 6" in failure(tmp_path, other, capsys, config, made)


class Opened:
    """Leaves a file where it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_pickled_mask_embedding_is_never_opened(tmp_path, target, capsys):
    folder = save(tmp_path, ZLAB, DFLASH2)
    (folder / "mask_embedding.pt").write_bytes(pickle.dumps(Opened(tmp_path / "opened")))
    said = hf.failure([str(folder), str(tmp_path / "out.gguf"), "--target", str(target)], capsys)
    assert "mask_embedding.pt: the mask's embedding is in a pickle, which luce does not open" in said
    assert "as its row 300" in said and "lm_head.weight" in said and "move this file away" in said
    assert not (tmp_path / "opened").exists()


def test_a_mask_row_of_its_own_is_that_of_an_own_embedding(tmp_path, target):
    """This is what the error on a pickle says to do."""
    made = DFLASH2 | own_ends()
    made["embed_tokens.weight"][300] = 7.0
    found = hf.tensors_of(convert(tmp_path, target, ZLAB, made, "--type", "F32"))
    assert (found["token_embd.weight"][300] == 7.0).all() and "output.weight" in found


# ---- DFlash of speculators


def test_dflash_of_speculators(tmp_path, target):
    config = {key: value for key, value in SPECULATORS_2.items() if not key.startswith(("conv", "selector"))}
    config |= {"architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash"}
    path = convert(tmp_path, target, config, weights() | own_ends())
    keys = dflash_keys(path)
    assert keys["attention.causal_pattern"] == [True, True, False] and keys["target_layers"] == [2, 5, 7]
    assert "sample_from_anchor" not in keys, "DFlash has no such key"
    assert hf.tensors_of(path).keys() == backbone(weights() | own_ends()).keys()
