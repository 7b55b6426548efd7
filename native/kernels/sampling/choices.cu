// Takes the tokens of a step's rows from choices that earlier rows have left on the device.
#include "common/kernels.h"
#include "common/overlap.cuh"

#include <cuda_runtime.h>

namespace luce {
namespace {

__global__ void row_tokens_kernel(TokensArgs a) { // a thread has a row
    const int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < a.T) {
        a.out[t] = token_of(a.tokens[t], a.drafts, a.n_vocab);
    }
}

} // namespace

int cuda::row_tokens(const TokensArgs &args, void *stream) {
    constexpr int THREADS = 64;
    if (args.T > 0) {
        const unsigned blocks = unsigned((args.T + THREADS - 1) / THREADS);
        row_tokens_kernel<<<blocks, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(args);
    }
    return int(cudaGetLastError());
}

} // namespace luce
