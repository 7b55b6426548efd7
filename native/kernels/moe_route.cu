// Has the first and the last launch of a mixture of experts (moe.h): route, and the sum.
//
// A block of route has 8 rows and a few outputs of the router. It computes the rows' norm and its logits, and
// packs its part of the rows. The last block of the 8 rows to finish chooses their experts. The last of those
// blocks makes the list.
#include "moe_plan.h"
#include "rowmm_pack.cuh"
#include "rowmm_ptx.cuh"

#include <algorithm>
#include <climits>
#include <cmath>

namespace luce {
namespace {

constexpr int THREADS = 256, WARPS = THREADS / WARP; // each row of a tile has a warp
constexpr int OUTPUTS = 4; // a block has so many of the router's outputs
// A warp computes the logits of so many rows: warp w has those of half w / OUTPUTS.
constexpr int WARP_ROWS = OUTPUTS;
constexpr int TILES = MOE_MAX_ROWS / WARPS;
constexpr int PER_LANE = MOE_MAX_EXPERTS / WARP, PER_THREAD = MOE_MAX_EXPERTS / THREADS;
static_assert(OUTPUTS * 2 == WARPS && WARP_ROWS * 2 == WARPS, "two halves of a tile's rows");
static_assert((TILES + 1) * int64_t(sizeof(uint32_t)) <= MOE_COUNTER_BYTES,
              "one of tiles, one for each tile");

struct RouteParams {
    MoeRouteArgs a;
    RoutedLayout at;

