// Says how blocks of route (moe/route.cu) share the router's outputs and the rows, and multiplies by the router's weights.
#pragma once

#include "matmul/pack.cuh"
#include "matmul/ptx.cuh"
#include "moe/plan.h"

namespace luce {
namespace {

constexpr int THREADS = ROUTE_THREADS, WARPS = THREADS / WARP;
constexpr int TILE_ROWS = ROUTE_ROWS; // a block has so many rows; each has a warp that chooses its experts
constexpr int OUTPUTS = ROUTE_OUTPUTS; // a block has so many of the router's outputs
constexpr int HALVES = WARPS / OUTPUTS; // so many warps share an output
constexpr int TILES = MOE_MAX_ROWS / TILE_ROWS;
constexpr int PER_THREAD = MOE_MAX_EXPERTS / THREADS;
constexpr int WEIGHTS = 8, VALUES = 2; // a thread has so many vectors of the router, and of a row, at once
static_assert(TILE_ROWS == WARPS && OUTPUTS * HALVES == WARPS, "what warps share");
static_assert((TILES + 1) * int64_t(sizeof(uint32_t)) <= MOE_COUNTER_BYTES,
              "one of tiles, one for each tile");

struct RouteParams {
    MoeRouteArgs a;
    RoutedLayout at;
    int32_t polled; // so many experts' numbers are polled for
    int32_t tile_rows; // a block has so many rows at most
    int32_t passes; // a block of many rows has so many MANY_OUTPUTS of the router, one after another

    template <typename T> __device__ T *of(int64_t offset) const {
        return reinterpret_cast<T *>(static_cast<uint8_t *>(a.routed) + offset);
    }
};

// Of few rows the blocks behind the router's pack a chunk each: of the experts' rows, or of those of a dense layer, which are as
// many.
struct Packer {
    int chunk;
    bool dense;

    __device__ explicit Packer(const MoeDims &d) : chunk(int(gridDim.x) - 1 - int(blockIdx.x)), dense(false) {
        const int chunks = int(chunks_of(d.E));
        dense = chunk >= chunks;
        chunk -= dense ? chunks : 0;
    }
};

struct TileShared {
    float squares[TILE_ROWS][WARPS];
    float dots[OUTPUTS][HALVES][TILE_ROWS];
    bool last;
};

// Returns what the norm multiplies a row by, whose sums of squares are each warp's.
__device__ float scale_of(const MoeRouteArgs &a, const float (&squares)[WARPS]) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        sum += squares[w];
    }
    return rsqrtf(sum / float(a.dims.E) + a.eps);
}
__device__ float scale_of(const MoeRouteArgs &a, const TileShared &s, int row) {
    return scale_of(a, s.squares[row]);
}

// A warp has every HALVES-th 128 of the values of one output.
struct Router {
    const float4 *weights; // it is null where there is no such output
    float4 w[WEIGHTS];
    int n;

    __device__ Router(const MoeRouteArgs &a, int output) : weights(nullptr), n(int(a.dims.E / 4)) {
        if (output < a.dims.n_expert) {
            weights = reinterpret_cast<const float4 *>(a.router) + int64_t(output) * n;
        } else if (output < router_outputs(a.dims)) {
            weights = reinterpret_cast<const float4 *>(a.shared_gate);
        }
        load(0);
        for (int j = WEIGHTS; weights != nullptr && at(j) < n; j++) {
            prefetch_line(weights + at(j));
        }
    }
    static __device__ int at(int j) {
        return (j * HALVES + threadIdx.x / WARP % HALVES) * WARP + threadIdx.x % WARP;
    }
    __device__ void load(int first) {
#pragma unroll
        for (int j = 0; j < WEIGHTS; j++) {
            const int i = at(first + j);
            w[j] = weights != nullptr && i < n ? weights[i] : float4{};
        }
    }
    // Leaves the products with the rows in v [rows][E].
    __device__ void multiply(const float *v, int rows, float (&out)[TILE_ROWS]) {
        const float4 *values = reinterpret_cast<const float4 *>(v);
        float sums[TILE_ROWS] = {};
        for (int first = 0; first * HALVES * WARP < n; first += WEIGHTS) {
            if (first > 0) {
                load(first);
            }
#pragma unroll
            for (int r = 0; r < TILE_ROWS; r++) {
                if (r >= rows) {
                    break;
                }
#pragma unroll
                for (int j = 0; j < WEIGHTS; j++) {
                    const int i = at(first + j);
                    const float4 x = i < n ? values[r * n + i] : float4{};
                    sums[r] =
                        fmaf(w[j].w, x.w, fmaf(w[j].z, x.z, fmaf(w[j].y, x.y, fmaf(w[j].x, x.x, sums[r]))));
                }
            }
        }
#pragma unroll
        for (int r = 0; r < TILE_ROWS; r++) {
            if (r < rows) {
                const float sum = warp_sum(sums[r], WARP);
                if (threadIdx.x % WARP == 0) {
                    out[r] = sum;
                }
            }
        }
    }
};

} // namespace
} // namespace luce
