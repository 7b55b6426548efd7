// Stands in for native/kernels/attention/sm90/instructions.cuh. A warp multiplies its 16 of the warpgroup's 64 rows at once.
// This shows what a descriptor points to, and nothing of when a multiplication ends.
#pragma once

#include "attention/tile.cuh"
#include "matmul/sm90/wgmma.cuh"

namespace luce {

constexpr int GROUP_THREADS = 128, GROUP_PAIRS = 64;

// A Matrix lies in rows of 128 bytes. Which of 16 bytes' words a row's are is changed by bits 7 to 9 of their address.
struct Matrix {
    uint32_t low;
    explicit Matrix(uint32_t address) : low(address) {
        if (address % 1024 != 0) {
            abort();
        }
    }
    uint64_t at(uint32_t bytes) const { return low + bytes; }
};
inline const uint16_t &half_at(uint64_t matrix, int row, int column) {
    const uint32_t at = uint32_t(matrix) + uint32_t(row * 128 + column * 2);
    return *reinterpret_cast<const uint16_t *>(emulated::dynamic_shared + (at ^ (at >> 7 & 7) << 4));
}
inline uint32_t pair_of(uint16_t low, uint16_t high) {
    return low | uint32_t(high) << 16;
}

// c (64 x 64) += or = a (64 x 16, by rows) * b (64 columns x 16, by columns).
inline void wgmma_by_rows(float (&c)[8][4], uint64_t a, uint64_t b, bool add) {
    const int lane = int(threadIdx.x % 32), row = int(threadIdx.x / 32 % 4) * 16 + lane / 4, k = lane % 4 * 2;
    const auto two = [&](uint64_t m, int at, int from) { return pair_of(half_at(m, at, from), half_at(m, at, from + 1)); };
    const uint32_t rows[4] = {two(a, row, k), two(a, row + 8, k), two(a, row, k + 8), two(a, row + 8, k + 8)};
    for (int n = 0; n < 8; n++) {
        for (float &x : c[n]) {
            x = add ? x : 0;
        }
        mma(c[n], rows[0], rows[1], rows[2], rows[3], two(b, n * 8 + lane / 4, k), two(b, n * 8 + lane / 4, k + 8));
    }
}
// c (64 x 64) += a (64 x 16, in registers) * b (16 x 64, by rows).
inline void wgmma_by_columns(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b) {
    const int lane = int(threadIdx.x % 32), k = lane % 4 * 2;
    for (int n = 0; n < 8; n++) {
        const int column = n * 8 + lane / 4;
        mma(c[n], a[0], a[1], a[2], a[3], pair_of(half_at(b, k, column), half_at(b, k + 1, column)),
            pair_of(half_at(b, k + 8, column), half_at(b, k + 9, column)));
    }
}

} // namespace luce
