// Holds the rings of rowmm's kernel in shared memory: one of weights (units of the block's range) and one of
// activations (stages). Nothing but their barriers keeps the warps together. In a block of one team the last
// warp fills them and the others take from them. Two teams have three warps for it (matmul/warp_groups.cuh).
#pragma once

#include "common/ring.cuh"
#include "matmul/fields.cuh"
#include "matmul/shape.h"

namespace luce {

// Returns which fragment of a tile a warp has.
__device__ __forceinline__ int fragment_of_warp() {
    return int(threadIdx.x / WARP) % FRAGMENTS;
}

// This is what a warp adds up: rows 2 t, 2 t + 1 of output g, then of g + 8.
template <int NT> using Sums = float[NT][4];

// ---- the rings ----

// A plan for 100 KB of shared memory may have fewer stages than the shape. Code for 9.0a, which runs nowhere else, knows their number.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool FEWER_STAGES = false;
#else
constexpr bool FEWER_STAGES = true;
#endif

// So many lanes copy, and arrive when theirs has come.
constexpr int COPIERS = ROWMM_BULK ? 1 : COPY_WARPS * WARP;

template <typename S> struct Rings {
    uint8_t *shared;
    int slot_bytes, slots;
    int columns; // a stage has so many
    int planned_stages;

    __device__ int stages() const { return FEWER_STAGES ? planned_stages : S::STAGES; }
    __device__ uint32_t stage_full(int i) const { return shared_address(shared) + 8 * i; }
    __device__ uint32_t stage_free(int i) const { return shared_address(shared) + 8 * (S::STAGES + i); }
    __device__ uint32_t slot_full(int i) const { return shared_address(shared) + 8 * (2 * S::STAGES + i); }
    __device__ uint32_t slot_free(int i) const { return slot_full(ROWMM_MAX_SLOTS + i); }
    __device__ uint32_t scales_full() const { return slot_free(ROWMM_MAX_SLOTS); }
    __device__ uint8_t *stage(int i) const { return shared + S::BARRIERS + i * chunk_bytes(columns); }
    __device__ uint8_t *slot(int i) const {
        return shared + S::row_bytes(columns, stages()) + i * slot_bytes;
    }

    // Prepares the barriers of stages and of scales.
    __device__ void init_rows() const {
        for (int i = 0; i < S::STAGES; i++) {
            barrier_init(stage_full(i), COPIERS);
            barrier_init_warps(stage_free(i), S::WARPS);
        }
        barrier_init_warps(scales_full(), S::WARPS);
        barrier_init_done();
    }
    // Prepares those of slots `from` .. `to` - 1.
    __device__ void init_slots(int from, int to) const {
#pragma unroll 1
        for (int i = from; i < to; i++) {
            barrier_init(slot_full(i), COPIERS);
            if (S::TEAMS == 2) {
                barrier_init_warps(slot_free(i), FRAGMENTS);
            }
        }
        barrier_init_done();
    }
};

// ---- scales of rows ----

// Where x was packed before its norm was known, results of a row are multiplied with a scale, which its squares give. The warps
// share the rows, the last warp first: the first ones fetch rows. A lane has the sum of some squares of each of its
// warp's rows.
template <typename S> using Squares = float[S::COLUMNS / S::WARPS];

template <typename S> __device__ __forceinline__ int first_scaled_row() {
    static_assert(S::COLUMNS % S::WARPS == 0);
    return S::WARPS - 1 - int(threadIdx.x / WARP);
}
// Returns the first square that a lane reads.
template <typename S> __device__ __forceinline__ const float *first_square(const RowmmParams &p) {
    return p.squares + first_scaled_row<S>() * p.n_squares + int(threadIdx.x % WARP);
}
// Asks for all squares. Those of up to WARP chunks are on their way when this is left, and those of more have come.
template <typename S>
__device__ __forceinline__ void fetch_squares(const RowmmParams &p, const float *square, Squares<S> &sum) {
    constexpr int ROWS = S::COLUMNS / S::WARPS;
    const int lane = threadIdx.x % WARP, first = first_scaled_row<S>();
    const auto load = [&](int i, int j) {
        const bool there = i < p.n_squares && first + j * S::WARPS < p.rows;
        return there ? __ldcg(square + j * S::WARPS * p.n_squares) : 0.0f;
    };
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
        sum[j] = load(lane, j);
    }
    // All lanes leave this loop together. Where some leave it first, each shuffle behind it has to call the lanes together: 2,000
    // cycles of an H200 for two rows, ahead of a warp's first unit.
#pragma unroll 1
    for (int i = lane + WARP; i - lane < p.n_squares; i += WARP) {
        square += WARP;
#pragma unroll
        for (int j = 0; j < ROWS; j++) {
            sum[j] += load(i, j);
        }
    }
}
// Finds the scales of the warp's rows, and says so to all warps.
template <typename S>
__device__ __forceinline__ void find_scales(const RowmmParams &p, const Rings<S> &rings, Squares<S> &sum,
                                            float *scales) {
    constexpr int ROWS = S::COLUMNS / S::WARPS;
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) {
#pragma unroll
        for (int j = 0; j < ROWS; j++) {
            sum[j] += __shfl_xor_sync(~0u, sum[j], mask);
        }
    }
    float own = sum[0]; // this is of row j for lane j
