// Reads ggml's blocks value by value, as a table of rows has them in the file.
#pragma once

#include "matmul/fields.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace luce {
namespace {

__device__ uint32_t u16_at(const uint8_t *p) {
    return uint32_t(p[0]) | uint32_t(p[1]) << 8;
}

// Returns a quant as it is stored (before any bias): value k of the 256 that begin at `b`.
template <int TYPE> __device__ uint32_t quant(const uint8_t *b, int k) {
    // these serve types with 256 values to a block
    const int half = k / 128, quarter = k % 128 / 32, l = k % 32;
    if constexpr (TYPE == TYPE_Q4_K || TYPE == TYPE_Q5_K) {
        const uint32_t q = b[(TYPE == TYPE_Q4_K ? 16 : 48) + k / 64 * 32 + l] >> 4 * (k / 32 % 2) & 15;
        return TYPE == TYPE_Q4_K ? q : q | (b[16 + l] >> k / 32 & 1u) << 4;
    } else if constexpr (TYPE == TYPE_Q6_K) {
        const uint32_t low = b[half * 64 + quarter % 2 * 32 + l] >> 4 * (quarter / 2) & 15;
        return low | (b[128 + half * 32 + l] >> 2 * quarter & 3u) << 4;
    } else if constexpr (TYPE == TYPE_Q3_K) {
        return (b[32 + half * 32 + l] >> 2 * quarter & 3u) | (b[l] >> (half * 4 + quarter) & 1u) << 2;
    } else if constexpr (TYPE == TYPE_Q2_K) {
        return b[16 + half * 32 + l] >> 2 * quarter & 3;
    } else if constexpr (TYPE == TYPE_IQ4_XS) {
        return b[8 + k / 32 * 16 + k % 16] >> 4 * (l / 16) & 15;
    } else {
        const uint8_t *p = b + k / 32 * (chunk_weight_bytes(TYPE) / 8);
        constexpr int HEAD = TYPE == TYPE_Q4_1 || TYPE == TYPE_Q5_1 ? 4 : 2;
        if constexpr (TYPE == TYPE_Q8_0) {
            return p[2 + l] ^ 0x80;
        } else if constexpr (bits_of(TYPE) == 5) {
            const uint32_t high = u16_at(p + HEAD) | u16_at(p + HEAD + 2) << 16;
            return (p[HEAD + 4 + l % 16] >> 4 * (l / 16) & 15) | (high >> l & 1u) << 4;
        } else {
            return p[HEAD + l % 16] >> 4 * (l / 16) & 15;
        }
    }
}

// Returns the scale (and the minimum, from bit 8 on) of the j-th 32 values of Q4_K and Q5_K. Of the others
// with 256 to a block it takes the j-th 16.
template <int TYPE> __device__ uint32_t block_scale(const uint8_t *b, int j) {
    if constexpr (TYPE == TYPE_Q4_K || TYPE == TYPE_Q5_K) {
        const uint8_t *s = b + 4;
        if (j < 4) {
            return (s[j] & 63u) | (s[j + 4] & 63u) << 8;
        }
        return (s[j + 4] & 15u) | (s[j - 4] >> 6 << 4) | (s[j + 4] >> 4 | s[j] >> 6 << 4) << 8;
    } else if constexpr (TYPE == TYPE_Q6_K) {
        return b[192 + j];
    } else if constexpr (TYPE == TYPE_Q3_K) {
        const uint8_t *s = b + 96;
        return (s[j % 8] >> 4 * (j / 8) & 15u) | (s[8 + j % 4] >> 2 * (j / 4) & 3u) << 4;
    } else if constexpr (TYPE == TYPE_Q2_K) {
        return b[j];
    } else { // of IQ4_XS the scale is that of the j-th 32
        return (b[4 + j / 2] >> 4 * (j % 2) & 15u) | (u16_at(b + 2) >> 2 * j & 3u) << 4;
    }
}

// Returns where d is in ggml's block; dmin comes after it.
constexpr ROWMM_BOTH int super_scale_at(int type) {
    return type == TYPE_Q6_K ? 208 : type == TYPE_Q3_K ? 108 : type == TYPE_Q2_K ? 80 : 0;
}

template <int TYPE> __device__ float float_at(const void *src, int64_t i) {
    if constexpr (TYPE == TYPE_F32) {
        return static_cast<const float *>(src)[i];
    } else if constexpr (TYPE == TYPE_F16) {
        return __half2float(static_cast<const __half *>(src)[i]);
    } else {
        return __bfloat162float(static_cast<const __nv_bfloat16 *>(src)[i]);
    }
}

// Returns what is subtracted from a quant.
constexpr ROWMM_BOTH int bias_of(int type) {
    switch (type) {
        case TYPE_Q3_K: return 4;
        case TYPE_Q4_0: return 8;
        case TYPE_Q5_0: return 16;
        case TYPE_Q6_K: return 32;
        case TYPE_Q8_0:
        case TYPE_IQ4_NL:
        case TYPE_IQ4_XS: return 128;
        default: return 0;
    }
}

__device__ float half_at(const uint8_t *p) {
    return __half2float(__ushort_as_half(uint16_t(u16_at(p))));
}

// Says whether values_of() knows the type. Of the types with a table of values it knows none.
constexpr ROWMM_BOTH bool has_values(int type) {
    return chunk_weight_bytes(type) != 0 && type != TYPE_IQ4_NL && type != TYPE_IQ4_XS;
}

// Reads values k .. k + N - 1 of a row, where k is a multiple of N, each step rounded to F32 as ggml does. They share a
// scale.
template <int TYPE, int N> __device__ void values_of(float (&v)[N], const uint8_t *row, int64_t k) {
    static_assert(16 % N == 0, "16 values have a scale of their own in some types");
    if constexpr (is_float_type(TYPE)) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            v[i] = float_at<TYPE>(row, k + i);
        }
    } else {
        const uint8_t *b = row + k / CHUNK * chunk_weight_bytes(TYPE), *d = b + super_scale_at(TYPE);
        const int at = int(k % CHUNK);
        float scale, offset = 0;
        constexpr bool K_MINIMUM = TYPE == TYPE_Q4_K || TYPE == TYPE_Q5_K;
        constexpr bool TWO = K_MINIMUM || TYPE == TYPE_Q2_K || TYPE == TYPE_Q4_1 || TYPE == TYPE_Q5_1;
        if constexpr (K_MINIMUM) {
            const uint32_t s = block_scale<TYPE>(b, at / 32);
            scale = half_at(d) * float(s & 63);
            offset = -(half_at(d + 2) * float(s >> 8));
        } else if constexpr (TYPE == TYPE_Q2_K) {
            const uint32_t s = block_scale<TYPE>(b, at / 16);
            scale = half_at(d) * float(s & 15);
            offset = -(half_at(d + 2) * float(s >> 4));
        } else if constexpr (TYPE == TYPE_Q3_K) {
            scale = half_at(d) * float(int(block_scale<TYPE>(b, at / 16)) - 32);
        } else if constexpr (TYPE == TYPE_Q6_K) {
            scale = half_at(d) * float(int8_t(block_scale<TYPE>(b, at / 16)));
        } else {
            const uint8_t *block = b + at / 32 * (chunk_weight_bytes(TYPE) / 8);
            scale = half_at(block);
            offset = TWO ? half_at(block + 2) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float x = float(int(quant<TYPE>(b, at + i)) - bias_of(TYPE)) * scale;
            v[i] = TWO ? x + offset : x;
        }
    }
}

} // namespace
} // namespace luce
