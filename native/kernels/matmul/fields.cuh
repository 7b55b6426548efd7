// The quants of a fragment (16 outputs x 256 k) lie in words that a lane reads whole. Lane (g = lane / 4, t =
// lane % 4) has, of outputs g and g + 8, the values k = 64 t .. 64 t + 63. For each half of 32 of them (h)
// and each of its outputs (r), v = 2 h + r, they are BITS words. Pair p (values 2 p and 2 p + 1) lies at the
// same place in the low and in the high 16 bits of a word, ready for half2 arithmetic.
#pragma once

#include "common/warp.cuh"
#include "matmul/layout.h"

namespace luce {

template <int BITS> struct Fields {
    static constexpr int BYTES = FRAGMENT * CHUNK * BITS / 8;
    static constexpr int PER = 16 / BITS; // half a word has so many whole fields
    static constexpr int WHOLE =
        PER * BITS; // These pairs are whole fields. Of 3, 5 and 6 bits some other pairs are spread.
    static constexpr uint32_t MASK = ((1u << BITS) - 1) * 0x00010001u;

    uint32_t w[BITS];

    // Returns the offset of word i. A lane has as many planes of 16 bytes as there are, then one of 8, then
    // one of 4.
    static __device__ int at(int i, int v, int lane) {
        constexpr int WIDE = BITS / 4 * 4, PAIR = (BITS - WIDE) / 2 * 2;
        if (i < WIDE) {
            return i / 4 * 2048 + v * 512 + lane * 16 + i % 4 * 4;
        }
        if (i < WIDE + PAIR) {
            return WIDE * 512 + v * 256 + lane * 8 + (i - WIDE) * 4;
        }
        return (WIDE + PAIR) * 512 + v * 128 + lane * 4;
    }
    __device__ void load(const uint8_t *fragment, int v, int lane) {
        int i = 0;
#pragma unroll
        for (; i + 4 <= BITS; i += 4) {
            const uint4 x = *reinterpret_cast<const uint4 *>(fragment + at(i, v, lane));
            w[i] = x.x;
            w[i + 1] = x.y;
            w[i + 2] = x.z;
            w[i + 3] = x.w;
        }
        if constexpr (BITS % 4 >= 2) {
            const uint2 x = *reinterpret_cast<const uint2 *>(fragment + at(BITS / 4 * 4, v, lane));
            w[BITS / 4 * 4] = x.x;
            w[BITS / 4 * 4 + 1] = x.y;
        }
        if constexpr (BITS % 2 == 1) {
            w[BITS - 1] = *reinterpret_cast<const uint32_t *>(fragment + at(BITS - 1, v, lane));
        }
    }
    __device__ void store(uint8_t *fragment, int v, int lane) const {
#pragma unroll
        for (int i = 0; i < BITS; i++) {
            *reinterpret_cast<uint32_t *>(fragment + at(i, v, lane)) = w[i];
        }
    }

    // These return the word and the shift of pair p < WHOLE. Of 6 bits the fields begin at bit 4, so that the
    // first needs no shift.
    static constexpr __device__ int word(int p) { return p / PER; }
    static constexpr __device__ int shift(int p) { return p % PER * BITS + (BITS == 6 ? 4 : 0); }

    static constexpr __device__ int spread(int p) { return p == 12 ? 0 : p == 13 ? 2 : p == 14 ? 3 : 5; }

    // Returns pair p as two integers, in the low and the high 16 bits.
    __device__ uint32_t get(int p) const {
        if (p < WHOLE) {
            return w[word(p)] >> shift(p) & MASK;
        }
        if constexpr (BITS == 3 || BITS == 5) { // bit i of pair 15 is bit 15 of word i
            uint32_t x = 0;
#pragma unroll
            for (int i = 0; i < BITS; i++) {
                x |= w[i] >> (15 - i) & 0x00010001u << i;
            }
            return x;
        } else if constexpr (BITS == 6) { // pairs 12 to 15 are in the low 4 bits of the six words
            const int a = spread(p), b = p < 14 ? 1 : 4, two = p % 2 * 2;
            return (w[a] & 0x000f000fu) | (w[b] >> two & 0x00030003u) << 4;
        }
        return 0;
    }
    // Adds pair p to words that were zero before.
    __device__ void put(int p, uint32_t low, uint32_t high) {
        const uint32_t x = low | high << 16;
        if (p < WHOLE) {
            w[word(p)] |= x << shift(p);
        } else if constexpr (BITS == 3 || BITS == 5) {
#pragma unroll
            for (int i = 0; i < BITS; i++) {
                w[i] |= (x >> i & 0x00010001u) << 15;
            }
        } else if constexpr (BITS == 6) {
            const int a = spread(p), b = p < 14 ? 1 : 4, two = p % 2 * 2;
            w[a] |= x & 0x000f000fu;
            w[b] |= (x >> 4 & 0x00030003u) << two;
        }
    }
};

constexpr ROWMM_BOTH int bits_of(int type) {
    switch (type) {
        case TYPE_Q2_K: return 2;
        case TYPE_Q3_K: return 3;
        case TYPE_Q5_K:
        case TYPE_Q5_0:
        case TYPE_Q5_1: return 5;
        case TYPE_Q6_K: return 6;
        case TYPE_Q8_0: return 8;
        default: return 4;
    }
}

// ---- scales of a fragment, after its quants ----

// These say where the scales begin, and where those of the 256 (d, dmin) begin among them.
constexpr ROWMM_BOTH int scales_at(int type) {
    return FRAGMENT * CHUNK * bits_of(type) / 8;
}
constexpr ROWMM_BOTH int super_at(int type) {
    switch (type) {
        case TYPE_Q4_K:
        case TYPE_Q5_K:
        case TYPE_Q3_K: return scales_at(type) + 192; // a lane has 6 bytes of scales
        case TYPE_Q6_K:
        case TYPE_Q2_K: return scales_at(type) + 256; // a lane has 8 bytes of scales
        case TYPE_IQ4_XS: return scales_at(type) + 96; // a lane has 3 bytes of scales
        default: return 0;
    }
}

// IQ4_NL and IQ4_XS have the values -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113.
// The table holds them plus 128.
constexpr uint32_t IQ4_TABLE[4] = {0x3f2d1801, 0x766a5d4f, 0xa6998d81, 0xf1d9c5b5};

// Their nibbles lie in order, with value 8 i + n at nibble n of word i, since the table gives bytes in order.
__device__ __forceinline__ void iq4_put(Fields<4> &f, int p, uint32_t low, uint32_t high) {
    f.w[p / 4] |= (low | high << 4) << 8 * (p % 4);
}
// Turns four nibbles of the low 16 bits of q into four bytes of the table.
__device__ __forceinline__ uint32_t iq4_values(uint32_t q) {
    const uint32_t low = __byte_perm(IQ4_TABLE[0], IQ4_TABLE[1], q & 0x7777);
    const uint32_t high = __byte_perm(IQ4_TABLE[2], IQ4_TABLE[3], q & 0x7777);
    return __byte_perm(low, high, 0x3210 | (q & 0x8888) >> 1);
}

} // namespace luce
