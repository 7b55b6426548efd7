// Wraps the instructions of a prompt's product: copies into shared memory, matrices out of it, and products with sums in F16.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace luce {
namespace {

__device__ __forceinline__ uint32_t shared_address(const void *p) {
    return uint32_t(__cvta_generic_to_shared(p));
}
// Copies 16 bytes from global memory, or zeros. Copies up to copies_commit() are a group; copies_wait leaves the last GROUPS of
// them under way.
__device__ __forceinline__ void copy_word(uint32_t to, const void *from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void copies_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int GROUPS> __device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}
// Loads four matrices of 8 x 8 F16, whose rows are where lanes 8 i .. 8 i + 7 say.
__device__ __forceinline__ void load_matrices(uint32_t (&m)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(at)
                 : "memory");
}
// Computes c += a (16 x 16) * b (16 x 8), where c is F16. Of it, thread `lane` holds columns lane % 4 * 2 and the next of row
// lane / 4 in c[0], and of row lane / 4 + 8 in c[1].
__device__ __forceinline__ void multiply_f16(uint32_t (&c)[2], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
        : "+r"(c[0]), "+r"(c[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

} // namespace
} // namespace luce
