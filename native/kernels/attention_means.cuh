// Leaves a chunk's partial results as attention_parts.h says.
#pragma once

#include "attention_parts.h"
#include "attention_tile.cuh"

namespace luce {
namespace {

// Returns what makes a mean of a sum of values by weight. Where no key was seen, both are 0.
__device__ inline float mean_scale(float weights) {
    return weights == 0 ? 0.0f : __fdividef(1.0f, weights);
}

// Stores a thread's part of a chunk's mean at `at`, for a row and a head: two columns of each of N tiles of 8 columns, from
// `tile` on, which are elements 2 * half and 2 * half + 1 of o. `quarter` says which of the row's four threads it is.
template <int N>
__device__ __forceinline__ void store_means(const AttentionParts &a, int64_t at, int D, int tile,
                                            const float (*o)[4], int half, float scale, int quarter) {
    static_assert(N == 1 || N == 2 || N == 4, "a thread's word has four tiles");
    uint32_t x[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = pack_halves(o[i][2 * half] * scale, o[i][2 * half + 1] * scale);
    }
    uint32_t *to = static_cast<uint32_t *>(a.means) + at * (D / 2) + (tile / 4 * 4 + quarter) * 4 + tile % 4;
    if constexpr (N == 4) {
        *reinterpret_cast<uint4 *>(to) = {x[0], x[1], x[2], x[3]};
    } else if constexpr (N == 2) {
        *reinterpret_cast<uint2 *>(to) = {x[0], x[1]};
    } else {
        *to = x[0];
    }
}

} // namespace
} // namespace luce
