// Makes a fragment's weights into F16 operands of the tensor core. Lane<TYPE> is what a lane has of one
// fragment of one unit.
//
// The sum over a unit is out[row] += D * (sum of pair() * x) - M * (sum of minimum() * sums of x). D and M
// are F32, one for each of the lane's two outputs, and pair() is F16. An F16 whose bits are an integer k <
// 2048 is exactly k * 2^-24. So products of quants and integer scales are made as bits, by an integer
// multiply or by an exact half2 multiply. The one that needs no shift of the field is taken (the two run on
// different pipes).
#pragma once

#include "matmul/fields.cuh"

#include <cuda_fp16.h>

namespace luce {

// ---- half2 as words ----

__device__ __forceinline__ uint32_t word_of(__half2 h) {
    return *reinterpret_cast<uint32_t *>(&h);
}
__device__ __forceinline__ __half2 halves(uint32_t w) {
    return *reinterpret_cast<__half2 *>(&w);
}
__device__ __forceinline__ __half2 twice(float x) {
    return __float2half2_rn(x);
}
// Puts the low or the high half into both halves.
__device__ __forceinline__ __half2 spread(__half2 x, int r) {
    return r == 0 ? __low2half2(x) : __high2half2(x);
}
__device__ __forceinline__ uint32_t times(uint32_t a, __half2 b) {
    return word_of(__hmul2(halves(a), b));
}
constexpr uint32_t F16_1024 = 0x64006400u; // F16 1024 + k has the bits of 1024 plus k

// Turns integers 0 .. 1023 in both halves into F16, less `bias`. The result is exact.
__device__ __forceinline__ __half2 to_half2(uint32_t x, float bias = 0) {
    return __hadd2(halves(x | F16_1024), twice(-1024.0f - bias));
}
__device__ __forceinline__ float half_bits(uint32_t low16) {
    return __half2float(__ushort_as_half(uint16_t(low16)));
}

template <typename T> __device__ __forceinline__ T word_at(const uint8_t *p) {
    return *reinterpret_cast<const T *>(p);
}

// These say which types' unit needs a factor D in F32, and which types' minimums are products with the sums
// of x.
constexpr ROWMM_BOTH bool has_super(int type) {
    return type == TYPE_Q2_K || type == TYPE_Q3_K || type == TYPE_Q4_K || type == TYPE_Q5_K ||
           type == TYPE_Q6_K || type == TYPE_IQ4_XS;
}
constexpr ROWMM_BOTH bool has_minimum(int type) {
    return type == TYPE_Q4_K || type == TYPE_Q5_K;
}

// ---- Q4_K, Q5_K: d * sc * q - dmin * mn, sc and mn of 6 bits for each 32 ----

template <int TYPE> struct Lane {
    static_assert(TYPE == TYPE_Q4_K || TYPE == TYPE_Q5_K);
    static constexpr int BITS = bits_of(TYPE);
    static constexpr float UNIT = 16777216.0f; // 2^24

    // These are packed scales of blocks 2 t and 2 t + 1. Each half of u, of g and g + 8, has both sc, and above
    // them four bits of a minimum of g (the low half block 2 t's). A byte of v has a block's minimum of g + 8, and
    // the other two bits of g's.
    uint32_t u, v, super, super_min;
    // These are the scales of the half in hand, of g and g + 8, over 2^place. Q4_K fills places 0 and BITS,
    // and Q5_K fills all.
    __half2 sc[BITS + 1];

    __device__ void load(const uint8_t *fragment, int lane) {
        const uint8_t *p = fragment + scales_at(TYPE);
        u = word_at<uint32_t>(p + lane * 4);
        v = word_at<uint16_t>(p + 128 + lane * 2);
        const uint2 d = word_at<uint2>(fragment + super_at(TYPE) + lane / 4 * 8);
        super = d.x;
        super_min = d.y;
    }
    __device__ void half(int h) {
        sc[0] = to_half2((h == 0 ? u : u >> 6) & 0x003f003fu);
#pragma unroll
        for (int place = BITS == 5 ? 1 : BITS; place <= BITS; place++) {
            sc[place] = __hmul2(sc[0], twice(1.0f / (1 << place))); // this is exact
        }
    }
    // Returns pair p of output r in the half in hand, times 2^-24. Two fields are taken where they lie. Others
    // are shifted to a place below bit 10. Of 5 bits that place differs from word to word, so that the bits of
    // the pair that is spread over all words come together.
    __device__ uint32_t pair(const Fields<BITS> &f, int p, int r) const {
        constexpr uint32_t MASK = Fields<BITS>::MASK;
        if (p >= Fields<BITS>::WHOLE) {
            uint32_t x = 0;
#pragma unroll
            for (int i = 0; i < BITS; i++) {
                x |= f.w[i] >> (15 - BITS - i) & 0x00010001u << (BITS + i);
            }
            return times(x, spread(sc[BITS], r));
        }
        const int i = Fields<BITS>::word(p), field = p % Fields<BITS>::PER;
        const int shift = field < 2 ? 0 : BITS == 4 ? 8 : 10 - i;
        const int place = BITS == 4 ? field % 2 * BITS : field < 2 ? field * BITS : i;
        return times(f.w[i] >> shift & MASK << place, spread(sc[place], r));
    }
    // Returns the minimums of blocks 2 t and 2 t + 1 of output r, times 2^-24.
    __device__ uint32_t minimum(int r) const {
        const uint32_t x = __byte_perm(v, 0, 0x4140);
        return r == 1 ? x & 0x003f003fu : (u >> 12 & 0x000f000fu) | (x >> 2 & 0x00300030u);
    }
    __device__ float factor(int r) const { return half_bits(super >> 16 * r & 0xffff) * UNIT; }
    __device__ float minimum_factor(int r) const { return half_bits(super_min >> 16 * r & 0xffff) * UNIT; }
};

// ---- Q6_K and Q3_K: d * sc * (q - bias), sc for each 16 ----

// A product of Q6_K is at most 4096, and an F16 as large as that is even. So few products are rounded, and
// those to 11 bits.
template <> struct Lane<TYPE_Q6_K> {
    // These are sc + 128 of the 16s of half h: two bytes of g in the low, two of g + 8 in the high half.
    uint32_t packed[2];
    uint32_t super;
    // These are of the half in hand, of g and g + 8: sc * 2^4 and -32 * sc * 2^-16, [16 of the 32], and sc * 2^8.
    __half2 sc[2], bias[2], sc_low;

    __device__ void load(const uint8_t *fragment, int lane) {
        const uint2 x = word_at<uint2>(fragment + scales_at(TYPE_Q6_K) + lane * 8);
        packed[0] = x.x;
        packed[1] = x.y;
        super = word_at<uint32_t>(fragment + super_at(TYPE_Q6_K) + lane / 4 * 4);
    }
    __device__ void half(int h) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t both = __byte_perm(packed[h], F16_1024, i == 0 ? 0x5250 : 0x5351);
            sc[i] = __hfma2(halves(both), twice(16.0f), twice(-1152.0f * 16)); // this is exact
            bias[i] = __hmul2(sc[i], twice(-32.0f / 1048576));
        }
        sc_low = __hmul2(sc[1], twice(16.0f));
    }
    // Returns pair p of output r in the half in hand, times 2^-16. Whole fields are taken at bit 4, where q is
    // q * 2^-20. What is spread over two words is gathered at bit 0.
    __device__ uint32_t pair(const Fields<6> &f, int p, int r) const {
        const int i = p / 8;
        if (p < Fields<6>::WHOLE) {
            const uint32_t x = (p % 2 == 0 ? f.w[p / 2] : f.w[p / 2] >> 6) & 0x03f003f0u;
            return word_of(__hfma2(halves(x), spread(sc[i], r), spread(bias[i], r)));
        }
        const int a = Fields<6>::spread(p), b = p < 14 ? 1 : 4;
        const uint32_t x = (f.w[a] & 0x000f000fu) | (f.w[b] << (p % 2 == 0 ? 4 : 2) & 0x00300030u);
        return word_of(__hfma2(halves(x), spread(sc_low, r), spread(bias[i], r)));
    }
    __device__ float factor(int r) const { return half_bits(super >> 16 * r & 0xffff) * 65536.0f; }
};

