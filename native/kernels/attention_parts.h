// What attention's first kernel leaves to its second: partial results by chunk (attention.cu, attention_combine.cu).
#pragma once

#include "kernels.h"

#include <cuda_runtime.h>

namespace luce {

struct AttentionParts : AttentionArgs {
    int32_t chunks; // a sequence has at most so many
    float *partial; // [T][H][chunks][D] sums of weight * v
    float2 *sums; // [T][H][chunks] {maximum, sum of weights}, of scores in units of log2
};

// Adds the chunks up into `out` or `packed`.
cudaError_t attention_combine(const AttentionParts &parts, cudaStream_t stream);

} // namespace luce
