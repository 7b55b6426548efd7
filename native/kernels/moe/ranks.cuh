// Adds up what a row's experts gave, by rank.
#pragma once

#include "moe/plan.h"

namespace luce {
namespace {

constexpr int AHEAD = 8; // so many loads are in flight

// Has a lane's values of a row, and none beyond the row's end.
struct Own {
    float4 v[2];
};
__device__ __forceinline__ Own own_values(const float *row, int k, int E) {
    const float4 *p = reinterpret_cast<const float4 *>(row + k);
    return {k < E ? p[0] : float4{}, k + 4 < E ? p[1] : float4{}};
}
__device__ __forceinline__ float4 fma4(float w, float4 y, float4 sum) {
    return {fmaf(w, y.x, sum.x), fmaf(w, y.y, sum.y), fmaf(w, y.z, sum.z), fmaf(w, y.w, sum.w)};
}

// Returns the weight of a row's rank, of the row's weights, with the factor of its expert.
__device__ __forceinline__ float rank_weight(const float *of_ranks, const void *routed,
                                             const RoutedLayout &at, const float *scales, int64_t row,
                                             int n_used, int rank) {
    const float weight = __ldcg(of_ranks + rank);
    if (scales == nullptr) {
        return weight;
    }
    const auto *ids = reinterpret_cast<const int32_t *>(static_cast<const uint8_t *>(routed) + at.ids);
    return weight * scales[__ldcg(ids + row * n_used + rank)];
}

// Adds a lane's values of a row's experts, y [T][n_used][E], times their weights, of which the first ones are `early`: all, or with
// n_used for the first rank none.
template <class Weight>
__device__ __forceinline__ void add_ranks(Own &sum, int first, const float *y, int64_t row, int n_used, int k,
                                          int E, const float (&early)[AHEAD], const Weight &weight_of) {
    for (; first < n_used; first += AHEAD) {
        Own of_rank[AHEAD];
        float w[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const bool present = first + i < n_used;
            of_rank[i] = present ? own_values(y + (row * n_used + first + i) * E, k, E) : Own{};
            w[i] = first == 0 ? early[i] : present ? weight_of(first + i) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                sum.v[j] = first + i < n_used ? fma4(w[i], of_rank[i].v[j], sum.v[j]) : sum.v[j];
            }
        }
    }
}

} // namespace
} // namespace luce
