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

inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulated::mma_16x8x16<__nv_bfloat162>(c, {a[0], a[1], a[2], a[3], b0, b1},
                                          [](__nv_bfloat162 pair) { return __bfloat1622float2(pair); });
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
