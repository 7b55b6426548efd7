// In the place of native/kernels/attention/mma.cuh: there are no tensor cores here, F32 cells are attended to without.
#pragma once

#include "attention/units.cuh"
#include "attention/kv_types.cuh"
#include "attention/layout.h"
#include "common/ring.cuh"

namespace luce {

template <int D, int TYPE, bool WGMMA, bool AHEAD> struct Layout {
    static constexpr int WARPS = 1, MATH_THREADS = 1, UNPACK_THREADS = 0, SLOTS = 0, TILES = 0;
    static constexpr int FULL = 0, EMPTY = 0, READY = 0, LEFT = 0, MAX_M = 1, PLAN = 0, BYTES = 1;
    static Told::Ring *told(uint8_t *) { abort(); }
};
template <typename L> struct Loader {
    const AttentionParams &a;
    const Plan &plan;
    uint8_t *shared;
    void run() { abort(); }
};
template <int TYPE, typename L> void unpack_units(uint8_t *) { abort(); }
template <int D, int TYPE> void mma_units(const AttentionParams &, const Plan &, uint8_t *) { abort(); }
inline float exp2_fast(float x) { return std::exp2(x); }

} // namespace luce
