"""A small DFlash drafter as its trainers publish one, config and safetensors, and what `luce convert` makes of it."""

import json

import hf_checkpoint as hf
import numpy as np
import pytest
import tiny

E, FF, HEADS, KV, D, LAYERS, VOCAB = 256, 512, 4, 2, 64, 3, 384
TARGET = tiny.Config(n_layer=8, n_embd=E, n_vocab=VOCAB)
CONFIG = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": E, "intermediate_size": FF,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": D,
    "hidden_act": "silu", "attention_bias": False, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB, "num_target_layers": 8, "is_causal": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
    "dflash_config": {"block_size": 16, "mask_token_id": 300, "target_layer_ids": [1, 4, 6]},
}  # fmt: skip
GGUF_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def config_with(**changes):
    """Returns CONFIG with keys changed, or removed (None); dflash_config's keys are given as dflash={...}."""
    config = json.loads(json.dumps(CONFIG))
    for place, values in ((config["dflash_config"], changes.pop("dflash", {})), (config, changes)):
        for key, value in values.items():
            place.pop(key, None)
            if value is not None:
                place[key] = value
    return config


def weights(ff=FF, n_taps=3):
    rng = np.random.default_rng(5)
    draw = lambda *shape: rng.uniform(-1, 1, shape).astype(np.float32)  # noqa: E731
    made = {"fc.weight": draw(E, n_taps * E), "hidden_norm.weight": draw(E), "norm.weight": draw(E)}
    shapes = {
        "input_layernorm": (E,), "post_attention_layernorm": (E,), "self_attn.q_proj": (HEADS * D, E),
        "self_attn.k_proj": (KV * D, E), "self_attn.v_proj": (KV * D, E), "self_attn.o_proj": (E, HEADS * D),
        "self_attn.q_norm": (D,), "self_attn.k_norm": (D,), "mlp.gate_proj": (ff, E), "mlp.up_proj": (ff, E),
        "mlp.down_proj": (E, ff),
    }  # fmt: skip
    for i in range(LAYERS):
        made |= {f"layers.{i}.{name}.weight": draw(*shape) for name, shape in shapes.items()}
    return made


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("target") / "target.gguf", TARGET, tiny.layout(TARGET, 1))


def save(tmp_path, config=None, made=None, **options):
    return hf.save(tmp_path / "hf", config or CONFIG, made or weights(), tokenizer=False, **options)


def convert(folder, target, *options):
    out = folder.parent / "out.gguf"
    assert hf.run(str(folder), str(out), "--target", str(target), *options) == 0
    return out
