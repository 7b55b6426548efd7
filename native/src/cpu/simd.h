// Here are vectors whose lanes are rows of a weight matrix. They are AVX-512 (16 lanes), AVX2 (8) or plain
// C++ (4). A lane's arithmetic depends on its own row alone, and each operation rounds once. So results do
// not depend on a row's lane.
#pragma once

#include <ggml.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace luce::lanes {

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define LUCE_LANES_512
constexpr int LANES = 16;
// GCC 12 warns that intrinsics without a mask leave lanes undefined. With a full mask none is.
constexpr __mmask16 ALL = 0xffff;
constexpr __mmask8 ALL_8 = 0xff;
#elif defined(__AVX2__)
#define LUCE_LANES_256
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

#define LUCE_INLINE static inline __attribute__((always_inline))

typedef uint32_t Words __attribute__((vector_size(4 * LANES))); // holds four bytes of each row
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef float Floats __attribute__((vector_size(4 * LANES)));

// Rows point at the same place of LANES rows.
struct Rows {
    const uint8_t *base;
    size_t stride; // it is the distance from row to row

    Rows at(size_t offset) const { return {base + offset, stride}; }
    const uint8_t *row(int i) const { return base + size_t(i) * stride; }
};

template <typename V> LUCE_INLINE V load(const void *from) {
    V v;
    memcpy(&v, from, sizeof(v));
    return v;
}

LUCE_INLINE uint32_t word_at(const void *from) {
    return load<uint32_t>(from);
}

// Returns x in all lanes.
LUCE_INLINE Words all(uint32_t x) {
    return Words{} + x;
}
LUCE_INLINE Ints all(int32_t x) {
    return Ints{} + x;
}
LUCE_INLINE Floats all(float x) {
#if defined(LUCE_LANES_512)
    return (Floats) _mm512_set1_ps(x);
#elif defined(LUCE_LANES_256)
    return (Floats) _mm256_set1_ps(x);
#else
    return Floats{x, x, x, x};
#endif
}

LUCE_INLINE Floats to_float(Ints x) {
    return __builtin_convertvector(x, Floats);
}

// Returns a * b + c, rounded once.
LUCE_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(LUCE_LANES_512)
    return (Floats) _mm512_fmadd_ps((__m512) a, (__m512) b, (__m512) c);
#elif defined(LUCE_LANES_256)
    return (Floats) _mm256_fmadd_ps((__m256) a, (__m256) b, (__m256) c);
#else
    for (int l = 0; l < LANES; l++) {
        c[l] = std::fma(a[l], b[l], c[l]);
    }
    return c;
#endif
}

// Takes an F16 in the low half of each word, and ignores the high half.
LUCE_INLINE Floats half_to_float(Words x) {
#if defined(LUCE_LANES_512)
    return (Floats) _mm512_maskz_cvtph_ps(ALL, _mm512_maskz_cvtepi32_epi16(ALL, (__m512i) x));
#elif defined(LUCE_LANES_256)
    const __m256i low = (__m256i) (x & 0xffff);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
    return (Floats) _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
#else
    Floats f;
    for (int l = 0; l < LANES; l++) {
        f[l] = ggml_fp16_to_fp32(ggml_fp16_t(x[l]));
    }
    return f;
#endif
}

// Loads LANES F16 that lie side by side.
LUCE_INLINE Floats load_halves(const void *from) {
#if defined(LUCE_LANES_512)
    return (Floats) _mm512_maskz_cvtph_ps(ALL, load<__m256i>(from));
#elif defined(LUCE_LANES_256)
    return (Floats) _mm256_cvtph_ps(load<__m128i>(from));
#else
    Floats f;
    for (int l = 0; l < LANES; l++) {
        f[l] = ggml_fp16_to_fp32(load<ggml_fp16_t>(static_cast<const uint8_t *>(from) + 2 * l));
    }
    return f;
#endif
}

