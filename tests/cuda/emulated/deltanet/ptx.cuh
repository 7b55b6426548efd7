// Stands in for native/kernels/deltanet/ptx.cuh. It has the tensor core's tile from the PTX manual's layout of m16n8k16, and
// copies that are done at once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace luce {

inline float pick(bool c, float a, float b) {
    return c ? a : b;
}
template <typename T> void store_back(void *to, T from) {
    memcpy(to, &from, sizeof(from));
}
inline void prefetch_line(const void *) {}

inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    struct Operands { __nv_bfloat162 a[4], b[2]; } mine;
    const uint32_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
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
                const float2 x = __bfloat1622float2(row.a[i / 2 + 2 * half]), y = __bfloat1622float2(column.b[half]);
                sum += double(x.x) * y.x + double(x.y) * y.y;
            }
        }
        c[i] = float(sum);
    }
}
inline void load_matrices(uint32_t (&m)[4], const uint8_t *row) {
    emulated::load_matrices(m, row);
}
inline void load_transposed(uint32_t (&m)[4], const uint8_t *row) {
    emulated::load_transposed(m, row);
}
inline void copy_16(uint8_t *shared, const void *global, bool there) {
    const uint8_t none[16] = {};
    memcpy(shared, there ? global : none, 16);
}
inline void copies_wait() {}

} // namespace luce
