// Has route of a step of one row, and of so few that each block has one.
//
// A thread has the row's values that its router's weights meet, so that nothing goes through shared memory ahead of the
// products, and what comes behind the wait is little: its instructions come from far. The order of all sums is that of many
// rows.
#pragma once

#include "moe/router.cuh"

namespace luce {
namespace {

static_assert(ONE_ROW_MAX_E == VALUES * THREADS * 4);
static_assert(VALUES * THREADS == WEIGHTS * HALVES * WARP, "a thread has all of its values at once");

// Holds the values of which a thread makes the sum of squares.
struct OneSquares {
    const float4 *first;
    int left; // so many lie from there on
    float4 x[VALUES];

    __device__ explicit OneSquares(const MoeRouteArgs &a)
        : first(reinterpret_cast<const float4 *>(a.x + blockIdx.y * a.dims.E) + threadIdx.x),
          left(int(a.dims.E / 4) - int(threadIdx.x)) {
        hold(first);
        hold(left);
    }
    __device__ void load() {
#pragma unroll
        for (int j = 0; j < VALUES; j++) {
            x[j] = j * THREADS < left ? __ldcg(first + j * THREADS) : float4{};
        }
    }
    __device__ float sum() const {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < VALUES; j++) {
            const float4 y = x[j];
            sum = fmaf(y.w, y.w, fmaf(y.z, y.z, fmaf(y.y, y.y, fmaf(y.x, y.x, sum))));
        }
        return sum;
    }
};

// A warp packs a chunk of the block's row. The others find the norm's scale with it.
__device__ __forceinline__ void pack_one(const RouteParams &p, TileShared &s) {
    const int64_t E = p.a.dims.E;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const auto [chunk, dense] = Packer(p.a.dims);
    float v[OWN], w[OWN];
    OneSquares squares(p.a);
    const float *x = p.a.x + blockIdx.y * E;
    uint8_t *out = p.of<uint8_t>(p.at.rows) + (first_row(p.a.dims, dense) + blockIdx.y) * row_record(E) +
                   chunk * chunk_bytes(1);
    load_values(w, dense ? p.a.dense_norm : p.a.norm, chunk * CHUNK + lane * OWN, E);
    wait_for_previous();
    squares.load();
    load_values(v, x, chunk * CHUNK + lane * OWN, E);
    const float sum = warp_sum(squares.sum(), WARP);
    if (lane == 0) {
        s.squares[0][warp] = sum;
    }
    __syncthreads();
    if (warp == 0) {
        const float scale = scale_of(p.a, s, 0);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            v[i] = v[i] * w[i] * scale;
        }
        pack_chunk(out, 1, 0, false, v, largest(v), lane);
    }
}

// The grid is {the router's outputs / OUTPUTS, and blocks that pack a chunk each; rows}.
__global__ void __launch_bounds__(THREADS, 2) moe_route_one_kernel(const __grid_constant__ RouteParams p) {
    __shared__ TileShared tile;
    const MoeDims &d = p.a.dims;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n = int(d.E / 4);
    let_next_start();
    if (blockIdx.x * OUTPUTS >= router_outputs(d)) {
        pack_one(p, tile);
        return;
    }
    const Router router(p.a, blockIdx.x * OUTPUTS + warp / HALVES);
    const float *weights = p.a.router_norm != nullptr ? p.a.router_norm : p.a.norm;
    float4 norm[WEIGHTS], x[WEIGHTS];
#pragma unroll
    for (int j = 0; j < WEIGHTS; j++) {
        const int i = Router::at(j);
        norm[j] = i < n ? reinterpret_cast<const float4 *>(weights)[i] : float4{};
    }
    OneSquares own(p.a);
    const float4 *first = reinterpret_cast<const float4 *>(p.a.x + blockIdx.y * d.E) + Router::at(0);
    int left = n - Router::at(0); // so many of the row's values lie from there on
    hold(first);
    hold(left);
    wait_for_previous();
#pragma unroll
    for (int j = 0; j < WEIGHTS; j++) {
        x[j] = j * HALVES * WARP < left ? __ldcg(first + j * HALVES * WARP) : float4{};
    }
    own.load();
    if (blockIdx.x == 0 && int(threadIdx.x) < d.n_used) { // down and the end wait for what up leaves here
        __stcg(p.of<int32_t>(p.at.ids) + blockIdx.y * d.n_used + threadIdx.x, -1);
    }
    float dot = 0;
#pragma unroll
    for (int j = 0; j < WEIGHTS; j++) {
        const float4 w = router.w[j],
                     y = {x[j].x * norm[j].x, x[j].y * norm[j].y, x[j].z * norm[j].z, x[j].w * norm[j].w};
        dot = fmaf(w.w, y.w, fmaf(w.z, y.z, fmaf(w.y, y.y, fmaf(w.x, y.x, dot))));
    }
    float squares = own.sum();
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) { // as warp_sum does it, of both at once
        dot += __shfl_xor_sync(~0u, dot, mask);
        squares += __shfl_xor_sync(~0u, squares, mask);
    }
    if (lane == 0) {
        tile.dots[warp / HALVES][warp % HALVES][0] = dot;
        tile.squares[0][warp] = squares;
    }
    __syncthreads();
    const int output = blockIdx.x * OUTPUTS + threadIdx.x;
    if (threadIdx.x < OUTPUTS && output < router_outputs(d)) {
        float sum = tile.dots[threadIdx.x][0][0];
#pragma unroll
        for (int h = 1; h < HALVES; h++) {
            sum += tile.dots[threadIdx.x][h][0];
        }
        __stcg(p.of<float>(p.at.logits) + blockIdx.y * logits_row(d) + output,
               sum * scale_of(p.a, tile, 0) * p.a.logit_scale());
    }
}

} // namespace
} // namespace luce