// Fetches bytes into the second-level cache, since a processor does not foresee reads of LANES rows side by
// side.
LUCE_INLINE void prefetch(const uint8_t *from, size_t n) {
    for (size_t i = 0; i < n; i += 64) {
        __builtin_prefetch(from + i, 0, 2);
    }
}

// ---- from rows to lanes ----

#if defined(LUCE_LANES_512)
// Transposes the 4 x 4 words of each 128-bit part.
LUCE_INLINE void transpose_parts(const __m512i *z, __m512i *out) {
    const __m512i a = _mm512_maskz_unpacklo_epi32(ALL, z[0], z[1]),
                  b = _mm512_maskz_unpackhi_epi32(ALL, z[0], z[1]);
    const __m512i c = _mm512_maskz_unpacklo_epi32(ALL, z[2], z[3]),
                  d = _mm512_maskz_unpackhi_epi32(ALL, z[2], z[3]);
    out[0] = _mm512_maskz_unpacklo_epi64(ALL_8, a, c);
    out[1] = _mm512_maskz_unpackhi_epi64(ALL_8, a, c);
    out[2] = _mm512_maskz_unpacklo_epi64(ALL_8, b, d);
    out[3] = _mm512_maskz_unpackhi_epi64(ALL_8, b, d);
}

LUCE_INLINE __m128i part(const Rows &r, int row) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i *>(r.row(row)));
}
LUCE_INLINE __m256i half(const Rows &r, int row) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(r.row(row)));
}
#elif defined(LUCE_LANES_256)
LUCE_INLINE void transpose_parts(const __m256i *z, __m256i *out) {
    const __m256i a = _mm256_unpacklo_epi32(z[0], z[1]), b = _mm256_unpackhi_epi32(z[0], z[1]);
    const __m256i c = _mm256_unpacklo_epi32(z[2], z[3]), d = _mm256_unpackhi_epi32(z[2], z[3]);
    out[0] = _mm256_unpacklo_epi64(a, c);
    out[1] = _mm256_unpackhi_epi64(a, c);
    out[2] = _mm256_unpacklo_epi64(b, d);
    out[3] = _mm256_unpackhi_epi64(b, d);
}

LUCE_INLINE __m128i part(const Rows &r, int row) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i *>(r.row(row)));
}
#endif

// Loads one word of each row.
LUCE_INLINE Words load_1(const Rows &r) {
    uint32_t words[LANES];
    for (int l = 0; l < LANES; l++) {
        words[l] = word_at(r.row(l));
    }
    return load<Words>(words);
}

// Loads 16 bytes of each row, so that words[j] is word j of them.
LUCE_INLINE void load_4(const Rows &r, Words *words) {
#if defined(LUCE_LANES_512)
    __m512i z[4], t[4];
    for (int i = 0; i < 4; i++) {
        const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(part(r, i)), part(r, 4 + i), 1);
        const __m256i high =
            _mm256_inserti128_si256(_mm256_castsi128_si256(part(r, 8 + i)), part(r, 12 + i), 1);
        z[i] = _mm512_maskz_inserti64x4(ALL_8, _mm512_castsi256_si512(low), high, 1);
    }
    transpose_parts(z, t);
    for (int j = 0; j < 4; j++) {
        words[j] = (Words) t[j];
    }
#elif defined(LUCE_LANES_256)
    __m256i z[4], t[4];
    for (int i = 0; i < 4; i++) {
        z[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(part(r, i)), part(r, 4 + i), 1);
    }
    transpose_parts(z, t);
    for (int j = 0; j < 4; j++) {
        words[j] = (Words) t[j];
    }
#else
    for (int j = 0; j < 4; j++) {
        words[j] = load_1(r.at(4 * j));
    }
#endif
}