#pragma unroll
    for (int j = 1; j < ROWS; j++) {
        own = lane == j ? sum[j] : own;
    }
    const int t = first_scaled_row<S>() + lane * S::WARPS;
    if (lane < ROWS && t < p.rows) {
        scales[t] = rsqrtf(own / p.K + p.eps);
    }
    __syncwarp();
    warp_arrive(rings.scales_full(), lane);
}

// ---- what fills the rings ----

__device__ __forceinline__ int segment_at(const RowmmParams &p, int unit) {
    int segment = 0;
    while (segment + 1 < p.n_segments && p.segments[segment + 1].first_unit <= unit) {
        segment++;
    }
    return segment;
}

// Walks over the weights of a range's units. One lane fills a ring, so that all it finds anew for a unit delays the unit:
// nothing is divided, and a matrix's sizes stay in registers.
struct WeightsWalk {
    const RowmmParams &p;
    int segment, unit, left; // `unit` counts in the segment, and `left` counts in the range
    int n_units, whole_units, bytes,
        narrow_bytes; // the segment's, and those of a whole unit and of a narrower one
    const uint8_t *from;

    // Begins with unit `first` of the launch.
    __device__ WeightsWalk(const RowmmParams &params, int first, int units)
        : p(params), segment(segment_at(params, first)), left(units) {
        enter();
        unit = first - p.segments[segment].first_unit;
        const int wide = min(unit, whole_units);
        from += int64_t(wide) * bytes + int64_t(unit - wide) * narrow_bytes;
    }
    __device__ void enter() {
        const RowmmSegment &s = p.segments[segment];
        n_units = s.n_units;
        whole_units = s.whole_units;
        bytes = s.fragment_bytes * FRAGMENTS;
        narrow_bytes = s.fragment_bytes * s.last_fragments;
        from = s.packed;
        unit = 0;
    }
    // Begins to copy the unit to a slot, and goes to the next. Without bulk copies the caller is one of so many lanes.
    __device__ void copy(uint32_t barrier, const uint8_t *slot, int lane = int(threadIdx.x % WARP),
                         int lanes = WARP) {
        const int size = unit < whole_units ? bytes : narrow_bytes;
        copies_begin(barrier, size);
        copy_to_shared(shared_address(slot), from, size, barrier, false, lane, lanes);
        copies_end(barrier);
        from += size;
        left--;
        if (++unit == n_units && left > 0) {
            segment++;
            enter();
        }
    }
};

// Says what is copied of the activations of a unit.
struct Rows {
    const uint8_t *values, *tail;
    int bytes; // `values` has so many; 0 says that there is nothing to copy
};
// Returns those of the unit at k of a tile's, where a chunk has 2^shift units.
__device__ __forceinline__ Rows rows_at(const RowmmParams &p, int k, int shift, int C) {
    const uint8_t *chunk = p.x + int64_t(k >> shift) * chunk_bytes(C);
    // These are the bytes of a unit's groups of 16 bytes, two steps each.
    const int bytes = chunk_sums(C) >> shift;
    return {chunk + (k & ((1 << shift) - 1)) * bytes, chunk + chunk_sums(C), bytes};
}
// Tells a stage's barrier of rows to come. None of their bytes need to be there yet.
__device__ __forceinline__ void announce(const Rows &r, uint32_t barrier, int C) {
    if (r.bytes > 0) {
        copies_begin(barrier, r.bytes + chunk_tail(C));
    }
}
// Begins to copy rows that are announced. Those of a whole chunk lie ahead of its tail. Without bulk copies the caller is one of
// so many lanes, who arrive for all COPIERS.
__device__ __forceinline__ void copy(const Rows &r, uint32_t barrier, uint8_t *stage, int C,
                                     int lane = int(threadIdx.x % WARP), int lanes = WARP) {
    if (r.bytes > 0) {
        const uint32_t to = shared_address(stage);
        const bool whole = r.bytes == chunk_sums(C);
        copy_to_shared(to, r.values, whole ? chunk_bytes(C) : r.bytes, barrier, true, lane, lanes);
        if (!whole) {
            copy_to_shared(to + chunk_sums(C), r.tail, chunk_tail(C), barrier, true, lane, lanes);
        }
        copies_end(barrier);
        for (int i = lanes; i < COPIERS; i += lanes) {
            barrier_arrive(barrier);
        }
    }
}

// Walks over the activations of a range's units.
struct RowsWalk {
    const RowmmParams &p;
    int segment, unit, left; // `unit` counts in the segment, and `left` counts in the range
    int k, units_k, n_units, shift; // the unit's place in its tile; the rest is of the segment

