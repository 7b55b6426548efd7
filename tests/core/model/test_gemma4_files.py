"""Gemma 4 files that lack or contradict something are refused by the name of the key or tensor; what published files
have in more than one way is read in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import drive
import gguf
import numpy as np
import pytest
import tiny_gemma4
from gguf.gguf_writer import GGUFValue

from luce.convert.gemma4_layout import Config
from luce.errors import Error, FileError, UnsupportedError
from luce.native import File, Library
from luce.native.structs import PAGE, EngineParams

DENSE = Config(sliding=(True, False, True, False), v_is_k=True)
SHARED = Config(sliding=(True, False, True, True, False), n_shared_kv=3, n_head_kv_swa=1, n_embd_per_layer=32)
MIXTURE = replace(DENSE, n_expert=4, n_expert_used=2, n_ff_expert=32)
MODELS = {"dense": DENSE, "shared": SHARED, "mixture": MIXTURE}

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a model without some tensors, and with other keys; None leaves a key out."""

    def written(c: Config, *without: str, **keys: Any) -> Path:
        class Writer(gguf.GGUFWriter):
            def write_header_to_file(self, path: Path | None = None) -> None:
                for key, value in keys.items():
                    name = f"gemma4.{key.replace('__', '.')}"
                    self.kv_data[0].pop(name, None)
                    if value is not None:
                        self.kv_data[0][name] = value
                super().write_header_to_file(path)

        monkeypatch.setattr(tiny_gemma4.gguf, "GGUFWriter", Writer)
        tensors = {name: x for name, x in tiny_gemma4.layout(c, 1).items() if name not in without}
        return tiny_gemma4.write(tmp_path / "model.gguf", c, tensors)

    return written


def number(value: int) -> GGUFValue:
    return GGUFValue(value, gguf.GGUFValueType.UINT32)


def real(value: float) -> GGUFValue:
    return GGUFValue(value, gguf.GGUFValueType.FLOAT32)


def array(values: list[Any], kind: gguf.GGUFValueType = gguf.GGUFValueType.UINT32) -> GGUFValue:
    return GGUFValue(values, gguf.GGUFValueType.ARRAY, kind)


BOOL = gguf.GGUFValueType.BOOL

LACKING: dict[str, tuple[str, str]] = {
    "rope_freqs.weight": ("dense", r"tensor rope_freqs\.weight is missing, expected \{64\}"),
    "blk.1.layer_output_scale.weight": (
        "dense", r"tensor blk\.1\.layer_output_scale\.weight: expected F32 \{1\}, found none"),
    "blk.0.attn_k.weight": ("dense", r"tensor blk\.0\.attn_k\.weight is missing"),
    "blk.0.post_ffw_norm.weight": ("dense", r"tensor blk\.0\.post_ffw_norm\.weight is missing"),
    "blk.2.ffn_gate_inp.scale": ("mixture", r"tensor blk\.2\.ffn_gate_inp\.scale is missing"),
    "blk.2.ffn_down_exps.scale": ("mixture", r"tensor blk\.2\.ffn_down_exps\.scale is missing, expected \{4\}"),
    "per_layer_proj_norm.weight": ("shared", r"tensor per_layer_proj_norm\.weight is missing, expected \{32\}"),
    "blk.3.inp_gate.weight": ("shared", r"tensor blk\.3\.inp_gate\.weight is missing"),
}


def refused(native: Library, path: Path, kind: type[Error], said: str) -> None:
    for opens in (lambda: File(path, native).plan_memory("cpu"), lambda: drive.open_model(native, path)):
        with pytest.raises(kind, match=said) as error:
            opens()
        assert path.name in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("tensor", LACKING)
def test_a_tensor_that_is_missing_is_named(tensor: str, write: Write, native: Library) -> None:
    model, said = LACKING[tensor]
    refused(native, write(MODELS[model], tensor), FileError, said)


