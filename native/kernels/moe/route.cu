// Has the first launch of a mixture of experts (moe.h): route.
//
// A block of route has 8 rows and a few outputs of the router, whose weights it holds before it waits. It
// computes the rows' norm and its logits, and packs its part of the rows. Of many rows, the last block of 8 to
// finish chooses their experts. The last of those blocks makes the list. Few rows (moe/plan.h) are spread over more
// blocks, of which none chooses. Where each has one row there is a kernel of its own (moe/route_one.cuh), and so have prompts'
// many rows (moe/route_many.cuh).
#include "common/pointers.h"
#include "common/small_shared.h"
#include "moe/choice.cuh"
#include "moe/launch_plan.h"
#include "moe/route_many.cuh"
#include "moe/route_one.cuh"

#include <climits>
#include <cmath>

namespace luce {
namespace {

constexpr int SOME_ROWS = 3; // a thread has fewer registers for so many: those of a few rows in three tiles

// Finds a tile's logits of the block's OUTPUTS.
__device__ void find_logits(const RouteParams &p, Router &router, TileShared &tile, const float *v, int row0,
                            int rows) {
    const MoeDims &d = p.a.dims;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (blockIdx.x * OUTPUTS < router_outputs(d)) {
        router.multiply(v, rows, tile.dots[warp / HALVES][warp % HALVES]);
    }
    __syncthreads();
    if (warp == 0) {
        const int r = lane / OUTPUTS, o = lane % OUTPUTS, output = int(blockIdx.x) * OUTPUTS + o;
        if (r < rows && output < router_outputs(d)) {
            float sum = tile.dots[o][0][r];
#pragma unroll
            for (int h = 1; h < HALVES; h++) {
                sum += tile.dots[o][h][r];
            }
            __stcg(p.of<float>(p.at.logits) + (row0 + r) * logits_row(d) + output,
                   sum * scale_of(p.a, tile, r) * p.a.logit_scale());
        }
    }
}

// Leaves x * norm of a tile's rows in v.
__device__ void weigh(const RouteParams &p, Norm &norm, int row0, int rows, float *v, TileShared &tile) {
    if (rows == 1) {
        weigh<1>(p.a, norm, row0, rows, v, tile.squares);
    } else if (rows <= SOME_ROWS) {
        weigh<SOME_ROWS>(p.a, norm, row0, rows, v, tile.squares);
    } else {
        weigh<TILE_ROWS>(p.a, norm, row0, rows, v, tile.squares);
    }
    __syncthreads();
}

// Packs row `row` of a launch for who does not read the router's norm of it: experts, and a dense layer. The blocks of a tile share
// their chunks. It is a call, so that the kernel's other rows keep their registers.
__device__ __noinline__ void pack_apart(const RouteParams &p, int row, float scale) {
    const int64_t E = p.a.dims.E, chunks = chunks_of(E);
    for (int64_t i = gridDim.x - 1 - blockIdx.x; i < packed_rows(p.a.dims) * chunks; i += gridDim.x) {
        const bool dense = i >= chunks;
        const int64_t chunk = dense ? i - chunks : i, k = chunk * CHUNK + threadIdx.x % WARP * OWN;
        float v[OWN] = {}, w[OWN];
        load_values(w, dense ? p.a.dense_norm : p.a.norm, k, E);
#pragma unroll
        for (int j = 0; j < OWN; j += 4) { // E is a multiple of 4
            if (k + j < E) {
                const float4 x = __ldcg(reinterpret_cast<const float4 *>(p.a.x + row * E + k + j));
                v[j] = x.x * w[j], v[j + 1] = x.y * w[j + 1], v[j + 2] = x.z * w[j + 2],
                v[j + 3] = x.w * w[j + 3];
            }
        }
        pack_values(p, row, chunk, v, scale, dense, false);
    }
}

// The grid is {the router's outputs / OUTPUTS, and maybe blocks that pack; tiles of rows}. A multiprocessor of 100 KB has room for the
// rows of one block as a rule; with registers for two a thread would keep 32 bytes in memory.
__global__ void __launch_bounds__(THREADS, SMALL_SHARED ? 1 : 2)
    moe_route_kernel(const __grid_constant__ RouteParams p) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ ListShared list;
    __shared__ int list_rows[1][MOE_MAX_EXPERTS];
    __shared__ TileShared tile;
    const MoeDims &d = p.a.dims;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int row0 = blockIdx.y * p.tile_rows, rows = min(d.T - row0, p.tile_rows);
    float *v = reinterpret_cast<float *>(shared); // [TILE_ROWS][E]
    const bool routes = blockIdx.x * OUTPUTS < router_outputs(d);
    let_next_start();
    Router router(p.a, int(blockIdx.x) * OUTPUTS + warp / HALVES);
    const Packer packer(d);
    Norm norm(routes         ? p.a.router_norm != nullptr ? p.a.router_norm : p.a.norm
              : packer.dense ? p.a.dense_norm
                             : p.a.norm,
              p.a);
    wait_for_previous();
    if (blockIdx.x + blockIdx.y == 0 &&
        int(threadIdx.x) < p.polled) { // who is behind up waits for what it leaves here
        __stcg(p.of<int32_t>(p.at.ids) + threadIdx.x, -1);
    }
    weigh(p, norm, row0, rows, v, tile);
    find_logits(p, router, tile, v, row0, rows);
    uint32_t *counters = static_cast<uint32_t *>(p.a.counters);
    // Of a step of few rows the experts are chosen behind this (moe.h), unless others multiply by them.
    const bool last =
        (!few_rows(d) || p.a.values != nullptr) && is_last(counters + 1 + blockIdx.y, gridDim.x, tile.last);
    if (const int row = WARPS - 1 - warp; row < rows) { // the first rows are the last warps'
        const float scale = scale_of(p.a, tile, row);
        if (!few_rows(d)) {
            p.a.router_norm != nullptr ? pack_apart(p, row0 + row, scale)
                                       : pack_row(p, row0 + row, v + row * d.E, scale);
        } else if (!routes) {
            float own[OWN];
            load_values(own, v + row * d.E, packer.chunk * CHUNK + lane * OWN, d.E);
            pack_values(p, row0 + row, packer.chunk, own, scale, packer.dense, false);
        }
    }
    if (!last) {
        return;
    }
    __syncthreads(); // the rows are packed, and what lies there now is of the choice
    if (warp < rows) {
        const float *logits = p.of<float>(p.at.logits) + (row0 + warp) * logits_row(d);
        const Choice choice =
            choose_experts(d, logits, reinterpret_cast<Candidates *>(shared)[warp], true, lane);
        keep_choice(d, p.at, static_cast<uint8_t *>(p.a.routed), row0 + warp, choice, lane);
    }
    if (few_rows(d)) {
        return;
    }
    __syncthreads();
    uint16_t *ids = reinterpret_cast<uint16_t *>(shared);
    if (!is_last(counters, gridDim.y, tile.last)) {
        return;
    }
    for (int i = threadIdx.x; i < d.T * d.n_used; i += THREADS) {
        ids[i] = uint16_t(__ldcg(p.of<int32_t>(p.at.ids) + i));
    }
    __syncthreads();
    make_list<1>(p, list, ids, list_rows);
}

} // namespace

