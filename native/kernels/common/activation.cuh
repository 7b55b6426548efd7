// Activations of gates (common/activation.h) on a GPU.
#pragma once

#include "common/activation.h"

#include <cuda_runtime.h>

namespace luce {

// Returns t such that f(x) = x * sigmoid(t): of GELU (1 + tanh(u)) / 2 is sigmoid(2 u).
__device__ __forceinline__ float opening(int32_t activation, float x) {
    return activation == GELU ? 1.5957691216f * fmaf(0.044715f * x * x, x, x) : x;
}
// Returns f(x) as the compiler divides.
__device__ __forceinline__ float activated(int32_t activation, float x) {
    return x / (1 + expf(-opening(activation, x)));
}

} // namespace luce
