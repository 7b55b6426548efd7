// Hopper's instructions for tiles of 64 F16 columns in shared memory: a warpgroup multiplies 64 rows, from there or from its
// registers, by 64 or 8 columns.
#pragma once

#include "attention/tile.cuh"
#include "matmul/sm90/wgmma.cuh"

namespace luce {
namespace {

constexpr int GROUP_THREADS = 128, GROUP_PAIRS = 64; // a warpgroup has so many

// A Matrix lies in shared memory in rows of 128 bytes, swizzled. Eight rows are 1024 bytes. All threads of a warp have the
// same one, and the compiler knows it, so that descriptors are made beside the threads' own arithmetic.
struct Matrix {
    uint32_t low;
    __device__ explicit Matrix(uint32_t address)
        : low(__shfl_sync(~0u, (address & 0x3ffff) >> 4 | EIGHT_ROWS << 16, 0)) {}
    // Returns the descriptor of what lies so many bytes behind.
    __device__ uint64_t at(uint32_t bytes) const {
        uint64_t descriptor;
        asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low + bytes / 16), "r"(EIGHT_ROWS | SWIZZLED));
        return descriptor;
    }
    static constexpr uint32_t EIGHT_ROWS = 1024 / 16, SWIZZLED = 1u << 30;
};

#define LUCE_C4(c, i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define LUCE_C32(c)                                                                                          \
    LUCE_C4(c, 0), LUCE_C4(c, 1), LUCE_C4(c, 2), LUCE_C4(c, 3), LUCE_C4(c, 4), LUCE_C4(c, 5), LUCE_C4(c, 6), \
        LUCE_C4(c, 7)

// Computes c (64 x 64) += or = a (64 x 16, by rows) * b (64 columns x 16, by columns), both in shared memory.
__device__ void wgmma_by_rows(float (&c)[8][4], uint64_t a, uint64_t b, bool add) {
#if ROWMM_WGMMA
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"
        "%27,%28,%29,%30,%31}, %32, %33, p, 1, 1, 0, 0;\n}"
        : LUCE_C32(c)
        : "l"(a), "l"(b), "r"(int(add)));
#endif
}
// Computes c (64 x 64) += a (64 x 16, in registers) * b (16 x 64, by rows, in shared memory).
__device__ void wgmma_by_columns(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b) {
#if ROWMM_WGMMA
    asm volatile(
        "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"
        "%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, 1;\n}"
        : LUCE_C32(c)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}
// Computes c (64 x 8) += or = a (64 x 16) * b (16 x 8, by columns), both in shared memory. A_COLUMNS is 1 where
// a lies by columns.
template <int A_COLUMNS> __device__ void wgmma_few(float (&c)[1][4], uint64_t a, uint64_t b, bool add) {
#if ROWMM_WGMMA
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
                 "{%0,%1,%2,%3}, %4, %5, p, 1, 1, %7, 0;\n}"
                 : LUCE_C4(c, 0)
                 : "l"(a), "l"(b), "r"(int(add)), "n"(A_COLUMNS));
#endif
}
// Computes c (64 x 8) += a (64 x 16, in registers) * b (16 x 8, by columns, in shared memory).
__device__ void wgmma_few(float (&c)[1][4], const uint32_t (&a)[4], uint64_t b) {
#if ROWMM_WGMMA
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p, 1, 1, 0;\n}"
                 : LUCE_C4(c, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}
#undef LUCE_C32
#undef LUCE_C4

} // namespace
} // namespace luce
