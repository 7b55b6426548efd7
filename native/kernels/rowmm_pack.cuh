// Packs a warp's 256 values of one row into a chunk of rowmm's activations (rowmm_layout.h). A lane has 8
// values in sequence, which are 16 bytes of F16.
#pragma once

#include "rowmm_fields.cuh"

#include <cuda_fp16.h>

namespace luce {

constexpr int OWN = 8; // a lane has so many values

__device__ __forceinline__ float warp_sum(float x, int lanes) {
    for (int mask = lanes / 2; mask > 0; mask /= 2) {
        x += __shfl_xor_sync(~0u, x, mask);
    }
    return x;
}

// Reads values k .. k + 7 of a row of K, with zeros beyond its end.
__device__ __forceinline__ void load_values(float (&v)[OWN], const float *row, int64_t k, int64_t K) {
    const float *p = row + k;
    if (k + OWN <= K && reinterpret_cast<uintptr_t>(p) % 16 == 0) {
        const float4 a = reinterpret_cast<const float4 *>(p)[0], b = reinterpret_cast<const float4 *>(p)[1];
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
        v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            v[i] = k + i < K ? p[i] : 0.0f;
        }
    }
}

// Writes values k .. k + 7 of a row of K, as far as there are so many. One store of 4 bytes a value would touch a sector
// of 32 each.
__device__ __forceinline__ void store_values(float *row, const float (&v)[OWN], int64_t k, int64_t K) {
    float *p = row + k;
    if (k + OWN <= K && reinterpret_cast<uintptr_t>(p) % 16 == 0) {
        reinterpret_cast<float4 *>(p)[0] = {v[0], v[1], v[2], v[3]};
        reinterpret_cast<float4 *>(p)[1] = {v[4], v[5], v[6], v[7]};
    } else {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            if (k + i < K) {
                p[i] = v[i];
            }
        }
    }
}

__device__ __forceinline__ float squares(const float (&v)[OWN]) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        sum = fmaf(v[i], v[i], sum);
    }
    return sum;
}

__device__ __forceinline__ float largest(const float (&v)[OWN]) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        most = fmaxf(most, fabsf(v[i]));
    }
    return most;
}

// Gates a head's values: v * rsqrt(mean(v^2) + eps) * w * silu(y). A head has a part of a warp's lanes.
__device__ __forceinline__ void gate_head(float (&v)[OWN], const float (&w)[OWN], const float (&y)[OWN],
                                          int head, float eps) {
    const float scale = rsqrtf(warp_sum(squares(v), head / OWN) / head + eps);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        v[i] = v[i] * scale * w[i] * (y[i] / (1 + expf(-y[i])));
    }
}

// The chunk's power of two brings its largest value to 512 .. 1023, so that sums of 32 fit F16 too. A value
// that is not finite stays what it is, and its column's products are not finite either. `most` is the lane's
// largest value.
__device__ __forceinline__ void pack_chunk(uint8_t *out, int C, int column, bool wide, const float (&v)[OWN],
                                           float most, int lane) {
    const int t = lane / 8, j = lane % 8;
    for (int mask = WARP / 2; mask > 0; mask /= 2) {
        most = fmaxf(most, __shfl_xor_sync(~0u, most, mask));
    }
    // The bound keeps both powers of two normal.
    const uint32_t exponent = max(__float_as_uint(most) >> 23, 10u);
    const float up = __uint_as_float((263 - exponent) << 23), down = __uint_as_float((exponent - 9) << 23);
    __half2 packed[OWN / 2];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < OWN / 2; i++) {
        packed[i] = __floats2half2_rn(v[2 * i] * up, v[2 * i + 1] * up);
        const float2 x = __half22float2(packed[i]);
        sum += x.x + x.y;
    }
    if (wide) {
#pragma unroll
        for (int i = 0; i < OWN / 2; i++) { // this is pair i % 2 of step 2 j + i / 2
            reinterpret_cast<__half2 *>(out)[((j * 4 + i) * C + column) * 4 + t] = packed[i];
        }
    } else {
        reinterpret_cast<uint4 *>(out)[(j * C + column) * 4 + t] = *reinterpret_cast<uint4 *>(packed);
    }
    sum = warp_sum(sum, 4); // this is the sum of 32 values
    const float other = __shfl_down_sync(~0u, sum, 4);
    if (j == 0) { // these are the sums of k = 64 t and 64 t + 32 onwards, as hi + lo
        const __half2 high = __floats2half2_rn(sum, other);
        const float2 x = __half22float2(high);
        __half2 *sums = reinterpret_cast<__half2 *>(out + chunk_sums(C)) + (column * 4 + t) * 2;
        sums[0] = high;
        sums[1] = __floats2half2_rn(sum - x.x, other - x.y);
    }
    if (lane == 0) {
        reinterpret_cast<float *>(out + chunk_sums(C) + 32 * C)[column] = down;
    }
}

} // namespace luce
