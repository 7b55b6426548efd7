// Wraps the instructions that rowmm needs beyond CUDA C++: those of the tensor core, and asynchronous copies.
#pragma once

#include "common/overlap.cuh"

#include <cstdint>

namespace luce {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define ROWMM_BULK 1 // bulk copies complete on an mbarrier
#else
#define ROWMM_BULK 0
#endif

// Does c[16 x 8] += a[16 x 16] * b[16 x 8].
__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                    uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t shared_address(const void *p) {
    return uint32_t(__cvta_generic_to_shared(p));
}

// Returns the same address in shared memory, held in a register where bulk copies are: on Hopper each use of a shared variable's
// own address reads the block's place in its cluster anew. Before it the address is a constant.
__device__ __forceinline__ uint8_t *held_address(uint8_t *shared) {
#if ROWMM_BULK
    uint32_t address = shared_address(shared);
    asm volatile("" : "+r"(address));
    return static_cast<uint8_t *>(__cvta_shared_to_generic(address));
#else
    return shared;
#endif
}

// Keeps a value in a register from here on, so that what follows from it is found behind this.
__device__ __forceinline__ void hold(int &x) {
    asm volatile("" : "+r"(x));
}
template <typename T> __device__ __forceinline__ void hold(T *&x) {
    asm volatile("" : "+l"(x));
}
// Has all that x follows from computed ahead of what comes behind this, be it a wait: x decides on a trap that is never met, for
// it has no sign bit. (ptxas knows nothing of hold(), and moves what serves only behind a wait to behind it.)
__device__ __forceinline__ void found(uint32_t x) {
    asm volatile("{\n.reg .pred p;\nsetp.lt.s32 p, %0, 0;\n@p trap;\n}" ::"r"(x) : "memory");
}
// Returns what found() takes of an address.
__device__ __forceinline__ uint32_t address_bits(const void *p) {
    const uint64_t bits = reinterpret_cast<uint64_t>(p);
    return (uint32_t(bits) | uint32_t(bits >> 32)) & 0x7fffffff;
}
// Returns the block's index, read anew rather than held in a register.
__device__ __forceinline__ int block_anew() {
    int b;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(b));
    return b;
}

// ---- barriers in shared memory, and copies into it that complete on one ----

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_init_done() {
#if ROWMM_BULK
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}
// Returns whether the phase of this parity has ended. Hopper sleeps for a while where it has not.
__device__ __forceinline__ bool phase_ended(uint32_t barrier, uint32_t parity) {
    uint32_t done;
#if ROWMM_BULK
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#else
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#endif
    return done != 0;
}
// Waits until the phase of this parity has ended.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    while (!phase_ended(barrier, parity)) {
    }
}

#if ROWMM_BULK
constexpr int COPY_LANES = 1; // so many lanes take part in a copy and arrive on its barrier
#else
constexpr int COPY_LANES = 32;
#endif

// The lanes that copy open a phase of a barrier, copy once or more, and close it. The phase ends when all
// copies have arrived.
__device__ __forceinline__ void copies_begin(uint32_t barrier, int bytes) {
#if ROWMM_BULK
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}
// `bytes` is a multiple of 16. `keep` says that others will read the same, so that it should stay in L2. Without bulk copies
// `lanes` lanes share it, of whom the caller is `lane`.
__device__ __forceinline__ void copy_to_shared(uint32_t shared, const uint8_t *global, int bytes,
                                               uint32_t barrier, bool keep, [[maybe_unused]] int lane,
                                               [[maybe_unused]] int lanes) {
#if ROWMM_BULK
    uint64_t policy;
    if (keep) {
        asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    } else {
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    }
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
        "[%3], %4;" ::"r"(shared),
        "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
#else
    for (int i = lane * 16; i < bytes; i += lanes * 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared + i), "l"(global + i)
                     : "memory");
    }
#endif
}
__device__ __forceinline__ void copy_to_shared(uint32_t shared, const uint8_t *global, int bytes,
                                               uint32_t barrier, bool keep) {
    copy_to_shared(shared, global, bytes, barrier, keep, int(threadIdx.x % 32), 32);
}
__device__ __forceinline__ void copies_end(uint32_t barrier) {
#if !ROWMM_BULK
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}

// ---- copies of 16 bytes into shared memory, by the lane itself ----

template <int BYTES> __device__ __forceinline__ void lane_copies(uint32_t shared, const uint8_t *global) {
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(global), "n"(BYTES)
                     : "memory");
    }
}
// Arrives when all that the lane copies has come.
__device__ __forceinline__ void lane_arrives(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Says that the 128 bytes at p, which are aligned so, are not read before they are written again, so that what L2 holds of them
// need not be written to memory.
__device__ __forceinline__ void discard_line(const void *p) {
    asm volatile("discard.global.L2 [%0], 128;" ::"l"(p) : "memory");
}

// Adds 1. This comes behind all that the block's threads wrote before its last barrier, and ahead of all they
// read after the next.
__device__ __forceinline__ uint32_t count_arrival(uint32_t *counter) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

} // namespace luce
