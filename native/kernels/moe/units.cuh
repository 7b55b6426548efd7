// Says what the blocks of up and down do (moe/matmul.cu), and brings each warp its weights.
//
// A unit is 16 outputs of one matrix over 256 of K, or less (matmul/layout.h). A step is as many units as a warp has of
// 16 outputs. A task is an item and a few steps.
#pragma once

#include "matmul/multiply.cuh"
#include "moe/item.cuh"
#include "moe/params.h"

namespace luce {

struct Task {
    int32_t expert, x, count, reserved;
};

// Says which part of a group's matrices the warp has.
struct Work {
    int matrix, fragment; // `fragment` counts in the block
    int part, last; // it has parts part .. last - 1 of K

    __device__ Work(const MatmulParams &p, const Group &g, int warp = threadIdx.x / WARP) {
        const int log = p.log_matrices;
        matrix = warp & ((1 << log) - 1);
        const int within = g.log_parts - g.log_across;
        part = (warp >> log & ((1 << g.log_across) - 1)) << within;
        last = part + (1 << within);
        fragment = warp >> (log + g.log_across);
    }
    __device__ int fragment_at(const MatmulParams &p, const Group &g, int x, int step) const {
        return ((x * p.steps + step) << g.log_fragments) + fragment;
    }
};

__device__ __forceinline__ const Group &group_of(const MatmulParams &p, int expert) {
    return expert == SHARED ? p.shared : p.experts;
}

// Returns the number of this warp. Those of one matrix follow each other where the warps of a warpgroup multiply at once.
template <bool GROUPED> __device__ __forceinline__ int own_warp(const MatmulParams &p) {
    const int warp = threadIdx.x / WARP;
    return GROUPED && p.log_matrices > 0 ? warp % (ITEM_WARPS / 2) * 2 + warp / (ITEM_WARPS / 2) : warp;
}

// Goes through the units of a warp, step after step and task after task, and brings them into its slots.
template <bool GROUPED> struct Units {
    const uint8_t *from; // the next unit is fetched from here
    int stride, bytes, left; // so many units of the step are left
    int task, step;

    // With NONE for the expert they are counted from `packed`, and an expert's offset is to be added.
    __device__ void begin(const MatmulParams &p, int expert, int x) {
        const Group &g = group_of(p, expert);
        const Work w(p, g, own_warp<GROUPED>(p));
        const Matrix &m = g.matrices[w.matrix];
        const int fragment = w.fragment_at(p, g, x, step);
        const int first = g.begin(w.part, m.units), last = g.begin(w.last, m.units);
        const int tile = fragment / FRAGMENTS, wide = min(g.fragments - tile * FRAGMENTS, FRAGMENTS);
        const uint32_t at =
            uint32_t(tile * FRAGMENTS * g.chunks * m.units + first * wide + fragment % FRAGMENTS);
        from = m.packed + expert_offset(m, expert) + int64_t(at) * m.unit_bytes;
        bytes = m.unit_bytes;
        stride = wide * bytes;
        left = fragment < g.fragments ? last - first : 0;
    }
    // Returns whether there is a unit.
    __device__ bool find(const MatmulParams &p, const Task *tasks, int n_tasks) {
        while (left == 0) {
            if (++step >= p.steps) {
                step = 0;
                task++;
            }
            if (task >= n_tasks) {
                step = p.steps;
                return false;
            }
            begin(p, tasks[task].expert, tasks[task].x);
        }
        return true;
    }
    __device__ void fetch(uint32_t slot, uint32_t barrier) {
        if (threadIdx.x % WARP < COPY_LANES) {
            copies_begin(barrier, bytes);
            copy_to_shared(slot, from, bytes, barrier, false);
            copies_end(barrier);
        }
        from += stride;
        left--;
    }
};

// Has a warp's slots of shared memory, through which its units come in their order.
template <bool GROUPED> struct WarpRing {
    uint8_t *slots;
    uint32_t full; // each slot's barrier
    int slot, filled; // the next unit is in `slot`; so many slots were filled at first
    uint32_t phases; // bit s is the parity that slot s waits for
    Units<GROUPED> units;

    __device__ WarpRing(const MatmulParams &p, uint8_t *shared) : slot(0), filled(0), phases(0), units{} {
        const int warp = threadIdx.x / WARP;
        slots = shared + BARRIER_BYTES + warp * p.slots * p.slot_bytes;
        full = shared_address(shared) + warp * MAX_SLOTS * 8;
        for (int i = 0; threadIdx.x % WARP == 0 && i < p.slots; i++) {
            barrier_init(full + i * 8, COPY_LANES);
        }
    }
    __device__ void fetch(const MatmulParams &p, int to) {
        units.fetch(shared_address(slots) + to * p.slot_bytes, full + to * 8);
    }
    // Fetches the units of the step in hand, as far as there is room at first.
    __device__ void fill(const MatmulParams &p) {
        for (; filled < p.slots && units.left > 0; filled++) {
            fetch(p, filled);
        }
    }
    __device__ void skip_filled() {
        for (int i = 0; i < filled; i++) {
            barrier_wait(full + i * 8, 0);
        }
        __syncwarp();
        phases = (1u << filled) - 1;
        filled = 0;
    }
    // Returns the oldest unit, which is here. After it has been used, another is fetched in its place.
    __device__ const uint8_t *take(const MatmulParams &p) {
        barrier_wait(full + slot * 8, phases >> slot & 1);
        phases ^= 1u << slot;
        return slots + slot * p.slot_bytes;
    }
    __device__ void next(const MatmulParams &p, const Task *tasks, int n_tasks) {
        __syncwarp();
        if (units.find(p, tasks, n_tasks)) {
            fetch(p, slot);
        }
        slot = slot + 1 == p.slots ? 0 : slot + 1;
    }
};

using UnitRing = WarpRing<false>;

} // namespace luce
