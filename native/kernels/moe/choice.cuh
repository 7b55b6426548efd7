// Chooses the experts of a row by the router's logits.
#pragma once

#include "matmul/pack.cuh"
#include "matmul/ptx.cuh"
#include "moe/plan.h"

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

// Has a row's experts that may be chosen, and then those that are, by rank. Each is its logit, ordered as an integer, above
// what rises as its id falls. Where logits are in no order and 8 of 256 experts are used, 21 of them may be chosen on
// average, and more than two a lane in 4 of 10,000 rows, which are ranked slowly.
constexpr int MOST_CANDIDATES = 2 * WARP;
constexpr uint32_t INFINITE = 0x7f800000; // the bits of an infinity
struct Candidates {
    // Behind them lie four that end a read, and a place for each lane to leave what is no candidate.
    alignas(16) uint64_t all[MOST_CANDIDATES + 4 + WARP];
    uint64_t ranked[WARP];
};

__device__ __forceinline__ uint64_t candidate(int key, int id) {
    return uint64_t(uint32_t(key) ^ 0x80000000u) << 32 | uint32_t(INT_MAX - id);
}
__device__ __forceinline__ float logit_of(uint64_t candidate) {
    const int key = int(uint32_t(candidate >> 32) ^ 0x80000000u);
    return __uint_as_float(uint32_t(key ^ (key >> 31 & INT_MAX)));
}

// Ranks a row's experts one by one, from all logits.
__device__ __forceinline__ void rank_slowly(const float *logits, int n_expert, int n_used, uint64_t *ranked,
                                            int lane) {
    uint64_t last = UINT64_MAX;
#pragma unroll 1
    for (int rank = 0; rank < n_used; rank++) {
        uint64_t best = 0;
#pragma unroll 1
        for (int id = lane; id < n_expert; id += WARP) {
            const uint64_t x = candidate(ordered(__ldcg(logits + id)), id);
            best = x < last && x > best ? x : best;
        }
        const uint32_t most = __reduce_max_sync(~0u, uint32_t(best >> 32));
        last =
            uint64_t(most) << 32 | __reduce_max_sync(~0u, uint32_t(best >> 32) == most ? uint32_t(best) : 0u);
        if (lane == 0) {
            ranked[rank] = last;
        }
    }
}

// Finds the experts that may be chosen, among N a lane, and returns how many there are. The lanes are in groups, at least
// as many as ranks, so the least of the groups' largest logits bounds them.
template <int N>
__device__ __forceinline__ int find_candidates(const MoeDims &d, const float *logits, Candidates &s,
                                               bool &finite, int lane) {
    int key[N], most = INT_MIN, least = INT_MAX, count = 0;
#pragma unroll
    for (int j = 0; j < N; j += 4) {
        const float4 x = __ldcg(reinterpret_cast<const float4 *>(logits) + lane + j / 4 * WARP);
        key[j] = int(__float_as_uint(x.x)), key[j + 1] = int(__float_as_uint(x.y));
        key[j + 2] = int(__float_as_uint(x.z)), key[j + 3] = int(__float_as_uint(x.w));
    }
    const auto id_of = [&](int j) { return lane * 4 + j / 4 * 4 * WARP + j % 4; };
#pragma unroll
    for (int j = 0; j < N; j++) {
        const bool present = id_of(j) < d.n_expert;
        const int x = ordered(__uint_as_float(uint32_t(key[j])));
        key[j] = present ? x : INT_MIN;
        most = max(most, key[j]);
        least = min(least, present ? x : 0);
    }
    // Numbers lie between the infinities, and what is none beyond them.
    finite = __all_sync(~0u, most < int(INFINITE) && least > int(~INFINITE | 0x80000000u));
    int bound = most;
    for (int apart = 1; 2 * apart * d.n_used <= WARP; apart *= 2) {
        bound = max(bound, __shfl_xor_sync(~0u, bound, apart));
    }
    bound = max(__reduce_min_sync(~0u, bound), INT_MIN + 1);
    const uint32_t below = (1u << lane) - 1;
#pragma unroll
    for (int j = 0; j < N; j++) {
        const bool may = key[j] >= bound;
        const uint32_t mask = __ballot_sync(~0u, may);
        const int at = count + __popc(mask & below);
        s.all[may && at < MOST_CANDIDATES ? at : MOST_CANDIDATES + 4 + lane] = candidate(key[j], id_of(j));
        count += __popc(mask);
    }
    return count;
}

// Chooses a row's experts with a warp. The largest logits come first, and of equal ones the lowest id. Where a logit is not
// finite the row has the first experts, and NaN for weights. The weights are there where it `weighs`.
__device__ __forceinline__ Choice choose_experts(const MoeDims &d, const float *logits, Candidates &s,
                                                 bool weighs, int lane) {
    constexpr int MOST = MOE_MAX_EXPERTS / WARP;
    bool finite = true;
    const int count = d.n_expert <= MOST / 2 * WARP ? find_candidates<MOST / 2>(d, logits, s, finite, lane)
                                                    : find_candidates<MOST>(d, logits, s, finite, lane);
    if (count > MOST_CANDIDATES) {
        rank_slowly(logits, d.n_expert, d.n_used, s.ranked, lane);
    } else {
        if (lane < 4) {
            s.all[count + lane] = 0;
        }
        __syncwarp();
        for (int i = lane; i < count; i += WARP) {
            const uint64_t own = s.all[i];
            int rank = 0;
#pragma unroll 1
            for (int j = 0; j < count; j += 4) {
                const ulonglong2 x = *reinterpret_cast<const ulonglong2 *>(s.all + j);
                const ulonglong2 y = *reinterpret_cast<const ulonglong2 *>(s.all + j + 2);
                rank += int(x.x > own) + int(x.y > own) + int(y.x > own) + int(y.y > own);
            }
            if (rank < d.n_used) {
                s.ranked[rank] = own;
            }
        }
    }
    __syncwarp();
    const uint64_t own = s.ranked[min(lane, d.n_used - 1)];
    Choice choice = {finite ? INT_MAX - int(uint32_t(own)) : lane, 0, 0};
    if (weighs) {
        const float gate = __ldcg(logits + d.n_expert);
        const float weight = lane >= d.n_used ? 0.0f
                             : finite         ? expf(logit_of(own) - logit_of(s.ranked[0]))
                                              : NAN;
        choice.weight = weight / warp_sum(weight, WARP);
        choice.open = 1 / (1 + expf(-gate));
    }
    return choice;
}

