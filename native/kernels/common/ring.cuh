// Has what rings in shared memory have in common: places, and how a warp leaves one.
//
// __syncwarp() puts what all lanes did with memory ahead of what each of them does next, and an arrival comes behind all
// that is ahead of it for its lane. So one lane arrives for its warp. (Where every lane does, 64 rows take 1% longer on an
// H200.) compute-sanitizer's racecheck does not follow this from the other lanes to that one, and takes what a ring brings
// next for a race: bench/racecheck_ring.cu shows it. In the build that racecheck looks at (tools/build_checks.sh) every
// lane arrives and waits, and nothing is reported (bench/results/2026-11-23-racecheck-h200.txt). All else is the same code.
#pragma once

#include "matmul/ptx.cuh"

namespace luce {

// This is a place in a ring of n, and the parity of the barrier's phase there.
struct Place {
    int i = 0, parity = 0;
    __device__ void next(int n) {
        if (++i == n) {
            i = 0;
            parity ^= 1;
        }
    }
    __device__ void go(int places, int n) {
        i += places;
        parity ^= i / n % 2;
        i %= n;
    }
};

#ifdef LUCE_EVERY_LANE_ARRIVES
constexpr int ARRIVING_LANES = 32;
#else
constexpr int ARRIVING_LANES = 1;
#endif

// Prepares a barrier whose phase ends when so many warps have arrived.
__device__ __forceinline__ void barrier_init_warps(uint32_t barrier, int warps) {
    barrier_init(barrier, warps * ARRIVING_LANES);
}
// Arrives for the warp, whose lanes all call it behind a __syncwarp().
__device__ __forceinline__ void warp_arrive(uint32_t barrier, int lane) {
    if (ARRIVING_LANES == 32 || lane == 0) {
        barrier_arrive(barrier);
    }
}

} // namespace luce
