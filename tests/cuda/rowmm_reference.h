// Reads ggml's blocks as numbers, written from the format's description and not from the kernels. It also
// makes random weights of every type, and products in double precision.
#pragma once

#include "matmul/quantised.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <cuda_fp16.h>

namespace rowmm_test {

using Bytes = std::vector<uint8_t>;

struct Type {
    int id;
    const char *name;
    int values, bytes; // a block has so many
};
inline const Type TYPES[] = {
    {12, "Q4_K", 256, 144}, {13, "Q5_K", 256, 176}, {14, "Q6_K", 256, 210}, {8, "Q8_0", 32, 34},
    {1, "F16", 1, 2},       {0, "F32", 1, 4},       {30, "BF16", 1, 2},     {2, "Q4_0", 32, 18},
    {3, "Q4_1", 32, 20},    {6, "Q5_0", 32, 22},    {7, "Q5_1", 32, 24},    {11, "Q3_K", 256, 110},
    {10, "Q2_K", 256, 84},  {20, "IQ4_NL", 32, 18}, {23, "IQ4_XS", 256, 136},
};
inline const Type &type_of(int id) {
    for (const Type &t : TYPES) {
        if (t.id == id) {
            return t;
        }
    }
    abort();
}

inline float half_at(const uint8_t *p) {
    __half_raw raw;
    memcpy(&raw.x, p, 2);
    return __half2float(__half(raw));
}
inline void put_half(uint8_t *p, float x) {
    const __half_raw raw = __float2half_rn(x);
    memcpy(p, &raw.x, 2);
}

// ---- dequantisation of one block, each step in F32 as ggml does it ----

// Reads the scale and the minimum of the j-th 32 values, as Q4_K and Q5_K store them.
inline void scale_and_minimum(const uint8_t *s, int j, int &scale, int &minimum) {
    if (j < 4) {
        scale = s[j] & 63;
        minimum = s[j + 4] & 63;
    } else {
        scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        minimum = s[j + 4] >> 4 | (s[j] >> 6) << 4;
    }
}

inline void blocks_of_32(int type, const uint8_t *b, float *y) {
    static const int8_t table[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    const bool has_m = type == 3 || type == 7, five = type == 6 || type == 7;
    const float d = half_at(b), m = has_m ? half_at(b + 2) : 0.0f;
    const uint8_t *qs = b + 2 + (has_m ? 2 : 0) + (five ? 4 : 0);
    uint32_t high = 0;
    if (five) {
        memcpy(&high, qs - 4, 4);
    }
    for (int i = 0; i < 32; i++) {
        if (type == 8) {
            y[i] = float(int8_t(b[2 + i])) * d;
            continue;
        }
        int q = (i < 16 ? qs[i] : qs[i - 16] >> 4) & 15;
        q |= five ? int(high >> i & 1) << 4 : 0;
        switch (type) {
            case 2: y[i] = float(q - 8) * d; break;
            case 6: y[i] = float(q - 16) * d; break;
            case 20: y[i] = d * table[q]; break;
            default: y[i] = float(q) * d + m;
        }
    }
}

inline void blocks_of_256(int type, const uint8_t *b, float *y) {
    static const int8_t table[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    for (int k = 0; k < 256; k++) {
        const int j = k / 32, i = k % 32, n = k / 128, quarter = k % 128 / 32;
        if (type == 12 || type == 13) { // d, dmin, scales, (qh,) qs
            int scale, minimum;
            scale_and_minimum(b + 4, j, scale, minimum);
            const uint8_t *qs = b + (type == 12 ? 16 : 48);
            int q = qs[j / 2 * 32 + i] >> (j % 2 * 4) & 15;
            q |= type == 13 ? (b[16 + i] >> j & 1) << 4 : 0;
            const float d = half_at(b) * float(scale), m = half_at(b + 2) * float(minimum);
            y[k] = d * float(q) - m;
        } else if (type == 14) { // ql, qh, scales, d
            const int low = b[n * 64 + quarter % 2 * 32 + i] >> (quarter / 2 * 4) & 15;
            const int q = (low | (b[128 + n * 32 + i] >> 2 * quarter & 3) << 4) - 32;
            y[k] = half_at(b + 208) * float(int8_t(b[192 + k / 16])) * float(q);
        } else if (type == 11) { // hmask, qs, scales, d
            const int s = k / 16;
            const int low = s < 8 ? b[96 + s] & 15 : b[96 + s - 8] >> 4;
            const int scale = (low | (b[104 + s % 4] >> 2 * (s / 4) & 3) << 4) - 32;
            const int q = (b[32 + n * 32 + i] >> 2 * quarter & 3) - (b[i] >> j & 1 ? 0 : 4);
            y[k] = half_at(b + 108) * float(scale) * float(q);
        } else if (type == 10) { // scales, qs, d, dmin
            const uint8_t s = b[k / 16];
            const float d = half_at(b + 80) * float(s & 15), m = half_at(b + 82) * float(s >> 4);
            y[k] = d * float(b[16 + n * 32 + i] >> 2 * quarter & 3) - m;
        } else { // IQ4_XS: d, scales_h, scales_l, qs
            const int high = (b[2] | b[3] << 8) >> 2 * j & 3, low = b[4 + j / 2] >> 4 * (j % 2) & 15;
            const int q = b[8 + j * 16 + i % 16] >> i / 16 * 4 & 15;
            y[k] = half_at(b) * float((low | high << 4) - 32) * table[q];
        }
    }
}

// Returns [N][K] as F32.
inline std::vector<float> dequantised(int type, const Bytes &blocks) {
    const Type &t = type_of(type);
    std::vector<float> y(blocks.size() / t.bytes * t.values);
    for (size_t i = 0; i < blocks.size() / t.bytes; i++) {
        const uint8_t *b = &blocks[i * t.bytes];
        if (type == 0) {
            memcpy(&y[i], b, 4);
        } else if (type == 1) {
            y[i] = half_at(b);
        } else if (type == 30) {
            const uint32_t bits = uint32_t(b[0] | b[1] << 8) << 16;
            memcpy(&y[i], &bits, 4);
        } else if (t.values == 32) {
            blocks_of_32(type, b, &y[i * 32]);
        } else {
            blocks_of_256(type, b, &y[i * 256]);
        }
    }
    return y;
}

// ---- random weights of a size about 0.02 ----

inline Bytes random_weights(int type, int64_t K, int64_t N, uint32_t seed) {
    const Type &t = type_of(type);
    std::mt19937 rng(seed);
    Bytes out(size_t(N) * (K / t.values) * t.bytes);
    for (size_t i = 0; i + 4 <= out.size(); i += 4) {
        const uint32_t x = rng();
        memcpy(&out[i], &x, 4);
    }
    std::normal_distribution<float> normal(0.0f, 0.02f);
    std::uniform_real_distribution<float> some(0.5f, 1.5f);
    for (size_t i = 0; i < out.size(); i += t.bytes) {
        uint8_t *b = &out[i];
        uint32_t bits;
        float x;
        switch (type) {
            case 0: x = normal(rng), memcpy(b, &x, 4); break;
            case 1: put_half(b, normal(rng)); break;
            case 30: x = normal(rng), memcpy(&bits, &x, 4), b[0] = uint8_t(bits >> 16), b[1] = uint8_t(bits >> 24); break;
            case 8: case 20: put_half(b, 3e-4f * some(rng)); break;
            case 2: case 6: put_half(b, (type == 2 ? 4e-3f : 2e-3f) * some(rng)); break;
            case 3: case 7: put_half(b, 3e-3f * some(rng)), put_half(b + 2, -0.03f * some(rng)); break;
            case 10: put_half(b + 80, 2e-3f * some(rng)), put_half(b + 82, 2e-3f * some(rng)); break;
            case 11: put_half(b + 108, 4e-4f * some(rng)); break;
            case 14: put_half(b + 208, 1.5e-5f * some(rng)); break;
            case 23: put_half(b, 2e-5f * some(rng)); break;
            default: put_half(b, 5e-5f * some(rng)), put_half(b + 2, 6e-4f * some(rng)); // only Q4_K and Q5_K are left
        }
    }
    return out;
}

// ---- the product ----

// Returns out[t][i] of outputs[i], in double.
inline std::vector<double> product(const std::vector<float> &w, const std::vector<float> &x, int64_t K, int T,
                                   const std::vector<int> &outputs) {
    std::vector<double> out(size_t(T) * outputs.size());
    for (int t = 0; t < T; t++) {
        for (size_t i = 0; i < outputs.size(); i++) {
            const float *a = &w[size_t(outputs[i]) * K], *b = &x[size_t(t) * K];
            double sum = 0;
            for (int64_t k = 0; k < K; k++) {
                sum += double(a[k]) * b[k];
            }
            out[t * outputs.size() + i] = sum;
        }
    }
    return out;
}

} // namespace rowmm_test
