// Holds the rings of rowmm's kernel in shared memory: one of weights (units of the block's range) and one of
// activations (stages). Nothing but their barriers keeps the warps together. In a block of one team the last
// warp fills them and the others take from them. Two teams have three warps for it (rowmm_teams.cuh).
#pragma once

#include "rowmm_fields.cuh"
#include "rowmm_plan.h"
#include "shared_ring.cuh"

namespace luce {

// NT is the number of tiles of 8 rows. A team is eight warps, of which each has 16 outputs of a tile. A
// block's teams have a range each, and share the stages of activations.
template <int NT, bool WIDE> struct Shape {
    static constexpr int TEAMS = NT == 8 ? 2 : 1, BLOCKS = BLOCKS_PER_SM / TEAMS;
    static constexpr int WARPS = TEAMS * FRAGMENTS; // so many take from the rings
    static constexpr int FILLERS = TEAMS == 1 ? 1 : 4; // so many fill them
    static constexpr int THREADS = (WARPS + FILLERS) * WARP;
    static constexpr int COLUMNS = 8 * NT;
    // Each holds the activations of a unit. For 16 rows three are faster on an H200 than four, and much faster than two.
    static constexpr int STAGES = NT == 4 ? 2 : NT == 2 ? 3 : 4;
    static constexpr int BARRIERS = 384; // all of Rings' barriers fit so many bytes
    static_assert(BARRIERS >= 16 * STAGES + 16 * ROWMM_MAX_SLOTS + 8);
    // A stage is a chunk of as many columns as the step has.
    static ROWMM_BOTH constexpr int columns(int C) { return NT == 1 ? C : COLUMNS; }
    // Returns the bytes of all stages and barriers.
    static ROWMM_BOTH constexpr int row_bytes(int C) {
        return (BARRIERS + STAGES * chunk_bytes(C) + 127) / 128 * 128;
    }
};

// Returns which fragment of a tile a warp has.
__device__ __forceinline__ int fragment_of_warp() {
    return int(threadIdx.x / WARP) % FRAGMENTS;
}

// This is what a warp adds up: rows 2 t, 2 t + 1 of output g, then of g + 8.
template <int NT> using Sums = float[NT][4];

// ---- the rings ----

template <typename S> struct Rings {
    uint8_t *shared;
    int slot_bytes, slots;
    int columns; // a stage has so many

    __device__ uint32_t stage_full(int i) const { return shared_address(shared) + 8 * i; }
    __device__ uint32_t stage_free(int i) const { return shared_address(shared) + 8 * (S::STAGES + i); }
    __device__ uint32_t slot_full(int i) const { return shared_address(shared) + 8 * (2 * S::STAGES + i); }
    __device__ uint32_t slot_free(int i) const { return slot_full(ROWMM_MAX_SLOTS + i); }
    __device__ uint32_t scales_full() const { return slot_free(ROWMM_MAX_SLOTS); }
    __device__ uint8_t *stage(int i) const { return shared + S::BARRIERS + i * chunk_bytes(columns); }
    __device__ uint8_t *slot(int i) const { return shared + S::row_bytes(columns) + i * slot_bytes; }

    __device__ void init() const {
        for (int i = 0; i < S::STAGES; i++) {
            barrier_init(stage_full(i), COPY_LANES);
            barrier_init_warps(stage_free(i), S::WARPS);
        }
        for (int i = 0; i < slots; i++) {
            barrier_init(slot_full(i), COPY_LANES);
            if (S::TEAMS == 2) {
                barrier_init_warps(slot_free(i), FRAGMENTS);
            }
        }
        barrier_init(scales_full(), S::WARPS);
        barrier_init_done();
    }
};

// Results of a row are multiplied with these where x was packed before its norm was known. The warps share
// the rows, the last warp first: the first ones fetch rows.
template <typename S>
__device__ __forceinline__ void find_scales(const RowmmParams &p, const Rings<S> &rings, float *scales) {
    constexpr int AT_ONCE = S::COLUMNS / S::WARPS; // a warp has so many loads in flight
    static_assert(S::COLUMNS % S::WARPS == 0);
    const int lane = threadIdx.x % WARP, first = S::WARPS - 1 - int(threadIdx.x / WARP);
    float sum[AT_ONCE] = {};
    for (int i = lane; i < p.n_squares; i += WARP) {
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int t = first + j * S::WARPS;
            sum[j] += t < p.rows ? __ldcg(p.squares + int64_t(t) * p.n_squares + i) : 0.0f;
        }
    }
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) {
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            sum[j] += __shfl_xor_sync(~0u, sum[j], mask);
        }
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
        const int t = first + j * S::WARPS;
        if (lane == 0 && t < p.rows) {
            scales[t] = rsqrtf(sum[j] / p.K + p.eps);
        }
    }
    if (lane == 0) {
        barrier_arrive(rings.scales_full());
    }
}

__device__ __forceinline__ int segment_at(const RowmmParams &p, int unit) {
    int segment = 0;
    while (segment + 1 < p.n_segments && p.segments[segment + 1].first_unit <= unit) {
        segment++;
    }
    return segment;
}

// Begins to copy unit `unit` of a matrix to a slot.
__device__ __forceinline__ void copy_unit(const RowmmSegment &s, int unit, uint32_t barrier, uint8_t *slot) {
    const int wide = min(unit, s.whole_units), bytes = s.fragment_bytes * FRAGMENTS;
    const int narrow = s.fragment_bytes * s.last_fragments, size = unit < s.whole_units ? bytes : narrow;
    const uint8_t *from = s.packed + int64_t(wide) * bytes + int64_t(unit - wide) * narrow;
    copies_begin(barrier, size);
    copy_to_shared(shared_address(slot), from, size, barrier, false);
    copies_end(barrier);
}

