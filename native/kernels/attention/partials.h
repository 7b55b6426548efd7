// What attention's first kernel leaves to its second: partial results by chunk (attention.cu, attention/combine.cu).
#pragma once

#include "common/device_limits.h"
#include "common/kernels.h"

#include <cuda_runtime.h>

namespace luce {

constexpr float LOG2E = 1.44269504f;

// A chunk's partial result for a row and a head is the mean of V by weight, and what it takes to add chunks' means up. The
// means are F16, as V is where it is multiplied, which halves what is written and read; those of F32 cells are F32. F16 means
// lie as the tensor cores' results do, so that a thread stores 16 bytes at once: of 32 columns, which are four tiles of 8, the
// first word of 8 values has columns 0 and 1 of each tile, the second has columns 2 and 3 of each, and so on.
struct AttentionParts : AttentionArgs {
    int32_t chunks; // a sequence has at most so many
    void *means; // [T][chunks][H][D]
    float2 *sums; // [T][chunks][H] {maximum, sum of weights}, of scores in units of log2

    // Returns the place of a result. Those of a unit's heads are neighbours.
    __host__ __device__ int64_t place(int64_t row, int32_t chunk, int64_t head) const {
        return (row * chunks + chunk) * H + head;
    }
};

// Adds the chunks up into `out` or `packed`.
int attention_combine(const AttentionParts &parts, const DeviceLimits &device, cudaStream_t stream);

} // namespace luce
