// This is the product's kernel. A block has a range of units for each of its teams, and a warp has 16 outputs
// of each unit of its team, and all rows.
#pragma once

#include "rowmm_multiply.cuh"
#include "rowmm_results.cuh"
#include "rowmm_teams.cuh"

namespace luce {

template <int NT, bool WIDE, typename Ring>
__device__ __forceinline__ void take_range(const RowmmParams &p, Ring &ring, int range, const float *scales) {
    const int begin = p.first[range], end = p.first[range + 1], warp = fragment_of_warp();
    for (int unit = begin; unit < end;) {
        const RowmmSegment &s = p.segments[segment_at(p, unit)];
        const int tile = (unit - s.first_unit) / s.units_k, C = Shape<NT, WIDE>::columns(p.columns);
        const int units = min(end, s.first_unit + (tile + 1) * s.units_k) - unit;
        const int fragments = (s.N + FRAGMENT - 1) / FRAGMENT - tile * FRAGMENTS;
        const bool present = (WIDE ? warp / 4 * 4 : warp) < fragments;
        Sums<NT> acc = {};
        multiply_tile<NT, WIDE>(acc, ring, s, units, C, present);
        if (warp < fragments) {
            if (p.squares != nullptr) {
                barrier_wait(ring.rings.scales_full(), 0);
            }
            const bool whole = units == s.units_k;
            float *part = p.parts != nullptr
                              ? p.parts + (range + s.first_tile + tile) * int64_t(p.part_rows) * TILE
                          : whole ? nullptr
                                  : part_of(p, range, (unit - s.first_unit) % s.units_k != 0);
            write_tile<NT>(p, s, acc, tile, part, scales);
        }
        unit += units;
    }
}

// Does what a block of one team does.
template <int NT, bool WIDE>
__device__ __forceinline__ void run_team(const RowmmParams &p, uint8_t *shared, float *scales) {
    using S = Shape<NT, WIDE>;
    // A multiprocessor's blocks, b and b + gridDim / 2 as a rule, have neighbouring ranges, so that their sum
    // is even.
    const int pairs = p.ranges / 2, b = blockIdx.x;
    const int range = b < 2 * pairs ? b % pairs * 2 + b / pairs : b;
    const Rings<S> rings{held_address(shared), p.slot_bytes, p.slots, S::columns(p.columns)};
    if (threadIdx.x == 0) {
        rings.init();
    }
    __syncthreads();
    const int unit = p.first[range], segment = segment_at(p, unit);
    const Walk begin{p, segment, unit - p.segments[segment].first_unit, p.first[range + 1] - unit};
    if (threadIdx.x < S::WARPS * WARP) {
        const int warp = threadIdx.x / WARP, C = rings.columns;
        Rows rows = {};
        if (warp < S::STAGES && threadIdx.x % WARP < COPY_LANES) {
            rows = Filler<S>(p, rings, begin).first_rows(warp);
            announce(rows, rings.stage_full(warp), C);
        }
        wait_for_previous();
        copy(rows, rings.stage_full(warp), rings.stage(warp), C);
        if (p.squares != nullptr) {
            find_scales(p, rings, scales);
        }
        Taker<S> ring{rings};
        take_range<NT, WIDE>(p, ring, range, scales);
    } else if (threadIdx.x % WARP < COPY_LANES) {
        Filler<S> filler(p, rings, begin);
        filler.fetch_first_weights();
        filler.go_on();
    }
}

// A multiprocessor's registers are shared so among a block's threads that take and those that fill.
constexpr int TAKER_REGISTERS = 112, FILLER_REGISTERS = 32;

// Does what a block of two teams does.
template <int NT, bool WIDE>
__device__ __forceinline__ void run_teams(const RowmmParams &p, uint8_t *shared, float *scales) {
    using S = Shape<NT, WIDE>;
    __shared__ Schedule plan;
    const RowmmPair &pair = p.pairs[blockIdx.x];
    const Rings<S> rings{held_address(shared), p.slot_bytes, p.slots, S::columns(p.columns)};
    if (threadIdx.x == 0) {
        rings.init();
    } else if (threadIdx.x == WARP) {
        plan = Schedule(p, pair);
    }
    __syncthreads();
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (warp >= S::WARPS) {
        registers_down<FILLER_REGISTERS>();
        const TeamFiller<S> filler{p, rings, plan};
        if (warp < S::WARPS + 2 && lane == 0) {
            filler.fill_weights(warp - S::WARPS);
        }
        if (warp == S::WARPS + 2 && lane < S::STAGES) {
            filler.fill_first_rows(lane);
            if (lane == 0) {
                filler.fill_more_rows();
            }
        }
    } else {
        registers_up<TAKER_REGISTERS>();
        wait_for_previous();
        if (p.squares != nullptr) {
            find_scales(p, rings, scales);
        }
        const int team = warp / FRAGMENTS, range = pair.range[team];
        TeamTaker<S> ring(rings, plan, team);
        if (range < p.ranges) {
            take_range<NT, WIDE>(p, ring, range, scales);
        }
        ring.finish(plan, team);
    }
}

template <int NT, bool WIDE>
__global__ void __launch_bounds__(Shape<NT, WIDE>::THREADS, Shape<NT, WIDE>::BLOCKS)
    rowmm_kernel(const __grid_constant__ RowmmParams p) {
#if !ROWMM_WGMMA
    if (WIDE) {
        return; // this is never launched here
    }
#endif
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ float scales[Shape<NT, WIDE>::COLUMNS];
    let_next_start();
    if (p.squares == nullptr && threadIdx.x < Shape<NT, WIDE>::COLUMNS) {
        scales[threadIdx.x] = 1; // a warp waits for the block's others before it reads this
    }
    if constexpr (Shape<NT, WIDE>::TEAMS == 2) {
        run_teams<NT, WIDE>(p, shared, scales);
    } else {
        run_team<NT, WIDE>(p, shared, scales);
    }
}

template <int NT, bool WIDE> RowmmKernel rowmm_kernel_of() {
    using S = Shape<NT, WIDE>;
    return {rowmm_kernel<NT, WIDE>, S::THREADS, S::row_bytes, S::TEAMS};
}

} // namespace luce