KEYS: dict[str, tuple[str, dict[str, GGUFValue | None], type[Error], str]] = {
    "no pattern": ("dense", {"attention__sliding_window_pattern": None}, FileError, r"sliding_window_pattern"),
    "a short pattern": (
        "dense", {"attention__sliding_window_pattern": array([True, False], BOOL)}, FileError,
        r"gemma4\.attention\.sliding_window_pattern has 2 entries, expected 4"),
    "no window": ("dense", {"attention__sliding_window": number(0)}, FileError, r"sliding_window is 0, expected 1 to"),
    "short widths": (
        "dense", {"feed_forward_length": array([96, 96])}, FileError, r"feed_forward_length has 2 entries"),
    "a negative cap": ("dense", {"final_logit_softcapping": real(-1.0)}, FileError,
                       r"final_logit_softcapping is -1, expected no negative number"),
    "all share": ("shared", {"attention__shared_kv_layers": number(5)}, FileError,
                  r"shared_kv_layers is 5, expected 0 to 4"),
    "none to share with": ("shared", {"attention__shared_kv_layers": number(4)}, FileError,
                           r"layer 1, a global one, has no layer to read"),
    "other heads than those it reads": (
        "shared", {"attention__head_count_kv": array([1, 1, 1, 2, 1])}, FileError,
        r"attention\.head_count_kv is 2 of layer 3, which reads those of layer 0, expected 1"),
    "other heads of a global layer": (
        "shared", {"attention__head_count_kv": array([1, 1, 1, 1, 2])}, FileError,
        r"attention\.head_count_kv is 2 of layer 4, which reads those of layer 1, expected 1"),
    "heads": ("dense", {"attention__key_length_swa": number(80)}, UnsupportedError, r"key_length is 80"),
    "groups": ("dense", {"attention__head_count_kv": array([3, 1, 3, 1])}, UnsupportedError,
               r"head_count is 4, no multiple of attention\.head_count_kv, which is 3"),
    "scaled RoPE": ("dense", {"rope__scaling__type": GGUFValue("yarn", gguf.GGUFValueType.STRING)}, UnsupportedError,
                    r"rope\.scaling\.type is 'yarn': luce has no RoPE scaling"),
    "used experts": (
        "mixture", {"expert_used_count": number(5)}, FileError, r"expert_used_count is 5, expected 1 to 4"),
}  # fmt: skip


@pytest.mark.parametrize("what", KEYS)
def test_a_key_that_does_not_fit_is_named(what: str, write: Write, native: Library) -> None:
    model, keys, kind, said = KEYS[what]
    refused(native, write(MODELS[model], **keys), kind, said)


def logits_of(native: Library, path: Path) -> bytes:
    sequence = drive.open_sequence(drive.open_model(native, path), n_ctx=64)
    return drive.chain_logits(sequence, [7, 1, 99, 23, 5], 5).tobytes()


def test_keys_may_be_a_number_or_one_for_each_layer(write: Write, native: Library) -> None:
    whole = logits_of(native, write(DENSE))
    arrays = {"feed_forward_length": array([96] * 4), "attention__head_count": array([4] * 4)}
    assert logits_of(native, write(DENSE, **arrays)) == whole
    absent: dict[str, None] = {"embedding_length_per_layer_input": None, "attention__shared_kv_layers": None}
    assert logits_of(native, write(DENSE, **absent)) == whole
    assert logits_of(native, write(DENSE, final_logit_softcapping=None)) != whole


def test_layers_that_read_the_cells_of_others_have_none(write: Write, native: Library) -> None:
    file = File(write(SHARED), native)
    params = EngineParams(n_ctx=PAGE, kv_type="f32")
    cells = sum(2 * SHARED.head(i) * SHARED.head_kv(i) for i in range(SHARED.n_layer_kv))
    small, large = (file.plan_memory("cpu", replace(params, n_ctx=n)) for n in (PAGE, 3 * PAGE))
    assert large.kv - small.kv == 2 * PAGE * cells * np.dtype(np.float32).itemsize
