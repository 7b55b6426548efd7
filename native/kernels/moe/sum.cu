// Has the last launch of a mixture of experts (moe.h): the sum over a row's experts, and the packing of the
// rows for the product behind.
#include "common/pointers.h"
#include "matmul/pack.cuh"
#include "matmul/plan.h"
#include "matmul/ptx.cuh"
#include "moe/launch_plan.h"
#include "moe/ranks.cuh"

namespace luce {
namespace {

struct SumParams {
    MoeSumArgs a;
    RoutedLayout at;
    RowsLayout layout;
};

// Packs a lane's values of x for a product that norms its rows, as rowmm_pack does.
__device__ void pack_sum(const SumParams &p, const float (&x)[OWN], const Own &norm, int row, int64_t chunk,
                         int lane) {
    const int64_t n_chunks = chunks_of(p.a.dims.E);
    uint8_t *out = static_cast<uint8_t *>(p.a.packed);
    const float sum = warp_sum(squares(x), WARP);
    if (lane == 0) {
        reinterpret_cast<float *>(out + squares_offset(p.a.dims.T, p.a.dims.E))[row * n_chunks + chunk] = sum;
    }
    const float *w = reinterpret_cast<const float *>(norm.v);
    float v[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        v[i] = x[i] * w[i];
    }
    const int C = p.layout.columns;
    pack_chunk(out + (row / p.layout.set * n_chunks + chunk) * chunk_bytes(C), C, row % p.layout.set,
               p.layout.wide, v, largest(v), lane);
}

// Has what a warp needs of its row beside the experts' results, which the launch ahead gives.
struct RowOf {
    Own residual;
    float open, weights[AHEAD]; // these are the first ranks'

    __device__ __forceinline__ void load(const SumParams &p, const float *of_ranks, int64_t row, int k) {
        const MoeDims &d = p.a.dims;
        const float *x = p.a.residual + row * d.E;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            residual.v[j] = p.a.residual != nullptr && k + 4 * j < d.E
                                ? __ldcg(reinterpret_cast<const float4 *>(x + k + 4 * j))
                                : float4{};
        }
        const auto *opens =
            reinterpret_cast<const float *>(static_cast<const uint8_t *>(p.a.routed) + p.at.open);
        open = d.shared() ? __ldcg(opens + row) : 0.0f;
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            weights[i] = i < d.n_used ? weight_of(p, of_ranks, row, i) : 0.0f;
        }
    }
    static __device__ __forceinline__ float weight_of(const SumParams &p, const float *of_ranks, int64_t row,
                                                      int rank) {
        return rank_weight(of_ranks, p.a.routed, p.at, p.a.scales, row, p.a.dims.n_used, rank);
    }
};

// The grid is {chunks / SUM_WARPS, rows}. A warp has a chunk, and a lane 8 values in sequence. Behind down, which lets this
// start when up has ended, what up and those ahead of it have left is read EARLY.
template <bool EARLY>
__global__ void __launch_bounds__(SUM_WARPS *WARP) moe_sum_kernel(const __grid_constant__ SumParams p) {
    const MoeDims &d = p.a.dims;
    const uint8_t *routed = static_cast<const uint8_t *>(p.a.routed);
    const int lane = threadIdx.x % WARP, E = int(d.E);
    const int64_t row = blockIdx.y, chunk = int64_t(blockIdx.x) * SUM_WARPS + threadIdx.x / WARP;
    const int k = int(chunk) * CHUNK + lane * OWN;
    let_next_start();
    const Own norm = p.a.norm != nullptr ? own_values(p.a.norm, k, E) : Own{};
    const float *weights = reinterpret_cast<const float *>(routed + p.at.weights) + row * d.n_used;
    RowOf own;
    if (EARLY) {
        own.load(p, weights, row, k);
    }
    wait_for_previous();
    if (chunk >= chunks_of(E)) { // this is true for a whole warp
        return;
    }
    if (!EARLY) {
        own.load(p, weights, row, k);
    }
    if (p.a.counts != nullptr && blockIdx.x == 0 && int(threadIdx.x) < d.n_used) {
        const auto *ids = reinterpret_cast<const int32_t *>(routed + p.at.ids) + row * d.n_used;
        atomicAdd(p.a.counts + __ldcg(ids + threadIdx.x), 1);
    }
    Own sum = {}, shared = {};
    if (d.shared()) {
        const int64_t first = p.a.sums != nullptr ? 0 : int64_t(d.T) * d.n_used;
        shared = own_values(p.a.y + (first + row) * E, k, E);
    }
    if (p.a.sums != nullptr) {
        sum = own_values(p.a.sums + row * E, k, E);
    }
    add_ranks(sum, p.a.sums != nullptr ? d.n_used : 0, p.a.y, row, d.n_used, k, E, own.weights,
              [&](int rank) { return RowOf::weight_of(p, weights, row, rank); });
    float x[OWN];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        float4 y = sum.v[j];
        if (d.shared()) {
            const float4 s = shared.v[j];
            y = {y.x + s.x * own.open, y.y + s.y * own.open, y.z + s.z * own.open, y.w + s.w * own.open};
        }
        float4 z = {y.x + own.residual.v[j].x, y.y + own.residual.v[j].y, y.z + own.residual.v[j].z,
                    y.w + own.residual.v[j].w};
        if (k + 4 * j < E) {
            *reinterpret_cast<float4 *>(p.a.out + row * E + k + 4 * j) = z;
        } else {
            z = {}; // what it was multiplied by may not be finite
        }
        x[4 * j] = z.x, x[4 * j + 1] = z.y, x[4 * j + 2] = z.z, x[4 * j + 3] = z.w;
    }
    if (p.a.packed != nullptr) {
        pack_sum(p, x, norm, int(row), chunk, lane);
    }
}

} // namespace

int cuda::moe_sum(const MoeSumArgs &args, void *stream) {
    const MoeDims &d = args.dims;
    if (!moe_has(d) || !given(args.routed) || ((args.sums == nullptr || d.shared()) && !given(args.y)) ||
        (args.sums != nullptr && !given(args.sums)) || !aligned(args.residual) || !given(args.out) ||
        (args.packed != nullptr && (!given(args.packed) || !given(args.norm) || d.T > ROWMM_MAX_ROWS))) {
        return int(cudaErrorInvalidValue);
    }
    if (d.T == 0) {
        return 0;
    }
    DeviceLimits device;
    if (const int error = device_limits(device); error != 0) {
        return error;
    }
    const SumParams p = {args, RoutedLayout(d), RowsLayout(d.T, args.packed != nullptr && device.wgmma)};
    const auto kernel = args.sums == nullptr ? moe_sum_kernel<true> : moe_sum_kernel<false>;
    return int(
        launch_kernel(kernel, plan_moe_sum(d), static_cast<cudaStream_t>(stream), args.overlap != 0, p));
}

} // namespace luce
