// Packs a chunk of one row by a block, of which a thread has two values. What a value needs is found by all threads at once,
// for a launch this short waits for one warp's instructions more than for memory. Then one warp packs what the others left
// in shared memory, and another adds up squares. Gates of many rows have two rows a block, and a warp packs each.
//
// All addresses are found while the launch ahead has not ended (found()), so that behind it all loads come at once.
#pragma once

#include "matmul/pairs.cuh"

namespace luce {
namespace {

// Packs the sum of parts and, where there is one, the residual, times a norm's weights.
__global__ void __launch_bounds__(PAIR_THREADS)
    pack_norm_kernel(const __grid_constant__ RowmmPackArgs a, RowsLayout layout,
                     const __grid_constant__ RowmmParts parts) {
    constexpr int AHEAD = 8;
    let_next_start();
    const PairPlace place(a, layout);
    const PairParts<AHEAD> of(parts, 0, place.row, place.at);
    const bool adds = a.x != nullptr;
    const float *residual = adds ? a.x + place.row * a.x_row + place.at : of.from[0];
    float *square = place.square(a);
    const float2 w = *reinterpret_cast<const float2 *>(a.w + place.at);
    found(of.bits() | address_bits(square) | address_bits(residual) | place.bits());
    wait_for_previous();
    float2 x[AHEAD];
    of.fetch(x);
    const float2 y = fetch_pair(residual);
    float2 v = of.sum(x, {of.zero(y.x), of.zero(y.y)});
    v.x = place.there ? v.x + (adds ? y.x : 0.0f) : 0.0f;
    v.y = place.there ? v.y + (adds ? y.y : 0.0f) : 0.0f;
    place.pack_normed(v, w, square);
}

// Packs f(x) * y, which are sums of parts, of ROWS rows a block.
template <int ROWS, Activation F>
__global__ void __launch_bounds__(PAIR_THREADS)
    pack_glu_kernel(const __grid_constant__ RowmmPackArgs a, RowsLayout layout,
                    const __grid_constant__ RowmmParts parts) {
    constexpr int AHEAD = 2;
    static_assert(SET % ROWS == 0, "a block's rows are of one set");
    __shared__ float4 values[ROWS][CHUNK / 4];
    let_next_start();
    const PairPlace place(a, layout, ROWS);
    const PairParts<AHEAD> of_x(parts, 0, place.row, place.at), of_y(parts, 1, place.row, place.at);
    found(of_x.bits() | of_y.bits() | place.bits());
    wait_for_previous();
    float2 x[ROWS][AHEAD], y[ROWS][AHEAD];
    float gates[2 * ROWS], gated[2 * ROWS], up[2 * ROWS];
    // The first row stands for one that there is not.
    const auto behind = [&](int r) { return place.row + r < a.T ? r * TILE : 0; };
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        of_x.fetch(x[r], behind(r));
        of_y.fetch(y[r], behind(r));
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float2 gate = of_x.sum(x[r], {}, behind(r)), value = of_y.sum(y[r], {}, behind(r));
        gates[2 * r] = gate.x, gates[2 * r + 1] = gate.y;
        up[2 * r] = value.x, up[2 * r + 1] = value.y;
    }
    activate<F>(gates, gated);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float2 v = {place.there ? gated[2 * r] * up[2 * r] : 0.0f,
                          place.there ? gated[2 * r + 1] * up[2 * r + 1] : 0.0f};
        place.leave(values[r], v);
        if (place.row + r < a.T) {
            place.keep(v, r * a.K);
        }
    }
    __syncthreads();
    if (place.warp < ROWS && place.row + place.warp < a.T) {
        place.pack(values[place.warp]);
    }
}

// Packs heads, normed and gated. Each warp finds the scales of all the chunk's heads itself.
__global__ void __launch_bounds__(PAIR_THREADS)
    pack_heads_kernel(const __grid_constant__ RowmmPackArgs a, RowsLayout layout) {
    __shared__ float4 values[CHUNK / 4];
    let_next_start();
    const PairPlace place(a, layout);
    const int eight = place.chunk * CHUNK + place.lane * OWN;
    const float *row = a.x + place.row * a.x_row, *all = row + (eight < a.K ? eight : 0),
                *own = row + place.at, *gate = a.y + place.row * a.y_row + place.at;
    const float2 w = *reinterpret_cast<const float2 *>(a.w + place.k % a.head);
    const float share = 1.0f / float(a.head);
    found(address_bits(all) | address_bits(own) | address_bits(gate) | place.bits() | __float_as_uint(share));
    wait_for_previous();
    float of_head[OWN];
    fetch_values(of_head, all);
    const float2 x = fetch_pair(own), y = fetch_pair(gate);
    const float scale = __shfl_sync(~0u, head_scale(of_head, a.head, share, a.eps), place.own / OWN);
    const float both[2] = {y.x, y.y};
    float gates[2];
    activate<SILU>(both, gates);
    float2 v = {x.x * scale * w.x * gates[0], x.y * scale * w.y * gates[1]};
    v = place.there ? v : float2{};
    place.leave(values, v);
    place.keep(v);
    __syncthreads();
    if (place.warp == 0) {
        place.pack(values);
    }
}

} // namespace
} // namespace luce
