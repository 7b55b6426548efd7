"""Makes blocks of the quantised types for an oracle model: noise, copies, and a matrix that lets values pass.

Every scale is 1 and every offset half the range, so that a weight is d * (q - middle) for a uniform q. Where
a type's middle is not that of its range, there are scales of both signs. Blocks are uint8 (n, bytes), as ggml
stores them.
"""

from __future__ import annotations

import gguf
import numpy as np

QType = gguf.GGMLQuantizationType


def random_words(n: int, *seed: int) -> np.ndarray:
    """Returns n uint64 straight from PCG64, which are the same on every numpy."""
    bits = np.random.Generator(np.random.PCG64(seed))
    return bits.integers(0, 2**64, n, dtype=np.uint64)


def _k_header(d: float, offset: int) -> np.ndarray:
    """Returns d, dmin = d/2 and the packed 6-bit pairs (scale 1, min `offset`), which are the 16 bytes of
    Q4_K and Q5_K. A weight is d*q - dmin*offset: with offset 15 (Q4_K) or 31 (Q5_K) it is symmetric around 0.
    """
    half = np.float16(d / 2)
    low = [1] * 4 + [offset & 0x3F | (offset >> 4) << 6] * 4 + [1 | (offset & 0xF) << 4] * 4
    return np.concatenate([np.array([half + half, half], "<f2").view(np.uint8), np.array(low, np.uint8)])


def _q6_tail(d: float, signs: tuple[int, int]) -> np.ndarray:
    """Q6_K's 16 scales and d. A weight is d*scale*(q - 32)."""
    return np.concatenate([np.array(signs * 8, np.int8).view(np.uint8), np.array([d], "<f2").view(np.uint8)])


def _bytes(d: np.float16) -> np.ndarray:
    return np.array([d], "<f2").view(np.uint8)


def _uniform_std(levels: int) -> float:
    return float(np.sqrt((levels**2 - 1) / 12))


