"""Refuses files whose shapes no kernel takes, before a graph is built: by the key, its value, and what luce runs. Dense
models, mixtures, heads of their own file and drafters have one check, and ops alone have it too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import drive
import gguf
import numpy as np
import pytest
import tiny
import tiny_dflash
from gguf.gguf_writer import GGUFValue
from op_run import op_run
from step_ctl import PAGE, Seq, step_ctl
from tiny import Config

from luce.errors import Error, FileError, UnsupportedError
from luce.native import File, Library

DENSE = Config(n_layer=2, interval=2)
MODELS = {"dense": DENSE, "mixture": tiny.with_experts(DENSE)}

HEADS = "luce runs 64, 128, 256 and 512"  # On a GPU it is without the last.
# What is said of files that hold these sizes in keys and tensors alike.
SIZES: dict[str, tuple[dict[str, int], str]] = {
    **{f"heads of {d}": ({"head_dim": d, "rope_dim": 8}, rf"attention\.key_length is {d}: {HEADS}")
       for d in (8, 16, 33, 96, 192, 1024)},
    "groups": ({"n_head": 5, "n_head_kv": 2},
               r"attention\.head_count is 5, no multiple of attention\.head_count_kv, which is 2"),
    "more KV heads": ({"n_head": 2, "n_head_kv": 4}, r"head_count is 2, no multiple of .*, which is 4"),
    "odd rotation": ({"rope_dim": 7}, r"rope\.dimension_count is 7: luce rotates an even number of a head's 64"),
    **{f"conv of {n}": ({"conv_kernel": n}, rf"ssm\.conv_kernel is {n}: luce runs 4") for n in (1, 3, 9)},
    **{f"states of {s}": ({"state_size": s}, rf"ssm\.state_size is {s}: luce runs 16, 32, 64 and 128")
       for s in (1, 24, 33, 256)},
}  # fmt: skip
# What is said where a key alone differs, so that tensors do not fit it either.
KEYS: dict[str, tuple[int | float, str]] = {
    "attention.key_length": (33, r"attention\.key_length is 33 and attention\.value_length 64"),
    "attention.value_length": (128, r"attention\.key_length is 64 and attention\.value_length 128: .* equal"),
    "attention.head_count_kv": (3, r"head_count is 2, no multiple of attention\.head_count_kv, which is 3"),
    "ssm.group_count": (3, r"ssm\.time_step_rank is 2, no multiple of ssm\.group_count, which is 3"),
    "ssm.inner_size": (65, r"ssm\.inner_size is 65, expected time_step_rank \* state_size = 64"),
    "ssm.conv_kernel": (9, r"ssm\.conv_kernel is 9: luce runs 4"),
    "rope.freq_base": (-1.0, r"rope\.freq_base is -1.*, expected a positive number"),
    "attention.layer_norm_rms_epsilon": (0.0, r"layer_norm_rms_epsilon is 0, expected a positive number"),
}
OF_EXPERTS: dict[str, tuple[int, type[Error], str]] = {
    "expert_used_count": (9, FileError, r"qwen35moe\.expert_used_count is 9, expected 1 to 8"),
    "expert_count": (0, FileError, r"qwen35moe\.expert_count is 0, expected 1 to"),
}


def writing(monkeypatch: pytest.MonkeyPatch, prefix: str, key: str, value: float) -> None:
    """Has files that are written from now on another value of this key."""
    kind = gguf.GGUFValueType.FLOAT32 if isinstance(value, float) else gguf.GGUFValueType.UINT32

    class Writer(gguf.GGUFWriter):
        def write_header_to_file(self, path: Path | None = None) -> None:
            self.kv_data[0][f"{prefix}.{key}"] = GGUFValue(value, kind)
            super().write_header_to_file(path)

    monkeypatch.setattr(tiny.gguf, "GGUFWriter", Writer)


def refused(native: Library, path: Path, kind: type[Error], said: str) -> None:
    """Both where memory is planned and where the model is opened, nothing but this error comes."""
    for opens in (lambda: File(path, native).plan_memory("cpu"), lambda: drive.open_model(native, path)):
        with pytest.raises(kind, match=said) as error:
            opens()
        assert path.name in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("model", MODELS)
def test_a_size_without_kernels_is_named(model: str, size: str, native: Library, tmp_path: Path) -> None:
    changes, said = SIZES[size]
    config = replace(MODELS[model], **changes)
    refused(native, tiny.write(tmp_path / "odd.gguf", config, tiny.layout(config, 1)), UnsupportedError, said)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("model", MODELS)
def test_a_key_without_kernels_is_named_before_the_tensors(
    model: str, key: str, native: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = MODELS[model]
    writing(monkeypatch, config.arch, key, KEYS[key][0])
    path = tiny.write(tmp_path / "key.gguf", config, tiny.layout(config, 1))
    refused(native, path, UnsupportedError, KEYS[key][1])


@pytest.mark.parametrize("key", OF_EXPERTS)
def test_counts_of_experts_are_named(
    key: str, native: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, kind, said = OF_EXPERTS[key]
    config = MODELS["mixture"]
    writing(monkeypatch, config.arch, key, value)
    refused(native, tiny.write(tmp_path / "experts.gguf", config, tiny.layout(config, 1)), kind, said)


def test_more_experts_of_a_row_than_luce_runs_are_named(native: Library, tmp_path: Path) -> None:
    config = replace(MODELS["mixture"], n_expert=80, n_expert_used=65, n_ff_expert=4, n_ff_shared=0)
    path = tiny.write(tmp_path / "many.gguf", config, tiny.layout(config, 1))
    refused(native, path, UnsupportedError, "expert_used_count is 65: luce runs up to 64")


@pytest.mark.parametrize("key", ["attention.key_length", "attention.head_count_kv", "rope.freq_base"])
def test_a_head_in_a_file_of_its_own_is_checked_too(
    key: str, native: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(DENSE, n_nextn=1)
    weights = tiny.layout(config, 1)
    trunk = tiny.write(tmp_path / "trunk.gguf", DENSE, tiny.layout(DENSE, 1))
    writing(monkeypatch, config.arch, key, KEYS[key][0])
    head = tiny.write(tmp_path / "head.gguf", config, tiny.head_only(config, weights))
    with pytest.raises(UnsupportedError, match=rf"head\.gguf: .*{KEYS[key][1]}"):
        drive.open_model(native, trunk, head=head)


@pytest.mark.parametrize("size, said", [({"head_dim": 33, "rope_dim": 8}, f"key_length is 33: {HEADS}"),
                                        ({"n_head": 3, "n_head_kv": 2}, "head_count is 3, no multiple of"),
                                        ({"rope_dim": 7}, "dimension_count is 7: luce rotates an even")])  # fmt: skip
def test_a_drafter_s_heads_are_checked_too(
    size: dict[str, int], said: str, native: Library, tmp_path: Path
) -> None:
    name, case = next(iter(tiny_dflash.CASES.items()))
    odd = replace(case, drafter=replace(case.drafter, **size))
    target = tiny.write(tmp_path / "target.gguf", case.target, tiny.layout(case.target, 1))
    drafter = tiny_dflash.write(tmp_path / "drafter.gguf", odd, tiny_dflash.weights(odd))
    with pytest.raises(UnsupportedError, match=rf"drafter\.gguf: attention\.{said}|drafter\.gguf: rope\.{said}"):
        drive.open_model(native, target, drafter=drafter)


@pytest.mark.parametrize("rows, said", [(0, "token_embd.weight.* is 0"),
                                        (2**24 + 1, "embd.weight has 16777217 rows: .* up to 16777216")])  # fmt: skip
def test_a_vocabulary_of_none_or_too_many_is_named(
    rows: int, said: str, native: Library, tmp_path: Path
) -> None:
    weights = tiny.layout(DENSE, 1) | {"token_embd.weight": np.zeros((rows, 1), np.float32)}
    path = tiny.write(tmp_path / "vocab.gguf", DENSE, weights, lambda name: "F16" if "embd" in name else "F32")
    with pytest.raises(Error, match=said):
        drive.open_model(native, path)


# Every number of heads, of groups, of rows' values and of experts that is whole has kernels on a CPU.
RUN: dict[str, dict[str, int]] = {
    "rows of one value": {"n_embd": 1}, "odd rows": {"n_embd": 33, "n_ff": 3},
    "seven groups": {"n_head": 14, "n_head_kv": 7},
    "many heads of one": {"n_head": 17, "n_head_kv": 1}, "one key head": {"n_k_head": 1, "n_v_head": 3},
    "no rotation": {"rope_dim": 0},
}  # fmt: skip


@pytest.mark.parametrize("size", RUN)
@pytest.mark.parametrize("model", MODELS)
def test_odd_sizes_that_have_kernels_run(model: str, size: str, native: Library, tmp_path: Path) -> None:
    config = replace(MODELS[model], **RUN[size])
    path = tiny.write(tmp_path / "odd.gguf", config, tiny.layout(config, 1))
    sequence = drive.open_sequence(drive.open_model(native, path), n_ctx=64)
    logits = drive.chain_logits(sequence, [3, 1, 4, 1, 5], 2)
    assert np.isfinite(logits).all() and logits.std() > 0


# ---- ops alone: a graph that asks for what has no kernel is refused too


@pytest.mark.parametrize("heads, kv, dim, said", [(2, 1, 33, f"attention: attention.key_length is 33: {HEADS}"),
                                                  (3, 2, 64, "attention.head_count is 3, no multiple")])  # fmt: skip
def test_attention_alone_is_refused(heads: int, kv: int, dim: int, said: str, native: Library) -> None:
    q = np.zeros((1, heads * dim), np.float32)
    pool = np.zeros((1, kv, PAGE, dim), np.float32)
    args = [q, None, pool, pool.copy(), step_ctl(Seq(parents=(-1,))), np.zeros(1, np.int32)]
    with pytest.raises(UnsupportedError, match=said):
        op_run(native, "cpu", "attention", args, (0, 0, 0, 0, 0), shape=q.shape)


@pytest.mark.parametrize("size, hk, hv, said", [(24, 2, 2, r"ssm\.state_size is 24: luce runs 16, 32, 64 and 128"),
                                                (32, 2, 3, r"ssm\.time_step_rank is 3, no multiple of")])  # fmt: skip
def test_the_conv_of_deltanet_alone_is_refused(size: int, hk: int, hv: int, said: str, native: Library) -> None:
    channels = (2 * hk + hv) * size
    log = channels + hv * size + 2 * (hk * size + hv)  # A slot's log of one row.
    x, w = np.zeros((1, channels), np.float32), np.zeros((channels, 4), np.float32)
    window, logs = np.zeros((1, 3, channels), np.float32), np.zeros((1, log), np.float32)
    args = [x, w, window, logs, step_ctl(Seq(parents=(-1,)))]
    with pytest.raises(UnsupportedError, match=said):
        op_run(native, "cpu", "deltanet_conv", args, (1, 1, hk, hv, size, 0, 1), shape=x.shape)
