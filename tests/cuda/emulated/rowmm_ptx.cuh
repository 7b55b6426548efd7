// Stands in for native/kernels/rowmm_ptx.cuh. It has the tensor core's tile from the PTX manual's layout of
// m16n8k16, and copies that are done at once. The barriers of rowmm's rings are only declared, since what is
// run here has none.
#pragma once

#include "overlap.cuh"

#include <cuda_fp16.h>

#define ROWMM_BULK 0

namespace luce {

constexpr int COPY_LANES = 32;

// Lane (g = lane / 4, t = lane % 4) has rows g and g + 8 of a and c, k 2 t, 2 t + 1 and 8 more, columns 2 t and 2 t + 1 of
// c, and column g of b.
inline void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    struct Operands { __half2 a[4], b[2]; } mine;
    const uint32_t words[6] = {a0, a1, a2, a3, b0, b1};
    static_assert(sizeof(mine) == sizeof(words));
    memcpy(static_cast<void *>(&mine), words, sizeof(mine));
    const auto all = emulated::exchange(mine);
    const int g = int(threadIdx.x % 32) / 4, t = int(threadIdx.x) % 4;
    for (int i = 0; i < 4; i++) {
        double sum = c[i];
        for (int s = 0; s < 4; s++) {
            const Operands row = emulated::of_lane<Operands>(all, g * 4 + s);
            const Operands column = emulated::of_lane<Operands>(all, (t * 2 + i % 2) * 4 + s);
            for (int half = 0; half < 2; half++) {
                const float2 x = __half22float2(row.a[i / 2 + 2 * half]), y = __half22float2(column.b[half]);
                sum += double(x.x) * y.x + double(x.y) * y.y;
            }
        }
        c[i] = float(sum);
    }
}

inline uint32_t shared_address(const void *) { abort(); }
inline void barrier_init(uint32_t, int) { abort(); }
inline void barrier_init_done() { abort(); }
inline void barrier_arrive(uint32_t) { abort(); }
inline void barrier_wait(uint32_t, uint32_t) { abort(); }
inline void copies_begin(uint32_t, int) { abort(); }
inline void copy_to_shared(uint32_t, const uint8_t *, int, uint32_t, bool) { abort(); }
inline void copies_end(uint32_t) { abort(); }

inline void copy_16(void *shared, const void *global) { memcpy(shared, global, 16); }
inline void copies_commit() {}
template <int N> void copies_wait() {}
inline void prefetch_l2(const void *) {}

inline uint32_t count_arrival(uint32_t *counter) { return (*counter)++; }

} // namespace luce
