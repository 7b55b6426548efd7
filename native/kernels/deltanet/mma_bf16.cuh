// Multiplies F32 values on the tensor core. A value is the sum of two BF16 numbers, high + low, to 2^-17 of
// it, and a product is the sum of three: high * high, high * low and low * high. So an F32 product is right
// to about 2^-16, in the whole range of F32, at a third of the tensor core's BF16 rate. It needs sm_80 or
// later.
#pragma once

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

#ifndef LUCE_NO_PTX // a test may bring its own
// Computes c[16 x 8] += a[16 x 16] * b[16 x 8].
__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Loads four matrices of 8 x 8, whose rows are at the addresses that lanes 8 m .. 8 m + 7 give.
__device__ __forceinline__ void load_matrices(uint32_t (&m)[4], const uint8_t *row) {
    const uint32_t at = uint32_t(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(at)
                 : "memory");
}
__device__ __forceinline__ void load_transposed(uint32_t (&m)[4], const uint8_t *row) {
    const uint32_t at = uint32_t(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(at)
                 : "memory");
}
// Copies 16 bytes to shared memory, or zeros where `there` is false. They are complete after copies_wait.
__device__ __forceinline__ void copy_16(uint8_t *shared, const void *global, bool there) {
    const uint32_t at = uint32_t(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(global), "r"(there ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}
#endif

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