def noise_blocks(kind: QType, n: int, std: float, *seed: int) -> np.ndarray:
    """Returns n blocks (n, bytes) of weights with the given standard deviation."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = random_words(-(-n * size // 8), *seed).view(np.uint8)[: n * size].reshape(n, size)
    if kind == QType.Q4_K:
        blocks[:, :16] = _k_header(std / _uniform_std(16), 15)
    elif kind == QType.Q5_K:
        blocks[:, :16] = _k_header(std / _uniform_std(32), 31)
    elif kind == QType.Q6_K:  # A weight is q - 32, which has a mean of -1/2.
        blocks[:, 192:] = _q6_tail(std / _uniform_std(64), (1, -1))
    else:  # It is Q8_0, where q has a mean of -1/2.
        d = np.float16(std / _uniform_std(256))
        blocks[0::2, :2], blocks[1::2, :2] = _bytes(d), _bytes(-d)
    return blocks


def _pack_q6(q: np.ndarray) -> np.ndarray:
    """Returns ql and qh (n, 192) of Q6_K for values 0..63 (n, 256)."""
    n = len(q)
    q = q.reshape(n, 2, 4, 32)
    low, high = q & 0xF, q >> 4  # (n, half, quarter, 32)
    quarters = [high[:, :, i] << 2 * i for i in range(4)]
    return np.concatenate([
        (low[:, :, :2] | low[:, :, 2:] << 4).reshape(n, 128), np.bitwise_or.reduce(quarters).reshape(n, 64)
    ], 1)  # fmt: skip


def q4_to_q6(blocks: np.ndarray) -> np.ndarray:
    """Returns the same weights as Q6_K, exactly: d*(q - 7.5) = (d/2)*((2q + 17) - 32)."""
    n = len(blocks)
    # Element 64j + l is in the low half, and 64j + 32 + l in the high one.
    qs = blocks[:, 16:].reshape(n, 4, 32)
    out = np.empty((n, 210), np.uint8)
    out[:, :192] = _pack_q6((2 * np.stack([qs & 0xF, qs >> 4], 2) + np.uint8(17)).reshape(n, 256))
    out[:, 192:208] = 1
    out[:, 208:] = blocks[:, 2:4]  # Q6_K's d is Q4_K's dmin, which is d/2.
    return out


def silent(blocks: np.ndarray, kind: QType) -> None:
    """Makes all weights of blocks of Q4_K, Q6_K or Q8_0 zero."""
    scales = {QType.Q4_K: slice(0, 4), QType.Q6_K: slice(208, 210), QType.Q8_0: slice(0, 2)}
    blocks[..., scales[kind]] = 0


def pass_through_blocks(kind: QType, first: int, n: int, n_embd: int, carried: int = 0, by: int = 0) -> np.ndarray:
    """Returns blocks first .. first + n of eh_proj (E, 2E) = [identity, 0], which lets the embedding pass
    without the hidden state. The first `carried` values of the hidden state are let pass too, turned around
    by `by` places."""
    length, size = gguf.GGML_QUANT_SIZES[kind]
    index = np.arange(first, first + n)
    per_row = 2 * n_embd // length
    row, column = index // per_row, index % per_row
    inside = row % length
    holds = row // length == column  # This block of the row holds its diagonal.
    if carried:
        source = n_embd + (row - by) % carried
        turned = (row < carried) & (source // length == column)
        inside = np.where(turned, source % length, inside)
        holds |= turned
    hit, inside = np.flatnonzero(holds), inside[holds]
    if kind == QType.Q6_K:
        q = np.full((n, 256), 32, np.uint8)
        q[hit, inside] = 33
        return np.concatenate([_pack_q6(q), np.tile(_q6_tail(1.0, (1, 1)), (n, 1))], 1)
    out = np.zeros((n, size), np.uint8)
    if kind == QType.Q8_0:
        out[:, :2] = _bytes(np.float16(1))
        out[hit, 2 + inside] = 1
    else:  # It is Q4_K.
        out[:, :16] = _k_header(1.0, 0)
        out[hit, 16 + inside // 64 * 32 + inside % 32] = np.where(inside % 64 < 32, 1, 16)
    return out


def set_first(blocks: np.ndarray, kind: QType, chosen: np.ndarray, value: float) -> None:
    """Makes the first weights of rows `value` where they are chosen, else zero. `chosen` is bool (rows, 64), and
    `blocks` (rows, blocks of a row, bytes) is of noise_blocks' Q4_K, Q6_K or Q8_0, whose other weights stay. The
    weight is the nearest to `value` that the type has."""
    n, width = chosen.shape
    if width != 64:
        raise ValueError(f"{width} weights: expected 64")
    if kind == QType.Q8_0:  # A block has 32 weights and a scale of its own.
        blocks[:, :2, :2] = _bytes(np.float16(value / 127))
        blocks[:, :2, 2:] = np.where(chosen, 127, 0).astype(np.uint8).reshape(n, 2, 32)
        return
    first = blocks[:, 0]
    at = slice(0, 2) if kind == QType.Q4_K else slice(208, 210)
    d = np.ascontiguousarray(first[:, at]).view("<f2").astype(np.float64)[:, 0] * (1 if kind == QType.Q4_K else 2)
    unit = float(d.max(initial=0.0)) or 1.0  # It is that of all rows, but of those that are zero anyway.
    scale = max(1, int(np.ceil(value / (15 * unit))))
    if scale > (63 if kind == QType.Q4_K else 127):
        raise ValueError(f"{kind.name} does not hold {value:g} beside weights of standard deviation 1")
    q = np.where(chosen, min(15, round(value / (unit * scale))), 0).astype(np.uint8)
    if kind == QType.Q4_K:  # Weights 0..31 are in low nibbles, 32..63 in high ones; both have the minimum 0.
        first[:, 4:6] = first[:, 4:6] & 0xC0 | scale
        first[:, 8:10] &= 0xC0
        first[:, 16:48] = q[:, :32] | q[:, 32:] << 4
        return
    q = 2 * q + np.uint8(32)
    first[:, :64] = first[:, :64] & 0xF0 | q & 0xF
    first[:, 128:160] = first[:, 128:160] & 0xF0 | q[:, :32] >> 4 | (q[:, 32:] >> 4) << 2
    first[:, 192:196] = scale
