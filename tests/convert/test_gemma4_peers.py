"""Compares converted Gemma 4 checkpoints with transformers, which saves them, and with llama.cpp's converter."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace

import gguf
import hf_checkpoint as hf
import numpy as np
import pytest
import tiny_gemma4
from checkout import ROOT
from tiny_gemma4 import ASSISTANT, CASES, ORDERED

from luce.convert.gemma4_layout import CENTROIDS, ORDERING

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.17")
pytestmark = pytest.mark.references

ASSISTANTS = {"assistant": ASSISTANT, "ordered": ORDERED}
SAVED = [(name, whole) for name in CASES for whole in (False, True)] + [(name, False) for name in ASSISTANTS]


@pytest.fixture(scope="module")
def peer():
    """Gives llama.cpp's converter, fetched where missing."""
    spec = importlib.util.spec_from_file_location("fetch_ggml", ROOT / "tools" / "fetch_ggml.py")
    fetch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fetch)
    return fetch.ensure(fetch.default_cache(), archive=None, peer=True) / "convert_hf_to_gguf.py"


def config_of(name):
    return ASSISTANTS[name] if name in ASSISTANTS else replace(CASES[name][0], fused_experts=True)


def saved(folder, c, conditional=False):
    """Saves a model as transformers does: of text, or the one for images too, without a tower."""
    text = transformers.Gemma4TextConfig(**tiny_gemma4.hf_config(c))
    if c.n_embd_out:
        config = transformers.Gemma4AssistantConfig(text_config=text, **tiny_gemma4.hf_assistant_config(c))
        model = transformers.Gemma4AssistantForCausalLM(config)
    elif conditional:
        config = transformers.Gemma4Config(text_config=text, tie_word_embeddings=c.tied)
        model = transformers.Gemma4ForConditionalGeneration(config)
    else:
        model = transformers.Gemma4ForCausalLM(text)
    state = {name: torch.from_numpy(x) for name, x in tiny_gemma4.weights(c, 1).items()}
    if c.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    if conditional:
        state = {name.replace("model.", "model.language_model.", 1): x for name, x in state.items()}
    model.load_state_dict(state, strict=True)
    model.save_pretrained(folder)
    hf.save_gemma4_tokenizer(folder, c.n_vocab)
    return folder


@pytest.mark.parametrize(("name", "conditional"), SAVED)
def test_what_transformers_saves_has_the_bits_of_the_test_models(tmp_path, name, conditional):
    c = config_of(name)
    found = hf.tensors_of(hf.convert_qwen35_to_gguf(saved(tmp_path / "hf", c, conditional), "--type", "F32"))
    wanted = tiny_gemma4.layout(c, 1)
    assert list(found) == list(wanted)
    assert all(np.array_equal(found[key], wanted[key]) for key in wanted)


def test_heads_are_saved_by_layer(tmp_path):
    """Else the test above shows nothing of it."""
    keys = json.loads((saved(tmp_path / "hf", config_of("dense")) / "config.json").read_text())
    assert keys["per_layer_config"]["2"] == {"head_dim": 128, "num_key_value_heads": 1}
    assert "global_head_dim" not in keys


@pytest.mark.parametrize("name", ["dense", "own-v", "experts", "per-layer", "untied", "assistant", "ordered"])
def test_llama_cpp_converts_to_the_same_tensors_and_keys(tmp_path, peer, name):
    c = config_of(name)
    folder = hf.save_gemma4(tmp_path / "hf", c)
    own, theirs = hf.convert_qwen35_to_gguf(folder, "--type", "F32"), tmp_path / "theirs.gguf"
    command = [sys.executable, str(peer), str(folder), "--outfile", str(theirs), "--outtype", "f32"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found, wanted = hf.tensors_of(own), hf.tensors_of(theirs)
    for left_out in (CENTROIDS, ORDERING) if c.n_centroid else ():  # It has names for them and drops them.
        found.pop(left_out)
    assert found.keys() == wanted.keys()
    for key, x in wanted.items():
        assert found[key].tobytes() == x.tobytes(), key
    ours, keys = hf.keys_of(own), hf.keys_of(theirs)
    ours.pop("gemma4-assistant.centroid_top_k", None)
    if c.n_embd_out:  # Its forward caps no logits, whatever its config says.
        keys.pop("gemma4-assistant.final_logit_softcapping", None)
    per_layer = (f"{c.arch}.attention.head_count_kv", f"{c.arch}.feed_forward_length")
    for key in per_layer:  # A number of all layers may be written for each.
        each = {keys[key]} if isinstance(keys[key], int) else set(keys[key])
        keys[key] = each.pop() if len(each) == 1 else keys[key]
    hyperparameters = {key: value for key, value in keys.items() if key.startswith(f"{c.arch}.")}
    assert {key: value for key, value in ours.items() if key.startswith(f"{c.arch}.")} == hyperparameters
    for key in ("model", "tokens", "token_type", "merges", "bos_token_id", "unknown_token_id", "add_bos_token",
                "add_space_prefix", "mask_token_id", "padding_token_id"):  # fmt: skip
        assert _named(ours, key, c) == _named(keys, key, c), key


def _named(keys, key, c):
    """Returns a key of the tokenizer; what has no text is one of a kind."""
    value = keys[f"tokenizer.ggml.{key}"]
    unused = [kind == gguf.TokenType.UNUSED for kind in keys["tokenizer.ggml.token_type"]]
    n = c.n_vocab - sum(unused)
    return value[:n] if key in ("tokens", "token_type") else value
