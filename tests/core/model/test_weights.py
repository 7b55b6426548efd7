"""Says what a file must hold: a missing, misshapen or unknown key or tensor is one error that names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny
from gguf.gguf_writer import GGUFValue
from tiny import Config, Weights

from luce.errors import Error, FileError, OutOfMemory, UnsupportedError
from luce.native import Engine, File, Library, Model
from luce.native.structs import EngineParams

CONFIG = Config(n_layer=4)
Edit = Callable[[dict[str, GGUFValue]], object]


@pytest.fixture
def opened(native: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., File]:
    """Opens a tiny file with its tensors and keys changed."""

    def make(
        tensors: Callable[[Weights], object] = lambda w: None,
        keys: Edit = lambda kv: None,
        config: Config = CONFIG,
        type_of: str = "F32",
    ) -> File:
        class Writer(gguf.GGUFWriter):
            def write_header_to_file(self, path: Path | None = None) -> None:
                keys(self.kv_data[0])
                super().write_header_to_file(path)

        monkeypatch.setattr(tiny.gguf, "GGUFWriter", Writer)
        weights = tiny.layout(config, 1)
        tensors(weights)
        return File(tiny.write(tmp_path / "edited.gguf", config, weights, type_of), native)

    return make


def message(file: File, kind: type[Error], params: EngineParams | None = None) -> str:
    with pytest.raises(kind) as error:
        file.plan_memory("cpu", params)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_unchanged_file_passes(opened: Callable[..., File]) -> None:
    assert opened().plan_memory("cpu").total > 0


@pytest.mark.parametrize("name", ["blk.1.ssm_out.weight", "blk.3.attn_q_norm.weight", "output_norm.weight"])
def test_a_missing_tensor_is_named_with_its_shape(opened: Callable[..., File], name: str) -> None:
    text = message(opened(lambda w: w.pop(name)), FileError)
    assert name in text and "missing" in text and "{" in text


@pytest.mark.parametrize("name", ["blk.0.attn_qkv.weight", "blk.3.attn_k.weight", "blk.2.ffn_down.weight"])
def test_another_shape_is_named_with_both(opened: Callable[..., File], name: str) -> None:
    def cut(w: Weights) -> None:
        w[name] = np.ascontiguousarray(w[name][:-1])

    text = message(opened(cut), FileError)
    rows, columns = tiny.layout(CONFIG, 1)[name].shape
    assert name in text and f"{{{columns}, {rows}}}" in text and f"{{{columns}, {rows - 1}}}" in text


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.9.attn_norm.weight", "rope_freqs.weight"])
def test_a_tensor_that_the_model_would_ignore_is_refused(opened: Callable[..., File], name: str) -> None:
    assert name in message(opened(lambda w: w.update({name: np.ones(64, np.float32)})), UnsupportedError)


def test_a_weight_type_without_kernels_on_every_device_is_named(native: Library, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "t.gguf", CONFIG, tiny.layout(CONFIG, 1), "F32")
    data = path.read_bytes()
    name = b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 16  # Before the type come n_dims and two dimensions.
    assert data[at : at + 4] == (0).to_bytes(4, "little")
    # The type becomes I8, which is smaller, so the tensor fits.
    path.write_bytes(data[:at] + (24).to_bytes(4, "little") + data[at + 4 :])
    assert "blk.0.ffn_up.weight has type I8" in message(File(path, native), UnsupportedError)


def test_a_norm_that_is_not_f32_is_named(native: Library, tmp_path: Path) -> None:
    def type_of(name: str) -> str:
        return "F16" if name == "blk.0.attn_norm.weight" else "F32"

    path = tiny.write(tmp_path / "t.gguf", CONFIG, tiny.layout(CONFIG, 1), type_of)
    text = message(File(path, native), UnsupportedError)
    assert "blk.0.attn_norm.weight" in text and "F16" in text and "F32" in text


REQUIRED = [
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "ssm.conv_kernel", "ssm.inner_size",
    "ssm.state_size", "ssm.time_step_rank", "ssm.group_count",
]  # fmt: skip


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(opened: Callable[..., File], key: str) -> None:
    text = message(opened(keys=lambda kv: kv.pop(f"qwen35.{key}")), FileError)
    assert f"qwen35.{key} is missing" in text


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("value", ["text", -1, 2**40])
def test_a_key_of_the_wrong_type_or_range_is_named(
    opened: Callable[..., File], key: str, value: str | int
) -> None:
    kind = gguf.GGUFValueType.STRING if isinstance(value, str) else gguf.GGUFValueType.INT64
    text = message(opened(keys=lambda kv: kv.update({f"qwen35.{key}": GGUFValue(value, kind)})), FileError)
    assert f"qwen35.{key}" in text


@pytest.mark.parametrize("key", ["rope.freq_base", "attention.layer_norm_rms_epsilon"])
# F32 does not hold the last one.
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300], ids=str)
def test_a_number_that_is_not_finite_is_named(opened: Callable[..., File], key: str, value: float) -> None:
    odd = GGUFValue(value, gguf.GGUFValueType.FLOAT64)
    text = message(opened(keys=lambda kv: kv.update({f"qwen35.{key}": odd})), FileError)
    assert f"qwen35.{key} is not finite" in text


@pytest.mark.parametrize(
    "key, value",
    [
        ("ssm.conv_kernel", 3), ("ssm.state_size", 48), ("attention.key_length", 96), ("ssm.inner_size", 80),
        ("attention.value_length", 32), ("attention.head_count_kv", 3),
    ],
)  # fmt: skip
def test_a_size_that_luce_does_not_run_is_named(opened: Callable[..., File], key: str, value: int) -> None:
    wanted = GGUFValue(value, gguf.GGUFValueType.UINT32)
    assert str(value) in message(opened(keys=lambda kv: kv.update({f"qwen35.{key}": wanted})), Error)


def test_rope_scaling_is_refused_by_name(opened: Callable[..., File]) -> None:
    yarn = GGUFValue("yarn", gguf.GGUFValueType.STRING)
    file = opened(keys=lambda kv: kv.update({"qwen35.rope.scaling.type": yarn}))
    assert "yarn" in message(file, UnsupportedError)


@pytest.mark.parametrize("arch", ["llama", "dflash", "dflash-draft", "qwen35-dflash-draft"])
def test_another_architecture_is_refused_by_name(opened: Callable[..., File], arch: str) -> None:
    other = GGUFValue(arch, gguf.GGUFValueType.STRING)
    text = message(opened(keys=lambda kv: kv.update({"general.architecture": other})), UnsupportedError)
    assert arch in text


def test_a_context_that_does_not_fit_names_both_figures(opened: Callable[..., File], device: str) -> None:
    huge = Config(n_layer=4, n_head=8, n_head_kv=8, head_dim=256, n_ctx=1 << 28)
    file = opened(config=huge)
    params = EngineParams(n_ctx=1 << 28, kv_type="f32")
    plan = file.plan_memory(device, params)
    assert plan.total > plan.device_free
    with Model(file, device) as model, pytest.raises(OutOfMemory, match=r"needs .*iB on .*, .*iB are free"):
        Engine(model, params)