// ---- by a block ----

// The warps of a block choose one row's experts together, where each has 32 of them at most, and one at least. With one
// warp's steps shared by eight, the instructions are few that each block runs for the first time.
constexpr ROWMM_BOTH bool chosen_together(const MoeDims &d) {
    return d.n_expert > (ITEM_WARPS - 1) * WARP && d.n_expert <= ITEM_WARPS * WARP && d.n_used <= ITEM_WARPS;
}
struct Together {
    alignas(16) int keys[ITEM_WARPS * WARP];
    alignas(16) int most[ITEM_WARPS];
    alignas(16) int ranked[ITEM_WARPS]; // an expert, or -1

    // The block's next barrier stands between this and the choice.
    __device__ __forceinline__ void begin(int n_used) {
        if (threadIdx.x < ITEM_WARPS) {
            ranked[threadIdx.x] = int(threadIdx.x) < n_used ? -1 : 0;
        }
    }
};
__device__ __forceinline__ int least_of(const int (&x)[ITEM_WARPS]) {
    const int4 a = *reinterpret_cast<const int4 *>(x), b = *reinterpret_cast<const int4 *>(x + 4);
    return min(min(min(a.x, a.y), min(a.z, a.w)), min(min(b.x, b.y), min(b.z, b.w)));
}

// Ranks the experts, and returns false where logits of theirs are equal or any is not finite. The least of the warps' largest
// logits bounds those that may be chosen, of which a warp goes through its own.
__device__ __forceinline__ bool choose_together(const MoeDims &d, const float *logits, Together &s) {
    const int id = threadIdx.x, lane = id % WARP;
    const float x = id < d.n_expert ? __ldcg(logits + id) : -INFINITY;
    const bool finite = (__float_as_uint(x) & INFINITE) != INFINITE;
    const int key =
        finite || id >= d.n_expert ? ordered(x) : INT_MAX; // above all, so that nobody has the first rank
    s.keys[id] = key;
    const int most = __reduce_max_sync(~0u, key);
    if (lane == 0) {
        s.most[id / WARP] = most;
    }
    __syncthreads();
    const int4 a = reinterpret_cast<const int4 *>(s.keys)[2 * lane],
               b = reinterpret_cast<const int4 *>(s.keys)[2 * lane + 1];
    int chosen = 0;
    uint32_t left = __ballot_sync(~0u, key >= least_of(s.most));
#pragma unroll 1
    for (; left != 0; left &= left - 1) {
        const int src = __ffs(int(left)) - 1, k = __shfl_sync(~0u, key, src);
        int more[4] = {int(a.x > k) + int(a.y > k), int(a.z > k) + int(a.w > k), int(b.x > k) + int(b.y > k),
                       int(b.z > k) + int(b.w > k)};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            hold(more[i]); // else they are counted one behind the other
        }
        const int rank = __reduce_add_sync(~0u, more[0] + more[1] + (more[2] + more[3]));
        if (rank < d.n_used && k < INT_MAX) {
            if (lane == src) { // warps may have the same rank for equal logits
                atomicExch(&s.ranked[rank], id);
            }
            chosen++;
        }
    }
    // Of equal logits a rank is taken twice, and one behind it not at all.
    const int all = __syncthreads_count(lane < chosen);
    return all == d.n_used && least_of(s.ranked) >= 0;
}

__device__ __forceinline__ void keep_choice(const MoeDims &d, const RoutedLayout &at, uint8_t *routed,
                                            int row, const Choice &choice, int lane) {
    if (lane < d.n_used) {
        __stcg(reinterpret_cast<int32_t *>(routed + at.ids) + row * d.n_used + lane, choice.expert);
        __stcg(reinterpret_cast<float *>(routed + at.weights) + row * d.n_used + lane, choice.weight);
    }
    if (d.gated() && lane == 0) {
        __stcg(reinterpret_cast<float *>(routed + at.open) + row, choice.open);
    }
}

// An expert takes microseconds to come, and so many polls take seconds.
constexpr int MOST_POLLS = 1 << 24;

// Returns a pair's expert, which up leaves, and where route has left -1. This ends: all blocks of up run when a block of the
// launch behind begins, and the one that leaves the experts waits for nothing of that. Where that is broken, the launch fails
// and does not keep the device for ever.
__device__ __forceinline__ int chosen_expert(const uint8_t *routed, const RoutedLayout &at, int pair) {
    const volatile int32_t *ids = reinterpret_cast<const volatile int32_t *>(routed + at.ids);
    int expert = ids[pair];
    for (int polls = 0; expert < 0; polls++) {
        if (polls == MOST_POLLS) {
            __trap();
        }
        expert = ids[pair];
    }
    return expert;
}

} // namespace luce
