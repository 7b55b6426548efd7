// Says how rows_matmul reads each quantised weight type: LANES rows at once, a chunk of 256 weights after the other
// (the last may be shorter). A type has
//   BYTES     of a chunk of 256
//   BIAS      what the unpacked bytes are too large by
//   SIGNED    bytes are signed (cpu/simd.h: from_signed)
//   MOST      the largest magnitude of a byte
//   GROUP     weights that share a scale, 32 or 16
//   MIN       weights are scale * q - min, else scale * q
//   scales()  of a chunk of n blocks of 32
//   each()    calls f(block, words) for each block: word j holds weights 4j .. 4j + 3
// The layouts are those of ggml-common.h.
#pragma once

#include "cpu/simd.h"

#define GGML_COMMON_DECL_CPP
#define GGML_COMMON_IMPL_CPP
#include <ggml-common.h>

#include <cstddef>

namespace luce::lanes {

struct Scales {
    Floats scale[16], min[16];
};

constexpr uint32_t LOW_4 = 0x0f0f0f0f, LOW_2 = 0x03030303, LOW_1 = 0x01010101;

LUCE_INLINE Floats byte_to_float(Words w, int i) {
    return to_float((Ints) ((w >> (8 * i)) & 0xff));
}
LUCE_INLINE Floats signed_byte_to_float(Words w, int i) {
    return to_float((Ints) (w << (24 - 8 * i)) >> 24);
}

// Loads the F16 at `offset` of each of n blocks of `bytes`. It goes by way of general registers, since
// vectors have enough to do with the weights. It writes four to a store, since the stores take the time.
LUCE_INLINE void load_block_halves(const Rows &r, int n, size_t bytes, size_t offset, Floats *out) {
    uint64_t fours[8][LANES / 4];
    for (int b = 0; b < n; b++) {
        for (int q = 0; q < LANES / 4; q++) {
            uint64_t four = 0;
            for (int i = 3; i >= 0; i--) {
                four = four << 16 | load<uint16_t>(r.row(4 * q + i) + b * bytes + offset);
            }
            fours[b][q] = four;
        }
    }
    for (int b = 0; b < n; b++) {
        out[b] = load_halves(fours[b]);
    }
}

// Loads 16 bytes of each row, whose low nibbles are weights 0 to 15 and whose high ones are 16 to 31.
LUCE_INLINE void load_nibbles(const Rows &r, Words *w) {
    load_4(r, w);
    for (int j = 0; j < 4; j++) {
        w[4 + j] = (w[j] >> 4) & LOW_4;
        w[j] &= LOW_4;
    }
}

// ---- blocks of 32 ----

// What types of one scale a block, and of one and a minimum, have in common.
template <typename Block, int BIAS_, int MOST_, bool SIGNED_> struct Scaled {
    static constexpr int BIAS = BIAS_, GROUP = 32, MOST = MOST_;
    static constexpr bool SIGNED = SIGNED_, MIN = false;
    static constexpr size_t BYTES = 8 * sizeof(Block);

    LUCE_INLINE void scales(const Rows &r, int n, Scales &s) {
        load_block_halves(r, n, sizeof(Block), offsetof(Block, d), s.scale);
    }
};
template <typename Block, int MOST_> struct ScaledWithMin {
    static constexpr int BIAS = 0, GROUP = 32, MOST = MOST_;
    static constexpr bool SIGNED = false, MIN = true;
    static constexpr size_t BYTES = 8 * sizeof(Block);

    LUCE_INLINE void scales(const Rows &r, int n, Scales &s) {
        load_block_halves(r, n, sizeof(Block), offsetof(Block, data), s.scale);
        load_block_halves(r, n, sizeof(Block), offsetof(Block, data) + 2, s.min);
        for (int b = 0; b < n; b++) {
            s.min[b] = -s.min[b];
        }
    }
};

// Calls f with each block's words, nibbles of Block::qs, after `change` of each.
template <typename Block, typename Change, typename F>
LUCE_INLINE void each_nibbles(const Rows &r, int n, Change change, F f) {
    for (int b = 0; b < n; b++) {
        Words w[8];
        load_nibbles(r.at(b * sizeof(Block) + offsetof(Block, qs)), w);
        for (Words &word : w) {
            word = change(word);
        }
        f(b, w);
    }
}
LUCE_INLINE Words unchanged(Words word) {
    return word;
}

struct Q8_0 : Scaled<block_q8_0, SIGNED_BIAS, 128, true> {
    template <typename F> LUCE_INLINE void each(const Rows &r, int n, F f) {
        for (int b = 0; b < n; b++) {
            Words w[8];
            load_8(r.at(b * sizeof(block_q8_0) + offsetof(block_q8_0, qs)), w);
            for (Words &word : w) {
                word = from_signed(word);
            }
            f(b, w);
        }
    }
};

struct Q4_0 : Scaled<block_q4_0, 8, 15, false> {
    template <typename F> LUCE_INLINE void each(const Rows &r, int n, F f) {
        each_nibbles<block_q4_0>(r, n, unchanged, f);
    }
};

struct Q4_1 : ScaledWithMin<block_q4_1, 15> {
    template <typename F> LUCE_INLINE void each(const Rows &r, int n, F f) {
        each_nibbles<block_q4_1>(r, n, unchanged, f);
    }
};

// Q5_0 and Q5_1 have nibbles, and a fifth bit of each weight in a word of 32.
template <typename Block, typename F> LUCE_INLINE void each_fifth_bit(const Rows &r, int n, F f) {
    for (int b = 0; b < n; b++) {
        Words w[8];
        load_nibbles(r.at(b * sizeof(Block) + offsetof(Block, qs)), w);
        const Words bits = load_1(r.at(b * sizeof(Block) + offsetof(Block, qh)));
        for (int j = 0; j < 8; j++) { // the product puts bit i of four into byte i
            w[j] |= ((((bits >> (4 * j)) & 0xf) * 0x00204081u) & LOW_1) << 4;
        }
        f(b, w);
    }
}

struct Q5_0 : Scaled<block_q5_0, 16, 31, false> {
    template <typename F> LUCE_INLINE void each(const Rows &r, int n, F f) {
        each_fifth_bit<block_q5_0>(r, n, f);
    }
};

struct Q5_1 : ScaledWithMin<block_q5_1, 31> {
    template <typename F> LUCE_INLINE void each(const Rows &r, int n, F f) {
        each_fifth_bit<block_q5_1>(r, n, f);
    }
};

struct Iq4Nl : Scaled<block_iq4_nl, SIGNED_BIAS, 128, true> {
    template <typename F> LUCE_INLINE void each(const Rows &r, int n, F f) {
        each_nibbles<block_iq4_nl>(
            r, n, [](Words word) { return from_signed(lookup(kvalues_iq4nl, word)); }, f);
    }
};

// ---- E2M1: 1, 2 and 1 bits of sign, exponent and fraction ----

// Twice the values of E2M1, which are -6 .. 6 in halves, plus 12: so they are integers, and none is negative.
constexpr int E2M1_BIAS = 12, E2M1_MOST = 24;
alignas(16) constexpr int8_t E2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// A block of 32 has a power of two (E8M0, whose bias is 127), here halved for the doubled values.
struct Mxfp4 {
    static constexpr int BIAS = E2M1_BIAS, GROUP = 32, MOST = E2M1_MOST;
    static constexpr bool SIGNED = false, MIN = false;
    static constexpr size_t BYTES = 8 * sizeof(block_mxfp4);

