"""Compares the core's logits and greedy tokens with transformers', of tiny Gemma 4 models: by steps of several
widths, and by prompts that are read in one call or in several."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import drive
import numpy as np
import pytest
import tiny_gemma4
from checkout import GOLDENS
from depth import deeper_but
from op_run import penalise
from tiny_gemma4 import CASES, LONG_CASES

from luce.convert.gemma4_layout import Config
from luce.errors import UnsupportedError
from luce.native import Library
from luce.native import Sequence as Timeline
from luce.native.structs import Penalties, Sampling

BOUND = 2e-3  # Logits with F32 weights and f32 KV may be off by so much.
# Those of llama.cpp: its GELU on a CPU reads a table of F16 values, which moves them from transformers' by up to 0.054.
LLAMACPP_BOUND = 0.06
LLAMACPP = dict(np.load(GOLDENS / "llamacpp-reference.npz"))
CHUNK = 256


@pytest.fixture
def golden(case: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDENS / f"gemma4-{case}.npz"))


@pytest.fixture
def bound(device: str) -> float:
    return BOUND if device == "cpu" else drive.CUDA_BOUND


@pytest.fixture
def sequence(case: str, native: Library, device: str, tmp_path: Path) -> Timeline:
    config, seed = (CASES | LONG_CASES)[case]
    path = tiny_gemma4.write(tmp_path / "f32.gguf", config, tiny_gemma4.layout(config, seed))
    return drive.open_sequence(drive.open_model(native, path, device), n_ctx=1024, n_chunk=CHUNK)


def check(sequence: Timeline, golden: dict[str, np.ndarray], error: float, device: str) -> None:
    """Logits are off by no more than `error`, and the same tokens follow the prompt."""
    assert error <= (BOUND if device == "cpu" else drive.CUDA_BOUND)
    greedy = golden["greedy"]
    sequence.reset()
    if device == "cpu":
        assert drive.greedy(sequence, golden["prompt"], len(greedy)) == greedy.tolist()
        return
    # Two logits that move towards each other by `error` each may change places; other experts choose other tokens.
    clear = (golden["gap"] > 2 * error) & (np.arange(len(greedy)) < golden.get("sure", len(greedy)))
    assert np.array(drive.choices(sequence, golden["prompt"], greedy))[clear].tolist() == greedy[clear].tolist()


@pytest.mark.parametrize("case", CASES)
def test_core_agrees_with_transformers(
    golden: dict[str, np.ndarray], sequence: Timeline, device: str, record_property: Callable[[str, object], None]
) -> None:
    prompt, expected = golden["prompt"], golden["logits"]
    errors = []
    for width in (1, 7, 40):
        sequence.reset()
        errors.append(np.abs(drive.chain_logits(sequence, prompt, width)[golden["at"]] - expected).max())
    for at, row in zip(golden["at"], expected, strict=True):
        sequence.reset()
        drive.prefill(sequence, prompt[: at + 1])
        errors.append(np.abs(sequence.logits(0) - row).max())
    record_property("max_abs_logit_error", float(max(errors)))
    check(sequence, golden, float(max(errors)), device)


@pytest.mark.parametrize("case", ["own-v"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_k=40, seed=3)], ids=["greedy", "sampled"])
def test_penalties_and_sampling_come_behind_the_cap(
    golden: dict[str, np.ndarray], sequence: Timeline, native: Library, device: str, sampling: Sampling
) -> None:
    """Of transformers' logits, which a cap of 8 bends. Ahead of it the same bias would choose another token."""
    n, logits = len(golden["prompt"]), golden["logits"][-1]
    best, other = np.argsort(-logits)[[0, 30]].tolist()
    bias = Penalties(bias=((other, float(logits[best] - logits[other]) + 1),))
    sequence.set_sampling(sampling)
    sequence.set_penalties(bias, n)
    drive.prefill(sequence, golden["prompt"])
    found, prompt = sequence.choose(0), golden["prompt"].tolist()
    assert found == native.sample(penalise(native, logits, bias, prompt, n), sampling, n)
    inside = 8 * np.arctanh(np.clip(logits / 8, -1 + 1e-6, 1 - 1e-6)).astype(np.float32)
    ahead = 8 * np.tanh(penalise(native, inside, bias, prompt, n) / 8)
    assert sampling.temperature or (found == other and ahead.argmax() == best)


@pytest.mark.parametrize("case", deeper_but(LONG_CASES, "long"))
def test_long_prompts_agree_with_transformers(
    golden: dict[str, np.ndarray], sequence: Timeline, device: str
) -> None:
    """A prompt takes three calls, and passes several windows and pages; then its text goes on."""
    prompt, errors = golden["prompt"], []
    for at, row in zip(golden["at"], golden["logits"], strict=True):
        sequence.reset()
        drive.prefill(sequence, prompt[: at + 1])
        errors.append(np.abs(sequence.logits(0) - row).max())
    sequence.reset()
    errors.append(np.abs(drive.chain_logits(sequence, prompt, 64)[golden["at"]] - golden["logits"]).max())
    check(sequence, golden, float(max(errors)), device)