    template <typename T> __device__ T *of(int64_t offset) const {
        return reinterpret_cast<T *>(static_cast<uint8_t *>(a.routed) + offset);
    }
};

// Makes v = RMS(x) * norm of a row, by one warp.
__device__ void normalise(const MoeRouteArgs &a, int row, float *v, int lane) {
    const int n = int(a.dims.E / 4);
    const float4 *x = reinterpret_cast<const float4 *>(a.x + row * a.dims.E);
    const float4 *norm = reinterpret_cast<const float4 *>(a.norm);
    float4 *out = reinterpret_cast<float4 *>(v);
    float sum = 0;
#pragma unroll 8
    for (int i = lane; i < n; i += WARP) {
        const float4 q = x[i];
        out[i] = q;
        sum = fmaf(q.w, q.w, fmaf(q.z, q.z, fmaf(q.y, q.y, fmaf(q.x, q.x, sum))));
    }
    const float scale = rsqrtf(warp_sum(sum, WARP) / float(a.dims.E) + a.eps);
#pragma unroll 8
    for (int i = lane; i < n; i += WARP) { // these are what the lane itself has written
        const float4 q = out[i], w = norm[i];
        out[i] = {q.x * scale * w.x, q.y * scale * w.y, q.z * scale * w.z, q.w * scale * w.w};
    }
}

__device__ const float *router_row(const MoeRouteArgs &a, int output) {
    return output < a.dims.n_expert ? a.router + output * a.dims.E : a.shared_gate;
}

// Computes logits. A warp has one output of up to WARP_ROWS rows, whose values are v [rows][E].
__device__ void multiply_router(const RouteParams &p, int output, int row, int rows, const float *v,
                                int lane) {
    const int n = int(p.a.dims.E / 4), n_outputs = router_outputs(p.a.dims);
    const float4 *weights = reinterpret_cast<const float4 *>(router_row(p.a, output));
    const float4 *values = reinterpret_cast<const float4 *>(v);
    float sums[WARP_ROWS] = {};
#pragma unroll 4
    for (int i = lane; i < n; i += WARP) {
        const float4 w = weights[i];
#pragma unroll
        for (int r = 0; r < WARP_ROWS; r++) {
            if (r < rows) {
                const float4 x = values[r * n + i];
                sums[r] = fmaf(w.w, x.w, fmaf(w.z, x.z, fmaf(w.y, x.y, fmaf(w.x, x.x, sums[r]))));
            }
        }
    }
#pragma unroll
    for (int r = 0; r < WARP_ROWS; r++) {
        const float sum = warp_sum(sums[r], WARP);
        if (r < rows && lane == 0) {
            __stcg(p.of<float>(p.at.logits) + (row + r) * n_outputs + output, sum);
        }
    }
}

// Chooses a row's experts with a warp. The largest logits come first, and of equal ones the lowest id. Where
// a logit is not finite the row has the first experts, and NaN for weights.
__device__ void choose_experts(const RouteParams &p, int row, int lane) {
    const MoeDims &d = p.a.dims;
    const float *logits = p.of<float>(p.at.logits) + row * router_outputs(d);
    float x[PER_LANE];
    bool finite = true;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
        const int id = lane + j * WARP;
        x[j] = id < d.n_expert ? __ldcg(logits + id) : -INFINITY;
        finite = finite && (id >= d.n_expert || isfinite(x[j]));
    }
    finite = __all_sync(~0u, finite);
    float top = 0, sum = 0, weight = 0; // lane r has those of rank r
    int expert = 0;
    for (int rank = 0; rank < d.n_used; rank++) {
        float best = -INFINITY;
        int id = INT_MAX;
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) {
            const bool better = x[j] > best;
            best = better ? x[j] : best;
            id = better ? lane + j * WARP : id;
        }
        for (int mask = WARP / 2; mask > 0; mask /= 2) {
            const float other = __shfl_xor_sync(~0u, best, mask);
            const int other_id = __shfl_xor_sync(~0u, id, mask);
            const bool better = other > best || (other == best && other_id < id);
            best = better ? other : best;
            id = better ? other_id : id;
        }
        id = finite ? id : rank;
        top = rank == 0 ? best : top;
        const float w = finite ? expf(best - top) : NAN;
        sum += w;
        weight = lane == rank ? w : weight;
        expert = lane == rank ? id : expert;
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) { // a taken one is never larger than -inf
            x[j] = id == lane + j * WARP ? -INFINITY : x[j];
        }
    }
    if (lane < d.n_used) {
        __stcg(p.of<int32_t>(p.at.ids) + row * d.n_used + lane, expert);
        __stcg(p.of<float>(p.at.weights) + row * d.n_used + lane, weight / sum);
    }
    if (d.shared() && lane == 0) {
        __stcg(p.of<float>(p.at.open) + row, 1 / (1 + expf(-__ldcg(logits + d.n_expert))));
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
    int rows[MOE_MAX_EXPERTS]; // they count each expert's rows, and then say where its next place goes
    int warp_rows[WARPS], warp_items[WARPS];
};