    LUCE_INLINE void scales(const Rows &r, int n, Scales &s) {
        for (int b = 0; b < n; b++) {
            const Words e = load_1(r.at(b * sizeof(block_mxfp4) + offsetof(block_mxfp4, e))) & 0xff;
            // The exponent of an F32 has the same bias; the least two are subnormal.
            s.scale[b] = (Floats) (e < 2u ? (e + 1) << 21 : (e - 1) << 23);
        }
    }
    template <typename F> LUCE_INLINE void each(const Rows &r, int n, F f) {
        each_nibbles<block_mxfp4>(r, n, [](Words word) { return lookup(E2M1, word); }, f);
    }
};

// A block of 64 has a scale for each 16: 4 bits of exponent and 3 of fraction (UE4M3, whose bias is 7).
struct Nvfp4 {
    static constexpr int BIAS = E2M1_BIAS, GROUP = 16, MOST = E2M1_MOST;
    static constexpr bool SIGNED = false, MIN = false;
    static constexpr size_t BYTES = 4 * sizeof(block_nvfp4);

    LUCE_INLINE void scales(const Rows &r, int n, Scales &s) {
        for (int g = 0; g < 2 * n; g++) {
            const Words four = load_1(r.at(g / 4 * sizeof(block_nvfp4) + offsetof(block_nvfp4, d)));
            const Words d = (four >> (8 * (g % 4))) & 0xff;
            // An F16 has one more bit of exponent, whose bias is 15. All bits set are no number, and count as 0.
            const Floats half = half_to_float(d == 0x7fu ? all(0u) : (d & 0x7f) << 7);
            s.scale[g] = half * all(128.0f); // 2^8 / 2
        }
    }
    // Low nibbles of 8 bytes are the first 8 of 16 weights, high ones the others.
    template <typename F> LUCE_INLINE void each(const Rows &r, int n, F f) {
        for (int b = 0; b < n; b++) {
            Words raw[4], w[8];
            load_4(r.at(b / 2 * sizeof(block_nvfp4) + offsetof(block_nvfp4, qs) + b % 2 * 16), raw);
            for (int j = 0; j < 4; j++) {
                const int at = j / 2 * 4 + j % 2;
                w[at] = lookup(E2M1, raw[j] & LOW_4);
                w[at + 2] = lookup(E2M1, (raw[j] >> 4) & LOW_4);
            }
            f(b, w);
        }
    }
};

// ---- blocks of 256 ----

// The ternary types have one F16 at the end of the block, for weights -1, 0 and 1.
template <typename Block> LUCE_INLINE void load_one_scale(const Rows &r, Scales &s) {
    static_assert(offsetof(Block, d) + 2 == sizeof(Block), "d must be the last");
    const Floats d = half_to_float(load_1(r.at(offsetof(Block, d) - 2)) >> 16);
    for (int b = 0; b < 8; b++) {
        s.scale[b] = d;
    }
}

struct Tq2_0 {
    static constexpr int BIAS = 1, GROUP = 32, MOST = 3;
    static constexpr bool SIGNED = false, MIN = false;
    static constexpr size_t BYTES = sizeof(block_tq2_0);

