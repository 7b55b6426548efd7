// Norms whole rows, RMS(x) * w, a row by a block of any number of warps. The sum of squares has an order that the row's
// length decides: chunks 32 apart, then these sums one after the other.
#pragma once

#include "common/kernels.h"
#include "matmul/pack.cuh"

namespace luce {
namespace {

constexpr int NORM_MAX_WARPS = 32;

int norm_threads(int64_t E) {
    const int64_t chunks = chunks_of(E);
    return int(chunks < NORM_MAX_WARPS ? chunks : NORM_MAX_WARPS) * WARP;
}

// A warp has every n-th chunk of 256 values, and a lane 8 in sequence of it.
struct WholeNorm {
    const float *w;
    int64_t E;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_warps = int(blockDim.x) / WARP;
    float norm[OWN]; // they are of the warp's first chunk

    // This reads weights alone, so it may run before the rows are there.
    __device__ WholeNorm(const float *weights, int64_t n) : w(weights), E(n) {
        load_values(norm, w, first_of(warp), E);
    }
    __device__ int64_t first_of(int chunk) const { return int64_t(chunk) * CHUNK + lane * OWN; }

    // Calls with_values(chunk, v) for each of a warp's chunks, of values that load(v, k) gives.
    template <typename L, typename F> __device__ void run(float eps, const L &load, const F &with_values) {
        __shared__ float sums[NORM_MAX_WARPS];
        const int chunks = int(chunks_of(E)), n_sums = min(chunks, NORM_MAX_WARPS);
        float v[OWN], sum;
        for (int i = warp; i < n_sums; i += n_warps) {
            sum = 0;
            for (int chunk = i; chunk < chunks; chunk += NORM_MAX_WARPS) {
                load(v, first_of(chunk));
                sum += squares(v);
            }
            sum = warp_sum(sum, WARP);
            if (lane == 0) {
                sums[i] = sum;
            }
        }
        __syncthreads();
        sum = 0;
        for (int i = 0; i < n_sums; i++) {
            sum += sums[i];
        }
        const float scale = rsqrtf(sum / float(E) + eps);
        for (int chunk = warp; chunk < chunks; chunk += n_warps) {
            if (chunks > n_warps) {
                load(v, first_of(chunk));
                load_values(norm, w, first_of(chunk), E);
            }
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                v[i] = v[i] * scale * norm[i];
            }
            with_values(chunk, v);
        }
    }
};

} // namespace
} // namespace luce