@pytest.mark.parametrize("case", [name.removeprefix("logits-") for name in LLAMACPP if name.startswith("logits-")])
def test_llama_cpp_agrees(case: str, golden: dict[str, np.ndarray], sequence: Timeline, device: str) -> None:
    """Of the same files (tools/make_llamacpp_reference.py); where a file says no cap, llama.cpp's is 30."""
    config, _ = (CASES | LONG_CASES)[case]
    expected, greedy = LLAMACPP[f"logits-{case}"], LLAMACPP[f"greedy-{case}"]
    found = drive.chain_logits(sequence, golden["prompt"], 40)[golden["at"][::7]]
    found = found if config.softcap else 30 * np.tanh(found / 30)
    assert np.abs(found - expected).max() <= LLAMACPP_BOUND + (0 if device == "cpu" else drive.CUDA_BOUND)
    assert greedy.tolist() == golden["greedy"].tolist()
    if device == "cpu":
        sequence.reset()
        assert drive.greedy(sequence, golden["prompt"], len(greedy)) == greedy.tolist()


# F32 experts in one tensor, quantised ones apart, and types that ggml multiplies.
DEEP = {"F32": {}, "Q8_0": {"fused_experts": False}, "IQ3_S": {"n_embd": 256, "n_ff": 256, "n_embd_per_layer": 256}}


@pytest.mark.long
@pytest.mark.parametrize("kind", deeper_but(DEEP, "Q8_0"))
def test_as_many_layers_as_models_have_with_all_parts_fit_a_graph(
    kind: str, native: Library, device: str, tmp_path: Path
) -> None:
    sizes = {"n_embd_per_layer": 32, "n_expert": 4, "n_expert_used": 2, "n_ff_expert": 32} | DEEP[kind]
    config = Config(sliding=tuple((i + 1) % 5 != 0 for i in range(60)), window=20, **sizes)

    def type_of(name: str) -> str:
        short = "exps" in name or "embd" in name
        return "F32" if not tiny_gemma4.quantizable(name) else "Q8_0" if kind == "IQ3_S" and short else kind

    tensors, made = tiny_gemma4.layout(config, 1), partial(drive.quantize, native)
    path = tiny_gemma4.write(tmp_path / "deep.gguf", config, tensors, type_of, quantize=made)
    device = device if kind != "IQ3_S" else "cpu"  # A GPU has no experts of ggml's.
    sequence = drive.open_sequence(drive.open_model(native, path, device), n_ctx=512, n_chunk=512)
    drive.prefill(sequence, list(range(200)))
    assert np.isfinite(sequence.logits(0)).all()
    assert np.isfinite(drive.chain_logits(sequence, [1, 2, 3, 4], 4)).all()


@pytest.mark.parametrize("case", ["experts", "experts-apart"])
def test_experts_in_host_memory_agree_with_transformers(
    case: str, golden: dict[str, np.ndarray], native: Library, device: str, bound: float, tmp_path: Path
) -> None:
    config, seed = CASES[case]
    path = tiny_gemma4.write(tmp_path / "f32.gguf", config, tiny_gemma4.layout(config, seed))
    model = drive.open_model(native, path, device, cpu_experts=config.n_layer)
    found = drive.chain_logits(drive.open_sequence(model, n_ctx=64), golden["prompt"], 20)
    assert np.abs(found[golden["at"]] - golden["logits"]).max() <= bound


@pytest.mark.parametrize("case", ["per-layer"])
def test_tensors_that_shared_layers_do_not_read_are_passed_over(
    case: str, golden: dict[str, np.ndarray], native: Library, tmp_path: Path
) -> None:
    """Published files have them; no other tensor is passed over."""
    config, seed = CASES[case]
    tensors = tiny_gemma4.layout(config, seed)
    for i in range(config.n_layer_kv, config.n_layer):
        d, e = config.head(i), config.n_embd
        unused = np.full((d * config.head_kv(i), e), np.nan, np.float32)
        tensors |= {f"blk.{i}.attn_k.weight": unused, f"blk.{i}.attn_v.weight": unused,
                    f"blk.{i}.attn_k_norm.weight": np.full(d, np.nan, np.float32)}  # fmt: skip
    path = tiny_gemma4.write(tmp_path / "published.gguf", config, tensors)
    sequence = drive.open_sequence(drive.open_model(native, path), n_ctx=64)
    logits = drive.chain_logits(sequence, golden["prompt"], 40)
    assert np.abs(logits[golden["at"]] - golden["logits"]).max() <= BOUND
    last = config.n_layer - 1
    tensors[f"blk.{last}.attn_k.bias"] = np.zeros(8, np.float32)
    path = tiny_gemma4.write(tmp_path / "other.gguf", config, tensors)
    with pytest.raises(UnsupportedError, match=rf"tensor blk\.{last}\.attn_k\.bias is not part of the gemma4"):
        drive.open_model(native, path)
