// This is the product's kernel. A block has a range of units for each of its teams, which are groups of eight warps. A warp
// of a team takes 16 outputs of each of its units, and all rows. Other warps of the block fill its rings with the weights and
// activations that these take (matmul/rings.cuh): producers and consumers, with mbarriers between them.
#pragma once

#include "common/small_shared.h"
#include "matmul/multiply.cuh"
#include "matmul/results.cuh"
#include "matmul/warp_groups.cuh"

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

// Returns how many columns a stage of rows has. Where they are known when a kernel is compiled, a stage's addresses are too.
template <int NT, bool WIDE, int KNOWN> __device__ __forceinline__ auto columns_of(const RowmmParams &p) {
    if constexpr (KNOWN != ANY) {
        return Exactly<KNOWN>();
    } else {
        return Shape<NT, WIDE>::columns(p.columns);
    }
}

// Returns where a range leaves its part of a tile of the launch, or null where it writes the tile's outputs.
__device__ __forceinline__ float *place_of(const RowmmParams &p, const TilePart &part, int range,
                                           int of_launch) {
    return p.parts != nullptr ? p.parts + (range + of_launch) * int64_t(p.part_rows) * TILE
           : part.whole       ? nullptr
                              : part_of(p, range, part.begun);
}

// Says all that a warp has to know of a tile.
struct TileWork {
    static constexpr int PRESENT = 4,
                         LAST = 8; // flags: the warp has outputs of the tile; the range ends with it
    int type, units;
    TileEnd end;

    __device__ TileWork(const RowmmParams &p, int range, int of_launch)
        : TileWork(p, TilePart(p, range, of_launch), range, of_launch) {}
    __device__ TileWork(const RowmmParams &p, const TilePart &part, int range, int of_launch)
        : type(p.segments[part.segment].type), units(part.units),
          end(p, p.segments[part.segment], part.tile, place_of(p, part, range, of_launch),
              (fragment_of_warp() < part.fragments ? PRESENT : 0) | (part.last ? LAST : 0)) {
        hold(type);
        hold(units);
    }
    __device__ bool present() const { return (end.flags & PRESENT) != 0; }
    __device__ bool last() const { return (end.flags & LAST) != 0; }
    // Has it computed ahead of what comes behind this.
    __device__ void find() const {
        found(uint32_t(type | units | end.flags | end.row) | address_bits(end.to));
    }
};

// Takes a range's tiles, of which `work` is the first. With few rows what a warp has to know of a tile fits its registers beside
// the tile's products, so that it is found ahead of the tile's units, and the first while the launch ahead has not ended.
template <int NT, int KNOWN, typename Ring>
__device__ __forceinline__ void take_range_early(const RowmmParams &p, Ring &ring, TileWork work,
                                                 int of_launch, const float *scales) {
    for (;;) {
        Sums<NT> acc = {};
        multiply_tile<NT, false>(acc, ring, work.type, work.units, columns_of<NT, false, KNOWN>(p),
                                 work.present());
        if (work.present()) {
            if (p.squares != nullptr) {
                barrier_wait(ring.rings.scales_full(), 0);
            }
            if (work.end.to != nullptr) {
                work.end.write<NT>(acc, scales, p.rows);
            } else {
                const int range = range_of_block(p);
                const TilePart part(p, range, of_launch);
                write_tile<NT>(p, p.segments[part.segment], acc, part.tile,
                               place_of(p, part, range, of_launch), scales);
            }
        }
        if (work.last()) {
            return;
        }
        hold(of_launch);
        of_launch++;
        work = TileWork(p, range_of_block(p), of_launch);
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
            multiply_tile<NT, WIDE>(acc, ring, p.segments[part.segment].type, part.units, C, present);
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
            write_tile<NT>(p, p.segments[part.segment], acc, part.tile, place_of(p, part, range, of_launch),
                           scales);
        }
        last = part.last;
    }
}

