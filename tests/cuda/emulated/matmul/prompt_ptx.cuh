// Stands in for native/kernels/matmul/prompt_ptx.cuh. Copies are done at once or when they are waited for, by chance.
#pragma once

#include "attention/tile.cuh"

namespace luce {

inline void copy_word(uint32_t to, const void *from, bool valid) {
    copy_async<16>(to, from, valid);
}
// Each mma's sum is rounded to F16 once.
inline void multiply_f16(uint32_t (&c)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    __half2 halves[2];
    memcpy(static_cast<void *>(halves), c, sizeof(halves));
    float sums[4] = {__low2float(halves[0]), __half2float(halves[0].y), __low2float(halves[1]),
                     __half2float(halves[1].y)};
    mma(sums, a[0], a[1], a[2], a[3], b0, b1);
    c[0] = pack_halves(sums[0], sums[1]);
    c[1] = pack_halves(sums[2], sums[3]);
}

} // namespace luce