// Lists the places of each expert, rising, and its items, by one block. `ids` has room for those of all
// places.
__device__ void make_list(const RouteParams &p, ListShared &s, uint16_t *ids) {
    const MoeDims &d = p.a.dims;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, pairs = d.T * d.n_used;
    for (int e = threadIdx.x; e < MOE_MAX_EXPERTS; e += THREADS) {
        s.rows[e] = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += THREADS) {
        const int id = __ldcg(p.of<int32_t>(p.at.ids) + i);
        ids[i] = uint16_t(id);
        atomicAdd(&s.rows[id], 1);
    }
    __syncthreads();
    int rows = 0, items = 0, of_expert[PER_THREAD];
    for (int j = 0; j < PER_THREAD; j++) {
        of_expert[j] = s.rows[threadIdx.x * PER_THREAD + j];
        rows += of_expert[j];
        items += items_of(of_expert[j]);
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
        for (int k = 0; k < items_of(of_expert[j]); k++) {
            list[item++] = item_of(expert, row, of_expert[j], k);
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

// Returns whether this block is the last of n to come here. If so, it sees what the others have written.
__device__ bool is_last(uint32_t *counter, int n) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        last = int(count_arrival(counter)) == n - 1;
        if (last) {
            *counter = 0; // this readies it for the next launch
        }
    }
    __syncthreads();
    return last;
}

// The grid is {the router's outputs / OUTPUTS, tiles of rows}.
__global__ void __launch_bounds__(THREADS) moe_route_kernel(const __grid_constant__ RouteParams p) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ ListShared list;
    const MoeDims &d = p.a.dims;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int row0 = blockIdx.y * WARPS, rows = min(d.T - row0, WARPS);
    const int output = blockIdx.x * OUTPUTS + warp % OUTPUTS;
    float *v = reinterpret_cast<float *>(shared); // [WARPS][E]
    let_next_start();
    if (output < router_outputs(d)) {
        const float *weights = router_row(p.a, output);
        for (int64_t i = (warp / OUTPUTS * WARP + lane) * 32; i < d.E; i += 2 * WARP * 32) {
            prefetch_l2(weights + i);
        }
    }
    wait_for_previous();
    if (warp < rows) {
        normalise(p.a, row0 + warp, v + warp * d.E, lane);
    }
    __syncthreads();
    const int half = warp / OUTPUTS * WARP_ROWS;
    if (output < router_outputs(d) && half < rows) {
        multiply_router(p, output, row0 + half, rows - half, v + half * d.E, lane);
    }
    for (int64_t chunk = blockIdx.x; warp < rows && chunk < chunks_of(d.E); chunk += gridDim.x) {
        float own[OWN];
        load_values(own, v + warp * d.E, chunk * CHUNK + lane * OWN, d.E);
        uint8_t *record = p.of<uint8_t>(p.at.rows) + (row0 + warp) * row_record(d.E);
        pack_chunk(record + chunk * chunk_bytes(1), 1, 0, false, own, largest(own), lane);
        for (int i = 0; p.a.values != nullptr && i < OWN; i++) {
            if (const int64_t k = chunk * CHUNK + lane * OWN + i; k < d.E) {
                p.a.values[(row0 + warp) * d.E + k] = own[i];
            }
        }
    }
    uint32_t *counters = static_cast<uint32_t *>(p.a.counters);
    if (!is_last(counters + 1 + blockIdx.y, gridDim.x)) {
        return;
    }
    if (warp < rows) {
        choose_experts(p, row0 + warp, lane);
    }
    if (is_last(counters, gridDim.y)) {
        make_list(p, list, reinterpret_cast<uint16_t *>(shared));
    }
}

// ---- the sum ----

constexpr int SUM_THREADS = 128;
constexpr int AHEAD = 8; // so many loads are in flight

struct SumParams {
    MoeSumArgs a;
    RoutedLayout at;
};

__device__ __forceinline__ float4 fma4(float w, float4 y, float4 sum) {
    return {fmaf(w, y.x, sum.x), fmaf(w, y.y, sum.y), fmaf(w, y.z, sum.z), fmaf(w, y.w, sum.w)};
}

// The grid is {E / 4 / SUM_THREADS, rows}, and a thread has 4 values of a row.
__global__ void __launch_bounds__(SUM_THREADS) moe_sum_kernel(const __grid_constant__ SumParams p) {
    const MoeDims &d = p.a.dims;
    const uint8_t *routed = static_cast<const uint8_t *>(p.a.routed);
    const int64_t row = blockIdx.y, n = d.E / 4, i = int64_t(blockIdx.x) * SUM_THREADS + threadIdx.x;
    let_next_start();
    wait_for_previous();
    if (i >= n) {
        return;
    }
    const float *weights = reinterpret_cast<const float *>(routed + p.at.weights) + row * d.n_used;
    const float4 *y = reinterpret_cast<const float4 *>(p.a.y) + i;
    float4 sum = {};
    if (p.a.sums != nullptr) {
        sum = reinterpret_cast<const float4 *>(p.a.sums)[row * n + i];
    }
    for (int first = p.a.sums != nullptr ? d.n_used : 0; first < d.n_used; first += AHEAD) {
        float4 of_rank[AHEAD];
#pragma unroll
        for (int r = 0; r < AHEAD; r++) {
            of_rank[r] = first + r < d.n_used ? y[(row * d.n_used + first + r) * n] : float4{};
        }
#pragma unroll
        for (int r = 0; r < AHEAD; r++) {
            sum = first + r < d.n_used ? fma4(weights[first + r], of_rank[r], sum) : sum;
        }
    }
    if (d.shared()) {
        const float open = reinterpret_cast<const float *>(routed + p.at.open)[row];
        const float4 s = y[((p.a.sums != nullptr ? 0 : int64_t(d.T) * d.n_used) + row) * n];
        sum = {sum.x + s.x * open, sum.y + s.y * open, sum.z + s.z * open, sum.w + s.w * open};
    }
    const float4 r = reinterpret_cast<const float4 *>(p.a.residual)[row * n + i];
    reinterpret_cast<float4 *>(p.a.out)[row * n + i] = {sum.x + r.x, sum.y + r.y, sum.z + r.z, sum.w + r.w};
}