    LUCE_INLINE void scales(const Rows &r, int, Scales &s) { load_one_scale<block_tq2_0>(r, s); }
    template <typename F> LUCE_INLINE void each(const Rows &r, int, F f) {
        for (int half = 0; half < 2; half++) {
            Words low[8], w[8];
            load_8(r.at(offsetof(block_tq2_0, qs) + half * 32), low);
            for (int b = 0; b < 4; b++) {
                for (int j = 0; j < 8; j++) {
                    w[j] = (low[j] >> (2 * b)) & LOW_2;
                }
                f(4 * half + b, w);
            }
        }
    }
};

// A byte is a fraction of 256 whose first digits to the base 3 are weights plus 1.
struct Tq1_0 {
    static constexpr int BIAS = 1, GROUP = 32, MOST = 2;
    static constexpr bool SIGNED = false, MIN = false;
    static constexpr size_t BYTES = sizeof(block_tq1_0);

    LUCE_INLINE void scales(const Rows &r, int, Scales &s) { load_one_scale<block_tq1_0>(r, s); }
    // Returns the digit of each byte behind those that `power` = 3^n shifts out.
    LUCE_INLINE Words digit(Words bytes, uint32_t power) {
        constexpr uint32_t EVEN = 0x00ff00ff;
        const Words even = ((bytes & EVEN) * power) & EVEN, odd = (((bytes >> 8) & EVEN) * power) & EVEN;
        return (((even * 3u) >> 8) & EVEN) | ((odd * 3u) & ~EVEN);
    }
    template <typename F> LUCE_INLINE void each(const Rows &r, int, F f) {
        static_assert(sizeof(block_tq1_0::qs) == 48 && offsetof(block_tq1_0, qh) == 48, "32, 16 and 4 bytes");
        constexpr uint32_t POWERS[5] = {1, 3, 9, 27, 81};
        Words bytes[8], w[8];
        load_8(r, bytes); // byte i has weights i, 32 + i .. 128 + i
        for (int n = 0; n < 5; n++) {
            for (int j = 0; j < 8; j++) {
                w[j] = digit(bytes[j], POWERS[n]);
            }
            f(n, w);
        }
        load_4(r.at(32), bytes); // byte i has weights 160 + i, 176 + i .. 224 + i
        for (int n = 0; n < 5; n++) {
            for (int j = 0; j < 4; j++) {
                w[n % 2 * 4 + j] = digit(bytes[j], POWERS[n]);
            }
            if (n % 2 == 1) {
                f(5 + n / 2, w);
            }
        }
        const Words last = load_1(r.at(48)); // byte i has weights 240 + i, 244 + i .. 252 + i
        for (int n = 0; n < 4; n++) {
            w[4 + n] = digit(last, POWERS[n]);
        }
        f(7, w);
    }
};

struct Iq4Xs {
    static constexpr int BIAS = SIGNED_BIAS, GROUP = 32, MOST = 128;
    static constexpr bool SIGNED = true, MIN = false;
    static constexpr size_t BYTES = sizeof(block_iq4_xs);

