// Reads and writes KV cells of each type, with their rounding.
#pragma once

#include "attention/layout.h"

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace luce {
namespace {

// Returns value i of a quantised block, which is q * d and exact in F32.
template <int TYPE> __device__ float block_value(const uint8_t *block, int i) {
    const float d = __half2float(*reinterpret_cast<const __half *>(block));
    if (TYPE == KV_Q8_0) {
        return d * float(reinterpret_cast<const int8_t *>(block)[2 + i]);
    }
    const int byte = block[2 + i % 16];
    return d * float((i < 16 ? byte & 15 : byte >> 4) - 8);
}

// Loads values i .. i + 7 of a row, where i is a multiple of 8.
template <int TYPE> __device__ void load_row(const uint8_t *row, int i, float (&x)[8]) {
    if (TYPE == KV_F32) {
        const float4 a = *reinterpret_cast<const float4 *>(row + i * 4);
        const float4 b = *reinterpret_cast<const float4 *>(row + i * 4 + 16);
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
        x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    } else if (TYPE == KV_F16) {
        const uint4 words = *reinterpret_cast<const uint4 *>(row + i * 2);
        const __half *h = reinterpret_cast<const __half *>(&words);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            x[j] = __half2float(h[j]);
        }
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            x[j] = block_value<TYPE>(row + i / 32 * KvType<TYPE>::BYTES, i % 32 + j);
        }
    }
}

// Writes a block as ggml's reference quantiser does, in words of 2 bytes.
template <int TYPE>
__device__ void quantize_block(const float (&x)[32], uint16_t (&words)[KvType<TYPE>::BYTES / 2]) {
    float most = 0, signed_most = 0;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        if (fabsf(x[i]) > most) { // it takes the first on a tie
            most = fabsf(x[i]);
            signed_most = x[i];
        }
    }
    const float d = TYPE == KV_Q8_0 ? most / 127.0f : signed_most / -8.0f;
    const float inverse = d != 0.0f ? 1.0f / d : 0.0f;
    words[0] = __half_as_ushort(__float2half_rn(d));
    if (TYPE == KV_Q8_0) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int low = int(roundf(x[2 * i] * inverse)), high = int(roundf(x[2 * i + 1] * inverse));
            words[1 + i] = uint16_t((low & 255) | (high & 255) << 8);
        }
    } else {
        const auto nibble = [&](int i) { return min(15, int(int8_t(x[i] * inverse + 8.5f))); };
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int low = nibble(2 * i) | nibble(2 * i + 16) << 4;
            const int high = nibble(2 * i + 1) | nibble(2 * i + 17) << 4;
            words[1 + i] = uint16_t((low & 255) | (high & 255) << 8);
        }
    }
}

} // namespace
} // namespace luce
