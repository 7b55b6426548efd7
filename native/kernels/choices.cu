// Keeps choices on the device: a step keeps its rows' tokens, and a later step starts from them.
#include "kernels.h"
#include "overlap.cuh"

#include <cuda_runtime.h>

namespace luce {
namespace {

__global__ void keep_kernel(KeepArgs a) { // a thread has a row
    let_next_start();
    wait_for_previous();
    const int t = threadIdx.x;
    const int32_t at = a.ctl->rows[t].keep;
    if (at >= 0) {
        a.drafts[2 * int64_t(at)] = a.choice[t].token;
        a.drafts[2 * int64_t(at) + 1] = a.choice[t].not_finite;
    }
}

__global__ void row_tokens_kernel(TokensArgs a) { // a thread has a row
    const int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < a.T) {
        a.out[t] = token_of(a.tokens, a.drafts, t, a.n_vocab);
    }
}

} // namespace

int cuda::keep(const KeepArgs &args, void *stream) {
    if (args.T < 0 || args.T > MAX_ROWS) {
        return int(cudaErrorInvalidValue);
    }
    if (args.T > 0) {
        return int(
            launch_kernel(keep_kernel, dim3(1), args.T, 0, static_cast<cudaStream_t>(stream), true, args));
    }
    return 0;
}

int cuda::row_tokens(const TokensArgs &args, void *stream) {
    constexpr int THREADS = 64;
    if (args.T > 0) {
        const unsigned blocks = unsigned((args.T + THREADS - 1) / THREADS);
        row_tokens_kernel<<<blocks, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(args);
    }
    return int(cudaGetLastError());
}

} // namespace luce