    LUCE_INLINE void scales(const Rows &r, int, Scales &s) {
        static_assert(offsetof(block_iq4_xs, scales_l) == 4, "d and scales_h must be the first word");
        const Words first = load_1(r), low = load_1(r.at(4));
        const Floats d = half_to_float(first);
        for (int b = 0; b < 8; b++) {
            const Words six = ((low >> (4 * b)) & 15) | (((first >> (16 + 2 * b)) & 3) << 4);
            s.scale[b] = d * to_float((Ints) six - 32);
        }
    }
    template <typename F> LUCE_INLINE void each(const Rows &r, int, F f) {
        for (int b = 0; b < 8; b++) {
            Words w[8];
            load_nibbles(r.at(offsetof(block_iq4_xs, qs) + b * 16), w);
            for (Words &word : w) {
                word = from_signed(lookup(kvalues_iq4nl, word));
            }
            f(b, w);
        }
    }
};

// Loads d, dmin and the eight 6-bit scales and mins of Q4_K and Q5_K, which begin both blocks.
LUCE_INLINE void load_scales_k4(const Rows &r, Scales &s) {
    static_assert(offsetof(block_q4_K, scales) == 4 && offsetof(block_q5_K, scales) == 4,
                  "16 bytes hold all");
    Words w[4];
    load_4(r, w);
    const Floats d = half_to_float(w[0]), dmin = half_to_float(w[0] >> 16);
    const Words scale[2] = {w[1] & 0x3f3f3f3f, (w[3] & LOW_4) | (((w[1] >> 6) & LOW_2) << 4)};
    const Words min[2] = {w[2] & 0x3f3f3f3f, ((w[3] >> 4) & LOW_4) | (((w[2] >> 6) & LOW_2) << 4)};
    for (int b = 0; b < 8; b++) {
        s.scale[b] = d * byte_to_float(scale[b / 4], b % 4);
        s.min[b] = dmin * byte_to_float(min[b / 4], b % 4);
    }
}

struct Q4_K {
    static constexpr int BIAS = 0, GROUP = 32, MOST = 15;
    static constexpr bool SIGNED = false, MIN = true;
    static constexpr size_t BYTES = sizeof(block_q4_K);

    LUCE_INLINE void scales(const Rows &r, int, Scales &s) { load_scales_k4(r, s); }
    template <typename F> LUCE_INLINE void each(const Rows &r, int, F f) {
        for (int pair = 0; pair < 4; pair++) {
            Words raw[8], w[8];
            load_8(r.at(offsetof(block_q4_K, qs) + pair * 32), raw);
#pragma GCC unroll 2
            for (int high = 0; high < 2; high++) {
                for (int j = 0; j < 8; j++) {
                    w[j] = (raw[j] >> (4 * high)) & LOW_4;
                }
                f(2 * pair + high, w);
            }
        }
    }
};

struct Q5_K {
    static constexpr int BIAS = 0, GROUP = 32, MOST = 31;
    static constexpr bool SIGNED = false, MIN = true;
    static constexpr size_t BYTES = sizeof(block_q5_K);

    LUCE_INLINE void scales(const Rows &r, int, Scales &s) { load_scales_k4(r, s); }
    template <typename F> LUCE_INLINE void each(const Rows &r, int, F f) {
        Words bits[8];
        load_8(r.at(offsetof(block_q5_K, qh)), bits);
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; pair++) {
            Words raw[8], w[8];
            load_8(r.at(offsetof(block_q5_K, qs) + pair * 32), raw);
#pragma GCC unroll 2
            for (int high = 0; high < 2; high++) {
                for (int j = 0; j < 8; j++) {
                    w[j] = ((raw[j] >> (4 * high)) & LOW_4) | (((bits[j] >> (2 * pair + high)) & LOW_1) << 4);
                }
                f(2 * pair + high, w);
            }
        }
    }
};

struct Q6_K {
    static constexpr int BIAS = 32, GROUP = 16, MOST = 63;
    static constexpr bool SIGNED = false, MIN = false;
    static constexpr size_t BYTES = sizeof(block_q6_K);

