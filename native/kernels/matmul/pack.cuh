// Packs a warp's 256 values of one row into a chunk of rowmm's activations (matmul/layout.h). A lane has 8
// values in sequence, which are 16 bytes of F16.
#pragma once

#include "common/activation.cuh"
#include "common/lanes.cuh"
#include "matmul/fields.cuh"
#include "matmul/ptx.cuh"

#include <cuda_fp16.h>

namespace luce {

constexpr int OWN = 8; // a lane has so many values

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

// Reads eight values that lie at a multiple of 16 bytes and that the launch ahead has written.
__device__ __forceinline__ void fetch_values(float (&v)[OWN], const float *p) {
    const float4 a = __ldcg(reinterpret_cast<const float4 *>(p)),
                 b = __ldcg(reinterpret_cast<const float4 *>(p) + 1);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
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
    float most[OWN / 2];
#pragma unroll
    for (int i = 0; i < OWN / 2; i++) {
        most[i] = fmaxf(fabsf(v[i]), fabsf(v[i + OWN / 2]));
    }
    // what is no number counts as 0
    return fmaxf(fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])), 0.0f);
}

// Computes an activation of several values. It divides as the compiler's division does where no exponent is extreme; but that
// asks so of each value, and one value's division comes behind another's.
template <Activation F, int N>
__device__ __forceinline__ void activate(const float (&y)[N], float (&out)[N]) {
    bool usual = true;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float t = opening(F, y[i]), d = 1 + expf(-t), about = __fdividef(1.0f, d),
                    r = fmaf(about, fmaf(-d, about, 1.0f), about), q = y[i] * r;
        out[i] = fmaf(r, fmaf(-d, q, y[i]), q);
        usual = usual && fabsf(t) < 80.0f && fabsf(y[i]) > 0x1p-60f;
    }
    if (!usual) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            out[i] = activated(F, y[i]);
        }
    }
}

// Returns the scale of the head that a lane has eight values of: rsqrt(mean(v^2) + eps). A head has a part of a warp's lanes,
// and `share` is one over its values, a power of two.
__device__ __forceinline__ float head_scale(const float (&v)[OWN], int head, float share, float eps) {
    const float own = squares(v), sum = head == 128 ? warp_sum(own, 128 / OWN) : warp_sum(own, head / OWN);
    return rsqrtf(sum * share + eps);
}

// Says where a lane's part of a packed chunk goes.
struct PackedPlace {
    uint8_t *values, *sums, *down;
    int step; // a pair of a wide chunk lies so many bytes behind the one before; 0 says that the chunk is narrow

    __device__ __forceinline__ PackedPlace(uint8_t *out, int C, int column, bool wide, int lane) {
        const int t = lane / 8, j = lane % 8;
        uint8_t *tail = out + chunk_sums(C);
        // Pair i of a wide chunk is pair i % 2 of step 2 j + i / 2.
        values = out + (wide ? (j * 4 * C + column) * 16 + t * 4 : ((j * C + column) * 4 + t) * 16);
        sums = tail + (column * 4 + t) * 8;
        down = tail + 32 * C + column * 4;
        step = wide ? 16 * C : 0;
    }
    __device__ uint32_t bits() const {
        return uint32_t(step) | address_bits(values) | address_bits(sums) | address_bits(down);
    }
    // The chunk's power of two brings its largest value to 512 .. 1023, so that sums of 32 fit F16 too. A value
    // that is not finite stays what it is, and its column's products are not finite either. `most` is the lane's
    // largest value.
    __device__ __forceinline__ void store(const float (&v)[OWN], float most, int lane) const {
        most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most))); // it has no sign
        // The bound keeps both powers of two normal.
        const uint32_t exponent = max(__float_as_uint(most) >> 23, 10u);
        const float up = __uint_as_float((263 - exponent) << 23);
        __half2 packed[OWN / 2];
        float sum = 0;
#pragma unroll
        for (int i = 0; i < OWN / 2; i++) {
            packed[i] = __floats2half2_rn(v[2 * i] * up, v[2 * i + 1] * up);
            const float2 x = __half22float2(packed[i]);
            sum += x.x + x.y;
        }
        if (step != 0) {
#pragma unroll
            for (int i = 0; i < OWN / 2; i++) {
                *reinterpret_cast<__half2 *>(values + i * step) = packed[i];
            }
        } else {
            *reinterpret_cast<uint4 *>(values) = *reinterpret_cast<uint4 *>(packed);
        }
        sum = warp_sum(sum, 4); // this is the sum of 32 values
        const float other = __shfl_down_sync(~0u, sum, 4);
        if (lane % 8 == 0) { // these are the sums of k = 64 t and 64 t + 32 onwards, as hi + lo
            const __half2 high = __floats2half2_rn(sum, other);
            const float2 x = __half22float2(high);
            const __half2 both[2] = {high, __floats2half2_rn(sum - x.x, other - x.y)};
            *reinterpret_cast<uint2 *>(sums) = *reinterpret_cast<const uint2 *>(both);
        }
        if (lane == 0) {
            *reinterpret_cast<float *>(down) = __uint_as_float((exponent - 9) << 23);
        }
    }
};
__device__ __forceinline__ void pack_chunk(uint8_t *out, int C, int column, bool wide, const float (&v)[OWN],
                                           float most, int lane) {
    PackedPlace(out, C, column, wide, lane).store(v, most, lane);
}

} // namespace luce