template <> struct Lane<TYPE_Q3_K> {
    uint32_t packed[2]; // each has four scales; [r]
    uint32_t super;
    __half2 sc[2][2], bias[2][2]; // they are those of the half in hand; [r][16 of the 32]

    __device__ void load(const uint8_t *fragment, int lane) {
        const uint8_t *p = fragment + scales_at(TYPE_Q3_K);
        // these have six bits each: 24 bits are of g, 24 of g + 8
        const uint32_t x = word_at<uint32_t>(p + lane * 4), y = word_at<uint16_t>(p + 128 + lane * 2);
        packed[0] = six_bits(x);
        packed[1] = six_bits(x >> 24 | y << 8);
        super = word_at<uint32_t>(fragment + super_at(TYPE_Q3_K) + lane / 4 * 4);
    }
    // Spreads four values of six bits to bytes.
    static __device__ uint32_t six_bits(uint32_t x) {
        return (x & 0x3f) | (x & 0xfc0) << 2 | (x & 0x3f000) << 4 | (x & 0xfc0000) << 6;
    }
    __device__ void half(int h) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int byte = 2 * h + i; // this is of g in the low half, of g + 8 in the high
            const uint32_t both = __byte_perm(packed[0], packed[1], byte | (4 + byte) << 8) & 0x00ff00ffu;
            const __half2 s = __hmul2(to_half2(both, 32.0f), twice(1024.0f)); // this is exact
#pragma unroll
            for (int r = 0; r < 2; r++) {
                sc[r][i] = spread(s, r);
                bias[r][i] = __hmul2(sc[r][i], twice(-4.0f / 16777216));
            }
        }
    }
    // Fields are taken at bit 0 as q * 2^-24, times sc * 2^10. With sc of at most 32 and the fields up to bit 6
    // that fits.
    __device__ uint32_t pair(const Fields<3> &f, int p, int r) const {
        return word_of(__hfma2(halves(f.get(p)), sc[r][p / 8], bias[r][p / 8]));
    }
    __device__ float factor(int r) const {
        return half_bits(super >> 16 * r & 0xffff) * (16777216.0f / 1024.0f);
    }
};

