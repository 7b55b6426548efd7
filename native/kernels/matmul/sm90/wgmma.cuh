// Wraps wgmma, in which a warpgroup multiplies 64 outputs x 16 k, from registers, by 16 k x 32, 64 or 80 rows,
// from shared memory. Only sm_90a has it.
#pragma once

#include <cstdint>

namespace luce {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define ROWMM_WGMMA 1
#else
#define ROWMM_WGMMA 0
#endif

__device__ __forceinline__ void wgmma_begin() {
#if ROWMM_WGMMA
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wgmma_commit() {
#if ROWMM_WGMMA
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Waits until all but the newest N groups have ended.
template <int N> __device__ __forceinline__ void wgmma_wait() {
#if ROWMM_WGMMA
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#endif
}
// Lets wgmma read what lanes' copies, which this thread has waited for, have brought to shared memory.
__device__ __forceinline__ void wgmma_show() {
#if ROWMM_WGMMA
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// Keeps the compiler from making the operands of what comes behind this ahead of what comes before: a branch
// that is never taken. `not_zero` is anything that is not zero.
__device__ __forceinline__ void wgmma_part(uint32_t not_zero) {
#if ROWMM_WGMMA
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p bra PART;\ntrap;\nPART:\n}" ::"r"(not_zero)
                 : "memory");
#endif
}
// These give registers of each of a warpgroup's threads back to the block, and take some of what others gave.
template <int N> __device__ __forceinline__ void registers_down() {
#if ROWMM_WGMMA
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#endif
}
template <int N> __device__ __forceinline__ void registers_up() {
#if ROWMM_WGMMA
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
#endif
}
// Keeps the compiler from touching c before or after this point.
template <int NT> __device__ __forceinline__ void wgmma_pin(float (&c)[NT][4]) {
#pragma unroll
    for (int j = 0; j < NT; j++) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            asm volatile("" : "+f"(c[j][k])::"memory");
        }
    }
}

// Describes step i of a stage of wide activations. It has NT matrices of 8 rows x 16 bytes side by side, with
// the next 8 k behind them.
template <int NT> __device__ __forceinline__ uint64_t wgmma_rows(uint32_t stage, int i) {
    constexpr uint32_t NEXT_K = NT * 128 / 16, NEXT_ROWS = 128 / 16;
    const uint32_t low = ((stage & 0x3ffff) >> 4) + (uint32_t(i) * 2 * NEXT_K + (NEXT_K << 16));
    uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low), "r"(NEXT_ROWS));
    return descriptor;
}

// Does c += a * rows, or c = a * rows.
__device__ __forceinline__ void wgmma(float (&c)[4][4], const uint32_t *a, uint64_t rows, bool add) {
#if ROWMM_WGMMA
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,"
                 "%15}, {%16,%17,%18,%19}, %20, p, 1, 1, 0;\n}"
                 : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]),
                   "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]),
                   "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"(int(add)));
#endif
}
__device__ __forceinline__ void wgmma(float (&c)[8][4], const uint32_t *a, uint64_t rows, bool add) {
#if ROWMM_WGMMA
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,"
        "%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, "
        "1, 0;\n}"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]),
          "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]),
          "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]),
          "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
          "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]),
          "+f"(c[7][2]), "+f"(c[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"(int(add)));
#endif
}

__device__ __forceinline__ void wgmma(float (&c)[10][4], const uint32_t *a, uint64_t rows, bool add) {
#if ROWMM_WGMMA
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %45, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"
                 "%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39}, "
                 "{%40,%41,%42,%43}, %44, p, 1, 1, 0;\n}"
                 : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]),
                   "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]),
                   "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]),
                   "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
                   "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]),
                   "+f"(c[7][2]), "+f"(c[7][3]), "+f"(c[8][0]), "+f"(c[8][1]), "+f"(c[8][2]), "+f"(c[8][3]),
                   "+f"(c[9][0]), "+f"(c[9][1]), "+f"(c[9][2]), "+f"(c[9][3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"(int(add)));
#endif
}

} // namespace luce