    LUCE_INLINE void scales(const Rows &r, int, Scales &s) {
        Words w[4];
        load_4(r.at(offsetof(block_q6_K, scales)), w);
        const Floats d = half_to_float(load_1(r.at(offsetof(block_q6_K, d) - 2)) >> 16);
        for (int g = 0; g < 16; g++) {
            s.scale[g] = d * signed_byte_to_float(w[g / 4], g % 4);
        }
    }
    template <typename F> LUCE_INLINE void each(const Rows &r, int, F f) {
        for (int half = 0; half < 2; half++) {
            Words bits[8], low[8], w[8];
            load_8(r.at(offsetof(block_q6_K, qh) + half * 32), bits);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) { // blocks 0 and 2 share bytes, and so do 1 and 3
                const int b = i / 2 + i % 2 * 2;
                if (i % 2 == 0) {
                    load_8(r.at(offsetof(block_q6_K, ql) + half * 64 + b * 32), low);
                }
                for (int j = 0; j < 8; j++) {
                    const Words top = b < 2 ? bits[j] << (4 - 2 * b) : bits[j] >> (2 * b - 4);
                    w[j] = ((low[j] >> (b / 2 * 4)) & LOW_4) | (top & (LOW_2 << 4));
                }
                f(4 * half + b, w);
            }
        }
    }
};

struct Q3_K {
    static constexpr int BIAS = 4, GROUP = 16, MOST = 7;
    static constexpr bool SIGNED = false, MIN = false;
    static constexpr size_t BYTES = sizeof(block_q3_K);

    LUCE_INLINE void scales(const Rows &r, int, Scales &s) {
        static_assert(offsetof(block_q3_K, d) == offsetof(block_q3_K, scales) + 12,
                      "d must follow the scales");
        Words w[4]; // it loads from two bytes before, so that nothing behind the block is read
        load_4(r.at(offsetof(block_q3_K, scales) - 2), w);
        const Floats d = half_to_float(w[3] >> 16);
        const Words a = (w[0] >> 16) | (w[1] << 16), b = (w[1] >> 16) | (w[2] << 16);
        const Words top = (w[2] >> 16) | (w[3] << 16);
        const Words six[4] = {(a & LOW_4) | ((top & LOW_2) << 4), (b & LOW_4) | (((top >> 2) & LOW_2) << 4),
                              ((a >> 4) & LOW_4) | (((top >> 4) & LOW_2) << 4),
                              ((b >> 4) & LOW_4) | (((top >> 6) & LOW_2) << 4)};
        for (int g = 0; g < 16; g++) {
            s.scale[g] = d * (byte_to_float(six[g / 4], g % 4) - all(32.0f));
        }
    }
    template <typename F> LUCE_INLINE void each(const Rows &r, int, F f) {
        Words mask[8];
        load_8(r.at(offsetof(block_q3_K, hmask)), mask);
        for (int half = 0; half < 2; half++) {
            Words low[8], w[8];
            load_8(r.at(offsetof(block_q3_K, qs) + half * 32), low);
            for (int b = 0; b < 4; b++) {
                for (int j = 0; j < 8; j++) {
                    w[j] = ((low[j] >> (2 * b)) & LOW_2) | (((mask[j] >> (4 * half + b)) & LOW_1) << 2);
                }
                f(4 * half + b, w);
            }
        }
    }
};

struct Q2_K {
    static constexpr int BIAS = 0, GROUP = 16, MOST = 3;
    static constexpr bool SIGNED = false, MIN = true;
    static constexpr size_t BYTES = sizeof(block_q2_K);

    LUCE_INLINE void scales(const Rows &r, int, Scales &s) {
        Words w[4];
        load_4(r.at(offsetof(block_q2_K, scales)), w);
        const Words dm = load_1(r.at(offsetof(block_q2_K, data)));
        const Floats d = half_to_float(dm), dmin = half_to_float(dm >> 16);
        for (int g = 0; g < 16; g++) {
            s.scale[g] = d * byte_to_float(w[g / 4] & LOW_4, g % 4);
            s.min[g] = dmin * byte_to_float((w[g / 4] >> 4) & LOW_4, g % 4);
        }
    }
    template <typename F> LUCE_INLINE void each(const Rows &r, int, F f) {
        for (int half = 0; half < 2; half++) {
            Words low[8], w[8];
            load_8(r.at(offsetof(block_q2_K, qs) + half * 32), low);
            for (int b = 0; b < 4; b++) {
                for (int j = 0; j < 8; j++) {
                    w[j] = (low[j] >> (2 * b)) & LOW_2;
                }
                f(4 * half + b, w);
            }
        }
    }
};

} // namespace luce::lanes