// ---- Q2_K: d * sc * q - dmin * mn, sc and mn of 4 bits for each 16 ----

// Here d and dmin are made F16 factors of about one by d's power of two, then a weight is rounded once or
// twice to F16. The sums of x can not serve here, since there are twice as many minimums as sums.
template <> struct Lane<TYPE_Q2_K> {
    uint32_t packed[2]; // each has four bytes sc | mn << 4; [r]
    float d[2], d_min[2];
    uint32_t power[2]; // each has an exponent's bits; [r]
    __half2 sc[2][2], mn[2][2];

    __device__ void load(const uint8_t *fragment, int lane) {
        const uint2 x = word_at<uint2>(fragment + scales_at(TYPE_Q2_K) + lane * 8);
        const uint2 s = word_at<uint2>(fragment + super_at(TYPE_Q2_K) + lane / 4 * 8);
        packed[0] = x.x;
        packed[1] = x.y;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            d[r] = half_bits(s.x >> 16 * r & 0xffff);
            d_min[r] = half_bits(s.y >> 16 * r & 0xffff);
            const uint32_t exponent = __float_as_uint(fmaxf(fabsf(d[r]), fabsf(d_min[r]))) >> 23;
            power[r] = max(exponent, 64u);
        }
    }
    __device__ void half(int h) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float down = __uint_as_float((254 - power[r]) << 23);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t x = packed[r] >> 8 * (2 * h + i);
                sc[r][i] = twice(d[r] * down * float(x & 15));
                mn[r][i] = twice(-(d_min[r] * down * float(x >> 4 & 15)));
            }
        }
    }
    __device__ uint32_t pair(const Fields<2> &f, int p, int r) const {
        return word_of(__hfma2(to_half2(f.get(p)), sc[r][p / 8], mn[r][p / 8]));
    }
    __device__ float factor(int r) const { return __uint_as_float(power[r] << 23); }
};

// ---- IQ4_XS: d * (sc - 32) * table[q], sc of 6 bits for each 32 ----

// Returns bytes k and k + 1 (k = 0 or 2) of table values plus 128, as F16 without the 128.
__device__ __forceinline__ __half2 signed_bytes(uint32_t bytes, int k) {
    return __hadd2(halves(__byte_perm(bytes, F16_1024, k == 0 ? 0x5150 : 0x5352)), twice(-1152.0f));
}

