// Chooses the experts of a row by the router's logits.
#pragma once

#include "moe_plan.h"
#include "rowmm_pack.cuh"

#include <climits>
#include <cmath>

namespace luce {

// A lane has the expert of its rank and that expert's weight. All lanes have the sigmoid of the shared gate.
struct Choice {
    int expert;
    float weight, open;
};

// Returns an integer that is ordered as the numbers are, of which -0 and 0 are the same.
__device__ __forceinline__ int ordered(float x) {
    const int bits = int(__float_as_uint(x + 0.0f));
    return bits ^ (bits >> 31 & INT_MAX);
}

// A lane's logits, the largest first, and of equal ones the lowest id. Expert lane + j * WARP is called j.
template <int N> struct Ranked {
    int key[N], j[N];

    __device__ void order(int a, int b) {
        const bool swaps = key[b] > key[a] || (key[b] == key[a] && j[b] < j[a]);
        const int k = key[a], i = j[a];
        key[a] = swaps ? key[b] : k, key[b] = swaps ? k : key[b];
        j[a] = swaps ? j[b] : i, j[b] = swaps ? i : j[b];
    }
    // Does Batcher's odd-even merge sort, for N a power of two: merges runs of P, comparing what lies K apart.
    template <int P = 1, int K = 1> __device__ void sort() {
        if constexpr (P < N) {
#pragma unroll
            for (int a = K % P; a < N - K; a++) {
                if ((a - K % P) / K % 2 == 0 && a / (2 * P) == (a + K) / (2 * P)) {
                    order(a, a + K);
                }
            }
            sort<K == 1 ? 2 * P : P, K == 1 ? 2 * P : K / 2>();
        }
    }
    // Drops the first where `taken`. What comes in behind is less than any number.
    __device__ void drop(bool taken) {
#pragma unroll
        for (int i = 0; i + 1 < N; i++) {
            key[i] = taken ? key[i + 1] : key[i];
            j[i] = taken ? j[i + 1] : j[i];
        }
        key[N - 1] = taken ? INT_MIN : key[N - 1];
    }
};

// Chooses a row's experts with a warp, of N logits a lane or less. The largest come first, and of equal ones the lowest
// id. Where a logit is not finite the row has the first experts, and NaN for weights. Only the first `ranks` are found;
// the weights need all.
template <int N> __device__ Choice choose_among(const MoeDims &d, const float *logits, int ranks, int lane) {
    Ranked<N> x;
    const float gate = d.shared() ? __ldcg(logits + d.n_expert) : 0.0f;
    bool finite = true;
#pragma unroll
    for (int j = 0; j < N; j++) {
        const int id = lane + j * WARP;
        const float logit = id < d.n_expert ? __ldcg(logits + id) : -INFINITY;
        finite = finite && (id >= d.n_expert || isfinite(logit));
        x.key[j] = ordered(logit);
        x.j[j] = j;
    }
    finite = __all_sync(~0u, finite);
    x.sort();
    int own = 0, expert = lane, top = 0; // lane r has those of rank r
    for (int rank = 0; rank < ranks; rank++) {
        const int most = __reduce_max_sync(~0u, x.key[0]), id = lane + x.j[0] * WARP;
        const int lowest = -__reduce_max_sync(~0u, x.key[0] == most ? -id : INT_MIN);
        top = rank == 0 ? most : top;
        own = lane == rank ? most : own;
        expert = lane == rank && finite ? lowest : expert;
        x.drop(id == lowest);
    }
    const auto number = [](int key) { return __uint_as_float(uint32_t(key ^ (key >> 31 & INT_MAX))); };
    const float weight = lane >= d.n_used ? 0.0f : finite ? expf(number(own) - number(top)) : NAN;
    return {expert, weight / warp_sum(weight, WARP), 1 / (1 + expf(-gate))};
}

__device__ __forceinline__ Choice choose_experts(const MoeDims &d, const float *logits, int ranks, int lane) {
    constexpr int MOST = MOE_MAX_EXPERTS / WARP;
    return d.n_expert <= MOST / 2 * WARP ? choose_among<MOST / 2>(d, logits, ranks, lane)
                                         : choose_among<MOST>(d, logits, ranks, lane);
}

__device__ __forceinline__ void keep_choice(const MoeDims &d, const RoutedLayout &at, uint8_t *routed,
                                            int row, const Choice &choice, int lane) {
    if (lane < d.n_used) {
        __stcg(reinterpret_cast<int32_t *>(routed + at.ids) + row * d.n_used + lane, choice.expert);
        __stcg(reinterpret_cast<float *>(routed + at.weights) + row * d.n_used + lane, choice.weight);
    }
    if (d.shared() && lane == 0) {
        __stcg(reinterpret_cast<float *>(routed + at.open) + row, choice.open);
    }
}

} // namespace luce