static_assert(sizeof(ListShared) + MOE_MAX_EXPERTS * sizeof(int) + sizeof(TileShared) <= ROUTE_BESIDES);
static_assert(sizeof(ListShared) + sizeof(ManyTile) <= ROUTE_BESIDES);
static_assert(sizeof(Candidates) == CANDIDATE_BYTES);

int64_t moe_routed_bytes(const MoeDims &dims) {
    return RoutedLayout(dims).bytes;
}
int64_t moe_ids_offset(const MoeDims &dims) {
    return RoutedLayout(dims).ids;
}
int64_t moe_weights_offset(const MoeDims &dims) {
    return RoutedLayout(dims).weights;
}
int64_t moe_record_bytes(const MoeDims &dims) {
    return many_rows(dims) ? dims.places() * row_record(dims.h_row()) : 0;
}
int64_t moe_open_offset(const MoeDims &dims) {
    return RoutedLayout(dims).open;
}

int cuda::moe_route(const MoeRouteArgs &args, void *stream) {
    const MoeDims &d = args.dims;
    if (!moe_has(d) || !given(args.x) || !given(args.norm) || !given(args.router) || !given(args.routed) ||
        !given(args.counters) || (d.gated() && !given(args.shared_gate)) || !aligned(args.router_norm) ||
        (d.dense != 0 && (!given(args.dense_norm) || !given(args.router_norm)))) {
        return int(cudaErrorInvalidValue);
    }
    if (d.T == 0) {
        return 0;
    }
    DeviceLimits device;
    if (const int error = device_limits(device); error != 0) {
        return error;
    }
    const RoutePlan plan = plan_route(device, d, args.values != nullptr);
    static_assert(FEW_PAIRS <= THREADS, "a block sees to all that are polled for");
    const RouteParams p = {args, RoutedLayout(d), args.values == nullptr ? polled_pairs(d) : 0,
                           plan.tile_rows, plan.passes};
    const auto kernel = plan.one_row   ? moe_route_one_kernel
                        : many_rows(d) ? moe_route_many_kernel
                                       : moe_route_kernel;
    return int(launch_kernel(kernel, plan.launch, static_cast<cudaStream_t>(stream), args.overlap != 0, p));
}

} // namespace luce
