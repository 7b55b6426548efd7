// Adds values of a warp's lanes up, or finds the largest of them, of all lanes or of groups of so many neighbours. Each lane
// gets the same bits: values half a group apart are combined first.
#pragma once

#include "common/warp.cuh"

namespace luce {

template <typename T> __device__ __forceinline__ T warp_sum(T x, int lanes = WARP) {
#pragma unroll
    for (int mask = lanes / 2; mask > 0; mask /= 2) {
        x += __shfl_xor_sync(~0u, x, mask);
    }
    return x;
}
__device__ __forceinline__ float warp_max(float x, int lanes = WARP) {
#pragma unroll
    for (int mask = lanes / 2; mask > 0; mask /= 2) {
        x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
    }
    return x;
}

} // namespace luce
