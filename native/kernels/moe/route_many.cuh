// Has route of many rows, which prompts have. A block has up to 16 rows, and goes over the router's outputs in passes of 16, which
// it shares with the other blocks of its rows: a warp has four of them and every second 128 values of K, so that a vector from
// shared memory meets four of weights. The order of all sums is that of few rows, so the bits are the same.
#pragma once

#include "moe/choice.cuh"
#include "moe/route_tile.cuh"

namespace luce {
namespace {

constexpr int MANY_TILE = ROUTE_MANY_ROWS, MANY_OUTPUTS = ROUTE_MANY_OUTPUTS;
constexpr int EACH = MANY_OUTPUTS * HALVES / WARPS; // a warp has so many outputs
constexpr int SUMS = EACH * MANY_TILE; // of a lane
static_assert(SUMS == 2 * WARP, "a lane has two of them in the end");
static_assert(MANY_TILE * MANY_OUTPUTS == THREADS, "a thread has a logit of a pass");

struct ManyTile {
    float squares[MANY_TILE][WARPS];
    float scales[MANY_TILE];
    alignas(8) float dots[HALVES][MANY_OUTPUTS][MANY_TILE];
    bool last;
};

// Returns the router's weights of an output; of one that is not there those of another, whose products nobody reads.
__device__ __forceinline__ const float4 *router_row(const MoeRouteArgs &a, int output) {
    const bool shared = output == a.dims.n_expert && a.dims.gated();
    const float *row = shared ? a.shared_gate : a.router + (output < a.dims.n_expert ? output * a.dims.E : 0);
    return reinterpret_cast<const float4 *>(row);
}

// Adds a lane's products of the outputs from `output` on with the rows in v [rows][E] to sums [EACH][MANY_TILE]. Rows that are
// not there are the last one again.
template <bool FULL>
__device__ __forceinline__ void multiply_rows(const MoeRouteArgs &a, int output, const float *v, int rows,
                                              float (&sums)[SUMS]) {
    const int n = int(a.dims.E / 4);
    const float4 *values = reinterpret_cast<const float4 *>(v), *weights[EACH];
    float4 next[EACH];
    const int first = Router::at(0);
#pragma unroll
    for (int o = 0; o < EACH; o++) {
        weights[o] = router_row(a, output + o);
        next[o] = first < n ? weights[o][first] : float4{};
    }
#pragma unroll 1
    for (int i = first; i - first < n; i += HALVES * WARP) {
        float4 w[EACH];
#pragma unroll
        for (int o = 0; o < EACH; o++) {
            w[o] = next[o];
            next[o] = i + HALVES * WARP < n ? weights[o][i + HALVES * WARP] : float4{};
        }
#pragma unroll
        for (int r = 0; r < MANY_TILE; r++) {
            const int row = FULL ? r : min(r, rows - 1);
            const float4 x = i < n ? values[row * n + i] : float4{};
#pragma unroll
            for (int o = 0; o < EACH; o++) {
                float &sum = sums[o * MANY_TILE + r];
                sum = fmaf(w[o].w, x.w, fmaf(w[o].z, x.z, fmaf(w[o].y, x.y, fmaf(w[o].x, x.x, sum))));
            }
        }
    }
}

// Adds lanes' sums up as warp_sum does each of them. Lane l has sums 2 l and 2 l + 1 in the first two places then: at each step two
// lanes share what both have.
__device__ __forceinline__ void sum_lanes(float (&sums)[SUMS], int lane) {
#pragma unroll
    for (int mask = WARP / 2, n = SUMS / 2; mask > 0; mask /= 2, n /= 2) {
        const bool upper = (lane & mask) != 0;
#pragma unroll
        for (int i = 0; i < SUMS / 2; i++) {
            if (i < n) {
                const float given = upper ? sums[i] : sums[i + n], kept = upper ? sums[i + n] : sums[i];
                sums[i] = kept + __shfl_xor_sync(~0u, given, mask);
            }
        }
    }
}

// Finds the logits of a tile's rows in a pass.
__device__ __forceinline__ void find_many_logits(const RouteParams &p, ManyTile &tile, const float *v,
                                                 int pass, int row0, int rows) {
    const MoeDims &d = p.a.dims;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, own = warp / HALVES * EACH;
    if (const int output = pass * MANY_OUTPUTS + own; output < router_outputs(d)) {
        float sums[SUMS] = {};
        if (rows == MANY_TILE) {
            multiply_rows<true>(p.a, output, v, rows, sums);
        } else {
            multiply_rows<false>(p.a, output, v, rows, sums);
        }
        sum_lanes(sums, lane);
        reinterpret_cast<float2 *>(tile.dots[warp % HALVES][own])[lane] = {sums[0], sums[1]};
    }
    __syncthreads();
    const int r = threadIdx.x % MANY_TILE, o = threadIdx.x / MANY_TILE, output = pass * MANY_OUTPUTS + o;
    if (r < rows && output < router_outputs(d)) {
        float sum = tile.dots[0][o][r];
#pragma unroll
        for (int h = 1; h < HALVES; h++) {
            sum += tile.dots[h][o][r];
        }
        __stcg(p.of<float>(p.at.logits) + (row0 + r) * logits_row(d) + output,
               sum * tile.scales[r] * p.a.logit_scale());
    }
    __syncthreads(); // the dots have been added up
}

// Leaves x * norm of a tile's rows in v, and their scales.
__device__ __forceinline__ void weigh_many(const RouteParams &p, const float *weights, int row0, int rows,
                                           float *v, ManyTile &tile) {
    const int64_t E = p.a.dims.E;
    Norm norm(weights, p.a);
    for (int r = 0; r < rows; r += TILE_ROWS) {
        if (r > 0) {
            norm.load(threadIdx.x, int(E / 4)); // it has the last values
        }
        weigh<TILE_ROWS>(p.a, norm, row0 + r, min(rows - r, TILE_ROWS), v + r * E, tile.squares + r);
    }
    __syncthreads();
    if (int(threadIdx.x) < rows) {
        tile.scales[threadIdx.x] = scale_of(p.a, tile.squares[threadIdx.x]);
    }
    __syncthreads();
}

// The grid is {blocks that share the passes of a tile; tiles of rows}.
__global__ void __launch_bounds__(THREADS, 1) moe_route_many_kernel(const __grid_constant__ RouteParams p) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ ListShared list;
    __shared__ ManyTile tile;
    const MoeDims &d = p.a.dims;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int row0 = blockIdx.y * p.tile_rows, rows = min(d.T - row0, p.tile_rows);
    float *v = reinterpret_cast<float *>(shared); // [p.tile_rows][E]
    let_next_start();
    wait_for_previous();
    weigh_many(p, p.a.router_norm != nullptr ? p.a.router_norm : p.a.norm, row0, rows, v, tile);
    for (int i = 0; i < p.passes; i++) {
        find_many_logits(p, tile, v, int(blockIdx.x) * p.passes + i, row0, rows);
    }
    if (p.a.router_norm != nullptr) { // what experts read is normed by other weights
        weigh_many(p, p.a.norm, row0, rows, v, tile);
    }
    uint32_t *counters = static_cast<uint32_t *>(p.a.counters);
    const bool last = is_last(counters + 1 + blockIdx.y, gridDim.x, tile.last);
    for (int row = warp; row < rows; row += WARPS) {
        pack_row(p, row0 + row, v + row * d.E, tile.scales[row], wide_rows(d));
    }
    if (!last) {
        return;
    }
    __syncthreads(); // the rows are packed, and what lies there now is of the choice
    for (int row = warp; row < rows; row += WARPS) {
        const float *logits = p.of<float>(p.at.logits) + (row0 + row) * logits_row(d);
        const Choice choice =
            choose_experts(d, logits, reinterpret_cast<Candidates *>(shared)[warp], true, lane);
        keep_choice(d, p.at, static_cast<uint8_t *>(p.a.routed), row0 + row, choice, lane);
        __syncwarp();
    }
    __syncthreads();
    if (!is_last(counters, gridDim.y, tile.last)) {
        return;
    }
    const int pairs = d.T * d.n_used;
    uint16_t *ids = reinterpret_cast<uint16_t *>(shared);
    const int4 *chosen = p.of<int4>(p.at.ids);
#pragma unroll 4
    for (int i = threadIdx.x; i < (pairs + 3) / 4; i += THREADS) {
        const int4 x = __ldcg(chosen + i);
        reinterpret_cast<uint2 *>(ids)[i] = {uint32_t(x.x | x.y << 16), uint32_t(x.z | x.w << 16)};
    }
    __syncthreads();
    make_list<WARPS>(p, list, ids, reinterpret_cast<int (*)[MOE_MAX_EXPERTS]>(shared + route_ids_bytes(d)));
}

} // namespace
} // namespace luce
