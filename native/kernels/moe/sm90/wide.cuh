// Has the kernel of up and down for a prompt's many rows by wgmma. A block has an item of up to ROWS rows of an expert, and two
// warpgroups, each 64 outputs of one matrix: a warp dequantises 16 of them into its registers, and the tensor cores read the rows
// from shared memory. A step is as many outputs over all of K. The rows come a chunk at a time for the whole block; each warp
// brings its own units (moe/units.cuh). The parts of K and the order of their sums are those of the other kernels, so the bits
// are the same.
#pragma once

#include "moe/many.cuh"

namespace luce {

template <int ROWS> struct WideShared {
    float up[ITEM_WARPS / 2][ROWS]
            [FRAGMENT + 1]; // of up, for the warp that has gate; the padding makes banks differ
    const uint8_t *records[ROWS];
    int places[ROWS];
};

// Brings chunks of an item's rows to stages. A row's eighths of a step go each to its column of a matrix of eight
// (matmul/layout.h). A warp has four of them, of all rows: eight lanes beside each other fill a matrix, and four lanes that read one
// row read 64 bytes of it. Each stage has a barrier that its copies are there, and one that all warps are done with it, so that one
// warpgroup may be ahead of the other and they multiply in turn. What lies in the place of rows that are not there meets no others.
template <int ROWS> struct WideRows {
    static constexpr int STAGES = WideShape<ROWS>::STAGES, STAGE = WideShape<ROWS>::STAGE;
    const uint8_t *const *records;
    uint8_t *stages;
    uint32_t full;
    int count, chunks, all; // `all` chunks are brought
    bool stay; // all chunks of the rows have stages and stay there

    static __device__ uint32_t barriers(uint8_t *shared) {
        return shared_address(shared) + ITEM_WARPS * MAX_SLOTS * 8;
    }
    static __device__ void init(uint8_t *shared) {
        for (int i = 0; threadIdx.x == 0 && i < STAGES; i++) {
            barrier_init(barriers(shared) + i * 8, ITEM_THREADS);
            barrier_init(barriers(shared) + (STAGES + i) * 8, ITEM_WARPS);
        }
    }
    __device__ WideRows(const WideShared<ROWS> &s, uint8_t *shared, uint8_t *at, int n, int n_chunks,
                        int steps)
        : records(s.records), stages(at), full(barriers(shared)), count(n), chunks(n_chunks),
          all(n_chunks <= STAGES ? n_chunks : steps * n_chunks), stay(n_chunks <= STAGES) {
        for (int i = 0; i < (stay ? chunks : STAGES - 1); i++) {
            bring(i);
        }
    }
    // Brings the i-th chunk of all steps.
    __device__ void bring(int i) const {
        if (i >= all) {
            return;
        }
        constexpr int EACH = 16;
        const int part = int(threadIdx.x) / WARP * 4 + int(threadIdx.x) % WARP / 8, own = threadIdx.x;
        const int64_t from = int64_t(i % chunks) * chunk_bytes(1);
        const uint32_t to = shared_address(stages) + i % STAGES * STAGE;
        if (i >= STAGES) {
            barrier_wait(full + (STAGES + i % STAGES) * 8, (i / STAGES - 1) % 2);
        }
#pragma unroll
        for (int first = 0; first < ROWS; first += 8) {
            if (const int row = first + int(threadIdx.x) % 8; row < count) {
                lane_copies<EACH>(to + (part * ROWS + row) * EACH, records[row] + from + part * EACH);
            }
        }
        if (own < count) { // the sums of the row's values, and its power of two
            const uint8_t *tail = records[own] + from + chunk_sums(1);
            lane_copies<EACH>(to + chunk_sums(ROWS) + own * 32, tail);
            lane_copies<EACH>(to + chunk_sums(ROWS) + own * 32 + EACH, tail + EACH);
            lane_copies<4>(to + chunk_sums(ROWS) + 32 * ROWS + own * 4, tail + 32);
        }
        lane_arrives(full + i % STAGES * 8);
    }
    __device__ const uint8_t *take(int i) const {
        if (!stay) {
            barrier_wait(full + i % STAGES * 8, i / STAGES % 2);
            wgmma_show();
        } else if (i < chunks) {
            barrier_wait(full + i * 8, 0);
            wgmma_show();
        }
        return stages + (stay ? i % chunks : i % STAGES) * STAGE;
    }
    // Fills the stage of the chunk ahead of this one anew, while this one is multiplied.
    __device__ void refill(int i) const {
        if (!stay) {
            bring(i + STAGES - 1);
        }
    }
    __device__ void leave(int i) const {
        if (!stay) {
            __syncwarp();
            if (threadIdx.x % WARP == 0) {
                barrier_arrive(full + (STAGES + i % STAGES) * 8);
            }
        }
    }
};

// What a warp needs of its step.
template <int ROWS> struct WideStep {
    const MatmulParams &p;
    WarpRing<true> &ring;
    const WideRows<ROWS> &rows;
    const Task &task;
    const Group &g;
    const Matrix &m;
    const float *scales; // null, or the powers of two of the warp's outputs
    int step;
    bool own; // else the warp has no outputs here, and multiplies what lies in its place with its warpgroup

    __device__ const uint8_t *take() const { return own ? ring.take(p) : ring.slots; }
    __device__ void next() const {
        if (own) {
            ring.next(p, &task, 1);
        }
    }
};

// A unit of quants on its way through the registers of a warp: G steps at a time are made while as many are multiplied.
template <int TYPE, int G> struct WideUnit {
    static constexpr int GROUPS = 16 / G;
    Lane<TYPE> weights;
    Fields<bits_of(TYPE)> f[2];

    __device__ __forceinline__ void make(uint32_t (&a)[4 * G], const uint8_t *fragment, int group, int lane) {
        const int half = group * G / 8;
        if (group * G % 8 == 0) {
            f[0].load(fragment, 2 * half, lane);
            f[1].load(fragment, 2 * half + 1, lane);
            weights.half(half);
        }
#pragma unroll
        for (int e = 0; e < 4 * G; e++) {
            a[e] = weights.pair(f[e % 2], group * G % 8 * 2 + e / 2, e % 2);
        }
    }
};

// Multiplies a step's outputs by all chunks.
template <int TYPE, int ROWS>
__device__ __forceinline__ void multiply_step_wide(const WideStep<ROWS> &s, Sums<ROWS / 8> &total, int lane) {
    constexpr int NT = ROWS / 8, G = WideShape<ROWS>::GROUP;
    const Group &g = s.g;
    Sums<NT> pair, acc, c;
    uint32_t a[2][4 * G];
    WideUnit<is_float_type(TYPE) ? TYPE_Q8_0 : TYPE, G> unit;
    const uint8_t *fragment = nullptr;
    const auto begin = [&] {
        fragment = s.take();
        unit.weights.load(fragment, lane);
        unit.make(a[0], fragment, 0, lane);
    };
    if constexpr (!is_float_type(TYPE)) {
        begin();
    }
    for (int chunk = 0; chunk < g.chunks; chunk++) {
        const int i = s.step * g.chunks + chunk;
        const uint8_t *stage = s.rows.take(i), *tail = stage + chunk_sums(ROWS);
        int part = 0; // the chunk is of this part of K
        while (g.begin(part + 1, 1) <= chunk) {
            part++;
        }
        if (chunk == g.begin(part, 1)) {
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    acc[n][k] = 0;
                }
            }
        }
        if constexpr (is_float_type(TYPE)) {
            s.rows.refill(i);
            constexpr int UNITS = units_of_chunk(TYPE);
            for (int u = 0; u < UNITS; u++) {
                multiply_unit<TYPE, NT, true>(acc, s.take(), stage + u * (512 / UNITS) * ROWS, tail, ROWS,
                                              lane, Downs(), [] {});
                s.next();
            }
        } else {
            const uint32_t rows = __shfl_sync(~0u, shared_address(stage), 0); // the warp's, not each lane's
#pragma unroll
            for (int group = 0; group < unit.GROUPS; group++) {
                wgmma_begin();
#pragma unroll
                for (int j = 0; j < G; j++) {
                    wgmma(c, a[group % 2] + 4 * j, wgmma_rows<NT>(rows, group * G + j), group + j > 0);
                }
                wgmma_commit();
                if (group + 1 < unit.GROUPS) {
                    if (group > 0) {
                        wgmma_wait<1>();
                    }
                    unit.make(a[(group + 1) % 2], fragment, group + 1, lane);
                }
            }
            const Lane<TYPE> done = unit.weights;
            s.rows.refill(i);
            s.next(); // all of the unit is in registers
            wgmma_wait<1>();
            if (chunk + 1 < g.chunks) {
                begin();
            }
            wgmma_wait<0>();
            wgmma_pin(c);
            add_unit<TYPE, NT>(acc, c, done, tail, ROWS, lane, Downs(), rows ^ shared_address(stage));
        }
        s.rows.leave(i);
        if (chunk + 1 == g.begin(part + 1, 1)) { // parts are added by pairs
            const bool last = part + 1 == 1 << g.log_parts;
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    float v = acc[n][k];
                    if (is_float_type(TYPE) && s.scales != nullptr) {
                        v *= s.scales[lane / 4 + k / 2 * 8];
                    }
                    pair[n][k] = part % 2 == 0 ? v : pair[n][k] + v;
                    if (last || part % 2 == 1) {
                        total[n][k] = part < 2 ? pair[n][k] : total[n][k] + pair[n][k];
                    }
                }
            }
        }
    }
}

