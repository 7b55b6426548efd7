// Has up of a step of one row, of which each expert is an item and each block has one task.
//
// What comes behind the wait is run once by each block, and its instructions come from far. So there is little of it: what
// can be found before is, a task's units are fetched at once, and what few choices need is left to slower code.
#pragma once

#include "moe/block.cuh"
#include "moe/choice.cuh"

namespace luce {

struct OneShared {
    float parts[ITEM_WARPS][FRAGMENT];
    Candidates candidates, kept; // a warp's that chooses alone
    Together together;
    int experts[WARP]; // by rank, where a warp has chosen alone
};

// Says which units of a task a warp has.
struct OnePart {
    const uint8_t *from; // the first unit, of expert 0
    int stride, bytes, first, units; // the first is counted along K
    int type, fragment;

    __device__ __forceinline__ OnePart(const MatmulParams &p, const Group &g, int x) {
        const int warp = threadIdx.x / WARP, part = warp >> 1 & ((1 << g.log_across) - 1);
        const Matrix &m = g.matrices[warp & 1];
        fragment = (x << g.log_fragments) + (warp >> (1 + g.log_across));
        first = g.begin(part, m.units);
        const int tile = fragment / FRAGMENTS, wide = min(g.fragments - tile * FRAGMENTS, FRAGMENTS);
        const uint32_t at =
            uint32_t(tile * FRAGMENTS * g.chunks * m.units + first * wide + fragment % FRAGMENTS);
        type = m.type;
        bytes = m.unit_bytes;
        stride = wide * bytes;
        from = m.packed + int64_t(at) * bytes;
        units = fragment < g.fragments ? g.begin(part + 1, m.units) - first : 0;
    }
    __device__ __forceinline__ void fetch(uint32_t to, uint32_t barrier, int slot_bytes) const {
        if (threadIdx.x % WARP < COPY_LANES) {
            copies_begin(barrier, units * bytes);
#pragma unroll 1
            for (int u = 0; u < units; u++) {
                copy_to_shared(to + u * slot_bytes, from + u * stride, bytes, barrier, false);
            }
            copies_end(barrier);
        }
    }
};

// Returns the expert of a rank to all threads. A block that `leaves` them leaves all to the next launch, which may be waiting
// for them.
__device__ __forceinline__ int choose_one(const MatmulParams &p, OneShared &s, int rank, bool leaves) {
    const float *logits = reinterpret_cast<const float *>(p.routed + p.at.logits);
    const int *experts = s.together.ranked;
    if (!chosen_together(p.dims) || !choose_together(p.dims, logits, s.together)) {
        if (threadIdx.x < WARP) {
            s.experts[threadIdx.x] = choose_experts(p.dims, logits, s.candidates, false, threadIdx.x).expert;
        }
        __syncthreads();
        experts = s.experts;
    }
    if (leaves && int(threadIdx.x) < p.n_used) {
        __stcg(reinterpret_cast<int32_t *>(p.routed + p.at.ids) + threadIdx.x, experts[threadIdx.x]);
    }
    return experts[rank];
}

template <int TYPE>
__device__ __forceinline__ void multiply_part(const OnePart &part, Sums<1> &acc, const uint8_t *slot,
                                              int slot_bytes, const uint8_t *row) {
    const int lane = threadIdx.x % WARP;
#pragma unroll 1
    for (int u = part.first; u < part.first + part.units; u++, slot += slot_bytes) {
        multiply_item<TYPE>(acc, slot, row, u, lane);
    }
}
__device__ __forceinline__ void multiply_one(const OnePart &part, Sums<1> &acc, const uint8_t *slot,
                                             int bytes, const uint8_t *row) {
    with_type(
        part.type, [](auto known, auto &...to) { multiply_part<known.value>(to...); }, part, acc, slot, bytes,
        row);
}

// Adds the parts of K of an output by pairs. Those of the other matrix lie between them.
__device__ __forceinline__ float add_parts(const float *part, int n_parts) {
    float sum = part[0];
    if (n_parts > 1) {
        sum += part[2 * FRAGMENT];
    }
    if (n_parts > 2) {
        sum += part[4 * FRAGMENT] + part[6 * FRAGMENT];
    }
    return sum;
}

// The shared expert's blocks come first, and their weights are fetched before the launch waits. The first block behind them
// leaves the experts at once to the next launch, which may be waiting for them. The first block of all leaves the whole choice:
// where it has a task of the shared expert it has time.
__global__ void __launch_bounds__(ITEM_THREADS, SMALL_BLOCKS_SM)
    moe_up_one_kernel(const __grid_constant__ MatmulParams p) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ OneShared own;
    OneShared &s = *reinterpret_cast<OneShared *>(held_address(reinterpret_cast<uint8_t *>(&own)));
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const auto [rank, x] = TaskAt(p, blockIdx.x);
    const Group &g = rank < 0 ? p.shared : p.experts;
    const uint32_t of_units = shared_address(shared) + warp * 8,
                   of_row = shared_address(shared) + ITEM_WARPS * 8;
    uint8_t *row = shared + ONE_BARRIERS, *units = row + p.row_bytes + warp * p.slots * p.slot_bytes;
    if (lane == 0) {
        barrier_init(of_units, COPY_LANES);
        if (warp == 0) {
            barrier_init(of_row, COPY_LANES);
        }
        barrier_init_done();
    }
    s.together.begin(p.n_used);
    __syncthreads();
    OnePart part(p, g, x);
    if (rank < 0) {
        part.fetch(shared_address(units), of_units, p.slot_bytes);
    }
    const Matrix &m = g.matrices[warp & 1];
    const int64_t expert_bytes = m.expert_bytes, *offsets = m.offsets;
    wait_for_previous();
    let_next_start(); // not ahead of the wait: moe/end.cu polls for what this launch leaves, and reads what route has left
    if (warp == ITEM_WARPS - 1 && lane < COPY_LANES) { // ahead of the weights, which would delay it
        copies_begin(of_row, g.record);
        copy_to_shared(shared_address(row), p.routed + p.at.rows + first_row(p.dims, rank < 0) * g.record,
                       g.record, of_row, true);
        copies_end(of_row);
    }
    int expert = 0;
    if (rank >= 0) {
        expert = choose_one(p, s, rank, int(blockIdx.x) == p.tasks_of(0));
        part.from += offsets != nullptr ? __ldcg(offsets + expert) : expert * expert_bytes;
        part.fetch(shared_address(units), of_units, p.slot_bytes);
    }
    if (blockIdx.x == 0 && warp == ITEM_WARPS - 1) {
        const float *logits = reinterpret_cast<const float *>(p.routed + p.at.logits);
        keep_choice(p.dims, p.at, p.routed, 0, choose_experts(p.dims, logits, s.kept, true, lane), lane);
    }
    barrier_wait(of_row, 0);
    barrier_wait(of_units, 0);
    Sums<1> acc = {};
    multiply_one(part, acc, units, p.slot_bytes, row);
    if (part.units > 0) {
        scale_part(acc, m, expert, part.fragment);
    }
    if (lane % 4 == 0) { // these have the only column
        s.parts[warp][lane / 4] = acc[0][0];
        s.parts[warp][lane / 4 + 8] = acc[0][2];
    }
    __syncthreads();
    const int o = threadIdx.x % FRAGMENT, f = threadIdx.x / FRAGMENT, n_parts = 1 << g.log_across;
    const int n = ((x << g.log_fragments) + f) * FRAGMENT + o;
    if (f < 1 << g.log_fragments && n < g.N) {
        const float *parts = s.parts[2 * f * n_parts] + o;
        const float gate = add_parts(parts, n_parts), up = add_parts(parts + FRAGMENT, n_parts);
        p.out[(rank < 0 ? p.n_used : rank) * p.out_row + n] = activated(p.activation, gate) * up;
    }
}

} // namespace luce
