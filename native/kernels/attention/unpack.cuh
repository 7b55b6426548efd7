// Unpacks cells of Q8_0 and Q4_0 to F16 in shared memory. A thread takes the two blocks that make 64 neighbouring values of
// a cell, which lie in whole words together, and writes eight 16-byte words. A byte becomes the low bits of the F16 number
// 1024 by a permutation, and two values are scaled at once: q * d is rounded once, as it would be from F32.
#pragma once

#include "attention/kv_types.cuh"
#include "attention/tile.cuh"

namespace luce {
namespace {

constexpr int UNPACKED_VALUES = 64; // a thread takes so many at once

__device__ __half2 halves(uint32_t bits) {
    return *reinterpret_cast<const __half2 *>(&bits);
}
__device__ uint32_t bits_of(__half2 h) {
    return *reinterpret_cast<const uint32_t *>(&h);
}
// Returns a number twice.
__device__ __half2 twice(float x) {
    return __float2half2_rn(x);
}

// Returns the F16 number that begins at an even byte of words, twice. Bytes are known when it is compiled.
__device__ __half2 scale_at(const uint32_t *words, int byte) {
    return halves(__byte_perm(words[byte / 4], 0, byte % 4 == 0 ? 0x1010 : 0x3232));
}
// Returns the bytes at an even byte and at the next, below `above` in 16 bits each.
__device__ uint32_t pair_at(uint32_t word, int byte, uint32_t above) {
    return __byte_perm(word, above, byte % 4 == 0 ? 0x4140 : 0x4342);
}

// Unpacks block b (0 or 1) to values in pairs.
template <int TYPE> __device__ void unpack_block(const uint32_t *words, int b, uint32_t (&values)[16]) {
    constexpr uint32_t ABOVE = 0x64646464; // 0x6400 + x is the F16 number 1024 + x
    const int first = b * KvType<TYPE>::BYTES;
    const __half2 d = scale_at(words, first);
#pragma unroll
    for (int i = 0; i < (TYPE == KV_Q8_0 ? 16 : 8); i++) {
        const int byte = first + 2 + 2 * i;
        if (TYPE == KV_Q8_0) {
            const __half2 x = halves(pair_at(words[byte / 4] ^ 0x80808080, byte, ABOVE)); // 1024 + 128 + q
            values[i] = bits_of(__hmul2(__hsub2(x, twice(1152)), d));
        } else {
            const uint32_t x = pair_at(words[byte / 4], byte, 0);
            const __half2 low = halves((x & 0x000f000f) | 0x64006400),
                          high = halves((x & 0x00f000f0) | 0x64006400);
            values[i] = bits_of(__hmul2(__hsub2(low, twice(1032)), d));
            values[8 + i] =
                bits_of(__hmul2(__hfma2(high, twice(1 / 16.0f), twice(-72)), d)); // 1024 + 16 (q + 8)
        }
    }
}

// Unpacks a share of a tile of packed cells to rows of F16. The caller's barrier follows. Eight threads that follow each
// other have eight rows, so that their words lie in different banks.
template <int TYPE, typename L>
__device__ void unpack(const uint8_t *from, uint8_t *to, int tid, int threads) {
    constexpr int BYTES = 2 * KvType<TYPE>::BYTES, PANELS = L::ROW / 2 / UNPACKED_VALUES;
    static_assert(BYTES % 4 == 0 && L::CELL == PANELS * BYTES, "two blocks are whole words");
#pragma unroll 1
    for (int u = tid; u < L::KEYS * PANELS; u += threads) {
        const int row = u / (8 * PANELS) * 8 + u % 8, panel = u / 8 % PANELS;
        const uint32_t *cell = reinterpret_cast<const uint32_t *>(from + row * L::CELL + panel * BYTES);
        uint32_t words[BYTES / 4];
#pragma unroll
        for (int i = 0; i < BYTES / 4; i++) {
            words[i] = cell[i];
        }
#pragma unroll
        for (int b = 0; b < 2; b++) {
            uint32_t v[16];
            unpack_block<TYPE>(words, b, v);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                *reinterpret_cast<uint4 *>(to + L::place(row, panel * 8 + b * 4 + i, L::KEYS)) = {
                    v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]};
            }
        }
    }
}

} // namespace
} // namespace luce
