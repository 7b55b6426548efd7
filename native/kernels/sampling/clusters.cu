// Logits of the tokens of some clusters of the vocabulary, for a head that looks at no others: a warp has a token, whose row it
// looks up. All others get a logit that nothing chooses.
#include "common/kernels.h"
#include "common/lanes.cuh"
#include "common/overlap.cuh"
#include "matmul/file_blocks.cuh"
#include "sampling/launch_plan.h"

namespace luce {
namespace {

constexpr int AT_ONCE = 8; // values of a lane

// Returns x . row, in all lanes of a warp.
template <int TYPE> __device__ float dot_of(const float *x, const uint8_t *row, int E) {
    float sum = 0;
    for (int k = threadIdx.x % WARP * AT_ONCE; k < E; k += WARP * AT_ONCE) {
        float w[AT_ONCE];
        values_of<TYPE>(w, row, k);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            sum += x[k + i] * w[i];
        }
    }
    return warp_sum(sum);
}

__device__ float logit_of(const ClusterLogitsArgs &a, const float *x, int32_t token) {
    const auto *row = static_cast<const uint8_t *>(a.table) + int64_t(token) * a.row_bytes;
    switch (a.type) {
#define LUCE_TABLE(TYPE)                                                                                     \
    case TYPE: return dot_of<TYPE>(x, row, a.E)
        LUCE_TABLE(TYPE_F32);
        LUCE_TABLE(TYPE_F16);
        LUCE_TABLE(TYPE_BF16);
        LUCE_TABLE(TYPE_Q4_0);
        LUCE_TABLE(TYPE_Q4_1);
        LUCE_TABLE(TYPE_Q5_0);
        LUCE_TABLE(TYPE_Q5_1);
        LUCE_TABLE(TYPE_Q8_0);
        LUCE_TABLE(TYPE_Q2_K);
        LUCE_TABLE(TYPE_Q3_K);
        LUCE_TABLE(TYPE_Q4_K);
        LUCE_TABLE(TYPE_Q5_K);
        LUCE_TABLE(TYPE_Q6_K);
#undef LUCE_TABLE
        default: return NEVER_CHOSEN; // the launcher refuses it
    }
}

// The grid is {parts of a row, rows}.
__global__ void __launch_bounds__(CLUSTER_THREADS)
    cluster_fill_kernel(const __grid_constant__ ClusterLogitsArgs a) {
    let_next_start();
    wait_for_previous();
    const int64_t begin = int64_t(blockIdx.x) * CLUSTER_FILLED;
    for (int64_t i = begin + threadIdx.x; i < a.n && i < begin + CLUSTER_FILLED; i += CLUSTER_THREADS) {
        a.out[blockIdx.y * a.n + i] = NEVER_CHOSEN;
    }
}

// The grid is {parts of a row's tokens, rows}.
__global__ void __launch_bounds__(CLUSTER_THREADS)
    cluster_scores_kernel(const __grid_constant__ ClusterLogitsArgs a) {
    let_next_start();
    const int i = blockIdx.x * (CLUSTER_THREADS / WARP) + threadIdx.x / WARP, t = blockIdx.y;
    wait_for_previous();
    if (i >= a.K * a.size) {
        return;
    }
    const int32_t cluster = a.clusters[int64_t(t) * a.K + i / a.size];
    const int32_t token = a.order[int64_t(cluster) * a.size + i % a.size];
    const float logit = logit_of(a, a.x + int64_t(t) * a.E, token);
    if (threadIdx.x % WARP == 0) {
        a.out[int64_t(t) * a.n + token] = logit;
    }
}

} // namespace

int cuda::cluster_logits(const ClusterLogitsArgs &args, void *stream) {
    if (args.T < 1 || args.T > MAX_ROWS || args.E < AT_ONCE || args.E % AT_ONCE != 0 ||
        !has_values(args.type)) {
        return int(cudaErrorInvalidValue);
    }
    const cudaStream_t st = static_cast<cudaStream_t>(stream);
    cudaError_t error = launch_kernel(cluster_fill_kernel, plan_cluster_fill(args.T, args.n), st, true, args);
    if (error == cudaSuccess) {
        const int64_t tokens = int64_t(args.K) * args.size;
        error = launch_kernel(cluster_scores_kernel, plan_cluster_scores(args.T, tokens), st, true, args);
    }
    return int(error);
}

} // namespace luce
