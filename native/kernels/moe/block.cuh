// Has what all blocks of up and down do (moe/matmul.cu): a warp multiplies its units of a step, and the block adds the
// parts of K.
#pragma once

#include "common/activation.cuh"
#include "moe/item.cuh"
#include "moe/units.cuh"

namespace luce {

constexpr int PART_ROW = FRAGMENT + 4; // the padding makes banks differ

// Has each warp's sums of an item's rows: [warp][column][output].
template <int ROWS> using Parts = float[ITEM_WARPS][ROWS][PART_ROW];

// Leaves a warp's sums, or adds them to what it left before.
template <int ROWS>
__device__ __forceinline__ void leave_part(Parts<ROWS> &parts, int count, const Sums<1> &acc, bool adds) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (const int column = lane % 4 * 2 + k % 2; column < count) {
            float &left = parts[warp][column][lane / 4 + k / 2 * 8];
            left = adds ? left + acc[0][k] : acc[0][k];
        }
    }
}

// Multiplies the outputs of a part of K by their powers of two, where the type has them.
__device__ __forceinline__ void scale_part(Sums<1> &acc, const Matrix &m, int expert, int fragment) {
    if (m.scales > 0) {
        const float *scales = reinterpret_cast<const float *>(m.packed + expert_offset(m, expert) + m.scales);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            acc[0][k] *= scales[fragment * FRAGMENT + threadIdx.x % WARP / 4 + k / 2 * 8];
        }
    }
}

// Adds the parts of K by pairs, and makes f(gate) * up of two matrices. A place below zero is nobody's.
template <int ROWS>
__device__ void write_out(const MatmulParams &p, const Group &g, const Parts<ROWS> &parts, const int *places,
                          int count, int x, int step) {
    const int n_matrices = 1 << p.log_matrices, n_parts = 1 << g.log_across;
    for (int i = threadIdx.x; i < count * FRAGMENT << g.log_fragments; i += ITEM_THREADS) {
        const int o = i % FRAGMENT, f = i / FRAGMENT & ((1 << g.log_fragments) - 1);
        const int column = i / FRAGMENT >> g.log_fragments;
        const int n = (((x * p.steps + step) << g.log_fragments) + f) * FRAGMENT + o;
        if (n >= g.N || places[column] < 0) {
            continue;
        }
        float sums[2] = {};
#pragma unroll
        for (int m = 0; m < 2; m++) {
            for (int part = 0; m < n_matrices && part < n_parts; part += 2) {
                const int at = (((f << g.log_across) + part) << p.log_matrices) + m;
                float pair = parts[at][column][o];
                if (part + 1 < n_parts) {
                    pair += parts[at + n_matrices][column][o];
                }
                sums[m] = part == 0 ? pair : sums[m] + pair;
            }
        }
        const float sum = sums[0];
        p.out[places[column] * p.out_row + n] =
            n_matrices == 1 ? sum : activated(p.activation, sum) * sums[1];
    }
}

// Multiplies units u .. end - 1 of a type that is known when this is compiled.
template <int TYPE>
__device__ __forceinline__ void multiply_run(const MatmulParams &p, const Task *tasks, UnitRing &ring,
                                             Sums<1> &acc, const uint8_t *row, int &u, int end, int n_tasks) {
    const int lane = threadIdx.x % WARP;
#pragma unroll 1
    for (; u < end; u++) {
        const uint8_t *unit = ring.take(p);
        multiply_item<TYPE>(acc, unit, row, u, lane);
        ring.next(p, tasks, n_tasks);
    }
}

// Multiplies the units of a step with an item's rows, of which `row` is the lane's own. Parts of K are added by pairs.
// RUNS says that the usual types have loops of their own.
template <int ROWS, bool RUNS>
__device__ __forceinline__ void multiply_step(const MatmulParams &p, const Task *tasks, UnitRing &ring,
                                              const Work &w, const Task &t, int fragment, const uint8_t *row,
                                              int n_tasks, int count, Parts<ROWS> &parts) {
    const Group &g = group_of(p, t.expert);
    const Matrix &m = g.matrices[w.matrix];
    const int lane = threadIdx.x % WARP;
    Sums<1> pair = {};
    int u = g.begin(w.part, m.units);
    for (int part = w.part; part < w.last; part++) {
        Sums<1> acc = {};
        const int end = g.begin(part + 1, m.units);
        if (RUNS && m.type == TYPE_Q4_K) {
            multiply_run<TYPE_Q4_K>(p, tasks, ring, acc, row, u, end, n_tasks);
        } else if (RUNS && m.type == TYPE_Q6_K) {
            multiply_run<TYPE_Q6_K>(p, tasks, ring, acc, row, u, end, n_tasks);
        }
        for (; u < end; u++) {
            const uint8_t *unit = ring.take(p);
            multiply_any(m.type, acc, unit, row, u, lane);
            ring.next(p, tasks, n_tasks);
        }
        scale_part(acc, m, t.expert, fragment);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            pair[0][k] = part == w.part || part % 2 == 0 ? acc[0][k] : pair[0][k] + acc[0][k];
        }
        if (part + 1 == w.last || part % 2 == 1) {
            leave_part<ROWS>(parts, count, pair, part >= w.part + 2);
        }
    }
}

} // namespace luce
