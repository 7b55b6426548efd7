// Norms whole rows around the NextN head: its input [RMS(e) * w ; RMS(h) * w], packed as its first product takes it, and
// the hidden state that a step keeps. A block has one row of one of these. The sum of squares has an order that the
// row's length decides.
#include "kernels.h"
#include "overlap.cuh"
#include "rowmm_pack.cuh"
#include "rowmm_plan.h"

namespace luce {
namespace {

constexpr int MAX_WARPS = 32;

// Calls with_values(chunk, v) for each of a warp's chunks of 256 values of RMS(x) * w. A lane has 8 values in sequence.
template <typename F>
__device__ void each_chunk(const float *x, const float *w, int64_t E, float eps, const F &with_values) {
    __shared__ float sums[MAX_WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n_warps = int(blockDim.x) / WARP;
    const int chunks = int(chunks_of(E));
    float v[OWN], norm[OWN], sum = 0;
    for (int chunk = warp; chunk < chunks; chunk += n_warps) {
        load_values(v, x, int64_t(chunk) * CHUNK + lane * OWN, E);
        sum += squares(v);
    }
    sum = warp_sum(sum, WARP);
    if (lane == 0) {
        sums[warp] = sum;
    }
    __syncthreads();
    sum = 0;
    for (int i = 0; i < n_warps; i++) {
        sum += sums[i];
    }
    const float scale = rsqrtf(sum / float(E) + eps);
    for (int chunk = warp; chunk < chunks; chunk += n_warps) {
        const int64_t k = int64_t(chunk) * CHUNK + lane * OWN;
        load_values(v, x, k, E);
        load_values(norm, w, k, E);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            v[i] = v[i] * scale * norm[i];
        }
        with_values(chunk, v);
    }
}

// The grid is {e, h; rows}.
__global__ void __launch_bounds__(MAX_WARPS *WARP)
    nextn_pack_kernel(const __grid_constant__ NextnPackArgs a, RowsLayout layout) {
    let_next_start();
    wait_for_previous();
    const int64_t row = blockIdx.y, chunks = chunks_of(a.E);
    const bool is_h = blockIdx.x == 1;
    const float *x = is_h ? a.hidden + a.hidden_from[row] * a.E : a.e + row * a.E;
    const int C = layout.columns;
    uint8_t *out = static_cast<uint8_t *>(a.out) +
                   (row / layout.set * 2 * chunks + (is_h ? chunks : 0)) * int64_t(chunk_bytes(C));
    each_chunk(x, is_h ? a.h_norm : a.e_norm, a.E, a.eps, [&](int chunk, const float (&v)[OWN]) {
        pack_chunk(out + chunk * int64_t(chunk_bytes(C)), C, int(row) % layout.set, layout.wide, v,
                   largest(v), threadIdx.x % WARP);
    });
}

// The grid is rows.
__global__ void __launch_bounds__(MAX_WARPS *WARP)
    keep_hidden_kernel(const __grid_constant__ KeepHiddenArgs a) {
    let_next_start();
    wait_for_previous();
    const int64_t row = blockIdx.x;
    float *out = a.hidden + a.hidden_to[row] * a.E;
    each_chunk(a.x + row * a.x_row, a.norm, a.E, a.eps, [&](int chunk, const float (&v)[OWN]) {
        const int64_t k = int64_t(chunk) * CHUNK + int(threadIdx.x % WARP) * OWN;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            if (k + i < a.E) {
                out[k + i] = v[i];
            }
        }
    });
}

int threads_of(int64_t E) {
    return int(chunks_of(E) < MAX_WARPS ? chunks_of(E) : MAX_WARPS) * WARP;
}

} // namespace

int cuda::nextn_pack(const NextnPackArgs &args, void *stream) {
    if (args.T < 1 || args.T > ROWMM_MAX_ROWS || args.E <= 0 || args.E % CHUNK != 0 ||
        reinterpret_cast<uintptr_t>(args.out) % 16 != 0) {
        return int(cudaErrorInvalidValue);
    }
    return int(launch_kernel(nextn_pack_kernel, dim3(2, unsigned(args.T)), threads_of(args.E), 0,
                             static_cast<cudaStream_t>(stream), true, args,
                             RowsLayout(args.T, rowmm_has_wgmma())));
}

int cuda::keep_hidden(const KeepHiddenArgs &args, void *stream) {
    if (args.T < 1 || args.E <= 0) {
        return int(cudaErrorInvalidValue);
    }
    return int(launch_kernel(keep_hidden_kernel, dim3(unsigned(args.T)), threads_of(args.E), 0,
                             static_cast<cudaStream_t>(stream), true, args));
}

} // namespace luce
