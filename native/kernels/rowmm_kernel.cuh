// This is the product's kernel. A block has a range of units for each of its teams, and a warp has 16 outputs
// of each unit of its team, and all rows.
#pragma once

#include "rowmm_multiply.cuh"
#include "rowmm_pack.cuh"
#include "rowmm_results.cuh"
#include "rowmm_teams.cuh"

namespace luce {

// Returns the tile of the launch in which a range begins.
__device__ __forceinline__ int first_tile(const RowmmParams &p, int range) {
    const RowmmSegment &s = p.segments[segment_at(p, p.first[range])];
    return s.first_tile + (p.first[range] - s.first_unit) / s.units_k;
}

// Says what a range has of a tile of the launch.
struct TilePart {
    int segment = 0, tile; // `tile` counts in the matrix
    int units, fragments;
    // These say whether a range before has the tile's first units, whether the range ends with it, and whether it
    // has all of it.
    bool begun, last, whole;

    __device__ TilePart(const RowmmParams &p, int range, int of_launch) {
        while (segment + 1 < p.n_segments && p.segments[segment + 1].first_tile <= of_launch) {
            segment++;
        }
        const RowmmSegment &s = p.segments[segment];
        tile = of_launch - s.first_tile;
        const int from = s.first_unit + tile * s.units_k, to = from + s.units_k;
        const int begin = p.first[range], end = p.first[range + 1];
        units = min(to, end) - max(from, begin);
        fragments = (s.N + FRAGMENT - 1) / FRAGMENT - tile * FRAGMENTS;
        begun = from < begin;
        last = to >= end;
        whole = units == s.units_k;
    }
};

// Returns the range of a block of one team. A multiprocessor's blocks, b and b + gridDim / 2 as a rule, have
// neighbouring ranges, so that their sum is even.
__device__ __forceinline__ int range_of_block(const RowmmParams &p) {
    const int pairs = p.ranges / 2, b = block_anew();
    return b >= 2 * pairs ? b : b < pairs ? 2 * b : 2 * (b - pairs) + 1;
}

// Says what a kernel knows of its rows when it is compiled: nothing, that it gates and packs them itself, or how many columns
// a stage of them has, from which a stage's addresses follow.
constexpr int ANY = 0, GATED = -1;

template <int NT, bool WIDE, int KNOWN> __device__ __forceinline__ auto columns_of(const RowmmParams &p) {
    if constexpr (KNOWN > 0) {
        return Exactly<KNOWN>();
    } else {
        return Shape<NT, WIDE>::columns(p.columns);
    }
}

template <int NT, bool WIDE, int KNOWN, typename Ring>
__device__ __forceinline__ void take_range(const RowmmParams &p, Ring &ring, int range, int of_launch,
                                           const float *scales) {
    const int warp = fragment_of_warp();
    const auto C = columns_of<NT, WIDE, KNOWN>(p);
    for (bool last = false; !last; of_launch++) {
        Sums<NT> acc = {};
        {
            const TilePart part(p, range, of_launch);
            const bool present = (WIDE ? warp / 4 * 4 : warp) < part.fragments;
            multiply_tile<NT, WIDE>(acc, ring, p.segments[part.segment], part.units, C, present);
        }
        // Nothing else is held while a tile is multiplied: with less in registers none has to go to memory.
        hold(of_launch);
        if constexpr (Shape<NT, WIDE>::TEAMS == 1) {
            range = range_of_block(p);
        } else {
            hold(range);
        }
        const TilePart part(p, range, of_launch);
        if (warp < part.fragments) {
            if (p.squares != nullptr) {
                barrier_wait(ring.rings.scales_full(), 0);
            }
            float *to = p.parts != nullptr ? p.parts + (range + of_launch) * int64_t(p.part_rows) * TILE
                        : part.whole       ? nullptr
                                           : part_of(p, range, part.begun);
            write_tile<NT>(p, p.segments[part.segment], acc, part.tile, to, scales);
        }
        last = part.last;
    }
}

// Gates and packs rows as rowmm_pack does it: a warp has a row of a stage. What it reads lies in L2, since the launch ahead
// wrote it. There are no more units than stages, and of one weight.
template <typename S>
__device__ __forceinline__ void pack_stage(const RowmmParams &p, const Rings<S> &rings, int first,
                                           int units) {
    static_assert(S::WARPS == ROWMM_GATED_ROWS * S::STAGES);
    const RowmmGated &a = p.gated;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, stage = warp % S::STAGES,
              row = warp / S::STAGES;
    int k = (first + stage) % p.segments[0].units_k * CHUNK + lane * OWN;
    hold(k); // it is found while the launch ahead has not ended
    wait_for_previous();
    if (stage >= units) {
        return;
    }
    if (row < p.rows) {
        float v[OWN], y[OWN], w[OWN];
        load_values(v, a.x + row * a.x_row, k, a.K);
        load_values(y, a.y + row * a.y_row, k, a.K);
        load_values(w, a.w, k % a.head, a.head);
        gate_head(v, w, y, a.head, a.eps);
        pack_chunk(rings.stage(stage), rings.columns, row, false, v, largest(v), lane);
    }
    __syncwarp();
    warp_arrive(rings.stage_full(stage), lane);
}

// Does what a block of one team does.
template <int NT, bool WIDE, int KNOWN>
__device__ __forceinline__ void run_team(const RowmmParams &p, uint8_t *shared, float *scales) {
    using S = Shape<NT, WIDE>;
    constexpr bool PACKS = KNOWN == GATED;
    const int range = range_of_block(p);
    const Rings<S> rings{held_address(shared), p.slot_bytes, p.slots, columns_of<NT, WIDE, KNOWN>(p)};
    if (threadIdx.x == 0) {
        rings.init(PACKS ? ROWMM_GATED_ROWS : 0);
    }
    __syncthreads();
    const int first = p.first[range], units = p.first[range + 1] - first;
    if (threadIdx.x < S::WARPS * WARP) {
        const int warp = threadIdx.x / WARP, C = rings.columns;
        Rows rows = {};
        if (!PACKS && warp < S::STAGES && threadIdx.x % WARP < COPY_LANES) {
            rows = first_rows(p, first, units, warp, C);
            announce(rows, rings.stage_full(warp), C);
        }
        int tile = first_tile(p, range);
        hold(tile); // it is found while the launch ahead has not ended
        if constexpr (PACKS) {
            pack_stage(p, rings, first, units);
        } else {
            wait_for_previous();
            copy(rows, rings.stage_full(warp), rings.stage(warp), C);
        }
        if (p.squares != nullptr) {
            find_scales(p, rings, scales);
        }
        Taker<S> ring{rings};
        take_range<NT, WIDE, KNOWN>(p, ring, range, tile, scales);
    } else if (threadIdx.x % WARP < COPY_LANES) {
        Filler<S> filler(p, rings, first, units);
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
            take_range<NT, WIDE, ANY>(p, ring, range, first_tile(p, range), scales);
        }
        ring.finish(plan, team);
    }
}

// A kernel that knows its columns would take more registers than leave room for a block of the launch behind, so it is told
// of a block more than a multiprocessor has.
template <int NT, bool WIDE, int KNOWN>
__global__ void __launch_bounds__(Shape<NT, WIDE>::THREADS, Shape<NT, WIDE>::BLOCKS + (KNOWN > 0 ? 1 : 0))
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
        run_team<NT, WIDE, KNOWN>(p, shared, scales);
    }
}

template <int NT, bool WIDE, int KNOWN = ANY> RowmmKernel rowmm_kernel_of() {
    using S = Shape<NT, WIDE>;
    return {rowmm_kernel<NT, WIDE, KNOWN>, S::THREADS, S::row_bytes, S::TEAMS};
}

} // namespace luce
