// Stands in for native/kernels/rowmm_wgmma.cuh. A warp multiplies its 16 of the warpgroup's 64 outputs at once.
// This shows what a descriptor points to, and nothing of when a multiplication ends.
#pragma once

#include "matmul/ptx.cuh"

#define ROWMM_WGMMA 1

namespace luce {

inline void wgmma_begin() {}
inline void wgmma_commit() {}
template <int N> void wgmma_wait() {}
inline void wgmma_part(uint32_t) {}
inline void wgmma_show() {}
template <int N> void registers_down() {}
template <int N> void registers_up() {}
template <int NT> void wgmma_pin(float (&)[NT][4]) {}

// Says where step i of a stage begins.
template <int NT> uint64_t wgmma_rows(uint32_t stage, int i) {
    return stage + uint32_t(i) * 2 * NT * 128;
}

// There are NT matrices of 8 rows x 16 bytes side by side, with the next 8 k behind them.
template <int NT> void wgmma(float (&c)[NT][4], const uint32_t *a, uint64_t rows, bool add) {
    const int lane = int(threadIdx.x % 32);
    for (int j = 0; j < NT; j++) {
        const uint8_t *from = emulated::dynamic_shared + rows + j * 128 + lane * 4;
        uint32_t b[2];
        memcpy(&b[0], from, 4);
        memcpy(&b[1], from + NT * 128, 4);
        for (float &x : c[j]) {
            x = add ? x : 0;
        }
        mma(c[j], a[0], a[1], a[2], a[3], b[0], b[1]);
    }
}

} // namespace luce
