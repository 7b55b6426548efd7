// Wraps what the gated delta rule needs beyond CUDA C++.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

namespace luce {

// Returns c ? a : b without a branch. nvcc makes branches of `?:` beside shuffles, and a diverged warp
// shuffles at a third of the speed.
__device__ __forceinline__ float pick(bool c, float a, float b) {
    float value;
    asm("{ .reg .pred p; setp.ne.b32 p, %3, 0; selp.f32 %0, %1, %2, p; }"
        : "=f"(value)
        : "f"(a), "f"(b), "r"(int(c)));
    return value;
}

// Stores to device memory in one access, since nvcc splits the assignment of a struct that lives in
// registers.
template <typename T> __device__ __forceinline__ void store_back(void *to, T from) {
    __stwb(static_cast<T *>(to), from);
}

// ---- of the rule in chunks ----

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

} // namespace luce
