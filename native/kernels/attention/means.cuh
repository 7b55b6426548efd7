// Leaves a chunk's partial results as attention/partials.h says.
#pragma once

#include "attention/partials.h"
#include "attention/tile.cuh"

namespace luce {
namespace {

// Stores x as what L2 lets go of last. The second kernel reads results soon, beside cells that are read once and would take
// their place.
template <typename T> __device__ __forceinline__ void store_kept(T *to, const T &x) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "a word");
    const uint32_t *words = reinterpret_cast<const uint32_t *>(&x);
    uint64_t last;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(last));
    if constexpr (sizeof(T) == 4) {
        asm volatile("st.global.L2::cache_hint.b32 [%0], %1, %2;" ::"l"(to), "r"(words[0]), "l"(last)
                     : "memory");
    } else if constexpr (sizeof(T) == 8) {
        asm volatile("st.global.L2::cache_hint.v2.b32 [%0], {%1, %2}, %3;" ::"l"(to), "r"(words[0]),
                     "r"(words[1]), "l"(last)
                     : "memory");
    } else {
        asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(words[0]),
                     "r"(words[1]), "r"(words[2]), "r"(words[3]), "l"(last)
                     : "memory");
    }
#else
    *to = x;
#endif
}

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
        store_kept(reinterpret_cast<uint4 *>(to), uint4{x[0], x[1], x[2], x[3]});
    } else if constexpr (N == 2) {
        store_kept(reinterpret_cast<uint2 *>(to), uint2{x[0], x[1]});
    } else {
        store_kept(to, x[0]);
    }
}

// Stores two columns of `tile` (x) and of the next tile (y), which is in the same four.
__device__ __forceinline__ void store_columns(const AttentionParts &a, int64_t at, int D, int tile,
                                              int quarter, uint32_t x, uint32_t y) {
    uint32_t *to = static_cast<uint32_t *>(a.means) + at * (D / 2) + (tile / 4 * 4 + quarter) * 4 + tile % 4;
    store_kept(reinterpret_cast<uint2 *>(to), uint2{x, y});
}

} // namespace
} // namespace luce
