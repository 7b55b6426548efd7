// Packs x + RMS(sum of parts) * post, of whole rows: a block has a row, and a warp a chunk of it, of which a lane has 8 values.
// The sums of squares of chunks are added in their order.
#pragma once

#include "matmul/pack_behind.cuh"
#include "matmul/partials.cuh"

namespace luce {
namespace {

constexpr int POST_WARPS = int(ROWMM_POST_K / CHUNK);

// The grid is rows.
__global__ void __launch_bounds__(POST_WARPS *WARP, 1)
    pack_post_kernel(const __grid_constant__ RowmmPackArgs a, RowsLayout layout,
                     const __grid_constant__ RowmmParts parts) {
    __shared__ float of_chunks[POST_WARPS];
    let_next_start();
    const int lane = threadIdx.x % WARP, chunk = threadIdx.x / WARP, row = blockIdx.x,
              chunks = int(blockDim.x) / WARP;
    const int k = chunk * CHUNK + lane * OWN, K = int(a.K);
    const bool there = k < K; // K is a multiple of 8
    const int at = there ? k : 0;
    const LaneParts<2> of(parts, 0, row, at);
    float4 p[2][2];
    float v[OWN] = {}, x[OWN], w[OWN];
    load_values(w, a.post, at, K);
    if (a.out != nullptr) {
        prefetch_line(a.w + at); // it is read last
    }
    wait_for_previous();
    of.fetch(p, 0);
    fetch_values(x, a.x + row * a.x_row + at);
    of.add(p, v);
    const float sum = warp_sum(there ? squares(v) : 0.0f, WARP);
    if (lane == 0) {
        of_chunks[chunk] = sum;
    }
    __syncthreads();
    const float scale = post_norm(of_chunks, chunks, K, a.eps);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        v[i] = there ? (x[i] + v[i] * scale * w[i]) * a.post_scale : 0.0f;
    }
    if (there) {
        store_values(a.copy + int64_t(row) * K, v, k, K);
    }
    if (a.out != nullptr) {
        pack_behind(v, a.w, static_cast<uint8_t *>(a.out), layout, a.T, K, row, chunk, lane);
    }
}

} // namespace
} // namespace luce