// The grid is items, the shared expert's first, times the tasks of one.
template <int ROWS>
__global__ void __launch_bounds__(ITEM_THREADS, 1) moe_wide_kernel(const __grid_constant__ MatmulParams p) {
#if ROWMM_WGMMA // else this is never launched
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ WideShared<ROWS> s;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const auto [number, x] = TaskAt(p, blockIdx.x);
    WarpRing<true> ring(p, shared);
    WideRows<ROWS>::init(shared);
    barrier_init_done();
    wait_for_previous();
    let_next_start();
    const MoeItem item = many_item(p, number);
    if (item.count == 0) {
        return;
    }
    const Group &g = group_of(p, item.expert);
    const Work w(p, g, own_warp<true>(p));
    const Matrix &m = g.matrices[w.matrix];
    const Task task = {item.expert, x, item.count, 0};
    if (int(threadIdx.x) < item.count) {
        const int place = many_place(p, item, threadIdx.x);
        s.places[threadIdx.x] = place;
        s.records[threadIdx.x] = Records(p, g).at(many_record(p, item, place));
    }
    __syncthreads();
    const WideRows<ROWS> rows(s, shared, shared + BARRIER_BYTES + ITEM_WARPS * p.slots * p.slot_bytes,
                              item.count, g.chunks, p.steps);
    ring.units.begin(p, item.expert, x);
    while (ring.filled < p.slots && ring.units.find(p, &task, 1)) {
        ring.fill(p);
    }
    for (int step = 0; step < p.steps; step++) {
        const int fragment = w.fragment_at(p, g, x, step);
        const bool own = fragment < g.fragments;
        const float *scales =
            m.scales > 0 && own
                ? reinterpret_cast<const float *>(m.packed + expert_offset(m, item.expert) + m.scales) +
                      fragment * FRAGMENT
                : nullptr;
        const WideStep<ROWS> of_warp = {p, ring, rows, task, g, m, scales, step, own};
        Sums<ROWS / 8> total;
        if (fragment - warp % 4 < g.fragments) { // wgmma needs all of a warpgroup
            with_type(
                m.type,
                [](auto known, const WideStep<ROWS> &of, Sums<ROWS / 8> &sums, int own_lane) {
                    multiply_step_wide<known.value, ROWS>(of, sums, own_lane);
                },
                of_warp, total, lane);
        } else {
            for (int chunk = 0; chunk < g.chunks; chunk++) {
                rows.take(step * g.chunks + chunk);
                rows.refill(step * g.chunks + chunk);
                rows.leave(step * g.chunks + chunk);
            }
        }
        leave_fragment(p, g, w, s, total, fragment, item.count);
    }
#endif
}

} // namespace luce