    // Begins with unit `first` of the launch.
    __device__ RowsWalk(const RowmmParams &params, int first, int units)
        : p(params), segment(segment_at(params, first)), left(units) {
        enter();
        unit = first - p.segments[segment].first_unit;
        k = unit % units_k;
    }
    __device__ void enter() {
        const RowmmSegment &s = p.segments[segment];
        units_k = s.units_k;
        n_units = s.n_units;
        shift = unit_shift(s.type);
        unit = k = 0;
    }
    __device__ Rows rows(int C) const { return rows_at(p, k, shift, C); }
    __device__ void next() {
        left--;
        k = k + 1 == units_k ? 0 : k + 1;
        if (++unit == n_units && left > 0) {
            segment++;
            enter();
        }
    }
};

// A block has so many units of weights in flight before the launch ahead has ended.
constexpr int IN_FLIGHT = 1;

// Returns the rows of stage `warp` of those that a range begins with. Takers fetch them, since they know first when these
// are there.
__device__ __forceinline__ Rows first_rows(const RowmmParams &p, int first, int units, int warp, int C) {
    RowsWalk rows(p, first, units);
    for (int i = 0; i < warp && rows.left > 0; i++) {
        rows.next();
    }
    return rows.left == 0 ? Rows{} : rows.rows(C);
}

// Does what the last warp does, or the last COPY_WARPS. A slot of weights is free when the stage of the same unit is.
template <typename S> struct Filler {
    const RowmmParams &p;
    const Rings<S> &rings;
    int first, units; // the range's first unit of the launch, and how many it has
    WeightsWalk weights;
    Place slot, stage;

    __device__ int lane() const { return int(threadIdx.x) - S::WARPS * WARP; }
    __device__ Filler(const RowmmParams &params, const Rings<S> &r, int first, int units)
        : p(params), rings(r), first(first), units(units), weights(params, first, units) {}

    __device__ void fetch_weights() {
        if (weights.left > 0) {
            weights.copy(rings.slot_full(slot.i), rings.slot(slot.i), lane(), COPIERS);
            slot.next(rings.slots);
        }
    }
    // Prepares the slots' barriers. The first weights are asked for as soon as theirs is, ahead of all else that a block does:
    // memory has nothing to do since the block ahead has left. (Where several warps copy, all have to know of the barriers first.)
    __device__ void begin(int lane) {
        if (lane == 0) {
            rings.init_slots(0, ROWMM_BULK ? 1 : rings.slots);
            if (ROWMM_BULK) {
                fetch_weights();
                rings.init_slots(1, rings.slots);
            }
        }
    }
    // Fetches the other first weights, which do not depend on what runs before this launch. Few are on their way
    // at once, for memory has to answer the launch ahead at the same time.
    __device__ void fetch_first_weights() {
        static_assert(IN_FLIGHT == 1, "begin() has asked for one");
        for (int i = ROWMM_BULK ? IN_FLIGHT : 0; i < rings.slots && weights.left > 0; i++) {
            if (COPY_LANES == 1) {
                barrier_wait(rings.slot_full(i - IN_FLIGHT), 0);
            }
            fetch_weights();
        }
    }
    // Fetches all else. A stage that is left has the next rows that are not there, since takers fetch the first.
    __device__ void go_on() {
        RowsWalk rows(p, first, units);
        for (int i = 0; i < rings.stages() && rows.left > 0; i++) {
            rows.next();
        }
        wait_for_previous();
        for (; rows.left > 0 || weights.left > 0; stage.next(rings.stages())) {
            barrier_wait(rings.stage_free(stage.i), stage.parity);
            fetch_weights();
            if (rows.left > 0) {
                const Rows r = rows.rows(rings.columns);
                announce(r, rings.stage_full(stage.i), rings.columns);
                copy(r, rings.stage_full(stage.i), rings.stage(stage.i), rings.columns, lane(), COPIERS);
                rows.next();
            }
        }
    }
};

// Does what the other warps do with the rings.
template <typename S> struct Taker {
    Rings<S> rings;
    Place slot, stage;

    __device__ const uint8_t *weights() const { return rings.slot(slot.i); }
    __device__ const uint8_t *rows() const { return rings.stage(stage.i); }
    // Waits for both. As a rule both are there. Their barriers are asked at once, since each answer takes a while; and they are asked
    // ahead of the loops that wait, since in a loop that begins with the question ptxas has the warp yield before each unit: two
    // builds that differ by this alone took a chain of 16 rows 1% apart (bench/results/2026-11-24-builds-by-turns-h200.txt).
    __device__ void wait() const {
        const bool weights = phase_ended(rings.slot_full(slot.i), slot.parity),
                   rows = phase_ended(rings.stage_full(stage.i), stage.parity);
        if (__builtin_expect(!weights | !rows, 0)) {
            barrier_wait(rings.slot_full(slot.i), slot.parity);
            barrier_wait(rings.stage_full(stage.i), stage.parity);
        }
    }
    __device__ void release_weights(int) {} // they are left with the unit
    // Leaves the unit in hand and goes to the next.
    __device__ void release(int lane) {
        __syncwarp();
        warp_arrive(rings.stage_free(stage.i), lane);
        stage.next(rings.stages());
        slot.next(rings.slots);
    }
};

} // namespace luce
