// Has tiles in shared memory and the tensor cores' instructions on them (sm_80 and later). Rows of F16 lie in
// 16-byte words, whose order is changed by the row so that eight rows of one column lie in different banks.
#pragma once

#include "common/overlap.cuh"
#include "common/ring.cuh"

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace luce {
namespace {

// Returns the byte offset of word `word` of row `row`, of rows of BYTES bytes.
template <int BYTES> __device__ int swizzle(int row, int word) {
    static_assert(BYTES >= 64 && (BYTES == 64 || BYTES % 128 == 0), "rows of 32 values, or of 64 and more");
    return row * BYTES + 16 * (BYTES == 64 ? word ^ (row >> 1 & 3) : word ^ (row & 7));
}

// Goes from the address of word w of a row to that of word w + x, where w and x have no bit in common.
__device__ uint32_t at_word(uint32_t address, int x) {
    return (address ^ x % 8 * 16) + x / 8 * 128;
}

// Copies BYTES from global memory, or zeros. They are on their way until a barrier says that they are there.
template <int BYTES> __device__ void copy_async(uint32_t to, const void *from, bool valid) {
    const int n = valid ? BYTES : 0;
    if (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(n));
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES),
                     "r"(n));
    }
}
template <int BYTES> __device__ __forceinline__ void copy_async(uint32_t to, const void *from) {
    if (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES));
    }
}
// Copies so far are a group; copies_wait leaves the last GROUPS of them under way.
__device__ __forceinline__ void copies_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int GROUPS> __device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

// ---- barriers in shared memory ----

// Lets this thread arrive when its copies so far have arrived.
__device__ void arrive_after_copies(uint32_t at) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at) : "memory");
}
// Waits where there is time: a warp that polls takes the shared memory from those that compute.
__device__ void wait_patiently(uint32_t at, uint32_t parity) {
    if (ARRIVING_LANES == 32 || threadIdx.x % 32 == 0) {
        while (!phase_ended(at, parity)) {
            __nanosleep(64);
        }
    }
    __syncwarp();
}

// Waits among `threads` threads of the block: 256, all that compute, or the 128 of one warpgroup. Each of these has a barrier of
// its own, since the other warpgroup may wait for both in a later unit already.
__device__ int barrier_of(int threads, int group) {
    return threads == 256 ? 1 : 3 + group;
}
__device__ void barrier(int threads, int group = 0) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier_of(threads, group)), "r"(threads) : "memory");
}
// Waits among the threads that load.
template <int THREADS> __device__ void loaders_barrier() {
    asm volatile("bar.sync 2, %0;" ::"n"(THREADS) : "memory");
}
__device__ bool barrier_or(int threads, int group, bool value) {
    uint32_t any;
    asm volatile(
        "{ .reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, %3, %2, p; selp.u32 %0, 1, 0, q; }"
        : "=r"(any)
        : "r"(uint32_t(value)), "r"(threads), "r"(barrier_of(threads, group))
        : "memory");
    return any != 0;
}
// Lets the tensor cores read in wgmma what this thread has written, or has seen written by others' copies.
__device__ void show_to_wgmma() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// ---- values that are not finite ----

__device__ bool finite(uint32_t halves) {
    return (halves & 0x7c00) != 0x7c00 && (halves & 0x7c000000) != 0x7c000000;
}
__device__ bool finite(const uint4 &words) {
    return finite(words.x) && finite(words.y) && finite(words.z) && finite(words.w);
}
__device__ uint32_t finite_or_zero(uint32_t halves) {
    return halves & ((halves & 0x7c00) == 0x7c00 ? 0xffff0000 : ~0u) &
           ((halves & 0x7c000000) == 0x7c000000 ? 0xffff : ~0u);
}

// ---- the tensor cores ----

constexpr uint32_t ONES = 0x3c003c00; // it holds two F16

__device__ void load_matrices(uint32_t (&m)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(at)
                 : "memory");
}
__device__ void load_transposed(uint32_t (&m)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(at)
                 : "memory");
}

// Computes c += a (16 x 16) * b (16 x 8). Of c, thread `lane` holds rows lane / 4 (c[0], c[1]) and lane / 4 +
// 8 (c[2], c[3]), in columns lane % 4 * 2 and the next.
__device__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Returns x, of which the compiler then knows nothing. So what is rarely needed is computed where it is
// needed, and not ahead of a loop that has no registers to keep it.
__device__ int here(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

__device__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ uint32_t pack_halves(float x, float y) {
    const __half2 h = __floats2half2_rn(x, y);
    return *reinterpret_cast<const uint32_t *>(&h);
}

} // namespace
} // namespace luce
