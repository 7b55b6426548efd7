// Multiplies pieces of an expert's weights, by one warp, with the rows of an item (moe/plan.h), each a column of
// the tensor core's tile.
#pragma once

#include "matmul/multiply.cuh"

namespace luce {

// Returns how far an expert's matrix lies from `packed` of a Matrix, or of what has its fields. The shared expert's lies there.
template <typename Of> __device__ __forceinline__ int64_t expert_offset(const Of &m, int expert) {
    return m.offsets != nullptr && expert >= 0 ? __ldcg(m.offsets + expert) : max(expert, 0) * m.expert_bytes;
}

// Adds the products of a unit, counted along K, with a row of activations, which is the lane's own column's, to
// acc.
template <int TYPE>
__device__ __forceinline__ void multiply_item(Sums<1> &acc, const uint8_t *fragment, const uint8_t *row,
                                              int of_row, int lane) {
    constexpr int UNITS = units_of_chunk(TYPE);
    constexpr int VALUES = 8 / UNITS * 64; // a unit's activations have so many bytes
    const uint8_t *chunk = row + of_row / UNITS * chunk_bytes(1), *tail = chunk + chunk_sums(1);
    const float own = word_at<float>(tail + 32);
    const float2 down = {__shfl_sync(~0u, own, lane % 4 * 8), __shfl_sync(~0u, own, lane % 4 * 8 + 4)};
    // Each column lies in a chunk of its own.
    const auto downs = [&](const uint8_t *, int, int, int) { return down; };
    multiply_unit<TYPE, 1, false>(acc, fragment, chunk + of_row % UNITS * VALUES, tail, 1, lane, downs,
                                  [] {});
}

__device__ __forceinline__ void multiply_any(int type, Sums<1> &acc, const uint8_t *fragment,
                                             const uint8_t *row, int unit, int lane) {
    with_type(
        type, [](auto known, auto &...to) { multiply_item<known.value>(to...); }, acc, fragment, row, unit,
        lane);
}

} // namespace luce
