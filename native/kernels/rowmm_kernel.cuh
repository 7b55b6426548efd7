// This is the product's kernel. A block has a range of units or two, and a warp has 16 outputs of each unit,
// and all rows.
#pragma once

#include "rowmm_multiply.cuh"
#include "rowmm_results.cuh"

namespace luce {

template <int NT, bool WIDE>
__device__ __forceinline__ void take_range(const RowmmParams &p, Taker<Shape<NT, WIDE>> &ring, int range,
                                           const float *scales) {
    const int begin = p.first[range], end = p.first[range + 1], warp = threadIdx.x / WARP;
    int segment = 0;
    for (int unit = begin; unit < end;) {
        while (segment + 1 < p.n_segments && p.segments[segment + 1].first_unit <= unit) {
            segment++;
        }
        const RowmmSegment &s = p.segments[segment];
        const int tile = (unit - s.first_unit) / s.units_k, C = p.columns;
        const int units = min(end, s.first_unit + (tile + 1) * s.units_k) - unit;
        const int fragments = (s.N + FRAGMENT - 1) / FRAGMENT - tile * FRAGMENTS;
        const bool present = (WIDE ? warp / 4 * 4 : warp) < fragments;
        Sums<NT> acc = {};
        switch (s.type) {
            case TYPE_F32: multiply<TYPE_F32, NT, WIDE>(acc, ring, units, C, present); break;
            case TYPE_F16:
            case TYPE_BF16: multiply<TYPE_F16, NT, WIDE>(acc, ring, units, C, present); break;
            case TYPE_Q4_0: multiply<TYPE_Q4_0, NT, WIDE>(acc, ring, units, C, present); break;
            case TYPE_Q4_1: multiply<TYPE_Q4_1, NT, WIDE>(acc, ring, units, C, present); break;
            case TYPE_Q5_0: multiply<TYPE_Q5_0, NT, WIDE>(acc, ring, units, C, present); break;
            case TYPE_Q5_1: multiply<TYPE_Q5_1, NT, WIDE>(acc, ring, units, C, present); break;
            case TYPE_Q8_0: multiply<TYPE_Q8_0, NT, WIDE>(acc, ring, units, C, present); break;
            case TYPE_Q2_K: multiply<TYPE_Q2_K, NT, WIDE>(acc, ring, units, C, present); break;
            case TYPE_Q3_K: multiply<TYPE_Q3_K, NT, WIDE>(acc, ring, units, C, present); break;
            case TYPE_Q4_K: multiply<TYPE_Q4_K, NT, WIDE>(acc, ring, units, C, present); break;
            case TYPE_Q5_K: multiply<TYPE_Q5_K, NT, WIDE>(acc, ring, units, C, present); break;
            case TYPE_Q6_K: multiply<TYPE_Q6_K, NT, WIDE>(acc, ring, units, C, present); break;
            case TYPE_IQ4_NL: multiply<TYPE_IQ4_NL, NT, WIDE>(acc, ring, units, C, present); break;
            default: multiply<TYPE_IQ4_XS, NT, WIDE>(acc, ring, units, C, present); break;
        }
        if (warp < fragments) {
            if (p.squares != nullptr) {
                barrier_wait(ring.rings.scales_full(), 0);
            }
            const bool whole = units == s.units_k;
            float *part = p.parts != nullptr
                              ? p.parts + (range + s.first_tile + tile) * int64_t(p.part_rows) * TILE
                          : whole ? nullptr
                                  : part_of(p, range, (unit - s.first_unit) % s.units_k != 0);
            write_tile<NT>(p, s, acc, tile, part, p.squares != nullptr ? scales : nullptr);
        }
        unit += units;
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
    using S = Shape<NT, WIDE>;
    // A multiprocessor's blocks, b and b + gridDim / 2 as a rule, have neighbouring ranges, so that their sum
    // is even.
    const int pairs = p.ranges / 2, b = blockIdx.x;
    const int range = S::RANGES > 1 ? b * S::RANGES : b < 2 * pairs ? b % pairs * 2 + b / pairs : b;
    const int end = min(range + S::RANGES, p.ranges);
    let_next_start();
    const Rings<S> rings{shared, p.slot_bytes, p.slots};
    if (threadIdx.x == 0) {
        rings.init();
    }
    __syncthreads();
    const int unit = p.first[range];
    int segment = 0;
    while (segment + 1 < p.n_segments && p.segments[segment + 1].first_unit <= unit) {
        segment++;
    }
    const Walk begin{p, segment, unit - p.segments[segment].first_unit, p.first[end] - unit};
    if (threadIdx.x < TAKERS) {
        wait_for_previous();
        if (threadIdx.x < COPY_LANES) {
            Filler<S>(p, rings, begin).fetch_first_rows();
        }
        if (p.squares != nullptr) {
            find_scales(p, rings, scales);
        }
        Taker<S> ring{rings};
        for (int r = range; r < end; r++) {
            take_range<NT, WIDE>(p, ring, r, scales);
        }
    } else if (threadIdx.x % WARP < COPY_LANES) {
        Filler<S> filler(p, rings, begin);
        filler.fetch_first_weights();
        filler.go_on();
    }
}

template <int NT, bool WIDE> RowmmKernel rowmm_kernel_of() {
    using S = Shape<NT, WIDE>;
    return {rowmm_kernel<NT, WIDE>, S::THREADS, S::ROW_BYTES, S::BLOCKS};
}

} // namespace luce
