// Multiplies F32 values on the tensor core. A value is the sum of two BF16 numbers, high + low, to 2^-17 of
// it, and a product is the sum of three: high * high, high * low and low * high. So an F32 product is right
// to about 2^-16, in the whole range of F32, at a third of the tensor core's BF16 rate. It needs sm_80 or
// later.
#pragma once

#include "deltanet/ptx.cuh"

#include <cstdint>
#include <cuda_bf16.h>

namespace luce {

// Split holds two neighbours, the first in the low half of a word.
struct Split {
    uint32_t high, low;
};
__device__ __forceinline__ Split split(float a, float b) {
    const __nv_bfloat162 high = __floats2bfloat162_rn(a, b);
    const float2 back = __bfloat1622float2(high);
    const __nv_bfloat162 low = __floats2bfloat162_rn(a - back.x, b - back.y);
    return {*reinterpret_cast<const uint32_t *>(&high), *reinterpret_cast<const uint32_t *>(&low)};
}

// Left is a 16 x 16 of the left side, from the accumulators of two tiles of 16 x 8 side by side.
struct Left {
    uint32_t high[4], low[4];

    __device__ __forceinline__ Left(const float (&first)[4], const float (&second)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float (&from)[4] = i < 2 ? first : second;
            const Split s = split(from[i % 2 * 2], from[i % 2 * 2 + 1]);
            high[i] = s.high;
            low[i] = s.low;
        }
    }
};

// Right is two tiles of the right side, 16 x 16: words 2 j and 2 j + 1 are tile j's.
struct Right {
    uint32_t high[4], low[4];
};

// Computes c[j] += a * tile j of N of them, part by part, so that no product waits for the one before it.
template <int N> __device__ __forceinline__ void multiply(float (*c)[4], const Left &a, const Right (&b)[N]) {
#pragma unroll
    for (int part = 0; part < 3; part++) {
#pragma unroll
        for (int j = 0; j < 2 * N; j++) {
            const uint32_t (&right)[4] = part == 1 ? b[j / 2].low : b[j / 2].high;
            mma_bf16(c[j], part == 2 ? a.low : a.high, right[j % 2 * 2], right[j % 2 * 2 + 1]);
        }
    }
}

} // namespace luce