template <> struct Lane<TYPE_IQ4_XS> {
    uint32_t u, super;
    __half2 sc[2];

    // Loads four scales of 6 bits: those of blocks 2 t and 2 t + 1 of g, and the same of g + 8.
    __device__ void load(const uint8_t *fragment, int lane) {
        const uint8_t *p = fragment + scales_at(TYPE_IQ4_XS);
        u = word_at<uint16_t>(p + lane * 2) | uint32_t(p[64 + lane]) << 16;
        super = word_at<uint32_t>(fragment + super_at(TYPE_IQ4_XS) + lane / 4 * 4);
    }
    __device__ void half(int h) {
        const uint32_t x = u >> 6 * h;
        const __half2 s = __hmul2(to_half2((x & 63) | (x << 4 & 0x3f0000), 32.0f), twice(1.0f / 16));
        sc[0] = spread(s, 0);
        sc[1] = spread(s, 1);
    }
    __device__ uint32_t pair(const Fields<4> &f, int p, int r) const {
        const uint32_t bytes = iq4_values(f.w[p / 4] >> (p % 4 < 2 ? 0 : 16));
        return word_of(__hmul2(signed_bytes(bytes, p % 2 * 2), sc[r]));
    }
    __device__ float factor(int r) const { return half_bits(super >> 16 * r & 0xffff) * 16.0f; }
};

// ---- types with an F16 d (and m) for each 32 ----

template <int TYPE> struct LaneBy32 {
    static constexpr int BITS = bits_of(TYPE);
    static constexpr bool HAS_M = TYPE == TYPE_Q4_1 || TYPE == TYPE_Q5_1;

    // These are d of block 2 t and of 2 t + 1 (g is low, g + 8 is high), then m likewise.
    uint32_t packed[HAS_M ? 4 : 2];
    __half2 d[2], m[2];

    __device__ void load(const uint8_t *fragment, int lane) {
        const uint8_t *p = fragment + scales_at(TYPE);
        const uint2 x = word_at<uint2>(p + lane * 8);
        packed[0] = x.x;
        packed[1] = x.y;
        if constexpr (HAS_M) {
            const uint2 y = word_at<uint2>(p + 256 + lane * 8);
            packed[2] = y.x;
            packed[3] = y.y;
        }
    }
    __device__ void half(int h) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            d[r] = spread(halves(h == 0 ? packed[0] : packed[1]), r);
            if constexpr (HAS_M) {
                m[r] = spread(halves(h == 0 ? packed[2] : packed[3]), r);
            }
        }
    }
    __device__ uint32_t pair(const Fields<BITS> &f, int p, int r) const {
        if constexpr (TYPE == TYPE_IQ4_NL) {
            const uint32_t bytes = iq4_values(f.w[p / 4] >> (p % 4 < 2 ? 0 : 16));
            return word_of(__hmul2(signed_bytes(bytes, p % 2 * 2), d[r]));
        } else if constexpr (TYPE == TYPE_Q8_0) { // this is q + 128, in bytes 0 and 2 or 1 and 3
            const uint32_t x = __byte_perm(f.w[p / 2], F16_1024, p % 2 == 0 ? 0x5250 : 0x5351);
            return word_of(__hmul2(__hadd2(halves(x), twice(-1152.0f)), d[r]));
        } else if constexpr (HAS_M) {
            return word_of(__hfma2(to_half2(f.get(p)), d[r], m[r]));
        } else {
            return word_of(__hmul2(to_half2(f.get(p), TYPE == TYPE_Q4_0 ? 8.0f : 16.0f), d[r]));
        }
    }
    __device__ float factor(int) const { return 1.0f; }
};
template <> struct Lane<TYPE_Q8_0> : LaneBy32<TYPE_Q8_0> {};
template <> struct Lane<TYPE_Q4_0> : LaneBy32<TYPE_Q4_0> {};
template <> struct Lane<TYPE_Q4_1> : LaneBy32<TYPE_Q4_1> {};
template <> struct Lane<TYPE_Q5_0> : LaneBy32<TYPE_Q5_0> {};
template <> struct Lane<TYPE_Q5_1> : LaneBy32<TYPE_Q5_1> {};
template <> struct Lane<TYPE_IQ4_NL> : LaneBy32<TYPE_IQ4_NL> {};

} // namespace luce
