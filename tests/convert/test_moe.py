"""Runs `luce convert`: mixtures of experts, however they are stored; and what transformers itself saves."""

from dataclasses import replace
from pathlib import Path

import drive
import hf_checkpoint as hf
import numpy as np
import pytest
import tiny
from checkout import GOLDENS
from hf_checkpoint import moe
from make_goldens import CASES

from luce.bench.oracle_model import SHAPES
from luce.convert import hf_qwen35
from luce.convert.hf_config import Section
from luce.convert.qwen35_layout import tensor_shapes
from luce.convert.safetensors_reader import Source

GROUPED = tiny.Config(n_v_head=6, n_nextn=1)  # There are 3 v heads for each k head, so they change places.
MIXTURE = replace(GROUPED, n_expert=4, n_expert_used=2, n_ff_expert=48, n_ff_shared=80)

convert = hf.convert_qwen35_to_gguf


def test_a_mixtures_tensors_have_the_bits_of_the_test_models(tmp_path):
    """The head's experts have them too."""
    found = hf.tensors_of(convert(hf.save_qwen35(tmp_path / "hf", MIXTURE), "--type", "F32"))
    wanted = tiny.layout(MIXTURE, 1)
    assert list(found) == list(wanted)
    assert all(np.array_equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("name", ["experts", "experts-one-used"])
def test_a_converted_mixture_gives_the_logits_of_transformers(tmp_path, name, native, device):
    c, seed = CASES[name]
    golden = np.load(GOLDENS / f"{name}.npz")
    path = convert(hf.save_qwen35(tmp_path / "hf", c, seed), "--type", "F32")
    sequence = drive.open_sequence(drive.open_model(native, path, device), n_ctx=256)
    found = drive.chain_logits(sequence, golden["prompt"].tolist(), 8)
    assert np.abs(found - golden["logits"]).max() < (1e-3 if device.startswith("cpu") else drive.CUDA_BOUND)


@pytest.mark.references
@pytest.mark.parametrize("c", [GROUPED, MIXTURE], ids=["dense", "experts"])
def test_save_pretrained_gives_the_logits_of_transformers(tmp_path, native, c):
    """transformers holds experts fused and saves them apart: both give the same file."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    kind = "Qwen3_5Moe" if c.n_expert else "Qwen3_5"
    config = getattr(transformers, f"{kind}TextConfig")(**tiny.hf_config(replace(c, n_nextn=0)))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(weight, -0.5, 0.5)
        elif "mlp" in name:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    model.save_pretrained(tmp_path / "hf")
    hf.save_tokenizer(tmp_path / "hf")
    path = convert(tmp_path / "hf", "--type", "F32")
    state = {name: weight.numpy() for name, weight in model.state_dict().items()}
    (tmp_path / "state").mkdir()
    held = hf.save(tmp_path / "state" / "hf", config.to_dict(), state)
    assert any("experts.gate_up_proj" in name for name in state) == bool(c.n_expert)
    assert convert(held, "--type", "F32").read_bytes() == path.read_bytes()
    tokens = np.random.default_rng(1).integers(0, 300, 24).tolist()
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0].numpy()
    with drive.open_model(native, path) as opened:
        found = drive.chain_logits(drive.open_sequence(opened, n_ctx=64), tokens, 6)
    assert np.abs(found - wanted).max() < 1e-3


class Shapes(dict):
    """These are a checkpoint's names and shapes without its numbers."""

    path = Path("35b")
    names = property(list)


@pytest.mark.references
def test_every_tensor_of_transformers_35b_has_its_place():
    """Only the vision tower has none. transformers' defaults are 35B-A3B's sizes."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3_5MoeConfig()
    config.vision_config.depth = 1
    with torch.device("meta"):
        model = transformers.Qwen3_5MoeForConditionalGeneration(config)
    checkpoint = Shapes({
        name: Source(name, "F32", tuple(weight.shape), np.zeros_like)
        for name, weight in model.state_dict().items()
    })  # fmt: skip
    names = hf_qwen35.plain_names(checkpoint)
    c = hf_qwen35.read_hparams(Section(config.to_dict(), "config.json"), names)
    sizes = ("n_layer", "n_embd", "n_head", "n_head_kv", "head_dim", "rope_dim", "n_k_head", "n_v_head",
             "state_size", "n_vocab", "interval", "n_expert", "n_expert_used", "n_ff_expert", "n_ff_shared")
    oracle = replace(SHAPES["35b-a3b"], n_nextn=0)
    assert {name: getattr(c, name) for name in sizes} == {name: getattr(oracle, name) for name in sizes}
    assert {t.name: t.shape for t in hf_qwen35.plan(c, "all", checkpoint, names)} == tensor_shapes(oracle)


# ---- stored in other ways


def test_experts_however_stored_give_the_same_file(tmp_path):
    made = {}
    for experts in ("fused", "fused.weight", "each"):
        (tmp_path / experts).mkdir()
        config, weights = moe(GROUPED, experts)
        made[experts] = convert(hf.save(tmp_path / experts / "hf", config, weights), "--type", "F32")
    assert len({path.read_bytes() for path in made.values()}) == 1
    found, keys = hf.tensors_of(made["fused"]), hf.keys_of(made["fused"])
    for i, prefix in ((0, "model.layers.0"), (3, "model.layers.3"), (4, "mtp.layers.0")):
        gate_up = moe(GROUPED, "fused")[1][f"{prefix}.mlp.experts.gate_up_proj"]
        assert found[f"blk.{i}.ffn_gate_exps.weight"].shape == (4, 48, 64)
        assert np.array_equal(found[f"blk.{i}.ffn_gate_exps.weight"], gate_up[:, :48])
        assert np.array_equal(found[f"blk.{i}.ffn_up_exps.weight"], gate_up[:, 48:])
        assert found[f"blk.{i}.ffn_down_exps.weight"].shape == (4, 64, 48)
        assert found[f"blk.{i}.ffn_gate_inp_shexp.weight"].shape == (64,)
    assert keys["general.architecture"] == "qwen35moe" and "qwen35moe.feed_forward_length" not in keys
    sizes = (
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
        "expert_shared_feed_forward_length",
    )
    assert [keys[f"qwen35moe.{key}"] for key in sizes] == [4, 2, 48, 80]


def test_router_stays_f32(tmp_path):
    config, weights = moe(GROUPED, "fused")
    types = hf.types_of(convert(hf.save(tmp_path / "hf", config, weights), "--type", "Q8_0"))
    assert types["blk.0.ffn_gate_inp.weight"] == types["blk.0.ffn_gate_inp_shexp.weight"] == "F32"
    assert types["blk.0.ffn_gate_exps.weight"] == "Q8_0"


def test_experts_have_the_types_of_their_mix(tmp_path, native):
    """Each expert is quantised by itself; rows of down that do not fit fall back, and luce runs the file."""
    c = replace(MIXTURE, n_embd=256, n_ff_expert=256, n_ff_shared=96, head_dim=128, state_size=64)
    path = convert(hf.save_qwen35(tmp_path / "hf", c), "--type", "Q4_K_M")
    found, types, wanted = hf.tensors_of(path), hf.types_of(path), tiny.layout(c, 1)
    assert all(hf.relative_error(found[name], x) <= hf.ROUND_TRIP[types[name]] for name, x in wanted.items())
    assert {types[f"blk.{i}.ffn_{m}_exps.weight"] for i in range(5) for m in ("gate", "up")} == {"Q4_K"}
    assert {types[f"blk.{i}.ffn_down_exps.weight"] for i in range(5)} == {"Q4_K", "Q6_K"}
    assert {types[f"blk.{i}.ffn_down_shexp.weight"] for i in range(5)} == {"Q8_0"}
    with drive.open_model(native, path, head=True) as model:
        sequence = drive.open_sequence(model, n_ctx=64, n_draft=2)
        assert len(drive.decode(sequence, [1, 2, 3], 8, 2).tokens) >= 8


def test_expert_of_another_shape(tmp_path, capsys):
    config, weights = moe(GROUPED, "each")
    weights["model.layers.1.mlp.experts.2.up_proj.weight"] = np.zeros((47, 64), np.float32)
    folder = hf.save(tmp_path / "hf", config, weights)
    said = hf.failure([str(folder), str(tmp_path / "out.gguf")], capsys)
    assert "model.layers.1.mlp.experts.2.up_proj.weight: expected shape (48, 64)" in said
    assert "found (47, 64)" in said


def test_says_that_luce_runs_experts(tmp_path, capsys):
    config, weights = moe(GROUPED, "fused")
    convert(hf.save(tmp_path / "hf", config, weights))
    assert "luce runs this file: 4 blocks" in capsys.readouterr().err
