// Has the sampling rule (luce_sample in luce.h) as plain functions that CPU and CUDA share. Every rounding is
// spelled out (fmaf where two operations round once; the compilers contract nothing), so both have the same
// bits of one row.
//
//   z_i   = (x_i - x_max) / temperature
//   keep  = the first top_k in the order (x descending, id ascending); of these the fewest whose masses reach top_p of
//           their sum; of these the ones with a mass of min_p or more
//   token = the id in keep with the largest z_i + G_i, the lowest one on a tie
//
// Masses are integers, so their sums do not depend on an order: mass_i = floor(exp(z_i) * 2^40). G_i is
// Gumbel noise of (seed, position, id) alone. It lies in (-3.14, 22.88), so an id with z < Z_MIN is never
// chosen. Where z is not below Z_MIN the mass is not 0.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define LUCE_BOTH __host__ __device__ __forceinline__
#else
#define LUCE_BOTH inline
#endif

namespace luce {

// ChoiceCtl says how a sequence's tokens are chosen, as kernels take it.
struct ChoiceCtl {
    uint64_t seed;
    uint64_t min_mass; // it is min_p in units of 2^-40; 0 means off
    float scale; // it is 2 / temperature, at most FLT_MAX; 0 means greedy
    int32_t top_k; // 0 means off
    uint32_t top_p; // it is in units of 2^-24; TOP_P_ONE means off
    uint32_t reserved;
};
constexpr uint32_t TOP_P_ONE = 1u << 24;
constexpr float Z_MIN = -27.5f;
constexpr float NOISE_MAX = 22.88f;

LUCE_BOTH uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

LUCE_BOTH float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

// ---- random numbers --------------------------------------------------------------------------------------

struct Words4 {
    uint32_t w[4];
};

// Computes Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers, SC 2011).
LUCE_BOTH Words4 philox(uint64_t key, uint64_t counter_lo, uint64_t counter_hi) {
    uint32_t c0 = uint32_t(counter_lo), c1 = uint32_t(counter_lo >> 32);
    uint32_t c2 = uint32_t(counter_hi), c3 = uint32_t(counter_hi >> 32);
    uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t a = uint64_t(0xD2511F53u) * c0, b = uint64_t(0xCD9E8D57u) * c2;
        c0 = uint32_t(b >> 32) ^ c1 ^ k0;
        c1 = uint32_t(b);
        c2 = uint32_t(a >> 32) ^ c3 ^ k1;
        c3 = uint32_t(a);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// Returns the words of ids 4 * group .. 4 * group + 3 at a position.
LUCE_BOTH Words4 noise_words(uint64_t seed, uint64_t position, uint32_t group) {
    return philox(seed, position, group);
}

// ---- logarithm and exponential ---------------------------------------------------------------------------

constexpr float LN2_HI = 0x1.63p-1f, LN2_LO = -0x1.bd0106p-13f; // LN2_HI times a small integer is exact

// Computes e * log(2) + log(1 + f) for f in [-1/3, 1/3].
LUCE_BOTH float log_parts(int32_t e, float f) {
    float p = -0x1.080fe0p-3f;
    p = fmaf(p, f, 0x1.1e7170p-3f);
    p = fmaf(p, f, -0x1.f30cf8p-4f);
    p = fmaf(p, f, 0x1.1ed51ap-3f);
    p = fmaf(p, f, -0x1.559deep-3f);
    p = fmaf(p, f, 0x1.99d044p-3f);
    p = fmaf(p, f, -0x1.fffef0p-3f);
    p = fmaf(p, f, 0x1.555506p-2f);
    p = fmaf(p, f, -0.5f);
    const float l = fmaf(f * f, p, f);
    return fmaf(float(e), LN2_HI, fmaf(float(e), LN2_LO, l));
}

// Returns the power of two that brings a normal x > 0 into [2/3, 4/3): x = 2^e * m.
LUCE_BOTH int32_t log_exponent(float x) {
    return int32_t(float_bits(x) - 0x3f2aaaabu) >> 23;
}

// Computes log(x) of a normal x > 0.
LUCE_BOTH float log_of(float x) {
    const int32_t e = log_exponent(x);
    return log_parts(e, bits_float(float_bits(x) - (uint32_t(e) << 23)) - 1.0f);
}

// Computes -log(u), u = (word + 1/2) / 2^32. Above one half it is computed from 1 - u, so it is accurate at
// both ends.
LUCE_BOTH float minus_log_uniform(uint32_t word) {
    const bool upper = word >> 31;
    const uint32_t from_end = upper ? ~word : word;
    const float q = float(2 * from_end + 1) * 0x1p-33f; // it is u or 1 - u, in (0, 1/2]
    const int32_t e = log_exponent(upper ? 1.0f - q : q);
    const float s = bits_float(uint32_t(127 - e) << 23); // it is 2^-e; u * 2^-e - 1 is exact in both cases
    return -log_parts(e, fmaf(upper ? -q : q, s, upper ? s - 1.0f : -1.0f));
}

// Returns the Gumbel noise of a random word: -log(-log(u)).
LUCE_BOTH float gumbel(uint32_t word) {
    return -log_of(minus_log_uniform(word));
}

// Returns no less than gumbel(word), at little cost: -log(-log u) <= -log(1 - u), which leading ones of the
// word bound.
LUCE_BOTH float gumbel_bound(uint32_t word) {
    const uint32_t rest = ~word;
#ifdef __CUDA_ARCH__
    const int leading = __clz(int(rest));
#else
    const int leading = rest == 0 ? 32 : __builtin_clz(rest);
#endif
    return fmaf(float(leading), 0.6932f, 0.6942f);
}

// Computes floor(exp(z) * 2^40) for z in [Z_MIN, 0], and 0 below.
LUCE_BOTH uint64_t mass_of(float z) {
    if (!(z >= Z_MIN)) {
        return 0;
    }
    constexpr float ROUND = 12582912.0f; // adding 1.5 * 2^23 leaves the nearest integer in the last bits
    const float shifted = fmaf(z, 0x1.715476p+0f, ROUND), n = shifted - ROUND;
    const float r = fmaf(n, -LN2_LO, fmaf(n, -LN2_HI, z)); // it is z - n * log(2)
    float p = 0x1.6a2448p-10f;
    p = fmaf(p, r, 0x1.1239d4p-7f);
    p = fmaf(p, r, 0x1.5558f2p-5f);
    p = fmaf(p, r, 0x1.555492p-3f);
    p = fmaf(p, r, 0x1.fffffcp-2f);
    p = fmaf(r * r, p, r) + 1.0f; // it is exp(r)
    const uint32_t exponent = float_bits(shifted) - float_bits(ROUND) + 40u + 127u;
    return uint64_t(p * bits_float(exponent << 23));
}

// Searches use ranges of z, best first: SAMPLE_BINS of equal width from 0 to Z_MIN.
constexpr int SAMPLE_BINS = 1024;

LUCE_BOTH int bin_of(float z) { // it takes Z_MIN <= z <= 0
    const int bin = int(z * (float(SAMPLE_BINS) / Z_MIN));
    return bin < SAMPLE_BINS ? bin : SAMPLE_BINS - 1;
}

// ---- the rule, id by id ------------------------------------------------------------------------------------

// Returns half of x - x_max. Halves never overflow, and ChoiceCtl::scale makes up for it.
LUCE_BOTH float half_gap(float x, float x_max) {
    return fmaf(x, 0.5f, -0.5f * x_max);
}

LUCE_BOTH float z_of(float gap, float scale) {
    return gap * scale;
}

// Computes z + G, rounded once.
LUCE_BOTH float score_of(float gap, float scale, uint32_t word) {
    return fmaf(gap, scale, gumbel(word));
}

// Returns the mass that a prefix must reach: at least top_p of the total, which is below 2^60, and at least
// 1.
LUCE_BOTH uint64_t needed_mass(uint64_t total, uint32_t top_p) {
    const uint64_t low = (total & 0xFFFFFFu) * top_p;
    const uint64_t need = (total >> 24) * top_p + ((low + 0xFFFFFFu) >> 24);
    return need > 0 ? need : 1;
}

// Maps logits to keys of the same order: a < b as floats where key(a) < key(b), and -0 is 0.
LUCE_BOTH uint32_t order_key(float x) {
    const uint32_t bits = float_bits(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

} // namespace luce