// Loads 32 bytes of each row, so that words[j] is word j of them.
LUCE_INLINE void load_8(const Rows &r, Words *words) {
#if defined(LUCE_LANES_512)
    __m512i z[4], low[4], high[4]; // they hold rows 0 to 7 and 8 to 15; words j and 4 + j alternate by part
    for (int i = 0; i < 4; i++) {
        z[i] = _mm512_maskz_inserti64x4(ALL_8, _mm512_castsi256_si512(half(r, i)), half(r, 4 + i), 1);
    }
    transpose_parts(z, low);
    for (int i = 0; i < 4; i++) {
        z[i] = _mm512_maskz_inserti64x4(ALL_8, _mm512_castsi256_si512(half(r, 8 + i)), half(r, 12 + i), 1);
    }
    transpose_parts(z, high);
    for (int j = 0; j < 4; j++) {
        words[j] = (Words) _mm512_maskz_shuffle_i32x4(ALL, low[j], high[j], 0x88);
        words[4 + j] = (Words) _mm512_maskz_shuffle_i32x4(ALL, low[j], high[j], 0xdd);
    }
#else
    load_4(r, words);
    load_4(r.at(16), words + 4);
#endif
}

// ---- bytes ----

// Returns table[b] for each byte b < 16.
LUCE_INLINE Words lookup(const int8_t *table, Words b) {
#if defined(LUCE_LANES_512)
    return (Words) _mm512_shuffle_epi8(_mm512_maskz_broadcast_i32x4(ALL, load<__m128i>(table)), (__m512i) b);
#elif defined(LUCE_LANES_256)
    return (Words) _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(table)), (__m256i) b);
#else
    uint8_t bytes[4 * LANES];
    memcpy(bytes, &b, sizeof(bytes));
    for (uint8_t &byte : bytes) {
        byte = uint8_t(table[byte]);
    }
    return load<Words>(bytes);
#endif
}

// Weights lie in bytes as 0 .. 63 or as -128 .. 127. VNNI multiplies unsigned by signed bytes, so for it
// signed weights are 128 too large. The sum of the activations makes that good, exactly, in integers.
LUCE_INLINE Words from_signed(Words w) {
#if defined(LUCE_LANES_512)
    return w ^ 0x80808080u;
#else
    return w;
#endif
}

#if defined(LUCE_LANES_512)
constexpr int SIGNED_BIAS = 128;
#else
constexpr int SIGNED_BIAS = 0;
#endif

// Returns sum + the products of n words of four bytes of each row with 4 * n activations of -127 .. 127. MOST is the
// largest magnitude of the bytes, or 128 of signed ones, and says how many products AVX2 adds in 16 bits: two of
// 128 * 127 fit, and their signs move to the activations.
template <bool SIGNED, int MOST> LUCE_INLINE Ints dot(Ints sum, const Words *w, const int8_t *x, int n) {
#if defined(LUCE_LANES_512)
    for (int j = 0; j < n; j++) {
        sum = (Ints) _mm512_dpbusd_epi32((__m512i) sum, (__m512i) w[j],
                                         _mm512_set1_epi32(int(word_at(x + 4 * j))));
    }
#elif defined(LUCE_LANES_256)
    constexpr int CHAIN = 32767 / (2 * 127 * MOST); // so many words can be added up before 16 bits overflow
    static_assert(CHAIN >= 1, "the products of a word must fit");
    for (int first = 0; first < n; first += CHAIN) {
        __m256i pairs = {};
        for (int j = first; j < n && j < first + CHAIN; j++) {
            __m256i a = (__m256i) w[j], b = _mm256_set1_epi32(int(word_at(x + 4 * j)));
            if (SIGNED) {
                b = _mm256_sign_epi8(b, a);
                a = _mm256_sign_epi8(a, a);
            }
            const __m256i products = _mm256_maddubs_epi16(a, b);
            pairs = j == first ? products : _mm256_add_epi16(pairs, products);
        }
        sum += (Ints) _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
#else
    for (int j = 0; j < n; j++) {
        for (int i = 0; i < 4; i++) {
            const Words byte = (w[j] >> (8 * i)) & 0xff;
            sum += (SIGNED ? ((Ints) (byte << 24) >> 24) : (Ints) byte) * int32_t(x[4 * j + i]);
        }
    }
#endif
    return sum;
}

} // namespace luce::lanes