// Does what a block of one team does.
template <int NT, bool WIDE, int KNOWN>
__device__ __forceinline__ void run_team(const RowmmParams &p, uint8_t *shared, float *scales) {
    using S = Shape<NT, WIDE>;
    const int range = range_of_block(p);
    const Rings<S> rings{held_address(shared), p.slot_bytes, p.slots, columns_of<NT, WIDE, KNOWN>(p),
                         p.stages};
    const int first = p.first[range], units = p.first[range + 1] - first;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, C = rings.columns;
    Filler<S> filler(p, rings, first, units);
    if (warp == S::WARPS) {
        filler.begin(lane);
    } else if (threadIdx.x == 0) {
        rings.init_rows();
    }
    __syncthreads(); // It is one place for all: a barrier in each of two branches is two to compute-sanitizer.
    if (warp < S::WARPS) {
        Rows rows = {};
        if (warp < rings.stages() && lane < COPY_LANES) {
            rows = first_rows(p, first, units, warp, C);
            announce(rows, rings.stage_full(warp), C);
        }
        const int tile = first_tile(p, range);
        const float *square = first_square<S>(p);
        Squares<S> squares = {};
        // All this is found while the launch ahead has not ended.
        found(uint32_t(tile) | address_bits(square) | address_bits(rows.values) | rings.stage_full(warp) |
              shared_address(rings.stage(warp)));
        Taker<S> ring{rings};
        const auto begin = [&] {
            wait_for_previous();
            // All blocks ask for rows at once, for more than L2 answers in a microsecond. So squares are asked for ahead of rows,
            // and rows of later units when the squares have come. Where there is no norm all rows are asked for at once.
            const bool normed = p.squares != nullptr;
            const auto copy_rows = [&] { copy(rows, rings.stage_full(warp), rings.stage(warp), C); };
            if (normed) {
                fetch_squares<S>(p, square, squares);
            }
            if (warp == 0) {
                copy_rows();
            }
            if (normed) {
                find_scales(p, rings, squares, scales);
            }
            if (warp > 0) {
                copy_rows();
            }
        };
        if constexpr (NT <= 2 && ROWMM_BULK) {
            const TileWork work(p, range, tile);
            work.find();
            begin();
            take_range_early<NT, KNOWN>(p, ring, work, tile, scales);
        } else {
            begin();
            take_range<NT, WIDE, KNOWN>(p, ring, range, tile, scales);
        }
    } else if (lane < COPY_LANES) {
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
    const Rings<S> rings{held_address(shared), p.slot_bytes, p.slots, S::columns(p.columns), p.stages};
    if (threadIdx.x == 0) {
        rings.init_rows();
        rings.init_slots(0, rings.slots);
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
            Squares<S> squares;
            fetch_squares<S>(p, first_square<S>(p), squares);
            find_scales(p, rings, squares, scales);
        }
        const int team = warp / FRAGMENTS, range = pair.range[team];
        TeamTaker<S> ring(rings, plan, team);
        if (range < p.ranges) {
            take_range<NT, WIDE, ANY>(p, ring, range, first_tile(p, range), scales);
        }
        ring.finish(plan, team);
    }
}

// Registers are shared out among so many blocks on a multiprocessor. Kernels of up to eight rows are told of a block more than
// there are, for else they would take so many that no block of the launch behind had room beside them. Before 9.0 none begins
// beside another. With 100 KB of shared memory (8.6, 8.9 and 12.0) a launch has a block a multiprocessor (blocks_per_sm), whose
// threads kept 28 to 100 bytes in memory where they had a half or a third of the registers.
template <int NT, bool WIDE> constexpr int launch_blocks() {
    [[maybe_unused]] constexpr int BLOCKS = Shape<NT, WIDE>::BLOCKS;
#if SMALL_SHARED
    constexpr int OWN = 1;
#else
    constexpr int OWN = BLOCKS;
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    return OWN;
#else
    return NT == 1 ? BLOCKS + 1 : OWN;
#endif
}

template <int NT, bool WIDE, int KNOWN>
__global__ void __launch_bounds__(Shape<NT, WIDE>::threads(ROWMM_BULK), (launch_blocks<NT, WIDE>()))
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

template <int NT, bool WIDE, int KNOWN> RowmmKernel rowmm_kernel_of() {
    return rowmm_kernel<NT, WIDE, KNOWN>;
}

} // namespace luce
