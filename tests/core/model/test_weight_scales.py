"""Factors that lie beside matrices of NVFP4, as converters of checkpoints of NVIDIA's ModelOpt write them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import drive
import gguf
import numpy as np
import pytest
import tiny
from depth import deeper
from split import two_ranks

from luce.errors import Error, FileError, UnsupportedError
from luce.native import File, Library

DENSE = tiny.Config(n_layer=2, interval=2, n_embd=256, n_ff=256, n_head=4, n_head_kv=2, head_dim=64,
                    rope_dim=16, n_k_head=2, n_v_head=4, state_size=64, n_nextn=1)  # fmt: skip
FUSED = tiny.with_experts(DENSE)
CONFIGS = {"dense": DENSE, "experts": replace(FUSED, fused_experts=False), "fused": FUSED}
NVFP4 = gguf.GGMLQuantizationType.NVFP4
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def value(byte: int) -> float:
    """Returns what a scale of 4 bits of exponent and 3 of fraction stands for."""
    exponent, fraction = byte >> 3, byte & 7
    return fraction * 2.0**-9 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)


BYTES = {value(byte): byte for byte in range(0x7F)}
# By power of two and scale: the scale that is as many times larger.
TIMES = [{byte: BYTES.get(value(byte) * 2**power, 0) for byte in range(0x7F)} for power in range(4)]


def type_of(name: str) -> str:
    return "NVFP4" if tiny.quantizable(name) and name != "token_embd.weight" else "F32"


def power(name: str, expert: int) -> int:
    """Returns which power of two the factor is: another for each expert and kind of matrix."""
    return (expert + len(name)) % 4


def write_pair(native: Library, folder: Path, c: tiny.Config, suffix: str = ".scale") -> tuple[Path, Path]:
    """Writes a model whose matrices have factors, and one whose blocks have had them multiplied in."""
    weights = tiny.layout(c, 7)
    scales = {}
    for name, x in weights.items():
        if type_of(name) == "NVFP4":
            base = name.removesuffix(".weight")
            n = len(x) if x.ndim == 3 else 1
            scales[base + suffix] = np.array([2.0 ** power(base, i) for i in range(n)], np.float32)
            scales[base + suffix.replace("scale", "input_scale")] = np.full(n, 77, np.float32)
    apart = tiny.write(folder / "apart.gguf", c, weights | scales, type_of, quantize=native.quantize)
    joined = gguf.GGUFWriter(folder / "joined.gguf", c.arch)
    tiny.add_keys(joined, c, "joined", file_type=0)
    for tensor in gguf.GGUFReader(apart).tensors:
        data = np.array(tensor.data)
        if tensor.tensor_type == NVFP4:
            base = tensor.name.removesuffix(".weight")
            matrices = data.reshape(data.shape[0] if data.ndim == 3 else 1, -1, 36)
            for i, blocks in enumerate(matrices):
                times = TIMES[power(base, i)]
                blocks[:, :4] = [[times[int(d)] for d in block] for block in blocks[:, :4]]
        if "scale" not in tensor.name:
            joined.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    joined.write_header_to_file()
    joined.write_kv_data_to_file()
    joined.write_tensors_to_file()
    joined.close()
    return apart, folder / "joined.gguf"


@pytest.mark.parametrize(
    "which, cpu_experts", [("dense", 0), *deeper(("experts", 0), ("experts", 2)), ("fused", 0), *deeper(("fused", 2))]
)
def test_a_factor_beside_a_matrix_is_one_in_its_blocks(native, tmp_path, which, cpu_experts):
    """Powers of two change no rounding, so the bits are the same."""
    found = []
    for path in write_pair(native, tmp_path, CONFIGS[which]):
        model = drive.open_model(native, path, head=True, cpu_experts=cpu_experts)
        sequence = drive.open_sequence(model, n_ctx=64, n_draft=1)
        decoded = drive.decode(sequence, TOKENS, 12, 1, logits=True)
        assert len(decoded.logits) >= 12 and np.isfinite(decoded.logits).all()
        found.append((decoded.tokens, decoded.accepted, np.array(decoded.logits).tobytes()))
    assert found[0] == found[1]


def test_a_factor_of_the_output_counts_where_ranks_share_its_rows(native, device, tmp_path):
    """Beside a head the last rank has all rows, and multiplies with the first ones."""
    found = []
    for path in write_pair(native, tmp_path, replace(DENSE, n_vocab=512)):
        model = drive.open_model(native, path, two_ranks(device), head=True)
        sequence = drive.open_sequence(model, n_ctx=64, n_draft=1)
        found.append(np.array(drive.decode(sequence, TOKENS, 4, 1, logits=True).logits).tobytes())
    assert found[0] == found[1]


def test_a_factor_may_be_named_after_the_weight(native, tmp_path):
    logits = []
    for suffix in (".scale", ".weight.scale"):
        path, _ = write_pair(native, tmp_path, DENSE, suffix)
        sequence = drive.open_sequence(drive.open_model(native, path), n_ctx=64)
        logits.append(drive.decode(sequence, TOKENS, 4, logits=True).logits)
    assert np.array_equal(*logits)


@pytest.mark.parametrize(
    "name, kind, error",
    [("blk.0.ffn_up.scale", "Q8_0", UnsupportedError), ("blk.0.attn_norm.scale", "NVFP4", UnsupportedError),
     ("blk.0.ffn_up.scale", "NVFP4 twice", FileError)],
)  # fmt: skip
def test_a_factor_that_has_no_place_is_named(native, tmp_path, name, kind, error):
    weights = tiny.layout(DENSE, 7) | {name: np.ones(2 if "twice" in kind else 1, np.float32)}
    kind_of = drive.type_of(kind.split()[0])
    path = tiny.write(tmp_path / "x.gguf", DENSE, weights, kind_of, quantize=native.quantize)
    with pytest.raises(Error, match=name) as raised:
        File(path, native).plan_memory("cpu")
    assert isinstance(raised.value, error)