// Says what is copied of the activations of a unit.
struct Rows {
    const uint8_t *values, *tail;
    int bytes; // `values` has so many; 0 says that there is nothing to copy
};
__device__ __forceinline__ Rows rows_of_unit(const RowmmParams &p, const RowmmSegment &s, int unit, int C) {
    const int units = units_of_chunk(s.type), k = unit % s.units_k;
    const uint8_t *chunk = p.x + int64_t(k / units) * chunk_bytes(C);
    // These are the bytes of a unit's groups of 16 bytes, two steps each.
    const int bytes = 8 / units * C * 64;
    return {chunk + k % units * bytes, chunk + chunk_sums(C), bytes};
}
// Tells a stage's barrier of rows to come. None of their bytes need to be there yet.
__device__ __forceinline__ void announce(const Rows &r, uint32_t barrier, int C) {
    if (r.bytes > 0) {
        copies_begin(barrier, r.bytes + chunk_tail(C));
    }
}
// Begins to copy rows that are announced.
__device__ __forceinline__ void copy(const Rows &r, uint32_t barrier, uint8_t *stage, int C) {
    if (r.bytes > 0) {
        const uint32_t to = shared_address(stage);
        copy_to_shared(to, r.values, r.bytes, barrier, true);
        copy_to_shared(to + chunk_sums(C), r.tail, chunk_tail(C), barrier, true);
        copies_end(barrier);
    }
}
// Begins to copy the activations of unit `unit` of a matrix to a stage.
__device__ __forceinline__ void copy_rows(const RowmmParams &p, const RowmmSegment &s, int unit,
                                          uint32_t barrier, uint8_t *stage, int C) {
    const Rows r = rows_of_unit(p, s, unit, C);
    announce(r, barrier, C);
    copy(r, barrier, stage, C);
}

// Walks over the units of a range.
struct Walk {
    const RowmmParams &p;
    int segment, unit, left; // `unit` counts in the segment, and `left` counts in the range

    __device__ const RowmmSegment &of() const { return p.segments[segment]; }
    __device__ void next() {
        left--;
        if (++unit == of().n_units && left > 0) {
            segment++;
            unit = 0;
        }
    }
};

// A block has so many units of weights in flight before the launch ahead has ended.
constexpr int IN_FLIGHT = 1;

// Does what the last warp does. A slot of weights is free when the stage of the same unit is.
template <typename S> struct Filler {
    const RowmmParams &p;
    const Rings<S> &rings;
    Walk weights, rows;
    Place slot, stage, freed;

    __device__ Filler(const RowmmParams &params, const Rings<S> &r, const Walk &begin)
        : p(params), rings(r), weights(begin), rows(begin) {}

    __device__ void fetch_weights() {
        if (weights.left == 0) {
            return;
        }
        copy_unit(weights.of(), weights.unit, rings.slot_full(slot.i), rings.slot(slot.i));
        slot.next(rings.slots);
        weights.next();
    }
    __device__ void fetch_rows() {
        if (rows.left == 0) {
            return;
        }
        copy_rows(p, rows.of(), rows.unit, rings.stage_full(stage.i), rings.stage(stage.i), rings.columns);
        skip_rows();
    }
    // First come the first weights, which do not depend on what runs before this launch. Few are on their way
    // at once, for memory has to answer the launch ahead at the same time.
    __device__ void fetch_first_weights() {
        for (int i = 0; i < rings.slots && weights.left > 0; i++) {
            if (COPY_LANES == 1 && i >= IN_FLIGHT) {
                barrier_wait(rings.slot_full(i - IN_FLIGHT), 0);
            }
            fetch_weights();
        }
    }
    // Takers fetch the first rows, since they know first when these are there: warp i those of stage i.
    __device__ Rows first_rows(int warp) {
        for (int i = 0; i < warp && rows.left > 0; i++) {
            skip_rows();
        }
        return rows.left == 0 ? Rows{} : rows_of_unit(p, rows.of(), rows.unit, rings.columns);
    }
    __device__ void skip_rows() {
        stage.next(S::STAGES);
        rows.next();
    }
    // Fetches all else.
    __device__ void go_on() {
        wait_for_previous();
        for (int i = 0; i < S::STAGES && rows.left > 0; i++) {
            skip_rows();
        }
        while (rows.left > 0 || weights.left > 0) {
            barrier_wait(rings.stage_free(freed.i), freed.parity);
            freed.next(S::STAGES);
            fetch_weights();
            fetch_rows();
        }
    }
};

// Does what the other warps do with the rings.
template <typename S> struct Taker {
    Rings<S> rings;
    Place slot, stage;

    __device__ const uint8_t *weights() const { return rings.slot(slot.i); }
    __device__ const uint8_t *rows() const { return rings.stage(stage.i); }
    __device__ void wait_weights() const { barrier_wait(rings.slot_full(slot.i), slot.parity); }
    __device__ void wait_rows() const { barrier_wait(rings.stage_full(stage.i), stage.parity); }
    __device__ void release_weights(int) {} // they are left with the unit
    // Leaves the unit in hand and goes to the next.
    __device__ void release(int lane) {
        __syncwarp();
        warp_arrive(rings.stage_free(stage.i), lane);
        stage.next(S::STAGES);
        slot.next(rings.slots);
    }
};

} // namespace luce
