"""Checks what a GPU has in place of types without kernels there: the same values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from op_run import core

from luce.native import Library

QType = GGMLQuantizationType


def recode(native: Library, kind: str, blocks: np.ndarray, table: bool = False) -> tuple[str, np.ndarray]:
    """Returns the type that stands in for `kind` in a matrix (or a table), and the blocks' values as that."""
    ffi, lib = core(native.path)
    values = blocks.size // GGML_QUANT_SIZES[QType[kind]][1] * GGML_QUANT_SIZES[QType[kind]][0]
    out, to = np.zeros(4 * values, np.uint8), ffi.new("int32_t *")

    def pointer(array: np.ndarray) -> Any:
        return ffi.cast("uint8_t *", array.ctypes.data)

    native.check(
        lib.luce_recode(int(QType[kind]), pointer(blocks), values, table, to, pointer(out), len(out))
    )
    found = QType(to[0])
    block, size = GGML_QUANT_SIZES[found]
    return found.name, dequantize(out[: values // block * size], found)


def random(kind: str, n: int = 64) -> np.ndarray:
    size = GGML_QUANT_SIZES[QType[kind]][1]
    return np.random.default_rng(size).integers(0, 256, (n, size), np.uint8)


def test_mxfp4_keeps_each_value_that_f16_scales_reach(native):
    blocks = random("MXFP4", 40)
    blocks[:, 0] = range(104, 144)  # Scales of Q5_0 are then 2^-24 to 2^15.
    kind, found = recode(native, "MXFP4", blocks)
    assert kind == "Q5_0" and found.tobytes() == dequantize(blocks.reshape(-1), QType.MXFP4).tobytes()


def test_mxfp4_below_the_least_f16_is_rounded_to_it(native):
    blocks = random("MXFP4", 104)
    blocks[:, 0] = range(104)
    _, found = recode(native, "MXFP4", blocks)
    exact = dequantize(blocks.reshape(-1), QType.MXFP4)
    assert np.array_equal(found, np.rint(exact * np.float32(2.0**24)) * np.float32(2.0**-24))


def test_mxfp4_too_large_for_f16_does_not_stay_finite(native):
    blocks = random("MXFP4", 1)
    blocks[:, 0] = 144
    blocks[:, 1:] |= 0x11  # No weight is 0.
    assert not np.isfinite(recode(native, "MXFP4", blocks)[1]).any()


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
def test_ternary_blocks_keep_each_value(native, kind):
    values = np.random.default_rng(0).integers(-1, 2, (16, 256)).astype(np.float32)
    values *= np.float16(1) + np.arange(16, dtype=np.float32)[:, None] / 64
    values[3] = 0
    blocks = native.quantize(int(QType[kind]), values)
    found_kind, found = recode(native, kind, blocks.reshape(-1))
    assert found_kind == "Q4_0" and np.array_equal(found.reshape(values.shape), values)


@pytest.mark.parametrize("kind, to", [("NVFP4", "F16"), ("IQ4_NL", "F32"), ("MXFP4", "Q5_0")])
def test_tables_that_cuda_cannot_look_up_keep_their_values(native, kind, to):
    values = np.random.default_rng(1).standard_normal((200, 64)).astype(np.float32)
    blocks = native.quantize(int(QType[kind]), values).reshape(-1)
    found_kind, found = recode(native, kind, blocks, table=True)
    assert found_kind == to and np.array_equal(found.reshape(-1), dequantize(blocks, QType[kind]).reshape(-1))


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q4_K", "IQ2_XS", "NVFP4"])
def test_other_matrices_stay_as_they_are(native, kind):
    blocks = random(kind, 8).reshape(-1)
    ffi, lib = core(native.path)
    out, to = np.zeros_like(blocks), ffi.new("int32_t *")
    n = blocks.size // GGML_QUANT_SIZES[QType[kind]][1] * GGML_QUANT_SIZES[QType[kind]][0]
    source, target = (ffi.cast("uint8_t *", array.ctypes.data) for array in (blocks, out))
    native.check(lib.luce_recode(int(QType[kind]), source, n, 0, to, target, len(out)))
    assert to[0] == QType[kind] and out.tobytes() == blocks.tobytes()
