// Packs x + RMS(sum of parts) * post, of whole rows: a block has a row, and a warp a chunk of it, of which a lane has 8 values.
#pragma once

#include "matmul/end_row.cuh"
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
    const int lane = threadIdx.x % WARP, chunk = threadIdx.x / WARP, row = blockIdx.x;
    const int k = chunk * CHUNK + lane * OWN, K = int(a.K), at = k < K ? k : 0;
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
    end_row(a, layout, row, v, x, w, of_chunks);
}

} // namespace
} // namespace luce