bool aligned(const void *p) {
    return p != nullptr && reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

} // namespace

bool moe_has(const MoeDims &d) {
    return d.T >= 0 && d.T <= MOE_MAX_ROWS && d.n_expert >= 1 && d.n_expert <= MOE_MAX_EXPERTS &&
           d.n_used >= 1 && d.n_used <= std::min(d.n_expert, MOE_MAX_USED) && d.E >= 4 && d.E % 4 == 0 &&
           d.E <= MOE_MAX_E && d.FF >= 1 && d.FF_shared >= 0 && d.h_row() <= MOE_MAX_FF;
}
int64_t moe_routed_bytes(const MoeDims &dims) {
    return RoutedLayout(dims).bytes;
}
int64_t moe_ids_offset(const MoeDims &dims) {
    return RoutedLayout(dims).ids;
}
int64_t moe_weights_offset(const MoeDims &dims) {
    return RoutedLayout(dims).weights;
}
int64_t moe_open_offset(const MoeDims &dims) {
    return RoutedLayout(dims).open;
}

int cuda::moe_route(const MoeRouteArgs &args, void *stream) {
    const MoeDims &d = args.dims;
    if (!moe_has(d) || !aligned(args.x) || !aligned(args.norm) || !aligned(args.router) ||
        !aligned(args.routed) || !aligned(args.counters) || (d.shared() && !aligned(args.shared_gate))) {
        return int(cudaErrorInvalidValue);
    }
    if (d.T == 0) {
        return 0;
    }
    const int rows = std::min(d.T, WARPS), tiles = (d.T + WARPS - 1) / WARPS;
    const int64_t ids = int64_t(d.T) * d.n_used * int64_t(sizeof(uint16_t));
    const int bytes = int(std::max(rows * d.E * int64_t(sizeof(float)), ids));
    const dim3 grid((router_outputs(d) + OUTPUTS - 1) / OUTPUTS, tiles);
    const RouteParams p = {args, RoutedLayout(d)};
    return int(launch_kernel(moe_route_kernel, grid, THREADS, size_t(bytes),
                             static_cast<cudaStream_t>(stream), args.overlap != 0, p));
}

int cuda::moe_sum(const MoeSumArgs &args, void *stream) {
    const MoeDims &d = args.dims;
    if (!moe_has(d) || !aligned(args.routed) || ((args.sums == nullptr || d.shared()) && !aligned(args.y)) ||
        (args.sums != nullptr && !aligned(args.sums)) || !aligned(args.residual) || !aligned(args.out)) {
        return int(cudaErrorInvalidValue);
    }
    if (d.T == 0) {
        return 0;
    }
    const dim3 grid(unsigned((d.E / 4 + SUM_THREADS - 1) / SUM_THREADS), unsigned(d.T));
    const SumParams p = {args, RoutedLayout(d)};
    return int(launch_kernel(moe_sum_kernel, grid, SUM_THREADS, 0, static_cast<cudaStream_t>(stream),
                             args.overlap != 0, p));
}

} // namespace luce
