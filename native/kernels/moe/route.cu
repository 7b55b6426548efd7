// Has the first launch of a mixture of experts (moe.h): route.
//
// A block of route has 8 rows and a few outputs of the router, whose weights it holds before it waits. It
// computes the rows' norm and its logits, and packs its part of the rows. Of many rows, the last block of 8 to
// finish chooses their experts. The last of those blocks makes the list. Few rows (moe/plan.h) are spread over more
// blocks, of which none chooses. Where each has one row there is a kernel of its own (moe/route_one.cuh).
#include "common/pointers.h"
#include "moe/choice.cuh"
#include "moe/launch_plan.h"
#include "moe/route_one.cuh"

#include <climits>
#include <cmath>

namespace luce {
namespace {

constexpr int SOME_ROWS = 3; // a thread has fewer registers for so many: those of a few rows in three tiles

// Holds a thread's share of a row, or of as many rows as a tile has.
struct Norm {
    const float *weights;
    float4 w[VALUES];

    __device__ explicit Norm(const float *norm, const MoeRouteArgs &a) : weights(norm) {
        load(threadIdx.x, int(a.dims.E / 4));
    }
    __device__ void load(int first, int n) {
#pragma unroll
        for (int j = 0; j < VALUES; j++) {
            const int i = first + j * THREADS;
            w[j] = i < n ? reinterpret_cast<const float4 *>(weights)[i] : float4{};
        }
    }
};

// Leaves x * norm of the tile's rows in v [rows][E], and each warp's sums of squares of x. `norm` has the
// weights of the first values. There are ROWS rows or less.
template <int ROWS>
__device__ void weigh(const MoeRouteArgs &a, Norm &norm, int row0, int rows, float *v, TileShared &s) {
    const int n = int(a.dims.E / 4), lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const float4 *x = reinterpret_cast<const float4 *>(a.x) + int64_t(row0) * n;
    float4 *out = reinterpret_cast<float4 *>(v);
    float sums[ROWS] = {};
    for (int first = threadIdx.x; first < n; first += VALUES * THREADS) {
        if (first >= VALUES * THREADS) {
            norm.load(first, n);
        }
        float4 q[ROWS][VALUES];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (int j = 0; j < VALUES; j++) {
                const int i = first + j * THREADS;
                q[r][j] = r < rows && i < n ? __ldcg(x + r * n + i) : float4{};
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (int j = 0; j < VALUES; j++) {
                const int i = first + j * THREADS;
                const float4 y = q[r][j], w = norm.w[j];
                sums[r] = fmaf(y.w, y.w, fmaf(y.z, y.z, fmaf(y.y, y.y, fmaf(y.x, y.x, sums[r]))));
                if (r < rows && i < n) {
                    out[r * n + i] = {y.x * w.x, y.y * w.y, y.z * w.z, y.w * w.w};
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (r < rows) {
            const float sum = warp_sum(sums[r], WARP);
            if (lane == 0) {
                s.squares[r][warp] = sum;
            }
        }
    }
}

// Returns the inclusive sum over a warp's lanes.
__device__ int scan(int x, int lane) {
    for (int step = 1; step < WARP; step *= 2) {
        const int before = __shfl_up_sync(~0u, x, step);
        x += lane >= step ? before : 0;
    }
    return x;
}

struct ListShared {
    alignas(16) int rows
        [MOE_MAX_EXPERTS]; // they count each expert's rows, and then say where its next place goes
    int warp_rows[WARPS], warp_items[WARPS];
};

// Lists the places of each expert, rising, and its items, by one block. `ids` has the experts of all places.
__device__ void make_list(const RouteParams &p, ListShared &s, const uint16_t *ids) {
    const MoeDims &d = p.a.dims;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, pairs = d.T * d.n_used;
    for (int e = threadIdx.x; e < MOE_MAX_EXPERTS; e += THREADS) {
        s.rows[e] = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += THREADS) {
        atomicAdd(&s.rows[ids[i]], 1);
    }
    __syncthreads();
    int rows = 0, items = 0, of_expert[PER_THREAD];
    for (int j = 0; j < PER_THREAD; j++) {
        of_expert[j] = s.rows[threadIdx.x * PER_THREAD + j];
        rows += of_expert[j];
        items += items_of(d, of_expert[j]);
    }
    const int rows_to = scan(rows, lane), items_to = scan(items, lane);
    if (lane == WARP - 1) {
        s.warp_rows[warp] = rows_to;
        s.warp_items[warp] = items_to;
    }
    __syncthreads();
    int row = rows_to - rows, item = items_to - items;
    for (int w = 0; w < warp; w++) {
        row += s.warp_rows[w];
        item += s.warp_items[w];
    }
    MoeItem *list = p.of<MoeItem>(p.at.items);
    for (int j = 0; j < PER_THREAD; j++) {
        const int expert = threadIdx.x * PER_THREAD + j;
        s.rows[expert] = row;
        for (int k = 0; k < items_of(d, of_expert[j]); k++) {
            list[item++] = item_of(d, expert, row, of_expert[j], k);
        }
        row += of_expert[j];
    }
    if (threadIdx.x == THREADS - 1) {
        *p.of<int32_t>(p.at.head) = item;
    }
    __syncthreads();
    for (int i = lane; warp == 0 && i - lane < pairs; i += WARP) { // this goes through 32 places at a time
        const int id = i < pairs ? ids[i] : -1;
        const uint32_t same = __match_any_sync(~0u, id), before = same & ((1u << lane) - 1);
        const int at = i < pairs ? s.rows[id] : 0;
        __syncwarp();
        if (i < pairs && before == 0) {
            s.rows[id] = at + __popc(same);
        }
        __syncwarp();
        if (i < pairs) {
            p.of<int32_t>(p.at.places)[at + __popc(before)] = i;
        }
    }
}

// Returns whether this block is the last of n to come here. If so, it sees what the others' first warps have written.
__device__ bool is_last(uint32_t *counter, int n, bool &last) {
    if (threadIdx.x < WARP) {
        __syncwarp();
        if (threadIdx.x == 0) {
            last = int(count_arrival(counter)) == n - 1;
            if (last) {
                *counter = 0; // this readies it for the next launch
            }
        }
    }
    __syncthreads();
    return last;
}

// Packs a tile's rows, which are v [rows][E] times their scales. The first rows are the last warps'.
__device__ void pack_rows(const RouteParams &p, int row0, int rows, const float *v, const TileShared &s) {
    const int64_t E = p.a.dims.E;
    const int lane = threadIdx.x % WARP, row = WARPS - 1 - int(threadIdx.x) / WARP;
    if (row >= rows) {
        return;
    }
    const float scale = scale_of(p.a, s, row);
    for (int64_t chunk = gridDim.x - 1 - blockIdx.x; chunk < chunks_of(E); chunk += gridDim.x) {
        float own[OWN];
        load_values(own, v + row * E, chunk * CHUNK + lane * OWN, E);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            own[i] *= scale;
        }
        uint8_t *record = p.of<uint8_t>(p.at.rows) + (row0 + row) * row_record(E);
        pack_chunk(record + chunk * chunk_bytes(1), 1, 0, false, own, largest(own), lane);
        for (int i = 0; p.a.values != nullptr && i < OWN; i++) {
            if (const int64_t k = chunk * CHUNK + lane * OWN + i; k < E) {
                p.a.values[(row0 + row) * E + k] = own[i];
            }
        }
    }
}

// Finds a tile's logits of the OUTPUTS of a group.
__device__ void find_logits(const RouteParams &p, Router &router, TileShared &tile, const float *v, int group,
                            int row0, int rows) {
    const MoeDims &d = p.a.dims;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (group * OUTPUTS < router_outputs(d)) {
        router.multiply(v, rows, tile.dots[warp / HALVES][warp % HALVES]);
    }
    __syncthreads();
    if (warp == 0) {
        const int r = lane / OUTPUTS, o = lane % OUTPUTS, output = group * OUTPUTS + o;
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
        weigh<1>(p.a, norm, row0, rows, v, tile);
    } else if (rows <= SOME_ROWS) {
        weigh<SOME_ROWS>(p.a, norm, row0, rows, v, tile);
    } else {
        weigh<TILE_ROWS>(p.a, norm, row0, rows, v, tile);
    }
    __syncthreads();
}

// Leaves the rows for the experts where the router's have been. It is a call, so that the kernel's other rows keep their registers.
__device__ __noinline__ void weigh_again(const RouteParams &p, int row0, int rows, float *v,
                                         TileShared &tile) {
    __syncthreads();
    Norm norm(p.a.norm, p.a);
    weigh(p, norm, row0, rows, v, tile);
}

// The grid is {the router's outputs / OUTPUTS, of MANY rows fewer, and maybe blocks that pack; tiles of rows}.
template <bool MANY>
__global__ void __launch_bounds__(THREADS, 2) moe_route_kernel(const __grid_constant__ RouteParams p) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ ListShared list;
    __shared__ TileShared tile;
    const MoeDims &d = p.a.dims;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int row0 = blockIdx.y * p.tile_rows, rows = min(d.T - row0, p.tile_rows);
    const int first = MANY ? int(blockIdx.x) * p.groups : int(blockIdx.x);
    float *v = reinterpret_cast<float *>(shared); // [TILE_ROWS][E]
    let_next_start();
    Router router(p.a, first * OUTPUTS + warp / HALVES);
    Norm norm(p.a.router_norm != nullptr ? p.a.router_norm : p.a.norm, p.a);
    wait_for_previous();
    if (blockIdx.x + blockIdx.y == 0 &&
        int(threadIdx.x) < p.polled) { // who is behind up waits for what it leaves here
        __stcg(p.of<int32_t>(p.at.ids) + threadIdx.x, -1);
    }
    weigh(p, norm, row0, rows, v, tile);
    find_logits(p, router, tile, v, first, row0, rows);
    for (int i = 1; MANY && i < p.groups; i++) {
        Router next(p.a, (first + i) * OUTPUTS + warp / HALVES);
        __syncthreads(); // the dots before have been added up
        find_logits(p, next, tile, v, first + i, row0, rows);
    }
    if (p.a.router_norm != nullptr) { // what experts read is normed by other weights
        weigh_again(p, row0, rows, v, tile);
    }
    uint32_t *counters = static_cast<uint32_t *>(p.a.counters);
    // Of a step of few rows the experts are chosen behind this (moe.h), unless others multiply by them.
    const bool last =
        (!few_rows(d) || p.a.values != nullptr) && is_last(counters + 1 + blockIdx.y, gridDim.x, tile.last);
    pack_rows(p, row0, rows, v, tile);
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
    make_list(p, list, ids);
}

} // namespace

static_assert(sizeof(ListShared) + sizeof(TileShared) <= ROUTE_BESIDES);
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
        !given(args.counters) || (d.shared() && !given(args.shared_gate)) || !aligned(args.router_norm)) {
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
                           plan.tile_rows, plan.groups};
    const auto kernel = plan.one_row      ? moe_route_one_kernel
                        : plan.groups > 1 ? moe_route_kernel<true>
                                          : moe_route_kernel<false>;
    return int(launch_kernel(kernel, plan.launch, static_cast<cudaStream_t>(stream), args.overlap != 0, p));
}

} // namespace luce
